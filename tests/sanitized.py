"""The kernels for sm_90 on small shapes, one run after another, for compute-sanitizer to watch; needs such a GPU.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitized.py

Without torch's cache, every tensor is an allocation of its own, and an access behind its end is seen. The names of runs
as arguments leave out the others; `--list` prints them. Whether results are right, the tests see.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from attend import attend
from shapes import CASES, Case
from test_hopper_backward import BESIDE, SHARED_Q, gradients
from test_hopper_forward import CUT, PAIR, hopper
from test_record import FEW

from jfa.impl.hopper import rounding
from jfa.schedule import SCHEDULES
from profiling.record import record

ORDERED = [name for name in SCHEDULES if name != "grid"]
# Fewer tiles than the tests have: here, they only have to be there.
BESIDE_HERE = {
    **BESIDE,
    "skewed": Case(q_lens=(700, 0, 5, 300, 1) * 8, kv_lens=(900, 70, 0, 129, 1) * 8, head_dim=128),
    "few-keys": dataclasses.replace(BESIDE["few-keys"], q_lens=(5_000, 3)),
}
RECORDED = {"broadcast": FEW, "jagged": dataclasses.replace(FEW, q_lens=FEW.kv_lens[::-1], broadcast_q=False)}


def _op(case: Case, dtype: torch.dtype = torch.bfloat16, **options) -> None:
    inputs = case.inputs("cuda", dtype, grad=True)
    attend(inputs, grads=True, impl="hopper", **options, **case.options)


def _forward(case: Case, **options) -> None:
    attend(case.inputs("cuda", torch.bfloat16), impl="hopper", **options, **case.options)


def _gradients(case: Case, kind: str, **options) -> None:
    gradients(case.inputs("cuda", torch.bfloat16), kind, case.options, **options)


def _beside(case: Case, schedule: str) -> None:
    with patch.multiple(rounding, LEAST_BYTES=0, LEAST_TILES=0):
        _gradients(case, "shared", schedule=schedule, beside=True)


def _recorded(workload: str, direction: str) -> None:
    record(RECORDED[workload], direction=direction, level="wait", impl="hopper", repeats=1)


def runs() -> dict[str, Callable[[], None]]:
    """Every run by its name."""
    found: dict[str, Callable[[], None]] = {}
    for name, case in CASES.items():
        found[f"op-{name}"] = partial(_op, case)
    found["op-float16"] = partial(_op, CASES["packed"], torch.float16)
    found["op-deterministic"] = partial(_op, CASES["gqa-4-1"], deterministic=True)
    for name in ("broadcast", "broadcast-gqa", "broadcast-window"):
        found[f"shared-{name}"] = partial(_gradients, CASES[name], "shared")
    for rows in (1, 100, 129, 257, 512):
        found[f"resident-{rows}"] = partial(_gradients, SHARED_Q[rows], "resident")
    for schedule in SCHEDULES:
        found[f"pair-{schedule}"] = partial(_forward, PAIR, schedule=schedule)
        found[f"cut-{schedule}"] = partial(_forward, CUT["jagged"], schedule=schedule)
        found[f"shared-{schedule}"] = partial(_gradients, CASES["tails"], "shared", schedule=schedule)
    for schedule in ORDERED:
        for name, case in BESIDE_HERE.items():
            found[f"beside-{name}-{schedule}"] = partial(_beside, case, schedule)
    for workload in RECORDED:
        for direction in ("forward", "backward"):
            found[f"recorded-{workload}-{direction}"] = partial(_recorded, workload, direction)
    return found


def main(names: list[str]) -> None:
    known = runs()
    if names == ["--list"]:
        print(*known, sep="\n")
        return
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"no run is called {', '.join(unknown)}; --list prints those there are")
    if not hopper():
        raise SystemExit("needs an sm_90 GPU and a Triton with TLX (fbtriton)")
    for name in names or known:
        began = time.perf_counter()
        known[name]()
        torch.cuda.synchronize()
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
