"""Shapes that broke other attention kernels, small enough for Triton's interpreter, and their full-size originals.

A case is a name, lengths and a mask; `inputs` makes its tensors, `poisoned` an allocator that betrays what a kernel
leaves unwritten. The comments name the kind of fault that a case is after.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch

from jfa.workloads import Inputs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="a GPU is here; TRITON_INTERPRET=1 interprets")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One batch. `q_lens` None: broadcast, L_q = `q_len`. `unused`: tokens past the last offset, filled with NaN.

    `layout`: "plain"; "packed", q, k and v as slices of one tensor behind a storage offset; "heads-first", each a
    transposed (H, T, D) tensor; "mixed", only v transposed; "odd", rows that start off a 16-byte boundary.
    """

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    q_len: int = 0
    heads: int = 2
    heads_kv: int = 2
    head_dim: int = 64
    causal: bool = False
    window: tuple[int, int] | None = None
    unused: int = 0
    layout: str = "plain"
    offsets_dtype: torch.dtype = torch.int32

    @property
    def broadcast(self) -> bool:
        return self.q_lens is None

    @property
    def options(self) -> dict[str, Any]:
        """The mask, as the op takes it."""
        return {"causal": self.causal, "window": self.window}

    @property
    def bounds(self) -> dict[str, int]:
        """The mask, as the reference takes it."""
        left, right = self.window or (-1, -1)
        return {"window_left": left, "window_right": 0 if self.causal else right}

    def inputs(self, device: str, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = False) -> Inputs:
        """Normally distributed tensors, the same values on every device and in every layout."""
        generator = torch.Generator().manual_seed(seed)
        rows = self.q_len if self.q_lens is None else sum(self.q_lens)
        q_unused = 0 if self.q_lens is None else self.unused
        shapes = [(rows, q_unused, self.heads), *2 * [(sum(self.kv_lens), self.unused, self.heads_kv)]]
        q, k, v = (
            torch.cat(
                [torch.randn(used, heads, self.head_dim, generator=generator), _nan(unused, heads, self.head_dim)]
            )
            for used, unused, heads in shapes
        )
        lead = (len(self.kv_lens),) if self.q_lens is None else ()
        grad_out = torch.randn(*lead, *q.shape, generator=generator)
        if q_unused:
            grad_out[rows:] = torch.nan
        q, k, v = lay_out(self.layout, *(tensor.to(device, dtype) for tensor in (q, k, v)))
        for tensor in (q, k, v):
            tensor.requires_grad_(grad)
        q_offsets = None if self.q_lens is None else offsets(self.q_lens, device, self.offsets_dtype)
        return Inputs(q, k, v, q_offsets, offsets(self.kv_lens, device, self.offsets_dtype), grad_out.to(device, dtype))


