"""What a report says of each kernel: its numbers, each with grade and source.

Launches of one kernel with one shape on one GPU are one row: its numbers are those of the launch of median duration,
and the spread of durations stands beside.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from profiling.errors import UserError
from profiling.ncu.metrics import DERIVED, ELAPSED, FACTS, PIPES, Number, number, tensor_operations, why_absent
from profiling.ncu.report import KernelLaunch, Metric, Report, Rule
from profiling.ncu.stalls import Stall, stalls

SECTOR_BYTES = 32
NO_TENSOR_WORK = 1.5
"""% of the tensor pipe below which a kernel does no tensor work: kernels without an MMA read up to 0.96 % on Hopper."""

LEAST_NOISE = 0.01
"""No two launches are compared more finely than this, as a share: ncu replays a launch pass by pass."""


@dataclass(frozen=True, eq=False)
class KernelSummary:
    """One kernel with one launch shape in one report.

    Attributes:
        launch: the launch of median duration, whose numbers these are; index: its place in the report.
        launches: how many there were; durations: of each, ns, NaN where not collected.
        share: of the summed duration of all kernels of the report, in [0, 1]; NaN where a duration is missing.
        numbers: by fact, see `profiling.ncu.metrics.FACTS`, and derived ones; absent: facts without a number, and why.
        noise: the relative difference that a comparison must exceed, and noise_source where that figure comes from.
        limiters: what allows no more CTAs on an SM, "" where unknown.
    """

    report: str
    index: int
    launch: KernelLaunch
    launches: int
    durations: tuple[float, ...]
    share: float
    numbers: Mapping[str, Number]
    absent: Mapping[str, str]
    stalls: tuple[Stall, ...]
    rules: tuple[Rule, ...]
    limiters: str
    noise: float
    noise_source: str
    metrics: Mapping[str, Metric] = field(repr=False, default_factory=dict)

    def get(self, fact: str) -> float:
        """The number's value, NaN where there is none."""
        found = self.numbers.get(fact)
        return found.value if found else math.nan

    @property
    def name(self) -> str:
        return self.launch.kernel

    @property
    def has_tensor_work(self) -> bool:
        """Whether the tensor pipe did more than a kernel without an MMA shows; False where it was not collected."""
        return max(_known([self.get("tensor"), self.get("tensor_active")]), default=0.0) >= NO_TENSOR_WORK


def pattern_of(kernel: str) -> re.Pattern[str]:
    """The regular expression that ``--kernel`` gives. Raises UserError where it is none."""
    try:
        return re.compile(kernel)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"--kernel {kernel!r} is not a regular expression ({error}); escape brackets with \\") from None


def select(report: Report, kernel: str | None = None, nvtx: str | None = None) -> Report:
    """The launches whose kernel name matches the regular expression ``kernel`` and that lie in a range that holds
    ``nvtx`` ("message", or "domain:message"; push/pop and start/end alike).

    Raises:
        UserError: not a regular expression, or nothing matches: the names that there are.
    """
    pattern = pattern_of(kernel or "")
    if not report.launches:
        raise UserError(f"{report.path}: holds no profiled kernel; did ncu's filter match anything?")
    named = [i for i, launch in enumerate(report.launches) if pattern.search(launch.kernel_full or launch.kernel)]
    if not named:
        names = ", ".join(dict.fromkeys(launch.kernel for launch in report.launches))
        raise UserError(f"--kernel {kernel!r} matches none of {report.path}; it holds {names}")
    if nvtx is None:
        return report.select(named)
    inside = [i for i in named if any(nvtx in name for name in _ranges(report.launches[i]))]
    if not inside:
        known = dict.fromkeys(name for launch in report.launches for name in _ranges(launch))
        there = f"it has {', '.join(known)}" if known else "none was recorded: profile with ncu --nvtx"
        raise UserError(f"--nvtx {nvtx!r} matches no range of {report.path}; {there}")
    return report.select(inside)


def _ranges(launch: KernelLaunch) -> tuple[str, ...]:
    return launch.push_pop + launch.start_end


