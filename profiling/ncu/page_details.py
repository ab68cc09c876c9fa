"""The details page: a row per metric of a section, under the label that ncu shows, and a row per rule's result."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from profiling.errors import UserError
from profiling.ncu.numbers import TEXTS, Cell, Convention
from profiling.ncu.page_parts import Part, measure, part, with_metrics
from profiling.ncu.page_text import HOW, Row, Table
from profiling.ncu.report import Rule
from profiling.text import count, plain

FORM = "details page"
BY_NAME = "Command line profiler metrics"
KINDS = {"OPT": "optimization", "WRN": "warning", "INF": "info", "ERR": "error"}

_NAME = re.compile(r"[A-Za-z][\w.:]*_[\w.:]*")
_LABEL_AND_NAME = re.compile(r"(?P<label>.*\S)[\s(\[]+(?P<name>[A-Za-z][\w.:]*__[\w.:]+)[)\]]?")


@cache
def labels() -> dict[str, dict[str, str]]:
    """Metric names by section and label, as Nsight Compute 2022.3 to 2025.3 show them.

    They were read from its reports; those whose page was at hand too were compared with it value by value. A label
    that stands for two metrics, in one version or in different ones, is not among them.
    """
    found: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("labels.json").read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True)
class Entry:
    """A metric's row: its name where it is known, the label shown, and the cell."""

    part: int
    name: str
    label: str
    section: str
    unit: str
    text: str
    line: int


class DetailsTable:
    """One table of the details page. Raises UserError where columns are missing or a row does not fit them."""

    def __init__(self, table: Table, path: str, notes: list[str]) -> None:
        self.path = path
        self.header = table.header
        self.at = {name: index for index, name in reversed(list(enumerate(table.header)))}
        missing = [name for name in ("Section Name", "Metric Name", "Metric Value") if name not in self.at]
        if missing:
            raise UserError(f'{path}: line {table.line}: the header lacks the column "{missing[0]}"; {HOW}')
        self.found: dict[tuple[object, ...], int] = {}
        self.empty: list[Part] = []
        self.launches: dict[tuple[str, ...], int] = {}
        self.entries: list[Entry] = []
        self.rules: list[tuple[int, Rule]] = []
        for row in table.rows:
            self._take(row)
        self._separate(notes)

    def _take(self, row: Row) -> None:
        fields = row.fields
        if not any(fields):
            return
        if len(fields) <= self.at["Metric Value"] or any(fields[len(self.header) :]):
            raise UserError(
                f"{self.path}: line {row.line}: a row of {len(fields)} columns under a header of {len(self.header)}, "
                f"where a metric's has {self.at['Metric Value'] + 1}: the file is cut or damaged; {HOW}"
            )
        owner = self._owner(row)
        rule = self._field(row, "Rule Name")
        if rule:
            self.rules.append((owner, self._rule(row, rule)))
        label = self._field(row, "Metric Name") or self._field(row, "Body Item Label")
        if label or self._field(row, "Metric Value"):
            section = self._field(row, "Section Name")
            name, label = metric_name(section, label)
            text, unit = self._field(row, "Metric Value"), self._field(row, "Metric Unit")
            self.entries.append(Entry(owner, name, label, section, unit, text, row.line))

    def _owner(self, row: Row) -> int:
        """The number of the part that the row belongs to; thousands of rows say the same of one launch."""
        identity = tuple(row.fields[: self.at["Section Name"]])
        if identity not in self.launches:
            fields = dict(zip(self.header, identity, strict=False))
            fresh = part(fields, row.line, FORM, self.path)
            if fresh.key not in self.found:
                self.found[fresh.key] = len(self.empty)
                self.empty.append(fresh)
            self.launches[identity] = self.found[fresh.key]
        return self.launches[identity]

    def _field(self, row: Row, name: str) -> str:
        index = self.at.get(name, len(row.fields))
        return row.fields[index].strip() if index < len(row.fields) else ""

    def _rule(self, row: Row, name: str) -> Rule:
        kind = self._field(row, "Rule Type")
        speedup = self._field(row, "Estimated Speedup")
        try:
            # It is printed with four significant digits, so that its one separator is the decimal's.
            percent = float(speedup.replace(",", ".").rstrip("% ")) if speedup else math.nan
        except ValueError:
            raise UserError(
                f"{self.path}: line {row.line}: the estimated speedup of {plain(name)} is {plain(speedup, 40)!r}, "
                "which is no number: correct the cell, or export the page again"
            ) from None
        return Rule(
            name=name,
            message=self._field(row, "Rule Description"),
            section=self._field(row, "Section Name"),
            kind=KINDS.get(kind, kind.lower()),
            speedup_pct=percent,
            speedup_scope=self._field(row, "Estimated Speedup Type"),
        )

    def _separate(self, notes: list[str]) -> None:
        """Gives rows of one launch and name that differ names of their own, and drops those that repeat another."""
        texts: dict[tuple[int, str], dict[tuple[str, str], Entry]] = {}
        for entry in self.entries:
            texts.setdefault((entry.part, entry.name), {}).setdefault((entry.text, entry.unit), entry)
        kept: list[Entry] = []
        told: list[str] = []
        for different in texts.values():
            if len(different) == 1:
                kept.extend(different.values())
                continue
            # One label, several metrics: which is which, the page does not say.
            first = next(iter(different.values()))
            told.append(first.label or first.name)
            for number, entry in enumerate(different.values(), 1):
                base = _unknown(entry.section, entry.label)
                kept.append(replace(entry, name=base if number == 1 else f"{base} ({number})"))
        if told:
            notes.append(
                f"{count(len(told), 'label')} of the details page with several values numbered in the order of the "
                f"file: {plain(', '.join(dict.fromkeys(told)), 80)}"
            )
        self.entries = sorted(kept, key=lambda entry: entry.line)

    def cells(self) -> Iterator[Cell]:
        """Every cell that may hold a number."""
        for entry in self.entries:
            if entry.name not in TEXTS:
                launch = self.empty[entry.part].launch
                known = math.nan
                if entry.name == "launch__thread_count" and launch.grid and launch.block:
                    known = math.prod(launch.grid) * math.prod(launch.block)
                yield Cell(entry.text, entry.line, entry.name, entry.unit, entry.part, known)

    def parts(self, convention: Convention) -> list[Part]:
        """A part per launch."""
        parts = [replace(found, metrics={}, steps={}, rules=[], instances={}) for found in self.empty]
        for entry in self.entries:
            cell = Cell(entry.text, entry.line, entry.name, entry.unit)
            measured = measure(cell, convention, self.path)
            metric = replace(measured.metric, label=entry.label, section=entry.section)
            parts[entry.part].add(measured._replace(metric=metric))
        for number, rule in self.rules:
            parts[number].rules.append(rule)
        for found in parts:
            found.launch = with_metrics(found.launch, found.metrics)
        return parts


def metric_name(section: str, label: str) -> tuple[str, str]:
    """(name, label) of what a row shows as its metric: a label, with --print-metric-name a name, or both."""
    if section == BY_NAME or _NAME.fullmatch(label):
        return label, ""
    if both := _LABEL_AND_NAME.fullmatch(label):
        return both["name"], both["label"]
    return labels().get(section, {}).get(label) or _unknown(section, label), label


def _unknown(section: str, label: str) -> str:
    return f"{section} :: {label}"
