""".ncu-rep files: everything that NVIDIA's reader has of them arrives; what is damaged is one line and never a hang."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ncu_kernels import blocks, file, real, repeated
from ncu_reports import NAMES, OURS, needs_reader

from profiling.errors import UserError
from profiling.ncu import binary, container, native, reading
from profiling.ncu.reading import load, read, read_all
from profiling.ncu.report import COLUMNS, MISSING, NOT_AVAILABLE, NOT_COLLECTED, OK

REPORTS = [name.removesuffix(".ncu-rep") for name in NAMES]
SMALL = "gtx1660ti_divergence_ncu2022.4"

# launches, GPU, capability, the writer's version, and the first launch: kernel, grid, block, its NVTX range
KNOWN = {
    "a100_cutlass_ncu2024.1": (
        3, "NVIDIA A100 80GB PCIe", "8.0", "2024.1.1.0", "Kernel", (24, 4, 1), (128, 1, 1),
        ("<default domain>:Non-fused-GEMM",),
    ),
    "a10g_sgemm_ncu2023.1": (6, "NVIDIA A10G", "8.6", "2023.1.1.0", "basic", (32, 32, 1), (32, 32, 1), ()),
    SMALL: (4, "NVIDIA GeForce GTX 1660 Ti", "7.5", "2022.4.0.0", "warmingUp", (1, 1, 1), (64, 1, 1), ()),
    "h200_all_basic": (
        24, "NVIDIA H200", "9.0", "2025.3.1.0", "_costs", (8, 1, 1), (128, 1, 1),
        ("jfa:jfa_table schedule=balanced-dynamic workload=hsp-loguniform",),
    ),
    "h200_bwd_sections": (
        1, "NVIDIA H200", "9.0", "2025.3.1.0", "jfa_backward", (132, 1, 1), (256, 1, 1),
        ("jfa:jfa_backward schedule=balanced-dynamic workload=hsp-loguniform heads=4 head_dim=128",),
    ),
    "h200_cudnn": (
        1, "NVIDIA H200", "9.0", "2025.3.1.0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        (132, 1, 1), (384, 1, 1), ("peer:cudnn_attention",),
    ),
    "h200_fwd_basic": (
        1, "NVIDIA H200", "9.0", "2025.3.1.0", "jfa_forward", (132, 1, 1), (256, 1, 1),
        ("jfa:jfa_forward schedule=balanced-dynamic workload=hsp-loguniform heads=4 head_dim=128",),
    ),
    "h200_fwd_static": (
        1, "NVIDIA H200", "9.0", "2025.3.1.0", "jfa_forward", (132, 1, 1), (256, 1, 1),
        ("jfa:jfa_forward schedule=static workload=hsp-loguniform heads=4 head_dim=128",),
    ),
    "rtx2080ti_reduce_ncu2022.3": (
        2, "NVIDIA GeForce RTX 2080 Ti", "7.5", "2022.3.0.0", "kernel_A", (256000, 1, 1), (64, 1, 1), (),
    ),
}  # fmt: skip


WALK = """
import json, sys
import ncu_report
as_is = {ncu_report.IMetric.ValueKind_STRING: "as_string", ncu_report.IMetric.ValueKind_UINT64: "as_uint64"}
context, found = ncu_report.load_report(sys.argv[1]), []
for part in (context.range_by_idx(i) for i in range(context.num_ranges())):
    for action in (part.action_by_idx(i) for i in range(part.num_actions())):
        metrics = {}
        for name in action.metric_names():
            metric = action.metric_by_name(name)
            read, ids = getattr(metric, as_is.get(metric.kind(), "as_double")), None
            if metric.has_correlation_ids() and metric.correlation_ids().kind() != ncu_report.IMetric.ValueKind_STRING:
                ids = [metric.correlation_ids().as_uint64(i) for i in range(metric.num_instances())]
            instances = [read(i) for i in range(metric.num_instances())]
            value = read() if metric.has_value() else None
            metrics[name] = value, metric.unit() or "", metric.label() or "", instances, ids
        found.append([action.name(), metrics])
