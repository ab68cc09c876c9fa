"""The real program on modelled recordings: what each command prints and writes, and how it ends."""

import contextlib
import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from synthetic import synthetic_recording

from profiling import examples
from profiling.__main__ import main
from profiling.commands import COMMANDS
from profiling.commands.arguments import SCHEDULES
from profiling.commands.views import tail
from profiling.recording import Recording
from profiling.text import short_names

PARTS = ("work", "ramp", "fetch", "tail", "unused")


def fine(result):
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_help_lists_every_command_and_each_teaches_by_example(program, capsys):
    text = fine(program())
    for command in COMMANDS:
        assert re.search(rf"^  {command.__name__.replace('_', '-')}  +\S", text, re.MULTILINE)
        assert main([command.__name__.replace("_", "-"), "--help"]) == 0
        assert f"python -m profiling {command.__name__.replace('_', '-')}" in capsys.readouterr().out


def test_show_says_the_split_its_grade_and_what_caused_the_tail(program, recordings):
    text = fine(program("show", recordings / "forward-static.parquet"))
    assert "hsp-small · forward · static" in text
    assert all(f" {part} " in text for part in PARTS)
    assert "times: modelled on model of 16 SMs; shares, headroom, TFLOP/s and speedup: derived" in text
    assert "warning: modelled, not measured" in text
    assert re.search(r"tail of launch 0: SM \d+ ended last, at .* with \d\.\d\d× the mean", text)


def test_json_of_show_sums_exactly(program, recordings):
    found = json.loads(fine(program("show", recordings / "backward-balanced.parquet", "--json")))
    assert found["grade"] == "modelled" and found["warnings"] and found["basis"] == "tile"
    for launch in found["launches"]:
        assert sum(launch[f"{part}_ns"] for part in PARTS) == launch["sms"] * launch["makespan_ns"]
    assert "kv_lens" not in found["metadata"]["workload"]


def test_a_recording_at_level_cta_says_what_its_work_is(program, tmp_path):
    path = tmp_path / "cta.parquet"
    synthetic_recording(256, [100, 4000, 0, 900], level="cta", launches=3).write(path)
    text = fine(program("show", path))
    assert "work is whole CTAs here" in text
    assert "not known" in text and "record with --level tile" in text


def test_clearing_that_runs_last_is_named():
    frame = pd.DataFrame(
        [(0, 0, "tile", 0, 0, 100), (0, 0, "zero", -1, 100, 130), (1, 1, "tile", 1, 0, 110)],
        columns=["cta", "sm", "event", "tile", "start_ns", "end_ns"],
    ).assign(launch=0, role="cta", batch=0, head=0, block=0, stage=-1)
    recording = Recording(frame, {"schema": "1.0", "gpu": {"sm_count": 2}, "events": {"lost": 0}})
    found, words = tail(recording, 0)
    assert found["late_tiles"] == 0 and found["fair_ns"] == 120
    assert words.startswith("no tile ran past 120") and words.endswith("empty tiles did, until 130 ns")


def test_strangers_words_are_printed_as_they_are(program, tmp_path):
    path = tmp_path / "odd.parquet"
    synthetic_recording(64, [100, 50], name="[red]x[/red] <b>\x1b[31m").write(path)
    text = fine(program("show", path))
    assert "[red]x[/red] <b>" in text
    assert "\x1b" not in text


def test_compare_gives_the_ratio_of_the_plain_kernels(program, recordings):
    paths = [recordings / f"forward-{schedule}.parquet" for schedule in ("static", "balanced-dynamic")]
    found = json.loads(fine(program("compare", *paths, "--json")))
    first, second = (Recording.read(path).metadata["durations"]["plain_ns"] for path in paths)
    assert [row["speedup"] for row in found["rows"]] == [1.0, pytest.approx(first / second)]
    assert found["obstacles"] == [] and found["speedup_of"] == "kernel time"


