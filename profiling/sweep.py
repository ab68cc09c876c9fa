"""From which density and skew on each schedule wins: lengths drawn on a grid, costs from a recording's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from profiling.cost_model import columns_met, cost_model, model_notes, modelled_tiles
from profiling.errors import UserError
from profiling.lengths import LONGEST
from profiling.schedules import REPLAY_ERROR, SCHEDULES, replay
from profiling.text import count
from profiling.tiles_measured import MOST_TILES, Tiles

DENSITIES = tuple(round(0.1 * step, 1) for step in range(1, 11))
SHORT = {"static": "static", "dynamic": "dyn.", "balanced": "bal.", "balanced-dynamic": "bal.-dyn."}
"""The schedules' names where there is little room."""
SKEWS = tuple(round(0.2 * step, 1) for step in range(10))


@dataclass(frozen=True)
class Population:
    """Lengths drawn for one point of the grid.

    A share ``density`` of ``batch`` sequences is not empty; their lengths are log-normal about ``median`` tokens with
    the standard deviation ``skew`` of the logarithm (0: all alike). What is drawn below 1 is made 1, what is drawn over
    ``longest`` is cut to that.
    """

    batch: int = 1024
    queries: int = 256
    median: int = 1024
    longest: int = 32768
    seed: int = 0

    def lengths(self, density: float, skew: float) -> np.ndarray:
        """int64 [batch], in tokens."""
        drawn, full = self._drawn(density, skew)
        return np.where(full, np.clip(drawn, 1, self.longest), 0).astype(np.int64)

    def outside(self, density: float, skew: float) -> tuple[int, int]:
        """How many lengths were drawn below 1, and how many over ``longest``."""
        drawn, full = self._drawn(density, skew)
        # A length is what is left without the fraction.
        return int((full & (drawn < 1)).sum()), int((full & (drawn >= self.longest + 1)).sum())

    def _drawn(self, density: float, skew: float) -> tuple[np.ndarray, np.ndarray]:
        """(lengths as drawn, which sequences have keys), float64 and bool [batch]."""
        rng = np.random.default_rng(self.seed)
        drawn = np.exp(np.log(self.median) + skew * rng.standard_normal(self.batch))
        full = rng.permutation(self.batch) < round(density * self.batch)
        return drawn, full


def sweep(
    like: Tiles,
    population: Population,
    densities: Iterable[float] = DENSITIES,
    skews: Iterable[float] = SKEWS,
    *,
    sms: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """Expected times of every schedule at every point, of values that are given twice once.

    Returns:
        A row a (density, skew, schedule): predicted_ns, bound_ns, headroom, gain (against `static` at that point),
        best: the plainest schedule within REPLAY_ERROR of the point's quickest; and how many of the point's sequences
        have keys (sequences), were drawn below 1 (raised) and over the population's longest (cut). attrs: grade
        "modelled", sms, and notes, a tuple of lines that a reader must know.

    Raises:
        UserError: a density outside (0, 1], a negative skew, a population without sequences or queries, a median over
            its longest; as `cost_model`.
    """
    densities, skews = tuple(dict.fromkeys(densities)), tuple(dict.fromkeys(skews))
    _check(population, densities, skews)
    model = cost_model(like)
    shape = replace(like.shape, window=(-1, -1))
    rows, met, points = [], [], [(density, skew) for density in densities for skew in skews]
    for done, (density, skew) in enumerate(points):
        if progress:
            progress(done, len(points))
        kv_lens = _lengths(population, density, skew)
        tiles = modelled_tiles(like, model, shape, np.full(len(kv_lens), population.queries), kv_lens)
        raised, cut = population.outside(density, skew)
        about = {"sequences": int((kv_lens > 0).sum()), "raised": raised, "cut": cut}
        rows += [{"density": density, "skew": skew, **row, **about} for row in _replays(tiles, sms)]
        met.append(columns_met(tiles))
    if progress:
        progress(len(points), len(points))
    result = pd.DataFrame(rows)
    notes = (*model_notes(model, met), *_notes_on_lengths(result, population))
    result.attrs |= {"grade": "modelled", "sms": like.sms if sms is None else sms, "notes": notes}
    return result


def _notes_on_lengths(table: pd.DataFrame, population: Population) -> list[str]:
    points = table.drop_duplicates(["density", "skew"])
    kinds = {
        "cut": f"were drawn over {population.longest:,} keys and cut to that (--longest)",
        "raised": "were drawn below 1 key and made 1",
    }
    return [_note_on_lengths(points, kind, what) for kind, what in kinds.items() if points[kind].any()]


def _note_on_lengths(points: pd.DataFrame, kind: str, what: str) -> str:
    most = points.iloc[int(points[kind].to_numpy().argmax())]
    where = f"at {int((points[kind] > 0).sum()):,} of {count(len(points), 'point')}"
    return (
        f"lengths that {what}: {where}, at most {most[kind]:,} of {count(most['sequences'], 'length')} "
        f"(density {most['density']:g}, skew {most['skew']:g})"
    )


def _lengths(population: Population, density: float, skew: float) -> np.ndarray:
    kv_lens = population.lengths(density, skew)
    if not kv_lens.any():
        raise UserError(
            f"density {density:g}: leaves none of {population.batch:,} sequences any keys; give a larger one"
        )
    return kv_lens


def _replays(tiles: Tiles, sms: int | None) -> list[dict[str, object]]:
    """A row a schedule, without the point."""
    found = {name: replay(tiles, name, sms=sms) for name in SCHEDULES}
    quickest = min(each.makespan_ns for each in found.values())
    best = next(name for name, each in found.items() if each.makespan_ns <= quickest * (1 + REPLAY_ERROR))
    static = found["static"].makespan_ns
    return [
        {
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
    for name, most in {
        "batch": MOST_TILES,
        "queries": LONGEST,
        "longest": LONGEST,
        "median": population.longest,
    }.items():
        _check_range(name, getattr(population, name), most)


def _check_range(name: str, value: int, most: int) -> None:
    if 1 <= value <= most:
        return
    mend = "; give a larger longest length as well (--longest)" if name == "median" and value > most else ""
    raise UserError(f"{name}: expected 1 to {most:,}, got {value:,}{mend}")
