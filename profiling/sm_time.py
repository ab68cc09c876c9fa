"""Where each SM's time went, how busy each was over time, and which tiles and sequences caused the tail.

For one launch, SMs × makespan = work + ramp + fetch + tail + unused, exactly, for each SM and in total (integer ns):

- work: the union of the SM's work spans over all CTAs on it, so that CTAs that overlap on one SM count once;
- ramp: from the launch's first start to the SM's first work (its CTA's prologue included);
- fetch: the time between its first and its last work in which it did not work;
- tail: from the end of its last work to the launch's last end;
- unused: the makespan, for an SM on which nothing ran.

An SM on which CTAs ran but found no work has ramp until its first CTA, and tail from there. Work spans are `tile` and
`zero` spans (basis "tile"); a recording at level `cta` has none, so whole CTAs count as work (basis "cta") and what
they spend between tiles hides in work. Every result carries basis, grade, title and warnings in `attrs` or fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from profiling.errors import RecordingError, UserError
from profiling.recording import WORK_EVENTS, Recording

PARTS = ("work_ns", "ramp_ns", "fetch_ns", "tail_ns", "unused_ns")
"""The parts of an SM's time, which sum to total_ns."""

TILE_COLUMNS = ("tile", "batch", "head", "block", "kv_len", "q_len")
COST_COLUMNS = ("launch", *TILE_COLUMNS, "cost_ns")
TAIL_COLUMNS = (*TILE_COLUMNS, "cta", "sm", "start_ns", "end_ns", "tail_ns", "late_ns")


@dataclass(frozen=True, eq=False)
class Occupancy:
    """How busy each SM was over one launch.

    Attributes:
        share: float32 [sms, bins] in [0, 1], the share of each bin in which the SM worked.
        edges_ns: float64 [bins + 1], the bins' edges, ns from the launch's first start.
        sms: int32 [sms], the SMs' numbers, rising; a row of `share` each.
        makespan_ns: the launch's last end.
        basis: "tile", or "cta" where whole CTAs count as work.
    """

    share: np.ndarray
    edges_ns: np.ndarray
    sms: np.ndarray
    makespan_ns: int
    launch: int
    basis: str
    grade: str
    title: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Launch:
    """One launch's rows as arrays, with each SM given a rank in `sms`."""

    launch: int
    rows: slice
    sms: np.ndarray
    rank: np.ndarray
    start: np.ndarray
    end: np.ndarray
    works: np.ndarray
    makespan: int


@dataclass(frozen=True, eq=False)
class _Blocks:
    """The union of work spans: blocks that do not touch, int64 [blocks], ordered by SM rank, then time."""

    rank: np.ndarray
    start: np.ndarray
    end: np.ndarray


def sm_time(recording: Recording) -> pd.DataFrame:
    """Each SM's time in each launch, in parts.

    Returns:
        A row a (launch, SM): launch int32, sm int32, work_ns, ramp_ns, fetch_ns, tail_ns, unused_ns, total_ns int64
        (the five parts sum to total_ns, the launch's makespan), tiles int64 (different ones that ran there), ctas int64.
        Every SM of gpu.sm_count has a row. attrs: basis, grade, title, coverage, warnings.

    Raises:
        RecordingError: gpu.sm_count is missing or smaller than the number of SMs seen, or no span is work.
    """
    frames = [_launch_time(recording, launch) for launch in _launches(recording)]
    return _labelled(pd.concat(frames, ignore_index=True), recording)


