"""``record``: run a kernel on this machine's GPU and keep what it did."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from profiling.commands import arguments, printing
from profiling.errors import UserError

ForWorkload = Annotated[str, typer.Option("--workload", help="A named workload, such as hsp-loguniform.")]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write it: a .parquet file.")]


def record(
    workload: ForWorkload,
    output: Output,
    schedule: Annotated[str, typer.Option(help=", ".join(arguments.SCHEDULES))] = "balanced-dynamic",
    direction: Annotated[str, typer.Option(help=" or ".join(arguments.DIRECTIONS))] = "forward",
    impl: Annotated[str, typer.Option(help=" or ".join(arguments.IMPLEMENTATIONS))] = "auto",
    level: Annotated[
        str, typer.Option(help="cta: when CTAs ran; tile: their tiles too; wait: a role's waits too.")
    ] = "tile",
    launches: Annotated[int, typer.Option(min=1, help="How many launches to record.")] = 1,
    repeats: Annotated[int, typer.Option(min=2, help="Timed runs of the plain and of the recorded kernel.")] = 20,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="The backward with repeatable gradients; of one whose dQ has a kernel of its own, the other one.",
        ),
    ] = False,
) -> None:
    """Run a kernel on the GPU and keep what every CTA did.

    What each CTA did, when and on which SM, goes to one Parquet file. The plain kernel is timed beside the recorded
    one, so that the file says what recording cost.

    \b
    Examples:
      python -m profiling record --workload hsp-loguniform --schedule static -o static.parquet
      python -m profiling record --workload hsp-extreme --direction backward --level cta -o back.parquet
    """
    arguments.choice(schedule, arguments.SCHEDULES, "schedule")
    arguments.choice(direction, arguments.DIRECTIONS, "direction")
    arguments.choice(impl, arguments.IMPLEMENTATIONS, "impl")
    arguments.choice(level, arguments.LEVELS, "level")
    work = arguments.workload(workload)
    arguments.output_file(output, [".parquet"])
    if find_spec("torch") is None:
        raise UserError("record runs a kernel on a GPU and needs torch, which is not installed here: make install")
    from profiling.record import record as run

    with printing.progress() as bar:
        bar.add_task(f"{workload} {direction} {schedule}", total=None)
        recording = run(
            work,
            schedule=schedule,
            direction=direction,
            impl=impl,
            level=level,
            launches=launches,
            repeats=repeats,
            deterministic=deterministic,
        )
        recording.write(output)
    printing.line(f"{recording.title()}: {len(recording.events):,} spans ({recording.grade}) in {output}")
    printing.warnings(recording.warnings())
    printing.line(f"look at it: python -m profiling show {output}")
