"""The command `ncu`: selections, formats and files, one line for every bad input, and how long it may take."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ncu_kernels import file, repeated
from ncu_reports import needs_reader

from profiling.__main__ import main

REPOSITORY = Path(__file__).resolve().parent.parent
RECORDINGS = REPOSITORY / "profiling" / "data"


@pytest.fixture(autouse=True)
def reader():
    needs_reader()


@pytest.fixture
def ncu(capsys, monkeypatch):
    """Run the command in this process on a terminal of so many columns: what it printed."""

    def run(*words, columns=200):
        monkeypatch.setenv("COLUMNS", str(columns))
        code = main(["ncu", *map(str, words)])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return out

    return run


@pytest.fixture
def refused(capsys):
    """Run the command on bad input: the one line that it says."""

    def run(*words):
        assert main(["ncu", *map(str, words)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
        return err

    return run


def static(ending="ncu-rep"):
    return file(f"h200_fwd_static.{ending}")


# --- what it says -------------------------------------------------------------------------------


def test_the_table_says_the_verdict_with_its_numbers(ncu):
    text = ncu(static(), columns=200)
    assert "NVIDIA H200 (9.0), ncu 2025.3.1.0" in text
    assert "imbalanced, then latency-bound (barrier)" in text
    assert "at most 18.4 % of the time" in text
    assert re.search(r"tensor pipe, of all time +│ +34\.4 % │ measured │ sm__pipe_tensor_cycles_active", text)
    assert "useful rate" in text and "327 TFLOP/s" in text
    assert "NVIDIA's rules and their estimates" in text


@pytest.mark.parametrize("columns", [100, 120, 200])
def test_no_word_of_the_overview_breaks_on_a_narrow_terminal(ncu, columns):
    text = ncu(file("h200_all_basic.ncu-rep"), columns=columns)
    overview = text.partition("jfa_backward: verdict")[0]
    for name in ("jfa_backward", "_ranked_pairs", "latency-bound", "memory-bound", "launch-bound", "collected)"):
        assert name in overview
    for heading in ("launches", "shape", "duration", "share", "tensor", "SM", "memory", "DRAM", "occupancy", "verdict"):
        assert f" {heading} " in overview
    assert all(len(line) <= columns for line in text.splitlines() if line.startswith(("│", "┃", "┏")))


def test_a_folder_and_several_reports(ncu, tmp_path):
    for ending in ("ncu-rep", "raw.csv", "details.csv"):
        shutil.copy(static(ending), tmp_path)
    text = ncu(tmp_path, file("gtx1660ti_divergence_ncu2022.4.ncu-rep"))
    assert text.count("(ncu-rep): NVIDIA") == 2
    assert text.count("in another form") == 2
    assert "GTX 1660 Ti" in text and "launch-bound (too few CTAs)" in text


def test_a_report_without_durations_keeps_its_order(ncu):
    text = ncu(file("a10g_sgemm_ncu2023.1.ncu-rep"), "--format", "md")
    first = text.partition("###")[0]
    order = re.findall(r"^\| (\S+)", first, re.MULTILINE)[2:]
    assert [name.replace("\\", "") for name in order] == [
        "basic", "gmem_coalesce", "smem_blocking", "one_blocktiling", "two_blocktiling", "one_d_vec",
    ]  # fmt: skip
    assert re.search(r"\| one\\_d\\_vec \| 1 \| – \| n/a \| – \| n/a \|", first)


def test_selections(ncu):
    report = file("h200_all_basic.ncu-rep")
    chosen = json.loads(ncu(report, "--kernel", "^jfa_(forward|delta)$", "--format", "json"))["reports"][0]["kernels"]
    assert {kernel["kernel"] for kernel in chosen} == {"jfa_forward", "jfa_delta"}
    chosen = json.loads(ncu(report, "--nvtx", "jfa_table", "--format", "json"))["reports"][0]["kernels"]
    assert {kernel["kernel"] for kernel in chosen} == {"_costs", "_ranked_pairs", "_block_ends", "_pairs"}
    several = ncu(report, static(), "--kernel", "jfa_delta")
    assert "note: " in several and "left out" in several and "h200_fwd_static" in several


def test_baseline_and_recording(ncu):
    recording = RECORDINGS / "hsp-loguniform_forward_static.parquet"
    text = ncu(static(), "--baseline", file("h200_all_basic.ncu-rep"), "--recording", recording)
    assert re.search(r"duration +│ 1\.799 ms │ 2\.219 ms │ +\+23\.4 %", text)
    assert re.search(r"occupancy, theoretical +│ +12\.5 % │ +12\.5 % │ +none", text)
    assert "SM time: lost to imbalance" in text
    assert "warning: only in the baseline: jfa_backward" in text.replace("\n", " ")


@pytest.mark.parametrize("form, ending", [("md", ".md"), ("csv", ".csv"), ("json", ".json"), ("table", ".txt")])
def test_each_format_prints_and_writes_the_same(ncu, tmp_path, form, ending):
    printed = ncu(static(), "--format", form)
    path = tmp_path / f"out{ending}"
    assert re.search(r"out\.\w+: 1 kernel", ncu(static(), "--format", form, "-o", path))
    written = path.read_text(encoding="utf-8")
    assert written == printed
    assert "imbalanced" in written
    if form == "json":
        json.loads(written)
    if form == "csv":
        assert len({len(row) for row in csv.reader(io.StringIO(written))}) == 1


def test_a_page_and_its_report_say_the_same(ncu):
    """Up to what a page rounds and leaves out."""
    whole, page = (
        {
            row["fact"]: float(row["value"])
            for row in csv.DictReader(io.StringIO(ncu(static(ending), "--format", "csv")))
            if row["value"] and "tensor_op" not in row["source"]
        }
        for ending in ("ncu-rep", "raw.csv")
    )
    assert len(page) > 40
    assert {fact: page[fact] for fact in page} == {
        fact: pytest.approx(whole[fact], rel=1e-3, abs=1e-3) for fact in page
    }


def test_html_is_written(ncu, tmp_path):
    path = tmp_path / "page.html"
    assert "2 kernels" in ncu(static(), file("h200_cudnn.ncu-rep"), "--format", "html", "-o", path)
    assert "imbalanced, then latency-bound (barrier)" in path.read_text(encoding="utf-8")


def test_the_module_of_its_own_is_the_command(tmp_path):
    """As a user runs it, in processes of their own."""
    words = [sys.executable, "-m", "profiling.ncu_summary"]
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120"}
    run = {"cwd": REPOSITORY, "env": environment, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([*words, str(static()), "--format", "md"], **run)
    assert (done.returncode, done.stderr) == (0, "")
    assert "imbalanced, then latency-bound" in done.stdout
    help_text = subprocess.run(words, **run)
    assert (help_text.returncode, help_text.stderr) == (0, "")
    assert "--baseline" in help_text.stdout and "REPORT..." in help_text.stdout
    wrong = subprocess.run([*words, str(tmp_path / "absent.ncu-rep")], **run)
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)


# --- bad input ----------------------------------------------------------------------------------


def test_words_of_the_command_line_that_cannot_be_meant(refused, tmp_path):
    report = static()
    assert "is not a regular expression" in refused(report, "--kernel", "(")
    assert "it holds jfa_forward" in refused(report, "--kernel", "nothing")
    assert "it has jfa:jfa_forward" in refused(report, "--nvtx", "nothing")
    assert "profile with ncu --nvtx" in refused(file("a10g_sgemm_ncu2023.1.ncu-rep"), "--nvtx", "jfa")
    assert "--format html: give a file to write" in refused(report, "--format", "html")
    assert "did you mean json?" in refused(report, "--format", "jsn")
    assert "expected a name that ends in .json" in refused(report, "--format", "json", "-o", tmp_path / "x.png")
    assert "give --format html" in refused(report, "-o", tmp_path / "x.html")
    assert "give --format table" in refused(report, "--format", "json", "-o", tmp_path / "x.txt")
    assert "there is no folder" in refused(report, "--format", "md", "-o", tmp_path / "absent" / "x.md")
    assert "expected point or comma, got 'dot'" in refused(report, "--decimal", "dot")
    assert "expected point or comma, got 'dot'" in refused(tmp_path, "--decimal", "dot")
    assert "--help" in refused("--kernel", "x")
    assert "--help" in refused(report, "--unheard-of")


def test_a_report_is_not_overwritten(refused, tmp_path):
    report = tmp_path / "report.csv"
    shutil.copy(static("raw.csv"), report)
    content = report.read_bytes()
    assert "is one of the reports" in refused(report, "--format", "csv", "-o", report)
    assert "is one of the reports" in refused(static(), "--baseline", report, "--format", "csv", "-o", report)
    assert "is one of the reports" in refused(tmp_path, "--format", "csv", "-o", report)
    assert report.read_bytes() == content


def test_an_earlier_summary_among_the_reports_is_overwritten(ncu, tmp_path):
    shutil.copy(static("raw.csv"), tmp_path / "report.csv")
    for _ in range(2):
        assert "1 kernel" in ncu(tmp_path, "--format", "csv", "-o", tmp_path / "summary.csv")


def test_files_that_cannot_be_read(refused, tmp_path):
    good = static()
    empty, text, cut, table = (tmp_path / name for name in ("empty.ncu-rep", "text.ncu-rep", "cut.ncu-rep", "x.csv"))
    empty.touch()
    text.write_text("hello\n")
    cut.write_bytes(good.read_bytes()[:100_000])
    table.write_text("a,b\n1,2\n")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.ncu-rep")
    for path, words in (
        (tmp_path / "absent.ncu-rep", "no such file"),
        (empty, "is empty"),
        (text, "is no Nsight Compute report"),
        (cut, "cut short or damaged"),
        (table, "no table of ncu"),
        (tmp_path / "folder", "holds no Nsight Compute report"),
        (tmp_path / "pipe.ncu-rep", "no regular file"),
        (Path("x" * 300), "File name too long"),
    ):
        assert words in refused(path), path
        assert words in refused(good, "--baseline", path) or path.name == "folder"
    assert "is a folder" in refused(good, "--baseline", tmp_path / "folder")


def test_recordings_that_do_not_fit(refused, tmp_path):
    other = RECORDINGS / "hsp-loguniform_forward_balanced.parquet"
    said = refused(static(), "--recording", other)
    assert " (schedule balanced) and " in said and "different launches" in said
    assert "absent" in refused(static(), "--recording", tmp_path / "absent.parquet")
    assert "are of different launches" in refused(file("h200_cudnn.ncu-rep"), "--recording", other)


# --- time ---------------------------------------------------------------------------------------


def seconds(path, times):
    """The best of so many runs of the whole program."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "profiling", "ncu", str(path)], cwd=REPOSITORY, check=True, capture_output=True
        )
        taken.append(time.perf_counter() - began)
    return min(taken)


def test_a_full_report_takes_a_second_or_two():
    assert seconds(static(), 3) < 4  # about 1 s on two idle cores


@pytest.mark.slow
def test_a_hundred_full_launches_take_seconds(tmp_path):
    path = tmp_path / "hundred.ncu-rep"
    path.write_bytes(repeated("h200_cudnn", 99))
    assert seconds(path, 2) < 10
