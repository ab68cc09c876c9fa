"""Small kernels in TLX, each a pattern of the real ones, and what runs them in the emulator and checks results."""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from jfa.impl.hopper import primitives
from profiling.emulator import emulated


@triton.jit
def product(a_desc, b_desc, c_desc, sums, tiles, steps, rows_used, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """C = A B through a ring of buffers, a block of rows at a time, and the sums of C's rows."""
    a_tiles = tlx.local_alloc((BLOCK, BLOCK), tl.bfloat16, STAGES)
    b_tiles = tlx.local_alloc((BLOCK, BLOCK), tl.bfloat16, STAGES)
    c_tile = tlx.local_alloc((BLOCK, BLOCK), tl.float32, 1)
    full = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    empty = tlx.alloc_warp_barrier(num_barriers=STAGES, num_warps=4, num_arrivals=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for turn in range(tiles * steps):
                stage = turn % STAGES
                row = turn // steps * BLOCK
                inner = turn % steps * BLOCK
                tlx.barrier_wait(empty[stage], ((turn // STAGES) & 1) ^ 1)
                tlx.barrier_expect_bytes(full[stage], 2 * BLOCK * BLOCK * 2)
                tlx.async_descriptor_load(a_desc, a_tiles[stage], [row, inner], full[stage])
                tlx.async_descriptor_load(b_desc, b_tiles[stage], [inner, 0], full[stage])
        with tlx.async_task(num_warps=4, registers=240):
            turn = 0
            for tile in range(tiles):
                acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
                for _ in range(steps):
                    stage = turn % STAGES
                    tlx.barrier_wait(full[stage], (turn // STAGES) & 1)
                    acc = tlx.async_dot(a_tiles[stage], b_tiles[stage], acc)
                    acc = tlx.async_dot_wait(0, acc)
                    tlx.barrier_arrive(empty[stage], 1)
                    turn += 1
                tlx.async_descriptor_store_wait(0)
                tlx.local_store(c_tile[0], acc)
                tlx.fence("async_shared")
                tlx.async_descriptor_store(c_desc, c_tile[0], [tile * BLOCK, 0])
                rows = tile * BLOCK + tl.arange(0, BLOCK)
                tl.store(sums + rows, tl.sum(acc, 1), mask=rows < rows_used)
            tlx.async_descriptor_store_wait(0)


@triton.jit
def exchange(given, found, turns, SIZE: tl.constexpr):
    """Each CTA of a pair sends its numbers to the other, turn by turn: its own plus twice the other's."""
    sent = tlx.local_alloc((SIZE,), tl.float32, 1)
    came = tlx.local_alloc((SIZE,), tl.float32, 1)
    full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    empty = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    rank = tlx.cluster_cta_rank()
    with tlx.async_tasks():  # noqa: SIM117
        with tlx.async_task("default"):
            for turn in range(turns):
                at = (2 * turn + rank) * SIZE + tl.arange(0, SIZE)
                own = tl.load(given + at)
                tlx.barrier_wait(empty[0], (turn & 1) ^ 1)
                tlx.local_store(sent[0], own)
                tlx.fence("async_shared")
                tlx.async_remote_shmem_copy(came[0], sent[0], 1 - rank, full[0])
                tlx.barrier_expect_bytes(full[0], SIZE * 4)
                tlx.barrier_wait(full[0], turn & 1)
                tl.store(found + at, own + 2 * tlx.local_load(came[0]))
                tlx.barrier_arrive(empty[0], 1, 1 - rank)
            tlx.barrier_wait(empty[0], (turns - 1) & 1)


@triton.jit
def taking_turns(given, found, steps, SIZE: tl.constexpr):
    """Two warpgroups take turns at a number in shared memory: each doubles it and adds the next of ``given``."""
    numbers = tlx.local_alloc((SIZE,), tl.int32, 1)
    value = tlx.local_alloc((1,), tl.int32, 1)
    full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_expect_bytes(full[0], SIZE * 4)
            tlx.async_load(given, numbers[0], bulk=True, barrier=full[0])
        with tlx.async_task(num_warps=4, registers=240, replicate=2):
            wg: tl.constexpr = tlx.async_task_replica_id()
            if wg == 1:
                primitives.put(value[0], 0)
                primitives.pass_turn(wg)
            tlx.barrier_wait(full[0], 0)
            for step in range(steps):
                tlx.named_barrier_wait(9 + wg, 256)
                number = primitives.get(tlx.local_slice(numbers[0], [2 * step + wg], [1]))
                primitives.put(value[0], 2 * primitives.get(value[0]) + number)
                primitives.pass_turn(wg)
            if wg == 1:
                tl.store(found, primitives.get(value[0]))


def run_product(seed: int) -> None:
    """Whole numbers, so that the result is exact; the last block's last rows do not exist."""
    block, tiles, steps, rows = 16, 6, 2, 92
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (rows, steps * block), generator=generator)
    b = torch.randint(-4, 5, (steps * block, block), generator=generator)
    c, sums = torch.full((rows, block), torch.nan), torch.full((rows,), torch.nan)
    descriptors = [
        TensorDescriptor(of, list(of.shape), list(of.stride()), [block, block])
        for of in (a.to(torch.bfloat16), b.to(torch.bfloat16), c)
    ]
    with emulated(sys.modules[__name__], "product", seed=seed):
        product[(1,)](*descriptors, sums, tiles, steps, rows, BLOCK=block, STAGES=2)
    assert torch.equal(c, (a @ b).float()), "C"
    assert torch.equal(sums, (a @ b).sum(1).float()), "sums"


def run_exchange(seed: int) -> None:
    turns, size = 5, 8
    given = torch.arange(2.0 * turns * size)
    found = torch.full_like(given, torch.nan)
    with emulated(sys.modules[__name__], "exchange", seed=seed):
        exchange[(2,)](given, found, turns, SIZE=size, ctas_per_cga=(2, 1, 1))
    own = given.view(turns, 2, size)
    assert torch.equal(found.view_as(own), own + 2 * own.flip(1)), "sums"


def run_turns(seed: int) -> None:
    given = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6], dtype=torch.int32)
    found = torch.full((1,), -1, dtype=torch.int32)
    with emulated(sys.modules[__name__], "taking_turns", seed=seed):
        taking_turns[(1,)](given, found, 4, SIZE=8)
    assert found.item() == sum(number << 7 - place for place, number in enumerate(given.tolist())), "number"
