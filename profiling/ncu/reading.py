"""One door for every form of report: .ncu-rep, CSV pages, and folders of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from profiling.doctor import find_ncu
from profiling.errors import UserError
from profiling.ncu.container import MAGIC
from profiling.ncu.metrics import ELAPSED, FACTS, number, summary_pattern
from profiling.ncu.report import OK, Report

SUFFIXES = (".ncu-rep", ".ncu-repz", ".csv", ".txt", ".log", ".tsv")
BINARY = (".ncu-rep", ".ncu-repz")
_SAME = 0.006  # a page prints a duration with two decimals: 1.00 ms may be 1.005 ms


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


def read(path: str | Path, *, decimal: str | None = None, instances: bool = False, for_summary: bool = False) -> Report:
    """One report file; what it is decides its content, not its name.

    ``decimal`` ("point" or "comma") says how the numbers of a CSV are written, where the file does not tell by itself.
    ``instances`` brings the values of instanced metrics of a .ncu-rep. ``for_summary`` brings of a .ncu-rep only what a
    summary reads, which takes a third of the time.

    Raises:
        UserError: no such file, or it is empty, damaged, cut short or no report; of a .ncu-rep, neither `ncu-report`
            nor ncu is installed, or not the former and instances were asked for.
    """
    path = Path(path)
    _check(decimal)
    try:
        start = _start(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; expected a .ncu-rep or what `ncu --csv` prints") from None
    if start == MAGIC:
        from profiling.ncu.binary import read_binary

        ncu = None if find_spec("ncu_report") or instances else find_ncu()
        if ncu is not None:
            from profiling.ncu.exported import read_exported

            return read_exported(path, ncu)
        return read_binary(path, instances=instances, wanted=summary_pattern() if for_summary else "")
    from profiling.ncu.pages import read_pages

    try:
        return read_pages(path, decimal=decimal)
    except UserError as error:
        if path.suffix not in BINARY:
            raise
        said = str(error).removeprefix(f"{path}: ")
        raise UserError(
            f"{path}: is no Nsight Compute report (it starts with {start!r}, not with 'NVR'), nor a page of one: {said}"
        ) from None


def _check(decimal: str | None) -> None:
    if decimal not in (None, "point", "comma"):
        raise UserError(f"--decimal: expected point or comma, got {decimal!r}")


def _start(path: Path) -> bytes:
    """The first bytes of a file that is one."""
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give one of the reports in it")
    if not path.is_file():
        known = "is no regular file" if path.exists() else "there is no such file"
        raise UserError(f"{path}: {known}; expected a .ncu-rep or what `ncu --csv` prints")
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if not start:
        raise UserError(f"{path}: is empty; did ncu run to its end?")
    return start


def read_all(paths: Iterable[Path], *, decimal: str | None = None, for_summary: bool = False) -> list[Report]:
    """Every report, folders opened; a page exported from a .ncu-rep of the same folder is not counted twice.

    Raises:
        UserError: as `read`; a folder without a report. In a folder, what is no report is named in the notes of the
            first report instead.
    """
    _check(decimal)
    found: list[Report] = []
    for path in paths:
        if path.is_dir():
            found += _folder(path, decimal, for_summary)
        else:
            found.append(read(path, decimal=decimal, for_summary=for_summary))
    return found


def _folder(folder: Path, decimal: str | None, for_summary: bool) -> list[Report]:
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(SUFFIXES))
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}; expected a folder of Nsight Compute reports") from None
    found: list[Report] = []
    notes: list[str] = []
    for path in files:
        try:
            found.append(read(path, decimal=decimal, for_summary=for_summary))
        except UserError as error:
            notes.append(f"left out: {error}")
    reports: list[Report] = []
    for report in sorted(found, key=lambda report: (report.form != "ncu-rep", -_size(report))):  # the fullest first
        twin = next((other for other in reports if _same(report, other)), None)
        if twin is None:
            reports.append(report)
        else:
            notes.append(f"left out: {report.path} holds the launches of {twin.path} in another form")
    if not reports:
        why = notes[0] if notes else f"it has no file that ends in {', '.join(SUFFIXES)}"
        raise UserError(f"{folder}: holds no Nsight Compute report ({why})")
    reports.sort(key=lambda report: report.path)
    return [replace(reports[0], notes=(*reports[0].notes, *notes)), *reports[1:]]


def _size(report: Report) -> int:
    return sum(map(len, report.metrics))


def _same(one: Report, other: Report) -> bool:
    """Whether two reports hold the same launches: shapes, durations and the cycles that both count agree one by one.

    Two measurements of one launch may well take equally long; hardly ever do they take as many cycles.
    """
    if len(one.launches) != len(other.launches):
        return False
    slack = 0.0 if one.form == other.form else _SAME
    for a, b, here, there in zip(one.launches, other.launches, one.metrics, other.metrics, strict=True):
        took, before = number(here, "duration"), number(there, "duration")
        if (a.grid, a.block) != (b.grid, b.block) or took is None or before is None or before.value <= 0:
            return False
        if abs(took.value - before.value) > slack * before.value:
            return False
        counted = [name for name in ELAPSED if name in here and name in there]
        if any(
            here[name].state == there[name].state == OK and here[name].value != there[name].value for name in counted
        ):
            return False
    return True
