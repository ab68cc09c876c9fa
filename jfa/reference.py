"""Jagged attention in plain PyTorch, one sequence at a time: the specification that the kernels are tested against.

It is differentiable by autograd, runs on any device and in any floating dtype, and favours being obviously right over
being fast: it reads the offsets on the host and keeps every score.
"""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_offsets: torch.Tensor,
    q_offsets: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax(scale q kᵀ) v for each sequence; returns (out, lse).

    q is (total_q, H, D) with `q_offsets` (B + 1), or (L_q, H, D) that every sequence attends with; k and v are
    (total_kv, H_kv, D), query head h reading head h // (H / H_kv). `scale` defaults to 1 / sqrt(D). Row i of a
    sequence sees columns j with i + o - window_left <= j <= i + o + window_right, o = L_kv - L_q (the ends align); a
    bound of -1 is unbounded, and (-1, 0) is causal. `dtype` is what everything is computed in (the inputs' by default).

    out is (total_q, H, D), or (B, L_q, H, D) for a broadcast q, in the inputs' dtype, or float64 when computed so.
    lse, the logarithm of the sum of the exponentials of the scaled scores, is (H, total_q) float32, or float64 when
    computed so, with B * L_q columns for a broadcast q. A row that sees nothing has out 0 and lse -inf. Rows of q, k
    and v past the last offset have out 0 and lse -inf, influence nothing, and receive zero gradients.
    """
    compute = dtype or q.dtype
    out_dtype = torch.float64 if compute == torch.float64 else q.dtype
    lse_dtype = torch.float64 if compute == torch.float64 else torch.float32
    scale = q.shape[2] ** -0.5 if scale is None else scale
    kv_lens = _lengths(kv_offsets)
    keys, values = (_split(tensor.to(compute), kv_lens) for tensor in (k, v))
    if q_offsets is None:
        # Expanded before it is taken apart, so that autograd sums the batch's gradients in one reduction.
        queries = q.to(compute).expand(len(kv_lens), *q.shape).unbind(0)
    else:
        queries = _split(q.to(compute), _lengths(q_offsets))
    results = [
        _one_sequence(*sequence, scale, window_left, window_right)
        for sequence in zip(queries, keys, values, strict=True)
    ]
    outs = [out.to(out_dtype) for out, _ in results]
    lses = [lse.to(lse_dtype) for _, lse in results]
    unused = 0 if q_offsets is None else q.shape[0] - sum(out.shape[0] for out in outs)
    # Sums over nothing tie the output to its inputs in a batch without sequences, whose gradients are zeros.
    nothing = q[:0].sum() + k[:0].sum() + v[:0].sum()
    outs.append(q.new_zeros(unused, *q.shape[1:], dtype=out_dtype) + nothing.to(out_dtype))
    lses.append(q.new_full((q.shape[1], unused), -torch.inf, dtype=lse_dtype))
    out, lse = torch.cat(outs), torch.cat(lses, dim=1)
    return (out if q_offsets is not None else out.view(len(kv_lens), *q.shape)), lse


def _one_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window_left: int, window_right: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (L_q, H, D), k and v (L_kv, H_kv, D) -> out (L_q, H, D), lse (H, L_q)."""
    q_len, heads, head_dim = q.shape
    kv_len, heads_kv, _ = k.shape
    grouped = q.transpose(0, 1).reshape(heads_kv, heads // heads_kv, q_len, head_dim)
    keys, values = (tensor.transpose(0, 1).unsqueeze(1) for tensor in (k, v))
    seen = _seen(q_len, kv_len, window_left, window_right, q.device)
    blind = ~seen.any(dim=1, keepdim=True)
    scores = (grouped @ keys.transpose(2, 3)) * scale
    # A blind row keeps finite scores, and so no NaN in its gradient; its weights are set to zero below.
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(blind, 0.0)
    weights = scores.softmax(dim=3).masked_fill(~seen, 0.0)
    out = (weights @ values).reshape(heads, q_len, head_dim).transpose(0, 1)
    exact = scores if scores.dtype == torch.float64 else scores.float()
    lse = exact.logsumexp(dim=3).masked_fill(blind[:, 0], -torch.inf)
    return out, lse.reshape(heads, q_len)


def _seen(q_len: int, kv_len: int, left: int, right: int, device: torch.device) -> torch.Tensor:
    """Which columns each row sees: bool (L_q, L_kv)."""
    column = torch.arange(kv_len, device=device)
    diagonal = (torch.arange(q_len, device=device) + kv_len - q_len)[:, None]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= column >= diagonal - left
    if right >= 0:
        seen &= column <= diagonal + right
    return seen


def _lengths(offsets: torch.Tensor) -> list[int]:
    ends: list[int] = offsets.tolist()
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def _split(tensor: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """Each sequence's rows, without those that belong to none; one split, so that backward is one concatenation."""
    return tensor.split([*lengths, tensor.shape[0] - sum(lengths)])[:-1]
