"""A schedule decides when and where a tile runs, never what comes out; a plan serves every call on its lengths."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attend import attend  # noqa: E402
from shapes import CASES, DEVICES, Case  # noqa: E402
from tolerance import assert_results_close  # noqa: E402

import jfa  # noqa: E402
from jfa.schedule import SCHEDULES  # noqa: E402

on_each_device = pytest.mark.parametrize("device", DEVICES)
OTHERS = [name for name in (*SCHEDULES, "auto") if name != "grid"]
# Fewer tiles than CTAs, more of them, none; tiles without work; rows and keys that no tile covers.
NAMES = ("ones", "tails-causal", "broadcast", "empty-both", "causal-short-kv", "unused-blocks", "all-empty-unused")


def assert_same(actual, expected):
    """Bit for bit, but for dq, whose terms arrive in any order."""
    for name in ("out", "lse", "dk", "dv"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    torch.testing.assert_close(actual.dq, expected.dq, rtol=1e-5, atol=1e-5)


def plan_for(case, inputs, **options):
    return jfa.plan(inputs.kv_offsets, inputs.q_offsets, q=inputs.q, k=inputs.k, **case.options, **options)


@on_each_device
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_gives_the_same(name, device):
    case = CASES[name]
    inputs = case.inputs(device, grad=True)
    expected = attend(inputs, grads=True, schedule="grid", **case.options)
    for schedule in OTHERS:
        assert_same(attend(inputs, grads=True, schedule=schedule, **case.options), expected)


@on_each_device
@pytest.mark.parametrize("schedule", ["grid", "balanced", "balanced-dynamic"])
@pytest.mark.parametrize("name", ["window-both", "broadcast", "no-sequences-unused", "all-kv-empty"])
def test_a_plan_gives_the_same_as_its_name(name, schedule, device):
    case = CASES[name]
    inputs = case.inputs(device, grad=True)
    table = plan_for(case, inputs, schedule=schedule)
    assert_same(
        attend(inputs, grads=True, schedule=table, **case.options),
        attend(inputs, grads=True, schedule=schedule, **case.options),
    )


@on_each_device
def test_one_plan_serves_many_layers(device):
    """Other values, another number of heads, other groups: the lengths are what counts."""
    case = Case(q_lens=(70, 0, 5), kv_lens=(130, 3, 66), causal=True)
    table = plan_for(case, case.inputs(device))
    for seed, heads, heads_kv in ((1, 2, 2), (2, 4, 1), (3, 1, 1)):
        layer = dataclasses.replace(case, heads=heads, heads_kv=heads_kv)
        inputs = layer.inputs(device, seed=seed, grad=True)
        assert_results_close(attend(inputs, grads=True, schedule=table, **case.options), inputs, **case.bounds)


@on_each_device
def test_a_plan_with_bounds_gives_the_same_as_one_without(device):
    case = CASES["broadcast"]
    inputs = case.inputs(device, grad=True)
    tight = plan_for(case, inputs, max_q_len=32, max_kv_len=130)
    assert tight.forward.max_items <= plan_for(case, inputs).forward.max_items
    assert_same(attend(inputs, grads=True, schedule=tight), attend(inputs, grads=True))


BASE = Case(q_lens=(20, 20), kv_lens=(30, 30))
STRANGERS = {
    "another batch": dataclasses.replace(BASE, q_lens=(20, 10, 10), kv_lens=(30, 15, 15)),
    "more queries": dataclasses.replace(BASE, q_lens=(20, 21)),
    "more keys": dataclasses.replace(BASE, kv_lens=(30, 31)),
    "causal": dataclasses.replace(BASE, causal=True),
    "a window": dataclasses.replace(BASE, window=(3, 4)),
    "a broadcast q of as many rows": dataclasses.replace(BASE, q_lens=None, q_len=40),
}


@on_each_device
@pytest.mark.parametrize("why", STRANGERS)
def test_a_plan_for_something_else_is_refused(why, device):
    table = plan_for(BASE, BASE.inputs(device))
    stranger = STRANGERS[why]
    with pytest.raises(ValueError, match=r"^schedule: the table was planned for .*jfa\.plan"):
        attend(stranger.inputs(device), schedule=table, **stranger.options)


@pytest.fixture
def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")


@pytest.mark.gpu
def test_tensors_need_not_be_on_the_current_device(two_gpus):
    case = CASES["window-both"]
    expected = attend(case.inputs("cuda:0", grad=True), grads=True, **case.options)
    inputs = case.inputs("cuda:1", grad=True)
    for schedule in ("auto", plan_for(case, inputs)):
        actual = attend(inputs, grads=True, schedule=schedule, **case.options)
        assert torch.equal(actual.out.cpu(), expected.out.cpu())
        assert torch.equal(actual.dk.cpu(), expected.dk.cpu())
    assert torch.cuda.current_device() == 0


@on_each_device
def test_a_plan_on_another_device_is_refused(device):
    table = plan_for(BASE, BASE.inputs(device))
    elsewhere = dataclasses.replace(table.forward, pairs=table.forward.pairs.to("meta"))
    with pytest.raises(ValueError, match=r"^schedule: the table was planned for tensors on meta, this call has "):
        attend(BASE.inputs(device), schedule=dataclasses.replace(table, forward=elsewhere))


@on_each_device
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"schedule": "balancd"}, ValueError, "schedule is 'balancd': .* did you mean 'balanced'"),
        ({"schedule": None}, TypeError, "schedule must be"),
        ({"window": (1,)}, TypeError, "window must be a pair"),
        ({"max_kv_len": torch.tensor(30)}, TypeError, "max_kv_len is a tensor"),
        ({"q": torch.zeros(3, 64)}, ValueError, "q has shape"),
    ],
)
def test_plan_refuses_bad_arguments(changed, error, message, device):
    inputs = BASE.inputs(device)
    arguments = {"q": inputs.q, "k": inputs.k, **changed}
    with pytest.raises(error, match=f"^{message}"):
        jfa.plan(inputs.kv_offsets, inputs.q_offsets, **arguments)


@on_each_device
def test_plan_reads_the_offsets_where_that_costs_nothing(device, monkeypatch):
    monkeypatch.setenv("JFA_CHECK", "1")
    inputs = BASE.inputs(device)
    offsets = torch.tensor([0, 30, 29], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="^kv_offsets decreases from 30 to 29 at sequence 1"):
        jfa.plan(offsets, inputs.q_offsets, q=inputs.q, k=inputs.k)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["broadcast", "window-both"])
def test_nothing_waits_for_the_device(name, monkeypatch):
    monkeypatch.delenv("JFA_CHECK", raising=False)
    case = CASES[name]
    inputs = case.inputs("cuda", grad=True)
    attend(inputs, grads=True, **case.options)
    longest = {"max_q_len": max(case.q_lens or (case.q_len,)), "max_kv_len": max(case.kv_lens)}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for schedule in (*SCHEDULES, plan_for(case, inputs, **longest)):
            results = attend(inputs, grads=True, schedule=schedule, **longest, **case.options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert results.out.isfinite().all()
