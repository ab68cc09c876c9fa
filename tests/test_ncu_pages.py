"""Nsight Compute's CSV pages: real ones with the values of the reports they came from, and every way to spoil one."""

import csv
import json
import math
import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profiling.errors import UserError
from profiling.ncu.page_details import labels
from profiling.ncu.page_parts import nvtx_ranges
from profiling.ncu.pages import read_pages
from profiling.ncu.report import Report
from profiling.ncu.units import to_base

DATA = Path(__file__).parent / "data" / "ncu" / "pages"
RAW, DETAILS = DATA / "fwd_basic.raw.csv", DATA / "fwd_basic.details.csv"
REAL = sorted(DATA.glob("*.csv"))
LAUNCH = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
LAUNCH += ["Block Size", "Grid Size", "Device", "CC"]
METRIC = ["Section Name", "Metric Name", "Metric Unit", "Metric Value"]
RULE = ["Rule Name", "Rule Type", "Rule Description", "Estimated Speedup Type", "Estimated Speedup"]
NVTX = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
NVTX_IDS = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


def line(*fields, separator=","):
    return separator.join('"' + field.replace('"', '""') + '"' for field in fields) + "\n"


def who(id="0", process="77", kernel="kernel", block="(256, 1, 1)", grid="(132, 1, 1)"):
    return [id, process, "python3", "127.0.0.1", kernel, "1", "7", block, grid, "0", "9.0"]


def raw_page(metrics, rows, *, separator=",", units=True):
    """A raw page: metrics as {name: unit}, rows as (launch columns, cells)."""
    text = line(*LAUNCH, *metrics, separator=separator)
    if units:
        text += line(*[""] * len(LAUNCH), *metrics.values(), separator=separator)
    return text + "".join(line(*launch, *cells, separator=separator) for launch, cells in rows)


def metric_line(launch, section, label, unit, value):
    return line(*launch, section, label, unit, value).rstrip("\n") + ",\n"


def details_page(*rows):
    return line(*LAUNCH, *METRIC, *RULE) + "".join(rows)


@pytest.fixture
def read(tmp_path):
    def read(content, **options) -> Report:
        path = tmp_path / "page.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_pages(path, **options)

    return read


def refused(read, content, *words, **options):
    """The one line that a bad file is answered with."""
    with pytest.raises(UserError) as error:
        read(content, **options)
    message = str(error.value)
    assert "page.csv" in message and "\n" not in message
    for word in words:
        assert word in message, message
    return message


# Real pages against the values of their reports


def printed(path):
    """{(section, name or label): (cell, unit)} of a raw or details page, read the plain way."""
    rows = list(csv.reader(path.open(encoding="utf-8")))
    header = rows[0]
    if "Metric Name" in header:
        at = [header.index(name) for name in ("Section Name", "Metric Name", "Metric Value", "Metric Unit")]
        return {(row[at[0]], row[at[1]]): (row[at[2]], row[at[3]]) for row in rows[1:] if row[at[1]]}
    return {("", name): (cell, unit) for name, unit, cell in zip(*rows, strict=True)}


def last_digit(cell, unit):
    """The size of a cell's last digit in base units."""
    decimals = len(cell.split(" ")[0].partition(".")[2])
    return to_base(10.0**-decimals, unit)[0]


@pytest.mark.parametrize(
    ("page", "values", "at_least"),
    [
        ("fwd_basic.raw.csv", "fwd_basic.values.json", 390),
        ("fwd_basic.details.csv", "fwd_basic.values.json", 49),
        ("fwd_basic_body.details.csv", "fwd_basic.values.json", 30),
        ("fwd_full.details.csv", "fwd_full.values.json", 80),
    ],
)
def test_pages_give_the_values_of_the_report_they_came_from(page, values, at_least):
    expected = json.loads((DATA / values).read_text())
    cells = printed(DATA / page)
    report = read_pages(DATA / page)
    compared = 0
    for name, metric in report.metrics[0].items():
        if name not in expected or metric.state != "ok":
            continue
        unit, value = expected[name]
        compared += 1
        if isinstance(value, str):
            assert metric.text == value
            continue
        cell, shown_unit = cells[metric.section, metric.label or name]
        assert metric.unit == unit, name
        assert abs(metric.value - value) <= 0.501 * last_digit(cell, shown_unit) + 1e-9 * abs(value), name
    assert compared >= at_least


