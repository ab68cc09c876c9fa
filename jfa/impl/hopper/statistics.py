"""lse and delta of each row, which the softmax's gradient needs, padded as `dq.stat_row` says.

delta = Σ_d out·grad_out − grad_lse. Rows that do not exist or see nothing get an lse of +inf, so that they weigh 0, and
a delta of 0: the lse of a row that sees nothing is a constant, whose gradient, often NaN, goes nowhere.

As out = P V, that sum is Σ_k P·dP too, over the keys that the row sees: where all of them are in one tile, the tile can
do it, without a look at out and grad_out. On an H200 that took 10.5 % off the backward of hsp-extreme, most of whose
sequences are that short, and nothing off or onto hsp-half-empty and hsp-loguniform
(reports/backward-limits-h200.json).

They come as numbers, or as columns of a product: a kernel whose queries are columns of its scores would have to load
each for all its threads, and does not find them in time, as a load from shared memory waits behind the products before
it. A product of 16 more columns takes them off instead: the statistics of a row, [−lse / scale, −delta] in three parts
of 8 bits each, times a block of ones and zeros, a *taker*, that chooses the parts of one of them. On an H200 the
backward took 2.4 % less with it on dense-1024 and 3.1 to 3.5 % on dense-2048, dense-4096 and self-lognormal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa import instrument
from jfa.impl.hopper import dq as summing
from jfa.impl.hopper.forward import score_scale
from jfa.impl.triton import launch, primitives
from jfa.validation import Problem

COLUMNS = 16
"""Of a row's statistics in a product: the least that one has."""
PARTS = 3
"""bfloat16 numbers that add up to a float32."""
MOST_ROWS = 2**31 - 1
"""Of a descriptor, whose coordinates are int32."""
_COLUMNS, _PARTS = tl.constexpr(COLUMNS), tl.constexpr(PARTS)
_HUGE = tl.constexpr(3e38)
"""Instead of infinity, which a taker's zeros would make NaN."""
_LOG2_E = tl.constexpr(launch.LOG2_E)


@triton.jit
def parts(value, column, FIRST: tl.constexpr):
    """What ``column`` holds of float32 ``value``: one of its parts, from column ``FIRST`` on, else 0."""
    value = tl.maximum(value, -_HUGE, propagate_nan=tl.PropagateNan.ALL)
    value = tl.minimum(value, _HUGE, propagate_nan=tl.PropagateNan.ALL)
    high = value.to(tl.bfloat16).to(tl.float32)
    middle = (value - high).to(tl.bfloat16).to(tl.float32)
    rest = tl.where(column == FIRST + 2, value - high - middle, 0.0)
    return tl.where(column == FIRST, high, tl.where(column == FIRST + 1, middle, rest))


@triton.jit
def _store_takers(stats, ROWS: tl.constexpr):
    """A block of [ROWS, _COLUMNS] that takes lse, and behind it one that takes delta."""
    row = tl.arange(0, 2 * ROWS)[:, None]
    column = tl.arange(0, _COLUMNS)[None, :]
    first = tl.where(row < ROWS, 0, _PARTS)
    takes = (column >= first) & (column < first + _PARTS)
    tl.store(stats + row * _COLUMNS + column, tl.where(takes, 1.0, 0.0).to(tl.bfloat16))


@triton.jit(do_not_specialize=["batch_count", "q_uniform", "total_q", "stat_rows"])
def jfa_stats(
    out,
    lse,
    grad_out,
    grad_lse,
    stats,
    q_offsets,
    kv_offsets,
    batch_count,
    q_uniform,
    total_q,
    stat_rows,
    row_stride,
    heads,
    scale,
    BROADCAST_Q: tl.constexpr,
    ROWS: tl.constexpr,
    PAD: tl.constexpr,
    TAKERS: tl.constexpr,
    SHORT: tl.constexpr,
    DIM: tl.constexpr,
):
    """Write the statistics, as columns behind two takers of ``TAKERS`` rows, or for 0 as numbers.

    A shared Q's rows are padded to a multiple of ``PAD``, others to one of ``ROWS``. A sequence without keys, whose
    rows no tile looks for, is left out; of one of up to ``SHORT`` keys delta lacks the sum. Program block of rows ·
    heads + head, so that whole rows are read together.
    """
    place = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    if TAKERS > 0:
        if tl.program_id(0) == 0:
            _store_takers(stats, TAKERS)
    base = place * ROWS
    if BROADCAST_Q:
        blocks = (q_uniform + PAD - 1) // PAD * (PAD // ROWS)
        inside = place % blocks * ROWS
        batch = place // blocks
        start = batch * q_uniform
        length = q_uniform
    else:
        batch = summing.sequence_at(base, q_offsets, batch_count, ROWS)
        start, length = primitives.sequence(q_offsets, batch, False, 0)
        inside = base - summing.stat_row(start, batch, 0, False, ROWS)
    _, kv_len = primitives.sequence(kv_offsets, batch, False, 0)
    if kv_len == 0:
        return
    rows = inside + tl.arange(0, ROWS)
    valid = rows < length
    at = start.to(tl.int64) + rows
    delta = tl.zeros((ROWS,), tl.float32)
    if kv_len > SHORT:
        dims = tl.arange(0, DIM)
        o = tl.load(out + (at[:, None] * heads + head) * DIM + dims[None, :], mask=valid[:, None], other=0.0)
        g = tl.load(grad_out + at[:, None] * row_stride + head * DIM + dims[None, :], mask=valid[:, None], other=0.0)
        delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    of_row = primitives.wide(head) * total_q + at
    row_lse = tl.load(lse + of_row, mask=valid, other=float("-inf"))
    sees = row_lse != float("-inf")
    if grad_lse is not None:
        delta -= tl.load(grad_lse + of_row, mask=sees, other=0.0)
    row_lse = tl.where(sees, row_lse, float("inf"))
    delta = tl.where(sees, delta, 0.0)
    of_head = primitives.wide(head) * stat_rows + base + tl.arange(0, ROWS)
    if TAKERS > 0:
        column = tl.arange(0, _COLUMNS)[None, :]
        values = parts((row_lse / -scale)[:, None], column, 0) + parts(-delta[:, None], column, _PARTS)
        tl.store(stats + (of_head[:, None] + 2 * TAKERS) * _COLUMNS + column, values.to(tl.bfloat16))
    else:
        tl.store(stats + of_head, row_lse * _LOG2_E)
        tl.store(stats + primitives.wide(heads) * stat_rows + of_head, delta)


