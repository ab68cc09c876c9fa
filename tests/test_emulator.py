"""The emulator of TLX kernels: right kernels come out right in any order, and each kind of fault is caught.

Faults are made by changing the source that the emulator reads, of kernels here and of the real ones.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
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
from profiling.emulator import Deadlock, EmulationError, emulated  # noqa: E402

one_thread = real.one_thread
SEEDS = range(6)


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
    with tlx.async_tasks():
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


def run_product(seed: int, stages: int = 2) -> None:
    """Whole numbers, so that the result is exact; the last rows do not exist."""
    block, tiles, steps, rows = 16, 4, 3, 60
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (rows, steps * block), generator=generator)
    b = torch.randint(-4, 5, (steps * block, block), generator=generator)
    c, sums = torch.full((rows, block), torch.nan), torch.full((rows,), torch.nan)
    descriptors = [
        TensorDescriptor(of, list(of.shape), list(of.stride()), [block, block])
        for of in (a.to(torch.bfloat16), b.to(torch.bfloat16), c)
    ]
    with emulated(sys.modules[__name__], "product", seed=seed):
        product[(1,)](*descriptors, sums, tiles, steps, rows, BLOCK=block, STAGES=stages)
    torch.testing.assert_close(c, (a @ b).float(), rtol=0, atol=0)
    torch.testing.assert_close(sums, (a @ b).sum(1).float(), rtol=0, atol=0)


def run_exchange(seed: int) -> None:
    turns, size = 5, 8
    given = torch.arange(2.0 * turns * size)
    found = torch.full_like(given, torch.nan)
    with emulated(sys.modules[__name__], "exchange", seed=seed):
        exchange[(2,)](given, found, turns, SIZE=size, ctas_per_cga=(2, 1, 1))
    own = given.view(turns, 2, size)
    torch.testing.assert_close(found.view_as(own), own + 2 * own.flip(1), rtol=0, atol=0)


def run_turns(seed: int) -> None:
    given = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6], dtype=torch.int32)
    found = torch.full((1,), -1, dtype=torch.int32)
    with emulated(sys.modules[__name__], "taking_turns", seed=seed):
        taking_turns[(1,)](given, found, 4, SIZE=8)
    expected = sum(number << place for place, number in enumerate(reversed(given.tolist())))
    assert found.item() == expected


JAGGED = Case(q_lens=(200, 40, 130), kv_lens=(300, 129, 200), heads=1, heads_kv=1)
SHARED_Q = {rows: Case(q_len=rows, kv_lens=(130, 70, 64, 5), heads=2, heads_kv=2) for rows in (100, 200)}


def run_forward(seed: int, **changes: Any) -> None:
    real.forward(JAGGED, seed, sms=1, **changes)


def run_pingpong(seed: int) -> None:
    run_forward(seed, pingpong=True)


def run_shared(seed: int, **changes: Any) -> None:
    real.shared(JAGGED, seed, sms=1, **changes)


def run_resident(seed: int) -> None:
    real.resident(SHARED_Q[100], seed, sms=1)


def run_pair(seed: int) -> None:
    real.resident(SHARED_Q[200], seed, sms=2)


RUNS = [run_product, run_exchange, run_turns, run_forward, run_pingpong, run_shared, run_resident, run_pair]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_a_right_kernel_comes_out_right_in_any_order(run):
    for seed in SEEDS:
        run(seed)


@dataclass(frozen=True)
class Fault:
    """A kernel's lines and what they are changed to, how it is run, and what is to come of it (a pattern)."""

    kernel: Any
    old: str
    new: str
    run: Callable[[int], None]
    comes: str


FENCE = "EmulationError: .* reads smem .* without a fence"
WRONG = "wrong result"
ARRIVALS = "EmulationError: .*more arrivals"


def changed(source: str, old: str, new: str) -> str:
    """The source with some of its lines replaced, which must stand there once."""
    lines, wanted = source.splitlines(), [line.strip() for line in old.strip().splitlines()]
    stripped = [line.strip() for line in lines]
    places = [at for at in range(len(lines)) if stripped[at : at + len(wanted)] == wanted]
    assert len(places) == 1, f"{len(places)} times in the source: {old}"
    indent = re.match(" *", lines[places[0]])[0]
    lines[places[0] : places[0] + len(wanted)] = [indent + line.strip() for line in new.strip().splitlines() or ["pass"]]
    return "\n".join(lines)


