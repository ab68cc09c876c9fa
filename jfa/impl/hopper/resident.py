"""Backward of a shared Q for sm_90: a CTA keeps its query rows, and their dQ in registers, over all its tiles of keys.

Q of a few rows meets every sequence, so nothing of dQ need leave the CTA before its last tile: no sum in memory is
contended, and what the CTAs leave of a head is added up in one order. CTAs (pairs of them, where Q has more than 128
rows: a *cluster*, each CTA with 128 rows) take equal shares of the tiles, side by side in the table, so that a
sequence's dO is loaded once for its tiles.

Roles of a CTA: ``load`` (the default warps) brings Q of a head, dO and its rows' statistics of a sequence, K and V of a
tile; ``mma0`` and ``mma1`` have half of the rows each: scores, dP, and dQ += dS K; they leave P and dS in shared
memory, where ``mma2`` makes of all rows dV = P^T dO and dK = dS^T Q, whole in one CTA, and partial in a pair: there
each CTA sends one of them to the other through distributed shared memory, in the inputs' type, and adds what it got to
its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from torch import Tensor

from jfa import instrument, lanes, toolchain
from jfa.config import RESIDENT_ROWS, HopperResidentConfig
from jfa.impl.hopper import backward as shared
from jfa.impl.hopper import left_out, statistics
from jfa.impl.hopper import primitives as hopper
from jfa.impl.triton import launch, primitives
from jfa.validation import Problem

ROLES = ("load", "mma0", "mma1", "mma2")
"""The warpgroups of a CTA, in the order of their lanes in a recording."""
ROWS, WIDTH = RESIDENT_ROWS, 64
"""Query rows of a CTA, and columns of an accumulator of dQ: what shared memory keeps side by side (128 bytes of K)."""
MOST_ROWS = 512
"""Rows of Q up to which dQ stays in registers: on an H200 a prototype made 520 TFLOP/s of 512 rows in two passes, the
sum in memory 470; of 1,024 in four 500 against 504."""
SUM_ROWS, SUM_PARTS = 4, 8
"""Rows of a program that sums the parts of dQ, and how many parts it loads at once."""
_ROLES = tl.constexpr(len(ROLES))
_ROWS, _WIDTH = tl.constexpr(ROWS), tl.constexpr(WIDTH)
_SLOTS = tl.constexpr(4)
_WORDS = tl.constexpr(6)
_FLAGS, _HEAD, _FIRST, _KV_START, _KV_LEN, _TILE = (tl.constexpr(word) for word in range(6))
# Flags of a tile, within the CTA's share: first and last of its sequence, first and last of its head.
_OPENS_SEQUENCE, _CLOSES_SEQUENCE, _OPENS_HEAD, _CLOSES_HEAD = (tl.constexpr(1 << bit) for bit in range(4))
# Buffers of P and dS, and of Q behind the two of dO.
_P, _DS, _Q = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_PAIR = tl.constexpr(256)
_FLUSH_BARRIER = tl.constexpr(9)
_ITEM_FULL = tl.constexpr(lanes.WAITS["item_full"])
_ITEM_EMPTY = tl.constexpr(lanes.WAITS["item_empty"])
_Q_FULL = tl.constexpr(lanes.WAITS["q_full"])
_Q_EMPTY = tl.constexpr(lanes.WAITS["q_empty"])
_K_FULL = tl.constexpr(lanes.WAITS["k_full"])
_K_EMPTY = tl.constexpr(lanes.WAITS["k_empty"])
_V_FULL = tl.constexpr(lanes.WAITS["v_full"])
_V_EMPTY = tl.constexpr(lanes.WAITS["v_empty"])
_DO_FULL = tl.constexpr(lanes.WAITS["do_full"])
_DO_EMPTY = tl.constexpr(lanes.WAITS["do_empty"])
_WEIGHTS_FULL = tl.constexpr(lanes.WAITS["weights_full"])
_WEIGHTS_EMPTY = tl.constexpr(lanes.WAITS["weights_empty"])
_PART_FULL = tl.constexpr(lanes.WAITS["part_full"])
_PART_EMPTY = tl.constexpr(lanes.WAITS["part_empty"])
_KIND_TILE = tl.constexpr(lanes.KINDS["tile"])
_KIND_ZERO = tl.constexpr(lanes.KINDS["zero"])
_EXP = tl.constexpr(left_out.CODES["exp"])
_LOADS = tl.constexpr(left_out.CODES["loads"])
_STORE = tl.constexpr(left_out.CODES["dk/dv store"])


def _accumulator(columns: int) -> tlx.layout:
    """Who of a warpgroup holds what of a wgmma accumulator [64, columns], so that loads need no exchange.

    PTX ISA, accumulator fragment of wgmma.m64nNk16: a thread holds two neighbouring columns of a row, of the row eight
    below, and so on every eight columns; a quad has eight columns, a warp sixteen rows.
    """
    return tlx.layout(
        shape=((4, 8, 4), (2, 2, columns // 8)),
        stride=((2, columns, 16 * columns), (1, 8 * columns, 8)),
    )


_ACCUMULATOR_64, _ACCUMULATOR_128 = tl.constexpr(_accumulator(64)), tl.constexpr(_accumulator(128))


@triton.jit
def share(total, own, workers):
    """(first, behind the last) of the ``total`` tiles that worker ``own`` of ``workers`` takes, one after another."""
    wide = tl.full((), 0, tl.int64) + total
    return (wide * own // workers).to(tl.int32), (wide * (own + 1) // workers).to(tl.int32)


@triton.jit
def part_of(worker, head):
    """Where the part of dQ of a head goes that a worker sums: shares follow each other head by head, so that from one
    such part to the next worker or head rise, never fall. With 4 heads, two CTAs a worker, on 132 SMs: 9 MB."""
    return worker + head


@triton.jit
def _store(desc, staging, start, rows, row, column, ADD: tl.constexpr, LEAVE_OUT: tl.constexpr):
    """Write a staged tile by TMA, or add it to what is there, unless that is left out."""
    if LEAVE_OUT != _STORE:
        tlx.fence("async_shared")
        if ADD:
            tlx.async_descriptor_store(desc, staging, hopper.ragged(start, rows, row, column), store_reduce="add")
        else:
            tlx.async_descriptor_store(desc, staging, hopper.ragged(start, rows, row, column))


@triton.jit(do_not_specialize=["batch_count", "q_len", "first_row", "stat_rows", "total_kv", "capacity"])
def jfa_backward_resident(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    dk,
    dv,
    stat_lse,
    stat_delta,
    kv_offsets,
    pairs,
    counts,
    batch_count,
    heads,
    q_len,
    first_row,
    stat_rows,
    total_kv,
    score_scale,
    scale,
    recorder,
    capacity,
    CLUSTER: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    DIM: tl.constexpr,
    K_STAGES: tl.constexpr,
    V_STAGES: tl.constexpr,
    REGISTERS: tl.constexpr,
    LEVEL: tl.constexpr,
    LEAVE_OUT: tl.constexpr,
):
    """Rows ``first_row`` … of Q, CLUSTER · 128 of them. ``ADD``: to the dK and dV of the rows before.

    stat_lse, stat_delta: float32 (H, stat_rows) as `RowStatistics.numbers` gives them, padded to CLUSTER · 128 rows,
    without the sum of sequences that are a tile.
    """
    HALF: tl.constexpr = _ROWS // 2
    WIDTH: tl.constexpr = _WIDTH
    dtype = tlx.dtype_of(k_desc)
    ELEMENT: tl.constexpr = tlx.size_of(tlx.dtype_of(k_desc))

    row_tiles = tlx.local_alloc((_ROWS, DIM), dtype, 3)
    k_tiles = tlx.local_alloc((BLOCK_KV, DIM), dtype, K_STAGES)
    v_tiles = tlx.local_alloc((BLOCK_KV, DIM), dtype, V_STAGES)
    weights = tlx.local_alloc((_ROWS, BLOCK_KV), dtype, 2)
    # When a head ends, dQ is staged there, WIDTH columns at a time, a warpgroup's rows in one of the two.
    tl.static_assert(HALF * WIDTH * 4 <= _ROWS * BLOCK_KV * ELEMENT)
    dq_tiles = tlx.local_alloc((1, 1, HALF, WIDTH), tl.float32, 2, reuse=weights)
    # What goes to the other CTA, and what comes from it; dV and dK are staged there for their stores.
    parts = tlx.local_alloc((BLOCK_KV, DIM), dtype, 2)
    out_tiles = tlx.local_alloc((1, 1, BLOCK_KV, DIM), dtype, 2, reuse=parts)
    lse_rows = tlx.local_alloc((_ROWS,), tl.float32, 2)
    delta_rows = tlx.local_alloc((_ROWS,), tl.float32, 2)
    words = tlx.local_alloc((1,), tl.int32, _SLOTS * _WORDS)
    item_full = tlx.alloc_warp_barrier(num_barriers=_SLOTS, num_warps=4, num_arrivals=1)
    item_empty = tlx.alloc_warp_barrier(num_barriers=_SLOTS, num_warps=4, num_arrivals=3)
    q_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    q_empty = tlx.alloc_warp_barrier(num_barriers=1, num_warps=4, num_arrivals=3)
    do_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    do_empty = tlx.alloc_warp_barrier(num_barriers=2, num_warps=4, num_arrivals=3)
    k_full = tlx.alloc_barriers(num_barriers=K_STAGES, arrive_count=1)
    k_empty = tlx.alloc_warp_barrier(num_barriers=K_STAGES, num_warps=4, num_arrivals=2)
    v_full = tlx.alloc_barriers(num_barriers=V_STAGES, arrive_count=1)
    v_empty = tlx.alloc_warp_barrier(num_barriers=V_STAGES, num_warps=4, num_arrivals=2)
    weights_full = tlx.alloc_warp_barrier(num_barriers=2, num_warps=4, num_arrivals=2)
    weights_empty = tlx.alloc_warp_barrier(num_barriers=2, num_warps=4, num_arrivals=1)
    part_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    part_empty = tlx.alloc_barriers(num_barriers=1, arrive_count=1)

    own = tl.program_id(0)
    work = tl.load(counts)
    begin, end = share(work * heads, own // CLUSTER, tl.num_programs(0) // CLUSTER)
    part_rows = (tl.num_programs(0) // CLUSTER + heads) * (CLUSTER * _ROWS)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            lane, noted = instrument.open_lane(recorder, own * _ROLES, capacity, LEVEL, True)
            row = first_row
            if CLUSTER == 2:
                row += tlx.cluster_cta_rank() * _ROWS
            row_blocks = (q_len + CLUSTER * _ROWS - 1) // (CLUSTER * _ROWS) * (CLUSTER * _ROWS)
            q_loads = 0
            do_loads = 0
            batch = 0
            block = 0
            head = begin // tl.maximum(work, 1)
            item = begin - head * work
            opens = _OPENS_HEAD | _OPENS_SEQUENCE
            if begin < end:
                batch = tl.load(pairs + 2 * item)
                block = tl.load(pairs + 2 * item + 1)
            if LEAVE_OUT == _LOADS:
                hot = hopper.hot_row(own // CLUSTER, tl.load(kv_offsets + batch_count).to(tl.int32), BLOCK_KV)
                hot_batch = batch
            for tile in range(begin, end):
                turn = tile - begin
                kv_start, kv_len = primitives.sequence(kv_offsets, batch, False, 0)
                first = block * BLOCK_KV
                next_item = item + 1
                next_head = head
                closes = 0
                if next_item == work:
                    next_item = 0
                    next_head += 1
                    closes = _CLOSES_HEAD | _CLOSES_SEQUENCE
                if tile + 1 == end:
                    closes = _CLOSES_HEAD | _CLOSES_SEQUENCE
                next_batch = tl.load(pairs + 2 * next_item)
                next_block = tl.load(pairs + 2 * next_item + 1)
                if next_batch != batch:
                    closes = closes | _CLOSES_SEQUENCE
                named = item * heads + head
                slot = turn % _SLOTS
                noted = hopper.wait(
                    item_empty[slot], ((turn // _SLOTS) & 1) ^ 1, lane, noted, capacity, _ITEM_EMPTY, slot, named, LEVEL
                )
                hopper.put(words[slot * _WORDS + _FLAGS], opens | closes)
                hopper.put(words[slot * _WORDS + _HEAD], head)
                hopper.put(words[slot * _WORDS + _FIRST], first)
                hopper.put(words[slot * _WORDS + _KV_START], kv_start)
                hopper.put(words[slot * _WORDS + _KV_LEN], kv_len)
                hopper.put(words[slot * _WORDS + _TILE], named)
                tlx.barrier_arrive(item_full[slot], 1)
                column = head * DIM
                if (opens & _OPENS_HEAD) != 0:
                    noted = hopper.wait(
                        q_empty[0], (q_loads & 1) ^ 1, lane, noted, capacity, _Q_EMPTY, -1, named, LEVEL
                    )
                    hopper.load(q_desc, row_tiles[_Q], q_full[0], 0, q_len, row, column)
                    q_loads += 1
                origin, do_batch, stat_head = kv_start, batch, head
                if LEAVE_OUT == _LOADS:
                    origin, do_batch, stat_head, column = hot - first, hot_batch, 0, 0
                stage = turn % K_STAGES
                noted = hopper.wait(
                    k_empty[stage], ((turn // K_STAGES) & 1) ^ 1, lane, noted, capacity, _K_EMPTY, stage, named, LEVEL
                )
                hopper.load(k_desc, k_tiles[stage], k_full[stage], origin, kv_len, first, column)
                if (opens & _OPENS_SEQUENCE) != 0:
                    stage = do_loads % 2
                    noted = hopper.wait(
                        do_empty[stage],
                        ((do_loads // 2) & 1) ^ 1,
                        lane,
                        noted,
                        capacity,
                        _DO_EMPTY,
                        stage,
                        named,
                        LEVEL,
                    )
                    tlx.barrier_expect_bytes(do_full[stage], _ROWS * DIM * ELEMENT + 2 * _ROWS * 4)
                    tlx.async_descriptor_load(
                        do_desc, tlx.local_reshape(row_tiles[stage], [1, 1, _ROWS, DIM]),
                        hopper.ragged(do_batch * q_len, q_len, row, column), do_full[stage],
                    )  # fmt: skip
                    stat = (tl.full((), 0, tl.int64) + stat_head) * stat_rows + do_batch * row_blocks + row
                    tlx.async_load(stat_lse + stat, lse_rows[stage], bulk=True, barrier=do_full[stage])
                    tlx.async_load(stat_delta + stat, delta_rows[stage], bulk=True, barrier=do_full[stage])
                    do_loads += 1
                stage = turn % V_STAGES
                noted = hopper.wait(
                    v_empty[stage], ((turn // V_STAGES) & 1) ^ 1, lane, noted, capacity, _V_EMPTY, stage, named, LEVEL
                )
                hopper.load(v_desc, v_tiles[stage], v_full[stage], origin, kv_len, first, column)
                opens = 0
                if (closes & _CLOSES_SEQUENCE) != 0:
                    opens = _OPENS_SEQUENCE
                if (closes & _CLOSES_HEAD) != 0:
                    opens = _OPENS_HEAD | _OPENS_SEQUENCE
                item = next_item
                head = next_head
                batch = next_batch
                block = next_block
            instrument.close_lane(lane, noted, LEVEL)

        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            wg: tl.constexpr = tlx.async_task_replica_id()
            lane, noted = instrument.open_lane(recorder, own * _ROLES + 1 + wg, capacity, LEVEL, True)
            row = first_row
            if CLUSTER == 2:
                row += tlx.cluster_cta_rank() * _ROWS
            heads_seen = 0
            sequences = 0
            q_own = tlx.local_slice(row_tiles[_Q], [wg * HALF, 0], [HALF, DIM])
            p_own = tlx.local_slice(weights[_P], [wg * HALF, 0], [HALF, BLOCK_KV])
            ds_own = tlx.local_slice(weights[_DS], [wg * HALF, 0], [HALF, BLOCK_KV])
            dq_left = tl.zeros((HALF, WIDTH), dtype=tl.float32)
            dq_right = tl.zeros((HALF, WIDTH), dtype=tl.float32)
            for turn in range(end - begin):
                slot = turn % _SLOTS
                noted = hopper.wait(
                    item_full[slot], (turn // _SLOTS) & 1, lane, noted, capacity, _ITEM_FULL, slot, -1, LEVEL
                )
                begun = noted
                instrument.begin_span(lane, begun, capacity, _KIND_TILE, -1, LEVEL, 2)
                noted = instrument.behind(noted, LEVEL, 2)
                flags = hopper.get(words[slot * _WORDS + _FLAGS])
                head = hopper.get(words[slot * _WORDS + _HEAD])
                first = hopper.get(words[slot * _WORDS + _FIRST])
                kv_len = hopper.get(words[slot * _WORDS + _KV_LEN])
                tile = hopper.get(words[slot * _WORDS + _TILE])
                tlx.barrier_arrive(item_empty[slot], 1)
                if (flags & _OPENS_HEAD) != 0:
                    noted = hopper.wait(q_full[0], heads_seen & 1, lane, noted, capacity, _Q_FULL, -1, tile, LEVEL)
                    heads_seen += 1
                k_stage = turn % K_STAGES
                v_stage = turn % V_STAGES
                do_stage = sequences % 2
                noted = hopper.wait(
                    k_full[k_stage], (turn // K_STAGES) & 1, lane, noted, capacity, _K_FULL, k_stage, tile, LEVEL
                )
                scores = tlx.async_dot(q_own, tlx.local_trans(k_tiles[k_stage]))
                if (flags & _OPENS_SEQUENCE) != 0:
                    noted = hopper.wait(
                        do_full[do_stage], (sequences // 2) & 1, lane, noted, capacity, _DO_FULL, do_stage, tile, LEVEL
                    )
                noted = hopper.wait(
                    v_full[v_stage], (turn // V_STAGES) & 1, lane, noted, capacity, _V_FULL, v_stage, tile, LEVEL
                )
                do_own = tlx.local_slice(row_tiles[do_stage], [wg * HALF, 0], [HALF, DIM])
                dp = tlx.async_dot(do_own, tlx.local_trans(v_tiles[v_stage]))
                scores = tlx.async_dot_wait(1, scores)
                lse = tlx.local_load(tlx.local_slice(lse_rows[do_stage], [wg * HALF], [HALF]))
                delta = tlx.local_load(tlx.local_slice(delta_rows[do_stage], [wg * HALF], [HALF]))
                if LEAVE_OUT == _EXP:
                    # Rows that do not exist have an lse of +inf; their weights stay numbers, as in the forward.
                    p = scores * score_scale - tl.minimum(lse, 128.0)[:, None]
                else:
                    p = tl.exp2(scores * score_scale - lse[:, None])
                if first + BLOCK_KV > kv_len:
                    # A key that is not there has a score of 0, and its weight may be beyond any number.
                    p = tl.where((first + tl.arange(0, BLOCK_KV) < kv_len)[None, :], p, 0.0)
                noted = hopper.wait(
                    weights_empty[_P], (turn & 1) ^ 1, lane, noted, capacity, _WEIGHTS_EMPTY, _P, tile, LEVEL
                )
                tlx.local_store(p_own, p.to(dtype))
                tlx.fence("async_shared")
                tlx.barrier_arrive(weights_full[_P], 1)
                dp = tlx.async_dot_wait(0, dp)
                tlx.barrier_arrive(v_empty[v_stage], 1)
                noted = hopper.wait(
                    weights_empty[_DS], (turn & 1) ^ 1, lane, noted, capacity, _WEIGHTS_EMPTY, _DS, tile, LEVEL
                )
                if kv_len <= BLOCK_KV:
                    # All keys of the row are here: its sum is left to the tile. Before the wait, or without the branch,
                    # this costs where it is not taken.
                    delta += tl.sum(p * dp, 1)
                ds = (p * (dp - delta[:, None])).to(dtype)
                tlx.local_store(ds_own, ds)
                tlx.fence("async_shared")
                tlx.barrier_arrive(weights_full[_DS], 1)
                dq_left = tlx.async_dot(ds, tlx.local_slice(k_tiles[k_stage], [0, 0], [BLOCK_KV, WIDTH]), dq_left)
                if DIM > WIDTH:
                    k_right = tlx.local_slice(k_tiles[k_stage], [0, WIDTH], [BLOCK_KV, WIDTH])
                    dq_right = tlx.async_dot(ds, k_right, dq_right)
                    dq_right = tlx.async_dot_wait(0, dq_right)
                dq_left = tlx.async_dot_wait(0, dq_left)
                tlx.barrier_arrive(k_empty[k_stage], 1)
                if (flags & _CLOSES_SEQUENCE) != 0:
                    tlx.barrier_arrive(do_empty[do_stage], 1)
                    sequences += 1
                if (flags & _CLOSES_HEAD) != 0:
                    tlx.barrier_arrive(q_empty[0], 1)
                    # The memory of P and dS is free when mma2 has read this tile's.
                    noted = hopper.wait(
                        weights_empty[_P], turn & 1, lane, noted, capacity, _WEIGHTS_EMPTY, _P, tile, LEVEL
                    )
                    noted = hopper.wait(
                        weights_empty[_DS], turn & 1, lane, noted, capacity, _WEIGHTS_EMPTY, _DS, tile, LEVEL
                    )
                    place = part_of(own // CLUSTER, head) * (CLUSTER * _ROWS) + row - first_row + wg * HALF
                    tlx.local_store(dq_tiles[wg], dq_left.reshape(1, 1, HALF, WIDTH))
                    tlx.fence("async_shared")
                    tlx.async_descriptor_store(dq_desc, dq_tiles[wg], hopper.ragged(0, part_rows, place, 0))
                    tlx.async_descriptor_store_wait(0)
                    if DIM > WIDTH:
                        tlx.local_store(dq_tiles[wg], dq_right.reshape(1, 1, HALF, WIDTH))
                        tlx.fence("async_shared")
                        tlx.async_descriptor_store(dq_desc, dq_tiles[wg], hopper.ragged(0, part_rows, place, WIDTH))
                        tlx.async_descriptor_store_wait(0)
                    dq_left = tl.zeros((HALF, WIDTH), dtype=tl.float32)
                    dq_right = tl.zeros((HALF, WIDTH), dtype=tl.float32)
                    # Neither writes P or dS before the other has sent its dQ from there.
                    tlx.named_barrier_wait(_FLUSH_BARRIER, _PAIR)
                instrument.end_span(lane, begun, capacity, tile, LEVEL, 2)

            if not ADD:
                instrument.begin_span(lane, noted, capacity, _KIND_ZERO, -1, LEVEL, 2)
                cleared = shared.clear_rest(
                    dk, dv, pairs, counts, kv_offsets, batch_count, heads, total_kv, own * 2 + wg,
                    tl.num_programs(0) * 2, BLOCK_KV, DIM,
                )  # fmt: skip
                if cleared > 0:
                    noted = instrument.end_span(lane, noted, capacity, -1, LEVEL, 2)
            instrument.close_lane(lane, noted, LEVEL)

        with tlx.async_task(num_warps=4, registers=REGISTERS):
            lane, noted = instrument.open_lane(recorder, own * _ROLES + 3, capacity, LEVEL, True)
            heads_seen = 0
            sequences = 0
            turns = end - begin
            # Of a pair CTA 0 finishes dV and CTA 1 dK; each makes first what it sends.
            rank = 1
            if CLUSTER == 2:
                rank = tlx.cluster_cta_rank()
            early = 1 - rank
            for turn in range(turns):
                slot = turn % _SLOTS
                noted = hopper.wait(
                    item_full[slot], (turn // _SLOTS) & 1, lane, noted, capacity, _ITEM_FULL, slot, -1, LEVEL
                )
                begun = noted
                instrument.begin_span(lane, begun, capacity, _KIND_TILE, -1, LEVEL, 2)
                noted = instrument.behind(noted, LEVEL, 2)
                flags = hopper.get(words[slot * _WORDS + _FLAGS])
                head = hopper.get(words[slot * _WORDS + _HEAD])
                first = hopper.get(words[slot * _WORDS + _FIRST])
                kv_start = hopper.get(words[slot * _WORDS + _KV_START])
                kv_len = hopper.get(words[slot * _WORDS + _KV_LEN])
                tile = hopper.get(words[slot * _WORDS + _TILE])
                tlx.barrier_arrive(item_empty[slot], 1)
                column = head * DIM
                do_stage = sequences % 2
                if (flags & _OPENS_HEAD) != 0:
                    noted = hopper.wait(q_full[0], heads_seen & 1, lane, noted, capacity, _Q_FULL, -1, tile, LEVEL)
                    heads_seen += 1
                if (flags & _OPENS_SEQUENCE) != 0:
                    noted = hopper.wait(
                        do_full[do_stage], (sequences // 2) & 1, lane, noted, capacity, _DO_FULL, do_stage, tile, LEVEL
                    )
                first_rows = tl.where(early == _P, do_stage, _Q)
                noted = hopper.wait(
                    weights_full[early], turn & 1, lane, noted, capacity, _WEIGHTS_FULL, early, tile, LEVEL
                )
                sent = tlx.async_dot(tlx.local_trans(weights[early]), row_tiles[first_rows])
                if turn > 0:
                    # The store before has been read: the other CTA may send again.
                    tlx.async_descriptor_store_wait(0)
                    if CLUSTER == 2:
                        tlx.barrier_arrive(part_empty[0], 1, 1 - rank)
                noted = hopper.wait(
                    weights_full[1 - early], turn & 1, lane, noted, capacity, _WEIGHTS_FULL, 1 - early, tile, LEVEL
                )
                kept = tlx.async_dot(tlx.local_trans(weights[1 - early]), row_tiles[do_stage + _Q - first_rows])
                sent = tlx.async_dot_wait(1, sent)
                tlx.barrier_arrive(weights_empty[early], 1)
                if CLUSTER == 1:
                    tlx.local_store(out_tiles[0], sent.to(dtype).reshape(1, 1, BLOCK_KV, DIM))
                    _store(dv_desc, out_tiles[0], kv_start, kv_len, first, column, ADD, LEAVE_OUT)
                    kept = tlx.async_dot_wait(0, kept)
                    tlx.barrier_arrive(weights_empty[1 - early], 1)
                    tlx.local_store(out_tiles[1], (kept * scale).to(dtype).reshape(1, 1, BLOCK_KV, DIM))
                    _store(dk_desc, out_tiles[1], kv_start, kv_len, first, column, ADD, LEAVE_OUT)
                else:
                    noted = hopper.wait(
                        part_empty[0], (turn & 1) ^ 1, lane, noted, capacity, _PART_EMPTY, -1, tile, LEVEL
                    )
                    tlx.local_store(parts[0], sent.to(dtype))
                    tlx.fence("async_shared")
                    tlx.async_remote_shmem_copy(parts[1], parts[0], 1 - rank, part_full[0])
                    tlx.barrier_expect_bytes(part_full[0], BLOCK_KV * DIM * ELEMENT)
                    kept = tlx.async_dot_wait(0, kept)
                    tlx.barrier_arrive(weights_empty[1 - early], 1)
                    noted = hopper.wait(part_full[0], turn & 1, lane, noted, capacity, _PART_FULL, -1, tile, LEVEL)
                    if DIM == 128:
                        came = tlx.local_load(parts[1], layout=_ACCUMULATOR_128)
                    else:
                        came = tlx.local_load(parts[1], layout=_ACCUMULATOR_64)
                    kept = (kept + came.to(tl.float32)) * tl.where(rank == 1, scale, 1.0)
                    tlx.local_store(out_tiles[1], kept.to(dtype).reshape(1, 1, BLOCK_KV, DIM))
                    if rank == 0:
                        _store(dv_desc, out_tiles[1], kv_start, kv_len, first, column, ADD, LEAVE_OUT)
                    else:
                        _store(dk_desc, out_tiles[1], kv_start, kv_len, first, column, ADD, LEAVE_OUT)
                if (flags & _CLOSES_SEQUENCE) != 0:
                    tlx.barrier_arrive(do_empty[do_stage], 1)
                    sequences += 1
                if (flags & _CLOSES_HEAD) != 0:
                    tlx.barrier_arrive(q_empty[0], 1)
                instrument.end_span(lane, begun, capacity, tile, LEVEL, 2)
            tlx.async_descriptor_store_wait(0)
            if CLUSTER == 2:
                if turns > 0:
                    # A CTA must not end before the other's last word to it has come.
                    tlx.barrier_arrive(part_empty[0], 1, 1 - rank)
                    tlx.barrier_wait(part_empty[0], (turns - 1) & 1)
            instrument.close_lane(lane, noted, LEVEL)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_offsets: Tensor,
    q_offsets: None,
    problem: Problem,
    config: HopperResidentConfig,
    run: launch.Run,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ summed over the batch, dK and dV, in q's dtype, contiguous, for a problem that :func:`serves`.

    The run's items are blocks of ``config.block_kv`` keys; its schedule's order is kept, and dealt in equal shares.
    More than 256 rows of Q take a pass for each 256, whose dK and dV are added up in q's dtype; a recorder sees the
    first.
    """
    toolchain.require_safe_ptxas("the backward for sm_90")
    dim, heads = problem.head_dim, problem.heads
    together = cluster(problem)
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_rows = launch.as_rows(grad_out.reshape(problem.total_q, heads, dim))
    facts = {"heads": heads, "head_dim": dim}
    rows = statistics.RowStatistics(grad_rows, grad_lse, out, lse, kv_offsets, None, problem, run)
    stats = rows.numbers(ROWS // 2, together * ROWS, config.block_kv)
    q_rows, k_rows, v_rows = launch.as_rows(q), launch.as_rows(k), launch.as_rows(v)
    grid = ctas(run, problem, config, q.device)
    workers, part = grid // together, together * ROWS
    parts = torch.empty(((workers + heads) * part, 1, dim), dtype=torch.float32, device=q.device)
    for first_row in range(0, problem.q_len, together * ROWS):
        recorder = run.recorder if first_row == 0 else instrument.OFF
        with instrument.launch_range("jfa_backward", run.schedule, **facts):
            compiled = jfa_backward_resident[(grid,)](
                launch.ragged_descriptor(q_rows, ROWS),
                launch.ragged_descriptor(grad_rows, ROWS),
                launch.ragged_descriptor(k_rows, config.block_kv),
                launch.ragged_descriptor(v_rows, config.block_kv),
                launch.ragged_descriptor(parts, ROWS // 2, WIDTH),
                launch.ragged_descriptor(launch.as_rows(dk), config.block_kv),
                launch.ragged_descriptor(launch.as_rows(dv), config.block_kv),
                dk,
                dv,
                stats[0],
                stats[1],
                kv_offsets,
                run.items.pairs,
                run.items.counts,
                problem.batch,
                heads,
                problem.q_len,
                first_row,
                stats.shape[2],
                problem.total_kv,
                problem.scale * launch.LOG2_E,
                problem.scale,
                recorder.buffer,
                recorder.capacity,
                CLUSTER=together,
                ADD=first_row > 0,
                BLOCK_KV=config.block_kv,
                DIM=dim,
                K_STAGES=config.k_stages,
                V_STAGES=config.v_stages,
                REGISTERS=config.registers,
                LEVEL=recorder.number,
                LEAVE_OUT=left_out.code(jfa_backward_resident.__name__, run.leave_out),
                num_warps=4,
                num_stages=1,
                ptx_options=config.ptx_options,
                **({"ctas_per_cga": (together, 1, 1)} if together > 1 else {}),
            )
        with instrument.launch_range("jfa_sum_dq", run.schedule, **facts):
            jfa_sum_dq_parts[(triton.cdiv(min(part, problem.q_len - first_row), SUM_ROWS), heads)](
                parts,
                dq,
                run.items.counts,
                problem.q_len,
                first_row,
                heads,
                workers,
                problem.scale,
                PART=part,
                ROWS=SUM_ROWS,
                EACH=SUM_PARTS,
                DIM=dim,
            )
        run.compiled.append(compiled)
    return dq, dk, dv


@triton.jit(do_not_specialize=["q_len", "first_row", "workers"])
def jfa_sum_dq_parts(
    parts,
    grad_q,
    counts,
    q_len,
    first_row,
    heads,
    workers,
    scale,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    EACH: tl.constexpr,
    DIM: tl.constexpr,
):
    """grad_q = scale · the sum of a head's parts, always in one order, rounded once; rows from ``first_row``.

    parts: float32 (workers + heads, PART, DIM), those of `part_of` written. Program (block of ROWS rows, head).
    """
    head = tl.program_id(1)
    work = tl.load(counts).to(tl.int64)
    total = work * heads
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    found = tl.zeros((ROWS, DIM), dtype=tl.float32)
    if total > 0:
        # The worker of a tile: the last one that begins at or before it.
        low = ((head * work + 1) * workers - 1) // total
        high = (((head + 1) * work) * workers - 1) // total
        for first in range(low.to(tl.int32), high.to(tl.int32) + 1, EACH):
            worker = first + tl.arange(0, EACH)
            begin, end = share(total, worker, workers)
            there = (worker <= high) & (begin < end)
            at = part_of(worker, head).to(tl.int64)[:, None] * PART + rows[None, :]
            place = parts + at[:, :, None] * DIM + dims[None, None, :]
            found += tl.sum(tl.load(place, mask=there[:, None, None], other=0.0), 0)
    row = first_row + rows
    at = primitives.wide(row) * heads + head
    values = (found * scale).to(grad_q.dtype.element_ty)
    tl.store(grad_q + at[:, None] * DIM + dims[None, :], values, mask=(row < q_len)[:, None])


def cluster(problem: Problem) -> int:
    """CTAs that do a tile together."""
    return 1 if problem.q_len <= ROWS else 2


def ctas(run: launch.Run, problem: Problem, config: HopperResidentConfig, device: torch.device) -> int:
    """CTAs of a launch: as many as run at once, whatever the schedule."""
    return launch.sm_count(device) // cluster(problem) * cluster(problem)


def serves(problem: Problem) -> bool:
    """Whether dQ can stay in registers: a shared Q of few rows, a K/V head for each head, no mask."""
    unmasked = problem.window_left < 0 and problem.window_right < 0
    return problem.broadcast_q and unmasked and problem.heads == problem.heads_kv and 0 < problem.q_len <= MOST_ROWS
