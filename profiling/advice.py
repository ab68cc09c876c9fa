"""Which schedule suits a user's own lengths: padding waste, and expected times through a recording's cost model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiling.cost_model import CostModel, cost_model, modelled_tiles
from profiling.errors import UserError
from profiling.schedules import REPLAY_ERROR, SCHEDULES, Replay, replay
from profiling.text import duration, percent
from profiling.tiles_measured import Shape, Tiles


@dataclass(frozen=True, eq=False)
class Advice:
    """What to expect of some lengths.

    Attributes:
        tokens_wasted, pairs_wasted: shares of the tokens, and of the (query, key) pairs, that padding every sequence to
            the longest would add; empty: sequences without keys.
        replays: what each of SCHEDULES is expected to take; choice: the plainest within REPLAY_ERROR of the quickest.
        padded_ns: what the same kernel is expected to take with every sequence padded to the longest, balanced.
        notes: where the model reaches beyond what it was fitted to.
    """

    sequences: int
    empty: int
    tokens_wasted: float
    pairs_wasted: float
    replays: tuple[Replay, ...]
    choice: str
    padded_ns: float
    model: CostModel
    notes: tuple[str, ...]

    @property
    def words(self) -> str:
        """One sentence: what to choose, and what it buys."""
        times = {found.schedule: found.makespan_ns for found in self.replays}
        best, static = times[self.choice], times["static"]
        if self.choice == "static":
            spread = max(times.values()) / min(times.values()) - 1
            return (
                f"choose static: no schedule is expected to gain more than the model's error ({percent(REPLAY_ERROR)}; "
                f"they lie within {percent(spread)})"
            )
        gain = static / best
        return f"choose {self.choice}: {duration(best)} expected, {gain:.2f}× faster than static ({duration(static)})"


def advise(like: Tiles, shape: Shape, q_lens: np.ndarray, kv_lens: np.ndarray, sms: int | None = None) -> Advice:
    """Expected times of these lengths, int64 [B], on ``sms`` SMs that each work as fast as the recording's.

    Raises:
        UserError: as `cost_model` and `modelled_tiles`; no tiles at all.
    """
    model = cost_model(like)
    tiles = modelled_tiles(like, model, shape, q_lens, kv_lens)
    if not len(tiles.cost):
        raise UserError("lengths: make no tiles (no sequence has rows), so that there is nothing to schedule")
    replays = tuple(replay(tiles, name, sms=sms) for name in SCHEDULES)
    quickest = min(found.makespan_ns for found in replays)
    choice = next(found.schedule for found in replays if found.makespan_ns <= quickest * (1 + REPLAY_ERROR))
    padded = [np.full(len(lens), lens.max(initial=0)) for lens in (q_lens, kv_lens)]
    filled = modelled_tiles(like, model, shape, *padded)
    return Advice(
        sequences=len(kv_lens),
        empty=int((kv_lens == 0).sum()),
        tokens_wasted=_wasted(kv_lens, padded[1]),
        pairs_wasted=_wasted(q_lens * kv_lens, padded[0] * padded[1]),
        replays=replays,
        choice=choice,
        padded_ns=replay(filled, "balanced-dynamic", sms=sms).makespan_ns,
        model=model,
        notes=_notes(model, tiles),
    )


def _wasted(used: np.ndarray, padded: np.ndarray) -> float:
    total = float(padded.sum())
    return 1 - float(used.sum()) / total if total else 0.0


def _notes(model: CostModel, tiles: Tiles) -> tuple[str, ...]:
    longest = int(tiles.columns.max(initial=0))
    if longest <= model.longest:
        return ()
    return (
        f"tiles of up to {longest:,} columns: the model was fitted to {model.shortest:,} to {model.longest:,}, and "
        "what lies beyond is extrapolated (18 % off at most from 8,166 to 32,768 on the shipped recordings)",
    )
