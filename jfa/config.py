"""Configurations of the kernels, pinned: every launch of a kind uses the same one, with the reason beside it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ForwardConfig:
    """One forward kernel's shape. ``ctas_per_sm`` sets the persistent grid; ``peel`` splits off masked key blocks."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    peel: bool = True


@dataclass(frozen=True)
class BackwardConfig:
    """One backward kernel's shape. ``reduce`` is how dQ is added up: ``tma`` (sm_90 and later) or ``atomic``."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    reduce: str = "atomic"


def config_hash(config: ForwardConfig | BackwardConfig) -> str:
    """Twelve hex digits that tell two configurations apart."""
    return hashlib.sha256(json.dumps(describe(config), sort_keys=True).encode()).hexdigest()[:12]


def describe(config: ForwardConfig | BackwardConfig) -> dict[str, Any]:
    """The configuration as plain JSON."""
    return {"kind": type(config).__name__, **asdict(config)}


INTERPRETED_FORWARD = ForwardConfig(64, 64, 4, 1, 1)
INTERPRETED_BACKWARD = BackwardConfig(64, 64, 4, 1, 1)
"""Small blocks: the interpreter runs one operation at a time, and short sequences should still span several blocks."""


def _datacenter_blackwell(capability: tuple[int, int]) -> bool:
    """sm_100, sm_103 and sm_110: tensor memory of 512 columns and 227 KB of shared memory."""
    return capability[0] in (10, 11)


def forward_config(capability: tuple[int, int] | None, head_dim: int, itemsize: int) -> ForwardConfig:
    """The forward's configuration for a compute capability (None: the interpreter), head dimension and element size."""
    if capability is None:
        return INTERPRETED_FORWARD
    if itemsize == 4:
        return ForwardConfig(64, 32, 4, 1, 1)  # float32 is for checks: no tensor cores, small tiles fit everywhere
    if capability[0] == 9:
        # H200, bf16, D 128, TFLOP/s on hsp-loguniform, self-lognormal, dense-1024, dense-4096: this 376, 426, 394, 454;
        # 128 x 128 keys 337, 413, 394, 411; 64 x 64 with two CTAs an SM 389, 440, 402, 450, but then tiles share
        # their SM and a tile's recorded time is no longer its own cost.
        # D 64 on hsp-loguniform: 128 keys and three stages 295, two stages 235, 64 keys 268.
        return ForwardConfig(128, 128 if head_dim <= 64 else 64, 8, 3, 1)
    if _datacenter_blackwell(capability):
        return ForwardConfig(128, 64, 4, 3, 1)  # compiled, not run: 256 of 512 tensor-memory columns
    # Compiled, not run: 57 KB of shared memory at most, and the fewest spills of those tried.
    return ForwardConfig(128, 64 if head_dim <= 64 else 32, 8, 2, 1)


def backward_config(capability: tuple[int, int] | None, head_dim: int, itemsize: int) -> BackwardConfig:
    """The backward's configuration, chosen as the forward's."""
    if capability is None:
        return INTERPRETED_BACKWARD
    if itemsize == 4:
        return BackwardConfig(32, 32, 4, 1, 1)
    if capability[0] == 9:
        # As above: this 237, 324, 306, 329; dQ by atomic adds instead of TMA's 203, 299, 283, 304; one stage 154, 188,
        # 178, 182; 64 keys a tile 144, 179, 177, 174.
        return BackwardConfig(64, 128, 8, 2, 1, reduce="tma")
    if _datacenter_blackwell(capability):
        # Compiled, not run: 512 tensor-memory columns; 128 keys a tile would need 544.
        return BackwardConfig(64, 64, 8, 2, 1, reduce="tma")
    return BackwardConfig(32, 64, 8, 1, 1)
