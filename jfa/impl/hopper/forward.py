"""Forward kernel for sm_90: one role loads, two compute; a tile is a block of queries of one (batch, head).

Roles of a CTA: ``load`` (the default warps) walks over the tile table, fetches the next tile while the current one is
loaded, and brings Q, K and V in by TMA; two ``mma`` warpgroups own half of the tile's rows each, hold scores, weights
and output in registers, and take turns at the tensor cores, so that one's softmax runs under the other's products.

With ``CLUSTER`` 2 a tile is two blocks of queries, of which each CTA of a pair does one: each loads half of every block
of K and V into both CTAs, and on demand rank 0 takes the tiles for both.

K and V pass through a ring of ``STAGES`` buffers. Blocks come in the order: a short rest of at most ``TAIL`` keys with
a product of its own size, the last (maybe partial) block, then the full ones from the first on; so the loop itself
needs no mask. Ragged descriptors give zeros behind a sequence's last row and never write there.

A sequence longer than ``split`` keys is cut: its parts are tiles of their own, which write partial results, each number
as the sum of two of q's type; ``merge`` joins them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from torch import Tensor

from jfa import instrument, lanes, schedule, toolchain
from jfa.config import HopperForwardConfig
from jfa.impl.hopper import left_out
from jfa.impl.hopper import merge as merging
from jfa.impl.hopper import primitives as hopper
from jfa.impl.triton import launch, primitives
from jfa.validation import Problem

ROLES = ("load", "mma0", "mma1")
"""The warpgroups of a CTA, in the order of their lanes in a recording."""
SPLIT_SHARE, LEAST_SPLIT = 0.85, 1024
MOST_PARTS = 2**11 - 1
"""Of a sequence, above whose block its part is kept in 32 bits."""
LEAST_SCALE = 1e-30
"""Scores are scaled after they are masked, and 0 · −inf would be NaN; so small a scale makes every score 0 as well."""
_ROLES = tl.constexpr(len(ROLES))
_LN2 = tl.constexpr(0.6931471805599453)
_SLOTS = tl.constexpr(4)
_ITEM_FULL = tl.constexpr(lanes.WAITS["item_full"])
_ITEM_EMPTY = tl.constexpr(lanes.WAITS["item_empty"])
_Q_FULL = tl.constexpr(lanes.WAITS["q_full"])
_Q_EMPTY = tl.constexpr(lanes.WAITS["q_empty"])
_K_FULL = tl.constexpr(lanes.WAITS["k_full"])
_K_EMPTY = tl.constexpr(lanes.WAITS["k_empty"])
_V_FULL = tl.constexpr(lanes.WAITS["v_full"])
_V_EMPTY = tl.constexpr(lanes.WAITS["v_empty"])
_KIND_TILE = tl.constexpr(lanes.KINDS["tile"])
_KIND_ZERO = tl.constexpr(lanes.KINDS["zero"])
_NEXT_FULL = tl.constexpr(lanes.WAITS["next_full"])
_NEXT_EMPTY = tl.constexpr(lanes.WAITS["next_empty"])
_PART_SHIFT = tl.constexpr(schedule.PART_SHIFT)
_DEAL_ON_DEMAND = tl.constexpr(schedule.DEAL_ON_DEMAND)
_EXP = tl.constexpr(left_out.CODES["exp"])
_LOADS = tl.constexpr(left_out.CODES["loads"])
_STORE = tl.constexpr(left_out.CODES["store"])


@triton.jit
def _blocks_of(low, high, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """(keys of the short rest, blocks) of columns ``low`` … ``high``: the rest, at most TAIL, is no block."""
    columns = high - low
    rest = columns % BLOCK
    short = tl.where(rest <= TAIL, rest, 0)
    return short, (columns - short + BLOCK - 1) // BLOCK


@triton.jit
def _place_of(step, blocks, PEEL: tl.constexpr):
    """Which block the ``step``-th is: the last one first, where it is peeled off the loop, as it may need a mask."""
    if PEEL:
        return tl.where(step == 0, blocks, step) - 1
    else:
        return step


@triton.jit
def _softmax(scores, row_max, row_sum, score_scale, GUARD: tl.constexpr, LEAVE_OUT: tl.constexpr = 0):
    """(weights, factor for what was summed before, new maximum, new sum); scores become log2 units by the scale."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * score_scale)
    base = new_max
    if GUARD:  # a row that has seen nothing keeps −inf; subtracting it from itself would be NaN
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = scores * score_scale - base[:, None]
    if LEAVE_OUT != _EXP:
        p = tl.exp2(p)
    rescale = tl.exp2(row_max - base)
    return p, rescale, new_max, row_sum * rescale + tl.sum(p, 1)