def test_every_label_of_a_header_has_its_metric_or_is_kept():
    unknown = [name for name in read_pages(DATA / "fwd_full.details.csv").metrics[0] if " :: " in name]
    # These stand for different metrics in different versions, or for one that the report does not name
    assert unknown == [
        "PM Sampling :: Maximum Sampling Interval",
        "Compute Workload Analysis :: Issue Slots Busy",
        "Compute Workload Analysis :: SM Busy",
        "Memory Workload Analysis :: L2 Compression Ratio",
        "Memory Workload Analysis :: L2 Compression Input Sectors",
    ]
    assert " :: " not in "".join(read_pages(DETAILS).metrics[0])


def test_both_pages_of_one_report_are_one_launch(read):
    raw, details = RAW.read_text(), DETAILS.read_text()
    for content in (raw + details, details + raw):
        report = read(content)
        assert len(report.launches) == 1
        assert sorted(report.form.split(" and ")) == ["details page", "raw page"]
        assert len(report.rules[0]) == 3
        duration = report.metrics[0]["gpu__time_duration.sum"]
        assert (duration.label, duration.section) == ("Duration", "GPU Speed Of Light Throughput")
        # The raw page prints more digits
        assert duration.value == read_pages(RAW).metrics[0]["gpu__time_duration.sum"].value
        assert report.metrics[0].keys() == read_pages(RAW).metrics[0].keys()
        assert not any("launch" in note for note in report.notes)


def test_a_launch_is_described_by_its_columns():
    launch = read_pages(RAW).launches[0]
    assert (launch.id, launch.process, launch.kernel) == ("0", "962", "jfa_forward")
    assert (launch.grid, launch.block, launch.cluster) == ((132, 1, 1), (256, 1, 1), ())
    assert (launch.gpu, launch.capability) == ("NVIDIA H200", "9.0")
    name = "jfa_forward schedule=balanced-dynamic workload=hsp-loguniform heads=4 head_dim=128"
    assert launch.push_pop == (f"jfa:{name}",)
    assert launch.start_end == ()


def test_rules_are_read():
    rules = read_pages(DETAILS).rules[0]
    assert [(rule.name, rule.section, rule.kind) for rule in rules] == [
        ("SOLBottleneck", "SpeedOfLight", "optimization"),
        ("LaunchConfiguration", "LaunchStats", "optimization"),
        ("TheoreticalOccupancy", "Occupancy", "optimization"),
    ]
    assert math.isnan(rules[0].speedup_pct) and rules[0].speedup_scope == ""
    assert (rules[2].speedup_pct, rules[2].speedup_scope) == (87.5, "local")
    assert rules[0].message.startswith("This workload exhibits low compute throughput")


@pytest.mark.parametrize(
    ("kind", "expected"), [("OPT", "optimization"), ("WRN", "warning"), ("INF", "info"), ("ERR", "error")]
)
def test_rules_of_every_kind(read, kind, expected):
    rule = line(
        *who(), "SpeedOfLight", "", "", "", "Name", kind, 'See <a href="x">this</a>, "that"\nand', "global", "8.282"
    )
    found = read(details_page(rule)).rules[0][0]
    assert (found.kind, found.speedup_pct, found.speedup_scope) == (expected, 8.282, "global")
    assert found.message == 'See <a href="x">this</a>, "that"\nand'
    refused(read, details_page(rule.replace("8.282", "lots")), "line 2", "lots")


