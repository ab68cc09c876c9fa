"""The backwards for sm_90, each called by itself: the same gradients as eager, from poisoned memory."""

from __future__ import annotations

import dataclasses
import faulthandler

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attend import attend, lse_gradients  # noqa: E402
from shapes import CASES, LARGE_CASES, Case, poisoned  # noqa: E402
from test_hopper_forward import HALVES, RESTS, on_hopper  # noqa: E402
from tolerance import Results, assert_close_to_reference, assert_results_close  # noqa: E402

from jfa import attention, jagged_attention, reference, validation  # noqa: E402
from jfa.config import HopperBackwardConfig, HopperResidentConfig  # noqa: E402
from jfa.impl import choice  # noqa: E402
from jfa.impl.triton import launch  # noqa: E402
from jfa.schedule import SCHEDULES  # noqa: E402
from jfa.workloads import Inputs  # noqa: E402

if not choice.has_tlx():
    pytest.skip("TLX comes with fbtriton (x86-64)", allow_module_level=True)

from jfa.impl.hopper import backward as shared  # noqa: E402
from jfa.impl.hopper import resident, rounding  # noqa: E402

HANGS_AFTER_S = 300
KV_RESTS = (0, 1, 63, 64, 65, 0, 127, 128, 129, 700, 0)
# One CTA, a pair, a pair in two passes; rows that fill no block; heads and batches that end within a CTA's share.
SHARED_Q = {
    rows: Case(q_len=rows, kv_lens=KV_RESTS, heads=3, heads_kv=3, head_dim=128, unused=70)
    for rows in (1, 64, 100, 128, 129, 200, 256, 257, 300, 512)
}

# More tiles than CTAs; sequences without queries, without keys, without either; rows behind the last.
BESIDE = {
    "skewed": Case(q_lens=(3000, 0, 5, 700, 1) * 30, kv_lens=(3000, 70, 0, 129, 1) * 30, head_dim=128),
    "group": Case(q_lens=(100, 64, 0, 1) * 60, kv_lens=(300, 0, 5, 128) * 60, heads=4, heads_kv=1, unused=90),
    "one": Case(q_lens=(9000,), kv_lens=(130,), heads=1, heads_kv=1, head_dim=128),
    "few-keys": Case(q_lens=(50_000, 3), kv_lens=(1, 1), heads=2, heads_kv=2, head_dim=128),
}  # fmt: skip


@pytest.fixture
def any_sum_is_rounded_beside(monkeypatch):
    monkeypatch.setattr(rounding, "LEAST_BYTES", 0)
    monkeypatch.setattr(rounding, "LEAST_TILES", 0)
    # A kernel that hangs cannot be interrupted from Python.
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def gradients(
    inputs: Inputs, kind: str, options: dict, schedule: str = "balanced-dynamic", *, beside: bool = False, **changes
) -> Results:
    """out and lse of the op, and the gradients of one kernel run on them; ``beside``: dQ must be rounded beside it;
    ``changes`` of the configuration of the one that shares dQ."""
    q, k, v = (tensor.detach() for tensor in (inputs.q, inputs.k, inputs.v))
    offsets = (inputs.kv_offsets, inputs.q_offsets)
    causal, window = options.get("causal", False), options.get("window")
    problem = validation.validate(q, k, v, *offsets, None, None, options.get("scale"), causal, window)
    out, lse = jagged_attention(q, k, v, *offsets, return_lse=True, **options)
    rows = out.reshape(problem.total_q, problem.heads, problem.head_dim)
    grad_out = inputs.grad_out.reshape(rows.shape)
    block = HopperResidentConfig().block_kv if kind == "resident" else HopperBackwardConfig().block_kv
    run = launch.Run(schedule, attention.backward_items(*offsets, problem, block, schedule))
    with poisoned():
        if kind == "resident":
            assert resident.serves(problem)
            config = HopperResidentConfig()
            found = resident.backward(grad_out, None, q, k, v, rows, lse, *offsets, problem, config, run)
        else:
            config = HopperBackwardConfig(round_beside=beside, **changes)
            assert beside == (rounding.sms_beside(run, problem, config, q.device) > 0)
            found = shared.backward(grad_out, None, q, k, v, rows, lse, *offsets, problem, config, run)
    torch.cuda.synchronize()
    return Results(out, lse, *found)


