"""SM time sums exactly, agrees with a count of single nanoseconds, and says what it does not know."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spans import SMS, recording, rows
from synthetic import SCHEDULES, synthetic_recording

from profiling.errors import RecordingError, UserError
from profiling.recording import Recording
from profiling.report import _verdict
from profiling.sm_time import PARTS, occupancy, sm_time, summary, tail_tiles
from profiling.tail import last_sm
from profiling.tiles_measured import tiles_of


def _worked(made: Recording, launch: int, sm: int, makespan: int) -> np.ndarray:
    """By brute force: whether the SM worked in each ns of the launch, bool [makespan]."""
    worked = np.zeros(makespan, dtype=bool)
    for row in made.events.itertuples():
        if (row.launch, row.sm) == (launch, sm) and row.event in ("tile", "zero"):
            worked[row.start_ns : row.end_ns] = True
    return worked


@given(rows())
def test_sm_time_against_single_nanoseconds(spans: list[dict[str, Any]]) -> None:
    made = recording(spans)
    times = sm_time(made)
    assert len(times) == made.launches * SMS
    assert (times[list(PARTS)].sum(axis=1) == times["total_ns"]).all()
    assert (times[list(PARTS)] >= 0).all(axis=None)
    for row in times.itertuples():
        here = [r for r in spans if r["launch"] == row.launch]
        on_sm = [r for r in here if r["sm"] == row.sm]
        work = [r for r in on_sm if r["event"] in ("tile", "zero")]
        makespan = max(r["end_ns"] for r in here)
        assert row.total_ns == makespan
        assert row.work_ns == _worked(made, row.launch, row.sm, makespan).sum()
        assert row.unused_ns == (0 if on_sm else makespan)
        assert row.tiles == len({r["tile"] for r in on_sm if r["event"] == "tile"} if _mixed(here) else _tiles(on_sm))
        assert row.ctas == len({r["cta"] for r in on_sm})
        if work:
            assert row.ramp_ns == min(r["start_ns"] for r in work)
            assert row.tail_ns == makespan - max(r["end_ns"] for r in work)
        elif on_sm:
            assert row.ramp_ns == min(r["start_ns"] for r in on_sm)
            assert row.fetch_ns == 0


def _mixed(spans: list[dict[str, Any]]) -> bool:
    return len({r["role"] for r in spans if r["event"] == "tile"}) > 1


def _tiles(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in spans if r["event"] == "tile"]


@given(rows(), st.integers(1, 90))
def test_occupancy_is_a_share_and_integrates_to_work(spans: list[dict[str, Any]], bins: int) -> None:
    made = recording(spans)
    times = sm_time(made)
    for launch in sorted({row["launch"] for row in spans}):
        found = occupancy(made, bins, launch)
        assert found.share.shape == (SMS, bins)
        assert found.share.dtype == np.float32
        assert found.edges_ns.shape == (bins + 1,)
        assert (found.share >= 0).all()
        assert (found.share <= 1).all()
        work = times.loc[times["launch"] == launch, "work_ns"].to_numpy()
        integral = (found.share.astype(np.float64) * np.diff(found.edges_ns)).sum(axis=1)
        np.testing.assert_allclose(integral, work, rtol=1e-5, atol=1e-5)


@given(rows())
def test_occupancy_with_a_bin_a_nanosecond(spans: list[dict[str, Any]]) -> None:
    made = recording(spans)
    launch = spans[0]["launch"]
    makespan = max(row["end_ns"] for row in spans if row["launch"] == launch)
    if makespan:
        share = occupancy(made, makespan, launch).share
        expected = [_worked(made, launch, sm, makespan) for sm in range(SMS)]
        np.testing.assert_allclose(share, np.array(expected, dtype=np.float32), atol=1e-5)


@given(rows())
def test_summary_is_the_sum(spans: list[dict[str, Any]]) -> None:
    made = recording(spans)
    times, total = sm_time(made), summary(made)
    assert total["launch"].tolist() == sorted({row["launch"] for row in spans})
    for row in total.itertuples():
        here = times[times["launch"] == row.launch]
        all_ns = row.sms * row.makespan_ns
        assert sum(getattr(row, part) for part in PARTS) == all_ns == here["total_ns"].sum()
        assert row.tiles == here["tiles"].sum()
        shares = [getattr(row, part.replace("_ns", "_share")) for part in PARTS]
        assert np.isnan(shares).all() if all_ns == 0 else sum(shares) == pytest.approx(1)
        if row.work_ns:
            assert row.headroom == pytest.approx(row.makespan_ns / (row.work_ns / row.sms))
            assert row.headroom >= 1
            assert here.set_index("sm")["work_ns"][row.busiest_sm] == here["work_ns"].max()
            assert 0 <= row.tail_sms_idle <= row.sms
        else:
            assert np.isnan(row.headroom)
            assert row.busiest_sm == row.last_sm == -1


@given(rows(events=["cta"]))
def test_at_level_cta_whole_ctas_are_work_and_it_says_so(spans: list[dict[str, Any]]) -> None:
    made = recording(spans, level="cta")
    times = sm_time(made)
    assert times.attrs["basis"] == "cta"
    assert summary(made)["basis"].eq("cta").all()
    assert occupancy(made, 3, spans[0]["launch"]).basis == "cta"
    as_tiles = sm_time(recording([row | {"event": "tile"} for row in spans]))
    assert times[["launch", "sm", *PARTS]].equals(as_tiles[["launch", "sm", *PARTS]])


def test_a_worked_example() -> None:
    """Two CTAs that overlap on SM 0, one on SM 1 that finds no work, nothing on SM 2; the launch ends at 100."""
    made = recording(
        [
            {"cta": 0, "sm": 0, "event": "cta", "start_ns": 0, "end_ns": 100},
            {"cta": 0, "sm": 0, "start_ns": 10, "end_ns": 40, "tile": 0},
            {"cta": 1, "sm": 0, "start_ns": 30, "end_ns": 50, "tile": 1},
            {"cta": 0, "sm": 0, "event": "zero", "start_ns": 60, "end_ns": 70, "tile": 2},
            {"cta": 2, "sm": 1, "event": "cta", "start_ns": 5, "end_ns": 8},
        ],
        sms=3,
    )
    times = sm_time(made)
    assert times[list(PARTS)].to_numpy().tolist() == [[50, 10, 10, 30, 0], [0, 5, 0, 95, 0], [0, 0, 0, 0, 100]]
    assert times["tiles"].tolist() == [2, 0, 0]
    assert times["ctas"].tolist() == [2, 1, 0]
    (total,) = summary(made).to_dict("records")
    assert total["headroom"] == 6.0 and total["sms_left"] == 0
    assert total["fair_ns"] == 50 / 3
    assert total["tail_start_ns"] == 70
    assert (total["busiest_sm"], total["last_sm"]) == (0, 0)
    assert occupancy(made, 10).share[0].tolist() == [0, 1, 1, 1, 1, 0, 1, 0, 0, 0]


def test_results_carry_where_they_come_from() -> None:
    made = synthetic_recording(256, [100, 900], name="two")
    for result in (sm_time(made), summary(made)):
        assert result.attrs["grade"] == "modelled"
        assert result.attrs["basis"] == "tile"
        assert result.attrs["title"] == made.title()
        assert result.attrs["warnings"] == made.warnings() != []
    found = occupancy(made)
    assert (found.grade, found.title, found.warnings) == ("modelled", made.title(), tuple(made.warnings()))


def test_a_partial_recording_warns_beside_its_numbers() -> None:
    lossy = recording([{}], events={"written": 1, "lost": 3, "lost_by_lane": {"0": 3}})
    assert "3 events lost" in sm_time(lossy).attrs["warnings"][0]
    assert summary(lossy)["coverage"].tolist() == [0.25]
    assert "lower bound" in occupancy(lossy).warnings[0]


def test_sm_numbers_with_gaps() -> None:
    made = recording([{"sm": 9, "cta": 0}, {"sm": 4, "cta": 1}], sms=4)
    times = sm_time(made)
    assert times["sm"].tolist() == [0, 1, 4, 9]
    assert times["work_ns"].tolist() == [0, 0, 1, 1]
    assert occupancy(made, 2).sms.tolist() == [0, 1, 4, 9]


def test_an_excerpt_is_of_the_sms_that_it_has() -> None:
    whole = recording([{"sm": 1, "cta": 0}, {"sm": 3, "cta": 1}], sms=4)
    part = recording([{"sm": 1, "cta": 0}, {"sm": 3, "cta": 1}], sms=4, excerpt="CTAs 0 to 1 of 4")
    assert sm_time(part)["sm"].tolist() == [1, 3] and occupancy(part, 2).sms.tolist() == [1, 3]
    assert summary(whole)["unused_share"].tolist() == [0.5] and summary(part)["unused_share"].tolist() == [0]
    assert "an excerpt: CTAs 0 to 1 of 4" in part.warnings()[0]


def test_more_sms_than_the_gpu_has() -> None:
    with pytest.raises(RecordingError, match="spans are on 2 SMs, but metadata key 'gpu.sm_count' is 1"):
        sm_time(recording([{"sm": 9, "cta": 0}, {"sm": 4, "cta": 1}], sms=1))


def test_no_sm_count() -> None:
    for analysis in (sm_time, summary, occupancy):
        with pytest.raises(RecordingError, match="metadata key 'gpu.sm_count' is missing"):
            analysis(recording([{}], gpu={}))


def test_no_work_at_all() -> None:
    with pytest.raises(RecordingError, match="no span is work"):
        sm_time(recording([{"event": "something"}], level="mystery"))
    idle = summary(recording([{"event": "cta", "end_ns": 50}], level="tile"))
    assert idle["work_ns"].tolist() == [0]
    assert idle["headroom"].isna().all()


def test_a_launch_that_takes_no_time() -> None:
    made = recording([{"start_ns": 0, "end_ns": 0}])
    assert sm_time(made)["total_ns"].eq(0).all()
    assert summary(made)["work_share"].isna().all()
    assert (occupancy(made, 7).share == 0).all()


def test_senseless_arguments() -> None:
    made = recording([{"launch": launch} for launch in range(7)])
    with pytest.raises(UserError, match="bins is 0; expected 1 or more"):
        occupancy(made, 0)
    with pytest.raises(UserError, match=r"has no launch 9; it has 0, 1, 2, 3, 4, … \(7 in all\)"):
        occupancy(made, 3, 9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("level", ["cta", "tile", "wait"])
def test_waits_and_lives_of_ctas_do_not_count_as_work(schedule: str, level: str) -> None:
    kv_lens = [100, 5000, 0, 900, 40, 2000]
    made = synthetic_recording(300, kv_lens, sms=7, schedule=schedule, level=level)
    times = sm_time(made)
    assert (times[list(PARTS)].sum(axis=1) == times["total_ns"]).all()
    if level == "wait":
        coarse = sm_time(synthetic_recording(300, kv_lens, sms=7, schedule=schedule))
        assert times.equals(coarse)


def test_sms_left_to_another_kernel_are_no_headroom() -> None:
    """Two SMs work to the end, the third is another kernel's: work could be spread no better."""
    made = synthetic_recording(256, [512] * 4, sms=2, heads=2)
    sms = made.sm_count
    whole = summary(made).iloc[0]
    made.metadata["gpu"]["sm_count"] = sms + 1
    made.metadata["kernel"]["sms_left"] = 1
    left = summary(made).iloc[0]
    assert left["sms_left"] == 1 and left["unused_share"] == pytest.approx(1 / (sms + 1))
    assert left["headroom"] == pytest.approx(whole["headroom"]) and left["fair_ns"] == whole["fair_ns"]
    assert tail_tiles(made).attrs["fair_ns"] == whole["fair_ns"] == last_sm(made).fair_ns
    assert tiles_of(made).sms == sms and "1 SM left to a kernel that runs beside" in _verdict(left)
