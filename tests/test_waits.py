"""Waits by role and barrier, who was late, and what the compute roles lose: on a pipeline whose truth is known."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ncu_reports import unpack
from pipeline import Pipeline, recording
from synthetic import synthetic_recording

from profiling import examples
from profiling.__main__ import main
from profiling.compare import compare
from profiling.errors import RecordingError
from profiling.late import late, twin
from profiling.lost import lost_time, products_share
from profiling.ncu import reading
from profiling.ncu.summary import summarise
from profiling.recording import Recording
from profiling.wait_figures import MOST_COLUMNS, SMALLEST, late_flow, late_matrix, role_time_bars
from profiling.waits import role_time, waits

SLOW_LOADS = Pipeline(flight=1000)
SLOW_CONSUMER = Pipeline(flight=10, use=(50, 400), steps=(20, 20))
SLOW_ISSUE = Pipeline(issue=800, flight=10, steps=(12,))

pipelines = st.builds(
    Pipeline,
    stages=st.integers(1, 4),
    issue=st.integers(0, 500),
    flight=st.integers(0, 2000),
    use=st.tuples(st.integers(0, 500), st.integers(0, 500)),
    work=st.tuples(st.integers(0, 500), st.integers(0, 500)),
    steps=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    ctas=st.integers(1, 4),
)


def share_of(table, **where) -> float:
    for name, value in where.items():
        table = table[table[name] == value]
    return float(table["share"].sum())


@pytest.mark.parametrize(
    ("workload", "direction", "roles"),
    [
        ("tiny", "forward", ["load", "mma0", "mma1"]),
        ("tiny", "backward", ["load", "mma0", "mma1", "mma2"]),
        ("tiny-causal", "backward", ["load", "mma0", "mma1"]),
    ],
)
def test_the_recordings_in_the_package_account_for_every_role(workload, direction, roles):
    """Measured on an H200: parts add up to each role's life, and every late producer is a role of the kernel."""
    found = examples.waits(workload, direction)
    parts = role_time(found)
    assert sorted(parts["role"].unique()) == roles and found.lost == 0
    assert (parts["total_ns"] >= 0).all()
    assert parts.groupby("role")["share"].sum().to_numpy() == pytest.approx(1.0, abs=0.01)
    assert set(late(found)["late"]) <= {*roles, ""}
    lost = lost_time(found)
    assert lost.work + lost.between + sum(lost.waits.values()) == pytest.approx(1.0, abs=0.01)
    assert lost.remedy and lost.barrier in lost.words


def test_counts_sums_and_phases():
    found = waits(recording(Pipeline(flight=100, steps=(4, 3), ctas=2)))
    mma = found[(found["role"] == "mma0") & (found["barrier"] == "k_full")]
    assert mma["count"].sum() == 2 * 7
    by_phase = mma.groupby("phase")["count"].sum()
    assert dict(by_phase) == {"first tile": 8, "tile boundary": 2, "steady": 4}
    assert set(mma["stage"]) == {0, 1}
    assert found.attrs["grade"] == "modelled"
    first = recording(Pipeline(steps=(1,), ctas=1))
    row = waits(first)[lambda t: t["role"] == "mma0"].iloc[0]
    assert (row["total_ns"], row["median_ns"], row["p95_ns"]) == (110, 110, 110)  # issued in 10, in flight for 100


@given(pipelines)
@settings(max_examples=60)
def test_parts_sum_to_the_lives_and_blame_to_the_waits(pipeline):
    made = recording(pipeline)
    parts = role_time(made)
    lives = made.events[made.events["event"] == "cta"]
    lived = (lives["end_ns"] - lives["start_ns"]).groupby(lives["role"], observed=True).sum()
    for role, own in parts.groupby("role"):
        assert own["total_ns"].sum() == pytest.approx(lived[role])
        assert own["total_ns"].min() >= 0
        assert not lived[role] or own["share"].sum() == pytest.approx(1.0)
    table = late(made)
    waited = waits(made).groupby(["role", "barrier"])["total_ns"].sum()
    blamed = table.groupby(["role", "barrier"])["total_ns"].sum().reindex(waited.index, fill_value=0.0)
    np.testing.assert_allclose(blamed, waited, atol=1e-6)
    assert (table["total_ns"] > 0).all()
    lost = lost_time(made)
    shares = lost.work + lost.between + sum(lost.waits.values())
    assert shares == pytest.approx(1.0) or not lived[["mma0", "mma1"]].sum()


