"""What a switch did: ratios of medians with bootstrap intervals, and "no difference" where the interval says so."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

RESAMPLES, CONFIDENCE = 2000, 95.0
LEAST = 0.003
"""Smaller effects count as none: what a launch's clocks do from one minute to the next."""


@dataclass(frozen=True)
class Effect:
    """A variant's time against another's: change = time / other − 1, with its interval. NaN where one has no times."""

    change: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves zero out, and the change is worth a word."""
        return (self.low > 0 or self.high < 0) and abs(self.change) >= LEAST

    @property
    def words(self) -> str:
        """ "+4.1 % (3.9 to 4.4)", "no difference", or "–"."""
        if math.isnan(self.change):
            return "–"
        if not self.differs:
            return "no difference"
        return f"{self.change * 100:+.1f} % ({self.low * 100:+.1f} to {self.high * 100:+.1f})"


def effect(times: np.ndarray, others: np.ndarray, seed: int = 0) -> Effect:
    """Compare samples that were taken in turn, [rounds] each: rounds are drawn again, for both at once.

    So what a round had in common, such as the clocks of that second, does not count as a difference.
    """
    rounds = min(len(times), len(others))
    if not rounds:
        return Effect(math.nan, math.nan, math.nan)
    times, others = np.asarray(times, float)[:rounds], np.asarray(others, float)[:rounds]
    picks = np.random.default_rng(seed).integers(0, rounds, (RESAMPLES, rounds))
    ratios = np.median(times[picks], axis=1) / np.median(others[picks], axis=1) - 1
    tail = (100 - CONFIDENCE) / 2
    low, high = np.percentile(ratios, [tail, 100 - tail])
    return Effect(float(np.median(times) / np.median(others) - 1), float(low), float(high))


def drift(times: np.ndarray) -> float:
    """How much longer the last third of a variant's samples took than its first third, relative; NaN below six."""
    first, last = thirds(times)
    return last / first - 1


def thirds(values: np.ndarray) -> tuple[float, float]:
    """The medians of the first third of the values and of the last; NaN of fewer than six."""
    third = len(values) // 3
    if third < 2:
        return math.nan, math.nan
    return float(np.median(values[:third])), float(np.median(values[-third:]))
