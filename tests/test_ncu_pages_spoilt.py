"""Nsight Compute's CSV pages in every encoding, and every way to spoil one."""

import json
import math
import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ncu_pages import REAL, details_page, line, raw_page, reader, refused, who

from profiling.errors import UserError
from profiling.ncu.pages import read_pages
from profiling.ncu.units import to_base


@pytest.fixture
def read(tmp_path):
    return reader(tmp_path)


# Encodings and what is no page


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_encodings(read, encoding, end):
    text = "==PROF== \u00fcber\n" + raw_page({"a__x": "us"}, [(who(kernel="größe"), ["1.50"])])
    report = read(text.replace("\n", end).encode(encoding))
    assert report.launches[0].kernel == "größe" and report.metrics[0]["a__x"].value == 1500


def test_latin_1_is_read_and_said(read):
    report = read(raw_page({"a__x": "us"}, [(who(kernel="größe"), ["1\xa0234,5"])]).encode("latin-1"))
    assert report.launches[0].kernel == "größe" and report.metrics[0]["a__x"].value == 1234500
    assert "bytes that are no UTF-8 read as Latin-1, the first on line 3" in report.notes


GOOD = raw_page({"a__x": "ns", "b__y": "%"}, [(who(), ["1", "2.50"]), (who("1"), ["3", "4.50"])])
HEADER = GOOD.splitlines(keepends=True)[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["the file is empty", "--csv --page raw"]),
        (b"\n \n", ["the file is empty"]),
        (HEADER, ["line 1", "no row under it"]),
        ("".join(GOOD.splitlines(keepends=True)[:2]), ["line 1", "no row under it"]),
        ("hello\nworld\n", ["no table of ncu", '"ID","Process ID"', "--csv --page raw"]),
        (b"\x89PNG\0\0\1\2", ["no text"]),
        (b"NVR\0\xff\xfe" + bytes(range(256)), ["no text"]),
        (json.dumps([{"ID": 1, "Process ID": 2}]), ["no table of ncu"]),
        ("".join(GOOD.splitlines(keepends=True)[2:]), ["line 1", "before any header"]),
        (GOOD[:-3], ["line 4, column 13", "a quote is left open"]),
        (GOOD.replace('"9.0","3"', '"9.0,"3"'), ["line 4", "a quote is left open, or text follows one"]),
        (GOOD.replace('"3",', ""), ["line 4", "12 columns under a header of 13"]),
        (GOOD.replace('"4.50"', '"4.50","5"'), ["line 4", "14 columns under a header of 13"]),
        (GOOD.replace('"a__x"', '""'), ["line 1", "column 12 of the header has no name"]),
        (GOOD.replace('"b__y"', '"a__x"'), ["line 3", "two columns are named a__x"]),
        (GOOD.replace('"4.50"', '"fast"'), ["line 4", "b__y", "'fast'", "its unit is %"]),
        (GOOD.replace("Kernel Name", "Name"), ["line 1", '"Kernel Name"']),
        (GOOD + GOOD.splitlines(keepends=True)[1].replace("ns", "us"), ["line 5", "second row of units"]),
        (details_page().replace("Metric Value", "Value") + "x", ["line 1", 'lacks the column "Metric Value"']),
        (details_page(line(*who(), "Section", "Duration", "us")), ["line 2", "14 columns", "a metric's has 15"]),
        (details_page(line(*who(), *"abcdefghij")), ["line 2", "21 columns under a header of 20"]),
        (details_page(line("", *who()[1:], "s", "Duration", "us", "1.5")) + GOOD, ["line 2", "under a header of 20"]),
        ('"Process ID","Kernel Name","Invocations","Metric Name","Minimum"\n', ["a summary"]),
        ('"#","Address","Source","Samples"\n', ["the source page"]),
        (GOOD.replace("kernel", "k" * 1_000_001), ["line 3, column 5", "1,000,0"]),
        ("==WARNING== No kernels were profiled.\n", ["nothing was profiled", "line 1", "--nvtx-include"]),
        (HEADER + "==WARNING== No kernels were profiled.\n", ["nothing was profiled", "line 2"]),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", ["no permission", "NVreg_Restrict", "root"]),
        ("==ERROR== The application returned an error code (3).\n", ["nothing was profiled", "error code (3)"]),
    ],
)
def test_what_is_no_page_is_refused(read, content, words):
    refused(read, content, *words)


