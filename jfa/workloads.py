"""Named workloads: the sequence lengths, heads and masks on which every implementation is timed.

Lengths come from one `numpy.random.default_rng(0)` drawn in a fixed order, so that a name means the same lengths on
every machine and for every implementation. Nothing here needs torch until `Workload.inputs` is called.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of one call: q, k, v (tokens, heads, head_dim), int32 offsets (B + 1), and a gradient for the output.

    `q` is (L_q, H, D) and `q_offsets` None for a broadcast workload; `grad_out` has the shape of the op's output:
    (total_q, H, D), or (B, L_q, H, D) for broadcast.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_offsets: torch.Tensor | None
    kv_offsets: torch.Tensor
    grad_out: torch.Tensor


@dataclass(frozen=True, eq=False)
class Workload:
    """Attention over a batch of sequences: sequence b has `q_lens[b]` queries and `kv_lens[b]` keys.

    `q_lens` and `kv_lens` are int64 arrays of B lengths >= 0, in tokens. With `broadcast_q` one Q of `q_lens[0]` rows
    attends to every sequence, and all `q_lens` are equal. `window` is (left, right), -1 for unbounded, aligned to the
    ends of the two sequences; `causal` is a right bound of 0. `seed` is the one that drew the lengths.

    Raises ValueError when the fields contradict one another.
    """

    name: str
    heads: int
    heads_kv: int
    head_dim: int
    q_lens: np.ndarray
    kv_lens: np.ndarray
    broadcast_q: bool
    dtype: str = "bfloat16"
    seed: int = 0
    causal: bool = False
    window: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for field in ("q_lens", "kv_lens"):
            object.__setattr__(self, field, _lengths(field, getattr(self, field)))
        if len(self.q_lens) != len(self.kv_lens):
            raise ValueError(
                f"q_lens and kv_lens must have one length a sequence: got {len(self.q_lens)} and {len(self.kv_lens)}"
            )
        if self.broadcast_q and len(np.unique(self.q_lens)) > 1:
            raise ValueError("broadcast_q: every sequence sees the same Q, so all q_lens must be equal")
        if min(self.heads, self.heads_kv, self.head_dim) < 1 or self.heads % self.heads_kv:
            raise ValueError(
                f"heads must be a positive multiple of heads_kv, and head_dim positive: got heads {self.heads}, "
                f"heads_kv {self.heads_kv}, head_dim {self.head_dim}"
            )
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}: got {self.dtype!r}")
        if self.causal and self.window is not None and self.window[1] > 0:
            raise ValueError(f"window: causal looks 0 tokens to the right, window {self.window} looks {self.window[1]}")

    @property
    def batch(self) -> int:
        """The number of sequences, empty ones included."""
        return len(self.kv_lens)

    @property
    def total_q(self) -> int:
        """Rows of the output, in tokens: the sum of `q_lens` (B * L_q for broadcast)."""
        return int(self.q_lens.sum())

    @property
    def total_kv(self) -> int:
        """The sum of `kv_lens`, in tokens."""
        return int(self.kv_lens.sum())

    @property
    def max_q_len(self) -> int:
        """The longest Q, in tokens; 0 for a batch without sequences."""
        return int(self.q_lens.max(initial=0))

    @property
    def max_kv_len(self) -> int:
        """The longest KV, in tokens; 0 for a batch without sequences."""
        return int(self.kv_lens.max(initial=0))

    @property
    def window_bounds(self) -> tuple[int, int]:
        """The window that `causal` and `window` mean together: (left, right), -1 for unbounded."""
        left, right = self.window or (-1, -1)
        return left, 0 if self.causal else right

    def pairs(self) -> int:
        """The number of (query, key) pairs of one head that the mask lets through."""
        left, right = self.window_bounds
        if left < 0 and right < 0:
            return int((self.q_lens * self.kv_lens).sum())
        q_lens, kv_lens = np.repeat(self.q_lens, self.q_lens), np.repeat(self.kv_lens, self.q_lens)
        starts = np.repeat(np.cumsum(self.q_lens) - self.q_lens, self.q_lens)
        diagonal = np.arange(self.total_q) - starts + kv_lens - q_lens
        first = np.maximum(diagonal - left, 0) if left >= 0 else np.zeros_like(diagonal)
        last = np.minimum(diagonal + right, kv_lens - 1) if right >= 0 else kv_lens - 1
        return int(np.maximum(last - first + 1, 0).sum())

    def flop(self, direction: str = "forward") -> float:
        """Useful floating-point operations of one pass: 4 H D pairs forward, 2.5 times that backward.

        The convention of FlashAttention's benchmarks: two products forward, five backward, two operations a
        multiply-add; softmax, padding and masked pairs count for nothing.
        """
        if direction not in ("forward", "backward"):
            raise ValueError(f"direction must be 'forward' or 'backward': got {direction!r}")
        forward = 4.0 * self.heads * self.head_dim * self.pairs()
        return forward if direction == "forward" else 2.5 * forward

    def metadata(self, direction: str = "forward") -> dict[str, Any]:
        """What a recording stores of its workload, as plain JSON values."""
        return {
            "name": self.name,
            "seed": self.seed,
            "heads": self.heads,
            "heads_kv": self.heads_kv,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
            "broadcast_q": self.broadcast_q,
            "causal": self.causal,
            "window": None if self.window is None else list(self.window),
            "q_lens": self.q_lens.tolist(),
            "kv_lens": self.kv_lens.tolist(),
            "flop": self.flop(direction),
        }

    def inputs(self, device: str | torch.device, *, seed: int = 0, requires_grad: bool = False) -> Inputs:
        """Normally distributed tensors on `device`, drawn there (so values, unlike lengths, depend on the device)."""
        import torch

        dtype = getattr(torch, self.dtype)
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        rows = (self.batch, self.max_q_len) if self.broadcast_q else (self.total_q,)
        q = normal(rows[-1], self.heads, self.head_dim)
        k = normal(self.total_kv, self.heads_kv, self.head_dim)
        v = normal(self.total_kv, self.heads_kv, self.head_dim)
        grad_out = normal(*rows, self.heads, self.head_dim)
        for tensor in (q, k, v):
            tensor.requires_grad_(requires_grad)
        q_offsets = None if self.broadcast_q else _offsets(self.q_lens, device)
        return Inputs(q, k, v, q_offsets, _offsets(self.kv_lens, device), grad_out)


def names() -> list[str]:
    """The names that `get` knows, in the order in which benchmarks run them."""
    return list(_workloads())


def get(name: str) -> Workload:
    """The workload of that name; ValueError with the nearest names when there is none."""
    known = _workloads()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(str(name), known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    raise ValueError(f"workload: there is none named {name!r}; {hint}")


def _lengths(field: str, values: np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{field} must be one row of integers: got {array.dtype} of shape {array.shape}")
    array = array.astype(np.int64)
    if (array < 0).any():
        raise ValueError(f"{field} must not be negative: got {array.min()}")
    array.setflags(write=False)
    return array


def _offsets(lengths: np.ndarray, device: str | torch.device) -> torch.Tensor:
    import torch

    return torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=device)


@cache
def _workloads() -> dict[str, Workload]:
    return {workload.name: workload for workload in (*_timed(np.random.default_rng(0)), *_tiny())}


def _timed(rng: np.random.Generator) -> Iterator[Workload]:
    """The workloads of every comparison; the order of the draws is part of what the names mean."""
    seeds, batch = 256, 1024
    skewed = np.exp(rng.uniform(np.log(16), np.log(8192), batch)).astype(np.int64)
    half_empty = np.where(rng.random(batch) < 0.5, 0, skewed)
    extreme = np.full(batch, 64)
    extreme[:8] = 32768
    own = np.minimum(np.exp(rng.normal(6.5, 1.0, 256)), 8192).astype(np.int64)
    q_lens = np.full(batch, seeds)
    for name, kv_lens in (("loguniform", skewed), ("half-empty", half_empty), ("extreme", extreme)):
        yield Workload(f"hsp-{name}", 4, 4, 128, q_lens, kv_lens, broadcast_q=True)
    yield Workload("self-lognormal", 4, 4, 128, own, own, broadcast_q=False)
    for length, batch, heads in ((512, 768, 4), (1024, 768, 4), (2048, 192, 4), (4096, 16, 16)):
        lengths = np.full(batch, length)
        yield Workload(f"dense-{length}", heads, heads, 128, lengths, lengths, broadcast_q=False)


def _tiny() -> Iterator[Workload]:
    """Small enough for a try on any GPU, or for the interpreter, with what usually breaks: empty and odd lengths."""
    kv_lens = np.array([0, 130, 1, 0, 64, 257, 33, 0])
    yield Workload("tiny", 2, 2, 64, np.full(len(kv_lens), 32), kv_lens, broadcast_q=True)
    q_lens = np.array([17, 0, 65, 1, 128])
    kv_lens = np.array([40, 9, 0, 129, 128])
    yield Workload("tiny-causal", 4, 2, 64, q_lens, kv_lens, broadcast_q=False, causal=True)