json.dump(found, sys.stdout)
"""


@functools.cache
def actions(name: str):
    """Every launch as NVIDIA's reader gives it: name and {metric: (value, unit, label, instances, their ids)}.

    In a process of its own: one that opens several reports is given units of the wrong one.
    """
    needs_reader()
    words = [sys.executable, "-c", WALK, str(file(f"{name}.ncu-rep"))]
    return json.loads(subprocess.run(words, capture_output=True, check=True, text=True).stdout)


@functools.cache
def small() -> bytes:
    return file(f"{SMALL}.ncu-rep").read_bytes()


def one_line(what, *arguments, **options) -> str:
    """The message of the UserError that a call ends with."""
    with pytest.raises(UserError) as raised:
        what(*arguments, **options)
    message = str(raised.value)
    assert message and "\n" not in message and "Traceback" not in message
    return message


# --- everything arrives -------------------------------------------------------------------------


def test_every_report_of_the_test_data_is_known_here():
    assert set(KNOWN) == set(REPORTS)


@pytest.mark.parametrize("name", REPORTS)
def test_every_metric_of_every_launch_arrives_as_the_reader_gives_it(name):
    launches, found = actions(name), real(name)
    assert len(found.launches) == len(launches) > 0
    seen = Counter()
    for (kernel, theirs), launch, mine in zip(launches, found.launches, found.metrics, strict=True):
        assert launch.kernel == kernel
        assert set(mine) == set(theirs)
        for metric, (value, unit, label, instances, _) in theirs.items():
            got = mine[metric]
            assert (got.name, got.unit, got.label, got.instances) == (metric, unit, label, len(instances))
            if value is None:
                assert (got.state, got.text) == (NOT_AVAILABLE, "") and math.isnan(got.value)
            elif isinstance(value, str):
                assert (got.state, got.text) == (OK, value) and math.isnan(got.value)
            elif value != value:
                assert (got.state, got.text) == (NOT_AVAILABLE, "") and math.isnan(got.value)
            else:
                assert (got.state, got.value, got.text) == (OK, value, "")
            seen[type(value)] += 1
    assert seen[float] > 50 and seen[int] > 50 and seen[str] > 0


@pytest.mark.parametrize("name", REPORTS)
def test_launch_shapes_gpu_and_writer(name):
    count, gpu, capability, writer, kernel, grid, block, ranges = KNOWN[name]
    found = real(name)
    assert len(found.launches) == count
    assert found.writer == writer
    assert "/ncu " in found.command
    first = found.launches[0]
    assert (first.kernel, first.grid, first.block, first.cluster) == (kernel, grid, block, ())
    assert {launch.gpu for launch in found.launches} == {gpu}
    assert {launch.capability for launch in found.launches} == {capability}
    assert first.push_pop == ranges
    assert first.start_end == ()
    assert [launch.id for launch in found.launches] == [str(i) for i in range(count)]
    assert found.notes == ()
    assert len(found.rules) == count


@pytest.mark.parametrize("name", ["h200_cudnn", "a100_cutlass_ncu2024.1", SMALL])
def test_values_of_instanced_metrics_come_when_they_are_asked_for(name):
    assert real(name).instances == {}
    found = real(name, instances=True)
    asked = 0
    for index, (_, theirs) in enumerate(actions(name)):
        for metric, (_, _, _, instances, expected) in theirs.items():
            if not instances:
                assert (index, metric) not in found.instances
                continue
            ids, values = found.instances[index, metric]
            assert repr(values) == repr(instances if isinstance(instances[0], str) else [float(v) for v in instances])
            assert ids == (list(range(len(instances))) if expected is None else expected)
            asked += len(instances)
    assert asked > 0
    assert repr(found.metrics) == repr(real(name).metrics)


def test_a_launch_that_the_gpu_gave_no_counters_of_keeps_what_it_has():
    found = real("a10g_sgemm_ncu2023.1")
    last = found.metrics[-1]
    assert found.launches[-1].kernel == "one_d_vec"
    assert last["gpu__time_duration.sum"].state == NOT_AVAILABLE
    assert last["device__attribute_multiprocessor_count"].value == 80
    assert found.launches[-1].grid == ()


def test_nvtx_ranges_of_both_kinds_come_with_their_domain():
    def domain(name, push_pop, start_end):
        return SimpleNamespace(name=lambda: name, push_pop_ranges=lambda: push_pop, start_end_ranges=lambda: start_end)

    domains = [
        domain("jfa", ["outer", "inner"], ["window"]),
        domain(None, ["other"], ["unnamed"]),
        domain("empty", [], []),
    ]
    state = SimpleNamespace(domains=lambda: range(3), domain_by_id=lambda i: domains[i])
    assert native._nvtx(SimpleNamespace(nvtx_state=lambda: state)) == (
        ["jfa:outer", "jfa:inner", ":other"],
        ["jfa:window", ":unnamed"],
    )
    assert native._nvtx(SimpleNamespace(nvtx_state=lambda: None)) == ([], [])


def test_several_readers_give_what_one_gives(monkeypatch):
    whole = real("h200_all_basic")
    monkeypatch.setattr(binary, "LAUNCHES_PER_READER", 6)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    parts = read(file("h200_all_basic.ncu-rep"))
    assert parts.launches == whole.launches
    assert repr(parts.metrics) == repr(whole.metrics)
    assert repr(parts.rules) == repr(whole.rules)


def test_a_launch_repeated_in_the_file_is_a_launch_more(tmp_path):
    needs_reader()
    path = tmp_path / "twice.ncu-rep"
    path.write_bytes(repeated(SMALL, 2))
    found = read(path)
    assert len(found.launches) == 6
    assert repr(found.metrics[-1]) == repr(real(SMALL).metrics[-1])


# --- the tidy table -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h200_all_basic", "a10g_sgemm_ncu2023.1", "rtx2080ti_reduce_ncu2022.3"])
def test_the_table_has_a_row_per_launch_and_metric(name):
    found = real(name)
    table = load(file(f"{name}.ncu-rep"))
    assert tuple(table.columns) == COLUMNS
    assert table["value"].dtype == np.float64
    assert {str(table[column].dtype) for column in ("range", "launch", "instances")} == {"int64"}
    for column in ("report", "writer", "kernel", "gpu", "metric", "text", "unit", "state", "label", "section"):
        assert isinstance(table[column].dtype, pd.CategoricalDtype), column
    assert not table.duplicated(["launch", "metric"]).any()
    assert table.groupby("launch", observed=True).size().nunique() == 1
    assert set(table["state"]) <= {OK, NOT_AVAILABLE, MISSING, NOT_COLLECTED}
    held = table[~table["state"].isin([MISSING, NOT_COLLECTED])]
    assert len(held) == sum(map(len, found.metrics))
    for launch in (0, len(found.launches) - 1):
        rows = held[held["launch"] == launch]
        assert dict(zip(rows["metric"], rows["value"].map(repr), strict=True)) == {
            metric: repr(mine.value) for metric, mine in found.metrics[launch].items()
        }
        assert list(rows["kernel"].unique()) == [found.launches[launch].kernel]
    assert table.loc[table["state"] != OK, "value"].isna().all()
    assert table.loc[table["text"] != "", "value"].isna().all()


def test_what_a_launch_lacks_is_missing_and_what_no_launch_has_is_not_collected():
    needs_reader()
    table = load(file("a10g_sgemm_ncu2023.1.ncu-rep"))
    missing = table[table["state"] == MISSING]
    assert set(missing["launch"]) == {5}
    assert len(missing) == 281 - 247
    like = table[(table["metric"] == missing["metric"].iloc[0]) & (table["launch"] == 0)].iloc[0]
    assert (missing["unit"].iloc[0], missing["label"].iloc[0]) == (like["unit"], like["label"])
    nowhere = table[table["state"] == NOT_COLLECTED]
    assert "dram__bytes.sum.per_second" in set(nowhere["metric"])
    assert set(nowhere["launch"]) == set(range(6))
    assert not set(nowhere["metric"]) & {name for metrics in real("a10g_sgemm_ncu2023.1").metrics for name in metrics}


def test_a_folder_is_one_table_and_counts_a_report_with_its_pages_once(tmp_path):
    needs_reader()
    for name in ("h200_all_basic", "h200_fwd_static"):
        for ending in ("ncu-rep", "raw.csv", "details.csv"):
            shutil.copy(file(f"{name}.{ending}"), tmp_path)
    shutil.copy(file(f"{SMALL}.ncu-rep"), tmp_path)
    (tmp_path / "notes.txt").write_text("nothing of ncu\n")
    reports = read_all([tmp_path])
    assert [os.path.basename(report.path) for report in reports] == [
        f"{SMALL}.ncu-rep", "h200_all_basic.ncu-rep", "h200_fwd_static.ncu-rep",
    ]  # fmt: skip
    notes = reports[0].notes
    assert sum("in another form" in note for note in notes) == 4
    assert all(".ncu-rep in another form" in note for note in notes if "in another form" in note)
    assert sum("notes.txt" in note for note in notes) == 1
    table = load(tmp_path)
    assert tuple(table.columns) == COLUMNS
    assert isinstance(table["metric"].dtype, pd.CategoricalDtype)
    assert table.groupby("report", observed=True)["launch"].nunique().to_dict() == {
        report.path: len(report.launches) for report in reports
    }


def test_of_two_pages_of_one_report_the_fuller_one_counts(tmp_path):
    for ending in ("raw.csv", "details.csv"):
        shutil.copy(file(f"h200_cudnn.{ending}"), tmp_path)
    assert [os.path.basename(report.path) for report in read_all([tmp_path])] == ["h200_cudnn.raw.csv"]


def test_two_measurements_that_took_equally_long_are_no_twins():
    found = real("h200_fwd_static")
    again = found.select([0])
    assert reading._same(found, again)
    elapsed = "sm__cycles_elapsed.max"
    changed = dict(found.metrics[0])
    changed[elapsed] = type(changed[elapsed])(elapsed, changed[elapsed].value + 1, unit="cycle")
    other = type(found)(found.path, found.form, found.launches, (changed,))
    assert not reading._same(found, other)


# --- what decides is the content ----------------------------------------------------------------


def test_a_report_under_the_name_of_a_page_is_read(tmp_path):
    needs_reader()
    path = tmp_path / "really-a-report.csv"
    path.write_bytes(small())
    assert read(path).form == "ncu-rep"
    assert len(read(path).launches) == 4


def test_a_page_under_the_name_of_a_report_is_read(tmp_path):
    path = tmp_path / "really-a-page.ncu-rep"
    path.write_bytes(file("h200_fwd_basic.raw.csv").read_bytes())
    found = read(path)
    assert found.form == "raw page"
    assert [launch.kernel for launch in found.launches] == ["jfa_forward"]


def test_text_under_the_name_of_a_report_says_what_was_expected(tmp_path):
    path = tmp_path / "text.ncu-rep"
    path.write_text("hello\n")
    message = one_line(read, path)
    assert str(path) in message and "is no Nsight Compute report" in message and "nor a page" in message


# --- what cannot be read ------------------------------------------------------------------------


def test_files_that_are_none(tmp_path):
    assert "there is no such file" in one_line(read, tmp_path / "absent.ncu-rep")
    assert "is a folder" in one_line(read, tmp_path)
    assert "holds no Nsight Compute report" in one_line(read_all, [tmp_path])
    empty = tmp_path / "empty.ncu-rep"
    empty.touch()
    assert "is empty" in one_line(read, empty)
    assert "--decimal" in one_line(read, empty, decimal="dot")
    assert "--decimal" in one_line(read_all, [tmp_path], decimal="dot")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.ncu-rep")
    began = time.monotonic()
    assert "no regular file" in one_line(read, tmp_path / "pipe.ncu-rep")
    assert "holds no" in one_line(read_all, [tmp_path])
    assert time.monotonic() - began < 5


def test_a_file_without_permission():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        path = folder / "closed.ncu-rep"
        path.write_bytes(small())
        path.chmod(0)
        if os.getuid() == 0:  # root may read everything
            os.seteuid(65534)
        try:
            message, notes = one_line(read, path), one_line(read_all, [folder])
        finally:
            os.seteuid(os.getuid())
    assert str(path) in message and "Permission denied" in message
    assert "Permission denied" in notes


def test_without_the_reader_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(binary, "find_spec", lambda name: None)
    monkeypatch.setattr("profiling.ncu.reading.find_spec", lambda name: None)
    monkeypatch.setattr("profiling.ncu.reading.find_ncu", lambda: None)
    message = one_line(read, file(f"{SMALL}.ncu-rep"))
    assert "pip install ncu-report" in message and "--csv --page raw" in message


def stand_in(monkeypatch, tmp_path, body: str) -> None:
    """A reader process that does something else."""
    script = tmp_path / "child.py"
    script.write_text(f"import json, os, signal, sys, time\n{body}\n")
    monkeypatch.setattr(binary, "_CHILD", script)
    monkeypatch.setattr(binary, "find_spec", lambda name: name)


@pytest.mark.parametrize(
    "body, words",
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed on it (signal 11)"),
        ("raise ValueError('no such\\nthing')", "failed (thing)"),
        ("sys.exit('out of luck')", "failed (out of luck)"),
        ("sys.exit(3)", "failed (no message)"),
        ("pass", "failed (no message)"),
        ("print('chatter' * 100000); sys.stderr.buffer.write(b'\\xff\\n'); sys.exit(1)", "failed (�)"),
        (
            "json.dump(dict(readable=False, launches=[], names={}, rules=[], instances=[]), open(sys.argv[2], 'w'))",
            "does not recognise it",
        ),
    ],
)
def test_a_reader_that_fails_is_one_line(monkeypatch, tmp_path, body, words):
    stand_in(monkeypatch, tmp_path, body)
    message = one_line(read, file(f"{SMALL}.ncu-rep"))
    assert words in message and SMALL in message


def test_a_reader_that_hangs_is_given_up(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, "time.sleep(600)")
    began = time.monotonic()
    message = one_line(binary.read_binary, file(f"{SMALL}.ncu-rep"), timeout_s=0.5)
    assert "did not come back within 0.5 s" in message
    assert time.monotonic() - began < 10


def test_launches_that_the_reader_did_not_give_are_said(monkeypatch, tmp_path):
    body = "json.dump(dict(readable=True, launches=[], names={}, rules=[], instances=[]), open(sys.argv[2], 'w'))"
    stand_in(monkeypatch, tmp_path, body)
    found = read(file(f"{SMALL}.ncu-rep"))
    assert "holds 4 results and NVIDIA's reader gave 0" in found.notes[0]
    assert "no profiled kernel" in found.notes[1]
    assert list(found.frame(["x"]).columns) == list(COLUMNS) and found.frame().empty


def test_the_reader_finds_what_this_process_finds(monkeypatch, tmp_path):
    """A package may lie where only PYTHONPATH says, and modules of ours must not hide the standard library's."""
    (tmp_path / "ncu_report.py").write_text("import numbers\nload_report = lambda path: None\nnumbers.Number\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(binary, "find_spec", lambda name: name)
    assert "does not recognise it" in one_line(read, file(f"{SMALL}.ncu-rep"))


# --- damage -------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=300)
def test_a_report_cut_short_is_noticed(data):
    content = small()
    cut = data.draw(st.integers(0, len(content) - 1))
    ends = {end: results for _, end, results in blocks(content)}
    try:
        found = container.inspect(content[:cut], "x.ncu-rep")
    except UserError as error:
        assert "x.ncu-rep" in str(error)
    else:  # whole blocks, and as many results as they name
        assert cut in ends or cut == blocks(content)[0][0]
        assert found.results == sum(results for _, end, results in blocks(content) if end <= cut) < 4


@given(st.data())
@settings(max_examples=300)
def test_the_walk_over_damaged_blocks_ends_in_a_result_or_one_line(data):
    content = bytearray(small())
    heads = [at for start, _, _ in blocks(content) for at in range(start, min(start + 200, len(content)))]
    places = st.one_of(st.sampled_from(heads), st.integers(0, len(content) - 1))
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=6)):
        content[place] = value
    try:
        container.inspect(bytes(content), "x.ncu-rep")
    except UserError as error:
        assert str(error).startswith("x.ncu-rep: ")


