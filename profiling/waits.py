"""Barrier waits by role, barrier and buffer: how long, how often, and when in a tile's life.

They need a recording at level `wait` of a kernel with roles. A role's life is the time from its start to its end in a
CTA; a wait belongs to the first tile of its CTA ("first tile": nothing runs ahead yet), to the first use of a barrier
in a tile ("tile boundary"), or to the steady state in between ("steady").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from profiling.errors import RecordingError
from profiling.recording import Recording

PREFIX = "wait:"
PHASES = ("first tile", "tile boundary", "steady")


@dataclass(frozen=True, eq=False)
class Waits:
    """All waits of a recording as arrays of one length, and what there is to name.

    Attributes:
        lane: which CTA of which launch, numbered 0 … lanes − 1; role, barrier: positions in `roles` and `barriers`.
        stage, tile: −1 where one does not apply; start, end: ns from the launch's first start; phase: in `PHASES`.
        lives: float64 [lanes, roles], how long each role lived, ns, and `begins` when it began; NaN where it did not.
        partner: [lanes], the lane of the other CTA of a cluster of two; −1 where there is none.
    """

    lane: np.ndarray
    role: np.ndarray
    barrier: np.ndarray
    stage: np.ndarray
    tile: np.ndarray
    start: np.ndarray
    end: np.ndarray
    phase: np.ndarray
    roles: tuple[str, ...]
    barriers: tuple[str, ...]
    lives: np.ndarray
    begins: np.ndarray
    partner: np.ndarray

    @property
    def lasted(self) -> np.ndarray:
        """Each wait's length, ns."""
        return self.end - self.start


def waits_of(recording: Recording) -> Waits:
    """The waits of a recording.

    Raises:
        RecordingError: it holds no waits, or lost events, so that sums over them would be too small.
    """
    events = recording.events
    names = [str(name) for name in events["event"].cat.categories]
    is_wait = np.array([name.startswith(PREFIX) for name in names])
    codes = events["event"].cat.codes.to_numpy()
    rows = is_wait[codes]
    if not rows.any():
        raise RecordingError(
            f"{recording.source}: holds no waits; record a kernel with roles: python -m profiling record --level wait "
            "(on an sm_90 GPU)"
        )
    if recording.lost:
        raise RecordingError(
            f"{recording.source}: lost {recording.lost:,} events for want of room, so that sums over waits would be "
            "too small; record a smaller workload"
        )
    role = events["role"].cat.codes.to_numpy()
    lane = _lanes(events)
    shape = (int(lane.max()) + 1, len(events["role"].cat.categories))
    begins, lives = np.full(shape, np.nan), np.full(shape, np.nan)
    start, end = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    life = codes == names.index("cta") if "cta" in names else np.zeros(len(codes), dtype=bool)
    begins[lane[life], role[life]] = start[life]
    lives[lane[life], role[life]] = end[life] - start[life]
    number = np.cumsum(is_wait) - 1
    tile = events["tile"].to_numpy()[rows]
    barrier = number[codes[rows]]
    return Waits(
        lane=lane[rows],
        role=role[rows],
        barrier=barrier,
        stage=events["stage"].to_numpy()[rows],
        tile=tile,
        start=start[rows],
        end=end[rows],
        phase=_phases(lane[rows], role[rows], barrier, tile),
        roles=tuple(str(name) for name in events["role"].cat.categories),
        barriers=tuple(name.removeprefix(PREFIX) for name, wait in zip(names, is_wait, strict=True) if wait),
        lives=lives,
        begins=begins,
        partner=_partners(events, lane, recording.get("kernel.cluster") == 2),
    )


def _lanes(events: pd.DataFrame) -> np.ndarray:
    """A number a (launch, CTA), rising: the rows are ordered so."""
    launch, cta = events["launch"].to_numpy(), events["cta"].to_numpy()
    new = np.r_[False, (launch[1:] != launch[:-1]) | (cta[1:] != cta[:-1])]
    return np.cumsum(new)


def _partners(events: pd.DataFrame, lane: np.ndarray, paired: bool) -> np.ndarray:
    """Of each lane that of its launch's CTA with the neighbouring number, where CTAs work in pairs."""
    first = np.flatnonzero(np.r_[True, lane[1:] != lane[:-1]])
    if not paired:
        return np.full(len(first), -1)
    launch, cta = (events[name].to_numpy()[first].tolist() for name in ("launch", "cta"))
    at = {who: number for number, who in enumerate(zip(launch, cta, strict=True))}
    return np.array([at.get((launch, cta ^ 1), -1) for launch, cta in at])


