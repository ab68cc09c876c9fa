"""From which density and skew on each schedule wins: lengths drawn on a grid, costs from a recording's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from profiling.cost_model import CostModel, cost_model, modelled_tiles
from profiling.errors import UserError
from profiling.schedules import REPLAY_ERROR, SCHEDULES, replay
from profiling.tiles_measured import Shape, Tiles

DENSITIES = tuple(round(0.1 * step, 1) for step in range(1, 11))
SHORT = {"static": "static", "dynamic": "dyn.", "balanced": "bal.", "balanced-dynamic": "bal.-dyn."}
"""The schedules' names where there is little room."""
SKEWS = tuple(round(0.2 * step, 1) for step in range(10))


@dataclass(frozen=True)
class Population:
    """Lengths drawn for one point of the grid.

    A share ``density`` of ``batch`` sequences is not empty; their lengths are log-normal about ``median`` tokens with
    the standard deviation ``skew`` of the logarithm (0: all alike), at most ``longest``.
    """

    batch: int = 1024
    queries: int = 256
    median: int = 1024
    longest: int = 32768
    seed: int = 0

    def lengths(self, density: float, skew: float) -> np.ndarray:
        """int64 [batch], in tokens."""
        rng = np.random.default_rng(self.seed)
        drawn = np.exp(np.log(self.median) + skew * rng.standard_normal(self.batch))
        full = rng.permutation(self.batch) < round(density * self.batch)
        return np.where(full, np.clip(drawn, 1, self.longest), 0).astype(np.int64)


def sweep(
    like: Tiles,
    population: Population,
    densities: Iterable[float] = DENSITIES,
    skews: Iterable[float] = SKEWS,
    *,
    sms: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """Expected times of every schedule at every point.

    Returns:
        A row a (density, skew, schedule): predicted_ns, bound_ns, headroom, gain (against `static` at that point), and
        best: the plainest schedule within REPLAY_ERROR of the point's quickest. attrs: grade "modelled".

    Raises:
        UserError: a density outside (0, 1], a negative skew, a population without sequences or queries; as
            `cost_model`.
    """
    densities, skews = tuple(densities), tuple(skews)
    _check(population, densities, skews)
    model = cost_model(like)
    shape = replace(like.shape, window=(-1, -1))
    rows, points = [], [(density, skew) for density in densities for skew in skews]
    for done, (density, skew) in enumerate(points):
        if progress:
            progress(done, len(points))
        rows += _point(like, model, shape, population, density, skew, sms)
    if progress:
        progress(len(points), len(points))
    result = pd.DataFrame(rows)
    result.attrs |= {"grade": "modelled", "sms": like.sms if sms is None else sms}
    return result


def _point(
    like: Tiles, model: CostModel, shape: Shape, population: Population, density: float, skew: float, sms: int | None
) -> list[dict[str, object]]:
    kv_lens = population.lengths(density, skew)
    if not kv_lens.any():
        raise UserError(
            f"density {density:g}: leaves none of {population.batch:,} sequences any keys; give a larger one"
        )
    tiles = modelled_tiles(like, model, shape, np.full(len(kv_lens), population.queries), kv_lens)
    found = {name: replay(tiles, name, sms=sms) for name in SCHEDULES}
    quickest = min(each.makespan_ns for each in found.values())
    best = next(name for name, each in found.items() if each.makespan_ns <= quickest * (1 + REPLAY_ERROR))
    static = found["static"].makespan_ns
    return [
        {
            "density": density,
            "skew": skew,
            "schedule": name,
            "predicted_ns": each.makespan_ns,
            "bound_ns": each.bound_ns,
            "headroom": each.headroom,
            "gain": static / each.makespan_ns if each.makespan_ns else 1.0,
            "best": best,
        }
        for name, each in found.items()
    ]


def _check(population: Population, densities: tuple[float, ...], skews: tuple[float, ...]) -> None:
    if not densities or not skews:
        raise UserError("sweep: expected at least one density and one skew")
    if wrong := [value for value in densities if not 0 < value <= 1]:
        raise UserError(f"density {wrong[0]}: expected a share of the sequences, above 0 and at most 1")
    if wrong := [value for value in skews if not 0 <= value < 10]:
        raise UserError(f"skew {wrong[0]}: expected the standard deviation of the lengths' logarithm, 0 to 10")
    for name in ("batch", "queries", "median", "longest"):
        if getattr(population, name) < 1:
            raise UserError(f"{name}: expected 1 or more, got {getattr(population, name)}")
