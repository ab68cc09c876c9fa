"""dQ's sum in float32 of the backward that shares it: how it lies in memory, how a tile adds to it, its rounding.

The sum of a head is stored in blocks of the rows of a step, and these in parts of columns, of which a warpgroup adds
one at a time. A part's elements stand in the order in which a warpgroup's threads hold them in an accumulator of wgmma:
then a thread's go to shared memory 16 bytes at a time, each where another's do not wait for it, and memory gets whole
lines. Row by row, as tensors lie, pairs of threads write to the same banks: on an H200 the backward of dense-1024 made
482 TFLOP/s that way and 504 this way (11 runs in turn, of which only medians were kept). It is the very order of a
thread's registers, 24 moves a step fewer than with neighbouring columns side by side: worth 0.7 to 1.1 % of dense-1024,
2048 and 4096, though it cost 2 to 3 % while the kernel loaded lse and delta from shared memory. Added from registers,
without shared memory, by red.v4.f32, the backward took 14 % (dense-1024) and 18 % (dense-2048) longer.

Rounding is a pass of its own. Tried likewise: that the last tile of a sequence rounds its dQ, as long as that is in
the L2 cache. A tile then waits for its additions and counts itself, and more is spilled: 454 TFLOP/s against 506 with
the pass. Or that the load role rounds, a few pieces a step between its loads, what tiles of a few rounds before
completed and counted (91 % of the blocks of dense-1024): the pass fell from 603 to 47 µs, and the kernel took 7,776 µs
instead of 6,850. Loads came as early as before, but a compute warpgroup, beside whose warps the rounding ran, worked
13 % longer. Zeroing is a pass too. Done by the load role instead, for tiles two rounds ahead: −1.0 % of the time on
dense-1024, where no zeroing at all would give −4.4 %, and +2.3 % on dense-2048. Of all but the first two trials the
times are in reports/backward-limits-h200.json.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa import instrument
from jfa.impl.triton import launch, primitives
from jfa.validation import Problem

LINE = 32
"""Elements of a line of 128 bytes."""
_LINE = tl.constexpr(LINE)


@triton.jit
def stat_row(q_start, batch, uniform, BROADCAST_Q: tl.constexpr, BLOCK: tl.constexpr):
    """Where a sequence's rows begin in the padded statistics: every sequence at a multiple of ``BLOCK``.

    (q_start // BLOCK + batch) · BLOCK: the next sequence's begins behind this one's last block, whatever the lengths.
    """
    if BROADCAST_Q:
        return batch * ((uniform + BLOCK - 1) // BLOCK * BLOCK)
    else:
        return (q_start // BLOCK + batch) * BLOCK


@triton.jit
def block_row(q_start, batch, BROADCAST_Q: tl.constexpr, BLOCK: tl.constexpr):
    """Where a sequence's rows begin in the sum: as in the statistics, but that a shared Q has one sum."""
    if BROADCAST_Q:
        return batch * 0
    else:
        return stat_row(q_start, batch, 0, False, BLOCK)


@triton.jit
def sequence_at(base, q_offsets, batch_count, BLOCK: tl.constexpr):
    """The last sequence whose padded rows begin at or before ``base``."""
    low = base * 0
    high = low + batch_count
    while high - low > 1:
        middle = (low + high) // 2
        begins = stat_row(tl.load(q_offsets + middle).to(tl.int32), middle, 0, False, BLOCK)
        low = tl.where(begins <= base, middle, low)
        high = tl.where(begins <= base, high, middle)
    return low


@triton.jit
def _lines(values):
    """[rows, columns] of an accumulator as lines, [rows · columns / 32, 32], in the order of the sum."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    # A row: of a warp's 16, of a thread's two 8 apart, of a quad. A column: of 8, of a thread in a quad, of its two.
    parts = values.reshape(ROWS // 16, 2, 8, COLUMNS // 8, 4, 2).permute(0, 3, 2, 4, 1, 5)
    return parts.reshape(ROWS * COLUMNS // _LINE, _LINE)


@triton.jit
def _values(found, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] that `_lines` made lines of."""
    parts = found.reshape(ROWS // 16, COLUMNS // 8, 8, 4, 2, 2).permute(0, 4, 2, 1, 3, 5)
    return parts.reshape(ROWS, COLUMNS)


@triton.jit
def add(desc, staging, dq, added, place, OWN: tl.constexpr, SLICES: tl.constexpr, BUFFERS: tl.constexpr):
    """Add a warpgroup's columns of dQ, its ``place``-th [rows, columns] of the sum, in slices of columns through its
    buffers in turn: ``added`` times before; a buffer is filled once what it held has left."""
    BLOCK_Q: tl.constexpr = dq.shape[0]
    WIDTH: tl.constexpr = dq.shape[1] // SLICES
    if SLICES == 2:
        parts = tl.split(dq.reshape(BLOCK_Q, 2, WIDTH).permute(0, 2, 1))
    else:
        parts = (dq,)
    for part in tl.static_range(SLICES):
        buffer = OWN
        if BUFFERS > 1:
            buffer = OWN + (added * SLICES + part) % BUFFERS
        tlx.async_descriptor_store_wait(BUFFERS - 1)
        tlx.local_store(staging[buffer], _lines(parts[part]))
        tlx.fence("async_shared")
        line = (place * SLICES + part) * (BLOCK_Q * WIDTH // _LINE)
        tlx.async_descriptor_store(desc, staging[buffer], [line, 0], store_reduce="add")


@triton.jit(do_not_specialize=["batch_count", "q_uniform", "total_q"])
def jfa_round_dq_blocks(
    dq_sum,
    grad_q,
    q_offsets,
    batch_count,
    q_uniform,
    total_q,
    heads,
    scale,
    BROADCAST_Q: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
):
    """grad_q = scale · sum, rounded once. Program block of rows · heads + head, so that whole rows are written at once.

    Rows behind the last sequence get zeros.
    """
    WIDTH: tl.constexpr = DIM // PARTS
    SIZE: tl.constexpr = ROWS * WIDTH
    place = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    base = place * ROWS
    start = base * 0
    first = base
    length = start + q_uniform
    end = length
    if not BROADCAST_Q:
        batch = sequence_at(base, q_offsets, batch_count, ROWS)
        start, length = primitives.sequence(q_offsets, batch, False, 0)
        first = base - stat_row(start, batch, 0, False, ROWS)
        end = length
        if batch + 1 == batch_count:
            end = total_q - start
    if first >= end:
        return
    rows = first + tl.arange(0, ROWS)
    at = ((rows.to(tl.int64) + start) * heads + head)[:, None] * DIM + tl.arange(0, WIDTH)[None, :]
    block = dq_sum + (primitives.wide(head) * (tl.num_programs(0) // heads) + place) * (ROWS * DIM)
    for part in tl.static_range(PARTS):
        found = tl.load(block + part * SIZE + tl.arange(0, SIZE)) * scale
        values = _values(found.to(grad_q.dtype.element_ty), ROWS, WIDTH)
        # Rows of the block behind the sequence may hold anything.
        values = tl.where((rows < length)[:, None], values, 0.0)
        tl.store(grad_q + at + part * WIDTH, values, mask=(rows < end)[:, None])


def blocks_of(problem: Problem, block: int) -> int:
    """Blocks of rows of a head's sum: an upper bound that needs no length."""
    if problem.broadcast_q:
        return triton.cdiv(problem.q_len, block)
    return problem.total_q // block + problem.batch if problem.batch else 0


@dataclass(frozen=True)
class Sum:
    """dQ's sum of a call: ``values`` float32, in ``parts`` of columns of ``blocks`` of ``block`` rows a head."""

    problem: Problem
    block: int
    parts: int
    blocks: int
    values: Tensor

    @classmethod
    def zeros(cls, problem: Problem, block: int, parts: int, device: torch.device) -> Sum:
        blocks = blocks_of(problem, block)
        size = max(problem.heads * blocks, 1) * block * problem.head_dim
        return cls(problem, block, parts, blocks, torch.zeros(size, dtype=torch.float32, device=device))

    @property
    def descriptor(self) -> TensorDescriptor:
        """Of a part's lines."""
        lines = self.block * self.problem.head_dim // self.parts // LINE
        return TensorDescriptor(self.values, [self.values.numel() // LINE, LINE], [LINE, 1], [lines, LINE])

    def rounded(self, like: Tensor, q_offsets: Tensor | None, run: launch.Run) -> Tensor:
        """scale · the sum, rounded once, of ``like``'s shape and dtype."""
        problem = self.problem
        if not problem.batch:
            return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        grad = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        with instrument.launch_range("jfa_round_dq", run.schedule, heads=problem.heads, head_dim=problem.head_dim):
            jfa_round_dq_blocks[(self.blocks * problem.heads,)](
                self.values,
                grad,
                q_offsets,
                problem.batch,
                problem.q_len,
                problem.total_q,
                problem.heads,
                problem.scale,
                BROADCAST_Q=problem.broadcast_q,
                ROWS=self.block,
                PARTS=self.parts,
                DIM=problem.head_dim,
                num_warps=2,
            )
        return grad
