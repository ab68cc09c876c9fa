"""What the compiler makes of each variant, and what a replay makes of each schedule: an ablation without a GPU."""

from __future__ import annotations

import math
import re
from typing import Any

from jfa.workloads import Workload
from profiling import examples
from profiling.ablation.plan import Plan, Setting
from profiling.schedules import SCHEDULES, replay
from profiling.tiles_measured import tiles_of

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def compile_setting(setting: Setting, workload: Workload, arch: int = 90) -> dict[str, Any]:
    """Registers, stack frame, ptxas's spills, shared memory; on sm_90 also local accesses in the loops with products,
    and whether wgmma waits for itself. Grade: compiled. ``why_not`` where it does not compile."""
    from jfa.schedule import deal
    from profiling import cross_compile as cross

    kind = type(setting.config).__name__
    options: dict[str, Any] = {"dim": workload.head_dim}
    if kind == "HopperResidentConfig":
        options["cluster"] = 1 if workload.max_q_len <= 128 else 2
    else:
        causal = workload.window_bounds[1] == 0
        options |= {"deal": deal(setting.schedule), "broadcast": workload.broadcast_q, "causal": causal}
    if kind == "HopperForwardConfig":
        options["split"] = setting.split
    compilers = {
        "HopperForwardConfig": cross.compile_hopper_forward,
        "HopperBackwardConfig": cross.compile_hopper_backward,
        "HopperResidentConfig": cross.compile_resident_backward,
        "ForwardConfig": cross.compile_forward,
        "BackwardConfig": cross.compile_backward,
    }
    try:
        made = compilers[kind](setting.config, arch, **options)  # type: ignore[operator]
        flags = getattr(setting.config, "ptx_options", "")
        said = cross.ptxas_says(made, f"sm_{arch}a" if arch >= 90 else f"sm_{arch}", flags)
    except Exception as error:  # each compiler has its own kinds
        return {"why_not": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    stores, loads = map(int, found.groups()) if (found := _SPILLS.search(said)) else (0, 0)
    facts = {
        "registers": made.registers,
        "stack": made.stack,
        "spill_stores": stores,
        "spill_loads": loads,
        "shared": made.shared,
    }
    if arch == 90:
        facts["loop_spills"] = max(cross.loop_spills(made.sass), default=0)
        facts["serialised"] = "serialized" in said
    return facts


def modelled_ms(plan: Plan, workload: Workload) -> dict[str, float]:
    """Expected time of the variants that differ from full in their schedule alone, from a recording in the package.

    Those recordings are of the plain Triton kernels on an H200, so that there is nothing to say of another kernel.
    Empty where the package has none of this workload and direction.
    """
    full = plan.named("full").values
    if plan.setting.impl != "triton" or "schedule" not in full:
        return {}
    name = f"{workload.name}_{plan.setting.direction}_static"
    if name not in examples.names():
        return {}
    tiles = tiles_of(examples.load(workload.name, plan.setting.direction, "static"))
    found = {}
    for variant in plan.variants:
        alone = {**variant.values, "schedule": full["schedule"]} == full
        schedule = variant.values["schedule"]
        if alone and schedule in SCHEDULES:
            found[variant.key] = replay(tiles, schedule).makespan_ns / 1e6
    return {key: value for key, value in found.items() if not math.isnan(value)}
