"""The arithmetic of `bench`, its turns, and what it does without a GPU; on a GPU, a whole small run."""

import itertools
import json
import statistics
import time
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jfa.workloads import Workload
from profiling import bench as module
from profiling.bench import FEWEST_ROUNDS, MOST_ROUNDS, Row, against_best_peer, bench, find_peers, orders, summarise
from profiling.commands.bench import show, timed_workloads
from profiling.errors import UserError


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=50))
def test_median_and_spread_are_numpys(samples):
    median, iqr, tflops = summarise(samples, 2e12)
    low, high = np.percentile(samples, [25, 75])
    assert median == pytest.approx(np.median(samples))
    assert iqr == pytest.approx(high - low, abs=1e-9)
    assert tflops == pytest.approx(2e12 / (median * 1e-3) / 1e12)


def test_one_sample_has_no_spread():
    assert summarise([2.0], 4e9) == (2.0, 0.0, 2.0)


@given(st.integers(1, 9), st.integers(0, 40))
def test_in_every_round_each_runs_once_and_the_first_place_goes_round(count, rounds):
    found = list(orders(count, rounds))
    assert len(found) == rounds
    assert all(sorted(order) == list(range(count)) for order in found)
    firsts = [order[0] for order in found]
    assert max(map(firsts.count, range(count))) - min(map(firsts.count, range(count))) <= 2


@pytest.mark.parametrize("count", range(2, 12))
def test_each_runs_after_each_other_one_as_often(count):
    rounds = count if count % 2 == 0 else 2 * count
    follows = Counter(pair for order in orders(count, rounds) for pair in itertools.pairwise(order))
    assert set(follows.values()) == {rounds // count} and len(follows) == count * (count - 1)


def test_rounds_fit_the_time_within_bounds():
    assert module.round_count(0.0) == MOST_ROUNDS
    assert module.round_count(1e9) == FEWEST_ROUNDS
    assert module.round_count(30.0) == 50


def rows(*times):
    """(implementation, median, IQR) of one workload and direction."""
    made = [Row("w", "forward", name, "", median, iqr) for name, median, iqr in times]
    return pd.DataFrame([vars(row) for row in made])


def test_the_best_peer_is_the_measure_and_the_spread_counts():
    table = rows(("jfa-triton", 1.0, 0.01), ("jfa-triton", 1.95, 0.01), ("fa4", 2.0, 0.1), ("fa3", 3.0, 0.1))
    assert against_best_peer(table).tolist()[:2] == [2.0, 1.0]
    assert against_best_peer(table).isna().tolist() == [False, False, True, True]


def test_without_a_peer_that_ran_there_is_nothing_to_compare_with():
    table = rows(("jfa-triton", 1.0, 0.01), ("fa4", None, None))
    assert against_best_peer(table).isna().all()
    assert against_best_peer(rows(("jfa-triton", 1.0, 0.01))).isna().all()
    assert against_best_peer(rows(("jfa-triton", None, None), ("fa4", 1.0, 0.1))).isna().all()


def test_an_exception_is_one_short_line():
    assert module.one_line(ValueError("a\n  b")) == "ValueError: a b"
    assert len(module.one_line(RuntimeError("x" * 1000))) == 200


def test_peers_that_do_not_import_say_why():
    found, left_out = find_peers()
    assert set(found) | set(left_out) == {"fa4", "fa3", "torch-varlen"}
    assert not set(found) & set(left_out)
    assert all(":" in why for why in left_out.values())


def test_without_a_gpu_there_is_no_number(device):
    if device == "cuda":
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="GPU"):
        bench([])


class CpuClock(module.GpuClock):
    """The same turns, timed by the processor's clock: kernels run in Triton's interpreter."""

    device = "cpu"

    def __init__(self):
        self.order = []

    def settle(self):
        pass

    def time(self, run):
        self.order.append(run)
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3


@pytest.fixture
def few_rounds(monkeypatch, device):
    if device == "cuda":
        pytest.skip("the interpreter is off where there is a GPU")
    monkeypatch.setattr(module, "WARMUP_RUNS", 1)
    monkeypatch.setattr(module, "FEWEST_ROUNDS", 2)
    monkeypatch.setattr(module, "MOST_ROUNDS", 2)


SMALL = Workload("small", 1, 1, 64, np.array([32, 32]), np.array([40, 0]), broadcast_q=True)


def raises(*args, **named):
    raise RuntimeError("no kernel\nfor this")


def sdpa(q, k, v, cu_q, cu_k, max_q, max_k, causal, window):
    """A peer: torch's own attention, sequence by sequence."""
    import torch

    pieces = []
    for begin, end, first, last in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        one, keys, values = (x.transpose(0, 1) for x in (q[begin:end], k[first:last], v[first:last]))
        pieces.append(torch.nn.functional.scaled_dot_product_attention(one, keys, values).nan_to_num().transpose(0, 1))
    return torch.cat(pieces), "lse"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_all_take_turns_and_one_that_raises_does_not_end_the_run(few_rounds, direction):
    clock = CpuClock()
    peers = {"broken": raises, "sdpa": sdpa}
    found, interrupted = module.measure(SMALL, direction, ["static", "balanced-dynamic"], peers, clock)
    assert not interrupted
    errors = [((row.implementation, row.schedule), row.error) for row in found]
    broken = "RuntimeError: no kernel for this"
    expected = {"jfa-triton": "", "broken": broken, "sdpa": ""}
    if direction == "backward":
        expected |= {"broken without dQ sum": broken, "sdpa without dQ sum": ""}
    names = ["jfa-triton", "jfa-triton", *sorted(list(expected)[1:])]
    assert [(name, error) for (name, _), error in errors] == [(name, expected[name]) for name in names]
    assert [schedule for (_, schedule), _ in errors] == ["static", "balanced-dynamic", *[""] * (len(names) - 2)]
    assert [row.rounds for row in found] == [0 if row.error else 2 for row in found]
    assert all(row.tflops == pytest.approx(SMALL.flop(direction) / row.median_ms / 1e9) for row in found if row.rounds)
    assert len(clock.order) == 3 * sum(not row.error for row in found)


