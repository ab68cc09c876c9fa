"""Device functions of the Hopper kernels: work items handed from role to role, ragged coordinates, ping-pong."""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfa import instrument, lanes

RAGGED_ROWS = tl.constexpr(1 << 30)
"""Rows that a ragged descriptor pretends to have: see :func:`ragged`."""
_PAIR = tl.constexpr(256)
_PLACE_OF_EIGHT = tl.constexpr("{ .reg .u32 thread; mov.u32 thread, %tid.x; and.b32 $0, thread, 7; }")
_FIRST_BARRIER = tl.constexpr(9)
_STORED = tl.constexpr("{ cp.async.bulk.wait_group 0; mov.u32 $0, 0; }")
_TURN = tl.constexpr(lanes.WAITS["turn"])
_HOT_BLOCKS = tl.constexpr(128)


@triton.jit
def ragged(start, rows, row, column):
    """Coordinates of row ``row`` of the ``rows`` rows from ``start`` on, of a ragged descriptor (``launch``).

    Rows behind the last are outside of the tensor: loads give zeros there, stores leave them alone.
    """
    return [RAGGED_ROWS, start + rows, RAGGED_ROWS - rows + row, column]


@triton.jit
def side_by_side(tile, block, heads, blocks):
    """(head, block, tile) to do as the ``tile``-th, so that all blocks of a head run before the next head's.

    CTAs that run at once then read the same keys. ``tile`` // heads is an item of the table, ``block`` its block; the
    ``blocks`` items of its sequence (or of its part, where that is cut) stand together, in order, which they do where
    they cost the same. Tiles trade places within those: the result's tile is the one that the table calls so.
    """
    begin = tile // heads - block
    rank = tile - begin * heads
    head = rank // blocks
    block = rank % blocks
    return head, block, (begin + block) * heads + head


@triton.jit
def happens(batch_count, WANTED: tl.constexpr):
    """Whether to do what may be left out: where it is not WANTED never, which the compiler does not know.

    So all that it would need is still made. ``batch_count``: a number from the host, not negative.
    """
    if WANTED:
        return True
    else:
        return batch_count < 0


@triton.jit
def hot_row(own, total, BLOCK: tl.constexpr):
    """First of the at most BLOCK rows, of ``total``, that CTA ``own`` loads time and again where loads are left out.

    Each CTA has its own, as far as there are rows: else all might wait for the same few slices of the L2 cache.
    """
    return own % _HOT_BLOCKS * BLOCK % tl.maximum(total - BLOCK + 1, 1)


@triton.jit
def put(slot, value):
    """Write a scalar int32 into a one-element buffer in shared memory."""
    tlx.local_store(slot, tl.full((1,), 0, tl.int32) + value)


@triton.jit
def get(slot):
    """Read a scalar int32 from a one-element buffer in shared memory."""
    return tl.sum(tlx.local_load(slot), 0)


@triton.jit
def load(desc, tile, full, start, rows, row, column):
    """Bring rows from ``row`` of the ``rows`` rows from ``start`` on into ``tile``, [rows of a tile, D], by TMA.

    ``full`` completes a phase when all bytes are there, zeros for rows that do not exist among them.
    """
    height: tl.constexpr = tile.shape[0]
    width: tl.constexpr = tile.shape[1]
    tlx.barrier_expect_bytes(full, height * width * tlx.size_of(tlx.dtype_of(desc)))
    tlx.async_descriptor_load(
        desc, tlx.local_reshape(tile, [1, 1, height, width]), ragged(start, rows, row, column), full
    )


@triton.jit
def load_for_both(desc, tile, full, start, rows, row, column, rank):
    """As :func:`load`, by both CTAs of a cluster: each brings half of the tile into both, ``desc`` being of a half.

    The halves are those of `jfa.impl.triton.launch.half_block`: each one run of shared memory.
    """
    height: tl.constexpr = tile.shape[0]
    width: tl.constexpr = tile.shape[1]
    element: tl.constexpr = tlx.size_of(tlx.dtype_of(desc))
    by_columns: tl.constexpr = width * element > 128
    own_rows: tl.constexpr = height if by_columns else height // 2
    own_width: tl.constexpr = width // 2 if by_columns else width
    tlx.barrier_expect_bytes(full, height * width * element)
    whole = tlx.local_reshape(tile, [1, 1, height, width])
    if by_columns:
        at = ragged(start, rows, row, column + rank * own_width)
    else:
        at = ragged(start, rows, row + rank * own_rows, column)
    if rank == 0:
        half = tlx.local_slice(whole, [0, 0, 0, 0], [1, 1, own_rows, own_width])
        tlx.async_descriptor_load(desc, half, at, full, multicast_targets=[0, 1])
    else:
        half = tlx.local_slice(whole, [0, 0, height - own_rows, width - own_width], [1, 1, own_rows, own_width])
        tlx.async_descriptor_load(desc, half, at, full, multicast_targets=[0, 1])


