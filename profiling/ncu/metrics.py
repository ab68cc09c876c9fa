"""Which metrics a summary reads, under every name that Nsight Compute gives them.

Names differ by architecture, by ncu's version and by section set; a fact lists its names in order of preference, and
the first that a launch has a value for is taken and named beside the number. Names were read from reports of ncu
2022.3 to 2025.3 on compute capabilities 7.5 to 12.0; those of the tensor pipe of sm_100 from NVIDIA's documentation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from profiling.ncu.report import NOT_AVAILABLE, NOT_COLLECTED, OK, Metric

MEASURED, DERIVED = "measured", "derived"


@dataclass(frozen=True)
class Number:
    """A number of a summary: value in `unit` (base units; shares in %), its grade, and the metrics it comes from."""

    value: float
    unit: str
    grade: str
    source: str


@dataclass(frozen=True)
class Fact:
    """Something a summary wants to know: its words, and the metrics that say it, best first."""

    words: str
    names: tuple[str, ...]


def _pct(base: str, of: str = "elapsed") -> str:
    return f"{base}.avg.pct_of_peak_sustained_{of}"


FACTS: Mapping[str, Fact] = {
    "duration": Fact("duration", ("gpu__time_duration.sum", "gpu__time_duration.avg", "gpu__time_duration.max")),
    "sm_clock": Fact("SM clock", ("sm__cycles_elapsed.avg.per_second", "gpc__cycles_elapsed.avg.per_second")),
    "sms": Fact("SMs", ("launch__sm_count", "device__attribute_multiprocessor_count")),
    "waves": Fact("waves", ("launch__waves_per_multiprocessor",)),
    "registers": Fact("registers a thread", ("launch__registers_per_thread",)),
    "smem": Fact("SMEM a CTA", ("launch__shared_mem_per_block_allocated", "launch__shared_mem_per_block")),
    "smem_dynamic": Fact("dynamic SMEM a CTA", ("launch__shared_mem_per_block_dynamic",)),
    "smem_static": Fact("static SMEM a CTA", ("launch__shared_mem_per_block_static",)),
    "occupancy_theoretical": Fact("occupancy, theoretical", ("sm__maximum_warps_per_active_cycle_pct",)),
    "occupancy_achieved": Fact("occupancy, achieved", (_pct("sm__warps_active", "active"),)),
    "limit_registers": Fact("CTAs an SM by registers", ("launch__occupancy_limit_registers",)),
    "limit_smem": Fact("CTAs an SM by SMEM", ("launch__occupancy_limit_shared_mem",)),
    "limit_warps": Fact("CTAs an SM by warps", ("launch__occupancy_limit_warps",)),
    "limit_blocks": Fact("CTAs an SM by the SM's slots", ("launch__occupancy_limit_blocks",)),
    "limit_barriers": Fact("CTAs an SM by barriers", ("launch__occupancy_limit_barriers",)),
    "tensor": Fact(
        "tensor pipe, of all time",
        (
            _pct("sm__pipe_tc_cycles_active"),  # sm_100 and later
            _pct("sm__pipe_tensor_cycles_active"),
            _pct("sm__pipe_tensor_type_hmma_hgmma_qgmma_imma_igmma_bmma_bgmma_cycles_active"),
            _pct("sm__inst_executed_pipe_tensor"),
        ),
    ),
    "tensor_active": Fact(
        "tensor pipe, while SMs are active",
        (
            _pct("sm__pipe_tc_cycles_active", "active"),
            _pct("sm__pipe_tensor_cycles_active", "active"),
            _pct("sm__pipe_tensor_op_hmma_cycles_active", "active"),
            _pct("sm__inst_executed_pipe_tensor", "active"),
            "sm__inst_executed_pipe_tensor.sum.pct_of_peak_sustained_active",
        ),
    ),
    "sm_throughput": Fact("SM throughput", (_pct("sm__throughput"),)),
    "memory_throughput": Fact("memory throughput", (_pct("gpu__compute_memory_throughput"),)),
    "dram_throughput": Fact("DRAM throughput", (_pct("gpu__dram_throughput"), _pct("dram__throughput"))),
    "l2_throughput": Fact("L2 throughput", (_pct("lts__throughput"),)),
    "l1_throughput": Fact("L1 and shared throughput", (_pct("l1tex__throughput"), _pct("l1tex__throughput", "active"))),
    "shared_wavefronts": Fact(
        "shared-memory wavefronts", ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed",)
    ),
    "l2_hit": Fact("L2 hit rate", ("lts__t_sector_hit_rate.pct",)),
    "dram_read": Fact("DRAM bytes read", ("dram__bytes_read.sum",)),
    "dram_write": Fact("DRAM bytes written", ("dram__bytes_write.sum",)),
    "dram_rate": Fact("DRAM bandwidth", ("dram__bytes.sum.per_second",)),
    "l2_bytes": Fact("L2 bytes", ("lts__t_bytes.sum",)),
    "l2_sectors": Fact("L2 sectors", ("lts__t_sectors.sum",)),
    "issue": Fact(
        "issue slots busy",
        (
            _pct("smsp__issue_active", "active"),
            _pct("sm__inst_issued", "active"),
            _pct("sm__issue_active"),
            _pct("sm__inst_issued"),
            "sm__inst_issued.sum.pct_of_peak_sustained_active",
        ),
    ),
    "ipc": Fact("instructions a cycle and SM", ("sm__inst_executed.avg.per_cycle_active",)),
    "eligible": Fact("eligible warps a scheduler", ("smsp__warps_eligible.avg.per_cycle_active",)),
    "cycles_active_min": Fact("SM active cycles, least", ("sm__cycles_active.min",)),
    "cycles_active_avg": Fact("SM active cycles, mean", ("sm__cycles_active.avg",)),
    "cycles_active_max": Fact("SM active cycles, most", ("sm__cycles_active.max",)),
    "cycles_elapsed": Fact("SM cycles elapsed", ("sm__cycles_elapsed.max", "sm__cycles_elapsed.avg")),
    "instructions": Fact(
        "instructions", ("smsp__inst_executed.sum", "sm__inst_executed.sum", "inst_executed", "smsp__inst_issued.sum")
    ),
    "spills": Fact("spill instructions", ("sass__inst_executed_register_spilling", "derived__local_spilling_requests")),
    "local_loads": Fact(
        "local loads",
        (
            "sass__inst_executed_local_loads",
            "smsp__sass_inst_executed_op_local_ld.sum",
            "smsp__inst_executed_op_local_ld.sum",
        ),
    ),
    "local_stores": Fact(
        "local stores",
        (
            "sass__inst_executed_local_stores",
            "smsp__sass_inst_executed_op_local_st.sum",
            "smsp__inst_executed_op_local_st.sum",
        ),
    ),
    "local_sectors_read": Fact("local sectors read", ("l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",)),
    "local_sectors_written": Fact("local sectors written", ("l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",)),
    "passes": Fact("passes", ("profiler__replayer_passes",)),
}

PIPES = {
    name: _pct(f"sm__inst_executed_pipe_{name}", "active")
    for name in ("alu", "fma", "fmaheavy", "fp64", "fp16", "xu", "lsu", "tex", "tma", "uniform", "adu", "cbu")
}
"""The SM's other pipes, by what they do; the tensor pipe has facts of its own."""

