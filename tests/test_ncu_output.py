"""What is said of a report in each format: complete, parseable, and harmless whatever a kernel is called."""

from __future__ import annotations

import csv
import html.parser
import io
import json
import math
import re
from pathlib import Path

import pytest
from browser import browser
from hypothesis import given, settings
from hypothesis import strategies as st
from ncu_kernels import launch, metrics, real, report
from test_ncu_summary import MADE

from profiling.ncu import formats, tables, words
from profiling.ncu.analysis import analyse, document
from profiling.ncu.metrics import FACTS, Number
from profiling.ncu.report import Rule
from profiling.recording import Recording

RECORDING = Path(__file__).resolve().parent.parent / "profiling/data/hsp-loguniform_forward_static.parquet"
HOSTILE = [
    "</script><script>alert(1)</script><b>bold</b>", "a|b|c", "`code` *star* _under_ [link](http://x) # <img src=x>",
    "two\nlines\r\nthree\rfour", "\x1b[31mred\x1b[0m\x9b1m\x07\x00", "", "x" * 5000,
    "\udc80\ud800 no text", "\"quoted\", 'too'",
    "{{ 7*7 }} {% raw %}", "\u202egnirts\u2028\u2029", "&lt;b&gt;", "=1+1",
]  # fmt: skip
MAKE = {
    "md": formats.markdown,
    "csv": formats.comma_separated,
    "json": formats.as_json,
    "html": formats.html,
}