@contextmanager
def faulty(fault: Fault):
    """The emulator reads the changed source inside; it must have."""
    read, original = [], inspect.getsource
    source = changed(original(fault.kernel.fn), fault.old, fault.new)

    def getsource(of: Any) -> str:
        if of is not fault.kernel.fn:
            return original(of)
        read.append(of)
        return source

    with patch("profiling.emulator.launch.inspect.getsource", getsource):
        yield
    assert read, "the emulator did not read the changed source"


def outcome(run: Callable[[int], None], seed: int) -> str:
    try:
        run(seed)
    except EmulationError as error:
        return f"{type(error).__name__}: {error}"
    except AssertionError as error:
        return f"wrong result: {error}"
    return "right"


FORWARD, SHARED, RESIDENT = forward.jfa_forward_hopper, backward.jfa_backward_hopper, resident.jfa_backward_resident

TOY_FAULTS = {
    "store-without-fence": Fault(product, 'tlx.fence("async_shared")', "", run_product, FENCE),
    "fence-of-another-kind": Fault(product, 'tlx.fence("async_shared")', 'tlx.fence("gpu")', run_product, FENCE),
    "fence-behind-the-store": Fault(
        product,
        """
        tlx.fence("async_shared")
        tlx.async_descriptor_store(c_desc, c_tile[0], [tile * BLOCK, 0])
        """,
        """
        tlx.async_descriptor_store(c_desc, c_tile[0], [tile * BLOCK, 0])
        tlx.fence("async_shared")
        """,
        run_product,
        FENCE,
    ),
    "product-of-what-was-stored-without-fence": Fault(
        product,
        "acc = tlx.async_dot(a_tiles[stage], b_tiles[stage], acc)",
        """
        tlx.local_store(a_tiles[stage], tlx.local_load(a_tiles[stage]))
        acc = tlx.async_dot(a_tiles[stage], b_tiles[stage], acc)
        """,
        run_product,
        FENCE,
    ),
    "copy-without-fence": Fault(exchange, 'tlx.fence("async_shared")', "", run_exchange, FENCE),
    "empty-before-the-product-has-read": Fault(
        product,
        """
        acc = tlx.async_dot_wait(0, acc)
        tlx.barrier_arrive(empty[stage], 1)
        """,
        """
        tlx.barrier_arrive(empty[stage], 1)
        acc = tlx.async_dot_wait(0, acc)
        """,
        run_product,
        WRONG,
    ),
    "full-not-waited-for": Fault(
        product, "tlx.barrier_wait(full[stage], (turn // STAGES) & 1)", "", run_product, WRONG
    ),
    "full-waited-for-with-the-other-parity": Fault(
        product,
        "tlx.barrier_wait(full[stage], (turn // STAGES) & 1)",
        "tlx.barrier_wait(full[stage], ((turn // STAGES) & 1) ^ 1)",
        run_product,
        WRONG,
    ),
    "empty-not-waited-for": Fault(
        product, "tlx.barrier_wait(empty[stage], ((turn // STAGES) & 1) ^ 1)", "", run_product, WRONG
    ),
    "empty-never-comes": Fault(
        product,
        "tlx.barrier_arrive(empty[stage], 1)",
        "",
        run_product,
        "Deadlock: .*CTA 0 role 0.0 waits for barrier 2 of CTA 0 .*CTA 0 role 1.0 waits for barrier 0 of CTA 0",
    ),
    "empty-comes-twice": Fault(
        product, "tlx.barrier_arrive(empty[stage], 1)", "tlx.barrier_arrive(empty[stage], 2)", run_product, ARRIVALS
    ),
    "too-few-bytes-expected": Fault(
        product,
        "tlx.barrier_expect_bytes(full[stage], 2 * BLOCK * BLOCK * 2)",
        "tlx.barrier_expect_bytes(full[stage], BLOCK * BLOCK * 2)",
        run_product,
        WRONG,
    ),
    "too-many-bytes-expected": Fault(
        product,
        "tlx.barrier_expect_bytes(full[stage], 2 * BLOCK * BLOCK * 2)",
        "tlx.barrier_expect_bytes(full[stage], 3 * BLOCK * BLOCK * 2)",
        run_product,
        "Deadlock",
    ),
    "product-read-without-waiting": Fault(
        product, "acc = tlx.async_dot_wait(0, acc)", "", run_product, "EmulationError: .*Product"
    ),
    "product-read-that-the-wait-leaves": Fault(
        product,
        "acc = tlx.async_dot_wait(0, acc)",
        "acc = tlx.async_dot_wait(1, acc)",
        run_product,
        "EmulationError: .*a product that it does not wait for",
    ),
    "staging-overwritten": Fault(
        product,
        """
        tlx.async_descriptor_store_wait(0)
        tlx.local_store(c_tile[0], acc)
        """,
        "tlx.local_store(c_tile[0], acc)",
        run_product,
        WRONG,
    ),
    "end-before-the-store-has-read": Fault(
        product,
        """
        tl.store(sums + rows, tl.sum(acc, 1), mask=rows < rows_used)
        tlx.async_descriptor_store_wait(0)
        """,
        "tl.store(sums + rows, tl.sum(acc, 1), mask=rows < rows_used)",
        run_product,
        "EmulationError: .*ends while a TMA store",
    ),
    "out-of-bounds": Fault(
        product,
        "tl.store(sums + rows, tl.sum(acc, 1), mask=rows < rows_used)",
        "tl.store(sums + rows, tl.sum(acc, 1))",
        run_product,
        "EmulationError: .*out of bounds: elements 48 to 63 of 60",
    ),
    "buffer-that-is-not-there": Fault(
        product,
        "stage = turn % STAGES\nrow = turn // steps * BLOCK",
        "stage = turn % (STAGES + 1)\nrow = turn // steps * BLOCK",
        run_product,
        "EmulationError: .*there are 2|EmulationError: .*IndexError",
    ),
    "memory-over-the-limit": Fault(
        product,
        "c_tile = tlx.local_alloc((BLOCK, BLOCK), tl.float32, 1)",
        "c_tile = tlx.local_alloc((BLOCK, BLOCK), tl.float32, 226)",
        run_product,
        "EmulationError: .*233,472 bytes of shared memory; a CTA has 232,448",
    ),
    "pair-without-exit-wait": Fault(
        exchange, "tlx.barrier_wait(empty[0], (turns - 1) & 1)", "", run_exchange, "EmulationError: .*has ended"
    ),
    "sent-again-before-it-was-used": Fault(
        exchange, "tlx.barrier_wait(empty[0], (turn & 1) ^ 1)", "", run_exchange, f"{WRONG}|Deadlock"
    ),
    "arrival-at-the-own-cta": Fault(
        exchange,
        "tlx.barrier_arrive(empty[0], 1, 1 - rank)",
        "tlx.barrier_arrive(empty[0], 1)",
        run_exchange,
        f"{WRONG}|Deadlock",
    ),
    "turn-not-passed": Fault(
        taking_turns,
        "primitives.put(value[0], 2 * primitives.get(value[0]) + number)\nprimitives.pass_turn(wg)",
        "primitives.put(value[0], 2 * primitives.get(value[0]) + number)",
        run_turns,
        "Deadlock: .*role 1.[01] waits for named barrier",
    ),
    "turn-not-taken": Fault(taking_turns, "tlx.named_barrier_wait(9 + wg, 256)", "", run_turns, f"{WRONG}|more"),
    "turn-of-too-few-threads": Fault(
        taking_turns,
        "tlx.named_barrier_wait(9 + wg, 256)",
        "tlx.named_barrier_wait(9 + wg, 128)",
        run_turns,
        f"{WRONG}|EmulationError: .*more threads",
    ),
    "bulk-load-not-waited-for": Fault(taking_turns, "tlx.barrier_wait(full[0], 0)", "", run_turns, WRONG),
}

