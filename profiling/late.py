"""Who a wait was for: the role that ended it, and what that role was doing meanwhile.

A barrier's name says who ends its waits: `x_full` is completed by the roles that themselves wait for `x_empty`, and
`x_empty` by those that wait for `x_full`; what has no such twin (`turn`) by the other roles that wait for it too. The
moment at which a role got hold of the buffer is the end of its own wait for the twin of that buffer; before it, the
role was waiting for something else or working, afterwards the buffer was "in flight" (a load on its way) or "in use".
Where several roles end a wait, the one that got hold of the buffer last was late.

They are looked for in the waiting role's CTA; of CTAs that work in pairs also or only in the other one, for barriers
that it has a part in. Moments on two SMs are then compared, which is as good as the recording's clock fit.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from profiling.recording import Recording
from profiling.waits import PREFIX, Waits, waits_of

AFTER = {"full": "in flight", "empty": "in use"}
WORKING = "working"
OTHER = " of the other CTA"
OWN, BOTH, ONLY_OTHER = ((False,), (False, True), (True,))
EXCHANGED = {"part": ONLY_OTHER, "next": ONLY_OTHER}
"""Buffers that one CTA of a pair fills for the other: partial sums of dK and dV, and the next tile."""
LOADED_FOR_BOTH = {"k": BOTH, "v": BOTH}
"""Buffers that both CTAs fill and empty, where a pair does two blocks of a tile (`kernel.blocks` 2)."""


def late(recording: Recording, role: str | None = None) -> pd.DataFrame:
    """Each role's waiting time by who was late and what that role was doing.

    Returns:
        A row a (role, barrier, late, doing): role and barrier that waited; late: the role that ended the waits, maybe
        "of the other CTA"; doing: "in flight", "in use", "working", or "wait:…" for its own waits; total_ns; share of
        the waiting role's life.
        Each (role, barrier)'s rows sum to its waits. Longest first; none for a role that does not occur. attrs as of
        `profiling.waits.waits`. A first wait, for a buffer that no one has had yet, counts as "in use".

    Raises:
        RecordingError: as `waits_of`.
    """
    found = waits_of(recording)
    shared: dict[str, tuple[bool, ...]] = dict(EXCHANGED) if recording.get("kernel.cluster") == 2 else {}
    if shared and recording.get("kernel.blocks") == 2:
        shared |= LOADED_FOR_BOTH
    rows: list[tuple[str, str, str, str, float]] = []
    for waiting, barrier in sorted(set(zip(found.role.tolist(), found.barrier.tolist(), strict=True))):
        if role is None or found.roles[waiting] == role:
            rows += _of(found, waiting, barrier, shared.get(found.barriers[barrier].rpartition("_")[0], OWN))
    lived = dict(zip(found.roles, np.nansum(found.lives, axis=0), strict=True))
    result = pd.DataFrame(rows, columns=["role", "barrier", "late", "doing", "total_ns"]).astype({"total_ns": float})
    result = result[result["total_ns"] > 0]
    result["share"] = result["total_ns"] / np.array([lived[name] for name in result["role"]], dtype=float)
    result = result.sort_values("total_ns", ascending=False, kind="stable").reset_index(drop=True)
    result.attrs = {"grade": "derived", "title": recording.title(), "warnings": recording.warnings()}
    return result


def twin(barrier: str) -> str:
    """The barrier on which the roles wait that complete this one: k_full and k_empty are each other's; "" for none.

    Those that have added dQ are those that get tiles.
    """
    if barrier == "dq_added":
        return "item_full"
    for one, other in (("_full", "_empty"), ("_empty", "_full")):
        if barrier.endswith(one):
            return barrier.removesuffix(one) + other
    return ""


def _of(found: Waits, waiting: int, barrier: int, where: tuple[bool, ...]) -> list[tuple[str, str, str, str, float]]:
    """The rows of one role's waits at one barrier, ended by roles of its own CTA, or (True) of the other one."""
    own = np.flatnonzero((found.role == waiting) & (found.barrier == barrier))
    name = found.barriers[barrier]
    other = twin(name)
    by = found.barriers.index(other if other in found.barriers else name)
    roles = sorted(set(found.role[found.barrier == by].tolist()))
    enders = [(r, away) for away in where for r in roles if away or r != waiting]
    # Of a kernel or a recording without them nobody can be said to be late.
    without = (found.partner[found.lane[own]] < 0) if where == ONLY_OTHER else np.full(len(own), not enders)
    unknown = (found.roles[waiting], name, "unknown", WORKING, float(found.lasted[own[without]].sum()))
    if without.all():
        return [unknown]
    own = own[~without]
    start, end = found.start[own], found.end[own]
    lanes = {away: found.partner[found.lane[own]] if away else found.lane[own] for away in where}
    held = np.stack([_got_hold(found, ender, by, own, lanes[away]) for ender, away in enders])
    latest = held.argmax(axis=0)
    rows = []
    for index, (ender, away) in enumerate(enders):
        chosen = latest == index
        if not chosen.any():
            continue
        begin, stop = start[chosen], end[chosen]
        hold = np.clip(held[index][chosen], begin, stop)
        after = AFTER.get(name.rpartition("_")[2], "issuing")
        late_role = found.roles[ender] + OTHER * away
        rows.append((late_role, after, float((stop - hold).sum())))
        states = _states(found, ender, lanes[away][chosen], begin, hold)
        rows += [(late_role, doing, total) for doing, total in states]
    return [unknown, *((found.roles[waiting], name, late_role, doing, total) for late_role, doing, total in rows)]


