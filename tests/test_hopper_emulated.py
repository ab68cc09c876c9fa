"""The kernels for sm_90 run role by role on the CPU: the same results as eager, in whatever order the roles take turns.

What a GPU is asked in `test_hopper_forward` and `test_hopper_backward`, of small shapes and without one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attend import lse_gradients, lse_weights  # noqa: E402
from shapes import CASES, HALF, INTERPRETED, Case, poisoned  # noqa: E402
from tolerance import Results, assert_close_to_reference, assert_results_close  # noqa: E402

from jfa import attention, lanes, reference, validation  # noqa: E402
from jfa.config import HopperBackwardConfig, HopperResidentConfig, hopper_forward_config  # noqa: E402
from jfa.impl import choice  # noqa: E402
from jfa.impl.triton import launch  # noqa: E402
from jfa.instrument import OFF, Recorder  # noqa: E402
from jfa.schedule import SCHEDULES, Items  # noqa: E402
from jfa.validation import Problem  # noqa: E402
from jfa.workloads import Inputs  # noqa: E402

if not choice.has_tlx():
    pytest.skip("TLX comes with fbtriton (x86-64)", allow_module_level=True)
if not INTERPRETED:
    pytest.skip("a GPU is here; TRITON_INTERPRET=1 emulates", allow_module_level=True)

from jfa.impl.hopper import backward as hopper_backward  # noqa: E402
from jfa.impl.hopper import dq as summing  # noqa: E402
from jfa.impl.hopper import forward as hopper_forward  # noqa: E402
from jfa.impl.hopper import resident as hopper_resident  # noqa: E402
from jfa.impl.hopper import rounding  # noqa: E402
from profiling.emulator import emulated  # noqa: E402
from profiling.emulator.memory import Pointer  # noqa: E402

BF16, FP16 = torch.bfloat16, torch.float16
# Every case in one half precision, those whose dtype matters in both where that is cheap.
SHAPES = [(name, [BF16, FP16][len(name) % 2]) for name in CASES]
MORE = [(name, [BF16, FP16][1 - len(name) % 2]) for name in HALF]
# Rests on both sides of a tail and of a block behind full blocks; tiles of which one warpgroup has no rows.
RESTS = Case(q_lens=(1, 64, 65, 129), kv_lens=(257, 64, 129, 319), heads=1, heads_kv=1, head_dim=128)
MASKED = {"causal": CASES["causal-short-kv"], "window": CASES["window-both"]}
KV_RESTS = (0, 1, 63, 64, 65, 0, 130, 5)
SWITCHES = [
    {"pingpong": True},
    {"pingpong": True, "peel": False},
    {"peel": False, "tail": 0},
    {"early_fetch": False},
    {"tail": 0},
]
# Sorted tables keep such tiles behind those with work.
CUT = {
    "broadcast": Case(q_len=40, kv_lens=(16, 0, 600, 128, 257), heads=2, heads_kv=1, head_dim=128),
    "jagged": Case(q_lens=(70, 0, 200, 5), kv_lens=(300, 130, 520, 0), heads=1, heads_kv=1, head_dim=64),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Of torch: blocks are small, and its threads would wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def given(case: Case, dtype: torch.dtype) -> tuple[Inputs, Problem]:
    """A case's tensors, which are only read."""
    inputs = case.inputs("cpu", dtype)
    offsets = (inputs.kv_offsets, inputs.q_offsets)
    tensors = (inputs.q, inputs.k, inputs.v)
    return inputs, validation.validate(*tensors, *offsets, None, None, None, case.causal, case.window)


@functools.cache
def items(case: Case, dtype: torch.dtype, direction: str, block: int, schedule: str, *split: int) -> Items:
    """A launch's table."""
    inputs, problem = given(case, dtype)
    build = getattr(attention, f"{direction}_items")
    return build(inputs.kv_offsets, inputs.q_offsets, problem, block, schedule, *split)


