"""Ablations: the plan, the comparison, the minding of a child that hangs or dies, and the report of real runs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from jfa import workloads  # noqa: E402
from jfa.config import HopperBackwardConfig, HopperForwardConfig  # noqa: E402
from jfa.impl import choice  # noqa: E402
from profiling.__main__ import main  # noqa: E402
from profiling.ablation import child, clocks, results  # noqa: E402
from profiling.ablation.compiled import modelled_ms  # noqa: E402
from profiling.ablation.effects import drift, effect  # noqa: E402
from profiling.ablation.plan import begun_from, full_setting, make_plan, switches_of  # noqa: E402
from profiling.ablation.report import write_report  # noqa: E402
from profiling.ablation.run import PROGRESS, described, measure, read_progress  # noqa: E402
from profiling.errors import UserError  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def plan_of(impl="triton", direction="forward", capability=(9, 0), names=(), resident=False):
    return make_plan(full_setting(impl, direction, capability, 128, 2, resident), names)


# --- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_the_ladder_leads_from_plain_to_full(impl, direction, resident):
    plan = plan_of(impl, direction, resident=resident)
    full, plain = plan.named("full"), plan.named("plain")
    rungs = [variant for variant in plan.variants if variant.kind == "rung"]
    assert rungs[-1].key == full.key and rungs[0].against == "plain"
    for variant in plan.variants:
        if variant.against:
            other = plan.named(variant.against).values
            changed = [name for name in variant.values if variant.values[name] != other[name]]
            assert changed == [variant.switch]
            assert plan.setting.changed(variant.values) != plan.setting.changed(other)
    assert all(plain.values[s.name] == (s.full if s.extra else s.other) for s in plan.switches)
    settings = plan.settings()
    assert len(settings) == len({variant.key for variant in plan.variants})
    assert settings[full.key] == plan.setting
    for key, setting in settings.items():
        again = child.setting_of(json.loads(json.dumps(described(setting))))
        assert again == setting, key


def test_switches_can_be_chosen_and_are_named():
    plan = plan_of("hopper", names=("peel", "schedule"))
    assert [switch.name for switch in plan.switches] == ["schedule", "peel"]
    assert {v.name for v in plan.variants} >= {"full", "without peel", "schedule static", "plain", "plain + peel"}
    with pytest.raises(UserError, match="the hopper forward has none named 'pel'; did you mean peel"):
        switches_of(full_setting("hopper", "forward", (9, 0), 128, 2), ["pel"])


def begun(*given, direction="forward", resident=False, impl="hopper"):
    return begun_from(full_setting(impl, direction, (9, 0), 128, 2, resident), given, resident)


def test_rounding_beside_is_a_switch_of_the_kernel_that_does_it():
    of_its_own, of_a_shared_q = (plan_of("hopper", "backward", resident=resident) for resident in (False, True))
    assert "round_beside" in {switch.name for switch in of_its_own.switches}
    assert "round_beside" not in {switch.name for switch in of_a_shared_q.switches}


def test_an_ablation_may_begin_from_another_configuration():
    assert begun() == full_setting("hopper", "forward", (9, 0), 128, 2)
    assert begun("peel=false", "stages=1", "split=False").config == HopperForwardConfig(peel=False, stages=1)
    assert not begun("split=False").split and begun("schedule=dynamic").schedule == "dynamic"
    shared = begun("stages=2", "dq=shared", direction="backward", resident=True)
    assert shared.config == HopperBackwardConfig(stages=2)
    plan = make_plan(shared)
    assert next(switch for switch in plan.switches if switch.name == "stages").full == 2
    assert plan.settings()[plan.named("full").key] == shared
    one = make_plan(begun("stages=1", "prefetch=False", direction="backward"))
    assert not {"stages", "prefetch"} & {switch.name for switch in one.switches}, "as it is otherwise already"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("stages", "--from stages: expected NAME=VALUE, such as stages=1"),
        ("stags=1", "--from: the hopper backward has no 'stags'; did you mean stages"),
        ("stages=two", "--from stages=two: expected a whole number, such as 3"),
        ("prefetch=1", "--from prefetch=1: expected True or False"),
        ("schedule=dynamical", "--from: schedules have no 'dynamical'; did you mean dynamic"),
        ("dq=resident", "--from: dq has no 'resident'; there are shared"),
        ("split=True", "--from: the hopper backward has no 'split'"),
    ],
)
def test_what_an_ablation_cannot_begin_from_is_one_line(given, said, tmp_path, capsys):
    with pytest.raises(UserError, match=re.escape(said)):
        begun(given, direction="backward")
    command = ["ablate", "--workload", "tiny-causal", "--direction", "backward", "--impl", "hopper", "--compiled"]
    if choice.has_tlx():
        assert main([*command, "--from", given, "-o", str(tmp_path / "x")]) == 2
        out, err = capsys.readouterr()
        assert said in err and err.count("\n") == 1 and not out


def test_a_kernels_own_recording_is_replayed_only_for_its_configuration():
    """The forward for sm_90 of hsp-loguniform: dealt in order +20 %, as `reports/ablation` measured."""
    workload = workloads.get("hsp-loguniform")
    plan = plan_of("hopper", names=["schedule"])
    found = modelled_ms(plan, workload)
    static, full = (found[plan.named(name).key] for name in ("schedule static", "full"))
    assert static / full - 1 == pytest.approx(0.2, abs=0.02)
    assert not modelled_ms(make_plan(begun("peel=False"), ["schedule"]), workload)
    assert not modelled_ms(plan, workloads.get("dense-1024"))


# --- effects -------------------------------------------------------------------------------------------------------


def test_equal_times_make_no_difference_and_unequal_ones_do():
    rng = np.random.default_rng(0)
    base = rng.normal(1.0, 0.01, 30)
    assert effect(base, base).words == "no difference"
    assert effect(rng.normal(1.0, 0.01, 30), base).words == "no difference"
    slower = effect(base * 1.05, base)
    assert slower.differs and slower.change == pytest.approx(0.05) and slower.words.startswith("+5.0 % (")
    assert effect(base * 1.001, base).words == "no difference", "less than a launch's clocks do"
    assert effect(np.array([]), base).words == "–"


@given(st.lists(st.floats(0.5, 2.0), min_size=3, max_size=20), st.floats(0.5, 2.0))
def test_what_a_round_has_in_common_cancels(base, factor):
    """The clocks of a round slow both alike: the ratio is exact however they wander."""
    base = np.array(base)
    found = effect(base * factor, base)
    assert found.change == pytest.approx(factor - 1) and found.low <= found.change <= found.high
    assert found.low == pytest.approx(found.high, abs=1e-9)


def test_drift_is_seen():
    assert np.isnan(drift(np.ones(5)))
    assert drift(np.ones(9)) == 0.0
    assert drift(np.linspace(1.0, 1.2, 30)) > 0.1


class Nvml:
    """A stand-in for NVML, that answers as its API reference says: 0 and the value through the last argument."""

    def __init__(self, known=b"GPU-1-2", says=(1620, 52, 640_000), fails=()):
        self.known, self.says, self.fails = known, says, fails

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        return 0 if uuid == self.known else 2

    def _answer(self, number, value):
        if number in self.fails:
            return 3
        value._obj.value = self.says[number]
        return 0

    def nvmlDeviceGetClockInfo(self, handle, kind, value):
        assert kind == 1
        return self._answer(0, value)

    def nvmlDeviceGetTemperature(self, handle, kind, value):
        assert kind == 0
        return self._answer(1, value)

    def nvmlDeviceGetPowerUsage(self, handle, value):
        return self._answer(2, value)


def test_clocks_are_read_where_nvml_is():
    def absent(name):
        raise OSError(name)

    assert clocks.Watch.of("1-2", absent) is None and clocks.Watch.of("3-4", lambda name: Nvml()) is None
    assert clocks.Watch.of("1-2", lambda name: Nvml()).read() == {"sm_mhz": 1620, "celsius": 52, "watt": 640}
    assert clocks.Watch.of("GPU-1-2", lambda name: Nvml(fails=(0, 2))).read() == {"celsius": 52}


def test_how_clocks_moved():
    readings = [{"sm_mhz": 1620 - 20 * n, "watt": 640} for n in range(9)] + [{}]
    found = clocks.moved(readings)
    assert found["sm_mhz"] == {"first": 1600, "last": 1480, "low": 1460, "high": 1620} and "celsius" not in found
    assert clocks.words(found) == "SM clock 1,600 → 1,480 MHz, 640 → 640 W"
    assert not clocks.moved(readings[:5]) and clocks.words({}) == ""


def test_what_nvml_said_is_in_the_report(tmp_path):
    """Beside a drift that has to be explained, and below the tables in any case."""
    plan = plan_of(names=["schedule"])
    folder = tmp_path / "run"
    folder.mkdir()
    keys = list(plan.settings())
    lines = [{"event": "child"}]
    for number in range(9):
        lines += [{"event": "sample", "key": key, "round": number, "ms": 1.0 + number / 50} for key in keys]
        lines.append({"event": "clocks", "round": number, "sm_mhz": 1620.0 - 20 * number, "celsius": 52.0 + number})
    (folder / PROGRESS).write_text("\n".join(map(json.dumps, lines)))
    found = read_progress(folder)
    assert len(found.clocks) == 9 and "round" not in found.clocks[0]
    document = results.assemble(plan, "tiny", found, {}, {}, {"command": "a test"})
    write_report(document, folder, found)
    assert results.read(folder)["clocks"]["sm_mhz"]["last"] == 1480
    text = (folder / "report.md").read_text()
    assert "over the run (from the first third of the rounds to the last SM clock 1,600 → 1,480 MHz, 53 → 59 °C" in text
    assert "By NVML, from the first third" in text and "By NVML" in (folder / "index.html").read_text()


@pytest.mark.gpu
def test_nvml_knows_this_gpu():
    watch = child._watch(torch.device("cuda", 0))
    assert watch is not None and watch.read()["sm_mhz"] > 100


# --- minding the child ---------------------------------------------------------------------------------------------

FAKE = """
import json, os, sys, time
request = json.loads(sys.stdin.readline())
def say(**event): print(json.dumps(event), flush=True)
print("what Triton prints")
for key in request["variants"]:
    say(event="begin", key=key)
    if "{bad}" in key:
        {deed}
    say(event="checked", key=key, error=0.0, registers=100, stack=0, shared=9)
