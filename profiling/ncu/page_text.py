"""The tables in the text that `ncu --csv` printed: their headers and rows, whatever stands around and between them.

ncu's own messages and what the profiled program prints go to the same place as the table. A program's line without an
end may even stand in front of a row; but quotes inside a field are doubled, so `"0","1234",` outside of a row can only
be a row's start.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from profiling.errors import UserError
from profiling.text import count, plain

LONGEST_FIELD = 1_000_000
HOW = "export it with ncu --import REPORT.ncu-rep --csv --page raw (or details)"

_HEADER = re.compile(
    r'(?P<quote>"|(?<![\w"]))ID(?P=quote)(?P<separator>[,;\t])(?P=quote)Process ID(?P=quote)(?P=separator)'
)
_LOST_ROW = re.compile(r'^"[0-9]++","[0-9]++","[^"\n]*+",.*"\([0-9]++, [0-9]++, [0-9]++\)"', re.MULTILINE)
_OTHER_PAGES = {
    '"Address","Source"': "the source page, which `hotspots` reads",
    '"Invocations"': "a summary (--print-summary), which has no launches and metrics to read",
    '"#","Source"': "the source page in a view that nothing reads here (`hotspots` reads that of --print-source sass)",
}
_BYTE_ORDER_MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb\xbf": "utf-8-sig"}
_LATIN_1 = {0xDC00 + byte: chr(byte) for byte in range(0x80, 0x100)}


@dataclass(frozen=True)
class Row:
    """A row of a table: the file's line on which it starts, and its fields."""

    line: int
    fields: list[str]


@dataclass
class Table:
    """A header and the rows under it, the row of units among them."""

    line: int
    header: list[str]
    separator: str
    rows: list[Row] = field(default_factory=list)


@dataclass
class Page:
    """What a file holds: its tables, the lines that belong to none as (number, text), and notes on how it was read."""

    path: str
    tables: list[Table] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_page(path: Path) -> Page:
    """The tables of one file.

    Raises:
        UserError: the file cannot be read, is no text, holds no table of the raw or details page, or is cut or damaged
            inside of one; nothing was profiled, and ncu says why.
    """
    page = Page(str(path))
    text = _text(path, page)
    _find_tables(text, page)
    _hear_messages(page)
    if not page.tables:
        raise UserError(f"{page.path}: {_why_no_table(text)}")
    if page.skipped:
        line, words = page.skipped[0]
        lines = count(len(page.skipped), "line")
        verb = "belongs" if len(page.skipped) == 1 else "belong"
        page.notes.append(f'{lines} that {verb} to no table skipped, the first: "{plain(words, 80)}" (line {line})')
    names = {";": "semicolons", "\t": "tabs"}
    for separator in dict.fromkeys(table.separator for table in page.tables if table.separator in names):
        page.notes.append(f"fields are separated by {names[separator]}, as a spreadsheet writes them")
    return page


def _text(path: Path, page: Page) -> str:
    text, note = decoded(content_of(path, HOW))
    if note:
        page.notes.append(note)
    if "\0" in text:
        raise UserError(f"{path}: this is no text; the pages of ncu --csv are: {HOW}")
    return text


def content_of(path: Path, how: str) -> bytes:
    """A file's bytes. Raises UserError where it cannot be read or is empty; ``how`` says what makes such a file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    if not content.strip():
        raise UserError(f"{path}: the file is empty; {how}")
    return content


def decoded(content: bytes) -> tuple[str, str]:
    """A page's bytes as text with plain line ends, and a note where they are no UTF-8, else ""."""
    note = ""
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS.items() if content.startswith(mark)), "utf-8")
    if encoding == "utf-16":
        text = content.decode(encoding, errors="replace")
    else:
        text = content.decode(encoding, errors="surrogateescape")
        if not text.isascii() and (foreign := re.search("[\udc80-\udcff]", text)):
            line = text.count("\n", 0, foreign.start()) + 1
            note = f"bytes that are no UTF-8 read as Latin-1, the first on line {line}"
            text = text.translate(_LATIN_1)
    return text.replace("\r\n", "\n").replace("\ufeff", ""), note


def _why_no_table(text: str) -> str:
    for sign, name in _OTHER_PAGES.items():
        if sign in text:
            return f"this is {name}; {HOW}"
    return f'no table of ncu in it: expected a header line that starts with "ID","Process ID"; {HOW}'


