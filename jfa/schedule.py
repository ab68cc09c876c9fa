"""Which tiles there are, in which order they run, and which CTA takes which.

A table lists *items*, (batch, block) pairs; every head of an item is a tile of its own, heads innermost. Forward tiles
own a block of queries, backward tiles a block of keys. Tables live on the device, which alone knows how many tiles
there are; the host's launch gets by with an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

SCHEDULES = ("grid", "static", "balanced", "dynamic", "balanced-dynamic")
AUTO_SCHEDULE = "balanced-dynamic"

DEAL_ONCE, DEAL_STRIDED, DEAL_ZIGZAG, DEAL_ON_DEMAND = 0, 1, 2, 3
_DEAL = {
    "grid": DEAL_ONCE,
    "static": DEAL_STRIDED,
    "balanced": DEAL_ZIGZAG,
    "dynamic": DEAL_ON_DEMAND,
    "balanced-dynamic": DEAL_ON_DEMAND,
}


PART_SHIFT = 20
"""Bit at which the number of an item's part begins, above its block of rows, where long sequences are cut."""


def deal(schedule: str) -> int:
    """How CTAs take tiles under ``schedule``: the kernels' ``DEAL`` constant."""
    return _DEAL[schedule]


def is_sorted(schedule: str) -> bool:
    """Whether the schedule sorts tiles by cost and drops those without work."""
    return schedule.startswith("balanced")


@dataclass(frozen=True)
class Lengths:
    """Lengths of one side (queries or keys): jagged by ``offsets`` [B + 1], or ``uniform`` rows for every sequence.

    ``total`` bounds the jagged tokens, ``longest`` one sequence's.
    """

    offsets: Tensor | None
    uniform: int
    total: int
    longest: int

    def max_items(self, batch: int, block: int) -> int:
        """Upper bound on blocks of ``block`` rows over all sequences, known without reading the device."""
        if self.offsets is None:
            return batch * -(-self.uniform // block)
        by_total = (self.total + batch * (block - 1)) // block
        return min(by_total, batch * -(-self.longest // block))


@dataclass(frozen=True)
class Items:
    """One direction's table on the device.

    ``pairs`` int32 [max_items, 2]: (batch, block), work first. ``counts`` int32 [3]: items with work, items in all, and
    a zero that the first launch of a fresh table may count in. With ``split`` > 0 sequences of more columns than that
    are cut into parts, and block is block + (part << PART_SHIFT).
    """

    pairs: Tensor
    counts: Tensor
    split: int = 0

    @property
    def max_items(self) -> int:
        return self.pairs.shape[0]


@dataclass(frozen=True)
class TileTable:
    """A batch's tables for forward and backward, made once by :func:`jfa.plan` and passed to every layer's call.

    The rest says what they were made for, so that a call on something else is refused: ``block_q`` and ``block_kv``,
    rows of a forward and of a backward tile; ``rows`` of q and of k; ``window`` (left, right), −1 being unbounded.
    """

    schedule: str
    forward: Items
    backward: Items
    block_q: int
    block_kv: int
    broadcast_q: bool
    batch: int
    rows: tuple[int, int]
    window: tuple[int, int]