@triton.jit
def _up_to(scores, start, high, BLOCK: tl.constexpr, UNSEEN: tl.constexpr = float("-inf")):
    """Scores of columns from ``start`` on, UNSEEN from ``high`` on; whole blocks are not looked at."""
    if start + BLOCK > high:
        columns = start + tl.arange(0, BLOCK)
        scores = tl.where((columns < high)[None, :], scores, UNSEEN)
    return scores


@triton.jit
def _normalise(acc, row_max, row_sum, MASKED: tl.constexpr):
    """(output rows, their lse); a row that saw nothing is zero, with an lse of −inf."""
    seen = row_sum != 0  # NaN goes through
    weight = 1.0 / tl.where(seen, row_sum, 1.0)
    row_lse = tl.where(seen, row_max * _LN2 + tl.log(tl.where(seen, row_sum, 1.0)), float("-inf"))
    if MASKED:
        acc = tl.where(seen[:, None], acc, 0.0)
    return acc * weight[:, None], row_lse


@triton.jit
def _clear_rest(
    out,
    lse,
    pairs,
    counts,
    work,
    q_offsets,
    batch_count,
    q_uniform,
    heads,
    total_q,
    own,
    stride,
    BROADCAST_Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    DIM: tl.constexpr,
):
    """Clear the rows that no tile writes: of items without work, then behind the last sequence; how many items it did.

    Of ``stride`` warpgroups this is the ``own``-th.
    """
    cleared = 0
    for item in range(work + own, tl.load(counts + 1), stride):
        batch = tl.load(pairs + 2 * item)
        first = (tl.load(pairs + 2 * item + 1) & ((1 << _PART_SHIFT) - 1)) * BLOCK_Q
        q_start, q_len = primitives.sequence(q_offsets, batch, BROADCAST_Q, q_uniform)
        if BROADCAST_Q:
            q_start = batch * q_uniform
        count = tl.minimum(q_len - first, BLOCK_Q)
        hopper.clear_rows(out, lse, q_start + first, count, heads, total_q, DIM)
        cleared += 1
    if not BROADCAST_Q:
        end = tl.load(q_offsets + batch_count).to(tl.int32)
        for row in range(end + own * BLOCK_Q, total_q, stride * BLOCK_Q):
            hopper.clear_rows(out, lse, row, tl.minimum(total_q - row, BLOCK_Q), heads, total_q, DIM)
            cleared += 1
    return cleared


@triton.jit
def _load(desc, tile, full, start, rows, row, column, rank, CLUSTER: tl.constexpr):
    """Load keys or values into this CTA's tile, or into those of both CTAs of a pair."""
    if CLUSTER == 2:
        hopper.load_for_both(desc, tile, full, start, rows, row, column, rank)
    else:
        hopper.load(desc, tile, full, start, rows, row, column)