def test_a_log_file_with_metrics_asked_for_by_name(read):
    report = read_pages(DATA / "log_file.details.csv")
    assert len(report.launches) == 10
    assert report.metrics[0]["gpu__time_duration.sum"].value == 2880
    assert report.metrics[0]["gpu__time_duration.sum"].unit == "ns"
    assert report.notes[0].startswith('2 lines that belong to no table skipped, the first: "==PROF== Connected')
    assert "whole number" in report.notes[1]


# Where rows are


NOISE = ["==PROF== Profiling", 'said "hello", 3 times', "==WARNING== Note", "a,b,c", '"quoted"', '"1","x"', "0%....50%"]


def test_rows_are_found_whatever_stands_around_them(read):
    plain = read_pages(RAW)
    lines = RAW.read_text().splitlines(keepends=True)
    noisy = ["tool\n", "output without an end ", lines[0], "\n\nmore\n", lines[1], *(w + "\n" for w in NOISE), "x=1 "]
    report = read("".join([*noisy, lines[2], "bye"]))
    assert report.metrics == plain.metrics and report.launches == plain.launches
    assert report.notes[0] == f'{len(NOISE) + 5} lines that belong to no table skipped, the first: "tool" (line 1)'


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_noise_between_rows_changes_nothing(read, data):
    clean = (DATA / "log_file.details.csv").read_text().splitlines(keepends=True)[2:]
    noise = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters='"\0\ufeff'), max_size=30)
    parts = []
    for row in clean:
        parts += [data.draw(noise), row]
    report = read("".join(parts))
    assert report.metrics == read_pages(DATA / "log_file.details.csv").metrics


def test_tables_repeated_and_of_both_pages(read):
    first = raw_page({"a__x": "ns"}, [(who("0"), ["1"]), (who("1"), ["2"])])
    second = details_page(
        metric_line(who("1"), "Command line profiler metrics", "b__y", "us", "3"),
        metric_line(who("2"), "Command line profiler metrics", "b__y", "us", "4"),
    )
    again = first.splitlines(keepends=True)[0] + line(*who("3"), "9")
    report = read(first + second + first + again)
    assert [launch.id for launch in report.launches] == ["0", "1", "2", "3"]
    assert {name: metric.value for name, metric in report.metrics[1].items()} == {"a__x": 2, "b__y": 3000}
    assert report.form == "raw page and details page"
    assert "2 launches repeated in the file, read once" in report.notes
    assert any("no row of units" in note for note in report.notes)


@pytest.mark.parametrize(
    "other", [who(process="78"), who(kernel="other"), who(grid="(64, 1, 1)"), who(id="1"), who(block="(1, 1, 1)")]
)
def test_rows_of_another_launch_are_kept_apart(read, other):
    report = read(raw_page({"a__x": ""}, [(who(), ["1"]), (other, ["1"])]))
    assert len(report.launches) == 2


def test_a_table_that_contradicts_another_has_launches_of_its_own(read):
    one = raw_page({"a__x": "us", "b__y": ""}, [(who(), ["1.50", "7"])])
    assert [m["a__x"].value for m in read(one + one.replace("1.50", "1.51")).metrics] == [1500, 1510]
    named = "Command line profiler metrics"
    # 1.50 us is 1,504 ns within what was printed; 1,506 is not
    agrees = details_page(metric_line(who(), named, "a__x", "ns", "1,504"))
    assert [m["a__x"].value for m in read(one + agrees).metrics] == [1504]
    clashes = read(one + agrees.replace("1,504", "1,506"))
    assert [m["a__x"].value for m in clashes.metrics] == [1500, 1506]
    assert any("launches of their own" in note for note in clashes.notes)


