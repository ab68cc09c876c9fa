"""`waterfall`: what the times of kernels without one of their stages say of the stages, and what is compiled of them.

That they end and stay within their tensors: `test_left_out`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import test_turns  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from jfa import lanes, workloads  # noqa: E402
from jfa.impl import choice  # noqa: E402
from jfa.impl.hopper import left_out  # noqa: E402
from profiling import examples  # noqa: E402
from profiling import waterfall as analysis  # noqa: E402
from profiling.__main__ import main  # noqa: E402
from profiling.errors import UserError  # noqa: E402
from profiling.launching import gpu, prepare  # noqa: E402
from profiling.lost import lost_time  # noqa: E402
from profiling.record import record_launcher  # noqa: E402

KERNELS = [(kernel, stage) for kernel, stages in left_out.STAGES.items() for stage in stages]
EXACT = np.full(12, 2.0)


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["--workload", "hsp-extrem"], "did you mean hsp-extreme"),
            (["--workload", "tiny", "--schedule", "dynamik"], "did you mean dynamic"),
            (["--workload", "tiny", "--direction", "bakward"], "did you mean backward"),
            (["--workload", "tiny", "--impl", "hoper"], "did you mean hopper"),
            (["--workload", "tiny", "--impl", "triton"], "waterfall needs a kernel with switches"),
            (["--workload", "tiny", "--repeats", "1"], "--repeats"),
        ],
    )
    def test_wrong_ones_are_one_line(self, arguments, expected, capsys):
        assert main(["waterfall", *arguments]) == 2
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1

    def test_without_a_gpu_it_says_so(self, device, capsys):
        if device == "cuda":
            pytest.skip("there is a GPU")
        assert main(["waterfall", "--workload", "tiny"]) == 2
        error = capsys.readouterr().err
        assert "found no CUDA GPU" in error and error.count("\n") == 1


class TestBounds:
    def test_what_is_quicker_without_a_stage_goes_with_it_at_least(self):
        noise = np.random.default_rng(0).normal(1, 0.002, (3, 40))
        times = {analysis.WHOLE: 2.0 * noise[0], "exp": 1.7 * noise[1], "loads": 2.0 * noise[2]}
        table = analysis.bounds(times, {"exp": 0.3}, {"exp": {"registers": 168, "stack_bytes": 8}})
        whole, exp, loads = table.to_dict("records")
        assert (whole["stage"], whole["words"], whole["bound"]) == ("whole kernel", "–", "–")
        assert exp["change"] == pytest.approx(-0.15, abs=0.002) and exp["low"] <= exp["change"] <= exp["high"] < 0
        assert exp["least"] == -exp["high"] <= 0.15 + 1e-3
        assert exp["bound"].startswith("at least 14.") and exp["bound"].endswith("% of the time goes with it")
        assert (exp["claimed"], exp["registers"], exp["stack_bytes"]) == (0.3, 168, 8)
        assert (loads["words"], loads["least"]) == ("no difference", 0.0) and "hidden" in loads["bound"]
        assert np.isnan(loads["claimed"]) and np.isnan(loads["registers"])
        assert table.attrs == {"grade": "measured", "results": "results discarded"}

    def test_what_is_slower_without_a_stage_bounds_nothing(self):
        row = analysis.bounds({analysis.WHOLE: EXACT, "exp": 1.2 * EXACT}, {}, {}).iloc[1]
        assert row["bound"].startswith("none: slower without it") and np.isnan(row["least"])

    @given(st.floats(0.2, 1.5), st.integers(3, 30), st.floats(0, 0.1))
    @settings(max_examples=30)
    def test_a_bound_is_never_more_than_was_seen(self, factor, rounds, spread):
        noise = np.random.default_rng(rounds).normal(1, spread, (2, rounds)).clip(0.5, 2)
        row = analysis.bounds({analysis.WHOLE: noise[0], "exp": factor * noise[1]}, {}, {}).iloc[1]
        assert np.isnan(row["least"]) or 0 <= row["least"] <= max(-row["low"], 0)

    def test_it_is_printed_with_its_grade_and_as_json(self, monkeypatch, capsys):
        table = analysis.bounds({analysis.WHOLE: EXACT, "exp": 0.8 * EXACT}, {"exp": 0.25}, {})
        table.attrs |= {"title": "tiny · forward · static · k", "warnings": ["slower when recorded"]}
        monkeypatch.setattr(analysis, "waterfall", lambda *_, **__: table)
        assert main(["waterfall", "--workload", "tiny"]) == 0
        text = capsys.readouterr().out
        assert text.count("results discarded") == 2 and "warning: slower when recorded" in text
        assert "at least 20.0 % of the time goes with it" in text and "25.0 %" in text and "measured" in text
        assert main(["waterfall", "--workload", "tiny", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["grade"], document["results"]) == ("measured", "results discarded")
        assert [row["least"] for row in document["rows"]] == [None, pytest.approx(0.2)]
        assert document["rows"][0]["registers"] is None


class TestClaims:
    def test_every_stage_feeds_barriers_that_there_are(self):
        assert {kernel: tuple(stages) for kernel, stages in analysis.FEEDS.items()} == left_out.STAGES
        fed = {barrier for stages in analysis.FEEDS.values() for barriers in stages.values() for barrier in barriers}
        assert fed <= set(lanes.WAITS)

    @pytest.mark.parametrize(
        ("workload", "direction", "kernel"),
        [
            ("tiny", "forward", "jfa_forward_hopper"),
            ("tiny", "backward", "jfa_backward_resident"),
            ("tiny-causal", "backward", "jfa_backward_hopper"),
        ],
    )
    def test_they_are_shares_of_what_the_compute_roles_wait(self, workload, direction, kernel):
        """Of recordings in the package."""
        recording = examples.waits(workload, direction)
        assert recording.metadata["kernel"]["name"] == kernel
        found, lost = analysis.claims(kernel, recording), lost_time(recording)
        assert tuple(found) == left_out.STAGES[kernel]
        assert found["loads"] == pytest.approx(sum(lost.waits[name] for name in analysis.FEEDS[kernel]["loads"]))
        assert 0 < found["loads"] < sum(lost.waits.values())
        assert np.isnan(found["exp"]) == (direction == "forward")


class TestSwitches:
    def test_codes_differ_and_a_kernel_has_its_own(self):
        assert left_out.CODES[""] == 0 and len(set(left_out.CODES.values())) == len(left_out.CODES)
        for kernel, stage in KERNELS:
            assert left_out.code(kernel, stage) > 0 == left_out.code(kernel, "")
        with pytest.raises(ValueError, match="jfa_forward_hopper can leave out exp, loads, store, got 'dq store'"):
            left_out.code("jfa_forward_hopper", "dq store")

    def test_what_has_no_switch_says_so_and_is_not_recorded_without(self, device):
        if device == "cuda":
            pytest.skip("the interpreter is off where there is a GPU")
        launcher = prepare(test_turns.FEW, "static", "forward", torch.device(device))
        with pytest.raises(UserError, match="jfa_forward can leave out nothing, got 'exp'"):
            launcher.without("exp")
        spoilt = dataclasses.replace(launcher, leave_out="exp")
        with pytest.raises(UserError, match="jfa_forward without exp is no kernel to record"):
            record_launcher(spoilt, test_turns.FEW, torch.device(device), "cta", 1, 2)


class TestCompiled:
    """By what the machine code of a kernel without a stage differs from the whole one's: by that stage."""

    @pytest.mark.parametrize("kernel", left_out.STAGES)
    def test_a_stage_is_gone_and_nothing_with_it(self, kernel):
        check(kernel, compiled(kernel, {}))

    @pytest.mark.slow
    @pytest.mark.parametrize("kernel", left_out.STAGES)
    @pytest.mark.parametrize("options", [{"dim": 64}, {"kind": "fp16"}], ids=str)
    def test_of_other_tensors(self, kernel, options):
        check(kernel, compiled(kernel, options))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("kernel", "options"),
        [
            ("jfa_forward_hopper", {"split": True}),
            ("jfa_forward_hopper", {"broadcast": False}),
            ("jfa_forward_hopper", {"broadcast": False, "causal": True}),
            ("jfa_backward_hopper", {"broadcast": False}),
            ("jfa_backward_hopper", {"broadcast": False, "causal": True}),
            ("jfa_backward_resident", {"cluster": 1}),
            ("jfa_backward_resident", {"add": True}),
        ],
        ids=str,
    )
    def test_of_other_launches(self, kernel, options):
        check(kernel, compiled(kernel, options))


