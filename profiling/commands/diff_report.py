"""``diff-report``: two ablations side by side."""

from pathlib import Path
from typing import Annotated

import typer

from profiling.commands import arguments, printing

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder of `ablate`.")]


def diff_report(before: Folder, after: Folder, json: arguments.Json = False) -> None:
    """Set two ablations side by side, as a change to a kernel would need.

    Each configuration's time in both. What else differs comes first, a line each: times of another GPU, of a
    configuration set otherwise, or modelled beside measured ones, are not compared; other versions are named. A
    difference within the spreads, or within 1 %, is none.

    \b
    Examples:
      python -m profiling diff-report main branch
    """
    from profiling.ablation.compare import compare
    from profiling.ablation.results import read

    table, warnings = compare(read(before), read(after))
    if json:
        rows = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
        printing.document({"rows": rows, "warnings": warnings, "grade": table.grade})
        return
    printing.warnings(warnings)
    printing.words(table)
