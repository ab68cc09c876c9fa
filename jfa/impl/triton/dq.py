"""dQ in a fixed order: a tile owns a block of queries and walks over the keys that it sees, so that nothing is added
up in the order in which tiles happen to end. Every product of the backward that dQ needs is done once more for it.

A Q that all sequences share has few blocks: its sequences are cut into chunks of about equally many keys, each chunk
adds up its own dQ in float32, and the chunks' are added one after the other. How many chunks there are depends on
shapes alone, so that the result is the same, bit for bit, on every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfa import instrument
from jfa.config import BackwardConfig
from jfa.impl.triton import launch, primitives
from jfa.schedule import Items
from jfa.validation import Problem

_LOG2_E = tl.constexpr(launch.LOG2_E)
PROGRAMS = 512
"""Programs that a shared Q is cut into at least, so that they fill a GPU."""
MOST_BYTES = 256 << 20
"""Of the chunks' dQ in float32."""


@triton.jit
def _walk_keys(
    dq,
    q,
    do,
    k_desc,
    v_desc,
    row_lse,
    row_delta,
    kv_start,
    column,
    low,
    high,
    rows,
    kv_len,
    q_len,
    shift,
    before,
    after,
    score_scale,
    MASK: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dQ / scale of one block of queries from keys ``low`` … ``high``."""
    for start in tl.range(low, high, BLOCK_KV, num_stages=STAGES):
        k = primitives.load_rows(k_desc, kv_start + start, column, kv_len - start, MASK, BLOCK_KV, DIM)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        p = tl.exp2(scores * score_scale - (row_lse * _LOG2_E)[:, None])
        if MASK:
            keys = start + tl.arange(0, BLOCK_KV)
            mask = primitives.visible(
                rows[:, None], keys[None, :], q_len, kv_len, shift, before, after, HAS_BEFORE, HAS_AFTER
            )
            p = tl.where(mask, p, 0.0)
        v = primitives.load_rows(v_desc, kv_start + start, column, kv_len - start, MASK, BLOCK_KV, DIM)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        ds = (p * (dp - row_delta[:, None])).to(q.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _of_sequence(
    dq,
    q,
    k_desc,
    v_desc,
    do_desc,
    lse,
    delta,
    o_row,
    kv_start,
    kv_len,
    first,
    q_len,
    total_q,
    head,
    group,
    before,
    after,
    score_scale,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dQ / scale of the block of queries at ``first``, with what one sequence's keys add to it."""
    inside = tl.arange(0, BLOCK_Q)
    rows = first + inside
    valid = rows < q_len
    do = primitives.load_rows(do_desc, o_row + first, head * DIM, q_len - first, True, BLOCK_Q, DIM)
    at = primitives.wide(head) * total_q + o_row + first + inside
    row_lse = tl.load(lse + at, mask=valid, other=0.0)
    row_delta = tl.load(delta + at, mask=valid, other=0.0)
    shift = kv_len - q_len
    column = head // group * DIM
    low, full_low, full_high, high = primitives.columns_met(
        first, tl.minimum(first + BLOCK_Q, q_len) - 1, shift, kv_len, before, after, HAS_BEFORE, HAS_AFTER, BLOCK_KV
    )
    if HAS_BEFORE:
        dq = _walk_keys(
            dq, q, do, k_desc, v_desc, row_lse, row_delta, kv_start, column, low, full_low, rows, kv_len, q_len, shift,
            before, after, score_scale, True, HAS_BEFORE, HAS_AFTER, BLOCK_KV, DIM, STAGES, PRECISION,
        )  # fmt: skip
    dq = _walk_keys(
        dq, q, do, k_desc, v_desc, row_lse, row_delta, kv_start, column, full_low, full_high, rows, kv_len, q_len,
        shift, before, after, score_scale, False, HAS_BEFORE, HAS_AFTER, BLOCK_KV, DIM, STAGES, PRECISION,
    )  # fmt: skip
    return _walk_keys(
        dq, q, do, k_desc, v_desc, row_lse, row_delta, kv_start, column, full_high, high, rows, kv_len, q_len, shift,
        before, after, score_scale, True, HAS_BEFORE, HAS_AFTER, BLOCK_KV, DIM, STAGES, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["total_q", "before", "after"])
def jfa_dq(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    grad_q,
    lse,
    delta,
    q_offsets,
    kv_offsets,
    pairs,
    counts,
    heads,
    group,
    total_q,
    before,
    after,
    score_scale,
    scale,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grad_q (total_q, H, D) of jagged queries: program (item of the table, head)."""
    item = tl.program_id(0)
    head = tl.program_id(1)
    if item < tl.load(counts + 1):
        batch = tl.load(pairs + 2 * item)
        first = tl.load(pairs + 2 * item + 1) * BLOCK_Q
        q_start, q_len = primitives.sequence(q_offsets, batch, False, 0)
        kv_start, kv_len = primitives.sequence(kv_offsets, batch, False, 0)
        q = q_desc.load([q_start + first, head * DIM])
        dq = _of_sequence(
            tl.zeros((BLOCK_Q, DIM), dtype=tl.float32), q, k_desc, v_desc, do_desc, lse, delta, q_start, kv_start,
            kv_len, first, q_len, total_q, head, group, before, after, score_scale, HAS_BEFORE, HAS_AFTER, BLOCK_Q,
            BLOCK_KV, DIM, STAGES, PRECISION,
        )  # fmt: skip
        rows = tl.arange(0, BLOCK_Q)
        at = (rows.to(tl.int64) + q_start + first)[:, None] * heads + head
        values = (dq * scale).to(grad_q.dtype.element_ty)
        tl.store(grad_q + at * DIM + tl.arange(0, DIM)[None, :], values, mask=(first + rows < q_len)[:, None])


@triton.jit
def _first_from(offsets, batch_count, key):
    """The first sequence that begins at ``key`` or behind it; ``batch_count`` where there is none."""
    low = batch_count * 0
    high = batch_count
    while low < high:
        middle = (low + high) // 2
        behind = tl.load(offsets + middle).to(tl.int64) >= key
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, middle + 1)
    return low


@triton.jit(do_not_specialize=["batch_count", "q_len", "total_q", "before", "after"])
def jfa_dq_shared(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    partial,
    lse,
    delta,
    kv_offsets,
    batch_count,
    heads,
    group,
    q_len,
    total_q,
    before,
    after,
    score_scale,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """partial float32 (chunks, L_q, H, D), dQ / scale of each chunk: program (block of queries, head, chunk)."""
    first = tl.program_id(0) * BLOCK_Q
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    chunks = tl.num_programs(2)
    keys = tl.load(kv_offsets + batch_count).to(tl.int64)
    begin = chunk * 0
    if chunk > 0:
        begin = _first_from(kv_offsets, batch_count, (keys * chunk + chunks - 1) // chunks)
    end = batch_count + chunk * 0
    if chunk + 1 < chunks:
        end = _first_from(kv_offsets, batch_count, (keys * (chunk + 1) + chunks - 1) // chunks)
    q = q_desc.load([first, head * DIM])
    dq = tl.zeros((BLOCK_Q, DIM), dtype=tl.float32)
    for batch in range(begin, end):
        kv_start, kv_len = primitives.sequence(kv_offsets, batch, False, 0)
        dq = _of_sequence(
            dq, q, k_desc, v_desc, do_desc, lse, delta, batch * q_len, kv_start, kv_len, first, q_len, total_q, head,
            group, before, after, score_scale, HAS_BEFORE, HAS_AFTER, BLOCK_Q, BLOCK_KV, DIM, STAGES, PRECISION,
        )  # fmt: skip
    rows = first + tl.arange(0, BLOCK_Q)
    at = (primitives.wide(chunk) * q_len + rows)[:, None] * heads + head
    tl.store(partial + at * DIM + tl.arange(0, DIM)[None, :], dq, mask=(rows < q_len)[:, None])


@triton.jit
def jfa_sum_dq(partial, grad_q, count, chunks, scale, BLOCK: tl.constexpr):
    """grad_q = scale · Σ partial over the chunks, one after the other, rounded once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for chunk in range(chunks):
        total += tl.load(partial + primitives.wide(chunk) * count + at, mask=at < count, other=0.0)
    tl.store(grad_q + at, (total * scale).to(grad_q.dtype.element_ty), mask=at < count)


@dataclass(frozen=True)
class FixedOrder:
    """That dQ is to be added up in one order: its configuration, and of jagged queries the table of their blocks."""

    config: BackwardConfig
    items: Items | None


def chunks_of(problem: Problem, block: int) -> int:
    """How many chunks a shared Q's sequences are cut into: enough programs, and at most MOST_BYTES."""
    tiles = triton.cdiv(problem.q_len, block) * problem.heads
    each = problem.q_len * problem.heads * problem.head_dim * 4
    return max(1, min(triton.cdiv(PROGRAMS, tiles), problem.batch, MOST_BYTES // each))


def grad_q(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    kv_offsets: Tensor,
    q_offsets: Tensor | None,
    problem: Problem,
    order: FixedOrder,
    schedule: str,
) -> Tensor:
    """dQ in q's shape and dtype, contiguous. grad_out: rows as `launch.as_rows` gives them; lse, delta: float32
    (H, total_q)."""
    config, items = order.config, order.items
    found = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    facts = {"heads": problem.heads, "head_dim": problem.head_dim}
    descriptors = (
        launch.descriptor(launch.as_rows(q), config.block_q),
        launch.descriptor(launch.as_rows(k), config.block_kv),
        launch.descriptor(launch.as_rows(v), config.block_kv),
        launch.descriptor(grad_out, config.block_q),
    )
    options = {
        "HAS_BEFORE": problem.window_left >= 0,
        "HAS_AFTER": problem.window_right >= 0,
        "BLOCK_Q": config.block_q,
        "BLOCK_KV": config.block_kv,
        "DIM": problem.head_dim,
        "STAGES": config.num_stages,
        "PRECISION": launch.precision(q),
        "num_warps": config.num_warps,
    }
    group, window = problem.heads // problem.heads_kv, (problem.window_left, problem.window_right)
    log2_scale = problem.scale * launch.LOG2_E
    if items is not None:
        with instrument.launch_range("jfa_dq", schedule, **facts):
            jfa_dq[(items.max_items, problem.heads)](
                *descriptors, found, lse, delta, q_offsets, kv_offsets, items.pairs, items.counts, problem.heads, group,
                problem.total_q, *window, log2_scale, problem.scale, **options,
            )  # fmt: skip
        return found
    chunks, blocks = chunks_of(problem, config.block_q), triton.cdiv(problem.q_len, config.block_q)
    partial = torch.empty((chunks, *q.shape), dtype=torch.float32, device=q.device)
    with instrument.launch_range("jfa_dq", schedule, **facts):
        jfa_dq_shared[(blocks, problem.heads, chunks)](
            *descriptors, partial, lse, delta, kv_offsets, problem.batch, problem.heads, group, problem.q_len,
            problem.total_q, *window, log2_scale, **options,
        )  # fmt: skip
        block = 1024
        grid = (triton.cdiv(found.numel(), block),)
        jfa_sum_dq[grid](partial, found, found.numel(), chunks, problem.scale, BLOCK=block)
    return found
