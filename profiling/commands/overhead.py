"""``overhead``: what recording costs."""

import math
from typing import Annotated

import typer

from profiling.commands import arguments, printing
from profiling.commands.printing import Column
from profiling.commands.record import ForWorkload
from profiling.text import duration

COLUMNS = [
    Column("level", "level", right=False),
    Column("median_ns", "time", duration),
    Column("iqr_ns", "± IQR", duration),
    Column("words", "against off", right=False),
    Column("events", "events", "{:,}".format),
    Column("event_ns", "an event, in its lane", lambda value: "–" if math.isnan(value) else duration(value)),
    Column("registers", "registers", "{:,}".format),
    Column("stack_bytes", "stack", "{:,} B".format),
    Column("shared_bytes", "SMEM", "{:,} B".format),
]


def overhead(
    workload: ForWorkload,
    schedule: Annotated[str, typer.Option(help=", ".join(arguments.SCHEDULES))] = "balanced-dynamic",
    direction: Annotated[str, typer.Option(help=" or ".join(arguments.DIRECTIONS))] = "forward",
    impl: Annotated[str, typer.Option(help=" or ".join(arguments.IMPLEMENTATIONS))] = "auto",
    repeats: Annotated[int, typer.Option(min=3, help="Rounds; in each, every level is timed once.")] = 40,
    proton: Annotated[
        bool, typer.Option("--proton", help="Beside them the waits alone, and Proton's scopes there.")
    ] = False,
    json: arguments.Json = False,
) -> None:
    """Say what recording costs a kernel: the plain one and each level, timed in turn on this GPU.

    Beside the time, what the compiler gave each: a recorded kernel is compiled from the same configuration, and can
    come out with other registers.

    \b
    Examples:
      python -m profiling overhead --workload hsp-loguniform
      python -m profiling overhead --workload hsp-extreme --direction backward --proton
    """
    arguments.choice(schedule, arguments.SCHEDULES, "schedule")
    arguments.choice(direction, arguments.DIRECTIONS, "direction")
    arguments.choice(impl, arguments.IMPLEMENTATIONS, "impl")
    work = arguments.workload(workload)
    from profiling.overhead import overhead as run

    with printing.progress() as bar:
        bar.add_task(f"{workload} {direction} {schedule}", total=None)
        table = run(work, schedule=schedule, direction=direction, impl=impl, rounds=repeats, proton=proton)
    rows = printing.records(table)
    if json:
        printing.document({"grade": table.attrs["grade"], "kernel": table.attrs["title"], "rows": rows})
        return
    grade = "measured on this GPU, medians of runs in turn; effects: 95 % bootstrap intervals over rounds"
    printing.table(rows, COLUMNS, title=f"What recording costs: {table.attrs['title']}", grade=grade)
