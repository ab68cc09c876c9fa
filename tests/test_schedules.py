"""Replays: against what was measured on a GPU, against bounds that hold for any tiles, and against worked examples."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline import Pipeline
from pipeline import recording as pipeline_recording
from synthetic import synthetic_recording

from jfa import workloads
from profiling.__main__ import main
from profiling.cost_model import cost_model, modelled_tiles
from profiling.errors import RecordingError, UserError
from profiling.examples import DATA
from profiling.recording import Recording
from profiling.schedules import CLEARED_NS, EMPTY_NS, REPLAY_ERROR, SCHEDULES, owners, replay, timeline
from profiling.tiles_measured import Shape, Tiles, tiles_of

WORKLOADS = ("hsp-loguniform", "hsp-half-empty", "hsp-extreme")
DIRECTIONS = ("forward", "backward")


@cache
def measured(workload: str, direction: str) -> dict[str, Tiles]:
    """The shipped recordings' tiles by schedule."""
    found = [Recording.read(path) for path in sorted(DATA.glob(f"{workload}_{direction}_*.parquet"))]
    return {recording.schedule: tiles_of(recording) for recording in found}


def tiles(cost, columns=None, *, place=None, sms=2, schedule="static", ramp_ns=0.0, fetch_ns=0.0, heads=1) -> Tiles:
    cost = np.asarray(cost, dtype=np.float64)
    columns = np.rint(cost).astype(np.int64) if columns is None else np.asarray(columns)
    place = np.zeros(len(cost), dtype=np.int64) if place is None else np.asarray(place)
    return Tiles(Shape("forward", 128, heads), cost, columns, place, sms, ramp_ns, fetch_ns, schedule, float("nan"))


# --- against what was measured -------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_any_recording_predicts_every_other_schedule(workload, direction):
    known = measured(workload, direction)
    assert len(known) >= 2
    for source, target in itertools.product(known, known):
        predicted = replay(known[source], target).makespan_ns
        assert predicted == pytest.approx(known[target].measured_ns, rel=REPLAY_ERROR), (source, target)
    assert REPLAY_ERROR <= 0.05


@pytest.mark.parametrize(("source", "target"), [WORKLOADS[:2], WORKLOADS[1::-1]])
def test_a_cost_model_predicts_lengths_that_it_was_not_fitted_to(source, target):
    work = workloads.get(target)
    for like in measured(source, "forward").values():
        model = cost_model(like)
        for schedule, other in measured(target, "forward").items():
            tiles_there = modelled_tiles(like, model, like.shape, work.q_lens, work.kv_lens)
            predicted = replay(tiles_there, schedule).makespan_ns
            assert predicted == pytest.approx(other.measured_ns, rel=0.05)


@pytest.mark.parametrize("schedule", ["static", "balanced"])
def test_a_fixed_deal_is_the_kernels(schedule):
    """The worker of a tile in a replay is the CTA that ran it on the GPU."""
    recording = Recording.read(DATA / f"hsp-half-empty_forward_{schedule}.parquet")
    known, events = tiles_of(recording), recording.events
    spans = events[(events["event"] == "tile") & (events["launch"] == 0)]
    order = np.arange(len(known.cost))
    if schedule == "balanced":
        order = np.argsort(-known.columns, kind="stable")
        order = order[known.columns[order] > 0]
    workers = int(recording.get("kernel.num_ctas"))
    expected = np.full(len(known.cost), -1)
    expected[order] = owners(len(order), workers, schedule == "balanced")
    same = expected[spans["tile"].to_numpy()] == spans["cta"].to_numpy()
    assert same.mean() == 1.0


# --- against bounds ------------------------------------------------------------------------------------------------

some_tiles = st.builds(
    tiles,
    st.lists(st.integers(0, 10_000), max_size=60),
    sms=st.integers(1, 9),
    schedule=st.sampled_from(SCHEDULES),
    ramp_ns=st.floats(0, 1000),
    fetch_ns=st.floats(0, 1000),
)


