"""Rows of a recording from what a recorder's lanes hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from jfa.lanes import KINDS, Lanes

NAMES = {number: name for name, number in KINDS.items()}


def rows_of(
    lanes: Lanes,
    roles: Sequence[str],
    level: str,
    tile_columns: Callable[[np.ndarray, np.ndarray], dict[str, np.ndarray]],
    launch: int = 0,
) -> pd.DataFrame:
    """A row a span, as `Recording` wants them: lanes' lives as `cta` events, and at level tile and above what they did.

    ``roles``: of each CTA, in the order of its lanes. ``tile_columns`` gives tile, batch, head and block of the tiles
    that the kernel numbered, int64 [events], and the CTAs that did them.
    """
    lives = pd.DataFrame(
        {
            "cta": lanes.lane // len(roles),
            "role": lanes.lane % len(roles),
            "sm": lanes.sm,
            "event": "cta",
            "tile": -1,
            "batch": -1,
            "head": -1,
            "block": -1,
            "stage": -1,
            "start_ns": lanes.start_ns,
            "end_ns": lanes.end_ns,
        }
    )
    frames = [lives]
    if level != "cta":
        lane = lanes.lane[lanes.event_lane]
        spans = {
            "cta": lane // len(roles),
            "role": lane % len(roles),
            "sm": lanes.sm[lanes.event_lane],
            "event": pd.Series(lanes.kind).map(NAMES),
            "stage": lanes.stage,
            **tile_columns(lanes.tile, lane // len(roles)),
            "start_ns": lanes.event_start_ns,
            "end_ns": lanes.event_end_ns,
        }
        frames.append(pd.DataFrame(spans))
    rows = pd.concat(frames, ignore_index=True)
    role = pd.Categorical.from_codes(rows["role"].to_numpy(), pd.Index(list(roles)))
    return rows.assign(launch=launch, role=role)


def losses(taken: Sequence[Lanes]) -> dict[str, Any]:
    """The metadata `events`: how many were written, and how many a full lane could not take, by lane."""
    by_lane: dict[str, int] = {}
    for lanes in taken:
        missing = lanes.offered - lanes.kept
        for position in np.flatnonzero(missing):
            lane = str(int(lanes.lane[position]))
            by_lane[lane] = by_lane.get(lane, 0) + int(missing[position])
    written = sum(int(lanes.kept.sum()) + len(lanes.lane) for lanes in taken)
    return {"written": written, "lost": sum(by_lane.values()), "lost_by_lane": by_lane}


def worst_clock(taken: Sequence[Lanes]) -> dict[str, float | int]:
    """The metadata `clock`: the fit of the launch that fits worst."""
    return max((lanes.clock for lanes in taken), key=lambda fit: (fit.order_violations, fit.residual_ns_max)).metadata()
