"""The report as files and as HTML text: what it says, what it refuses, what stays inert, how large it gets."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from spans import recording as by_hand
from synthetic import large_recording, synthetic_recording

from profiling import page, report, text
from profiling.errors import RecordingError, UserError
from profiling.recording import Recording
from profiling.report import write_report
from profiling.sm_time import summary
from profiling.tiles import tail_sequences

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7*7 }} <!--"
LENGTHS = [0, 5, 17, 300, 2900, 64, 64, 0, 1800, 730]


def made(schedule: str = "static", **changes) -> Recording:
    return synthetic_recording(256, LENGTHS, **({"sms": 6, "schedule": schedule, "name": "jagged"} | changes))


def with_metadata(recording: Recording, **changes) -> Recording:
    metadata = copy.deepcopy(recording.metadata)
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        inner = metadata
        for name in path:
            inner = inner[name]
        inner[last] = value
    return replace(recording, metadata=metadata)


class Reader(HTMLParser):
    """The page's tags, its text outside scripts and styles, and its scripts."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self._inside = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else self._inside
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        self._inside = "" if tag == self._inside else self._inside
        self.text += " " if tag in ("td", "th", "tr", "p") else ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif not self._inside:
            self.text += data

    @property
    def words(self) -> str:
        return " ".join(self.text.split())

    def figures(self) -> dict[str, dict]:
        """The figures by id, from the JSON in the page."""
        return {
            str(attrs["id"]): json.loads(source)
            for attrs, source in self.scripts
            if attrs.get("type") == "application/json"
        }


def read(index: Path) -> Reader:
    return Reader(index.read_text(encoding="utf-8"))


# -- what it says ------------------------------------------------------------------------------------------------------


def test_a_report_is_two_files_with_plotly_once(tmp_path):
    index = write_report([made()], tmp_path / "deep" / "report")
    assert index == tmp_path / "deep" / "report" / "index.html"
    assert sorted(entry.name for entry in index.parent.iterdir()) == ["index.html", "plotly.min.js"]
    assert (index.parent / "plotly.min.js").read_text(encoding="utf-8").count("plotly.js v") == 1
    assert index.stat().st_size < 200_000


def test_a_section_shows_the_split_the_headroom_and_the_figures(tmp_path):
    recording = made()
    reader = read(write_report([recording], tmp_path))
    row = summary(recording).iloc[0]
    for part in ("work", "fetch", "ramp", "tail", "unused"):
        assert text.percent(row[f"{part}_share"]) in reader.words
    assert f"{text.times(row['headroom'])} headroom" in reader.words
    assert text.duration(row["makespan_ns"]) in reader.words
    kinds = Counter(figure["data"][0]["type"] for figure in reader.figures().values())
    assert kinds == {"heatmap": 1, "bar": 3, "scatter": 1}  # occupancy; SM time, Gantt, lengths; cost


def test_recordings_of_one_workload_and_direction_are_compared_on_one_axis(tmp_path):
    recordings = [
        made("static"),
        made("balanced-dynamic"),
        made("static", direction="backward"),
        made("static", name="other"),
    ]
    reader = read(write_report(recordings, tmp_path))
    compared = {name: figure for name, figure in reader.figures().items() if name.startswith("comparison")}
    assert len(compared) == 2  # the heatmaps and the split, of one group
    heatmaps = next(figure for figure in compared.values() if figure["data"][0]["type"] == "heatmap")
    assert len(heatmaps["data"]) == 2
    assert "Comparison: jagged · forward" in reader.words
    plain = [recording.metadata["durations"]["plain_ns"] for recording in recordings[:2]]
    assert f"balanced-dynamic is {plain[0] / plain[1]:.2f}× as fast as static (by kernel time)" in reader.words


def test_recordings_that_may_not_be_compared_get_no_speedup(tmp_path):
    other = with_metadata(made("balanced-dynamic"), gpu__name="another GPU")
    words = read(write_report([made(), other], tmp_path)).words
    assert "no speedup is given: GPU differs" in words
    assert "as fast as" not in words