ELAPSED = ("sm__cycles_elapsed.max", "gpc__cycles_elapsed.max", "l1tex__cycles_elapsed.max", "smsp__cycles_elapsed.max")
"""One quantity, the launch's length in SM cycles, read in different passes: their spread is the passes' noise."""

TENSOR_OPS = "sm__ops_path_tensor_"
TENSOR_OP_KINDS = ("op_hmma", "op_hgmma", "op_imma", "op_igmma", "op_qgmma", "op_dmma", "op_bmma", "op_bgmma")


def summary_pattern() -> str:
    """A regular expression of all metrics that a summary reads, stall reasons, launch shape and GPU among them."""
    names = {name for fact in FACTS.values() for name in fact.names} | set(PIPES.values()) | set(ELAPSED)
    names |= {"device__attribute_display_name", "device__attribute_compute_capability_(major|minor)"}
    families = ["launch__(grid|block|cluster)_dim_[xyz]", ".*issue_stalled_.*", f"{TENSOR_OPS}.*sum"]
    return "|".join([*sorted(name if "(" in name else re.escape(name) for name in names), *families])


def number(metrics: Mapping[str, Metric], fact: str) -> Number | None:
    """The fact's number from the first of its metrics that has a value here; None where none has."""
    for name in FACTS[fact].names:
        metric = metrics.get(name)
        if metric is not None and metric.state == OK and math.isfinite(metric.value):
            return Number(metric.value, metric.unit, MEASURED, name)
    return None


def why_absent(metrics: Mapping[str, Metric], fact: str) -> str:
    """Why the fact has no number: "n/a" where ncu wrote that, else "not collected"."""
    # A state of "ok" is a text here, or infinite: no number either.
    states = [metrics[name].state for name in FACTS[fact].names if name in metrics]
    return next((state for state in states if state != OK), NOT_AVAILABLE) if states else NOT_COLLECTED


def tensor_operations(metrics: Mapping[str, Metric]) -> Number | None:
    """Operations that the tensor cores executed, two a multiply-add, of all input types; None if not collected."""
    found = list(_operation_counters(metrics))
    if not found:
        return None
    total = sum(metric.value for metric in found)
    source = max(found, key=lambda metric: metric.value).name
    return Number(total, "", MEASURED, source)


def _operation_counters(metrics: Mapping[str, Metric]) -> Iterator[Metric]:
    """The counters by instruction and type; the sums over instructions, which ncu has too, would count twice."""
    for name, metric in metrics.items():
        if name.startswith(TENSOR_OPS) and name.endswith(".sum") and math.isfinite(metric.value):
            rest = name.removeprefix(TENSOR_OPS)
            if rest.startswith(TENSOR_OP_KINDS):
                yield metric