class TestOnTheGpu:
    pytestmark = on_hopper

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    @pytest.mark.parametrize("name", [name for name in CASES if "no-rows" not in name and "no-sequences" not in name])
    def test_shared_serves_every_shape(self, name, dtype):
        inputs = CASES[name].inputs("cuda", dtype)
        assert_results_close(gradients(inputs, "shared", CASES[name].options), inputs, **CASES[name].bounds)

    @pytest.mark.parametrize("name", ["causal-short-kv", "window-both", "gqa-8-2", "broadcast-causal"])
    def test_blocks_without_a_mask_in_a_loop_of_their_own(self, name):
        inputs = CASES[name].inputs("cuda", torch.bfloat16)
        assert_results_close(gradients(inputs, "shared", CASES[name].options, peel=True), inputs, **CASES[name].bounds)

    @pytest.mark.parametrize("name", CASES)
    def test_the_op_gives_every_gradient(self, name):
        inputs = CASES[name].inputs("cuda", torch.bfloat16, grad=True)
        results = attend(inputs, grads=True, impl="hopper", **CASES[name].options)
        assert_results_close(results, inputs, **CASES[name].bounds)

    @pytest.mark.parametrize("name", LARGE_CASES)
    def test_shared_serves_large_shapes(self, name):
        inputs = LARGE_CASES[name].inputs("cuda", torch.bfloat16)
        assert_results_close(gradients(inputs, "shared", LARGE_CASES[name].options), inputs, **LARGE_CASES[name].bounds)

    def test_a_bound_below_the_lengths_ends(self, any_sum_is_rounded_beside):
        """More sequences than are ranked, of which the table lacks some: whatever comes out, nobody waits for them."""
        count = 8193
        case = Case(q_lens=(1,) * (count - 1) + (50,), kv_lens=(100,) * (count - 1) + (200,), heads=1, heads_kv=1)
        inputs = case.inputs("cuda", torch.bfloat16, grad=True)
        leaves = (inputs.q, inputs.k, inputs.v)
        out = jagged_attention(*leaves, inputs.kv_offsets, inputs.q_offsets, max_q_len=50, max_kv_len=128)
        torch.autograd.grad(out, leaves, inputs.grad_out)
        torch.cuda.synchronize()

    @pytest.mark.parametrize("schedule", ["static", "balanced", "dynamic", "balanced-dynamic"])
    @pytest.mark.parametrize("name", BESIDE)
    def test_dq_is_rounded_beside(self, name, schedule, any_sum_is_rounded_beside):
        inputs = BESIDE[name].inputs("cuda", torch.bfloat16)
        for _ in range(3):
            assert_results_close(gradients(inputs, "shared", {}, schedule, beside=True), inputs)

    def test_beside_other_streams_and_in_a_graph(self, any_sum_is_rounded_beside):
        """Launches of three streams at once, and one captured and run again, give what one alone does; the captured one
        rounds by a pass."""
        inputs = BESIDE["skewed"].inputs("cuda", torch.bfloat16)
        tensors, offsets = (inputs.q, inputs.k, inputs.v), (inputs.kv_offsets, inputs.q_offsets)
        problem = validation.validate(*tensors, *offsets, None, None, None)
        out, lse = jagged_attention(*tensors, *offsets, return_lse=True)
        config = HopperBackwardConfig()

        def run() -> tuple[torch.Tensor, ...]:
            plan = launch.Run("balanced-dynamic", attention.backward_items(*offsets, problem, 128, "balanced-dynamic"))
            return shared.backward(inputs.grad_out, None, *tensors, out, lse, *offsets, problem, config, plan)

        expected = run()
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        found = []
        for _ in range(20):
            for stream in streams:
                with torch.cuda.stream(stream):
                    found.append(run())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append(run())
        for _ in range(3):
            for gradient in found[-1]:
                gradient.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            for gradient, right in zip(found[-1], expected, strict=True):
                torch.testing.assert_close(gradient, right, rtol=2e-2, atol=2e-3)
        for gradients_of in found:
            for gradient, right in zip(gradients_of, expected, strict=True):
                torch.testing.assert_close(gradient, right, rtol=2e-2, atol=2e-3)

    @pytest.mark.parametrize("dtype", HALVES, ids=str)
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("rows", SHARED_Q)
    def test_resident_serves_every_number_of_rows(self, rows, head_dim, dtype):
        inputs = dataclasses.replace(SHARED_Q[rows], head_dim=head_dim).inputs("cuda", dtype)
        assert_results_close(gradients(inputs, "resident", {}), inputs)

    @pytest.mark.parametrize("case", [SHARED_Q[100], SHARED_Q[300], CASES["dim-128"]], ids=["one", "pair", "jagged"])
    def test_lse_is_differentiable(self, case):
        inputs = case.inputs("cuda", torch.bfloat16)
        found = lse_gradients(jagged_attention, inputs, torch.bfloat16, return_lse=True, impl="hopper")
        exact, low = (lse_gradients(reference.attention, inputs, dtype) for dtype in (torch.float64, torch.bfloat16))
        for name, *three in zip(("dq", "dk", "dv"), found, exact, low, strict=True):
            assert_close_to_reference(*three, what=name)

    @pytest.mark.parametrize("kind", ["shared", "resident"])
    @pytest.mark.parametrize("lengths", [(5,), (0, 0, 3), (1,) * 300, (20_000,), (64,) * 700, (200, 0) * 150])
    def test_few_and_many_tiles(self, lengths, kind):
        inputs = Case(q_len=200, kv_lens=lengths, heads=2, heads_kv=2, head_dim=128).inputs("cuda", torch.bfloat16)
        assert_results_close(gradients(inputs, kind, {}), inputs)

    @pytest.mark.parametrize("kind", ["shared", "resident"])
    @pytest.mark.parametrize("scale", [0.0, 3.0])
    def test_scale(self, scale, kind):
        inputs = SHARED_Q[200].inputs("cuda", torch.bfloat16)
        assert_results_close(gradients(inputs, kind, {"scale": scale}), inputs, scale=scale)

    @pytest.mark.parametrize("kind", ["shared", "resident"])
    def test_weights_beyond_any_number_stay_away(self, kind):
        """Scores of −1,000: behind a sequence's end exp2(−lse) is infinite, and must not be multiplied by zero."""
        inputs = SHARED_Q[200].inputs("cuda", torch.bfloat16)
        inputs.q.fill_(1.0), inputs.k[: inputs.kv_offsets[-1]].fill_(-1.0)
        options = {"scale": 8.0}
        assert_results_close(gradients(inputs, kind, options), inputs, **options)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("kind", ["shared", "resident"])
    def test_gradients_agree_bit_for_bit_under_every_schedule(self, kind, schedule):
        """All but a dQ that CTAs add up in memory."""
        inputs = SHARED_Q[200].inputs("cuda", torch.bfloat16)
        expected = gradients(inputs, kind, {}, "static")
        for _ in range(10):
            found = gradients(inputs, kind, {}, schedule)
            assert torch.equal(found.dk, expected.dk) and torch.equal(found.dv, expected.dv)
            assert kind == "shared" or torch.equal(found.dq, expected.dq)
        assert_results_close(found, inputs)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize(
        "case",
        [RESTS, CASES["empty-q"], CASES["empty-both"], Case(q_lens=(10, 70), kv_lens=(300, 400), window=(20, 0))],
        ids=["rests", "empty-q", "empty-both", "window"],
    )
    def test_shared_under_every_schedule(self, case, schedule):
        """Unsorted ones also deal tiles of keys that no query sees."""
        inputs = case.inputs("cuda", torch.bfloat16)
        assert_results_close(gradients(inputs, "shared", case.options, schedule), inputs, **case.bounds)

    def test_nan_does_not_vanish(self):
        """A key that is NaN makes every gradient of its sequence's keys NaN, and of no other's."""
        inputs = Case(q_lens=(70, 130), kv_lens=(100, 200), heads=2, heads_kv=2, head_dim=128).inputs(
            "cuda", torch.bfloat16
        )
        inputs.k[3] = torch.nan
        found = gradients(inputs, "shared", {})
        for gradient in (found.dk, found.dv):
            assert gradient[:100].isnan().all() and gradient[100:].isfinite().all()

    def test_no_batch_hangs(self, any_sum_is_rounded_beside):
        """200 batches of extreme skew, each under a schedule of its own; Triton's kernel says what is right."""
        random = np.random.default_rng(7)
        kinds = [0, 1, 63, 64, 65, 128, 129, 700, 3000]
        odds = [0.3, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05, 0.07, 0.03]
        rounding = 1e-5  # of an element that is 0, float32 leaves that much: dQ and dK where a row sees one key
        for index in range(200):
            count = int(random.integers(1, 40))
            kv_lens, q_lens = (tuple(int(x) for x in random.choice(kinds, count, p=odds)) for _ in range(2))
            rows = int(random.choice([1, 128, 200]))
            shape = {"q_len": rows} if index % 2 else {"q_lens": q_lens}
            case = Case(kv_lens=kv_lens, heads=2, heads_kv=2, head_dim=128, causal=index % 4 == 2, **shape)
            schedule = SCHEDULES[int(random.integers(len(SCHEDULES)))]
            inputs = case.inputs("cuda", torch.bfloat16, grad=True)
            found, right = (
                attend(inputs, grads=True, impl=impl, schedule=schedule, **case.options)
                for impl in ("hopper", "triton")
            )
            for name in ("dq", "dk", "dv"):
                one, other = getattr(found, name).float(), getattr(right, name).float()
                most = 2e-2 * other.norm() + rounding * one.numel() ** 0.5
                assert (one - other).norm() <= most, (index, name, case, schedule)


def test_what_keeps_dq_in_registers():
    def serves(**changes) -> bool:
        case = dataclasses.replace(Case(q_len=256, kv_lens=(5, 7), head_dim=128), **changes)
        inputs = case.inputs("cpu", torch.bfloat16)
        args = (inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets)
        return resident.serves(validation.validate(*args, causal=case.causal, window=case.window))

    assert serves() and serves(q_len=1) and serves(q_len=resident.MOST_ROWS)
    assert not serves(q_len=resident.MOST_ROWS + 1)
    assert not serves(causal=True) and not serves(window=(3, -1))
    assert not serves(heads=4, heads_kv=2)
    assert not serves(q_len=0, q_lens=(3, 4))
