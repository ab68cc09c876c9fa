"""What recording costs a kernel: time, time an event, registers and memory, at each level. Needs a CUDA GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from jfa.workloads import Workload
from profiling.ablation.effects import effect
from profiling.bench import GpuClock
from profiling.launching import Launcher, gpu, prepare
from profiling.record import resources_of, resources_of_run, room
from profiling.turns import Clock, take_turns

if TYPE_CHECKING:
    import torch

LEVELS = ("cta", "tile", "wait")
PROTON = "Proton at waits"
WAITS = "waits alone"


def overhead(
    workload: Workload,
    *,
    schedule: str = "balanced-dynamic",
    direction: str = "forward",
    impl: str = "auto",
    rounds: int = 40,
    proton: bool = False,
) -> pd.DataFrame:
    """The plain kernel and the recorded one at each level, in turn in one process.

    Returns:
        A row a level, "off" first: level, median_ns, iqr_ns, change (relative to off), low, high (its 95 % interval),
        words ("no difference" where that says so), events (spans that one launch notes), event_ns (how much longer a
        lane takes, an event of it; NaN without events or a difference), registers (a thread), stack_bytes,
        shared_bytes, config_hash. With ``proton`` also "waits alone", level wait less what level tile costs, and
        a row of Proton's scopes, which stand at the waits alone. A backward's times include its small kernels.
        ``attrs``: title, grade.

    Raises:
        UserError: no GPU, a workload without rows, unknown schedule, direction or implementation.
    """
    device = gpu()
    launcher = prepare(workload, schedule, direction, device, impl)
    table = ledger(launcher, workload, device, GpuClock(), rounds, proton)
    table.attrs["title"] = f"{workload.name} · {direction} · {launcher.schedule} · {launcher.impl}"
    return table


def ledger(
    launcher: Launcher, workload: Workload, device: torch.device, clock: Clock, rounds: int, proton: bool = False
) -> pd.DataFrame:
    """As `overhead`, of a kernel that is ready; level wait where it has roles."""
    from jfa.config import config_hash
    from jfa.instrument import OFF

    levels = LEVELS if launcher.roles != ("cta",) else LEVELS[:-1]
    recorders = {"off": OFF} | {level: room(launcher, workload, level, device) for level in levels}
    runs: dict[str, Any] = {level: partial(launcher.run, own) for level, own in recorders.items()}
    if proton:
        from profiling.proton_scopes import with_scopes

        runs[PROTON] = with_scopes(launcher, device)
    times = take_turns(runs, clock, rounds)
    rows = []
    for level, recorder in recorders.items():
        resources = resources_of(launcher, recorder)
        lanes = launcher.ctas * len(launcher.roles)
        events = int(recorder.read().offered.sum()) if level != "off" else 0
        rows.append(_row(level, times[level], times["off"], events, lanes) | resources)
    if proton:
        # As many scopes as the recorder has waits.
        noted = {row["level"]: row["events"] for row in rows}
        events = noted["wait"] - noted["tile"]
        alone = _row(WAITS, _waits_alone(times), times["off"], events, lanes)
        rows.append(alone | resources_of(launcher, recorders["wait"]))
        row = _row(PROTON, times[PROTON], times["off"], events, lanes)
        rows.append(row | resources_of_run(runs[PROTON]()))
    table = pd.DataFrame(rows)
    table["config_hash"] = config_hash(launcher.config)
    table.attrs["grade"] = "measured"
    return table


def _waits_alone(times: Mapping[str, np.ndarray]) -> np.ndarray:
    """What each round would have taken with waits noted and nothing else."""
    return times["off"] + times["wait"] - times["tile"]


def _row(level: str, times: np.ndarray, plain: np.ndarray, events: int, lanes: int) -> dict[str, Any]:
    found = effect(times, plain)
    low, high = np.percentile(times, [25, 75])
    extra_ns = 1e6 * float(np.median(times) - np.median(plain))
    return {
        "level": level,
        "median_ns": 1e6 * float(np.median(times)),
        "iqr_ns": 1e6 * float(high - low),
        "change": 0.0 if level == "off" else found.change,
        "low": found.low,
        "high": found.high,
        "words": "–" if level == "off" else found.words,
        "events": events,
        "event_ns": extra_ns * lanes / events if events and found.differs else float("nan"),
    }
