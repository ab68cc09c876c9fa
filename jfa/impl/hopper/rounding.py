"""dQ's sum, rounded once to the inputs' type: in a pass of its own, or beside the backward that adds it up.

Where each sequence has queries of its own, the sum is large (1.6 GB on dense-1024), and a pass over it takes the time
that memory needs, 7 % of that backward on an H200. But a sequence is complete when its own tiles are done, long before
the last tile is. So a few SMs are left to a kernel that rounds each sequence behind its tiles, in their order; once the
backward has ended, it has all of them. On an H200 the whole takes 3.7 % less on dense-512 (10 SMs), 3.9 % on dense-1024
(5), 2.0 % on dense-2048 and 0.6 % on self-lognormal (2).

That kernel waits for counts, and must not take the place of a CTA that counts: it is launched behind one of a single
warp, `jfa_wait_for_ctas`, which ends when all of those have started. Both wait only for a kernel launched before them,
so that they end too where launches run one after the other, as under a profiler; in a CUDA graph, which keeps no order
between streams, dQ is rounded by a pass. And no program waits once the backward has ended, whatever was counted: in a
table of other lengths than the call's tiles are missing.

Tried: that the last tile of a sequence rounds its dQ, as long as that is in the L2 cache. A tile then waits for its
additions and counts itself, and more is spilled: 454 TFLOP/s against 506 with the pass. Or that the load role rounds, a
few pieces a step between its loads, what tiles of a few rounds before completed and counted (91 % of the blocks of
dense-1024): the pass fell from 603 to 47 µs, and the kernel took 7,776 µs instead of 6,850. Loads came as early as
before, but a compute warpgroup, beside whose warps the rounding ran, worked 13 % longer
(reports/backward-limits-h200.json).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfa import instrument, schedule
from jfa.config import HopperBackwardConfig
from jfa.impl.hopper import dq as summing
from jfa.impl.hopper import primitives as hopper
from jfa.impl.hopper.dq import Sum
from jfa.impl.triton import launch, primitives
from jfa.validation import Problem

LEAST_BYTES = 128 << 20
"""Of a sum that is rounded beside its backward, as that is two launches more. On an H200, in batches of 256 to 4,096
tokens a sequence: sums of 128 and 256 MiB took 1.5 to 3.8 % less, of 64 MiB from 1.2 % less to 0.3 % more, of 16 MiB
25 % more."""
KEYS_A_SM = 5120
"""Keys of a sequence times the SMs that keep up with its rounding: with fewer keys, a row is done sooner. On an H200,
of 0 to 6, 8 and 10 SMs, 10 were quickest for 512 keys, 5 for 1,024, 2 for 2,048 (reports/backward-limits-h200.json)."""
MOST_SHARE = 8
"""At most one SM of so many is left to rounding."""
LEAST_TILES = 8
"""Of a backward, over all SMs, that leaves some: of few tiles a CTA, one more is much."""
CLEARERS = 256
"""Programs at most that clear rows without keys, and those behind the last sequence."""
_CLEARERS = tl.constexpr(CLEARERS)
_SEQUENCES = tl.constexpr(128)


def sms_beside(run: launch.Run, problem: Problem, config: HopperBackwardConfig, device: torch.device) -> int:
    """SMs that a backward leaves to rounding its dQ beside it; 0 where that is a pass of its own.

    It is one of a shared Q, whose sum is complete at the end alone; with a mask, where a sequence's tiles do not stand
    together; of a schedule without an order; of a small sum, or of few tiles; and in a CUDA graph.
    """
    masked = problem.window_left >= 0 or problem.window_right >= 0
    ordered = schedule.deal(run.schedule) != schedule.DEAL_ONCE
    large = 4 * problem.total_q * problem.heads * problem.head_dim >= LEAST_BYTES
    able = config.round_beside and ordered and not (masked or problem.broadcast_q or launch.captured(device))
    if not (able and large and problem.batch and problem.total_kv):
        return 0
    sms = launch.sm_count(device)
    if run.items.max_items * problem.heads_kv < LEAST_TILES * sms:
        return 0
    # No length is known here, but the mean and perhaps a bound. Long sequences have most of the rows and of the work.
    mean = problem.total_kv / problem.batch
    longest = problem.max_kv_len if 0 < problem.max_kv_len < problem.total_kv else mean
    return min(max(round(KEYS_A_SM / (mean * longest) ** 0.5), 1), sms // MOST_SHARE)


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
    place = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    base = place * ROWS
    start = base * 0
    first = base
    length = start + q_uniform
    end = length
    if not BROADCAST_Q:
        batch = summing.sequence_at(base, q_offsets, batch_count, ROWS)
        start, length = primitives.sequence(q_offsets, batch, False, 0)
        first = base - summing.stat_row(start, batch, 0, False, ROWS)
        end = length
        if batch + 1 == batch_count:
            end = total_q - start
    if first >= end:
        return
    block = primitives.wide(head) * (tl.num_programs(0) // heads) + place
    _round_block(dq_sum, grad_q, block, start, first, length, end, head, heads, scale, ROWS, PARTS, DIM)


@triton.jit
def _round_block(
    dq_sum, grad_q, block, start, first, length, end, head, heads, scale, ROWS: tl.constexpr, PARTS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Round block ``block`` of ROWS rows of the sum: from row ``first`` of the ``length`` rows from ``start`` on.

    Rows from the ``length``-th to the ``end``-th get zeros.
    """
    found = tl.load(dq_sum + primitives.wide(block) * (ROWS * DIM) + tl.arange(0, ROWS * DIM)) * scale
    rows = first + tl.arange(0, ROWS)
    # Rows of the block behind the sequence may hold anything.
    values = summing.values_of(found.to(grad_q.dtype.element_ty), ROWS, DIM, PARTS)
    values = tl.where((rows < length)[:, None], values, 0.0)
    at = ((rows.to(tl.int64) + start) * heads + head)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(grad_q + at, values, mask=(rows < end)[:, None])


