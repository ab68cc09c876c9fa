"""What the compiler makes of the kernels, for GPUs that are not there: the recorder's price when off, and what fits."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
"""KB of shared memory that a block can have (CUDA C++ programming guide, specifications by compute capability)."""
TENSOR_COLUMNS = 512

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton.language.extra.tlx") is None,
    reason="cross-compilation and its tools come with fbtriton (x86-64)",
)


def compiled(*arguments: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Facts of each kernel, by (direction, architecture, head dimension, level), from a process that compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
    script = Path(__file__).with_name("aot.py")
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    facts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(fact["direction"], fact["arch"], fact["dim"], fact["level"]): fact for fact in facts}


def test_a_recorder_that_is_off_leaves_no_instruction() -> None:
    """SASS of level off is that of the kernel with the recorder's functions emptied; level tile's is not."""
    off = compiled("0", "sm_90", "sm_100", "d128")
    emptied = compiled("emptied", "0", "sm_90", "sm_100", "d128")
    assert len(off) == 9
    assert {key: fact["sass"] for key, fact in off.items()} == {key: fact["sass"] for key, fact in emptied.items()}
    recording = compiled("2", "sm_90", "d128")
    for direction in ("forward", "backward", "hopper-forward", "hopper-backward", "hopper-resident"):
        assert recording[direction, 90, 128, 2]["sass"] != off[direction, 90, 128, 0]["sass"]


def test_recording_costs_the_forward_no_spill() -> None:
    facts = compiled("0", "2", "sm_90", "d128")
    assert facts["forward", 90, 128, 0]["stack"] == facts["forward", 90, 128, 2]["stack"] == 0


@pytest.mark.parametrize(
    "arch", [90, 100, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (80, 86, 89, 103, 120))]
)
def test_pinned_configurations_fit(arch: int) -> None:
    """A kernel that asks for too much tensor memory compiles to a trap; too much shared memory fails at launch."""
    for fact in compiled("0", f"sm_{arch}", "d64", "d128").values():
        assert fact["shared"] <= SHARED_LIMIT[arch] * 1024, fact
        assert fact["tensor_memory"] <= TENSOR_COLUMNS, fact
        assert fact["traps"] == 0, fact