for number in range(request["rounds"]):
    for place, key in enumerate(request["variants"]):
        say(event="begin", key=key)
        say(event="sample", key=key, round=number, ms=1.0 + place + number / 1000)
        {between}
for key in request["why"]:
    say(event="begin", key=key, phase="why")
    if "{bad}" in key:
        {later}
    say(event="why", key=key, sm_time=dict(work=1.0, tail=0.0))
say(event="end")
"""


def fake(bad="nothing", deed="pass", later="pass", between="pass") -> tuple[str, ...]:
    words = {"{bad}": bad, "{deed}": deed, "{later}": later, "{between}": between}
    script = FAKE
    for word, said in words.items():
        script = script.replace(word, said)
    return "-c", script


def keys_with(plan, words):
    return [key for key in plan.settings() if words in key]


@pytest.mark.parametrize(
    ("deed", "why"),
    [
        ("time.sleep(60)", "hung: no answer in 1 s"),
        ("os.abort()", "its process died"),
        ("raise SystemExit('no such kernel')", "its process died (1): no such kernel"),
        ("say(event='failed', key=key, why='wrong result'); continue", "wrong result"),
    ],
)
def test_a_variant_that_misbehaves_is_a_row_and_not_the_end(deed, why, tmp_path):
    plan = plan_of()
    bad = keys_with(plan, "num_stages=1 peel=False schedule=balanced")
    assert len(bad) == 1
    found = measure(
        "tiny", plan, tmp_path, rounds=3, limit_s=1.0, child=fake("num_stages=1 peel=False schedule=b", deed)
    )
    assert list(found.failed) == bad and found.failed[bad[0]].startswith(why)
    assert {len(samples) for key, samples in found.samples.items() if key not in bad} == {3}
    rows = results.assemble(plan, "tiny", found, {}, {}, {})["rows"]
    failed = [row for row in rows if row["failed"]]
    assert failed and all(row["time"] is None for row in failed)
    assert all(row["time"] for row in rows if not row["failed"])


def test_a_run_goes_on_where_it_was(tmp_path):
    plan = plan_of()
    first = measure("tiny", plan, tmp_path, rounds=3, child=fake())
    with (tmp_path / PROGRESS).open("a") as log:
        log.write('{"event": "sample", "key": "cut sho')
    assert read_progress(tmp_path).samples == first.samples
    again = measure("tiny", plan, tmp_path, rounds=5, child=fake())
    assert {len(samples) for samples in again.samples.values()} == {5}
    untouched = measure("tiny", plan, tmp_path, rounds=5, child=("-c", "raise SystemExit('not needed')"))
    assert untouched.samples == again.samples


@pytest.mark.parametrize("later", ["raise SystemExit(3)", "time.sleep(60)"])
def test_whoever_dies_saying_why_keeps_its_times(later, tmp_path):
    plan = plan_of()
    (bad,) = keys_with(plan, "num_stages=1 peel=False schedule=balanced")
    found = measure("tiny", plan, tmp_path, rounds=3, limit_s=1.0, child=fake(bad, later=later))
    assert not found.failed and {len(samples) for samples in found.samples.values()} == {3}
    assert "no_why" in found.facts[bad]
    assert all("sm_time" in facts for key, facts in found.facts.items() if key != bad)
    again = measure("tiny", plan, tmp_path, rounds=3, child=("-c", "raise SystemExit('not needed')"))
    assert again.facts == found.facts


def test_a_round_that_was_cut_short_is_dropped(tmp_path):
    """Samples are compared by their place, so that those of one place must be of one round."""
    plan = plan_of()
    keys = list(plan.settings())
    stop = f"{{}} if key != {keys[2]!r} or number < 2 or os.path.exists({str(tmp_path / 'mark')!r}) else "
    stop += f"(open({str(tmp_path / 'mark')!r}, 'w'), os.abort())"
    found = measure("tiny", plan, tmp_path, rounds=5, child=fake(between=stop), why=False)
    assert list(found.failed) == [keys[2]]
    for key in keys[:2] + keys[3:]:
        assert [round(1000 * (took - int(took))) for took in found.samples[key]] == [0, 1, 0, 1, 2]


def test_a_child_that_cannot_begin_is_an_error(tmp_path):
    with pytest.raises(UserError, match="could not begin: its process died .*no torch"):
        measure("tiny", plan_of(), tmp_path, rounds=3, child=("-c", "raise SystemExit('no torch')"))


def test_wrong_results_are_told_from_rounding():
    exact = [torch.tensor([1.0, 2.0, float("-inf")])]
    assert child.worst_error(exact, exact) == 0.0
    assert child.worst_error([torch.tensor([1.0, 2.02, float("-inf")])], exact) == pytest.approx(0.009, abs=0.001)
    assert child.worst_error([torch.tensor([1.0, 2.0, 3.0])], exact) == float("inf")
    assert not child.worst_error([torch.tensor([1.0, float("nan"), float("-inf")])], exact) <= child.WORST_ERROR


@pytest.mark.skipif(not INTERPRETED, reason="a GPU is here; TRITON_INTERPRET=1 interprets")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_real_kernels_in_a_real_child(direction, tmp_path):
    """Interpreted: right results of every configuration, times of the host."""
    setting = full_setting("triton", direction, None, 64, 2)
    config = dataclasses.replace(setting.config, num_stages=2)
    plan = make_plan(dataclasses.replace(setting, config=config), ["schedule", "num_stages"])
    found = measure("tiny", plan, tmp_path, rounds=3, device="cpu", why=False)
    assert not found.failed and {len(samples) for samples in found.samples.values()} == {3}
    assert all(facts["error"] <= child.WORST_ERROR for facts in found.facts.values())
    document = results.assemble(plan, "tiny", found, {}, {}, {"command": "a test"})
    page = write_report(document, tmp_path / "report", found)
    assert {entry.name for entry in page.parent.iterdir()} == {
        "index.html", "report.md", "results.json", "samples.parquet", "plotly.min.js",
    }  # fmt: skip
    samples = pd.read_parquet(page.parent / "samples.parquet")
    assert len(samples) == 3 * len(plan.settings()) and set(samples.columns) == {"variant", "round", "ms"}
    assert results.read(page.parent) == json.loads(json.dumps(document))


# --- the report and the commands -----------------------------------------------------------------------------------


def measured_report(folder, plan=None, factor=1.0):
    plan = plan or plan_of()
    (folder.parent / "work").mkdir(exist_ok=True)
    work = folder.parent / f"work/{folder.name}"
    work.mkdir()
    found = measure("tiny", plan, work, rounds=6, child=fake())
    for key, samples in found.samples.items():
        found.samples[key] = [factor * took for took in samples]
    document = results.assemble(plan, "tiny", found, {}, {}, {"command": "a <b>test</b>", "gpu": "a GPU"})
    return write_report(document, folder, found)


def test_a_report_says_what_buys_most(tmp_path):
    page = measured_report(tmp_path / "r")
    text, html = (page.parent / "report.md").read_text(), page.read_text()
    assert "From the full configuration, each switch otherwise alone" in text and "95 % bootstrap" in text
    assert "buys most" in html and "From plain to full" in html and "&lt;b&gt;test" in html
    assert page.stat().st_size < 200_000


@pytest.mark.browser
def test_the_page_draws_without_a_network(tmp_path, chromium):
    from browser import browser

    page = measured_report(tmp_path / "r")
    with browser(chromium, tmp_path / "profile") as tab:
        assert tab.open(page) < 5.0
        assert tab.evaluate("document.querySelectorAll('.plot .main-svg').length") >= 2
        assert not [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))]


def test_two_reports_side_by_side(tmp_path, capsys):
    before, after = measured_report(tmp_path / "a"), measured_report(tmp_path / "b", factor=0.9)
    assert main(["diff-report", str(before.parent), str(after.parent)]) == 0
    assert "-10.0 %" in capsys.readouterr().out
    assert main(["diff-report", str(before.parent), str(before.parent), "--json"]) == 0
    assert {row["change"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"none"}
    other = measured_report(tmp_path / "c", plan_of("triton", "backward"))
    assert main(["diff-report", str(before.parent), str(other.parent)]) == 2
    assert "direction differs (forward and backward)" in capsys.readouterr().err
    assert main(["diff-report", str(before.parent), str(tmp_path)]) == 2
    assert "holds no results.json" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_everything_is_compiled_and_schedules_modelled(tmp_path, capsys):
    command = ["ablate", "--workload", "hsp-extreme", "--impl", "triton", "--switches", "schedule"]
    folder = tmp_path / "run"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "profiling", *command, "-o", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    document = results.read(folder)
    assert document["grade"] == "compiled" and "no GPU was here" in (folder / "report.md").read_text()
    rows = {row["name"]: row for row in document["rows"]}
    assert rows["full"]["resources"]["grade"] == "compiled" and rows["full"]["resources"]["registers"] > 100
    static = rows["schedule static"]
    assert static["effect"]["grade"] == "modelled" and static["effect"]["change"] == pytest.approx(0.45, abs=0.05)
    assert main([*command, "-o", str(folder)]) == 2
    assert "holds a run already; give --force" in capsys.readouterr().err
    assert main([*command[:-1], "peel", "-o", str(folder), "--resume"]) == 2
    assert "holds another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--workload", "hsp-extrem"], "did you mean hsp-extreme"),
        (["--workload", "tiny", "--switches", "schedul", "--impl", "triton"], "did you mean schedule"),
        (["--workload", "tiny", "--direction", "back"], "did you mean backward"),
        (["--workload", "tiny", "--resume", "--force"], "--resume and --force"),
        (
            ["--workload", "tiny", "--compiled", "--arch", "9"],
            "--arch 9: expected one that",
        ),
    ],
)
def test_wrong_arguments_are_one_line(arguments, expected, tmp_path, capsys):
    assert main(["ablate", *arguments, "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_foreign_folder_is_left_alone(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["ablate", "--workload", "tiny", "--impl", "triton", "-o", str(tmp_path), "--force"]) == 2
    assert "holds thesis.tex, which no ablation made" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
