"""Backward kernel for sm_90: a tile is one block of keys of one (batch, K/V head); dQ is added up in float32 by TMA.

Roles of a CTA: ``load`` (the default warps) brings K and V of a tile and Q, dO and their rows' statistics step by step;
two ``mma`` warpgroups own half of the tile's keys each. Scores are transposed (keys are rows), so that P and dS are the
register operands of dV += P^T dO and dK += dS^T Q. For dQ = dS K, which needs all keys, both put their dS into shared
memory, and each multiplies it with half of K's columns and adds its half of dQ to the sum in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from torch import Tensor

from jfa import instrument, lanes, schedule, toolchain
from jfa.config import HopperBackwardConfig
from jfa.impl.hopper import dq as summing
from jfa.impl.hopper import left_out, rounding, statistics
from jfa.impl.hopper import primitives as hopper
from jfa.impl.triton import backward as baseline
from jfa.impl.triton import launch, primitives
from jfa.validation import Problem

ROLES = ("load", "mma0", "mma1")
_ROLES = tl.constexpr(len(ROLES))
_SLOTS = tl.constexpr(4)
_COLUMNS = tl.constexpr(statistics.COLUMNS)
_ITEM_FULL = tl.constexpr(lanes.WAITS["item_full"])
_ITEM_EMPTY = tl.constexpr(lanes.WAITS["item_empty"])
_Q_FULL = tl.constexpr(lanes.WAITS["q_full"])
_Q_EMPTY = tl.constexpr(lanes.WAITS["q_empty"])
_DO_FULL = tl.constexpr(lanes.WAITS["do_full"])
_DO_EMPTY = tl.constexpr(lanes.WAITS["do_empty"])
_K_FULL = tl.constexpr(lanes.WAITS["k_full"])
_K_EMPTY = tl.constexpr(lanes.WAITS["k_empty"])
_V_FULL = tl.constexpr(lanes.WAITS["v_full"])
_V_EMPTY = tl.constexpr(lanes.WAITS["v_empty"])
_DS_FULL = tl.constexpr(lanes.WAITS["ds_full"])
_DS_EMPTY = tl.constexpr(lanes.WAITS["ds_empty"])
_DQ_ADDED = tl.constexpr(lanes.WAITS["dq_added"])
# Tiles that may have added their dQ, and are not announced: the role that does so is a tile behind.
_TURNS = tl.constexpr(2)
_CLEAR_ROWS = tl.constexpr(64)
_LINE = tl.constexpr(summing.LINE)
_KIND_TILE = tl.constexpr(lanes.KINDS["tile"])
_KIND_ZERO = tl.constexpr(lanes.KINDS["zero"])
_EXP = tl.constexpr(left_out.CODES["exp"])
_LOADS = tl.constexpr(left_out.CODES["loads"])
_DQ_STORE = tl.constexpr(left_out.CODES["dq store"])


@triton.jit
def clear_rest(
    dk,
    dv,
    pairs,
    counts,
    kv_offsets,
    batch_count,
    heads_kv,
    total_kv,
    own,
    stride,
    BLOCK_KV: tl.constexpr,
    DIM: tl.constexpr,
):
    """Clear the rows of dK and dV that no tile writes; how many blocks of them it did.

    Those are of items without work, and behind the last sequence. Of ``stride`` warpgroups this is the ``own``-th.
    """
    cleared = 0
    for item in range(tl.load(counts) + own, tl.load(counts + 1), stride):
        empty = tl.load(pairs + 2 * item)
        key = tl.load(pairs + 2 * item + 1) * BLOCK_KV
        kv_start, kv_len = primitives.sequence(kv_offsets, empty, False, 0)
        count = tl.minimum(kv_len - key, BLOCK_KV)
        baseline.clear_rows(dk, dv, kv_start + key, count, heads_kv, DIM, _CLEAR_ROWS)
        cleared += 1
    end = tl.load(kv_offsets + batch_count).to(tl.int32)
    for row in range(end + own * BLOCK_KV, total_kv, stride * BLOCK_KV):
        count = tl.minimum(total_kv - row, BLOCK_KV)
        baseline.clear_rows(dk, dv, row, count, heads_kv, DIM, _CLEAR_ROWS)
        cleared += 1
    return cleared


@triton.jit
def _turn_of(step, STAGES: tl.constexpr):
    return step % STAGES, (step // STAGES) & 1


@triton.jit
def _steps_of(PART: tl.constexpr, low, full_low, full_high, steps, tail, BLOCK_Q: tl.constexpr):
    """(first, behind the last) of a head's ``steps`` from row ``low`` on: those with a mask that come first, those
    without one, those behind them. A ``tail`` of keys takes a mask in all."""
    first = tl.minimum(tl.maximum((full_low - low + BLOCK_Q - 1) // BLOCK_Q, 0), steps)
    behind = tl.minimum(tl.maximum((full_high - low + BLOCK_Q - 1) // BLOCK_Q, first), steps)
    first = tl.where(tail, steps, first)
    behind = tl.where(tail, steps, behind)
    if PART == 0:
        return first * 0, first
    elif PART == 1:
        return first, behind
    else:
        return behind, steps


@triton.jit
def announce(dq_added, turn, counter, lane, noted, capacity, tile, LEVEL: tl.constexpr):
    """Count the CTA's ``turn``-th tile, ``tile``, at ``counter`` once its dQ is in memory; gives the count of events.

    For a role that nobody waits for: a compute warpgroup that counted, and so made its stores visible to the whole GPU,
    took 8 % of dense-512's backward.
    """
    place, phase = turn % _TURNS, (turn // _TURNS) & 1
    noted = hopper.wait(dq_added[place], phase, lane, noted, capacity, _DQ_ADDED, place, tile, LEVEL)
    tl.atomic_add(counter, 1, sem="release")
    return noted


@triton.jit(
    do_not_specialize=["batch_count", "q_uniform", "stat_rows", "total_kv", "before", "after", "capacity"],
    do_not_specialize_on_alignment=["counter", "started"],
)
def jfa_backward_hopper(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    dk,
    dv,
    stat_desc,
    taker_desc,
    q_offsets,
    kv_offsets,
    pairs,
    counts,
    counter,
    done,
    started,
    batch_count,
    heads_kv,
    group,
    q_uniform,
    stat_rows,
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
    PREFETCH: tl.constexpr,
    DQ_SLICES: tl.constexpr,
    DQ_BUFFERS: tl.constexpr,
    ANNOUNCE: tl.constexpr,
    PEEL: tl.constexpr,
    REGISTERS: tl.constexpr,
    DEAL: tl.constexpr,
    LEVEL: tl.constexpr,
    LEAVE_OUT: tl.constexpr,
):
    """``before`` and ``after`` are the window as keys see queries.

    stat_desc, taker_desc: blocks of BLOCK_Q and of BLOCK_KV / 2 rows of `statistics.Columns`.
    """
    HALF: tl.constexpr = BLOCK_KV // 2
    WIDTH: tl.constexpr = DIM // 2
    MASKED: tl.constexpr = HAS_BEFORE or HAS_AFTER
    dtype = tlx.dtype_of(k_desc)

    k_tile = tlx.local_alloc((BLOCK_KV, DIM), dtype, 1)
    v_tile = tlx.local_alloc((BLOCK_KV, DIM), dtype, 1)
    q_tiles = tlx.local_alloc((BLOCK_Q, DIM), dtype, STAGES)
    do_tiles = tlx.local_alloc((BLOCK_Q, DIM), dtype, STAGES)
    stat_tiles = tlx.local_alloc((BLOCK_Q, _COLUMNS), tl.bfloat16, STAGES)
    takers = tlx.local_alloc((HALF, _COLUMNS), tl.bfloat16, 2)
    takers_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    ds_tile = tlx.local_alloc((BLOCK_KV, BLOCK_Q), dtype, 1)
    # Where dQ is staged, dV and dK are too, when a tile ends: a warpgroup's part holds PLACES slices of dQ, or
    # OUT_PLACES tiles of dV, of which it uses the first.
    OUT_SLICES: tl.constexpr = HALF * DIM * tlx.size_of(tlx.dtype_of(k_desc)) // (BLOCK_Q * WIDTH // DQ_SLICES * 4)
    tl.static_assert(OUT_SLICES * BLOCK_Q * WIDTH // DQ_SLICES * 4 == HALF * DIM * tlx.size_of(tlx.dtype_of(k_desc)))
    OUT_PLACES: tl.constexpr = (DQ_BUFFERS + OUT_SLICES - 1) // OUT_SLICES
    PLACES: tl.constexpr = OUT_PLACES * OUT_SLICES
    dq_tiles = tlx.local_alloc((BLOCK_Q * WIDTH // DQ_SLICES // _LINE, _LINE), tl.float32, 2 * PLACES)
    out_tiles = tlx.local_alloc((1, 1, HALF, DIM), dtype, 2 * OUT_PLACES, reuse=dq_tiles)
    k_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    k_empty = tlx.alloc_warp_barrier(num_barriers=1, num_warps=4, num_arrivals=2)
    v_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    v_empty = tlx.alloc_warp_barrier(num_barriers=1, num_warps=4, num_arrivals=2)
    q_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    q_empty = tlx.alloc_warp_barrier(num_barriers=STAGES, num_warps=4, num_arrivals=2)
    do_full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    do_empty = tlx.alloc_warp_barrier(num_barriers=STAGES, num_warps=4, num_arrivals=2)
    ds_full = tlx.alloc_warp_barrier(num_barriers=1, num_warps=4, num_arrivals=2)
    ds_empty = tlx.alloc_warp_barrier(num_barriers=1, num_warps=4, num_arrivals=2)
    item_full = tlx.alloc_warp_barrier(num_barriers=_SLOTS, num_warps=4, num_arrivals=1)
    item_empty = tlx.alloc_warp_barrier(num_barriers=_SLOTS, num_warps=4, num_arrivals=2)
    dq_added = tlx.alloc_warp_barrier(num_barriers=_TURNS, num_warps=4, num_arrivals=2)
    item_tile = tlx.local_alloc((1,), tl.int32, _SLOTS)
    item_batch = tlx.local_alloc((1,), tl.int32, _SLOTS)
    item_first = tlx.local_alloc((1,), tl.int32, _SLOTS)
    item_q_start = tlx.local_alloc((1,), tl.int32, _SLOTS)
    item_q_len = tlx.local_alloc((1,), tl.int32, _SLOTS)
    item_kv_start = tlx.local_alloc((1,), tl.int32, _SLOTS)
    item_kv_len = tlx.local_alloc((1,), tl.int32, _SLOTS)

    own = tl.program_id(0)
    work = tl.load(counts)
    tile_count = work * heads_kv

    with tlx.async_tasks():
        with tlx.async_task("default"):
            lane, noted = instrument.open_lane(recorder, own * _ROLES, capacity, LEVEL, True)
            tile = own
            turn = 0
            tlx.barrier_expect_bytes(takers_full[0], 2 * HALF * _COLUMNS * 2)
            tlx.async_descriptor_load(taker_desc, takers[0], [0, 0], takers_full[0])
            tlx.async_descriptor_load(taker_desc, takers[1], [HALF, 0], takers_full[0])
            seen = 0  # tiles that some query sees: those whose K and V are loaded
            loaded = 0
            added = 0
            announced = -1
            batch = 0
            block = 0
            if LEAVE_OUT == _LOADS:
                o_rows = batch_count * q_uniform
                q_rows = q_uniform
                if not BROADCAST_Q:
                    o_rows = tl.load(q_offsets + batch_count).to(tl.int32)
                    q_rows = o_rows
                hot_q, hot_o = hopper.hot_row(own, q_rows, BLOCK_Q), hopper.hot_row(own, o_rows, BLOCK_Q)
                hot_stat = 0
            if ANNOUNCE:
                tl.atomic_add(started, 1, sem="relaxed")
            if tile < tile_count:
                batch = tl.load(pairs + 2 * (tile // heads_kv))
                block = tl.load(pairs + 2 * (tile // heads_kv) + 1)
            while tile < tile_count:
                q_start, q_len = primitives.sequence(q_offsets, batch, BROADCAST_Q, q_uniform)
                kv_start, kv_len = primitives.sequence(kv_offsets, batch, False, 0)
                head = tile % heads_kv
                named = tile
                if not MASKED:
                    head, block, named = hopper.side_by_side(tile, block, heads_kv, (kv_len + BLOCK_KV - 1) // BLOCK_KV)
                first = block * BLOCK_KV
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
                tlx.barrier_arrive(item_full[slot], 1)

                low, full_low, full_high, high = primitives.columns_met(
                    first, tl.minimum(first + BLOCK_KV, kv_len) - 1, q_len - kv_len, q_len, before, after, HAS_BEFORE,
                    HAS_AFTER, BLOCK_Q,
                )  # fmt: skip
                steps = (high - low + BLOCK_Q - 1) // BLOCK_Q
                o_start = q_start
                if BROADCAST_Q:
                    o_start = batch * q_uniform
                stats = summing.stat_row(q_start, batch, q_uniform, BROADCAST_Q, BLOCK_Q)

                if steps > 0:
                    noted = hopper.wait(k_empty[0], (seen & 1) ^ 1, lane, noted, capacity, _K_EMPTY, -1, named, LEVEL)
                    hopper.load(k_desc, k_tile[0], k_full[0], kv_start, kv_len, first, head * DIM)

                next_tile = tile_count
                next_batch = 0
                next_block = 0
                fetched = 0
                # Counted up: a division a step doubles the role's instructions (dense-1024 on an H200, processes in
                # turn: 8,109 µs, 8,053 this way, 8,109).
                q_head = head * group
                row = low
                for step in range(steps * group):
                    stage, phase = _turn_of(loaded, STAGES)
                    column = q_head * DIM
                    stat = q_head * stat_rows + stats + row
                    q_origin, o_origin = q_start, o_start
                    if LEAVE_OUT == _LOADS:
                        q_origin, o_origin, column = hot_q - row, hot_o - row, 0
                        # Those of the CTA's first step: not every row has some.
                        hot_stat = tl.where(loaded == 0, stat, hot_stat)
                        stat = hot_stat
                    noted = hopper.wait(q_empty[stage], phase ^ 1, lane, noted, capacity, _Q_EMPTY, stage, named, LEVEL)
                    tlx.barrier_expect_bytes(q_full[stage], BLOCK_Q * (DIM * tlx.size_of(dtype) + _COLUMNS * 2))
                    tlx.async_descriptor_load(
                        q_desc, tlx.local_reshape(q_tiles[stage], [1, 1, BLOCK_Q, DIM]),
                        hopper.ragged(q_origin, q_len, row, column), q_full[stage],
                    )  # fmt: skip
                    tlx.async_descriptor_load(stat_desc, stat_tiles[stage], [2 * HALF + stat, 0], q_full[stage])
                    if step == 0:
                        noted = hopper.wait(
                            v_empty[0], (seen & 1) ^ 1, lane, noted, capacity, _V_EMPTY, -1, named, LEVEL
                        )
                        hopper.load(v_desc, v_tile[0], v_full[0], kv_start, kv_len, first, head * DIM)
                    noted = hopper.wait(
                        do_empty[stage], phase ^ 1, lane, noted, capacity, _DO_EMPTY, stage, named, LEVEL
                    )
                    tlx.barrier_expect_bytes(do_full[stage], BLOCK_Q * DIM * tlx.size_of(dtype))
                    tlx.async_descriptor_load(
                        do_desc, tlx.local_reshape(do_tiles[stage], [1, 1, BLOCK_Q, DIM]),
                        hopper.ragged(o_origin, q_len, row, column), do_full[stage],
                    )  # fmt: skip
                    loaded += 1
                    if step == 0:
                        next_tile = primitives.next_tile(tile, turn + 1, counter, tile_count, DEAL)
                    elif step == 1:
                        if next_tile < tile_count:
                            next_batch = tl.load(pairs + 2 * (next_tile // heads_kv))
                            next_block = tl.load(pairs + 2 * (next_tile // heads_kv) + 1)
                    fetched = step + 1
                    row += BLOCK_Q
                    if row >= high:
                        row = low
                        q_head += 1
                if fetched < 1:
                    next_tile = primitives.next_tile(tile, turn + 1, counter, tile_count, DEAL)
                if fetched < 2:
                    if next_tile < tile_count:
                        next_batch = tl.load(pairs + 2 * (next_tile // heads_kv))
                        next_block = tl.load(pairs + 2 * (next_tile // heads_kv) + 1)
                if steps > 0:
                    seen += 1
                if ANNOUNCE:
                    # The tile before this one: behind all loads of this one, that has added its dQ, or soon will have.
                    if turn > 0:
                        noted = announce(dq_added, turn - 1, done + added, lane, noted, capacity, announced, LEVEL)
                    # A table of other lengths than these could make it any head.
                    added = batch * heads_kv + tl.minimum(head, heads_kv - 1)
                    announced = named
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
            if ANNOUNCE:
                if turn > 0:
                    noted = announce(dq_added, turn - 1, done + added, lane, noted, capacity, announced, LEVEL)
                tl.atomic_add(started + 1, 1, sem="release")
            instrument.close_lane(lane, noted, LEVEL)

        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            wg: tl.constexpr = tlx.async_task_replica_id()
            lane, noted = instrument.open_lane(recorder, own * _ROLES + 1 + wg, capacity, LEVEL, True)
            tile = -1
            turn = 0
            seen = 0
            used = 0
            noted = hopper.wait(item_full[0], 0, lane, noted, capacity, _ITEM_FULL, 0, tile, LEVEL)
            tile = hopper.get(item_tile[0])
            k_own = tlx.local_slice(k_tile[0], [wg * HALF, 0], [HALF, DIM])
            k_half = tlx.local_slice(k_tile[0], [0, wg * WIDTH], [BLOCK_KV, WIDTH])
            v_own = tlx.local_slice(v_tile[0], [wg * HALF, 0], [HALF, DIM])
            ds_own = tlx.local_slice(ds_tile[0], [wg * HALF, 0], [HALF, BLOCK_Q])
            takes_lse, takes_delta = takers[0], takers[1]
            tlx.barrier_wait(takers_full[0], 0)  # once a launch: not noted
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
                head = tile % heads_kv
                shift = q_len - kv_len
                low, full_low, full_high, high = primitives.columns_met(
                    first, tl.minimum(first + BLOCK_KV, kv_len) - 1, shift, q_len, before, after, HAS_BEFORE, HAS_AFTER,
                    BLOCK_Q,
                )  # fmt: skip
                steps = (high - low + BLOCK_Q - 1) // BLOCK_Q
                keys = first + wg * HALF + tl.arange(0, HALF)
                dq_blocks = (q_uniform + BLOCK_Q - 1) // BLOCK_Q
                if not BROADCAST_Q:
                    dq_blocks = stat_rows // BLOCK_Q
                dq_block = summing.block_row(q_start, batch, BROADCAST_Q, BLOCK_Q) // BLOCK_Q
                tail = first + BLOCK_KV > kv_len
                dk_acc = tl.zeros((HALF, DIM), dtype=tl.float32)
                dv_acc = tl.zeros((HALF, DIM), dtype=tl.float32)
                total = steps * group
                scores = tl.zeros((HALF, BLOCK_Q), dtype=tl.float32)
                if total > 0:
                    noted = hopper.wait(k_full[0], seen & 1, lane, noted, capacity, _K_FULL, -1, tile, LEVEL)
                if DQ_BUFFERS > 1:
                    # Of several buffers the first may be filled while one store is under way: not while that is dK's.
                    tlx.async_descriptor_store_wait(0)
                if PREFETCH:
                    if total > 0:
                        stage, phase = _turn_of(used, STAGES)
                        noted = hopper.wait(q_full[stage], phase, lane, noted, capacity, _Q_FULL, stage, tile, LEVEL)
                        scores = tlx.async_dot(takes_lse, tlx.local_trans(stat_tiles[stage]))
                        scores = tlx.async_dot(k_own, tlx.local_trans(q_tiles[stage]), scores)
                        scores = tlx.async_dot_wait(0, scores)
                for turn_of_head in range(group if PEEL else 1):
                    for part in tl.static_range(3 if PEEL else 1):
                        begin, end = 0, total
                        if PEEL:
                            begin, end = _steps_of(part, low, full_low, full_high, steps, tail, BLOCK_Q)
                            begin += turn_of_head * steps
                            end += turn_of_head * steps
                        for step in range(begin, end):
                            q_head = head * group + step // steps
                            row = low + step % steps * BLOCK_Q
                            stage, phase = _turn_of(used, STAGES)
                            if not PREFETCH:
                                noted = hopper.wait(
                                    q_full[stage], phase, lane, noted, capacity, _Q_FULL, stage, tile, LEVEL
                                )
                                scores = tlx.async_dot(takes_lse, tlx.local_trans(stat_tiles[stage]))
                                scores = tlx.async_dot(k_own, tlx.local_trans(q_tiles[stage]), scores)
                            if step == 0:
                                noted = hopper.wait(
                                    v_full[0], seen & 1, lane, noted, capacity, _V_FULL, -1, tile, LEVEL
                                )
                            noted = hopper.wait(
                                do_full[stage], phase, lane, noted, capacity, _DO_FULL, stage, tile, LEVEL
                            )
                            dp = tlx.async_dot(takes_delta, tlx.local_trans(stat_tiles[stage]))
                            dp = tlx.async_dot(v_own, tlx.local_trans(do_tiles[stage]), dp)
                            if not PREFETCH:
                                scores = tlx.async_dot_wait(1, scores)
                            p = scores * score_scale
                            if LEAVE_OUT != _EXP:
                                p = tl.exp2(p)
                            if PEEL and part == 1:
                                pass
                            elif MASKED:
                                if tail | (row < full_low) | (row >= full_high):
                                    queries = row + tl.arange(0, BLOCK_Q)
                                    mask = primitives.visible(
                                        keys[:, None], queries[None, :], kv_len, q_len, shift, before, after,
                                        HAS_BEFORE, HAS_AFTER,
                                    )  # fmt: skip
                                    p = tl.where(mask, p, 0.0)
                            else:
                                if tail:
                                    p = tl.where((keys < kv_len)[:, None], p, 0.0)
                            p_low = p.to(dtype)
                            dv_acc = tlx.async_dot(p_low, do_tiles[stage], dv_acc)
                            dp = tlx.async_dot_wait(1, dp)
                            if step + 1 == total:
                                tlx.barrier_arrive(v_empty[0], 1)
                            ds = (p * dp).to(dtype)
                            noted = hopper.wait(
                                ds_empty[0], (used & 1) ^ 1, lane, noted, capacity, _DS_EMPTY, -1, tile, LEVEL
                            )
                            tlx.local_store(ds_own, ds)
                            tlx.fence("async_shared")
                            tlx.barrier_arrive(ds_full[0], 1)
                            dk_acc = tlx.async_dot(ds, q_tiles[stage], dk_acc)
                            dv_acc = tlx.async_dot_wait(1, dv_acc)
                            tlx.barrier_arrive(do_empty[stage], 1)
                            noted = hopper.wait(ds_full[0], used & 1, lane, noted, capacity, _DS_FULL, -1, tile, LEVEL)
                            dq = tlx.async_dot(tlx.local_trans(ds_tile[0]), k_half)
                            place = (q_head * dq_blocks + dq_block + row // BLOCK_Q) * 2 + wg
                            if PREFETCH:
                                more = step + 1 < total
                                stage_ahead, phase = _turn_of(used + more.to(tl.int32), STAGES)
                                if more:
                                    noted = hopper.wait(
                                        q_full[stage_ahead],
                                        phase,
                                        lane,
                                        noted,
                                        capacity,
                                        _Q_FULL,
                                        stage_ahead,
                                        tile,
                                        LEVEL,
                                    )
                                dk_acc = tlx.async_dot_wait(1, dk_acc)
                                if more:
                                    tlx.barrier_arrive(q_empty[stage], 1)
                                # For nothing behind the last step; a branch around it took 1 % longer (dense-1024,
                                # dense-2048).
                                scores = tlx.async_dot(takes_lse, tlx.local_trans(stat_tiles[stage_ahead]))
                                scores = tlx.async_dot(k_own, tlx.local_trans(q_tiles[stage_ahead]), scores)
                                dq = tlx.async_dot_wait(1, dq)
                                tlx.barrier_arrive(ds_empty[0], 1)
                                if hopper.happens(batch_count, LEAVE_OUT != _DQ_STORE):
                                    summing.add(dq_desc, dq_tiles, dq, used, place, wg * PLACES, DQ_SLICES, DQ_BUFFERS)
                                scores = tlx.async_dot_wait(0, scores)
                                if not more:
                                    tlx.barrier_arrive(q_empty[stage], 1)
                            else:
                                dk_acc = tlx.async_dot_wait(1, dk_acc)
                                tlx.barrier_arrive(q_empty[stage], 1)
                                dq = tlx.async_dot_wait(0, dq)
                                tlx.barrier_arrive(ds_empty[0], 1)
                                if hopper.happens(batch_count, LEAVE_OUT != _DQ_STORE):
                                    summing.add(dq_desc, dq_tiles, dq, used, place, wg * PLACES, DQ_SLICES, DQ_BUFFERS)
                            used += 1
                if total > 0:
                    tlx.barrier_arrive(k_empty[0], 1)
                    seen += 1
                # Once more what is not worth a register over the steps.
                first = hopper.get(item_first[slot])
                kv_start = hopper.get(item_kv_start[slot])
                kv_len = hopper.get(item_kv_len[slot])
                tlx.barrier_arrive(item_empty[slot], 1)
                at = hopper.ragged(kv_start, kv_len, first + wg * HALF, head * DIM)
                tlx.async_descriptor_store_wait(0)
                if ANNOUNCE:
                    hopper.stored()
                    tlx.barrier_arrive(dq_added[turn % _TURNS], 1)
                tlx.local_store(out_tiles[wg * OUT_PLACES], dv_acc.to(dtype).reshape(1, 1, HALF, DIM))
                tlx.fence("async_shared")
                tlx.async_descriptor_store(dv_desc, out_tiles[wg * OUT_PLACES], at)
                tlx.async_descriptor_store_wait(0)
                tlx.local_store(out_tiles[wg * OUT_PLACES], (dk_acc * scale).to(dtype).reshape(1, 1, HALF, DIM))
                tlx.fence("async_shared")
                tlx.async_descriptor_store(dk_desc, out_tiles[wg * OUT_PLACES], at)
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
            cleared = clear_rest(
                dk, dv, pairs, counts, kv_offsets, batch_count, heads_kv, total_kv, own * 2 + wg,
                tl.num_programs(0) * 2, BLOCK_KV, DIM,
            )  # fmt: skip
            if cleared > 0:
                noted = instrument.end_span(lane, noted, capacity, -1, LEVEL, 2)
            instrument.close_lane(lane, noted, LEVEL)


def ctas(run: launch.Run, problem: Problem, config: HopperBackwardConfig, device: torch.device) -> int:
    """CTAs of a launch: one an SM, but for those left to rounding, or a tile for the schedule grid."""
    return max(launch.grid(run, problem.heads_kv, device, 1) - rounding.sms_beside(run, problem, config, device), 1)


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
    config: HopperBackwardConfig,
    run: launch.Run,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV in q's dtype, contiguous; dQ of a broadcast q is summed over the batch."""
    toolchain.require_safe_ptxas("the backward for sm_90")
    dim, heads, heads_kv = problem.head_dim, problem.heads, problem.heads_kv
    grad_q, dk, dv = (torch.empty(of.shape, dtype=of.dtype, device=of.device) for of in (q, k, k))
    beside = rounding.sms_beside(run, problem, config, q.device) > 0
    dq = summing.Sum.zeros(problem, config.block_q, 2 * config.dq_slices, q.device)
    grad_rows = launch.as_rows(grad_out.reshape(problem.total_q, heads, dim))
    facts = {"heads": heads, "head_dim": dim}
    half = config.block_kv // 2
    rows = statistics.RowStatistics(grad_rows, grad_lse, out, lse, kv_offsets, q_offsets, problem, run)
    stats = rows.columns(config.block_q, half)
    q_rows, k_rows, v_rows = launch.as_rows(q), launch.as_rows(k), launch.as_rows(v)
    grid = ctas(run, problem, config, q.device)
    since = launch.mark(q.device) if beside else None
    with instrument.launch_range("jfa_backward", run.schedule, **facts):
        compiled = jfa_backward_hopper[(grid,)](
            launch.ragged_descriptor(q_rows, config.block_q),
            launch.ragged_descriptor(grad_rows, config.block_q),
            launch.ragged_descriptor(k_rows, config.block_kv),
            launch.ragged_descriptor(v_rows, config.block_kv),
            dq.descriptor,
            launch.ragged_descriptor(launch.as_rows(dk), half),
            launch.ragged_descriptor(launch.as_rows(dv), half),
            dk,
            dv,
            stats.descriptor(config.block_q),
            stats.descriptor(half),
            q_offsets,
            kv_offsets,
            run.items.pairs,
            run.items.counts,
            run.counter(),
            dq.done,
            dq.started,
            problem.batch,
            heads_kv,
            heads // heads_kv,
            problem.q_len,
            stats.rows,
            problem.total_kv,
            problem.window_right,
            problem.window_left,
            stats.scale * launch.LOG2_E,
            problem.scale,
            run.recorder.buffer,
            run.recorder.capacity,
            BROADCAST_Q=problem.broadcast_q,
            HAS_BEFORE=problem.window_right >= 0,
            HAS_AFTER=problem.window_left >= 0,
            BLOCK_Q=config.block_q,
            BLOCK_KV=config.block_kv,
            DIM=dim,
            STAGES=config.stages,
            PREFETCH=config.prefetch and config.stages > 1,
            DQ_SLICES=config.dq_slices,
            DQ_BUFFERS=config.dq_buffers,
            ANNOUNCE=beside,
            PEEL=config.peel,
            REGISTERS=config.registers,
            DEAL=schedule.deal(run.schedule),
            LEVEL=run.recorder.number,
            LEAVE_OUT=left_out.code(jfa_backward_hopper.__name__, run.leave_out),
            num_warps=4,
            num_stages=1,
            ptx_options=config.ptx_options,
        )
    run.compiled.append(compiled)
    if beside and q_offsets is not None:
        return rounding.rounded_beside(dq, grad_q, q_offsets, kv_offsets, config.block_kv, since, grid, run), dk, dv
    return rounding.rounded(dq, grad_q, q_offsets, run), dk, dv
