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

from dataclasses import dataclass

import numpy as np
import pandas as pd

from profiling.errors import UserError
from profiling.launches import Launch, basis_of, blocks_of, labelled, launches_of, one_launch, own_sms
from profiling.recording import Recording
from profiling.tiles import tail_sequences, tail_tiles, tile_cost, tile_spans

__all__ = [
    "PARTS",
    "Occupancy",
    "occupancy",
    "sm_time",
    "summary",
    "tail_sequences",
    "tail_tiles",
    "tile_cost",
    "tile_spans",
]

PARTS = ("work_ns", "ramp_ns", "fetch_ns", "tail_ns", "unused_ns")
"""The parts of an SM's time, which sum to total_ns."""


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


def sm_time(recording: Recording) -> pd.DataFrame:
    """Each SM's time in each launch, in parts.

    Returns:
        A row a (launch, SM): launch int32, sm int32, work_ns, ramp_ns, fetch_ns, tail_ns, unused_ns, total_ns int64
        (the five parts sum to total_ns, the launch's makespan), tiles int64 (different ones), ctas int64.
        Every SM of gpu.sm_count has a row, of an excerpt each that it has spans of. attrs: basis, grade, title,
        coverage, warnings.

    Raises:
        RecordingError: gpu.sm_count is missing or smaller than the number of SMs seen, or no span is work.
    """
    frames = [_launch_time(recording, launch) for launch in launches_of(recording)]
    return labelled(pd.concat(frames, ignore_index=True), recording)


def summary(recording: Recording, times: pd.DataFrame | None = None) -> pd.DataFrame:
    """Each launch's SM time in total; `times` is `sm_time(recording)` where that is at hand.

    Returns:
        A row a launch: launch, makespan_ns, sms, sms_left (to another kernel), tiles, ctas; work_ns … unused_ns (sums
        over the SMs) and work_share … unused_share (of sms × makespan, NaN where that is 0); fair_ns = work_ns /
        (sms − sms_left), when perfectly spread work would have ended; headroom = makespan / fair_ns (NaN without work);
        tail_start_ns, when the first SM that worked had no work left; tail_sms_idle, how many of those that worked were
        idle on average from then to the end; busiest_sm, with the most work; last_sm, whose work ended last (−1 without
        work); basis, grade, coverage. attrs as of `sm_time`.

    Raises:
        RecordingError: as `sm_time`.
    """
    times = sm_time(recording) if times is None else times
    launches = times.groupby("launch", sort=True)
    own = own_sms(recording, int(launches.size().iloc[0]))
    result = pd.DataFrame([_launch_summary(int(str(key)), group, own) for key, group in launches])
    result["basis"], result["grade"], result["coverage"] = basis_of(recording), recording.grade, recording.coverage()
    return labelled(result, recording)


def occupancy(recording: Recording, bins: int = 400, launch: int = 0) -> Occupancy:
    """How busy each SM was in each of `bins` equal parts of a launch; the bins' integral is the SM's work_ns.

    Raises:
        RecordingError: as `sm_time`.
        UserError: bins < 1, or no such launch.
    """
    if bins < 1:
        raise UserError(f"bins is {bins}; expected 1 or more")
    rows = one_launch(recording, launch)
    blocks = blocks_of(rows)
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
        basis=basis_of(recording),
        grade=recording.grade,
        title=recording.title(),
        warnings=tuple(recording.warnings()),
    )


def _launch_time(recording: Recording, rows: Launch) -> pd.DataFrame:
    blocks, sms = blocks_of(rows), len(rows.sms)
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


def _tiles_on(recording: Recording, rows: Launch) -> np.ndarray:
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


def _ctas_on(recording: Recording, rows: Launch) -> np.ndarray:
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


def _launch_summary(launch: int, times: pd.DataFrame, own: int) -> dict[str, float]:
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
        "sms_left": sms - own,
        "tiles": int(times["tiles"].sum()),
        "ctas": int(times["ctas"].sum()),
        **sums,
        **{part.replace("_ns", "_share"): total / all_ns if all_ns else np.nan for part, total in sums.items()},
        "fair_ns": sums["work_ns"] / own,
        "headroom": own * makespan / sums["work_ns"] if sums["work_ns"] else np.nan,
        "tail_start_ns": tail_start,
        "tail_sms_idle": int(worked["tail_ns"].sum()) / tail_length if tail_length else 0.0,
        "busiest_sm": int(worked["sm"].iloc[int(worked["work_ns"].argmax())]) if len(worked) else -1,
        "last_sm": int(worked["sm"].iloc[int(ended.argmax())]) if len(worked) else -1,
    }