@pytest.mark.parametrize("separator", [";", "\t"])
@pytest.mark.parametrize("quoted", [True, False])
def test_tables_that_a_spreadsheet_saved(read, separator, quoted):
    kernel = "f<int, float>(T1)"
    page = raw_page({"a__x": "%", "b__y": "us"}, [(who(kernel=kernel), ["65,77", "1.234,5"])], separator=separator)
    report = read(page if quoted else "noise\n" + page.replace('"', ""))
    assert report.launches[0].kernel == kernel
    assert report.metrics[0]["a__x"].value == 65.77 and report.metrics[0]["b__y"].value == 1234500
    assert any("separated by" in note for note in report.notes)


@pytest.mark.parametrize(
    "kernel",
    [
        "f<int, float>(T1, T2)",
        'say "hello", "0","1234",',
        "copy_blocked[v1,cw51](Array<long long, 1>)",
        "void at::<unnamed>::kernel<T[2]>",
        "<b>bold</b>",
        "two\nlines\n",
        "große Straße 核",
        "x" * 100_000,
        '"',
        '"","","","","","","","",""',
    ],
)
def test_kernel_names_of_every_kind(read, kernel):
    report = read(raw_page({"a__x": ""}, [(who(kernel=kernel), ["1"]), (who("1"), ["2"])]))
    assert [launch.kernel for launch in report.launches] == [kernel, "kernel"]


# NVTX


@pytest.mark.parametrize(
    ("cell", "numbered", "expected"),
    [
        ("", False, ()),
        ('962  "jfa:f a=1:none:none:RGB:0xff:REGISTERED:f a=1" ', False, ("jfa:f a=1",)),
        ('590  "<default domain>:fwd:none:none:none:none:none:none" ', False, ("<default domain>:fwd",)),
        (
            '1  "<default domain>:step:none:none:none:none:none:none"  "lib:op: x:y:none:none:none:none:none:none" ',
            False,
            ("<default domain>:step", "lib:op: x:y"),
        ),
        ('7  "d:a:b:c:INT64:3:ARGB:0x1:ASCII:a:b:c" ', False, ("d:a:b:c",)),
        ('7  "d:say "hi" now:none:none:RGB:0x1:ASCII:say "hi" now" ', False, ('d:say "hi" now',)),
        ('"3:<default domain>:whole:none:none:none:none:none:none" ', True, ("<default domain>:whole",)),
        ('"3:d:whole:none:none:RGB:0:ASCII:whole" ', True, ("d:whole",)),
        ("odd text", False, ("odd text",)),
        ('1 "odd:text"', False, ("odd:text",)),
    ],
)
def test_nvtx_ranges(cell, numbered, expected):
    assert nvtx_ranges(cell, numbered=numbered) == expected


def test_nvtx_columns_of_a_table(read):
    header = [*LAUNCH[:4], NVTX, NVTX_IDS, *LAUNCH[4:], "a__x"]
    launch = who()
    cells = [*launch[:4], '9  "d:m:none:none:none:none:none:none" ', '"4:e:n:none:none:none:none:none:none" ']
    report = read(line(*header) + line(*[""] * (len(header) - 1), "ns") + line(*cells, *launch[4:], "5"))
    assert (report.launches[0].push_pop, report.launches[0].start_end) == (("d:m",), ("e:n",))
    assert list(report.metrics[0]) == ["a__x"] and report.notes == ()


# Units, labels, cells


def test_cells_of_the_unit_row_may_be_empty(read):
    found = read(raw_page({"a__x": "", "b__y": "ms", "c__z": ""}, [(who(), ["1", "2", "3.5"])])).metrics[0]
    assert [(m.value, m.unit) for m in found.values()] == [(1, ""), (2e6, "ns"), (3.5, "")]


def test_without_a_unit_row_units_are_unknown(read):
    report = read(raw_page({"a__x.pct": "", "b__y": "ms"}, [(who(), ["1", "2"])], units=False))
    assert [(m.value, m.unit) for m in report.metrics[0].values()] == [(1, "%"), (2, "")]
    assert "no row of units" in report.notes[0]


