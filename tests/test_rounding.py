"""Rounding of dQ's sum, by a pass and beside a backward: every row once, those without keys zero."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from shapes import DEVICES  # noqa: E402

from jfa import attention, workloads  # noqa: E402
from jfa.config import HopperBackwardConfig  # noqa: E402
from jfa.impl import choice  # noqa: E402
from jfa.impl.triton import launch  # noqa: E402
from jfa.schedule import Items  # noqa: E402
from jfa.validation import Problem  # noqa: E402
from profiling.ablation import plan  # noqa: E402

if not choice.has_tlx():
    pytest.skip("TLX comes with fbtriton (x86-64)", allow_module_level=True)

from jfa.impl.hopper import dq as summing  # noqa: E402
from jfa.impl.hopper import rounding  # noqa: E402

BLOCK_KV = 128
LENGTHS = st.lists(st.tuples(st.integers(0, 150), st.integers(0, 300)), min_size=1, max_size=4)


class Filled:
    """A sum of random values, as a backward leaves it, of sequences of (queries, keys)."""

    heads_kv, dim = 2, 64

    def __init__(self, lengths, group, parts, unused, device, schedule="balanced", longest=None):
        self.q_lens, self.kv_lens = (list(of) for of in zip(*lengths, strict=True))
        heads, total_q, total_kv = self.heads_kv * group, sum(self.q_lens) + unused, sum(self.kv_lens)
        longest = max(self.kv_lens) if longest is None else longest
        sizes = (heads, self.heads_kv, self.dim, total_q, 0, total_kv, max(self.q_lens), longest)
        self.problem = Problem(False, len(lengths), *sizes, 0.5, -1, -1)
        self.q_offsets, self.kv_offsets = (
            torch.tensor(np.concatenate([[0], np.cumsum(of)]), dtype=torch.int32, device=device)
            for of in (self.q_lens, self.kv_lens)
        )
        items = attention.backward_items(self.kv_offsets, self.q_offsets, self.problem, BLOCK_KV, schedule)
        self.run = launch.Run(schedule, items)
        self.dq = summing.Sum.zeros(self.problem, 64, parts, torch.device(device))
        self.shape, self.device = (total_q, heads, self.dim), torch.device(device)
        generator = torch.Generator().manual_seed(0)
        self.dq.values.copy_(torch.randn(self.dq.values.shape, generator=generator))
        for at, kv_len in enumerate(self.kv_lens):
            if kv_len == 0:  # nobody adds to it
                block = sum(self.q_lens[:at]) // 64 + at
                blocks = self.dq.values.view(heads, -1, 64 * self.dim)[:, block : block - (-self.q_lens[at] // 64)]
                blocks.zero_()

    def passed(self) -> torch.Tensor:
        return rounding.rounded(self.dq, self.poison(), self.q_offsets, self.run).cpu()

    def poison(self) -> torch.Tensor:
        return torch.full(self.shape, torch.nan, dtype=torch.bfloat16, device=self.device)

    def beside(self, done=None, ended=0) -> torch.Tensor:
        tiles = -(-torch.tensor(self.kv_lens) // BLOCK_KV).repeat_interleave(self.heads_kv)
        self.dq.done.copy_(tiles if done is None else torch.tensor(done))
        self.dq.started.copy_(torch.tensor([3, ended]))
        grad = self.poison()
        since = launch.mark(self.device)
        offsets = (self.q_offsets, self.kv_offsets)
        return rounding.rounded_beside(self.dq, grad, *offsets, BLOCK_KV, since, 3, self.run).cpu()


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=12, deadline=None)
@given(
    lengths=LENGTHS, group=st.integers(1, 2), parts=st.sampled_from([2, 4]), unused=st.sampled_from([0, 1, 150]),
    schedule=st.sampled_from(["static", "balanced", "balanced-dynamic"]),
)  # fmt: skip
def test_both_round_every_row(device, lengths, group, parts, unused, schedule):
    if not any(kv_len for _, kv_len in lengths):
        lengths = [*lengths, (3, 1)]
    filled = Filled(lengths, group, parts, unused, device, schedule)
    found, expected = filled.beside(), filled.passed()
    behind = filled.shape[0] - unused
    assert torch.equal(found, expected)
    assert not expected[behind:].any() and not expected.isnan().any()
    for at, (_, kv_len) in enumerate(lengths):
        start = sum(filled.q_lens[:at])
        own = expected[start : start + filled.q_lens[at]]
        assert own.any() == bool(kv_len and len(own)), "of no keys comes nothing, of others something"


@pytest.mark.parametrize("device", DEVICES)
def test_values_are_the_scaled_sum_rounded_once(device):
    """In the order in which a warpgroup's threads hold an accumulator of wgmma (PTX ISA, m64nNk16)."""
    filled = Filled([(64, 1)], 1, 2, 0, device)
    filled.dq.values.copy_(torch.arange(filled.dq.values.numel()) / 7)
    found = filled.passed()
    head, part, row, column = 1, 1, 37, 21
    warp, inside = divmod(row, 16)
    low, of_eight = divmod(inside, 8)
    eight, rest = divmod(column, 8)
    quad, one = divmod(rest, 2)
    register = ((((warp * 4 + eight) * 8 + of_eight) * 4 + quad) * 2 + low) * 2 + one
    value = filled.dq.values.view(2, 2, 2, -1)[head, 0, part, register] * 0.5
    assert found[row, head, part * 32 + column] == value.to(torch.bfloat16).cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("schedule", ["static", "balanced"])
