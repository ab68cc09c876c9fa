"""Which ptxas Triton uses.

ptxas 12.9 may reuse registers that an asynchronous wgmma has not read yet (triton-lang/triton#9433 and #11781; fixed in
13.3): attention keeps P in such registers, so results can be silently wrong on sm_90. PyPI's ``nvidia-cuda-nvcc``
brings a current one.
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

SAFE_PTXAS = (13, 3)


def packaged_ptxas() -> Path | None:
    """ptxas of an installed ``nvidia-cuda-nvcc``, the newest CUDA's, or None."""
    spec = find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    # cu13 and its successors: cuda_nvcc beside them is CUDA 12's, which is too old.
    found = [path for folder in folders for path in Path(folder).glob("cu[0-9]*/bin/ptxas")]
    return max(found, key=lambda path: int(re.sub(r"\D", "", path.parts[-3])), default=None)


def prefer_packaged_ptxas() -> None:
    """Point Triton at the packaged ptxas, unless TRITON_PTXAS_PATH already says which one to use."""
    found = packaged_ptxas()
    if found is not None and "TRITON_PTXAS_PATH" not in os.environ:
        if not os.access(found, os.X_OK):  # in an environment of another user it may not be ours to change
            found.chmod(found.stat().st_mode | 0o111)
        os.environ["TRITON_PTXAS_PATH"] = str(found)


def ptxas_in_use() -> tuple[Path | None, str]:
    """The ptxas that Triton runs for our kernels, and why that one."""
    if asked := os.environ.get("TRITON_PTXAS_PATH"):
        return Path(asked), "TRITON_PTXAS_PATH"
    if packaged := packaged_ptxas():
        return packaged, "nvidia-cuda-nvcc"
    spec = find_spec("triton")
    for folder in spec.submodule_search_locations or () if spec else ():
        bundled = Path(folder) / "backends" / "nvidia" / "bin" / "ptxas"
        if bundled.exists():
            return bundled, "Triton's own"
    return None, ""


@lru_cache
def ptxas_version(path: str) -> tuple[int, ...]:
    """Version of a ptxas, e.g. (13, 4, 92). OSError or ValueError: it does not run or does not say."""
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"V(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{path}: no version in its answer")
    return tuple(int(part) for part in match.groups())


@lru_cache
def require_safe_ptxas(what: str) -> None:
    """Refuse to compile ``what`` with a ptxas that may assemble it wrongly. Reads the version once.

    RuntimeError: it is older than SAFE_PTXAS, or does not say how old it is.
    """
    path, why = ptxas_in_use()
    wanted = ".".join(map(str, SAFE_PTXAS))
    mend = f"pip install 'nvidia-cuda-nvcc>={wanted}', or set TRITON_PTXAS_PATH to such a one"
    if path is None:
        raise RuntimeError(f"{what}: found no ptxas; {mend}")
    try:
        version = ptxas_version(str(path))
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{what}: the ptxas in use does not say its version ({error}); {mend}") from None
    if version < SAFE_PTXAS:
        found = ".".join(map(str, version))
        raise RuntimeError(
            f"{what}: ptxas {found} ({why}: {path}) may reuse registers that a wgmma still reads, and be "
            f"silently wrong; {mend}"
        )