def test_the_table_of_contents_reaches_every_section(tmp_path):
    reader = read(write_report([made("static"), made("dynamic"), made("static", direction="backward")], tmp_path))
    ids = [attrs["id"] for _, attrs in reader.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = {str(attrs["href"]) for tag, attrs in reader.tags if tag == "a"}
    assert links <= {f"#{name}" for name in ids}
    assert {"#overview", "#comparison-1", "#recording-1", "#recording-2", "#recording-3", "#words"} <= links


def test_the_median_launch_is_shown_and_named(tmp_path):
    recording = made(launches=5)
    launches = summary(recording)
    median = launches.sort_values("makespan_ns").iloc[2]
    reader = read(write_report([recording], tmp_path))
    assert f"launch {int(median['launch'])} of 5, the one with the median makespan" in reader.words
    heat = reader.figures()["recording-1-figure-1-data"]
    assert text.duration(median["makespan_ns"]) in heat["layout"]["title"]["text"]


def test_what_caused_the_tail_is_told(tmp_path):
    recording = made()
    words = read(write_report([recording], tmp_path)).words
    worst = tail_sequences(recording).iloc[0]
    assert f"{worst['batch']:.0f} {worst['kv_len']:,.0f} 256 {worst['tiles']:.0f} " in words
    assert re.search(r"Past the even end at \S+ µs, \d+ tiles? of \d sequences? ran\.", words.replace("\u00a0", " "))
    last = summary(recording).iloc[0]["last_sm"]
    assert f"SM {last} ended last: it had " in words


def test_warnings_stand_beside_the_numbers_and_on_the_figures(tmp_path):
    recording = with_metadata(made(), events={"written": 30, "lost": 3, "lost_by_lane": {"2": 3}})
    reader = read(write_report([recording, made("dynamic")], tmp_path))
    lost = next(line for line in recording.warnings() if "lost" in line)
    assert reader.words.count(lost) >= 2  # the comparison and the recording's own section
    assert "3 events lost (coverage 90.91 %), so what caused the tail" in reader.words  # refused, with the reason
    own = [figure for name, figure in reader.figures().items() if name.startswith("recording-1")]
    told = [figure for figure in own if "⚠ 3 events lost" in json.dumps(figure, ensure_ascii=False)]
    assert len(told) == len(own) - 1  # all but the lengths, which lost nothing


def test_level_cta_is_told_and_what_needs_tiles_says_so(tmp_path):
    reader = read(write_report([made(level="cta")], tmp_path))
    assert "whole CTAs count as work" in reader.words
    assert "recorded at level cta, without tiles" in reader.words
    assert len(reader.figures()) == 3


def test_a_figure_that_is_missing_says_why(tmp_path):
    reader = read(write_report([with_metadata(made(), workload__q_lens=None)], tmp_path))
    assert "Not drawn: jagged: metadata key 'workload.q_lens' is missing; the histogram of lengths" in reader.words
    assert len(reader.figures()) == 3  # neither tile costs by length nor the lengths


def test_clearing_that_runs_last_is_named(tmp_path):
    spans = [
        {"tile": 0, "batch": 0, "end_ns": 100},
        {"event": "zero", "tile": 1, "batch": 1, "start_ns": 100, "end_ns": 130},
    ]
    reader = read(write_report([by_hand(spans, sms=1)], tmp_path))
    assert "No tile ran past the even end at 130 ns." in reader.words
    spans.append({"cta": 1, "sm": 1, "tile": 2, "batch": 2, "end_ns": 110})
    reader = read(write_report([by_hand(spans, sms=2)], tmp_path))
    assert "at 120 ns; clearing the output of empty tiles did, until 130 ns." in reader.words


@pytest.mark.parametrize("grade", ["measured", "modelled", "derived"])
def test_every_table_and_figure_carries_the_grade(tmp_path, grade):
    source = write_report([with_metadata(made(), grade=grade)], tmp_path).read_text(encoding="utf-8")
    body = source.split("</nav>")[1].split('id="words"')[0]
    assert body.count(f'<span class="grade {grade}">') == body.count("<caption>") > 0
    subtitles = [f["layout"]["title"]["subtitle"]["text"] for f in Reader(source).figures().values()]
    assert all(grade in subtitle or "derived" in subtitle for subtitle in subtitles)


# -- strangers' recordings ---------------------------------------------------------------------------------------------


def test_a_recording_of_bare_rows_has_a_report(tmp_path):
    recording = by_hand([{"tile": 1, "batch": 0, "head": 0, "block": 0, "end_ns": 10}])
    reader = read(write_report([recording], tmp_path))
    assert "5 SMs worked 20.0 % of 10 ns" in reader.words
    assert len(reader.figures()) == 3


def test_a_recording_without_work_has_a_report(tmp_path):
    recording = by_hand([{"tile": 1, "end_ns": 0}], sms=1)
    assert "No SM worked in 0 ns" in read(write_report([recording], tmp_path)).words


def test_metadata_of_odd_kinds_have_a_report(tmp_path):
    odd = with_metadata(
        made(),
        kernel__config=["x"] * 50,
        versions="one",
        durations={"plain_ns": "fast"},
        clock=3,
        workload__heads={"a": [1] * 50},
        grade="guess",
        created=None,
    )
    assert "guess" in read(write_report([odd, made("dynamic")], tmp_path)).words


def test_a_missing_sm_count_is_refused_before_anything_is_written(tmp_path):
    metadata = {name: value for name, value in made().metadata.items() if name != "gpu"}
    with pytest.raises(RecordingError, match=r"gpu\.sm_count"):
        write_report([replace(made(), metadata=metadata)], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_hostile_text_is_inert_in_html_and_json(tmp_path):
    hostile = with_metadata(
        made(name=HOSTILE),
        kernel__name=HOSTILE,
        kernel__config={HOSTILE: HOSTILE},
        kernel__schedule=HOSTILE,
        gpu__name=HOSTILE,
        command=HOSTILE,
        created=HOSTILE,
        grade=HOSTILE,
        versions={HOSTILE: HOSTILE},
        workload__dtype=HOSTILE,
        events={"written": 1, "lost": 1, "lost_by_lane": {HOSTILE: 1}},
    )
    hostile = replace(hostile, source=HOSTILE)
    tame = read(write_report([with_metadata(made(), events=hostile.metadata["events"])] * 2, tmp_path / "tame"))
    reader = read(write_report([hostile, hostile], tmp_path / "hostile"))
    assert Counter(tag for tag, _ in reader.tags) == Counter(tag for tag, _ in tame.tags)
    assert not [attrs for _, attrs in reader.tags if any(name.startswith("on") for name in attrs)]
    assert "alert(1)" in reader.words
    assert "{{ 7*7 }}" in reader.words
    for attrs, source in reader.scripts:
        assert ("alert" not in source) or attrs.get("type") == "application/json"
        assert "<" not in source or attrs.get("type") != "application/json"
    for figure in reader.figures().values():
        assert not re.search(r"<(script|img|/)(?!b>|br>)", json.dumps(figure["layout"]))


def test_nothing_in_the_page_points_at_a_network(tmp_path):
    reader = read(write_report([made(), made("dynamic")], tmp_path))
    for _, attrs in reader.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert str(attrs.get(name, "#")).startswith("#") or attrs[name] == "plotly.min.js"
    policy = next(attrs["content"] for _, attrs in reader.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    rules = {rule.split()[0]: rule.split()[1:] for rule in str(policy).split(";")}
    assert rules["default-src"] == ["'none'"]
    assert not any(word.startswith(("http", "*", "'unsafe-eval'")) for words in rules.values() for word in words)
    assert "'unsafe-inline'" not in rules["script-src"]


def test_long_metadata_are_shortened_and_that_is_said(tmp_path):
    recording = with_metadata(made(), command="x" * 100_000, notes=list(range(10_000)), deep=_nested(50))
    index = write_report([recording], tmp_path)
    assert index.stat().st_size < 120_000
    assert "long lists and texts shortened" in read(index).words


def _nested(depth: int) -> dict:
    return {"a": _nested(depth - 1)} if depth else {}


# -- the folder --------------------------------------------------------------------------------------------------------


def test_a_previous_report_is_replaced(tmp_path):
    write_report([made()], tmp_path)
    index = write_report([made("dynamic")], tmp_path)
    assert "dynamic" in read(index).words
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["thesis.docx", "index.html", ".git"])
def test_a_folder_that_holds_something_else_is_refused_and_kept(tmp_path, name):
    (tmp_path / name).write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(name)) as caught:
        write_report([made()], tmp_path)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text(encoding="utf-8") == "mine"


def test_a_report_with_a_strangers_file_beside_it_is_refused(tmp_path):
    write_report([made()], tmp_path)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=r"notes\.txt"):
        write_report([made()], tmp_path)


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    place = tmp_path / "report"
    place.write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="is a file"):
        write_report([made()], place)
    with pytest.raises(UserError, match="cannot be written"):
        write_report([made()], place / "below")


