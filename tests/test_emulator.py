"""The emulator of TLX kernels: right kernels come out right in any order, and each kind of fault is caught.

Faults are made by changing the source that the emulator reads, of kernels here and of the real ones.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import test_hopper_emulated as real  # noqa: E402
import triton.language as tl  # noqa: E402
import triton.language.extra.tlx as tlx  # noqa: E402
from shapes import Case  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from jfa.impl.hopper import backward, forward, primitives, resident  # noqa: E402
from profiling.emulator import EmulationError, emulated  # noqa: E402

one_thread = real.one_thread
SEEDS = range(20)


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
    assert found.item() == sum(number << 7 - place for place, number in enumerate(given.tolist()))


JAGGED = Case(q_lens=(200, 40, 130), kv_lens=(300, 129, 200), heads=1, heads_kv=1)
# A step a tile, so that the next tile is stored soon.
SHORT = Case(q_lens=(129,) * 3, kv_lens=(30,) * 3)
SHORT_BACKWARD = Case(q_lens=(40,) * 4, kv_lens=(129,) * 4)
FEW_ROWS = Case(q_len=100, kv_lens=(130, 64, 5), heads=3, heads_kv=3)
MORE_ROWS = Case(q_len=200, kv_lens=(130, 70, 64, 5))

RUNS = {
    "product": run_product,
    "exchange": run_exchange,
    "turns": run_turns,
    "forward": partial(real.forward, JAGGED, sms=1),
    "forward-short": partial(real.forward, SHORT, sms=1),
    "forward-pingpong": partial(real.forward, JAGGED, sms=1, pingpong=True),
    "shared": partial(real.shared, JAGGED, sms=1),
    "shared-buffers": partial(real.shared, SHORT_BACKWARD, sms=1, dq_slices=2, dq_buffers=2),
    "resident": partial(real.resident, FEW_ROWS, sms=1),
    "pair": partial(real.resident, MORE_ROWS, sms=2),
}
OF_FORWARD = (forward.jfa_forward_hopper, primitives.store_tile, primitives.ragged)
OF_RESIDENT = (resident.jfa_backward_resident, resident._store)
FUNCTIONS = {
    "product": (product,),
    "exchange": (exchange,),
    "turns": (taking_turns,),
    "forward": OF_FORWARD,
    "forward-short": OF_FORWARD,
    "forward-pingpong": OF_FORWARD,
    "shared": (backward.jfa_backward_hopper, backward._add_dq),
    "shared-buffers": (backward.jfa_backward_hopper,),
    "resident": OF_RESIDENT,
    "pair": OF_RESIDENT,
}
"""Where a run's faults are."""

FENCE = "EmulationError: .* reads smem .* without a fence"
UNWAITED = "EmulationError: .*Product"
ARRIVALS = "EmulationError: .*more arrivals"
ENDED = "EmulationError: .*has ended"
STORE_LEFT = "EmulationError: .*ends while a TMA store"
OUTSIDE = "EmulationError: .*out of bounds"
STUCK = "Deadlock: .*waits for barrier"
WRONG = "wrong result"
CAUGHT = f"{WRONG}|Deadlock|EmulationError"
"""Another by every seed: phases are out of step from there on."""

