"""The recorder's buffer becomes spans: layout, clock fit, loss."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfa import lanes

SM_RATES = st.floats(1.2, 2.0)


def buffer(ctas: list[dict], capacity: int) -> np.ndarray:
    """Words as the device writes them. A CTA: sm; timer, clock (start, end); events (began, ended, tile, kind)."""
    words = np.zeros((len(ctas), lanes.HEADER_WORDS + lanes.EVENT_WORDS * capacity), dtype=np.int64)
    for row, cta in zip(words, ctas, strict=True):
        events = cta.get("events", [])
        row[:6] = cta["sm"], cta["timer"][0], cta["clock"][0], cta["timer"][1], cta["clock"][1], len(events)
        for slot, (began, ended, tile, kind) in enumerate(events[:capacity]):
            at = lanes.HEADER_WORDS + lanes.EVENT_WORDS * slot
            closed = (ended & 0xFFFFFFFF) | ((tile + 1) << 32)
            if kind in lanes.WAITS.values():
                row[at : at + 2] = (began & 0xFFFFFFFF) | (kind << 48), closed
            else:
                row[at] = (began & (2**48 - 1)) | (kind << 48) | (0 << 56)
                row[at + 1 : at + 3] = cta.get("anchors", {}).get(slot, 0), closed
    return words


def life(sm: int, rate: float, start_ns: int, took_ns: int, events: list[tuple[int, int, int]], epoch: int) -> dict:
    """A CTA on an SM whose clock ran at ``rate`` since ``epoch`` cycles; events in ns from the CTA's start."""

    def clock(ns: int) -> int:
        return epoch + round(ns * rate)

    return {
        "sm": sm,
        "timer": (10**15 + start_ns, 10**15 + start_ns + took_ns),
        "clock": (clock(start_ns), clock(start_ns + took_ns)),
        "events": [(clock(start_ns + a), clock(start_ns + b), tile, 1) for a, b, tile in events],
    }


@given(st.lists(SM_RATES, min_size=1, max_size=8), st.integers(0, 2**62))
def test_clock_fit_recovers_each_sms_own_rate(rates: list[float], epoch: int) -> None:
    ctas = [life(sm, rate, 100 * sm, 1_000_000, [(10_000, 60_000, sm)], epoch) for sm, rate in enumerate(rates)]
    spans = lanes.decode(buffer(ctas, 4), 4)
    np.testing.assert_allclose(spans.event_start_ns, 10_000 + 100 * np.arange(len(rates)), atol=2)
    np.testing.assert_allclose(spans.event_end_ns, 60_000 + 100 * np.arange(len(rates)), atol=2)
    assert spans.clock.sms_fitted == len(rates)
    assert spans.clock.order_violations == 0
    assert spans.clock.residual_ns_max <= 1


@given(st.lists(st.integers(1, 400_000), min_size=2, max_size=30), SM_RATES)
def test_ctas_that_share_an_sm_share_its_line(lives_ns: list[int], rate: float) -> None:
    """Short CTAs one after the other: none is long enough for a rate of its own, the SM is."""
    starts = np.cumsum([0, *lives_ns])[:-1]
    ctas = [
        life(3, rate, int(start), took, [(0, took, index)], 77)
        for index, (start, took) in enumerate(zip(starts, lives_ns, strict=True))
    ]
    spans = lanes.decode(buffer(ctas, 1), 1)
    assert (np.diff(spans.start_ns) >= 0).all()
    np.testing.assert_allclose(spans.start_ns, starts, atol=2)
    np.testing.assert_allclose(spans.end_ns - spans.start_ns, lives_ns, atol=2)
    assert spans.clock.order_violations == 0


def test_a_clock_that_slows_down_is_followed_from_span_to_span() -> None:
    """The rate falls from 2.0 to 1.5 GHz half-way: one line would be 71 µs off there."""
    starts = np.arange(0, 2_000_000, 20_000)

    def clock(ns: float) -> int:
        return round(2.0 * min(ns, 1e6) + 1.5 * max(ns - 1e6, 0.0))

    cta = life(0, 1.0, 0, 2_000_000, [], 0)
    cta["clock"] = (clock(0), clock(2e6))
    cta["events"] = [(clock(start), clock(start + 15_000), index, 1) for index, start in enumerate(starts)]
    cta["anchors"] = {index: 10**15 + int(start) for index, start in enumerate(starts)}
    spans = lanes.decode(buffer([cta], 200), 200)
    np.testing.assert_allclose(spans.event_start_ns, starts, atol=20)
    np.testing.assert_allclose(spans.event_end_ns - spans.event_start_ns, 15_000, rtol=0.005)
    assert spans.clock.pairs_checked > 40
    assert spans.clock.residual_ns_max < 20
    cta["anchors"] = {}
    straight = lanes.decode(buffer([cta], 200), 200)
    assert np.abs(straight.event_start_ns - starts).max() > 70_000