@triton.jit
def _agree(
    taken, turn, sent, came, came_first, next_empty, next_full, rank, lane, noted, capacity, named, LEVEL: tl.constexpr
):  # fmt: skip
    """(the tile that rank 0 has taken, in both CTAs of a pair; the lane's count of events)."""
    slot = turn % _SLOTS
    phase = (turn // _SLOTS) & 1
    if rank == 0:
        noted = hopper.wait(next_empty[slot], phase ^ 1, lane, noted, capacity, _NEXT_EMPTY, slot, named, LEVEL)
        tlx.local_store(sent[slot], tl.full((4,), 0, tl.int32) + taken)
        tlx.fence("async_shared")
        tlx.async_remote_shmem_copy(came[slot], sent[slot], 1, next_full[slot])
    else:
        tlx.barrier_expect_bytes(next_full[slot], 16)
        noted = hopper.wait(next_full[slot], phase, lane, noted, capacity, _NEXT_FULL, slot, named, LEVEL)
        taken = hopper.get(came_first[4 * slot])
        tlx.barrier_arrive(next_empty[slot], 1, 0)
    return taken, noted


@triton.jit(
    do_not_specialize=["batch_count", "q_uniform", "total_q", "q_stride", "split", "before", "after", "capacity"],
    do_not_specialize_on_alignment=["counter"],
)
def jfa_forward_hopper(
    q_desc,
    k_desc,
    v_desc,
    k_tail_desc,
    v_tail_desc,
    o_desc,
    out,
    lse,
    partial_desc,
    partial_lse,
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
    q_stride,
    split,
    before,
    after,
    score_scale,
    recorder,
    capacity,
    BROADCAST_Q: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TAIL: tl.constexpr,
    DIM: tl.constexpr,
    STAGES: tl.constexpr,
    REGISTERS: tl.constexpr,
    PINGPONG: tl.constexpr,
    PEEL: tl.constexpr,
    EARLY_FETCH: tl.constexpr,
    CLUSTER: tl.constexpr,
    DEAL: tl.constexpr,
    LEVEL: tl.constexpr,
    LEAVE_OUT: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_Q // 2
    UNIT: tl.constexpr = BLOCK_Q * CLUSTER
    # Warps whose threads all arrive when a buffer is released: two warpgroups', and a warp's worth of the other CTA's.
    RELEASERS: tl.constexpr = 7 + CLUSTER
    AGREE: tl.constexpr = CLUSTER == 2 and DEAL == _DEAL_ON_DEMAND
    # A pair that agreed on its next tile in the midst of loads was no quicker (hsp-loguniform on an H200, 12 rounds in
    # turn: 1,188 against 1,182 µs), and its loop of loads held more in registers.
    EARLY: tl.constexpr = EARLY_FETCH and not AGREE
    MASKED: tl.constexpr = HAS_BEFORE or HAS_AFTER
    ELEMENT: tl.constexpr = tlx.size_of(tlx.dtype_of(k_desc))
    # Sums stay numbers: products of infinities might take less power, and a GPU at its limit clock higher.
    UNSEEN: tl.constexpr = 0.0 if LEAVE_OUT == _EXP else float("-inf")
    dtype = tlx.dtype_of(k_desc)

    q_tiles = tlx.local_alloc((HALF, DIM), dtype, 4)
    k_tiles = tlx.local_alloc((BLOCK_KV, DIM), dtype, STAGES)
    v_tiles = tlx.local_alloc((BLOCK_KV, DIM), dtype, STAGES)
    o_tiles = tlx.local_alloc((1, 1, HALF, DIM), dtype, 2)
    q_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    q_empty = tlx.alloc_warp_barrier(num_barriers=2, num_warps=4, num_arrivals=2)
    k_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    k_empty = tlx.alloc_warp_barrier(num_barriers=STAGES, num_warps=RELEASERS)
    v_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    v_empty = tlx.alloc_warp_barrier(num_barriers=STAGES, num_warps=RELEASERS)
    # A work item: tile (−1 ends), batch, first query row of the tile in its sequence, q's first row and length of the
    # sequence, first key row and number of keys of the tile; of a sequence that is cut which part, and all its keys.
    item_full = tlx.alloc_warp_barrier(num_barriers=_SLOTS, num_warps=4, num_arrivals=1)
    item_empty = tlx.alloc_warp_barrier(num_barriers=_SLOTS, num_warps=4, num_arrivals=2)
    item_tile = tlx.local_alloc((1,), tl.int32, _SLOTS)
    item_batch = tlx.local_alloc((1,), tl.int32, _SLOTS)
    item_first = tlx.local_alloc((1,), tl.int32, _SLOTS)
    item_q_start = tlx.local_alloc((1,), tl.int32, _SLOTS)
    item_q_len = tlx.local_alloc((1,), tl.int32, _SLOTS)
    item_kv_start = tlx.local_alloc((1,), tl.int32, _SLOTS)
    item_kv_len = tlx.local_alloc((1,), tl.int32, _SLOTS)
    item_part = tlx.local_alloc((1,), tl.int32, _SLOTS)
    item_kv_all = tlx.local_alloc((1,), tl.int32, _SLOTS)

    if AGREE:
        # The next tile, which rank 0 takes for both CTAs and tells rank 1; 16 bytes are the least that can be copied.
        # Read as one number, not as four: then ptxas knows that all threads have the same, and so do loops over it.
        sent = tlx.local_alloc((4,), tl.int32, _SLOTS)
        came = tlx.local_alloc((4,), tl.int32, _SLOTS)
        came_first = tlx.local_alloc((1,), tl.int32, 4 * _SLOTS, reuse=came)
        next_full = tlx.alloc_barriers(num_barriers=_SLOTS, arrive_count=1)
        next_empty = tlx.alloc_barriers(num_barriers=_SLOTS, arrive_count=1)

    own = tl.program_id(0)
    rank = 0
    if CLUSTER == 2:
        rank = own % 2  # and not the special register, which ptxas takes to differ between threads
    work = tl.load(counts)
    tile_count = work * heads

    with tlx.async_tasks():
        with tlx.async_task("default"):
            lane, noted = instrument.open_lane(recorder, own * _ROLES, capacity, LEVEL, True)
            tile = own // CLUSTER
            turn = 0
            loaded = 0
            batch = 0
            block = 0
            if LEAVE_OUT == _LOADS:
                hot = hopper.hot_row(own, tl.load(kv_offsets + batch_count).to(tl.int32), BLOCK_KV)
            if tile < tile_count:
                batch = tl.load(pairs + 2 * (tile // heads))
                block = tl.load(pairs + 2 * (tile // heads) + 1)
            while tile < tile_count:
                q_start, q_len = primitives.sequence(q_offsets, batch, BROADCAST_Q, q_uniform)
                kv_start, kv_all = primitives.sequence(kv_offsets, batch, False, 0)
                kv_len = kv_all
                head = tile % heads
                part = block >> _PART_SHIFT
                block = block & ((1 << _PART_SHIFT) - 1)
                named = tile
                if not MASKED:
                    head, block, named = hopper.side_by_side(tile, block, heads, (q_len + UNIT - 1) // UNIT)
                first = block * UNIT + rank * BLOCK_Q
                if SPLIT:
                    kv_start += part * split
                    kv_len = tl.minimum(kv_all - part * split, split)
                slot = turn % _SLOTS
                noted = hopper.wait(
                    item_empty[slot], ((turn // _SLOTS) & 1) ^ 1, lane, noted, capacity, _ITEM_EMPTY, slot, named, LEVEL
                )
                hopper.put(item_tile[slot], named)
                hopper.put(item_batch[slot], batch)
                hopper.put(item_first[slot], first)
                hopper.put(item_q_start[slot], q_start)
                hopper.put(item_q_len[slot], q_len)
                hopper.put(item_kv_start[slot], kv_start)
                hopper.put(item_kv_len[slot], kv_len)
                if SPLIT:
                    hopper.put(item_part[slot], tl.where(kv_all > split, part, -1))
                    hopper.put(item_kv_all[slot], kv_all)
                tlx.barrier_arrive(item_full[slot], 1)

                low, full_low, full_high, high = primitives.columns_met(
                    first, tl.minimum(first + BLOCK_Q, q_len) - 1, kv_len - q_len, kv_len, before, after, HAS_BEFORE,
                    HAS_AFTER, BLOCK_KV,
                )  # fmt: skip
                short, blocks = _blocks_of(low, high, BLOCK_KV, TAIL)
                column = head // group * DIM
                if LEAVE_OUT == _LOADS:
                    column = 0

                q_slot = turn % 2
                noted = hopper.wait(
                    q_empty[q_slot], ((turn // 2) & 1) ^ 1, lane, noted, capacity, _Q_EMPTY, q_slot, named, LEVEL
                )
                tlx.barrier_expect_bytes(q_full[q_slot], BLOCK_Q * DIM * ELEMENT)
                tlx.async_descriptor_load(
                    q_desc, tlx.local_reshape(q_tiles[2 * q_slot], [1, 1, HALF, DIM]),
                    hopper.ragged(q_start, q_len, first, head * DIM), q_full[q_slot],
                )  # fmt: skip
                tlx.async_descriptor_load(
                    q_desc, tlx.local_reshape(q_tiles[2 * q_slot + 1], [1, 1, HALF, DIM]),
                    hopper.ragged(q_start, q_len, first + HALF, head * DIM), q_full[q_slot],
                )  # fmt: skip

                if TAIL > 0:
                    if short > 0:
                        stage = loaded % STAGES
                        phase = (loaded // STAGES) & 1
                        origin = kv_start
                        if LEAVE_OUT == _LOADS:
                            origin = hot - (high - short)
                        k_short = tlx.local_reinterpret(k_tiles[stage], dtype, [TAIL, DIM])
                        v_short = tlx.local_reinterpret(v_tiles[stage], dtype, [TAIL, DIM])
                        began, ended = hopper.timed_wait(k_empty[stage], phase ^ 1, noted, capacity, LEVEL)
                        _load(k_tail_desc, k_short, k_full[stage], origin, kv_len, high - short, column, rank, CLUSTER)
                        noted = instrument.note_wait(lane, noted, capacity, began, ended, _K_EMPTY, stage, named, LEVEL)
                        began, ended = hopper.timed_wait(v_empty[stage], phase ^ 1, noted, capacity, LEVEL)
                        _load(v_tail_desc, v_short, v_full[stage], origin, kv_len, high - short, column, rank, CLUSTER)
                        noted = instrument.note_wait(lane, noted, capacity, began, ended, _V_EMPTY, stage, named, LEVEL)
                        loaded += 1

                # The next tile, fetched a step at a time while the ring is full, so that no load waits for it.
                next_tile = tile_count
                next_batch = 0
                next_block = 0
                fetched = 0
                for step in range(blocks):
                    start = low + _place_of(step, blocks, PEEL) * BLOCK_KV
                    stage = loaded % STAGES
                    phase = (loaded // STAGES) & 1
                    origin = kv_start
                    if LEAVE_OUT == _LOADS:
                        origin = hot - start
                    # A load is on its way before its wait is noted: consumers may be waiting for it.
                    began, ended = hopper.timed_wait(k_empty[stage], phase ^ 1, noted, capacity, LEVEL)
                    _load(k_desc, k_tiles[stage], k_full[stage], origin, kv_len, start, column, rank, CLUSTER)
                    noted = instrument.note_wait(lane, noted, capacity, began, ended, _K_EMPTY, stage, named, LEVEL)
                    began, ended = hopper.timed_wait(v_empty[stage], phase ^ 1, noted, capacity, LEVEL)
                    _load(v_desc, v_tiles[stage], v_full[stage], origin, kv_len, start, column, rank, CLUSTER)
                    noted = instrument.note_wait(lane, noted, capacity, began, ended, _V_EMPTY, stage, named, LEVEL)
                    loaded += 1
                    if EARLY and step == 0:
                        next_tile = primitives.next_tile(tile, turn + 1, counter, tile_count, DEAL, CLUSTER)
                    elif EARLY and step == 1:
                        if next_tile < tile_count:
                            next_batch = tl.load(pairs + 2 * (next_tile // heads))
                            next_block = tl.load(pairs + 2 * (next_tile // heads) + 1)
                    if EARLY:
                        fetched = step + 1
                if fetched < 1:
                    if not AGREE or rank == 0:
                        next_tile = primitives.next_tile(tile, turn + 1, counter, tile_count, DEAL, CLUSTER)
                if fetched < 2:
                    if AGREE:
                        next_tile, noted = _agree(
                            next_tile, turn, sent, came, came_first, next_empty, next_full, rank, lane, noted, capacity,
                            named, LEVEL,
                        )  # fmt: skip
                    if next_tile < tile_count:
                        next_batch = tl.load(pairs + 2 * (next_tile // heads))
                        next_block = tl.load(pairs + 2 * (next_tile // heads) + 1)
                tile = next_tile
                batch = next_batch
                block = next_block
                turn += 1
            slot = turn % _SLOTS
            noted = hopper.wait(
                item_empty[slot], ((turn // _SLOTS) & 1) ^ 1, lane, noted, capacity, _ITEM_EMPTY, slot, -1, LEVEL
            )
            hopper.put(item_tile[slot], -1)
            tlx.barrier_arrive(item_full[slot], 1)
            instrument.close_lane(lane, noted, LEVEL)
            if CLUSTER == 2:
                # A CTA must not end before the other's last word to it has come.
                for ahead in range(STAGES):
                    stage = (loaded + ahead) % STAGES
                    phase = ((loaded + ahead) // STAGES) & 1
                    tlx.barrier_wait(k_empty[stage], phase ^ 1)
                    tlx.barrier_wait(v_empty[stage], phase ^ 1)
            if AGREE:
                if rank == 0:
                    for ahead in range(_SLOTS):
                        slot = (turn + ahead) % _SLOTS
                        tlx.barrier_wait(next_empty[slot], (((turn + ahead) // _SLOTS) & 1) ^ 1)

        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            wg: tl.constexpr = tlx.async_task_replica_id()
            lane, noted = instrument.open_lane(recorder, own * _ROLES + 1 + wg, capacity, LEVEL, True)
            tile = -1
            if PINGPONG:
                if wg == 1:
                    hopper.pass_turn(wg)
            turn = 0
            used = 0
            noted = hopper.wait(item_full[0], 0, lane, noted, capacity, _ITEM_FULL, 0, tile, LEVEL)
            tile = hopper.get(item_tile[0])
            while tile >= 0:
                begun = noted
                instrument.begin_span(lane, begun, capacity, _KIND_TILE, -1, LEVEL, 2)
                noted = instrument.behind(noted, LEVEL, 2)
                slot = turn % _SLOTS
                batch = hopper.get(item_batch[slot])
                first = hopper.get(item_first[slot])
                q_start = hopper.get(item_q_start[slot])
                q_len = hopper.get(item_q_len[slot])
                kv_start = hopper.get(item_kv_start[slot])
                kv_len = hopper.get(item_kv_len[slot])
                part = -1
                if SPLIT:
                    part = hopper.get(item_part[slot])
                    kv_all = hopper.get(item_kv_all[slot])
                tlx.barrier_arrive(item_empty[slot], 1)
                head = tile % heads
                shift = kv_len - q_len
                low, full_low, full_high, high = primitives.columns_met(
                    first, tl.minimum(first + BLOCK_Q, q_len) - 1, shift, kv_len, before, after, HAS_BEFORE, HAS_AFTER,
                    BLOCK_KV,
                )  # fmt: skip
                short, blocks = _blocks_of(low, high, BLOCK_KV, TAIL)
                q_slot = turn % 2
                q_tile = q_tiles[2 * q_slot + wg]
                noted = hopper.wait(
                    q_full[q_slot], (turn // 2) & 1, lane, noted, capacity, _Q_FULL, q_slot, tile, LEVEL
                )

                both = first + HALF < q_len
                if (wg == 0) | both:
                    row_max = tl.full((HALF,), float("-inf"), tl.float32)
                    row_sum = tl.zeros((HALF,), dtype=tl.float32)
                    acc = tl.zeros((HALF, DIM), dtype=tl.float32)
                    rows = first + wg * HALF + tl.arange(0, HALF)
                    if TAIL > 0:
                        if short > 0:
                            stage = used % STAGES
                            phase = (used // STAGES) & 1
                            noted = hopper.wait(
                                k_full[stage], phase, lane, noted, capacity, _K_FULL, stage, tile, LEVEL
                            )
                            k_short = tlx.local_reinterpret(k_tiles[stage], dtype, [TAIL, DIM])
                            s_short = tlx.async_dot(q_tile, tlx.local_trans(k_short))
                            s_short = tlx.async_dot_wait(0, s_short)
                            hopper.release(k_empty[stage], rank, CLUSTER)
                            columns = tl.arange(0, TAIL)
                            s_short = tl.where((columns < short)[None, :], s_short, UNSEEN)
                            p_short, rescale, row_max, row_sum = _softmax(
                                s_short, row_max, row_sum, score_scale, False, LEAVE_OUT
                            )
                            noted = hopper.wait(
                                v_full[stage], phase, lane, noted, capacity, _V_FULL, stage, tile, LEVEL
                            )
                            v_short = tlx.local_reinterpret(v_tiles[stage], dtype, [TAIL, DIM])
                            acc = tlx.async_dot(p_short.to(dtype), v_short, acc)
                            acc = tlx.async_dot_wait(0, acc)
                            hopper.release(v_empty[stage], rank, CLUSTER)
                            used += 1
                    if blocks > 0:
                        stage = used % STAGES
                        noted = hopper.wait(
                            k_full[stage], (used // STAGES) & 1, lane, noted, capacity, _K_FULL, stage, tile, LEVEL
                        )
                        if PINGPONG:
                            if both:
                                noted = hopper.take_turn(wg, lane, noted, capacity, tile, LEVEL)
                        scores = tlx.async_dot(q_tile, tlx.local_trans(k_tiles[stage]))
                        if PINGPONG:
                            if both:
                                hopper.pass_turn(wg)
                        scores = tlx.async_dot_wait(0, scores)
                        hopper.release(k_empty[stage], rank, CLUSTER)
                        start = low + _place_of(0, blocks, PEEL) * BLOCK_KV
                        if MASKED:
                            mask = primitives.visible(
                                rows[:, None], (start + tl.arange(0, BLOCK_KV))[None, :], q_len, kv_len, shift, before,
                                after, HAS_BEFORE, HAS_AFTER,
                            )  # fmt: skip
                            scores = tl.where(mask, scores, UNSEEN)
                        else:
                            scores = _up_to(scores, start, high, BLOCK_KV, UNSEEN)
                        p, rescale, row_max, row_sum = _softmax(
                            scores, row_max, row_sum, score_scale, MASKED, LEAVE_OUT
                        )
                        acc = acc * rescale[:, None]
                        used += 1
                        for step in range(1, blocks):
                            stage = used % STAGES
                            noted = hopper.wait(
                                k_full[stage], (used // STAGES) & 1, lane, noted, capacity, _K_FULL, stage, tile, LEVEL
                            )
                            if PINGPONG:
                                if both:
                                    noted = hopper.take_turn(wg, lane, noted, capacity, tile, LEVEL)
                            scores = tlx.async_dot(q_tile, tlx.local_trans(k_tiles[stage]))
                            behind = (used - 1) % STAGES
                            noted = hopper.wait(
                                v_full[behind],
                                ((used - 1) // STAGES) & 1,
                                lane,
                                noted,
                                capacity,
                                _V_FULL,
                                behind,
                                tile,
                                LEVEL,
                            )
                            acc = tlx.async_dot(p.to(dtype), v_tiles[behind], acc)
                            if PINGPONG:
                                if both:
                                    hopper.pass_turn(wg)
                            scores = tlx.async_dot_wait(1, scores)
                            hopper.release(k_empty[stage], rank, CLUSTER)
                            start = low + _place_of(step, blocks, PEEL) * BLOCK_KV
                            if not PEEL:
                                scores = _up_to(scores, start, high, BLOCK_KV, UNSEEN)
                            if MASKED:
                                if (start < full_low) | (start >= full_high):
                                    mask = primitives.visible(
                                        rows[:, None], (start + tl.arange(0, BLOCK_KV))[None, :], q_len, kv_len, shift,
                                        before, after, HAS_BEFORE, HAS_AFTER,
                                    )  # fmt: skip
                                    scores = tl.where(mask, scores, UNSEEN)
                            p, rescale, row_max, row_sum = _softmax(
                                scores, row_max, row_sum, score_scale, MASKED, LEAVE_OUT
                            )
                            acc = tlx.async_dot_wait(0, acc)
                            hopper.release(v_empty[behind], rank, CLUSTER)
                            acc = acc * rescale[:, None]
                            used += 1
                        behind = (used - 1) % STAGES
                        noted = hopper.wait(
                            v_full[behind],
                            ((used - 1) // STAGES) & 1,
                            lane,
                            noted,
                            capacity,
                            _V_FULL,
                            behind,
                            tile,
                            LEVEL,
                        )
                        acc = tlx.async_dot(p.to(dtype), v_tiles[behind], acc)
                        acc = tlx.async_dot_wait(0, acc)
                        hopper.release(v_empty[behind], rank, CLUSTER)
                    tlx.barrier_arrive(q_empty[q_slot], 1)

                    acc, row_lse = _normalise(acc, row_max, row_sum, MASKED)
                    if (part < 0) & hopper.happens(batch_count, LEAVE_OUT != _STORE):
                        out_start = q_start
                        if BROADCAST_Q:
                            out_start = batch * q_uniform
                        hopper.store_tile(
                            o_desc, o_tiles[wg], acc.to(dtype), out_start, q_len, first + wg * HALF, head * DIM, HALF,
                            DIM,
                        )  # fmt: skip
                        at = (out_start + rows).to(tl.int64)
                        tl.store(lse + primitives.wide(head) * total_q + at, row_lse, mask=rows < q_len)
                    if SPLIT:
                        if (part >= 0) & (first < q_stride) & hopper.happens(batch_count, LEAVE_OUT != _STORE):
                            place = merging.part_place(kv_start, split, part, kv_all)
                            at = (place * heads + head) * q_stride
                            high_half = acc.to(dtype)
                            hopper.store_tile(
                                partial_desc, o_tiles[wg], high_half, 2 * at, q_len, first + wg * HALF, 0, HALF, DIM
                            )
                            low_half = (acc - high_half.to(tl.float32)).to(dtype)
                            hopper.store_tile(
                                partial_desc, o_tiles[wg], low_half, 2 * at + q_stride, q_len, first + wg * HALF, 0,
                                HALF, DIM,
                            )  # fmt: skip
                            tl.store(partial_lse + at + rows, row_lse, mask=rows < q_len)
                else:
                    for _ in range(blocks + tl.where(short > 0, 1, 0)):
                        stage = used % STAGES
                        phase = (used // STAGES) & 1
                        noted = hopper.wait(k_full[stage], phase, lane, noted, capacity, _K_FULL, stage, tile, LEVEL)
                        hopper.release(k_empty[stage], rank, CLUSTER)
                        noted = hopper.wait(v_full[stage], phase, lane, noted, capacity, _V_FULL, stage, tile, LEVEL)
                        hopper.release(v_empty[stage], rank, CLUSTER)
                        used += 1
                    tlx.barrier_arrive(q_empty[q_slot], 1)
                instrument.end_span(lane, begun, capacity, tile, LEVEL, 2)
                turn += 1
                noted = hopper.wait(
                    item_full[turn % _SLOTS],
                    (turn // _SLOTS) & 1,
                    lane,
                    noted,
                    capacity,
                    _ITEM_FULL,
                    turn % _SLOTS,
                    tile,
                    LEVEL,
                )
                tile = hopper.get(item_tile[turn % _SLOTS])
            tlx.async_descriptor_store_wait(0)

            instrument.begin_span(lane, noted, capacity, _KIND_ZERO, -1, LEVEL, 2)
            cleared = _clear_rest(
                out, lse, pairs, counts, work, q_offsets, batch_count, q_uniform, heads, total_q, own * 2 + wg,
                tl.num_programs(0) * 2, BROADCAST_Q, UNIT, DIM,
            )  # fmt: skip
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
    config: HopperForwardConfig,
    run: launch.Run,
) -> tuple[Tensor, Tensor]:
    """Output (total_q, H, D) in q's dtype and lse float32 (H, total_q); for broadcast q, total_q = B · L_q."""
    out = torch.empty((problem.total_q, problem.heads, problem.head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((problem.heads, problem.total_q), dtype=torch.float32, device=q.device)
    if problem.total_q == 0 or problem.heads == 0:
        return out, lse
    toolchain.require_safe_ptxas("the forward for sm_90")
    split = run.items.split
    q_rows, k_rows, v_rows = launch.as_rows(q), launch.as_rows(k), launch.as_rows(v)
    half, tail = config.block_q // 2, config.tail or config.block_kv
    together = cluster(problem, config, split)
    grid = launch.grid(run, problem.heads, q.device, 1, together)
    partial_out, partial_lse = merging.partials(problem, split, config.block_q, q)
    facts = {"heads": problem.heads, "head_dim": problem.head_dim}
    with instrument.launch_range("jfa_forward", run.schedule, **facts):
        compiled = jfa_forward_hopper[(grid,)](
            launch.ragged_descriptor(q_rows, half),
            *(_descriptor(rows, count, together) for count in (config.block_kv, tail) for rows in (k_rows, v_rows)),
            launch.ragged_descriptor(out, half),
            out,
            lse,
            None if partial_out is None else launch.ragged_descriptor(partial_out, half),
            partial_lse,
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
            0 if partial_lse is None else partial_lse.shape[1] // problem.heads,
            split,
            problem.window_left,
            problem.window_right,
            score_scale(problem),
            run.recorder.buffer,
            run.recorder.capacity,
            BROADCAST_Q=problem.broadcast_q,
            HAS_BEFORE=problem.window_left >= 0,
            HAS_AFTER=problem.window_right >= 0,
            SPLIT=split > 0,
            BLOCK_Q=config.block_q,
            BLOCK_KV=config.block_kv,
            # A rest has no mask but its own end.
            TAIL=0 if problem.window_left >= 0 or problem.window_right >= 0 else config.tail,
            DIM=problem.head_dim,
            STAGES=config.stages,
            REGISTERS=config.registers,
            PINGPONG=config.pingpong,
            PEEL=config.peel,
            EARLY_FETCH=config.early_fetch,
            CLUSTER=together,
            DEAL=schedule.deal(run.schedule),
            LEVEL=run.recorder.number,
            LEAVE_OUT=left_out.code(jfa_forward_hopper.__name__, run.leave_out),
            num_warps=4,
            num_stages=1,
            ptx_options=config.ptx_options,
            **({"ctas_per_cga": (together, 1, 1)} if together > 1 else {}),
        )
    run.compiled.append(compiled)
    if partial_out is not None and partial_lse is not None:
        merging.merge(out, lse, partial_out, partial_lse, q_offsets, kv_offsets, problem, run)
    return out, lse


def _descriptor(rows: Tensor, count: int, together: int) -> Any:
    """Of ``count`` keys of a head, or of the half that a CTA of two loads."""
    if together == 1:
        return launch.ragged_descriptor(rows, count)
    return launch.ragged_descriptor(rows, *launch.half_block(count, rows.shape[2], rows.element_size()))


def cluster(problem: Problem, config: HopperForwardConfig, split: int) -> int:
    """CTAs that do a tile together, a block of queries each, and load its keys once for both: 1 or 2.

    Two where all queries see all keys and every sequence has an even number of blocks, which the host knows of a shared
    Q; not where sequences are cut, after which tiles are about equal and half as many of them even out less.
    """
    masked = problem.window_left >= 0 or problem.window_right >= 0
    even = problem.broadcast_q and triton.cdiv(problem.q_len, config.block_q) % 2 == 0
    return 2 if config.multicast and even and not masked and split == 0 else 1


def score_scale(problem: Problem) -> float:
    """What scores are multiplied by to be in log2 units."""
    return max(problem.scale * launch.LOG2_E, LEAST_SCALE)


def split_for(problem: Problem, config: HopperForwardConfig, ctas: int) -> int:
    """Keys from which on a sequence is cut into parts, 0 for never: what exceeds SPLIT_SHARE of a CTA's mean load.

    The load is estimated from what the host knows, sequences being as long as the longest query: too high rather than
    too low, as a part costs its merging. The parts of the longest sequence are about equal.
    """
    if problem.window_left >= 0 or problem.window_right >= 0 or problem.max_kv_len == 0:
        return 0
    load = problem.total_kv * triton.cdiv(problem.max_q_len, config.block_q) * problem.heads / ctas
    most = max(int(SPLIT_SHARE * load), LEAST_SPLIT)
    if problem.max_kv_len <= most:
        return 0
    parts = triton.cdiv(problem.max_kv_len, most)
    even = triton.cdiv(problem.max_kv_len, parts)
    # max_kv_len may be understated; total_kv is not, and bounds the parts of any sequence.
    return triton.cdiv(max(even, triton.cdiv(problem.total_kv, MOST_PARTS)), config.block_kv) * config.block_kv
