"""Offsets: both integer widths, any strides, tokens behind the last one, bounds, and element indices beyond 2^31."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attend import attend  # noqa: E402
from shapes import CASES, DEVICES, offsets  # noqa: E402
from tolerance import assert_results_close  # noqa: E402

from jfa import jagged_attention  # noqa: E402
from jfa.workloads import Inputs  # noqa: E402

on_each_device = pytest.mark.parametrize("device", DEVICES)
FIELDS = ("out", "lse", "dk", "dv")


@on_each_device
@pytest.mark.parametrize("kv_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("q_dtype", [torch.int32, torch.int64], ids=str)
def test_both_widths_and_mixtures(q_dtype, kv_dtype, device):
    case = CASES["causal-short-q"]
    inputs = case.inputs(device, grad=True)
    expected = attend(inputs, grads=True, **case.options)
    wide = dataclasses.replace(
        inputs, q_offsets=inputs.q_offsets.to(q_dtype), kv_offsets=inputs.kv_offsets.to(kv_dtype)
    )
    actual = attend(wide, grads=True, **case.options)
    for name in FIELDS:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


@on_each_device
@pytest.mark.parametrize("schedule", ["static", "balanced-dynamic"])
def test_offsets_with_strides(schedule, device):
    """A column of a table of offsets, as a data loader that batches several features hands over."""
    inputs = CASES["empty-q"].inputs(device, grad=True)
    expected = attend(inputs, grads=True, schedule=schedule)
    table = torch.stack([inputs.q_offsets, inputs.kv_offsets], dim=1)
    strided = dataclasses.replace(inputs, q_offsets=table[:, 0], kv_offsets=table[:, 1])
    actual = attend(strided, grads=True, schedule=schedule)
    for name in FIELDS:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


@on_each_device
@pytest.mark.parametrize("bounds", [(70, 80), (71, 1000), (10**9, 10**9), (None, 80), (70, None)], ids=str)
def test_bounds_change_nothing(bounds, device):
    inputs = CASES["empty-q"].inputs(device, grad=True)
    expected = attend(inputs, grads=True)
    actual = attend(inputs, grads=True, max_q_len=bounds[0], max_kv_len=bounds[1])
    for name in FIELDS:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


@on_each_device
def test_bounds_of_zero_fit_an_empty_batch(device):
    case = CASES["all-empty-unused"]
    inputs = case.inputs(device, grad=True)
    assert_results_close(attend(inputs, grads=True, max_q_len=0, max_kv_len=0), inputs)


BAD = {
    "start": ({"kv_offsets": (1, 4, 9)}, {}, "kv_offsets starts at 1"),
    "order": ({"q_offsets": (0, 9, 7)}, {}, "q_offsets decreases from 9 to 7 at sequence 1"),
    "end": ({"kv_offsets": (0, 4, 11)}, {}, "kv_offsets ends at 11 and k has 10 tokens"),
    "max_q_len": ({}, {"max_q_len": 4}, "max_q_len is 4 and sequence 1 has 5 tokens"),
    "max_kv_len": ({}, {"max_kv_len": 5}, "max_kv_len is 5 and sequence 0 has 6 tokens"),
}


@on_each_device
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("why", BAD)
def test_bad_values_are_refused(why, impl, device, monkeypatch):
    """Always on the CPU; on a GPU, where reading them waits for it, when JFA_CHECK=1 asks for it."""
    if device == "cuda":
        monkeypatch.setenv("JFA_CHECK", "1")
    changed, options, message = BAD[why]
    ends = {"kv_offsets": (0, 6, 10), "q_offsets": (0, 3, 8), **changed}
    tensors = {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in ends.items()}
    q, k = torch.zeros(8, 2, 64, device=device), torch.zeros(10, 2, 64, device=device)
    with pytest.raises(ValueError, match=f"^{message}"):
        jagged_attention(q, k, k, **tensors, impl=impl, **options)


# What follows allocates up to about 60 GiB.


def large_inputs(lengths, heads, head_dim):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad_out = (
        torch.randn(sum(lengths), heads, head_dim, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(4)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()
    ends = offsets(lengths, "cuda")
    return Inputs(q, k, v, ends, ends, grad_out)


def assert_sequences_close(results, inputs, lengths, sequences):
    """Compare a few sequences of a batch that is too large to compare whole."""
    ends = offsets(lengths, "cpu").tolist()
    for sequence in sequences:
        rows = slice(ends[sequence], ends[sequence + 1])
        one = offsets((lengths[sequence],), "cuda")
        part = Inputs(inputs.q[rows], inputs.k[rows], inputs.v[rows], one, one, inputs.grad_out[rows])
        fields = {name: getattr(results, name)[rows] for name in ("out", "dq", "dk", "dv")}
        assert_results_close(dataclasses.replace(results, lse=results.lse[:, rows], **fields), part)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    lengths = (1000,) * 4300
    inputs = large_inputs(lengths, heads=4, head_dim=128)
    assert inputs.q.numel() > 2**31
    results = attend(inputs, grads=True, max_q_len=1000, max_kv_len=1000)
    for name in ("out", "dq", "dk", "dv"):
        assert all(part.isfinite().all() for part in getattr(results, name).chunk(16)), name
    # The first, the last, and the ones on both sides of 2^31 elements (row 4,194,304).
    assert_sequences_close(results, inputs, lengths, [0, 4193, 4194, 4195, 4299])


@pytest.mark.gpu
def test_a_broadcast_output_of_more_than_two_to_the_31_elements():
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = (3, 0, 70) * 5500
    q = torch.randn(256, 4, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
    k, v = torch.randn(2, sum(lengths), 4, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
    out, lse = jagged_attention(q, k, v, offsets(lengths, "cuda"), return_lse=True, impl="triton")
    assert out.numel() > 2**31
    last = slice(sum(lengths) - 70, None)
    alone, alone_lse = jagged_attention(q, k[last], v[last], offsets((70,), "cuda"), return_lse=True, impl="triton")
    assert torch.equal(out[-1], alone[0]) and torch.equal(lse[:, -256:], alone_lse)
    assert (out[-2] == 0).all() and all(part.isfinite().all() for part in out.chunk(16))


@pytest.mark.gpu
def test_a_gradient_whose_stride_passes_two_to_the_31():
    """Rows of the output's gradient 9,728 elements apart, 410,923 of them: the last begins at element 4 * 10^9."""
    lengths = (1000,) * 410 + (923,)
    inputs = large_inputs(lengths, heads=1, head_dim=64)
    wide = torch.full((sum(lengths), 9728), torch.nan, dtype=torch.bfloat16, device="cuda")
    grad = wide[:, :64].unsqueeze(1).copy_(inputs.grad_out)
    inputs = dataclasses.replace(inputs, grad_out=grad)
    results = attend(inputs, grads=True, max_q_len=1000, max_kv_len=1000)
    assert_sequences_close(results, inputs, lengths, [0, 220, 221, 409, 410])
