"""How close is close enough: a kernel may err at most twice as much as eager PyTorch does in the inputs' own dtype.

Errors are L2 norms of the difference to float64 on the same input, over the whole tensor and over each sequence alone,
so that one wrong sequence cannot hide in a large batch. NaN never passes, nor does an infinity out of place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jfa.reference import attention
from jfa.workloads import Inputs

FACTOR = 2.0
# Kernels compute in float32 and exponentiate score - lse, numbers of size ten that were each rounded before, so that
# even one key's weight of 1 is off by a few of these; eager's float32 can be exact by luck. The same holds for what is
# left of a gradient that cancels exactly, as a share of its terms.
FLOAT32_ROUNDINGS = 8 * torch.finfo(torch.float32).eps
# Eager can be lucky on a single vector, whose error is that of a handful of roundings; not on many.
LUCK = 8.0


@dataclass(frozen=True)
class Results:
    """What one call gave: out, lse, and the gradients of q, k and v (None where no gradient was asked for)."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None


def reference_results(inputs: Inputs, dtype: torch.dtype | None = None, *, grads: bool = True, **options) -> Results:
    """The reference's results on `inputs`, computed in `dtype` (the inputs' by default); float64 is the exact result.

    The tensors are converted before autograd sees them, so float64 gradients stay float64.
    """
    q, k, v = (
        tensor.detach().to(dtype or tensor.dtype).requires_grad_(grads) for tensor in (inputs.q, inputs.k, inputs.v)
    )
    out, lse = attention(q, k, v, inputs.kv_offsets, inputs.q_offsets, **options)
    if not grads:
        return Results(out, lse)
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), inputs.grad_out.to(out.dtype)))


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """‖actual − exact‖ / ‖exact‖ in float64; 0 for two zero tensors, infinite when only the exact one is zero."""
    difference = (actual.double() - exact.double()).norm().item()
    norm = exact.double().norm().item()
    if norm == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / norm


def assert_close_to_reference(
    actual: torch.Tensor,
    exact64: torch.Tensor,
    low_precision: torch.Tensor,
    factor: float = FACTOR,
    *,
    what: str = "result",
    offsets: torch.Tensor | None = None,
    dim: int = 0,
    allowance: float = 0.0,
) -> None:
    """Fail unless `actual` errs at most `factor` times as much as `low_precision` does, both against `exact64`.

    With `offsets` (B + 1) the same is asked of each sequence's slice along `dim` (a little less of one that holds only
    a few vectors), and everything past the last offset must equal the exact result (zeros, or -inf for lse).
    Infinities must stand exactly where the exact result has them.
    `allowance` is an absolute L2 error that always passes, for results that are all cancellation.
    """
    exact = exact64
    assert exact.dtype == torch.float64, f"{what}: the exact result is {exact.dtype}"
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    finite = exact.isfinite()
    assert torch.equal(actual.double()[~finite], exact[~finite]), (
        f"{what}: differs where {exact[~finite].unique()} is due"
    )
    # Rounding the exact result once to its dtype is always right.
    rounding = max(torch.finfo(low_precision.dtype).eps / 2, FLOAT32_ROUNDINGS)
    parts = [torch.where(finite, tensor.double(), 0.0) for tensor in (actual, exact, low_precision)]

    def check(where: str, actual: torch.Tensor, exact: torch.Tensor, low: torch.Tensor, factor: float) -> None:
        error, eager, norm = ((actual - exact).norm().item(), (low - exact).norm().item(), exact.norm().item())
        bound = max(factor * eager, rounding * norm) + allowance
        # Written so that a NaN error fails.
        assert error <= bound, (
            f"{where}: error {error:.3g}, bound {bound:.3g} ({factor:.3g} x eager's {eager:.3g}), norm {norm:.3g}"
        )

    check(what, *parts, factor)
    if offsets is None:
        return
    ends = offsets.tolist()
    heads = exact.shape[1 - dim]
    for sequence, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        if end > start:
            lucky = factor * (1 + LUCK / (heads * (end - start)))
            check(f"{what} of sequence {sequence}", *(part.narrow(dim, start, end - start) for part in parts), lucky)
    tail, exact_tail = (part.narrow(dim, ends[-1], part.shape[dim] - ends[-1]) for part in parts[:2])
    assert torch.equal(tail, exact_tail), f"{what}: something was written past the last offset"


def assert_results_close(actual: Results, inputs: Inputs, factor: float = FACTOR, **options) -> None:
    """Compare every part of `actual` that is there with the float64 reference and the eager one in the inputs' dtype.

    Exact gradients of q and k can be all cancellation (one key: its weight is 1 whatever q is); what float32 leaves of
    one is bounded by the sizes of the vectors in it.
    """
    grads = actual.dq is not None
    exact = reference_results(inputs, torch.float64, grads=grads, **options)
    low = reference_results(inputs, grads=grads, **options)
    rows = inputs.q_offsets
    pairs = [(results.out, results.lse) for results in (actual, exact, low)]
    if rows is None:
        assert actual.out.shape == exact.out.shape, f"out: shape {tuple(actual.out.shape)}"
        rows = torch.arange(len(inputs.kv_offsets)) * len(inputs.q)
        pairs = [(out.flatten(0, 1), lse) for out, lse in pairs]
    outs, lses = zip(*pairs, strict=True)
    assert_close_to_reference(*outs, factor, what="out", offsets=rows)
    # Of a logarithm the absolute error counts: it is the relative error of what it stands for.
    absolute = FLOAT32_ROUNDINGS * inputs.q.shape[1] ** 0.5
    assert_close_to_reference(*lses, factor, what="lse", offsets=rows, dim=1, allowance=absolute)
    if not grads:
        return
    scale = options.get("scale") or inputs.q.shape[-1] ** -0.5
    q, k, v = (_longest(tensor) for tensor in (inputs.q, inputs.k, inputs.v))
    left = FLOAT32_ROUNDINGS * abs(scale) * inputs.grad_out.double().nan_to_num(0).norm().item() * v
    sides = {"dq": (inputs.q_offsets, left * k), "dk": (inputs.kv_offsets, left * q), "dv": (inputs.kv_offsets, 0.0)}
    for name, (offsets, allowance) in sides.items():
        three = (getattr(results, name) for results in (actual, exact, low))
        assert_close_to_reference(*three, factor, what=name, offsets=offsets, allowance=allowance)


def _longest(tensor: torch.Tensor) -> float:
    """The largest norm of one head's vector, NaN aside."""
    return tensor.detach().double().nan_to_num(0).norm(dim=-1).flatten().amax().item() if tensor.numel() else 0.0
