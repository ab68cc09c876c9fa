"""``waits``: which barrier costs which role how much, and who was late."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from profiling.commands import arguments, printing
from profiling.commands.printing import Column
from profiling.errors import UserError
from profiling.text import duration, percent

if TYPE_CHECKING:
    import pandas as pd

    from profiling.lost import LostTime
    from profiling.recording import Recording

ROWS = 16


class Baseline(NamedTuple):
    """Another recording's time of its roles, and what else differs between the two, as `profiling.compare.unlike`."""

    recording: "Recording"
    parts: "pd.DataFrame"
    obstacles: list[str]
    differences: list[str]


COLUMNS = [
    Column("role", "role", right=False),
    Column("barrier", "barrier", right=False),
    Column("stage", "buffer", lambda value: "–" if value < 0 else f"{value}"),
    Column("phase", "when", right=False),
    Column("count", "waits", "{:,}".format),
    Column("total_ns", "in sum", duration),
    Column("median_ns", "median", duration),
    Column("p95_ns", "95th pct.", duration),
    Column("share", "of the role's life", percent),
]


def waits(
    file: arguments.RecordingFile,
    role: Annotated[
        str | None, typer.Option("--role", help="Only this role's time and waits; the verdict is the kernel's.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="FILE", help="Set the roles' time beside this recording's.")
    ] = None,
    ncu: Annotated[
        Path | None, typer.Option("--ncu", metavar="REPORT", help="An Nsight Compute report of the same launch.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Figures: .html.")] = None,
    json: arguments.Json = False,
) -> None:
    """Say which barrier costs which role how much, and who was late.

    For recordings at level wait. Waits by role, barrier and buffer; each wait is laid at the door of the role that
    ended it, with what that role was doing; the compute roles' time is split into work, waits and gaps between tiles,
    which sum to their lives. With --ncu, the tensor pipe's share of the launch stands beside it.

    \b
    Examples:
      python -m profiling waits forward.parquet
      python -m profiling waits forward.parquet --role load -o waits.html
    """
    from profiling.late import late
    from profiling.lost import lost_time
    from profiling.recording import Recording
    from profiling.waits import role_time
    from profiling.waits import waits as table_of

    if output:
        arguments.output_file(output, [".html"])
    recording = Recording.read(file)
    parts = role_time(recording)
    roles = list(dict.fromkeys(parts["role"]))
    if role is not None:
        arguments.choice(role, roles, "role")
    before = _baseline(Recording.read(baseline), recording, role) if baseline else None
    table, blame = table_of(recording), late(recording, role)
    if role is not None:
        parts, table = parts[parts["role"] == role], table[table["role"] == role]
    lost = lost_time(recording, _tensor_share(ncu, recording) if ncu else math.nan)
    if json:
        printing.document(
            {
                "title": recording.title(),
                "grade": recording.grade,
                "warnings": recording.warnings(),
                "waits": printing.records(table),
                "late": printing.records(blame),
                "roles": printing.records(parts),
                "lost": asdict(lost),
                "baseline": printing.records(before.parts) if before else None,
                "baseline_differs": [*before.obstacles, *before.differences] if before else [],
                "baseline_warnings": before.recording.warnings() if before else [],
            }
        )
    else:
        _print(recording, table, blame, parts, lost, before)
    if output:
        from profiling.page import write_figures
        from profiling.wait_figures import late_flow, late_matrix, role_time_bars

        blamed = [late_matrix(blame), late_flow(blame)] if len(blame) else []
        write_figures([role_time_bars(parts), *blamed], output, recording.title())
        if not json:
            printing.line(f"figures in {output}")


def _print(
    recording: "Recording",
    table: "pd.DataFrame",
    blame: "pd.DataFrame",
    parts: "pd.DataFrame",
    lost: "LostTime",
    before: Baseline | None,
) -> None:
    grade = f"{recording.grade} on {recording.gpu_name}; shares: derived"
    printing.line(recording.title())
    printing.warnings(recording.warnings())
    if before:
        _say_unlike(before)
    shares = parts.assign(was=math.nan)
    columns = [
        Column("role", "role", right=False),
        Column("part", "part", right=False),
        Column("total_ns", "in sum", duration),
        Column("share", "of the role's life", percent),
    ]
    if before:
        was = before.parts.set_index(["role", "part"])["share"]
        shares["was"] = [was.get(key, math.nan) for key in zip(parts["role"], parts["part"], strict=True)]
        columns.append(Column("was", f"in {Path(before.recording.source).stem}", percent))
    printing.table(printing.records(shares), columns, title="Where each role's time went", grade=grade)
    more = f"; the {ROWS} longest of {len(table)}" if len(table) > ROWS else ""
    rows = printing.records(table.head(ROWS))
    printing.table(rows, COLUMNS, title=f"Waits by role, barrier and buffer{more}", grade=grade)
    late_columns = [
        Column("role", "waits", right=False),
        Column("barrier", "for", right=False),
        Column("late", "late", right=False),
        Column("doing", "doing", right=False),
        Column("total_ns", "in sum", duration),
        Column("share", "of the waiting role's life", percent),
    ]
    derived = "derived from the roles' own waits: `in flight` and `in use` begin when the late role's wait ended"
    more = f"; the {ROWS} longest of {len(blame)}" if len(blame) > ROWS else ""
    printing.table(printing.records(blame.head(ROWS)), late_columns, title=f"Who was late{more}", grade=derived)
    printing.line(f"verdict: {lost.words}")
    printing.line(f"remedy: {lost.remedy}")
    for words in _of_the_tensor_pipe(lost):
        printing.line(words)


def _baseline(before: "Recording", recording: "Recording", role: str | None) -> Baseline:
    from profiling.compare import unlike
    from profiling.waits import role_time

    parts = role_time(before)
    own = parts if role is None else parts[parts["role"] == role]
    return Baseline(before, own, *unlike([recording, before]))


def _say_unlike(before: Baseline) -> None:
    for words in before.obstacles:
        printing.line(f"not comparable: {words}; the shares are of unlike launches")
    for words in before.differences:
        printing.line(f"note: {words}")
    printing.warnings(f"{before.recording.source}: {words}" for words in before.recording.warnings())


def _of_the_tensor_pipe(lost: "LostTime") -> list[str]:
    """What the products take of the launch, what a profiler saw of it, and what the roles do beside."""
    lines = []
    if not math.isnan(lost.products):
        lines.append(f"tensor cores: the useful products take {percent(lost.products)} of the plain launch (derived)")
    if not math.isnan(lost.tensor):
        apart = "" if math.isnan(lost.residual) else f", {100 * lost.residual:+.1f} points from that"
        lines.append(f"tensor pipe: active for {percent(lost.tensor)} of the launch (ncu, measured){apart}")
    if not math.isnan(lost.beside):
        lines.append(
            f"beside: of the {percent(lost.work)} that the compute roles work, {percent(lost.beside)} are softmax, "
            "issuing and stores (derived)"
        )
    return lines


def _tensor_share(path: Path, recording: "Recording") -> float:
    """The tensor pipe's share of the launch in a report of the same kernel, workload and schedule."""
    from profiling.ncu import attention, reading
    from profiling.ncu.summary import summarise

    refused = UserError(f"--ncu {path}: holds no kernel")
    for kernel in summarise(reading.read(path, for_summary=True)):
        try:
            attention.same_launch(kernel, recording, "--ncu")
        except UserError as error:
            refused = error
            continue
        if (share := kernel.get("tensor")) == share:
            return share / 100.0
        raise UserError(
            f"--ncu {path}: has no tensor-pipe metric of {kernel.name}; collect ComputeWorkloadAnalysis, or --set full"
        )
    raise refused
