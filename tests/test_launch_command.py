"""`launch`: which launches lie in NVTX ranges, and what is refused before anything runs."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from jfa import instrument, workloads
from profiling import launching
from profiling.__main__ import main
from profiling.errors import UserError

FEW = workloads.Workload(
    name="few",
    heads=2,
    heads_kv=2,
    head_dim=64,
    q_lens=np.full(3, 40),
    kv_lens=np.array([0, 70, 5]),
    broadcast_q=True,
)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of the ranges pushed from now on."""
    nvtx = pytest.importorskip("nvtx")
    pushed: list[str] = []
    annotate = nvtx.annotate

    @contextmanager
    def noting(message: str, domain: str):
        pushed.append(f"{domain}@{message}")
        with annotate(message=message, domain=domain):
            yield

    monkeypatch.setattr(nvtx, "annotate", noting)
    return pushed


@pytest.mark.parametrize(
    ("direction", "kernels"),
    [("forward", ["jfa_forward"]), ("backward", ["jfa_delta", "jfa_backward", "jfa_round_dq"])],
)
def test_only_what_was_asked_for_lies_in_ranges(direction, kernels, ranges, device) -> None:
    launcher = launching.launch(
        FEW, direction=direction, schedule="dynamic", launches=2, warmup=1, device=torch.device(device)
    )
    assert launcher.kernel.startswith(f"jfa_{direction}") and launcher.schedule == "dynamic"
    facts = "schedule=dynamic workload=few heads=2 head_dim=64"
    if launcher.kernel == "jfa_backward_resident":
        kernels = [*kernels[:-1], "jfa_sum_dq"]
    assert ranges == [f"jfa@{kernel} {facts}" for kernel in kernels * 2]
    assert instrument.nvtx is not None


def test_an_old_ptxas_is_refused_before_anything_runs(monkeypatch, device) -> None:
    """What would only fail when the kernel is compiled is one line before."""
    from jfa import toolchain
    from jfa.impl import choice

    monkeypatch.setattr(choice, "resolve", lambda *asked: "hopper")
    monkeypatch.setattr(toolchain, "ptxas_in_use", lambda: (None, ""))
    toolchain.require_safe_ptxas.cache_clear()
    with pytest.raises(UserError, match="the kernels for sm_90: found no ptxas; .*; or run --impl triton"):
        launching.launch(FEW, device=torch.device(device))


def test_what_needs_another_gpu_is_one_line(device) -> None:
    if device == "cuda":
        pytest.skip("a GPU may have it")
    with pytest.raises(UserError, match="workload few: impl='hopper' needs an sm_90 GPU"):
        launching.launch(FEW, direction="backward", impl="hopper", device=torch.device(device))


def test_ranges_come_back_after_an_error(ranges, device) -> None:
    with pytest.raises(UserError, match="the forward of few has no rows"):
        launching.launch(replace(FEW, q_lens=np.zeros(3, dtype=int)), device=torch.device(device))
    assert instrument.nvtx is not None and instrument.current_workload() == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--workload", "hsp-loguniforn"], "hsp-loguniform"),
        (["--workload", "tiny", "--direction", "forwards"], "did you mean forward"),
        (["--workload", "tiny", "--schedule", "balance"], "balanced"),
        (["--workload", "tiny", "--impl", "triton2"], "impl: there is none named 'triton2'; did you mean triton"),
        (["--workload", "tiny", "--launches", "0"], "--launches"),
        (["--workload", "tiny", "--warmup", "-1"], "--warmup"),
        ([], "--workload"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, expected, capsys) -> None:
    assert main(["launch", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and expected in said


def test_an_unknown_direction_is_refused_before_a_gpu_is_sought() -> None:
    with pytest.raises(UserError, match="expected one of forward, backward"):
        launching.launch(FEW, direction="sideways")


def test_without_a_gpu_it_says_so_in_one_line(device, capsys) -> None:
    if device == "cuda":
        pytest.skip("there is a GPU")
    assert main(["launch", "--workload", "tiny"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "found no CUDA GPU" in said


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_real_launch(direction, program) -> None:
    result = program("launch", "--workload", "tiny", "--direction", direction, "--launches", 2)
    assert result.returncode == 0, result.stderr
    said = rf"jfa_{direction}(_hopper|_resident)? on tiny, balanced-dynamic: 2 launched after 2 to warm up"
    assert re.search(said, result.stdout)
