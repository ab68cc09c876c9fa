"""Runs that take turns on one GPU, so that what they are compared by is shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from profiling.bench import WARMUP_RUNS, orders


class Clock(Protocol):
    """Times a run, ms: `profiling.bench.GpuClock`."""

    def time(self, run: Callable[[], Any]) -> float: ...


def take_turns(runs: Mapping[str, Callable[[], Any]], clock: Clock, rounds: int) -> dict[str, np.ndarray]:
    """Each run's times, ms [rounds], after a warm-up; in each round every run once, after each other one as often."""
    names = list(runs)
    for name in names:
        for _ in range(WARMUP_RUNS):
            clock.time(runs[name])
    taken: dict[str, list[float]] = {name: [] for name in names}
    for order in orders(len(names), rounds):
        for place in order:
            taken[names[place]].append(clock.time(runs[names[place]]))
    return {name: np.asarray(times) for name, times in taken.items()}