def compiled(kernel: str, options: dict) -> dict[str, dict]:
    """Facts of a kernel by the stage left out, from a process that compiles: this one may interpret."""
    if not choice.has_tlx():
        pytest.skip("TLX comes with fbtriton (x86-64)")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    here = Path(__file__).resolve().parent
    environment["PYTHONPATH"] = os.pathsep.join([str(here.parent), str(here)])
    arguments = [sys.executable, __file__, json.dumps([kernel, options])]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(kernel: str, facts: dict[str, dict]) -> None:
    whole = facts[""]
    for stage in left_out.STAGES[kernel]:
        fact = facts[stage]
        assert fact["products"] == whole["products"] > 0, stage
        # Where they are from is the loads' own change: how often the compiler writes a step of theirs out may differ.
        copies = (1, 2) if stage == "loads" else (1,)
        assert whole["loads"] in [copy * fact["loads"] for copy in copies] and whole["loads"] > 0, stage
        assert not fact["serialised"], stage
        assert fact["registers"] == whole["registers"] and fact["stack"] <= whole["stack"] + 32, stage
        # Registers are allotted anew: up to five more spilled words, of some 490 instructions a round, are let pass.
        assert fact["loop_spills"] <= whole["loop_spills"] + 5, stage
        if stage != "exp":
            assert fact["exponentials"] == whole["exponentials"], stage
        # What is never done is in the code all the same; stores of what is staged all the same are not.
        assert fact["stores"] == whole["stores"] if stage != "dk/dv store" else fact["stores"] < whole["stores"], stage
    # The forward's factors of a row stay: two of a thread, beside 64 weights a step.
    most = whole["exponentials"] // 20 if kernel == "jfa_forward_hopper" else 0
    assert facts["exp"]["exponentials"] <= most < whole["exponentials"]


