"""Layout of the recorder's buffer, and how its words become spans: NumPy only, so that it works without a GPU.

A *lane* is the stretch of the buffer that one CTA (or one role of a CTA) writes: a header of eight 64-bit words,
then ``capacity`` events of two words. A full lane keeps its first events and goes on counting.

====== ==========================================================================
header  word 0: SM id; 1: %globaltimer at the start (ns); 2: %clock64 at the start (cycles);
        3: %globaltimer at the end; 4: %clock64 at the end; 5: events offered; 6, 7: zero
event   word 0: %clock64 at the span's start, low 48 bits | kind << 48 | (stage + 1) << 56
        word 1: cycles the span took, 32 bits, saturated | (tile + 1) << 32
====== ==========================================================================

Stage and tile are stored plus one so that "does not apply" (−1) is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HEADER_WORDS = 8
EVENT_WORDS = 2
LEVELS = {"off": 0, "cta": 1, "tile": 2, "wait": 3}
KINDS = {"tile": 1, "zero": 2}

_CLOCK_MASK = (1 << 48) - 1
_MIN_FIT_NS = 20_000
"""A CTA shorter than this cannot be fitted: at 32 ns a tick (GH100's %globaltimer, read on an H200) its rate would be
uncertain by more than 0.3 %."""


@dataclass(frozen=True)
class Lanes:
    """Spans read from a buffer, one axis for all SMs.

    ``lane``-indexed arrays have one entry a lane that ran: lane (int64), sm, start_ns, end_ns, offered, kept.
    ``event``-indexed arrays: event_lane (position in ``lane``), kind, stage, tile, event_start_ns, event_end_ns.
    Times are int64 ns from the first lane's start.
    """

    lane: NDArray[np.int64]
    sm: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    offered: NDArray[np.int64]
    kept: NDArray[np.int64]
    event_lane: NDArray[np.int64]
    kind: NDArray[np.int64]
    stage: NDArray[np.int64]
    tile: NDArray[np.int64]
    event_start_ns: NDArray[np.int64]
    event_end_ns: NDArray[np.int64]
    clock: ClockFit

    @property
    def lost(self) -> int:
        """Events that found their lane full."""
        return int((self.offered - self.kept).sum())


@dataclass(frozen=True)
class ClockFit:
    """How cycles became ns: ``rate`` (cycles per ns) for each lane, and what the fit is worth."""

    rate: NDArray[np.float64]
    rate_ghz: float
    rate_spread_ppm: float
    residual_ns_max: float
    ctas_fitted: int
    ctas_median_rate: int
    order_violations: int

    def metadata(self) -> dict[str, float | int]:
        """The recording's ``clock`` entry."""
        return {
            "rate_ghz": round(self.rate_ghz, 6),
            "rate_spread_ppm": round(self.rate_spread_ppm, 1),
            "residual_ns_max": round(self.residual_ns_max, 1),
            "ctas_fitted": self.ctas_fitted,
            "ctas_median_rate": self.ctas_median_rate,
            "order_violations": self.order_violations,
        }


def fit_clocks(
    timer: NDArray[np.int64], clock: NDArray[np.int64], min_fit_ns: int = _MIN_FIT_NS
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Cycles per ns of each lane from its two (timer, clock) pairs, both [lanes, 2]; and which lanes had their own fit.

    A lane shorter than ``min_fit_ns`` takes the median rate of the others; when there are no others, the rate of all
    lanes together.
    """
    took_ns = (timer[:, 1] - timer[:, 0]).astype(np.float64)
    cycles = (clock[:, 1] - clock[:, 0]).astype(np.float64)
    fitted = (took_ns >= min_fit_ns) & (cycles > 0)
    if fitted.any():
        common = float(np.median(cycles[fitted] / took_ns[fitted]))
    else:
        common = float(cycles.sum() / took_ns.sum()) if took_ns.sum() > 0 and cycles.sum() > 0 else 1.0
    rate = np.full(len(took_ns), common)
    rate[fitted] = cycles[fitted] / took_ns[fitted]
    return rate, fitted


def decode(words: NDArray[np.int64], capacity: int) -> Lanes:
    """Spans of a buffer copied from the device: int64 [lanes, HEADER_WORDS + EVENT_WORDS·capacity].

    Lanes whose header was never written (a grid larger than the launch used) are left out.
    ValueError: the buffer's shape is not that of ``capacity``, or no lane ran.
    """
    expected = HEADER_WORDS + EVENT_WORDS * capacity
    if words.ndim != 2 or words.shape[1] != expected:
        raise ValueError(f"words: expected [lanes, {expected}] for capacity {capacity}, got {list(words.shape)}")
    lane = np.flatnonzero(words[:, 1])
    if lane.size == 0:
        raise ValueError("words: no lane was written; did the kernel run with a recorder at level cta or above?")
    header = words[lane, :HEADER_WORDS]
    timer, clock = header[:, [1, 3]], header[:, [2, 4]]
    offered = header[:, 5]
    kept = np.minimum(offered, capacity)
    rate, fitted = fit_clocks(timer, clock)
    origin = int(timer[:, 0].min())

    event_lane = np.repeat(np.arange(lane.size), kept)
    slot = np.arange(event_lane.size) - np.repeat(np.cumsum(kept) - kept, kept)
    column = HEADER_WORDS + EVENT_WORDS * slot
    first, second = words[lane[event_lane], column], words[lane[event_lane], column + 1]
    since = ((first & _CLOCK_MASK) - (clock[event_lane, 0] & _CLOCK_MASK)) & _CLOCK_MASK  # the low bits may wrap
    took = second & 0xFFFFFFFF
    offset = timer[event_lane, 0] - origin
    start = offset + np.rint(since / rate[event_lane]).astype(np.int64)
    end = offset + np.rint((since + took) / rate[event_lane]).astype(np.int64)

    lane_start = timer[:, 0] - origin
    lane_end = np.maximum(timer[:, 1] - origin, lane_start)
    outside = np.maximum(end - lane_end[event_lane], 0)
    same_lane = event_lane[1:] == event_lane[:-1]
    backwards = int((same_lane & (first[1:] & _CLOCK_MASK < first[:-1] & _CLOCK_MASK) & (since[1:] < since[:-1])).sum())
    own_rate = rate[fitted]
    spread = float(np.ptp(own_rate) / np.median(own_rate) * 1e6) if own_rate.size > 1 else 0.0
    fit = ClockFit(
        rate=rate,
        rate_ghz=float(np.median(rate)),
        rate_spread_ppm=spread,
        residual_ns_max=float(outside.max(initial=0)),
        ctas_fitted=int(fitted.sum()),
        ctas_median_rate=int((~fitted).sum()),
        order_violations=backwards + int((timer[:, 1] < timer[:, 0]).sum()) + int((clock[:, 1] < clock[:, 0]).sum()),
    )
    np.maximum(lane_end, _lane_max(end, event_lane, lane_end), out=lane_end)
    return Lanes(
        lane=lane,
        sm=header[:, 0] & 0xFFFFFFFF,
        start_ns=lane_start,
        end_ns=lane_end,
        offered=offered,
        kept=kept,
        event_lane=event_lane,
        kind=(first >> 48) & 0xFF,
        stage=((first >> 56) & 0xFF) - 1,
        tile=((second >> 32) & 0xFFFFFFFF) - 1,
        event_start_ns=start,
        event_end_ns=end,
        clock=fit,
    )


def _lane_max(values: NDArray[np.int64], lane: NDArray[np.int64], floor: NDArray[np.int64]) -> NDArray[np.int64]:
    """Largest value of each lane, at least ``floor``: a CTA ends no earlier than its last span."""
    out = floor.copy()
    np.maximum.at(out, lane, values)
    return out