@pytest.mark.parametrize("columns", [60, 100])
def test_on_a_narrow_terminal_headings_stay_whole(program, recordings, columns):
    paths = [recordings / f"forward-{schedule}.parquet" for schedule in ("static", "balanced-dynamic")]
    text = fine(program("compare", *paths, COLUMNS=str(columns)))
    for heading in ("kernel time", "TFLOP/s", "makespan", "headroom", "speedup"):
        assert f"│ {heading} " in text
    wide = fine(program("compare", *paths, COLUMNS="200"))
    assert "headroom ┃" in wide and "│ headroom" not in wide and "forward-static " in wide


@pytest.mark.parametrize(
    ("sources", "short"),
    [
        (["a/b/one.parquet", "a/b/other.parquet"], ["one", "other"]),
        (["a/one.parquet", "b/one.parquet"], ["a/one.parquet", "b/one.parquet"]),
        (["one.parquet", "one.pq"], ["one.parquet", "one.pq"]),
        (["one.parquet", "one.parquet"], ["one", "one"]),
        ([], []),
    ],
)
def test_files_are_called_by_what_tells_them_apart(sources, short):
    assert short_names(sources) == short


def test_a_difference_within_the_spread_is_none(program, tmp_path):
    paths = []
    for number, factor in enumerate((1.0, 1.003, 1.02)):
        recording = synthetic_recording(256, [100, 4000, 900])
        recording.metadata["durations"]["plain_ns"] *= factor
        paths.append(tmp_path / f"{number}.parquet")
        recording.write(paths[-1])
    rows = json.loads(fine(program("compare", *paths, "--json")))["rows"]
    assert [row["speedup"] for row in rows] == [1.0, 1.0, pytest.approx(1 / 1.02)]
    text = fine(program("compare", *paths[:2]))
    assert "base" in text and "same" in text


def test_a_speedup_of_makespans_says_that_their_spread_is_not_known(program, tmp_path):
    paths = [tmp_path / "one.parquet", tmp_path / "other.parquet"]
    for path, schedule in zip(paths, ("static", "balanced"), strict=True):
        recording = synthetic_recording(256, [100, 4000, 900], schedule=schedule)
        del recording.metadata["durations"]
        recording.write(path)
    text = fine(program("compare", *paths))
    assert "note: a recording without the plain kernel's time" in text and "spread is not known" in text
    assert "(makespan, against the first)" in text


def test_compare_points_out_other_workloads_before_the_numbers_and_gives_no_speedup(program, recordings, tmp_path):
    other = tmp_path / "other.parquet"
    synthetic_recording(256, [64] * 40, sms=8, name="another").write(other)
    text = fine(program("compare", recordings / "forward-static.parquet", other))
    assert text.index("not comparable: workload differs: hsp-small, another") < text.index("makespan")
    assert "not comparable: GPU differs: model of 16 SMs, model of 8 SMs" in text
    assert "×" not in text.split("speedup")[1].split("headroom")[0]
    found = json.loads(fine(program("compare", recordings / "forward-static.parquet", other, "--json")))
    assert [row["speedup"] for row in found["rows"]] == [None, None]


@pytest.mark.parametrize(
    ("where", "change", "words"),
    [
        ("workload", {"heads": 64}, "not comparable: heads differs"),
        ("workload", {"head_dim": 64}, "not comparable: head size differs"),
        ("workload", {"causal": True}, "not comparable: mask differs"),
        ("kernel", {"plain_config_hash": "x", "config_hash": "x"}, "note: kernel configuration differs"),
    ],
)
def test_compare_looks_past_a_workloads_name(program, tmp_path, where, change, words):
    paths = [tmp_path / "one.parquet", tmp_path / "other.parquet"]
    for path, changed in zip(paths, ({}, change), strict=True):
        recording = synthetic_recording(256, [100, 4000, 900])
        recording.metadata[where].update(changed)
        recording.write(path)
    text = fine(program("compare", *paths))
    assert words in text
    assert ("base" in text) == (where == "kernel")


@pytest.mark.parametrize("command", ["heatmap", "compare"])
def test_heatmaps_are_written_and_need_no_network(program, recordings, tmp_path, command):
    page = tmp_path / "page.html"
    paths = [recordings / f"forward-{schedule}.parquet" for schedule in ("static", "balanced")]
    fine(program(command, *(paths if command == "compare" else paths[:1]), "-o", page))
    text = page.read_text()
    assert "heatmap" in text and "modelled" in text
    assert not re.search(r"<(script|link)[^>]+(src|href)=\"(https?:)?//", text)


