"""``ncu``: what Nsight Compute reports say of each kernel, and what limits it."""

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profiling.commands import arguments, printing
from profiling.errors import UserError
from profiling.text import count

if TYPE_CHECKING:
    from profiling.ncu.analysis import ReportFindings
    from profiling.word_table import Table

SUFFIXES = {"table": ".txt", "md": ".md", "csv": ".csv", "json": ".json", "html": ".html"}

WIDE = 150
TIME = {"kernel", "launches", "shape", "duration", "share", "verdict"}
"""Columns of the overview that stand first where a terminal of fewer than WIDE columns cannot hold all of them."""


def ncu(
    report: Annotated[
        list[Path], typer.Argument(metavar="REPORT...", help=".ncu-rep, what `ncu --csv` prints, or a folder of them.")
    ],
    kernel: Annotated[str | None, typer.Option("--kernel", metavar="REGEX", help="Only kernels it matches.")] = None,
    nvtx: Annotated[
        str | None, typer.Option("--nvtx", metavar="RANGE", help="Only launches in an NVTX range that holds it.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="REPORT", help="Set each kernel beside this report's.")
    ] = None,
    recording: Annotated[
        Path | None,
        typer.Option("--recording", metavar="FILE", help="A recording of the same launch: splits lost tensor time."),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="table, md, csv, json or html")] = "table",
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write it there.")] = None,
    decimal: Annotated[
        str | None, typer.Option("--decimal", help="point or comma: how a CSV writes numbers, where it cannot tell.")
    ] = None,
) -> None:
    """Say what limits each kernel of Nsight Compute reports.

    Per kernel: time, shape, occupancy and its limiter, tensor pipe, throughputs, stall reasons, balance over the SMs,
    spills, and a verdict with the metrics that it rests on. Kernels of ours also get useful TFLOP/s from the workload
    that their NVTX range names. With --baseline, only what exceeds the passes' noise is a difference.

    \b
    Examples:
      python -m profiling ncu forward.ncu-rep
      python -m profiling ncu new.ncu-rep --baseline old.ncu-rep --kernel attention
      python -m profiling ncu forward.ncu-rep --recording forward.parquet
      python -m profiling ncu reports/ --format html -o ncu.html
    """
    from profiling.ncu import formats, reading
    from profiling.ncu.analysis import analyse

    arguments.choice(format, formats.FORMATS, "format")
    if output is not None:
        for other, suffix in SUFFIXES.items():
            if output.suffix == suffix != SUFFIXES[format]:
                raise UserError(f"-o {output}: --format {format} ends in {SUFFIXES[format]}; give --format {other}")
        arguments.output_file(output, [SUFFIXES[format]])
        _keep(output, [*report, baseline] if baseline else report)
    elif format == "html":
        raise UserError("--format html: give a file to write, such as -o ncu.html")
    found = analyse(
        reading.read_all(report, decimal=decimal, for_summary=True),
        kernel=kernel,
        nvtx=nvtx,
        baseline=reading.read(baseline, decimal=decimal, for_summary=True) if baseline else None,
        recording=arguments.read_all([recording])[0] if recording else None,
    )
    make = {"md": formats.markdown, "csv": formats.comma_separated, "json": formats.as_json, "html": formats.html}
    if output is not None:
        from profiling.page import write

        write(output, make.get(format, _as_text)(found))
        printing.line(f"{output}: {count(sum(len(findings.kernels) for findings in found), 'kernel')}")
    elif format == "table":
        _print(found)
    else:
        sys.stdout.write(make[format](found))


def _keep(output: Path, inputs: Sequence[Path]) -> None:
    """UserError where writing would replace a report, one that lies in a folder of reports too."""
    from profiling.ncu import reading

    if not output.is_file():
        return
    lost = any(path.is_file() and path.samefile(output) for path in inputs)
    if not lost and any(path.is_dir() and path.samefile(output.parent) for path in inputs):
        with contextlib.suppress(UserError):  # what is no report may be replaced
            lost = bool(reading.read(output))
    if lost:
        raise UserError(f"-o {output}: is one of the reports, which would be lost; give another name")


def _as_text(found: Sequence["ReportFindings"]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        _print(found)
    return out.getvalue()


def _print(found: Sequence["ReportFindings"]) -> None:
    from profiling.ncu import formats, tables

    printing.warnings(tables.differences(found))
    for findings in found:
        for table in _fitting(tables.overview(findings)):
            printing.words(table)
        for table in formats.detail_tables(findings):
            printing.words(table)
        if more := formats.left_out(findings):
            printing.line(more)
    for note in tables.notes(found):
        printing.line(f"note: {note}")


def _fitting(overview: "Table") -> list["Table"]:
    """The overview in two where its columns are too many for the terminal: words would break inside."""
    if printing.console().width >= WIDE:
        return [overview]
    time, units = (
        [i for i, heading in enumerate(overview.headings) if heading in names]
        for names in (TIME, {"kernel"} | (set(overview.headings) - TIME))
    )
    return [_columns(overview, time)._replace(grade=""), _columns(overview, units)._replace(title="")]


def _columns(table: "Table", keep: list[int]) -> "Table":
    return table._replace(
        headings=tuple(table.headings[i] for i in keep),
        rows=[tuple(row[i] for i in keep) for row in table.rows],
        right=tuple(keep.index(i) for i in table.right if i in keep),
    )