class Tags(html.parser.HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def whole():
    """Findings of the forward with everything that there can be: a baseline, a recording, rules, stalls."""
    return analyse(
        [real("h200_fwd_static")], baseline=real("h200_all_basic"), recording=Recording.read(RECORDING)
    )  # fmt: skip


def hostile(name):
    shape = launch(name, kernel_full=name, push_pop=(f"jfa:{name}",), gpu=name, process=name)
    rule = Rule(name, name, name, name, "warning", 10.0, name)
    facts = metrics({"duration": 1e6, "sm_throughput": 20.0, "tensor": 10.0})
    return analyse(
        [
            report(
                (shape, facts),
                path=f"folder/{name}",
                rules=((rule,),),
                writer=f"{name} of now",
                command=name,
                notes=(name,),
            )
        ],
        baseline=report((shape, facts), path=name, writer="another"),
    )


def rows(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


# --- words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, unit, expected",
    [
        (2219136.0, "ns", "2.219 ms"),
        (34.44, "%", "34.4 %"),
        (1.8e9, "hz", "1.80 GHz"),
        (5.71e9, "byte", "5.71 GB"),
        (512.0, "byte", "512 B"),
        (2.57e12, "byte/s", "2.57 TB/s"),
        (327e12, "1/s", "327 TFLOP/s"),
        (1.0234, "x", "1.02×"),
        (132.0, "", "132"),
        (593e6, "inst", "593 M"),
        (0.483, "warp", "0.483"),
        (math.nan, "%", "–"),
        (math.inf, "byte", "–"),
        (-5e9, "byte", "-5.00 GB"),
        (0.0, "byte", "0 B"),
    ],
)
def test_a_number_is_shown_in_a_unit_that_suits_it(value, unit, expected):
    assert words.show(Number(value, unit, "", "")) == expected


def test_none_is_a_dash_and_every_shown_fact_has_words():
    assert words.show(None) == "–"
    assert set(words.SHOWN) <= set(FACTS) | set(words.DERIVED_WORDS)
    assert len(set(words.SHOWN)) == len(words.SHOWN)


@pytest.mark.parametrize(
    "grid, block, cluster, expected",
    [
        ((132, 1, 1), (256, 1, 1), (), "132 CTAs of 256"),
        ((2048, 4, 1), (128, 1, 1), (), "2,048×4 CTAs of 128"),
        ((1, 1, 5), (32, 32, 1), (2, 1, 1), "1×1×5 CTAs of 32×32, clusters of 2"),
        ((), (128, 1, 1), (), "–"),
    ],
)
def test_a_shape_in_words(grid, block, cluster, expected):
    assert words.shape(launch(grid=grid, block=block, cluster=cluster)) == expected


# --- tables -------------------------------------------------------------------------------------


def test_the_overview_says_the_verdict_first_and_why_something_is_absent():
    (found,) = analyse([real("a10g_sgemm_ncu2023.1")])
    table = tables.overview(found)
    assert all(len(row) == len(table.headings) for row in table.rows)
    by_name = {row[0]: dict(zip(table.headings, row, strict=True)) for row in table.rows}
    assert by_name["basic"]["verdict"] == "memory-bound (L1)"
    assert by_name["basic"]["tensor"] == "no tensor work"
    assert by_name["basic"]["share"] == "–"
    last = by_name["one_d_vec"]
    assert (last["duration"], last["tensor"], last["shape"], last["occupancy"]) == ("n/a", "n/a", "–", "–")
    detail = {row[0]: row[1] for row in tables.numbers(found.kernels[-1]).rows}
    assert detail["duration"] == "n/a"
    assert detail["DRAM bandwidth"] == "not collected"


def test_a_kernel_of_several_launches_shows_its_range_of_durations():
    (found,) = analyse([real("h200_all_basic")], kernel="jfa_delta")
    (row,) = tables.overview(found).rows
    assert row[1:4] == ("3", "2,048×4 CTAs of 128", "128.9 µs (128.2 µs … 130.1 µs)")
    assert "median duration of 3" in tables.numbers(found.kernels[0]).title


def test_every_number_has_its_grade_and_metric():
    (found,) = whole()
    for what, value, grade, source in tables.numbers(found.kernels[0]).rows:
        assert (grade in ("measured", "derived") and source) or value in ("n/a", "not collected"), what
    shown = {row[0]: row[1] for row in tables.numbers(found.kernels[0]).rows}
    assert shown["occupancy, theoretical"] == "12.5 % (by registers and SMEM)"
    assert shown["busiest other pipe"] == "22.8 % (xu)"
    assert shown["useful rate"] == "327 TFLOP/s"
    assert shown["stall: barrier"] == "26.9 % of warp time"
    assert shown["SM time: lost to imbalance"].startswith("19.0 % (")


def test_rules_come_with_estimate_and_without_link_marks():
    (found,) = analyse([real("h200_fwd_static")])
    table = tables.rules(found.kernels[0])
    assert [row[0] for row in table.rows[:2]] == ["Low Compression Rate", "Issue Slot Utilization"]
    assert table.rows[0][1] == "49.4 % (global)"
    assert not any(re.search("@(url|section|source|sass):", cell) for row in table.rows for cell in row)
    assert len(table.rows) < len(found.kernels[0].kernel.rules)  # infos are left to ncu
    assert tables.rules(hostile("x")[0].kernels[0]) is not None
    assert tables.rules(analyse([report((launch(), metrics({"duration": 1.0})))])[0].kernels[0]) is None


def test_notes_name_their_file_where_there_are_several():
    one, other = report((launch("a"), {}), path="a.csv", notes=("odd",)), report((launch("b"), {}), path="b.csv")
    assert tables.notes(analyse([one])) == ["odd"]
    assert tables.notes(analyse([one, other])) == ["a.csv: odd"]
    (line,) = tables.differences(analyse([other], baseline=report((launch("b"), {}), (launch("c"), {}), path="c.csv")))
    assert line == "only in the baseline: c"


def test_a_report_that_a_selection_leaves_nothing_of_is_named():
    one, other = report((launch("a"), {}), path="a.csv"), report((launch("b"), {}), path="b.csv")
    found = analyse([one, other], kernel="a")
    assert [findings.report.path for findings in found] == ["a.csv"]
    (note,) = tables.notes(found)
    assert "left out" in note and "b.csv; it holds b" in note


def test_kernels_beyond_the_first_few_are_counted():
    many = report(*((launch(f"k{i}"), metrics({"duration": 1e6})) for i in range(formats.DETAILED + 2)))
    (found,) = analyse([many])
    assert "2 shorter kernels" in formats.left_out(found)
    assert len(tables.overview(found).rows) == formats.DETAILED + 2
    assert formats.left_out(whole()[0]) == ""
    assert "2 shorter kernels" in formats.markdown([found]) and "2 shorter kernels" in formats.html([found])


# --- formats ------------------------------------------------------------------------------------


def test_every_format_says_the_verdict_and_the_metrics():
    found = whole()
    for name, make in MAKE.items():
        text = make(found)
        for expected in ("imbalanced", "latency-bound", "barrier"):
            assert expected in text, (name, expected)
        metric = "sm__cycles_active.max"
        assert metric in text.replace("\\_", "_"), name


def test_json_holds_every_number_with_unit_grade_and_source():
    read = json.loads(formats.as_json(whole()), parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))
    (one,) = read["reports"]
    (kernel,) = one["kernels"]
    assert one["writer"] == "2025.3.1.0" and "--set full" in one["command"]
    assert kernel["kernel"] == "jfa_forward" and kernel["grid"] == [132, 1, 1]
    assert kernel["numbers"]["duration"] == {
        "value": 2219136.0, "unit": "ns", "grade": "measured", "source": "gpu__time_duration.sum",
    }  # fmt: skip
    assert [verdict["kind"] for verdict in kernel["verdicts"]] == ["imbalanced", "latency-bound"]
    assert set(kernel["verdicts"][0]["evidence"]) == {"imbalance", "least_busy"}
    lost = kernel["tensor_time"]
    assert lost["tensor"] + lost["inside"] + lost["imbalance"] == pytest.approx(100)
    assert kernel["attention"]["useful_rate"]["unit"] == "1/s"
    (match,) = one["baseline"]["matches"]
    assert {delta["fact"] for delta in match["deltas"] if delta["differs"]} >= {"duration", "imbalance"}
    assert set(document(whole())) == {"reports"}


