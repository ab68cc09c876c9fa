"""Reads .ncu-rep files without NVIDIA's `ncu-report` package, where ncu itself is: it prints their raw page."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from profiling.errors import UserError
from profiling.ncu import container
from profiling.ncu.collection import process_group
from profiling.ncu.pages import read_pages
from profiling.ncu.report import Report
from profiling.text import plain

TIMEOUT_S = 120.0
OTHERWISE = "; pip install ncu-report reads it without ncu"
NOTE = (
    "read through ncu --import, as the package ncu-report is not installed: values are as exact as ncu prints them, "
    "and NVIDIA's own rules are not among them"
)


def read_exported(path: Path, ncu: str, *, timeout_s: float = TIMEOUT_S) -> Report:
    """One .ncu-rep file, by the raw page that ``ncu`` prints of it; `Report.notes` says so.

    Raises:
        UserError: the file is no report, cut short or damaged; ncu fails on it, such as an older one, or takes more
            than ``timeout_s`` seconds.
    """
    outside = container.inspect(path.read_bytes(), str(path))
    printed = printed_page(path, ncu, ("raw",), timeout_s)
    with tempfile.TemporaryDirectory(prefix="ncu-page-") as folder:
        page = Path(folder) / f"{path.stem}.csv"
        page.write_bytes(printed)
        try:
            found = read_pages(page, decimal="point")
        except UserError as error:
            raise UserError(f"{path}: what ncu --import prints of it: {str(error).removeprefix(f'{page}: ')}") from None
    notes = [NOTE, *(note for note in found.notes if not note.endswith("as asked"))]  # nobody asked: LC_ALL says it
    if len(found.launches) != outside.results:
        notes.append(f"the file holds {outside.results} results and ncu printed {len(found.launches)}")
    return replace(found, path=str(path), writer=outside.writer, command=outside.command, notes=tuple(notes))


def printed_page(path: Path, ncu: str, page: tuple[str, ...], timeout_s: float = TIMEOUT_S) -> bytes:
    """What ``ncu`` prints of a report as a page of CSV: its name, and further words of the command.

    Raises:
        UserError: ncu fails, or takes more than ``timeout_s`` seconds.
    """
    words = ["env", "LC_ALL=C", ncu, "--import", str(path.resolve()), "--csv", "--page", *page]
    try:
        with process_group(words) as process:
            printed, complained = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{path}: ncu --import did not come back within {timeout_s:g} s; the file is damaged, or very large"
        ) from None
    if process.returncode:
        said = (printed + complained).decode(errors="replace").strip().splitlines() or ["no message"]
        last = plain(said[-1], 300)
        otherwise = OTHERWISE if page == ("raw",) else ""
        raise UserError(f"{path}: ncu --import failed ({last}){otherwise}")
    return printed
