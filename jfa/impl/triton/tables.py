"""Build tile tables on the device: nothing about them is read back, and a launch needs only an upper bound.

Where every row meets all columns of its sequence, a sorted table is one launch, which ranks sequences: with it,
written for a shared Q alone then, hsp-extreme's whole forward took 364.0 µs instead of 373.3 on an H200 (30 runs in
turn, medians). Other tables are at most three small launches: the running sum of every sequence's blocks (where
lengths differ), the columns that each block meets, and the (batch, block) pairs, each put where its cost ranks. Host
time matters as much as GPU time here: a table is built in every call that was not planned. Sums made by every program
instead of by a launch of their own changed no time of `bench` on an H200.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from jfa.schedule import PART_SHIFT, Items, Lengths

_CHUNK = 1024
_PART_SHIFT = tl.constexpr(PART_SHIFT)
_ROWS = 256
# Measured on an H200, µs to rank the blocks of hsp-loguniform and hsp-half-empty: this 8.6, 9.5; 16 x 256 12.6, 11.9.
_RANKED_ROWS, _RANKED_OTHERS = 8, 512
_ITEMS = 64
"""Of a sequence, written at once."""
_MOST_RANKED = 8192
"""Items, or sequences, up to this many are ranked by comparing each with all others (67 million comparisons, one
launch); more are sorted."""
_SIZES = ["bound", "batch_count", "uniform_blocks", "row_uniform", "column_uniform", "split"]
"""Arguments that differ from batch to batch: no kernel is compiled anew for a value of theirs."""


@triton.jit
def _store_counts(counts, work, total):
    tl.store(counts, work)
    tl.store(counts + 1, total)
    tl.store(counts + 2, 0)


@triton.jit
def _blocks(row_offsets, row_uniform, batch, ROWS_UNIFORM: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks of rows of sequences ``batch``."""
    return (_lengths(row_offsets, batch, row_uniform, ROWS_UNIFORM) + BLOCK - 1) // BLOCK