def test_csv_is_long_and_exact():
    found = whole()
    read = rows(formats.comma_separated(found))
    assert list(read[0]) == list(formats.CSV_COLUMNS)
    values = {row["fact"]: row for row in read}
    numbers = found[0].kernels[0].kernel.numbers
    assert {fact: float(values[fact]["value"]) for fact in numbers} == {f: n.value for f, n in numbers.items()}
    assert (values["duration"]["unit"], values["duration"]["grade"]) == ("ns", "measured")
    assert sum(row["fact"] == "verdict" for row in read) == 2
    assert float(values["sm_time: inside"]["value"]) == found[0].kernels[0].lost.inside
    (absent,) = (row for row in rows(formats.comma_separated(analyse([real("a10g_sgemm_ncu2023.1")])))
                 if row["kernel"] == "one_d_vec" and row["fact"] == "duration")  # fmt: skip
    assert (absent["value"], absent["source"]) == ("", "n/a")


def test_the_page_runs_no_script_and_loads_nothing():
    page = Tags(formats.html(whole()))
    assert {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe"} == set()
    (policy,) = (attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_what_a_kernel_is_called_stays_words(name):
    found = hostile(name)
    plain_page = Tags(formats.html(hostile("plain")))
    page = Tags(formats.html(found))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain_page.tags]
    text = formats.markdown(found)
    borders = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")]
    assert borders == [
        len(re.findall(r"(?<!\\)\|", line))
        for line in formats.markdown(hostile("plain")).splitlines()
        if line.startswith("|")
    ]
    assert not re.search(r"(?<!\\)[<`]", text)
    assert len(text.splitlines()) == len(formats.markdown(hostile("plain")).splitlines())
    read = rows(formats.comma_separated(found))
    assert len(read) == len(rows(formats.comma_separated(hostile("plain"))))
    assert all(None not in row and None not in row.values() for row in read)
    loaded = json.loads(formats.as_json(found))
    assert loaded["reports"][0]["kernels"][0]["kernel"] == name.encode("utf-8", "replace").decode()
    for name_of_format, make in MAKE.items():
        written = make(found).encode("utf-8").decode("utf-8")
        if name_of_format != "json":
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", written), name_of_format


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@given(
    st.lists(st.tuples(st.one_of(st.text(max_size=20), st.sampled_from(HOSTILE)), MADE), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=60)
def test_no_format_ever_fails(named, with_baseline):
    launches = [(launch(name, grid=made.grid, push_pop=made.push_pop), found) for name, (made, found) in named]
    found = analyse([report(*launches)], baseline=report(launches[-1]) if with_baseline else None)
    for name, make in MAKE.items():
        text = make(found)
        text.encode("utf-8")
        if name == "json":
            json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} in the JSON"))
        if name == "csv":
            assert {len(row) for row in csv.reader(io.StringIO(text, newline=""))} == {len(formats.CSV_COLUMNS)}


@pytest.mark.browser
def test_the_page_opens_and_hides_no_verdict(chromium, tmp_path):
    path = tmp_path / "ncu.html"
    path.write_text(formats.html([*whole(), *analyse([real("h200_all_basic")])]), encoding="utf-8")
    with browser(chromium, tmp_path / "profile") as page:
        page.open(path, until="true")
        assert page.errors == [] and page.blocked == []
        assert [url for url in page.requests if not url.startswith("file:")] == []
        assert page.evaluate("document.body.innerText").count("imbalanced, then latency-bound (barrier)") == 1
        assert page.evaluate("window.innerWidth") <= 1280
        assert page.evaluate("[...document.querySelectorAll('.table')].every(t => t.scrollWidth <= t.clientWidth)")
        bars = "[...document.querySelectorAll('.split i')].map(i => [i.clientWidth, i.parentElement.clientWidth])"
        widths = page.evaluate(bars)
        assert len(widths) > 20 and all(0 <= bar <= whole for bar, whole in widths)
        assert max(bar for bar, _ in widths) > 200
        path.write_text(formats.html([findings for name in HOSTILE for findings in hostile(name)]), encoding="utf-8")
        page.open(path, until="true")
        assert page.errors == []
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