@functools.cache
def forward_results(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse that a backward is given: float32's."""
    inputs, _ = given(case, dtype)
    tensors = (tensor.float() for tensor in (inputs.q, inputs.k, inputs.v))
    out, lse = reference.attention(*tensors, inputs.kv_offsets, inputs.q_offsets, **case.bounds)
    return out.to(dtype), lse


def few_ctas(sms: int):
    """Few, so that each has several tiles: buffers and phases are then used again."""
    return patch.object(launch, "sm_count", lambda device: sms)


def forward(
    case, seed=0, *, dtype=BF16, schedule="balanced-dynamic", split=0, sms=2, recorder=OFF, **changes
) -> Results:
    """Run the forward, and compare it."""
    inputs, problem = given(case, dtype)
    config = dataclasses.replace(hopper_forward_config(case.head_dim), **changes)
    rows = config.block_q * hopper_forward.cluster(problem, config, split)
    run = launch.Run(schedule, items(case, dtype, "forward", rows, schedule, split), recorder)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets)
    with poisoned(), few_ctas(sms), emulated(hopper_forward, "jfa_forward_hopper", seed=seed) as kernel:
        out, lse = hopper_forward.forward(*tensors, problem, config, run)
    assert kernel.launches == (problem.total_q > 0)
    if problem.broadcast_q:
        out = out.view(problem.batch, problem.q_len, problem.heads, problem.head_dim)
    results = Results(out, lse)
    assert_results_close(results, inputs, **case.bounds)
    return results


def gradients(case, seed, dtype, schedule, sms, module, name, config, recorder, through_lse=False) -> Results:
    """Run a backward on what float32 gives forward, and compare it; ``through_lse``: of the output and of lse."""
    inputs, problem = given(case, dtype)
    out, lse = forward_results(case, dtype)
    rows = out.reshape(problem.total_q, problem.heads, problem.head_dim)
    run = launch.Run(schedule, items(case, dtype, "backward", config.block_kv, schedule), recorder)
    grad_lse = torch.where(lse.isfinite(), lse_weights(lse), torch.nan) if through_lse else None
    tensors = (inputs.grad_out.reshape(rows.shape), grad_lse, inputs.q, inputs.k, inputs.v, rows, lse)
    with poisoned(), few_ctas(sms), emulated(module, name, seed=seed) as kernel:
        found = module.backward(*tensors, inputs.kv_offsets, inputs.q_offsets, problem, config, run)
    assert kernel.launches
    results = Results(out, lse, *found)
    if through_lse:
        both = (lse_gradients(reference.attention, inputs, of, **case.bounds) for of in (torch.float64, dtype))
        for three in zip(found, *both, strict=True):
            assert_close_to_reference(*three)
    else:
        assert_results_close(results, inputs, **case.bounds)
    return results


def shared(
    case, seed=0, *, dtype=BF16, schedule="balanced-dynamic", sms=2, recorder=OFF, through_lse=False, **changes
) -> Results:
    """Run the backward that adds dQ up in memory, and compare it."""
    config = dataclasses.replace(HopperBackwardConfig(), **changes)
    kernel = (hopper_backward, "jfa_backward_hopper")
    return gradients(case, seed, dtype, schedule, sms, *kernel, config, recorder, through_lse)


