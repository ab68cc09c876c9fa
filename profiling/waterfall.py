"""How much of a kernel's time goes with each of its stages, beside what the waits claim. Needs an sm_90 GPU.

The kernel runs without one stage at a time (`jfa.impl.hopper.left_out` says what that leaves), in turn with the whole
one. What such a run computes is wrong and thrown away. What it takes less is the least that is to be had from a stage:
with it gone, others may be done otherwise too. Where it takes no less, what the stage takes is hidden behind the rest,
however long others wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from jfa.workloads import Workload
from profiling.ablation.effects import Effect, effect
from profiling.bench import GpuClock
from profiling.errors import RecordingError, UserError
from profiling.launching import gpu, prepare
from profiling.lost import lost_time
from profiling.record import record_launcher, resources_of
from profiling.text import percent
from profiling.turns import take_turns

if TYPE_CHECKING:
    from profiling.recording import Recording

WHOLE = "whole kernel"
DISCARDED = "results discarded"
FEEDS: dict[str, dict[str, tuple[str, ...]]] = {
    "jfa_forward_hopper": {"exp": (), "loads": ("k_full", "v_full"), "store": ()},
    "jfa_backward_hopper": {"exp": ("ds_full",), "loads": ("q_full", "do_full"), "dq store": ()},
    "jfa_backward_resident": {
        "exp": ("weights_full",),
        "loads": ("k_full", "v_full", "do_full"),
        "dk/dv store": ("part_empty",),
    },
}
"""By kernel and stage, the barriers at which others wait for it; none where only its own warps do."""


def waterfall(
    workload: Workload,
    *,
    schedule: str = "balanced-dynamic",
    direction: str = "forward",
    impl: str = "hopper",
    rounds: int = 40,
) -> pd.DataFrame:
    """The whole kernel and the kernel without each stage, in turn in one process, and a recording of the whole one.

    Returns:
        As `bounds`. A backward's times include its small kernels, a forward's the merging of cut sequences. ``attrs``:
        also title, warnings (of the recording at level wait that the claims rest on).

    Raises:
        UserError: no GPU, a kernel without switches, a workload without rows, unknown schedule, direction or
            implementation.
    """
    if impl == "triton":
        raise UserError(_without_switches("the one of --impl triton has none"))
    device = gpu()
    launcher = prepare(workload, schedule, direction, device, impl)
    if launcher.kernel not in FEEDS:
        raise UserError(_without_switches(f"{launcher.kernel}, which --impl {impl} means on this GPU, has none"))
    from jfa.instrument import OFF

    runs = {WHOLE: launcher} | {stage: launcher.without(stage) for stage in FEEDS[launcher.kernel]}
    # Compiled before they are timed: a run that compiles is late, and the clock would wait longer before all others.
    resources = {stage: resources_of(own, OFF) for stage, own in runs.items()}
    times = take_turns({stage: partial(own.run, OFF) for stage, own in runs.items()}, GpuClock(), rounds)
    recording = record_launcher(launcher, workload, device, "wait", 1, 5)
    try:
        claimed, warnings = claims(launcher.kernel, recording), recording.warnings()
    except RecordingError as error:
        claimed, warnings = {}, [str(error)]
    table = bounds(times, claimed, resources)
    table.attrs["title"] = f"{workload.name} · {direction} · {launcher.schedule} · {launcher.kernel}"
    table.attrs["warnings"] = warnings
    return table


def claims(kernel: str, recording: Recording) -> dict[str, float]:
    """By stage of a kernel, what share of the compute roles' lives waits for the barriers that it feeds.

    NaN for a stage that feeds none. RecordingError: as `profiling.lost.lost_time`.
    """
    lost = lost_time(recording).waits
    return {
        stage: sum(lost.get(barrier, 0.0) for barrier in barriers) if barriers else math.nan
        for stage, barriers in FEEDS[kernel].items()
    }


def bounds(
    times: Mapping[str, np.ndarray], claimed: Mapping[str, float], resources: Mapping[str, Mapping[str, int]]
) -> pd.DataFrame:
    """What the times of the whole kernel, the first, and of those without a stage say of the stages.

    Args:
        times: by stage left out, ms [rounds], taken in turn. claimed: as of `claims`; what is not there is not known.
        resources: by stage left out, as of `profiling.record.resources_of`.

    Returns:
        A row each, the whole kernel first: stage, median_ns, iqr_ns, change (of the time, relative to the whole
        kernel's), low, high (its 95 % interval), words ("no difference" where that says so), least (share of the time
        that goes with the stage at least: the interval's nearer end, 0 where there is no difference, NaN where it runs
        slower), bound (that in words), claimed (share of the compute roles' lives), and the resources. ``attrs``:
        grade, results ("results discarded").
    """
    first, whole = next(iter(times.items()))
    rows = []
    for stage, own in times.items():
        found = effect(own, whole)
        low, high = np.percentile(own, [25, 75])
        rows.append(
            {
                "stage": stage,
                "median_ns": 1e6 * float(np.median(own)),
                "iqr_ns": 1e6 * float(high - low),
                "change": found.change,
                "low": found.low,
                "high": found.high,
                "words": "–" if stage == first else found.words,
                "least": math.nan if stage == first else _least(found),
                "bound": "–" if stage == first else _bound(found),
                "claimed": claimed.get(stage, math.nan),
                **_given(resources.get(stage, {})),
            }
        )
    table = pd.DataFrame(rows)
    table.attrs |= {"grade": "measured", "results": DISCARDED}
    return table


def _least(found: Effect) -> float:
    if not found.differs:
        return 0.0
    return -found.high if found.high < 0 else math.nan


def _bound(found: Effect) -> str:
    if not found.differs:
        return "none: hidden behind the rest"
    if found.high < 0:
        return f"at least {percent(-found.high)} of the time goes with it"
    return "none: slower without it, which says nothing of it"


def _given(resources: Mapping[str, int]) -> dict[str, Any]:
    return {name: resources.get(name, math.nan) for name in ("registers", "stack_bytes")}


def _without_switches(why: str) -> str:
    return f"waterfall needs a kernel with switches for its stages: {why}; run --impl hopper on an sm_90 GPU"