@given(st.binary(max_size=300))
def test_the_walk_over_anything_ends_in_a_result_or_one_line(body):
    for content in (body, container.MAGIC + body, container.MAGIC + bytes(4) + body):
        try:
            assert container.inspect(content, "x").results >= 0
        except UserError as error:
            assert str(error).startswith("x: ")


@pytest.mark.parametrize("filler", [b"x", b"/ncu", b"/ncu ", b"/ncu ab\n", b"\0\0\0\0"])
def test_the_walk_is_quick_whatever_the_report_embeds(filler):
    size = 1 << 20
    header = bytes([container._PAYLOAD << 3]) + bytes([size & 0x7F | 0x80, (size >> 7) & 0x7F | 0x80, size >> 14])
    body = (filler * size)[:size]
    content = container.MAGIC + bytes(4) + len(header).to_bytes(4, "little") + header + body
    began = time.monotonic()
    assert container.inspect(content, "x").results == 0
    assert time.monotonic() - began < 1


def test_the_command_is_the_whole_line():
    assert container.inspect(small(), "x").command == (
        "/opt/nvidia/nsight-compute/2022.4.0/target/linux-desktop-glibc_2_11_3-x64/ncu -f -o profile "
        "build/cuda_learning_c/chapter_3/pg_84_simpleDivergence"
    )


