"""Kernels for sm_90 without one of their stages, emulated: each ends, within its tensors, and leaves out what it says.

That the whole kernels stay right is `test_hopper_emulated`'s.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import test_hopper_emulated as real  # noqa: E402
import triton.language as tl  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from shapes import CASES, Case, poisoned  # noqa: E402

from jfa.config import HopperBackwardConfig, HopperResidentConfig, hopper_forward_config  # noqa: E402
from jfa.impl.hopper import backward, forward, left_out, primitives, resident  # noqa: E402
from jfa.impl.triton import launch  # noqa: E402
from profiling.emulator import emulated  # noqa: E402

one_thread = real.one_thread
MODULES = {"jfa_forward_hopper": forward, "jfa_backward_hopper": backward, "jfa_backward_resident": resident}
LENS = (70, 0, 200, 129)
# A sequence of fewer rows than a block, the first and the last tokens of a tensor, tokens of no sequence (NaN).
FEW = Case(q_lens=(3,), kv_lens=(5,), unused=2)
JAGGED = Case(q_lens=LENS, kv_lens=(129, 40, 0, 257), heads=2, heads_kv=1, unused=3)
CAUSAL = dataclasses.replace(JAGGED, kv_lens=LENS, heads=2, heads_kv=1, causal=True, head_dim=128)
BROADCAST = Case(q_len=40, kv_lens=(0, 130, 1, 64, 257, 0), heads=2, heads_kv=2, head_dim=128)
CASES_OF = {
    "jfa_forward_hopper": [
        *(FEW, JAGGED, CAUSAL, CASES["window-both"]),
        *(dataclasses.replace(BROADCAST, q_len=rows) for rows in (40, 200)),  # a CTA alone, a pair
    ],
    "jfa_backward_hopper": [FEW, JAGGED, CAUSAL, dataclasses.replace(BROADCAST, heads_kv=1), CASES["window-both"]],
    # A CTA, a pair, a pair in two passes.
    "jfa_backward_resident": [
        dataclasses.replace(BROADCAST, q_len=rows, unused=unused)
        for rows, unused in ((3, 2), (100, 0), (200, 0), (300, 0))
    ],
}
RUNS = [
    pytest.param(kernel, stage, case, id=f"{kernel}-{stage}-{number}")
    for kernel, stages in left_out.STAGES.items()
    for stage in stages
    for number, case in enumerate(CASES_OF[kernel])
]


def run(kernel: str, stage: str, case: Case, *, seed=0, schedule="balanced", sms=2, split=0, **changes) -> list:
    """What a launch gives: out and lse, or dQ, dK and dV; NaN where nothing was written."""
    inputs, problem = real.given(case, real.BF16)
    module = MODULES[kernel]
    backwards = module is not forward
    configs = {forward: hopper_forward_config(case.head_dim), backward: HopperBackwardConfig()}
    config = dataclasses.replace(configs.get(module, HopperResidentConfig()), **changes)
    block = config.block_kv if backwards else config.block_q * forward.cluster(problem, config, split)
    items = real.items(case, real.BF16, "backward" if backwards else "forward", block, schedule, *[split][backwards:])
    tensors = [inputs.q, inputs.k, inputs.v]
    if backwards:
        out, lse = real.forward_results(case, real.BF16)
        rows = out.reshape(problem.total_q, problem.heads, problem.head_dim)
        tensors = [inputs.grad_out.reshape(rows.shape), None, *tensors, rows, lse]
    tensors += [inputs.kv_offsets, inputs.q_offsets]
    way = launch.Run(schedule, items, leave_out=stage)
    with poisoned(), real.few_ctas(sms), emulated(module, kernel, seed=seed) as emulation:
        found = getattr(module, "backward" if backwards else "forward")(*tensors, problem, config, way)
    assert emulation.launches
    return list(found)


@functools.cache
def whole(kernel: str, case: Case) -> list:
    return run(kernel, "", case)


@pytest.mark.parametrize(("kernel", "stage", "case"), RUNS)
def test_it_ends_within_its_tensors_and_is_wrong(kernel, stage, case):
    """A result that is right would say that nothing was left out."""
    for seed, schedule in enumerate(("balanced-dynamic", "grid")):
        found = run(kernel, stage, case, seed=seed, schedule=schedule)
        pairs = list(zip(found, whole(kernel, case), strict=True))
        assert all(result.shape == expected.shape for result, expected in pairs)
        assert not all(torch.allclose(*pair, rtol=0.02, atol=0.02, equal_nan=True) for pair in pairs)


@pytest.mark.parametrize("stage", left_out.STAGES["jfa_forward_hopper"])
def test_cut_sequences_are_merged_whatever_their_parts_hold(stage):
    case = real.CUT["broadcast"]
    found, right = (run("jfa_forward_hopper", which, case, split=128) for which in (stage, ""))
    assert not torch.allclose(found[0], right[0], rtol=0.02, atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("changes", real.SWITCHES, ids=str)
@pytest.mark.parametrize("stage", left_out.STAGES["jfa_forward_hopper"])
def test_every_switch_of_the_forward(stage, changes):
    found, right = (run("jfa_forward_hopper", which, real.RESTS, sms=1, **changes) for which in (stage, ""))
    assert not torch.equal(found[0], right[0])


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"prefetch": False}, {"stages": 1}, {"stages": 2, "dq_buffers": 2}], ids=str)
@pytest.mark.parametrize("stage", left_out.STAGES["jfa_backward_hopper"])
def test_every_switch_of_the_backward(stage, changes):
    found, right = (run("jfa_backward_hopper", which, JAGGED, sms=1, **changes) for which in (stage, ""))
    assert not torch.equal(found[0], right[0])


def test_what_is_not_stored_keeps_what_it_was():
    """NaN, as allocated, but where a row has no keys: such are cleared."""
    out, lse = run("jfa_forward_hopper", "store", JAGGED)
    rows = torch.zeros(out.shape[0], dtype=torch.bool)
    rows[: LENS[0]] = True
    rows[LENS[0] + LENS[1] + LENS[2] : sum(LENS)] = True
    assert out[rows].isnan().all() and lse[:, rows].isnan().all()
    assert (out[~rows] == 0).all() and (lse[:, ~rows] == -torch.inf).all()
    dq, dk, dv = run("jfa_backward_hopper", "dq store", JAGGED)
    _, right_dk, right_dv = whole("jfa_backward_hopper", JAGGED)
    assert (dq == 0).all() and torch.equal(dk, right_dk) and torch.equal(dv, right_dv)
    for rows in (100, 200):
        case = dataclasses.replace(BROADCAST, q_len=rows)
        dq, dk, dv = run("jfa_backward_resident", "dk/dv store", case)
        assert dk.isnan().all() and dv.isnan().all()
        torch.testing.assert_close(dq, whole("jfa_backward_resident", case)[0])


def test_without_exponentials_sums_stay_numbers():
    """Of the forward and the resident backward, whose sums go on over many steps: what a mask hides counts as 0."""
    for case in (JAGGED, CAUSAL, CASES["window-both"]):
        out, _ = run("jfa_forward_hopper", "exp", case)
        assert out[: sum(case.q_lens)].isfinite().all()
    for result in run("jfa_backward_resident", "exp", dataclasses.replace(BROADCAST, q_len=100)):
        assert result.isfinite().all()


@given(st.integers(0, 2_000_000), st.integers(0, 2**31 - 1), st.sampled_from([64, 128]))
@settings(max_examples=30)
def test_the_rows_that_are_loaded_again_and_again_exist(device, total, own, block):
    found = torch.full((1,), -1, dtype=torch.int32, device=device)
    _hot_row[(1,)](found, own, total, BLOCK=block)
    assert 0 <= found.item() and found.item() + min(block, total) <= total


@triton.jit(do_not_specialize=["own", "total"])
def _hot_row(found, own, total, BLOCK: tl.constexpr):
    tl.store(found, primitives.hot_row(own, total, BLOCK))
