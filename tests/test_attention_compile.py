"""The op as torch sees it: a registered operator with the right fake, and one graph under torch.compile."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attend import attend  # noqa: E402
from shapes import CASES, DEVICES, Case  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import jfa  # noqa: E402
from jfa import jagged_attention  # noqa: E402

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch.compiler.reset()


def operator_arguments(case, inputs, table=None, deterministic=False):
    """The positional arguments of torch.ops.jfa.forward for a case."""
    problem_bounds = case.bounds
    tables = (None,) * 4
    if table is not None:
        tables = (table.forward.pairs, table.forward.counts, table.backward.pairs, table.backward.counts)
    return (
        *(inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets, *tables),
        [table.block_q, table.block_kv, table.forward.split] if table else [0, 0, 0],
        "triton",
        table.schedule if table else "balanced-dynamic",
        case.q_len if case.broadcast else len(inputs.q),
        len(inputs.k),
        0.125,
        problem_bounds["window_left"],
        problem_bounds["window_right"],
        deterministic,
    )


SMALL = {
    "jagged": Case(q_lens=(3, 0, 5), kv_lens=(4, 2, 6), heads=2, heads_kv=1, causal=True),
    "broadcast": Case(q_len=3, kv_lens=(4, 0, 6), heads=1, heads_kv=1),
}


@pytest.mark.parametrize("planned", [False, True], ids=["named", "planned"])
@pytest.mark.parametrize("name", SMALL)
def test_opcheck(name, planned, device):
    case = SMALL[name]
    inputs = case.inputs(device, grad=True)
    table = None
    if planned:
        table = jfa.plan(inputs.kv_offsets, inputs.q_offsets, q=inputs.q, k=inputs.k, impl="triton", **case.options)
    torch.library.opcheck(torch.ops.jfa.forward.default, operator_arguments(case, inputs, table))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_opcheck_backward(name, deterministic, device):
    case = SMALL[name]
    inputs = case.inputs(device)
    results = attend(inputs, **case.options)
    arguments = operator_arguments(case, inputs, deterministic=deterministic)
    out = results.out.flatten(0, 1) if case.broadcast else results.out
    grad_out = inputs.grad_out.view_as(out)
    for grad_lse in (None, torch.ones_like(results.lse)):
        torch.library.opcheck(
            torch.ops.jfa.backward.default,
            (grad_out, grad_lse, *arguments[:3], out, results.lse, *arguments[3:5], None, None, *arguments[10:]),
        )


@pytest.mark.parametrize(
    "name", ["causal-short-kv", "broadcast-gqa", "all-empty", "no-sequences", "heads-first", "heads-first-no-keys"]
)
def test_fakes_have_the_shapes_dtypes_and_strides_of_results(name, device):
    case = CASES[name]
    inputs = case.inputs(device, grad=True)
    real = attend(inputs, grads=True, **case.options)
    with FakeTensorMode() as mode:
        tensors = [None if x is None else mode.from_tensor(x) for x in vars(inputs).values()]
        q, k, v, q_offsets, kv_offsets, grad_out = tensors
        out, lse = jagged_attention(q, k, v, kv_offsets, q_offsets, return_lse=True, impl="triton", **case.options)
        grads = torch.autograd.grad(out, (q, k, v), grad_out)
    for expected, fake in zip(vars(real).values(), (out, lse, *grads), strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (expected.shape, expected.dtype, expected.stride())


def step(q, k, v, kv_offsets, q_offsets, grad_out, options):
    out, lse = jagged_attention(q * 1.5, k, v, kv_offsets, q_offsets, return_lse=True, **options)
    return out, lse, (out * grad_out).sum()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["causal-short-q", "broadcast", "unused-tokens", "packed"])
def test_one_graph_forward_and_backward(name, dynamic, device):
    case = CASES[name]
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    found = []
    for function in (step, compiled):
        inputs = case.inputs(device, grad=True)
        grad_out = inputs.grad_out.nan_to_num(0.0)
        options = {"impl": "triton", **case.options}
        out, lse, loss = function(inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets, grad_out, options)
        found.append((out, lse, *torch.autograd.grad(loss, (inputs.q, inputs.k, inputs.v))))
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("broadcast", [False, True])
def test_new_lengths_compile_nothing_new(broadcast, device):
    """Tokens, batch sizes and longest lengths differ from step to step; the code is compiled once."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def forward(q, k, v, kv_offsets, q_offsets, max_kv_len):
        return jagged_attention(q, k, v, kv_offsets, q_offsets, max_kv_len=max_kv_len, impl="triton")

    for kv_lens in ((11, 13, 15), (10, 15, 11, 3), (2, 0, 70, 5, 9), (64, 9)):
        lengths = {"q_len": 12} if broadcast else {"q_lens": kv_lens[::-1]}
        inputs = Case(kv_lens=kv_lens, **lengths).inputs(device)
        arguments = inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets
        out = forward(*arguments, max(kv_lens))
        assert torch.equal(out, jagged_attention(*arguments, impl="triton"))
    assert counter.frame_count == 1


def test_a_plan_crosses_into_compiled_code(device):
    case = CASES["window-both"]
    inputs = case.inputs(device, grad=True)
    table = jfa.plan(inputs.kv_offsets, inputs.q_offsets, q=inputs.q, k=inputs.k, **case.options)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def two_layers(q, k, v, kv_offsets, q_offsets, table):
        first = jagged_attention(q, k, v, kv_offsets, q_offsets, schedule=table, impl="triton", **case.options)
        return jagged_attention(first, k, v, kv_offsets, q_offsets, schedule=table, impl="triton", **case.options)

    arguments = inputs.q, inputs.k, inputs.v, inputs.kv_offsets, inputs.q_offsets
    first = jagged_attention(*arguments, impl="triton", **case.options)
    second = jagged_attention(first, *arguments[1:], impl="triton", **case.options)
    traced = two_layers(*arguments, table)
    torch.testing.assert_close(traced, second, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(out, arguments[:3], inputs.grad_out) for out in (traced, second)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
