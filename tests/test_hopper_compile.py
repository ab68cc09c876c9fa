"""What the compiler makes of the forward for sm_90, without a GPU; and its plain parts, in the interpreter."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

if importlib.util.find_spec("triton.language.extra.tlx") is None:
    pytest.skip("TLX comes with fbtriton (x86-64)", allow_module_level=True)

import triton.language as tl  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from test_tables import side  # noqa: E402

from jfa.config import HopperBackwardConfig, HopperForwardConfig, HopperResidentConfig, hopper_forward_config  # noqa: E402
from jfa.impl.hopper import forward as hopper  # noqa: E402
from jfa.impl.hopper import merge, primitives, resident, statistics, tune  # noqa: E402
from jfa.impl.triton import launch, tables  # noqa: E402
from jfa.schedule import PART_SHIFT, Lengths  # noqa: E402
from jfa.validation import Problem  # noqa: E402
from profiling import cross_compile  # noqa: E402

SHARED_LIMIT = 232_448
"""Bytes of shared memory that a block can have on sm_90: 227 KB (CUDA C++ programming guide)."""

VARIANTS = {
    "plain": {},
    "jagged": {"broadcast": False},
    "split": {"split": True},
    "causal": {"broadcast": False, "causal": True},
    "window": {"broadcast": False, "window": True},
    "d64": {"dim": 64},
    "fp16": {"kind": "fp16"},
    "tile": {"level": 2},
    "wait": {"level": 3, "split": True},
    "pair": {"cluster": 2},
    "pair-d64-wait": {"cluster": 2, "dim": 64, "level": 3},
    "ping-pong": {"config": {"pingpong": True}},
    "backward": {"direction": "backward"},
    "backward-jagged": {"direction": "backward", "broadcast": False},
    "backward-causal": {"direction": "backward", "broadcast": False, "causal": True},
    "backward-d64": {"direction": "backward", "dim": 64},
    "backward-wait": {"direction": "backward", "level": 3},
    "backward-plain": {"direction": "backward", "config": {"prefetch": False}},
    "backward-staged": {"direction": "backward", "config": {"stages": 2, "dq_slices": 2, "dq_buffers": 3}},
    "resident": {"direction": "resident", "cluster": 1},
    "resident-d64": {"direction": "resident", "cluster": 1, "dim": 64},
    "resident-pair": {"direction": "resident"},
    "resident-pair-d64": {"direction": "resident", "dim": 64},
    "resident-pair-add-fp16": {"direction": "resident", "add": True, "kind": "fp16"},
    "resident-wait": {"direction": "resident", "level": 3},
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> dict[str, dict]:
    """Facts of each variant, from one process that compiles: this one interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    here = Path(__file__).resolve().parent
    environment["PYTHONPATH"] = os.pathsep.join([str(here.parent), str(here)])
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(VARIANTS)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", VARIANTS)
def test_it_fits_and_wgmma_runs_asynchronously(facts, name):
    """Spills stay outside the loop over keys, but for a few with a mask, the recorder or scores fetched ahead.

    "serialized" is ptxas's word for an MMA that waits for itself.
    """
    fact = facts[name]
    assert fact["shared"] <= SHARED_LIMIT
    assert "serialized" not in fact["ptxas"], fact["ptxas"]
    resident = name.startswith("resident")
    groups = 3 if resident else 2
    config = HopperResidentConfig() if resident else HopperForwardConfig()
    # 65,536 over the threads, those that load included, then reallocated
    assert re.search(r"Used (\d+) registers", fact["ptxas"])[1] == ("128" if resident else "168")
    backward = name.startswith("backward") and not name.endswith("d64")
    none = name.endswith("d64") or name == "resident-pair"
    assert fact["stack"] <= (0 if none else 144 if backward else 80)
    assert fact["reallocated_to"].count(str(config.registers)) == groups, "setmaxnreg was dropped"
    assert len(fact["loop_spills"]) == groups, "a loop over keys for each warpgroup"
    few = 20 if name == "backward-wait" else 10 if backward else 3 if re.search("causal|window|tile|wait", name) else 0
    few = {"backward-plain": 0, "resident-wait": 8}.get(name, few)
    assert max(fact["loop_spills"]) <= few


def test_pairs_load_for_both(facts):
    for name in VARIANTS:
        assert facts[name]["multicasts"] == name.startswith("pair"), name


