"""What the analyses of SM time share: a launch's rows as arrays, its SMs, and the union of its work spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from profiling.errors import RecordingError, UserError
from profiling.recording import WORK_EVENTS, Recording


@dataclass(frozen=True, eq=False)
class Launch:
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
class Blocks:
    """The union of work spans: blocks that do not touch, int64 [blocks], ordered by SM rank, then time."""

    rank: np.ndarray
    start: np.ndarray
    end: np.ndarray


def basis_of(recording: Recording) -> str:
    names = set(recording.events["event"].cat.categories)
    if names & set(WORK_EVENTS) or recording.level in ("tile", "wait"):
        return "tile"
    if "cta" in names:
        return "cta"
    raise RecordingError(f"{recording.source}: no span is work (cta, tile or zero); record at level cta or tile")


def launches_of(recording: Recording) -> Iterator[Launch]:
    """The launches in order. Rows are ordered by launch, so that a launch's arrays are views."""
    events = recording.events
    launch = events["launch"].to_numpy()
    cuts = np.concatenate([[0], np.flatnonzero(launch[1:] != launch[:-1]) + 1, [len(launch)]])
    sms, working = _sms(recording), _working(recording)
    for first, last in zip(cuts[:-1], cuts[1:], strict=True):
        yield _launch_rows(events, slice(int(first), int(last)), sms, working)


def one_launch(recording: Recording, launch: int) -> Launch:
    column = recording.events["launch"].to_numpy()
    first, last = np.searchsorted(column, [launch, launch + 1])
    if first == last:
        raise UserError(f"{recording.source}: has no launch {launch}; it has {_some(np.unique(column))}")
    return _launch_rows(recording.events, slice(int(first), int(last)), _sms(recording), _working(recording))


def _launch_rows(events: pd.DataFrame, rows: slice, sms: np.ndarray, working: np.ndarray) -> Launch:
    sm = events["sm"].to_numpy()[rows]
    if sms[-1] == len(sms) - 1:
        rank = sm
    else:
        ranks = np.zeros(int(sms[-1]) + 1, dtype=np.int16)
        ranks[sms] = np.arange(len(sms), dtype=np.int16)
        rank = ranks[sm]
    end = events["end_ns"].to_numpy()[rows]
    return Launch(
        launch=int(events["launch"].to_numpy()[rows.start]),
        rows=rows,
        sms=sms,
        rank=rank,
        start=events["start_ns"].to_numpy()[rows],
        end=end,
        works=working[events["event"].cat.codes.to_numpy()[rows]],
        makespan=int(end.max()),
    )


def own_sms(recording: Recording, sms: int) -> int:
    """SMs over which the kernel's work can be spread, of ``sms`` in a launch: all but those left to another kernel.

    Of an excerpt, those that it has.
    """
    return sms if recording.get("excerpt") else max(sms - recording.sms_left, 1)


def _working(recording: Recording) -> np.ndarray:
    """For each category of `event`, whether its spans are work."""
    names = WORK_EVENTS if basis_of(recording) == "tile" else ("cta",)
    return np.array([name in names for name in recording.events["event"].cat.categories])


def _sms(recording: Recording) -> np.ndarray:
    """The numbers of all gpu.sm_count SMs, int32 rising; of an excerpt those that it has spans of.

    Numbers may have gaps (PTX does not promise otherwise): then the SMs seen are real, and the lowest free numbers
    stand for those that ran nothing.
    """
    count = recording.sm_count
    is_seen = np.zeros(np.iinfo(np.int16).max + 1, dtype=bool)
    is_seen[recording.events["sm"].to_numpy()] = True
    seen = np.flatnonzero(is_seen)
    if len(seen) > count:
        raise RecordingError(
            f"{recording.source}: spans are on {len(seen)} SMs, but metadata key 'gpu.sm_count' is {count}; correct it"
        )
    if recording.get("excerpt"):
        return seen.astype(np.int32)
    free = np.setdiff1d(np.arange(count), seen)[: count - len(seen)]
    return np.sort(np.concatenate([seen, free])).astype(np.int32)


def blocks_of(rows: Launch) -> Blocks:
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
    return Blocks(rank=starts >> bits, start=starts & low, end=ends & low)


def labelled(frame: pd.DataFrame, recording: Recording) -> pd.DataFrame:
    frame.attrs = {
        "basis": basis_of(recording),
        "grade": recording.grade,
        "title": recording.title(),
        "coverage": recording.coverage(),
        "warnings": recording.warnings(),
    }
    return frame


def _some(launches: np.ndarray) -> str:
    shown = ", ".join(str(launch) for launch in launches[:5])
    return shown + (f", … ({len(launches)} in all)" if len(launches) > 5 else "")