@given(some_tiles, st.sampled_from(SCHEDULES), st.integers(1, 9))
def test_no_replay_ends_before_the_bound(given_tiles, schedule, sms):
    found = replay(given_tiles, schedule, sms=sms)
    assert found.makespan_ns >= max(replay(given_tiles, s, sms=sms).bound_ns for s in SCHEDULES) * (1 - 1e-9)
    assert found.headroom >= 1 - 1e-9 and len(found.busy) == sms
    assert found.makespan_ns >= found.busy.max(initial=0.0)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=60)
def test_longest_first_keeps_grahams_bound(costs, workers):
    best = min(
        max(sum(c for c, owner in zip(costs, deal, strict=True) if owner == worker) for worker in range(workers))
        for deal in itertools.product(range(workers), repeat=len(costs))
    )
    found = replay(tiles(costs, sms=workers, schedule="balanced-dynamic"), "balanced-dynamic", fetch_ns=0.0)
    assert best <= found.makespan_ns + 1e-9
    assert found.makespan_ns <= best * (4 / 3 - 1 / (3 * workers)) + 1e-9
    assert found.optimum_ns <= best + 1e-9


@given(some_tiles, st.sampled_from(SCHEDULES))
def test_all_tiles_are_run_once(given_tiles, schedule):
    found = replay(given_tiles, schedule, fetch_ns=0.0)
    alike = given_tiles.schedule.startswith("balanced") == schedule.startswith("balanced")
    if alike and (given_tiles.columns > 0).all():
        assert found.busy.sum() == pytest.approx(given_tiles.cost.sum())


# --- worked examples -----------------------------------------------------------------------------------------------


def test_each_schedule_of_a_worked_example():
    four = tiles([5, 1, 5, 1, 4, 3])
    assert replay(four, "static", fetch_ns=0).busy.tolist() == [14, 5]
    assert sorted(replay(four, "dynamic", fetch_ns=0).busy) == [9, 10]
    assert replay(four, "balanced", fetch_ns=0).busy.tolist() == [9, 10]  # 5 3 1 against 5 4 1, there and back
    assert replay(four, "balanced-dynamic", fetch_ns=0).busy.sum() == 19
    assert replay(four, "static", fetch_ns=10).makespan_ns == 14 + 3 * 10
    assert replay(dataclasses.replace(four, ramp_ns=7.0), "static", fetch_ns=0).makespan_ns == 21
    assert replay(four, "static", sms=1, fetch_ns=0).makespan_ns == four.cost.sum()
    enough = replay(four, "static", sms=100, fetch_ns=0)
    assert enough.makespan_ns == enough.bound_ns == 5


def test_pairs_take_as_long_as_their_longer_tile():
    two_heads = tiles([10, 20, 30, 5, 7, 9], place=[0, 0, 1, 1, 2, 2], heads=2, sms=2)
    found = replay(two_heads, "static", cluster=2, fetch_ns=0)
    assert found.busy.tolist() == [30 + 20 + 7 + 9] and found.sms == 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_recording_of_pairs_is_dealt_in_pairs_again(schedule):
    """Unless it is asked for otherwise; each of a pair's workers runs its tile of the two, at the same time."""
    cost, place = [10, 20, 30, 5, 7, 9, 8, 8], [0, 0, 1, 1, 2, 2, 3, 3]
    pairs = dataclasses.replace(tiles(cost, place=place, heads=2, sms=4), cluster=2)
    found = [replay(pairs, schedule, cluster=cluster) for cluster in (None, 2, 1)]
    assert [len(one.busy) for one in found] == [2, 2, 4] and found[0].makespan_ns == found[1].makespan_ns
    dealt = timeline(pairs, schedule)
    assert sorted(dealt.tile) == list(range(len(cost))) and dealt.workers == 4
    assert dealt.end_ns.max() == replay(pairs, schedule).makespan_ns
    idle = dataclasses.replace(pairs, columns=np.array([5, 5, 5, 5, 0, 0, 0, 0]))
    cleared = timeline(idle, schedule)
    assert cleared.end_ns.max() + cleared.cleared_ns == replay(idle, schedule).makespan_ns
    of = dict(zip(dealt.tile.tolist(), zip(dealt.worker, dealt.start_ns, strict=True), strict=True))
    for first, second in ((0, 2), (1, 3)):
        assert of[second][0] == of[first][0] + 1 and of[second][0] % 2 == 1 and of[first][1] == of[second][1]