def summary(recording: Recording, times: pd.DataFrame | None = None) -> pd.DataFrame:
    """Each launch's SM time in total; `times` is `sm_time(recording)` where that is at hand.

    Returns:
        A row a launch: launch, makespan_ns, sms, tiles, ctas; work_ns … unused_ns (sums over the SMs) and work_share …
        unused_share (of sms × makespan, NaN where that is 0); fair_ns = work_ns / sms, when perfectly spread work would
        have ended; headroom = makespan / fair_ns (NaN without work); tail_start_ns, when the first SM that worked had
        no work left; tail_sms_idle, how many of those that worked were idle on average from then to the end;
        busiest_sm, with the most work; last_sm, whose work ended last (−1 without work); basis, grade, coverage.
        attrs as of `sm_time`.

    Raises:
        RecordingError: as `sm_time`.
    """
    times = sm_time(recording) if times is None else times
    result = pd.DataFrame([_launch_summary(int(str(key)), group) for key, group in times.groupby("launch", sort=True)])
    result["basis"], result["grade"], result["coverage"] = _basis(recording), recording.grade, recording.coverage()
    return _labelled(result, recording)


def occupancy(recording: Recording, bins: int = 400, launch: int = 0) -> Occupancy:
    """How busy each SM was in each of `bins` equal parts of a launch; the bins' integral is the SM's work_ns.

    Raises:
        RecordingError: as `sm_time`.
        UserError: bins < 1, or no such launch.
    """
    if bins < 1:
        raise UserError(f"bins is {bins}; expected 1 or more")
    rows = _one_launch(recording, launch)
    blocks = _blocks(rows)
    edges = np.linspace(0.0, rows.makespan, bins + 1)
    share = np.zeros((len(rows.sms), bins), dtype=np.float32)
    if rows.makespan:
        firsts = np.searchsorted(blocks.rank, np.arange(len(rows.sms) + 1))
        for sm, (first, last) in enumerate(zip(firsts[:-1], firsts[1:], strict=True)):
            if last > first:
                done = _work_until(blocks.start[first:last], blocks.end[first:last], edges)
                share[sm] = np.clip(np.diff(done) * (bins / rows.makespan), 0.0, 1.0)
    return Occupancy(
        share=share,
        edges_ns=edges,
        sms=rows.sms,
        makespan_ns=rows.makespan,
        launch=launch,
        basis=_basis(recording),
        grade=recording.grade,
        title=recording.title(),
        warnings=tuple(recording.warnings()),
    )


def tail_tiles(recording: Recording, launch: int = 0, count: int | None = 10) -> pd.DataFrame:
    """The tiles that still ran when perfectly spread work (work_ns / SMs) would have ended, the latest end first.

    Returns:
        tile, batch, head, block, kv_len, q_len, cta, sm, start_ns, end_ns; tail_ns, how long past that moment it ended;
        late_ns, how long past that moment it ran. kv_len and q_len are −1 where the metadata has no lengths. `count`
        None gives all. attrs: fair_ns (that moment), late_tiles (how many there are in all), and those of `sm_time`.

    Raises:
        RecordingError: as `sm_time`, recorded at level cta, or events lost (a full lane keeps its first, so just the
            tail is missing).
        UserError: no such launch.
    """
    late, fair = _late_tiles(recording, launch)
    result = late if count is None else late.head(count)
    result = _labelled(result[list(TAIL_COLUMNS)].reset_index(drop=True), recording)
    result.attrs |= {"fair_ns": fair, "late_tiles": len(late)}
    return result


def tail_sequences(recording: Recording, launch: int = 0, count: int | None = 10) -> pd.DataFrame:
    """The sequences to whom the late tiles of `tail_tiles` belong, the most time past that moment first.

    Returns:
        batch, kv_len, q_len, tiles (late ones), late_ns (their time past the moment, summed), late_share (of all late
        time), tail_ns (the latest end past it). attrs: fair_ns, late_tiles, and those of `sm_time`.

    Raises:
        RecordingError, UserError: as `tail_tiles`.
    """
    late, fair = _late_tiles(recording, launch)
    groups = late.groupby("batch", as_index=False, sort=True)
    result = groups.agg(
        kv_len=("kv_len", "first"),
        q_len=("q_len", "first"),
        tiles=("tile", "nunique"),
        late_ns=("late_ns", "sum"),
        tail_ns=("tail_ns", "max"),
    )
    result.insert(5, "late_share", result["late_ns"] / max(int(late["late_ns"].sum()), 1))
    result = result.sort_values(["late_ns", "batch"], ascending=[False, True], ignore_index=True)
    result = _labelled(result if count is None else result.head(count), recording)
    result.attrs |= {"fair_ns": fair, "late_tiles": len(late)}
    return result


