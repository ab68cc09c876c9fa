"""Device functions that forward and backward share: dealing tiles, finding a sequence, and what rows may see."""

from __future__ import annotations

import triton
import triton.language as tl

from jfa import schedule

_DEAL_ONCE = tl.constexpr(schedule.DEAL_ONCE)
_DEAL_STRIDED = tl.constexpr(schedule.DEAL_STRIDED)
_DEAL_ZIGZAG = tl.constexpr(schedule.DEAL_ZIGZAG)


@triton.jit
def wide(value):
    """A scalar as int64; loop counters are plain integers in the interpreter."""
    return tl.full((), 0, tl.int64) + value


@triton.jit
def next_tile(tile, turn, counter, tile_count, DEAL: tl.constexpr, CLUSTER: tl.constexpr = 1):
    """The tile this CTA takes after ``tile``, its ``turn``-th (counted from 1); ``tile_count`` or more ends the loop.

    The first tile is the CTA's own index. Zigzag deals rounds of tiles to the CTAs, every other round backwards, so
    that over a sorted list each CTA gets long and short ones alike. On demand, ``counter`` starts at 0 and hands out
    the tiles behind the first round.
    """
    ctas = tl.num_programs(0) // CLUSTER
    if DEAL == _DEAL_ONCE:
        return tile_count
    elif DEAL == _DEAL_STRIDED:
        return tile + ctas
    elif DEAL == _DEAL_ZIGZAG:
        own = tl.program_id(0) // CLUSTER
        return turn * ctas + tl.where(turn % 2 == 0, own, ctas - 1 - own)
    else:
        return ctas + tl.atomic_add(counter, 1, sem="relaxed")


@triton.jit
def sequence(offsets, batch, UNIFORM: tl.constexpr, uniform_len):
    """First row and length of a sequence, int32; without offsets every sequence is rows 0 … ``uniform_len``."""
    if UNIFORM:
        return 0, uniform_len
    else:
        start = tl.load(offsets + batch)
        return start.to(tl.int32), (tl.load(offsets + batch + 1) - start).to(tl.int32)


@triton.jit
def columns_met(
    first, last, shift, columns, before, after, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr, BLOCK: tl.constexpr
):
    """Columns that rows ``first`` … ``last`` (inclusive) see, as four bounds: low ≤ full_low ≤ full_high ≤ high.

    Row i sees columns i + shift − before … i + shift + after of ``columns``. Blocks of ``BLOCK`` from low on need a
    mask below full_low and from full_high on; between the two every row sees every column. All but high are multiples
    of ``BLOCK``.
    """
    low = 0
    full_low = 0
    if HAS_BEFORE:
        low = tl.maximum(first + shift - before, 0) // BLOCK * BLOCK
        full_low = tl.maximum(last + shift - before + BLOCK - 1, 0) // BLOCK * BLOCK
    high = columns
    full_high = columns // BLOCK * BLOCK
    if HAS_AFTER:
        high = tl.minimum(columns, last + shift + after + 1)
        full_high = tl.maximum(tl.minimum(columns, first + shift + after + 1), 0) // BLOCK * BLOCK
    high = tl.maximum(high, low)
    full_low = tl.minimum(tl.maximum(full_low, low), (high + BLOCK - 1) // BLOCK * BLOCK)
    full_high = tl.maximum(full_high, full_low)
    return low, full_low, full_high, high


@triton.jit
def visible(rows, cols, row_count, col_count, shift, before, after, HAS_BEFORE: tl.constexpr, HAS_AFTER: tl.constexpr):
    """Mask: which of ``rows`` × ``cols`` (broadcastable index tensors) exist and see each other."""
    mask = (rows < row_count) & (cols < col_count)
    if HAS_BEFORE:
        mask &= cols >= rows + shift - before
    if HAS_AFTER:
        mask &= cols <= rows + shift + after
    return mask


@triton.jit
def load_rows(descriptor, row, column, count, MASK: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Rows ``row`` … ``row + BLOCK`` of one head, [BLOCK, DIM]; with ``MASK``, rows from ``count`` on are zero.

    Rows behind a sequence belong to the next one or to nobody: they may hold NaN, which not even a zero weight stops.
    """
    rows = descriptor.load([row, column])
    if MASK:
        rows = tl.where((tl.arange(0, BLOCK) < count)[:, None], rows, 0.0)
    return rows