def test_pairs_off_the_line_show_in_the_residual() -> None:
    ctas = [life(0, 1.5, start, 10_000, [], 0) for start in (0, 20_000, 40_000)]
    ctas[1]["timer"] = tuple(value + 900 for value in ctas[1]["timer"])
    fit = lanes.decode(buffer(ctas, 0), 0).clock
    assert 890 <= fit.residual_ns_max <= 910
    assert fit.pairs_checked == 4


@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=60))
def test_knots_are_apart_and_hold_both_ends(gaps: list[int]) -> None:
    timer = np.cumsum([0, *gaps])
    knots = lanes._knots(timer, 50_000)
    assert knots[0] == 0
    assert knots[-1] == timer.size - 1
    assert (np.diff(timer[knots]) >= 25_000).all() or timer[-1] < 50_000


def test_a_short_launch_takes_the_others_rate_and_says_so() -> None:
    ctas = [life(0, 1.5, 0, 900_000, [], 0), life(1, 1.7, 0, 900_000, [], 0), life(2, 1.9, 0, 1_000, [(0, 1000, 5)], 0)]
    spans = lanes.decode(buffer(ctas, 1), 1)
    assert (spans.clock.sms_fitted, spans.clock.sms_median_rate) == (2, 1)
    assert int(spans.event_end_ns[0] - spans.event_start_ns[0]) == round(1900 / 1.6)


def test_the_low_bits_of_the_clock_may_wrap() -> None:
    epoch = 2**48 - 1_000
    ctas = [life(0, 2.0, 0, 1_000_000, [(100, 700_000, 1), (700_000, 900_000, 2)], epoch)]
    spans = lanes.decode(buffer(ctas, 2), 2)
    assert spans.event_start_ns.tolist() == [100, 700_000]
    assert spans.event_end_ns.tolist() == [700_000, 900_000]
    assert spans.tile.tolist() == [1, 2]


@given(
    st.integers(0, 2**62),
    st.lists(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9), st.booleans()), max_size=6), min_size=1),
)
def test_waits_are_placed_by_the_event_before(epoch: int, of_lanes: list[list[tuple[int, int, bool]]]) -> None:
    """They hold 32 bits of the clock, and may begin up to 2³¹ cycles after it; a lane may last longer than 2³²."""
    rate, ctas, expected = 1.0, [], []
    for sm, gaps in enumerate(of_lanes):
        cta = life(sm, rate, 0, sum(gap + took for gap, took, _ in gaps) + 1, [], epoch)
        cta["events"], at = [], 0
        for number, (gap, took, waits) in enumerate(gaps):
            span = (at + gap, at + gap + took)
            cta["events"].append((epoch + span[0], epoch + span[1], number, lanes.WAITS["k_full"] if waits else 1))
            expected.append(span)
            at = span[1]
        ctas.append(cta)
    spans = lanes.decode(buffer(ctas, 6), 6)
    found = list(zip(spans.event_start_ns.tolist(), spans.event_end_ns.tolist(), strict=True))
    assert found == expected
    assert spans.clock.order_violations == 0


def test_a_wait_follows_a_tile_however_late_that_is() -> None:
    """A tile's own 48 bits place it, and what comes behind it."""
    cta = life(0, 1.0, 0, 9 * 10**9, [], 7)
    spans = [(0, 3 * 10**9, 1), (3 * 10**9 + 10, 8 * 10**9, 1), (3 * 10**9 + 20, 3 * 10**9 + 30, lanes.WAITS["k_full"])]
    cta["events"] = [(7 + begin, 7 + end, number, kind) for number, (begin, end, kind) in enumerate(spans)]
    found = lanes.decode(buffer([cta], 3), 3)
    assert found.event_start_ns.tolist() == [begin for begin, _, _ in spans]
    assert found.event_end_ns.tolist()[2] == spans[2][1]


@settings(max_examples=30)
@given(st.integers(0, 6), st.integers(0, 9))
def test_a_full_lane_keeps_its_first_events_and_counts_the_rest(capacity: int, offered: int) -> None:
    events = [(1000 * index, 1000 * index + 500, index) for index in range(offered)]
    spans = lanes.decode(buffer([life(0, 1.5, 0, 100_000, events, 5)], capacity), capacity)
    assert spans.tile.tolist() == list(range(min(offered, capacity)))
    assert spans.lost == max(offered - capacity, 0)


def test_time_that_runs_backwards_is_counted() -> None:
    cta = life(0, 1.5, 0, 100_000, [(50_000, 60_000, 0), (10_000, 20_000, 1)], 0)
    assert lanes.decode(buffer([cta], 2), 2).clock.order_violations == 1


def test_lanes_that_never_ran_are_left_out() -> None:
    words = np.vstack([buffer([life(0, 1.5, 0, 100_000, [], 0)], 1), np.zeros((3, 12), dtype=np.int64)])
    assert lanes.decode(words, 1).lane.tolist() == [0]


@pytest.mark.parametrize(
    ("words", "capacity", "message"),
    [(np.zeros((2, 9), np.int64), 1, "capacity 1"), (np.zeros((2, 12), np.int64), 1, "no lane was written")],
)
def test_a_buffer_that_is_none_is_refused(words: np.ndarray, capacity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lanes.decode(words, capacity)
