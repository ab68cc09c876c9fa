"""How results look on a terminal: tables with a grade under them, warnings beside them, or one JSON document."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from profiling.text import gathered, plain

if TYPE_CHECKING:
    import pandas as pd

    from profiling.recording import Recording
    from profiling.word_table import Table as WordTable

PIPED_WIDTH = 200
MOST_ROWS_AS_COLUMNS = 4


class Column(NamedTuple):
    """A column of a printed table: the row's key, the heading, and how a value reads."""

    key: str
    heading: str
    show: Callable[[Any], str] = str
    right: bool = True


def console(stderr: bool = False) -> Console:
    """A terminal as it is; into a pipe or file, wide enough not to fold a table. COLUMNS overrules both."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[Column], *, title: str, grade: str) -> None:
    """Print rows; ``grade`` says under the table how its numbers were obtained. Strangers' words print as they are.

    Where a terminal is too narrow for the words of a few rows, these are columns.
    """
    cells = [[plain(column.show(row[column.key]), 400) for column in columns] for row in rows]
    right = [column.right for column in columns]
    headings, out = [column.heading for column in columns], console()
    grid = _grid(headings, cells, right, title, grade)
    needed = Measurement.get(out, out.options.update(width=PIPED_WIDTH * 10), grid).minimum
    if needed > out.width and 0 < len(cells) <= MOST_ROWS_AS_COLUMNS:
        turned = list(zip(headings, *cells, strict=True))
        grid = _grid(turned[0], turned[1:], [False, *[True] * len(cells)], title, grade)
    out.print(grid)


def _grid(
    headings: Sequence[str], cells: Iterable[Sequence[str]], right: Sequence[bool], title: str, grade: str
) -> Table:
    grid = Table(
        title=Text(plain(title)), caption=Text(plain(grade, 400)), title_justify="left", caption_justify="left"
    )
    for heading, justified in zip(headings, right, strict=True):
        grid.add_column(Text(heading), justify="right" if justified else "left", overflow="fold")
    for row in cells:
        grid.add_row(*map(Text, row))
    return grid


def words(made: "WordTable") -> None:
    """Print a table of words."""
    columns = [Column(str(index), heading, right=index in made.right) for index, heading in enumerate(made.headings)]
    rows = [{str(index): cell for index, cell in enumerate(row)} for row in made.rows]
    table(rows, columns, title=made.title, grade=made.grade)


def line(words: str = "") -> None:
    """One line of plain text on stdout; a stranger's control characters do not reach the terminal."""
    console().print(Text("".join(c if c.isprintable() else " " for c in words)), soft_wrap=True)


def warnings(lines: Iterable[str]) -> None:
    """Beside the numbers that they touch, on stdout: a redirected table keeps its warnings."""
    for words in lines:
        console().print(Text(f"warning: {plain(words, 600)}", style="yellow"), soft_wrap=True)


def warnings_of(recordings: Sequence["Recording"], name: Callable[["Recording"], str]) -> None:
    """The warnings of several recordings; what several of them say is said once."""
    warnings(gathered((name(recording), recording.warnings()) for recording in recordings))


def document(value: Any) -> None:
    """One JSON document on stdout; what is not a finite number is null."""
    print(json.dumps(_jsonable(value), indent=2, ensure_ascii=False))


def records(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    """A DataFrame's rows as JSON objects."""
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def progress() -> Progress:
    """A progress bar on stderr that goes away when it is done; none where stderr is no terminal."""
    errors = console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        return _jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
