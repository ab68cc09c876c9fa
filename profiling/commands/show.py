"""``show``: one recording, in words and tables."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from profiling.commands import arguments, printing, views
from profiling.commands.printing import Column
from profiling.text import count, coverage, duration, overhead, percent

if TYPE_CHECKING:
    from profiling.recording import Recording

TAIL_COLUMNS = [
    Column("batch", "sequence", "{:,}".format),
    Column("kv_len", "KV length", lambda value: "–" if value < 0 else f"{value:,}"),
    Column("q_len", "Q length", lambda value: "–" if value < 0 else f"{value:,}"),
    Column("tiles", "late tiles", "{:,}".format),
    Column("late_ns", "late time", duration),
    Column("late_share", "of all late time", percent),
    Column("tail_ns", "latest end", lambda value: f"+{duration(value)}"),
]


def show(file: arguments.RecordingFile, json: arguments.Json = False) -> None:
    """Say where a recording's SM time went, and what caused the tail.

    SMs x makespan = work + ramp (before an SM's first work) + fetch (between tiles) + tail (no work left) + unused.
    Headroom is the makespan against perfectly spread work.

    \b
    Examples:
      python -m profiling show static.parquet
      python -m profiling show static.parquet --json
    """
    from profiling.compare import median_launch, split
    from profiling.recording import Recording
    from profiling.sm_time import summary

    recording = Recording.read(file)
    launches = summary(recording)
    launch = int(median_launch(launches)["launch"])
    tail, sentence = views.tail(recording, launch)
    if json:
        metadata = dict(recording.metadata)
        if isinstance(workload := metadata.get("workload"), dict):
            metadata["workload"] = {k: v for k, v in workload.items() if k not in ("q_lens", "kv_lens")}
        printing.document(
            {
                "title": recording.title(),
                "grade": recording.grade,
                "coverage": recording.coverage(),
                "warnings": recording.warnings(),
                "basis": launches.attrs["basis"],
                "launches": printing.records(launches),
                "tail_launch": launch,
                "tail": tail,
                "metadata": metadata,
            }
        )
        return
    printing.line(recording.title())
    for name, value in _facts(recording):
        printing.line(f"  {name:<12} {value}")
    rows = _launch_rows(split(recording), printing.records(launches))
    columns = views.split_columns([Column("launch", "launch")], compared=False)
    printing.table(rows, columns, title="Where the SMs' time went", grade=views.grade_words([recording]))
    if launches.attrs["basis"] == "cta":
        printing.line(f"note: {views.BASIS_NOTE}")
    printing.warnings(recording.warnings())
    printing.line(f"tail of launch {launch}: {sentence}")
    if tail.get("sequences"):
        grade = f"times: {recording.grade}; past the moment when perfectly spread work would have ended: derived"
        printing.table(tail["sequences"], TAIL_COLUMNS, title="What ran late, by sequence", grade=grade)


def _resources(recording: "Recording") -> str:
    """How the recorded kernel came out beside the plain one; "" where the recording does not say."""
    plain, recorded = (recording.get(f"kernel.{which}_resources") for which in ("plain", "recorded"))
    if not isinstance(plain, dict) or not isinstance(recorded, dict):
        return ""
    words = "{registers} registers, {stack_bytes} B stack, {shared_bytes:,} B SMEM"
    try:
        if plain == recorded:
            return f"{words.format(**plain)}, recorded and plain alike"
        return f"recorded {words.format(**recorded)}; plain {words.format(**plain)}"
    except (KeyError, ValueError, TypeError):
        return ""


def _launch_rows(plain: dict[str, Any], launches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a launch; the plain kernel's time and TFLOP/s belong to the recording and are repeated."""
    return views.split_rows([{**plain, **launch} for launch in launches])


def _facts(recording: "Recording") -> Iterator[tuple[str, str]]:
    resolution = recording.get("gpu.timer_resolution_ns")
    timer = f", timer steps of {resolution} ns" if resolution else ""
    yield "grade", f"{recording.grade} on {recording.gpu_name}, {recording.sm_count} SMs{timer}"
    ctas = recording.get("kernel.num_ctas")
    by = f" by {count(ctas, 'CTA')}" if isinstance(ctas, int) else ""
    if recording.get("excerpt"):
        own = recording.events["cta"].nunique()
        by = f" by {own:,} of {count(ctas, 'CTA')}" if isinstance(ctas, int) else f" by {count(own, 'CTA')}"
    spans = count(len(recording.events), "span")
    yield "recorded", f"{spans}{by} at level {recording.level}, {count(recording.launches, 'launch', 'launches')}"
    if recording.sms_left:
        yield "beside", f"{count(recording.sms_left, 'SM')} left to a kernel that runs beside this one: unused by it"
    share = coverage(recording.coverage())
    yield "coverage", share if share == "unknown" else f"{share} of the events"
    lengths = recording.get("workload.kv_lens")
    if isinstance(lengths, list) and lengths and all(isinstance(length, int) for length in lengths):
        empty = sum(length == 0 for length in lengths)
        yield "lengths", f"{count(len(lengths), 'sequence')}, KV {min(lengths):,} to {max(lengths):,}, {empty:,} empty"
    plain, recorded = (duration(recording.number(f"durations.{which}_ns")) for which in ("plain", "recorded"))
    if not math.isnan(cost := recording.overhead()):
        yield "recording", f"{recorded} recorded, {plain} plain: {overhead(cost)} ({recording.grade})"
    if differs := _resources(recording):
        yield "compiled", differs
    versions = recording.get("versions", {})
    known = [f"{name} {version}" for name, version in versions.items() if version] if isinstance(versions, dict) else []
    if known:
        yield "versions", ", ".join(known)
    if command := recording.get("command"):
        yield "made by", str(command)
