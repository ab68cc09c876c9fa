"""What Nsight Compute measures of one launch of a variant: a row's worth of its metrics, and what limits the kernel."""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from profiling.errors import UserError
from profiling.ncu.collection import collect, find_ncu
from profiling.text import plain

GRADE = "measured (ncu)"
SECTIONS = ("ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables", "WarpStateStats")
"""Beside those of the set basic: the SM's pipes, shared memory and spills, and the stall reasons of a verdict."""
LIMIT_S = 180.0
"""For the imports, a compilation and some thirty passes over a launch."""
FACTS = (
    "duration", "tensor", "shared_wavefronts", "l2_throughput", "dram_throughput", "occupancy_achieved", "registers",
)  # fmt: skip
LSU = "lsu"
CHILD = ("-m", "profiling.ablation.one_launch")


def require() -> None:
    """UserError: what --ncu needs is not installed: ncu, NVTX ranges."""
    try:
        find_ncu()
    except UserError as error:
        raise UserError(f"--ncu: {error}; or leave --ncu out") from None
    if find_spec("nvtx") is None:
        raise UserError("--ncu: needs the package nvtx, which is not installed here: pip install nvtx")


def count(
    workload: str,
    setting: dict[str, Any],
    *,
    device: str = "cuda",
    limit_s: float = LIMIT_S,
    child: tuple[str, ...] = CHILD,
) -> dict[str, Any]:
    """One launch of a setting (as `profiling.ablation.run.described` writes it) under ncu, in a process of its own.

    Returns:
        kernel, launches (how many the launch consists of), numbers (fact → value, unit, source: shares in %, duration
        in ns), verdict and why, gpu, ncu (its version), grade; or only ``failed``, a line that says why there is none.
    """
    words: list[bytes] = []
    request = {"workload": workload, "device": device, "setting": setting}
    try:
        with tempfile.TemporaryDirectory(prefix="ablate-ncu-") as folder:
            report = collect(
                [sys.executable, *child, json.dumps(request)],
                output=Path(folder) / "launch.ncu-rep",
                nvtx=f"jfa@jfa_{setting['direction']}",
                set="basic",
                extra=("--kernel-name", "regex:jfa", *(word for name in SECTIONS for word in ("--section", name))),
                on_output=words.append,  # --json leaves stdout to the document
                timeout_s=limit_s,
            )
            return row_of(report)
    except UserError as error:
        return {"failed": _why(str(error), b"".join(words))}
    except OSError as error:
        return {"failed": f"ncu: no room or no right to write its report: {error.strerror or error}"}


def row_of(path: Path) -> dict[str, Any]:
    """What `count` returns, of the report's longest kernel. UserError: it cannot be read, or holds no kernel."""
    from profiling.ncu.analysis import KernelFindings
    from profiling.ncu.metrics import PIPES, number
    from profiling.ncu.reading import read
    from profiling.ncu.summary import select, summarise
    from profiling.ncu.tables import verdict_words
    from profiling.ncu.verdict import verdicts

    report = read(path, for_summary=True)
    kernel = summarise(select(report))[0]
    found = tuple(verdicts(kernel))
    numbers = {fact: value for fact in FACTS if (value := number(kernel.metrics, fact)) is not None}
    told = {name: {"value": n.value, "unit": n.unit, "source": n.source} for name, n in numbers.items()}
    lsu = kernel.metrics.get(PIPES["lsu"])
    if lsu is not None and lsu.value == lsu.value:
        told[LSU] = {"value": lsu.value, "unit": "%", "source": lsu.name}
    return {
        "kernel": kernel.name,
        "launches": kernel.launches,
        "numbers": told,
        "verdict": verdict_words(KernelFindings(kernel, found, {})),
        "why": found[0].why,
        "gpu": kernel.launch.gpu,
        "ncu": report.writer,
        "grade": GRADE,
    }


def _why(said: str, output: bytes) -> str:
    """The line of an error; where the launch itself failed, with that process's last words."""
    last = output.decode(errors="replace").strip().splitlines()[-1:]
    if said.startswith("the command failed") and last:
        return f"its process failed under ncu: {plain(last[0], 300)}"
    return plain(said, 600)
