"""Nested tensors go in and come out, and the numbers are the op's."""

from __future__ import annotations

import pytest
import torch

from jfa import jagged_attention, nested_attention
from jfa.reference import attention as reference

LENGTHS = ([3, 0, 70], [5, 66, 1])


def nested(lengths: list[int], heads: int, generator: torch.Generator) -> torch.Tensor:
    parts = [torch.randn(length, heads, 64, generator=generator) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = nested(LENGTHS[0], 4, generator)
    k = nested(LENGTHS[1], 2, generator)
    values = torch.randn(sum(LENGTHS[1]), 2, 64, generator=generator, requires_grad=True)
    return q, k, torch.nested.nested_tensor_from_jagged(values, k.offsets())


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_nested_in_nested_out(impl: str, device: str) -> None:
    if impl == "triton" and device == "cuda":
        pytest.skip("these tensors are on the CPU")
    q, k, v = inputs()
    out, lse = nested_attention(q, k, v, causal=True, return_lse=True, impl=impl)
    expected, expected_lse = reference(
        q.values(), k.values(), v.values(), k.offsets(), q.offsets(), window_left=-1, window_right=0
    )
    assert out.is_nested
    assert [part.shape[0] for part in out.unbind()] == LENGTHS[0]
    torch.testing.assert_close(out.values(), expected)
    torch.testing.assert_close(lse, expected_lse)


def test_gradients_reach_the_nested_leaves() -> None:
    q, k, v = inputs()
    nested_attention(q, k, v, impl="reference").values().square().sum().backward()
    assert q.grad is not None and q.grad.is_nested
    values = [tensor.values().detach().requires_grad_() for tensor in (q, k, v)]
    jagged_attention(*values, k.offsets(), q.offsets(), impl="reference").square().sum().backward()
    torch.testing.assert_close(q.grad.values(), values[0].grad)


def test_broadcast_q_is_plain() -> None:
    _, k, v = inputs()
    q = torch.randn(7, 4, 64)
    out = nested_attention(q, k, v, impl="reference")
    torch.testing.assert_close(out, jagged_attention(q, k.values(), v.values(), k.offsets(), impl="reference"))


def test_what_does_not_fit_is_named() -> None:
    q, k, v = inputs()
    with pytest.raises(TypeError, match="k must be a nested tensor of layout torch.jagged"):
        nested_attention(q, k.values(), v)
    with pytest.raises(ValueError, match="q must be .* ragged in dimension 1"):
        nested_attention(q.transpose(1, 2), k, v)
    with pytest.raises(ValueError, match="v and k have offsets of their own"):
        nested_attention(q, k, nested(LENGTHS[0], 2, torch.Generator()))
    holes = torch.nested.nested_tensor_from_jagged(k.values(), k.offsets(), lengths=torch.tensor([1, 66, 1]))
    with pytest.raises(ValueError, match="k has holes"):
        nested_attention(q, holes, v)
