"""All schedules of one workload, run against each other on this GPU. Needs a CUDA GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from jfa.workloads import Workload
from profiling.ablation.effects import effect
from profiling.bench import GpuClock
from profiling.launching import Launcher, gpu, prepare
from profiling.turns import Clock, take_turns

if TYPE_CHECKING:
    from profiling.recording import Recording


def race(
    workload: Workload, schedules: Sequence[str], *, direction: str = "forward", impl: str = "auto", rounds: int = 40
) -> tuple[pd.DataFrame, list[Recording]]:
    """Times in turn in one process, then one recording of each at level tile, whose SM time says why.

    Returns:
        A row a schedule: schedule, median_ns, iqr_ns, change (relative to the first), low, high, words; makespan_ns,
        work_share … unused_share and headroom of its recording, fetch_ns (a tile's). And the recordings, in that order.

    Raises:
        UserError: no GPU, a workload without rows, unknown schedule, direction or implementation.
    """
    from profiling.record import record_launcher

    device = gpu()
    launchers = {name: prepare(workload, name, direction, device, impl) for name in schedules}
    table = times_of(launchers, GpuClock(), rounds)
    recordings = [record_launcher(own, workload, device, "tile", 1, 5) for own in launchers.values()]
    return table.join(pd.DataFrame([_sm_time(each) for each in recordings])), recordings


def times_of(launchers: dict[str, Launcher], clock: Clock, rounds: int) -> pd.DataFrame:
    """The columns of `race` that need no recording."""
    from jfa.instrument import OFF

    times = take_turns({name: partial(own.run, OFF) for name, own in launchers.items()}, clock, rounds)
    first = next(iter(times.values()))
    rows: list[dict[str, Any]] = []
    for name, own in times.items():
        found = effect(own, first)
        low, high = np.percentile(own, [25, 75])
        rows.append(
            {
                "schedule": name,
                "median_ns": 1e6 * float(np.median(own)),
                "iqr_ns": 1e6 * float(high - low),
                "change": found.change,
                "low": found.low,
                "high": found.high,
                "words": "–" if own is first else found.words,
            }
        )
    return pd.DataFrame(rows)


def _sm_time(recording: Recording) -> dict[str, float]:
    from profiling.sm_time import summary

    total = summary(recording).iloc[0]
    shares = {name: float(total[name]) for name in total.index if str(name).endswith("_share")}
    fetch = float(total["fetch_ns"]) / max(float(total["tiles"]), 1.0)
    return {
        "makespan_ns": float(total["makespan_ns"]),
        **shares,
        "headroom": float(total["headroom"]),
        "fetch_ns": fetch,
    }