def test_export_writes_a_trace_and_compresses_it_by_its_name(program, recordings, tmp_path):
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    for path in (plain, packed):
        fine(program("export", recordings / "forward-static.parquet", "-o", path))
    trace = json.loads(plain.read_text())
    assert trace == json.loads(gzip.decompress(packed.read_bytes()))
    assert len(trace["traceEvents"]) >= len(Recording.read(recordings / "forward-static.parquet").events)


def test_report_writes_one_page(program, recordings, tmp_path):
    folder = tmp_path / "report"
    text = fine(program("report", *sorted(recordings.glob("forward-*.parquet")), "-o", folder))
    pages = list(folder.glob("*.html"))
    assert pages and str(pages[0]) in text
    assert "balanced-dynamic" in pages[0].read_text()


def test_demo_goes_through_every_workload_direction_and_schedule(program, recordings, tmp_path):
    text = fine(program("demo", "--data", recordings, "--out", tmp_path / "demo"))
    for direction in ("forward", "backward"):
        assert f"hsp-small · {direction} · model of 16 SMs" in text
    for schedule in ("static", "balanced", "dynamic", "balanced-dynamic"):
        assert len(re.findall(rf"^  tail, {schedule}: ", text, re.MULTILINE)) == 2
    assert list((tmp_path / "demo").glob("*.html"))


def test_demo_as_json_orders_schedules_and_compares_with_the_first(program, recordings, tmp_path):
    found = json.loads(fine(program("demo", "--data", recordings, "--out", tmp_path / "demo", "--json")))
    assert [group["direction"] for group in found["groups"]] == ["forward", "backward"]
    for group in found["groups"]:
        assert [row["schedule"] for row in group["rows"]] == ["static", "balanced", "dynamic", "balanced-dynamic"]
        assert group["rows"][0]["speedup"] == 1.0
        for row in group["rows"]:
            assert sum(row[f"{part}_share"] for part in PARTS) == pytest.approx(1)
            assert "late_tiles" in row["tail"]


def test_the_schedules_that_commands_know_are_the_kernels(device):
    from jfa.schedule import SCHEDULES as KERNELS

    assert SCHEDULES == KERNELS


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_output_into_a_pipe_that_closes_is_quiet(recordings, repository, more):
    command = [sys.executable, "-m", "profiling", "show", str(recordings / "forward-static.parquet"), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=repository) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        process.wait(60)
    assert process.returncode == 141  # as a shell reports a program that SIGPIPE ended


