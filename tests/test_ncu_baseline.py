"""A report against another: what differs by more than the noise, what else differs, and what has no counterpart."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from ncu_kernels import file, launch, metrics, real, report
from test_ncu_summary import MADE

from profiling.ncu.baseline import COMPARED, EXACT, compare
from profiling.ncu.reading import read
from profiling.ncu.summary import LEAST_NOISE, summarise
from profiling.ncu.tables import deltas


def against(report_now, baseline):
    return compare(report_now, summarise(report_now), baseline, summarise(baseline))


def one(duration=1e6, *, kernel="kernel", path="made.ncu-rep", shape=None, **facts):
    return report((launch(kernel, **(shape or {})), metrics({"duration": duration} | facts)), path=path)


@pytest.mark.parametrize(
    "name", ["h200_fwd_static", "h200_all_basic", "a10g_sgemm_ncu2023.1", "a100_cutlass_ncu2024.1"]
)
def test_a_report_against_itself_does_not_differ(name):
    found = against(real(name), real(name))
    assert len(found.matches) == len(summarise(real(name)))
    assert all(match.same_shape for match in found.matches)
    assert (found.only_here, found.only_baseline, found.warnings) == ((), (), ())
    for match in found.matches:
        assert not any(delta.differs for delta in match.deltas)
        assert {row[-1] for row in deltas(match).rows} <= {"none"}
    assert sum(len(match.deltas) for match in found.matches) > 3


@pytest.mark.parametrize("page", ["raw.csv", "details.csv"])
def test_a_report_against_its_own_page_does_not_differ(page):
    found = against(real("h200_fwd_static"), read(file(f"h200_fwd_static.{page}")))
    (match,) = found.matches
    assert match.same_shape and len(match.deltas) > 8
    assert [delta.fact for delta in match.deltas if delta.differs] == []


def test_only_the_same_metric_is_compared_and_that_is_said():
    """The details page lacks the metric of allocated shared memory; the sum that stands in for it is another number."""
    found = against(real("h200_fwd_static"), read(file("h200_fwd_static.details.csv")))
    assert "smem" not in {delta.fact for delta in found.matches[0].deltas}
    assert any("SMEM a CTA not compared" in warning for warning in found.warnings)


def test_schedule_static_against_the_balanced_forward():
    found = against(real("h200_fwd_static"), real("h200_all_basic"))
    (match,) = found.matches
    assert match.kernel.name == "jfa_forward" and match.same_shape
    changes = {delta.fact: delta for delta in match.deltas}
    assert changes["duration"].differs and changes["duration"].change == pytest.approx(0.234, abs=0.002)
    assert changes["imbalance"].differs
    assert not changes["occupancy_theoretical"].differs
    assert changes["registers"].differs and changes["registers"].noise == 0  # 170 and 171: a compiler has no noise
    assert sorted(kernel.name for kernel in found.only_baseline) == [
        "_block_ends", "_costs", "_pairs", "_ranked_pairs", "jfa_backward", "jfa_delta", "jfa_round_dq",
    ]  # fmt: skip
    assert found.only_here == ()


def test_another_version_and_another_gpu_are_said_first():
    found = against(real("h200_fwd_static"), real("a100_cutlass_ncu2024.1"))
    assert any("different versions of ncu (2024.1.1.0 and 2025.3.1.0)" in warning for warning in found.warnings)
    assert [kernel.name for kernel in found.only_here] == ["jfa_forward"]
    assert {kernel.name for kernel in found.only_baseline} == {"Kernel"}
    moved = against(one(), one(shape={"gpu": "NVIDIA A100", "capability": "8.0"}))
    assert len(moved.matches) == 1
    assert any("different GPUs (NVIDIA A100 and NVIDIA H200)" in warning for warning in moved.warnings)
    assert any("different compute capabilities (8.0 and 9.0)" in warning for warning in moved.warnings)


@pytest.mark.parametrize("clock, said", [(1.7e9, True), (1.79e9, False), (math.nan, False)])
def test_another_clock_is_said(clock, said):
    given_clock = {} if math.isnan(clock) else {"sm_clock": clock}
    found = against(one(sm_clock=1.8e9), one(**given_clock))
    assert any("the SMs ran at" in warning for warning in found.warnings) is said


def test_a_changed_shape_is_matched_by_name_and_said():
    found = against(one(shape={"grid": (64, 1, 1)}), one())
    (match,) = found.matches
    assert not match.same_shape
    assert any(
        "matched by name only, its launch shape changed from grid (1320, 1, 1)" in words for words in found.warnings
    )


def test_two_changed_shapes_of_one_name_are_not_guessed():
    now = report(*((launch(grid=(n, 1, 1)), metrics({"duration": 1e6})) for n in (1, 2)))
    found = against(now, one())
    assert found.matches == ()
    assert len(found.only_here) == 2 and len(found.only_baseline) == 1


def test_kernels_of_one_name_and_several_shapes_find_their_own():
    shapes = [(launch(grid=(n, 1, 1)), metrics({"duration": 1e6 * n})) for n in (1, 2, 3)]
    found = against(report(*reversed(shapes)), report(*shapes))
    assert all(match.kernel.launch.grid == match.baseline.launch.grid for match in found.matches)
    assert len(found.matches) == 3


@pytest.mark.parametrize("factor, differs", [(1.009, False), (1.011, True), (0.989, True), (0.991, False)])
def test_what_exceeds_the_noise_differs(factor, differs):
    (match,) = against(one(1e6 * factor), one(1e6)).matches
    (delta,) = match.deltas
    assert (delta.fact, delta.noise, delta.differs) == ("duration", LEAST_NOISE, differs)
    assert delta.change == pytest.approx(factor - 1)


def test_the_noise_is_the_larger_one_of_quartiles():
    many = report(*((launch(), metrics({"duration": value})) for value in (90.0, 95.0, 100.0, 105.0, 110.0)))
    (match,) = against(one(108.0), many).matches
    (delta,) = match.deltas
    assert delta.noise == pytest.approx(0.1) and not delta.differs
    assert "quartiles of 5 launches" in deltas(match).grade


def test_from_nothing():
    (match,) = against(one(local_sectors_read=4.0), one(local_sectors_read=0.0)).matches
    (delta,) = (delta for delta in match.deltas if delta.fact == "local_bytes")
    assert delta.differs and math.isinf(delta.change)
    assert [row[-1] for row in deltas(match).rows] == ["none", "from nothing"]


def test_what_the_compiler_fixed_has_no_noise_and_every_fact_is_known():
    assert set(EXACT) <= set(COMPARED)
    (match,) = against(one(registers=129.0), one(registers=128.0)).matches
    assert {delta.fact: delta.differs for delta in match.deltas} == {"duration": False, "registers": True}


@pytest.mark.parametrize("form, differs", [("raw page", False), ("ncu-rep", True)])
def test_what_a_page_rounds_is_no_difference(form, differs):
    """99,328 bytes are printed as 99.33 Kbyte."""
    page = replace(one(smem=99_330.0), form=form)
    (match,) = against(one(smem=99_328.0), page).matches
    assert [delta.fact for delta in match.deltas if delta.differs] == (["smem"] if differs else [])


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@given(MADE, MADE)
@settings(max_examples=100)
def test_anything_can_be_compared(now, before):
    found = against(report(now), report(before))
    assert len(found.matches) + len(found.only_here) == 1
    assert len(found.matches) + len(found.only_baseline) == 1
    for match in found.matches:
        assert deltas(match).rows is not None
        itself = against(report(now), report(now)).matches[0]
        assert not any(delta.differs for delta in itself.deltas)
