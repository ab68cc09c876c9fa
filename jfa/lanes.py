"""Layout of the recorder's buffer, and how its words become spans: NumPy only, so that it works without a GPU.

A *lane* is the stretch of the buffer that one CTA (or one role of a CTA) writes: a header of eight 64-bit words,
then ``capacity`` events of four words. A full lane keeps its first events and goes on counting.

====== ==========================================================================
header  word 0: SM id; 1: %globaltimer at the start (ns); 2: %clock64 at the start (cycles);
        3: %globaltimer at the end; 4: %clock64 at the end; 5: events offered; 6, 7: zero
event   word 0: %clock64 at the span's start, low 48 bits (of a wait 32) | kind << 48 | (stage + 1) << 56
        word 1: %globaltimer at the span's start (ns); of a wait, what word 2 holds of other spans
        word 2: %clock64 at the span's end, low 32 bits | (tile + 1) << 32; word 3: zero
====== ==========================================================================

Stage and tile are stored plus one so that "does not apply" (−1) is zero. Start and end are stored apart, each when it
is known: a start kept in registers until the end costs a kernel that is short of them. Waits are short and many: both
ends go out in one store of 16 bytes, of 32-bit parts. A span of 2³² cycles or more (2.1 s at 2 GHz) is not told from a
shorter one, and a wait is placed right if it begins at most 2³¹ cycles after the lane's event before.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

HEADER_WORDS = 8
EVENT_WORDS = 4
LEVELS = {"off": 0, "cta": 1, "tile": 2, "wait": 3}
WAITS = {
    "item_full": 16,
    "item_empty": 17,
    "q_full": 18,
    "q_empty": 19,
    "k_full": 20,
    "k_empty": 21,
    "v_full": 22,
    "v_empty": 23,
    "turn": 24,
    "kv_full": 25,
    "kv_empty": 26,
    "do_full": 27,
    "do_empty": 28,
    "ds_full": 29,
    "ds_empty": 30,
    "weights_full": 31,
    "weights_empty": 32,
    "part_full": 33,
    "part_empty": 34,
    "next_full": 35,
    "next_empty": 36,
    "dq_added": 37,
}
"""Numbers of the barriers that a role waits for. ``full``: until a buffer holds its load, ``empty``: until it may be
overwritten; ``turn``: for the other warpgroup at the tensor cores; ``next``: for the tile that the other CTA of a pair
took for both; ``dq_added``: until the compute roles have added all of a tile's dQ."""

KINDS = {"tile": 1, "zero": 2} | {f"wait:{barrier}": number for barrier, number in WAITS.items()}