def test_interrupting_is_quiet_and_ends_with_130(recordings, repository, tmp_path):
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "profiling", "demo", "--data", str(recordings), "--out", str(out)]
    terminal, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, cwd=repository) as process:
        os.close(theirs)
        shown = os.read(terminal, 4096)  # the progress bar's first words: the work has begun
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    with contextlib.suppress(OSError):  # Linux: the other end is closed
        while more := os.read(terminal, 4096):
            shown += more
    os.close(terminal)
    assert (process.returncode, output) == (130, b"")
    assert b"Traceback" not in shown and b"Interrupt" not in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["shw", "x"], "No such command 'shw'"),
        (["show"], "Missing argument 'FILE'; see python -m profiling show --help"),
        (["show", "a.parquet", "--jsn"], "No such option"),
        (["compare", "a.parquet"], "expected two recordings or more, got 1"),
        (["bench", "--workload", "hsp-logunifrm"], "there is none named 'hsp-logunifrm'; did you mean hsp-loguniform?"),
        (["bench", "--schedule", "balancd"], "schedule: there is none named 'balancd'; did you mean balanced"),
        (["bench", "--direction", "sideways"], "direction: there is none named 'sideways'; known: forward, backward"),
        (["record", "--workload", "tiny", "--schedule", "x", "-o", "x.parquet"], "schedule: there is none named 'x'"),
        (["record", "--workload", "tiny", "--level", "tiles", "-o", "x.parquet"], "did you mean tile?"),
        (["record", "--workload", "tiny", "--impl", "tritn", "-o", "x.parquet"], "did you mean triton?"),
        (["record", "--workload", "tiny", "-o", "x.json"], "expected a name that ends in .parquet"),
        (["heatmap", "a.parquet", "-o", "no/such/folder/x.html"], "make it first: mkdir -p no/such/folder"),
        (["heatmap", "a.parquet", "-o", "pyproject.toml/x.html"], "pyproject.toml is not a folder"),
        (["heatmap", "a.parquet", "-o", "x.png"], "expected a name that ends in .html"),
        (["export", "a.parquet", "-o", "x.gz"], "expected a name that ends in .json or .json.gz"),
        (["report", "a.parquet", "-o", "pyproject.toml"], "is a file; expected a folder"),
        (["demo", "--out", "no/such/folder"], "make it first: mkdir -p no/such"),
        (["demo", "--data", "tests", "--out", "x"], "there are no recordings in tests"),
        (["show", "no-such.parquet"], "no-such.parquet"),
    ],
)
def test_a_wrong_word_is_one_line_and_exit_code_2(repository, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(repository)
    assert main(arguments) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert expected in errors


WITHOUT = (
    "import sys; sys.modules.update(dict.fromkeys({missing})); from profiling.__main__ import main; sys.exit(main())"
)


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--json"]])
def test_help_and_doctor_need_no_analysis_library(repository, arguments):
    code = WITHOUT.format(missing=["numpy", "pandas", "pyarrow", "plotly", "jinja2", "torch"])
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=repository, check=False)
    assert result.returncode in (0, 1) and result.stderr == "" and result.stdout


def test_a_missing_library_is_one_line_that_leads_to_the_doctor(recordings, repository, tmp_path):
    path, page = recordings / "forward-static.parquet", tmp_path / "x.html"
    command = [sys.executable, "-c", WITHOUT.format(missing=["plotly"]), "heatmap", str(path), "-o", str(page)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=repository, check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: this needs plotly") and "doctor" in result.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_full_disk_is_one_line(recordings, repository, more):
    command = [sys.executable, "-m", "profiling", "show", str(recordings / "forward-static.parquet"), *more]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=repository, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: the output could not be written") and result.stderr.count("\n") == 1


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "folder.html").mkdir()
    assert main(["heatmap", "a.parquet", "-o", str(tmp_path / "folder.html")]) == 2
    assert "is a folder; give a file in it" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path, capsys):
    tmp_path.chmod(0o500)
    assert main(["heatmap", "a.parquet", "-o", str(tmp_path / "x.html")]) == 2
    assert "no permission to write" in capsys.readouterr().err


def test_record_and_bench_without_a_gpu_say_so(device, capsys, tmp_path):
    if device == "cuda":
        pytest.skip("there is a GPU")
    for arguments in (["record", "--workload", "tiny", "-o", str(tmp_path / "x.parquet")], ["bench"]):
        assert main(arguments) == 2
        output, errors = capsys.readouterr()
        assert output == "" and errors.count("\n") == 1 and "GPU" in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_record_then_show_on_the_gpu(program, tmp_path):
    path = tmp_path / "tiny.parquet"
    for direction in ("forward", "backward"):
        program("record", "--workload", "tiny", "--direction", direction, "-o", path)
        found = json.loads(fine(program("show", path, "--json")))
        assert found["grade"] == "measured"
        assert np.isfinite(found["launches"][0]["headroom"])


def test_an_excerpt_without_its_number_of_ctas_names_its_own(tmp_path, capsys):
    made = Recording.read(examples.DATA / "waits" / "loguniform-200_forward_alone.parquet")
    own = made.events["cta"].nunique()
    for kernel, words in ((made.metadata["kernel"], f"by {own} of 132 CTAs at"), ({}, f"by {own} CTAs at")):
        shown = {key: value for key, value in made.metadata["kernel"].items() if kernel or key != "num_ctas"}
        Recording(made.events, made.metadata | {"kernel": shown}).write(tmp_path / "e.parquet")
        assert main(["show", str(tmp_path / "e.parquet")]) == 0
        assert words in " ".join(capsys.readouterr().out.split())
