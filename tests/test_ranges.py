"""NVTX ranges: every launch of ours lies in one, of domain jfa, that says what ran."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
from shapes import CASES

from jfa import instrument, jagged_attention


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of the ranges pushed from now on. No profiler listens in a test, so the package's own call is noted."""
    nvtx = pytest.importorskip("nvtx")
    pushed: list[str] = []
    annotate = nvtx.annotate

    @contextmanager
    def noting(message: str, domain: str):
        assert domain == "jfa"
        pushed.append(message)
        with annotate(message=message, domain=domain):
            yield

    monkeypatch.setattr(instrument.nvtx, "annotate", noting)
    return pushed


def test_each_launch_names_kernel_schedule_and_workload(ranges: list[str], device: str) -> None:
    inputs = CASES["gqa-8-2"].inputs(device)
    tensors = [tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    with instrument.workload_label("a-batch"):
        out = jagged_attention(*tensors, inputs.kv_offsets, inputs.q_offsets, impl="triton", schedule="dynamic")
    assert ranges == [
        "jfa_table schedule=dynamic workload=a-batch",
        "jfa_forward schedule=dynamic workload=a-batch heads=8 head_dim=64",
    ]
    ranges.clear()
    thread = threading.Thread(target=out.sum().backward)  # as autograd does for CUDA tensors
    thread.start()
    thread.join()
    kernels = [message.split()[0] for message in ranges]
    assert kernels == ["jfa_table", "jfa_delta", "jfa_backward", "jfa_round_dq"]
    assert all("schedule=dynamic workload=a-batch" in message for message in ranges)


def test_without_the_package_there_is_no_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instrument, "nvtx", None)
    with instrument.launch_range("kernel", "static", heads=1):
        pass
