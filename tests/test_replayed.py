"""A replay as a recording: the same makespan, each tile once, no worker in two places."""

from __future__ import annotations

import numpy as np
import pytest

from profiling import examples
from profiling.errors import RecordingError, UserError
from profiling.replayed import replayed
from profiling.schedules import SCHEDULES, replay, timeline
from profiling.sm_time import sm_time, summary
from profiling.tiles_measured import tiles_of


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("workload", ["hsp-extreme", "hsp-half-empty"])
def test_a_replayed_recording_ends_when_the_replay_does(workload, schedule, tmp_path):
    measured = examples.load(workload, "forward", "static")
    tiles = tiles_of(measured)
    expected, recording = replay(tiles, schedule), replayed(measured, schedule)
    assert int(recording.events["end_ns"].max()) == pytest.approx(expected.makespan_ns, abs=1)
    assert recording.grade == "modelled" and recording.schedule == schedule
    assert recording.metadata["model"]["from"] == measured.title()
    work = recording.events[recording.events["event"] == "tile"]
    dealt = tiles.columns > 0 if schedule.startswith("balanced") else np.ones(len(tiles.cost), bool)
    assert sorted(work["tile"]) == np.flatnonzero(dealt).tolist()
    took = (work["end_ns"] - work["start_ns"]).groupby(work["sm"]).sum()
    parts = sm_time(recording).set_index("sm")
    cleared = recording.events[recording.events["event"] == "zero"]
    assert (parts["work_ns"].sum() - took.sum()) == (cleared["end_ns"] - cleared["start_ns"]).sum(), "none overlap"
    recording.write(tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 100_000


def test_its_tiles_are_those_of_the_measured_one():
    measured = examples.load("hsp-half-empty", "forward", "balanced-dynamic")
    own = measured.events[measured.events["event"] == "tile"].set_index("tile").sort_index()
    made = replayed(measured, "balanced-dynamic").events
    made = made[made["event"] == "tile"].set_index("tile").sort_index()
    assert (made[["batch", "head", "block"]] == own[["batch", "head", "block"]]).all().all()
    cost = (made["end_ns"] - made["start_ns"]) - (own["end_ns"] - own["start_ns"])
    assert cost.abs().max() <= 1


def test_a_replay_of_itself_is_near_what_was_measured():
    measured = examples.load("hsp-extreme", "forward", "static")
    was, now = (summary(recording).iloc[0] for recording in (measured, replayed(measured, "static")))
    assert now["makespan_ns"] == pytest.approx(was["makespan_ns"], rel=0.02)
    assert now["work_share"] == pytest.approx(was["work_share"], abs=0.02)


def test_what_cannot_be_replayed_is_one_line():
    with pytest.raises(UserError, match="schedule: expected one of static"):
        timeline(tiles_of(examples.load()), "grid")
    with pytest.raises(RecordingError):
        replayed(examples.waits("tiny", "backward"), "static")