def shared_beside(case, seed=0, **options) -> int:
    """As `shared`, with small sums rounded beside it too; how many were.

    Each CTA must have counted itself, and each tile when its dQ was in the sum: whoever waits for a sequence's tiles
    must find what is there at the end.
    """
    rounded, zeros, add = rounding.rounded_beside, summing.Sum.zeros, Pointer.add
    sums, seen, calls = [], {}, []

    def remembered(*arguments):
        sums.append(zeros(*arguments))
        return sums[-1]

    def added(counter, value):
        before = add(counter, value)
        if sums and counter.storage.data_ptr() == sums[-1].values.data_ptr():
            seen[int(counter.offset)] = sums[-1].values.clone()
        return before

    def when_counted(dq, grad, q_offsets, kv_offsets, block_kv, since, ctas, run):
        rows = q_offsets.diff()
        tiles = ((kv_offsets.diff() + block_kv - 1) // block_kv * (rows > 0))[:, None]
        done = dq.done.view(len(tiles), -1) * (rows > 0)[:, None]
        assert (done == tiles).all() and dq.started.tolist() == [ctas, ctas], "it would wait for ever"
        heads, group = dq.problem.heads_kv, dq.problem.heads // dq.problem.heads_kv
        values = dq.values.view(dq.problem.heads, dq.blocks, -1)
        for place in range(done.numel()):
            batch, head = divmod(place, heads)
            if rows[batch] and tiles[batch]:
                first = int(q_offsets[batch]) // dq.block + batch
                own = (slice(head * group, (head + 1) * group), slice(first, first - (-int(rows[batch]) // dq.block)))
                at = seen[dq.done.storage_offset() + place].view(values.shape)[own]
                assert torch.equal(at, values[own]), "counted before it was there"
        calls.append(dq)
        return rounded(dq, grad, q_offsets, kv_offsets, block_kv, since, ctas, run)

    small = patch.multiple(rounding, LEAST_BYTES=0, LEAST_TILES=0, MOST_SHARE=2, rounded_beside=when_counted)
    with small, patch.object(summing.Sum, "zeros", remembered), patch.object(Pointer, "add", added):
        shared(case, seed, **options)
    return len(calls)


def resident(
    case, seed=0, *, dtype=BF16, schedule="balanced", sms=2, recorder=OFF, through_lse=False, **changes
) -> Results:
    """Run the backward that keeps dQ of a shared Q in registers, and compare it."""
    assert hopper_resident.serves(given(case, dtype)[1])
    config = dataclasses.replace(HopperResidentConfig(), **changes)
    kernel = (hopper_resident, "jfa_backward_resident")
    return gradients(case, seed, dtype, schedule, sms, *kernel, config, recorder, through_lse)


class TestForward:
    @pytest.mark.parametrize(("name", "dtype"), SHAPES + MORE, ids=str)
    def test_every_shape(self, name, dtype):
        forward(CASES[name], seed=len(name), dtype=dtype)

    @pytest.mark.parametrize("switch", SWITCHES, ids=str)
    @pytest.mark.parametrize("case", [RESTS, *MASKED.values()], ids=["rests", *MASKED])
    def test_every_switch(self, case, switch):
        for seed in range(2):
            forward(case, seed, sms=1, **switch)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("case", [RESTS, CASES["broadcast"]], ids=["rests", "broadcast"])
    def test_schedules_agree_bit_for_bit(self, case, schedule):
        found, expected = forward(case, 1, schedule=schedule), in_table_order(case)
        assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)

    @pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
    @pytest.mark.parametrize("split", [128, 256])
    @pytest.mark.parametrize("name", CUT)
    def test_long_sequences_are_cut_and_joined(self, name, split, dtype):
        assert max(CUT[name].kv_lens) > 2 * split, "nothing is cut in three: the test would show little"
        forward(CUT[name], split, dtype=dtype, split=split)


class TestForwardInPairs:
    """Two CTAs that load keys for both."""

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("rows", [129, 192, 193, 256, 400])
    def test_every_number_of_rows(self, rows, head_dim):
        case = pair(q_len=rows, heads=2, heads_kv=1, head_dim=head_dim)
        forward(case, rows, dtype=FP16 if rows % 128 else BF16, sms=4)

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_schedules_agree_bit_for_bit(self, schedule, seed):
        found, alone = forward(PAIR, seed, schedule=schedule, sms=4), forward(PAIR, multicast=False)
        assert torch.equal(found.out, alone.out) and torch.equal(found.lse, alone.lse)

    @pytest.mark.parametrize("switch", [*SWITCHES, {"stages": 1}, {"stages": 3}], ids=str)
    def test_every_switch(self, switch):
        for seed in range(2):
            forward(pair(head_dim=64) if "stages" in switch else PAIR, seed, **switch)

    @pytest.mark.parametrize("lengths", [(5,), (0, 0, 3), (200, 0) * 3, (0, 0)], ids=str)
    @pytest.mark.parametrize("schedule", ["balanced-dynamic", "dynamic", "grid"])
    def test_few_tiles(self, schedule, lengths):
        """Pairs without any; on demand from a table in which some are empty."""
        forward(pair(kv_lens=lengths), 1, schedule=schedule, sms=6)

    def test_which_problems(self):
        config = hopper_forward_config(128)

        def ctas(case: Case, split: int = 0, **changes: bool) -> int:
            return hopper_forward.cluster(given(case, BF16)[1], dataclasses.replace(config, **changes), split)

        assert [ctas(pair(q_len=rows)) for rows in (1, 128, 129, 256, 257, 384, 385, 512)] == [1, 1, 2, 2, 1, 1, 2, 2]
        assert ctas(PAIR, multicast=False) == ctas(PAIR, split=128) == 1
        assert ctas(pair(causal=True)) == ctas(pair(window=(9, -1))) == 1
        assert ctas(Case(q_lens=(200, 200), kv_lens=(5, 7))) == 1, "queries of their own may differ in length"


def pair(**changes: Any) -> Case:
    return dataclasses.replace(Case(q_len=200, kv_lens=KV_RESTS, heads=2, heads_kv=2, head_dim=128), **changes)


PAIR = pair()


@functools.cache
def in_table_order(case: Case) -> Results:
    return forward(case, 2, schedule="static", sms=1)


class TestShared:
    @pytest.mark.parametrize(("name", "dtype"), SHAPES, ids=str)
    def test_every_shape(self, name, dtype):
        shared(CASES[name], seed=len(name), dtype=dtype)

    @pytest.mark.parametrize(
        "changes",
        [
            {"prefetch": False},
            {"stages": 1},
            {"stages": 3},
            {"dq_slices": 2},
            {"peel": True},
            {"stages": 2, "dq_buffers": 2},
            {"dq_slices": 2, "dq_buffers": 2},
            {"stages": 2, "dq_slices": 2, "dq_buffers": 3},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_every_configuration(self, head_dim, changes):
        lens = {"q_lens": (65, 1, 200), "kv_lens": (129, 70, 130)}
        case = Case(**lens, heads=2, heads_kv=1, head_dim=head_dim, causal=head_dim == 64)
        shared(case, len(changes), sms=1, **changes)

    @pytest.mark.parametrize(("name", "dtype"), SHAPES, ids=str)
    def test_every_shape_rounded_beside(self, name, dtype):
        case = CASES[name]
        own = case.q_lens is not None and len(case.kv_lens) > 0
        plain = own and not case.causal and case.window is None and sum(case.kv_lens) + case.unused > 0
        assert shared_beside(case, seed=len(name), dtype=dtype, sms=2 + len(name) % 2) == plain

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("case", [RESTS, CASES["empty-q"], CASES["empty-both"]], ids=["rests", "q", "both"])
    def test_every_schedule_rounded_beside(self, case, schedule):
        assert shared_beside(case, 2, schedule=schedule, sms=3) == (schedule != "grid")

    @pytest.mark.parametrize("changes", [{"prefetch": False}, {"dq_slices": 2, "dq_buffers": 2}], ids=str)
    @pytest.mark.parametrize("heads_kv", [1, 2])
    def test_groups_and_slices_rounded_beside(self, heads_kv, changes):
        case = Case(q_lens=(65, 0, 200, 30), kv_lens=(129, 70, 0, 260), heads=4, heads_kv=heads_kv, head_dim=64)
        assert shared_beside(case, len(changes), sms=2, **changes)

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("changes", [{"stages": 2, "dq_buffers": 2}, {"dq_slices": 2, "dq_buffers": 2}], ids=str)
    def test_buffers_of_dq_hold_the_last_tiles_dk(self, changes, seed):
        """One step a tile, so that dQ is staged soon."""
        shared(Case(q_lens=(40,) * 4, kv_lens=(129,) * 4), seed, sms=1, **changes)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_every_schedule(self, schedule):
        shared(RESTS, 3, schedule=schedule)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize(
        "case",
        [CASES["empty-q"], CASES["empty-both"], Case(q_lens=(10, 70), kv_lens=(300, 400), window=(20, 0))],
        ids=["empty", "both", "window"],
    )
    def test_keys_without_queries_under_every_schedule(self, case, schedule):
        shared(case, 1, schedule=schedule)

    @pytest.mark.parametrize("prefetch", [False, True])
    @pytest.mark.parametrize("name", ["causal-short-kv", "window-both", "window-causal", "tails", "broadcast-causal"])
    def test_blocks_without_a_mask_in_a_loop_of_their_own(self, name, prefetch):
        shared(CASES[name], 1, peel=True, prefetch=prefetch)


class TestResident:
    """One CTA, a pair, a pair in two passes."""

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("rows", [1, 64, 128, 129, 200, 256, 300])
    def test_every_number_of_rows(self, rows, head_dim):
        case = Case(q_len=rows, kv_lens=KV_RESTS, heads=2, heads_kv=2, head_dim=head_dim, unused=70)
        resident(case, rows, dtype=FP16 if rows % 128 else BF16)

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("rows", [100, 200])
    def test_many_orders(self, rows, seed):
        """Shares of tiles that end within a head and a sequence, by the number of CTAs."""
        resident(Case(q_len=rows, kv_lens=KV_RESTS, heads=2, heads_kv=2), seed, sms=2 * seed + 2)

    @pytest.mark.parametrize("rows", [100, 200])
    @pytest.mark.parametrize("stages", [(1, 1), (1, 2), (2, 1)], ids=str)
    def test_few_stages(self, stages, rows):
        case = Case(q_len=rows, kv_lens=KV_RESTS, heads=2, heads_kv=2)
        resident(case, rows, k_stages=stages[0], v_stages=stages[1])

    @pytest.mark.parametrize("lengths", [(5,), (0, 0, 3), (200, 0) * 3], ids=str)
    def test_few_tiles(self, lengths):
        resident(Case(q_len=150, kv_lens=lengths, heads=1, heads_kv=1), 1, sms=4)

    @pytest.mark.parametrize(("rows", "orders"), [(128, 4), (200, 4), (300, 2)])
    def test_gradients_repeat_bit_for_bit(self, rows, orders):
        """Whatever the order in which CTAs get on: each leaves its part of dQ in a place of its own."""
        case = Case(q_len=rows, kv_lens=(300, 64, 500, 129, 700, 5, 250), heads=2, heads_kv=2, head_dim=128)
        first, *others = [resident(case, seed, sms=10, dtype=torch.float16) for seed in range(orders)]
        for other in others:
            assert all(torch.equal(getattr(first, name), getattr(other, name)) for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize(
    ("backward", "case"),
    [
        (resident, Case(q_len=70, kv_lens=KV_RESTS, heads=2, heads_kv=2)),
        (resident, Case(q_len=200, kv_lens=(1, 64, 65), heads=1, heads_kv=1)),
        (shared, Case(q_lens=(70, 5), kv_lens=(130, 20))),
    ],
    ids=["one", "pair", "shared"],
)
def test_gradients_through_lse(backward, case):
    backward(case, 1, through_lse=True)


@pytest.mark.slow
def test_no_batch_hangs():
    """200 batches of extreme skew, empty sides among them, each under a schedule and an order of its own."""
    random = np.random.default_rng(1)
    lengths, odds = [0, 1, 63, 64, 65, 128, 129, 300], [0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05]
    for index in range(200):
        count = int(random.integers(1, 9))
        kv_lens, q_lens = (tuple(int(x) for x in random.choice(lengths, count, p=odds)) for _ in range(2))
        rows = {"q_len": int(random.choice([1, 100, 128, 200, 256]))} if index % 2 else {"q_lens": q_lens}
        causal, heads_kv = index % 3 == 0, 1 + index % 4 // 2
        case = Case(kv_lens=kv_lens, heads=2, heads_kv=heads_kv, head_dim=64, causal=causal, **rows)
        schedule, sms = SCHEDULES[int(random.integers(len(SCHEDULES)))], int(random.integers(1, 4))
        forward(case, index, schedule=schedule, sms=2 * sms)
        shared(case, index, schedule=schedule, sms=sms)
        if case.broadcast and not causal and heads_kv == 2:
            resident(case, index, sms=2 * sms)


RECORDED = {
    "forward": (forward, hopper_forward.ROLES, RESTS),
    "shared": (shared, hopper_backward.ROLES, RESTS),
    "pair": (forward, hopper_forward.ROLES, PAIR),
    "resident": (resident, hopper_resident.ROLES, Case(q_len=100, kv_lens=KV_RESTS, heads=2, heads_kv=2, head_dim=128)),
}


@pytest.mark.parametrize("level", ["cta", "tile", "wait"])
@pytest.mark.parametrize("name", RECORDED)
def test_what_roles_record(name, level):
    """Every lane, in order, with a tile's span for each compute role; at level wait what each role waited for."""
    run, roles, case = RECORDED[name]
    recorder = Recorder.allocate(level, 2 * len(roles), 4096, "cpu")
    run(case, 3, recorder=recorder)
    found = recorder.read()
    assert len(found.lane) == 2 * len(roles) and found.lost == 0 == found.clock.order_violations
    tiles, waits = found.kind == lanes.KINDS["tile"], found.kind >= min(lanes.WAITS.values())
    assert tiles.any() == (level != "cta") and waits.any() == (level == "wait")
    role = found.lane[found.event_lane] % len(roles)
    per_role = [sorted(found.tile[tiles & (role == place)].tolist()) for place in range(1, len(roles))]
    assert all(own == per_role[0] for own in per_role)
    times = 2 if name == "pair" else 1  # each CTA its block
    assert all(per_role[0].count(tile) == times for tile in per_role[0])
    assert not (tiles & (role == 0)).any()
    barriers = {number: barrier for barrier, number in lanes.WAITS.items()}
    for place, who in enumerate(roles):
        own = {barriers[kind] for kind in found.kind[waits & (role == place)].tolist()}
        if level == "wait":
            empty = {barrier.endswith("_empty") for barrier in own}
            assert True in empty if who == "load" else "item_full" in own, (who, own)
    assert (found.event_end_ns >= found.event_start_ns).all()
    assert (found.event_end_ns <= found.end_ns[found.event_lane]).all()
