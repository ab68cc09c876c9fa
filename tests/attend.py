"""Calls of the op for the tests of what it promises: on poisoned memory, and through its lse."""

from __future__ import annotations

from collections.abc import Callable

import torch
from shapes import poisoned
from tolerance import Results

from jfa import jagged_attention
from jfa.workloads import Inputs


def attend(inputs: Inputs, *, grads: bool = False, impl: str = "triton", **options) -> Results:
    """Run the op forward, and backward when `grads`; everything that it allocates uninitialised held NaN before."""
    with poisoned():
        out, lse = jagged_attention(
            *(inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets), return_lse=True, impl=impl, **options
        )
        three = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.grad_out) if grads else (None,) * 3
    return Results(out.detach(), lse.detach(), *three)


def lse_gradients(
    op: Callable, inputs: Inputs, dtype: torch.dtype, *, with_out: bool = True, **options
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k and v, in ``dtype``, of a weighted sum of lse, where it is finite, and of the output."""
    q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    out, lse = op(q, k, v, inputs.kv_offsets, inputs.q_offsets, **options)
    loss = (torch.where(lse.isfinite(), lse, 0.0) * lse_weights(lse)).sum()
    return torch.autograd.grad(loss + (out * inputs.grad_out.to(out)).sum() * with_out, (q, k, v))


def lse_weights(lse: torch.Tensor) -> torch.Tensor:
    """What `lse_gradients` weights lse by."""
    return torch.randn(lse.shape, generator=torch.Generator().manual_seed(7)).to(lse)
