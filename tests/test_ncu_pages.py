"""Nsight Compute's CSV pages: real ones with the values of their reports, and what cells and tables may look like."""

import csv
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ncu_pages import DATA, LAUNCH, NVTX, NVTX_IDS, details_page, line, metric_line, raw_page, reader, refused, who

from profiling.ncu.page_details import labels
from profiling.ncu.page_parts import nvtx_ranges
from profiling.ncu.pages import read_pages
from profiling.ncu.units import to_base

RAW, DETAILS = DATA / "fwd_basic.raw.csv", DATA / "fwd_basic.details.csv"


@pytest.fixture
def read(tmp_path):
    return reader(tmp_path)


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
