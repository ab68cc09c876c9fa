"""Who a wait was for: the role that ended it, and what that role was doing meanwhile.

A barrier's name says who ends its waits: `x_full` is completed by the roles that themselves wait for `x_empty`, and
`x_empty` by those that wait for `x_full`; what has no such twin (`turn`) by the other roles that wait for it too. The
moment at which a role got hold of the buffer is the end of its own wait for the twin of that buffer; before it, the
role was waiting for something else or working, afterwards the buffer was "in flight" (a load on its way) or "in use".
Where several roles end a wait, the one that got hold of the buffer last was late. It is looked for in the waiting
role's own CTA: of two CTAs that load for both (`kernel.blocks` 2) the other's part in it is not told apart, and who
takes tiles for the pair is "unknown".
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from profiling.recording import Recording
from profiling.waits import PREFIX, Waits, waits_of

AFTER = {"full": "in flight", "empty": "in use"}
WORKING = "working"


def late(recording: Recording, role: str | None = None) -> pd.DataFrame:
    """Each role's waiting time by who was late and what that role was doing.

    Returns:
        A row a (role, barrier, late, doing): role and barrier that waited; late: the role that ended the waits; doing:
        "in flight", "in use", "working", or "wait:…" for its own waits; total_ns; share of the waiting role's life.
        Each (role, barrier)'s rows sum to its waits. Longest first; none for a role that does not occur. attrs as of
        `profiling.waits.waits`. A first wait, for a buffer that no one has had yet, counts as "in use".

    Raises:
        RecordingError: as `waits_of`.
    """
    found = waits_of(recording)
    rows: list[tuple[str, str, str, str, float]] = []
    for waiting, barrier in sorted(set(zip(found.role.tolist(), found.barrier.tolist(), strict=True))):
        if role is None or found.roles[waiting] == role:
            rows += _of(found, waiting, barrier)
    lived = dict(zip(found.roles, np.nansum(found.lives, axis=0), strict=True))
    result = pd.DataFrame(rows, columns=["role", "barrier", "late", "doing", "total_ns"]).astype({"total_ns": float})
    result = result[result["total_ns"] > 0]
    result["share"] = result["total_ns"] / np.array([lived[name] for name in result["role"]], dtype=float)
    result = result.sort_values("total_ns", ascending=False, kind="stable").reset_index(drop=True)
    warnings = recording.warnings()
    if recording.get("kernel.blocks") == 2:
        warnings.append("two CTAs load each buffer for both: that the other one is late shows as a load in flight")
    result.attrs = {"grade": "derived", "title": recording.title(), "warnings": warnings}
    return result


def twin(barrier: str) -> str:
    """The barrier on which the roles wait that complete this one: k_full and k_empty are each other's; "" for none."""
    for one, other in (("_full", "_empty"), ("_empty", "_full")):
        if barrier.endswith(one):
            return barrier.removesuffix(one) + other
    return ""


def _of(found: Waits, waiting: int, barrier: int) -> list[tuple[str, str, str, str, float]]:
    """The rows of one role's waits at one barrier."""
    own = np.flatnonzero((found.role == waiting) & (found.barrier == barrier))
    name = found.barriers[barrier]
    other = twin(name)
    by = found.barriers.index(other if other in found.barriers else name)
    enders = [r for r in sorted(set(found.role[found.barrier == by].tolist())) if r != waiting]
    if not enders:
        return [(found.roles[waiting], name, "unknown", WORKING, float(found.lasted[own].sum()))]
    start, end = found.start[own], found.end[own]
    held = np.stack([_got_hold(found, ender, by, own) for ender in enders])
    latest = held.argmax(axis=0)
    rows = []
    for index, ender in enumerate(enders):
        chosen = latest == index
        if not chosen.any():
            continue
        begin, stop = start[chosen], end[chosen]
        hold = np.clip(held[index][chosen], begin, stop)
        after = AFTER.get(name.rpartition("_")[2], "issuing")
        rows.append((ender, after, float((stop - hold).sum())))
        states = _states(found, ender, found.lane[own][chosen], begin, hold)
        rows += [(ender, doing, total) for doing, total in states]
    return [(found.roles[waiting], name, found.roles[ender], doing, total) for ender, doing, total in rows]


def _got_hold(found: Waits, role: int, barrier: int, of: np.ndarray) -> np.ndarray:
    """When ``role`` last ended a wait at ``barrier`` for the same CTA and buffer before each wait of ``of`` ended.

    −1 where it never had.
    """
    theirs = np.flatnonzero((found.role == role) & (found.barrier == barrier))
    span = int(found.end.max()) + 1
    stages = int(found.stage.max()) + 2

    def key(rows: np.ndarray) -> np.ndarray:
        return (found.lane[rows].astype(np.int64) * stages + found.stage[rows] + 1) * span + found.end[rows]

    keys = key(theirs)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    asked = key(of)
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
