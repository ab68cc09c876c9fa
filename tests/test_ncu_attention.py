"""Attention kernels whose workload is known: useful work, and where tensor time went."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from ncu_kernels import kernel, launch, real

from jfa import workloads
from profiling.errors import UserError
from profiling.ncu.analysis import analyse
from profiling.ncu.attention import DIRECTIONS, extras, fields, lost_tensor_time
from profiling.ncu.metrics import DERIVED
from profiling.ncu.summary import summarise
from profiling.recording import Recording

RECORDINGS = Path(__file__).resolve().parent.parent / "profiling" / "data"
RANGE = "jfa:jfa_forward schedule=static workload={} heads=4 head_dim=128"


def recording(name="hsp-loguniform_forward_static"):
    return Recording.read(RECORDINGS / f"{name}.parquet")


def forward():
    return summarise(real("h200_fwd_static"))[0]


def made(workload="hsp-loguniform", name="jfa_forward", **facts):
    given = {"duration": 1e6, "sm_clock": 1.8e9, "sms": 132.0} | facts
    return kernel(given, of=launch(name, push_pop=(RANGE.format(workload),)))


@pytest.mark.parametrize(
    "name, kernel_name, direction",
    [
        ("h200_fwd_static", "jfa_forward", "forward"),
        ("h200_all_basic", "jfa_forward", "forward"),
        ("h200_all_basic", "jfa_backward", "backward"),
        ("h200_bwd_sections", "jfa_backward", "backward"),
    ],
)
def test_the_useful_rate_is_the_workloads_operations_over_the_duration(name, kernel_name, direction):
    (found,) = (one for one in summarise(real(name)) if one.name == kernel_name)
    more = extras(found)
    useful = workloads.get("hsp-loguniform").flop(direction)
    assert more["useful_operations"].value == useful
    assert more["useful_rate"].value == pytest.approx(useful / (found.get("duration") * 1e-9))
    assert 0 < more["peak_share"].value < 100
    assert all(value.grade == DERIVED for value in more.values())


def test_rates_of_the_forward_on_an_h200():
    more = extras(forward())
    assert more["useful_rate"].value / 1e12 == pytest.approx(327, abs=1)
    assert more["tensor_peak"].value / 1e12 == pytest.approx(974, abs=2)
    assert more["executed_per_useful"].value == pytest.approx(1.02, abs=0.01)


def test_every_kernel_of_ours_has_a_direction():
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from jfa.impl import choice

    assert DIRECTIONS[choice.forward_kernel("triton", (9, 0), 128, 2).kernel] == "forward"
    if choice.has_tlx():
        assert DIRECTIONS[choice.forward_kernel("hopper", (9, 0), 128, 2).kernel] == "forward"


@pytest.mark.parametrize("name", DIRECTIONS)
def test_the_useful_rate_of_every_kernel(name):
    assert extras(made(name=name))["useful_rate"].value > 0


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(lambda: summarise(real("h200_cudnn"))[0], id="cudnn"),
        pytest.param(lambda: made("no-such-workload"), id="unknown workload"),
        pytest.param(lambda: made(name="jfa_delta"), id="another kernel of ours"),
        pytest.param(lambda: kernel({}, of=launch("jfa_forward")), id="no range"),
    ],
)
def test_without_a_known_workload_nothing_is_said(found):
    assert extras(found()) == {}


def test_what_is_not_known_is_left_out():
    assert set(extras(made(duration=math.nan))) == {"useful_operations"}
    assert set(extras(made(sm_clock=math.nan))) == {"useful_operations", "useful_rate"}
    unknown_gpu = kernel(
        {"sm_clock": 1e9}, of=launch("jfa_forward", capability="7.5", push_pop=(RANGE.format("hsp-loguniform"),))
    )
    assert set(extras(unknown_gpu)) == {"useful_operations", "useful_rate"}


def test_the_innermost_range_of_ours_counts():
    ranges = ("jfa:outer workload=a", "jfa:inner workload=b heads=4", "other:x workload=c")
    assert fields(kernel({}, of=launch(push_pop=ranges))) == {"workload": "b", "heads": "4"}
    assert fields(kernel({}, of=launch(push_pop=("other:x workload=c",)))) == {}
    assert fields(kernel({}, of=launch(start_end=("jfa:x workload=c",)))) == {"workload": "c"}


def test_sm_time_splits_into_three_parts():
    lost = lost_tensor_time(forward(), recording())
    assert lost.tensor == forward().get("tensor")
    assert lost.tensor + lost.inside + lost.imbalance == pytest.approx(100)
    assert sum(lost.parts.values()) == pytest.approx(lost.imbalance)
    assert lost.imbalance == pytest.approx(forward().get("imbalance"), abs=2)  # two tools, one launch
    assert lost.inside > 0


@pytest.mark.parametrize(
    "name, what",
    [
        ("hsp-loguniform_forward_balanced", "schedule balanced"),
        ("hsp-extreme_forward_static", "workload hsp-extreme"),
        ("hsp-loguniform_backward_static", "kernel jfa_backward"),
    ],
)
def test_the_recording_of_another_launch_is_refused(name, what):
    with pytest.raises(UserError, match="^--recording: .* are of different launches") as raised:
        lost_tensor_time(forward(), recording(name))
    assert what in str(raised.value)


def test_the_recording_of_another_gpu_is_refused():
    elsewhere = kernel(
        {"tensor": 30.0}, of=launch("jfa_forward", gpu="NVIDIA B200", push_pop=(RANGE.format("hsp-loguniform"),))
    )
    with pytest.raises(UserError, match="GPU NVIDIA H200.*GPU NVIDIA B200"):
        lost_tensor_time(elsewhere, recording())


def test_a_report_without_the_tensor_pipe_cannot_be_split():
    with pytest.raises(UserError, match="no tensor-pipe metric"):
        lost_tensor_time(made(), recording())


def test_a_recording_goes_to_the_kernels_that_it_can_be_of():
    (found,) = analyse([real("h200_all_basic")], recording=recording("hsp-loguniform_forward_balanced-dynamic"))
    assert [item.kernel.name for item in found.kernels if item.lost] == ["jfa_forward"]
    with pytest.raises(UserError, match="--recording: .* are of different launches"):
        analyse([real("h200_cudnn")], recording=recording())