def _got_hold(found: Waits, role: int, barrier: int, of: np.ndarray, lane: np.ndarray) -> np.ndarray:
    """When ``role`` last ended a wait on ``lane``, for the same buffer, before each wait of ``of`` ended.

    −1 where it never had.
    """
    theirs = np.flatnonzero((found.role == role) & (found.barrier == barrier))
    span = int(found.end.max()) + 1
    stages = int(found.stage.max()) + 2

    def key(lane: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return (lane.astype(np.int64) * stages + found.stage[rows] + 1) * span + found.end[rows]

    keys = key(found.lane[theirs], theirs)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    asked = key(lane, of)
    at = np.searchsorted(keys, asked, "right") - 1
    ends = np.where(at >= 0, keys[np.maximum(at, 0)], -1)
    same = (at >= 0) & (ends // span == asked // span)
    return np.where(same, ends % span, -1)


def _states(found: Waits, role: int, lane: np.ndarray, begin: np.ndarray, stop: np.ndarray) -> list[tuple[str, float]]:
    """What ``role`` did between ``begin`` and ``stop`` on each lane, summed: its waits by barrier, and the rest."""
    total = float((stop - begin).sum())
    rows = []
    rest = total
    for barrier in sorted(set(found.barrier[found.role == role].tolist())):
        waited = _overlap(found, (found.role == role) & (found.barrier == barrier), lane, begin, stop)
        rest -= waited
        rows.append((PREFIX + found.barriers[barrier], waited))
    return [*rows, (WORKING, max(rest, 0.0))]


def _overlap(found: Waits, which: np.ndarray, lane: np.ndarray, begin: np.ndarray, stop: np.ndarray) -> float:
    """Time of the waits ``which``, which do not overlap on a lane, within the spans from ``begin`` to ``stop``."""
    span = int(found.end.max()) + 1
    starts = found.lane[which].astype(np.int64) * span + found.start[which]
    order = np.argsort(starts, kind="stable")
    starts, lasted = starts[order], found.lasted[which][order]
    before = np.concatenate([[0], np.cumsum(lasted)])

    def until(moment: np.ndarray) -> np.ndarray:
        at = np.searchsorted(starts, lane.astype(np.int64) * span + moment, "right")
        last = np.maximum(at - 1, 0)
        into = np.where(at > 0, lane.astype(np.int64) * span + moment - starts[last], 0)
        return before[last] + np.where(at > 0, np.minimum(into, lasted[last]), 0)

    return float((until(stop) - until(begin)).sum())
