"""Reads what `ncu --csv` printed: the raw page, the details page, or both in one file, whatever is between them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from profiling.errors import UserError
from profiling.ncu import page_details, page_raw
from profiling.ncu.numbers import Cell, decide
from profiling.ncu.page_details import DetailsTable
from profiling.ncu.page_parts import Part, Reader
from profiling.ncu.page_raw import RawTable
from profiling.ncu.page_text import HOW, Table, read_page
from profiling.ncu.report import MISSING, OK, Metric, Report
from profiling.text import count

_CANDIDATES = 8
"""How many launches of one ID, process and kernel are looked at for one that a further part may belong to."""


@contextmanager
def _without_collector() -> Iterator[None]:
    """A page makes a million small objects and no cycles: looking through them time and again takes the collector a
    quarter of the time (2,243 metrics of 100 launches)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_without_collector()
def read_pages(path: Path, *, decimal: str | None = None) -> Report:
    """The report that a file of ncu's CSV output holds; `Report.notes` says what was decided while reading.

    Values are scaled to base units, as in an .ncu-rep, and are as exact as they were printed.

    Args:
        decimal: "point" or "comma", the decimal separator of the whole file; None: decide by its cells.

    Raises:
        UserError: the file cannot be read, holds no table with launches, or is damaged; a cell is no number; it cannot
            be known what the separators mean.
    """
    page = read_page(path)
    readers = [_reader(table, page.path, page.notes) for table in page.tables]
    convention = decide(_Cells(readers), page.path, decimal)
    if convention.note:
        page.notes.append(convention.note)
    launches = _joined([part for reader in readers for part in reader.parts(convention)], page.notes)
    if not launches:
        line = page.tables[0].line
        raise UserError(f"{page.path}: line {line}: a header and no row under it: nothing was profiled, or it was cut")
    metrics = _without_gaps([launch.metrics for launch in launches])
    forms = {page_details.FORM if isinstance(reader, DetailsTable) else page_raw.FORM: None for reader in readers}
    return Report(
        page.path,
        " and ".join(forms),
        tuple(launch.launch for launch in launches),
        tuple(metrics),
        tuple(tuple(launch.rules) for launch in launches),
        notes=tuple(dict.fromkeys(page.notes)),
        instances={(i, name): spread for i, launch in enumerate(launches) for name, spread in launch.instances.items()},
    )


@dataclass(frozen=True)
class _Cells:
    """All cells of a file, made anew whenever they are gone through: they may be many."""

    readers: Sequence[Reader]

    def __iter__(self) -> Iterator[Cell]:
        return chain.from_iterable(reader.cells() for reader in self.readers)


def _reader(table: Table, path: str, notes: list[str]) -> Reader:
    if "Kernel Name" not in table.header:
        raise UserError(f'{path}: line {table.line}: the header lacks the column "Kernel Name"; {HOW}')
    details = {"Section Name", "Metric Name", "Metric Value", "Metric Unit"} & set(table.header)
    return DetailsTable(table, path, notes) if details else RawTable(table, path, notes)


@dataclass
class _Seen:
    """How often parts repeated what was known, and how often they contradicted it."""

    repeated: int = 0
    clashed: int = 0


def _joined(parts: Sequence[Part], notes: list[str]) -> list[Part]:
    """Parts of one launch made one; what contradicts a launch of the same ID, process and kernel is another launch."""
    launches: list[Part] = []
    by_key: dict[tuple[object, ...], list[Part]] = {}
    seen = _Seen()
    for part in parts:
        same = by_key.setdefault(part.key, [])
        home = next((launch for launch in same[-_CANDIDATES:] if _agree(launch, part)), None)
        if home is None:
            seen.clashed += bool(same)
            same.append(part)
            launches.append(part)
        else:
            seen.repeated += part.form in home.form and part.metrics.keys() <= home.metrics.keys()
            _add(home, part)
    if seen.repeated:
        notes.append(f"{count(seen.repeated, 'launch', 'launches')} repeated in the file, read once")
    if seen.clashed:
        notes.append(
            f"{count(seen.clashed, 'launch', 'launches')} with the ID, process and kernel of another and other values, "
            "kept as launches of their own"
        )
    return launches


def _agree(known: Part, other: Part) -> bool:
    """Whether no metric that both have differs by more than what was printed of it."""
    return all(
        _same(known.metrics[name], metric, known.steps[name], other.steps[name])
        for name, metric in other.metrics.items()
        if name in known.metrics
    )


def _same(one: Metric, other: Metric, step: float, other_step: float) -> bool:
    if one.state != other.state:
        return MISSING in (one.state, other.state)
    if one.text != other.text or (one.unit != other.unit and one.unit and other.unit):
        return False
    if one.text or one.state != OK:
        return True
    # What is printed with the same digits is one value only where they are equal.
    slack = 0.0 if step == other_step else 0.51 * (step + other_step) + 1e-9 * abs(one.value)
    return abs(one.value - other.value) <= slack


def _add(home: Part, part: Part) -> None:
    """Adds what a further part knows of a launch: what it has alone, and the more exact one of two values."""
    for name, metric in part.metrics.items():
        mine = home.metrics.get(name)
        if mine is None:
            home.metrics[name], home.steps[name] = metric, part.steps[name]
            continue
        if metric.state == OK and (mine.state != OK or part.steps[name] < home.steps[name]):
            better, home.steps[name] = metric, part.steps[name]
        else:
            better = mine
        label, section = mine.label or metric.label, mine.section or metric.section
        home.metrics[name] = replace(better, label=label, section=section)
    home.rules.extend(rule for rule in part.rules if rule not in home.rules)
    home.instances = {**part.instances, **home.instances}
    home.form = home.form if part.form in home.form else f"{home.form}, {part.form}"
    launch, other = home.launch, part.launch
    home.launch = replace(
        launch,
        gpu=launch.gpu or other.gpu,
        cluster=launch.cluster or other.cluster,
        push_pop=launch.push_pop or other.push_pop,
        start_end=launch.start_end or other.start_end,
    )


def _without_gaps(launches: Sequence[dict[str, Metric]]) -> list[dict[str, Metric]]:
    """The metrics of each launch without those it has no value of while another launch does."""
    empty = {name for launch in launches for name, metric in launch.items() if metric.state == MISSING}
    filled = {name for launch in launches for name in empty if name in launch and launch[name].state != MISSING}
    if not filled:
        return list(launches)
    return [
        {name: metric for name, metric in launch.items() if metric.state != MISSING or name not in filled}
        for launch in launches
    ]
