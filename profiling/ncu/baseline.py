"""Two reports side by side: kernels matched by name and launch shape; a difference exceeds the noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from profiling.ncu.report import Report
from profiling.ncu.summary import KernelSummary
from profiling.ncu.words import name_of

COMPARED = (
    "duration", "tensor", "sm_throughput", "memory_throughput", "dram_throughput", "l2_throughput", "dram_bytes",
    "l2_bytes", "issue", "occupancy_theoretical", "occupancy_achieved", "registers", "smem", "imbalance",
    "instructions", "local_bytes", "sm_clock",
)  # fmt: skip
EXACT = ("registers", "smem", "occupancy_theoretical")
"""What the compiler fixed: it has no noise, but a page prints it with two decimals."""
PRINTED = 0.005
CLOCKS_DIFFER = 0.02


@dataclass(frozen=True)
class Delta:
    """One number in both: `change` relative to the baseline; `differs` where it exceeds `noise`."""

    fact: str
    before: float
    after: float
    unit: str
    change: float
    noise: float

    @property
    def differs(self) -> bool:
        return abs(self.change) > self.noise or (math.isinf(self.change))


@dataclass(frozen=True, eq=False)
class Match:
    """A kernel in both reports. `same_shape` is False where only the names agree."""

    kernel: KernelSummary
    baseline: KernelSummary
    same_shape: bool
    deltas: tuple[Delta, ...]


@dataclass(frozen=True, eq=False)
class Comparison:
    """`warnings` come first: what else differs than the kernels. Unmatched kernels are named, never dropped."""

    matches: tuple[Match, ...]
    only_here: tuple[KernelSummary, ...]
    only_baseline: tuple[KernelSummary, ...]
    warnings: tuple[str, ...]


def compare(
    report: Report, kernels: Sequence[KernelSummary], baseline: Report, before: Sequence[KernelSummary]
) -> Comparison:
    """Match ``kernels`` against those of the baseline: first by name and shape, then, where one of a name is left on
    either side, by name alone."""
    exact = 0.0 if report.form == baseline.form == "ncu-rep" else PRINTED
    left = list(before)
    matches: list[Match] = []
    rest: list[KernelSummary] = []
    for kernel in kernels:
        found = next((other for other in left if _key(other) == _key(kernel)), None)
        if found is None:
            rest.append(kernel)
        else:
            left.remove(found)
            matches.append(Match(kernel, found, True, _deltas(kernel, found, exact)))
    unmatched = []
    for kernel in rest:
        same_name = [other for other in left if _name(other) == _name(kernel)]
        if len(same_name) == 1 and sum(_name(other) == _name(kernel) for other in rest) == 1:
            left.remove(same_name[0])
            matches.append(Match(kernel, same_name[0], False, _deltas(kernel, same_name[0], exact)))
        else:
            unmatched.append(kernel)
    warnings = (*_versions(report, baseline), *_circumstances(matches))
    return Comparison(tuple(matches), tuple(unmatched), tuple(left), warnings)


def _name(kernel: KernelSummary) -> str:
    return kernel.launch.kernel_full or kernel.launch.kernel


def _key(kernel: KernelSummary) -> tuple[object, ...]:
    return _name(kernel), kernel.launch.grid, kernel.launch.block, kernel.launch.cluster


def _deltas(kernel: KernelSummary, baseline: KernelSummary, exact: float) -> tuple[Delta, ...]:
    noise = max(kernel.noise, baseline.noise)
    found = []
    for fact in COMPARED:
        before, after = baseline.numbers.get(fact), kernel.numbers.get(fact)
        if before and after and before.source == after.source:
            if before.value:
                change = after.value / before.value - 1
            else:
                change = 0.0 if after.value == 0 else math.inf
            found.append(Delta(fact, before.value, after.value, after.unit, change, exact if fact in EXACT else noise))
    return tuple(found)


def _versions(report: Report, baseline: Report) -> list[str]:
    found = []
    if report.writer and baseline.writer and report.writer != baseline.writer:
        found.append(
            f"written by different versions of ncu ({baseline.writer} and {report.writer}): a metric may have changed "
            "its meaning"
        )
    return found


def _circumstances(matches: Sequence[Match]) -> list[str]:
    """Differing GPUs and clocks, each said once."""
    found: dict[str, None] = {}
    for match in matches:
        one, other = match.baseline.launch, match.kernel.launch
        for what, before, after in (
            ("GPUs", one.gpu, other.gpu),
            ("compute capabilities", one.capability, other.capability),
        ):
            if before and after and before != after:
                found[f"measured on different {what} ({before} and {after}): no delta is the kernel's alone"] = None
        clock, now = match.baseline.get("sm_clock"), match.kernel.get("sm_clock")
        if clock > 0 and abs(now / clock - 1) > CLOCKS_DIFFER:
            found[
                f"{match.kernel.name}: the SMs ran at {clock / 1e9:.2f} GHz before and {now / 1e9:.2f} GHz now; "
                "durations differ by that alone"
            ] = None
        for fact in COMPARED:
            there, here = match.baseline.numbers.get(fact), match.kernel.numbers.get(fact)
            if there and here and there.source != here.source:
                found[
                    f"{match.kernel.name}: {name_of(fact)} not compared, it comes from different metrics "
                    f"({there.source} and {here.source})"
                ] = None
        if not match.same_shape:
            found[
                f"{match.kernel.name}: matched by name only, its launch shape changed from grid {one.grid} block "
                f"{one.block} to grid {other.grid} block {other.block}"
            ] = None
    return list(found)
