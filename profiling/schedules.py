"""Measured tile costs run under another schedule, on another number of SMs, or at another price of asking for a tile.

A replay deals the tiles of one launch, in the order and by the rule of a schedule, to workers that take as long for
each as the recording says, plus what fetching a tile costs. It is a model: a tile costs what it cost beside the
neighbours that it had, so that a prediction stands beside its error wherever a measurement exists.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from profiling.errors import UserError
from profiling.tiles_measured import Tiles

SCHEDULES = ("static", "dynamic", "balanced", "balanced-dynamic")
"""From the plainest on: neither counter nor sorting; a counter; a sorted table; both. Not `grid`: what the hardware
takes to start a CTA is in no recording."""
ON_DEMAND = ("dynamic", "balanced-dynamic")


@dataclass(frozen=True)
class Prices:
    """What stands between two tiles of a worker, ns: the next of a fixed deal, and one asked for."""

    strided_ns: float
    on_demand_ns: float


PRICES = {"forward": Prices(65.0, 415.0), "backward": Prices(575.0, 785.0)}
"""Measured: `fetch` of the shipped H200 recordings over their tiles. Forward 60 to 69 and 378 to 430 (an atomic
counter, then the table); backward 557 to 587 and 780 to 795 (a tile's gradients are written before the next loads)."""

EMPTY_NS, CLEARED_NS = 2650.0, 890.0
"""What a tile without work costs, ns: dealt like any other, and cleared behind the tiles by a sorted schedule.
Measured: hsp-half-empty forward on an H200, medians 2,559 to 2,646 and 888 to 903 (128 rows, D 128, bfloat16)."""

REPLAY_ERROR = 0.035
"""Largest error of a replay against a measured makespan, relative: 3.2 % over the 42 pairs of shipped recordings of one
workload and direction (forward 1.7 %), and each with itself. Schedules that lie closer together than this are not told
apart."""

MOST_SMS = 4096
"""More than any GPU has by far; each costs a replay time and memory."""
LONGEST_FETCH_NS = 1e9


@dataclass(frozen=True)
class Replay:
    """What a replay predicts, ns.

    Attributes:
        bound_ns: no schedule of these tiles on these SMs ends earlier: perfectly spread work, or the longest tile, with
            those without work at the least that one costs under any schedule.
        optimum_ns: of `balanced-dynamic` without a window, which deals about the longest first: by Graham's bound, the
            best possible deal takes at least its makespan / (4/3 − 1/(3 G)), G workers. NaN for the others.
        busy: float64 [workers], each worker's time with tiles and their fetching.
    """

    schedule: str
    sms: int
    makespan_ns: float
    bound_ns: float
    optimum_ns: float
    busy: np.ndarray

    @property
    def headroom(self) -> float:
        """The makespan against the bound: 1 is none left to gain."""
        return self.makespan_ns / self.bound_ns if self.bound_ns else 1.0


def replay(
    tiles: Tiles, schedule: str, *, sms: int | None = None, fetch_ns: float | None = None, cluster: int | None = None
) -> Replay:
    """Run the tiles under ``schedule``.

    ``sms``: on so many SMs (the recording's by default). ``fetch_ns``: the price of fetching a tile; by default as the
    recording measured it where it deals in the same way, else its direction's PRICES. ``cluster`` 2, by default as
    recorded: neighbouring blocks of a sequence run on pairs of SMs, and a pair takes as long as its longer tile. Tiles
    without work cost what the recording says where its schedule treats them alike, else EMPTY_NS or CLEARED_NS.

    Raises:
        UserError: unknown schedule, fewer SMs than a cluster has or more than MOST_SMS, another cluster size than 1 or
            2, a price that is negative or over LONGEST_FETCH_NS.
    """
    if schedule not in SCHEDULES:
        raise UserError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    cluster = tiles.cluster if cluster is None else cluster
    if cluster not in (1, 2):
        raise UserError(f"cluster: expected 1 or 2, got {cluster}")
    workers = _workers(tiles.sms if sms is None else sms, cluster)
    if fetch_ns is not None and not 0 <= fetch_ns <= LONGEST_FETCH_NS:
        raise UserError(f"fetch_ns: expected 0 to {LONGEST_FETCH_NS:,.0f} (1 s), got {fetch_ns:g}")
    fetch = fetch_price(tiles, schedule) if fetch_ns is None else fetch_ns
    units = _units(tiles, cluster)
    cost, columns = units.longest(_cost_under(tiles, schedule)), units.longest(tiles.columns)
    least = units.longest(np.minimum(tiles.cost, _empty_at(tiles, CLEARED_NS)))
    bound = max(float(least.sum()) / workers, float(least.max(initial=0.0)))
    dealt = _deal(cost, columns, schedule, workers, fetch)
    busy = np.zeros(workers)
    np.maximum.at(busy, dealt.worker, dealt.end_ns)
    # All workers clear rows alike, behind the tiles.
    makespan = float(busy.max(initial=0.0)) + dealt.cleared_ns + tiles.ramp_ns
    optimum = makespan / (4 / 3 - 1 / (3 * workers)) if schedule == "balanced-dynamic" else float("nan")
    return Replay(schedule, workers * cluster, makespan, bound, optimum, busy)


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each tile of a replay runs, ns from the launch's first start.

    Attributes:
        tile: int64 [T'], places in the natural order, in the order in which they are dealt; under a sorted schedule
            those without work are left out.
        worker: int64 [T']; start_ns, end_ns: float64 [T'], the last end is the replay's makespan without clearing.
        workers: how many there are; cleared_ns: what each spends clearing rows, behind its tiles.
    """

    tile: np.ndarray
    worker: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    workers: int
    cleared_ns: float


def timeline(tiles: Tiles, schedule: str) -> Timeline:
    """Which worker runs which tile when in `replay(tiles, schedule)`, on the recording's SMs, in its pairs of them.

    Raises:
        UserError: unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise UserError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
    units, cluster = _units(tiles, tiles.cluster), tiles.cluster
    cost, columns = units.longest(_cost_under(tiles, schedule)), units.longest(tiles.columns)
    dealt = _deal(cost, columns, schedule, _workers(tiles.sms, cluster), fetch_price(tiles, schedule))
    # Of a pair each worker runs one tile of the two, where there are two.
    tile = np.stack([units.first, units.second][:cluster], axis=1)[dealt.tile].ravel()
    worker = (dealt.worker[:, None] * cluster + np.arange(cluster)).ravel()
    real = tile >= 0
    start, end = (np.repeat(moment, cluster)[real] + tiles.ramp_ns for moment in (dealt.start_ns, dealt.end_ns))
    return Timeline(tile[real], worker[real], start, end, dealt.workers * cluster, dealt.cleared_ns)


def _deal(cost: np.ndarray, columns: np.ndarray, schedule: str, workers: int, fetch_ns: float) -> Timeline:
    """Who runs what when, from the first fetch on; tiles cost ``cost``, ns, and are sorted by ``columns``."""
    is_sorted = schedule.startswith("balanced")
    tile, cleared = np.arange(len(cost)), 0.0
    if is_sorted:
        order = np.argsort(-columns, kind="stable")
        work = columns[order] > 0
        tile, cleared = order[work], float(cost[order[~work]].sum())
    if schedule in ON_DEMAND:
        worker, end = _first_free(cost[tile], workers, fetch_ns)
    else:
        worker, end = owners(len(tile), workers, is_sorted), np.empty(len(tile))
        by_worker = np.argsort(worker, kind="stable")
        for own in np.split(by_worker, np.flatnonzero(np.diff(worker[by_worker])) + 1):
            end[own] = np.cumsum(cost[tile[own]] + fetch_ns)
    return Timeline(tile, worker, end - cost[tile], end, workers, cleared / workers)


def _first_free(cost: np.ndarray, workers: int, fetch_ns: float) -> tuple[np.ndarray, np.ndarray]:
    """(worker, end) of each tile where it goes to whoever is free first."""
    free = [(0.0, worker) for worker in range(workers)]
    owner, ends = [0] * len(cost), [0.0] * len(cost)
    for tile, took in enumerate((cost + fetch_ns).tolist()):
        since, owner[tile] = free[0]
        ends[tile] = since + took
        heapq.heapreplace(free, (ends[tile], owner[tile]))
    return np.asarray(owner, dtype=np.int64), np.asarray(ends, dtype=np.float64)


def _cost_under(tiles: Tiles, schedule: str) -> np.ndarray:
    """The tiles' costs, ns; of those without work as the recording says where ``schedule`` treats them alike."""
    is_sorted = schedule.startswith("balanced")
    if is_sorted == tiles.schedule.startswith("balanced"):
        return tiles.cost
    return _empty_at(tiles, CLEARED_NS if is_sorted else EMPTY_NS)


def _workers(sms: int, cluster: int) -> int:
    if not cluster <= sms <= MOST_SMS:
        raise UserError(f"sms: expected {cluster} to {MOST_SMS:,}, got {sms:,}")
    return sms // cluster


def fetch_price(tiles: Tiles, schedule: str) -> float:
    """What fetching a tile costs under ``schedule``, ns: as recorded where that deals in the same way, else PRICES."""
    asks, prices = schedule in ON_DEMAND, PRICES[tiles.shape.direction]
    if (tiles.schedule in ON_DEMAND) == asks:
        return tiles.fetch_ns
    return prices.on_demand_ns if asks else prices.strided_ns


def _empty_at(tiles: Tiles, price_ns: float) -> np.ndarray:
    """The tiles' costs, ns, with another price for those without work."""
    return np.where(tiles.columns > 0, tiles.cost, price_ns)


@dataclass(frozen=True, eq=False)
class _Units:
    """What is dealt as one: a tile, or the ``first`` and ``second`` of two (−1: none), int64, places of tiles."""

    first: np.ndarray
    second: np.ndarray

    def longest(self, of: np.ndarray) -> np.ndarray:
        """The larger of the two tiles' values."""
        return np.where(self.second >= 0, np.maximum(of[self.first], of[self.second]), of[self.first])


def _units(tiles: Tiles, cluster: int) -> _Units:
    count = len(tiles.place)
    if cluster == 1:
        return _Units(np.arange(count), np.full(count, -1))
    # Blocks 2i and 2i + 1 of one head: a head's next block stands `heads` tiles further.
    even = np.flatnonzero(tiles.place % 2 == 0)
    other = np.minimum(even + tiles.shape.heads, count - 1)
    return _Units(even, np.where(tiles.place[other] == tiles.place[even] + 1, other, -1))


def owners(count: int, workers: int, zigzag: bool) -> np.ndarray:
    """int64 [count]: the worker of each tile of a fixed deal, in the order in which they are dealt."""
    turn, place = np.divmod(np.arange(count), workers)
    return np.where(zigzag & (turn % 2 == 1), workers - 1 - place, place)