FORWARD_FAULTS = {
    "store-without-fence": Fault(primitives.store_tile, 'tlx.fence("async_shared")', "", run_forward, FENCE),
    "staging-overwritten": Fault(
        primitives.store_tile, "tlx.async_descriptor_store_wait(0)", "", run_forward, WRONG
    ),
    "end-before-the-store-has-read": Fault(
        FORWARD,
        "tlx.async_descriptor_store_wait(0)",
        "",
        run_forward,
        "EmulationError: .*ends while a TMA store",
    ),
    "k-released-early": Fault(
        FORWARD,
        """
        scores = tlx.async_dot_wait(1, scores)
        tlx.barrier_arrive(k_empty[stage], 1)
        """,
        """
        tlx.barrier_arrive(k_empty[stage], 1)
        scores = tlx.async_dot_wait(1, scores)
        """,
        run_forward,
        WRONG,
    ),
    "v-released-early": Fault(
        FORWARD,
        """
        acc = tlx.async_dot_wait(0, acc)
        tlx.barrier_arrive(v_empty[behind], 1)
        acc = acc * rescale[:, None]
        """,
        """
        tlx.barrier_arrive(v_empty[behind], 1)
        acc = tlx.async_dot_wait(0, acc)
        acc = acc * rescale[:, None]
        """,
        run_forward,
        WRONG,
    ),
    "q-released-early": Fault(
        FORWARD,
        "both = first + HALF < q_len",
        """
        tlx.barrier_arrive(q_empty[q_slot], 1)
        both = first + HALF < q_len
        """,
        run_forward,
        f"{ARRIVALS}|{WRONG}|Deadlock",
    ),
    "item-read-late": Fault(
        FORWARD,
        """
        tlx.barrier_arrive(item_empty[slot], 1)
        head = tile % heads
        """,
        "head = tile % heads",
        run_forward,
        "Deadlock: .*role 0.0 waits for barrier",
    ),
    "v-never-released": Fault(
        FORWARD,
        """
        acc = tlx.async_dot_wait(0, acc)
        tlx.barrier_arrive(v_empty[behind], 1)
        acc = acc * rescale[:, None]
        """,
        """
        acc = tlx.async_dot_wait(0, acc)
        acc = acc * rescale[:, None]
        """,
        run_forward,
        "Deadlock: .*role 0.0 waits for barrier .*role 1.[01] waits for barrier",
    ),
    "v-released-twice": Fault(
        FORWARD,
        """
        acc = tlx.async_dot_wait(0, acc)
        tlx.barrier_arrive(v_empty[behind], 1)
        acc = acc * rescale[:, None]
        """,
        """
        acc = tlx.async_dot_wait(0, acc)
        tlx.barrier_arrive(v_empty[behind], 2)
        acc = acc * rescale[:, None]
        """,
        run_forward,
        ARRIVALS,
    ),
    "without-rows-nothing-released": Fault(
        FORWARD,
        "for _ in range(blocks + tl.where(short > 0, 1, 0)):",
        "for _ in range(0):",
        run_forward,
        "Deadlock",
    ),
    "scores-read-without-waiting": Fault(
        FORWARD, "scores = tlx.async_dot_wait(1, scores)", "", run_forward, "EmulationError: .*Product"
    ),
    "output-read-without-waiting": Fault(
        FORWARD,
        """
        acc = tlx.async_dot_wait(0, acc)
        tlx.barrier_arrive(v_empty[behind], 1)
        acc = acc * rescale[:, None]
        """,
        """
        tlx.barrier_arrive(v_empty[behind], 1)
        acc = acc * rescale[:, None]
        """,
        run_forward,
        "EmulationError: .*Product",
    ),
    "k-not-waited-for": Fault(
        FORWARD,
        """
        noted = hopper.wait(
        k_full[stage], (used // STAGES) & 1, lane, noted, capacity, _K_FULL, stage, tile, LEVEL
        )
        if PINGPONG:
        if both:
        noted = hopper.take_turn(wg, lane, noted, capacity, tile, LEVEL)
        scores = tlx.async_dot(q_tile, tlx.local_trans(k_tiles[stage]))
        behind = (used - 1) % STAGES
        """,
        """
        scores = tlx.async_dot(q_tile, tlx.local_trans(k_tiles[stage]))
        behind = (used - 1) % STAGES
        """,
        run_forward,
        WRONG,
    ),
    "lse-out-of-bounds": Fault(
        FORWARD,
        "tl.store(lse + primitives.wide(head) * total_q + at, row_lse, mask=rows < q_len)",
        "tl.store(lse + primitives.wide(head) * total_q + at, row_lse)",
        run_forward,
        f"EmulationError: .*out of bounds|{WRONG}",
    ),
    "tile-out-of-bounds": Fault(
        primitives.ragged,
        "return [RAGGED_ROWS, start + rows, RAGGED_ROWS - rows + row, column]",
        "return [RAGGED_ROWS, start + rows, RAGGED_ROWS - rows + row - start, column]",
        run_forward,
        "EmulationError: .*out of bounds",
    ),
    "turn-not-passed": Fault(
        FORWARD,
        """
        if PINGPONG:
        if both:
        hopper.pass_turn(wg)
        scores = tlx.async_dot_wait(1, scores)
        """,
        "scores = tlx.async_dot_wait(1, scores)",
        run_pingpong,
        "Deadlock: .*named barrier",
    ),
}

