"""``schedules``: what other schedules would make of a recording's tiles."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from profiling.commands import arguments, printing
from profiling.commands.printing import Column
from profiling.errors import UserError
from profiling.text import duration, times

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
    Column("error", "prediction's error", lambda value: "–" if math.isnan(value) else f"{value:+.1%}"),
]


def schedules(
    files: arguments.RecordingFiles,
    schedule: Annotated[
        list[str] | None, typer.Option("--schedule", help="Only this one; may be given again. Default: all.")
    ] = None,
    gpu: arguments.Gpu = None,
    sms: arguments.Sms = None,
    latency: Annotated[
        float | None, typer.Option("--latency", min=0, help="Asking for a tile takes so many ns. Default: as measured.")
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
    measured = {recording.schedule: tiles_of(recording).measured_ns for recording in recordings}
    as_recorded = count in (None, tiles.sms) and latency is None and cluster in (None, tiles.cluster)
    rows: list[dict[str, Any]] = []
    for name in names:
        price = latency if name in ON_DEMAND else None
        found = replay(tiles, name, sms=count, fetch_ns=price, cluster=cluster)
        known = measured.get(name, math.nan) if as_recorded else math.nan
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
    notes = [] if as_recorded else [f"tiles cost what they cost on {source.gpu_name} with {tiles.sms} SMs"]
    if json:
        printing.document({"grade": grade, "source": source.title(), "rows": rows, "warnings": source.warnings()})
    else:
        columns = COLUMNS + (MEASURED if as_recorded else [])
        printing.table(rows, columns, title=f"What other schedules would make of {source.title()}", grade=grade)
        printing.warnings([*source.warnings(), *notes])
        best = min(rows, key=lambda row: row["predicted_ns"])
        printing.line(
            f"shortest: {best['schedule']}, {duration(best['predicted_ns'])}, {times(best['faster'])} the recorded "
            f"{source.schedule}'s speed; no schedule of these tiles takes less than {duration(best['bound_ns'])}"
        )
    if output:
        from profiling.page import write_figures
        from profiling.schedule_figures import replay_bars

        figure = replay_bars(rows, source.title(), grade, [*source.warnings(), *notes])
        write_figures([figure], output, source.title())
        if not json:
            printing.line(f"figure in {output}")
