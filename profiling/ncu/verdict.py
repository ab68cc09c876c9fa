"""What limits a kernel, in words, with the numbers that it rests on and, where arithmetic gives one, the gain in reach.

Verdicts are in the order in which to look at them: what distorts every other number comes first. A launch too small to
fill the GPU, spills and imbalance are named before a busy unit, and a kernel whose units all have room is
latency-bound: its warps wait, and the stall reasons say for what.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from profiling.ncu.metrics import Number
from profiling.ncu.summary import KernelSummary, busiest_pipe
from profiling.text import duration, percent, significant

SHORT_NS = 5_000
"""A launch costs a few µs itself; a kernel as short as that is bound by being launched."""
IDLE_SMS = 10.0
"""% of the SMs without a CTA, from which too few CTAs are a verdict."""
BUSY, NEAR = 80.0, 70.0
"""% of a unit's peak from which it is the limit (as in NVIDIA's own rule), and from which it is close to being it."""
IMBALANCED = 10.0
"""% of the SMs' time that perfectly even work would save, from which imbalance is a verdict."""
SPILLING = 1.0
"""% of all instructions that access local memory, from which spilling is a verdict."""
SPILL_TRAFFIC = 0.1
"""Bytes of local traffic per byte of L2 traffic, from which spilling is a verdict."""
TOP_STALLS = 3


@dataclass(frozen=True)
class Verdict:
    """One limit.

    Attributes:
        kind: tensor-bound, memory-bound, pipe-bound, issue-starved, latency-bound, imbalanced, spilling, launch-bound,
            or unknown.
        what: the kind with its object, such as "memory-bound (DRAM)".
        why: a sentence.
        evidence: names of the numbers it rests on (`KernelSummary.numbers`) or stall reasons.
        gain: the share of the duration, in [0, 1], that removing the limit alone could save at most; NaN where
            arithmetic does not give one. It is always derived.
    """

    kind: str
    what: str
    why: str
    evidence: tuple[str, ...]
    gain: float = math.nan


def verdicts(kernel: KernelSummary) -> list[Verdict]:
    """What limits the kernel, the first thing to look at first; "unknown" where the report holds too little to say."""
    found = [*_launch(kernel), *_spilling(kernel), *_imbalance(kernel), *_busy(kernel)]
    # A launch that leaves most of the GPU idle says little of what its few warps wait for.
    told = ("tensor-bound", "memory-bound", "pipe-bound", "issue-starved", "launch-bound")
    if not any(verdict.kind in told for verdict in found):
        found += _latency(kernel)
    return found or [_unknown(kernel)]


def _launch(kernel: KernelSummary) -> Iterator[Verdict]:
    sms, took = kernel.get("sms"), kernel.get("duration")
    ctas = math.prod(kernel.launch.grid) if kernel.launch.grid else math.nan
    idle = 1 - ctas / sms if sms > 0 else math.nan
    if idle >= IDLE_SMS / 100:
        yield Verdict(
            "launch-bound",
            "launch-bound (too few CTAs)",
            f"{ctas:,.0f} CTAs for {sms:,.0f} SMs leave {percent(idle)} of the GPU without work",
            ("sms",),
        )
    elif took < SHORT_NS:
        yield Verdict(
            "launch-bound",
            "launch-bound (short)",
            f"{duration(took)} is of the order of what a launch costs; put more work into one",
            ("duration",),
        )


def _spilling(kernel: KernelSummary) -> Iterator[Verdict]:
    local, all_of_them = kernel.get("local_instructions"), kernel.get("instructions")
    share = 100.0 * local / all_of_them if all_of_them > 0 else math.nan
    traffic, l2 = kernel.get("local_bytes"), kernel.get("l2_bytes")
    heavy = l2 > 0 and traffic / l2 >= SPILL_TRAFFIC
    if not (share >= SPILLING or heavy) or kernel.get("spills") == 0:
        return
    if kernel.get("spills") > 0:
        certain = "ncu counts them as spills"
    else:
        certain = "spills or arrays indexed at run time: this report does not tell which"
    parts = [f"{significant(share)} % of all instructions access local memory"] if share == share else []
    if traffic == traffic:
        parts.append(f"{_bytes(traffic)} of local traffic")
    yield Verdict(
        "spilling",
        "spilling",
        f"{', '.join(parts)} ({certain}); fewer registers a thread needed at once, or smaller tiles",
        tuple(
            fact for fact in ("local_instructions", "instructions", "local_bytes", "spills") if fact in kernel.numbers
        ),
    )


def _imbalance(kernel: KernelSummary) -> Iterator[Verdict]:
    lost, least = kernel.get("imbalance"), kernel.get("least_busy")
    if lost >= IMBALANCED and not list(_launch(kernel)):
        yield Verdict(
            "imbalanced",
            "imbalanced",
            f"the mean SM was active for {significant(100 - lost)} % of the busiest one's cycles"
            + (f", the least busy for {significant(least)} %" if least == least else "")
            + "; a schedule that spreads the work evenly saves up to that difference",
            tuple(fact for fact in ("imbalance", "least_busy") if fact in kernel.numbers),
            min(1.0, lost / 100.0),
        )