def test_spills_in_a_loop_are_seen():
    """Of a loop with products only; what lies around it, or in a loop that waits, is not counted."""
    lines = [
        "STL [R1], R2",
        "HGMMA R4",
        "LDL R2, [R1]",
        "STL.64 [R1], R2",
        "@P0 BRA 0x0010",
        "LDL R3, [R1]",
        "@!P1 BRA 0x0000",
    ]
    sass = "\n".join(f"        /*{16 * at:04x}*/     {words} ;    /* 0x0 */" for at, words in enumerate(lines))
    assert cross_compile.loop_spills(sass) == [2]
    assert cross_compile.loop_spills(sass.replace("HGMMA", "FFMA")) == []


def main(variants: dict[str, dict]) -> None:
    found = {}
    for name, options in variants.items():
        changes = options.pop("config", {})
        direction = options.pop("direction", "forward")
        if direction == "forward":
            config = dataclasses.replace(hopper_forward_config(options.get("dim", 128)), **changes)
            made = cross_compile.compile_hopper_forward(config, **options)
        elif direction == "resident":
            config = HopperResidentConfig()
            made = cross_compile.compile_resident_backward(config, **options)
        else:
            config = dataclasses.replace(HopperBackwardConfig(), **changes)
            made = cross_compile.compile_hopper_backward(config, **options)
        found[name] = {
            "shared": made.shared,
            "stack": made.stack,
            "reallocated_to": re.findall(r"setmaxnreg\.inc\.sync\.aligned\.u32\s+(\d+)", made.ptx),
            "multicasts": ".multicast::cluster" in made.ptx,
            "loop_spills": cross_compile.loop_spills(made.sass),
            "ptxas": cross_compile.ptxas_says(made, options=config.ptx_options),
        }
    print(json.dumps(found))


@given(st.integers(0, 100_000), st.integers(1, 200))
@settings(max_examples=20)
def test_shares_are_equal_and_cover_all_tiles(device, total, workers):
    found = torch.full((workers, 2), -1, dtype=torch.int32, device=device)
    _shares[(workers,)](found, total, workers)
    bounds = found.tolist()
    assert bounds[0][0] == 0 and bounds[-1][1] == total
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    sizes = [end - begin for begin, end in bounds]
    assert max(sizes) - min(sizes) <= 1


@triton.jit(do_not_specialize=["total", "workers"])
def _shares(found, total, workers):
    own = tl.program_id(0)
    begin, end = resident.share(total, own, workers)
    tl.store(found + 2 * own, begin)
    tl.store(found + 2 * own + 1, end)


def problem(q_len: int, kv_lens: list[int], heads: int = 2, **changes) -> Problem:
    base = {
        "broadcast_q": True, "batch": len(kv_lens), "heads": heads, "heads_kv": heads, "head_dim": 64,
        "total_q": q_len * len(kv_lens), "q_len": q_len, "total_kv": sum(kv_lens), "max_q_len": q_len,
        "max_kv_len": max(kv_lens, default=0), "scale": 1.0, "window_left": -1, "window_right": -1,
    }  # fmt: skip
    return Problem(**{**base, **changes})


class TestTrial:
    """hopper-autotune: which configuration it chooses."""

    def test_the_quickest_is_chosen_and_what_fails_is_out(self):
        configs = tune.candidates(hopper_forward_config(128))
        assert configs[0] == hopper_forward_config(128) and len(set(configs)) == len(configs) == 5
        assert {(config.block_q, config.block_kv, config.multicast) for config in configs} == {(128, 128, True)}
        speed = {config: 10.0 - place for place, config in enumerate(configs)}
        now = []

        def attempt(config):
            if config is configs[-1]:
                raise RuntimeError("does not compile")
            now.append(config)

        def clock(run):
            run()
            return speed[now[-1]]

        assert tune.quickest(configs, attempt, clock) is configs[-2]
        with pytest.raises(RuntimeError):
            tune.quickest(configs[-1:], attempt, clock)

    def test_lengths_of_another_kind_are_tried_anew(self):
        q = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
        config = hopper_forward_config(64)
        kinds = {tune.regime(q, problem(64, lens), config, 0) for lens in ([100, 120], [110, 90], [4000, 4000])}
        assert len(kinds) == 2
        causal, plain = (tune.regime(q, problem(64, [100], **mask), config, 0) for mask in ({"window_right": 0}, {}))
        assert causal != plain
        alone, pair = (tune.regime(q, problem(rows, [100], broadcast_q=True), config, 0) for rows in (384, 256))
        assert alone != pair