def test_empty_cells_and_cells_without_a_value(read):
    metrics = {"everywhere__x": "%", "some__x": "%", "none__x": "us", "na__x": "inst"}
    report = read(raw_page(metrics, [(who(), ["1", "", "", "n/a"]), (who("1"), ["2", "3", "", "no data"])]))
    assert [m["none__x"].state for m in report.metrics] == ["missing"] * 2
    assert report.metrics[0]["none__x"].unit == "ns"
    assert "some__x" not in report.metrics[0] and report.metrics[1]["some__x"].value == 3
    assert [m["na__x"].state for m in report.metrics] == ["n/a"] * 2
    states = report.frame().set_index(["launch", "metric"])["state"]
    assert states[0, "some__x"] == "missing" and states[1, "some__x"] == "ok"


def test_texts_are_kept_and_lists_of_tpcs_are_no_numbers(read):
    metrics = {"launch__tpc_enabled": "", "launch__func_cache_config": "", "x__flag": "", "x__hex": "", "y__v": "%"}
    found = read(raw_page(metrics, [(who(), ["0,1", "CachePreferShared", "true", "0x1F", "1.50"])])).metrics[0]
    assert [m.text for m in found.values()] == ["0,1", "CachePreferShared", "true", "0x1F", ""]


def test_instanced_cells(read):
    text = metric_line(who(), "Command line profiler metrics", "a__x", "Kbyte", "3.50 (16: 1.25; 32: 2.25)")
    report = read(details_page(text))
    assert report.metrics[0]["a__x"].value == 3500 and report.metrics[0]["a__x"].instances == 2
    assert report.instances == {(0, "a__x"): ([16, 32], [1250, 2250])}
    body = read_pages(DATA / "fwd_basic_body.details.csv")
    ids, values = body.instances[0, "launch__occupancy_per_register_count"]
    assert ids == list(range(len(values))) and sum(values) == 2056


def test_one_label_with_several_values_is_not_guessed():
    report = read_pages(DATA / "fwd_basic_body.details.csv")
    base = "GPU and Memory Workload Distribution :: SM Active Cycles"
    names = [base, f"{base} (2)", f"{base} (3)", f"{base} (4)"]
    assert [report.metrics[0][name].value for name in names] == [3212367.2, 3229746, 3196486, 424032471]
    assert any("numbered in the order of the file" in note for note in report.notes)


@pytest.mark.parametrize(
    ("label", "name", "shown"),
    [
        ("Duration", "gpu__time_duration.sum", "Duration"),
        ("gpu__time_duration.sum", "gpu__time_duration.sum", ""),
        ("Duration (gpu__time_duration.sum)", "gpu__time_duration.sum", "Duration"),
        ("Duration gpu__time_duration.sum", "gpu__time_duration.sum", "Duration"),
        ("Time of Day", "GPU Speed Of Light Throughput :: Time of Day", "Time of Day"),
    ],
)
def test_labels_names_or_both(read, label, name, shown):
    report = read(details_page(metric_line(who(), "GPU Speed Of Light Throughput", label, "us", "1.50")))
    ((found, metric),) = report.metrics[0].items()
    assert (found, metric.label, metric.section) == (name, shown, "GPU Speed Of Light Throughput")


def test_labels_are_whole():
    assert sum(map(len, labels().values())) > 150
    assert all("__" in name or name == "inst_executed" for names in labels().values() for name in names.values())
    assert "SM Busy" not in labels()["Compute Workload Analysis"]


