"""Every rule on the op's inputs, and the error that names the argument that breaks it.

`validate` looks at shapes, dtypes and plain Python values only: it never reads a tensor, so it costs no host
synchronisation and traces under `torch.compile(fullgraph=True)`. `check_values` reads the offsets.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from jfa.schedule import SCHEDULES as _SCHEDULES
from jfa.schedule import TileTable

IMPLS = ("auto", "reference", "triton", "hopper", "hopper-autotune")
SCHEDULES = ("auto", *_SCHEDULES)
KERNEL_HEAD_DIMS = (64, 128)
HOPPER_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_DTYPES = (*HOPPER_DTYPES, torch.float32)
REFERENCE_DTYPES = (*KERNEL_DTYPES, torch.float64)
_OFFSET_DTYPES = (torch.int32, torch.int64)
_FARTHEST_BOUND = 2**30
"""Window bounds are cut to this: the kernels add them to positions in int32, and no sequence is that long (its k alone
would take 128 GiB), so that a larger bound, such as sys.maxsize for "unbounded", means the same."""


@dataclass(frozen=True)
class Problem:
    """What one valid call asks for, without its tensors; lengths and totals in tokens.

    `total_q` counts the rows of the output (B * L_q for broadcast), `q_len` is L_q for broadcast and 0 otherwise.
    `max_q_len` and `max_kv_len` bound the lengths from above. A window bound of -1 is unbounded; causal is a right
    bound of 0. `total_kv` counts the rows of k, those past the last offset included.
    """

    broadcast_q: bool
    batch: int
    heads: int
    heads_kv: int
    head_dim: int
    total_q: int
    q_len: int
    total_kv: int
    max_q_len: int
    max_kv_len: int
    scale: float
    window_left: int
    window_right: int


def validate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_offsets: torch.Tensor,
    q_offsets: torch.Tensor | None = None,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    deterministic: bool = False,
    impl: str = "auto",
    schedule: Any = "auto",
) -> Problem:
    """Check what can be checked without reading a tensor, and return the `Problem`.

    q (total_q, H, D), or (L_q, H, D) when `q_offsets` is None; k and v (total_kv, H_kv, D), H a multiple of H_kv;
    offsets int32 or int64 (B + 1). Raises TypeError for the wrong kind of value (dtypes included) and ValueError for
    a wrong one. With an `impl` of kernels the limits of `check_kernel_limits` apply too; a caller that resolves "auto"
    applies them itself.
    """
    _check_tokens(q, k, v)
    batch = _check_offsets("kv_offsets", kv_offsets, q)
    if q_offsets is not None and _check_offsets("q_offsets", q_offsets, q) != batch:
        raise ValueError(
            f"q_offsets has {q_offsets.shape[0]} elements and kv_offsets {kv_offsets.shape[0]}: expected B + 1 in "
            "both; an empty sequence repeats its offset"
        )
    for name, flag in (("causal", causal), ("deterministic", deterministic)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False: got {flag!r}")
    left, right = _window(window, causal)
    rows, total_kv = q.shape[0], k.shape[0]
    _check_name("impl", impl, IMPLS)
    _check_schedule(schedule)
    if impl in ("triton", "hopper", "hopper-autotune"):
        check_kernel_limits(q.dtype, q.shape[2], impl)
    return Problem(
        broadcast_q=q_offsets is None,
        batch=batch,
        heads=q.shape[1],
        heads_kv=k.shape[1],
        head_dim=q.shape[2],
        total_q=rows if q_offsets is not None else batch * rows,
        q_len=0 if q_offsets is not None else rows,
        total_kv=total_kv,
        max_q_len=_max_q_len(max_q_len, rows, q_offsets is None),
        max_kv_len=_max_len("max_kv_len", max_kv_len, total_kv),
        scale=_scale(scale, q.shape[2]),
        window_left=left,
        window_right=right,
    )


def check_kernel_limits(dtype: torch.dtype, head_dim: int, impl: str) -> None:
    """Raise if no kernel that ``impl`` may pick serves this dtype or head dimension; the reference serves more."""
    dtypes = HOPPER_DTYPES if impl.startswith("hopper") else KERNEL_DTYPES
    if dtype not in dtypes:
        raise TypeError(
            f"q is {dtype}, which impl={impl!r} does not support: expected one of {_listed(dtypes)}; "
            "convert the inputs or pass impl='reference'"
        )
    if head_dim not in KERNEL_HEAD_DIMS:
        raise ValueError(
            f"q has head dimension {head_dim}, which impl={impl!r} does not support: expected one of "
            f"{_listed(KERNEL_HEAD_DIMS)}; pad q, k and v with zeros (and pass scale=) or pass impl='reference'"
        )


def check_values(kv_offsets: torch.Tensor, q_offsets: torch.Tensor | None, problem: Problem) -> None:
    """Read the offsets (this synchronises with the device) and raise ValueError if they describe no batch.

    Offsets start at 0, never decrease, end at or before the number of tokens (tokens past the end belong to no
    sequence), and no length exceeds the max_*_len that the caller gave.
    """
    _check_offset_values("kv", kv_offsets, "k", problem.total_kv, problem.max_kv_len)
    if q_offsets is not None:
        _check_offset_values("q", q_offsets, "q", problem.total_q, problem.max_q_len)


def _check_tokens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor: got {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout != torch.strided:
            raise TypeError(f"{name} is a {tensor.layout} tensor: expected a strided one; pass its values and offsets")
        if tensor.dim() != 3:
            raise ValueError(f"{name} has shape {_shape(tensor)}: expected (tokens, heads, head_dim)")
        if tensor.dtype not in REFERENCE_DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}: expected one of {_listed(REFERENCE_DTYPES)}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} is {tensor.dtype} and q {q.dtype}: expected one dtype; convert with .to(q.dtype)")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q on {q.device}: move it with .to(q.device)")
        if tensor.shape[2] != q.shape[2]:
            raise ValueError(
                f"{name} has shape {_shape(tensor)} and q {_shape(q)}: expected one head dimension (the last)"
            )
    if q.shape[1] == 0 or q.shape[2] == 0:
        raise ValueError(f"q has shape {_shape(q)}: expected at least one head and one channel")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"k has {k.shape[1]} heads and q {q.shape[1]}: expected q's heads to be a multiple of k's (grouped queries)"
        )
    if v.shape[0] != k.shape[0] or v.shape[1] != k.shape[1]:
        raise ValueError(f"v has shape {_shape(v)}: expected k's shape {_shape(k)}")


def _check_offsets(name: str, offsets: torch.Tensor, q: torch.Tensor) -> int:
    """Check one offsets tensor; returns the batch size."""
    if not isinstance(offsets, torch.Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor: got {type(offsets).__name__}; "
            "build it with torch.tensor(..., dtype=torch.int32, device=q.device)"
        )
    if offsets.dtype not in _OFFSET_DTYPES:
        raise TypeError(f"{name} is {offsets.dtype}: expected torch.int32 or int64; convert with .to(torch.int32)")
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(
            f"{name} has shape {_shape(offsets)}: expected (B + 1,), the running sum of the lengths from 0 on"
        )
    if offsets.device != q.device:
        raise ValueError(f"{name} is on {offsets.device} and q on {q.device}: move it with .to(q.device)")
    return offsets.shape[0] - 1


def _window(window: Any, causal: bool) -> tuple[int, int]:
    if window is None:
        return -1, 0 if causal else -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be a pair (left, right) of integers or None: got {window!r}")
    left, right = window
    for side, bound in (("left", left), ("right", right)):
        if isinstance(bound, bool) or not isinstance(bound, int):
            raise TypeError(f"window's {side} bound must be an integer: got {bound!r}")
        if bound < -1:
            raise ValueError(f"window's {side} bound is {bound}: expected a number of tokens, or -1 for unbounded")
    if causal and right > 0:
        raise ValueError(
            f"window looks {right} tokens to the right, which causal=True forbids: pass window=({left}, 0) or "
            "causal=False"
        )
    left, right = min(left, _FARTHEST_BOUND), min(right, _FARTHEST_BOUND)
    return left, 0 if causal else right


def _max_len(name: str, given: Any, tokens: int) -> int:
    """An upper bound of the lengths: what was given, never above the number of tokens."""
    if given is None:
        return tokens
    if isinstance(given, torch.Tensor):
        raise TypeError(
            f"{name} is a tensor: expected a Python int, because reading a tensor stops the host until the device is "
            "done, and compiled code anew for each value; pass int(...) of a length that you know, or an upper bound"
        )
    if isinstance(given, bool) or not isinstance(given, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int or None: got {given!r}")
    if given < 0:
        raise ValueError(f"{name} is {given}: expected the longest length of the batch, in tokens, or a bound above it")
    return torch.sym_min(given, tokens)


def _max_q_len(given: Any, rows: int, broadcast: bool) -> int:
    bound = _max_len("max_q_len", given, rows)
    if broadcast and bound < rows:
        raise ValueError(
            f"max_q_len is {given} and q has {rows} rows: without q_offsets all rows of q attend to every sequence; "
            "leave max_q_len out, or pass q_offsets"
        )
    return bound


def _scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"scale must be a float or None (1 / sqrt(head_dim)): got {_kind(scale)}")
    if not -float("inf") < scale < float("inf"):
        raise ValueError(f"scale is {scale}: expected a finite number")
    return float(scale)


def _check_name(argument: str, given: Any, known: tuple[str, ...]) -> None:
    if not isinstance(given, str):
        raise TypeError(f"{argument} must be one of {_listed(known)}: got {_kind(given)}")
    if given not in known:
        _refuse_name(argument, given, known)


def _refuse_name(argument: str, given: str, known: tuple[str, ...]) -> NoReturn:
    near = difflib.get_close_matches(given, known, n=2)
    hint = f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
    raise ValueError(f"{argument} is {given!r}: expected one of {_listed(known)}{hint}")


def _check_schedule(schedule: Any) -> None:
    if isinstance(schedule, str):
        _check_name("schedule", schedule, SCHEDULES)
        return
    if not isinstance(schedule, TileTable):
        raise TypeError(
            f"schedule must be one of {_listed(SCHEDULES)} or a tile table made by jfa.plan(...): got {_kind(schedule)}"
        )


def _check_offset_values(side: str, offsets: torch.Tensor, holder: str, tokens: int, max_len: int) -> None:
    values = offsets.detach().to("cpu", torch.int64)
    lengths = values.diff()
    if values[0] != 0:
        raise ValueError(f"{side}_offsets starts at {int(values[0])}: expected 0")
    if (lengths < 0).any():
        at = int((lengths < 0).nonzero()[0])
        raise ValueError(
            f"{side}_offsets decreases from {int(values[at])} to {int(values[at + 1])} at sequence {at}: expected the "
            "running sum of the lengths"
        )
    if values[-1] > tokens:
        raise ValueError(
            f"{side}_offsets ends at {int(values[-1])} and {holder} has {tokens} tokens: expected an end at or before "
            "them"
        )
    if len(lengths) and lengths.max() > max_len:
        at = int(lengths.argmax())
        raise ValueError(
            f"max_{side}_len is {max_len} and sequence {at} has {int(lengths[at])} tokens: expected the longest length "
            "of the batch, or a bound above it"
        )


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(str(value) for value in values)
