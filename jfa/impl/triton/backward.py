"""Backward kernels: a tile is one block of keys of one (batch, K/V head); it walks over the queries that see it.

dK and dV stay in registers over the walk; dQ is added up in one float32 buffer, which for broadcast q is summed over
the batch by the same additions, and rounded once at the end.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfa import instrument, lanes, schedule
from jfa.config import BackwardConfig
from jfa.impl.triton import dq, launch, primitives
from jfa.validation import Problem

_LOG2_E = tl.constexpr(launch.LOG2_E)
_KIND_TILE = tl.constexpr(lanes.KINDS["tile"])
_KIND_ZERO = tl.constexpr(lanes.KINDS["zero"])
_CLEAR_ROWS = tl.constexpr(64)


@triton.jit
def jfa_delta(
    out, lse, grad_out, grad_lse, delta, rows_count, row_stride, heads, ROWS: tl.constexpr, DIM: tl.constexpr
):
    """delta[h, i] = Σ_d out·grad_out − grad_lse, float32 (H, rows): the softmax's row term of dS.

    The lse of a row that sees nothing is a constant: its gradient, often NaN (logaddexp of two −inf), must not reach
    the keys through a weight of zero.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    dims = tl.arange(0, DIM)
    valid = rows < rows_count
    o = tl.load(out + (rows[:, None] * heads + head) * DIM + dims[None, :], mask=valid[:, None], other=0.0)
    g = tl.load(grad_out + rows[:, None] * row_stride + head * DIM + dims[None, :], mask=valid[:, None], other=0.0)
    total = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    at = head.to(tl.int64) * rows_count + rows
    if grad_lse is not None:
        sees = tl.load(lse + at, mask=valid, other=0.0) != float("-inf")
        total -= tl.load(grad_lse + at, mask=valid & sees, other=0.0)
    tl.store(delta + at, total, mask=valid)


@triton.jit
def jfa_round_dq(total, grad_q, count, scale, BLOCK: tl.constexpr):
    """grad_q = scale · total, rounded once from float32."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(total + at, mask=at < count) * scale
    tl.store(grad_q + at, values.to(grad_q.dtype.element_ty), mask=at < count)


@triton.jit
def _add_dq(dq, values, row, column, row_count, REDUCE: tl.constexpr, BLOCK_Q: tl.constexpr, DIM: tl.constexpr):
    """Add [BLOCK_Q, DIM] to the float32 dQ at ``row``; rows that are not the sequence's hold zeros."""
    if REDUCE == "tma":
        dq.atomic_add([row, column], values)
    else:
        pointer, row_stride = dq
        rows = tl.arange(0, BLOCK_Q)
        pointers = pointer + (rows.to(tl.int64) + row)[:, None] * row_stride + column + tl.arange(0, DIM)[None, :]
        tl.atomic_add(pointers, values, mask=(rows < row_count)[:, None], sem="relaxed")