def test_tiles_without_work_cost_what_the_schedule_makes_of_them():
    mixed = tiles([100.0, 40.0, 100.0], [5, 0, 5], sms=1)
    assert replay(mixed, "static", fetch_ns=0).makespan_ns == 240.0
    assert replay(mixed, "balanced", fetch_ns=0).makespan_ns == 200.0 + CLEARED_NS
    assert replay(dataclasses.replace(mixed, schedule="balanced"), "static", fetch_ns=0).makespan_ns == 200.0 + EMPTY_NS


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_to_do_takes_the_ramp(schedule):
    found = replay(tiles([], ramp_ns=5.0), schedule)
    assert (found.makespan_ns, found.bound_ns, found.headroom) == (5.0, 0.0, 1.0)


def test_columns_met_agree_with_the_pairs_that_the_mask_lets_through():
    rng = np.random.default_rng(1)
    for direction, window in itertools.product(DIRECTIONS, [(-1, -1), (-1, 0), (40, 0), (0, 10), (7, 30)]):
        q_lens, kv_lens = rng.integers(0, 90, 6), rng.integers(0, 90, 6)
        columns, place = Shape(direction, 16, 1, window).layout(q_lens, kv_lens)
        expected, places = [], []
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
            row, column = np.arange(q_len)[:, None] + kv_len - q_len, np.arange(kv_len)[None]
            seen = np.ones((q_len, kv_len), dtype=bool)
            seen &= column >= row - window[0] if window[0] >= 0 else seen
            seen &= column <= row + window[1] if window[1] >= 0 else seen
            seen = seen if direction == "forward" else seen.T
            blocks = range(0, len(seen), 16)
            expected += [int(seen[first : first + 16].any(axis=0).sum()) for first in blocks]
            places += [first // 16 for first in blocks]
        # A block's columns lie between its first and last one, whether or not a row in between sees them all.
        assert place.tolist() == places
        assert (columns >= expected).all() and ((columns > 0) | (np.asarray(expected) == 0)).all()
        if window == (-1, -1) or window == (-1, 0):
            assert columns.tolist() == expected


# --- the cost model ------------------------------------------------------------------------------------------------


def test_a_straight_line_is_found_exactly():
    columns = np.arange(1, 200)
    model = cost_model(tiles(1000 + 7.0 * columns, columns))
    assert (model.fixed_ns, model.per_column_ns) == pytest.approx((1000, 7.0))
    assert model.error_p95 < 1e-9 and (model.shortest, model.longest, model.tiles) == (1, 199, 199)


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(1, 1e6)), min_size=1, max_size=50))
def test_no_model_predicts_a_cost_below_zero(points):
    columns, cost = map(np.asarray, zip(*points, strict=True))
    model = cost_model(tiles(cost, columns))
    assert (model.cost(np.arange(1, 5001)) >= 0).all()