def _phases(lane: np.ndarray, role: np.ndarray, barrier: np.ndarray, tile: np.ndarray) -> np.ndarray:
    """The phase of each wait; waits of a (lane, role) are in order of time."""
    who = lane.astype(np.int64) * 256 + role
    real = np.flatnonzero(tile >= 0)
    firsts = np.full(int(who.max()) + 1, -1, dtype=np.int64)
    firsts[who[real][::-1]] = tile[real][::-1]  # the earliest is written last
    by_barrier = np.lexsort((np.arange(len(who)), barrier, who))
    same = np.zeros(len(who), dtype=bool)
    a, b = by_barrier[1:], by_barrier[:-1]
    same[a] = (who[a] == who[b]) & (barrier[a] == barrier[b]) & (tile[a] == tile[b])
    phase = np.where(same, 2, 1)
    phase[(tile < 0) | (tile == firsts[who])] = 0
    return phase


def waits(recording: Recording) -> pd.DataFrame:
    """Waits by role, barrier, buffer and phase.

    Returns:
        A row a (role, barrier, stage, phase) that occurs: role, barrier, stage int (−1: none), phase str, count,
        total_ns, median_ns, p95_ns, share: of the role's life in all CTAs together, in [0, 1]. Longest in sum first.
        attrs: grade, title, warnings.

    Raises:
        RecordingError: as `waits_of`.
    """
    found = waits_of(recording)
    table = pd.DataFrame(
        {"role": found.role, "barrier": found.barrier, "stage": found.stage, "phase": found.phase, "ns": found.lasted}
    )
    keys = ["role", "barrier", "stage", "phase"]
    grouped = table.groupby(keys, sort=False)["ns"]
    result = grouped.agg(count="count", total_ns="sum", median_ns="median").reset_index()
    result["p95_ns"] = grouped.quantile(0.95).to_numpy()
    lived = np.nansum(found.lives, axis=0)
    result["share"] = result["total_ns"] / lived[result["role"]]
    result["role"] = [found.roles[i] for i in result["role"]]
    result["barrier"] = [found.barriers[i] for i in result["barrier"]]
    result["phase"] = [PHASES[i] for i in result["phase"]]
    result = result.sort_values("total_ns", ascending=False, kind="stable").reset_index(drop=True)
    result.attrs = {"grade": recording.grade, "title": recording.title(), "warnings": recording.warnings()}
    return result


def role_time(recording: Recording) -> pd.DataFrame:
    """Where each role's life went: waits by barrier, work, and idle time between tiles; the parts sum to the life.

    Returns:
        A row a (role, part): role, part ("wait:k_full", …; "work": in its tiles and not waiting, or for a role without
        tiles all time that it did not wait; "between tiles": outside of them and not waiting), total_ns, share of the
        role's life. attrs as of `waits`.

    Raises:
        RecordingError: as `waits_of`.
    """
    found = waits_of(recording)
    counts, tiles, inside = _tile_time(recording, found)
    rows = []
    for index, role in enumerate(found.roles):
        lived = float(np.nansum(found.lives[:, index]))
        own = found.role == index
        waited = np.bincount(found.barrier[own], found.lasted[own], minlength=len(found.barriers))
        for barrier, total in zip(found.barriers, waited, strict=True):
            if total or (found.barrier[own] == found.barriers.index(barrier)).any():
                rows.append((role, PREFIX + barrier, float(total), lived))
        if counts[index]:
            work = tiles[index] - inside[index]
            rows.append((role, "work", work, lived))
            rows.append((role, "between tiles", lived - float(waited.sum()) - work, lived))
        else:
            rows.append((role, "work", lived - float(waited.sum()), lived))
    result = pd.DataFrame(rows, columns=["role", "part", "total_ns", "lived_ns"])
    result["share"] = result["total_ns"] / result.pop("lived_ns")
    result.attrs = {"grade": recording.grade, "title": recording.title(), "warnings": recording.warnings()}
    return result


def _tile_time(recording: Recording, found: Waits) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per role: how many tiles it has, their time, and how much of it was spent waiting (ns); float64 [roles]."""
    events = recording.events
    names = [str(name) for name in events["event"].cat.categories]
    work = np.isin(events["event"].cat.codes.to_numpy(), [i for i, n in enumerate(names) if n in ("tile", "zero")])
    role, lane = events["role"].cat.codes.to_numpy()[work], _lanes(events)[work]
    start, end = events["start_ns"].to_numpy()[work], events["end_ns"].to_numpy()[work]
    tiles = np.bincount(role, end - start, minlength=len(found.roles)).astype(np.float64)
    inside = np.zeros(len(found.roles))
    span = int(max(end.max(initial=0), found.end.max())) + 1
    for index in range(len(found.roles)):
        own, theirs = role == index, found.role == index
        if not own.any() or not theirs.any():
            continue
        key = lane[own].astype(np.int64) * span + start[own]
        order = np.argsort(key, kind="stable")
        at = np.searchsorted(key[order], found.lane[theirs].astype(np.int64) * span + found.start[theirs], "right") - 1
        last = order[np.maximum(at, 0)]
        within = (at >= 0) & (lane[own][last] == found.lane[theirs]) & (found.end[theirs] <= end[own][last])
        inside[index] = found.lasted[theirs][within].sum()
    return np.bincount(role, minlength=len(found.roles)), tiles, inside
