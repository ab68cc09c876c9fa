"""A summary's numbers and names as a reader sees them."""

from __future__ import annotations

import math

from profiling.ncu.metrics import FACTS, Number
from profiling.ncu.report import KernelLaunch
from profiling.text import duration, significant

DERIVED_WORDS = {
    "dram_bytes": "DRAM bytes",
    "l2_rate": "L2 bandwidth",
    "local_instructions": "local-memory instructions",
    "local_bytes": "local-memory traffic",
    "imbalance": "SM time that even work would save",
    "least_busy": "least busy SM, of the busiest",
    "busiest_pipe": "busiest other pipe",
    "tensor_operations": "tensor operations executed",
    "tensor_rate": "tensor rate, executed",
    "useful_operations": "useful operations",
    "useful_rate": "useful rate",
    "tensor_peak": "tensor peak at this clock",
    "peak_share": "useful rate, of the tensor peak",
    "executed_per_useful": "operations executed per useful one",
}

SHOWN = (
    "duration", "sm_clock", "sms", "waves", "registers", "smem", "occupancy_theoretical", "occupancy_achieved",
    "tensor", "tensor_active", "busiest_pipe", "sm_throughput", "memory_throughput", "issue", "ipc", "eligible",
    "dram_throughput", "dram_bytes", "dram_rate", "l2_throughput", "l2_bytes", "l2_rate", "l2_hit", "l1_throughput",
    "shared_wavefronts", "cycles_active_min", "cycles_active_avg", "cycles_active_max", "imbalance", "spills",
    "local_instructions", "local_bytes", "instructions", "tensor_operations", "tensor_rate", "passes",
)  # fmt: skip
"""The facts that a reader is shown, in this order; the others are only in the JSON."""

_SCALES = {
    "byte": ("B", ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))),
    "byte/s": ("B/s", ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"))),
    "hz": ("Hz", ((1e9, "GHz"), (1e6, "MHz"))),
    "1/s": ("op/s", ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"))),
    "byte/block": ("B", ((1e3, "kB"),)),
}


def name_of(fact: str) -> str:
    """The fact's words."""
    return FACTS[fact].words if fact in FACTS else DERIVED_WORDS.get(fact, fact)


def show(number: Number | None) -> str:
    """A number with a unit that suits it; "–" for none."""
    if number is None or not math.isfinite(number.value):
        return "–"
    value, unit = number.value, number.unit
    if unit == "ns":
        return duration(value)
    if unit == "%":
        return f"{significant(value)} %"
    if unit == "x":
        return f"{significant(value)}×"
    base, scales = _SCALES.get(unit, ("", ((1e12, "T"), (1e9, "G"), (1e6, "M"))))
    for size, name in scales:
        if abs(value) >= size:
            return f"{significant(value / size)} {name}"
    whole = f"{value:,.0f}" if float(value).is_integer() else significant(value)
    return f"{whole} {base}".rstrip()


def shape(launch: KernelLaunch) -> str:
    """Grid and block, and cluster where there is one: "132 CTAs of 256"."""
    if not launch.grid or not launch.block:
        return "–"
    sizes = [_dims(launch.grid), _dims(launch.block)]
    cluster = f", clusters of {_dims(launch.cluster)}" if launch.cluster else ""
    noun = "CTA" if launch.grid == (1, 1, 1) else "CTAs"
    return f"{sizes[0]} {noun} of {sizes[1]}{cluster}"


def _dims(dims: tuple[int, ...]) -> str:
    """Trailing ones say nothing."""
    kept = list(dims)
    while len(kept) > 1 and kept[-1] == 1:
        kept.pop()
    return "×".join(f"{n:,}" for n in kept)
