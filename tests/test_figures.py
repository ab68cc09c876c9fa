"""Figures say what the analyses found: the values drawn, the words beside them, and their bounds."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spans import recording as by_hand
from synthetic import synthetic_recording

from profiling import figures, layout, text
from profiling.sm_time import occupancy, sm_time, summary
from profiling.theme import OCCUPANCY_SCALE, PARTS
from profiling.tiles import tile_cost, tile_spans

HOSTILE = "<script>alert(1)</script><a href='javascript:alert(2)'>x</a> %{y} <b>&"
LENGTHS = [0, 5, 17, 300, 2900, 64, 64, 0, 1800, 730]


def made(schedule: str = "static", **changes):
    return synthetic_recording(
        256, LENGTHS, **({"sms": 6, "heads": 2, "schedule": schedule, "name": "jagged"} | changes)
    )


def words(figure) -> str:
    layout = figure.layout
    return f"{layout.title.text} {layout.title.subtitle.text} " + " ".join(a.text for a in layout.annotations)


def every_figure(recording) -> dict:
    lengths = [recording.lengths(which, "a test") for which in ("q", "kv")]
    spans = tile_spans(recording)
    return {
        "heatmap": figures.occupancy_heatmap(occupancy(recording, bins=50)),
        "comparison": figures.occupancy_comparison([occupancy(recording, bins=50), occupancy(recording, bins=50)]),
        "bars": figures.sm_time_bars(sm_time(recording)),
        "split": figures.sm_time_split([summary(recording), summary(recording)]),
        "cost": figures.tile_cost(tile_cost(recording)),
        "density": figures.tile_cost(tile_cost(recording), most_points=3),
        "gantt": figures.tile_gantt(spans, [0, 3, 5]),
        "lengths": figures.length_histogram(*lengths, title=recording.workload_name, grade=recording.grade),
    }


@pytest.mark.parametrize("kind", list(every_figure(made())))
def test_every_figure_has_title_axes_with_units_and_grade(kind):
    figure = every_figure(made())[kind]
    assert len(figure.layout.title.text) > 10
    assert "modelled" in figure.layout.title.subtitle.text
    titles = [axis.title.text for axis in figure.select_xaxes() if axis.title.text]
    assert len(titles) == 1
    assert any(unit in titles[0] for unit in ("(µs", "(ms", "(ns", "(tokens", "SM ("))
    if kind != "split":  # its bars are named on the axis itself
        assert all(axis.title.text for axis in figure.select_yaxes())
    assert len(figure.to_json()) < 60_000
    json.loads(figure.to_json())


@pytest.mark.parametrize("kind", list(every_figure(made())))
def test_text_of_recordings_is_escaped_in_every_figure(kind):
    recording = made(name=HOSTILE)
    source = every_figure(recording)[kind].to_json()
    for tag in ("<script", "<a ", "<b>&"):
        assert tag not in source.replace("\\u003c", "<")
    assert "&lt;script&gt;alert(1)" in source.replace("\\u0026", "&")
    templates = [v for v in _values(json.loads(source), "hovertemplate") if v]
    assert templates
    assert not any("alert" in template for template in templates)


def _values(tree, name):
    if isinstance(tree, dict):
        yield from (value for key, value in tree.items() if key == name)
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _values(child, name)


def test_warnings_stand_on_the_figure_unless_others_are_given():
    recording = made()
    found = occupancy(recording, bins=10)
    assert "⚠ modelled, not measured" in words(figures.occupancy_heatmap(found))
    assert "⚠ modelled, not measured" in words(figures.sm_time_bars(sm_time(recording)))
    assert "⚠" not in words(figures.occupancy_heatmap(found, notes=[]))
    assert "⚠ 3 events &lt;lost&gt;" in words(figures.occupancy_heatmap(found, notes=["3 events <lost>"]))


def test_whole_ctas_as_work_is_always_said():
    recording = made(level="cta")
    assert "whole CTAs count as work" in words(figures.occupancy_heatmap(occupancy(recording), notes=[]))
    assert "whole CTAs count as work" in words(figures.sm_time_split([summary(recording)], notes=[]))


def test_long_notes_are_broken_into_lines_that_fit():
    figure = figures.occupancy_heatmap(occupancy(made(), bins=10), notes=["word " * 60])
    lines = figure.layout.title.subtitle.text.split("<br>")
    assert max(map(len, lines)) <= 135
    assert figure.layout.margin.t > 40 + 15 * len(lines)


# -- SM × time ---------------------------------------------------------------------------------------------------------


def test_heatmap_draws_the_share_of_each_bin_where_it_belongs():
    # SM 1 works from 100 to 250 of 400 ns: half of the second bin of four... exactly.
    recording = by_hand(
        [
            {"sm": 0, "tile": 0, "start_ns": 0, "end_ns": 400},
            {"sm": 1, "cta": 1, "tile": 1, "start_ns": 100, "end_ns": 250},
        ],
        sms=3,
    )
    figure = figures.occupancy_heatmap(occupancy(recording, bins=4))
    heat = figure.data[0]
    assert heat.z.tolist() == [[100] * 4, [0, 100, 50, 0], [0] * 4]
    assert heat.x0 == 50
    assert heat.dx == 100
    assert heat.y.tolist() == [0, 1, 2]
    assert "(ns)" in figure.layout.xaxis.title.text
    assert "45.8 %" in figure.layout.title.text  # (400 + 150) / (3 × 400)
    assert "400 ns" in figure.layout.title.text


def test_heatmap_reads_the_same_in_grey_and_to_the_colour_blind():
    lightness = [_linear(colour) @ [0.2126, 0.7152, 0.0722] for _, colour in OCCUPANCY_SCALE]
    assert all(light > dark + 0.05 for light, dark in itertools.pairwise(lightness))


def test_parts_of_sm_time_are_told_apart_by_the_colour_blind():
    # Viénot, Brettel and Mollon (1999): what dichromats see, as linear RGB matrices.
    protan = np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]])
    deutan = np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]])
    for seen in (np.eye(3), protan, deutan):
        shades = [np.clip(seen @ _linear(colour), 0, 1) ** (1 / 2.2) for *_, colour in PARTS]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(shades, 2)) > 0.15


def _linear(colour: str) -> np.ndarray:
    return (np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255) ** 2.2


def test_comparison_shares_one_time_axis_and_marks_each_makespan():
    found = [occupancy(made(schedule), bins=40) for schedule in ("static", "balanced-dynamic")]
    figure = figures.occupancy_comparison(found)
    ranges = [tuple(axis.range) for axis in figure.select_xaxes()]
    assert len(ranges) == 2
    assert ranges[0] == ranges[1]
    longest = max(o.makespan_ns for o in found) / 1e3
    assert longest <= ranges[0][1] <= 1.02 * longest
    for trace, shape, one in zip(figure.data, figure.layout.shapes, found, strict=True):
        assert shape.x0 == shape.x1 == one.makespan_ns / 1e3
        assert shape.yref.startswith(trace.yaxis or "y")
        assert text.duration(one.makespan_ns) in words(figure)
    assert words(figure).index("<b>static</b>") < words(figure).index("<b>balanced-dynamic</b>")
    ratio = text.significant(found[0].makespan_ns / found[1].makespan_ns)
    assert figure.layout.title.text == f"<b>static takes {ratio}× as long as balanced-dynamic</b>"


def test_comparison_of_equals_claims_no_winner_and_names_both():
    one = occupancy(made(), bins=20)
    figure = figures.occupancy_comparison([one, one])
    assert "takes" not in figure.layout.title.text
    assert "(1)" in words(figure)
    assert "(2)" in words(figure)


def test_comparison_of_what_may_not_be_compared_gives_no_factor_and_names_each_grade_and_warning():
    first, second = (occupancy(made(schedule), bins=20) for schedule in ("static", "dynamic"))
    first, second = replace(first, grade="measured", warnings=()), replace(second, warnings=("odd clock",))
    figure = figures.occupancy_comparison([first, second], comparable=False)
    assert "×" not in figure.layout.title.text
    assert "<b>static · measured</b>" in words(figure) and "<b>dynamic · modelled</b>" in words(figure)
    assert "⚠ dynamic · modelled: odd clock" in words(figure)


def test_a_short_makespan_is_not_written_over_the_panels_name():
    long, brief = (occupancy(made(heads=heads), bins=20) for heads in (8, 1))
    figure = figures.occupancy_comparison([brief, long])
    assert brief.makespan_ns < 0.5 * long.makespan_ns
    marks = [a for a in figure.layout.annotations if a.text.startswith("<b>") and a.text.endswith("</b>")]
    assert [(mark.y, mark.yanchor) for mark in marks] == [(0.5, "middle"), (1, "bottom")]


def test_no_colour_bar_has_its_title_over_the_uppermost_label():
    found = json.loads(json.dumps([figure.to_plotly_json() for figure in every_figure(made()).values()], default=str))
    bars = list(_values(found, "colorbar"))
    assert len(bars) >= 3
    assert all(bar["title"]["side"] == "right" for bar in bars if "title" in bar)


def test_comparison_of_none_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        figures.occupancy_comparison([])


# -- SM time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["work", "sm"])
def test_bars_of_an_sm_sum_to_the_makespan(order):
    times = sm_time(made(sms=9))
    figure = figures.sm_time_bars(times, order=order)
    assert figure.layout.barmode == "stack"
    heights = np.sum([np.asarray(trace.y, dtype=float) for trace in figure.data], axis=0)
    np.testing.assert_allclose(heights, times["total_ns"].to_numpy() / 1e3, rtol=1e-5)
    work = np.asarray(figure.data[0].y)
    by_sm = times.set_index("sm")["work_ns"] / 1e3
    np.testing.assert_allclose(work, by_sm.loc[figure.data[0].customdata[:, 0]], rtol=1e-6)
    assert (np.diff(work) <= 0).all() if order == "work" else figure.data[0].customdata[:, 0].tolist() == list(range(9))
    assert figure.layout.shapes[0].y0 == pytest.approx(times["work_ns"].mean() / 1e3)


def test_bars_draw_the_launch_that_is_asked_for():
    times = sm_time(made(launches=3))
    drawn = figures.sm_time_bars(times, launch=2)
    expected = times[times["launch"] == 2]["work_ns"].sum() / 1e3
    assert np.asarray(drawn.data[0].y, dtype=float).sum() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="launch: expected one of"):
        figures.sm_time_bars(times, launch=7)
    with pytest.raises(ValueError, match="order: expected"):
        figures.sm_time_bars(times, order="random")


def test_split_has_a_bar_a_recording_as_long_as_its_makespan():
    summaries = [summary(made(schedule)) for schedule in ("static", "dynamic", "dynamic")]
    figure = figures.sm_time_split(summaries)
    assert list(figure.data[0].y) == ["static", "dynamic (1)", "dynamic (2)"]
    lengths = np.sum([np.asarray(trace.x, dtype=float) for trace in figure.data], axis=0)
    np.testing.assert_allclose(lengths, [s["makespan_ns"].iloc[0] / 1e3 for s in summaries], rtol=1e-9)
    assert [trace.name for trace in figure.data] == [label for _, label, _ in PARTS]


def test_split_draws_the_launch_with_the_median_makespan():
    launches = summary(made(launches=5))
    figure = figures.sm_time_split([launches])
    drawn = sum(float(trace.x[0]) for trace in figure.data)
    assert drawn == pytest.approx(launches["makespan_ns"].median() / 1e3)


# -- tiles -------------------------------------------------------------------------------------------------------------


def test_every_tile_is_a_point_up_to_the_bound():
    costs = tile_cost(made())
    figure = figures.tile_cost(costs, most_points=len(costs))
    points = figure.data[0]
    assert points.type == "scatter"
    assert len(points.x) == len(costs)
    np.testing.assert_allclose(points.y, costs["cost_ns"] / 1e3, rtol=1e-6)
    assert f"{len(costs)} tiles" in words(figure)
    assert "density" not in words(figure)


def test_above_the_bound_tiles_are_a_density_that_loses_none_and_says_so():
    costs = tile_cost(made())
    figure = figures.tile_cost(costs, most_points=len(costs) - 1)
    density = figure.data[0]
    assert density.type == "heatmap"
    assert int(np.sum(density.customdata)) == len(costs)
    assert ((np.asarray(density.z) > 0) == (np.asarray(density.customdata) > 0)).all()
    assert f"density of {len(costs)} tiles, above {len(costs) - 1} points" in words(figure)


def test_a_million_tiles_stay_small():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 9000, 1_000_000)
    costs = pd.DataFrame({"kv_len": lengths, "cost_ns": 500 + 11 * lengths, "batch": 0, "head": 0, "block": 0})
    assert len(figures.tile_cost(costs).to_json()) < 60_000


def test_median_line_and_a_length_of_zero():
    costs = pd.DataFrame({"kv_len": [0, 0, 0, 100, 100, 100], "cost_ns": [1000, 2000, 9000, 4000, 5000, 90000]})
    costs = costs.assign(batch=0, head=0, block=0)
    figure = figures.tile_cost(costs, title="t", grade="measured")
    assert [y for y in figure.data[1].y if not np.isnan(y)] == [2.0, 5.0]
    assert figure.data[1].x[0] == 0.5
    assert figure.layout.xaxis.ticktext[0] == "0"
    assert "0 drawn at 0.5" in figure.layout.xaxis.title.text


def test_costs_of_one_magnitude_have_ticks_and_lengths_that_nobody_has_no_line():
    costs = pd.DataFrame({"batch": 0, "head": 0, "block": range(8), "kv_len": [64, 32768] * 4})
    costs["cost_ns"] = np.linspace(18_900, 30_200, 8).astype(int)
    figure = figures.tile_cost(costs, grade="measured")
    seen = [tick for tick in figure.layout.yaxis.tickvals if 18.9 <= tick <= 30.2]
    assert 4 <= len(seen) <= 12
    x = np.asarray(figure.data[1].x, dtype=float)
    assert x[0] == 64 and x[-1] == 32768 and np.isnan(x[1:-1]).all()


def test_no_tiles_are_refused():
    with pytest.raises(ValueError, match="at least one tile"):
        figures.tile_cost(tile_cost(made()).head(0))


def test_gantt_draws_each_tile_of_the_chosen_sms_where_it_ran():
    spans = tile_spans(made("grid"))
    figure = figures.tile_gantt(spans, [4, 1])
    chosen = spans[spans["sm"].isin([4, 1])]
    bars = figure.data[0]
    assert len(bars.x) == len(chosen)
    assert sorted(np.round(np.asarray(bars.base, dtype=float) * 1e3)) == sorted(chosen["start_ns"])
    assert np.sum(bars.x) == pytest.approx((chosen["end_ns"] - chosen["start_ns"]).sum() / 1e3, rel=1e-5)
    assert list(figure.layout.yaxis.ticktext) == ["4", "1"]
    assert f"{len(chosen)} tiles of 2 SMs" in words(figure)
    np.testing.assert_allclose(bars.marker.color, np.log10(bars.customdata[:, 5]), rtol=1e-5)


def test_gantt_states_its_bound():
    spans = tile_spans(synthetic_recording(256, [30] * 300, sms=2))
    figure = figures.tile_gantt(spans, [0, 1], most_rectangles=50)
    assert len(figure.data[0].x) <= 50
    assert int(figure.data[0].customdata[:, 6].sum()) == len(spans)
    assert "neighbours shorter than" in words(figure)


def test_gantt_of_unused_sms_is_refused():
    with pytest.raises(ValueError, match="sms: expected SMs that ran a tile"):
        figures.tile_gantt(tile_spans(made()), [77])


@st.composite
def spans_of_sms(draw):
    rows = draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(0, 60)), min_size=1, max_size=60)
    )
    frame = pd.DataFrame(rows, columns=["sm", "start_ns", "length"])
    frame["end_ns"] = frame["start_ns"] + frame.pop("length")
    return frame.assign(kv_len=np.arange(len(frame)))


@settings(max_examples=60)
@given(spans_of_sms())
def test_lanes_hold_spans_that_do_not_overlap_and_are_as_few_as_can_be(spans):
    packed = layout.pack_lanes(spans)
    assert len(packed) == len(spans)
    for _, lane in packed.groupby(["sm", "lane"]):
        ordered = lane.sort_values(["start_ns", "end_ns"])
        assert (ordered["start_ns"].to_numpy()[1:] >= ordered["end_ns"].to_numpy()[:-1]).all()
    for _, rows in packed.groupby("sm"):
        at_once = max(
            ((rows["start_ns"] <= t) & ((rows["end_ns"] > t) | (rows["start_ns"] == t))).sum() for t in rows["start_ns"]
        )
        assert rows["lane"].max() + 1 <= at_once


@settings(max_examples=60)
@given(spans_of_sms(), st.integers(1, 80))
def test_joined_rectangles_lose_no_tile_and_cover_the_same_time(spans, most):
    packed = layout.pack_lanes(spans)
    joined, width = layout.merge_short(packed, most)
    lanes = packed.groupby(["sm", "lane"]).ngroups
    assert joined["tiles"].sum() == len(spans)
    assert len(joined) <= max(most, 2 * lanes)
    assert (width == 0) == (len(spans) <= most)
    key = ["sm", "lane"]
    before, after = packed.groupby(key), joined.groupby(key)
    assert (before["start_ns"].min() == after["start_ns"].min()).all()
    assert (before["end_ns"].max() == after["end_ns"].max()).all()
    long = packed[packed["end_ns"] - packed["start_ns"] >= width]
    kept = joined[joined["tiles"] == 1]
    columns = ["sm", "lane", "start_ns", "end_ns"]
    assert len(long[columns].merge(kept[columns].drop_duplicates())) == len(long)


# -- lengths -----------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=50))
def test_each_length_is_in_its_bin(lengths):
    lens = np.array(lengths)
    positive = lens[lens > 0]
    low, high = (int(positive.min()), int(positive.max())) if len(positive) else (1, 1)
    bins = layout.length_bins(lens, low, high)
    for low_edge, high_edge, counted in zip(bins["low"], bins["high"], bins["sequences"], strict=True):
        assert ((lens >= low_edge) & (lens < high_edge)).sum() == counted
    assert bins["sequences"].sum() == len(lens)
    assert bins["token_share"].sum() == pytest.approx(1 if len(positive) else 0)


def test_histogram_counts_empty_sequences_and_padding():
    figure = figures.length_histogram([256] * 4, [0, 0, 10, 90], title="mine", grade="measured")
    assert "75.0 %" not in figure.layout.title.text
    assert "72.2 % padding" in figure.layout.title.text  # 100 of 4 × 90 tokens are real
    assert "4 sequences, 2 without keys, every Q 256 tokens" in words(figure)
    assert len(figure.data) == 1
    zero = figure.data[0]
    assert zero.y[0] == 2
    assert figure.layout.xaxis.ticktext[0] == "<b>0</b>"


def test_histogram_of_jagged_queries_shows_both():
    figure = figures.length_histogram([1, 2, 4], [8, 8, 8])
    assert [trace.name for trace in figure.data] == ["KV length", "Q length"]
    assert "Q tokens" in words(figure)


@pytest.mark.parametrize("lengths", [[0, 0], [1], [1, 1, 2], [2**20]])
def test_histogram_of_odd_batches(lengths):
    figure = figures.length_histogram([1] * len(lengths), lengths)
    assert sum(figure.data[0].y) == len(lengths)


def test_histogram_of_no_sequences_is_refused():
    with pytest.raises(ValueError, match="at least one sequence"):
        figures.length_histogram([], [])


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 ns"),
        (7, "7 ns"),
        (999, "999 ns"),
        (1500, "1.500 µs"),
        (716_000, "716.0 µs"),
        (1_234_567, "1.235 ms"),
        (2.5e9, "2.500 s"),
        (float("nan"), "–"),
    ],
)
def test_durations(value, expected):
    assert text.duration(value) == expected


def test_durations_in_anothers_unit():
    assert text.duration(500_000, like=2_000_000) == "0.5000 ms"


def test_small_shares_never_read_as_nothing():
    assert text.percent(0.0001) == "< 0.1 %"
    assert text.percent(0) == "0.0 %"


def test_titles_are_told_apart_by_what_differs():
    common, own = text.split_titles(["w · forward · static · H200", "w · forward · dynamic · H200"])
    assert (common, own) == ("w · forward · H200", ["static", "dynamic"])
    assert text.split_titles(["a", "a · b"]) == ("", ["a", "a · b"])
    assert text.split_titles(["a · b", "a · b"])[1] == ["recording (1)", "recording (2)"]


def test_strangers_text_is_one_short_line():
    assert text.plain("a\nb\x00\u202ec" + "d" * 500, 20) == "a b cddddddddddddd" + "d" + "…"


def test_analyses_need_no_plotly():
    code = "import sys, profiling.sm_time, profiling.compare, profiling.report; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