def tile_spans(recording: Recording, launch: int = 0) -> pd.DataFrame:
    """Where and when each tile of a launch ran, as far as it was recorded: for Gantt charts.

    Returns:
        A row a (tile, CTA): launch, tile, batch, head, block, kv_len (−1 where the metadata has no lengths), cta, sm,
        start_ns, end_ns; spans of several roles merged. attrs as of `sm_time`.

    Raises:
        RecordingError: as `sm_time`, or recorded at level cta.
        UserError: no such launch.
    """
    spans = _tile_spans(recording, _one_launch(recording, launch).rows)
    known = recording.get("workload.kv_lens") is not None
    spans["kv_len"] = _of_batch(recording, "kv", spans["batch"].to_numpy(), "the tiles of a launch") if known else -1
    return _labelled(spans, recording)


def tile_cost(recording: Recording, *, allow_partial: bool = False) -> pd.DataFrame:
    """What each tile cost beside its sequence's lengths, for scatter plots and for replays under other schedules.

    Args:
        allow_partial: take a recording that lost events, and give the tiles that it has; a replay must not.

    Returns:
        A row a (launch, tile), ordered so: launch, tile, batch, head, block, kv_len, q_len, cost_ns int64. A tile that
        several roles record costs from its first start to its last end; one that several CTAs share, their sum. attrs
        as of `sm_time`.

    Raises:
        RecordingError: recorded at level cta, lengths missing in the metadata, events lost without `allow_partial`.
    """
    if not allow_partial:
        _refuse_loss(recording, "the costs of all tiles")
    spans = _tile_spans(recording, slice(None))
    spans["cost_ns"] = spans["end_ns"] - spans["start_ns"]
    keys = ["launch", "tile"]
    packed = (spans["launch"].to_numpy().astype(np.int64) << 32) | spans["tile"].to_numpy()
    order = np.argsort(packed, kind="stable")
    packed = packed[order]
    spans = spans.take(order)
    if (packed[1:] == packed[:-1]).any():
        same = {name: (name, "first") for name in ("batch", "head", "block")}
        spans = spans.groupby(keys, as_index=False, sort=False).agg(**same, cost_ns=("cost_ns", "sum"))
    for which in ("kv", "q"):
        spans[f"{which}_len"] = _of_batch(recording, which, spans["batch"].to_numpy(), "the cost of tiles by length")
    return _labelled(spans[list(COST_COLUMNS)].reset_index(drop=True), recording)


# -- one launch --------------------------------------------------------------------------------------------------------


def _basis(recording: Recording) -> str:
    names = set(recording.events["event"].cat.categories)
    if names & set(WORK_EVENTS) or recording.level in ("tile", "wait"):
        return "tile"
    if "cta" in names:
        return "cta"
    raise RecordingError(f"{recording.source}: no span is work (cta, tile or zero); record at level cta or tile")


def _launches(recording: Recording) -> Iterator[_Launch]:
    """The launches in order. Rows are ordered by launch, so that a launch's arrays are views."""
    events = recording.events
    launch = events["launch"].to_numpy()
    cuts = np.concatenate([[0], np.flatnonzero(launch[1:] != launch[:-1]) + 1, [len(launch)]])
    sms, working = _sms(recording), _working(recording)
    for first, last in zip(cuts[:-1], cuts[1:], strict=True):
        yield _launch_rows(events, slice(int(first), int(last)), sms, working)


