"""What the forward computes: the reference's output and lse, for every shape that broke somebody, every row written."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attend import attend  # noqa: E402
from shapes import CASES, DEVICES, DTYPES, HALF, Case, poisoned  # noqa: E402
from tolerance import assert_results_close  # noqa: E402

from jfa import jagged_attention  # noqa: E402
from jfa.reference import attention  # noqa: E402

pytestmark = pytest.mark.parametrize("device", DEVICES)
HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("name", CASES)
def test_every_shape_in_float32(name, device):
    case = CASES[name]
    inputs = case.inputs(device)
    assert_results_close(attend(inputs, **case.options), inputs, **case.bounds)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", HALF)
def test_half_precision_errs_at_most_twice_as_much_as_eager(name, dtype, device):
    case = CASES[name]
    inputs = case.inputs(device, dtype)
    results = attend(inputs, **case.options)
    assert (results.out.dtype, results.lse.dtype) == (dtype, torch.float32)
    assert_results_close(results, inputs, **case.bounds)


@pytest.mark.parametrize("name", ["tails", "causal-short-kv", "window-both", "gqa-8-2"])
def test_masked_blocks_need_not_be_peeled(name, device, monkeypatch):
    """One loop that masks every block computes the same: what peeling saves is time."""
    from jfa.impl import choice

    pinned = choice.forward_config
    monkeypatch.setattr(choice, "forward_config", lambda *kind: dataclasses.replace(pinned(*kind), peel=False))
    case = CASES[name]
    inputs = case.inputs(device)
    assert_results_close(attend(inputs, **case.options), inputs, **case.bounds)


def test_nobody_writes_what_the_tests_do_not_see(device):
    with poisoned() as shapes:
        for tensor in (torch.empty(3), torch.empty_like(torch.zeros(3)), torch.zeros(1).new_empty(3)):
            assert tensor.isnan().all()
    assert shapes == [(3,)] * 3
    inputs = CASES["tails"].inputs(device)
    with poisoned() as shapes:
        jagged_attention(inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets, impl="triton")
    assert tuple(inputs.q.shape) in shapes, "the output is not allocated where the tests poison memory"


def test_rows_that_see_nothing_are_zero_with_lse_minus_infinity(device):
    case = CASES["causal-short-kv"]
    results = attend(case.inputs(device), **case.options)
    # Sequence 2: rows 73 … 222, of which the first 130 stand before the first key.
    blind = slice(73, 73 + 130)
    assert (results.out[blind] == 0).all() and (results.lse[:, blind] == -torch.inf).all()
    assert results.lse[:, 73 + 130 :].isfinite().all()


def test_the_output_is_contiguous_and_shaped_as_documented(device):
    jagged = attend(CASES["gqa-8-2"].inputs(device))
    assert jagged.out.shape == (39, 8, 64) and jagged.lse.shape == (8, 39) and jagged.out.is_contiguous()
    broadcast = attend(CASES["broadcast"].inputs(device))
    assert broadcast.out.shape == (7, 32, 2, 64) and broadcast.lse.shape == (2, 7 * 32)
    assert broadcast.out.is_contiguous()


def test_without_lse_there_is_one_result(device):
    inputs = CASES["gqa-4-1"].inputs(device)
    out = jagged_attention(inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets)
    assert torch.equal(out, attend(inputs).out)


@pytest.mark.parametrize("scale", [0.7, 0.0, -0.2, 3])
def test_scale(scale, device):
    inputs = CASES["gqa-4-1"].inputs(device)
    assert_results_close(attend(inputs, scale=scale), inputs, scale=scale)


def test_scores_far_from_zero_do_not_overflow(device):
    case = Case(q_lens=(5, 70), kv_lens=(70, 66))
    for sign in (1, -1):
        inputs = case.inputs(device)
        # Every score lies near ±2,000, beyond what a float32 exponential can hold.
        inputs = dataclasses.replace(inputs, q=inputs.q * 0.1 + 50 * sign, k=inputs.k * 0.1 + 5)
        results = attend(inputs)
        assert results.out.isfinite().all()
        assert (results.lse * sign > 1000).all()
        assert_results_close(results, inputs)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_stays_in_its_own_sequence(which, device):
    case = Case(q_lens=(30, 70, 20), kv_lens=(66, 30, 90))
    clean = case.inputs(device)
    dirty = case.inputs(device)
    start = 30 if which == "q" else 66
    getattr(dirty, which)[start] = torch.nan
    expected, actual = attend(clean), attend(dirty)
    for rows in (slice(0, 30), slice(100, 120)):
        assert torch.equal(actual.out[rows], expected.out[rows])
        assert torch.equal(actual.lse[:, rows], expected.lse[:, rows])
    hit = actual.out[30:100].isnan()
    assert hit[0].all() and (which == "q" or hit.all()), "NaN in a sequence must not vanish either"


def test_each_sequence_alone_gives_the_same(device):
    case = CASES["window-both"]
    inputs = case.inputs(device)
    whole = attend(inputs, **case.options)
    row, key = 0, 0
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        alone = dataclasses.replace(case, q_lens=(q_len,), kv_lens=(kv_len,)).inputs(device)
        rows, keys = slice(row, row + q_len), slice(key, key + kv_len)
        alone = dataclasses.replace(alone, q=inputs.q[rows], k=inputs.k[keys], v=inputs.v[keys])
        found = attend(alone, **case.options)
        assert torch.equal(found.out, whole.out[rows]) and torch.equal(found.lse, whole.lse[:, rows])
        row, key = row + q_len, key + kv_len


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_impl_reference_is_the_reference(dtype, device):
    case = CASES["broadcast-causal"]
    inputs = case.inputs(device, dtype)
    tensors = inputs.q, inputs.k, inputs.v, inputs.kv_offsets
    out, lse = jagged_attention(*tensors, impl="reference", return_lse=True, **case.options)
    expected, expected_lse = attention(*tensors, **case.bounds)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