def summarise(report: Report) -> list[KernelSummary]:
    """Each kernel of a report, longest in sum first; in the file's order where durations are missing."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, launch in enumerate(report.launches):
        key = (launch.kernel_full or launch.kernel, launch.grid, launch.block, launch.cluster, launch.gpu)
        groups.setdefault(key, []).append(index)
    durations = [_duration(metrics) for metrics in report.metrics]
    total = sum(durations)
    found = [_summary(report, members, durations, total) for members in groups.values()]
    return sorted(found, key=lambda kernel: -kernel.share if kernel.share == kernel.share else 0.0)


def _duration(metrics: Mapping[str, Metric]) -> float:
    found = number(metrics, "duration")
    return found.value if found else math.nan


def _summary(report: Report, members: Sequence[int], durations: Sequence[float], total: float) -> KernelSummary:
    own = [durations[i] for i in members]
    typical = (
        members[0] if any(map(math.isnan, own)) else sorted(members, key=lambda i: durations[i])[len(members) // 2]
    )
    metrics = report.metrics[typical]
    numbers = {fact: found for fact in FACTS if (found := number(metrics, fact)) is not None}
    numbers |= _derived(numbers, metrics)
    noise, noise_source = _noise(own, metrics)
    return KernelSummary(
        report=report.path,
        index=typical,
        launch=report.launches[typical],
        launches=len(members),
        durations=tuple(own),
        share=sum(own) / total if total > 0 else math.nan,
        numbers=numbers,
        absent={fact: why_absent(metrics, fact) for fact in FACTS if fact not in numbers},
        stalls=stalls(metrics),
        rules=report.rules[typical] if report.rules else (),
        limiters=_limiters(numbers),
        noise=noise,
        noise_source=noise_source,
        metrics=metrics,
    )


def _derived(numbers: Mapping[str, Number], metrics: Mapping[str, Metric]) -> dict[str, Number]:
    """Arithmetic on metrics, where the report has no metric of its own for it."""
    made: dict[str, Number] = {}

    def value(fact: str) -> float:
        found = made.get(fact) or numbers.get(fact)
        return found.value if found else math.nan

    def add(fact: str, result: float, unit: str, *sources: str) -> None:
        if fact not in numbers and math.isfinite(result):
            names = dict.fromkeys(s.source for source in sources if (s := made.get(source) or numbers.get(source)))
            made[fact] = Number(result, unit, DERIVED, ", ".join(names))

    seconds = value("duration") / 1e9 or math.nan
    add("smem", _sum(value("smem_static"), value("smem_dynamic")), "byte/block", "smem_static", "smem_dynamic")
    add("dram_bytes", value("dram_read") + value("dram_write"), "byte", "dram_read", "dram_write")
    add("dram_rate", value("dram_bytes") / seconds, "byte/s", "dram_bytes", "duration")
    add("l2_bytes", value("l2_sectors") * SECTOR_BYTES, "byte", "l2_sectors")
    add("l2_rate", value("l2_bytes") / seconds, "byte/s", "l2_bytes", "duration")
    add("local_instructions", _sum(value("local_loads"), value("local_stores")), "inst", "local_loads", "local_stores")
    local = ("local_sectors_read", "local_sectors_written")
    add("local_bytes", _sum(*map(value, local)) * SECTOR_BYTES, "byte", *local)
    mean, most, least = (value(f"cycles_active_{which}") for which in ("avg", "max", "min"))
    if most > 0:
        add("imbalance", 100.0 * (1 - mean / most), "%", "cycles_active_avg", "cycles_active_max")
        add("least_busy", 100.0 * least / most, "%", "cycles_active_min", "cycles_active_max")
    pipe = max(
        ((m.value, pipe, name) for pipe, name in PIPES.items() if (m := metrics.get(name)) and math.isfinite(m.value)),
        default=None,
    )
    if pipe:
        made["busiest_pipe"] = Number(pipe[0], "%", "measured", pipe[2])
    operations = tensor_operations(metrics)
    if operations and operations.value > 0:
        made["tensor_operations"] = operations
        add("tensor_rate", operations.value / seconds, "1/s", "tensor_operations", "duration")
    return made


def busiest_pipe(kernel: KernelSummary) -> str:
    """The name of the pipe behind the number `busiest_pipe`, such as "xu"; "" where no pipe was collected."""
    found = kernel.numbers.get("busiest_pipe")
    return next((pipe for pipe, name in PIPES.items() if found and name == found.source), "")


def _limiters(numbers: Mapping[str, Number]) -> str:
    limits = {
        "registers": "limit_registers",
        "SMEM": "limit_smem",
        "warps": "limit_warps",
        "the SM's CTA slots": "limit_blocks",
        "barriers": "limit_barriers",
    }
    known = {words: numbers[fact].value for words, fact in limits.items() if fact in numbers}
    if not known:
        return ""
    least = min(known.values())
    return " and ".join(words for words, value in known.items() if value == least)


def _noise(durations: Sequence[float], metrics: Mapping[str, Metric]) -> tuple[float, str]:
    """How finely the kernel may be compared, as a share of its duration.

    Of several launches the interquartile range; of one, how far the passes that read the launch's length in SM cycles
    lie apart. Never below LEAST_NOISE.
    """
    known = _known(durations)
    if len(known) > 2:
        low, middle, high = np.percentile(known, [25, 50, 75])
        found, source = float((high - low) / middle) if middle else 0.0, f"quartiles of {len(known)} launches"
    else:
        cycles = [metrics[name].value for name in ELAPSED if name in metrics and 0 < metrics[name].value < math.inf]
        found = max(cycles) / min(cycles) - 1 if len(cycles) > 1 else 0.0
        source = "elapsed cycles in different passes" if len(cycles) > 1 else "a least value"
    return (found, source) if found > LEAST_NOISE else (LEAST_NOISE, f"a least value ({source}: {found * 100:.1f} %)")


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if value == value]


def _sum(*values: float) -> float:
    """The sum of what is known; NaN where nothing is."""
    known = _known(values)
    return sum(known) if known else math.nan