def compile_variants(kernel: str, options: dict) -> dict[str, dict]:
    """In a process that does not interpret: facts of the kernel's pinned configuration by the stage left out."""
    from jfa.config import HopperBackwardConfig, HopperResidentConfig, hopper_forward_config
    from profiling import cross_compile as cross

    compilers = {
        "jfa_forward_hopper": (cross.compile_hopper_forward, hopper_forward_config(options.get("dim", 128))),
        "jfa_backward_hopper": (cross.compile_hopper_backward, HopperBackwardConfig()),
        "jfa_backward_resident": (cross.compile_resident_backward, HopperResidentConfig()),
    }
    compile_one, config = compilers[kernel]
    found = {}
    for stage in ("", *left_out.STAGES[kernel]):
        made = compile_one(config, leave_out=stage, **options)
        found[stage] = {
            "products": made.sass.count("HGMMA"),
            "exponentials": made.sass.count("MUFU.EX2"),
            "loads": made.sass.count("UTMALDG"),
            "stores": made.sass.count("UTMASTG") + made.sass.count("UTMAREDG"),
            "serialised": "serialized" in cross.ptxas_says(made, options=config.ptx_options),
            "registers": made.registers,
            "stack": made.stack,
            "loop_spills": max(cross.loop_spills(made.sass)),
        }
    return found


@pytest.mark.gpu
class TestOnTheGpu:
    @pytest.mark.parametrize(
        ("workload", "direction", "kernel"),
        [
            ("tiny", "forward", "jfa_forward_hopper"),
            ("tiny", "backward", "jfa_backward_resident"),
            ("tiny-causal", "forward", "jfa_forward_hopper"),
            ("tiny-causal", "backward", "jfa_backward_hopper"),
        ],
    )
    def test_every_stage_has_a_row(self, workload, direction, kernel, capsys):
        hopper_or_skip()
        command = ["waterfall", "--workload", workload, "--direction", direction, "--repeats", "3"]
        assert main([*command, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        rows = document["rows"]
        assert [row["stage"] for row in rows] == [analysis.WHOLE, *left_out.STAGES[kernel]]
        assert document["results"] == "results discarded" and document["title"].endswith(kernel)
        assert all(row["median_ns"] > 0 and row["registers"] > 0 for row in rows)
        assert all(0 <= row["claimed"] <= 1 for row in rows if row["stage"] == "loads")
        assert main(command) == 0
        text = capsys.readouterr().out
        assert "results discarded" in text and all(f" {stage} " in text for stage in left_out.STAGES[kernel])

    @pytest.mark.parametrize("workload", ["tiny", "tiny-causal"])
    @pytest.mark.parametrize("direction", ["forward", "backward"])
    def test_the_whole_kernels_results_stay_what_they_were(self, workload, direction):
        from jfa.instrument import OFF

        hopper_or_skip()
        launcher = prepare(workloads.get(workload), "balanced", direction, gpu(), "hopper")
        launcher.run(OFF)
        before = [result.clone() for result in launcher.results]
        for stage in left_out.STAGES[launcher.kernel]:
            without = launcher.without(stage)
            without.run(OFF)
            assert without.results == []
        assert all(map(torch.equal, launcher.results, before))
        launcher.run(OFF)
        for result, expected in zip(launcher.results, before, strict=True):
            torch.testing.assert_close(result, expected, equal_nan=True)


def hopper_or_skip() -> None:
    if torch.cuda.get_device_capability() != choice.HOPPER or not choice.has_tlx():
        pytest.skip("needs an sm_90 GPU and TLX")


if __name__ == "__main__":
    print(json.dumps(compile_variants(*json.loads(sys.argv[1]))))
