"""Reads what `ncu --csv` printed: the raw page, the details page, or both in one file, whatever is between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from profiling.errors import UserError
from profiling.ncu import page_details, page_raw
from profiling.ncu.numbers import decide
from profiling.ncu.page_details import DetailsTable
from profiling.ncu.page_parts import Measured, Part, Reader
from profiling.ncu.page_raw import RawTable
from profiling.ncu.page_text import HOW, Table, read_page
from profiling.ncu.report import MISSING, OK, Metric, Report
from profiling.text import count

_CANDIDATES = 8
"""How many launches of one ID, process and kernel are looked at for one that a further part may belong to."""


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
    convention = decide([cell for reader in readers for cell in reader.cells()], page.path, decimal)
    if convention.note:
        page.notes.append(convention.note)
    launches = _joined([part for reader in readers for part in reader.parts(convention, page.notes)], page.notes)
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
        home = next((launch for launch in same[-_CANDIDATES:] if _agree(launch.metrics, part.metrics)), None)
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


def _agree(known: dict[str, Measured], other: dict[str, Measured]) -> bool:
    """Whether no metric that both have differs by more than what was printed of it."""
    for name, (metric, step) in other.items():
        if name not in known:
            continue
        mine = known[name]
        if mine.metric is metric or OK not in (metric.state, mine.metric.state):
            continue
        if metric.state != mine.metric.state:
            if MISSING in (metric.state, mine.metric.state):
                continue
            return False
        if metric.text != mine.metric.text or (metric.unit != mine.metric.unit and metric.unit and mine.metric.unit):
            return False
        slack = 0.51 * (step + mine.step) + 1e-9 * abs(metric.value)
        if not metric.text and abs(metric.value - mine.metric.value) > slack:
            return False
    return True


def _add(home: Part, part: Part) -> None:
    """Adds what a further part knows of a launch: what it has alone, and the more exact one of two values."""
    for name, measured in part.metrics.items():
        mine = home.metrics.get(name)
        if mine is None or mine.metric.state != OK:
            better = measured
        else:
            better = measured if measured.metric.state == OK and measured.step < mine.step else mine
        if mine is not None and mine.metric is not measured.metric:
            label = mine.metric.label or measured.metric.label
            section = mine.metric.section or measured.metric.section
            better = better._replace(metric=replace(better.metric, label=label, section=section))
        home.metrics[name] = better
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


def _without_gaps(launches: Sequence[dict[str, Measured]]) -> list[dict[str, Metric]]:
    """The metrics of each launch without those it has no value of while another launch does."""
    empty = {name for launch in launches for name, (metric, _) in launch.items() if metric.state == MISSING}
    filled = {name for launch in launches for name in empty if name in launch and launch[name].metric.state != MISSING}
    return [
        {name: metric for name, (metric, _) in launch.items() if not (metric.state == MISSING and name in filled)}
        for launch in launches
    ]
