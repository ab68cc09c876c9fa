"""The Nsight Compute reports among the test data, unpacked where a test wants them."""

import lzma
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data" / "ncu"
NAMES = sorted(path.name.removesuffix(".xz") for path in DATA.glob("*.ncu-rep.xz"))
OURS = [name for name in NAMES if name.startswith("h200_")]


def unpack(name: str, folder: Path) -> Path:
    """The file ``name`` of the test data, such as "h200_cudnn.raw.csv", unpacked into ``folder``."""
    path = folder / name
    path.write_bytes(lzma.decompress((DATA / f"{name}.xz").read_bytes()))
    return path


def needs_reader() -> None:
    """Skip where NVIDIA's reader is not installed: its licence makes it an optional extra."""
    pytest.importorskip("ncu_report", reason="the extra ncu is not installed")
