"""Tile tables name every tile once, longest first where asked; deals give every tile to exactly one CTA."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from jfa import schedule
from jfa.impl.triton import launch, primitives, tables  # noqa: F401  (launch repairs the interpreter)
from jfa.schedule import Lengths

lengths = st.lists(st.one_of(st.just(0), st.integers(0, 5), st.integers(60, 200)), min_size=1, max_size=12)


def side(values: list[int], device: str, dtype: torch.dtype = torch.int32) -> Lengths:
    offsets = torch.tensor(np.concatenate([[0], np.cumsum(values)]), dtype=dtype, device=device)
    return Lengths(offsets, 0, int(sum(values)), max(values, default=0))


def expected_items(
    rows: list[int], columns: list[int], block: int, before: int, after: int
) -> list[tuple[int, int, int]]:
    """(batch, block, columns met) in the natural order, row by row."""
    items = []
    for batch, (row_len, column_len) in enumerate(zip(rows, columns, strict=True)):
        shift = column_len - row_len
        for index in range(-(-row_len // block)):
            met: set[int] = set()
            for row in range(index * block, min((index + 1) * block, row_len)):
                low = max(0, row + shift - before) if before >= 0 else 0
                high = min(column_len, row + shift + after + 1) if after >= 0 else column_len
                met.update(range(low, high))
            items.append((batch, index, len(met)))
    return items


@settings(max_examples=40)
@given(
    pairs=st.lists(st.tuples(st.one_of(st.just(0), st.integers(0, 200)), st.integers(0, 200)), min_size=1, max_size=9),
    window=st.sampled_from([(-1, -1), (-1, 0), (0, -1), (17, 5), (0, 0)]),
    by_cost=st.booleans(),
    wide=st.booleans(),
)
def test_every_block_is_listed_once(
    device: str, pairs: list[tuple[int, int]], window: tuple[int, int], by_cost: bool, wide: bool
) -> None:
    rows, columns = [a for a, _ in pairs], [b for _, b in pairs]
    dtype = torch.int64 if wide else torch.int32
    row_side, column_side = side(rows, device, dtype), side(columns, device, dtype)
    before, after = window
    items = tables.build_items(row_side, column_side, len(rows), 64, before=before, after=after, by_cost=by_cost)
    truth = expected_items(rows, columns, 64, before, after)
    check_items(items, truth, by_cost)


@settings(max_examples=25)
@given(columns=lengths, queries=st.integers(0, 150), by_cost=st.booleans(), owner=st.booleans())
def test_broadcast_sides(device: str, columns: list[int], queries: int, by_cost: bool, owner: bool) -> None:
    """A uniform side may own the tiles (forward) or be met by them (backward)."""
    uniform = Lengths(None, queries, queries * len(columns), queries)
    jagged = side(columns, device)
    same = [queries] * len(columns)
    first, second = (uniform, jagged) if owner else (jagged, uniform)
    items = tables.build_items(first, second, len(columns), 64, before=-1, after=-1, by_cost=by_cost)
    truth = expected_items(*((same, columns) if owner else (columns, same)), 64, -1, -1)
    check_items(items, truth, by_cost)


@settings(max_examples=60)
@given(
    lens=st.lists(
        st.tuples(
            st.one_of(st.just(0), st.integers(0, 5), st.integers(60, 900)), st.one_of(st.just(0), st.integers(1, 900))
        ),
        min_size=1,
        max_size=30,
    ),
    queries=st.one_of(st.none(), st.integers(1, 1300)),
    split=st.sampled_from([0, 1, 64, 100, 896]),
    longest=st.one_of(st.none(), st.integers(1, 300)),
)
def test_sorted_by_sequence_as_by_block(
    device: str, lens: list[tuple[int, int]], queries: int | None, split: int, longest: int | None
) -> None:
    """Without a mask one launch ranks sequences: the same table, of parts too, to the last item.

    Where the longest length is understated, as much of it as there is room for.
    """
    columns, rows = [a for a, _ in lens], [b for _, b in lens]
    uniform = queries is not None
    owner = Lengths(None, queries, queries * len(lens), queries) if uniform else side(rows, device)
    if longest is not None and not uniform:
        owner = replace(owner, longest=min(owner.longest, longest))
    tabulate = partial(tables.build_items, owner, side(columns, device), len(lens), 64, before=-1, after=-1)
    ranked = tabulate(by_cost=True, split=split)
    with patch.object(tables, "_MOST_RANKED", 0):
        sorted_ = tabulate(by_cost=True, split=split)
    assert ranked.pairs.shape == sorted_.pairs.shape
    if owner.longest < max(rows, default=0) and not uniform:
        work, total, _ = ranked.counts.tolist()
        assert work <= total <= ranked.max_items
        listed = [tuple(pair) for pair in ranked.pairs[:total].tolist()]
        assert len(set(listed)) == total
        return
    assert ranked.counts.tolist() == sorted_.counts.tolist()
    total = int(ranked.counts[1])
    assert ranked.pairs[:total].tolist() == sorted_.pairs[:total].tolist()


def check_items(items: schedule.Items, truth: list[tuple[int, int, int]], by_cost: bool) -> None:
    work, total, counter = items.counts.tolist()
    assert counter == 0
    assert total == len(truth) <= items.max_items
    listed = [tuple(pair) for pair in items.pairs[:total].tolist()]
    assert sorted(listed) == [(batch, block) for batch, block, _ in truth]
    cost = {(batch, block): met for batch, block, met in truth}
    if not by_cost:
        assert listed == sorted(listed)
        assert work == total
        return
    costs = [cost[pair] for pair in listed]
    assert costs == sorted(costs, reverse=True)
    assert work == sum(met > 0 for met in costs)


@pytest.mark.parametrize("most_ranked", [tables._MOST_RANKED, 0])
@pytest.mark.parametrize("uniform", [False, True])
def test_many_sequences_span_several_programs(
    device: str, most_ranked: int, uniform: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranked and, where there are too many items for that, sorted."""
    monkeypatch.setattr(tables, "_MOST_RANKED", most_ranked)
    rows = np.random.default_rng(0).integers(0, 130, 1500).tolist()
    column_side = side(rows, device)
    same = [100] * len(rows)
    row_side = Lengths(None, 100, 100 * len(rows), 100) if uniform else column_side
    items = tables.build_items(row_side, column_side, len(rows), 64, before=-1, after=-1, by_cost=True)
    check_items(items, expected_items(same if uniform else rows, rows, 64, -1, -1), True)


