"""Faults of kernels in TLX, as the lines of a diff, and what the emulator says of each."""

from __future__ import annotations

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
             hopper.release(k_empty[stage], rank, CLUSTER)
            +scores = tlx.async_dot_wait(0, scores)
            """,
        ),
        "v-released-early": (
            WRONG,
            """
            +hopper.release(v_empty[behind], rank, CLUSTER)
             acc = tlx.async_dot_wait(0, acc)
            -hopper.release(v_empty[behind], rank, CLUSTER)
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
            -hopper.release(v_empty[behind], rank, CLUSTER)
             acc = acc * rescale[:, None]
            """,
        ),
        "v-released-twice": (
            CAUGHT,
            """
             acc = tlx.async_dot_wait(0, acc)
             hopper.release(v_empty[behind], rank, CLUSTER)
            +hopper.release(v_empty[behind], rank, CLUSTER)
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
    "forward-pair": {
        "released-here-only": (
            STUCK,
            """
             if CLUSTER == 2:
            -    tlx.barrier_arrive(empty, 1, 1 - rank, pred=one_of_eight())
            +    pass
            """,
        ),
        "released-by-every-thread-there": (
            ARRIVALS,
            """
            -tlx.barrier_arrive(empty, 1, 1 - rank, pred=one_of_eight())
            +tlx.barrier_arrive(empty, 1, 1 - rank)
            """,
        ),
        "half-a-tile-expected": (
            f"{WRONG}|{STUCK}",
            """
            -tlx.barrier_expect_bytes(full, height * width * element)
            +tlx.barrier_expect_bytes(full, height * width * element // 2)
            """,
        ),
        "the-same-half-twice": (
            WRONG,
            """
            -at = ragged(start, rows, row + rank * own_rows, column)
            +at = ragged(start, rows, row, column)
            """,
        ),
        "loaded-here-only": (
            STUCK,
            """
             if rank == 0:
                 half = tlx.local_slice(whole, [0, 0, 0, 0], [1, 1, own_rows, own_width])
            -    tlx.async_descriptor_load(desc, half, at, full, multicast_targets=[0, 1])
            +    tlx.async_descriptor_load(desc, half, at, full)
            """,
        ),
        "ends-before-the-other-has-released": (
            ENDED,
            """
             phase = ((loaded + ahead) // STAGES) & 1
            -tlx.barrier_wait(k_empty[stage], phase ^ 1)
            -tlx.barrier_wait(v_empty[stage], phase ^ 1)
            +pass
            """,
        ),
        "each-takes-tiles-for-itself": (
            CAUGHT,
            """
            -if not AGREE or rank == 0:
            -    next_tile = primitives.next_tile(tile, turn + 1, counter, tile_count, DEAL, CLUSTER)
            +next_tile = primitives.next_tile(tile, turn + 1, counter, tile_count, DEAL, CLUSTER)
             if fetched < 2:
            -    if AGREE:
            -        next_tile, noted = _agree(
            -            next_tile, turn, sent, came, came_first, next_empty, next_full, rank, lane, noted, capacity,
            -            named, LEVEL,
            -        )  # fmt: skip
             if next_tile < tile_count:
            """,
        ),
        "no-fence-before-the-next-tile-is-sent": (
            FENCE,
            """
            -tlx.fence("async_shared")
             tlx.async_remote_shmem_copy(came[slot], sent[slot], 1, next_full[slot])
            """,
        ),
        "the-next-tile-not-waited-for": (
            CAUGHT,
            """
            -noted = hopper.wait(next_full[slot], phase, lane, noted, capacity, _NEXT_FULL, slot, named, LEVEL)
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
             line = (place * SLICES + part) * (BLOCK_Q * WIDTH // _LINE)
            """,
        ),
        "dq-staging-overwritten": (WRONG, "-tlx.async_descriptor_store_wait(BUFFERS - 1)"),
        "dq-staging-overwritten-by-dv": (
            WRONG,
            """
            -tlx.async_descriptor_store_wait(0)
             if ANNOUNCE:
                 hopper.stored()
                 tlx.barrier_arrive(dq_added[turn % _TURNS], 1)
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
            -tlx.barrier_expect_bytes(q_full[stage], BLOCK_Q * (DIM * tlx.size_of(dtype) + _COLUMNS * 2))
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
    "shared-beside": {
        "last-tile-not-announced": (
            WRONG,
            """
             tlx.barrier_arrive(item_full[slot], 1)
             if ANNOUNCE:
            -    if turn > 0:
            +    if turn < 0:
            """,
        ),
        "tile-counted-as-the-next": (
            WRONG,
            """
            +added = batch * heads_kv + head
             if turn > 0:
                 noted = announce(dq_added, turn - 1, done + added, lane, noted, capacity, announced, LEVEL)
             # A table of other lengths than these could make it any head.
            -added = batch * heads_kv + tl.minimum(head, heads_kv - 1)
            """,
        ),
        "counted-before-it-is-there": (WRONG, "-hopper.stored()"),
        "counted-while-it-is-added": (
            WRONG,
            """
            -noted = hopper.wait(dq_added[place], phase, lane, noted, capacity, _DQ_ADDED, place, tile, LEVEL)
             tl.atomic_add(counter, 1, sem="release")
            """,
        ),
        "cta-not-counted": (
            WRONG,
            """
            -tl.atomic_add(started, 1, sem="relaxed")
            +tl.atomic_add(started, 0, sem="relaxed")
            """,
        ),
        "one-barrier-for-two-tiles": (
            STUCK,
            """
            -tlx.barrier_arrive(dq_added[turn % _TURNS], 1)
            +tlx.barrier_arrive(dq_added[0], 1)
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
             instrument.end_span(lane, begun, capacity, tile, LEVEL, 2)
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
