"""The forward for sm_90: the same results as eager, whatever is switched; long sequences cut and joined."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attend import attend  # noqa: E402
from shapes import CASES, LARGE_CASES, Case, offsets  # noqa: E402
from test_attention_offsets import large_inputs  # noqa: E402
from tolerance import assert_results_close  # noqa: E402

import jfa  # noqa: E402
from jfa import jagged_attention  # noqa: E402
from jfa.config import hopper_forward_config  # noqa: E402
from jfa.impl import choice  # noqa: E402
from jfa.schedule import SCHEDULES  # noqa: E402
from jfa.validation import validate  # noqa: E402

HALVES = [torch.float16, torch.bfloat16]
SWITCHES = [{"pingpong": False}, {"peel": False}, {"early_fetch": False}, {"tail": 0}, {"registers": 232}]
# Few keys, so that none is cut, and more tiles than 66 pairs of CTAs do at once.
PAIR = Case(q_len=256, kv_lens=(450, 0, 257, 1, 64, 0, 129, 65), heads=16, heads_kv=4, head_dim=128)
# Rests of 0, 1, 63 … 65 and 127 … 129 keys behind full blocks, and tiles of which one warpgroup has no rows.
RESTS = Case(q_lens=(1, 64, 65, 128, 129, 200, 30), kv_lens=(256, 257, 319, 320, 321, 383, 384), head_dim=128)
CUT = {
    "broadcast": Case(q_len=256, kv_lens=(16, 0, 5000, 700, 0, 1024, 1025, 3000), heads=2, heads_kv=1, head_dim=128),
    "broadcast-few-rows": Case(q_len=40, kv_lens=(4000, 10, 1500), heads=2, heads_kv=2, head_dim=64),
    "jagged": Case(q_lens=(70, 0, 300, 5), kv_lens=(2500, 1100, 4100, 0), heads=2, heads_kv=2, head_dim=128),
}


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and choice.has_tlx()


on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not hopper(), reason="no sm_90 GPU with TLX")]


def run(case, dtype=torch.bfloat16, **options):
    inputs = case.inputs("cuda", dtype)
    return inputs, attend(inputs, impl="hopper", **options, **case.options)


class TestOnTheGpu:
    pytestmark = on_hopper

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    @pytest.mark.parametrize("name", CASES)
    def test_every_shape(self, name, dtype):
        inputs, results = run(CASES[name], dtype)
        assert_results_close(results, inputs, **CASES[name].bounds)

    @pytest.mark.parametrize("scale", [0.0, -0.2, 3.0])
    @pytest.mark.parametrize("masked", [False, True])
    def test_scale(self, scale, masked):
        case = dataclasses.replace(RESTS, causal=masked)
        inputs, results = run(case, scale=scale)
        assert_results_close(results, inputs, scale=scale, **case.bounds)

    @pytest.mark.parametrize("name", LARGE_CASES)
    def test_large_shapes(self, name):
        inputs, results = run(LARGE_CASES[name])
        assert_results_close(results, inputs, **LARGE_CASES[name].bounds)

    @pytest.mark.parametrize("switch", SWITCHES, ids=str)
    @pytest.mark.parametrize(
        "case",
        [RESTS, CASES["causal-short-kv"], CASES["window-both"], PAIR],
        ids=["rests", "causal", "window", "pair"],
    )
    def test_every_switch_computes_the_same(self, case, switch, monkeypatch):
        monkeypatch.setattr(
            choice, "hopper_forward_config", lambda dim: dataclasses.replace(hopper_forward_config(dim), **switch)
        )
        inputs, results = run(case)
        assert_results_close(results, inputs, **case.bounds)

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_two_ctas_that_load_for_both_compute_what_one_does(self, schedule, head_dim, monkeypatch):
        case = dataclasses.replace(PAIR, head_dim=head_dim)
        inputs = case.inputs("cuda", torch.bfloat16)
        problem = validate(inputs.q, inputs.k, inputs.v, inputs.kv_offsets)
        kernel = choice.forward_kernel("hopper", choice.HOPPER, head_dim, 2)
        assert kernel.cluster_of(problem, kernel.config, kernel.split(problem, 132)) == 2, "one CTA does it alone"
        results = attend(inputs, impl="hopper", schedule=schedule, **case.options)
        assert_results_close(results, inputs, **case.bounds)
        table = jfa.plan(inputs.kv_offsets, q=inputs.q, k=inputs.k, impl="hopper", schedule=schedule)
        planned = attend(inputs, impl="hopper", schedule=table, **case.options)
        assert torch.equal(results.out, planned.out) and torch.equal(results.lse, planned.lse)
        monkeypatch.setattr(
            choice,
            "hopper_forward_config",
            lambda dim: dataclasses.replace(hopper_forward_config(dim), multicast=False),
        )
        _, alone = run(case, schedule=schedule)
        assert torch.equal(results.out, alone.out) and torch.equal(results.lse, alone.lse)

    @pytest.mark.parametrize("schedule", [*SCHEDULES, "auto"])
    @pytest.mark.parametrize(
        "case", [RESTS, CASES["broadcast"], CASES["empty-both"]], ids=["rests", "broadcast", "empty"]
    )
    def test_schedules_agree_bit_for_bit(self, case, schedule):
        _, expected = run(case, schedule="grid")
        for _ in range(3):
            _, results = run(case, schedule=schedule)
            assert torch.equal(results.out, expected.out) and torch.equal(results.lse, expected.lse)

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    @pytest.mark.parametrize("name", CUT)
    def test_long_sequences_are_cut_and_joined(self, name, dtype):
        inputs, results = run(CUT[name], dtype)
        problem = validate(inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets)
        split = choice.forward_kernel("hopper", (9, 0), inputs.q.shape[2], 2).split(problem, 132)
        assert 0 < split < max(CUT[name].kv_lens), "nothing is cut: the test would show nothing"
        assert_results_close(results, inputs)
        _, again = run(CUT[name], dtype)
        assert torch.equal(results.out, again.out) and torch.equal(results.lse, again.lse)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_a_cut_sequence_under_every_schedule_and_plan(self, schedule):
        case = CUT["broadcast"]
        inputs, expected = run(case)
        _, named = run(case, schedule=schedule)
        table = jfa.plan(inputs.kv_offsets, q=inputs.q, k=inputs.k, impl="hopper", schedule=schedule)
        _, planned = run(case, schedule=table)
        for results in (named, planned):
            assert torch.equal(results.out, expected.out) and torch.equal(results.lse, expected.lse)

    def test_a_plan_for_the_other_kernel_is_refused(self):
        case = CUT["broadcast"]
        inputs = case.inputs("cuda", torch.bfloat16)
        table = jfa.plan(inputs.kv_offsets, q=inputs.q, k=inputs.k, impl="hopper")
        with pytest.raises(ValueError, match="^schedule: the table was planned for .* cut every .* this call's impl"):
            attend(inputs, impl="triton", schedule=table)

    def test_auto_is_hopper_for_half_precision(self):
        inputs = RESTS.inputs("cuda", torch.bfloat16)
        auto, own = (attend(inputs, impl=impl) for impl in ("auto", "hopper"))
        assert torch.equal(auto.out, own.out) and torch.equal(auto.lse, own.lse)
        single = RESTS.inputs("cuda", torch.float32)
        assert torch.equal(attend(single, impl="auto").out, attend(single, impl="triton").out)
        with pytest.raises(TypeError, match="float32, which impl='hopper' does not support"):
            attend(single, impl="hopper")

    def test_a_configuration_by_trial_gives_the_same(self):
        from jfa.impl.hopper import tune

        tune._chosen.clear()
        inputs = RESTS.inputs("cuda", torch.bfloat16)
        for _ in range(2):
            assert_results_close(attend(inputs, impl="hopper-autotune"), inputs)
        assert len(tune._chosen) == 1

    def test_gradients_come_from_its_output(self):
        case = dataclasses.replace(RESTS, heads=2, heads_kv=1)
        inputs = case.inputs("cuda", torch.bfloat16, grad=True)
        assert_results_close(attend(inputs, grads=True, impl="hopper"), inputs)

    def test_longest_lengths_that_are_understated_harm_no_neighbour(self):
        case = CUT["broadcast"]
        _, expected = run(case)
        _, results = run(case, max_kv_len=1024)
        assert torch.equal(results.out[:2], expected.out[:2])

    def test_more_than_two_to_the_31_elements(self):
        lengths = (1000,) * 4300
        inputs = large_inputs(lengths, heads=4, head_dim=128)
        out, lse = jagged_attention(
            inputs.q.detach(), inputs.k.detach(), inputs.v.detach(), inputs.kv_offsets, inputs.q_offsets,
            max_q_len=1000, max_kv_len=1000, return_lse=True, impl="hopper",
        )  # fmt: skip
        for sequence in (0, 4193, 4194, 4195, 4299):
            rows = slice(1000 * sequence, 1000 * (sequence + 1))
            one = offsets((1000,), "cuda")
            alone = jagged_attention(
                *(tensor.detach()[rows] for tensor in (inputs.q, inputs.k, inputs.v)), one, one, impl="triton"
            )
            torch.testing.assert_close(out[rows], alone, rtol=2e-2, atol=2e-2)
        assert lse.isfinite().all()


@pytest.mark.skipif(hopper(), reason="an sm_90 GPU is here")
def test_elsewhere_it_says_what_it_needs():
    with pytest.raises(ValueError, match="^impl='hopper' needs an sm_90 GPU .*; pass impl='auto' or impl='triton'"):
        choice.resolve("hopper", (8, 0), torch.bfloat16)
    with pytest.raises(ValueError, match="Triton's interpreter"):
        choice.resolve("hopper", None, torch.bfloat16)
    assert choice.resolve("auto", None, torch.bfloat16) == "triton"
    assert choice.resolve("auto", (10, 0), torch.bfloat16) == "triton"
    assert choice.resolve("auto", (9, 0), torch.float32) == "triton"
    assert choice.resolve("auto", (9, 0), torch.bfloat16) == ("hopper" if choice.has_tlx() else "triton")
