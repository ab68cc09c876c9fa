"""``schedules``: what other schedules would make of a recording's tiles."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from profiling.commands import arguments, printing
from profiling.commands.printing import Column
from profiling.errors import UserError
from profiling.text import duration, times

if TYPE_CHECKING:
    from profiling.recording import Recording
    from profiling.tiles_measured import Tiles


def _signed(share: float) -> str:
    """A difference as a percentage with its sign, which one that rounds to nothing has none of."""
    if math.isnan(share):
        return "–"
    return "0.0 %" if abs(share) < 0.0005 else f"{share * 100:+.1f} %"


COLUMNS = [
    Column("schedule", "schedule", right=False),
    Column("sms", "SMs", "{:,}".format),
    Column("predicted_ns", "predicted", duration),
    Column("bound_ns", "no schedule below", duration),
    Column("headroom", "headroom", times),
    Column("faster", "against the recording", times),
]
MEASURED = [
    Column("measured_ns", "measured", duration),
    Column("error", "prediction's error", _signed),
]


def schedules(
    files: arguments.RecordingFiles,
    schedule: Annotated[
        list[str] | None, typer.Option("--schedule", help="Only this one; may be given again. Default: all.")
    ] = None,
    gpu: arguments.Gpu = None,
    sms: arguments.Sms = None,
    latency: Annotated[
        float | None,
        typer.Option("--latency", min=0, max=1e9, help="Asking for a tile takes so many ns. Default: as measured."),
    ] = None,
    cluster: Annotated[
        int | None,
        typer.Option("--cluster", min=1, max=2, help="CTAs that take neighbouring blocks; default: as recorded."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="A figure: .html.")] = None,
    json: arguments.Json = False,
) -> None:
    """Say how long a recording's tiles would take under other schedules.

    The measured cost of each tile of the first FILE is dealt again by each schedule's rule. Further FILES are measured
    launches of the same workload: where one has the predicted schedule, the prediction's error stands beside it.

    \b
    Examples:
      python -m profiling schedules static.parquet balanced-dynamic.parquet
      python -m profiling schedules static.parquet --gpu B200 --latency 200
    """
    from profiling import gpus
    from profiling.compare import compare
    from profiling.schedules import ON_DEMAND, SCHEDULES, replay
    from profiling.tiles_measured import tiles_of

    names = [arguments.choice(name, SCHEDULES, "schedule") for name in schedule or SCHEDULES]
    count = arguments.sm_count(gpu, sms)
    if output:
        arguments.output_file(output, [".html"])
    recordings = arguments.read_all(files)
    if len(recordings) > 1 and (obstacles := compare(recordings).obstacles):
        raise UserError(f"schedules: these are not launches of one workload ({obstacles[0]}); give those of one")
    source, tiles = recordings[0], tiles_of(recordings[0])
    count = arguments.kernels_sms(count, gpu, source)
    measured = {recording.schedule: tiles_of(recording).measured_ns for recording in recordings}
    other = gpus.other_gpu(gpu, count, source.gpu_name, tiles.sms)
    changes = _Changes(bool(other), cluster not in (None, tiles.cluster), latency)
    notes = [*other, *_notes(tiles, names, latency, cluster), *_uncompared(recordings, names, changes)]
    rows: list[dict[str, Any]] = []
    for name in names:
        price = latency if name in ON_DEMAND else None
        found = replay(tiles, name, sms=count, fetch_ns=price, cluster=cluster)
        known = math.nan if changes.of(name) else measured.get(name, math.nan)
        rows.append(
            {
                "schedule": name,
                "sms": found.sms,
                "predicted_ns": found.makespan_ns,
                "bound_ns": found.bound_ns,
                "optimum_at_least_ns": found.optimum_ns,
                "headroom": found.headroom,
                "faster": tiles.measured_ns / found.makespan_ns if found.makespan_ns else math.nan,
                "measured_ns": known,
                "error": found.makespan_ns / known - 1,
            }
        )
    grade = f"modelled on tile costs measured on {source.gpu_name}"
    warnings = [*source.warnings(), *notes]
    if json:
        printing.document({"grade": grade, "source": source.title(), "rows": rows, "warnings": warnings})
    else:
        columns = COLUMNS + ([] if all(changes.of(name) for name in names) else MEASURED)
        printing.table(rows, columns, title=f"What other schedules would make of {source.title()}", grade=grade)
        printing.warnings(warnings)
        best = min(rows, key=lambda row: row["predicted_ns"])
        printing.line(
            f"shortest: {best['schedule']}, {duration(best['predicted_ns'])}, {times(best['faster'])} the recorded "
            f"{source.schedule}'s speed; no schedule of these tiles takes less than {duration(best['bound_ns'])}"
        )
    if output:
        from profiling.page import write_figures
        from profiling.schedule_figures import replay_bars

        figure = replay_bars(rows, source.title(), grade, warnings)
        write_figures([figure], output, source.title())
        if not json:
            printing.line(f"figure in {output}")


class _Changes(NamedTuple):
    """What stands between these replays and a launch that was measured."""

    gpu: bool
    pairs: bool
    latency: float | None

    def of(self, schedule: str) -> list[str]:
        """Those that touch the schedule's replay, in words."""
        from profiling.schedules import ON_DEMAND

        asks = self.latency is not None and schedule in ON_DEMAND
        what = {"on another GPU or number of SMs": self.gpu, "with CTAs paired otherwise": self.pairs}
        return [words for words, is_so in (what | {"at another price of asking for a tile": asks}).items() if is_so]


def _notes(tiles: "Tiles", names: Sequence[str], latency: float | None, cluster: int | None) -> list[str]:
    """What differs from the recording beside the GPU."""
    from profiling.schedules import ON_DEMAND, fetch_price

    notes = []
    if cluster not in (None, tiles.cluster):
        as_here, as_there = ("in pairs", "one by one") if cluster == 2 else ("one by one", "in pairs")
        notes.append(
            f"CTAs take blocks {as_here} here and took them {as_there} in the recording, whose costs tiles keep"
        )
    asking = [name for name in names if name in ON_DEMAND]
    if latency is not None and asking:
        price = duration(fetch_price(tiles, asking[0]), 3)
        notes.append(
            f"asking for a tile takes {duration(latency)} instead of {price}: {' and '.join(asking)} alone ask"
        )
    elif latency is not None:
        notes.append(f"--latency changes nothing: under {' and '.join(names)} no tile is asked for")
    return notes


def _uncompared(recordings: "Sequence[Recording]", names: Sequence[str], changes: _Changes) -> list[str]:
    """Why a further recording stands beside no prediction, a line each."""
    notes = []
    for place, recording in enumerate(recordings[1:], 1):
        if recording.schedule not in names:
            why = f"{recording.schedule} is not among the schedules predicted here"
        elif found := changes.of(recording.schedule):
            why = f"it was measured {' and '.join(found)} than these predictions"
        elif recording.schedule in [later.schedule for later in recordings[place + 1 :]]:
            why = f"a later file was measured under {recording.schedule} too, and stands in its place"
        else:
            continue
        notes.append(f"{recording.source} is not compared: {why}")
    return notes
