"""Adapter for torch's nested tensors of jagged layout: their values and offsets are what the op takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jfa.attention import jagged_attention


def nested_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """:func:`jfa.jagged_attention` of nested tensors.

    Args:
        q: nested (B, lengths, H, D), or a plain (L_q, H, D) for broadcast.
        k, v: nested (B, lengths, H_kv, D) with one set of offsets (made by one nested tensor, or with
            ``torch.nested.nested_tensor_from_jagged(values, offsets)`` from the same ``offsets``).
        options: the keyword arguments of ``jagged_attention``.

    Returns:
        Nested as q, or (B, L_q, H, D) for broadcast; with ``return_lse`` a pair with the float32 lse (H, rows).

    Raises:
        TypeError, ValueError: not of jagged layout, not ragged in dimension 1, with holes, or k and v of different
            offsets; and whatever ``jagged_attention`` raises.
    """
    k_values, kv_offsets = _parts("k", k)
    v_values, _ = _parts("v", v)
    if k.shape[1] != v.shape[1]:  # torch gives one such size to all that share their offsets, and another to others
        raise ValueError(
            "v and k have offsets of their own, whose values would have to be read to be compared: make v with "
            "torch.nested.nested_tensor_from_jagged(values, k.offsets())"
        )
    if not q.is_nested:
        return jagged_attention(q, k_values, v_values, kv_offsets, **options)
    q_values, q_offsets = _parts("q", q)
    result = jagged_attention(q_values, k_values, v_values, kv_offsets, q_offsets, **options)
    out, *rest = result if isinstance(result, tuple) else (result,)
    nested = torch.nested.nested_tensor_from_jagged(out, q_offsets)
    return (nested, *rest) if rest else nested


def _parts(name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Values (tokens, H, D) and offsets (B + 1) of a nested tensor."""
    if not tensor.is_nested or tensor.layout != torch.jagged:
        raise TypeError(
            f"{name} must be a nested tensor of layout torch.jagged: got {tensor.layout}, nested {tensor.is_nested}"
        )
    if tensor.dim() != 4 or tensor._ragged_idx != 1:  # type: ignore[attr-defined]
        raise ValueError(
            f"{name} must be (B, lengths, heads, head_dim), ragged in dimension 1; transpose it back first"
        )
    if tensor.lengths() is not None:  # type: ignore[attr-defined]
        raise ValueError(f"{name} has holes between its sequences (lengths besides offsets): call .contiguous() first")
    return tensor.values(), tensor.offsets()  # type: ignore[attr-defined]
