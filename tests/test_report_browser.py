"""The report in headless Chromium with the network cut: figures are drawn, nothing is complained of, nothing leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from browser import browser
from synthetic import synthetic_recording
from test_report import HOSTILE, made, with_metadata

from profiling.figures import occupancy_comparison
from profiling.page import write_figures
from profiling.report import write_report
from profiling.sm_time import occupancy

pytestmark = pytest.mark.browser

DRAWN = "document.querySelectorAll('.plot > .plot-container .main-svg:first-child').length"


@pytest.fixture(scope="module")
def open_page(chromium, tmp_path_factory):
    """A function that opens a file in one Chromium and gives the page, its notes begun anew, and the seconds."""
    with browser(chromium, tmp_path_factory.mktemp("chromium") / "profile") as page:

        def opened(path: Path, **until: str):
            page.forget()
            return page, page.open(path, **until)

        yield opened


def test_the_report_draws_every_figure_offline_without_a_complaint(open_page, tmp_path):
    index = write_report([made("static"), made("balanced-dynamic"), made("static", direction="backward")], tmp_path)
    page, _ = open_page(index)
    expected = page.evaluate("document.querySelectorAll('.plot').length")
    assert expected == 3 * 5 + 2
    assert page.evaluate(DRAWN) == expected
    assert page.errors == []
    assert {url.split(":")[0] for url in page.requests} <= {"file", "data", "blob"}
    assert sorted(Path(url).name for url in page.requests if url.startswith("file:")) == ["index.html", "plotly.min.js"]
    # What was drawn has a size, a heatmap's pixels, and bars.
    assert page.evaluate(
        "[...document.querySelectorAll('.plot')].every(p => p.clientHeight > 150 && p.clientWidth > 700)"
    )
    assert page.evaluate("document.querySelectorAll('.heatmaplayer image').length") == 3 + 2
    assert page.evaluate("document.querySelectorAll('.barlayer .point path').length") > 100


def test_no_table_hides_a_column_on_a_laptop(open_page, tmp_path):
    lengths = [int(16 * 1.02**i) for i in range(300)]
    recordings = [synthetic_recording(256, lengths, sms=132, schedule=s) for s in ("static", "balanced-dynamic")]
    page, _ = open_page(write_report(recordings, tmp_path))
    assert page.evaluate("window.innerWidth") <= 1280
    assert page.evaluate("[...document.querySelectorAll('.table')].every(t => t.scrollWidth <= t.clientWidth)")


def test_the_report_opens_at_once_and_draws_the_rest_later(open_page, tmp_path):
    lengths = [int(16 * 1.02**i) for i in range(300)]
    schedules = ("static", "balanced", "dynamic", "balanced-dynamic") * 4
    recordings = [synthetic_recording(256, lengths, sms=132, schedule=s, heads=4) for s in schedules]
    page, seconds = open_page(write_report(recordings, tmp_path), until=f"{DRAWN} > 0")
    paint = page.evaluate("performance.getEntriesByType('paint')[0].startTime")
    assert paint < 2000
    assert seconds < 10  # two seconds on a machine at rest; this guards against drawing all 82 before showing one
    assert page.evaluate(DRAWN) < 82


def test_hostile_text_does_nothing(open_page, tmp_path):
    hostile = with_metadata(made(name=HOSTILE), kernel__name=HOSTILE, gpu__name=HOSTILE, command=HOSTILE, grade=HOSTILE)
    page, _ = open_page(write_report([hostile, with_metadata(hostile, kernel__schedule=HOSTILE)], tmp_path))
    assert page.errors == []
    assert page.evaluate("document.querySelectorAll('img, .plot a, .plot script').length") == 0
    titles = page.evaluate("[...document.querySelectorAll('.gtitle-subtitle')].map(e => e.textContent).join()")
    assert "<script>alert(1)</script>" in titles  # shown as text, not hidden
    assert page.evaluate("document.querySelector('h2 ~ h2').textContent").count("alert(1)") == 1


def test_no_button_of_a_figure_sends_it_anywhere(open_page, tmp_path):
    page, _ = open_page(write_report([made()], tmp_path))
    buttons = page.evaluate("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title || '').join('|')")
    assert "Download" in buttons
    assert "Share" not in buttons
    assert page.evaluate("document.querySelectorAll('.modebar a[href^=http]').length") == 0


def test_hovering_a_heatmap_tells_the_sm_and_its_share(open_page, tmp_path):
    page, _ = open_page(write_report([made()], tmp_path))
    area = "document.querySelector('.plot .nsewdrag')"
    page.evaluate(f"{area}.scrollIntoView({{behavior: 'instant'}})")
    box = page.evaluate(f"{area}.getBoundingClientRect().toJSON()")
    for x in (0.4, 0.5):  # a pointer that moves
        place = {"x": box["x"] + x * box["width"], "y": box["y"] + 2.5 / 6 * box["height"]}
        page.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
    said = page.evaluate(
        "new Promise(done => setTimeout(() => done(document.querySelector('.plot .hoverlayer').textContent), 500))"
    )
    assert "SM 2 at" in said
    assert "% of the bin" in said


def test_a_single_file_of_figures_works_by_itself(open_page, tmp_path):
    found = [occupancy(made(schedule)) for schedule in ("static", "balanced-dynamic")]
    page, _ = open_page(write_figures(occupancy_comparison(found), tmp_path / "compare.html"))
    assert page.evaluate(DRAWN) == 1
    assert page.evaluate("document.querySelectorAll('.heatmaplayer image').length") == 2
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_a_figure_that_cannot_be_drawn_says_so_and_spares_the_others(open_page, tmp_path):
    index = write_report([made()], tmp_path)
    source = index.read_text(encoding="utf-8")
    index.write_text(
        source.replace('id="recording-1-figure-2-data">{', 'id="recording-1-figure-2-data">{{', 1), encoding="utf-8"
    )
    page, _ = open_page(index)
    assert page.evaluate(DRAWN) == 4
    assert "could not be drawn" in page.evaluate("document.getElementById('recording-1-figure-2').textContent")
    assert len(page.errors) == 1


def test_the_checks_above_would_see_a_request_and_a_script(open_page, tmp_path):
    """The harness itself: a page that does what a report must not is caught, and gets nowhere."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<img src='http://example.com/x.png'><script>alert(1); throw Error('boom')</script>", encoding="utf-8"
    )
    page, _ = open_page(bad, until="true")
    page.evaluate("new Promise(done => setTimeout(done, 300))")
    assert "http://example.com/x.png" in page.requests
    assert any("alert" in line or "dialog: 1" in line for line in page.errors)
    assert any("boom" in line for line in page.errors)
    assert any("ERR_" in line for line in page.errors)