_CLOCK_MASK = (1 << 48) - 1
_SEGMENT_NS = 50_000
"""Length of the straight pieces that tie an SM's cycles to the common axis. %globaltimer, read on 132 SMs of an H200 at
once, spreads over 160 ns: 0.3 % of this, about what the SMs' clocks differ by; under load an SM's clock strays from one
straight line over a 1.8 ms launch by up to 8 µs."""


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

    %clock64 counts one SM's cycles, %globaltimer ns for all SMs. An SM's (timer, clock) pairs, about 50 µs apart, are
    joined by straight lines; ``residual_ns_max`` and ``residual_ns_p99`` say how far its other pairs lie from them, and
    ``pairs_checked`` how many others there were. ``sms_median_rate``: SMs with too little to go by, which use the
    median rate of the rest.
    """

    rate_ghz: float
    rate_spread_ppm: float
    residual_ns_p99: float
    residual_ns_max: float
    pairs_checked: int
    sms_fitted: int
    sms_median_rate: int
    order_violations: int

    def metadata(self) -> dict[str, float | int]:
        """The recording's ``clock`` entry."""
        return {name: round(value, 6) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Pairs:
    """Readings of both clocks at one moment: SM id, %globaltimer (ns) and %clock64 (cycles), int64 arrays."""

    sm: NDArray[np.int64]
    timer: NDArray[np.int64]
    clock: NDArray[np.int64]


@dataclass(frozen=True)
class SmClock:
    """One SM's cycles on the common axis: ``knots`` (clock, timer) joined by lines, ``rate`` (cycles per ns) beyond."""

    clock: NDArray[np.int64]
    timer: NDArray[np.int64]
    rate: float
    fitted: bool

    def to_ns(self, clock: NDArray[np.int64]) -> NDArray[np.int64]:
        """Global timer (ns) at readings of this SM's clock; differences are taken in 64 bits before they are floats."""
        since = (clock - self.clock[0]).astype(np.float64)
        knots, times = (self.clock - self.clock[0]).astype(np.float64), (self.timer - self.timer[0]).astype(np.float64)
        inside = np.interp(since, knots, times)
        beyond = np.where(since > knots[-1], since - knots[-1], np.minimum(since, 0.0)) / self.rate
        return self.timer[0] + np.rint(inside + beyond).astype(np.int64)


def fit_clocks(pairs: Pairs, segment_ns: int = _SEGMENT_NS) -> dict[int, SmClock]:
    """Each SM's clock from its pairs: knots about ``segment_ns`` apart, its first and its last pair among them.

    An SM watched for less than ``segment_ns`` takes the median rate of the others from its first pair on; where there
    are no others, all take the rate of all together.
    """
    order = np.lexsort((pairs.clock, pairs.sm))
    sm, timer, clock = pairs.sm[order], pairs.timer[order], pairs.clock[order]
    starts = np.flatnonzero(np.r_[True, sm[1:] != sm[:-1]])
    stops = np.r_[starts[1:], sm.size]
    took = (timer[stops - 1] - timer[starts]).astype(np.float64)
    cycles = (clock[stops - 1] - clock[starts]).astype(np.float64)
    fitted = (took >= segment_ns) & (cycles > 0)
    if fitted.any():
        common = float(np.median(cycles[fitted] / took[fitted]))
    else:
        common = float(cycles.sum() / took.sum()) if took.sum() > 0 and cycles.sum() > 0 else 1.0
    rates = np.where(fitted, cycles / np.where(fitted, took, 1.0), common)
    clocks = {}
    for start, stop, own, rate in zip(starts, stops, fitted, rates, strict=True):
        knots = _knots(timer[start:stop], segment_ns) + start if own else np.array([start])
        clocks[int(sm[start])] = SmClock(clock[knots], timer[knots], float(rate), bool(own))
    return clocks


def _knots(timer: NDArray[np.int64], segment_ns: int) -> NDArray[np.int64]:
    """Positions of the pairs to join: the first of each segment, half a segment apart at least, and the very last."""
    segment = (timer - timer[0]) // segment_ns
    first = np.flatnonzero(np.r_[True, segment[1:] > segment[:-1]])
    apart = np.r_[True, np.diff(timer[first]) * 2 >= segment_ns]  # else a pair late in one and one early in the next
    first = first[apart]
    near_end = timer[-1] - timer[first] < segment_ns // 2
    return np.r_[first[~near_end | (first == 0)], timer.size - 1]


def decode(words: NDArray[np.int64], capacity: int) -> Lanes:
    """Spans of a buffer copied from the device: int64 [lanes, HEADER_WORDS + EVENT_WORDS·capacity].

    Lanes whose header was never written (the buffer has more lanes than the launch had CTAs) are left out.
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
    event_lane = np.repeat(np.arange(lane.size), kept)
    slot = np.arange(event_lane.size) - np.repeat(np.cumsum(kept) - kept, kept)
    events = words[:, HEADER_WORDS:].reshape(len(words), capacity, EVENT_WORDS)[lane[event_lane], slot]
    first = events[:, 0]
    kind = (first >> 48) & 0xFF
    waits = kind >= min(WAITS.values())
    anchor, second = np.where(waits, 0, events[:, 1]), np.where(waits, events[:, 1], events[:, 2])
    opened = clock[event_lane, 0]
    began = opened + (((first & _CLOCK_MASK) - (opened & _CLOCK_MASK)) & _CLOCK_MASK)  # the low bits may have wrapped
    began = np.where(waits, _followed(began, waits, clock[:, 0], event_lane), began)
    ended = began + (((second & 0xFFFFFFFF) - (first & 0xFFFFFFFF)) & 0xFFFFFFFF)

    event_sm, read = sm[event_lane], anchor != 0
    pairs = Pairs(
        np.concatenate([sm, sm, event_sm[read]]),
        np.concatenate([timer[:, 0], timer[:, 1], anchor[read]]),
        np.concatenate([clock[:, 0], clock[:, 1], began[read]]),
    )
    clocks = fit_clocks(pairs)
    readings = np.concatenate([clock[:, 0], clock[:, 1], began, ended])
    times = _to_ns(clocks, np.concatenate([sm, sm, event_sm, event_sm]), readings)
    times -= times[: lane.size].min()
    bounds = np.cumsum([lane.size, lane.size, began.size])
    lane_start, lane_end, event_start, event_end = np.split(times, bounds)
    backwards = (
        # Waits lie inside of tiles; among themselves the spans of a lane follow each other.
        sum(_overlaps(event_lane[part], began[part], ended[part]) for part in (waits, ~waits))
        + int((ended > clock[event_lane, 1]).sum())
        + int((timer[:, 1] < timer[:, 0]).sum())
        + int((clock[:, 1] < clock[:, 0]).sum())
    )
    return Lanes(
        lane=lane,
        sm=sm,
        start_ns=lane_start,
        end_ns=lane_end,
        offered=offered,
        kept=kept,
        event_lane=event_lane,
        kind=kind,
        stage=((first >> 56) & 0xFF) - 1,
        tile=((second >> 32) & 0xFFFFFFFF) - 1,
        event_start_ns=event_start,
        event_end_ns=event_end,
        clock=_judge(clocks, pairs, backwards),
    )


def _followed(
    began: NDArray[np.int64], short: NDArray[np.bool_], opened: NDArray[np.int64], lane: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Where events begin of which the ``short`` ones have the lower 32 bits of the clock only.

    Such a one is at most 2³¹ cycles from the event before it, or from its lane's ``opened``.
    """
    if not lane.size:
        return began
    new = np.r_[True, lane[1:] != lane[:-1]]
    low = began & 0xFFFFFFFF
    before = np.where(new, opened[lane] & 0xFFFFFFFF, np.roll(low, 1))
    step = (low - before + (1 << 31) & 0xFFFFFFFF) - (1 << 31)
    run = np.cumsum(step)
    # Counted from the last event that is known whole, or from the lane's first.
    base = np.maximum.accumulate(np.where(~short | new, np.arange(lane.size), 0))
    return np.where(short, opened[lane] + step, began)[base] + run - run[base]


def _overlaps(lane: NDArray[np.int64], began: NDArray[np.int64], ended: NDArray[np.int64]) -> int:
    """Spans that begin before the one before them, of the same lane, has ended."""
    return int(((lane[1:] == lane[:-1]) & (began[1:] < ended[:-1])).sum())


def _to_ns(clocks: dict[int, SmClock], sm: NDArray[np.int64], clock: NDArray[np.int64]) -> NDArray[np.int64]:
    """Global timer (ns) of clock readings on SMs ``sm``."""
    times = np.empty_like(clock)
    order = np.argsort(sm, kind="stable")
    ends = np.flatnonzero(np.r_[sm[order][1:] != sm[order][:-1], True]) + 1
    for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        rows = order[start:end]
        times[rows] = clocks[int(sm[rows[0]])].to_ns(clock[rows])
    return times


def _judge(clocks: dict[int, SmClock], pairs: Pairs, order_violations: int) -> ClockFit:
    """What the fit is worth: spread of the SMs' rates, and how far pairs lie from it."""
    residual = np.abs(_to_ns(clocks, pairs.sm, pairs.clock) - pairs.timer)
    rates = np.array([clock.rate for clock in clocks.values() if clock.fitted])
    checked = residual.size - sum(clock.clock.size for clock in clocks.values())
    return ClockFit(
        rate_ghz=float(np.median([clock.rate for clock in clocks.values()])),
        rate_spread_ppm=float(np.ptp(rates) / np.median(rates) * 1e6) if rates.size > 1 else 0.0,
        residual_ns_p99=float(np.percentile(residual, 99)),
        residual_ns_max=float(residual.max()),
        pairs_checked=int(checked),
        sms_fitted=int(rates.size),
        sms_median_rate=len(clocks) - int(rates.size),
        order_violations=order_violations,
    )
