"""dQ's sum in float32 of the backward that shares it: how it lies in memory, and how a tile adds to it.

The sum of a head is stored in blocks of the rows of a step, and these in parts of columns, of which a warpgroup adds
one at a time. A part's elements stand in the order in which a warpgroup's threads hold them in an accumulator of wgmma:
then a thread's go to shared memory 16 bytes at a time, each where another's do not wait for it, and memory gets whole
lines. Row by row, as tensors lie, pairs of threads write to the same banks: on an H200 the backward of dense-1024 made
482 TFLOP/s that way and 504 this way (11 runs in turn, of which only medians were kept). It is the very order of a
thread's registers, 24 moves a step fewer than with neighbouring columns side by side: worth 0.7 to 1.1 % of dense-1024,
2048 and 4096, though it cost 2 to 3 % while the kernel loaded lse and delta from shared memory. Added from registers,
without shared memory, by red.v4.f32, the backward took 14 % (dense-1024) and 18 % (dense-2048) longer.

Zeroing is a pass of its own. Done by the load role instead, for tiles two rounds ahead: −1.0 % of the time on
dense-1024, where no zeroing at all would give −4.4 %, and +2.3 % on dense-2048. On SMs left to it, as rounding is, and
the rows' statistics with it: −2.3 % and −1.7 %, but +0.6 % of short sequences (dense-512), as an SM stores at most
61 GB/s; not worth that tiles wait for another kernel (reports/backward-limits-h200.json). Rounding is in `rounding`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

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
def values_of(found, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """[ROWS, COLUMNS] that lie in ``found`` in PARTS parts of columns, each as `_lines` made it."""
    parts = found.reshape(PARTS, ROWS // 16, COLUMNS // PARTS // 8, 8, 4, 2, 2).permute(1, 5, 3, 0, 2, 4, 6)
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


def blocks_of(problem: Problem, block: int) -> int:
    """Blocks of rows of a head's sum: an upper bound that needs no length."""
    if problem.broadcast_q:
        return triton.cdiv(problem.q_len, block)
    return problem.total_q // block + problem.batch if problem.batch else 0


@dataclass(frozen=True)
class Sum:
    """dQ's sum of a call: ``values`` float32, in ``parts`` of columns of ``blocks`` of ``block`` rows a head.

    What rounding beside the backward counts, int32, is zeroed with it: ``done`` (B · heads_kv), tiles of a sequence and
    K/V head that have added what they had, and ``started`` (2), CTAs that have started, and those that have ended.
    """

    problem: Problem
    block: int
    parts: int
    blocks: int
    values: Tensor
    done: Tensor
    started: Tensor

    @classmethod
    def zeros(cls, problem: Problem, block: int, parts: int, device: torch.device) -> Sum:
        blocks = blocks_of(problem, block)
        size = max(problem.heads * blocks, 1) * block * problem.head_dim
        counts = problem.batch * problem.heads_kv
        whole = torch.zeros(size + counts + 2, dtype=torch.float32, device=device)
        values, done, started = whole.split([size, counts, 2])
        return cls(problem, block, parts, blocks, values, done.view(torch.int32), started.view(torch.int32))

    @property
    def descriptor(self) -> TensorDescriptor:
        """Of a part's lines."""
        lines = self.block * self.problem.head_dim // self.parts // LINE
        return TensorDescriptor(self.values, [self.values.numel() // LINE, LINE], [LINE, 1], [lines, LINE])
