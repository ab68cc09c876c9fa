"""``race``: all schedules of a workload, measured against each other."""

from pathlib import Path
from typing import Annotated

import typer

from profiling.commands import arguments, printing
from profiling.commands.printing import Column
from profiling.commands.record import ForWorkload
from profiling.text import duration, percent, times

COLUMNS = [
    Column("schedule", "schedule", right=False),
    Column("median_ns", "time", duration),
    Column("iqr_ns", "± IQR", duration),
    Column("words", "against the first", right=False),
    *(Column(f"{part}_share", part, percent) for part in ("work", "ramp", "fetch", "tail", "unused")),
    Column("headroom", "headroom", times),
    Column("fetch_ns", "fetch, a tile", duration),
]


def race(
    workload: ForWorkload,
    schedule: Annotated[
        list[str] | None, typer.Option("--schedule", help="Only this one; may be given again. Default: all.")
    ] = None,
    direction: Annotated[str, typer.Option(help=" or ".join(arguments.DIRECTIONS))] = "forward",
    impl: Annotated[str, typer.Option(help=" or ".join(arguments.IMPLEMENTATIONS))] = "auto",
    repeats: Annotated[int, typer.Option(min=3, help="Rounds; in each, every schedule is timed once.")] = 40,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Keep the recordings, and a page of heatmaps.")
    ] = None,
    json: arguments.Json = False,
) -> None:
    """Run every schedule of a workload on this GPU, in turn in one process, and say why they differ.

    Medians with their spread, the difference to the first with its interval, and how each one's SM time divides. The
    recordings that -o keeps are what `schedules` replays, for a prediction beside each measurement.

    \b
    Examples:
      python -m profiling race --workload hsp-extreme -o race
      python -m profiling race --workload hsp-loguniform --schedule static --schedule dynamic --impl triton
    """
    names = [arguments.choice(name, arguments.SCHEDULES, "schedule") for name in schedule or arguments.SCHEDULES]
    arguments.choice(direction, arguments.DIRECTIONS, "direction")
    arguments.choice(impl, arguments.IMPLEMENTATIONS, "impl")
    work = arguments.workload(workload)
    if output:
        arguments.output_folder(output)
        from profiling.report import write_report  # what it needs is missed before anything is measured
    from profiling.race import race as run

    with printing.progress() as bar:
        bar.add_task(f"{workload} {direction}", total=None)
        table, recordings = run(work, list(dict.fromkeys(names)), direction=direction, impl=impl, rounds=repeats)
    title = recordings[0].title().replace(recordings[0].schedule, "schedules", 1)
    if output:
        output.mkdir(parents=True, exist_ok=True)
        for recording in recordings:
            recording.write(output / f"{workload}_{direction}_{recording.schedule}.parquet")
        page = write_report(recordings, output / "report")
    if json:
        printing.document({"grade": "measured", "kernel": title, "rows": printing.records(table)})
        return
    grade = "measured on this GPU, medians of runs in turn; shares and headroom: derived from a recording of each"
    printing.table(printing.records(table), COLUMNS, title=f"Schedules of {title}", grade=grade)
    if output:
        printing.line(f"report: {page}")
