"""What the backward computes: autograd's gradients of the reference, for every shape, layout and kind of gradient."""

import dataclasses
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attend import attend, lse_gradients  # noqa: E402
from shapes import CASES, DEVICES, HALF, INTERPRETED, LARGE_CASES, Case  # noqa: E402
from tolerance import assert_close_to_reference, assert_results_close, reference_results  # noqa: E402

from jfa import config, jagged_attention  # noqa: E402
from jfa.reference import attention  # noqa: E402
from jfa.schedule import SCHEDULES  # noqa: E402
from jfa.validation import validate  # noqa: E402

on_each_device = pytest.mark.parametrize("device", DEVICES)
HALVES = [torch.float16, torch.bfloat16]


@on_each_device
@pytest.mark.parametrize("name", CASES)
def test_every_shape_in_float32(name, device):
    case = CASES[name]
    inputs = case.inputs(device, grad=True)
    assert_results_close(attend(inputs, grads=True, **case.options), inputs, **case.bounds)


@on_each_device
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", HALF)
def test_half_precision_errs_at_most_twice_as_much_as_eager(name, dtype, device):
    case = CASES[name]
    inputs = case.inputs(device, dtype, grad=True)
    results = attend(inputs, grads=True, **case.options)
    assert {results.dq.dtype, results.dk.dtype, results.dv.dtype} == {dtype}
    assert_results_close(results, inputs, **case.bounds)


@pytest.fixture
def adding_by_tma(monkeypatch):
    """The interpreter adds dQ up as on sm_90 and later, where float32, which the other tests use, is not added so."""
    tma = dataclasses.replace(config.INTERPRETED_BACKWARD, reduce="tma")
    monkeypatch.setattr(config, "INTERPRETED_BACKWARD", tma)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the tests in half precision add so")
@pytest.mark.parametrize(
    "name",
    ["tails", "gqa-8-2", "causal-short-kv", "window-both", "unused-blocks", "broadcast-gqa", "broadcast-no-rows"],
)
def test_dq_added_by_tma(name, adding_by_tma):
    case = CASES[name]
    inputs = case.inputs("cpu", grad=True)
    assert_results_close(attend(inputs, grads=True, **case.options), inputs, **case.bounds)


