"""Join the partial results of sequences that were cut into parts of keys. Plain Triton: it only moves memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfa import instrument
from jfa.impl.triton import launch, primitives
from jfa.validation import Problem

_ROWS = 16


@triton.jit
def part_place(kv_start, split, part, kv_all):
    """Where a part of a cut sequence keeps its partial result: no two parts have the same place.

    ``kv_start`` is the part's first key. Parts begin ``split`` keys apart, within a sequence and from one to the next,
    but for each sequence's last, which may be short: the lasts lie ``split`` apart among themselves. So twice the start
    in units of ``split``, plus one for a last part, is taken once; 2 · (keys in all // split + 1) places do.
    """
    last = (part + 1) * split >= kv_all
    return kv_start // split * 2 + tl.where(last, 1, 0)


@triton.jit
def _holder(offsets, row, batch_count):
    """The last sequence that begins at or before key ``row``."""
    low = row * 0
    high = low + batch_count
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(offsets + middle).to(tl.int32)
        low = tl.where(begins <= row, middle, low)
        high = tl.where(begins <= row, high, middle)
    return low


@triton.jit(do_not_specialize=["batch_count", "q_uniform", "total_q", "q_stride", "split"])
def jfa_merge(
    out,
    lse,
    partial_out,
    partial_lse,
    q_offsets,
    kv_offsets,
    batch_count,
    heads,
    q_uniform,
    total_q,
    q_stride,
    split,
    BROADCAST_Q: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Rows of the sequence whose first key lies nearest before key ``split`` · program 0, if it was cut.

    Every cut sequence is longer than ``split``, so that it holds such a multiple; the first that it holds is its own.
    """
    mark = tl.program_id(0) * split
    head = tl.program_id(1)
    batch = _holder(kv_offsets, mark, batch_count)
    kv_start, kv_all = primitives.sequence(kv_offsets, batch, False, 0)
    if (kv_all > split) & (mark >= kv_start) & (mark - kv_start < split):
        q_start, q_len = primitives.sequence(q_offsets, batch, BROADCAST_Q, q_uniform)
        if BROADCAST_Q:
            q_start = batch * q_uniform
        rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        valid = rows < q_len
        dims = tl.arange(0, DIM)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        acc = tl.zeros((ROWS, DIM), dtype=tl.float32)
        for part in range((kv_all + split - 1) // split):
            place = part_place(kv_start + part * split, split, part, kv_all)
            at = primitives.wide(place * heads + head) * q_stride
            part_lse = tl.load(partial_lse + at + rows, mask=valid, other=float("-inf"))
            high = partial_out + (2 * at + rows[:, None]) * DIM + dims[None, :]
            values = tl.load(high, mask=valid[:, None], other=0.0).to(tl.float32)
            values += tl.load(high + q_stride * DIM, mask=valid[:, None], other=0.0).to(tl.float32)
            new_top = tl.maximum(top, part_lse)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            kept = tl.exp(top - base)
            weight = tl.exp(part_lse - base)
            acc = acc * kept[:, None] + values * weight[:, None]
            total = total * kept + weight
            top = new_top
        seen = total != 0  # NaN goes through
        divisor = tl.where(seen, total, 1.0)
        at = (q_start + rows).to(tl.int64)
        values = acc / divisor[:, None]
        tl.store(
            out + (at[:, None] * heads + head) * DIM + dims[None, :], values.to(out.dtype.element_ty), valid[:, None]
        )
        row_lse = tl.where(seen, top + tl.log(divisor), float("-inf"))
        tl.store(lse + primitives.wide(head) * total_q + at, row_lse, mask=valid)


def merge(
    out: Tensor,
    lse: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor,
    problem: Problem,
    run: launch.Run,
) -> None:
    """Write the rows of cut sequences into ``out`` (total_q, H, D) and ``lse`` (H, total_q).

    partial_out and partial_lse as of :func:`partials`.
    """
    rows = partial_lse.shape[1] // problem.heads
    split = run.items.split
    facts = {"heads": problem.heads, "head_dim": problem.head_dim}
    with instrument.launch_range("jfa_merge", run.schedule, **facts):
        jfa_merge[(problem.total_kv // split + 1, problem.heads, triton.cdiv(problem.max_q_len, _ROWS))](
            out,
            lse,
            partial_out,
            partial_lse,
            q_offsets,
            kv_offsets,
            problem.batch,
            problem.heads,
            problem.q_len,
            problem.total_q,
            rows,
            split,
            BROADCAST_Q=problem.broadcast_q,
            ROWS=_ROWS,
            DIM=problem.head_dim,
        )


def partials(problem: Problem, split: int, block: int, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Room for the partial results, uninitialised; None where no sequence is cut.

    The output, a sum of two numbers of q's type, (places · H · 2 · rows, 1, D), rows being L_q padded to ``block``; and
    the lse, float32 [places, H · rows].
    """
    if split == 0:
        return None, None
    places = 2 * (problem.total_kv // split + 1)
    rows = problem.heads * triton.cdiv(problem.max_q_len, block) * block
    out = torch.empty((places * rows * 2, 1, problem.head_dim), dtype=q.dtype, device=q.device)
    return out, torch.empty((places, rows), dtype=torch.float32, device=q.device)
