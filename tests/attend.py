"""One call of the op for the tests of what it promises, on poisoned memory."""

from __future__ import annotations

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
