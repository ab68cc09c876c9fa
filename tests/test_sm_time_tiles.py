"""What tiles cost, and who caused the tail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from spans import SMS, recording, rows
from synthetic import synthetic_recording

from profiling.errors import RecordingError, UserError
from profiling.recording import Recording
from profiling.sm_time import sm_time, tail_sequences, tail_tiles, tile_cost, tile_spans

LENGTHS = {"q_lens": [256, 256, 256, 256], "kv_lens": [10, 200, 3000, 0]}
LOST = {"written": 9, "lost": 1, "lost_by_lane": {"0": 1}}


def _tail() -> Recording:
    """Three SMs; work is 60 + 20 + 10, so that perfectly spread it would end at 30. Tile 7 of sequence 2 is late."""
    return recording(
        [
            {"cta": 0, "sm": 0, "tile": 1, "batch": 1, "start_ns": 0, "end_ns": 20},
            {"cta": 0, "sm": 0, "tile": 7, "batch": 2, "head": 3, "block": 1, "start_ns": 20, "end_ns": 60},
            {"cta": 1, "sm": 1, "tile": 2, "batch": 1, "start_ns": 11, "end_ns": 31},
            {"cta": 2, "sm": 2, "tile": 3, "batch": 0, "start_ns": 0, "end_ns": 10},
        ],
        sms=3,
        workload=LENGTHS,
    )


def test_tail_tiles_of_a_worked_example() -> None:
    late = tail_tiles(_tail())
    assert late.attrs["fair_ns"] == 30.0
    assert late.attrs["late_tiles"] == 2
    assert late.attrs["grade"] == "measured"
    first, second = late.to_dict("records")
    assert first == {
        "tile": 7,
        "batch": 2,
        "head": 3,
        "block": 1,
        "kv_len": 3000,
        "q_len": 256,
        "cta": 0,
        "sm": 0,
        "start_ns": 20,
        "end_ns": 60,
        "tail_ns": 30,
        "late_ns": 30,
    }
    assert (second["tile"], second["tail_ns"], second["late_ns"]) == (2, 1, 1)
    assert tail_tiles(_tail(), count=1)["tile"].tolist() == [7]
    assert tail_tiles(_tail(), count=1).attrs["late_tiles"] == 2


def test_tail_sequences_of_a_worked_example() -> None:
    late = tail_sequences(_tail())
    assert late["batch"].tolist() == [2, 1]
    assert late["kv_len"].tolist() == [3000, 200]
    assert late["tiles"].tolist() == [1, 1]
    assert late["late_ns"].tolist() == [30, 1]
    assert late["late_share"].tolist() == [30 / 31, 1 / 31]
    assert late["tail_ns"].tolist() == [30, 1]


@given(rows())
def test_late_tiles_of_anything(spans: list[dict[str, Any]]) -> None:
    made = recording(spans, workload=LENGTHS)
    launch = spans[0]["launch"]
    late = tail_tiles(made, launch, count=None)
    times = sm_time(made)
    fair = times.loc[times["launch"] == launch, "work_ns"].sum() / SMS
    assert late.attrs["fair_ns"] == pytest.approx(fair)
    assert (late["end_ns"] > fair).all()
    assert (late["end_ns"].diff().dropna() <= 0).all()
    assert ((late["tail_ns"] >= 1) & (late["late_ns"] <= late["tail_ns"])).all()
    tiles = [row for row in spans if row["launch"] == launch and row["event"] == "tile" and row["end_ns"] > fair]
    if len({row["role"] for row in tiles}) <= 1:
        assert sorted(late["tile"]) == sorted(row["tile"] for row in tiles)
    assert tail_sequences(made, launch, count=None)["late_ns"].sum() == late["late_ns"].sum()


def test_a_perfect_launch_has_no_tail() -> None:
    even = recording([{"cta": sm, "sm": sm, "tile": sm, "end_ns": 50} for sm in range(SMS)])
    assert len(tail_tiles(even)) == len(tail_sequences(even)) == 0
    assert tail_tiles(even).attrs["late_tiles"] == 0


def test_lengths_that_are_not_known_are_minus_one() -> None:
    unknown = tail_tiles(recording([{"tile": 0, "batch": 0, "end_ns": 50}]))
    assert unknown[["kv_len", "q_len"]].to_numpy().tolist() == [[-1, -1]]


def test_tile_cost_knows_lengths_and_follows_tiles() -> None:
    made = synthetic_recording([100, 300], [900, 4000], schedule="balanced-dynamic", heads=3, launches=2)
    costs = tile_cost(made)
    assert costs["launch"].tolist() == [0] * 12 + [1] * 12
    assert costs["tile"].tolist() == list(range(12)) * 2
    assert costs["kv_len"].tolist() == ([900] * 3 + [4000] * 9) * 2
    assert costs["q_len"].tolist() == ([100] * 3 + [300] * 9) * 2
    tiles = made.events[made.events["event"] == "tile"].sort_values(["launch", "tile"])
    assert costs["cost_ns"].tolist() == (tiles["end_ns"] - tiles["start_ns"]).tolist()
    assert np.corrcoef(costs["kv_len"], costs["cost_ns"])[0, 1] > 0.9


def test_tiles_of_several_roles_and_several_ctas() -> None:
    made = recording(
        [
            {"tile": 5, "batch": 1, "role": "load", "start_ns": 3, "end_ns": 9},
            {"tile": 5, "batch": 1, "role": "mma", "start_ns": 7, "end_ns": 20},
            {"tile": 5, "batch": 1, "role": "mma", "cta": 1, "sm": 1, "start_ns": 0, "end_ns": 4},
            {"tile": 2, "batch": 0, "role": "mma", "start_ns": 30, "end_ns": 31},
        ],
        workload=LENGTHS,
    )
    costs = tile_cost(made)
    assert costs["tile"].tolist() == [2, 5]
    assert costs["cost_ns"].tolist() == [1, 17 + 4]
    spans = tile_spans(made).sort_values(["tile", "cta"])
    assert spans[["tile", "cta", "start_ns", "end_ns"]].to_numpy().tolist() == [
        [2, 0, 30, 31],
        [5, 0, 3, 20],
        [5, 1, 0, 4],
    ]


def test_tile_spans_of_one_launch() -> None:
    made = synthetic_recording(256, [900, 4000], schedule="dynamic", launches=2)
    spans = tile_spans(made, 1)
    rows = made.events[(made.events["event"] == "tile") & (made.events["launch"] == 1)]
    assert sorted(zip(spans["tile"], spans["start_ns"], strict=True)) == sorted(
        zip(rows["tile"], rows["start_ns"], strict=True)
    )
    assert set(spans["kv_len"]) == {900, 4000}


@pytest.mark.parametrize("analysis", [tail_tiles, tail_sequences, tile_cost])
def test_lost_events_are_refused(analysis: Any) -> None:
    lossy = recording([{"tile": 0, "batch": 0}], workload=LENGTHS, events=LOST)
    with pytest.raises(RecordingError, match=r"1 event lost \(coverage 90.00 %\)"):
        analysis(lossy)


def test_tile_cost_takes_a_partial_recording_when_told_to() -> None:
    lossy = recording([{"tile": 0, "batch": 0}], workload=LENGTHS, events=LOST)
    assert len(tile_cost(lossy, allow_partial=True)) == 1
    assert "1 event lost" in tile_cost(lossy, allow_partial=True).attrs["warnings"][0]


@pytest.mark.parametrize("analysis", [tail_tiles, tail_sequences, tile_cost, tile_spans])
def test_level_cta_has_no_tiles(analysis: Any) -> None:
    with pytest.raises(RecordingError, match="recorded at level cta, without tiles; record with --level tile"):
        analysis(synthetic_recording(256, [900, 4000], level="cta"))


def test_missing_and_short_lengths() -> None:
    with pytest.raises(RecordingError, match="'workload.kv_lens' is missing"):
        tile_cost(recording([{"tile": 0, "batch": 0}]))
    short = {"q_lens": [1], "kv_lens": [1]}
    with pytest.raises(RecordingError, match="column 'batch' spans 0 to 3, but metadata key 'workload.kv_lens' has 1"):
        tile_cost(recording([{"tile": 0, "batch": 0}, {"tile": 1, "batch": 3}], workload=short))


def test_tiles_without_a_number() -> None:
    with pytest.raises(RecordingError, match="without a tile number"):
        tile_cost(recording([{"tile": -1, "batch": 0}], workload=LENGTHS))


@pytest.mark.parametrize("analysis", [tail_tiles, tail_sequences, tile_spans])
def test_no_such_launch(analysis: Any) -> None:
    with pytest.raises(UserError, match="has no launch 4; it has 0"):
        analysis(_tail(), 4)
