"""One door for every form of report: .ncu-rep, CSV pages, and folders of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from profiling.errors import UserError
from profiling.ncu.container import MAGIC
from profiling.ncu.metrics import FACTS, number
from profiling.ncu.report import Report

SUFFIXES = (".ncu-rep", ".ncu-repz", ".csv", ".txt", ".log", ".tsv")
_SAME = 1e-3  # a page prints a duration with at least this many digits


def load(path: str | Path, *, decimal: str | None = None) -> pd.DataFrame:
    """The tidy table of a report or of a folder of reports: a row per (report, range, launch, metric).

    Columns: `profiling.ncu.report.COLUMNS`. ``value`` is in the base unit that ``unit`` names (ns, byte, hz, %, …), NaN
    where ``state`` is not "ok" or the metric is a ``text``; ``state`` is "ok", "n/a", "missing" (other launches of the
    report have it) or "not collected" (a summary looks for it, this report has it nowhere). Values of instanced metrics
    are not in here: ``instances`` counts them and `read(path, instances=True)` has them.

    Raises:
        UserError: as `read`.
    """
    frames = [report.frame(_uncollected(report)) for report in read_all([Path(path)], decimal=decimal)]
    if len(frames) == 1:
        return frames[0]
    joined = pd.concat(frames, ignore_index=True)
    for column in frames[0].columns:
        if isinstance(frames[0][column].dtype, pd.CategoricalDtype):
            joined[column] = joined[column].astype("category")
    return joined


def _uncollected(report: Report) -> list[str]:
    """The best name of each fact that no launch of the report has under any name."""
    there = {name for launch in report.metrics for name in launch}
    return [fact.names[0] for fact in FACTS.values() if there.isdisjoint(fact.names)]


def read(path: str | Path, *, decimal: str | None = None, instances: bool = False) -> Report:
    """One report file; what it is decides its content, not its name.

    ``decimal`` ("point" or "comma") says how the numbers of a CSV are written, where the file does not tell by itself.
    ``instances`` brings the values of instanced metrics of a .ncu-rep.

    Raises:
        UserError: no such file, or it is empty, damaged, cut short or no report; `ncu-report` is not installed.
    """
    path = Path(path)
    if decimal not in (None, "point", "comma"):
        raise UserError(f"--decimal: expected point or comma, got {decimal!r}")
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give one of its files, or read it with read_all")
    if not path.is_file():
        known = "is no regular file" if path.exists() else "there is no such file"
        raise UserError(f"{path}: {known}; expected a .ncu-rep or what `ncu --csv` prints")
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if not start:
        raise UserError(f"{path}: is empty; did ncu run to its end?")
    if start == MAGIC or path.suffix in (".ncu-rep", ".ncu-repz"):
        from profiling.ncu.binary import read_binary

        return read_binary(path, instances=instances)
    from profiling.ncu.pages import read_pages

    return read_pages(path, decimal=decimal)


def read_all(paths: Iterable[Path], *, decimal: str | None = None) -> list[Report]:
    """Every report, folders opened; a page exported from a .ncu-rep of the same folder is not counted twice.

    Raises:
        UserError: as `read`; a folder without a report. In a folder, what is no report is named in the notes of the
            first report instead.
    """
    found: list[Report] = []
    for path in paths:
        found += _folder(path, decimal) if path.is_dir() else [read(path, decimal=decimal)]
    return found


def _folder(folder: Path, decimal: str | None) -> list[Report]:
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(SUFFIXES))
    files.sort(key=lambda path: path.suffix != ".ncu-rep")
    reports: list[Report] = []
    notes: list[str] = []
    for path in files:
        try:
            report = read(path, decimal=decimal)
        except UserError as error:
            notes.append(f"left out: {error}")
            continue
        twin = next((other for other in reports if _same(report, other)), None)
        if twin is None:
            reports.append(report)
        else:
            notes.append(f"left out: {path} holds the launches of {twin.path} in another form")
    if not reports:
        why = notes[0] if notes else f"it has no file that ends in {', '.join(SUFFIXES)}"
        raise UserError(f"{folder}: holds no Nsight Compute report ({why})")
    reports[0] = replace(reports[0], notes=(*reports[0].notes, *notes))
    return sorted(reports, key=lambda report: report.path)


def _same(one: Report, other: Report) -> bool:
    """Whether two reports hold the same launches: kernels, shapes and durations agree one by one."""
    if len(one.launches) != len(other.launches):
        return False
    pairs = zip(_prints(one), _prints(other), strict=True)
    return all(a[:2] == b[:2] and a[2] > 0 and abs(a[2] - b[2]) <= _SAME * b[2] for a, b in pairs)


def _prints(report: Report) -> Sequence[tuple[object, object, float]]:
    durations = [number(metrics, "duration") for metrics in report.metrics]
    return [
        (launch.grid, launch.block, found.value if found else 0.0)
        for launch, found in zip(report.launches, durations, strict=True)
    ]
