"""Global and shared memory: pointers, descriptors, buffers that betray what was not written or not fenced."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from profiling.emulator.scheduler import EmulationError

WRAP = 1 << 64
"""Addresses wrap there, which ragged descriptors rely on."""


@dataclass(frozen=True)
class Pointer:
    """A pointer into a tensor's storage, or a block of them where ``offset`` is a tensor; in elements."""

    storage: Tensor
    offset: Any = 0

    @classmethod
    def to(cls, tensor: Tensor) -> Pointer:
        """To the first element of a tensor that may be a view."""
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]
        return cls(whole, tensor.storage_offset())

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.storage.dtype)

    def __add__(self, by: Any) -> Pointer:
        return Pointer(self.storage, self.offset + by)

    __radd__ = __add__

    def load(self, mask: Any = None, other: Any = None) -> Any:
        if not isinstance(self.offset, Tensor):
            if mask is not None and not bool(mask):
                return other
            return self._at(torch.tensor([self.offset]))[0].item()
        index, chosen = self._chosen(mask)
        filler = float("nan") if self.storage.dtype.is_floating_point else -(1 << 30)
        found = torch.full(index.shape, filler if other is None else other, dtype=self.storage.dtype)
        found[chosen] = self._at(index[chosen])
        return found

    def store(self, value: Any, mask: Any = None) -> None:
        index, chosen = self._chosen(mask)
        values = torch.as_tensor(value).to(self.storage.dtype).expand(index.shape)
        self._check(index[chosen])
        self.storage[index[chosen].reshape(-1)] = values[chosen].reshape(-1)

    def add(self, value: Any) -> Any:
        """Atomic: the old value."""
        old = self.storage[self.offset].item()
        self.storage[self.offset] += value
        return old

    def _chosen(self, mask: Any) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(self.offset).to(torch.int64)
        mask = torch.as_tensor(True if mask is None else mask)
        index, chosen = torch.broadcast_tensors(index, mask)
        return index, chosen

    def _at(self, index: Tensor) -> Tensor:
        self._check(index)
        return self.storage[index]

    def _check(self, index: Tensor) -> None:
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= len(self.storage)):
            raise EmulationError(
                f"access out of bounds: elements {int(index.min())} to {int(index.max())} of {len(self.storage)}"
            )


def descriptor_index(descriptor: Any, at: list[int]) -> tuple[Tensor, Tensor]:
    """(elements of the storage, which exist) of a block of a tensor descriptor: int64 and bool [block shape]."""
    shape, strides, block = descriptor.shape, descriptor.strides, descriptor.block_shape
    base = descriptor.base.storage_offset()
    inside = torch.ones(tuple(block), dtype=torch.bool)
    constant = 0
    address = torch.zeros(tuple(block), dtype=torch.int64)
    for axis, (begin, extent, stride, size) in enumerate(zip(at, shape, strides, block, strict=True)):
        steps = torch.arange(size).view([-1 if i == axis else 1 for i in range(len(block))])
        inside &= (steps + int(begin) >= 0) & (steps + int(begin) < extent)
        constant += int(begin) * int(stride)
        if size > 1:
            address = address + steps * int(stride)
    start = constant % WRAP
    if start >= WRAP // 2:
        start -= WRAP
    return address + start + base, inside


@dataclass(eq=False)
class Allocation:
    """Bytes of a CTA's shared memory, NaN until written.

    ``unfenced``: (task, first byte, behind the last) of writes by threads that engines cannot see yet.
    """

    data: Tensor
    name: str
    unfenced: list[tuple[Any, int, int]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class View:
    """A buffer, or a part of one: a torch view of its allocation's bytes."""

    allocation: Allocation
    values: Tensor

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def write(self, value: Tensor, task: Any = None) -> None:
        """``task``: whose threads write; an engine's writes need no fence."""
        if tuple(value.shape) != tuple(self.values.shape):
            raise EmulationError(f"{self.allocation.name}: {tuple(value.shape)} stored into {tuple(self.values.shape)}")
        self.values.copy_(value)
        if task is not None:
            self.allocation.unfenced.append((task, *self._bytes()))

    def of(self, allocation: Allocation) -> View:
        """The same part of another CTA's allocation."""
        values, flat = self.values, allocation.data.view(self.values.dtype)
        return View(allocation, flat.as_strided(values.shape, values.stride(), values.storage_offset()))

    def lose(self) -> None:
        """Forget the values: an engine writes others at some moment from now on."""
        self.values.fill_(float("nan") if self.values.is_floating_point() else -1)

    def seen_by_engines(self, what: str) -> None:
        """Raise where a task wrote and did not fence."""
        first, last = self._bytes()
        for task, begin, end in self.allocation.unfenced:
            if begin < last and first < end:
                raise EmulationError(f"{what} reads {self.allocation.name}, which {task.name} wrote without a fence")

    def _bytes(self) -> tuple[int, int]:
        """(first byte, behind the last) that it may touch."""
        size = self.values.element_size()
        begin = int(self.values.storage_offset())
        reach = sum(
            (int(extent) - 1) * int(stride)
            for extent, stride in zip(self.values.shape, self.values.stride(), strict=True)
        )
        return begin * size, (begin + reach + 1) * size


@dataclass(frozen=True, eq=False)
class Buffers:
    """``count`` buffers of one shape, side by side in an allocation."""

    allocation: Allocation
    block: tuple[int, ...]
    kind: torch.dtype
    count: int

    def __getitem__(self, index: Any) -> View:
        index = int(index)
        if not 0 <= index < self.count:
            raise EmulationError(f"{self.allocation.name}[{index}]: there are {self.count} buffers")
        size = self.kind.itemsize
        for extent in self.block:
            size *= extent
        data = self.allocation.data[index * size : (index + 1) * size]
        return View(self.allocation, data.view(self.kind).view(self.block))


def allocate(shape: tuple[int, ...], kind: torch.dtype, count: int, name: str, reuse: Buffers | None) -> Buffers:
    """New bytes, or those of ``reuse``."""
    size = count * kind.itemsize
    for extent in shape:
        size *= extent
    if reuse is None:
        allocation = Allocation(torch.full((size,), 0xFF, dtype=torch.uint8), name)
    else:
        allocation = reuse.allocation
        if size > len(allocation.data):
            raise EmulationError(f"{name}: {size} bytes reuse the {len(allocation.data)} of {allocation.name}")
    return Buffers(allocation, tuple(shape), kind, count)