@triton.jit
def one_of_eight():
    """Whether this thread is every eighth of its warp."""
    place = tl.inline_asm_elementwise(_PLACE_OF_EIGHT, "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    return place == 0


@triton.jit
def release(empty, rank, CLUSTER: tl.constexpr):
    """A compute warpgroup is done with a buffer that its whole cluster's loads go to.

    The other CTA gets a message of every eighth thread only, as many in all as a warp has threads.
    """
    tlx.barrier_arrive(empty, 1)
    if CLUSTER == 2:
        tlx.barrier_arrive(empty, 1, 1 - rank, pred=one_of_eight())


@triton.jit
def stored():
    """Wait until what this thread stored by TMA is in memory, where others see it once they know of this."""
    tl.inline_asm_elementwise(_STORED, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait(barrier, phase, lane, noted, capacity, KIND: tl.constexpr, stage, tile, LEVEL: tl.constexpr):
    """Wait for a phase of an mbarrier; the lane's new count of events (level wait notes how long it took)."""
    began = instrument.begin_wait(noted, capacity, LEVEL)
    tlx.barrier_wait(barrier, phase)
    return instrument.end_wait(lane, noted, capacity, began, KIND, stage, tile, LEVEL)


@triton.jit
def timed_wait(barrier, phase, noted, capacity, LEVEL: tl.constexpr):
    """As :func:`wait`, for `instrument.note_wait` to note when what was waited for has been used: (began, ended)."""
    began = instrument.begin_wait(noted, capacity, LEVEL)
    tlx.barrier_wait(barrier, phase)
    return began, instrument.wait_ended(noted, capacity, LEVEL)


@triton.jit
def take_turn(OWN: tl.constexpr, lane, noted, capacity, tile, LEVEL: tl.constexpr):
    """Wait until the other warpgroup has issued its products; ``OWN`` is 0 or 1. Gives the count as :func:`wait`."""
    began = instrument.begin_wait(noted, capacity, LEVEL)
    tlx.named_barrier_wait(_FIRST_BARRIER + OWN, _PAIR)
    return instrument.end_wait(lane, noted, capacity, began, _TURN, -1, tile, LEVEL)


@triton.jit
def pass_turn(OWN: tl.constexpr):
    """Let the other warpgroup issue its products."""
    tlx.named_barrier_arrive(_FIRST_BARRIER + 1 - OWN, _PAIR)


@triton.jit
def store_tile(desc, staging, values, start, rows, row, column, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Write [ROWS, DIM] to row ``row`` of the ``rows`` rows from ``start`` on, by TMA out of this warpgroup's staging.

    It is done with the staging when :func:`tlx.async_descriptor_store_wait` returns, which the next call waits for.
    """
    tlx.async_descriptor_store_wait(0)
    tlx.local_store(staging, values.reshape(1, 1, ROWS, DIM))
    tlx.fence("async_shared")
    tlx.async_descriptor_store(desc, staging, ragged(start, rows, row, column))


@triton.jit
def clear_rows(out, lse, row, count, heads, total_q, DIM: tl.constexpr):
    """Zero output and −inf lse for ``count`` rows from ``row`` on, of every head."""
    step: tl.constexpr = 16
    rows = tl.arange(0, step)
    dims = tl.arange(0, DIM)
    zero = tl.zeros((step, DIM), dtype=out.dtype.element_ty)
    nothing = tl.full((step,), float("-inf"), tl.float32)
    for head in range(heads):
        for start in range(0, count, step):
            valid = start + rows < count
            at = (rows + start).to(tl.int64) + row
            tl.store(out + (at[:, None] * heads + head) * DIM + dims[None, :], zero, mask=valid[:, None])
            tl.store(lse + tl.full((), 0, tl.int64) + head * total_q.to(tl.int64) + at, nothing, mask=valid)
