"""What an ablation's page shows beside times: Nsight Compute's counters and linked heatmaps; and two reports compared.

ncu needs a GPU. Elsewhere a stand-in runs the command that it is given, which interprets the kernel, and leaves a real
report of the test data.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ncu_reports import needs_reader, unpack  # noqa: E402
from test_ablation import INTERPRETED, fake, keys_with, measured_report, plan_of  # noqa: E402
from test_ncu_collect import FORBIDDEN  # noqa: E402

from jfa import workloads  # noqa: E402
from profiling import doctor, examples  # noqa: E402
from profiling.__main__ import main  # noqa: E402
from profiling.ablation import child, counters, results  # noqa: E402
from profiling.ablation.compiled import modelled_ms, modelled_recordings  # noqa: E402
from profiling.ablation.heatmaps import MOST, heatmaps  # noqa: E402
from profiling.ablation.report import write_report  # noqa: E402
from profiling.ablation.run import PROGRESS, RECORDINGS, described, measure, recording_names  # noqa: E402
from profiling.errors import UserError  # noqa: E402
from profiling.ncu.collection import of_the_machine  # noqa: E402
from profiling.recording import Recording  # noqa: E402

MOST_BYTES = 8_000_000
NO_CHILD = ("-c", "raise SystemExit('not needed')")

STAND_IN = """\
#!{python}
import shutil, subprocess, sys, time
words = sys.argv[1:]
at = words.index("-o") + 1
with open({asked!r}, "a") as file:
    print(*words, sep=" ", file=file)
code = subprocess.run(words[at + 1:]).returncode if {runs} else 0
print({said!r}, end="", flush=True)
{deed}
if code:
    print(f"==ERROR== The application returned an error code ({{code}}).", flush=True)
elif {report!r}:
    shutil.copy({report!r}, words[at])
