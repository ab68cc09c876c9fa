"""Reads .ncu-rep files through NVIDIA's `ncu-report` package, in a child process.

The native reader can crash on a damaged file, or never come back; in a process of its own that is one line here.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from profiling.errors import UserError
from profiling.ncu import container
from profiling.ncu.report import NOT_AVAILABLE, OK, KernelLaunch, Metric, Report, Rule

TIMEOUT_S = 120.0
MOST_READERS, LAUNCHES_PER_READER = 4, 16
"""A report of many launches is read by several processes: a launch of `--set full` takes the native reader 30 ms."""
_CHILD = Path(__file__).with_name("native.py")


def read_binary(path: Path, *, instances: bool = False, wanted: str = "", timeout_s: float = TIMEOUT_S) -> Report:
    """One .ncu-rep file.

    Values are in base units. With ``instances`` those of instanced metrics come along, else only their number.
    ``wanted`` is a regular expression of metric names: only those are brought, which is quicker; "" means all.

    Raises:
        UserError: `ncu-report` is not installed; the file is no report, cut short or damaged; the reader crashed, or
            took more than ``timeout_s`` seconds.
    """
    outside = container.inspect(path.read_bytes(), str(path))
    if find_spec("ncu_report") is None:
        raise UserError(
            f"{path}: reading .ncu-rep needs the optional package ncu-report (NVIDIA's licence): pip install "
            f"ncu-report; or export it where ncu is: ncu --import {path.name} --csv --page raw > {path.stem}.csv"
        )
    parts = max(1, min(os.cpu_count() or 1, MOST_READERS, outside.results // LAUNCHES_PER_READER))
    with ThreadPoolExecutor(parts) as pool:
        documents = list(
            pool.map(lambda part: _run_reader(path, instances, wanted, timeout_s, part, parts), range(parts))
        )
    if not all(document["readable"] for document in documents):
        raise UserError(f"{path}: NVIDIA's reader does not recognise it as a report; it is damaged, or of a newer ncu")
    return _report(path, outside, documents)


def _run_reader(path: Path, instances: bool, wanted: str, timeout_s: float, part: int, parts: int) -> dict[str, Any]:
    """What one reader process says of every ``parts``-th launch."""
    with tempfile.TemporaryDirectory(prefix="ncu-report-") as folder:
        output = Path(folder) / "report.json"
        words = [sys.executable, "-P", str(_CHILD), str(path.resolve()), str(output), "instances" if instances else ""]
        words += [str(part), str(parts), wanted]
        try:
            done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"{path}: NVIDIA's reader did not come back within {timeout_s:g} s; the file is damaged, or this "
                "machine is too small for it"
            ) from None
        if done.returncode < 0:
            raise UserError(
                f"{path}: NVIDIA's reader crashed on it (signal {-done.returncode}); the file is damaged: copy it "
                "again, or profile again"
            )
        if done.returncode or not output.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"{path}: NVIDIA's reader failed ({last}); the file is damaged, or of a newer ncu")
        document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return document


def _report(path: Path, outside: container.Container, documents: Sequence[Mapping[str, Any]]) -> Report:
    launches, metrics, instances, rules = [], [], {}, []
    for index in range(sum(len(document["launches"]) for document in documents)):
        document, place = documents[index % len(documents)], index // len(documents)
        launch, names = document["launches"][place], document["names"]
        found = {
            name: _metric(name, cell, names[name], launch["sections"].get(name, ""))
            for name, cell in launch["values"].items()
        }
        launches.append(_launch(index, launch, found))
        metrics.append(found)
        rules.append(tuple(_rule(rule) for rule in document["rules"][place]))
        for name, (ids, values) in document["instances"][place].items():
            instances[index, name] = (ids, values)
    notes = []
    if len(launches) != outside.results:
        notes.append(
            f"the file holds {outside.results} results and NVIDIA's reader gave {len(launches)}; the rest was not read"
        )
    if not launches:
        notes.append("the report holds no profiled kernel")
    return Report(
        str(path),
        "ncu-rep",
        tuple(launches),
        tuple(metrics),
        tuple(rules),
        outside.writer,
        outside.command,
        tuple(notes),
        instances,
    )


def _metric(name: str, cell: list[Any], fixed: list[str], section: str) -> Metric:
    value, count, unit = cell
    state, number, text = OK, float("nan"), ""
    if value is None:
        state = NOT_AVAILABLE  # an instanced metric may have values and no total: `instances` says so
    elif isinstance(value, str):
        text = value
    else:
        number = float(value)
        state = OK if number == number else NOT_AVAILABLE
    return Metric(name, number, text, unit or fixed[0], state, fixed[1], section, count)


def _launch(index: int, launch: Mapping[str, Any], metrics: Mapping[str, Metric]) -> KernelLaunch:
    def shape(what: str) -> tuple[int, ...]:
        values = [metrics[name].value for axis in "xyz" if (name := f"launch__{what}_dim_{axis}") in metrics]
        return tuple(int(v) for v in values) if len(values) == 3 and all(1 <= v < math.inf for v in values) else ()

    def text(name: str) -> str:
        return metrics[name].text if name in metrics else ""

    major, minor = (
        metrics.get(f"device__attribute_compute_capability_{part}", Metric("")).value for part in ("major", "minor")
    )
    cluster = shape("cluster")
    return KernelLaunch(
        id=str(index),
        kernel=launch["name"],
        range=launch["range"],
        kernel_full=launch["full_name"],
        grid=shape("grid"),
        block=shape("block"),
        cluster=cluster if any(n > 1 for n in cluster) else (),
        gpu=text("device__attribute_display_name"),
        capability=f"{int(major)}.{int(minor)}" if math.isfinite(major) and math.isfinite(minor) else "",
        push_pop=tuple(launch["push_pop"]),
        start_end=tuple(launch["start_end"]),
    )


def _rule(rule: Mapping[str, Any]) -> Rule:
    return Rule(
        rule["name"],
        rule["message"],
        rule["title"],
        rule["section"],
        rule["kind"],
        float(rule["speedup"] or "nan"),
        rule["scope"],
    )