@triton.jit
def _clear_rows(grad_q, start, rows, heads, begin, stride, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Zero ``rows`` rows from ``start`` on, of all heads: every ``stride``-th block of ROWS from ``begin`` on."""
    for block in range(begin, (rows + ROWS - 1) // ROWS, stride):
        first = block * ROWS
        row = first + tl.arange(0, ROWS)
        at = (row.to(tl.int64) + start)[:, None] * (heads * DIM) + tl.arange(0, DIM)[None, :]
        zero = tl.zeros((ROWS, DIM), grad_q.dtype.element_ty)
        for head in range(heads):
            tl.store(grad_q + at + head * DIM, zero, mask=(row < rows)[:, None])


@triton.jit
def _clear(
    grad_q, q_offsets, kv_offsets, batch_count, total_q, heads, own, others, ROWS: tl.constexpr, DIM: tl.constexpr
):
    """Zero rows without keys and those behind the last sequence: the ``own``-th of ``others`` programs' share."""
    for base in range(0, batch_count, _SEQUENCES):
        batches = base + tl.arange(0, _SEQUENCES)
        valid = batches < batch_count
        kv_begin = tl.load(kv_offsets + batches, mask=valid, other=0)
        keyless = valid & (tl.load(kv_offsets + batches + 1, mask=valid, other=1) == kv_begin)
        if tl.sum(keyless.to(tl.int32), 0) > 0:
            for batch in range(base, tl.minimum(base + _SEQUENCES, batch_count)):
                start, length = primitives.sequence(q_offsets, batch, False, 0)
                _, kv_len = primitives.sequence(kv_offsets, batch, False, 0)
                if kv_len == 0:
                    _clear_rows(grad_q, start, length, heads, own, others, ROWS, DIM)
    end = tl.load(q_offsets + batch_count).to(tl.int32)
    _clear_rows(grad_q, end, total_q - end, heads, own, others, ROWS, DIM)


@triton.jit
def _come_to(counter, count):
    """Whether ``counter`` has come to ``count``; what was written before is seen then."""
    return tl.atomic_add(counter, 0, sem="acquire") >= count


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["started"])
def jfa_wait_for_ctas(started, count):
    """End when ``count`` CTAs have started: what is launched next takes no place that one of them needs."""
    while not _come_to(started, count):
        pass


