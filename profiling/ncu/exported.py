"""Reads .ncu-rep files without NVIDIA's `ncu-report` package, where ncu itself is: it prints their raw page."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from profiling.errors import UserError
from profiling.ncu import container
from profiling.ncu.pages import read_pages
from profiling.ncu.report import Report

TIMEOUT_S = 120.0
NOTE = "read through ncu --import, as the package ncu-report is not installed: values are as exact as ncu prints them"


def read_exported(path: Path, ncu: str, *, timeout_s: float = TIMEOUT_S) -> Report:
    """One .ncu-rep file, by the raw page that ``ncu`` prints of it; `Report.notes` says so.

    Raises:
        UserError: the file is no report, cut short or damaged; ncu fails on it, such as an older one, or
            takes more than ``timeout_s`` seconds.
    """
    outside = container.inspect(path.read_bytes(), str(path))
    words = [ncu, "--import", str(path.resolve()), "--csv", "--page", "raw"]
    try:
        done = subprocess.run(words, capture_output=True, timeout=timeout_s, env={**os.environ, "LC_ALL": "C"})
    except subprocess.TimeoutExpired:
        raise UserError(f"{path}: ncu --import did not come back within {timeout_s:g} s; the file is damaged") from None
    except OSError as error:
        raise UserError(f"{path}: {ncu} cannot be run ({error.strerror or error}); pip install ncu-report") from None
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines() or ["no message"]
        raise UserError(
            f"{path}: ncu --import failed ({said[-1].strip()}); pip install ncu-report reads it without ncu"
        )
    with tempfile.TemporaryDirectory(prefix="ncu-page-") as folder:
        page = Path(folder) / f"{path.stem}.csv"
        page.write_bytes(done.stdout)
        try:
            found = read_pages(page, decimal="point")
        except UserError as error:
            raise UserError(f"{path}: what ncu --import prints of it: {str(error).removeprefix(f'{page}: ')}") from None
    return replace(found, path=str(path), writer=outside.writer, command=outside.command, notes=(NOTE, *found.notes))