@on_each_device
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_key_stays_out_of_the_next_sequences_dq(bad, device, request):
    """The last block of queries reaches into the next sequence's rows, and TMA adds all of it."""
    if device == "cpu":
        request.getfixturevalue("adding_by_tma")
    clean, dirty = (Case(q_lens=(70, 20), kv_lens=(66, 90)).inputs(device, torch.bfloat16) for _ in range(2))
    dirty.k[3] = bad
    for inputs in (clean, dirty):
        for tensor in (inputs.q, inputs.k, inputs.v):
            tensor.requires_grad_()
    expected, actual = attend(clean, grads=True), attend(dirty, grads=True)
    assert actual.dq[:70].isnan().any()
    torch.testing.assert_close(actual.dq[70:], expected.dq[70:], rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", LARGE_CASES)
def test_full_size(name, dtype):
    case = LARGE_CASES[name]
    inputs = case.inputs("cuda", dtype, grad=True)
    assert_results_close(attend(inputs, grads=True, **case.options), inputs, **case.bounds)


def strided(kind, grad):
    """The same gradient behind other strides."""
    if kind == "heads-first":
        return grad.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "wide rows":
        wide = torch.full((len(grad), grad.shape[1] + 3, grad.shape[2]), torch.nan, device=grad.device)
        return wide[:, 1:-2].copy_(grad)
    if kind == "every other channel":
        wide = torch.full((*grad.shape[:2], 2 * grad.shape[2]), torch.nan, device=grad.device)
        return wide[..., ::2].copy_(grad)
    return grad[:, :1, :1].expand(grad.shape)


@on_each_device
@pytest.mark.parametrize("kind", ["heads-first", "wide rows", "every other channel", "expanded"])
def test_gradients_of_the_output_may_have_any_strides(kind, device):
    inputs = CASES["gqa-4-1"].inputs(device, grad=True)
    grad = strided(kind, inputs.grad_out)
    assert not grad.is_contiguous()
    inputs = dataclasses.replace(inputs, grad_out=grad)
    assert_results_close(attend(inputs, grads=True), inputs)


@on_each_device
def test_the_gradient_of_a_sum(device):
    """A sum's gradient has strides of 0 everywhere; dv of broadcast keys is then the sum of their weights."""
    inputs = CASES["broadcast-long-q"].inputs(device, grad=True)
    attend_all = jagged_attention(inputs.q, inputs.k, inputs.v, inputs.kv_offsets, impl="triton")
    dv = torch.autograd.grad(attend_all.sum(), inputs.v)[0]
    # Each sequence with keys hands out a weight of 1 a row, over both channels and heads alike.
    for start, end in ((0, 65), (65, 68)):
        torch.testing.assert_close(dv[start:end].sum(0), torch.full_like(dv[0], 70.0), rtol=1e-5, atol=0)


@on_each_device
@pytest.mark.parametrize("with_out", [False, True], ids=["lse", "lse-and-out"])
@pytest.mark.parametrize("name", ["causal-short-kv", "window-both", "broadcast-causal", "empty-kv"])
def test_lse_is_differentiable_alone_and_with_the_output(name, with_out, device):
    case = CASES[name]
    inputs = case.inputs(device)
    options = {"return_lse": True, "impl": "triton", **case.options}
    actual = lse_gradients(jagged_attention, inputs, torch.float32, with_out=with_out, **options)
    exact, low = (
        lse_gradients(attention, inputs, dtype, with_out=with_out, **case.bounds)
        for dtype in (torch.float64, torch.float32)
    )
    for name, *three in zip(("dq", "dk", "dv"), actual, exact, low, strict=True):
        assert_close_to_reference(*three, what=name, allowance=1e-6 * three[1].norm().item())


@on_each_device
def test_the_gradient_of_a_blind_rows_lse_goes_nowhere(device):
    """Where two partial results are merged by logaddexp, rows that neither sees have NaN for a gradient."""
    case = CASES["causal-short-kv"]
    found = []
    for op, options in (
        (jagged_attention, {"impl": "triton", "return_lse": True, **case.options}),
        (attention, case.bounds),
    ):
        inputs = case.inputs(device, grad=True)
        out, lse = op(inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets, **options)
        grad_lse = torch.where(lse.isfinite(), 1.0, torch.nan)
        assert grad_lse.isnan().any()
        found.append(torch.autograd.grad((out, lse), (inputs.q, inputs.k), (torch.zeros_like(out), grad_lse)))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@on_each_device
@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
def test_only_the_gradients_asked_for(wanted, device):
    inputs = CASES["gqa-4-1"].inputs(device)
    leaves = [getattr(inputs, name).requires_grad_() for name in wanted]
    out = jagged_attention(inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets, impl="triton")
    found = torch.autograd.grad(out, leaves, inputs.grad_out)
    everything = reference_results(inputs)
    for name, grad in zip(wanted, found, strict=True):
        torch.testing.assert_close(grad, getattr(everything, f"d{name}"), rtol=1e-4, atol=1e-5)


@on_each_device
def test_without_gradients_nothing_is_kept(device):
    inputs = CASES["gqa-4-1"].inputs(device, grad=True)
    arguments = inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets
    with torch.no_grad():
        assert jagged_attention(*arguments).grad_fn is None
    detached = CASES["gqa-4-1"].inputs(device)
    assert not attend(detached).out.requires_grad


@on_each_device
def test_gradients_accumulate_over_calls(device):
    inputs = CASES["broadcast"].inputs(device, grad=True)
    for _ in range(2):
        out = jagged_attention(inputs.q, inputs.k, inputs.v, inputs.kv_offsets, impl="triton")
        out.backward(inputs.grad_out)
    once = attend(CASES["broadcast"].inputs(device, grad=True), grads=True)
    torch.testing.assert_close(inputs.q.grad, 2 * once.dq, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.k.grad, 2 * once.dk, rtol=0, atol=0)


@on_each_device
@pytest.mark.parametrize("which", ["k", "v", "grad_out"])
def test_nan_stays_in_its_own_sequence(which, device):
    case = Case(q_lens=(30, 70, 20), kv_lens=(66, 30, 90))
    clean, dirty = case.inputs(device), case.inputs(device)
    getattr(dirty, which)[30 if which == "grad_out" else 66] = torch.nan
    for inputs in (clean, dirty):
        for tensor in (inputs.q, inputs.k, inputs.v):
            tensor.requires_grad_()
    expected, actual = attend(clean, grads=True), attend(dirty, grads=True)
    for rows, keys in ((slice(0, 30), slice(0, 66)), (slice(100, 120), slice(96, 186))):
        torch.testing.assert_close(actual.dq[rows], expected.dq[rows], rtol=1e-5, atol=1e-6)
        assert torch.equal(actual.dk[keys], expected.dk[keys])
        assert torch.equal(actual.dv[keys], expected.dv[keys])
    assert actual.dk[66:96].isnan().any(), "NaN in a sequence must not vanish either"


@on_each_device
@pytest.mark.parametrize("bound", [2**31 - 1, 2**31, sys.maxsize])
def test_a_window_beyond_int32_is_unbounded(bound, device):
    """Rows that see nothing and rows before the first key included: their positions plus the bound must not wrap."""
    inputs = Case(q_lens=(140, 30), kv_lens=(200, 7)).inputs(device, grad=True)
    results = attend(inputs, grads=True, window=(bound, bound))
    assert_results_close(results, inputs)
    causal = attend(inputs, grads=True, window=(bound, -1), causal=True)
    assert_results_close(causal, inputs, window_right=0)


@on_each_device
def test_negative_scale(device):
    inputs = CASES["broadcast-causal"].inputs(device, grad=True)
    results = attend(inputs, grads=True, causal=True, scale=-0.3)
    assert_results_close(results, inputs, scale=-0.3, window_right=0)


@on_each_device
@pytest.mark.parametrize("impl", ["reference", "triton", "auto"])
@pytest.mark.parametrize("name", ["gqa-4-1", "broadcast", "window-both"])
def test_deterministic_gradients_repeat_bit_for_bit(name, impl, device):
    inputs = CASES[name].inputs(device, torch.float32 if device == "cpu" else torch.bfloat16, grad=True)
    options = {"impl": impl, "deterministic": True, **CASES[name].options}
    runs = [attend(inputs, grads=True, schedule=schedule, **options) for schedule in (*SCHEDULES, "auto", "auto")]
    for run in runs[1:]:
        for part in ("out", "lse", "dq", "dk", "dv"):
            assert torch.equal(getattr(run, part), getattr(runs[0], part)), part


@on_each_device
@pytest.mark.parametrize("name", CASES)
def test_deterministic_gradients_are_right(name, device):
    inputs = CASES[name].inputs(device, grad=True)
    results = attend(inputs, grads=True, deterministic=True, **CASES[name].options)
    assert_results_close(results, inputs, **CASES[name].bounds)


@on_each_device
def test_a_shared_q_over_more_sequences_than_chunks(device, monkeypatch):
    """Chunks of several sequences, empty ones at their ends, and one that holds nearly all keys."""
    from jfa.impl.triton import dq

    monkeypatch.setattr(dq, "PROGRAMS", 8)
    case = Case(q_len=40, kv_lens=(0, 0, 3, 500, 0, 1, 2, 0, 70, 0), heads=2, heads_kv=1)
    inputs = case.inputs(device, grad=True)
    assert dq.chunks_of(validate(inputs.q, inputs.k, inputs.v, inputs.kv_offsets), 64) == 4
    assert_results_close(attend(inputs, grads=True, deterministic=True), inputs)