@pytest.mark.parametrize("most_ranked", [tables._MOST_RANKED, 0])
@pytest.mark.parametrize("by_cost", [False, True])
def test_an_understated_length_leaves_items_out_but_counts_none_that_are_not_there(
    device: str, by_cost: bool, most_ranked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels trust the counts: more than the table holds, and they would read and write anywhere."""
    monkeypatch.setattr(tables, "_MOST_RANKED", most_ranked)
    lens = [100, 0, 300, 1]
    sequences = replace(side(lens, device), longest=60)
    items = tables.build_items(sequences, sequences, len(lens), 64, before=-1, after=-1, by_cost=by_cost)
    work, total, _ = items.counts.tolist()
    assert work == total == items.max_items == 4
    listed = {tuple(pair) for pair in items.pairs.tolist()}
    assert len(listed) == 4
    assert listed <= {(batch, block) for batch, block, _ in expected_items(lens, lens, 64, -1, -1)}


@triton.jit
def _deal(taken, counter, tile_count, DEAL: tl.constexpr):
    tile = tl.program_id(0)
    turn = 0
    while tile < tile_count:
        tl.atomic_add(taken + tile, 1)
        turn += 1
        tile = primitives.next_tile(tile, turn, counter, tile_count, DEAL)


@settings(max_examples=40)
@given(name=st.sampled_from(schedule.SCHEDULES), tiles=st.integers(0, 70), ctas=st.integers(1, 9))
def test_every_tile_is_dealt_once(device: str, name: str, tiles: int, ctas: int) -> None:
    taken = torch.zeros(tiles + 100, dtype=torch.int32, device=device)
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    grid = max(tiles, 1) if name == "grid" else ctas
    _deal[(grid,)](taken, counter, tiles, DEAL=schedule.deal(name))
    assert taken[:tiles].tolist() == [1] * tiles
    assert not taken[tiles:].any()


def test_zigzag_evens_out_a_sorted_list(device: str) -> None:
    """Dealt backwards every other round, the longest tile's CTA gets the shortest of the next round."""
    costs = np.arange(40, 0, -1)
    rounds = costs.reshape(-1, 4)
    straight = rounds.sum(0)
    zigzag = np.stack([row if turn % 2 == 0 else row[::-1] for turn, row in enumerate(rounds)]).sum(0)
    assert np.ptp(zigzag) == 0 < np.ptp(straight)
    owner = torch.full((40,), -1, dtype=torch.int32, device=device)
    _owners[(4,)](owner, 40, DEAL=schedule.deal("balanced"))
    assert [int(costs[owner.cpu().numpy() == cta].sum()) for cta in range(4)] == zigzag.tolist()


@triton.jit
def _owners(owner, tile_count, DEAL: tl.constexpr):
    tile = tl.program_id(0)
    turn = 0
    while tile < tile_count:
        tl.store(owner + tile, tl.program_id(0))
        turn += 1
        tile = primitives.next_tile(tile, turn, owner, tile_count, DEAL)