@triton.jit(do_not_specialize=_SIZES)
def _block_ends(
    row_offsets,
    row_uniform,
    column_offsets,
    column_uniform,
    ends,
    counts,
    bound,
    batch_count,
    split,
    ROWS_UNIFORM: tl.constexpr,
    COLUMNS_UNIFORM: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """ends[b] = items of sequences 0 … b; counts = (items in all, twice; a counter at zero).

    A sequence has an item a block of rows, with ``SPLIT`` a block of rows and part of ``split`` columns.

    ``bound`` is how many items the table holds: where it is less (the longest length was understated), the rest is
    left out, so that no kernel reads behind the table.
    """
    total = tl.full((), 0, tl.int32)
    for start in range(0, batch_count, CHUNK):
        at = start + tl.arange(0, CHUNK)
        valid = at < batch_count
        batch = tl.minimum(at, batch_count - 1)
        items = _blocks(row_offsets, row_uniform, batch, ROWS_UNIFORM, BLOCK)
        if SPLIT:
            columns = _lengths(column_offsets, batch, column_uniform, COLUMNS_UNIFORM)
            items *= tl.maximum((columns + split - 1) // split, 1)
        items = tl.where(valid, items, 0)
        tl.store(ends + at, total + tl.cumsum(items, 0), mask=valid)
        total += tl.sum(items, 0)
    total = tl.minimum(total, bound)
    _store_counts(counts, total, total)


@triton.jit
def _locate(
    rank,
    ends,
    batch_count,
    uniform_blocks,
    row_offsets,
    row_uniform,
    ROWS_UNIFORM: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(batch, block, part) of natural ranks, int32 tensors; ranks behind the last item give the last sequence.

    A sequence's items come part by part, in each part block by block.
    """
    if ROWS_UNIFORM and not SPLIT:
        return rank // uniform_blocks, rank % uniform_blocks, rank * 0
    else:
        low = rank * 0
        high = low + batch_count
        steps = batch_count
        while steps > 0:  # the first sequence whose end is above the rank
            middle = (low + high) // 2
            above = tl.load(ends + tl.minimum(middle, batch_count - 1)) > rank
            open_ = low < high
            high = tl.where(open_ & above, middle, high)
            low = tl.where(open_ & (above == 0), middle + 1, low)
            steps = steps // 2
        batch = tl.minimum(low, batch_count - 1)
        before = tl.load(ends + tl.maximum(batch - 1, 0))
        inside = rank - tl.where(batch > 0, before, 0)
        if SPLIT:
            blocks = tl.maximum(_blocks(row_offsets, row_uniform, batch, ROWS_UNIFORM, BLOCK), 1)
            return batch, inside % blocks, inside // blocks
        else:
            return batch, inside, inside * 0


@triton.jit
def _lengths(offsets, batch, uniform, UNIFORM: tl.constexpr):
    if UNIFORM:
        return batch * 0 + uniform
    else:
        return (tl.load(offsets + batch + 1) - tl.load(offsets + batch)).to(tl.int32)


@triton.jit(do_not_specialize=[*_SIZES, "before", "after"])
def _costs(
    costs,
    row_offsets,
    row_uniform,
    column_offsets,
    column_uniform,
    ends,
    counts,
    bound,
    batch_count,
    uniform_blocks,
    before,
    after,
    split,
    ROWS_UNIFORM: tl.constexpr,
    COLUMNS_UNIFORM: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """costs[rank] = columns that at least one row of the block sees; −1 where there is no such item."""
    rank = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = rank < bound
    batch, block, part = _locate(
        rank, ends, batch_count, uniform_blocks, row_offsets, row_uniform, ROWS_UNIFORM, SPLIT, BLOCK
    )
    batch = tl.minimum(batch, batch_count - 1)
    columns = _lengths(column_offsets, batch, column_uniform, COLUMNS_UNIFORM)
    rows = _lengths(row_offsets, batch, row_uniform, ROWS_UNIFORM)
    first = block * BLOCK
    shift = columns - rows
    low = rank * 0
    high = columns
    if HAS_BEFORE:
        low = tl.maximum(first + shift - before, 0)
    if HAS_AFTER:
        high = tl.minimum(columns, tl.minimum(first + BLOCK, rows) + shift + after)
    if SPLIT:
        low = part * split
        high = tl.minimum(columns, low + split)
    total = bound
    if SPLIT or not ROWS_UNIFORM:
        total = tl.load(counts + 1)
    tl.store(costs + rank, tl.where(rank < total, tl.maximum(high - low, 0), -1), mask=valid)


@triton.jit(do_not_specialize=_SIZES)
def _pairs(
    pairs,
    order,
    costs,
    ends,
    counts,
    bound,
    batch_count,
    uniform_blocks,
    row_offsets,
    row_uniform,
    ROWS_UNIFORM: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write (batch, block and part) of item i of ``order`` (without one, the natural order) to i; and the counts."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = at < bound
    rank = at
    if order is not None:
        rank = tl.load(order + at, mask=valid, other=0).to(tl.int32)
        works = tl.load(costs + at, mask=valid, other=0) > 0
        next_works = tl.load(costs + at + 1, mask=at + 1 < bound, other=0) > 0
        tl.store(counts + at * 0, at + 1, mask=works & (next_works == 0))
    elif ROWS_UNIFORM and not SPLIT:
        if tl.program_id(0) == 0:
            _store_counts(counts, bound, bound)
    batch, block, part = _locate(
        rank, ends, batch_count, uniform_blocks, row_offsets, row_uniform, ROWS_UNIFORM, SPLIT, BLOCK
    )
    tl.store(pairs + 2 * at, batch, mask=valid)
    tl.store(pairs + 2 * at + 1, block + (part << _PART_SHIFT), mask=valid)


@triton.jit(do_not_specialize=_SIZES)
def _ranked_pairs(
    pairs,
    costs,
    ends,
    counts,
    bound,
    batch_count,
    uniform_blocks,
    row_offsets,
    row_uniform,
    ROWS_UNIFORM: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """An item's (batch, block and part) goes where its cost ranks, longest first, ties in natural order; the counts.

    Few rows a program: the comparisons then spread over the GPU and their running sums fit into registers.
    """
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = at < bound
    own = tl.load(costs + at, mask=valid, other=-1)
    ahead = tl.zeros((ROWS, OTHERS), dtype=tl.int32)
    work = tl.zeros((OTHERS,), dtype=tl.int32)
    for start in range(0, bound, OTHERS):
        other = start + tl.arange(0, OTHERS)
        cost = tl.load(costs + other, mask=other < bound, other=-2)
        earlier = (other[None, :] < at[:, None]).to(tl.int32)
        ahead += (cost[None, :] + earlier > own[:, None]).to(tl.int32)
        work += (cost > 0).to(tl.int32)
    if tl.program_id(0) == 0:
        total = bound
        if SPLIT or not ROWS_UNIFORM:
            total = tl.load(counts + 1)
        _store_counts(counts, tl.sum(work, 0), total)
    place = tl.sum(ahead, 1)
    batch, block, part = _locate(
        at, ends, batch_count, uniform_blocks, row_offsets, row_uniform, ROWS_UNIFORM, SPLIT, BLOCK
    )
    tl.store(pairs + 2 * place, batch, mask=valid)
    tl.store(pairs + 2 * place + 1, block + (part << _PART_SHIFT), mask=valid)


@triton.jit
def _sequences(
    batch, row_offsets, row_uniform, column_offsets, column_uniform, batch_count, split, ROWS_UNIFORM: tl.constexpr,
    COLUMNS_UNIFORM: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of sequences: (blocks of rows, parts of ``split`` columns, columns of a last part, whether there is one).

    A sequence without columns has a last part, of none; one behind the last sequence has no blocks.
    """
    valid = batch < batch_count
    inside = tl.minimum(batch, batch_count - 1)
    blocks = tl.where(valid, _blocks(row_offsets, row_uniform, inside, ROWS_UNIFORM, BLOCK), 0)
    rest = _lengths(column_offsets, inside, column_uniform, COLUMNS_UNIFORM)
    full = rest * 0
    if SPLIT:
        full = rest // split
        rest -= full * split
    return blocks, full, rest, (rest > 0) | (full == 0)


@triton.jit(do_not_specialize=_SIZES)
def _ranked_sequences(
    pairs,
    counts,
    row_offsets,
    row_uniform,
    column_offsets,
    column_uniform,
    bound,
    batch_count,
    split,
    ROWS_UNIFORM: tl.constexpr,
    COLUMNS_UNIFORM: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN: tl.constexpr,
    OTHERS: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """The sorted table in one launch, where every row meets all columns of its sequence.

    Then a sequence's blocks cost the same, and parts of sequences are ranked: those of ``split`` columns in natural
    order, behind them the last ones by their columns, longest first, ties in natural order. A part's items stand
    together. Places behind ``bound`` are left out, and not counted.
    """
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    blocks, full, rest, is_last = _sequences(
        own, row_offsets, row_uniform, column_offsets, column_uniform, batch_count, split, ROWS_UNIFORM,
        COLUMNS_UNIFORM, SPLIT, BLOCK,
    )  # fmt: skip
    before = tl.zeros((OWN, OTHERS), dtype=tl.int32)
    ahead = tl.zeros((OWN, OTHERS), dtype=tl.int32)
    fulls = tl.zeros((OTHERS,), dtype=tl.int32)
    working = tl.zeros((OTHERS,), dtype=tl.int32)
    lasts = tl.zeros((OTHERS,), dtype=tl.int32)
    for start in range(0, batch_count, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_blocks, other_full, other_rest, other_last = _sequences(
            other, row_offsets, row_uniform, column_offsets, column_uniform, batch_count, split, ROWS_UNIFORM,
            COLUMNS_UNIFORM, SPLIT, BLOCK,
        )  # fmt: skip
        earlier = (other[None, :] < own[:, None]).to(tl.int32)
        if SPLIT:
            before += earlier * (other_full * other_blocks)[None, :]
            fulls += other_full * other_blocks
        weight = tl.where(other_last, other_blocks, 0)
        ahead += tl.where(other_rest[None, :] + earlier > rest[:, None], weight[None, :], 0)
        working += tl.where(other_rest > 0, weight, 0)
        lasts += weight
    all_full = tl.sum(fulls, 0)
    if tl.program_id(0) == 0:
        work, total = all_full + tl.sum(working, 0), all_full + tl.sum(lasts, 0)
        _store_counts(counts, tl.minimum(work, bound), tl.minimum(total, bound))
    first = tl.sum(before, 1)[:, None]
    last = (all_full + tl.sum(ahead, 1))[:, None]
    cut = (full * blocks)[:, None]
    items = cut + tl.where(is_last, blocks, 0)[:, None]
    for start in range(0, tl.max(items), ITEMS):
        item = start + tl.arange(0, ITEMS)[None, :]
        place = tl.where(item < cut, first + item, last + item - cut)
        valid = (item < items) & (place < bound)
        count = tl.maximum(blocks, 1)[:, None]
        tl.store(pairs + 2 * place, own[:, None] + 0 * item, mask=valid)
        tl.store(pairs + 2 * place + 1, item % count + ((item // count) << _PART_SHIFT), mask=valid)


def build_items(
    rows: Lengths,
    columns: Lengths,
    batch: int,
    block: int,
    *,
    before: int,
    after: int,
    by_cost: bool,
    split: int = 0,
) -> Items:
    """The table of the side that owns tiles (``rows``), in blocks of ``block``, against the other side (``columns``).

    ``before`` and ``after`` bound the columns that a row sees, end-aligned as for attention windows (−1: unbounded);
    the backward, whose rows are keys, passes the window's two sides exchanged. ``by_cost`` sorts items by the number of
    columns that they meet, longest first, and keeps those without work behind ``counts[0]``; items that all cost the
    same stay in their natural order. At least one side is jagged; the table lives where its offsets do. With ``split``
    a sequence of more columns than that is cut into parts of so many, the last one shorter; no window then.
    """
    device = next(side.offsets.device for side in (rows, columns) if side.offsets is not None)
    bound = rows.max_items(batch, block)
    if bound == 0:
        nothing = torch.zeros(3, dtype=torch.int32, device=device)
        return Items(torch.zeros((0, 2), dtype=torch.int32, device=device), nothing, split)
    unbounded = before < 0 and after < 0
    assert unbounded or not split, "a window's tiles are not cut"
    if split:
        bound += -(-rows.longest // block) * (columns.total // split)
    by_cost = by_cost and not (columns.offsets is None and columns.uniform > 0 and unbounded)
    if by_cost and unbounded and batch <= _MOST_RANKED:
        return _by_sequence(rows, columns, batch, block, bound, split)
    ranked = by_cost and bound <= _MOST_RANKED
    counts = torch.empty(3, dtype=torch.int32, device=device)
    uniform = rows.offsets is None
    uniform_blocks = -(-rows.uniform // block)
    ends = counts
    counted = bool(split) or not uniform
    shape = {"ROWS_UNIFORM": uniform, "SPLIT": split > 0, "BLOCK": block}
    if counted:
        ends = torch.empty(batch, dtype=torch.int32, device=device)
        _block_ends[(1,)](
            rows.offsets,
            rows.uniform,
            columns.offsets,
            columns.uniform,
            ends,
            counts,
            bound,
            batch,
            split,
            COLUMNS_UNIFORM=columns.offsets is None,
            CHUNK=_CHUNK,
            **shape,
        )
    grid = (triton.cdiv(bound, _ROWS),)
    order = costs = None
    if by_cost:
        costs = torch.empty(bound, dtype=torch.int32, device=device)
        _costs[grid](
            costs,
            rows.offsets,
            rows.uniform,
            columns.offsets,
            columns.uniform,
            ends,
            counts,
            bound,
            batch,
            uniform_blocks,
            before,
            after,
            split,
            COLUMNS_UNIFORM=columns.offsets is None,
            HAS_BEFORE=before >= 0,
            HAS_AFTER=after >= 0,
            ROWS=_ROWS,
            **shape,
        )
        if not ranked:
            costs, order = costs.sort(descending=True, stable=True)
            counts[:1].zero_()  # fills, not copies from the host, which would wait for the device
            if not counted:
                counts[1:2].fill_(bound)
                counts[2:].zero_()
    pairs = torch.empty((bound, 2), dtype=torch.int32, device=device)
    if ranked:
        _ranked_pairs[(triton.cdiv(bound, _RANKED_ROWS),)](
            pairs,
            costs,
            ends,
            counts,
            bound,
            batch,
            uniform_blocks,
            rows.offsets,
            rows.uniform,
            ROWS=_RANKED_ROWS,
            OTHERS=_RANKED_OTHERS,
            **shape,
        )
    else:
        _pairs[grid](
            pairs,
            order,
            costs,
            ends,
            counts,
            bound,
            batch,
            uniform_blocks,
            rows.offsets,
            rows.uniform,
            ROWS=_ROWS,
            **shape,
        )
    return Items(pairs, counts, split)


def _by_sequence(rows: Lengths, columns: Lengths, batch: int, block: int, bound: int, split: int) -> Items:
    """The sorted table where every row meets all columns of its sequence: of sequences, not of blocks."""
    device = next(side.offsets.device for side in (rows, columns) if side.offsets is not None)
    counts = torch.empty(3, dtype=torch.int32, device=device)
    pairs = torch.empty((bound, 2), dtype=torch.int32, device=device)
    _ranked_sequences[(triton.cdiv(batch, _RANKED_ROWS),)](
        pairs,
        counts,
        rows.offsets,
        rows.uniform,
        columns.offsets,
        columns.uniform,
        bound,
        batch,
        split,
        ROWS_UNIFORM=rows.offsets is None,
        COLUMNS_UNIFORM=columns.offsets is None,
        SPLIT=split > 0,
        BLOCK=block,
        OWN=_RANKED_ROWS,
        OTHERS=_RANKED_OTHERS,
        ITEMS=_ITEMS,
    )
    return Items(pairs, counts, split)
