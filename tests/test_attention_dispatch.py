"""Which implementation runs, and what happens when none can: never a silent fallback, always one line that names it."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attend import attend  # noqa: E402
from shapes import CASES, DEVICES, Case  # noqa: E402

from jfa import jagged_attention  # noqa: E402

on_each_device = pytest.mark.parametrize("device", DEVICES)


@on_each_device
def test_auto_is_triton_where_it_runs(device):
    inputs = CASES["gqa-4-1"].inputs(device)
    triton, auto, reference = (attend(inputs, impl=impl) for impl in ("triton", "auto", "reference"))
    assert torch.equal(auto.out, triton.out) and torch.equal(auto.lse, triton.lse)
    assert not torch.equal(auto.lse, reference.lse), "the kernels round otherwise than the reference"


@on_each_device
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("head_dim", [1, 32, 80, 96, 256])
def test_head_dims_of_no_kernel_are_refused(impl, head_dim, device):
    inputs = Case(q_lens=(3,), kv_lens=(4,), head_dim=head_dim).inputs(device)
    with pytest.raises(ValueError, match=f"^q has head dimension {head_dim}, which impl='{impl}' does not support"):
        attend(inputs, impl=impl)
    assert attend(inputs, impl="reference").out.shape == (3, 2, head_dim)


@on_each_device
@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_float64_is_for_the_reference(impl, device):
    inputs = Case(q_lens=(3,), kv_lens=(4,)).inputs(device, torch.float64)
    with pytest.raises(TypeError, match=f"^q is torch.float64, which impl='{impl}' does not support"):
        attend(inputs, impl=impl)
    assert attend(inputs, impl="reference").out.dtype == torch.float64


@on_each_device
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": None}, TypeError, "q must be a torch.Tensor"),
        ({"q_offsets": [0, 3, 5]}, TypeError, "q_offsets must be a torch.Tensor"),
        ({"causal": True, "window": (1, 1)}, ValueError, "window looks 1 tokens to the right"),
        ({"max_q_len": torch.tensor(3)}, TypeError, "max_q_len is a tensor"),
        ({"impl": "cuda"}, ValueError, "impl is 'cuda': expected one of auto, reference, triton"),
        ({"schedule": "static "}, ValueError, "schedule is 'static ': .* did you mean 'static'"),
    ],
)
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_bad_arguments_reach_no_kernel(changed, error, message, impl, device):
    inputs = Case(q_lens=(3, 2), kv_lens=(4, 1)).inputs(device)
    fields = {name: getattr(inputs, name) for name in ("q", "k", "v", "kv_offsets", "q_offsets")}
    with pytest.raises(error, match=f"^{message}") as caught:
        jagged_attention(**{"impl": impl, **fields, **changed})
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
def test_tensors_on_two_devices_are_refused():
    inputs = Case(q_lens=(3, 2), kv_lens=(4, 1)).inputs("cuda")
    with pytest.raises(ValueError, match=r"^kv_offsets is on cpu and q on cuda:0: move it with"):
        jagged_attention(inputs.q, inputs.k, inputs.v, inputs.kv_offsets.cpu(), inputs.q_offsets)
    with pytest.raises(ValueError, match=r"^v is on cpu"):
        jagged_attention(inputs.q, inputs.k, inputs.v.cpu(), inputs.kv_offsets, inputs.q_offsets)


WITHOUT_INTERPRETER = """
import torch
from jfa import jagged_attention, plan
from jfa.reference import attention

torch.manual_seed(0)
q, k, v = torch.randn(3, 5, 2, 64).unbind(0)
ends = torch.tensor([0, 2, 5])
assert torch.equal(jagged_attention(q, k, v, ends, ends), attention(q, k, v, ends, ends)[0])
for refused in (lambda: jagged_attention(q, k, v, ends, ends, impl="triton"), lambda: plan(ends, ends, q=q, k=k)):
    try:
        refused()
    except ValueError as error:
        print(error)
"""

WITH_INTERPRETER = """
import torch
from jfa import jagged_attention

q, k, v = torch.randn(3, 5, 2, 64).unbind(0)
ends = torch.tensor([0, 2, 5])
assert torch.equal(jagged_attention(q, k, v, ends, ends), jagged_attention(q, k, v, ends, ends, impl="triton"))
"""


def test_on_the_cpu_without_the_interpreter_auto_is_the_reference_and_triton_refused(repository):
    run = run_python(WITHOUT_INTERPRETER, repository)
    assert run.returncode == 0, run.stderr
    op, plan = run.stdout.splitlines()
    assert op.startswith("impl='triton' needs CUDA tensors, q is on cpu:")
    assert plan.startswith("plan needs CUDA tensors, q is on cpu:")


@pytest.mark.parametrize("spelling", ["1", "true", "ON"])
def test_the_interpreter_is_switched_on_in_all_of_tritons_spellings(spelling, repository):
    run = run_python(WITH_INTERPRETER, repository, TRITON_INTERPRET=spelling)
    assert run.returncode == 0, run.stderr


def run_python(program, repository, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**inherited, **environment},
        cwd=repository,
    )


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (
            torch.float32,
            "^q is torch.float32, which impl='hopper' does not support: expected one of torch.bfloat16, tor",
        ),
        (torch.bfloat16, "^impl='hopper' needs"),
    ],
)
def test_what_was_asked_for_is_what_errors_name(dtype, expected):
    with pytest.raises((TypeError, ValueError), match=expected):
        attend(Case(q_lens=(3,), kv_lens=(4,)).inputs("cpu", dtype), impl="hopper")
