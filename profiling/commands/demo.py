"""``demo``: everything, on the recordings in the package and without a GPU."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from profiling.commands import arguments, printing, views
from profiling.commands.printing import Column
from profiling.errors import UserError

if TYPE_CHECKING:
    from profiling.recording import Recording

Output = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the report goes.")]
Data = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", hidden=True, help="Other recordings than the package's.")
]


def demo(out: Output = Path("profiling-demo"), data: Data = None, json: arguments.Json = False) -> None:
    """Look at the recordings in the package; no GPU is needed.

    They were made on a real GPU. For each workload and direction: where the SMs' time went under each schedule, how far
    that is from perfectly spread work (headroom), what caused the tail; and an HTML report of it all.

    \b
    Examples:
      python -m profiling demo
      python -m profiling demo --out /tmp/demo
    """
    from profiling import examples
    from profiling.recording import Recording
    from profiling.report import write_report

    arguments.output_folder(out, "--out")
    data = data or examples.DATA
    paths = sorted(data.glob("*.parquet"))
    if not paths:
        raise UserError(f"demo: there are no recordings in {data}; reinstall the package")
    with printing.progress() as bar:
        task = bar.add_task("reading", total=2 * len(paths) + 1)
        recordings = []
        for path in paths:
            bar.update(task, description=path.stem)
            recordings.append(Recording.read(path))
            bar.advance(task)
        recordings.sort(key=_place)
        groups = []
        for members in _groups(recordings):
            bar.update(task, description=f"{members[0].workload_name} {members[0].direction}")
            groups.append((members, _split(members)))
            bar.advance(task, len(members))
        bar.update(task, description="report")
        page = write_report(recordings, out)
        bar.advance(task)
    if json:
        printing.document({"groups": [_json(members, rows) for members, rows in groups], "report": str(page)})
        return
    for members, rows in groups:
        _print(members, rows)
    printing.line("headroom: the makespan against perfectly spread work; 1.00× is none left to gain from a schedule")
    printing.line(f"report: {page}")


def _place(recording: "Recording") -> tuple[str, bool, int, str]:
    known = recording.schedule in arguments.SCHEDULES
    rank = arguments.SCHEDULES.index(recording.schedule) if known else len(arguments.SCHEDULES)
    return recording.workload_name, recording.direction != "forward", rank, recording.source


def _groups(recordings: Iterable["Recording"]) -> list[list["Recording"]]:
    """Recordings that may be compared with each other, in the order in which they come."""
    groups: dict[tuple[str, str, str], list[Recording]] = {}
    for recording in recordings:
        groups.setdefault((recording.workload_name, recording.direction, recording.gpu_name), []).append(recording)
    return list(groups.values())


def _split(members: list["Recording"]) -> list[dict[str, Any]]:
    """A row a schedule: SM-time split, speedup against the first, and what caused the tail."""
    from profiling.compare import compare, median_launch, split
    from profiling.sm_time import summary

    rows = printing.records(compare(members).table) if len(members) > 1 else [split(members[0])]
    for recording, row in zip(members, rows, strict=True):
        launch = int(median_launch(summary(recording))["launch"])
        row["tail"], row["tail_words"] = views.tail(recording, launch)
    return rows


def _json(members: list["Recording"], rows: list[dict[str, Any]]) -> dict[str, Any]:
    first = members[0]
    warned = {recording.schedule: recording.warnings() for recording in members}
    return {"workload": first.workload_name, "direction": first.direction, "rows": rows, "warnings": warned}


def _print(members: list["Recording"], rows: list[dict[str, Any]]) -> None:
    first = members[0]
    title = f"{first.workload_name} · {first.direction} · {first.gpu_name}"
    columns = views.split_columns([Column("schedule", "schedule", right=False)], compared=len(members) > 1)
    printing.table(views.split_rows(rows), columns, title=title, grade=views.grade_words(members))
    for row in rows:
        printing.line(f"  tail, {row['schedule']}: {row['tail_words']}")
    printing.warnings_of(members, lambda recording: recording.schedule)
    printing.line()
