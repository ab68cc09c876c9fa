"""A report's kernels: their numbers, stall reasons and verdicts, on real reports and just beside each threshold."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ncu_kernels import kernel, launch, metrics, real, report

from profiling.errors import UserError
from profiling.ncu.metrics import DERIVED, FACTS, MEASURED, PIPES, number, why_absent
from profiling.ncu.report import NOT_AVAILABLE, Metric
from profiling.ncu.stalls import MEANING, WORKING, stalls
from profiling.ncu.summary import LEAST_NOISE, NO_TENSOR_WORK, busiest_pipe, select, summarise
from profiling.ncu.verdict import (
    BUSY,
    IDLE_SMS,
    IMBALANCED,
    NEAR,
    SHORT_NS,
    SPILL_TRAFFIC,
    SPILLING,
    evidence,
    verdicts,
)

KINDS = {
    "tensor-bound", "memory-bound", "pipe-bound", "issue-starved", "latency-bound", "imbalanced", "spilling",
    "launch-bound", "unknown",
}  # fmt: skip
QUIET = {"sm_throughput": 30.0, "memory_throughput": 20.0, "issue": 10.0}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
SAMPLED = "smsp__pcsamp_warps_issue_stalled_{}"


def whats(facts, **named):
    return [verdict.what for verdict in verdicts(kernel(facts, **named))]


def by_name(name):
    return {found.name: found for found in summarise(real(name))}


# --- real reports -------------------------------------------------------------------------------


def test_the_forward_under_schedule_static_is_imbalanced_first():
    (found,) = summarise(real("h200_fwd_static"))
    said = verdicts(found)
    assert [verdict.what for verdict in said] == ["imbalanced", "latency-bound (barrier)"]
    assert said[0].gain == pytest.approx(0.184, abs=0.001)
    assert said[1].gain == pytest.approx(1 - found.get("l2_throughput") / 100)
    assert found.share == 1
    assert found.limiters == "registers and SMEM"
    assert found.get("duration") == 2219136
    assert found.has_tensor_work


@pytest.mark.parametrize(
    "name, kernel_name, expected",
    [
        ("rtx2080ti_reduce_ncu2022.3", "kernel_C", ["memory-bound (L1)"]),
        ("rtx2080ti_reduce_ncu2022.3", "kernel_A", ["pipe-bound (SM)"]),
        ("gtx1660ti_divergence_ncu2022.4", "mathKernel1", ["launch-bound (too few CTAs)"]),
        ("a10g_sgemm_ncu2023.1", "gmem_coalesce", ["memory-bound (L1)"]),
        ("a10g_sgemm_ncu2023.1", "one_blocktiling", ["close to being memory-bound (L1)"]),
        ("a10g_sgemm_ncu2023.1", "one_d_vec", ["not known"]),
        ("h200_all_basic", "jfa_delta", ["memory-bound (L2)", "memory-bound (DRAM)"]),
        ("h200_all_basic", "_costs", ["launch-bound (too few CTAs)"]),
        ("h200_all_basic", "jfa_forward", ["latency-bound (stalls not collected)"]),
        ("h200_bwd_sections", "jfa_backward", ["spilling", "latency-bound (long_scoreboard)"]),
        ("h200_fwd_basic", "jfa_forward", ["latency-bound (stalls not collected)"]),
    ],
)
def test_verdicts_of_real_reports(name, kernel_name, expected):
    assert [verdict.what for verdict in verdicts(by_name(name)[kernel_name])][: len(expected)] == expected


def test_launches_of_one_kernel_and_shape_are_one_row_of_median_duration():
    found = by_name("h200_all_basic")
    assert list(found)[:3] == ["jfa_backward", "jfa_forward", "jfa_delta"]  # longest in sum first
    assert len(found) == 8
    assert sum(one.launches for one in found.values()) == 24
    assert sum(one.share for one in found.values()) == pytest.approx(1)
    for one in found.values():
        assert one.get("duration") == sorted(one.durations)[1]
        assert one.noise >= LEAST_NOISE
    assert found["_pairs"].noise_source == "quartiles of 3 launches"


@pytest.mark.parametrize("name", ["h200_all_basic", "h200_fwd_static", "a10g_sgemm_ncu2023.1", "h200_cudnn"])
def test_every_fact_has_a_number_or_a_reason_and_every_number_its_metric(name):
    for found in summarise(real(name)):
        assert set(found.numbers) | set(found.absent) >= set(FACTS)
        assert not set(FACTS) & set(found.numbers) & set(found.absent) - {"smem", "dram_rate", "l2_bytes"}
        for one in found.numbers.values():
            assert one.grade in (MEASURED, DERIVED) and math.isfinite(one.value)
            assert all(source in found.metrics for source in one.source.split(", "))
            if one.grade == MEASURED and not one.source.startswith("sm__ops"):
                assert one.value == found.metrics[one.source].value


def test_without_durations_the_order_stays_and_shares_are_unknown():
    found = summarise(real("a10g_sgemm_ncu2023.1"))
    assert [one.name for one in found] == [
        "basic", "gmem_coalesce", "smem_blocking", "one_blocktiling", "two_blocktiling", "one_d_vec",
    ]  # fmt: skip
    assert all(math.isnan(one.share) for one in found)
    last = found[-1]
    assert math.isnan(last.durations[0]) and math.isnan(last.get("duration"))
    assert (last.absent["duration"], last.absent["dram_rate"]) == (NOT_AVAILABLE, "not collected")
    assert [verdict.kind for verdict in verdicts(last)] == ["unknown"]


# --- selecting ----------------------------------------------------------------------------------


def test_selecting_by_name_and_range():
    whole = real("h200_all_basic")
    assert {one.kernel for one in select(whole, "jfa_(forward|delta)").launches} == {"jfa_forward", "jfa_delta"}
    assert {one.kernel for one in select(whole, nvtx="jfa_table").launches} == {
        "_costs", "_ranked_pairs", "_block_ends", "_pairs",
    }  # fmt: skip
    assert len(select(whole, nvtx="jfa:jfa_delta").launches) == 3
    assert len(select(whole, "jfa_delta", "workload=hsp-loguniform").launches) == 3
    assert select(whole).launches == whole.launches


@pytest.mark.parametrize(
    "kernel_name, nvtx, words",
    [
        ("(", None, "is not a regular expression"),
        ("a{99999999999999999999}", None, "is not a regular expression"),
        ("nothing", None, "it holds _costs, _ranked_pairs, jfa_forward"),
        (None, "nothing", "it has jfa:jfa_table schedule"),
        ("jfa_delta", "jfa_table", "matches no range"),
    ],
)
def test_a_selection_that_leaves_nothing(kernel_name, nvtx, words):
    with pytest.raises(UserError, match="^--(kernel|nvtx)") as raised:
        select(real("h200_all_basic"), kernel_name, nvtx)
    assert words in str(raised.value)


def test_no_range_and_no_launch_are_said():
    with pytest.raises(UserError, match="profile with ncu --nvtx"):
        select(real("a10g_sgemm_ncu2023.1"), nvtx="jfa")
    with pytest.raises(UserError, match="holds no profiled kernel"):
        select(report())
    assert summarise(report()) == []


# --- stalls -------------------------------------------------------------------------------------


def test_both_families_give_the_same_names_and_nearly_the_same_order():
    (found,) = real("h200_fwd_static").metrics
    counted = stalls({name: metric for name, metric in found.items() if "pcsamp" not in name})
    sampled = stalls({name: metric for name, metric in found.items() if "average_warps" not in name})
    assert all("pcsamp" in one.source for one in sampled) and not any("pcsamp" in one.source for one in counted)
    assert {one.reason for one in sampled} <= {one.reason for one in counted} <= set(MEANING)
    assert "gmma" in {one.reason for one in counted} & {one.reason for one in sampled}
    assert [one.reason for one in counted[:2]] == [one.reason for one in sampled[:2]]
    shares = {one.reason: one.share for one in sampled}
    for one in counted[:6]:
        assert shares[one.reason] == pytest.approx(one.share, abs=3)
    assert stalls(found) == counted  # the counted family comes first


@pytest.mark.parametrize("name", ["h200_fwd_static", "h200_cudnn", "a100_cutlass_ncu2024.1"])
def test_shares_are_of_all_the_warps_time(name):
    for found in real(name).metrics:
        shares = stalls(found)
        working = [found[STALL.format(reason)].value for reason in WORKING]
        total = sum(
            metric.value for metric_name, metric in found.items() if metric_name.startswith(STALL.partition("{")[0])
        )
        assert sum(one.share for one in shares) == pytest.approx(100 * (1 - sum(working) / total))
        assert [one.share for one in shares] == sorted((one.share for one in shares), reverse=True)


def test_names_that_differ_by_family_are_one():
    other = {SAMPLED.format(n): Metric("", 2.0) for n in ("warpgroup_arrive", "no_instructions", "selected")}
    other[SAMPLED.format("wait_not_issued")] = Metric("", 100.0)
    found = stalls(other)
    assert {one.reason for one in found} == {"gmma", "no_instruction"}
    assert [one.share for one in found] == [pytest.approx(100 / 3)] * 2
    assert stalls({}) == ()
    assert stalls({STALL.format("wait"): Metric("", 0.0), STALL.format("drain"): Metric("", math.nan)}) == ()


# --- each kind, just on either side of its threshold ----------------------------------------------


@pytest.mark.parametrize(
    "facts, what",
    [
        ({"tensor_active": "x", "tensor": 40.0}, "tensor-bound"),
        ({"dram_throughput": "x"}, "memory-bound (DRAM)"),
        ({"l2_throughput": "x"}, "memory-bound (L2)"),
        ({"l1_throughput": "x"}, "memory-bound (L1)"),
        ({"memory_throughput": "x"}, "memory-bound"),
        ({"issue": "x"}, "issue-starved"),
        ({"sm_throughput": "x"}, "pipe-bound (SM)"),
    ],
)
def test_a_unit_is_the_limit_from_its_threshold_on(facts, what):
    def at(value):
        return whats(QUIET | {fact: value if given == "x" else given for fact, given in facts.items()})

    assert at(BUSY)[0] == what
    assert at(BUSY - 0.01)[0] == f"close to being {what}"
    assert at(NEAR)[0] == f"close to being {what}"
    assert at(NEAR - 0.01) == ["latency-bound (stalls not collected)"]


def test_a_pipe_is_named():
    busy = kernel(QUIET, **{PIPES["xu"]: BUSY, PIPES["fma"]: BUSY - 1})
    assert busiest_pipe(busy) == "xu"
    assert [verdict.what for verdict in verdicts(busy)] == ["pipe-bound (xu)"]
    assert whats(QUIET, **{PIPES["xu"]: NEAR - 0.01}) == ["latency-bound (stalls not collected)"]


def test_a_unit_at_its_limit_leaves_out_those_that_are_only_near():
    assert whats(QUIET | {"dram_throughput": 90.0, "l2_throughput": 75.0}) == ["memory-bound (DRAM)"]
    assert whats(QUIET | {"dram_throughput": 81.0, "l2_throughput": 90.0}) == [
        "memory-bound (L2)", "memory-bound (DRAM)",
    ]  # fmt: skip
    # The memory system as a whole is named where its busiest unit is not.
    assert whats(QUIET | {"memory_throughput": 90.0, "l2_throughput": 90.0}) == ["memory-bound (L2)"]
    assert whats(QUIET | {"memory_throughput": 90.0, "l2_throughput": 40.0}) == ["memory-bound"]


def test_imbalance():
    def at(lost, **more):
        cycles = {"cycles_active_avg": 1e6 * (1 - lost / 100), "cycles_active_max": 1e6, "cycles_active_min": 1e5}
        return verdicts(kernel(QUIET | cycles | more))

    first, second = at(IMBALANCED + 0.01)
    assert (first.what, second.kind) == ("imbalanced", "latency-bound")
    assert first.gain == pytest.approx((IMBALANCED + 0.01) / 100)
    assert "the least busy for 10.0 %" in first.why
    assert [verdict.kind for verdict in at(IMBALANCED - 0.01)] == ["latency-bound"]
    # Where most SMs had no CTA at all, that is what is said.
    assert [verdict.kind for verdict in at(50.0, sms=10_000.0)] == ["launch-bound"]


def test_the_tensor_pipe_is_judged_while_sms_are_active():
    """A pipe that is busy for half of the launch, on SMs that are active for 60 % of it, is at its limit there."""
    cycles = {"cycles_active_avg": 6e5, "cycles_active_max": 1e6}
    assert whats(QUIET | cycles | {"tensor": 50.0}) == ["imbalanced", "tensor-bound"]
    assert whats(QUIET | cycles | {"tensor": 50.0, "tensor_active": 60.0})[0] == "imbalanced"
    assert "tensor-bound" not in whats(QUIET | cycles | {"tensor": 50.0, "tensor_active": 60.0})
    never_active = {"cycles_active_avg": 0.0, "cycles_active_max": 1e6, "tensor": 90.0}
    assert whats(QUIET | never_active) == ["imbalanced", "tensor-bound"]


def test_a_short_launch_and_one_of_too_few_ctas():
    assert whats(QUIET | {"duration": SHORT_NS - 1}) == ["launch-bound (short)"]
    assert whats(QUIET | {"duration": SHORT_NS}) == ["latency-bound (stalls not collected)"]
    few = launch(grid=(1, 1, 1))
    sms = 1 / (1 - IDLE_SMS / 100)
    assert verdicts(kernel(QUIET | {"sms": sms + 1e-6}, of=few))[0].what == "launch-bound (too few CTAs)"
    assert verdicts(kernel(QUIET | {"sms": sms - 1e-3}, of=few))[0].kind == "latency-bound"
    assert verdicts(kernel(QUIET, of=launch(grid=())))[0].kind == "latency-bound"


@pytest.mark.parametrize(
    "spills, certain", [(100.0, "ncu counts them as spills"), (math.nan, "this report does not tell which")]
)
def test_spills(spills, certain):
    def at(share):
        local = {"local_loads": share * 600, "local_stores": share * 400, "instructions": 1e5}
        return verdicts(kernel(QUIET | local | {"spills": spills}))

    found = at(SPILLING)
    assert [verdict.kind for verdict in found] == ["spilling", "latency-bound"]
    assert certain in found[0].why
    assert [verdict.kind for verdict in at(SPILLING - 0.001)] == ["latency-bound"]


def test_a_stack_frame_is_no_spill():
    local = {"local_loads": 9e4, "local_stores": 0.0, "instructions": 1e5, "spills": 0.0}
    assert whats(QUIET | local) == ["latency-bound (stalls not collected)"]


def test_traffic_alone_can_tell_of_spills():
    def at(share):
        sectors = {"local_sectors_read": share * 1000, "local_sectors_written": 0.0, "l2_sectors": 1000.0}
        return whats(QUIET | sectors)

    assert at(SPILL_TRAFFIC)[0] == "spilling"
    assert at(SPILL_TRAFFIC - 0.001)[0] != "spilling"


@pytest.mark.parametrize("tensor, works", [(NO_TENSOR_WORK, True), (NO_TENSOR_WORK - 0.01, False), (math.nan, False)])
def test_little_use_of_the_tensor_pipe_is_no_tensor_work(tensor, works):
    assert kernel(QUIET | {"tensor": tensor}).has_tensor_work is works


def test_a_latency_bound_kernel_is_told_what_its_warps_wait_for():
    warps = {STALL.format("long_scoreboard"): 6.0, STALL.format("wait"): 3.0, STALL.format("selected"): 1.0}
    found = kernel(QUIET | {"occupancy_theoretical": 25.0, "limit_registers": 1.0, "limit_smem": 2.0}, **warps)
    (said,) = verdicts(found)
    assert said.what == "latency-bound (long_scoreboard)"
    assert "long_scoreboard 60 %, wait 30 %" in said.why
    assert "25.0 % occupancy (registers allow no more)" in said.why
    assert said.gain == pytest.approx(0.7)
    assert [fact for fact, _ in evidence(found, said)] == ["sm_throughput", "stall: long_scoreboard", "stall: wait"]


def test_too_little_to_say_anything():
    assert [verdict.kind for verdict in verdicts(kernel({}))] == ["unknown"]


# --- numbers ------------------------------------------------------------------------------------


def test_the_first_name_with_a_value_is_taken():
    first, second = FACTS["tensor"].names[1:3]
    there = {first: Metric(first, state=NOT_AVAILABLE), second: Metric(second, 12.0, unit="%")}
    assert number(there, "tensor") == type(number(there, "tensor"))(12.0, "%", MEASURED, second)
    assert number({first: there[first]}, "tensor") is None
    assert why_absent({first: there[first]}, "tensor") == NOT_AVAILABLE
    assert why_absent({}, "tensor") == "not collected"


def test_arithmetic_on_metrics():
    facts = {
        "duration": 2e6, "dram_read": 3e9, "dram_write": 1e9, "l2_sectors": 1e6, "smem_static": 16.0,
        "smem_dynamic": 1024.0, "local_sectors_read": 10.0, "cycles_active_avg": 75.0, "cycles_active_max": 100.0,
        "cycles_active_min": 50.0,
    }  # fmt: skip
    found = kernel(facts, sm__ops_path_tensor_op_hgmma_src_bf16_dst_fp32_sparsity_off=0.0)
    expected = {
        "dram_bytes": (4e9, "byte"), "dram_rate": (2e12, "byte/s"), "l2_bytes": (32e6, "byte"),
        "l2_rate": (16e9, "byte/s"), "smem": (1040.0, "byte/block"), "local_bytes": (320.0, "byte"),
        "imbalance": (25.0, "%"), "least_busy": (50.0, "%"),
    }  # fmt: skip
    assert {fact: (found.get(fact), found.numbers[fact].unit) for fact in expected} == {
        fact: (pytest.approx(value), unit) for fact, (value, unit) in expected.items()
    }
    assert all(found.numbers[fact].grade == DERIVED for fact in expected)
    assert "tensor_operations" not in found.numbers


def test_operations_are_counted_once():
    """ncu has the counters by instruction and their sums by type."""
    ops = "sm__ops_path_tensor_{}.sum"
    found = kernel(
        {"duration": 1e6},
        **{
            ops.format("op_hgmma_src_bf16_dst_fp32_sparsity_off"): 6e9,
            ops.format("op_hmma_src_bf16_dst_fp32_sparsity_off"): 1e9,
            ops.format("src_bf16_dst_fp32"): 7e9,
            ops.format("op_hgmma_src_bf16_dst_fp32_sparsity_off") + ".per_second": 6e12,
        },
    )
    assert found.get("tensor_operations") == 7e9
    assert found.get("tensor_rate") == pytest.approx(7e12)


def test_noise_is_of_quartiles_or_of_passes():
    def of(*durations, **cycles):
        return summarise(report(*((launch(), metrics({"duration": one}, **cycles)) for one in durations)))[0]

    several = of(100.0, 110.0, 120.0, 130.0, 140.0)
    assert several.noise == pytest.approx(20 / 120)
    assert several.get("duration") == 120
    assert (of(100.0, 100.0, 100.0).noise, of(100.0, 180.0).noise) == (LEAST_NOISE, LEAST_NOISE)
    passes = of(100.0, **{"sm__cycles_elapsed.max": 100.0, "gpc__cycles_elapsed.max": 103.0})
    assert (passes.noise, passes.noise_source) == (pytest.approx(0.03), "elapsed cycles in different passes")


@pytest.mark.parametrize("different", [{"grid": (7, 1, 1)}, {"block": (7, 1, 1)}, {"gpu": "another"}])
def test_another_shape_or_gpu_is_another_row(different):
    found = summarise(report((launch(), metrics({"duration": 1e6})), (launch(**different), metrics({"duration": 3e6}))))
    assert [one.share for one in found] == [0.75, 0.25]


# --- whatever is missing ------------------------------------------------------------------------

VALUES = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1e-320, 1e308, 100.0, 80.0, 70.0, 5000.0]),
    st.floats(),
    st.floats(0, 120),
)
NAMES = sorted(
    {name for fact in FACTS.values() for name in fact.names}
    | set(PIPES.values())
    | {STALL.format(reason) for reason in ("wait", "barrier", "selected", "new_reason")}
    | {SAMPLED.format(reason) for reason in ("wait", "warpgroup_arrive", "wait_not_issued")}
    | {"gpc__cycles_elapsed.max", "sm__ops_path_tensor_op_hmma_src_bf16.sum", "unheard__of.sum"}
)
LAUNCHES = st.builds(
    launch,
    kernel=st.sampled_from(["kernel", "jfa_forward", ""]),
    grid=st.sampled_from([(), (1, 1, 1), (1320, 1, 1), (0, 0, 0), (2**31, 65535, 65535)]),
    capability=st.sampled_from(["", "9.0", "99.9"]),
    push_pop=st.sampled_from([(), ("jfa:jfa_forward workload=hsp-loguniform",)]),
)
MADE = st.tuples(
    LAUNCHES,
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=len(NAMES)).map(
        lambda values: {name: Metric(name, value) for name, value in values.items()}
    ),
)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # NumPy, of quartiles of the infinite
@given(st.lists(MADE, min_size=1, max_size=4))
@settings(max_examples=300)
def test_verdicts_are_always_given_with_a_gain_that_can_be(launches):
    for found in summarise(report(*launches)):
        said = verdicts(found)
        assert said and {verdict.kind for verdict in said} <= KINDS
        for verdict in said:
            assert math.isnan(verdict.gain) or 0 <= verdict.gain <= 1
            assert verdict.what and verdict.why
            rests = evidence(found, verdict)
            assert len(rests) == len(verdict.evidence)
        assert found.noise >= LEAST_NOISE
        assert all(0 <= stall.share <= 100.000001 for stall in found.stalls)
        assert math.isnan(found.share) or math.isfinite(found.share)
