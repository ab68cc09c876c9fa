"""Every rule of jfa.validation refuses with one line that names the argument, and lets good calls through unread."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from jfa import validation  # noqa: E402
from jfa.validation import check_values, validate  # noqa: E402


def call(**changed):
    """A valid jagged call, B = 3, H 4/2, D 64, with some arguments changed."""
    arguments = {
        "q": torch.zeros(10, 4, 64),
        "k": torch.zeros(20, 2, 64),
        "v": torch.zeros(20, 2, 64),
        "kv_offsets": torch.tensor([0, 5, 5, 18], dtype=torch.int32),
        "q_offsets": torch.tensor([0, 3, 6, 10], dtype=torch.int64),
    }
    return validate(**{**arguments, **changed})


def test_problem_of_a_jagged_call():
    problem = call(max_q_len=4, max_kv_len=13, causal=True, window=(7, -1))
    assert problem == validation.Problem(
        broadcast_q=False,
        batch=3,
        heads=4,
        heads_kv=2,
        head_dim=64,
        total_q=10,
        q_len=0,
        total_kv=20,
        max_q_len=4,
        max_kv_len=13,
        scale=0.125,
        window_left=7,
        window_right=0,
    )


def test_problem_of_a_broadcast_call():
    problem = call(q_offsets=None)
    assert problem.broadcast_q
    assert (problem.total_q, problem.q_len, problem.max_q_len, problem.max_kv_len) == (30, 10, 10, 20)


@pytest.mark.parametrize(
    ("causal", "window", "bounds"),
    [
        (False, None, (-1, -1)),
        (True, None, (-1, 0)),
        (True, (3, 0), (3, 0)),
        (True, (3, -1), (3, 0)),
        (True, [-1, -1], (-1, 0)),
        (False, (0, 2), (0, 2)),
    ],
)
def test_causal_and_window_meet_in_two_bounds(causal, window, bounds):
    problem = call(causal=causal, window=window)
    assert (problem.window_left, problem.window_right) == bounds


def test_bounds_never_exceed_the_tokens():
    problem = call(max_q_len=1000, max_kv_len=1000)
    assert (problem.max_q_len, problem.max_kv_len) == (10, 20)


def test_a_batch_without_tokens_or_sequences_is_a_problem_like_any_other():
    none = torch.zeros(0, 2, 64)
    empty = validate(none, none, none, torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), 0, 0)
    assert (empty.batch, empty.total_q, empty.max_q_len, empty.max_kv_len) == (3, 0, 0, 0)
    nobody = validate(torch.zeros(5, 2, 64), none, none, torch.zeros(1, dtype=torch.int64))
    assert (nobody.batch, nobody.total_q, nobody.q_len) == (0, 0, 5)


EMPTY_HEADS = torch.zeros(20, 0, 64)
REFUSED = {
    "q is a list": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor: got list"),
    "k is an array": ({"k": np.zeros((20, 2, 64))}, TypeError, "k must be a torch.Tensor: got ndarray"),
    "q of rank 4": ({"q": torch.zeros(1, 10, 4, 64)}, ValueError, r"q has shape \(1, 10, 4, 64\): expected \(tokens"),
    "v of rank 2": ({"v": torch.zeros(20, 64)}, ValueError, r"v has shape \(20, 64\)"),
    "q of integers": ({"q": torch.zeros(10, 4, 64, dtype=torch.int32)}, TypeError, "q is torch.int32: expected one of"),
    "v of another dtype": ({"v": torch.zeros(20, 2, 64).half()}, TypeError, "v is torch.float16 and q torch.float32"),
    "k elsewhere": ({"k": torch.zeros(20, 2, 64, device="meta")}, ValueError, r"k is on meta and q on cpu.*\.to\("),
    "k of another head_dim": ({"k": torch.zeros(20, 2, 32)}, ValueError, "k has shape .* one head dimension"),
    "heads not a multiple": ({"k": torch.zeros(20, 3, 64)}, ValueError, "k has 3 heads and q 4: .* multiple"),
    "no kv heads": ({"k": EMPTY_HEADS, "v": EMPTY_HEADS}, ValueError, "k has 0 heads"),
    "no heads": ({"q": torch.zeros(10, 0, 64)}, ValueError, "q has shape .* at least one head"),
    "v shorter than k": ({"v": torch.zeros(19, 2, 64)}, ValueError, "v has shape .* expected k's shape"),
    "v with other heads": ({"v": torch.zeros(20, 4, 64)}, ValueError, "v has shape .* expected k's shape"),
    "a sparse k": ({"k": torch.zeros(20, 2, 64).to_sparse()}, TypeError, "k is a torch.sparse_coo tensor"),
    "offsets as a list": ({"kv_offsets": [0, 5, 5, 18]}, TypeError, "kv_offsets must be a torch.Tensor: got list"),
    "float offsets": ({"kv_offsets": torch.zeros(4)}, TypeError, "kv_offsets is torch.float32: expected torch.int32"),
    "int16 offsets": ({"q_offsets": torch.zeros(4).short()}, TypeError, "q_offsets is torch.int16"),
    "offsets of rank 2": ({"kv_offsets": torch.zeros(2, 2).int()}, ValueError, r"kv_offsets has shape \(2, 2\)"),
    "offsets of rank 0": ({"q_offsets": torch.zeros(()).int()}, ValueError, r"q_offsets has shape \(\)"),
    "no offset at all": (
        {"kv_offsets": torch.zeros(0).int()},
        ValueError,
        r"kv_offsets has shape \(0,\): expected \(B",
    ),
    "offsets elsewhere": ({"kv_offsets": torch.zeros(4, device="meta").int()}, ValueError, "kv_offsets is on meta"),
    "two batch sizes": ({"q_offsets": torch.zeros(5).int()}, ValueError, "q_offsets has 5 elements and kv_offsets 4"),
    "max as a tensor": ({"max_q_len": torch.tensor(4)}, TypeError, "max_q_len is a tensor: .* stops the host"),
    "max as a float": ({"max_kv_len": 13.0}, TypeError, "max_kv_len must be an int"),
    "max as a bool": ({"max_kv_len": True}, TypeError, "max_kv_len must be an int"),
    "max negative": ({"max_kv_len": -1}, ValueError, "max_kv_len is -1"),
    "max below a broadcast q": ({"q_offsets": None, "max_q_len": 9}, ValueError, "max_q_len is 9 and q has 10 rows"),
    "scale NaN": ({"scale": float("nan")}, ValueError, "scale is nan: expected a finite"),
    "scale infinite": ({"scale": float("-inf")}, ValueError, "scale is -inf"),
    "scale a tensor": ({"scale": torch.tensor(0.1)}, TypeError, "scale must be a float .* got a tensor"),
    "scale a string": ({"scale": "0.1"}, TypeError, "scale must be a float"),
    "causal an int": ({"causal": 1}, TypeError, "causal must be True or False: got 1"),
    "deterministic None": ({"deterministic": None}, TypeError, "deterministic must be True or False"),
    "window an int": ({"window": 128}, TypeError, r"window must be a pair \(left, right\)"),
    "window of three": ({"window": (1, 2, 3)}, TypeError, "window must be a pair"),
    "window of floats": ({"window": (1.5, 0)}, TypeError, "window's left bound must be an integer: got 1.5"),
    "window of None": ({"window": (4, None)}, TypeError, "window's right bound must be an integer"),
    "window below -1": ({"window": (-2, 0)}, ValueError, "window's left bound is -2"),
    "causal window to the right": (
        {"causal": True, "window": (4, 2)},
        ValueError,
        r"window looks 2 .* window=\(4, 0\)",
    ),
    "impl misspelt": ({"impl": "tirton"}, ValueError, "impl is 'tirton': .* did you mean 'triton'"),
    "impl a type": ({"impl": None}, TypeError, "impl must be one of auto"),
    "schedule misspelt": (
        {"schedule": "balanced_dynamic"},
        ValueError,
        "schedule is .* did you mean 'balanced-dynamic'",
    ),
    "schedule of no kind": ({"schedule": 3}, TypeError, r"schedule must be one of .* jfa\.plan\(\.\.\.\): got 3"),
    "triton at D 80": (
        {"q": torch.zeros(10, 4, 80), "k": torch.zeros(20, 2, 80), "v": torch.zeros(20, 2, 80), "impl": "triton"},
        ValueError,
        "q has head dimension 80, .* expected one of 64, 128; pad",
    ),
    "triton at float64": (
        {**{name: torch.zeros(20, 2, 64).double() for name in "qkv"}, "impl": "triton"},
        TypeError,
        "q is torch.float64, which impl='triton' does not support",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused_with_one_line(why):
    changed, error, message = REFUSED[why]
    with pytest.raises(error, match=f"^{message}") as caught:
        call(**changed)
    assert "\n" not in str(caught.value)


def test_nested_tensors_are_told_what_to_pass():
    nested = torch.nested.nested_tensor([torch.zeros(2, 4, 64), torch.zeros(3, 4, 64)], layout=torch.jagged)
    with pytest.raises(TypeError, match="^q is a torch.jagged tensor: .* pass its values and offsets"):
        call(q=nested)


def test_the_reference_takes_what_the_kernels_do_not():
    tensors = {name: torch.zeros(20, 2, 80, dtype=torch.float64) for name in "qkv"}
    assert call(**tensors, impl="reference").head_dim == 80


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_good_values_pass_even_with_tokens_past_the_end(dtype):
    offsets = torch.tensor([0, 5, 5, 18], dtype=dtype)
    check_values(offsets, None, call(q_offsets=None, max_kv_len=13))
    check_values(torch.zeros(1, dtype=dtype), None, call(q_offsets=None, kv_offsets=torch.zeros(1, dtype=dtype)))


BAD_VALUES = {
    "start": ([1, 5, 5, 18], [0, 3, 6, 10], {}, "kv_offsets starts at 1: expected 0"),
    "order": ([0, 5, 4, 18], [0, 3, 6, 10], {}, "kv_offsets decreases from 5 to 4 at sequence 1"),
    "end": ([0, 5, 5, 21], [0, 3, 6, 10], {}, "kv_offsets ends at 21 and k has 20 tokens"),
    "end of q": ([0, 5, 5, 18], [0, 3, 6, 11], {}, "q_offsets ends at 11 and q has 10 tokens"),
    "max_kv_len": ([0, 5, 5, 18], [0, 3, 6, 10], {"max_kv_len": 12}, "max_kv_len is 12 and sequence 2 has 13 tokens"),
    "max_q_len": ([0, 5, 5, 18], [0, 3, 6, 10], {"max_q_len": 3}, "max_q_len is 3 and sequence 2 has 4 tokens"),
    "int32 overflow": ([0, 2**31 - 1, -(2**31), 18], [0, 3, 6, 10], {}, "kv_offsets decreases from 2147483647"),
}


@pytest.mark.parametrize("why", BAD_VALUES)
def test_bad_values_are_refused(why):
    kv_offsets, q_offsets, lengths, message = BAD_VALUES[why]
    kv_offsets, q_offsets = (torch.tensor(ends, dtype=torch.int32) for ends in (kv_offsets, q_offsets))
    problem = call(kv_offsets=kv_offsets, q_offsets=q_offsets, **lengths)
    with pytest.raises(ValueError, match=f"^{message}"):
        check_values(kv_offsets, q_offsets, problem)


def test_validate_never_reads_a_tensor():
    meta = {name: torch.zeros(8, 2, 64, device="meta") for name in "qkv"}
    offsets = torch.zeros(3, dtype=torch.int32, device="meta")
    assert call(**meta, kv_offsets=offsets, q_offsets=offsets).batch == 2


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("broadcast", [False, True])
def test_traces_as_one_graph(dynamic, broadcast):
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=dynamic)
    def traced(q, k, v, kv_offsets, q_offsets, max_kv_len, scale):
        problem = validate(
            q, k, v, kv_offsets, q_offsets, None, max_kv_len, scale, True, (5, -1), False, "triton", "static"
        )
        rows = q.new_zeros(problem.total_q, problem.heads, problem.head_dim)
        return rows + problem.scale + problem.max_kv_len + problem.window_left

    for tokens in (10, 23, 31):
        q, k, v = torch.zeros(tokens, 4, 64), torch.zeros(40, 2, 64), torch.zeros(40, 2, 64)
        ends = torch.tensor([0, 3, 6], dtype=torch.int32)
        out = traced(q, k, v, ends, None if broadcast else ends, 3 + tokens, 0.5)
        assert out.shape == (2 * tokens if broadcast else tokens, 4, 64)
        assert (out == 0.5 + 3 + tokens + 5).all()
    assert len(graphs) == (1 if dynamic else 2), "a new length compiles anew"


def test_compiled_code_keeps_the_message():
    traced = torch.compile(call, backend="eager", fullgraph=False)
    with pytest.raises(ValueError, match="k has 3 heads and q 4"):
        traced(k=torch.zeros(20, 3, 64))
