"""What `advise` and `schedules` say beside their numbers: whose tile costs, how far extrapolated, why this schedule."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

from jfa import workloads
from profiling import examples, gpus
from profiling.__main__ import main
from profiling.advice import advise
from profiling.cost_model import EXTRAPOLATED, MEASURED_TO, columns_met, cost_model, model_notes, modelled_tiles
from profiling.recording import Recording
from profiling.schedules import REPLAY_ERROR, SCHEDULES, replay
from profiling.text import duration
from profiling.tiles_measured import tiles_of

STATIC = str(examples.DATA / "hsp-loguniform_forward_static.parquet")
DYNAMIC = str(examples.DATA / "hsp-loguniform_forward_dynamic.parquet")
PAIRS = str(examples.DATA / "waits" / "loguniform-200_forward_pairs.parquet")
TINY = str(examples.DATA / "waits" / "tiny_forward.parquet")
COSTS = "tiles cost what they cost on NVIDIA H200"


@pytest.fixture(scope="module")
def like():
    return tiles_of(examples.load())


@pytest.fixture
def lengths(tmp_path):
    np.save(tmp_path / "lengths.npy", workloads.get("hsp-loguniform").kv_lens)
    return str(tmp_path / "lengths.npy")


def documented(command, capsys) -> dict:
    assert main([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def printed(command, capsys) -> str:
    assert main(command) == 0
    return capsys.readouterr().out


# --- whose tile costs ----------------------------------------------------------------------------------------------


def commands(lengths) -> dict[str, list[str]]:
    return {
        "advise": ["advise", "--lengths", lengths, "--queries", "256"],
        "sweep": ["sweep", "--densities", "1", "--skews", "0"],
        "schedules": ["schedules", STATIC],
    }


@pytest.mark.parametrize("name", ["advise", "sweep", "schedules"])
@pytest.mark.parametrize("gpu", gpus.SMS)
def test_another_gpus_tiles_are_said_to_be_the_recordings(name, gpu, lengths, capsys):
    command = [*commands(lengths)[name], "--gpu", gpu.lower()]
    said = [line for line in documented(command, capsys)["warnings"] if "tiles cost" in line]
    if gpu == "H200":
        assert said == []
        return
    assert len(said) == 1 and said[0].startswith(f"{COSTS}, not on {gpu}: only the number of SMs is {gpu}'s, ")
    assert said[0].endswith("132, as many as NVIDIA H200 has: nothing differs" if gpu == "H100" else " for 132")
    assert f"warning: {said[0]}" in printed(command, capsys)


@pytest.mark.parametrize("name", ["advise", "sweep", "schedules"])
@pytest.mark.parametrize(("sms", "expected"), [("132", None), ("100", "only the number of SMs differs, 100")])
def test_another_number_of_sms_is_said(name, sms, expected, lengths, capsys):
    said = documented([*commands(lengths)[name], "--sms", sms], capsys)["warnings"]
    assert [line.partition(": ")[2] for line in said if COSTS in line] == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("recorded", "known"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GH200 480GB", None),
        ("unknown GPU", None),
    ],
)
def test_a_drivers_name_is_one_of_the_table_or_none(recorded, known):
    assert [name for name in gpus.SMS if gpus.is_recorded(name, recorded)] == ([known] if known else [])


@pytest.mark.parametrize("name", ["advise", "sweep", "schedules"])
def test_more_sms_than_any_gpu_has_are_refused(name, lengths, capsys):
    assert main([*commands(lengths)[name], "--sms", "100000000"]) == 2
    assert capsys.readouterr().err == "error: sms: expected 1 to 4,096, got 100,000,000\n"


# --- what else differs under `schedules` ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], []),
        (["--cluster", "1"], []),
        (
            ["--latency", "200"],
            ["asking for a tile takes 200 ns instead of 415 ns: dynamic and balanced-dynamic alone"],
        ),
        (
            ["--latency", "200", "--schedule", "static"],
            ["--latency changes nothing: under static no tile is asked for"],
        ),
        (["--cluster", "2"], ["CTAs take blocks in pairs here and took them one by one in the recording"]),
        (["--gpu", "B200", "--latency", "0"], [COSTS, "asking for a tile takes 0 ns"]),
    ],
)
def test_what_differs_is_said_and_nothing_else(options, expected, capsys):
    said = documented(["schedules", STATIC, *options], capsys)["warnings"]
    assert len(said) == len(expected) and all(part in line for part, line in zip(expected, said, strict=True))
    text = printed(["schedules", STATIC, *options], capsys)
    assert all(f"warning: {line}" in text for line in said) and text.count("warning") == len(said)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ([DYNAMIC], ""),
        ([DYNAMIC, "--gpu", "B200", "--latency", "200"], "on another GPU or number of SMs and at another price"),
        ([DYNAMIC, "--gpu", "H100"], "on another GPU or number of SMs"),
        ([DYNAMIC, "--latency", "200"], "at another price of asking for a tile"),
        ([DYNAMIC, "--cluster", "2"], "with CTAs paired otherwise"),
        ([DYNAMIC, "--schedule", "balanced"], "dynamic is not among the schedules predicted here"),
        ([DYNAMIC, DYNAMIC], "a later file was measured under dynamic too"),
    ],
)
def test_a_file_that_is_not_compared_says_why(options, why, capsys, tmp_path):
    page = tmp_path / "s.html"
    text = printed(["schedules", STATIC, *options, "-o", str(page)], capsys)
    said = [line for line in text.splitlines() if "is not compared" in line]
    assert len(said) == bool(why) and all(DYNAMIC in line and why in line for line in said)
    assert ("is not compared" in page.read_text()) == bool(why)
    rows = {row["schedule"]: row for row in documented(["schedules", STATIC, *options], capsys)["rows"]}
    if "dynamic" in rows:
        assert (rows["dynamic"]["measured_ns"] is None) == (bool(why) and options != [DYNAMIC, DYNAMIC])


def test_a_price_of_asking_leaves_what_does_not_ask_as_it_was_measured(capsys):
    rows = documented(["schedules", STATIC, DYNAMIC, "--latency", "200"], capsys)["rows"]
    assert [row["measured_ns"] is not None for row in rows] == [True, False, False, False]


@pytest.mark.parametrize("latency", ["1e30", "inf", "nan", "-1"])
def test_a_price_beyond_a_second_is_refused(latency, capsys):
    assert main(["schedules", STATIC, "--latency", latency]) == 2
    error = capsys.readouterr().err
    assert "--latency" in error and error.count("\n") == 1


def test_no_difference_reads_minus_zero(capsys):
    files = [str(path) for path in sorted(examples.DATA.glob("hsp-*_forward_static.parquet"))]
    for file in files:
        text = printed(["schedules", file], capsys)
        assert "-0.0" not in text and re.search(r"\d %", text) and not re.search(r"\d%", text)


@pytest.mark.parametrize(
    "command", [["schedules", PAIRS], ["advise", "--recording", PAIRS], ["sweep", "--recording", PAIRS]]
)
def test_an_excerpt_is_refused_as_one(command, lengths, capsys):
    assert main([*command, *(["--lengths", lengths] if command[0] == "advise" else [])]) == 2
    error = capsys.readouterr().err
    assert "it is an excerpt (CTAs 0 to 7 of 132); give a whole recording" in error and error.count("\n") == 1


# --- how far a model reaches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name in examples.names() if name.startswith(EXTRAPOLATED) and "forward" in name]
)
def test_the_extrapolations_error_is_that_of_the_shipped_recordings(name):
    """Each of the package's fits is at most 18 % off hsp-extreme's measured makespans; it says so up to there."""
    found, work = tiles_of(examples.load(*name.split("_"))), workloads.get("hsp-extreme")
    model = cost_model(found)
    reached = modelled_tiles(found, model, found.shape, work.q_lens, work.kv_lens)
    for schedule in SCHEDULES:
        measured = tiles_of(examples.load("hsp-extreme", "forward", schedule)).measured_ns
        assert replay(reached, schedule).makespan_ns == pytest.approx(measured, rel=0.18)
    assert model_notes(model, [(16, model.longest)]) == ()
    for longest in (model.longest + 1, MEASURED_TO):
        assert "(18 % off at most from 8,166 to 32,768" in model_notes(model, [(16, longest)])[0]
    assert "18 %" not in model_notes(model, [(16, MEASURED_TO + 1)])[0]


def test_what_is_not_the_packages_model_quotes_no_error_of_it(like):
    other = dataclasses.replace(cost_model(like), fixed_ns=1.0)
    (note,) = model_notes(other, [(16, MEASURED_TO)])
    assert "18 %" not in note and note.endswith(
        "extrapolated, to 4.01× the longest: how far off it is there is not known"
    )


def test_a_fit_to_few_tiles_is_warned_of(lengths, capsys):
    command = ["advise", "--lengths", lengths, "--recording", TINY]
    said = documented(command, capsys)["warnings"]
    assert any("fitted to 10 tiles, expected 30 or more" in line for line in said)
    assert any("31.8× the longest: how far off it is there is not known" in line for line in said)
    assert not any("18 %" in line for line in said)
    assert all(f"warning: {line}" in printed(command, capsys) for line in said)


def test_lengths_below_the_fit_are_noted_where_that_matters(like):
    model = cost_model(like)
    assert model_notes(model, [(1, 100)]) == () and model_notes(model, [(0, 0)]) == ()
    long = dataclasses.replace(model, shortest=4000)
    assert "as few as 10 columns" in model_notes(long, [(10, 5000)])[0]


def test_columns_met_are_of_tiles_with_work(like):
    model = cost_model(like)
    some = modelled_tiles(like, model, like.shape, np.array([256, 256, 256]), np.array([0, 70, 5]))
    assert columns_met(some) == (5, 70)
    none = modelled_tiles(like, model, like.shape, np.array([256]), np.array([0]))
    assert columns_met(none) == (0, 0)


# --- why this schedule ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_choice_that_is_not_the_fastest_says_so(like, seed):
    rng = np.random.default_rng(seed)
    lens = np.minimum(rng.lognormal(6, 0.2 * (seed % 6), 300 + 100 * seed), 8000).astype(np.int64)
    found = advise(like, like.shape, np.full(len(lens), 256), lens)
    expected = {each.schedule: each.makespan_ns for each in found.replays}
    assert expected[found.fastest] == min(expected.values())
    assert expected[found.choice] <= expected[found.fastest] * (1 + REPLAY_ERROR)
    within = f"within the replay's error (3.5 %) of the fastest, {found.fastest} ({duration(expected[found.fastest])})"
    assert (within in found.words) == (found.choice != found.fastest)


def test_the_fastest_is_in_the_document(lengths, capsys):
    found = documented(["advise", "--lengths", lengths, "--recording", TINY], capsys)
    assert found["choice"] == "dynamic" and found["fastest"] == "balanced-dynamic"
    assert "within the replay's error (3.5 %) of the fastest, balanced-dynamic (" in found["advice"]


def test_a_shipped_recording_is_known_by_its_tiles(like, tmp_path):
    """Whatever its file is called."""
    copy = shutil.copy(examples.DATA / "hsp-loguniform_forward_balanced-dynamic.parquet", tmp_path / "mine.parquet")
    beyond = [(16, MEASURED_TO)]
    (note,) = model_notes(cost_model(tiles_of(Recording.read(copy))), beyond)
    assert "18 % off at most" in note and (note,) == model_notes(cost_model(like), beyond)