def test_the_policy_stops_what_escaping_would_miss(open_page, tmp_path):
    index = write_report([made()], tmp_path)
    source = index.read_text(encoding="utf-8")
    smuggled = "<script>document.title = 'owned'</script><img src='http://example.com/x.png'>"
    index.write_text(source.replace("</h1>", "</h1>" + smuggled, 1), encoding="utf-8")
    page, _ = open_page(index)
    assert page.evaluate("document.title") != "owned"
    assert page.blocked == ["http://example.com/x.png"]
    assert sum("Content Security Policy" in line for line in page.errors) == 2


def test_the_readmes_picture_is_made_from_recordings(chromium, repository, tmp_path):
    paths = [tmp_path / f"{schedule}.parquet" for schedule in ("static", "balanced-dynamic")]
    for path in paths:
        made(path.stem).write(path)
    picture = tmp_path / "picture.png"
    command = [sys.executable, "docs/make_pictures.py", *map(str, paths), "-o", str(picture)]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(header[16:20]) == 1600
    assert 20_000 < picture.stat().st_size <= 300_000  # a blank page would have a few thousand bytes
    failed = subprocess.run(
        [*command[:2], "none.parquet"], cwd=repository, env=environment, capture_output=True, text=True
    )
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: none.parquet")
    assert len(failed.stderr.splitlines()) == 1