def _hear_messages(page: Page) -> None:
    """Says what ncu's own messages mean: to the user at once where there is nothing else to show."""
    errors = [(line, words) for line, words in page.skipped if "==ERROR==" in words]
    rows = any(table.rows for table in page.tables)
    if any("ERR_NVGPUCTRPERM" in words for _, words in page.skipped):
        what = (
            "ncu had no permission to read the GPU's performance counters (ERR_NVGPUCTRPERM): run it as root, or load "
            "the driver with NVreg_RestrictProfilingToAdminUsers=0, and in a container add --cap-add SYS_ADMIN"
        )
        if not rows:
            raise UserError(f"{page.path}: nothing was profiled: {what}")
        page.notes.append(what)
    if rows:
        page.notes.extend(f'ncu reported: "{plain(words)}" (line {line})' for line, words in errors[:3])
        return
    for line, words in page.skipped:
        if "No kernels were profiled" in words:
            raise UserError(
                f"{page.path}: nothing was profiled: ncu says so on line {line}; check that the program launches "
                "kernels and that --kernel-name, --nvtx-include and --launch-count let one through"
            )
    if errors:
        line, words = errors[0]
        raise UserError(f'{page.path}: nothing was profiled: ncu says "{plain(words)}" (line {line})')


def _find_tables(text: str, page: Page) -> None:
    position, line, starts = 0, 1, _HEADER
    fields = _field(",")
    while found := starts.search(text, position):
        _skip(text, position, found.start(), line, page)
        line += text.count("\n", position, found.start())
        is_header = found.groupdict().get("separator") is not None
        if is_header:
            starts, fields = _starts(found["quote"], found["separator"]), _field(found["separator"])
        values, end = _record(text, found.start(), line, fields, page)
        if is_header:
            page.tables.append(Table(line, _named(values, line, page), found["separator"]))
        else:
            page.tables[-1].rows.append(Row(line, values))
        line += text.count("\n", found.start(), end)
        position = end
    _skip(text, position, len(text), line, page)


def _starts(quote: str, separator: str) -> re.Pattern[str]:
    """What a header, a row or a row of units starts with. Only where everything is quoted can that be inside a line."""
    if quote:
        row = rf'"[0-9]++"{separator}"[0-9]++"{separator}|(?:""{separator}){{8}}'
    else:
        row = rf'^"?[0-9]++"?{separator}"?[0-9]++"?{separator}|^(?:(?:"")?{separator}){{8}}'
    return re.compile(f"{_HEADER.pattern}|{row}", re.MULTILINE)


def _field(separator: str) -> re.Pattern[str]:
    return re.compile(rf'(?:"((?:[^"]++|"")*+)"|([^"{separator}\n]*+))({separator}|\n|\Z)')


def _record(text: str, start: int, line: int, pattern: re.Pattern[str], page: Page) -> tuple[list[str], int]:
    """The fields of the record that starts there, and where the next line does."""
    values = []
    position, size = start, len(text)
    match_field = pattern.match
    while found := match_field(text, position):
        quoted, bare, after = found.groups()
        value = bare if quoted is None else quoted.replace('""', '"')
        if len(value) > LONGEST_FIELD:
            break
        values.append(value)
        position = found.end()
        if after == "\n" or (position == size and not after):
            return values, position
    where = f"{page.path}: line {line}, column {len(values) + 1}"
    if found:
        raise UserError(f"{where}: a field of {len(found[0]):,} characters; a quote is missing before it: {HOW}")
    raise UserError(f"{where}: a quote is left open, or text follows one: the file is cut or damaged; {HOW}")


def _named(header: list[str], line: int, page: Page) -> list[str]:
    names = [name.strip() for name in header]
    while len(names) > 1 and not names[-1]:
        names.pop()
    if "" in names:
        raise UserError(f"{page.path}: line {line}: column {names.index('') + 1} of the header has no name; {HOW}")
    return names


def _skip(text: str, start: int, end: int, line: int, page: Page) -> None:
    between = text[start:end]
    if not between or between.isspace():
        return
    lost = None if page.tables else _LOST_ROW.search(between)
    if lost:
        number = line + between.count("\n", 0, lost.start())
        raise UserError(f"{page.path}: line {number}: a row before any header line; {HOW}")
    page.skipped.extend(
        (number, words) for number, words in enumerate(between.split("\n"), line) if words and not words.isspace()
    )
