"""Nsight Compute reports for tests: those of the test data, unpacked and read once, and made-up ones."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ncu_reports import needs_reader, unpack

from profiling.ncu import container
from profiling.ncu.metrics import FACTS
from profiling.ncu.reading import read
from profiling.ncu.report import KernelLaunch, Metric, Report
from profiling.ncu.summary import KernelSummary, summarise

_FOLDER = tempfile.TemporaryDirectory(prefix="ncu-reports-")

UNITS = {
    "duration": "ns", "sm_clock": "hz", "dram_rate": "byte/s", "dram_read": "byte", "dram_write": "byte",
    "tensor": "%", "tensor_active": "%", "issue": "%", "smem": "byte/block",
}  # fmt: skip


@functools.cache
def file(name: str) -> Path:
    """A file of the test data, such as "h200_cudnn.raw.csv"; every test of the process has the same copy."""
    return unpack(name, Path(_FOLDER.name))


@functools.cache
def _read(name: str, instances: bool) -> Report:
    return read(file(f"{name}.ncu-rep"), instances=instances)


def real(name: str, *, instances: bool = False) -> Report:
    """A report of the test data as the reader gives it; the test is skipped where NVIDIA's reader is absent."""
    needs_reader()
    return _read(name, instances)


def metrics(facts: Mapping[str, float], **named: float) -> dict[str, Metric]:
    """Metrics that say these facts, each under the fact's best name, and further ones by their own names."""
    found = {FACTS[fact].names[0]: (value, UNITS.get(fact, "%")) for fact, value in facts.items()}
    found |= {name: (value, "") for name, value in named.items()}
    return {name: Metric(name, value, unit=unit) for name, (value, unit) in found.items()}


def launch(kernel: str = "kernel", **changes: object) -> KernelLaunch:
    """A launch of 1,320 CTAs on an H200."""
    given = {"grid": (1320, 1, 1), "block": (128, 1, 1), "gpu": "NVIDIA H200", "capability": "9.0"} | changes
    return KernelLaunch("0", kernel, **given)  # type: ignore[arg-type]


def report(*launches: tuple[KernelLaunch, dict[str, Metric]], path: str = "made.ncu-rep", **changes: object) -> Report:
    """A report of these launches."""
    shapes, values = zip(*launches, strict=True) if launches else ((), ())
    return Report(path, "ncu-rep", shapes, values, **changes)  # type: ignore[arg-type]


def kernel(facts: Mapping[str, float], *, of: KernelLaunch | None = None, **named: float) -> KernelSummary:
    """The summary of one launch with these facts; of 1 ms on 132 SMs unless they say otherwise."""
    given = {"duration": 1e6, "sms": 132.0} | facts
    known = {fact: value for fact, value in given.items() if not math.isnan(value)}
    return summarise(report((of or launch(), metrics(known, **named))))[0]


def blocks(content: bytes) -> list[tuple[int, int, int]]:
    """(start, end, results) of each block of a .ncu-rep, by the reader's own walk."""
    found = []
    at = container._sized(content, len(container.MAGIC), "")
    while at < len(content):
        end = container._sized(content, at, "")
        fields = container._varints(content[at + 4 : end], "")
        stop = end + fields.get(container._PAYLOAD, 0)
        found.append((at, stop, fields.get(container._RESULTS, 0)))
        at = stop
    return found


def repeated(name: str, times: int) -> bytes:
    """The report with its last launch ``times`` times more."""
    content = file(f"{name}.ncu-rep").read_bytes()
    start, stop, _ = [block for block in blocks(content) if block[2]][-1]
    return content + content[start:stop] * times