def _one_launch(recording: Recording, launch: int) -> _Launch:
    column = recording.events["launch"].to_numpy()
    first, last = np.searchsorted(column, [launch, launch + 1])
    if first == last:
        raise UserError(f"{recording.source}: has no launch {launch}; it has {_some(np.unique(column))}")
    return _launch_rows(recording.events, slice(int(first), int(last)), _sms(recording), _working(recording))


def _launch_rows(events: pd.DataFrame, rows: slice, sms: np.ndarray, working: np.ndarray) -> _Launch:
    sm = events["sm"].to_numpy()[rows]
    if sms[-1] == len(sms) - 1:
        rank = sm
    else:
        ranks = np.zeros(int(sms[-1]) + 1, dtype=np.int16)
        ranks[sms] = np.arange(len(sms), dtype=np.int16)
        rank = ranks[sm]
    end = events["end_ns"].to_numpy()[rows]
    return _Launch(
        launch=int(events["launch"].to_numpy()[rows.start]),
        rows=rows,
        sms=sms,
        rank=rank,
        start=events["start_ns"].to_numpy()[rows],
        end=end,
        works=working[events["event"].cat.codes.to_numpy()[rows]],
        makespan=int(end.max()),
    )


def _working(recording: Recording) -> np.ndarray:
    """For each category of `event`, whether its spans are work."""
    names = WORK_EVENTS if _basis(recording) == "tile" else ("cta",)
    return np.array([name in names for name in recording.events["event"].cat.categories])


def _sms(recording: Recording) -> np.ndarray:
    """The numbers of all gpu.sm_count SMs, int32 rising. Numbers may have gaps (PTX does not promise otherwise): then
    the SMs seen are real, and the lowest free numbers stand for those that ran nothing."""
    count = recording.sm_count
    seen = np.flatnonzero(np.bincount(recording.events["sm"].to_numpy()))
    if len(seen) > count:
        raise RecordingError(
            f"{recording.source}: spans are on {len(seen)} SMs, but metadata key 'gpu.sm_count' is {count}; correct it"
        )
    free = np.setdiff1d(np.arange(count), seen)[: count - len(seen)]
    return np.sort(np.concatenate([seen, free])).astype(np.int32)


def _blocks(rows: _Launch) -> _Blocks:
    """Merge work spans. With starts and ends each sorted by themselves, a gap lies before the i-th start exactly where
    it is later than the (i−1)-th end: then as many spans have ended as have begun."""
    picked = rows.works
    bits = rows.makespan.bit_length()
    high = (rows.rank if picked.all() else rows.rank[picked]).astype(np.int64) << bits
    starts = high | (rows.start if picked.all() else rows.start[picked])
    ends = np.bitwise_or(high, rows.end if picked.all() else rows.end[picked], out=high)
    for keys in (starts, ends):
        if not (keys[1:] >= keys[:-1]).all():  # one CTA an SM: in order as they are
            keys.sort()
    # another SM's start is always later than an end, so that this also parts the SMs
    opens = np.ones(len(starts), dtype=bool)
    np.greater(starts[1:], ends[:-1], out=opens[1:])
    closes = np.append(opens[1:], True)[: len(opens)]
    starts, ends = starts[opens], ends[closes]
    low = (1 << bits) - 1
    return _Blocks(rank=starts >> bits, start=starts & low, end=ends & low)