def test_the_broadcast_q_is_expanded_for_peers_and_gives_the_same_output(few_rounds):
    inputs = SMALL.inputs("cpu", requires_grad=True)
    (ours,) = module._ours(SMALL, inputs, ["static"])
    (theirs,) = module._theirs(SMALL, inputs, {"sdpa": sdpa}, "forward")
    out = ours.forward()
    np.testing.assert_allclose(
        out.detach().float().reshape(-1), theirs.forward().detach().float().reshape(-1), atol=2e-2, rtol=2e-2
    )


def test_peers_sum_dq_over_the_batch_and_what_leaves_that_out_is_no_measure(few_rounds):
    inputs = SMALL.inputs("cpu", requires_grad=True)
    (ours,) = module._ours(SMALL, inputs, ["static"])
    whole, part = module._theirs(SMALL, inputs, {"sdpa": sdpa}, "backward")
    assert (whole.implementation, part.implementation) == ("sdpa", "sdpa without dQ sum")
    clock = CpuClock()
    dq, theirs, unsummed = (
        module._prepare(contestant, inputs, "backward", clock).run()[0].detach().float()
        for contestant in (ours, whole, part)
    )
    np.testing.assert_allclose(dq, theirs, atol=3e-2, rtol=3e-2)
    assert unsummed.shape[0] == SMALL.batch * theirs.shape[0]
    table = rows(("jfa-triton", 1.0, 0.01), ("fa4", 3.0, 0.1), ("fa4 without dQ sum", 2.0, 0.1))
    assert against_best_peer(table).tolist()[0] == 3.0


def test_an_interrupt_keeps_what_was_measured(few_rounds):
    class Impatient(CpuClock):
        def time(self, run):
            if len(self.order) == 4:
                raise KeyboardInterrupt
            return super().time(run)

    found, interrupted = module.measure(SMALL, "forward", ["static", "balanced"], {}, Impatient())
    assert interrupted
    assert [row.rounds for row in found] == [1, 1]


def table_of(rows, **facts):
    table = pd.DataFrame([vars(row) for row in rows], columns=list(Row.__dataclass_fields__))
    table.attrs = {
        "gpu": "a GPU",
        "versions": {"torch": "2.13"},
        "created": "",
        "left_out": {},
        "interrupted": False,
        "behind": 0,
    } | facts
    return table


def test_a_peer_that_raised_is_a_row_that_says_so(capsys):
    made = [
        Row("w", "forward", "jfa-triton", "static", 1.5, 0.01, 400.0, 50),
        Row("w", "forward", "fa4", "", error="E: x"),
    ]
    show(table_of(made, left_out={"fa3": "ImportError: no"}), True, False)
    output = capsys.readouterr().out
    assert "E: x" in output and "400" in output and "measured" in output
    assert "note: fa3 left out: ImportError: no" in output
    assert "leave out: no gradient of the shared Q" in " ".join(output.split())


def test_what_was_measured_before_an_interrupt_is_shown(capsys):
    show(table_of([Row("w", "forward", "jfa-triton", "static", 1.5, 0.01, 400.0, 50)], interrupted=True), False, True)
    found = json.loads(capsys.readouterr().out)
    assert found["interrupted"] and len(found["rows"]) == 1
    assert found["rows"][0]["median_ms"] == 1.5 and found["rows"][0]["against_best_peer"] is None
    assert found["grade"] == "measured"


def test_timed_workloads_leave_out_those_made_for_a_try():
    names = timed_workloads()
    assert "hsp-loguniform" in names and "dense-4096" in names
    assert not [name for name in names if name.startswith("tiny")]


@pytest.mark.gpu
def test_a_slow_host_is_not_in_the_time():
    import torch

    clock = module.GpuClock()
    data = torch.zeros(2**20, device="cuda")

    def run(pause):
        data.add_(1)
        time.sleep(pause)
        data.add_(1)

    run(0), clock.settle()
    quick = statistics.median(clock.time(lambda: run(0)) for _ in range(5))
    slow = statistics.median(clock.time(lambda: run(0.003)) for _ in range(5))
    assert slow < quick + 1.0


@pytest.mark.gpu
def test_a_small_run_on_the_gpu():
    from jfa import workloads

    table = bench([workloads.get("tiny")], schedules=("static", "balanced-dynamic"), peers=True)
    ours = table[table["implementation"].str.startswith("jfa")]
    assert ours["error"].eq("").all() and len(ours) >= 4
    assert (ours["median_ms"] > 0).all() and (ours["rounds"] >= FEWEST_ROUNDS).all()
    assert statistics.median(ours["tflops"]) > 0