SHARED_FAULTS = {
    "ds-without-fence": Fault(
        SHARED,
        """
        tlx.local_store(ds_own, ds)
        tlx.fence("async_shared")
        """,
        "tlx.local_store(ds_own, ds)",
        run_shared,
        FENCE,
    ),
    "dq-without-fence": Fault(backward._add_dq, 'tlx.fence("async_shared")', "", run_shared, FENCE),
    "dq-staging-overwritten": Fault(
        backward._add_dq, "tlx.async_descriptor_store_wait(BUFFERS - 1)", "", run_shared, WRONG
    ),
    "dv-staging-overwritten": Fault(
        SHARED,
        """
        tlx.async_descriptor_store(dv_desc, out_tiles[wg * OUT_PLACES], at)
        tlx.async_descriptor_store_wait(0)
        """,
        "tlx.async_descriptor_store(dv_desc, out_tiles[wg * OUT_PLACES], at)",
        run_shared,
        WRONG,
    ),
    "dq-staging-overwritten-by-dv": Fault(
        SHARED,
        """
        tlx.async_descriptor_store_wait(0)
        tlx.local_store(out_tiles[wg * OUT_PLACES], dv_acc.to(dtype).reshape(1, 1, HALF, DIM))
        """,
        "tlx.local_store(out_tiles[wg * OUT_PLACES], dv_acc.to(dtype).reshape(1, 1, HALF, DIM))",
        run_shared,
        WRONG,
    ),
    "v-released-early": Fault(
        SHARED,
        """
        dp = tlx.async_dot_wait(1, dp)
        if step + 1 == total:
        tlx.barrier_arrive(v_empty[0], 1)
        """,
        """
        if step + 1 == total: tlx.barrier_arrive(v_empty[0], 1)
        dp = tlx.async_dot_wait(1, dp)
        """,
        run_shared,
        WRONG,
    ),
    "do-released-early": Fault(
        SHARED,
        """
        dv_acc = tlx.async_dot_wait(1, dv_acc)
        tlx.barrier_arrive(do_empty[stage], 1)
        """,
        """
        tlx.barrier_arrive(do_empty[stage], 1)
        dv_acc = tlx.async_dot_wait(1, dv_acc)
        """,
        run_shared,
        WRONG,
    ),
    "q-released-early": Fault(
        SHARED,
        """
        dk_acc = tlx.async_dot_wait(1, dk_acc)
        if more:
        tlx.barrier_arrive(q_empty[stage], 1)
        """,
        """
        if more: tlx.barrier_arrive(q_empty[stage], 1)
        dk_acc = tlx.async_dot_wait(1, dk_acc)
        """,
        run_shared,
        WRONG,
    ),
    "q-released-before-the-spare-scores": Fault(
        SHARED,
        """
        scores = tlx.async_dot_wait(0, scores)
        if not more:
        tlx.barrier_arrive(q_empty[stage], 1)
        """,
        """
        if not more: tlx.barrier_arrive(q_empty[stage], 1)
        scores = tlx.async_dot_wait(0, scores)
        """,
        run_shared,
        WRONG,
    ),
    "ds-released-early": Fault(
        SHARED,
        """
        dq = tlx.async_dot_wait(1, dq)
        tlx.barrier_arrive(ds_empty[0], 1)
        """,
        """
        tlx.barrier_arrive(ds_empty[0], 1)
        dq = tlx.async_dot_wait(1, dq)
        """,
        run_shared,
        WRONG,
    ),
    "k-released-early": Fault(
        SHARED,
        "dk_acc = tlx.async_dot(ds, q_tiles[stage], dk_acc)",
        """
        dk_acc = tlx.async_dot(ds, q_tiles[stage], dk_acc)
        if step + 1 == total: tlx.barrier_arrive(k_empty[0], 1)
        """,
        run_shared,
        f"{ARRIVALS}|{WRONG}",
    ),
    "ds-not-told": Fault(
        SHARED, "tlx.barrier_arrive(ds_full[0], 1)", "", run_shared, "Deadlock: .*role 1.0 .*role 1.1"
    ),
    "ds-told-twice": Fault(
        SHARED, "tlx.barrier_arrive(ds_full[0], 1)", "tlx.barrier_arrive(ds_full[0], 2)", run_shared, WRONG
    ),
    "ds-told-before-it-is-there": Fault(
        SHARED,
        """
        tlx.local_store(ds_own, ds)
        tlx.fence("async_shared")
        tlx.barrier_arrive(ds_full[0], 1)
        """,
        """
        tlx.barrier_arrive(ds_full[0], 1)
        tlx.local_store(ds_own, ds)
        tlx.fence("async_shared")
        """,
        run_shared,
        f"{FENCE}|{WRONG}",
    ),
    "delta-without-dp": Fault(
        SHARED, "dp = tlx.async_dot_wait(1, dp)", "", run_shared, "EmulationError: .*Product"
    ),
    "more-bytes-than-expected": Fault(
        SHARED,
        "tlx.barrier_expect_bytes(q_full[stage], BLOCK_Q * DIM * tlx.size_of(dtype) + BLOCK_Q * 4)",
        "tlx.barrier_expect_bytes(q_full[stage], BLOCK_Q * DIM * tlx.size_of(dtype))",
        run_shared,
        f"{WRONG}|Deadlock",
    ),
    "end-before-the-store-has-read": Fault(
        SHARED,
        """
        tile = hopper.get(item_tile[turn % _SLOTS])
        tlx.async_descriptor_store_wait(0)
        """,
        "tile = hopper.get(item_tile[turn % _SLOTS])",
        run_shared,
        "EmulationError: .*ends while a TMA store",
    ),
}

