"""Runs in turn: `race` and `overhead`, whose times are compared within rounds; on a GPU, whole small runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from jfa import workloads  # noqa: E402
from profiling import race as racing  # noqa: E402
from profiling.__main__ import main  # noqa: E402
from profiling.bench import WARMUP_RUNS  # noqa: E402
from profiling.launching import prepare  # noqa: E402
from profiling.overhead import LEVELS, PROTON, WAITS, _row, _waits_alone, overhead  # noqa: E402
from profiling.recording import Recording  # noqa: E402
from profiling.turns import take_turns  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
FEW = replace(workloads.get("tiny"), name="few", kv_lens=np.array([70, 0, 130]), q_lens=np.array([32, 32, 32]))


class Clock:
    """The processor's, and what ran in which order."""

    def __init__(self) -> None:
        self.ran: list = []

    def time(self, run) -> float:
        self.ran.append(run)
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)


def test_a_round_has_every_run_once_and_a_warm_up_comes_before():
    clock = Clock()
    runs = {name: (lambda name=name: name) for name in "abc"}
    taken = take_turns(runs, clock, 6)
    assert {name: len(times) for name, times in taken.items()} == {"a": 6, "b": 6, "c": 6}
    timed = clock.ran[3 * WARMUP_RUNS :]
    for start in range(0, len(timed), 3):
        assert {run() for run in timed[start : start + 3]} == set("abc")


def test_a_slower_schedule_is_said_to_be_so(device):
    if device == "cuda":
        pytest.skip("the interpreter is off where there is a GPU")
    launchers = {name: prepare(FEW, name, "forward", torch.device(device)) for name in ("static", "dynamic")}

    class Slow(Clock):
        def time(self, run) -> float:
            run()
            return 2.0 if run.func is launchers["dynamic"].run else 1.0

    table = racing.times_of(launchers, Slow(), 4)
    assert table["schedule"].tolist() == ["static", "dynamic"]
    assert table["words"].tolist() == ["–", "+100.0 % (+100.0 to +100.0)"]
    assert table["median_ns"].tolist() == [1e6, 2e6]


def test_the_time_of_an_event_is_what_lanes_took_longer():
    plain, slower = np.full(10, 1.0), np.full(10, 1.1)
    row = _row("tile", slower, plain, events=1000, lanes=100)
    assert row["event_ns"] == pytest.approx(0.1e6 * 100 / 1000)
    assert np.isnan(_row("tile", plain, plain, 1000, 100)["event_ns"])
    assert row["words"].startswith("+10.0 %")


def test_waits_alone_cost_what_level_wait_costs_more_than_level_tile():
    rng = np.random.default_rng(0)
    clock = rng.normal(0, 0.2, 30)  # of a round, which all its runs share
    times = {level: clock + cost for level, cost in {"off": 10.0, "tile": 10.1, "wait": 10.7}.items()}
    row = _row(WAITS, _waits_alone(times), times["off"], events=600, lanes=100)
    assert row["change"] == pytest.approx(0.06, abs=0.001) and row["words"].startswith("+6.0 %")
    assert row["event_ns"] == pytest.approx(0.6e6 * 100 / 600)


@pytest.mark.parametrize("command", ["race", "overhead"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--workload", "hsp-extrem"], "did you mean hsp-extreme"),
        (["--workload", "tiny", "--schedule", "dynamik"], "did you mean dynamic"),
        (["--workload", "tiny", "--impl", "cuda"], "impl"),
        (["--workload", "tiny", "--direction", "both"], "direction"),
        (["--workload", "tiny", "--repeats", "1"], "--repeats"),
    ],
)
def test_wrong_arguments_are_one_line(command, arguments, expected, capsys):
    assert main([command, *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


@pytest.mark.parametrize("command", ["race", "overhead"])
def test_without_a_gpu_it_says_so(command, device, capsys):
    if device == "cuda":
        pytest.skip("there is a GPU")
    assert main([command, "--workload", "tiny"]) == 2
    assert "found no CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_race_on_the_gpu_keeps_what_it_recorded(direction, tmp_path, capsys):
    pytest.importorskip("plotly")
    folder = tmp_path / "race"
    command = ["race", "--workload", "tiny", "--direction", direction, "--repeats", "3", "-o", str(folder)]
    assert main([*command, "--schedule", "static", "--schedule", "balanced-dynamic"]) == 0
    said = capsys.readouterr().out
    assert "balanced-dynamic" in said and "measured" in said
    kept = sorted(folder.glob("*.parquet"))
    assert [Recording.read(path).schedule for path in kept] == ["balanced-dynamic", "static"]


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_ledger_on_the_gpu_has_every_level(direction):
    table = overhead(workloads.get("tiny"), direction=direction, rounds=3)
    assert table["level"].tolist()[:3] == ["off", *LEVELS[:2]]
    assert (table["median_ns"] > 0).all() and (table["registers"] > 0).all()
    assert table["events"].tolist()[0] == 0 and table["events"].iloc[2] > 0
    assert table["config_hash"].nunique() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_protons_scopes_stand_beside_the_levels_on_the_gpu(direction):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("roles that wait are sm_90's")
    table = overhead(workloads.get("tiny"), direction=direction, rounds=3, proton=True).set_index("level")
    assert table.loc[PROTON, "events"] == table.loc["wait", "events"] - table.loc["tile", "events"] > 0
    assert table.loc[[WAITS, PROTON], "median_ns"].gt(0).all()
    assert table.loc[PROTON, "shared_bytes"] > table.loc["off", "shared_bytes"], "its ring is not there"


def test_protons_scopes_are_compiled_in_and_nothing_of_them_stays():
    pytest.importorskip("triton.language.extra.tlx")
    script = (
        "from jfa.config import hopper_forward_config as pinned\n"
        "from profiling import cross_compile, proton_scopes\n"
        "with proton_scopes.compiling(232448):\n"
        "    print(cross_compile.compile_hopper_forward(pinned(128)).sass.count('CS2R'))\n"
        "print(cross_compile.compile_hopper_forward(pinned(128)).sass.count('CS2R'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    scoped, plain = map(int, done.stdout.split())
    assert scoped > plain + 20, "each wait reads a clock twice, and zeroes registers no more often"
