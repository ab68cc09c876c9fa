"""Which schedule suits a user's own lengths: padding waste, and expected times through a recording's cost model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiling.cost_model import CostModel, columns_met, cost_model, model_notes, modelled_tiles
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
        notes: where the model reaches beyond what it was fitted to, and a fit to few tiles.
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
    def fastest(self) -> str:
        """The schedule of the shortest expected time, whether or not it is the choice."""
        return min(self.replays, key=lambda found: found.makespan_ns).schedule

    @property
    def words(self) -> str:
        """One sentence: what to choose, what it buys, and why it is not the fastest where it is another."""
        times = {found.schedule: found.makespan_ns for found in self.replays}
        best, static, fastest = times[self.choice], times["static"], times[self.fastest]
        if self.choice == self.fastest == "static":
            return f"choose static: {duration(best)} expected, and no schedule is expected to take less"
        within = (
            f"within the replay's error ({percent(REPLAY_ERROR)}) of the fastest, {self.fastest} ({duration(fastest)})"
        )
        if self.choice == "static":
            return f"choose static: {duration(best)} expected, {within}, and the simplest"
        gain = f"{duration(best)} expected, {static / best:.2f}× faster than static ({duration(static)})"
        return f"choose {self.choice}: {gain}" + ("" if self.choice == self.fastest else f"; {within}, and simpler")


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
        notes=model_notes(model, [columns_met(tiles)]),
    )


def _wasted(used: np.ndarray, padded: np.ndarray) -> float:
    total = float(padded.sum())
    return 1 - float(used.sum()) / total if total else 0.0
