"""What a measurement was made with: goes into every recording and every benchmark."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import jfa
from jfa import toolchain

_PEERS = {"fa4": "flash-attn-4", "fa3": "flash_attn_3"}


def versions() -> dict[str, str]:
    """Versions of this package, torch, Triton, its ptxas, Python and the GPU's driver. Imports torch and Triton."""
    import torch
    import triton

    return {
        "jfa": jfa.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "ptxas": _ptxas(),
        "python": platform.python_version(),
        "driver": _driver(),
    }


def _ptxas() -> str:
    used, _ = toolchain.ptxas_in_use()
    try:
        return ".".join(map(str, toolchain.ptxas_version(str(used)))) if used else "unknown"
    except (OSError, ValueError):
        return "unknown"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.splitlines()[0].strip() if answer.strip() else "unknown"


def peer_versions() -> dict[str, str]:
    """Versions of the attention packages that are installed beside ours."""
    found = {}
    for name, package in _PEERS.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found
