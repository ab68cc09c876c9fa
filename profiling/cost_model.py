"""What a tile costs by how many columns it meets, so that a recording speaks about lengths that were never run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from profiling import examples
from profiling.errors import UserError
from profiling.schedules import CLEARED_NS, EMPTY_NS
from profiling.text import count, times
from profiling.tiles_measured import Shape, Tiles, tiles_of

FEW_TILES = 30
"""Fewer measured tiles than this make a fit to warn of."""

EXTRAPOLATED = ("hsp-loguniform", "hsp-half-empty")
MEASURED_TO = 32768
"""How far off a model is beyond the lengths that it was fitted to is known of the package's forward recordings of these
workloads, up to so many columns: they were held against hsp-extreme's measured makespans, 8.8 to 17.7 % off."""


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

    def cost(self, columns: np.ndarray | int) -> np.ndarray:
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


def columns_met(tiles: Tiles) -> tuple[int, int]:
    """(fewest, most) columns of the tiles with work; (0, 0) where none has any."""
    work = tiles.columns[tiles.columns > 0]
    return (int(work.min()), int(work.max())) if len(work) else (0, 0)


def model_notes(model: CostModel, met: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """What a reader must know of costs from this model, a line each.

    ``met``: what `columns_met` says of each set of lengths whose costs are asked for.
    """
    notes = (_few(model), _beyond(model, met), _below(model, met))
    return tuple(note for note in notes if note)


def _few(model: CostModel) -> str:
    if model.tiles >= FEW_TILES:
        return ""
    return (
        f"the model is fitted to {count(model.tiles, 'tile')}, expected {FEW_TILES} or more: give a recording of more "
        "with --recording"
    )


def _beyond(model: CostModel, met: Sequence[tuple[int, int]]) -> str:
    beyond = [most for _, most in met if most > model.longest]
    if not beyond:
        return ""
    longest = max(beyond)
    known = longest <= MEASURED_TO and _is_extrapolation_measured(model)
    how_far = (
        f" (18 % off at most from {model.longest:,} to {MEASURED_TO:,} on the shipped recordings)"
        if known
        else ": how far off it is there is not known"
    )
    return (
        f"tiles of up to {longest:,} columns{_points(beyond, met)}: the model was fitted to {model.shortest:,} to "
        f"{model.longest:,}, and what lies beyond is extrapolated, to {times(longest / model.longest)} the longest"
        + how_far
    )


def _below(model: CostModel, met: Sequence[tuple[int, int]]) -> str:
    below = [fewest for fewest, _ in met if 0 < fewest < model.shortest]
    # Towards no columns at all a cost is the fixed part: most fits hardly move below their shortest tile.
    if not below or model.cost(model.shortest) <= model.cost(min(below)) * (1 + model.error_p95):
        return ""
    return (
        f"tiles of as few as {count(min(below), 'column')}{_points(below, met)}: the model was fitted to "
        f"{model.shortest:,} to {model.longest:,}, and what lies below is extrapolated: how far off it is there is not "
        "known"
    )


def _points(those: Sequence[int], met: Sequence[tuple[int, int]]) -> str:
    return f" at {len(those):,} of {len(met):,} points" if len(met) > 1 else ""


def _is_extrapolation_measured(model: CostModel) -> bool:
    names = [name for name in examples.names() if name.startswith(tuple(f"{work}_forward_" for work in EXTRAPOLATED))]
    return any(cost_model(tiles_of(examples.load(*name.split("_")))) == model for name in names)


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