class TestSplit:
    """From how many keys on a sequence is cut."""

    config = HopperForwardConfig()

    def test_what_a_cta_can_do_in_its_share_stays_whole(self):
        assert hopper.split_for(problem(256, [1000] * 500), self.config, 132) == 0
        assert hopper.split_for(problem(256, [0, 0]), self.config, 132) == 0
        assert hopper.split_for(problem(256, []), self.config, 132) == 0
        assert hopper.split_for(problem(1, [900]), self.config, 132) == 0

    def test_one_long_sequence_is_cut_into_equal_parts(self):
        split = hopper.split_for(problem(128, [32768]), self.config, 132)
        assert split == 1024 and split % self.config.block_kv == 0
        uneven = hopper.split_for(problem(128, [2000]), self.config, 132)
        assert uneven == 1024  # two parts of 1,000, up to whole blocks

    def test_parts_of_a_sequence_longer_than_said_can_be_counted(self):
        """max_kv_len is the caller's word; the parts of what is really there must fit their bits."""
        understated = problem(128, [2048], total_kv=5_000_000)
        split = hopper.split_for(understated, HopperForwardConfig(), 132)
        assert not split or -(-5_000_000 // split) < 2**11

    def test_windows_are_never_cut(self):
        assert hopper.split_for(problem(128, [32768], window_right=0), self.config, 132) == 0

    @given(st.lists(st.integers(0, 50_000), min_size=1, max_size=20), st.integers(1, 600), st.integers(1, 8))
    def test_parts_are_few(self, kv_lens, q_len, heads):
        """What parts cost in memory is bounded, whatever the lengths."""
        asked = problem(q_len, kv_lens, heads)
        split = hopper.split_for(asked, self.config, 132)
        if split:
            assert split >= hopper.LEAST_SPLIT // 2
            blocks = -(-q_len // self.config.block_q) * heads
            assert sum(-(-n // split) * blocks for n in kv_lens if n > split) <= 4 * 132 + 4 * blocks * len(kv_lens)


@settings(max_examples=40)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300)), min_size=1, max_size=8),
    split=st.sampled_from([64, 100]),
    uniform=st.booleans(),
    by_cost=st.booleans(),
)
def test_tables_cut_long_sequences(device, pairs, split, uniform, by_cost):
    """Every block meets every key once; a head's blocks stand together, as the kernel's order of tiles needs."""
    rows, columns = [70 if uniform else row for row, _ in pairs], [column for _, column in pairs]
    owner = Lengths(None, 70, 70 * len(rows), 70) if uniform else side(rows, device)
    items = tables.build_items(
        owner, side(columns, device), len(rows), 64, before=-1, after=-1, by_cost=by_cost, split=split
    )
    work, total, counter = items.counts.tolist()
    listed = [(b, code & ((1 << PART_SHIFT) - 1), code >> PART_SHIFT) for b, code in items.pairs[:total].tolist()]
    expected = {
        (batch, block, part)
        for batch, (row, column) in enumerate(zip(rows, columns, strict=True))
        for block in range(-(-row // 64))
        for part in range(max(-(-column // split), 1))
    }
    assert (counter, items.split) == (0, split) and total == len(expected) <= items.max_items
    assert set(listed) == expected and len(listed) == len(expected)
    costs = [min(split, columns[batch] - part * split) for batch, _, part in listed]
    if by_cost:
        assert costs == sorted(costs, reverse=True) and work == sum(cost > 0 for cost in costs)
    for place, (batch, block, part) in enumerate(listed[:work]):
        first = place - block
        assert listed[first] == (batch, 0, part)
    check_order(listed[:work], [-(-row // 64) for row in rows], device)


def check_order(listed: list[tuple[int, int, int]], blocks: list[int], device: str) -> None:
    """The kernel's order of tiles does each once, a head's blocks after one another."""
    heads = 3
    tiles = torch.arange(len(listed) * heads, dtype=torch.int32, device=device)
    if not len(tiles):
        return
    per_item = lambda values: torch.tensor(values, dtype=torch.int32, device=device).repeat_interleave(heads)  # noqa: E731
    block, count = per_item([b for _, b, _ in listed]), per_item([blocks[batch] for batch, _, _ in listed])
    found = [torch.empty_like(tiles) for _ in range(3)]
    _order[(len(tiles),)](tiles, block, count, *found, heads)
    head, chosen, named = (values.tolist() for values in found)
    assert sorted(named) == list(range(len(tiles)))
    for tile in range(len(tiles)):
        item, of_head = divmod(named[tile], heads)
        assert (of_head, listed[item][1]) == (head[tile], chosen[tile])
        assert chosen[tile] == 0 or (named[tile - 1], head[tile - 1]) == (named[tile] - heads, head[tile])


@triton.jit
def _order(tiles, blocks, counts, heads_found, blocks_found, named, heads):
    at = tl.program_id(0)
    head, block, tile = primitives.side_by_side(tl.load(tiles + at), tl.load(blocks + at), heads, tl.load(counts + at))
    tl.store(heads_found + at, head)
    tl.store(blocks_found + at, block)
    tl.store(named + at, tile)


@settings(max_examples=40)
@given(
    columns=st.integers(1, 300),
    tail=st.sampled_from([0, 16, 32]),
    scale=st.sampled_from([0.0, 1e-46, 0.125, 3.0]),
    peel=st.booleans(),
    guard=st.booleans(),
)
def test_the_online_softmax_is_the_softmax(device, columns, tail, scale, peel, guard):
    """Short rest, last block, full blocks, as the kernel takes them; a scale of 0 weighs all keys alike."""
    rows, dim, block = 16, 16, 64
    generator = torch.Generator().manual_seed(columns)
    scores, values = torch.randn(rows, columns, generator=generator), torch.randn(columns, dim, generator=generator)
    out, lse = torch.full((rows, dim), torch.nan, device=device), torch.full((rows,), torch.nan, device=device)
    passed = hopper.score_scale(problem(1, [columns], scale=scale))
    _walk[(1,)](
        scores.to(device), values.to(device), out, lse, columns, passed, ROWS=rows, BLOCK=block, TAIL=tail, DIM=dim,
        PEEL=peel, GUARD=guard,
    )  # fmt: skip
    scaled = (scores * scale).double()
    torch.testing.assert_close(out.cpu().double(), scaled.softmax(-1) @ values.double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), scaled.logsumexp(-1), rtol=1e-5, atol=1e-5)


@triton.jit
def _walk(
    scores_at, values_at, out_at, lse_at, columns, score_scale, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, DIM: tl.constexpr, PEEL: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """The forward's order of blocks over keys that are there already; what is behind them reads 0, as TMA gives."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, DIM), dtype=tl.float32)
    short, blocks = hopper._blocks_of(0, columns, BLOCK, TAIL)
    if TAIL > 0 and short > 0:
        at = columns - short + tl.arange(0, TAIL)
        scores = tl.load(scores_at + rows[:, None] * columns + at[None, :], mask=at[None, :] < columns, other=0.0)
        values = tl.load(values_at + at[:, None] * DIM + dims[None, :], mask=at[:, None] < columns, other=0.0)
        scores = tl.where((tl.arange(0, TAIL) < short)[None, :], scores, float("-inf"))
        p, rescale, row_max, row_sum = hopper._softmax(scores, row_max, row_sum, score_scale, False)
        acc = acc * rescale[:, None] + tl.dot(p, values, input_precision="ieee")
    for step in range(blocks):
        start = hopper._place_of(step, blocks, PEEL) * BLOCK
        at = start + tl.arange(0, BLOCK)
        scores = tl.load(scores_at + rows[:, None] * columns + at[None, :], mask=at[None, :] < columns, other=0.0)
        values = tl.load(values_at + at[:, None] * DIM + dims[None, :], mask=at[:, None] < columns, other=0.0)
        if step == 0 or not PEEL:
            scores = hopper._up_to(scores, start, columns - short, BLOCK)
        p, rescale, row_max, row_sum = hopper._softmax(scores, row_max, row_sum, score_scale, GUARD)
        acc = acc * rescale[:, None] + tl.dot(p, values, input_precision="ieee")
    acc, row_lse = hopper._normalise(acc, row_max, row_sum, False)
    tl.store(out_at + rows[:, None] * DIM + dims[None, :], acc)
    tl.store(lse_at + rows, row_lse)


@settings(max_examples=25)
@given(
    kv_lens=st.lists(st.integers(0, 400), min_size=1, max_size=8),
    q_len=st.integers(1, 40),
    split=st.sampled_from([64, 128]),
)
def test_merged_parts_are_the_whole(device, kv_lens, q_len, split):
    """Each part's own softmax, kept where the kernel keeps it, joins to the softmax over all keys."""
    heads, dim = 2, 64
    generator = torch.Generator().manual_seed(0)
    asked = problem(q_len, kv_lens, heads)
    offsets = torch.tensor(np.concatenate([[0], np.cumsum(kv_lens)]), dtype=torch.int32)
    scores = 4 * torch.randn(heads, q_len, max(sum(kv_lens), 1), generator=generator)
    values = torch.randn(heads, max(sum(kv_lens), 1), dim, generator=generator)
    partial_out, partial_lse = merge.partials(asked, split, 16, torch.zeros(1, dtype=torch.bfloat16, device=device))
    partial_out.fill_(torch.nan), partial_lse.fill_(torch.nan)
    rows = partial_lse.shape[1] // heads
    halves = partial_out.view(-1, heads, 2, rows, dim)
    expected = torch.full((len(kv_lens) * q_len, heads, dim), 7.0)
    expected_lse = torch.full((heads, len(kv_lens) * q_len), 7.0)
    taken = set()
    for batch, kv_len in enumerate(kv_lens):
        if kv_len <= split:
            continue
        start = int(offsets[batch])
        at = slice(batch * q_len, (batch + 1) * q_len)
        own = scores[:, :, start : start + kv_len]
        expected[at] = (own.softmax(-1) @ values[:, start : start + kv_len]).transpose(0, 1)
        expected_lse[:, at] = own.logsumexp(-1)
        for part in range(-(-kv_len // split)):
            first, last = start + part * split, start + min((part + 1) * split, kv_len)
            place = first // split * 2 + ((part + 1) * split >= kv_len)
            assert place not in taken
            taken.add(place)
            piece = scores[:, :, first:last]
            out = piece.softmax(-1) @ values[:, first:last]
            high = out.to(torch.bfloat16)
            halves[place, :, 0, :q_len] = high.to(device)
            halves[place, :, 1, :q_len] = (out - high.float()).to(torch.bfloat16).to(device)
            partial_lse.view(-1, heads, rows)[place, :, :q_len] = piece.logsumexp(-1).to(device)
    out = torch.full_like(expected, 7.0).to(device)
    lse = torch.full_like(expected_lse, 7.0).to(device)
    run = launch.Run("static", tables.Items(offsets, offsets, split))
    merge.merge(out, lse, partial_out, partial_lse, None, offsets.to(device), asked, run)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-5, atol=1e-5)


ROWS_TO_SUM_UP = {
    "q_lens": st.lists(st.integers(0, 150), min_size=1, max_size=7),
    "keyless": st.integers(0, 127),
    "broadcast": st.booleans(),
    "gradient": st.booleans(),
}
"""``keyless``: a bit a sequence, of those without keys, whose statistics the backward does not look for."""
KEYS = (1, 64, 65, 300)


class Rows:
    """Rows of sequences with what their statistics are made of, some of which see nothing."""

    heads, dim = 2, 64

    def __init__(self, q_lens, keyless, broadcast, gradient, device, scale=None):
        batch = len(q_lens)
        self.lens = [q_lens[0]] * batch if broadcast else q_lens
        total = sum(self.lens)
        self.problem = problem(
            self.lens[0] if broadcast else 0, [1] * batch, self.heads, broadcast_q=broadcast, total_q=total,
            max_q_len=max(self.lens), **({} if scale is None else {"scale": scale}),
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        out, grad = (torch.randn(total, self.heads, self.dim, generator=generator) for _ in range(2))
        self.lse, grad_lse = (torch.randn(self.heads, total, generator=generator) for _ in range(2))
        self.blind = torch.rand(self.heads, total, generator=generator) < 0.2
        self.lse[self.blind], grad_lse[self.blind] = -torch.inf, torch.nan
        self.sums, self.taken_off = (out * grad).sum(-1).T, grad_lse if gradient else torch.zeros_like(grad_lse)
        self.kv_lens = [0 if keyless >> sequence & 1 else KEYS[sequence % len(KEYS)] for sequence in range(batch)]
        offsets, kv_offsets = (
            torch.tensor(np.concatenate([[0], np.cumsum(of)]), dtype=torch.int32, device=device)
            for of in (self.lens, self.kv_lens)
        )
        self.statistics = statistics.RowStatistics(
            grad.to(device), grad_lse.to(device) if gradient else None, out.to(device), self.lse.to(device), kv_offsets,
            None if broadcast else offsets, self.problem, launch.Run("static", tables.Items(offsets, offsets)),
        )  # fmt: skip


@settings(max_examples=30)
@given(**ROWS_TO_SUM_UP, pad=st.sampled_from([64, 128, 256]), short=st.sampled_from([0, 64]))
def test_statistics_are_padded_so_that_no_row_needs_a_mask(device, q_lens, keyless, broadcast, gradient, pad, short):
    """Each row's lse and delta where the backward looks for them, and what weighs nothing behind them; of sequences of
    few keys, without the sum."""
    rows, block = Rows(q_lens, keyless, broadcast, gradient, device), 64
    stats = rows.statistics.numbers(block, pad, short)
    expected = torch.stack([torch.full_like(stats[0].cpu(), torch.inf), torch.zeros_like(stats[0].cpu())])
    for sequence, length in enumerate(rows.lens):
        start = sum(rows.lens[:sequence])
        at = sequence * -(-rows.lens[0] // pad) * pad if broadcast else (start // block + sequence) * block
        own = slice(start, start + length)
        blind = rows.blind[:, own]
        assert (expected[0, :, at : at + length] == torch.inf).all(), "two sequences share a place"
        expected[0, :, at : at + length] = torch.where(blind, torch.inf, rows.lse[:, own] / np.log(2))
        delta = rows.sums[:, own] * (rows.kv_lens[sequence] > short) - rows.taken_off[:, own]
        expected[1, :, at : at + length] = torch.where(blind, 0.0, delta)
        if not rows.kv_lens[sequence]:
            behind = (sequence + 1) * -(-rows.lens[0] // pad) * pad if broadcast else (sequence + 1) * block
            if not broadcast:
                behind += (start + length) // block * block
            behind = expected.shape[2] if sequence + 1 == len(rows.lens) else behind
            expected[:, :, at:behind] = stats[:, :, at:behind].cpu()  # whatever was there
    torch.testing.assert_close(stats.cpu(), expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@settings(max_examples=30)
@given(**ROWS_TO_SUM_UP, scale=st.sampled_from([0.0, 1e-46, 0.125, 3.0]), takers=st.sampled_from([16, 64]))
def test_a_product_takes_the_statistics_as_they_are(device, q_lens, keyless, broadcast, gradient, scale, takers):
    """Columns times takers give −lse / scale and −delta, whose numbers a launch of its own gives."""
    rows, block = Rows(q_lens, keyless, broadcast, gradient, device, scale), 64
    with patch.object(torch, "empty", torch.zeros):  # what neither launch writes is alike then
        lse, delta = rows.statistics.numbers(block, block, short=0).cpu()
        found = rows.statistics.columns(block, takers)
    assert found.stats.shape == (2 * takers + rows.heads * found.rows, statistics.COLUMNS)
    if not found.rows:
        return
    stats = found.stats.cpu().float()
    taken = (stats[2 * takers :].double() @ stats[: 2 * takers].double().T).reshape(*lse.shape, 2, takers)
    assert (taken == taken[..., :1]).all(), "takers differ from row to row"
    nothing = lse == torch.inf
    assert (taken[..., 0, 0][nothing] < -1e38).all() and (taken[..., 1, 0][nothing] == 0).all()
    assert found.scale == (pytest.approx(scale, rel=1e-12) if scale > 1e-30 else pytest.approx(6.9e-31, rel=0.01))
    scores = torch.where(nothing, 0.0, taken[..., 0, 0] * found.scale * launch.LOG2_E)
    torch.testing.assert_close(scores, -torch.where(nothing, 0.0, lse).double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(taken[..., 1, 0], -delta.double(), rtol=1e-6, atol=1e-6)


def test_more_rows_than_a_descriptor_counts_are_refused():
    """Before anything is allocated: 2^25 one-row sequences, each padded to 64, of one head are 2^31 rows."""
    asked = problem(1, [1] * 4, 1, total_q=4)
    many = dataclasses.replace(asked, batch=2**25, total_q=2**25, broadcast_q=True, q_len=1)
    with pytest.raises(ValueError, match=r"2,147,483,648 query rows .* split the batch, or pass impl='triton'"):
        statistics.RowStatistics(*(None,) * 6, many, launch.Run("static", None)).columns(64, 64)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