def test_tiles_of_one_length_speak_of_that_length_alone():
    like = tiles([50.0, 60.0], [256, 256])
    model = cost_model(like)
    same = modelled_tiles(like, model, like.shape, np.array([128]), np.array([256]))
    assert 50 < same.cost[0] < 60
    with pytest.raises(UserError, match="all meet 256 columns"):
        modelled_tiles(like, model, like.shape, np.array([128]), np.array([512]))


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"schedule": "grid"}, "schedule: expected one of"),
        ({"schedule": "static", "cluster": 3}, "cluster: expected 1 or 2"),
        ({"schedule": "static", "sms": 0}, "sms: expected 1 to 4,096, got 0"),
        ({"schedule": "static", "sms": 1, "cluster": 2}, "sms: expected 2 to 4,096, got 1"),
        ({"schedule": "static", "sms": 100_000_000}, "sms: expected 1 to 4,096, got 100,000,000"),
        ({"schedule": "dynamic", "fetch_ns": -1.0}, "fetch_ns: expected 0 to 1,000,000,000"),
        ({"schedule": "dynamic", "fetch_ns": 1e30}, "fetch_ns: expected 0 to 1,000,000,000"),
        ({"schedule": "dynamic", "fetch_ns": float("nan")}, "fetch_ns: expected 0 to 1,000,000,000"),
    ],
)
def test_wrong_arguments_are_refused(arguments, expected):
    with pytest.raises(UserError, match=expected):
        replay(tiles([1.0]), **arguments)


def test_recordings_that_do_not_hold_what_a_replay_needs_are_refused():
    made = synthetic_recording(256, [100, 4000, 900])
    assert tiles_of(made).measured_ns > 0
    with pytest.raises(RecordingError, match="recorded at level cta"):
        tiles_of(synthetic_recording(256, [100, 900], level="cta"))
    with pytest.raises(RecordingError, match="block size and heads"):
        tiles_of(changed(made, kernel={**made.metadata["kernel"], "direction": "sideways"}))
    with pytest.raises(RecordingError, match="cut into parts"):
        tiles_of(changed(made, kernel={**made.metadata["kernel"], "split": 4096}))
    with pytest.raises(RecordingError, match="lost"):
        tiles_of(changed(made, events={"written": 10, "lost": 1, "lost_by_lane": {"0": 1}}))
    fewer = made.events[made.events["tile"] != 3]
    with pytest.raises(RecordingError, match="1 of .* tiles with work were not recorded"):
        tiles_of(Recording(fewer, made.metadata, source=made.source))
    with pytest.raises(RecordingError, match="its lengths and block size make only"):
        tiles_of(changed(made, workload={**made.metadata["workload"], "heads": 1}))
    with pytest.raises(RecordingError):
        tiles_of(pipeline_recording(Pipeline()))


@pytest.mark.parametrize("path", sorted((DATA / "waits").glob("*.parquet")), ids=lambda path: path.stem)
def test_a_refused_excerpt_is_said_to_be_one_where_that_is_why(path):
    recording = Recording.read(path)
    try:
        assert len(tiles_of(recording).cost)
    except RecordingError as error:
        told = "it is an excerpt (CTAs 0 to " in str(error) and "give a whole recording" in str(error)
        assert told == ("were not recorded" in str(error)) and (not told or recording.get("excerpt"))


def test_a_deal_to_many_workers_takes_no_time():
    begun = time.process_time()
    assert replay(tiles(np.full(300_000, 5.0), sms=4096), "static", fetch_ns=1.0).makespan_ns == 74 * 6
    assert time.process_time() - begun < 0.25


def changed(recording: Recording, **metadata) -> Recording:
    return Recording(recording.events, recording.metadata | metadata, source=recording.source)


# --- size ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_million_tiles_in_under_two_seconds(schedule):
    rng = np.random.default_rng(0)
    many = tiles(rng.lognormal(9, 1, 1_000_000), sms=148)
    begun = time.perf_counter()
    replay(many, schedule)
    assert time.perf_counter() - begun < 2.0


def test_a_named_gpu_has_fewer_sms_where_the_kernel_leaves_some(tmp_path, capsys):
    recording = Recording.read(DATA / "hsp-half-empty_forward_static.parquet")
    recording.metadata["kernel"]["sms_left"] = 32
    recording.write(tmp_path / "left.parquet")
    for options, sms in ([], 100), (["--gpu", "H200"], 100), (["--gpu", "B200"], 116), (["--sms", "132"], 132):
        assert main(["schedules", str(tmp_path / "left.parquet"), "--schedule", "static", "--json", *options]) == 0
        assert json.loads(capsys.readouterr().out)["rows"][0]["sms"] == sms
