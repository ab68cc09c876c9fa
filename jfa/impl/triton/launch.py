"""What the launches of forward and backward share on the host: descriptors, grids, devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa import schedule as schedules
from jfa.impl.triton import interpreter
from jfa.instrument import OFF, Recorder
from jfa.schedule import Items
from jfa.toolchain import prefer_packaged_ptxas

prefer_packaged_ptxas()

LOG2_E = 1.4426950408889634
INTERPRETED = bool(triton.knobs.runtime.interpret)
if INTERPRETED:
    interpreter.repair()


@dataclass(frozen=True)
class Run:
    """How one launch is scheduled and recorded: the schedule's name, its table, and the recorder.

    ``fresh``: the table was built for this launch alone, which may count in it. ``compiled`` collects what ran.
    ``leave_out``: a stage of `jfa.impl.hopper.left_out` without which the kernel runs: its results are wrong then.
    """

    schedule: str
    items: Items
    recorder: Recorder = OFF
    fresh: bool = False
    compiled: list[Any] = field(default_factory=list, compare=False)
    leave_out: str = ""

    def counter(self) -> Tensor:
        """int32 [1], zero, for this launch alone."""
        if self.fresh:
            return self.items.counts[2:]
        return torch.zeros(1, dtype=torch.int32, device=self.items.counts.device)


def as_rows(tensor: Tensor) -> Tensor:
    """The (T, H, D) tensor laid out as TMA wants it: 16-byte aligned rows, the heads of a row side by side.

    What is laid out otherwise (transposed heads, expanded tokens) is copied, once, here; rows may be apart, as in a
    slice of packed q, k, v. A tensor without rows becomes one row of zeros, which no tile reads.
    """
    tokens, heads, dim = tensor.shape
    if tokens == 0:
        return tensor.new_zeros((1, heads, dim))
    side_by_side = tensor.stride(2) == 1 and (heads == 1 or tensor.stride(1) == dim)
    row = tensor.stride(0)
    aligned = row * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
    if side_by_side and aligned and row >= heads * dim:
        return tensor
    return torch.empty((tokens, heads, dim), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def descriptor(rows: Tensor, block: int) -> TensorDescriptor:
    """Descriptor of what :func:`as_rows` returned, as (T, H·D) in blocks [block, D]."""
    tokens, heads, dim = rows.shape
    return TensorDescriptor(rows, [tokens, heads * dim], [rows.stride(0), 1], [block, dim])


def ragged_descriptor(rows: Tensor, block: int, width: int | None = None) -> TensorDescriptor:
    """Descriptor of (T, H·D) rows in blocks [1, 1, block, ``width``], of which a kernel sees one sequence at a time.

    Rows behind the sequence's last are out of bounds: loads give zeros, stores do nothing. The extent of the rows is
    2³⁰, and the two leading dimensions shift the origin so that a sequence *ends* there; the shift relies on addresses
    wrapping around at 2⁶⁴: 2³⁰ · (2³⁴ − stride) elements are −2³⁰ · stride. As in ``triton.tools.ragged_tma``.
    """
    tokens, heads, dim = rows.shape
    stride = rows.stride(0)
    shape = [0x7FFF0000, 0x7FFF0000, 1 << 30, heads * dim]
    return TensorDescriptor(rows, shape, [(1 << 34) - stride, stride, stride, 1], [1, 1, block, width or dim])


def half_block(rows: int, dim: int, itemsize: int) -> tuple[int, int]:
    """(rows, columns) of half a block in shared memory: half the columns where a row has over 128 bytes, else the rows.

    What `jfa.impl.hopper.primitives.load_for_both` loads in one go.
    """
    return (rows, dim // 2) if dim * itemsize > 128 else (rows // 2, dim)


@lru_cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 4 in the interpreter, so that schedules deal to several CTAs there too."""
    return 4 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability; None in the interpreter."""
    return None if INTERPRETED else torch.cuda.get_device_capability(device)


def grid(run: Run, heads: int, device: torch.device, ctas_per_sm: int, cluster: int = 1) -> int:
    """CTAs of a launch: one a tile for ``grid``, else as many as run at once; at least one, which clears the output.

    ``cluster``: CTAs that do a tile together.
    """
    if schedules.deal(run.schedule) == schedules.DEAL_ONCE:
        return max(run.items.max_items * heads, 1) * cluster
    return max(sm_count(device) * ctas_per_sm // cluster, 1) * cluster


@lru_cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def captured(device: torch.device) -> bool:
    """Whether launches go into a CUDA graph, which need not run them in their order on several streams."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """This point of the current stream, for :func:`beside`; None on the CPU, where launches end before they return."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextmanager
def beside(since: torch.cuda.Event | None, device: torch.device) -> Iterator[None]:
    """Launches inside run beside those of the current stream that came behind ``since``, its :func:`mark`.

    The current stream goes on when they are done.
    """
    if since is None:
        yield
        return
    second = _second_stream(device)
    second.wait_event(since)
    try:
        with torch.cuda.stream(second):
            yield
    finally:
        torch.cuda.current_stream(device).wait_stream(second)


def precision(tensor: Tensor) -> str:
    """float32 is multiplied as float32, not as tf32."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"
