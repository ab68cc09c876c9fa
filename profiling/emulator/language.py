"""The parts of Triton's and TLX's languages that kernels here use, on torch tensors. Scalars are Python's numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from profiling.emulator.memory import Allocation, Buffers, Pointer, View, allocate, descriptor_index
from profiling.emulator.scheduler import Barrier, EmulationError, NamedBarrier, Task, World

WARP = 32
SHARED_LIMIT = 232_448
"""Bytes of shared memory that a CTA can have on sm_90."""


class Cta:
    """A cooperative thread array: its place in the grid and the cluster, its shared memory, its barriers."""

    def __init__(self, world: World, index: int, grid: tuple[int, ...], rank: int) -> None:
        self.world, self.index, self.grid, self.rank = world, index, grid, rank
        self.cluster: list[Cta] = [self]
        self.allocations: list[Any] = []
        self.barriers: list[Barrier] = []
        self.named: dict[int, NamedBarrier] = {}
        self.bytes = 0
        self.start: Task | None = None
        self.allocated = False

    @property
    def ended(self) -> bool:
        """Whether its shared memory is gone."""
        return self.start is not None and self.start.finished

    def twin(self, of: Any, rank: int) -> Any:
        """The other CTA's object at the same place as this one's."""
        other = self.cluster[rank]
        if other.ended:
            raise EmulationError(f"reaches into CTA {other.index}, which has ended")
        if isinstance(of, Barrier):
            return other.barriers[self.barriers.index(of)]
        return other.allocations[self.allocations.index(of)]


@dataclass(eq=False)
class Product:
    """A tensor-core product in flight: its operands are read when it is waited for."""

    left: Any
    right: View
    onto: Any
    value: Tensor | None = None

    @property
    def done(self) -> bool:
        return self.value is not None

    def settle(self) -> None:
        """Read the operands and multiply, in float32."""
        if self.value is None:
            onto = self.onto
            if isinstance(onto, Product):
                onto.settle()
                onto = onto.value
            left = self.left.values if isinstance(self.left, View) else self.left
            product = left.float() @ self.right.values.float()
            self.value = product if onto is None else onto + product


def tl_of(world: World, constexpr: Any) -> SimpleNamespace:
    """The namespace ``tl``."""

    def maximum(left: Any, right: Any) -> Any:
        return torch.maximum(*_tensors(left, right)) if _any_tensor(left, right) else max(left, right)

    def minimum(left: Any, right: Any) -> Any:
        return torch.minimum(*_tensors(left, right)) if _any_tensor(left, right) else min(left, right)

    def where(condition: Any, left: Any, right: Any) -> Any:
        if not _any_tensor(condition, left, right):
            return left if condition else right
        like = next((x for x in (left, right) if isinstance(x, Tensor)), None)
        kind = (
            like.dtype
            if like is not None
            else (torch.float32 if isinstance(left, float) or isinstance(right, float) else torch.int32)
        )
        left, right = (x if isinstance(x, Tensor) else torch.tensor(x, dtype=kind) for x in (left, right))
        return torch.where(torch.as_tensor(condition), left, right)

    def load(pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Any:
        return pointer.load(mask, other)

    def store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
        pointer.store(value, mask)

    def full(shape: Any, value: Any, dtype: torch.dtype) -> Any:
        return torch.full(tuple(shape), value, dtype=dtype) if tuple(shape) else value

    def atomic_add(pointer: Pointer, value: Any, **_: Any) -> Any:
        world.pause()
        return pointer.add(value)

    def static_assert(condition: Any, words: str = "") -> None:
        if not condition:
            raise EmulationError(f"static_assert: {words}")

    return SimpleNamespace(
        constexpr=constexpr,
        float32=torch.float32,
        bfloat16=torch.bfloat16,
        float16=torch.float16,
        int32=torch.int32,
        int64=torch.int64,
        program_id=lambda axis: world.me().cta.index if axis == 0 else 0,
        num_programs=lambda axis: world.me().cta.grid[axis] if axis < len(world.me().cta.grid) else 1,
        arange=lambda start, end: torch.arange(start, end, dtype=torch.int32),
        zeros=lambda shape, dtype: torch.zeros(tuple(shape), dtype=dtype),
        full=full,
        maximum=maximum,
        minimum=minimum,
        where=where,
        load=load,
        store=store,
        atomic_add=atomic_add,
        sum=lambda values, axis: _reduced(values, values.sum(axis)),
        max=lambda values, axis: _reduced(values, values.max(axis).values),
        exp2=torch.exp2,
        log=torch.log,
        range=range,
        static_range=range,
        split=lambda values: values.unbind(-1),
        static_assert=static_assert,
    )


def tlx_of(world: World) -> SimpleNamespace:
    """The namespace ``tlx``."""

    def local_alloc(shape: Any, dtype: torch.dtype, count: int, *, reuse: Buffers | None = None) -> Buffers:
        cta = _loading(world)
        made = allocate(tuple(shape), dtype, count, f"smem {len(cta.allocations)} {tuple(shape)}", reuse)
        if reuse is None:
            cta.allocations.append(made.allocation)
            cta.bytes += len(made.allocation.data)
            if cta.bytes > SHARED_LIMIT:
                raise EmulationError(f"{cta.bytes:,} bytes of shared memory; a CTA has {SHARED_LIMIT:,}")
        return made

    def alloc_barriers(num_barriers: int, arrive_count: int, by_thread: bool = False) -> list[Barrier]:
        cta = _loading(world)
        made = [
            Barrier(world, f"barrier {len(cta.barriers) + i} of CTA {cta.index}", arrive_count, by_thread)
            for i in range(num_barriers)
        ]
        cta.barriers += made
        return made

    def alloc_warp_barrier(num_barriers: int, num_warps: int = 1, num_arrivals: int = 1) -> list[Barrier]:
        return alloc_barriers(num_barriers, WARP * num_warps * num_arrivals, by_thread=True)

    def barrier_wait(barrier: Barrier, phase: int) -> None:
        barrier.wait(int(phase))

    def barrier_arrive(barrier: Barrier, count: int = 1, remote_cta_rank: int | None = None, pred: float = 1.0) -> None:
        # A task's threads go together here, so that a predicate is the share of them for which it holds.
        world.pause()
        target = barrier if remote_cta_rank is None else world.me().cta.twin(barrier, int(remote_cta_rank))
        if pred != 1.0 and not barrier.by_thread:
            raise EmulationError(f"{barrier.name}: a predicate where one thread arrives for all is not emulated")
        target.arrive(int(count * world.me().threads * pred) if barrier.by_thread else count)

    def local_load(view: View, layout: Any = None) -> Tensor:
        return view.values.clone()

    def local_store(view: View, value: Tensor) -> None:
        view.write(value, world.me())
        world.pause()

    def fence(scope: str) -> None:
        if scope != "async_shared":
            return
        for cta in world.me().cta.cluster:
            for allocation in cta.allocations:
                allocation.unfenced = [write for write in allocation.unfenced if write[0] is not world.me()]

    def async_descriptor_load(
        descriptor: Any, view: View, at: list[int], barrier: Barrier, multicast_targets: Any = ()
    ) -> None:
        at = [int(place) for place in at]
        me = world.me().cta
        # To each CTA at its own moment; what is given is of the CTA that issues it.
        for cta in [me.cluster[int(rank)] for rank in multicast_targets] or [me]:
            own = cta is me
            there = view if own else view.of(me.twin(view.allocation, cta.rank))
            full = barrier if own else me.twin(barrier, cta.rank)
            there.lose()
            world.later("a TMA load", partial(_bring, descriptor, there, at, full, cta))
        world.pause()

    def async_load(pointer: Pointer, view: View, *, bulk: bool, barrier: Barrier) -> None:
        view.lose()

        def work() -> None:
            view.values.copy_(pointer._at(torch.arange(view.values.numel()) + pointer.offset))
            barrier.complete(view.values.numel() * view.values.element_size())

        world.later("a bulk load", work)
        world.pause()

    def async_descriptor_store(descriptor: Any, view: View, at: list[int], store_reduce: str = "") -> None:
        view.seen_by_engines("a TMA store")
        at = [int(place) for place in at]

        def read() -> Callable[[], None]:
            index, inside = descriptor_index(descriptor, at)
            target = Pointer.to(descriptor.base)
            target._check(index[inside])
            values = view.values.view(index.shape)[inside].to(target.storage.dtype)

            def write() -> None:
                if store_reduce == "add":
                    target.storage.index_add_(0, index[inside], values)
                else:
                    target.storage[index[inside]] = values

            return write

        world.me().stores.append(world.store("a TMA store", read))
        world.pause()

    def async_descriptor_store_wait(left: int) -> None:
        task = world.me()
        before = task.stores[: max(len(task.stores) - left, 0)]
        world.pause("its TMA stores", lambda: all(store.done for store in before))

    def async_remote_shmem_copy(target: View, source: View, rank: int, barrier: Barrier) -> None:
        source.seen_by_engines("a copy to another CTA")
        cta = world.me().cta
        there = cta.twin(target.allocation, int(rank))
        size = source.values.numel() * source.values.element_size()
        begin = target.values.storage_offset() * target.values.element_size()
        arrives = cta.twin(barrier, int(rank))
        other = cta.cluster[int(rank)]

        def work() -> None:
            if other.ended:
                raise EmulationError(f"a copy comes to CTA {other.index}, which has ended")
            there.data[begin : begin + size] = source.values.contiguous().view(-1).view(torch.uint8)
            arrives.complete(size)

        world.later("a copy to another CTA", work)
        world.pause()

    def async_dot(left: Any, right: View, onto: Any = None) -> Product:
        for operand in (left, right):
            if isinstance(operand, View):
                operand.seen_by_engines("a product")
        made = Product(left, right, onto)
        world.me().products.append(made)
        world.pause()
        return made

    def async_dot_wait(left: int, value: Any) -> Any:
        world.pause()
        task = world.me()
        old = max(len(task.products) - left, 0)
        for product in task.products[:old]:
            product.settle()
        task.products = task.products[old:]
        if isinstance(value, Product):
            if value.value is None:
                raise EmulationError("async_dot_wait returns a product that it does not wait for")
            return value.value
        return value

    def local_reinterpret(view: View, dtype: torch.dtype, shape: Any) -> View:
        flat = view.values.reshape(-1)
        count = 1
        for extent in shape:
            count *= extent
        return View(view.allocation, flat.view(dtype)[:count].view(tuple(shape)))

    def local_slice(view: View, begin: Any, shape: Any) -> View:
        values = view.values
        for axis, (first, extent) in enumerate(zip(begin, shape, strict=True)):
            values = values.narrow(axis, int(first), int(extent))
        return View(view.allocation, values)

    def named(number: int) -> NamedBarrier:
        cta = world.me().cta
        return cta.named.setdefault(number, NamedBarrier(world, f"named barrier {number} of CTA {cta.index}"))

    def named_barrier_arrive(number: int, threads: int) -> None:
        world.pause()
        named(number).arrive(threads)

    return SimpleNamespace(
        local_alloc=local_alloc,
        alloc_barriers=alloc_barriers,
        alloc_warp_barrier=alloc_warp_barrier,
        barrier_wait=barrier_wait,
        barrier_arrive=barrier_arrive,
        barrier_expect_bytes=lambda barrier, size: barrier.expect(int(size)),
        local_load=local_load,
        local_store=local_store,
        local_slice=local_slice,
        local_reinterpret=local_reinterpret,
        local_trans=lambda view: View(view.allocation, view.values.T),
        local_reshape=lambda view, shape: View(view.allocation, view.values.view(tuple(shape))),
        fence=fence,
        async_descriptor_load=async_descriptor_load,
        async_load=async_load,
        async_descriptor_store=async_descriptor_store,
        async_descriptor_store_wait=async_descriptor_store_wait,
        async_remote_shmem_copy=async_remote_shmem_copy,
        async_dot=async_dot,
        async_dot_wait=async_dot_wait,
        named_barrier_wait=lambda number, threads: named(number).wait(threads),
        named_barrier_arrive=named_barrier_arrive,
        cluster_cta_rank=lambda: world.me().cta.rank,
        async_task_replica_id=lambda: world.me().replica,
        size_of=lambda kind: kind.itemsize,
        dtype_of=lambda of: of.base.dtype if hasattr(of, "base") else of.dtype,
        layout=lambda **_: None,
    )


def task_of(world: World, cta: Cta, name: str, warps: int, replica: int, body: Callable[[], None]) -> Task:
    """A role of a CTA, ready to run."""
    task = Task(f"CTA {cta.index} {name}", cta, warps * WARP, body)
    task.replica = replica
    return task


def _bring(descriptor: Any, view: View, at: list[int], barrier: Barrier, cta: Cta) -> None:
    """A load's bytes come to shared memory of ``cta``."""
    if cta.ended:
        raise EmulationError(f"a TMA load comes to CTA {cta.index}, which has ended")
    index, inside = descriptor_index(descriptor, at)
    found = torch.zeros(index.shape, dtype=descriptor.base.dtype)
    found[inside] = Pointer.to(descriptor.base)._at(index[inside])
    view.values.copy_(found.view(view.values.shape))
    barrier.complete(view.values.numel() * view.values.element_size())


def _loading(world: World) -> Cta:
    cta: Cta = world.me().cta
    return cta


def _any_tensor(*values: Any) -> bool:
    return any(isinstance(value, Tensor) for value in values)


def _tensors(left: Any, right: Any) -> tuple[Tensor, Tensor]:
    kind = left.dtype if isinstance(left, Tensor) else right.dtype
    return tuple(x if isinstance(x, Tensor) else torch.tensor(x, dtype=kind) for x in (left, right))  # type: ignore[return-value]


def _reduced(values: Tensor, found: Tensor) -> Any:
    """Of a block of one dimension a number; sums keep the type, as Triton's do."""
    if values.dim() == 1:
        return found.item()
    return found.to(values.dtype)


__all__ = ["Allocation", "Cta", "task_of", "tl_of", "tlx_of"]