def _launch_time(recording: Recording, rows: _Launch) -> pd.DataFrame:
    blocks, sms = _blocks(rows), len(rows.sms)
    work = np.bincount(blocks.rank, weights=blocks.end - blocks.start, minlength=sms).astype(np.int64)
    firsts = np.searchsorted(blocks.rank, np.arange(sms + 1))
    worked = firsts[1:] > firsts[:-1]
    begin, finish = np.zeros(sms, dtype=np.int64), np.zeros(sms, dtype=np.int64)
    begin[worked], finish[worked] = blocks.start[firsts[:-1][worked]], blocks.end[firsts[1:][worked] - 1]
    used = np.bincount(rows.rank, minlength=sms) > 0
    idle = used & ~worked
    if idle.any():
        earliest = np.full(sms, rows.makespan, dtype=np.int64)
        np.minimum.at(earliest, rows.rank, rows.start)
        begin[idle] = finish[idle] = earliest[idle]
    columns = {
        "launch": np.full(sms, rows.launch, dtype=np.int32),
        "sm": rows.sms,
        "work_ns": work,
        "ramp_ns": begin,
        "fetch_ns": finish - begin - work,
        "tail_ns": np.where(used, rows.makespan - finish, 0),
        "unused_ns": np.where(used, 0, rows.makespan),
        "total_ns": np.full(sms, rows.makespan, dtype=np.int64),
        "tiles": _tiles_on(recording, rows),
        "ctas": _ctas_on(recording, rows),
    }
    return pd.DataFrame(columns)


def _tiles_on(recording: Recording, rows: _Launch) -> np.ndarray:
    """How many different tiles ran on each SM, int64 [sms]."""
    events = recording.events
    categories = list(events["event"].cat.categories)
    tile = categories.index("tile") if "tile" in categories else -1
    picked = events["event"].cat.codes.to_numpy()[rows.rows] == tile
    if not picked.any():
        return np.zeros(len(rows.sms), dtype=np.int64)
    rank = rows.rank[picked]
    role = events["role"].cat.codes.to_numpy()[rows.rows][picked]
    if (role == role[0]).all():
        return np.bincount(rank, minlength=len(rows.sms))
    keys = np.unique((rank.astype(np.int64) << 32) | events["tile"].to_numpy()[rows.rows][picked].astype(np.uint32))
    return np.bincount(keys >> 32, minlength=len(rows.sms))


def _ctas_on(recording: Recording, rows: _Launch) -> np.ndarray:
    """How many CTAs ran on each SM, int64 [sms]; a CTA's rows are together, and on one SM."""
    cta = recording.events["cta"].to_numpy()[rows.rows]
    first = np.flatnonzero(np.concatenate([[True], cta[1:] != cta[:-1]]))
    return np.bincount(rows.rank[first], minlength=len(rows.sms))


