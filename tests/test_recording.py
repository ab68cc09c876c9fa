"""A recording's promises: types, order, refusals, warnings, and what it says of itself."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from spans import frame, recording, rows
from synthetic import SCHEDULES, synthetic_recording

from profiling.errors import RecordingError, UserError
from profiling.recording import COLUMNS, INTEGER_COLUMNS, Recording

ORDER = ["launch", "cta", "role", "start_ns"]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import profiling, sys; print([m for m in ('pandas', 'pyarrow', 'plotly', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_analyses_load_neither_plotly_nor_torch_nor_triton() -> None:
    code = (
        "import profiling.sm_time, profiling.export, profiling.storage, sys;"
        "print([m for m in ('plotly', 'torch', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_package_exports() -> None:
    import profiling

    assert profiling.Recording is Recording
    assert profiling.RecordingError is RecordingError
    assert issubclass(RecordingError, UserError)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = profiling.nothing


@given(rows())
def test_rows_are_typed_and_ordered_whatever_came(spans: list[dict[str, Any]]) -> None:
    events = recording(spans).events
    assert list(events.columns) == list(COLUMNS)
    assert {name: str(events[name].dtype) for name in INTEGER_COLUMNS} == INTEGER_COLUMNS
    expected = sorted(spans, key=lambda row: (*(row[name] for name in ORDER), -row["end_ns"]))
    for name in ("launch", "cta", "role", "start_ns", "end_ns"):
        assert events[name].tolist() == [row[name] for row in expected]
    everything = [tuple(row[name] for name in spans[0]) for row in spans]
    assert sorted(zip(*(events[name].tolist() for name in spans[0]), strict=True)) == sorted(everything)


def test_other_widths_orders_and_columns_are_converted() -> None:
    wide = frame([{"tile": 3, "end_ns": 9}, {"tile": 4, "start_ns": 9, "end_ns": 12}]).astype(
        {"tile": "int64", "sm": "uint8", "role": str}
    )
    wide["comment"] = "dropped"
    events = Recording(wide[wide.columns[::-1]], {}).events
    assert list(events.columns) == list(COLUMNS)
    assert str(events["tile"].dtype) == "int32"
    assert str(events["sm"].dtype) == "int16"
    assert events["tile"].tolist() == [3, 4]


def _refused(events: pd.DataFrame, *words: str) -> None:
    with pytest.raises(RecordingError) as caught:
        Recording(events, {}, source="x.parquet")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("x.parquet: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", COLUMNS)
def test_a_missing_column_is_named(name: str) -> None:
    _refused(frame([{}]).drop(columns=name), repr(name), "missing")


def test_no_rows() -> None:
    _refused(frame([{}]).iloc[:0], "no spans", "record again")


def test_an_end_before_its_start() -> None:
    _refused(frame([{}, {"start_ns": 9, "end_ns": 3}]), "1 spans end before they start", "row 1", "9 to 3 ns")


@pytest.mark.parametrize("name", ["launch", "cta", "sm", "start_ns"])
def test_negative_numbers(name: str) -> None:
    _refused(frame([{name: -2}]), repr(name), "-2")


def test_times_that_were_never_made_relative() -> None:
    now = 1_790_000_000_000_000_000
    _refused(frame([{"start_ns": now, "end_ns": now + 5}]), "first start", "subtract")


def test_a_cta_on_two_sms() -> None:
    rows = [{"cta": 3, "sm": 1, "end_ns": 4}, {"cta": 3, "sm": 2, "start_ns": 5, "end_ns": 6}]
    _refused(frame(rows), "CTA 3 of launch 0", "SM 1", "SM 2")


def test_a_cta_may_be_elsewhere_in_another_launch() -> None:
    Recording(frame([{"cta": 3, "sm": 1}, {"cta": 3, "sm": 2, "launch": 1}]), {})


def test_fractions_empty_cells_and_overflow() -> None:
    events = frame([{}, {}])
    _refused(events.assign(tile=[0.5, 1.0]), "'tile'", "float64", "int32")
    _refused(events.assign(tile=[np.nan, 1.0]), "'tile'", "empty cells")
    _refused(events.assign(sm=[0, 70_000]), "'sm'", "outside int16")
    _refused(events.assign(role=pd.Categorical(["cta", None])), "'role'", "empty cells")


def test_metadata_becomes_plain() -> None:
    given_metadata = {
        "gpu": {"sm_count": np.int64(4), "capability": (9, 0)},
        "workload": {"kv_lens": np.array([1, 2])},
        "events": {"lost_by_lane": {17: 3}},
        "clock": {"residual_ns_max": math.nan},
    }
    assert Recording(frame([{}]), given_metadata).metadata == {
        "gpu": {"sm_count": 4, "capability": [9, 0]},
        "workload": {"kv_lens": [1, 2]},
        "events": {"lost_by_lane": {"17": 3}},
        "clock": {"residual_ns_max": None},
    }


def test_everything_may_be_missing_but_is_not_invented() -> None:
    bare = Recording(frame([{}]), {}, source="bare.parquet")
    assert bare.title() == "bare.parquet"
    assert bare.grade == "unknown"
    assert bare.level == "tile"
    assert (bare.schedule, bare.direction, bare.impl, bare.workload_name) == ("unknown",) * 4
    assert math.isnan(bare.coverage())
    assert any("'events.lost' is missing" in line for line in bare.warnings())
    assert any("does not say how" in line for line in bare.warnings())
    with pytest.raises(RecordingError, match=r"bare.parquet: metadata key 'gpu.sm_count' is missing"):
        _ = bare.sm_count
    with pytest.raises(RecordingError, match=r"'workload.kv_lens' is missing"):
        bare.lengths("kv", "this test")


@pytest.mark.parametrize("count", [0, -1, "132", 1.5, True, [4]])
def test_a_senseless_sm_count(count: Any) -> None:
    with pytest.raises(RecordingError, match="'gpu.sm_count' is .*expected a positive integer"):
        _ = Recording(frame([{}]), {"gpu": {"sm_count": count}}).sm_count


@pytest.mark.parametrize("count", [-1, 4, 132, "1", 1.5, True, [1]])
def test_a_senseless_number_of_sms_left(count: Any) -> None:
    with pytest.raises(RecordingError, match="'kernel.sms_left' is .*below the GPU's 4"):
        _ = Recording(frame([{}]), {"gpu": {"sm_count": 4}, "kernel": {"sms_left": count}}).sms_left


@pytest.mark.parametrize("lengths", ["12", [1, -1], [1.5], {"a": 1}, 7])
def test_senseless_lengths(lengths: Any) -> None:
    with pytest.raises(RecordingError, match="'workload.kv_lens' must be a list of integers"):
        Recording(frame([{}]), {"workload": {"kv_lens": lengths}}).lengths("kv", "this test")


def test_metadata_of_another_shape_is_as_missing() -> None:
    odd = Recording(frame([{}]), {"gpu": "H200", "workload": [1], "events": 3})
    assert odd.gpu_name == "unknown GPU"
    assert odd.get("workload.name", "none") == "none"
    assert math.isnan(odd.coverage())


def test_level_of_rows() -> None:
    assert Recording(frame([{"event": "cta"}]), {}).level == "cta"
    assert Recording(frame([{"event": "wait:q"}]), {}).level == "wait"
    assert Recording(frame([{"event": "cta"}]), {"level": "tile"}).level == "tile"


def test_title() -> None:
    made = synthetic_recording(256, [100, 900], schedule="balanced", name="two")
    assert made.title() == "two · forward · balanced · model · model of 16 SMs"


def test_loss_is_in_coverage_and_warnings() -> None:
    lossy = recording([{}] * 6, events={"written": 6, "lost": 2, "lost_by_lane": {"17": 1, "3": 1}})
    assert lossy.lost == 2
    assert lossy.coverage() == 0.75
    (line,) = lossy.warnings()
    assert "2 events lost in 2 lanes (3, 17), coverage 75.00 %" in line


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"grade": "modelled"}, "modelled, not measured"),
        ({"kernel": {"config_hash": "a1", "plain_config_hash": "b2"}}, "a1"),
        ({"clock": {"order_violations": 3}}, "3 spans are out of order"),
        ({"clock": {"sms_median_rate": 2}}, "2 SMs were watched too briefly"),
        ({"clock": {"residual_ns_max": 5000.0}}, "5,000 ns"),
        ({"durations": {"plain_ns": 100.0, "recorded_ns": 120.0}}, "20.0 % slower"),
    ],
)
def test_warnings(metadata: dict[str, Any], word: str) -> None:
    (line,) = recording([{}], **metadata).warnings()
    assert word in line
    assert "\n" not in line


def test_a_clean_recording_warns_of_nothing() -> None:
    clean = recording(
        [{}],
        kernel={"config_hash": "a1", "plain_config_hash": "a1"},
        clock={"order_violations": 0, "sms_median_rate": 0, "residual_ns_max": 90.0},
        durations={"plain_ns": 100.0, "recorded_ns": 102.0},
    )
    assert clean.warnings() == []
    assert clean.coverage() == 1.0


def test_html_is_escaped_and_carries_grade_and_warnings() -> None:
    nasty = recording([{}], workload={"name": "<script>alert(1)</script>"}, grade="modelled")
    page = nasty._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "grade: modelled" in page
    assert "<li>modelled, not measured" in page


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_model_runs_each_tile_once(schedule: str, direction: str) -> None:
    q_lens, kv_lens, heads = [100, 300, 256, 1], [0, 700, 129, 128], 2
    made = synthetic_recording(q_lens, kv_lens, sms=3, schedule=schedule, heads=heads, direction=direction)
    tiles = made.events[made.events["event"].isin(["tile", "zero"])]
    outer = q_lens if direction == "forward" else kv_lens
    natural = [
        (b, block, head)
        for b, length in enumerate(outer)
        for block in range(-(-length // 128))
        for head in range(heads)
    ]
    seen = sorted(zip(tiles["batch"], tiles["block"], tiles["head"], strict=True))
    dropped = [t for t in natural if schedule.startswith("balanced") and direction == "forward" and kv_lens[t[0]] == 0]
    assert seen == [t for t in natural if t not in dropped]
    for row in tiles.itertuples():
        assert natural[row.tile] == (row.batch, row.block, row.head)