# What each run is changed by, as the lines of a diff, and what is to come of it. What only follows a slow or a quick
# turn comes under some seeds.
FAULTS = {
    "product": {
        "no-fence-before-the-store": (FENCE, '-tlx.fence("async_shared")'),
        "fence-of-another-kind": (
            FENCE,
            """
            -tlx.fence("async_shared")
            +tlx.fence("gpu")
            """,
        ),
        "fence-behind-the-store": (
            FENCE,
            """
            -tlx.fence("async_shared")
             tlx.async_descriptor_store(c_desc, c_tile[0], [tile * BLOCK, 0])
            +tlx.fence("async_shared")
            """,
        ),
        "no-fence-before-a-product-of-what-was-stored": (
            FENCE,
            """
            +tlx.local_store(a_tiles[stage], tlx.local_load(a_tiles[stage]))
             acc = tlx.async_dot(a_tiles[stage], b_tiles[stage], acc)
            """,
        ),
        "released-before-the-product-has-read": (
            WRONG,
            """
            +tlx.barrier_arrive(empty[stage], 1)
             acc = tlx.async_dot_wait(0, acc)
            -tlx.barrier_arrive(empty[stage], 1)
            """,
        ),
        "full-not-waited-for": (CAUGHT, "-tlx.barrier_wait(full[stage], (turn // STAGES) & 1)"),
        "full-of-the-other-phase": (
            CAUGHT,
            """
            -tlx.barrier_wait(full[stage], (turn // STAGES) & 1)
            +tlx.barrier_wait(full[stage], ((turn // STAGES) & 1) ^ 1)
            """,
        ),
        "empty-not-waited-for": (CAUGHT, "-tlx.barrier_wait(empty[stage], ((turn // STAGES) & 1) ^ 1)"),
        "never-released": (
            "Deadlock: .*CTA 0 role 0.0 waits for barrier 2 of CTA 0 .*CTA 0 role 1.0 waits for barrier 0 of CTA 0",
            "-tlx.barrier_arrive(empty[stage], 1)",
        ),
        "released-twice": (
            ARRIVALS,
            """
            -tlx.barrier_arrive(empty[stage], 1)
            +tlx.barrier_arrive(empty[stage], 2)
            """,
        ),
        "fewer-bytes-than-come": (
            STUCK,
            """
            -tlx.barrier_expect_bytes(full[stage], 2 * BLOCK * BLOCK * 2)
            +tlx.barrier_expect_bytes(full[stage], BLOCK * BLOCK * 2)
            """,
        ),
        "more-bytes-than-come": (
            STUCK,
            """
            -tlx.barrier_expect_bytes(full[stage], 2 * BLOCK * BLOCK * 2)
            +tlx.barrier_expect_bytes(full[stage], 3 * BLOCK * BLOCK * 2)
            """,
        ),
        "product-not-waited-for": (UNWAITED, "-acc = tlx.async_dot_wait(0, acc)"),
        "product-that-the-wait-leaves": (
            "EmulationError: .*a product that it does not wait for",
            """
            -acc = tlx.async_dot_wait(0, acc)
            +acc = tlx.async_dot_wait(1, acc)
            """,
        ),
        "staging-overwritten": (
            WRONG,
            """
            -tlx.async_descriptor_store_wait(0)
             tlx.local_store(c_tile[0], acc)
            """,
        ),
        "end-before-the-store-has-read": (
            STORE_LEFT,
            """
             tl.store(sums + rows, tl.sum(acc, 1), mask=rows < rows_used)
            -tlx.async_descriptor_store_wait(0)
            """,
        ),
        "out-of-bounds": (
            "EmulationError: .*out of bounds: elements 80 to 95 of 92",
            """
            -tl.store(sums + rows, tl.sum(acc, 1), mask=rows < rows_used)
            +tl.store(sums + rows, tl.sum(acc, 1))
            """,
        ),
        "buffer-that-is-not-there": (
            r"EmulationError: .*\[1\]: there are 1 buffers",
            """
            -tlx.local_store(c_tile[0], acc)
            +tlx.local_store(c_tile[1], acc)
            """,
        ),
        "shared-memory-over-the-limit": (
            "EmulationError: .*233,472 bytes of shared memory; a CTA has 232,448",
            """
            -c_tile = tlx.local_alloc((BLOCK, BLOCK), tl.float32, 1)
            +c_tile = tlx.local_alloc((BLOCK, BLOCK), tl.float32, 226)
            """,
        ),
    },
    "exchange": {
        "no-fence-before-the-copy": (FENCE, '-tlx.fence("async_shared")'),
        "no-exit-wait": (ENDED, "-tlx.barrier_wait(empty[0], (turns - 1) & 1)"),
        "no-last-word": (
            ENDED,
            """
            -tlx.barrier_arrive(empty[0], 1, 1 - rank)
            -tlx.barrier_wait(empty[0], (turns - 1) & 1)
            +if turn + 1 < turns: tlx.barrier_arrive(empty[0], 1, 1 - rank)
            """,
        ),
        "sent-again-before-it-was-used": (CAUGHT, "-tlx.barrier_wait(empty[0], (turn & 1) ^ 1)"),
        "arrival-at-the-own-barrier": (
            CAUGHT,
            """
            -tlx.barrier_arrive(empty[0], 1, 1 - rank)
            +tlx.barrier_arrive(empty[0], 1)
            """,
        ),
    },
    "turns": {
        "turn-not-passed": (
            "Deadlock: .*role 1.0 waits for named barrier 9 of CTA 0; CTA 0 role 1.1 waits for named barrier 10",
            """
             primitives.put(value[0], 2 * primitives.get(value[0]) + number)
            -primitives.pass_turn(wg)
            """,
        ),
        "turn-not-taken": (f"{WRONG}|EmulationError: .*more threads", "-tlx.named_barrier_wait(9 + wg, 256)"),
        "turn-of-too-few-threads": (
            f"{WRONG}|EmulationError: .*more threads",
            """
            -tlx.named_barrier_wait(9 + wg, 256)
            +tlx.named_barrier_wait(9 + wg, 128)
            """,
        ),
        "bulk-load-not-waited-for": (f"{WRONG}|{ENDED}", "-tlx.barrier_wait(full[0], 0)"),
    },
    "forward": {
        "no-fence-before-the-store": (FENCE, '-tlx.fence("async_shared")'),
        "end-before-the-store-has-read": (
            STORE_LEFT,
            """
             tile = hopper.get(item_tile[turn % _SLOTS])
            -tlx.async_descriptor_store_wait(0)
            """,
        ),
        "k-released-early": (
            WRONG,
            """
            -scores = tlx.async_dot_wait(0, scores)
             tlx.barrier_arrive(k_empty[stage], 1)
            +scores = tlx.async_dot_wait(0, scores)
            """,
        ),
        "v-released-early": (
            WRONG,
            """
            +tlx.barrier_arrive(v_empty[behind], 1)
             acc = tlx.async_dot_wait(0, acc)
            -tlx.barrier_arrive(v_empty[behind], 1)
             acc = acc * rescale[:, None]
            """,
        ),
        "item-never-released": (
            "Deadlock: .*role 0.0 waits for barrier .*role 1.0 waits for barrier .*role 1.1 waits for barrier",
            """
            -tlx.barrier_arrive(item_empty[slot], 1)
             head = tile % heads
            """,
        ),
        "v-never-released": (
            STUCK,
            """
             acc = tlx.async_dot_wait(0, acc)
            -tlx.barrier_arrive(v_empty[behind], 1)
             acc = acc * rescale[:, None]
            """,
        ),
        "v-released-twice": (
            CAUGHT,
            """
             acc = tlx.async_dot_wait(0, acc)
             tlx.barrier_arrive(v_empty[behind], 1)
            +tlx.barrier_arrive(v_empty[behind], 1)
             acc = acc * rescale[:, None]
            """,
        ),
        "nothing-released-without-rows": (
            STUCK,
            """
            -for _ in range(blocks + tl.where(short > 0, 1, 0)):
            +for _ in range(0):
            """,
        ),
        "scores-not-waited-for": (UNWAITED, "-scores = tlx.async_dot_wait(1, scores)"),
        "k-not-waited-for": (
            CAUGHT,
            """
            -noted = hopper.wait(
            -    k_full[stage], (used // STAGES) & 1, lane, noted, capacity, _K_FULL, stage, tile, LEVEL
            -)
             if PINGPONG:
                 if both:
                     noted = hopper.take_turn(wg, lane, noted, capacity, tile, LEVEL)
             scores = tlx.async_dot(q_tile, tlx.local_trans(k_tiles[stage]))
             behind = (used - 1) % STAGES
            """,
        ),
        "lse-out-of-bounds": (
            OUTSIDE,
            """
            -tl.store(lse + primitives.wide(head) * total_q + at, row_lse, mask=rows < q_len)
            +tl.store(lse + primitives.wide(head) * total_q + at, row_lse)
            """,
        ),
        "tile-out-of-bounds": (
            OUTSIDE,
            """
            -return [RAGGED_ROWS, start + rows, RAGGED_ROWS - rows + row, column]
            +return [RAGGED_ROWS, start + 2 * rows, RAGGED_ROWS - rows + row, column]
            """,
        ),
    },
    "forward-short": {
        "q-released-early": (
            WRONG,
            """
            +tlx.barrier_arrive(q_empty[q_slot], 1)
             row_max = tl.full((HALF,), float("-inf"), tl.float32)
            ...
            -tlx.barrier_arrive(q_empty[q_slot], 1)

             acc, row_lse = _normalise(acc, row_max, row_sum, MASKED)
            """,
        ),
        "staging-overwritten": (
            WRONG,
            """
            -tlx.async_descriptor_store_wait(0)
             tlx.local_store(staging, values.reshape(1, 1, ROWS, DIM))
            """,
        ),
    },
    "forward-pingpong": {
        "turn-not-passed": (
            "Deadlock: .*waits for named barrier",
            """
            -if PINGPONG:
            -    if both:
            -        hopper.pass_turn(wg)
             scores = tlx.async_dot_wait(1, scores)
            """,
        ),
    },
    "shared": {
        "no-fence-behind-ds": (
            FENCE,
            """
             tlx.local_store(ds_own, ds)
            -tlx.fence("async_shared")
            """,
        ),
        "no-fence-before-dq-is-stored": (
            FENCE,
            """
            -tlx.fence("async_shared")
             at = hopper.ragged(start, rows, row, column + part * WIDTH)
            """,
        ),
        "dq-staging-overwritten": (WRONG, "-tlx.async_descriptor_store_wait(BUFFERS - 1)"),
        "dq-staging-overwritten-by-dv": (
            WRONG,
            """
            -tlx.async_descriptor_store_wait(0)
             tlx.local_store(out_tiles[wg * OUT_PLACES], dv_acc.to(dtype).reshape(1, 1, HALF, DIM))
            """,
        ),
        "dv-staging-overwritten-by-dk": (
            WRONG,
            """
            -tlx.async_descriptor_store_wait(0)
             tlx.local_store(out_tiles[wg * OUT_PLACES], (dk_acc * scale).to(dtype).reshape(1, 1, HALF, DIM))
            """,
        ),
        "q-released-early": (
            WRONG,
            """
            +if more:
            +    tlx.barrier_arrive(q_empty[stage], 1)
             dk_acc = tlx.async_dot_wait(1, dk_acc)
            -if more:
            -    tlx.barrier_arrive(q_empty[stage], 1)
            """,
        ),
        "ds-released-early": (
            WRONG,
            """
            -dq = tlx.async_dot_wait(1, dq)
             tlx.barrier_arrive(ds_empty[0], 1)
            +dq = tlx.async_dot_wait(1, dq)
            """,
        ),
        "k-released-early": (
            WRONG,
            """
             dk_acc = tlx.async_dot(ds, q_tiles[stage], dk_acc)
            +if step + 1 == total:
            +    tlx.barrier_arrive(k_empty[0], 1)
            ...
            -tlx.barrier_arrive(k_empty[0], 1)
             seen += 1
            """,
        ),
        "ds-told-before-it-is-there": (
            f"{FENCE}|{WRONG}",
            """
            +tlx.barrier_arrive(ds_full[0], 1)
             tlx.local_store(ds_own, ds)
             tlx.fence("async_shared")
            -tlx.barrier_arrive(ds_full[0], 1)
            """,
        ),
        "ds-never-told": ("Deadlock: .*role 1.0 waits for .*role 1.1 waits for", "-tlx.barrier_arrive(ds_full[0], 1)"),
        "ds-told-twice": (
            CAUGHT,
            """
            -tlx.barrier_arrive(ds_full[0], 1)
            +tlx.barrier_arrive(ds_full[0], 2)
            """,
        ),
        "dp-not-waited-for": (UNWAITED, "-dp = tlx.async_dot_wait(1, dp)"),
        "fewer-bytes-than-come": (
            STUCK,
            """
            -tlx.barrier_expect_bytes(q_full[stage], BLOCK_Q * DIM * tlx.size_of(dtype) + BLOCK_Q * 4)
            +tlx.barrier_expect_bytes(q_full[stage], BLOCK_Q * DIM * tlx.size_of(dtype))
            """,
        ),
        "end-before-the-store-has-read": (
            STORE_LEFT,
            """
             tile = hopper.get(item_tile[turn % _SLOTS])
            -tlx.async_descriptor_store_wait(0)
            """,
        ),
    },
    "shared-buffers": {
        "dk-staging-overwritten-by-dq": (
            WRONG,
            """
            -if DQ_BUFFERS > 1:
            +if DQ_BUFFERS > 3:
            """,
        ),
    },
    "resident": {
        "no-fence-behind-p": (
            FENCE,
            """
             tlx.local_store(p_own, p.to(dtype))
            -tlx.fence("async_shared")
            """,
        ),
        "no-fence-behind-ds": (
            FENCE,
            """
             tlx.local_store(ds_own, ds)
            -tlx.fence("async_shared")
            """,
        ),
        "no-fence-before-dv-is-stored": (
            FENCE,
            """
            -tlx.fence("async_shared")
             if ADD:
            """,
        ),
        "no-fence-before-dq-is-stored": (
            FENCE,
            """
             tlx.local_store(dq_tiles[wg], dq_left.reshape(1, 1, HALF, WIDTH))
            -tlx.fence("async_shared")
            """,
        ),
        "v-released-early": (
            WRONG,
            """
            -dp = tlx.async_dot_wait(0, dp)
             tlx.barrier_arrive(v_empty[v_stage], 1)
            +dp = tlx.async_dot_wait(0, dp)
            """,
        ),
        "k-released-early": (
            WRONG,
            """
            -dq_left = tlx.async_dot_wait(0, dq_left)
             tlx.barrier_arrive(k_empty[k_stage], 1)
            +dq_left = tlx.async_dot_wait(0, dq_left)
            """,
        ),
        "weights-released-early": (
            WRONG,
            """
            -sent = tlx.async_dot_wait(1, sent)
             tlx.barrier_arrive(weights_empty[early], 1)
            +sent = tlx.async_dot_wait(1, sent)
            """,
        ),
        "do-released-early": (
            WRONG,
            """
            +if (flags & _CLOSES_SEQUENCE) != 0:
            +    tlx.barrier_arrive(do_empty[do_stage], 1)
             first_rows = tl.where(early == _P, do_stage, _Q)
            ...
             if (flags & _CLOSES_SEQUENCE) != 0:
            -    tlx.barrier_arrive(do_empty[do_stage], 1)
                 sequences += 1
             if (flags & _CLOSES_HEAD) != 0:
                 tlx.barrier_arrive(q_empty[0], 1)
             instrument.end_span(lane, begun, capacity, tile, LEVEL, 2, True)
            """,
        ),
        "dv-staging-overwritten": (
            WRONG,
            """
            -tlx.async_descriptor_store_wait(0)
             if CLUSTER == 2:
                 tlx.barrier_arrive(part_empty[0], 1, 1 - rank)
             noted = hopper.wait(
            """,
        ),
        "dq-staging-overwritten-by-weights": (WRONG, "-tlx.named_barrier_wait(_FLUSH_BARRIER, _PAIR)"),
        "weights-overwritten-by-dq": (
            f"{WRONG}|{FENCE}",
            """
            -noted = hopper.wait(
            -    weights_empty[_P], turn & 1, lane, noted, capacity, _WEIGHTS_EMPTY, _P, tile, LEVEL
            -)
            -noted = hopper.wait(
            -    weights_empty[_DS], turn & 1, lane, noted, capacity, _WEIGHTS_EMPTY, _DS, tile, LEVEL
            -)
            """,
        ),
        "weights-never-told": (
            "Deadlock: .*role 2.0 waits for barrier",
            "-tlx.barrier_arrive(weights_full[_DS], 1)",
        ),
        "item-released-twice": (
            ARRIVALS,
            """
            -tlx.barrier_arrive(item_empty[slot], 1)
            +tlx.barrier_arrive(item_empty[slot], 2)
             column = head * DIM
            """,
        ),
        "dv-not-waited-for": (UNWAITED, "-sent = tlx.async_dot_wait(1, sent)"),
    },
    "pair": {
        "no-fence-before-the-copy": (
            FENCE,
            """
             tlx.local_store(parts[0], sent.to(dtype))
            -tlx.fence("async_shared")
            """,
        ),
        "part-allowed-early": (
            WRONG,
            """
            -tlx.async_descriptor_store_wait(0)
             if CLUSTER == 2:
                 tlx.barrier_arrive(part_empty[0], 1, 1 - rank)
            +tlx.async_descriptor_store_wait(0)
             noted = hopper.wait(
            """,
        ),
        "part-never-allowed": (
            STUCK,
            """
             tlx.async_descriptor_store_wait(0)
            -if CLUSTER == 2:
            -    tlx.barrier_arrive(part_empty[0], 1, 1 - rank)
             noted = hopper.wait(
            """,
        ),
        "no-exit-wait": (ENDED, "-tlx.barrier_wait(part_empty[0], (turns - 1) & 1)"),
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_right_kernels_come_out_right_in_any_order(name):
    for seed in SEEDS[:6]:
        RUNS[name](seed)


@contextmanager
def faulty(functions: tuple[Any, ...], diff: str):
    """Inside, the emulator reads one of the functions as the diff changes it; it must have read it."""
    read, original = [], inspect.getsource
    found = {of.fn: changed for of in functions if (changed := patched(original(of.fn), diff))}
    assert len(found) == 1, f"the lines are in {len(found)} functions: {diff}"

    def getsource(of: Any) -> str:
        if of not in found:
            return original(of)
        read.append(of)
        return found[of]

    with patch("profiling.emulator.launch.inspect.getsource", getsource):
        yield
    assert read, "the emulator did not read the changed source"


def patched(source: str, diff: str) -> str | None:
    """The source as the diff changes it, None where its lines do not stand there once. ``...`` is between two places.

    Lines are compared without their indentation.
    """
    lines = source.splitlines()
    for place in diff.split("..."):
        marked = textwrap.dedent(place).strip("\n").splitlines()
        marked = [line or " " for line in marked]
        wanted = [line[1:].strip() for line in marked if line[0] != "+"]
        found = [at for at in range(len(lines)) if [line.strip() for line in lines[at : at + len(wanted)]] == wanted]
        if len(found) != 1:
            return None
        lines[found[0] : found[0] + len(wanted)] = replaced(lines[found[0] :], marked)
    return "\n".join(lines)


def replaced(lines: list[str], marked: list[str]) -> list[str]:
    """What a diff's lines make of those that begin with its first; what it adds is indented as they are."""
    shift = indentation(lines[0]) - indentation(marked[0][1:])
    rest = iter(lines)
    made = []
    for line in marked:
        if line[0] == "+":
            made.append(" " * (shift + indentation(line[1:])) + line[1:].strip())
        else:
            kept = next(rest)
            made += [kept] if line[0] == " " else []
    return made


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def outcome(name: str, seed: int) -> str:
    try:
        RUNS[name](seed)
    except EmulationError as error:
        return f"{type(error).__name__}: {error}"
    except AssertionError as error:
        return f"wrong result: {str(error).splitlines()[0]}"
    return "right"


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in FAULTS for fault in FAULTS[name]])
def test_a_fault_is_caught(name, fault):
    comes, diff = FAULTS[name][fault]
    found = []
    with faulty(FUNCTIONS[name], diff):
        for seed in SEEDS:
            found.append(outcome(name, seed))
            if found[-1] != "right":
                break
    assert re.match(comes, found[-1]), found


def test_a_seed_repeats_an_order():
    """What one seed shows, it shows again; another may not."""
    _, diff = FAULTS["product"]["staging-overwritten"]
    with faulty(FUNCTIONS["product"], diff):
        found, again = ([outcome("product", seed) == "right" for seed in SEEDS] for _ in range(2))
    assert found == again and len(set(found)) > 1


@pytest.mark.parametrize(
    ("run", "changes"), [(real.forward, {"stages": 3}), (real.shared, {"dq_buffers": 3})], ids=["forward", "shared"]
)
def test_a_configuration_that_does_not_fit_is_refused(run, changes):
    with pytest.raises(EmulationError, match="bytes of shared memory; a CTA has 232,448"):
        run(replace(JAGGED, head_dim=128), **changes)


def test_lines_that_are_gone_are_not_taken_for_a_fault_that_was_caught():
    with pytest.raises(AssertionError, match="in 0 functions"), faulty((product,), "-tlx.fence()"):
        pass
    with pytest.raises(AssertionError, match="did not read"), faulty((product,), '-tlx.fence("async_shared")'):
        pass
