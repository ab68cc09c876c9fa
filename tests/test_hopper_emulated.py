"""The kernels for sm_90 run role by role on the CPU: the same results as eager, in whatever order the roles take turns.

What a GPU is asked in `test_hopper_forward` and `test_hopper_backward`, of small shapes and without one.
"""

from __future__ import annotations

import dataclasses
import functools
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from shapes import CASES, HALF, INTERPRETED, Case, poisoned  # noqa: E402
from tolerance import Results, assert_results_close  # noqa: E402

from jfa import attention, reference, validation  # noqa: E402
from jfa.config import HopperBackwardConfig, HopperResidentConfig, hopper_forward_config  # noqa: E402
from jfa.impl import choice  # noqa: E402
from jfa.impl.triton import launch  # noqa: E402
from jfa.schedule import SCHEDULES  # noqa: E402
from jfa.validation import Problem  # noqa: E402
from jfa.workloads import Inputs  # noqa: E402

if not choice.has_tlx():
    pytest.skip("TLX comes with fbtriton (x86-64)", allow_module_level=True)
if not INTERPRETED:
    pytest.skip("a GPU is here; TRITON_INTERPRET=1 emulates", allow_module_level=True)

from jfa.impl.hopper import backward as hopper_backward  # noqa: E402
from jfa.impl.hopper import forward as hopper_forward  # noqa: E402
from jfa.impl.hopper import resident as hopper_resident  # noqa: E402
from profiling.emulator import emulated  # noqa: E402

BF16, FP16 = torch.bfloat16, torch.float16
# Every case in one half precision, those whose dtype matters in both.
NAMES_AND_DTYPES = [(name, dtype) for name in CASES for dtype in ([BF16, FP16] if name in HALF else [BF16])]
# Rests on both sides of a tail and of a block behind full blocks; tiles of which one warpgroup has no rows.
RESTS = Case(q_lens=(1, 64, 65, 129, 200), kv_lens=(257, 64, 129, 319, 320), heads=1, heads_kv=1, head_dim=128)
KV_RESTS = (0, 1, 63, 64, 65, 0, 130, 5)


@functools.cache
def given(case: Case, dtype: torch.dtype) -> tuple[Inputs, Problem]:
    """A case's tensors; tests only read them."""
    inputs = case.inputs("cpu", dtype)
    offsets = (inputs.kv_offsets, inputs.q_offsets)
    tensors = (inputs.q, inputs.k, inputs.v)
    return inputs, validation.validate(*tensors, *offsets, None, None, None, case.causal, case.window)


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


def forward(case, seed=0, *, dtype=BF16, schedule="balanced-dynamic", split=0, sms=2, **changes) -> Results:
    """Run the forward, and compare it."""
    inputs, problem = given(case, dtype)
    config = dataclasses.replace(hopper_forward_config(case.head_dim), **changes)
    offsets = (inputs.kv_offsets, inputs.q_offsets)
    items = attention.forward_items(*offsets, problem, config.block_q, schedule, split)
    run = launch.Run(schedule, items)
    with poisoned(), few_ctas(sms), emulated(hopper_forward, "jfa_forward_hopper", seed=seed) as kernel:
        out, lse = hopper_forward.forward(inputs.q, inputs.k, inputs.v, *offsets, problem, config, run)
    assert kernel.launches == (problem.total_q > 0)
    if problem.broadcast_q:
        out = out.view(problem.batch, problem.q_len, problem.heads, problem.head_dim)
    assert_results_close(Results(out, lse), inputs, **case.bounds)
    return Results(out, lse)


def gradients(case, seed, dtype, schedule, sms, module, name, config) -> Results:
    """Run a backward on what float32 gives forward, and compare it."""
    inputs, problem = given(case, dtype)
    out, lse = forward_results(case, dtype)
    rows = out.reshape(problem.total_q, problem.heads, problem.head_dim)
    offsets = (inputs.kv_offsets, inputs.q_offsets)
    run = launch.Run(schedule, attention.backward_items(*offsets, problem, config.block_kv, schedule))
    tensors = (inputs.grad_out.reshape(rows.shape), None, inputs.q, inputs.k, inputs.v, rows, lse)
    with poisoned(), few_ctas(sms), emulated(module, name, seed=seed) as kernel:
        found = module.backward(*tensors, *offsets, problem, config, run)
    assert kernel.launches
    results = Results(out, lse, *found)
    assert_results_close(results, inputs, **case.bounds)
    return results


def shared(case, seed=0, *, dtype=BF16, schedule="balanced-dynamic", sms=2, **changes) -> Results:
    """The backward that adds dQ up in memory."""
    config = dataclasses.replace(HopperBackwardConfig(), **changes)
    return gradients(case, seed, dtype, schedule, sms, hopper_backward, "jfa_backward_hopper", config)