def test_slow_loads_are_in_flight():
    table = late(recording(SLOW_LOADS))
    mma = table[table["role"] == "mma0"]
    assert mma.iloc[0][["barrier", "late", "doing"]].tolist() == ["k_full", "load", "in flight"]
    assert share_of(mma, doing="in flight") > 0.8
    lost = lost_time(recording(SLOW_LOADS))
    assert (lost.barrier, lost.late, lost.doing) == ("k_full", "load", "in flight")
    assert "more stages" in lost.remedy and "late is load, in flight" in lost.words


def test_the_slower_of_two_consumers_is_late():
    table = late(recording(SLOW_CONSUMER))
    load = table[(table["role"] == "load") & (table["barrier"] == "k_empty")]
    assert load.iloc[0][["late", "doing"]].tolist() == ["mma1", "in use"]
    assert share_of(load, late="mma1") > 20 * share_of(load, late="mma0")
    mma0 = table[table["role"] == "mma0"]
    assert mma0.iloc[0][["late", "doing"]].tolist() == ["load", "wait:k_empty"]  # which itself waits for mma1


def test_a_role_that_is_busy_is_working():
    table = late(recording(SLOW_ISSUE))
    mma = table[table["role"] == "mma0"]
    assert mma.iloc[0][["barrier", "late", "doing"]].tolist() == ["k_full", "load", "in flight"]
    assert mma.iloc[0]["share"] > 0.8
    # The load role gets hold of a buffer, then takes long to issue: that is the buffer's time, not another wait's.
    assert share_of(table, role="mma0", doing="wait:k_empty") < 0.1


def test_what_waits_little_is_bound_by_its_work():
    lost = lost_time(recording(Pipeline(flight=0, issue=0, use=(500, 500), steps=(30,))))
    assert "bound by what they compute" in lost.words and lost.work > 0.95


