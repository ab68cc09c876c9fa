"""Reads the source page that ``ncu --page source --csv`` prints: a kernel's instructions, their samples and counts."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from profiling.doctor import find_ncu
from profiling.errors import UserError
from profiling.ncu.container import MAGIC
from profiling.ncu.exported import printed_page
from profiling.ncu.page_text import LONGEST_FIELD, content_of, decoded
from profiling.text import count, plain

COMMAND = "ncu --import REPORT.ncu-rep --page source --print-source sass --csv"
HOW = f"print it with {COMMAND}"
COLLECT = "profile with --section SourceCounters"
SAMPLES = ("# Samples", "Warp Stall Sampling (All Samples)")
COUNTS = {"executed": "Instructions Executed", "wavefronts": "L1 Wavefronts Shared"}
STALL = "stall_"
Rows = list[tuple[int, list[str]]]
"""A table's rows, with the lines on which they end."""
_NOTHING = ("", "-", "n/a")
_COUNT = re.compile(r"[0-9]{1,18}|[0-9]{1,3}(?:(?P<mark>[,.'\u00a0\u202f ])[0-9]{3}(?:(?P=mark)[0-9]{3}){0,4})")


@dataclass(frozen=True, eq=False)
class Listing:
    """One kernel's machine code.

    Attributes:
        kernel: its name, "" where the page does not say.
        code: a row an instruction, in order: ``address`` (int), ``text``, ``samples``, ``executed`` (times, by warps)
            and ``wavefronts`` (of shared memory), the last two NaN where they were not collected.
        stalls: a column a reason as ncu abbreviates it ("long_sb"): samples, rows as in ``code``.
    """

    kernel: str
    code: pd.DataFrame
    stalls: pd.DataFrame


def read_source(path: Path) -> list[Listing]:
    """The kernels of a source page, or of a .ncu-rep, of which the ncu that is installed prints it.

    Raises:
        UserError: the file cannot be read, holds no source page of machine code, no samples, or is cut or damaged; it
            is a .ncu-rep and there is no ncu.
    """
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give a report, or what this prints of it: {COMMAND}")
    content = content_of(path, HOW)
    if content.startswith(MAGIC):
        ncu = find_ncu()
        if ncu is None:
            raise UserError(
                f"{path}: only ncu reads the source page of a report, and is not here; where it is: {COMMAND}"
            )
        content = printed_page(path, ncu, ("source", "--print-source", "sass"))
    text, _ = decoded(content)
    if "\0" in text:
        raise UserError(f"{path}: this is no text; expected a .ncu-rep, or what this prints: {COMMAND}")
    found = [_listing(path, *table) for table in _tables(path, text)]
    if not found:
        raise UserError(f"{path}: holds no source page of machine code (a header with Address and Source); {HOW}")
    return found


def _tables(path: Path, text: str) -> Iterator[tuple[str, int, list[str], Rows]]:
    """(kernel, line of the header, header, rows with their lines) of each kernel."""
    kernel, header, begun = "", [""], 0
    rows: Rows = []
    for line, fields in _fields(path, text):
        if fields[:2] == ["Address", "Source"] or fields[:1] == ["Kernel Name"]:
            if begun:
                yield kernel, begun, header, rows
            begun, rows = 0, []
            if fields[0] == "Kernel Name":
                kernel = fields[1] if len(fields) > 1 else ""
            else:
                header, begun = fields, line
        elif begun and len(fields) > 1:  # a line of one field is what ncu or the program said
            rows.append((line, fields))
    if begun:
        yield kernel, begun, header, rows


def _fields(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    limit = csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader(io.StringIO(text))
    try:
        for fields in reader:
            yield reader.line_num, fields
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: {error}; {HOW}") from None
    finally:
        csv.field_size_limit(limit)


def _listing(path: Path, kernel: str, line: int, header: list[str], rows: Rows) -> Listing:
    samples = next((name for name in SAMPLES if name in header), None)
    stalls = [name for name in header if name.startswith(STALL) and "(" not in name]
    if samples is None or not stalls:
        raise UserError(f"{path}: line {line}: the page has no samples of stalls; {COLLECT}")
    if not rows:
        raise UserError(f"{path}: line {line}: a header and no instruction under it: the page was cut; {HOW}")
    for at, fields in rows:
        if len(fields) != len(header):
            raise UserError(
                f"{path}: line {at}: {count(len(fields), 'field')} under a header of {len(header)}: the page was cut, "
                f"or something else printed into it; {HOW}"
            )
    place = {name: index for index, name in enumerate(header)}

    def numbers(name: str) -> np.ndarray:
        if name not in place:
            return np.full(len(rows), np.nan)
        return np.array([_number(path, at, name, fields[place[name]]) for at, fields in rows])

    code = pd.DataFrame(
        {
            "address": [_address(path, at, fields[place["Address"]]) for at, fields in rows],
            "text": [plain(fields[place["Source"]].strip(), 400) for _, fields in rows],
            "samples": numbers(samples),
            **{name: numbers(column) for name, column in COUNTS.items()},
        }
    )
    if not code["samples"].sum():
        raise UserError(f"{path}: line {line}: no instruction has a sample; {COLLECT}, and a kernel of 100 µs or more")
    return Listing(plain(kernel, 200), code, pd.DataFrame({name.removeprefix(STALL): numbers(name) for name in stalls}))


def _address(path: Path, line: int, text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        raise UserError(
            f"{path}: line {line}: {plain(text, 40)!r} is no instruction's address: another view of the source; {HOW}"
        ) from None


def _number(path: Path, line: int, column: str, text: str) -> float:
    """A count as ncu prints it, with separators of thousands or without."""
    text = text.strip()
    if text in _NOTHING:
        return 0.0
    if not _COUNT.fullmatch(text):
        raise UserError(f"{path}: line {line}: {column} is {plain(text, 40)!r}; expected a count")
    return float(re.sub("[^0-9]", "", text))