def test_cluster_grid_and_gpu_from_metrics(read):
    names = [f"launch__{what}_dim_{axis}" for what in ("cluster", "grid", "block") for axis in "xyz"]
    metrics = dict.fromkeys([*names, "device__attribute_display_name"], "")
    cells = ["2", "1", "1", "16", "2", "1", "128", "1", "1", "NVIDIA B200"]
    launch = read(raw_page(metrics, [(who(block="", grid=""), cells)])).launches[0]
    assert (launch.cluster, launch.grid, launch.block) == ((2, 1, 1), (16, 2, 1), (128, 1, 1))
    assert launch.gpu == "NVIDIA B200"
    for none in (["0"] * 3, ["1"] * 3):
        assert read(raw_page(metrics, [(who(), none + cells[3:])])).launches[0].cluster == ()


@pytest.mark.parametrize("text", ["(1024, 2, 1)", "(1024,2,1)", "(1.024, 2, 1)", "(1,024, 2, 1)", "1024 x 2 x 1"])
def test_shapes(read, text):
    assert read(raw_page({"a__x": ""}, [(who(grid=text), ["1"])])).launches[0].grid == (1024, 2, 1)
    refused(read, raw_page({"a__x": ""}, [(who(grid="(large)"), ["1"])]), "line 3", "(large)")


# Locales


def german(text):
    """The page as a German locale prints it."""
    swap = str.maketrans(".,", ",.")
    rows = list(csv.reader(text.splitlines()))
    value = rows[0].index("Metric Value")
    for row in rows[1:]:
        row[value] = row[value].translate(swap)
    return "".join(line(*row) for row in rows)


@pytest.mark.parametrize("path", [DETAILS, DATA / "fwd_full.details.csv"], ids=lambda path: path.name)
def test_a_page_of_another_locale_gives_the_same_numbers(read, path):
    plain, foreign = read_pages(path), read(german(path.read_text()))
    assert foreign.metrics == plain.metrics
    assert any('decimal comma: "3,20" (line 2' in note for note in foreign.notes)
    assert read(german(path.read_text()), decimal="comma").metrics == plain.metrics
    refused(read, german(path.read_text()), "line 2", "3,20", "--decimal comma", decimal="point")


def test_a_duration_of_a_german_machine(read):
    metrics = {"gpu__time_duration.sum": "ns", "sm__throughput.avg.pct_of_peak_sustained_elapsed": "%"}
    report = read(raw_page(metrics, [(who(), ["117.344", "65,77"])]))
    assert report.metrics[0]["gpu__time_duration.sum"].value == 117344
    assert '"65,77" (line 3' in report.notes[0]


def test_numbers_that_nothing_decides(read):
    page = raw_page({"dram__bytes.sum.per_second": "byte/s"}, [(who(), ["117.344"])])
    refused(read, page, '"117.344" (line 3', "--decimal point or --decimal comma")
    assert read(page, decimal="comma").metrics[0]["dram__bytes.sum.per_second"].value == 117344
    assert read(page, decimal="point").metrics[0]["dram__bytes.sum.per_second"].value == 117.344


def test_threads_are_grid_times_block(read):
    metrics = {"launch__thread_count": "thread", "x__y": "byte/s"}
    found = read(raw_page(metrics, [(who(block="(1000, 1, 1)", grid="(128, 1, 1)"), ["128,000", "2,345"])])).metrics[0]
    assert (found["launch__thread_count"].value, found["x__y"].value) == (128000, 2345)
    found = read(raw_page(metrics, [(who(block="(1, 1, 1)", grid="(128, 1, 1)"), ["128,000", "2,345"])])).metrics[0]
    assert (found["launch__thread_count"].value, found["x__y"].value) == (128, 2.345)


def test_two_locales_in_one_file(read):
    point, comma = (raw_page({"a__x": "%"}, [(who(i), [cell])]) for i, cell in (("0", "65.77"), ("1", "65,77")))
    refused(read, point + comma, "line 3", "line 6", "separate the files")


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
    start = time.perf_counter()
    report = read(page)
    assert time.perf_counter() - start < 5
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
    start = time.perf_counter()
    try:
        read(content)
    except UserError as error:
        assert len(str(error)) < 1000
    assert time.perf_counter() - start < 5


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