@triton.jit(
    do_not_specialize=["batch_count", "total_q", "blocks", "max_items", "ctas"],
    do_not_specialize_on_alignment=["started"],
)
def jfa_round_dq_beside(
    dq_sum,
    grad_q,
    done,
    started,
    pairs,
    counts,
    q_offsets,
    kv_offsets,
    batch_count,
    total_q,
    blocks,
    max_items,
    ctas,
    heads_kv,
    group,
    scale,
    BLOCK_KV: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
):
    """As :func:`jfa_round_dq_blocks`, while the backward runs: a program a tile of it, and in its order.

    A program rounds its share of the rows of its tile's sequence and K/V head, when all of that one's tiles are
    counted, or all ``ctas`` CTAs have ended. Programs behind the last tile clear rows without keys and those behind
    the last sequence. ``blocks``: of a head's sum; ``max_items``: what the table holds.
    """
    tile = tl.program_id(0)
    item = tile // heads_kv
    work = tl.load(counts)
    # Asked for before it is known whether there is such an item: behind the branch, they would wait for its answer.
    listed = item < max_items
    batch = tl.load(pairs + 2 * item, mask=listed, other=0)
    block = tl.load(pairs + 2 * item + 1, mask=listed, other=0)
    heads = heads_kv * group
    if item >= work:
        own = tile - work * heads_kv
        others = tl.minimum(tl.num_programs(0) - work * heads_kv, _CLEARERS)
        if own < others:
            _clear(grad_q, q_offsets, kv_offsets, batch_count, total_q, heads, own, others, ROWS, DIM)
        return
    start, length = primitives.sequence(q_offsets, batch, False, 0)
    _, kv_len = primitives.sequence(kv_offsets, batch, False, 0)
    kv_blocks = tl.maximum((kv_len + BLOCK_KV - 1) // BLOCK_KV, 1)
    head, block, _ = hopper.side_by_side(tile, block, heads_kv, kv_blocks)
    counter = done + batch * heads_kv + tl.minimum(head, heads_kv - 1)
    waits = True
    while waits:
        waits = not (_come_to(counter, kv_blocks) or _come_to(started + 1, ctas))
    # In a table of other lengths than these, it can be a head that is not there.
    row_blocks = tl.where(head < heads_kv, (length + ROWS - 1) // ROWS, 0)
    first_block = summing.stat_row(start, batch, 0, False, ROWS) // ROWS
    low = primitives.wide(block) * row_blocks // kv_blocks
    high = (primitives.wide(block) + 1) * row_blocks // kv_blocks
    for at in range(low.to(tl.int32), high.to(tl.int32)):
        for q_head in range(head * group, (head + 1) * group):
            place = primitives.wide(q_head) * blocks + first_block + at
            _round_block(
                dq_sum, grad_q, place, start, at * ROWS, length, length, q_head, heads, scale, ROWS, PARTS, DIM
            )


def rounded(dq: Sum, grad: Tensor, q_offsets: Tensor | None, run: launch.Run) -> Tensor:
    """``grad``, (total_q, H, D) or (L_q, H, D), as scale · the sum, rounded once, in a pass of its own."""
    problem = dq.problem
    if not problem.batch:
        return grad.zero_()
    with instrument.launch_range("jfa_round_dq", run.schedule, heads=problem.heads, head_dim=problem.head_dim):
        jfa_round_dq_blocks[(dq.blocks * problem.heads,)](
            dq.values,
            grad,
            q_offsets,
            problem.batch,
            problem.q_len,
            problem.total_q,
            problem.heads,
            problem.scale,
            BROADCAST_Q=problem.broadcast_q,
            ROWS=dq.block,
            PARTS=dq.parts,
            DIM=problem.head_dim,
            num_warps=4,
        )
    return grad


def rounded_beside(
    dq: Sum,
    grad: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    block_kv: int,
    since: torch.cuda.Event | None,
    ctas: int,
    run: launch.Run,
) -> Tensor:
    """As :func:`rounded`, into ``grad``, beside the backward of ``ctas`` CTAs that was launched behind ``since``.

    All tensors must have been there at ``since``: what the current stream does later with their memory, it would do at
    the same time.
    """
    problem = dq.problem
    facts = {"heads": problem.heads, "head_dim": problem.head_dim}
    # More than there are tiles, so that someone clears.
    programs = run.items.max_items * problem.heads_kv + launch.sm_count(grad.device)
    with launch.beside(since, grad.device), instrument.launch_range("jfa_round_dq", run.schedule, **facts):
        jfa_wait_for_ctas[(1,)](dq.started, ctas, num_warps=1)
        jfa_round_dq_beside[(programs,)](
            dq.values,
            grad,
            dq.done,
            dq.started,
            run.items.pairs,
            run.items.counts,
            q_offsets,
            kv_offsets,
            problem.batch,
            problem.total_q,
            dq.blocks,
            run.items.max_items,
            ctas,
            problem.heads_kv,
            problem.heads // problem.heads_kv,
            problem.scale,
            BLOCK_KV=block_kv,
            ROWS=dq.block,
            PARTS=dq.parts,
            DIM=problem.head_dim,
            num_warps=4,
        )
    return grad
