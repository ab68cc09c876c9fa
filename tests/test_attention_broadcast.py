"""One q for all sequences: as if it were repeated, without repeating it, and its gradient summed over the batch."""

import dataclasses
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attend import attend  # noqa: E402
from shapes import CASES, DEVICES, Case, offsets, poisoned  # noqa: E402
from tolerance import assert_results_close, reference_results, relative_error  # noqa: E402

from jfa import jagged_attention  # noqa: E402

on_each_device = pytest.mark.parametrize("device", DEVICES)


@on_each_device
@pytest.mark.parametrize(
    "name", ["broadcast", "broadcast-long-q", "broadcast-gqa", "broadcast-causal", "broadcast-window"]
)
def test_as_if_q_were_repeated(name, device):
    case = CASES[name]
    inputs = case.inputs(device, grad=True)
    batch = len(case.kv_lens)
    repeated = dataclasses.replace(
        inputs,
        q=inputs.q.detach().repeat(batch, 1, 1).requires_grad_(),
        q_offsets=offsets((case.q_len,) * batch, device),
        grad_out=inputs.grad_out.flatten(0, 1),
    )
    actual = attend(inputs, grads=True, **case.options)
    expected = attend(repeated, grads=True, **case.options)
    assert torch.equal(actual.out.flatten(0, 1), expected.out) and torch.equal(actual.lse, expected.lse)
    assert torch.equal(actual.dk, expected.dk) and torch.equal(actual.dv, expected.dv)
    summed = expected.dq.view(batch, case.q_len, case.heads, case.head_dim).sum(0)
    torch.testing.assert_close(actual.dq, summed, rtol=1e-5, atol=1e-5)


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_sum_over_the_batch_is_rounded_once(dtype, device):
    """Forty terms that were each rounded, or a sum kept in the dtype, would miss the bound."""
    case = Case(q_len=2, kv_lens=(2, 3) * 20, heads=1, heads_kv=1)
    inputs = case.inputs(device, dtype, grad=True)
    results = attend(inputs, grads=True)
    assert_results_close(results, inputs)
    exact = reference_results(inputs, torch.float64).dq
    sequential = torch.zeros_like(inputs.q)
    for sequence in range(len(case.kv_lens)):
        start, end = inputs.kv_offsets[sequence : sequence + 2].tolist()
        alone = dataclasses.replace(
            inputs,
            k=inputs.k[start:end].detach(),
            v=inputs.v[start:end].detach(),
            kv_offsets=offsets((end - start,), device),
            grad_out=inputs.grad_out[sequence : sequence + 1],
        )
        sequential += reference_results(alone).dq
    assert relative_error(results.dq, exact) < relative_error(sequential, exact)


@on_each_device
def test_q_is_never_expanded(device):
    """Of B * L_q rows there are the output in the forward and, given a contiguous gradient, nothing in the backward."""
    case = Case(q_len=33, kv_lens=(5, 0, 70, 3))
    inputs = case.inputs(device, grad=True)
    expanded = math.prod(inputs.grad_out.shape)

    def large(shapes):
        return [shape for shape in shapes if math.prod(shape) >= expanded // 2 and shape[0] != len(inputs.k)]

    with poisoned() as shapes:
        out = jagged_attention(inputs.q, inputs.k, inputs.v, inputs.kv_offsets, impl="triton")
    assert large(shapes) == [(4 * 33, 2, 64)]
    with poisoned() as shapes:
        torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.grad_out)
    assert large(shapes) == []


@pytest.mark.gpu
def test_peak_memory_is_that_of_the_results():
    case = Case(q_len=256, kv_lens=(1, 64) * 256, heads=4, heads_kv=4, head_dim=128)
    inputs = case.inputs("cuda", torch.bfloat16, grad=True)
    out_bytes = inputs.grad_out.numel() * inputs.grad_out.element_size()
    arguments = inputs.q, inputs.k, inputs.v, inputs.kv_offsets
    torch.autograd.grad(jagged_attention(*arguments), arguments[:3], inputs.grad_out)

    def peak_over(call):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        return result, torch.cuda.max_memory_allocated() - before

    out, forward = peak_over(lambda: jagged_attention(*arguments))
    # Where long sequences are cut, their parts' results, in float32: about two tiles for each CTA.
    partial = 2 * torch.cuda.get_device_properties(0).multi_processor_count * 128 * 128 * 4
    assert out_bytes <= forward < 1.1 * out_bytes + partial
    _, backward = peak_over(lambda: torch.autograd.grad(out, arguments[:3], inputs.grad_out))
    assert backward < 0.1 * out_bytes + inputs.k.nbytes + inputs.v.nbytes


@on_each_device
def test_the_same_q_object_may_serve_both_ways(device):
    """With offsets q is jagged, without them broadcast: the argument decides, not the shape."""
    inputs = Case(q_len=8, kv_lens=(6, 4)).inputs(device)
    tensors = inputs.q, inputs.k, inputs.v, inputs.kv_offsets
    jagged = jagged_attention(*tensors, offsets((3, 5), device))
    broadcast = jagged_attention(*tensors)
    assert jagged.shape == (8, 2, 64) and broadcast.shape == (2, 8, 2, 64)
    torch.testing.assert_close(jagged[:3], broadcast[0, :3])
    torch.testing.assert_close(jagged[3:], broadcast[1, 3:])