def resident(case, seed=0, *, dtype=BF16, schedule="balanced", sms=2, **changes) -> Results:
    """The backward of a shared Q that keeps dQ in registers."""
    _, problem = given(case, dtype)
    assert hopper_resident.serves(problem)
    config = dataclasses.replace(HopperResidentConfig(), **changes)
    return gradients(case, seed, dtype, schedule, sms, hopper_resident, "jfa_backward_resident", config)


class TestForward:
    @pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES, ids=str)
    def test_every_shape(self, name, dtype):
        forward(CASES[name], seed=len(name), dtype=dtype)

    @pytest.mark.parametrize(
        "switch",
        [
            {"pingpong": True},
            {"pingpong": True, "peel": False},
            {"peel": False, "tail": 0},
            {"early_fetch": False},
            {"tail": 0},
        ],
        ids=str,
    )
    @pytest.mark.parametrize(
        "case", [RESTS, CASES["causal-short-kv"], CASES["window-both"]], ids=["rests", "causal", "window"]
    )
    def test_every_switch(self, case, switch):
        for seed in range(2):
            forward(case, seed, **switch)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_schedules_agree_bit_for_bit(self, schedule):
        for case in (RESTS, CASES["broadcast"], CASES["empty-both"]):
            found, expected = forward(case, 1, schedule=schedule), forward(case, 2, schedule="grid")
            assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)

    @pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
    @pytest.mark.parametrize("split", [128, 256])
    @pytest.mark.parametrize(
        "case",
        [
            Case(q_len=130, kv_lens=(16, 0, 600, 128, 257), heads=2, heads_kv=1, head_dim=128),
            Case(q_lens=(70, 0, 200, 5), kv_lens=(300, 130, 520, 0), heads=1, heads_kv=1, head_dim=64),
        ],
        ids=["broadcast", "jagged"],
    )
    def test_long_sequences_are_cut_and_joined(self, case, split, dtype):
        assert max(case.kv_lens) > 2 * split, "nothing is cut in three: the test would show little"
        forward(case, split, dtype=dtype, split=split)


class TestShared:
    @pytest.mark.parametrize(("name", "dtype"), NAMES_AND_DTYPES, ids=str)
    def test_every_shape(self, name, dtype):
        shared(CASES[name], seed=len(name), dtype=dtype)

    @pytest.mark.parametrize(
        "changes",
        [
            {"prefetch": False},
            {"stages": 1},
            {"stages": 3},
            {"dq_slices": 2},
            {"dq_buffers": 2},
            {"dq_slices": 2, "dq_buffers": 2},
            {"dq_slices": 2, "dq_buffers": 3},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_every_configuration(self, head_dim, changes):
        if changes == {"stages": 3} and head_dim == 128:
            changes = {"stages": 3, "dq_slices": 2}
        case = Case(q_lens=(65, 1, 200), kv_lens=(129, 70, 130), heads=2, heads_kv=1, head_dim=head_dim, causal=True)
        for seed in range(2):
            shared(case, seed, **changes)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_every_schedule(self, schedule):
        shared(RESTS, 3, schedule=schedule)


class TestResident:
    """One CTA, a pair, a pair in two passes."""

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("rows", [1, 64, 128, 129, 200, 256, 300])
    def test_every_number_of_rows(self, rows, head_dim):
        case = Case(q_len=rows, kv_lens=KV_RESTS, heads=2, heads_kv=2, head_dim=head_dim, unused=70)
        resident(case, seed=rows, dtype=FP16 if rows % 2 else BF16)

    @pytest.mark.parametrize("rows", [100, 200])
    def test_many_orders(self, rows):
        for seed in range(6):
            resident(Case(q_len=rows, kv_lens=KV_RESTS, heads=2, heads_kv=2), seed, sms=2 + seed)

    @pytest.mark.parametrize("rows", [100, 200])
    @pytest.mark.parametrize("stages", [(1, 1), (1, 2), (2, 1)], ids=str)
    def test_few_stages(self, stages, rows):
        case = Case(q_len=rows, kv_lens=KV_RESTS, heads=2, heads_kv=2)
        resident(case, rows, k_stages=stages[0], v_stages=stages[1])

    @pytest.mark.parametrize("lengths", [(5,), (0, 0, 3), (200, 0) * 3], ids=str)
    def test_fewer_tiles_than_ctas_and_more(self, lengths):
        resident(Case(q_len=150, kv_lens=lengths, heads=1, heads_kv=1), 1, sms=8)