def test_a_folder_or_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.csv"):
        with pytest.raises(UserError, match=str(path)):
            read_pages(path)


def test_ncu_errors_beside_rows_are_noted(read):
    report = read(GOOD + "==ERROR== The application returned an error code (3).\n")
    assert 'ncu reported: "==ERROR== The application returned an error code (3)." (line 5)' in report.notes
    assert any("ERR_NVGPUCTRPERM" in note for note in read(GOOD + "==ERROR== ERR_NVGPUCTRPERM\n").notes)


# Sizes and damage


def test_a_hundred_launches_of_two_thousand_metrics(read):
    drawn = random.Random(0)
    metrics = {
        f"unit__counter_{i:04}.sum.per_second_and_more": drawn.choice(["%", "us", "", "Kbyte"]) for i in range(2243)
    }
    rows = [(who(str(i)), [f"{drawn.uniform(0, 9e9):,.2f}" for _ in metrics]) for i in range(100)]
    page = raw_page(metrics, rows)
    start = time.process_time()
    report = read(page)
    assert time.process_time() - start < 5
    assert len(report.metrics) == 100 and all(len(found) == 2243 for found in report.metrics)


ROW = GOOD.splitlines(keepends=True)[2]


@pytest.mark.parametrize(
    "content",
    [
        '"' * 4_000_000,
        HEADER + '"' * 4_000_001,
        HEADER + '"0","1",' + '"' * 4_000_001,
        HEADER + '"0","1","' + '""' * 2_000_000,
        HEADER + '"",' * 1_500_000,
        HEADER + '"0",' * 1_000_000,
        HEADER + '"' + "0" * 4_000_000,
        '"ID",' * 1_000_000,
        "\n" * 4_000_000,
        HEADER + "," * 4_000_000,
        HEADER.replace('"', "") + "0,1" + "," * 4_000_000,
        HEADER + "".join(ROW.replace('"2.50"', f'"{i}.5"') for i in range(20_000)),
        GOOD.replace('"2.50"', '"' + "1," * 450_000 + '"'),
        GOOD.replace('"2.50"', '"' + "1 (" * 300_000 + ')"'),
        raw_page({"a__x": ""}, [(who(), ["3 (" + "1; " * 300_000 + "1)"])]),
    ],
    ids=lambda content: content[-12:],
)
def test_hostile_files_end_soon(read, content):
    start = time.process_time()
    try:
        read(content)
    except UserError as error:
        assert len(str(error)) < 1000
    assert time.process_time() - start < 5


@st.composite
def damaged(draw):
    """A real page with bytes flipped, lines moved, doubled or lost, or its end cut off."""
    content = draw(st.sampled_from(REAL)).read_bytes()
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["flip", "cut", "shuffle", "double", "drop", "paste"]))
        lines = content.splitlines(keepends=True)
        if kind == "cut":
            content = content[: draw(st.integers(0, len(content)))]
        elif kind == "flip" and content:
            at = draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=8))
            spoilt = bytearray(content)
            for index in at:
                spoilt[index] = draw(st.integers(0, 255) | st.sampled_from(list(b'",;.\n\t0')))
            content = bytes(spoilt)
        elif kind == "paste":
            at = draw(st.integers(0, len(content)))
            content = content[:at] + draw(st.sampled_from([b'"', b'\n"0","1",', HEADER.encode(), b"\0"])) + content[at:]
        elif lines:
            if kind == "shuffle":
                draw(st.randoms(use_true_random=False)).shuffle(lines)
            at = draw(st.integers(0, len(lines) - 1))
            if kind == "double":
                lines.insert(draw(st.integers(0, len(lines))), lines[at])
            if kind == "drop":
                del lines[at]
            content = b"".join(lines)
    return content


@given(damaged(), st.sampled_from([None, None, "point", "comma"]))
@settings(max_examples=150, deadline=5000, suppress_health_check=list(HealthCheck))
def test_a_damaged_page_is_read_or_refused(read, content, decimal):
    try:
        report = read(content, decimal=decimal)
    except UserError as error:
        assert "page.csv" in str(error)
        return
    assert len(report.launches) == len(report.metrics) == len(report.rules) > 0
    for found in report.metrics:
        for name, metric in found.items():
            assert metric.name == name
            assert to_base(1.0, metric.unit) == (1.0, metric.unit)
            assert metric.state != "ok" or metric.text or math.isfinite(metric.value)
    report.frame()
