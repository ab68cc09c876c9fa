"""Which tiles there are, in which order they run, and which CTA takes which.

A table lists *items*, (batch, block) pairs; every head of an item is a tile of its own, heads innermost. Tables are
built on the device by vectorised operations: no number of tiles ever travels to the host, whose launch only needs an
upper bound. Forward tiles own a block of queries, backward tiles a block of keys: one builder serves both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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

    def per_sequence(self, batch: int, device: torch.device) -> Tensor:
        """int32 [batch]."""
        if self.offsets is None:
            return torch.full((batch,), self.uniform, dtype=torch.int32, device=device)
        return self.offsets.diff().to(torch.int32)

    def max_items(self, batch: int, block: int) -> int:
        """Upper bound on blocks of ``block`` rows over all sequences, known without reading the device."""
        if self.offsets is None:
            return batch * -(-self.uniform // block)
        by_total = (self.total + batch * (block - 1)) // block
        return min(by_total, batch * -(-self.longest // block))


@dataclass(frozen=True)
class Items:
    """One direction's table on the device.

    ``pairs`` int32 [max_items, 2]: (batch, block), work first. ``counts`` int32 [2]: items with work, items in all.
    """

    pairs: Tensor
    counts: Tensor

    @property
    def max_items(self) -> int:
        return self.pairs.shape[0]


@dataclass(frozen=True)
class TileTable:
    """A batch's tables for forward and backward, made once by :func:`jfa.plan` and passed to every layer's call."""

    schedule: str
    forward: Items
    backward: Items
    block_q: int
    block_kv: int
    batch: int
    rows: tuple[int, int]
    window: tuple[int, int]


def build_items(
    rows: Lengths,
    columns: Lengths,
    batch: int,
    block: int,
    *,
    before: int,
    after: int,
    by_cost: bool,
    device: torch.device,
) -> Items:
    """The table of the side that owns tiles (``rows``), in blocks of ``block``, against the other side (``columns``).

    ``before`` and ``after`` bound the columns a row sees, end-aligned as for attention windows (−1: unbounded); the
    backward, whose rows are keys, passes the window's two sides exchanged. ``by_cost`` sorts items by the number of
    columns that they meet, longest first, and keeps those without work behind ``counts[0]``.
    """
    bound = rows.max_items(batch, block)
    if bound == 0:
        return Items(
            torch.zeros((0, 2), dtype=torch.int32, device=device), torch.zeros(2, dtype=torch.int32, device=device)
        )
    row_len, column_len = rows.per_sequence(batch, device), columns.per_sequence(batch, device)
    ends = ((row_len + (block - 1)) // block).cumsum(0, dtype=torch.int32)
    rank = torch.arange(bound, dtype=torch.int32, device=device)
    owner = torch.searchsorted(ends, rank, right=True, out_int32=True)
    real = rank < ends[-1]
    owner = owner.clamp_(max=batch - 1)
    index = owner.long()
    blocks = (row_len + (block - 1)) // block
    position = rank - (ends - blocks)[index]
    if not by_cost or (columns.offsets is None and columns.uniform > 0 and before < 0 and after < 0):  # equal costs
        counts = torch.stack((ends[-1], ends[-1]))
        return Items(torch.stack((owner, position), 1), counts)
    cost = _columns_met(position * block, row_len[index], column_len[index], block, before, after)
    cost = torch.where(real, cost, -1)
    cost, order = cost.sort(descending=True, stable=True)
    counts = torch.stack(((cost > 0).sum(dtype=torch.int32), ends[-1]))
    return Items(torch.stack((owner, position), 1)[order], counts)


def _columns_met(start: Tensor, row_len: Tensor, column_len: Tensor, block: int, before: int, after: int) -> Tensor:
    """Columns that at least one row of a block sees, times nothing when the block has no rows: int32, element-wise."""
    if before < 0 and after < 0:
        return column_len
    shift = column_len - row_len
    last = torch.minimum(start + block, row_len) - 1
    low = (start + shift - before).clamp(min=0) if before >= 0 else torch.zeros_like(start)
    high = torch.minimum(column_len, last + shift + after + 1) if after >= 0 else column_len
    return (high - low).clamp(min=0)