def test_roles_can_be_chosen_and_baselines_shown(tmp_path, capsys):
    file, other = tmp_path / "a.parquet", tmp_path / "b.parquet"
    recording(SLOW_LOADS).write(file)
    recording(Pipeline()).write(other)
    assert main(["waits", str(file), "--role", "mma0", "--baseline", str(other)]) == 0
    out = capsys.readouterr().out
    assert "verdict: mma0 and mma1 compute for" in out and "in b" in out and "not comparable" not in out
    assert "load" not in out.split("Where each role's time went")[1].split("measured")[0].split("Who was late")[0]
    assert main(["waits", str(file), "--role", "mma0", "--baseline", str(other), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["role"] for part in ("waits", "late", "roles", "baseline") for row in document[part]} == {"mma0"}
    assert main(["waits", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["lost"]["barrier"] == "k_full" and document["lost"]["tensor"] is None
    assert main(["waits", str(file), "-o", str(tmp_path / "w.html")]) == 0
    assert (tmp_path / "w.html").stat().st_size > 1_000_000


@pytest.mark.parametrize(
    ("where", "change", "words"),
    [
        ("workload", {"heads": 7}, "not comparable: heads differs"),
        ("kernel", {"direction": "backward"}, "not comparable: direction differs: forward, backward"),
        ("kernel", {"impl": "triton"}, "note: implementation differs"),
        (None, {"excerpt": "CTAs 0 to 1 of 9"}, "note: excerpt differs: the whole launch, CTAs 0 to 1 of 9"),
    ],
)
def test_a_baseline_of_another_launch_is_said_first_and_warns(tmp_path, capsys, where, change, words):
    file, other = tmp_path / "a.parquet", tmp_path / "b.parquet"
    recording(Pipeline()).write(file)
    unlike = recording(Pipeline())
    (unlike.metadata if where is None else unlike.metadata[where]).update(change)
    unlike.write(other)
    assert main(["waits", str(file), "--baseline", str(other)]) == 0
    out = capsys.readouterr().out
    assert out.index(words) < out.index("Where each role's time went")
    warned = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert ("excerpt" in change) == any(line.startswith(f"warning: {other}: an excerpt") for line in warned)
    assert main(["waits", str(file), "--baseline", str(other), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert any(words.split(": ", 1)[1] in line for line in document["baseline_differs"])
    assert ("excerpt" in change) == any("an excerpt" in line for line in document["baseline_warnings"])


def report_of(kernel: str, folder, **columns) -> str:
    """The raw page of a real report, of a kernel renamed, with whole columns left out."""
    text = unpack("h200_fwd_static.raw.csv", folder).read_text().replace("jfa_forward", kernel)
    path = folder / f"{kernel}.csv"
    path.write_text(text)
    return str(path)


def of_the_report(**kernel) -> Recording:
    made = recording(Pipeline())
    facts = dict(made.metadata)
    facts["kernel"] = {**facts["kernel"], "schedule": "static", **kernel}
    facts["workload"], facts["gpu"] = {"name": "hsp-loguniform"}, {**facts["gpu"], "name": "NVIDIA H200"}
    return Recording(made.events, facts, source="of-the-report")


def test_the_tensor_pipe_of_the_same_launch_stands_beside(tmp_path, capsys):
    file, report = tmp_path / "a.parquet", report_of("jfa_forward_hopper", tmp_path)
    of_the_report().write(file)
    assert main(["waits", str(file), "--ncu", report]) == 0
    assert "tensor pipe: active for 34.4 % of the launch (ncu, measured)" in capsys.readouterr().out
    assert main(["waits", str(file), "--ncu", report, "--json"]) == 0
    lost = json.loads(capsys.readouterr().out)["lost"]
    assert lost["beside"] == pytest.approx(lost["work"] - lost["tensor"])
    assert lost["products"] is lost["residual"] is None, "the made-up recording names no operations"


@pytest.mark.parametrize(("schedule", "report"), [("static", "fwd_static"), ("balanced-dynamic", "fwd_balanced")])
def test_the_products_take_what_the_tensor_pipe_was_seen_to(schedule, report, tmp_path):
    """Of real launches, by ncu and by the recording alone."""
    (kernel,) = summarise(reading.read(unpack(f"h200_{report}.raw.csv", tmp_path), for_summary=True))
    share = products_share(examples.load("hsp-loguniform", "forward", schedule))
    assert share == pytest.approx(kernel.get("tensor") / 100, abs=0.01)


def test_the_operations_and_the_rate_are_those_that_the_tensor_pipe_counts(tmp_path):
    """Of the forward for sm_90, at the report's own clock and duration."""
    (kernel,) = summarise(reading.read(unpack("h200_hopper_forward.raw.csv", tmp_path), for_summary=True))
    assert kernel.name == "jfa_forward_hopper"
    tiles = examples.load("hsp-loguniform", "forward", "balanced-dynamic")
    span = float(tiles.events["end_ns"].max() - tiles.events["start_ns"].min())
    timed = {
        "clock": {**tiles.metadata["clock"], "rate_ghz": kernel.get("sm_clock") / 1e9},
        "durations": {"plain_ns": kernel.get("duration"), "recorded_ns": span},
    }
    share = products_share(Recording(tiles.events, {**tiles.metadata, **timed}, source="timed by ncu"))
    assert share == pytest.approx(kernel.get("tensor") / 100, abs=0.02)


@pytest.mark.parametrize(
    "change", [("workload", "dtype", "float32"), ("gpu", "capability", [7, 5]), ("clock", "rate_ghz", None)]
)
def test_without_a_rate_nothing_is_said_of_the_products(change):
    real = examples.load("hsp-loguniform", "forward", "static")
    section, name, value = change
    metadata = {**real.metadata, section: {**real.metadata[section], name: value}}
    assert math.isnan(products_share(Recording(real.events, metadata, source="changed")))


def test_a_report_of_another_kernel_is_refused(tmp_path, capsys):
    file = tmp_path / "a.parquet"
    of_the_report().write(file)
    assert main(["waits", str(file), "--ncu", report_of("jfa_forward", tmp_path)]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("error: --ncu: ")
        and "(kernel jfa_forward_hopper) and " in said
        and "different launches" in said
    )


def test_a_baseline_without_waits_prints_nothing_first(tmp_path, capsys):
    file, other = tmp_path / "a.parquet", tmp_path / "tiles.parquet"
    recording(Pipeline()).write(file)
    synthetic_recording(256, [100, 4000, 900]).write(other)
    assert main(["waits", str(file), "--baseline", str(other)]) == 2
    said = capsys.readouterr()
    assert not said.out and "holds no waits" in said.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--role", "mma2"], "--role: there is none named 'mma2'; did you mean"),
        (["-o", "x.txt"], "expected a name that ends in .html"),
        (["--baseline", "nowhere.parquet"], "nowhere.parquet"),
        (["--ncu", "nowhere.ncu-rep"], "there is no such file"),
    ],
)
def test_wrong_input_is_one_line(arguments, expected, tmp_path, capsys):
    file = tmp_path / "a.parquet"
    recording(Pipeline()).write(file)
    assert main(["waits", str(file), *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_recordings_without_waits_or_with_losses_are_refused(tmp_path, capsys):
    file = tmp_path / "tiles.parquet"
    synthetic_recording(256, [100, 4000, 900]).write(file)
    assert main(["waits", str(file)]) == 2
    assert "holds no waits" in capsys.readouterr().err
    lossy = recording(Pipeline(), events={"written": 10, "lost": 5, "lost_by_lane": {"0": 5}})
    with pytest.raises(RecordingError, match="lost 5 events"):
        waits(lossy)
    alone = recording(Pipeline())
    only = alone.events[(alone.events["role"] == "load")]
    with pytest.raises(RecordingError, match="no role has tile spans"):
        lost_time(Recording(only, alone.metadata))
    table = late(Recording(only, alone.metadata))
    assert set(table["late"]) <= {"unknown"}


def test_nothing_waited_for(tmp_path, capsys):
    """Waits that took no time at all: tables without rows, and no figure of them."""
    file = tmp_path / "a.parquet"
    recording(Pipeline(issue=0, flight=0, use=(0, 0), work=(9, 9), stages=4, steps=(3,))).write(file)
    assert late(Recording.read(file)).empty
    assert main(["waits", str(file), "-o", str(tmp_path / "w.html")]) == 0
    assert "bound by what they compute" in capsys.readouterr().out


PAIR = {"name": "jfa_forward_hopper", "direction": "forward", "schedule": "static", "impl": "hopper", "cluster": 2}


def test_of_two_ctas_that_load_for_both_the_slower_one_is_late():
    made = recording(Pipeline(slower=300, flight=10, steps=(20, 20)), kernel={**PAIR, "blocks": 2})
    table = late(made)
    waits_for = table[(table["role"] == "load") & (table["barrier"] == "k_empty")]
    away = waits_for["late"].str.endswith("of the other CTA")
    # CTA 0 waits for CTA 1, and CTA 1 for itself.
    assert 0.4 < waits_for[away]["share"].sum() / waits_for["share"].sum() < 0.6
    assert set(waits_for[away]["late"]) <= {"mma0 of the other CTA", "mma1 of the other CTA"}
    for (role, barrier), rows in table.groupby(["role", "barrier"]):
        found = waits(made)
        expected = found[(found["role"] == role) & (found["barrier"] == barrier)]["total_ns"].sum()
        assert rows["total_ns"].sum() == pytest.approx(expected)


def test_only_pairs_wait_for_each_other():
    pipeline = Pipeline(slower=300, flight=10, steps=(20, 20))
    alone = late(recording(pipeline, kernel={**PAIR, "cluster": 1, "blocks": 2}))
    resident = late(recording(pipeline, kernel={**PAIR, "blocks": 1}))  # a cluster that shares no loads
    made = recording(pipeline, kernel={**PAIR, "blocks": 2})
    excerpt = late(Recording(made.events[made.events["cta"] == 0], made.metadata))
    for table in (alone, resident, excerpt):
        assert not table["late"].str.contains("other CTA").any()


def test_of_a_pair_cut_in_two_nobody_is_late():
    whole = examples.change()[1]
    for kept in ([0], [0, 2, 3]):
        table = late(Recording(whole.events[whole.events["cta"].isin(kept)].reset_index(drop=True), whole.metadata))
        parts = table[table["barrier"] == "part_full"]
        alone = late(Recording(whole.events[whole.events["cta"] == 0].reset_index(drop=True), whole.metadata))
        own = alone[alone["barrier"] == "part_full"]["total_ns"].sum()
        assert parts[parts["late"] == "unknown"]["total_ns"].sum() == pytest.approx(own)
        assert ("mma2 of the other CTA" in set(parts["late"])) is (kept != [0])


def test_pairs_of_several_launches_are_kept_apart():
    whole = recording(Pipeline(slower=300, flight=10, steps=(20, 20)), kernel={**PAIR, "blocks": 2})
    second = whole.events.assign(launch=1)
    both = pd.concat([whole.events, second[second["cta"] == 1]], ignore_index=True)
    table = late(Recording(both, whole.metadata))
    away = table["late"].str.endswith("of the other CTA")
    assert table[away]["total_ns"].sum() == pytest.approx(
        late(whole).pipe(lambda t: t[t["late"].str.endswith("of the other CTA")])["total_ns"].sum()
    )


def test_the_next_tile_comes_from_the_other_cta():
    """Measured: of a pair one CTA takes the tiles for both."""
    table = late(examples.change("forward")[1])
    following = table[table["barrier"].isin(["next_full", "next_empty"])]
    assert set(following["late"]) == {"load of the other CTA"}


def test_parts_come_from_the_other_cta():
    """Measured: of a backward that keeps dQ in registers, the third warpgroups exchange partial sums."""
    table = late(examples.change()[1])
    parts = table[table["barrier"].isin(["part_full", "part_empty"])]
    assert set(parts["late"]) == {"mma2 of the other CTA"}


def test_a_matrix_of_many_columns_sums_the_smallest_up():
    table = late(examples.change("forward")[1])
    matrix = late_matrix(table).data[0]
    assert len(matrix.x) == MOST_COLUMNS and matrix.x[-1] == "all else"
    shown = table[table["share"] >= SMALLEST]
    assert np.sum(matrix.z) == pytest.approx(100 * shown["share"].sum())


def test_twins():
    assert (twin("k_full"), twin("k_empty"), twin("turn")) == ("k_empty", "k_full", "")
    assert twin("dq_added") == "item_full", "whoever adds dQ gets tiles"


def test_turns_are_ended_by_the_other_role():
    made = recording(Pipeline(flight=0, issue=0))
    events = made.events.copy()
    events["event"] = events["event"].astype(str)
    events.loc[(events["event"] == "wait:k_full"), "event"] = "wait:turn"
    table = late(Recording(events[events["role"] != "load"], made.metadata))
    assert set(table["role"]) <= {"mma0", "mma1"}
    for role, own in table.groupby("role"):
        assert set(own["late"]) == {"mma1" if role == "mma0" else "mma0"}
        assert set(own["doing"]) <= {"issuing", "working", "wait:turn"}


@pytest.mark.parametrize("hostile", ["<b>x</b>", "a" * 300])
def test_figures_draw_and_escape(hostile):
    made = recording(dataclasses.replace(SLOW_CONSUMER, steps=(5,)), workload={"name": hostile})
    for figure in (role_time_bars(role_time(made)), late_matrix(late(made)), late_flow(late(made))):
        text = figure.to_json()
        assert "<b>x" not in text.replace("\\u003c", "<") and len(figure.data) >= 1
    bars = role_time_bars(role_time(made))
    assert sum(bar.x[0] for bar in bars.data) == pytest.approx(100.0)
    flow = late_flow(late(made)).data[0].link
    assert sum(flow.value) == pytest.approx(2 * late(made)["total_ns"].sum() / 1e6)


@pytest.mark.slow
def test_millions_of_waits_take_seconds():
    import time

    made = recording(Pipeline(steps=(400,) * 5, ctas=300))
    started = time.perf_counter()
    waits(made), role_time(made), late(made)
    assert len(made.events) > 1_500_000 and time.perf_counter() - started < 20


def test_the_change_that_waits_asked_for_paid():
    before, after = examples.change()
    asked, left = lost_time(before), lost_time(after)
    assert asked.barrier == "ds_full" and "keep dQ in registers" in asked.remedy
    assert "ds_full" not in left.waits
    assert after.number("durations.plain_ns") < 0.85 * before.number("durations.plain_ns")
    for one in (before, after):
        assert any("an excerpt: CTAs 0 to 15 of 132" in line for line in one.warnings())
        parts = role_time(one).groupby("role")["share"].sum()
        assert np.allclose(parts, 1, atol=0.01)


def test_each_way_to_sum_dq_is_in_the_package():
    found = examples.strategies()
    assert {kind: one.get("kernel.name") for kind, one in found.items()} == {
        "shared": "jfa_backward_hopper",
        "slices": "jfa_backward_hopper",
        "resident": "jfa_backward_resident",
        "deterministic": "jfa_backward",
    }
    assert found["slices"].get("kernel.config")["dq_slices"] == 2
    plain = {kind: one.number("durations.plain_ns") for kind, one in found.items()}
    assert sorted(plain, key=plain.__getitem__) == ["resident", "shared", "slices", "deterministic"]
    assert len({tuple(one.get("workload.kv_lens")) for one in found.values()}) == 1
    fixed = found["deterministic"]
    assert " · deterministic · " in fixed.title() and "deterministic" not in found["shared"].title()
    usual = Recording(fixed.events, {**fixed.metadata, "kernel": {**fixed.metadata["kernel"], "deterministic": False}})
    assert any(line.startswith("deterministic differs") for line in compare([fixed, usual]).differences)


def test_the_change_that_the_forwards_waits_asked_for_paid():
    before, after = examples.change("forward")
    asked = lost_time(before)
    assert (asked.barrier, asked.late, asked.doing) == ("k_full", "load", "in flight")
    assert "multicast" in asked.remedy and "multicast" not in lost_time(after).remedy
    assert compare([before, after]).table["speedup"][1] > 1.01  # 1 where the spread is larger than the difference
    assert after.get("kernel.blocks") == 2 and before.get("kernel.blocks") == 1


def changed(real: Recording, key: str, value) -> Recording:
    section, name = key.split(".")
    return Recording(real.events, {**real.metadata, section: {**real.metadata[section], name: value}}, source="changed")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("durations.recorded_ns", 0),
        ("durations.plain_ns", 0),
        ("clock.rate_ghz", 0),
        ("gpu.capability", 9),
        ("gpu.sm_count", None),
        ("workload.q_lens", [512] * 40),
    ],
)
def test_what_is_odd_of_the_launch_leaves_the_waits_and_no_products(key, value):
    """512 rows of a shared Q: one pass of two was recorded."""
    lost = lost_time(changed(examples.change()[1], key, value))
    assert math.isnan(lost.products) and lost.barrier == "weights_empty"
