"""Layout of the recorder's buffer, and how its words become spans: NumPy only, so that it works without a GPU.

A *lane* is the stretch of the buffer that one CTA (or one role of a CTA) writes: a header of eight 64-bit words,
then ``capacity`` events of two words. A full lane keeps its first events and goes on counting.

====== ==========================================================================
header  word 0: SM id; 1: %globaltimer at the start (ns); 2: %clock64 at the start (cycles);
        3: %globaltimer at the end; 4: %clock64 at the end; 5: events offered; 6, 7: zero
event   word 0: %clock64 at the span's start, low 48 bits | kind << 48 | (stage + 1) << 56
        word 1: %clock64 at the span's end, low 32 bits | (tile + 1) << 32
====== ==========================================================================

Stage and tile are stored plus one so that "does not apply" (−1) is zero. The two words are stored apart, each when it
is known: a start kept in registers until the end costs a kernel that is short of them. A span of 2³² cycles or more
(2.1 s at 2 GHz) is not told from a shorter one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

HEADER_WORDS = 8
EVENT_WORDS = 2
LEVELS = {"off": 0, "cta": 1, "tile": 2, "wait": 3}
KINDS = {"tile": 1, "zero": 2}

_CLOCK_MASK = (1 << 48) - 1
_MIN_FIT_NS = 50_000
"""A launch shorter than this gives an SM no rate of its own: %globaltimer read on 132 SMs of an H200 at once spreads
over 160 ns, which over 50 µs is 0.3 %, about what the SMs' clocks really differ by."""


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
    """How cycles became ns, and what that is worth.

    %clock64 counts one SM's cycles, %globaltimer ns for all SMs. Each SM gets the straight line through its first and
    its last (timer, clock) pair of the launch. ``residual_ns_max`` is how far any other pair lies from its SM's line;
    an SM that ran one CTA has no other pair, and ``pairs_checked`` says how many there were.
    """

    rate_ghz: float
    rate_spread_ppm: float
    residual_ns_max: float
    pairs_checked: int
    sms_fitted: int
    sms_median_rate: int
    order_violations: int

    def metadata(self) -> dict[str, float | int]:
        """The recording's ``clock`` entry."""
        return {name: round(value, 6) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class SmClocks:
    """A line an SM: timer = ``timer`` + (clock − ``clock``) / ``rate``; indexed by SM id, rate in cycles per ns."""

    timer: NDArray[np.int64]
    clock: NDArray[np.int64]
    rate: NDArray[np.float64]
    fitted: NDArray[np.bool_]
    seen: NDArray[np.bool_]

    def to_ns(self, sm: NDArray[np.int64], clock: NDArray[np.int64]) -> NDArray[np.int64]:
        """Global timer (ns) of clock values read on SMs ``sm``; the clock's difference is exact, in 64 bits."""
        return self.timer[sm] + np.rint((clock - self.clock[sm]) / self.rate[sm]).astype(np.int64)


def fit_clocks(
    sm: NDArray[np.int64], timer: NDArray[np.int64], clock: NDArray[np.int64], min_fit_ns: int = _MIN_FIT_NS
) -> SmClocks:
    """Each SM's line from its CTAs' pairs: sm [lanes]; timer (ns) and clock (cycles) [lanes, 2], start and end.

    An SM watched for less than ``min_fit_ns`` takes the median rate of the others; where there are no others, all take
    the rate of all together.
    """
    count = int(sm.max()) + 1
    first, last = np.full(count, -1), np.full(count, -1)
    early, late = np.argsort(-timer[:, 0], kind="stable"), np.argsort(timer[:, 1], kind="stable")
    first[sm[early]] = early  # of several assignments to one SM the last stays
    last[sm[late]] = late
    seen = first >= 0
    took = np.where(seen, timer[last, 1] - timer[first, 0], 0).astype(np.float64)
    cycles = np.where(seen, clock[last, 1] - clock[first, 0], 0).astype(np.float64)
    fitted = (took >= min_fit_ns) & (cycles > 0)
    if fitted.any():
        common = float(np.median(cycles[fitted] / took[fitted]))
    else:
        common = float(cycles.sum() / took.sum()) if took.sum() > 0 and cycles.sum() > 0 else 1.0
    rate = np.where(fitted, cycles / np.where(fitted, took, 1.0), common)
    return SmClocks(timer[first, 0], clock[first, 0], rate, fitted, seen)


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
    sm, timer, clock = header[:, 0], header[:, [1, 3]], header[:, [2, 4]]
    offered = header[:, 5]
    kept = np.minimum(offered, capacity)
    clocks = fit_clocks(sm, timer, clock)
    lane_start, lane_end = clocks.to_ns(sm, clock[:, 0]), clocks.to_ns(sm, clock[:, 1])
    origin = int(lane_start.min())

    event_lane = np.repeat(np.arange(lane.size), kept)
    slot = np.arange(event_lane.size) - np.repeat(np.cumsum(kept) - kept, kept)
    column = HEADER_WORDS + EVENT_WORDS * slot
    first, second = words[lane[event_lane], column], words[lane[event_lane], column + 1]
    opened = clock[event_lane, 0]
    began = opened + (((first & _CLOCK_MASK) - (opened & _CLOCK_MASK)) & _CLOCK_MASK)  # the low bits may have wrapped
    ended = began + (((second & 0xFFFFFFFF) - (first & 0xFFFFFFFF)) & 0xFFFFFFFF)
    return Lanes(
        lane=lane,
        sm=sm,
        start_ns=lane_start - origin,
        end_ns=lane_end - origin,
        offered=offered,
        kept=kept,
        event_lane=event_lane,
        kind=(first >> 48) & 0xFF,
        stage=((first >> 56) & 0xFF) - 1,
        tile=((second >> 32) & 0xFFFFFFFF) - 1,
        event_start_ns=clocks.to_ns(sm[event_lane], began) - origin,
        event_end_ns=clocks.to_ns(sm[event_lane], ended) - origin,
        clock=_judge(clocks, sm, timer, clock, event_lane, began, ended),
    )


def _judge(
    clocks: SmClocks,
    sm: NDArray[np.int64],
    timer: NDArray[np.int64],
    clock: NDArray[np.int64],
    event_lane: NDArray[np.int64],
    began: NDArray[np.int64],
    ended: NDArray[np.int64],
) -> ClockFit:
    """Residuals, spread of the rates, and how often time ran backwards or a span left its CTA's life."""
    residual = np.abs(np.stack([clocks.to_ns(sm, clock[:, side]) - timer[:, side] for side in (0, 1)], axis=1))
    rates = clocks.rate[clocks.fitted]
    same_lane = event_lane[1:] == event_lane[:-1]
    backwards = (
        int((same_lane & (began[1:] < ended[:-1])).sum())
        + int((ended > clock[event_lane, 1]).sum())
        + int((timer[:, 1] < timer[:, 0]).sum())
        + int((clock[:, 1] < clock[:, 0]).sum())
    )
    return ClockFit(
        rate_ghz=float(np.median(clocks.rate[clocks.seen])),
        rate_spread_ppm=float(np.ptp(rates) / np.median(rates) * 1e6) if rates.size > 1 else 0.0,
        residual_ns_max=float(residual.max()),
        pairs_checked=int(residual.size - 2 * clocks.seen.sum()),
        sms_fitted=int(clocks.fitted.sum()),
        sms_median_rate=int((clocks.seen & ~clocks.fitted).sum()),
        order_violations=backwards,
    )