sys.exit(code or {code})
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Put an `ncu` on the PATH; the function gives the file where it notes what it was asked, a line a call."""

    def make(report: str = "", said: str = "", *, runs: bool = True, code: int = 0, deed: str = "") -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        asked = folder / "asked"
        left = str(unpack(report, folder)) if report else ""
        fields = {"python": sys.executable, "asked": str(asked), "said": said, "deed": deed}
        (folder / "ncu").write_text(STAND_IN.format(**fields, runs=runs, code=code, report=left))
        (folder / "ncu").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return asked

    return make


# --- what ncu measures of a launch ---------------------------------------------------------------------------------


@pytest.mark.skipif(not INTERPRETED, reason="a GPU is here; TRITON_INTERPRET=1 interprets")
def test_one_launch_of_a_setting_runs_under_ncu(stand_in, capfd):
    needs_reader()
    asked = stand_in("h200_fwd_static.ncu-rep")
    setting = plan_of(capability=None).setting
    row = counters.count("tiny", described(setting), device="cpu")
    assert row["verdict"] == "imbalanced, then latency-bound (barrier)" and row["grade"] == "measured (ncu)"
    assert {*counters.FACTS, counters.LSU} == set(row["numbers"])
    assert row["numbers"]["duration"] == {"value": 2219136.0, "unit": "ns", "source": "gpu__time_duration.sum"}
    assert row["gpu"] == "NVIDIA H200" and row["launches"] == 1
    words = asked.read_text()
    assert "--nvtx-include regex:jfa@jfa_forward.*/ --kernel-name regex:jfa --section ComputeWork" in words
    assert capfd.readouterr() == ("", ""), "stdout is the document's"


@pytest.mark.parametrize(
    ("stood_in", "expected"),
    [
        ({"said": FORBIDDEN, "runs": False, "code": 1}, "no permission to read the GPU's counters"),
        ({"runs": False, "deed": "time.sleep(60)"}, "did not end within 1 s"),
        ({"runs": False, "said": "==ERROR== odd\n", "code": 5}, "ncu ended with code 5"),
        ({}, "its process failed under ncu: ModuleNotFoundError"),
    ],
)
def test_why_ncu_measured_nothing_is_one_line(stood_in, expected, stand_in):
    stand_in(**stood_in)
    child = ("-c", "import no_such_module")
    row = counters.count("tiny", described(plan_of().setting), limit_s=1 if "deed" in stood_in else 60, child=child)
    assert list(row) == ["failed"] and expected in row["failed"] and "\n" not in row["failed"]


def test_counters_come_after_the_rounds_and_are_kept(tmp_path):
    plan = plan_of(names=["schedule", "peel"])
    keys = list(plan.settings())
    asked = []

    def count(workload, setting):
        asked.append(setting)
        return {"failed": "ncu did not end within 1 s"} if len(asked) == 2 else {"verdict": "tensor-bound"}

    found = measure("tiny", plan, tmp_path, rounds=3, child=fake(), count=count)
    assert len(asked) == len(keys) and {len(samples) for samples in found.samples.values()} == {3}
    events = [json.loads(line)["event"] for line in (tmp_path / PROGRESS).read_text().splitlines()]
    assert events[-len(keys) :] == ["ncu"] * len(keys) and "ncu" not in events[: -len(keys)]
    again = measure("tiny", plan, tmp_path, rounds=3, child=NO_CHILD, count=count)
    assert asked[len(keys) :] == [described(plan.settings()[keys[1]])], "only what failed is asked again"
    assert all(again.facts[key]["ncu"] == {"verdict": "tensor-bound"} for key in keys)
    assert measure("tiny", plan, tmp_path, rounds=3, child=NO_CHILD).facts == again.facts, "without --ncu they stay"


def test_what_failed_is_not_counted_and_a_refusal_is_said_of_all(tmp_path, stand_in):
    asked = stand_in(said=FORBIDDEN, runs=False, code=1)
    plan = plan_of()
    (bad,) = keys_with(plan, "num_stages=1 peel=False schedule=balanced")
    child = fake(bad, "say(event='failed', key=key, why='wrong result'); continue")
    found = measure("tiny", plan, tmp_path, rounds=3, child=child, count=counters.count)
    assert len(asked.read_text().splitlines()) == 1, "what keeps ncu from one keeps it from all"
    assert "ncu" not in found.facts.get(bad, {})
    assert all(of_the_machine(found.facts[key]["ncu"]["failed"]) for key in plan.settings() if key != bad)
    rows = results.assemble(plan, "tiny", found, {}, {}, {})["rows"]
    assert all(row["time"] for row in rows if row["ncu"])


def test_rows_say_what_ncu_measured_in_every_format(tmp_path):
    needs_reader()
    row = counters.row_of(unpack("h200_bwd_sections.ncu-rep", tmp_path))
    page = measured_report(tmp_path / "r")
    document = results.read(page.parent)
    for variant in document["rows"]:
        is_bad = variant["name"] == "without peel"
        variant["ncu"] = {"failed": "ncu did not end within <1> s"} if is_bad else row
    write_report(document, page.parent)
    text, html = (page.parent / "report.md").read_text(), page.read_text()
    assert results.read(page.parent)["rows"][0]["ncu"] == row
    for said in (text.replace("\\_", "_"), html.replace("\N{NO-BREAK SPACE}", " ")):
        assert "spilling, then latency-bound (long_scoreboard)" in said and "measured (ncu)" in said
        assert "7.434 ms" in said and "35.4 %" in said
    assert "not measured: ncu did not end within &lt;1&gt; s" in html
    assert text.count("not measured") == 1, "of equal configurations one row"


def test_without_a_gpu_or_ncu_it_says_so_before_anything(tmp_path, monkeypatch, capsys):
    command = ["ablate", "--workload", "tiny", "--impl", "triton", "--ncu", "-o", str(tmp_path / "run")]
    assert main([*command, "--compiled"]) == 2
    assert "--ncu: measures on a GPU" in capsys.readouterr().err
    command_of = sys.modules["profiling.commands.ablate"]  # its package has the function under the same name
    monkeypatch.setattr(command_of, "_device", lambda compiled, arch: ("cuda", (9, 0)))
    monkeypatch.setattr(doctor, "find_ncu", lambda: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --ncu: ncu was not found; sought in PATH") and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
def test_the_real_ncu_measures_the_variants_of_a_run(tmp_path, program):
    if doctor.find_ncu() is None:
        pytest.skip("no ncu")
    folder = tmp_path / "run"
    command = ["ablate", "--workload", "tiny", "--impl", "triton", "--switches", "schedule", "--repeats", "3", "--ncu"]
    done = program(*command, "-o", folder)
    assert done.returncode == 0, done.stderr
    rows = results.read(folder)["rows"]
    assert all(row["time"] and (folder / RECORDINGS / row["recording"]).exists() for row in rows)
    if refused := next((row["ncu"]["failed"] for row in rows if of_the_machine(row["ncu"].get("failed", ""))), ""):
        pytest.skip(refused)
    for row in rows:
        assert row["ncu"]["kernel"] == "jfa_forward" and row["ncu"]["verdict"], row["ncu"]
        assert {"duration", "tensor", "l2_throughput", "registers"} <= set(row["ncu"]["numbers"])
    stamp = (folder / PROGRESS).stat().st_size
    assert program(*command, "--resume", "-o", folder).returncode == 0
    assert (folder / PROGRESS).stat().st_size == stamp, "nothing is measured twice"


# --- linked heatmaps -----------------------------------------------------------------------------------------------

RECORDED = {
    "full": "balanced-dynamic",
    "schedule static": "static",
    "num_stages 1": "dynamic",
    "without peel": "balanced",
}


def recorded_report(folder: Path, recorded=RECORDED, workload="hsp-extreme", direction="forward") -> Path:
    """The folder of a report whose recordings are those of the package under these schedules."""
    page = measured_report(folder, plan_of("triton", "forward", names=["schedule", "peel", "num_stages"]))
    document = results.read(page.parent)
    document |= {"workload": workload, "direction": direction}
    (folder / RECORDINGS).mkdir()
    for row in document["rows"]:
        if row["name"] in recorded:
            row["recording"] = f"{recorded[row['name']]}.parquet"
            source = examples.DATA / f"hsp-extreme_forward_{row['recording']}"
            shutil.copy(source, folder / RECORDINGS / row["recording"])
    write_report(document, folder)
    return folder


def panels(figure) -> list[str]:
    names = [a.text.split("</b>")[0].removeprefix("<b>") for a in figure.layout.annotations if "SMs worked" in a.text]
    assert len(names) == len(figure.data)
    return names


def test_the_full_configuration_stands_above_those_that_differ_most(tmp_path):
    folder = recorded_report(tmp_path / "r")
    document = results.read(folder)
    effects = {row["name"]: abs(row["effect"]["change"]) for row in document["rows"] if row["kind"] == "without"}
    found = heatmaps(document, folder)
    assert panels(found.figure) == ["full", *sorted(effects, key=lambda name: -effects[name])[: MOST - 1]]
    assert not found.missing and "measured" in found.figure.layout.title.subtitle.text
    axes = [*found.figure.select_xaxes(), *found.figure.select_yaxes()]
    assert len([axis for axis in axes if axis.matches]) == len(axes) - 2, "all follow one time axis and one SM axis"
    assert axes[MOST - 1].title.text == "time since each launch's first start (µs)" and axes[-1].title.text == "SM"
    assert sum(file.stat().st_size for file in folder.glob("*.*")) < MOST_BYTES


def test_a_recording_that_cannot_be_shown_is_named_and_the_next_one_is(tmp_path):
    folder = recorded_report(tmp_path / "r")
    document = results.read(folder)
    rows = {row["name"]: row for row in document["rows"]}
    (folder / RECORDINGS / "static.parquet").write_bytes(b"PAR1 and no more")
    shutil.copy(examples.DATA / "hsp-loguniform_forward_static.parquet", folder / RECORDINGS / "dynamic.parquet")
    rows["without peel"]["recording"] = "../secret.parquet"
    rows["ctas_per_sm 2"] = {**rows["without peel"], "name": "ctas_per_sm 2", "recording": None, "no_recording": "full"}
    found = heatmaps(document | {"rows": list(rows.values())}, folder)
    said = "\n".join(found.missing)
    assert len(found.figure.data) == 1 and "576.4 µs" in found.figure.layout.title.text and len(found.missing) == 5
    assert "schedule static: " in said and "truncated or damaged" in said
    assert "num_stages 1: its recording is of another workload (hsp-loguniform, not hsp-extreme)" in said
    assert "without peel: its recording is '../secret.parquet', expected the name of a file in recordings" in said
    assert "ctas_per_sm 2: full" in said and "no other recording" in said
    (folder / RECORDINGS / "balanced-dynamic.parquet").unlink()
    assert heatmaps(document, folder).figure is None


@pytest.mark.parametrize(
    ("changes", "row", "expected"),
    [
        (
            {"environment": {"command": "python -m profiling ablate --no-why -o x"}},
            {},
            "--no-why was given; ablate again",
        ),
        ({"grade": "compiled"}, {}, "no GPU was here"),
        ({}, {"no_recording": "OutOfMemoryError: CUDA"}, "nothing was recorded: OutOfMemoryError: CUDA"),
        ({}, {}, "those of an older version have none"),
    ],
)
def test_why_there_are_no_heatmaps_is_one_line_of_page_and_markdown(changes, row, expected, tmp_path):
    page = measured_report(tmp_path / "r")
    document = results.read(page.parent) | changes
    document["rows"] = [variant | row for variant in document["rows"]]
    write_report(document, page.parent)
    assert heatmaps(document, page.parent).figure is None
    assert expected in page.read_text() and expected in (page.parent / "report.md").read_text()


def test_a_run_keeps_its_recordings_and_the_page_is_made_of_them_again(tmp_path, capsys):
    """The child writes them where the request says; here it copies one of the package."""
    source = str(examples.DATA / "hsp-half-empty_forward_static.parquet")
    deed = f"""import shutil; shutil.copy({source!r}, request["recordings"][key])
        say(event="why", key=key, recording=os.path.basename(request["recordings"][key]))"""
    plan = plan_of(names=["schedule"])
    found = measure("hsp-half-empty", plan, tmp_path, rounds=6, child=fake("schedule", later=deed))
    document = results.assemble(plan, "hsp-half-empty", found, {}, {}, {"command": "a test"})
    assert {row["recording"] for row in document["rows"]} == {"full.parquet", "schedule-static.parquet"}
    page = write_report(document, tmp_path, found)
    before = page.read_text()
    assert '"heatmap"' in before and "One recorded launch of each" in before
    page.unlink()
    assert main(["ablation-page", str(tmp_path)]) == 0
    assert page.read_text() == before and "report:" in capsys.readouterr().out


def test_the_child_keeps_the_recording_that_its_split_of_sm_time_is_of(tmp_path, monkeypatch):
    """With a recording of the package in place of the one that a GPU would give."""
    ready = SimpleNamespace(launcher=SimpleNamespace(roles=("cta",)))
    monkeypatch.setattr(child, "launcher_of", lambda *given: ready)
    monkeypatch.setattr("profiling.record.record_launcher", lambda *given: examples.load())
    given = (workloads.get("hsp-loguniform"), plan_of().setting, torch.device("cuda"))
    found = child.why(*given, str(tmp_path / "full.parquet"))
    assert found["recording"] == "full.parquet" and 0.9 < found["sm_time"]["work"] < 1
    assert Recording.read(tmp_path / "full.parquet").schedule == "balanced-dynamic"
    assert "recording" not in child.why(*given)


@pytest.mark.parametrize("impl", ["hopper", "triton"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_each_configuration_has_a_file_of_its_own(impl, direction):
    names = recording_names(plan_of(impl, direction, resident=True))
    assert len(set(names.values())) == len(names) and "full.parquet" in names.values()
    assert all(Path(name).name == name and " " not in name for name in names.values())


def test_a_recording_that_cannot_be_written_is_said(tmp_path):
    recording = examples.load()
    assert child.kept(recording, tmp_path / "a.parquet") == {"recording": "a.parquet"}
    assert Recording.read(tmp_path / "a.parquet").title() == recording.title()
    assert "cannot be written" in child.kept(recording, tmp_path / "none" / "a.parquet")["no_recording"]


def test_replayed_schedules_are_shown_as_modelled(tmp_path):
    plan, workload = plan_of(names=["schedule"]), workloads.get("hsp-extreme")
    (tmp_path / RECORDINGS).mkdir()
    names = recording_names(plan)
    for key, recording in modelled_recordings(plan, workload).items():
        recording.write(tmp_path / RECORDINGS / names[key])
    expected = modelled_ms(plan, workload)
    document = results.assemble(plan, "hsp-extreme", None, {}, expected, {}, names)
    found = heatmaps(document, tmp_path)
    assert panels(found.figure) == ["full", "schedule static"] and not found.missing
    subtitle = found.figure.layout.title.subtitle.text
    assert "· modelled" in subtitle and "not measured" in subtitle and "measured ·" not in subtitle
    assert found.lead.startswith("One modelled launch of each")
    for row in document["rows"][:2]:
        makespan = Recording.read(tmp_path / RECORDINGS / row["recording"]).events["end_ns"].max()
        assert makespan == pytest.approx(1e6 * expected[row["key"]], abs=1)
    assert not modelled_recordings(plan_of("hopper"), workload), "no recording of this workload"
    assert not modelled_recordings(plan, workloads.get("tiny"))


@pytest.mark.browser
def test_zooming_one_heatmap_moves_all(tmp_path, chromium):
    from browser import browser

    folder = recorded_report(tmp_path / "r")
    with browser(chromium, tmp_path / "profile") as tab:
        assert tab.open(folder / "index.html") < 10.0
        assert tab.evaluate("document.querySelectorAll('#heatmaps .heatmaplayer image').length") == MOST
        zoom = "{'xaxis2.range': [100, 300], 'yaxis3.range': [40, 20]}"
        tab.evaluate(f"Plotly.relayout('heatmaps', {zoom}).then(() => true)")
        axes = tab.evaluate("Object.entries(heatmaps._fullLayout).filter(([k]) => /^[xy]axis/.test(k)).map(([k, a]) => "
                            "[k[0], ...a.range])")  # fmt: skip
        assert sorted(axes) == [["x", 100, 300]] * MOST + [["y", 40, 20]] * MOST
        tab.screenshot(tmp_path / "page.png")
        assert tab.errors == []
        assert not [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))]
    assert (tmp_path / "page.png").stat().st_size > 50_000


# --- two reports ---------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path, capsys):
    """A function that changes the second of two equal reports and gives diff-report's JSON."""
    plan = plan_of(names=["schedule", "peel"])
    before, after = (measured_report(tmp_path / name, plan).parent for name in "ab")

    def differ(change) -> dict:
        document = results.read(after)
        change(document)
        (after / results.RESULTS).write_text(json.dumps(document))
        assert main(["diff-report", str(before), str(after), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return differ


def changes(found: dict) -> dict[str, str]:
    return {row["configuration"]: row["change"] for row in found["rows"]}


def test_equal_reports_need_no_word(two):
    found = two(lambda document: None)
    assert not found["warnings"] and set(changes(found).values()) == {"none"}


def test_times_of_another_gpu_are_not_compared(two):
    found = two(lambda document: document["environment"].update(gpu="another GPU", torch="9"))
    assert found["warnings"] == ["gpu differs: a GPU and another GPU: times are not compared",
                                 "torch differs: None and 9"]  # fmt: skip
    assert set(changes(found).values()) == {"not compared"}
    assert all(row["before"] == row["after"] != "–" for row in found["rows"])


def test_a_configuration_set_otherwise_is_not_compared(two):
    def change(document):
        for row in document["rows"][:2]:
            row["values"]["peel"] = "twice"

    found = two(change)
    assert found["warnings"] == ["full, schedule static: not the same configuration in both (peel True and twice), "
                                 "not compared"]  # fmt: skip
    assert list(changes(found).values()).count("not compared") == 2


def test_a_kernel_of_other_blocks_is_not_compared(two):
    found = two(lambda document: document["setting"]["config"].update(block_q=64))
    assert found["warnings"] == ["the configuration beside the switches differs: block_q 128 and 64: times are not "
                                 "compared"]  # fmt: skip
    assert set(changes(found).values()) == {"not compared"}


def test_a_switch_that_is_new_is_a_change_to_look_at(two):
    """The second has no peel any more, as where a change takes a switch out, or read the other way brings it in."""

    def change(document):
        document["switches"] = [switch for switch in document["switches"] if switch["name"] != "peel"]
        del document["setting"]["config"]["peel"]
        document["rows"] = [row for row in document["rows"] if row["switch"] != "peel"]
        for row in document["rows"]:
            del row["values"]["peel"]

    found = two(change)
    assert "only the first has the switch peel: what it is set to is in the notes" in found["warnings"]
    full = next(row for row in found["rows"] if row["configuration"] == "full")
    assert (full["change"], full["note"]) == ("none", "only in the first: peel True")
    plainest = next(row for row in found["rows"] if row["configuration"] == "plain")
    assert (plainest["change"], plainest["note"]) == ("none", "")


def test_missing_and_failed_variants_are_said(two):
    def change(document):
        document["rows"][1]["name"] = "schedule grid"
        document["rows"][2] |= {"time": None, "failed": "hung: no answer in 1 s"}

    found = two(change)
    assert found["warnings"] == ["only in the first: schedule static", "only in the second: schedule grid"]
    said = changes(found)
    assert said["schedule static"] == "only in the first" and said["without peel"] == "–"
    assert "failed in the second: hung: no answer in 1 s" in [row["note"] for row in found["rows"]]


def test_modelled_times_are_not_compared_with_measured_ones(two):
    def change(document):
        for row in document["rows"]:
            row["time"]["grade"] = "modelled"

    found = two(change)
    assert set(changes(found).values()) == {"not compared"} and "(modelled)" in found["rows"][0]["after"]


def test_everything_that_makes_reports_unlike_is_named_at_once(tmp_path, capsys):
    before, after = (measured_report(tmp_path / name).parent for name in "ab")
    document = results.read(after) | {"workload": "other", "impl": "hopper"}
    (after / results.RESULTS).write_text(json.dumps(document))
    assert main(["diff-report", str(before), str(after)]) == 2
    error = capsys.readouterr().err
    assert "workload differs (tiny and other); impl differs (triton and hopper)" in error and error.count("\n") == 1


def test_reports_of_different_switches_are_compared_where_they_are_alike(tmp_path, capsys):
    """Of a document with fewer switches, the others are as in its full configuration."""
    few = measured_report(tmp_path / "a", plan_of(names=["schedule"])).parent
    many = measured_report(tmp_path / "b", plan_of(names=["schedule", "peel"])).parent
    assert main(["diff-report", str(few), str(many), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    said = changes(found)
    assert said["full"] == "none" and said["plain"] == "not compared"
    assert any("plain" in line and "peel True and False" in line for line in found["warnings"])


def test_committed_reports_still_load(repository, tmp_path, capsys):
    for folder in sorted((repository / "reports" / "ablation").iterdir()):
        copy = Path(shutil.copytree(folder, tmp_path / folder.name))
        assert main(["ablation-page", str(copy)]) == 0
        assert main(["diff-report", str(folder), str(copy), "--json"]) == 0
        assert "no heatmaps: " in (copy / "index.html").read_text()
    assert capsys.readouterr().err == ""


def test_a_broken_document_is_one_line(tmp_path):
    (tmp_path / results.RESULTS).write_text('{"kind": "ablation", "schema": 1}')
    with pytest.raises(UserError, match="is not whole, workload, impl"):
        results.read(tmp_path)
