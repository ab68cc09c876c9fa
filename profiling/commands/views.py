"""What `show`, `compare` and `demo` print alike: the SM-time split of recordings, and what caused their tails."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from profiling.commands import printing
from profiling.commands.printing import Column
from profiling.errors import RecordingError
from profiling.text import duration, percent, significant

if TYPE_CHECKING:
    from profiling.recording import Recording

BASIS_NOTE = "work is whole CTAs here (level cta): what they spend between tiles hides in it"


def with_spread(row: dict[str, Any]) -> str:
    """A row's plain kernel time with its interquartile range."""
    if math.isnan(row["kernel_ns"]):
        return "–"
    spread = "" if math.isnan(row["kernel_iqr_ns"]) else f" ± {duration(row['kernel_iqr_ns'], 2)}"
    return duration(row["kernel_ns"]) + spread


def speedup(value: float) -> str:
    """A ratio of times: "same" within the spread, – where the two may not be compared."""
    if math.isnan(value):
        return "–"
    return "same" if value == 1.0 else f"{value:.2f}×"


def split_columns(first: Sequence[Column], *, compared: bool) -> list[Column]:
    """The columns of a split (rows of `profiling.compare.split`, through `split_rows`), after those of ``first``."""
    from profiling.compare import PARTS

    parts = [Column(f"{part}_share", part, percent) for part in PARTS]
    last = [Column("faster", "speedup")] if compared else []
    return [
        *first,
        Column("kernel", "kernel time"),
        Column("tflops", "TFLOP/s", lambda value: "–" if math.isnan(value) else significant(value)),
        Column("makespan_ns", "makespan", duration),
        *parts,
        Column("headroom", "headroom", lambda value: "–" if math.isnan(value) else f"{value:.2f}×"),
        *last,
    ]


def split_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `profiling.compare.split` or `compare`, with what is printed of several columns together."""
    faster = [speedup(row.get("speedup", math.nan)) for row in rows]
    if faster[0] != "–":
        faster[0] = "base"
    return [{**row, "kernel": with_spread(row), "faster": words} for row, words in zip(rows, faster, strict=True)]


def grade_words(recordings: Sequence["Recording"]) -> str:
    """How the numbers of a split were obtained."""
    grades = " and ".join(dict.fromkeys(recording.grade for recording in recordings))
    gpus = ", ".join(dict.fromkeys(recording.gpu_name for recording in recordings))
    return f"times: {grades} on {gpus}; shares, headroom, TFLOP/s and speedup: derived from them"


def tail(recording: "Recording", launch: int) -> tuple[dict[str, Any], str]:
    """What caused a launch's tail, as JSON and in words; a recording that cannot tell says why."""
    from profiling.tail import tail as look

    try:
        late = look(recording, launch)
    except RecordingError as error:
        return {"refused": str(error)}, f"not known: {error}"
    last, fair = late.last, late.fair_ns
    found = {
        "fair_ns": fair,
        "late_tiles": late.tiles,
        "last_sm": asdict(last) if last else None,
        "sequences": printing.records(late.sequences.head(10)),
    }
    if last is None or not late.tiles:
        words = f"no tile ran past {duration(fair)}, when perfectly spread work would have ended"
        return found, words + (f"; {late.cleared}" if late.cleared else "")
    length = f" (KV length {last.kv_len:,})" if last.kv_len >= 0 else ""
    more = last.work_ns / max(last.fair_ns, 1)
    most = f", {percent(last.sequence_share)} of it for sequence {last.batch}{length}" if last.batch >= 0 else ""
    return found, (
        f"SM {last.sm} ended last, at {duration(last.end_ns)}, with {more:.2f}× the mean SM's work{most}; "
        f"{late.late} ran past {duration(fair)}, when perfectly spread work would have ended"
    )