@triton.jit
def _walk(
    dk,
    dv,
    k,
    v,
    q_desc,
    do_desc,
    dq,
    lse,
    delta,
    q_row,
    o_row,
    column,
    low,
    high,
    keys,
    kv_len,
    q_len,
    shift,
    before,
    after,
    score_scale,
    MASK: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """dK and dV of one block of keys from queries ``low`` … ``high`` of one head; adds their dQ. Tiles are S^T."""
    for start in tl.range(low, high, BLOCK_Q, num_stages=STAGES):
        queries = start + tl.arange(0, BLOCK_Q)
        q = primitives.load_rows(q_desc, q_row + start, column, q_len - start, MASK, BLOCK_Q, DIM)
        scores = tl.dot(k, q.T, input_precision=PRECISION)
        if MASK:
            row_lse = tl.load(lse + start + tl.arange(0, BLOCK_Q), mask=queries < q_len, other=0.0)
            row_delta = tl.load(delta + start + tl.arange(0, BLOCK_Q), mask=queries < q_len, other=0.0)
        else:
            row_lse = tl.load(lse + start + tl.arange(0, BLOCK_Q))
            row_delta = tl.load(delta + start + tl.arange(0, BLOCK_Q))
        p = tl.exp2(scores * score_scale - (row_lse * _LOG2_E)[None, :])
        if MASK:
            mask = primitives.visible(
                keys[:, None], queries[None, :], kv_len, q_len, shift, before, after, HAS_BEFORE, HAS_AFTER
            )
            p = tl.where(mask, p, 0.0)
        do = primitives.load_rows(do_desc, o_row + start, column, q_len - start, MASK, BLOCK_Q, DIM)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(v, do.T, input_precision=PRECISION)
        ds = (p * (dp - row_delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if REDUCE != "none":
            values = tl.dot(ds.T, k, input_precision=PRECISION)
            if MASK and REDUCE == "tma":
                # TMA adds whole blocks, into the next sequence's rows too: zeros, not a zero weight times a key's NaN.
                values = tl.where((queries < q_len)[:, None], values, 0.0)
            _add_dq(dq, values, q_row + start, column, q_len - start, REDUCE, BLOCK_Q, DIM)
    return dk, dv


@triton.jit
def _store_rows(grad, values, row, head, heads, count, rows, DIM: tl.constexpr):
    """Write [rows, DIM] of one head into the contiguous (total_kv, H_kv, D) ``grad``, the first ``count`` of them."""
    at = rows.to(tl.int64) + row
    pointers = grad + (at[:, None] * heads + head) * DIM + tl.arange(0, DIM)[None, :]
    tl.store(pointers, values.to(grad.dtype.element_ty), mask=(rows < count)[:, None])


@triton.jit
def clear_rows(dk, dv, row, count, heads, DIM: tl.constexpr, ROWS: tl.constexpr):
    """Zero gradients for ``count`` rows of every head."""
    rows = tl.arange(0, ROWS)
    for step in range(0, count, ROWS):
        for head in range(heads):
            zero = tl.zeros((ROWS, DIM), dtype=dk.dtype.element_ty)
            _store_rows(dk, zero, row + step, head, heads, count - step, rows, DIM)
            _store_rows(dv, zero, row + step, head, heads, count - step, rows, DIM)


@triton.jit
def _tile(
    k_desc,
    v_desc,
    q_desc,
    do_desc,
    dq,
    dk_out,
    dv_out,
    lse,
    delta,
    q_row,
    o_row,
    kv_start,
    first,
    kv_len,
    q_len,
    total_q,
    head,
    heads_kv,
    group,
    before,
    after,
    score_scale,
    scale,
    TAIL: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """One tile. ``TAIL``: its last keys lie behind the sequence's end, so every step is masked."""
    rows = tl.arange(0, BLOCK_KV)
    keys = first + rows
    shift = q_len - kv_len
    k = primitives.load_rows(k_desc, kv_start + first, head * DIM, kv_len - first, TAIL, BLOCK_KV, DIM)
    v = primitives.load_rows(v_desc, kv_start + first, head * DIM, kv_len - first, TAIL, BLOCK_KV, DIM)
    last = tl.minimum(first + BLOCK_KV, kv_len) - 1
    low, full_low, full_high, high = primitives.columns_met(
        first, last, shift, q_len, before, after, HAS_BEFORE, HAS_AFTER, BLOCK_Q
    )
    if TAIL:
        full_low = low
        full_high = low
    dk = tl.zeros((BLOCK_KV, DIM), dtype=tl.float32)
    dv = tl.zeros((BLOCK_KV, DIM), dtype=tl.float32)
    for member in range(group):
        q_head = head * group + member
        column = q_head * DIM
        row_lse = lse + primitives.wide(q_head) * total_q + o_row
        row_delta = delta + primitives.wide(q_head) * total_q + o_row
        if HAS_BEFORE and not TAIL:
            dk, dv = _walk(
                dk, dv, k, v, q_desc, do_desc, dq, row_lse, row_delta, q_row, o_row, column, low, full_low, keys,
                kv_len, q_len, shift, before, after, score_scale, True, HAS_BEFORE, HAS_AFTER, BLOCK_Q, DIM, STAGES,
                PRECISION, REDUCE,
            )  # fmt: skip
        if not TAIL:
            dk, dv = _walk(
                dk, dv, k, v, q_desc, do_desc, dq, row_lse, row_delta, q_row, o_row, column, full_low, full_high, keys,
                kv_len, q_len, shift, before, after, score_scale, False, HAS_BEFORE, HAS_AFTER, BLOCK_Q, DIM, STAGES,
                PRECISION, REDUCE,
            )  # fmt: skip
        dk, dv = _walk(
            dk, dv, k, v, q_desc, do_desc, dq, row_lse, row_delta, q_row, o_row, column, full_high, high, keys,
            kv_len, q_len, shift, before, after, score_scale, True, HAS_BEFORE, HAS_AFTER, BLOCK_Q, DIM, STAGES,
            PRECISION, REDUCE,
        )  # fmt: skip
    _store_rows(dk_out, dk * scale, kv_start + first, head, heads_kv, kv_len - first, rows, DIM)
    _store_rows(dv_out, dv, kv_start + first, head, heads_kv, kv_len - first, rows, DIM)


@triton.jit(
    do_not_specialize=["batch_count", "q_uniform", "total_q", "total_kv", "before", "after", "capacity"],
    # A table of its own lends an unaligned counter, a plan does not: the code is the same, and compiled once so.
    do_not_specialize_on_alignment=["counter"],
)
def jfa_backward(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dq,
    dk,
    dv,
    lse,
    delta,
    q_offsets,
    kv_offsets,
    pairs,
    counts,
    counter,
    batch_count,
    heads_kv,
    group,
    q_uniform,
    total_q,
    total_kv,
    before,
    after,
    score_scale,
    scale,
    recorder,
    capacity,
    BROADCAST_Q: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
    DEAL: tl.constexpr,
    PRECISION: tl.constexpr,
    REDUCE: tl.constexpr,
    LEVEL: tl.constexpr,
):
    """Persistent over the table of key blocks; ``before`` and ``after`` are the window as keys see queries.

    dq: float32 sum of dQ / scale, a descriptor (``REDUCE`` = tma) or (pointer, row stride); none with ``REDUCE`` none,
    where dQ is another kernel's. dk, dv: contiguous
    (total_kv, H_kv, D), written for every row; lse, delta: float32 (H, total_q).
    """
    own = tl.program_id(0)
    lane, noted = instrument.open_lane(recorder, own, capacity, LEVEL)
    work = tl.load(counts)
    tile_count = work * heads_kv
    tile = own
    turn = 0
    while tile < tile_count:
        instrument.begin_span(lane, noted, capacity, _KIND_TILE, -1, LEVEL, 2)
        item = tile // heads_kv
        head = tile % heads_kv
        batch = tl.load(pairs + 2 * item)
        first = tl.load(pairs + 2 * item + 1) * BLOCK_KV
        q_start, q_len = primitives.sequence(q_offsets, batch, BROADCAST_Q, q_uniform)
        kv_start, kv_len = primitives.sequence(kv_offsets, batch, False, 0)
        o_row = q_start
        if BROADCAST_Q:
            o_row = batch * q_uniform
        if first + BLOCK_KV <= kv_len:
            _tile(
                k_desc, v_desc, q_desc, do_desc, dq, dk, dv, lse, delta, q_start, o_row, kv_start, first, kv_len, q_len,
                total_q, head, heads_kv, group, before, after, score_scale, scale, False, HAS_BEFORE, HAS_AFTER,
                BLOCK_Q, BLOCK_KV, DIM, STAGES, PRECISION, REDUCE,
            )  # fmt: skip
        else:
            _tile(
                k_desc, v_desc, q_desc, do_desc, dq, dk, dv, lse, delta, q_start, o_row, kv_start, first, kv_len, q_len,
                total_q, head, heads_kv, group, before, after, score_scale, scale, True, HAS_BEFORE, HAS_AFTER,
                BLOCK_Q, BLOCK_KV, DIM, STAGES, PRECISION, REDUCE,
            )  # fmt: skip
        noted = instrument.end_span(lane, noted, capacity, tile, LEVEL, 2)
        turn += 1
        tile = primitives.next_tile(tile, turn, counter, tile_count, DEAL)

    instrument.begin_span(lane, noted, capacity, _KIND_ZERO, -1, LEVEL, 2)
    cleared = 0
    for item in range(work + own, tl.load(counts + 1), tl.num_programs(0)):
        kv_start, kv_len = primitives.sequence(kv_offsets, tl.load(pairs + 2 * item), False, 0)
        first = tl.load(pairs + 2 * item + 1) * BLOCK_KV
        clear_rows(dk, dv, kv_start + first, tl.minimum(kv_len - first, BLOCK_KV), heads_kv, DIM, _CLEAR_ROWS)
        cleared += 1
    end = tl.load(kv_offsets + batch_count).to(tl.int32)
    for row in range(end + own * _CLEAR_ROWS, total_kv, tl.num_programs(0) * _CLEAR_ROWS):
        clear_rows(dk, dv, row, tl.minimum(total_kv - row, _CLEAR_ROWS), heads_kv, DIM, _CLEAR_ROWS)
        cleared += 1
    if cleared > 0:
        noted = instrument.end_span(lane, noted, capacity, -1, LEVEL, 2)
    instrument.close_lane(lane, noted, LEVEL)


def ctas(run: launch.Run, problem: Problem, config: BackwardConfig, device: torch.device) -> int:
    """CTAs of a launch."""
    return launch.grid(run, problem.heads_kv, device, config.ctas_per_sm)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_offsets: Tensor,
    q_offsets: Tensor | None,
    problem: Problem,
    config: BackwardConfig,
    run: launch.Run,
    fixed_order: dq.FixedOrder | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv in the shapes and dtype of q, k and v. grad_out and out: (total_q, H, D); lse: (H, total_q).

    ``fixed_order``: dQ by a kernel of its own that adds up in one order, bitwise repeatable.
    """
    heads, heads_kv, dim = problem.heads, problem.heads_kv, problem.head_dim
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    reduce = "none" if fixed_order else config.reduce
    dq_sum = None if fixed_order else torch.zeros((q.shape[0], heads, dim), dtype=torch.float32, device=q.device)
    grad_out = launch.as_rows(grad_out)
    delta = torch.empty_like(lse)
    rows = 128
    facts = {"heads": heads, "head_dim": dim}
    with instrument.launch_range("jfa_delta", run.schedule, **facts):
        jfa_delta[(triton.cdiv(problem.total_q, rows), heads)](
            out, lse, grad_out, grad_lse, delta, problem.total_q, grad_out.stride(0), heads, ROWS=rows, DIM=dim
        )
    grid = ctas(run, problem, config, q.device)
    with instrument.launch_range("jfa_backward", run.schedule, **facts):
        compiled = jfa_backward[(grid,)](
            launch.descriptor(launch.as_rows(q), config.block_q),
            launch.descriptor(launch.as_rows(k), config.block_kv),
            launch.descriptor(launch.as_rows(v), config.block_kv),
            launch.descriptor(grad_out, config.block_q),
            _dq_target(dq_sum, config),
            dk,
            dv,
            lse,
            delta,
            q_offsets,
            kv_offsets,
            run.items.pairs,
            run.items.counts,
            run.counter(),
            problem.batch,
            heads_kv,
            heads // heads_kv,
            problem.q_len,
            problem.total_q,
            problem.total_kv,
            problem.window_right,
            problem.window_left,
            problem.scale * launch.LOG2_E,
            problem.scale,
            run.recorder.buffer,
            run.recorder.capacity,
            BROADCAST_Q=problem.broadcast_q,
            HAS_BEFORE=problem.window_right >= 0,
            HAS_AFTER=problem.window_left >= 0,
            BLOCK_Q=config.block_q,
            BLOCK_KV=config.block_kv,
            DIM=dim,
            STAGES=config.num_stages,
            DEAL=schedule.deal(run.schedule),
            PRECISION=launch.precision(q),
            REDUCE=reduce,
            LEVEL=run.recorder.number,
            num_warps=config.num_warps,
        )
    run.compiled.append(compiled)
    if dq_sum is not None:
        return rounded(dq_sum, q.dtype, problem.scale, run, facts), dk, dv
    assert fixed_order is not None
    return dq.grad_q(grad_out, q, k, v, lse, delta, kv_offsets, q_offsets, problem, fixed_order, run.schedule), dk, dv


def _dq_target(dq_sum: Tensor | None, config: BackwardConfig) -> Any:
    """Where the kernel adds dQ up: nowhere, by TMA, or by atomic adds."""
    if dq_sum is None:
        return None
    return launch.descriptor(dq_sum, config.block_q) if config.reduce == "tma" else (dq_sum, dq_sum.stride(0))


def rounded(total: Tensor, dtype: torch.dtype, scale: float, run: launch.Run, facts: dict[str, int]) -> Tensor:
    """scale · total (float32), rounded once to ``dtype``."""
    grad = torch.empty(total.shape, dtype=dtype, device=total.device)
    block = 4096
    with instrument.launch_range("jfa_round_dq", run.schedule, **facts):
        jfa_round_dq[(triton.cdiv(grad.numel(), block),)](total, grad, grad.numel(), scale, BLOCK=block)
    return grad