def test_no_recordings_and_too_many_are_refused(tmp_path):
    with pytest.raises(UserError, match="at least one"):
        write_report([], tmp_path / "a")
    with pytest.raises(UserError, match="at most|give fewer"):
        write_report([made()] * 33, tmp_path / "b")


# -- size --------------------------------------------------------------------------------------------------------------


def folder_bytes(index: Path) -> int:
    return sum(entry.stat().st_size for entry in index.parent.iterdir())


@pytest.mark.parametrize("number", [1, 16, report.MOST_RECORDINGS])
def test_a_page_stays_under_eight_megabytes(tmp_path, number):
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(16), np.log(8192), 400)).astype(int)
    kinds = [
        synthetic_recording(256, lengths, sms=148, schedule=schedule, heads=4, direction=direction)
        for schedule in ("static", "balanced-dynamic")
        for direction in ("forward", "backward")
    ]
    index = write_report([kinds[i % len(kinds)] for i in range(number)], tmp_path)
    assert folder_bytes(index) < 8_000_000
    reader = read(index)
    assert len(reader.figures()) >= 5 * number
    bins = report.Bounds.of([kinds[0]] * number).bins  # what the first try allows already fits
    assert f"heatmaps have {bins} time bins" in reader.words


def test_a_page_that_grew_too_large_is_drawn_again_with_less(tmp_path, monkeypatch):
    recordings = [made(sms=148), made("dynamic", sms=148)]
    full = write_report(recordings, tmp_path / "full")
    monkeypatch.setattr(report, "MOST_BYTES", folder_bytes(full) - 1)
    small = write_report(recordings, tmp_path / "small")
    assert folder_bytes(small) < folder_bytes(full)
    assert "heatmaps have 400 time bins" in read(full).words
    assert "heatmaps have 20 time bins" in read(small).words
    monkeypatch.setattr(report, "MOST_BYTES", 4_900_000)
    with pytest.raises(UserError, match="give fewer"):
        write_report(recordings, tmp_path / "none")


@pytest.mark.slow
def test_ten_million_spans_stay_under_eight_megabytes(tmp_path):
    index = write_report([large_recording(10_000_000)], tmp_path)
    assert folder_bytes(index) < 8_000_000


def test_bounds_shrink_with_the_number_of_recordings():
    few, many = report.Bounds.of([made()]), report.Bounds.of([made(sms=148)] * 32)
    assert few.bins == 400
    assert 20 <= many.bins < few.bins
    assert many.points < few.points
    assert many.rectangles < few.rectangles


# -- pages of figures --------------------------------------------------------------------------------------------------


def test_a_page_of_figures_holds_plotly_itself(tmp_path):
    from profiling.figures import occupancy_heatmap
    from profiling.sm_time import occupancy

    path = page.write_figures(occupancy_heatmap(occupancy(made())), tmp_path / "a" / "heat.html", title=HOSTILE)
    reader = read(path)
    assert [attrs.get("src") for tag, attrs in reader.tags if tag == "script"] == [None] * 3
    assert len(reader.figures()) == 1
    assert 4_000_000 < path.stat().st_size < 6_000_000


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        page.write(tmp_path, "x")
    assert not list(tmp_path.iterdir())
