"""Forward kernel: a tile is one block of queries of one (batch, head); it walks over that sequence's keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfa import instrument, lanes, schedule
from jfa.config import ForwardConfig
from jfa.impl.triton import launch, primitives
from jfa.validation import Problem

_LN2 = tl.constexpr(0.6931471805599453)
_KIND_TILE = tl.constexpr(lanes.KINDS["tile"])
_KIND_ZERO = tl.constexpr(lanes.KINDS["zero"])


@triton.jit
def _attend(
    acc,
    row_max,
    row_sum,
    q,
    k_desc,
    v_desc,
    kv_start,
    kv_len,
    column,
    low,
    high,
    q_rows,
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
    """Online softmax over keys ``low`` … ``high``; scores are in log2 units (``score_scale`` = scale · log2 e)."""
    for start in tl.range(low, high, BLOCK_KV, num_stages=STAGES):
        k = k_desc.load([kv_start + start, column])
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if MASK:
            cols = start + tl.arange(0, BLOCK_KV)
            mask = primitives.visible(
                q_rows[:, None], cols[None, :], q_len, kv_len, shift, before, after, HAS_BEFORE, HAS_AFTER
            )
            scores = tl.where(mask, scores * score_scale, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            # A row that has seen nothing keeps −inf; subtracting it from itself would be NaN.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2(scores - base[:, None])
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * score_scale)
            base = new_max
            p = tl.exp2(scores * score_scale - base[:, None])
        rescale = tl.exp2(row_max - base)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        v = primitives.load_rows(v_desc, kv_start + start, column, kv_len - start, MASK, BLOCK_KV, DIM)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _store_rows(out, lse, values, row_lse, row, head, heads, total_q, valid, rows, DIM: tl.constexpr):
    """Write [rows, DIM] of ``out`` (total_q, H, D) and their lse (H, total_q) from row ``row`` on, where ``valid``."""
    at = rows.to(tl.int64) + row
    dims = tl.arange(0, DIM)
    pointers = out + (at[:, None] * heads + head) * DIM + dims[None, :]
    tl.store(pointers, values.to(out.dtype.element_ty), mask=valid[:, None])
    tl.store(lse + primitives.wide(head) * total_q + at, row_lse, mask=valid)


@triton.jit
def _clear_rows(out, lse, row, count, heads, total_q, BLOCK_Q: tl.constexpr, DIM: tl.constexpr):
    """Zero output and −inf lse for ``count`` rows of every head."""
    rows = tl.arange(0, BLOCK_Q)
    zero = tl.zeros((BLOCK_Q, DIM), dtype=out.dtype.element_ty)
    nothing = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    for head in range(heads):
        _store_rows(out, lse, zero, nothing, row, head, heads, total_q, rows < count, rows, DIM)


@triton.jit(
    do_not_specialize=["batch_count", "q_uniform", "total_q", "before", "after", "capacity"],
    # A table of its own lends an unaligned counter, a plan does not: the code is the same, and compiled once so.
    do_not_specialize_on_alignment=["counter"],
)
def jfa_forward(
    q_desc,
    k_desc,
    v_desc,
    out,
    lse,
    q_offsets,
    kv_offsets,
    pairs,
    counts,
    counter,
    batch_count,
    heads,
    group,
    q_uniform,
    total_q,
    before,
    after,
    score_scale,
    recorder,
    capacity,
    BROADCAST_Q: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
    PEEL: tl.constexpr,
    DEAL: tl.constexpr,
    PRECISION: tl.constexpr,
    LEVEL: tl.constexpr,
):
    """Persistent over the tile table (one tile a CTA where ``DEAL`` says once).

    q_desc: rows of q, (rows, H·D); k_desc, v_desc: (total_kv, H_kv·D), blocks [BLOCK, D]. out: contiguous
    (total_q, H, D); lse: float32 (H, total_q); both are written for every row, seen or not.
    """
    own = tl.program_id(0)
    lane, noted = instrument.open_lane(recorder, own, capacity, LEVEL)
    work = tl.load(counts)
    tile_count = work * heads
    tile = own
    turn = 0
    while tile < tile_count:
        instrument.begin_span(lane, noted, capacity, _KIND_TILE, -1, LEVEL, 2)
        item = tile // heads
        head = tile % heads
        batch = tl.load(pairs + 2 * item)
        block = tl.load(pairs + 2 * item + 1)
        q_start, q_len = primitives.sequence(q_offsets, batch, BROADCAST_Q, q_uniform)
        kv_start, kv_len = primitives.sequence(kv_offsets, batch, False, 0)
        first = block * BLOCK_Q
        last = tl.minimum(first + BLOCK_Q, q_len) - 1
        shift = kv_len - q_len
        rows = tl.arange(0, BLOCK_Q)
        q_rows = first + rows
        low, full_low, full_high, high = primitives.columns_met(
            first, last, shift, kv_len, before, after, HAS_BEFORE, HAS_AFTER, BLOCK_KV
        )
        if not PEEL:
            full_low = low
            full_high = low
        q = q_desc.load([q_start + first, head * DIM])
        column = head // group * DIM
        acc = tl.zeros((BLOCK_Q, DIM), dtype=tl.float32)
        row_max = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        row_sum = tl.zeros((BLOCK_Q,), dtype=tl.float32)
        if HAS_BEFORE:
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, k_desc, v_desc, kv_start, kv_len, column, low, full_low, q_rows, q_len, shift,
                before, after, score_scale, True, HAS_BEFORE, HAS_AFTER, BLOCK_KV, DIM, STAGES, PRECISION,
            )  # fmt: skip
        if PEEL:
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, k_desc, v_desc, kv_start, kv_len, column, full_low, full_high, q_rows, q_len,
                shift, before, after, score_scale, False, HAS_BEFORE, HAS_AFTER, BLOCK_KV, DIM, STAGES, PRECISION,
            )  # fmt: skip
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, k_desc, v_desc, kv_start, kv_len, column, full_high, high, q_rows, q_len, shift,
            before, after, score_scale, True, HAS_BEFORE, HAS_AFTER, BLOCK_KV, DIM, STAGES, PRECISION,
        )  # fmt: skip
        seen = row_sum != 0  # NaN goes through
        values = tl.where(seen[:, None], acc / tl.where(seen, row_sum, 1.0)[:, None], 0.0)
        row_lse = tl.where(seen, row_max * _LN2 + tl.log(tl.where(seen, row_sum, 1.0)), float("-inf"))
        out_row = q_start + first
        if BROADCAST_Q:
            out_row = batch * q_uniform + first
        _store_rows(out, lse, values, row_lse, out_row, head, heads, total_q, q_rows < q_len, rows, DIM)
        noted = instrument.end_span(lane, noted, capacity, tile, LEVEL, 2)
        turn += 1
        tile = primitives.next_tile(tile, turn, counter, tile_count, DEAL)

    instrument.begin_span(lane, noted, capacity, _KIND_ZERO, -1, LEVEL, 2)
    cleared = 0
    for item in range(work + own, tl.load(counts + 1), tl.num_programs(0)):
        batch = tl.load(pairs + 2 * item)
        first = tl.load(pairs + 2 * item + 1) * BLOCK_Q
        q_start, q_len = primitives.sequence(q_offsets, batch, BROADCAST_Q, q_uniform)
        out_row = q_start + first
        if BROADCAST_Q:
            out_row = batch * q_uniform + first
        _clear_rows(out, lse, out_row, q_len - first, heads, total_q, BLOCK_Q, DIM)
        cleared += 1
    if not BROADCAST_Q:
        end = tl.load(q_offsets + batch_count).to(tl.int32)
        for row in range(end + own * BLOCK_Q, total_q, tl.num_programs(0) * BLOCK_Q):
            _clear_rows(out, lse, row, total_q - row, heads, total_q, BLOCK_Q, DIM)
            cleared += 1
    if cleared > 0:
        noted = instrument.end_span(lane, noted, capacity, -1, LEVEL, 2)
    instrument.close_lane(lane, noted, LEVEL)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_offsets: Tensor,
    q_offsets: Tensor | None,
    problem: Problem,
    config: ForwardConfig,
    run: launch.Run,
) -> tuple[Tensor, Tensor]:
    """Output (total_q, H, D) in q's dtype and lse float32 (H, total_q); for broadcast q, total_q = B · L_q."""
    out = torch.empty((problem.total_q, problem.heads, problem.head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((problem.heads, problem.total_q), dtype=torch.float32, device=q.device)
    if problem.total_q == 0 or problem.heads == 0:
        return out, lse
    grid = launch.grid(run, problem.heads, q.device, config.ctas_per_sm)
    facts = {"heads": problem.heads, "head_dim": problem.head_dim}
    with instrument.launch_range("jfa_forward", run.schedule, **facts):
        compiled = jfa_forward[(grid,)](
            launch.descriptor(launch.as_rows(q), config.block_q),
            launch.descriptor(launch.as_rows(k), config.block_kv),
            launch.descriptor(launch.as_rows(v), config.block_kv),
            out,
            lse,
            q_offsets,
            kv_offsets,
            run.items.pairs,
            run.items.counts,
            run.counter(),
            problem.batch,
            problem.heads,
            problem.heads // problem.heads_kv,
            problem.q_len,
            problem.total_q,
            problem.window_left,
            problem.window_right,
            problem.scale * launch.LOG2_E,
            run.recorder.buffer,
            run.recorder.capacity,
            BROADCAST_Q=problem.broadcast_q,
            HAS_BEFORE=problem.window_left >= 0,
            HAS_AFTER=problem.window_right >= 0,
            BLOCK_Q=config.block_q,
            BLOCK_KV=config.block_kv,
            DIM=problem.head_dim,
            STAGES=config.num_stages,
            PEEL=config.peel,
            DEAL=schedule.deal(run.schedule),
            PRECISION=launch.precision(q),
            LEVEL=run.recorder.number,
            num_warps=config.num_warps,
        )
    run.compiled.append(compiled)
    return out, lse