@pytest.mark.parametrize("longest", [1, 130])
def test_a_table_too_short_for_its_lengths_ends(device, longest, schedule):
    """Of an understated max_kv_len: when the backward has ended nobody waits, and what has a tile is rounded."""
    lengths = [(70, 500), (64, 300), (10, 40)]
    filled = Filled(lengths, 1, 2, 0, device, schedule, longest)
    listed = filled.run.items.pairs[: int(filled.run.items.counts[0])].cpu()
    assert len(listed) < 4 + 3 + 1
    found, right = filled.beside([0] * 6, ended=3), filled.passed()
    rounded = [
        torch.equal(found[start : start + rows], right[start : start + rows])
        for start, rows in zip((0, 70, 134), filled.q_lens, strict=True)
    ]
    whole = [int((listed[:, 0] == batch).sum()) == blocks for batch, blocks in enumerate((4, 3, 1))]
    assert any(whole) == (longest > 1)
    assert all(one for one, all_there in zip(rounded, whole, strict=True) if all_there)


@pytest.mark.parametrize("device", DEVICES)
def test_a_table_of_other_lengths_ends_and_stays_inside(device):
    """As of a plan whose offsets were changed: blocks that a sequence does not have make heads that are not there."""
    filled = Filled([(64, 128), (64, 384)], 1, 2, 0, device, "static")
    filled.kv_offsets = torch.tensor([0, 384, 512], dtype=torch.int32, device=device)
    filled.kv_lens = [384, 128]
    whole = torch.full((3, *filled.shape), torch.nan, dtype=torch.bfloat16, device=device)
    with patch.object(filled, "poison", lambda: whole[1]):
        filled.beside([0] * 4, ended=3)
    assert whole[0].isnan().all() and whole[2].isnan().all(), "written outside of dQ"


def asked(lengths=1024, batch=64, heads=16, **changes) -> Problem:
    """A problem whose sum is half a gigabyte."""
    kv_lens = np.full(batch, lengths)
    workload = workloads.Workload("asked", heads, heads, 128, kv_lens, kv_lens, broadcast_q=False)
    return dataclasses.replace(plan.problem_of(workload), **changes)


class TestWhichSums:
    def sms(self, problem, schedule="balanced-dynamic", sms=132, items=4096, **changes) -> int:
        config = dataclasses.replace(HopperBackwardConfig(), **changes)
        table = Items(torch.empty((items, 2), dtype=torch.int32), torch.empty(3, dtype=torch.int32))
        with patch.object(launch, "sm_count", lambda device: sms):
            return rounding.sms_beside(launch.Run(schedule, table), problem, config, torch.device("cpu"))

    def test_no_bound_of_the_lengths_leaves_their_mean(self):
        assert self.sms(asked(512, max_kv_len=512 * 64)) == self.sms(asked(512)) == 10

    def test_few_tiles_are_not_fewer_ctas(self):
        assert self.sms(asked(), items=66) == 5 and not self.sms(asked(), items=65)

    def test_not_in_a_graph(self):
        with patch.object(launch, "captured", lambda device: True):
            assert not self.sms(asked())

    def test_the_shorter_the_sequences_the_more_sms(self):
        found = [self.sms(asked(keys)) for keys in (128, 256, 512, 1024, 2048, 4096, 1 << 20)]
        assert found == [0, 16, 10, 5, 2, 1, 1], "128 keys are a small sum"

    def test_few_sms_leave_few(self):
        assert self.sms(asked(512), sms=16) == 2 and self.sms(asked(512), sms=4) == 0

    @pytest.mark.parametrize(
        "changes",
        [
            {"broadcast_q": True, "q_len": 1024},
            {"window_right": 0},
            {"window_left": 5},
            {"batch": 0},
            {"total_kv": 0},
            {"total_q": 9},
        ],
        ids=str,
    )
    def test_no_other_sums(self, changes):
        assert self.sms(asked()) and not self.sms(asked(**changes))

    def test_nor_without_an_order_or_when_switched_off(self):
        assert not self.sms(asked(), schedule="grid") and not self.sms(asked(), round_beside=False)
        assert all(self.sms(asked(), schedule=name) for name in ("static", "balanced", "dynamic", "balanced-dynamic"))