RESIDENT_FAULTS = {
    "p-without-fence": Fault(
        RESIDENT,
        """
        tlx.local_store(p_own, p.to(dtype))
        tlx.fence("async_shared")
        """,
        "tlx.local_store(p_own, p.to(dtype))",
        run_resident,
        FENCE,
    ),
    "ds-without-fence": Fault(
        RESIDENT,
        """
        tlx.local_store(ds_own, ds)
        tlx.fence("async_shared")
        """,
        "tlx.local_store(ds_own, ds)",
        run_resident,
        FENCE,
    ),
    "dv-without-fence": Fault(resident._store, 'tlx.fence("async_shared")', "", run_resident, FENCE),
    "dq-without-fence": Fault(
        RESIDENT,
        """
        tlx.local_store(dq_tiles[wg], dq_left.reshape(1, 1, HALF, WIDTH))
        tlx.fence("async_shared")
        """,
        "tlx.local_store(dq_tiles[wg], dq_left.reshape(1, 1, HALF, WIDTH))",
        run_resident,
        FENCE,
    ),
    "pair-part-without-fence": Fault(
        RESIDENT,
        """
        tlx.local_store(parts[0], sent.to(dtype))
        tlx.fence("async_shared")
        """,
        "tlx.local_store(parts[0], sent.to(dtype))",
        run_pair,
        FENCE,
    ),
    "v-released-early": Fault(
        RESIDENT,
        """
        dp = tlx.async_dot_wait(0, dp)
        tlx.barrier_arrive(v_empty[v_stage], 1)
        """,
        """
        tlx.barrier_arrive(v_empty[v_stage], 1)
        dp = tlx.async_dot_wait(0, dp)
        """,
        run_resident,
        WRONG,
    ),
    "k-released-early": Fault(
        RESIDENT,
        """
        dq_left = tlx.async_dot_wait(0, dq_left)
        tlx.barrier_arrive(k_empty[k_stage], 1)
        """,
        """
        tlx.barrier_arrive(k_empty[k_stage], 1)
        dq_left = tlx.async_dot_wait(0, dq_left)
        """,
        run_resident,
        WRONG,
    ),
    "weights-released-early": Fault(
        RESIDENT,
        """
        sent = tlx.async_dot_wait(1, sent)
        tlx.barrier_arrive(weights_empty[early], 1)
        """,
        """
        tlx.barrier_arrive(weights_empty[early], 1)
        sent = tlx.async_dot_wait(1, sent)
        """,
        run_resident,
        WRONG,
    ),
    "do-released-early": Fault(
        RESIDENT,
        "do_own = tlx.local_slice(row_tiles[do_stage], [wg * HALF, 0], [HALF, DIM])",
        """
        do_own = tlx.local_slice(row_tiles[do_stage], [wg * HALF, 0], [HALF, DIM])
        if (flags & _CLOSES_SEQUENCE) != 0: tlx.barrier_arrive(do_empty[do_stage], 1)
        """,
        run_resident,
        f"{ARRIVALS}|{WRONG}",
    ),
    "out-staging-overwritten": Fault(
        RESIDENT,
        """
        tlx.async_descriptor_store_wait(0)
        if CLUSTER == 2:
        tlx.barrier_arrive(part_empty[0], 1, 1 - rank)
        """,
        "if CLUSTER == 2: tlx.barrier_arrive(part_empty[0], 1, 1 - rank)",
        run_resident,
        WRONG,
    ),
    "pair-part-allowed-early": Fault(
        RESIDENT,
        """
        tlx.async_descriptor_store_wait(0)
        if CLUSTER == 2:
        tlx.barrier_arrive(part_empty[0], 1, 1 - rank)
        """,
        """
        if CLUSTER == 2: tlx.barrier_arrive(part_empty[0], 1, 1 - rank)
        tlx.async_descriptor_store_wait(0)
        """,
        run_pair,
        WRONG,
    ),
    "dq-staging-overwritten": Fault(
        RESIDENT, "tlx.named_barrier_wait(_FLUSH_BARRIER, _PAIR)", "", run_resident, WRONG
    ),
    "dq-staged-over-weights": Fault(
        RESIDENT,
        """
        noted = hopper.wait(
        weights_empty[_P], turn & 1, lane, noted, capacity, _WEIGHTS_EMPTY, _P, tile, LEVEL
        )
        noted = hopper.wait(
        weights_empty[_DS], turn & 1, lane, noted, capacity, _WEIGHTS_EMPTY, _DS, tile, LEVEL
        )
        """,
        "",
        run_resident,
        WRONG,
    ),
    "weights-not-told": Fault(
        RESIDENT,
        "tlx.barrier_arrive(weights_full[_DS], 1)",
        "",
        run_resident,
        "Deadlock: .*role 2.0 waits for barrier",
    ),
    "item-released-twice": Fault(
        RESIDENT,
        """
        tlx.barrier_arrive(item_empty[slot], 1)
        column = head * DIM
        """,
        """
        tlx.barrier_arrive(item_empty[slot], 2)
        column = head * DIM
        """,
        run_resident,
        ARRIVALS,
    ),
    "dv-read-without-waiting": Fault(
        RESIDENT, "sent = tlx.async_dot_wait(1, sent)", "", run_resident, "EmulationError: .*Product"
    ),
    "pair-part-not-allowed": Fault(
        RESIDENT,
        """
        if CLUSTER == 2:
        tlx.barrier_arrive(part_empty[0], 1, 1 - rank)
        noted = hopper.wait(
        """,
        "noted = hopper.wait(",
        run_pair,
        "Deadlock: .*CTA 0 role 2.0 waits for barrier .*CTA 1 role 2.0 waits for barrier",
    ),
    "pair-without-exit-wait": Fault(
        RESIDENT,
        "tlx.barrier_wait(part_empty[0], (turns - 1) & 1)",
        "",
        run_pair,
        "EmulationError: .*has ended",
    ),
    "pair-without-last-words": Fault(
        RESIDENT,
        """
        tlx.barrier_arrive(part_empty[0], 1, 1 - rank)
        tlx.barrier_wait(part_empty[0], (turns - 1) & 1)
        """,
        "",
        run_pair,
        "EmulationError: .*has ended",
    ),
}

FAULTS = {"toy": TOY_FAULTS, "forward": FORWARD_FAULTS, "shared": SHARED_FAULTS, "resident": RESIDENT_FAULTS}


@pytest.mark.parametrize("fault", [pytest.param(fault, id=f"{kind}-{name}") for kind in FAULTS for name, fault in FAULTS[kind].items()])
def test_a_fault_is_caught(fault):
    found = []
    with faulty(fault):
        for seed in SEEDS:
            found.append(outcome(fault.run, seed))
            if found[-1] != "right":
                break
    assert re.match(fault.comes, found[-1]), found
