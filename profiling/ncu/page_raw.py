"""The raw page: a row per launch, a column per metric, and under the header a row of units."""

from __future__ import annotations

import math
from collections.abc import Iterator

from profiling.errors import UserError
from profiling.ncu.numbers import TEXTS, Cell, Convention
from profiling.ncu.page_parts import Part, measure, part, with_metrics
from profiling.ncu.page_text import HOW, Row, Table
from profiling.text import count, plain

FORM = "raw page"


class RawTable:
    """One table of the raw page. Raises UserError where a row does not have the header's columns."""

    def __init__(self, table: Table, path: str, notes: list[str]) -> None:
        self.path = path
        self.header = table.header
        self.columns = [index for index, name in enumerate(table.header) if _is_metric(name)]
        rows = [self._checked(row) for row in table.rows]
        self.rows = [row for row in rows if row.fields[0].strip()]
        units = [row for row in rows if not row.fields[0].strip() and any(row.fields)]
        if any(row.fields != units[0].fields for row in units):
            raise UserError(f"{path}: line {units[-1].line}: a second row of units under one header; {HOW}")
        has_units = len(self.rows) < len(rows)
        self.units = units[0].fields if units else [_from_name(name) if not has_units else "" for name in table.header]
        if self.rows and not has_units:
            notes.append(f"the table on line {table.line} has no row of units: values as printed, their units unknown")
        other = [name for name in table.header if not _is_metric(name) and not _is_of_launch(name)]
        if other:
            notes.append(f"{count(len(other), 'column')} of no metric left out: {plain(', '.join(other), 80)}")

    def _checked(self, row: Row) -> Row:
        width = len(self.header)
        extra = row.fields[width:]
        if any(extra) or len(row.fields) < width:
            raise UserError(
                f"{self.path}: line {row.line}: a row of {len(row.fields)} columns under a header of {width}: the file "
                f"is cut or damaged; {HOW}"
            )
        return row

    def cells(self) -> Iterator[Cell]:
        """Every cell that may hold a number."""
        columns = [(i, self.header[i], self.units[i]) for i in self.columns if self.header[i] not in TEXTS]
        known = {name: i for i, name, _ in columns if name in _KNOWN}
        for row in self.rows:
            fields, line = row.fields, row.line
            for index, name, unit in columns:
                yield Cell(fields[index], line, name, unit, line)
            if known:
                launch = self._part(row).launch
                sizes = {"grid": math.prod(launch.grid or (math.nan,)), "block": math.prod(launch.block or (math.nan,))}
                for name, index in known.items():
                    size = math.prod(sizes[what] for what in _KNOWN[name])
                    yield Cell(fields[index], line, name, self.units[index], line, size)

    def parts(self, convention: Convention) -> list[Part]:
        """A part per row."""
        columns = [(index, self.header[index], self.units[index]) for index in self.columns]
        parts = []
        for row in self.rows:
            found = self._part(row)
            for index, name, unit in columns:
                measured = measure(Cell(row.fields[index], row.line, name, unit), convention, self.path)
                if name in found.metrics and found.metrics[name] != measured.metric:
                    raise UserError(
                        f"{self.path}: line {row.line}: two columns are named {plain(name)} and differ; {HOW}"
                    )
                found.add(measured)
            found.launch = with_metrics(found.launch, found.metrics)
            parts.append(found)
        return parts

    def _part(self, row: Row) -> Part:
        return part(dict(zip(self.header, row.fields, strict=False)), row.line, FORM, self.path)


_LAUNCH_COLUMNS = frozenset(
    ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Kernel Time", "Context", "Stream", "Block Size"]
    + ["Grid Size", "Device", "CC"]
)

_KNOWN = {"launch__thread_count": ("grid", "block"), "launch__grid_size": ("grid",), "launch__block_size": ("block",)}
"""Metrics that are the product of sizes that the columns give too."""


def _is_metric(name: str) -> bool:
    return "_" in name and "/" not in name


def _is_of_launch(name: str) -> bool:
    return name in _LAUNCH_COLUMNS or "/Pop_Range" in name or "/Stop_Range" in name


def _from_name(name: str) -> str:
    return "%" if name.endswith(".pct") or ".pct_of_peak_sustained" in name else ""
