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


def of_kernel(impl: str, workload: str, direction: str) -> Recording | None:
    """One of a kernel's own tiles under schedule static, to be dealt otherwise; None where there is none.

    Of "triton" those of `names`; of "hopper" the forward of hsp-loguniform, an H200 as well.
    """
    folder = DATA if impl == "triton" else DATA / impl
    path = folder / f"{workload}_{direction}_static.parquet"
    return Recording.read(path) if path.exists() else None


def change(direction: str = "backward") -> tuple[Recording, Recording]:
    """Before and after a change that waits asked for, at level wait, on an H200; excerpts of some of 132 CTAs.

    The backward of the first 40 sequences of hsp-half-empty, dQ added up in memory and kept in registers; the forward
    of the first 200 of hsp-loguniform, K and V loaded for each CTA alone and for two CTAs at once.
    """
    kinds = {
        "backward": ("half-empty-40_backward_shared", "half-empty-40_backward_resident"),
        "forward": ("loguniform-200_forward_alone", "loguniform-200_forward_pairs"),
    }
    before, after = (Recording.read(DATA / "waits" / f"{name}.parquet") for name in kinds[direction])
    return before, after


def strategies() -> dict[str, Recording]:
    """The backward of those 40 sequences by how dQ is summed: "shared", "slices", "resident" at level wait and
    "deterministic", Triton's, at level tile (its kernel of dK and dV; that of dQ is in its times)."""
    kinds = ("shared", "slices", "resident", "deterministic")
    return {kind: Recording.read(DATA / "waits" / f"half-empty-40_backward_{kind}.parquet") for kind in kinds}


def names() -> list[str]:
    """workload_direction_schedule of each."""
    return sorted(path.stem for path in DATA.glob("*.parquet"))
