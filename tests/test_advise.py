"""Advice on a user's own lengths, and the sweep: from lengths in a file to the schedule to choose."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import pytest

from jfa import workloads
from profiling import examples
from profiling.__main__ import main
from profiling.advice import advise
from profiling.errors import UserError
from profiling.gpus import SMS, sm_count
from profiling.lengths import read_lengths
from profiling.recording import Recording
from profiling.schedules import SCHEDULES
from profiling.sweep import Population, sweep
from profiling.tiles_measured import tiles_of

STATIC = examples.DATA / "hsp-loguniform_forward_static.parquet"
LENGTHS = [100, 0, 4000, 7]


@pytest.fixture(scope="module")
def like():
    return tiles_of(Recording.read(STATIC))


# --- lengths in files ----------------------------------------------------------------------------------------------


def test_every_kind_of_file_is_read(tmp_path):
    np.save(tmp_path / "a.npy", np.array(LENGTHS, dtype=np.int32))
    np.save(tmp_path / "f.npy", np.array(LENGTHS, dtype=np.float64))
    pd.DataFrame({"length": LENGTHS}).to_parquet(tmp_path / "a.parquet")
    pd.DataFrame({"id": range(4), "length": LENGTHS}).to_parquet(tmp_path / "two.parquet")
    (tmp_path / "bare.csv").write_text("\n".join(map(str, LENGTHS)) + "\n")
    (tmp_path / "named.csv").write_text("length\n" + "\n".join(map(str, LENGTHS)))
    (tmp_path / "two.csv").write_text("id,length\n" + "\n".join(f"{i},{n}" for i, n in enumerate(LENGTHS)))
    for name in ("a.npy", "f.npy", "a.parquet", "bare.csv", "named.csv"):
        assert read_lengths(tmp_path / name).tolist() == LENGTHS, name
    for name in ("two.parquet", "two.csv"):
        assert read_lengths(tmp_path / name, "length").tolist() == LENGTHS
        with pytest.raises(UserError, match=r"has 2 columns \(id, length\); say which with --column"):
            read_lengths(tmp_path / name)
        with pytest.raises(UserError, match="has no column 'lens'; it has id, length"):
            read_lengths(tmp_path / name, "lens")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3, -1], "length 1 .* is -1: it is negative"),
        ([3.0, float("nan")], "length 1 .* is nan: it is not a number"),
        ([3.5], "length 0 .* is 3.5: it is not whole"),
        ([2**31], "length 0 .* is over"),
        ([float("inf")], "length 0 .* is over"),
        ([], "holds no lengths"),
        ([[1, 2]], r"has shape \(1, 2\)"),
        (["twelve"], "holds values of dtype <U6; expected whole numbers"),
    ],
)
def test_wrong_lengths_say_which_and_why(values, expected, tmp_path):
    np.save(tmp_path / "x.npy", np.array(values))
    with pytest.raises(UserError, match=expected):
        read_lengths(tmp_path / "x.npy")


@pytest.mark.parametrize("first", ["1e3", "5 ", " 5", "5.0", "-0"])
def test_a_number_is_no_heading(first, tmp_path):
    (tmp_path / "x.csv").write_text(f"{first}\n7\n8\n")
    assert read_lengths(tmp_path / "x.csv").tolist() == [int(float(first)), 7, 8]


def test_more_tiles_than_fit_are_refused(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.full(200, 2_000_000_000))
    assert main(["advise", "--lengths", str(tmp_path / "x.npy")]) == 2
    error = capsys.readouterr().err
    assert "tiles, expected 100,000,000 at most" in error and error.count("\n") == 1


def test_a_column_is_of_the_tables_alone(tmp_path, capsys):
    np.save(tmp_path / "keys.npy", np.array([100, 300]))
    pd.DataFrame({"a": [1, 2], "n": [40, 50]}).to_parquet(tmp_path / "queries.parquet")
    queries = ["--query-lengths", str(tmp_path / "queries.parquet")]
    assert main(["advise", "--lengths", str(tmp_path / "keys.npy"), *queries, "--column", "n"]) == 0
    capsys.readouterr()
    assert main(["advise", "--lengths", str(tmp_path / "keys.npy"), "--column", "n"]) == 2
    assert "has no columns; leave --column out" in capsys.readouterr().err


def test_wrong_lengths_in_tables(tmp_path):
    (tmp_path / "x.csv").write_text("length\n3\n\n4\n")
    with pytest.raises(UserError, match="length 1 .* is nan: it is not a number"):
        read_lengths(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_text("length\n3\n4\nfive\n")
    with pytest.raises(UserError, match="length 2 .* is five: it is not a number"):
        read_lengths(tmp_path / "x.csv")
    pd.DataFrame({"n": [1, None]}).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(UserError, match="length 1 .* is not a number"):
        read_lengths(tmp_path / "x.parquet")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    for name in ("empty.csv", "torn.parquet"):
        with pytest.raises(UserError, match="could not be read as"):
            read_lengths(tmp_path / name)
    with pytest.raises(UserError, match="there is no such file"):
        read_lengths(tmp_path / "none.npy")
    with pytest.raises(UserError, match="expected lengths as .npy"):
        read_lengths(tmp_path / "lengths.txt")


# --- advice --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hsp-loguniform", "hsp-half-empty"])
def test_advice_agrees_with_what_was_measured(like, name):
    """The schedule that it chooses is within 3 % of the quickest one measured."""
    work = workloads.get(name)
    found = advise(like, like.shape, work.q_lens, work.kv_lens)
    measured = {
        schedule: tiles_of(Recording.read(examples.DATA / f"{name}_forward_{schedule}.parquet")).measured_ns
        for schedule in SCHEDULES
    }
    assert measured[found.choice] <= 1.03 * min(measured.values())
    assert found.choice in found.words and "faster than static" in found.words
    assert found.pairs_wasted == pytest.approx(1 - work.kv_lens.sum() / (len(work.kv_lens) * work.kv_lens.max()))
    assert found.padded_ns > 3 * min(each.makespan_ns for each in found.replays)
    assert found.empty == (work.kv_lens == 0).sum() and not found.notes


def test_equal_lengths_need_no_schedule(like):
    lens = np.full(132, 1024)
    found = advise(like, like.shape, np.full(132, 128), lens)
    ends = r"and no schedule is expected to take less|within the replay's error \(3.5 %\) of .*, and the simplest"
    assert found.choice == "static" and re.fullmatch(rf"choose static: .* expected, ({ends})", found.words)
    assert found.tokens_wasted == 0 and found.padded_ns > 0


def test_lengths_beyond_the_model_are_noted(like):
    found = advise(like, like.shape, np.array([256]), np.array([50_000]))
    assert "extrapolated" in found.notes[0]


def test_no_rows_is_nothing_to_schedule(like):
    with pytest.raises(UserError, match="make no tiles"):
        advise(like, like.shape, np.array([0]), np.array([5]))
    only_empty = advise(like, like.shape, np.array([256, 256]), np.array([0, 0]))
    assert only_empty.empty == 2 and only_empty.pairs_wasted == 0


# --- the sweep -----------------------------------------------------------------------------------------------------


def test_a_sweep_of_a_hundred_points(like):
    seen = []
    table = sweep(like, Population(), progress=lambda done, total: seen.append((done, total)))
    assert len(table) == 100 * len(SCHEDULES) and seen[-1] == (100, 100)
    assert (table["predicted_ns"] >= table["bound_ns"]).all() and table.attrs["grade"] == "modelled"
    assert (table[table["schedule"] == "static"]["gain"] == 1.0).all()
    alike = table[(table["density"] == 1.0) & (table["skew"] == 0.0)]
    skewed = table[(table["density"] == 0.5) & (table["skew"] == 1.8)]
    assert set(alike["best"]) == {"static"} and skewed["best"].iloc[0].startswith("balanced")
    assert skewed["gain"].max() > 1.3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"densities": [0.0]}, "density 0.0: expected a share"),
        ({"densities": [1.5]}, "density 1.5: expected a share"),
        ({"skews": [-1.0]}, "skew -1.0: expected"),
        ({"skews": [float("nan")]}, "skew nan: expected"),
        ({"skews": []}, "at least one density and one skew"),
        ({"population": Population(batch=0)}, "batch: expected 1 to 100,000,000, got 0"),
    ],
)
def test_wrong_grids_are_refused(like, arguments, expected):
    with pytest.raises(UserError, match=expected):
        sweep(like, **{"population": Population(), **arguments})


def test_lengths_are_as_dense_and_skewed_as_asked():
    lens = Population(batch=4000, longest=10**9).lengths(0.25, 1.0)
    assert (lens > 0).sum() == 1000
    assert np.log(lens[lens > 0]).std() == pytest.approx(1.0, rel=0.1)
    assert set(Population().lengths(1.0, 0.0)) <= {1023, 1024}


# --- commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def lengths(tmp_path):
    np.save(tmp_path / "lengths.npy", workloads.get("hsp-loguniform").kv_lens)
    return str(tmp_path / "lengths.npy")


def test_advise_prints_what_to_choose(lengths, capsys):
    assert main(["advise", "--lengths", lengths, "--queries", "256"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"choose balanced: 1\.\d+ ms expected, 1\.2\d× faster than static", text)
    assert "83.4 % of the keys" in text and "modelled: " in text and "132 SMs" in text
    assert main(["advise", "--lengths", lengths, "--gpu", "b200", "--causal", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["choice"] in SCHEDULES and "148 SMs" in found["grade"] and len(found["rows"]) == 4


def test_schedules_sets_predictions_beside_measurements(capsys, tmp_path):
    dynamic = str(examples.DATA / "hsp-loguniform_forward_dynamic.parquet")
    assert main(["schedules", str(STATIC), dynamic, "-o", str(tmp_path / "s.html")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"dynamic .*1\.8\d\d ms +│ +\+1\.7 %", text) and "modelled on tile costs measured on" in text
    assert (tmp_path / "s.html").stat().st_size > 1_000_000
    assert main(["schedules", str(STATIC), "--gpu", "B200", "--latency", "0", "--cluster", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["schedule"] for row in rows] == list(SCHEDULES)
    assert {row["sms"] for row in rows} == {148} and {row["measured_ns"] for row in rows} == {None}


def test_sweep_prints_a_grid_and_draws_it(capsys, tmp_path):
    assert main(["sweep", "--densities", "0.5,1", "--skews", "0,1.5", "-o", str(tmp_path / "s.html")]) == 0
    text = capsys.readouterr().out
    assert "static 1.00×" in text and "skew 1.5" in text
    assert "static is enough at 1 of 4 points" in (tmp_path / "s.html").read_text()
    assert main(["sweep", "--densities", "1", "--skews", "1", "--sms", "108", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == len(SCHEDULES)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["advise", "--lengths", "L", "--gpu", "H300"], "--gpu: 'H300' is not in the table (H100, H200)"),
        (["advise", "--lengths", "L", "--gpu", "H100", "--sms", "3"], "both say how many SMs there are"),
        (["advise", "--lengths", "nowhere.npy"], "there is no such file"),
        (["advise", "--lengths", "L", "--queries", "3", "--query-lengths", "L"], "both say how many queries"),
        (["advise", "--lengths", "L", "--recording", "nowhere.parquet"], "nowhere.parquet"),
        (["advise", "--lengths", "L", "--recording", "BACK"], "all meet 256 columns"),
        (["sweep", "--skews", "1,x"], "--skews '1,x': expected numbers between commas"),
        (["sweep", "-o", "x.png"], "expected a name that ends in .html"),
        (["schedules", "STATIC", "--schedule", "gird"], "schedule: there is none named 'gird'"),
        (["schedules", "STATIC", "BACK"], "these are not launches of one workload"),
        (["schedules", "STATIC", "--gpu", "RTX"], "give its number of SMs with --sms"),
    ],
)
def test_wrong_input_is_one_line(command, expected, lengths, capsys):
    files = {"L": lengths, "STATIC": str(STATIC)}
    files["BACK"] = str(examples.DATA / "hsp-loguniform_backward_static.parquet")
    assert main([files.get(word, word) for word in command]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_gpus_are_known_in_either_case():
    assert sm_count("h100") == sm_count("H100") == 132 and all(sms > 0 for sms in SMS.values())
