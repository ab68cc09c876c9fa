"""Why warps waited: both families of stall metrics, which name one reason differently, as shares of warp time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from profiling.ncu.metrics import DERIVED
from profiling.ncu.report import Metric

_COUNTED = re.compile(
    r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_(?:issue_active|warp_active))?\.(?:ratio|pct)"
)
_SAMPLED = re.compile(r"smsp__pcsamp_warps_issue_stalled_(\w+)")
SAME = {
    "warpgroup_arrive": "gmma", "no_instructions": "no_instruction", "no_inst": "no_instruction",
    "dispatch": "dispatch_stall", "imc": "imc_miss", "lg": "lg_throttle", "long_sb": "long_scoreboard",
    "math": "math_pipe_throttle", "mio": "mio_throttle", "short_sb": "short_scoreboard", "sleep": "sleeping",
    "tex": "tex_throttle",
}  # fmt: skip
"""Other names of reasons, those by which the source page abbreviates them among them."""

WORKING = ("selected", "not_selected")
"""Not a wait: the warp issued, or could have and another did."""

MEANING = {
    "barrier": "waiting for other warps at a CTA barrier: fewer barriers, more CTAs an SM, or warp specialisation",
    "branch_resolving": "waiting for a branch target: fewer branches in the inner loop",
    "dispatch_stall": "the dispatcher held the warp back",
    "drain": "waiting for stores at the end of the kernel",
    "gmma": "waiting for a warpgroup's MMA: more MMAs in flight, or other work between issue and wait",
    "imc_miss": "waiting for a constant: fewer different constants",
    "lg_throttle": "the queue for global and local memory is full: fewer or wider accesses",
    "long_scoreboard": "waiting for data from global or local memory, or at an mbarrier (SYNCS): more loads in flight, "
    "earlier, or fewer spills; `waits` of a recording tells barriers apart",
    "math_pipe_throttle": "waiting for a busy math pipe: fewer instructions of that pipe",
    "membar": "waiting for a memory fence",
    "mio_throttle": "the queue for shared memory and special functions is full: fewer or wider accesses",
    "misc": "other reasons",
    "no_instruction": "waiting for instructions: a smaller loop body, so that it fits the instruction cache",
    "short_scoreboard": "waiting for shared memory or special functions: more of them in flight, or fewer",
    "sleeping": "the warp slept by its own will, as polling loops do",
    "tex_throttle": "the texture queue is full",
    "wait": "fixed latency between dependent instructions: more warps or more independent instructions",
}


@dataclass(frozen=True)
class Stall:
    """One reason: `share` of all warp time in % (issuing included), and the metric it comes from."""

    reason: str
    share: float
    source: str
    grade: str = DERIVED

    @property
    def meaning(self) -> str:
        """What the reason means and what usually helps; "" for a reason not known here."""
        return MEANING.get(self.reason, "")


def stalls(metrics: Mapping[str, Metric]) -> tuple[Stall, ...]:
    """The reasons for which warps waited, most first; the counted family where the report has it, else the sampled one.

    Shares are of the family's total, which is all the time that warps were resident. Empty where neither was collected.
    """
    for family in (_COUNTED, _SAMPLED):
        found: dict[str, tuple[float, str]] = {}
        for name, metric in metrics.items():
            match = family.fullmatch(name)
            if match and 0 <= metric.value < math.inf and "not_issued" not in name:
                reason = SAME.get(match[1], match[1])
                found.setdefault(reason, (metric.value, name))
        total = sum(value for value, _ in found.values())
        if total > 0:
            ranked = sorted(found.items(), key=lambda item: -item[1][0])
            return tuple(
                Stall(reason, 100.0 * (value / total), name)
                for reason, (value, name) in ranked
                if reason not in WORKING and value > 0
            )
    return ()
