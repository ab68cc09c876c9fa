"""Recording real launches (on a GPU), and what refuses without one."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from jfa import instrument, schedule, workloads
from jfa.attention import forward_items
from jfa.impl.triton import dq
from jfa.validation import validate
from profiling.errors import UserError
from profiling.launching import prepare
from profiling.record import _capacity, _tile_columns, record, record_launcher
from profiling.recording import Recording
from profiling.sm_time import sm_time, summary

SMALL = workloads.Workload(
    name="small",
    heads=2,
    heads_kv=2,
    head_dim=64,
    q_lens=np.full(40, 150),
    kv_lens=np.where(np.arange(40) % 3 == 0, 0, 37 * np.arange(40)),
    broadcast_q=True,
)
# On sm_90 done by pairs of CTAs: an even number of blocks, no sequence long enough to be cut.
UNCUT = replace(SMALL, name="uncut", q_lens=np.full(40, 200), kv_lens=np.minimum(SMALL.kv_lens, 900))
# Quick enough for the interpreter.
FEW = replace(SMALL, q_lens=np.full(6, 70), kv_lens=np.array([0, 200, 37, 0, 64, 5]))


def test_without_a_gpu_it_says_so_in_one_line(device: str) -> None:
    if device == "cuda":
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="found no CUDA GPU"):
        record(SMALL)


@pytest.mark.parametrize(
    ("direction", "changed"),
    [
        ("forward", {"q_lens": np.zeros(6, dtype=int)}),
        ("backward", {"q_lens": np.zeros(6, dtype=int)}),
        ("backward", {"kv_lens": np.zeros(6, dtype=int)}),
    ],
)
def test_a_workload_without_rows_is_refused(direction: str, changed: dict[str, np.ndarray], device: str) -> None:
    with pytest.raises(UserError, match=f"the {direction} of small has no rows"):
        prepare(replace(FEW, **changed), "static", direction, torch.device(device))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", schedule.SCHEDULES)
def test_lanes_hold_what_a_cta_can_take(name: str, direction: str, device: str) -> None:
    """Exactly that where the deal fixes it: with one CTA a tile, room for many would be gigabytes."""
    launcher = prepare(FEW, name, direction, torch.device(device))
    tiles = launcher.items.max_items * launcher.heads
    clearing = 1
    expected = {"grid": 1, "static": -(-tiles // launcher.ctas), "balanced": -(-tiles // launcher.ctas)}
    assert _capacity(launcher, FEW, "tile") == expected.get(name, tiles) + clearing
    assert _capacity(launcher, FEW, "cta") == 0


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["static", "balanced"])
def test_a_tile_has_one_rank_under_every_schedule(name: str, direction: str, device: str) -> None:
    launcher = prepare(FEW, name, direction, torch.device(device))
    work = int(launcher.items.counts[0]) * launcher.heads
    columns = _tile_columns(np.array([-1, *range(work)]), np.zeros(1 + work, int), launcher, FEW)
    assert [int(column[0]) for column in columns.values()] == [-1] * 4
    batch, head, block = (columns[field][1:] for field in ("batch", "head", "block"))
    owner = FEW.q_lens if direction == "forward" else FEW.kv_lens
    blocks = -(-owner // launcher.block)
    natural = [(b, i, h) for b, count in enumerate(blocks) for i in range(count) for h in range(launcher.heads)]
    assert [natural[rank] for rank in columns["tile"][1:]] == list(zip(batch, block, head, strict=True))
    assert len(set(columns["tile"])) == work + 1


def test_each_cta_of_a_pair_has_a_block_of_its_own(device: str) -> None:
    """A tile of two blocks, of which every other CTA does the second: recorded as the tiles they would be alone."""
    few = replace(FEW, q_lens=np.full(len(FEW.kv_lens), 200))
    alone = prepare(few, "static", "forward", torch.device(device), "triton")
    work = int(alone.items.counts[0]) * alone.heads
    expected = _tile_columns(np.arange(work), np.zeros(work, int), alone, few)
    inputs = few.inputs(device)
    problem = validate(inputs.q, inputs.k, inputs.v, inputs.kv_offsets)
    units = forward_items(inputs.kv_offsets, None, problem, 2 * alone.block, "balanced")
    paired = replace(alone, items=units, cluster=2, blocks=2)
    count = int(units.counts[1]) * paired.heads
    tile, cta = np.repeat(np.arange(count), 2), np.tile([4, 5], count)
    found = _tile_columns(tile, cta, paired, few)
    even = -(-200 // alone.block) % 2 == 0
    assert even, "a tile of one block would have no second"
    assert sorted(zip(*found.values(), strict=True)) == sorted(zip(*expected.values(), strict=True))


def expected_tiles(recording: Recording, workload: workloads.Workload) -> set[tuple[int, int, int]]:
    """(batch, head, block) of all tiles, those without work left out where the schedule drops them."""
    forward = recording.direction == "forward"
    config = recording.metadata["kernel"]["config"]
    own, other = (workload.q_lens, workload.kv_lens) if forward else (workload.kv_lens, workload.q_lens)
    block, heads = (config["block_q"], workload.heads) if forward else (config["block_kv"], workload.heads_kv)
    dropped = schedule.is_sorted(recording.schedule)
    return {
        (batch, head, index)
        for batch, (rows, columns) in enumerate(zip(own, other, strict=True))
        for index in range(-(-int(rows) // block))
        for head in range(heads)
        if columns > 0 or not dropped
    }


@pytest.mark.gpu
@pytest.mark.parametrize(("workload", "direction"), [(SMALL, "forward"), (SMALL, "backward"), (UNCUT, "forward")])
@pytest.mark.parametrize("name", schedule.SCHEDULES)
def test_each_tile_is_recorded_once(name: str, workload: workloads.Workload, direction: str, tmp_path) -> None:
    recording = record(workload, schedule=name, direction=direction, launches=2, repeats=2)
    assert recording.lost == 0
    for launch in (0, 1):
        rows = recording.events[(recording.events["launch"] == launch) & (recording.events["event"] == "tile")]
        for _, own in rows.groupby("role", observed=True):
            seen = list(zip(own["batch"], own["head"], own["block"], strict=True))
            assert set(seen) == expected_tiles(recording, workload)
            times = recording.get("kernel.cluster") // recording.get("kernel.blocks")
            assert (own["tile"].value_counts() == times).all()
            # The parts of a cut sequence are tiles of their own.
            once = len(seen) == len(set(seen)) * times
            assert once or recording.get("kernel.split") > 0
    split = sm_time(recording)
    parts = split[["work_ns", "ramp_ns", "fetch_ns", "tail_ns", "unused_ns"]].sum(axis=1)
    assert (parts == split["total_ns"]).all()
    path = tmp_path / "small.parquet"
    recording.write(path)
    assert Recording.read(path).events.equals(recording.events)


@pytest.mark.gpu
def test_tiles_lie_inside_their_cta() -> None:
    events = record(SMALL, schedule="dynamic", repeats=2).events
    events = events.assign(lane=list(zip(events["cta"], events["role"], strict=True)))
    lives = events[events["event"] == "cta"].set_index("lane")
    tiles = events[events["event"] != "cta"]
    assert (tiles["start_ns"].to_numpy() >= lives.loc[tiles["lane"], "start_ns"].to_numpy()).all()
    assert (tiles["end_ns"].to_numpy() <= lives.loc[tiles["lane"], "end_ns"].to_numpy()).all()
    assert (tiles["sm"].to_numpy() == lives.loc[tiles["lane"], "sm"].to_numpy()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("workload", [SMALL, UNCUT], ids=["alone", "pairs"])
def test_level_wait_notes_every_role_and_barrier(workload: workloads.Workload) -> None:
    from jfa.impl import choice
    from jfa.impl.triton import launch

    if choice.resolve("auto", launch.capability(torch.device("cuda", 0)), torch.bfloat16) != "hopper":
        with pytest.raises(UserError, match="level wait: the triton forward has no roles"):
            record(workload, level="wait", repeats=2)
        return
    recording = record(workload, level="wait", repeats=2)
    assert recording.lost == 0 and recording.get("clock.order_violations") == 0
    waits = recording.events[recording.events["event"].str.startswith("wait:")]
    found = {role: set(own["event"]) for role, own in waits.groupby("role", observed=True)}
    pairs = {"wait:next_full", "wait:next_empty"} if recording.get("kernel.blocks") == 2 else set()
    assert (workload is UNCUT) == bool(pairs)
    assert found["load"] == {"wait:item_empty", "wait:q_empty", "wait:k_empty", "wait:v_empty"} | pairs
    assert found["mma0"] == found["mma1"] == {"wait:item_full", "wait:q_full", "wait:k_full", "wait:v_full"}
    tiles = recording.events[recording.events["event"] == "tile"]
    assert set(tiles["role"]) == {"mma0", "mma1"}
    assert (waits["end_ns"] >= waits["start_ns"]).all() and set(waits["stage"]) <= {0, 1, 2, 3}


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [100, 200, 600])
def test_level_wait_of_each_backward_has_every_role(q_len: int) -> None:
    workload = replace(SMALL, q_lens=np.full(len(SMALL.kv_lens), q_len))
    recording = record(workload, direction="backward", level="wait", repeats=2)
    if recording.get("kernel.impl") != "hopper":
        pytest.skip("no backward with roles here")
    assert recording.lost == 0 and recording.get("clock.order_violations") == 0
    assert recording.get("kernel.cluster") == (2 if q_len == 200 else 1)
    waits = recording.events[recording.events["event"].str.startswith("wait:")]
    assert set(waits["role"]) == {"load", "mma0", "mma1", *(["mma2"] if q_len <= 512 else [])}
    assert (waits["end_ns"] >= waits["start_ns"]).all()


def test_a_forward_is_not_recorded_as_deterministic() -> None:
    with pytest.raises(UserError, match="deterministic: a forward always repeats"):
        record(SMALL, deterministic=True)


def test_level_wait_of_a_deterministic_backward_says_what_would_do(device: str) -> None:
    where = torch.device(device)
    launcher = prepare(FEW, "static", "backward", where, "triton", deterministic=True)
    with pytest.raises(UserError, match="record it at level tile, or without deterministic"):
        record_launcher(launcher, FEW, where, "wait", 1, 2)


def test_an_unknown_direction_is_named_first() -> None:
    with pytest.raises(UserError, match="direction: expected one of forward, backward, got 'backwards'"):
        record(SMALL, direction="backwards", deterministic=True)


def test_a_deterministic_backward_gives_the_same_gradients(device: str) -> None:
    found = []
    for deterministic in (False, True):
        launcher = prepare(FEW, "static", "backward", torch.device(device), "triton", deterministic=deterministic)
        assert launcher.deterministic is deterministic
        with patch.object(dq, "grad_q", wraps=dq.grad_q) as fixed_order:
            launcher.run(instrument.OFF)
        assert fixed_order.called is deterministic
        found.append([result.clone() for result in launcher.results])
    for usual, fixed in zip(*found, strict=True):
        torch.testing.assert_close(usual, fixed, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("impl", "shared"), [("auto", True), ("auto", False), ("triton", True)], ids=["registers", "jagged", "triton"]
)
def test_a_deterministic_backward_is_recorded(impl: str, shared: bool) -> None:
    lens = SMALL.kv_lens if not shared else SMALL.q_lens
    workload = replace(SMALL, q_lens=lens, broadcast_q=shared)
    recording = record(workload, direction="backward", deterministic=True, impl=impl, repeats=2)
    in_registers = shared and impl == "auto" and recording.get("kernel.impl") == "hopper"
    assert recording.get("kernel.name") == ("jfa_backward_resident" if in_registers else "jfa_backward")
    assert recording.get("kernel.deterministic")
    assert recording.get("command").endswith("--deterministic")
    assert {"cta", "tile"} <= set(recording.events["event"])


@pytest.mark.gpu
def test_level_cta_keeps_lives_only() -> None:
    recording = record(SMALL, level="cta", repeats=2)
    assert set(recording.events["event"]) == {"cta"}
    assert summary(recording).iloc[0]["basis"] == "cta"


@pytest.mark.gpu
def test_jagged_queries_and_masks_are_recorded_too() -> None:
    jagged = replace(SMALL, q_lens=np.arange(40) * 5, broadcast_q=False, causal=True)
    recording = record(jagged, schedule="static", repeats=2)
    tiles = recording.events[recording.events["event"] == "tile"]
    for _, own in tiles.groupby("role", observed=True):
        assert len(own) == len(expected_tiles(recording, jagged))


@triton.jit
def _doubles(x, recorder, capacity, SIZE: tl.constexpr, LEVEL: tl.constexpr):
    """The kernel of instrument's docstring: every CTA doubles some chunks, each a span."""
    lane, count = instrument.open_lane(recorder, tl.program_id(0), capacity, LEVEL)
    for chunk in range(3):
        instrument.begin_span(lane, count, capacity, 1, -1, LEVEL, 2)
        at = (tl.program_id(0) * 3 + chunk) * SIZE + tl.arange(0, SIZE)
        tl.store(x + at, tl.load(x + at) * 2)
        count = instrument.end_span(lane, count, capacity, tl.program_id(0) * 3 + chunk, LEVEL, 2)
    instrument.close_lane(lane, count, LEVEL)


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [3, 2, 0])
def test_the_recorder_serves_other_kernels_and_counts_what_it_loses(capacity: int) -> None:
    x = torch.ones(8 * 3 * 256, device="cuda")
    recorder = instrument.Recorder.allocate("tile", 8, capacity, "cuda")
    _doubles[(8,)](x, recorder.buffer, capacity, SIZE=256, LEVEL=recorder.number)
    spans = recorder.read()
    assert (x == 2).all()
    assert spans.lane.tolist() == list(range(8))
    assert spans.lost == 8 * (3 - capacity)
    assert sorted(spans.tile.tolist()) == sorted(3 * cta + chunk for cta in range(8) for chunk in range(capacity))
    assert (spans.event_end_ns >= spans.event_start_ns).all()


@pytest.mark.gpu
def test_the_timer_steps_in_whole_ns() -> None:
    assert 1 <= instrument.timer_resolution_ns("cuda") <= 1100
