"""Workloads mean the same lengths everywhere, count useful work exactly, and make valid inputs."""

import json
import subprocess
import sys

import numpy as np
import pytest

from jfa import workloads
from jfa.workloads import Workload

TIMED = ["hsp-loguniform", "hsp-half-empty", "hsp-extreme", "self-lognormal"]
DENSE = ["dense-512", "dense-1024", "dense-2048", "dense-4096"]


def test_the_names_that_others_rely_on():
    assert workloads.names()[:8] == TIMED + DENSE
    assert [workloads.get(name).name for name in workloads.names()] == workloads.names()


# (tokens of q, tokens of kv, longest kv, empty sequences): they change only if what a published number means does.
@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("hsp-loguniform", (262144, 1385503, 8166, 0)),
        ("hsp-half-empty", (262144, 665070, 8166, 549)),
        ("hsp-extreme", (262144, 327168, 32768, 0)),
        ("self-lognormal", (296137, 296137, 8192, 0)),
        ("dense-512", (393216, 393216, 512, 0)),
        ("dense-1024", (786432, 786432, 1024, 0)),
        ("dense-2048", (393216, 393216, 2048, 0)),
        ("dense-4096", (65536, 65536, 4096, 0)),
    ],
)
def test_lengths_are_the_published_ones(name, facts):
    w = workloads.get(name)
    assert (w.total_q, w.total_kv, w.max_kv_len, int((w.kv_lens == 0).sum())) == facts
    assert w.head_dim == 128 and w.heads == w.heads_kv == (16 if name == "dense-4096" else 4)
    assert w.broadcast_q == name.startswith("hsp")


def test_lengths_come_from_one_generator_in_order():
    rng = np.random.default_rng(0)
    skewed = np.exp(rng.uniform(np.log(16), np.log(8192), 1024)).astype(int)
    emptied = rng.random(1024) < 0.5
    own = np.minimum(np.exp(rng.normal(6.5, 1.0, 256)), 8192).astype(int)
    assert np.array_equal(workloads.get("hsp-loguniform").kv_lens, skewed)
    assert np.array_equal(workloads.get("hsp-half-empty").kv_lens, np.where(emptied, 0, skewed))
    assert np.array_equal(workloads.get("self-lognormal").q_lens, own)


def test_nobody_can_change_a_named_workload():
    with pytest.raises(ValueError, match="read-only"):
        workloads.get("dense-512").kv_lens[0] = 7


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("hsp-loguniforn", "did you mean hsp-loguniform"),
        ("dense-512k", "dense-512"),
        ("zzz", "known: hsp-loguniform, "),
        ("", "known: "),
    ],
)
def test_an_unknown_name_gets_the_nearest(given, hint):
    with pytest.raises(ValueError, match=f"^workload: there is none named '{given}'; .*{hint}"):
        workloads.get(given)


def small(**changed):
    fields = {"heads": 2, "heads_kv": 1, "head_dim": 8, "q_lens": [3, 0, 5], "kv_lens": [7, 4, 2]}
    return Workload(**{"name": "small", "broadcast_q": False, **fields, **changed})


@pytest.mark.parametrize("window", [None, (-1, 0), (0, 0), (2, 1), (-1, 3), (1, -1), (100, 100)])
def test_pairs_count_what_the_mask_lets_through(window):
    w = small(window=window)
    left, right = window or (-1, -1)
    expected = 0
    for q_len, kv_len in zip(w.q_lens, w.kv_lens, strict=True):
        for i in range(q_len):
            for j in range(kv_len):
                distance = j - (i + kv_len - q_len)
                expected += (left < 0 or distance >= -left) and (right < 0 or distance <= right)
    assert w.pairs() == expected


def test_causal_is_a_right_bound_of_zero():
    assert small(causal=True).pairs() == small(window=(-1, 0)).pairs() == (5 + 6 + 7) + (0 + 0 + 0 + 1 + 2)
    assert small(causal=True, window=(1, -1)).window_bounds == (1, 0)


def test_flop_by_hand():
    w = small()
    assert w.flop() == 4 * 2 * 8 * (3 * 7 + 5 * 2)
    assert w.flop("backward") == 2.5 * w.flop("forward")
    with pytest.raises(ValueError, match="direction must be"):
        w.flop("sideways")


def test_metadata_is_json_and_complete():
    meta = json.loads(json.dumps(workloads.get("hsp-half-empty").metadata()))
    assert meta["q_lens"] == [256] * 1024 and len(meta["kv_lens"]) == 1024
    assert meta["flop"] == workloads.get("hsp-half-empty").flop()
    assert {"name", "seed", "heads", "heads_kv", "head_dim", "dtype", "broadcast_q", "causal", "window"} < set(meta)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q_lens": [1, 2]}, "one length a sequence: got 2 and 3"),
        ({"kv_lens": [1, -2, 3]}, "kv_lens must not be negative: got -2"),
        ({"kv_lens": [1.5, 2, 3]}, "kv_lens must be one row of integers"),
        ({"q_lens": [[1, 2, 3]]}, "q_lens must be one row of integers"),
        ({"broadcast_q": True}, "broadcast_q"),
        ({"heads_kv": 3}, "multiple of heads_kv"),
        ({"head_dim": 0}, "head_dim positive"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"causal": True, "window": (1, 1)}, "window: causal"),
    ],
)
def test_contradictions_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        small(**changed)


def test_a_batch_of_no_sequences():
    w = small(q_lens=[], kv_lens=[], causal=True)
    assert (w.batch, w.total_q, w.total_kv, w.max_q_len, w.max_kv_len, w.flop()) == (0, 0, 0, 0, 0, 0)


def test_importing_workloads_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from jfa import workloads; print(len(workloads.names()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", ["tiny", "tiny-causal"])
def test_inputs_fit_the_op(name):
    torch = pytest.importorskip("torch")
    from jfa.validation import check_values, validate

    w = workloads.get(name)
    inputs = w.inputs("cpu", requires_grad=True)
    problem = validate(
        *(inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets, w.max_q_len, w.max_kv_len),
        causal=w.causal,
        window=w.window,
    )
    check_values(inputs.kv_offsets, inputs.q_offsets, problem)
    assert (problem.total_q, problem.batch, problem.heads, problem.heads_kv) == (
        w.total_q,
        w.batch,
        w.heads,
        w.heads_kv,
    )
    assert problem.broadcast_q == w.broadcast_q
    shape = (w.batch, w.max_q_len) if w.broadcast_q else (w.total_q,)
    assert inputs.grad_out.shape == (*shape, w.heads, w.head_dim)
    assert all(tensor.requires_grad and tensor.dtype == torch.bfloat16 for tensor in (inputs.q, inputs.k, inputs.v))
    again, other = w.inputs("cpu"), w.inputs("cpu", seed=1)
    assert torch.equal(again.k, inputs.k) and not torch.equal(other.k, inputs.k)