@given(st.data())
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_bytes_give_a_report_or_one_line(tmp_path, data):
    needs_reader()
    content = bytearray(small())
    places = st.integers(blocks(content)[1][0], len(content) - 1)
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=20)):
        content[place] = value
    path = tmp_path / "damaged.ncu-rep"
    path.write_bytes(content)
    try:
        found = read(path)
    except UserError as error:
        assert str(path) in str(error)
    else:
        assert tuple(found.frame().columns) == COLUMNS


@given(st.data())
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_cut_at_a_block_gives_the_launches_before_it(tmp_path, data):
    """A block's end cannot be told from the file's: what is whole before it is read."""
    needs_reader()
    content = small()
    _, end, _ = data.draw(st.sampled_from(blocks(content)))
    path = tmp_path / "cut.ncu-rep"
    path.write_bytes(content[:end])
    found = read(path)
    assert len(found.launches) == sum(results for _, stop, results in blocks(content) if stop <= end)
    assert bool(found.launches) != any("no profiled kernel" in note for note in found.notes)


def test_a_name_that_is_no_text_can_be_written(tmp_path):
    needs_reader()
    path = tmp_path / "name.ncu-rep"
    assert small().count(b"mathKernel1") > 0
    path.write_bytes(small().replace(b"mathKernel1", b"math\xff\xfeernel"))
    names = [launch.kernel for launch in read(path).launches]
    assert len(names) == 4 and "mathKernel1" not in names
    "".join(names).encode("utf-8")


def test_pages_and_reports_of_ours_hold_the_same_launches():
    for name in OURS:
        whole = real(name.removesuffix(".ncu-rep"))
        page = read(file(name.replace(".ncu-rep", ".raw.csv")))
        assert [(launch.grid, launch.block) for launch in page.launches] == [
            (launch.grid, launch.block) for launch in whole.launches
        ]
        assert reading._same(page, whole)