def _busy(kernel: KernelSummary) -> Iterator[Verdict]:
    """Units at their limit while SMs are active; the busiest first. A unit near its limit counts if none is at it."""
    active = 1 - kernel.get("imbalance") / 100 if 0 < kernel.get("imbalance") < 100 else 1.0
    rests = "tensor_active" if "tensor_active" in kernel.numbers else "tensor"
    tensor = kernel.get(rests) / (active if rests == "tensor" else 1.0)
    pipe = busiest_pipe(kernel)
    units = [
        ("tensor-bound", "tensor-bound", "the tensor pipe", tensor if kernel.has_tensor_work else math.nan, rests),
        ("memory-bound", "memory-bound (DRAM)", "DRAM", kernel.get("dram_throughput"), "dram_throughput"),
        ("memory-bound", "memory-bound (L2)", "the L2 cache", kernel.get("l2_throughput"), "l2_throughput"),
        (
            "memory-bound",
            "memory-bound (L1)",
            "L1 and shared memory",
            kernel.get("l1_throughput"),
            "l1_throughput",
        ),
        ("pipe-bound", f"pipe-bound ({pipe})", f"the {pipe} pipe", kernel.get("busiest_pipe"), "busiest_pipe"),
        ("issue-starved", "issue-starved", "instruction issue", kernel.get("issue"), "issue"),
    ]
    memory, named = kernel.get("memory_throughput"), [unit[3] for unit in units if unit[0] == "memory-bound"]
    level = BUSY if memory >= BUSY else NEAR
    if memory >= level and not any(value >= level for value in named):
        whole = "the memory system's busiest unit, which this report does not name,"
        units.append(("memory-bound", "memory-bound", whole, memory, "memory_throughput"))
    known = sorted((unit for unit in units if unit[3] == unit[3]), key=lambda unit: -unit[3])
    if max(kernel.get("sm_throughput"), NEAR) > max([unit[3] for unit in known], default=0.0):
        whole = "the SMs' busiest unit, which this report does not name,"
        known.insert(0, ("pipe-bound", "pipe-bound (SM)", whole, kernel.get("sm_throughput"), "sm_throughput"))
    limit = BUSY if known and known[0][3] >= BUSY else NEAR
    for kind, what, name, value, fact in known:
        if value >= limit:
            close = "" if value >= BUSY else "close to being "
            yield Verdict(kind, close + what, f"{name} is busy for {significant(value)} % of what it can do", (fact,))


def _latency(kernel: KernelSummary) -> Iterator[Verdict]:
    names = ("tensor", "sm_throughput", "memory_throughput", "l2_throughput", "issue")
    known = {fact: kernel.get(fact) for fact in names if fact in kernel.numbers}
    if not known:
        return
    most = max(known, key=lambda fact: known[fact])
    gain = min(1.0, max(0.0, 1 - known[most] / 100.0))
    room = f"no unit is busy for more than {significant(known[most])} % of what it can do"
    top = kernel.stalls[:TOP_STALLS]
    few = kernel.get("occupancy_theoretical")
    warps = (
        f"; {significant(few)} % occupancy ({kernel.limiters} allow no more) hides little"
        if few < 50 and kernel.limiters
        else ""
    )
    if top:
        reasons = ", ".join(f"{stall.reason} {stall.share:.0f} %" for stall in top)
        first = top[0]
        means = f": {first.meaning}" if first.meaning else ""
        yield Verdict(
            "latency-bound",
            f"latency-bound ({first.reason})",
            f"{room}, and warps wait, of all their time: {reasons}{warps}. {first.reason}{means}",
            (most, *(stall.source for stall in top)),
            gain,
        )
    else:
        yield Verdict(
            "latency-bound",
            "latency-bound (stalls not collected)",
            f"{room}{warps}; the report has no stall reasons: collect WarpStateStats, or --set full",
            (most,),
            gain,
        )


def _unknown(kernel: KernelSummary) -> Verdict:
    return Verdict(
        "unknown",
        "not known",
        "the report has neither throughputs nor cycles of the SMs; collect SpeedOfLight and WorkloadDistribution, or "
        "--set full",
        (),
    )


def _bytes(value: float) -> str:
    for name, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{significant(value / size)} {name}"
    return f"{value:.0f} B"


def evidence(kernel: KernelSummary, verdict: Verdict) -> list[tuple[str, Number]]:
    """The numbers behind a verdict, by fact; stall reasons as numbers in %."""
    by_source = {stall.source: stall for stall in kernel.stalls}
    found = []
    for name in verdict.evidence:
        if name in kernel.numbers:
            found.append((name, kernel.numbers[name]))
        elif name in by_source:
            stall = by_source[name]
            found.append((f"stall: {stall.reason}", Number(stall.share, "%", stall.grade, stall.source)))
    return found