def _work_until(start: np.ndarray, end: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Work done before each edge, float64 [edges], by one SM's blocks."""
    done = np.concatenate([[0], np.cumsum(end - start)])
    begun = np.searchsorted(start, edges, side="right")
    unfinished = np.maximum(end[np.maximum(begun, 1) - 1] - edges, 0.0)
    return done[begun] - np.where(begun > 0, unfinished, 0.0)


def _launch_summary(launch: int, times: pd.DataFrame) -> dict[str, float]:
    makespan, sms = int(times["total_ns"].iloc[0]), len(times)
    sums = {part: int(times[part].sum()) for part in PARTS}
    all_ns = sms * makespan
    worked = times[times["work_ns"] > 0]
    ended = worked["total_ns"] - worked["tail_ns"]
    tail_start = int(ended.min()) if len(worked) else makespan
    tail_length = makespan - tail_start
    return {
        "launch": launch,
        "makespan_ns": makespan,
        "sms": sms,
        "tiles": int(times["tiles"].sum()),
        "ctas": int(times["ctas"].sum()),
        **sums,
        **{part.replace("_ns", "_share"): total / all_ns if all_ns else np.nan for part, total in sums.items()},
        "fair_ns": sums["work_ns"] / sms,
        "headroom": all_ns / sums["work_ns"] if sums["work_ns"] else np.nan,
        "tail_start_ns": tail_start,
        "tail_sms_idle": int(worked["tail_ns"].sum()) / tail_length if tail_length else 0.0,
        "busiest_sm": int(worked["sm"].iloc[int(worked["work_ns"].argmax())]) if len(worked) else -1,
        "last_sm": int(worked["sm"].iloc[int(ended.argmax())]) if len(worked) else -1,
    }


# -- tiles -------------------------------------------------------------------------------------------------------------


def _late_tiles(recording: Recording, launch: int) -> tuple[pd.DataFrame, float]:
    _refuse_loss(recording, "what caused the tail")
    rows = _one_launch(recording, launch)
    blocks = _blocks(rows)
    fair = float((blocks.end - blocks.start).sum()) / len(rows.sms)
    spans = _tile_spans(recording, rows.rows, after=fair)
    spans["tail_ns"] = np.ceil(spans["end_ns"] - fair).astype(np.int64)
    spans["late_ns"] = np.minimum(spans["tail_ns"], spans["end_ns"] - spans["start_ns"])
    for which in ("kv", "q"):
        known = recording.get(f"workload.{which}_lens") is not None
        batch = spans["batch"].to_numpy()
        spans[f"{which}_len"] = _of_batch(recording, which, batch, "what caused the tail") if known else -1
    return spans.sort_values(["end_ns", "tile"], ascending=[False, True]), fair


def _tile_spans(recording: Recording, rows: slice, after: float = -1.0) -> pd.DataFrame:
    """A row a (launch, tile, CTA) that ends later than `after`: the tile spans, those of several roles merged."""
    events = recording.events
    if "tile" not in events["event"].cat.categories:
        if _basis(recording) == "cta":
            raise RecordingError(f"{recording.source}: recorded at level cta, without tiles; record with --level tile")
        picked = np.zeros(0, dtype=np.int64)
    else:
        code = list(events["event"].cat.categories).index("tile")
        in_rows = (events["event"].cat.codes.to_numpy()[rows] == code) & (events["end_ns"].to_numpy()[rows] > after)
        picked = np.flatnonzero(in_rows) + (rows.start or 0)
    names = ["launch", "tile", "batch", "head", "block", "cta", "sm", "role", "start_ns", "end_ns"]
    spans = pd.DataFrame({name: events[name].array[picked] for name in names}, copy=False)
    if len(spans) and int(spans["tile"].min()) < 0:
        raise RecordingError(f"{recording.source}: tile spans without a tile number; column 'tile' must be 0 or more")
    if spans["role"].nunique() > 1:
        keys = ["launch", "tile", "cta"]
        same = {name: (name, "first") for name in ("batch", "head", "block", "sm")}
        ends = {"start_ns": ("start_ns", "min"), "end_ns": ("end_ns", "max")}
        spans = spans.groupby(keys, as_index=False, sort=False).agg(**same, **ends)
    return spans.drop(columns="role", errors="ignore")


def _of_batch(recording: Recording, which: str, batch: np.ndarray, why: str) -> np.ndarray:
    """The length of each row's sequence, int64 [rows]."""
    lengths = recording.lengths(which, why)
    if len(batch) and not (0 <= int(batch.min()) and int(batch.max()) < len(lengths)):
        raise RecordingError(
            f"{recording.source}: column 'batch' spans {int(batch.min())} to {int(batch.max())}, but metadata key "
            f"'workload.{which}_lens' has {len(lengths)} lengths"
        )
    return lengths[batch]


def _refuse_loss(recording: Recording, wanted: str) -> None:
    if recording.lost:
        raise RecordingError(
            f"{recording.source}: {recording.lost} events were lost (coverage {recording.coverage():.2%}), so {wanted} "
            "cannot be told; record with more room a lane, or at a coarser level"
        )


def _labelled(frame: pd.DataFrame, recording: Recording) -> pd.DataFrame:
    frame.attrs = {
        "basis": _basis(recording),
        "grade": recording.grade,
        "title": recording.title(),
        "coverage": recording.coverage(),
        "warnings": recording.warnings(),
    }
    return frame


def _some(launches: np.ndarray) -> str:
    shown = ", ".join(str(launch) for launch in launches[:5])
    return shown + (f", … ({len(launches)} in all)" if len(launches) > 5 else "")
