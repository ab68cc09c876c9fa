"""``bench``: our kernels and their peers, timed in turns on this machine's GPU."""

import math
from typing import Annotated, Any

import typer

from profiling.commands import arguments, printing
from profiling.commands.printing import Column
from profiling.text import significant

INTERRUPTED = 130


def bench(
    workload: Annotated[
        list[str] | None, typer.Option("--workload", help="A named workload; may be given again. Default: all timed.")
    ] = None,
    direction: Annotated[
        list[str] | None, typer.Option("--direction", help="forward or backward. Default: both.")
    ] = None,
    schedule: Annotated[
        list[str] | None, typer.Option("--schedule", help="Default: static and balanced-dynamic.")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Also FA4, FA3 and torch's varlen_attn.")] = False,
    json: arguments.Json = False,
) -> int:
    """Time our kernels, and with --peers others, on this GPU.

    Implementations take turns in one process, run by run, with a cold L2 cache. Medians with the interquartile range;
    TFLOP/s by 4 H D times the (query, key) pairs forward, 2.5 times that backward. The schedule's own cost is in the
    time. Peers are those that import. Ctrl-C prints what was measured until then.

    \b
    Examples:
      python -m profiling bench --workload hsp-loguniform --peers
      python -m profiling bench --direction backward --schedule static --schedule balanced-dynamic --json
    """
    from profiling.bench import bench as run

    schedules = [arguments.choice(name, arguments.SCHEDULES, "schedule") for name in schedule or DEFAULT_SCHEDULES]
    directions = [
        arguments.choice(name, arguments.DIRECTIONS, "direction") for name in direction or arguments.DIRECTIONS
    ]
    workloads = [arguments.workload(name) for name in workload or timed_workloads()]
    with printing.progress() as bar:
        task = bar.add_task("", total=None)
        table = run(
            workloads,
            directions=directions,
            schedules=schedules,
            peers=peers,
            progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )
    show(table, peers, json)
    return INTERRUPTED if table.attrs["interrupted"] else 0


DEFAULT_SCHEDULES = ("static", "balanced-dynamic")


def timed_workloads() -> list[str]:
    """The workloads of every comparison: those that are not made for a try."""
    from jfa import workloads

    return [name for name in workloads.names() if not name.startswith("tiny")]


def show(table: Any, peers: bool, json: bool) -> None:
    """Print the rows, and under them what a reader must know of how they came about."""
    from profiling.bench import PEER_NOTE, against_best_peer

    facts = table.attrs
    notes = [PEER_NOTE] if peers else []
    notes += [f"{name} left out: {why}" for name, why in facts["left_out"].items()]
    if facts["behind"]:
        notes.append(f"in {facts['behind']:,} runs the GPU waited for the host (or the run waited for the GPU)")
    notes += ["interrupted: these are the results until then"] if facts["interrupted"] else []
    table = table.assign(against_best_peer=against_best_peer(table))
    if json:
        rows = printing.records(table)
        document = {"grade": "measured"} | {key: facts[key] for key in ("gpu", "versions", "created")}
        printing.document({**document, "rows": rows, "notes": notes, "interrupted": facts["interrupted"]})
        return
    columns = [
        Column("workload", "workload", right=False),
        Column("direction", "direction", right=False),
        Column("implementation", "implementation", right=False),
        Column("schedule", "schedule", right=False),
        Column("median_ms", "median ms", milliseconds),
        Column("iqr_ms", "± IQR", milliseconds),
        Column("tflops", "TFLOP/s", lambda value: "–" if missing(value) else f"{value:.0f}"),
    ]
    if peers:
        columns.append(Column("against_best_peer", "× best peer", times))
    if (table["error"] != "").any():
        columns.append(Column("error", "error", right=False))
    title = f"{facts['gpu']}, " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    grade = "ms: measured on this GPU, medians of interleaved runs, cold L2; TFLOP/s and ×: derived from them"
    printing.table(printing.records(table), columns, title=title, grade=grade)
    for note in notes:
        printing.line(f"note: {note}")


def missing(value: Any) -> bool:
    """Whether a cell holds no number."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def milliseconds(value: Any) -> str:
    """A time in ms with three digits, – where there is none."""
    return "–" if missing(value) else significant(value)


def times(value: Any) -> str:
    """A ratio; what is within the spread reads as the same."""
    if missing(value):
        return ""
    return "same" if value == 1.0 else f"{value:.2f}"
