"""What a tile costs by how many columns it meets, so that a recording speaks about lengths that were never run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from profiling.errors import UserError
from profiling.schedules import CLEARED_NS, EMPTY_NS
from profiling.tiles_measured import Shape, Tiles


@dataclass(frozen=True)
class CostModel:
    """Cost of a tile ≈ fixed_ns + per_column_ns · columns, fitted to measured tiles; and how far those lie from it.

    Attributes:
        error_p50, error_p95: median and 95th percentile of |measured / modelled − 1| over ``tiles`` tiles.
        shortest, longest: columns of the measured tiles; beyond them the model extrapolates.
    """

    fixed_ns: float
    per_column_ns: float
    error_p50: float
    error_p95: float
    tiles: int
    shortest: int
    longest: int

    def cost(self, columns: np.ndarray) -> np.ndarray:
        """float64, ns, of tiles with work."""
        return self.fixed_ns + self.per_column_ns * np.asarray(columns, dtype=np.float64)


def cost_model(tiles: Tiles) -> CostModel:
    """Fit a tile's cost to its columns: least squares of the relative error, so that short tiles count too.

    Raises:
        UserError: no tile has work.
    """
    work = (tiles.columns > 0) & (tiles.cost > 0)
    columns, cost = tiles.columns[work].astype(np.float64), tiles.cost[work]
    if not work.any():
        raise UserError("cost model: no tile of the recording has work, so that there is nothing to fit")
    basis = np.stack([1 / cost, columns / cost], axis=1)
    fixed, slope = np.linalg.lstsq(basis, np.ones(len(cost)), rcond=None)[0]
    if np.ptp(columns) == 0 or slope < 0:  # length explains nothing
        fixed, slope = float(np.mean(1 / cost) / np.mean(1 / cost**2)), 0.0
    elif fixed < 0:
        fixed, slope = 0.0, float(np.mean(columns / cost) / np.mean((columns / cost) ** 2))
    off = np.abs(cost / (fixed + slope * columns) - 1)
    median, worst = np.percentile(off, [50, 95])
    return CostModel(
        float(fixed), float(slope), float(median), float(worst), len(cost), int(columns.min()), int(columns.max())
    )


def modelled_tiles(like: Tiles, model: CostModel, shape: Shape, q_lens: np.ndarray, kv_lens: np.ndarray) -> Tiles:
    """Tiles of other lengths, int64 [B] each, with the ramp, prices and SMs of the recording that the model is of.

    Raises:
        UserError: lengths that do not match, or negative ones; other columns than the recording's where its tiles all
            meet as many.
    """
    if q_lens.shape != kv_lens.shape or q_lens.ndim != 1 or (q_lens < 0).any() or (kv_lens < 0).any():
        raise UserError("lengths: expected one length of 0 or more a sequence, for queries and keys alike")
    columns, place = shape.layout(q_lens, kv_lens)
    if model.shortest == model.longest and (columns[columns > 0] != model.longest).any():
        raise UserError(
            f"cost model: the recording's tiles all meet {model.longest:,} columns, so that it says nothing of others; "
            "take one of a workload whose tiles differ"
        )
    empty = CLEARED_NS if like.schedule.startswith("balanced") else EMPTY_NS
    cost = np.where(columns > 0, model.cost(columns), empty)
    return replace(like, shape=shape, cost=cost, columns=columns, place=place, measured_ns=float("nan"))
