"""``waterfall``: how much of a kernel's time goes with each of its stages."""

import math
from typing import Annotated

import typer

from profiling.commands import arguments, printing
from profiling.commands.printing import Column
from profiling.commands.record import ForWorkload
from profiling.text import duration, percent

COLUMNS = [
    Column("stage", "without", right=False),
    Column("median_ns", "time", duration),
    Column("iqr_ns", "± IQR", duration),
    Column("words", "against the whole", right=False),
    Column("bound", "bound", right=False),
    Column("claimed", "waits claim", percent),
    Column("registers", "registers", lambda value: "–" if math.isnan(value) else f"{value:,.0f}"),
    Column("stack_bytes", "stack", lambda value: "–" if math.isnan(value) else f"{value:,.0f} B"),
]


def waterfall(
    workload: ForWorkload,
    schedule: Annotated[str, typer.Option(help=", ".join(arguments.SCHEDULES))] = "balanced-dynamic",
    direction: Annotated[str, typer.Option(help=" or ".join(arguments.DIRECTIONS))] = "forward",
    impl: Annotated[str, typer.Option(help="hopper: only those kernels have switches for their stages.")] = "hopper",
    repeats: Annotated[int, typer.Option(min=3, help="Rounds; in each, every variant is timed once.")] = 40,
    json: arguments.Json = False,
) -> None:
    """Say how much of a kernel's time goes with each of its stages: it runs without one at a time, results discarded.

    Stages of the forward: exp, loads (they come from the L2 cache), store; of the backwards: exp, loads, and dq store
    or dk/dv store. What a run without a stage takes less is the least that is to be had from it. Beside it stands what
    the barrier waits claim: the share of the compute roles' time that waits for what the stage makes.

    \b
    Examples:
      python -m profiling waterfall --workload hsp-loguniform
      python -m profiling waterfall --workload dense-1024 --direction backward --json
    """
    arguments.choice(schedule, arguments.SCHEDULES, "schedule")
    arguments.choice(direction, arguments.DIRECTIONS, "direction")
    arguments.choice(impl, arguments.IMPLEMENTATIONS, "impl")
    work = arguments.workload(workload)
    from profiling.waterfall import waterfall as run

    with printing.progress() as bar:
        bar.add_task(f"{workload} {direction} {schedule}", total=None)
        table = run(work, schedule=schedule, direction=direction, impl=impl, rounds=repeats)
    rows, about = printing.records(table), table.attrs
    if json:
        printing.document({key: about[key] for key in ("grade", "results", "title", "warnings")} | {"rows": rows})
        return
    printing.warnings(about["warnings"])
    grade = (
        f"measured on this GPU, medians of runs in turn, {about['results']}; bounds: the nearer ends of 95 % bootstrap "
        "intervals over rounds; waits: derived from a recording of the whole kernel, shares of its compute roles' lives"
    )
    printing.table(rows, COLUMNS, title=f"What goes with each stage, {about['results']}: {about['title']}", grade=grade)