def padded_rows(problem: Problem, block: int, pad: int) -> int:
    """Rows of a head: an upper bound that needs no length."""
    if problem.broadcast_q:
        return problem.batch * triton.cdiv(problem.q_len, pad) * pad
    return summing.blocks_of(problem, block) * block


class Columns(NamedTuple):
    """Statistics as columns: bfloat16 [2 · takers + H · rows, COLUMNS], the takers first, for scores times ``scale``.

    The scale is the problem's, but never 0: −lse / scale would be no number.
    """

    stats: Tensor
    rows: int
    takers: int
    scale: float

    def descriptor(self, block: int) -> TensorDescriptor:
        """Of ``block`` rows."""
        return TensorDescriptor(self.stats, list(self.stats.shape), [COLUMNS, 1], [block, COLUMNS])


@dataclass(frozen=True)
class RowStatistics:
    """Of a call's rows: grad_rows (total_q, H, D) with any stride of rows, the others as the op has them."""

    grad_rows: Tensor
    grad_lse: Tensor | None
    out: Tensor
    lse: Tensor
    kv_offsets: Tensor
    q_offsets: Tensor | None
    problem: Problem
    run: launch.Run

    def numbers(self, block: int, pad: int, short: int) -> Tensor:
        """lse in log2 units and delta, float32 (2, H, rows): a shared Q's padded to ``pad``, others to ``block``.

        For sequences of up to ``short`` keys delta is −grad_lse alone: a tile of all keys makes the sum by itself.
        """
        shape = (2, self.problem.heads, padded_rows(self.problem, block, pad))
        stats = torch.empty(shape, dtype=torch.float32, device=self.out.device)
        return self._written(stats, block, pad, takers=0, short=short)

    def columns(self, block: int, takers: int) -> Columns:
        """−lse / scale and −delta as parts, padded to ``block`` rows, and takers of ``takers`` rows.

        Raises ValueError where there are more rows than coordinates.
        """
        heads, rows = self.problem.heads, padded_rows(self.problem, block, block)
        if 2 * takers + heads * rows > MOST_ROWS:
            raise ValueError(
                f"{heads * rows:,} query rows (of all heads, a sequence's padded to a multiple of {block}) are more "
                f"than the backward for sm_90 counts, {MOST_ROWS:,}: split the batch, or pass impl='triton'"
            )
        stats = torch.empty((2 * takers + heads * rows, COLUMNS), dtype=torch.bfloat16, device=self.out.device)
        return Columns(self._written(stats, block, block, takers, short=0), rows, takers, self._scale)

    @property
    def _scale(self) -> float:
        return score_scale(self.problem) / launch.LOG2_E

    def _written(self, stats: Tensor, block: int, pad: int, takers: int, short: int) -> Tensor:
        problem = self.problem
        rows = padded_rows(problem, block, pad)
        if not rows:
            return stats
        facts = {"heads": problem.heads, "head_dim": problem.head_dim}
        with instrument.launch_range("jfa_delta", self.run.schedule, **facts):
            jfa_stats[(rows // block * problem.heads,)](
                self.out,
                self.lse,
                self.grad_rows,
                self.grad_lse,
                stats,
                self.q_offsets,
                self.kv_offsets,
                problem.batch,
                problem.q_len,
                problem.total_q,
                rows,
                self.grad_rows.stride(0),
                problem.heads,
                self._scale,
                BROADCAST_Q=problem.broadcast_q,
                ROWS=block,
                PAD=pad,
                TAKERS=takers,
                SHORT=short,
                DIM=problem.head_dim,
                num_warps=2,
            )
        return stats
