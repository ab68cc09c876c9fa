"""The recordings in the package, of our kernels on a real GPU."""

from __future__ import annotations

from pathlib import Path

from profiling.errors import UserError
from profiling.recording import Recording

DATA = Path(__file__).resolve().parent / "data"


def load(workload: str = "hsp-loguniform", direction: str = "forward", schedule: str = "balanced-dynamic") -> Recording:
    """One of them. UserError: there is none; which there are."""
    path = DATA / f"{workload}_{direction}_{schedule}.parquet"
    if not path.exists():
        raise UserError(f"examples: there is no {path.stem}; there are {', '.join(names())}")
    return Recording.read(path)


def waits(workload: str, direction: str) -> Recording:
    """One at level wait, of a kernel for sm_90: tiny forward and backward (dQ in registers), tiny-causal backward."""
    return Recording.read(DATA / "waits" / f"{workload}_{direction}.parquet")


def change() -> tuple[Recording, Recording]:
    """Before and after a change that waits asked for, at level wait, on an H200: the backward of 40 sequences of
    hsp-half-empty, dQ added up in memory and kept in registers. Excerpts of 32 of 132 CTAs."""
    before, after = (
        Recording.read(DATA / "waits" / f"half-empty-40_backward_{dq}.parquet") for dq in ("shared", "resident")
    )
    return before, after


def names() -> list[str]:
    """workload_direction_schedule of each."""
    return sorted(path.stem for path in DATA.glob("*.parquet"))