def offsets(lengths: tuple[int, ...], device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """The running sum of the lengths, from 0."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, dtype)


def lay_out(layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """The same values behind other strides; see `Case`."""
    if layout == "packed":
        tokens, heads, dim = q.shape
        packed = torch.full((tokens + 3, heads + 2 * k.shape[1] + 1, dim), torch.nan, dtype=q.dtype, device=q.device)
        ends = [1, 1 + heads, 1 + heads + k.shape[1], 1 + heads + 2 * k.shape[1]]
        views = [packed[3:, start:end] for start, end in zip(ends, ends[1:], strict=False)]
        return [view.copy_(tensor) for view, tensor in zip(views, (q, k, v), strict=True)]
    if layout == "heads-first":
        return [_heads_first(tensor) for tensor in (q, k, v)]
    if layout == "mixed":
        return [q, k, _heads_first(v)]
    if layout == "odd":
        return [_odd(tensor) for tensor in (q, k, v)]
    return [q, k, v]


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def _odd(tensor: torch.Tensor) -> torch.Tensor:
    tokens, heads, dim = tensor.shape
    wide = torch.full((tokens * (heads * dim + 1) + 1,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    view = wide.as_strided(tensor.shape, (heads * dim + 1, dim, 1), 1)
    return view.copy_(tensor)


def _nan(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)


TAILS = (1, 63, 64, 65, 127, 128, 129)

CASES = {
    # Empty sequences first, in the middle and last.
    "empty-q": Case(q_lens=(0, 5, 0, 70, 0), kv_lens=(3, 4, 5, 80, 2)),
    "empty-kv": Case(q_lens=(3, 4, 5, 66, 2), kv_lens=(0, 5, 0, 70, 0)),
    "empty-both": Case(q_lens=(0, 0, 65, 0, 2), kv_lens=(0, 7, 70, 0, 0), offsets_dtype=torch.int64),
    # Empty queries at both ends over many keys, one key head for four.
    "empty-q-gqa": Case(q_lens=(0, 121, 84, 0), kv_lens=(129, 100, 84, 70), heads=4, heads_kv=1, head_dim=128),
    # A sequence of one key without queries before the long one hung a backward.
    "one-key-no-query": Case(q_lens=(0, 103), kv_lens=(1, 204)),
    # Offsets 0, 1, 1, 2 with a longest length of 1.
    "ones": Case(q_lens=(1, 0, 1), kv_lens=(1, 0, 1)),
    # Few queries, many heads, causal: a prefix of the output stayed unwritten.
    "few-rows-many-heads": Case(q_lens=(3,), kv_lens=(7,), heads=16, heads_kv=16, causal=True),
    # One row below, at and above the blocks' sizes.
    "tails": Case(q_lens=TAILS, kv_lens=TAILS[::-1], heads=1, heads_kv=1),
    "tails-causal": Case(q_lens=TAILS, kv_lens=TAILS, heads=1, heads_kv=1, causal=True),
    # Grouped queries: gradients of the wrong heads.
    "gqa-4-1": Case(q_lens=(20, 70), kv_lens=(66, 30), heads=4, heads_kv=1),
    "gqa-8-2": Case(q_lens=(11, 13, 15), kv_lens=(10, 15, 11), heads=8, heads_kv=2),
    "dim-128": Case(q_lens=(50, 67), kv_lens=(129, 20), head_dim=128),
    # Causal with unequal lengths; in the last sequence a whole block of rows sees nothing.
    "causal-short-q": Case(q_lens=(5, 70), kv_lens=(64, 150), causal=True),
    "causal-short-kv": Case(q_lens=(9, 64, 150), kv_lens=(4, 63, 20), causal=True, offsets_dtype=torch.int64),
    "causal-ragged": Case(q_lens=(174, 156), kv_lens=(174, 156), heads=1, heads_kv=1, causal=True),
    # Windows: blocks that are masked on the left, on the right, on both sides, and not at all.
    "window-diagonal": Case(q_lens=(70, 40), kv_lens=(130, 20), window=(0, 0)),
    "window-left": Case(q_lens=(150, 20), kv_lens=(200, 3), window=(40, -1)),
    "window-right": Case(q_lens=(150, 20), kv_lens=(100, 90), window=(-1, 5)),
    "window-both": Case(q_lens=(140, 30), kv_lens=(200, 60), window=(70, 10)),
    "window-causal": Case(q_lens=(140, 30), kv_lens=(200, 7), window=(33, -1), causal=True),
    "window-wide": Case(q_lens=(20, 70), kv_lens=(66, 30), window=(1000, 1000)),
    # Tokens that belong to no sequence gave NaN gradients.
    "unused-tokens": Case(q_lens=(30, 70), kv_lens=(66, 30), unused=3),
    "unused-blocks": Case(q_lens=(2, 1), kv_lens=(1, 3), unused=150, causal=True),
    # Layouts that others refuse, or read wrongly.
    "packed": Case(q_lens=(30, 70), kv_lens=(30, 70), layout="packed", causal=True),
    "heads-first": Case(q_lens=(30, 70), kv_lens=(66, 30), layout="heads-first"),
    "heads-first-no-keys": Case(q_lens=(30, 70), kv_lens=(0, 0), layout="heads-first"),
    "transposed-v": Case(q_lens=(30, 70), kv_lens=(66, 30), heads=4, layout="mixed"),
    "odd-rows": Case(q_lens=(3, 70), kv_lens=(66, 3), layout="odd"),
    # Nothing to attend to at all.
    "all-kv-empty": Case(q_lens=(5, 0, 70), kv_lens=(0, 0, 0)),
    "all-q-empty": Case(q_lens=(0, 0), kv_lens=(3, 70)),
    "all-empty": Case(q_lens=(0, 0, 0), kv_lens=(0, 0, 0)),
    "all-empty-unused": Case(q_lens=(0, 0), kv_lens=(0, 0), unused=5),
    "no-sequences": Case(q_lens=(), kv_lens=()),
    "no-sequences-unused": Case(q_lens=(), kv_lens=(), unused=70),
    # Many short ones.
    "many-short": Case(q_lens=(3, 2, 1) * 12, kv_lens=(1, 2, 3) * 12, heads=1, heads_kv=1),
    # One q for all.
    "broadcast": Case(q_len=32, kv_lens=(0, 130, 1, 0, 64, 33, 0)),
    "broadcast-long-q": Case(q_len=70, kv_lens=(0, 65, 3), offsets_dtype=torch.int64),
    "broadcast-one-row": Case(q_len=1, kv_lens=(5, 0, 67), heads=4, heads_kv=2),
    "broadcast-gqa": Case(q_len=17, kv_lens=(66, 0, 2), heads=4, heads_kv=1, head_dim=128, unused=3),
    "broadcast-causal": Case(q_len=66, kv_lens=(2, 70, 0, 66), causal=True),
    "broadcast-window": Case(q_len=40, kv_lens=(10, 100, 0), window=(20, 5), layout="heads-first"),
    "broadcast-all-empty": Case(q_len=5, kv_lens=(0, 0)),
    "broadcast-no-sequences": Case(q_len=5, kv_lens=(), unused=3),
    "broadcast-no-rows": Case(q_len=0, kv_lens=(3, 2)),
}

# Cases whose dtype matters: run in half precision too. The rest is about indices, and float32 shows wrong ones best.
HALF = ("tails", "causal-short-kv", "window-both", "gqa-8-2", "dim-128", "unused-tokens", "packed", "broadcast")

# The originals of what is scaled down above, and what only many rows show: for a GPU.
LARGE_CASES = {
    "empty-q-gqa": Case(q_lens=(0, 1208, 840, 0), kv_lens=(2538, 1742, 840, 3072), heads=4, heads_kv=1, head_dim=128),
    "one-key-no-query": Case(q_lens=(0, 1023), kv_lens=(1, 2044), heads=4, heads_kv=4, head_dim=128),
    "causal-ragged": Case(q_lens=(1743, 1559), kv_lens=(1743, 1559), heads=8, heads_kv=8, head_dim=128, causal=True),
    "many-short": Case(q_lens=(34,) * 1024, kv_lens=(34,) * 1024, heads=4, heads_kv=4, head_dim=64),
    "unused-tokens": Case(q_lens=(400, 544), kv_lens=(400, 544), head_dim=128, unused=2, causal=True),
    "packed-window": Case(q_lens=(700, 900), kv_lens=(700, 900), head_dim=128, window=(128, 16), layout="packed"),
    "broadcast": Case(q_len=256, kv_lens=(16, 0, 8192, 700, 0, 64, 129, 3000), heads=4, heads_kv=4, head_dim=128),
    "broadcast-many": Case(q_len=256, kv_lens=tuple(range(200)), heads=2, heads_kv=1, head_dim=128),
    "long": Case(q_lens=(1, 5000), kv_lens=(9001, 5001), heads=2, heads_kv=2, head_dim=64, causal=True),
}


@contextmanager
def poisoned() -> Iterator[list[tuple[int, ...]]]:
    """Inside, what torch allocates uninitialised holds NaN, so that an element nobody writes shows in the result.

    Yields the shapes of the floating-point tensors that were allocated so.
    """
    shapes: list[tuple[int, ...]] = []

    def filling(allocate):
        def allocate_nan(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                shapes.append(tuple(tensor.shape))
                tensor.fill_(torch.nan)
            return tensor

        return allocate_nan

    homes = [(torch, name) for name in ("empty", "empty_like", "empty_strided")]
    homes += [(torch.Tensor, name) for name in ("new_empty", "new_empty_strided")]
    patches = [patch.object(home, name, filling(getattr(home, name))) for home, name in homes]
    for each in patches:
        each.start()
    try:
        yield shapes
    finally:
        for each in patches:
            each.stop()
