"""What the compiler makes of each variant, and what a replay makes of each schedule: an ablation without a GPU."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, cast

from jfa.workloads import Workload
from profiling import examples
from profiling.ablation.plan import Plan, Setting, problem_of
from profiling.gpus import SMS
from profiling.recording import Recording
from profiling.replayed import replayed
from profiling.schedules import SCHEDULES, replay
from profiling.tiles_measured import tiles_of

if TYPE_CHECKING:
    from jfa.config import HopperForwardConfig

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
        options |= _shape_on_hopper(setting, workload)
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


def _shape_on_hopper(setting: Setting, workload: Workload) -> dict[str, Any]:
    """Whether the forward for sm_90 cuts sequences of this workload on 132 SMs, and CTAs of its clusters."""
    from jfa.impl.hopper.forward import cluster, split_for

    problem = problem_of(workload)
    config = cast("HopperForwardConfig", setting.config)
    split = split_for(problem, config, SMS["H200"]) if setting.split else 0
    return {"split": split > 0, "cluster": cluster(problem, config, split)}


def modelled_ms(plan: Plan, workload: Workload) -> dict[str, float]:
    """Expected time of the variants that differ from full in their schedule alone, from a recording in the package.

    Empty where the package has none of this kernel, configuration, workload and direction.
    """
    schedules, measured = _replayable(plan), _measured(plan, workload)
    if not schedules or measured is None:
        return {}
    tiles = tiles_of(measured)
    found = {key: replay(tiles, schedule).makespan_ns / 1e6 for key, schedule in schedules.items()}
    return {key: value for key, value in found.items() if not math.isnan(value)}


def modelled_recordings(plan: Plan, workload: Workload) -> dict[str, Recording]:
    """The launches behind `modelled_ms`, as recordings of grade modelled."""
    schedules, measured = _replayable(plan), _measured(plan, workload)
    if measured is None:
        return {}
    return {key: replayed(measured, schedule) for key, schedule in schedules.items()}


def _replayable(plan: Plan) -> dict[str, str]:
    """key → schedule of the variants that differ from full in it alone."""
    full = plan.named("full").values
    if "schedule" not in full:
        return {}
    alone = [v for v in plan.variants if {**v.values, "schedule": full["schedule"]} == full]
    return {variant.key: str(s) for variant in alone if (s := variant.values["schedule"]) in SCHEDULES}


def _measured(plan: Plan, workload: Workload) -> Recording | None:
    """The package's recording under schedule static of this kernel as the plan has it, whose tiles are replayed."""
    from jfa.config import describe

    found = examples.of_kernel(plan.setting.impl, workload.name, plan.setting.direction)
    same = found is not None and found.get("kernel.config") == describe(plan.setting.config)
    return found if same else None
