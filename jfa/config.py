"""Configurations of the kernels, pinned: every launch of a kind uses the same one, with the reason beside it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ForwardConfig:
    """One forward kernel's shape: rows of a tile (``block_q``) and of a step over its keys (``block_kv``).

    ``num_stages`` is the depth of the pipeline that loads keys, ``ctas_per_sm`` sets the persistent grid, ``peel``
    gives the blocks that need no mask a loop without one.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    peel: bool = True


@dataclass(frozen=True)
class BackwardConfig:
    """One backward kernel's shape: rows of a tile (``block_kv``) and of a step over the queries (``block_q``).

    ``reduce`` is how dQ is added up: ``tma`` (sm_90 and later) or ``atomic``; the rest is as the forward's.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    reduce: str = "atomic"


@dataclass(frozen=True)
class HopperForwardConfig:
    """The warp-specialised forward of sm_90: ``block_q`` rows of a tile for each CTA, half of them a warpgroup's.

    ``block_kv`` keys a step; ``tail`` is the most keys that a product of its own size does at a sequence's end (0:
    none). ``stages`` is the depth of the K/V ring, ``registers`` a compute thread's. ``pingpong``: the warpgroups take
    turns at the tensor cores. ``peel``: the block that needs a mask comes first, outside of the loop. ``early_fetch``:
    the next tile is fetched while the current one is loaded, not behind it (by a pair that takes tiles on demand always
    behind it). ``multicast``: two CTAs do two blocks of a shared Q together and load K and V once for both.
    """

    block_q: int = 128
    block_kv: int = 128
    tail: int = 64
    stages: int = 2
    registers: int = 240
    pingpong: bool = False
    peel: bool = True
    early_fetch: bool = True
    multicast: bool = True
    # Triton asks ptxas for another register allocator, which spills here; the last option given wins.
    ptx_options: str = "--regAllocOptLevel=5"


@dataclass(frozen=True)
class HopperBackwardConfig:
    """The warp-specialised backward of sm_90: a tile of ``block_kv`` keys, half of it a warpgroup's.

    ``block_q`` queries a step, ``stages`` of them in flight; ``registers`` a compute thread's. ``prefetch``, of two
    stages or more: the next step's scores are started before dQ of this one is stored. A warpgroup stores its half of
    dQ's columns in ``dq_slices`` (1 or 2), through ``dq_buffers`` of a slice each (1 to 3).
    ``peel``: blocks that need no mask have a loop of their own, without a branch around it; not timed on a GPU yet, and
    of the same registers (stack 232 bytes instead of 80, compiled).
    ``round_beside``: dQ is rounded beside the kernel, on SMs left to it, where `impl/hopper/rounding.py` can.
    """

    block_q: int = 64
    block_kv: int = 128
    stages: int = 3
    prefetch: bool = True
    dq_slices: int = 1
    dq_buffers: int = 1
    peel: bool = False
    round_beside: bool = True
    registers: int = 240
    ptx_options: str = "--regAllocOptLevel=5"


RESIDENT_ROWS = 128
"""Rows of a shared Q that a CTA of the backward with dQ in registers keeps; a launch takes those of a cluster."""


@dataclass(frozen=True)
class HopperResidentConfig:
    """The backward of a shared Q on sm_90 that keeps dQ in registers: tiles of ``block_kv`` keys.

    ``k_stages``, ``v_stages`` of them in flight; ``registers`` a compute thread's, of which there are 384.
    """

    block_kv: int = 64
    k_stages: int = 2
    v_stages: int = 1
    registers: int = 160
    ptx_options: str = "--regAllocOptLevel=5"


Config = ForwardConfig | BackwardConfig | HopperForwardConfig | HopperBackwardConfig | HopperResidentConfig


def config_hash(config: Config) -> str:
    """Twelve hex digits that tell two configurations apart."""
    return hashlib.sha256(json.dumps(describe(config), sort_keys=True).encode()).hexdigest()[:12]


def describe(config: Config) -> dict[str, Any]:
    """The configuration as plain JSON."""
    return {"kind": type(config).__name__, **asdict(config)}


INTERPRETED_FORWARD = ForwardConfig(block_q=64, block_kv=64, num_warps=4, num_stages=1, ctas_per_sm=1)
INTERPRETED_BACKWARD = BackwardConfig(block_q=64, block_kv=64, num_warps=4, num_stages=1, ctas_per_sm=1)
"""Small blocks: the interpreter runs one operation at a time, and short sequences should still span several blocks."""


def _datacenter_blackwell(capability: tuple[int, int]) -> bool:
    """sm_100, sm_103 and sm_110: tensor memory of 512 columns and 227 KB of shared memory."""
    return capability[0] in (10, 11)


def forward_config(capability: tuple[int, int] | None, head_dim: int, itemsize: int) -> ForwardConfig:
    """The forward's configuration for a compute capability (None: the interpreter), head dimension and element size."""
    if capability is None:
        return INTERPRETED_FORWARD
    if itemsize == 4:
        # float32 is for checks: no tensor cores, and small tiles fit everywhere.
        return ForwardConfig(block_q=64, block_kv=32, num_warps=4, num_stages=1, ctas_per_sm=1)
    if capability[0] == 9:
        # Measured on an H200, bf16, D 128; TFLOP/s on hsp-loguniform, self-lognormal, dense-1024 and dense-4096:
        #   this                                 376, 426, 394, 454
        #   128 keys a step                      337, 413, 394, 411
        #   64 x 64, two CTAs an SM              389, 440, 402, 450, but then tiles share their SM and a tile's recorded
        #                                        time is no longer its own cost
        # D 64, hsp-loguniform: 128 keys a step and three stages 295, two stages 235, 64 keys 268.
        return ForwardConfig(
            block_q=128, block_kv=128 if head_dim <= 64 else 64, num_warps=8, num_stages=3, ctas_per_sm=1
        )
    if _datacenter_blackwell(capability):
        # Compiled, not run: 256 of 512 tensor-memory columns.
        return ForwardConfig(block_q=128, block_kv=64, num_warps=4, num_stages=3, ctas_per_sm=1)
    # Compiled, not run: 57 KB of shared memory at most, and the fewest spills of those tried.
    return ForwardConfig(block_q=128, block_kv=64 if head_dim <= 64 else 32, num_warps=8, num_stages=2, ctas_per_sm=1)


def hopper_forward_config(head_dim: int) -> HopperForwardConfig:
    """The warp-specialised forward's configuration for a head dimension."""
    # Measured on an H200, bf16, D 128; TFLOP/s on hsp-loguniform, self-lognormal, dense-1024 and dense-4096:
    #   with ping-pong                              564, 637, 607, 637
    #   and no tail of its own                      550, 628, 597, 640
    #   and rescaling where a maximum grew 256×     561, 632, 598, 638, so every step rescales
    #   and Triton's own register allocation        544, 623, 600, 637
    # In another run, loguniform, self-lognormal and dense-512: this 584, 672, 558; with ping-pong 571, 640, 552; that
    # and the mask in the loop 568, 636, 510; that and late fetching 571, 640, 545.
    # Each CTA for itself instead of multicast, hsp-half-empty (`reports/ablation`): 625 instead of 608 µs. Where it is
    # not done now, hsp-extreme, cut, took 354.5 instead of 359.4 µs, dense-1024 and dense-4096 were alike (10 runs in
    # turn, of which only medians were kept).
    if head_dim <= 64:
        # Compiled: a tail of 64 keys makes ptxas serialise the wgmma of the loop (C7514), one of none does not.
        return HopperForwardConfig(tail=0)
    return HopperForwardConfig()


def hopper_backward_config(resident: bool) -> HopperBackwardConfig | HopperResidentConfig:
    """The warp-specialised backward's configuration, by whether dQ can stay in registers."""
    # Measured on an H200, bf16, D 128, `reports/ablation`; ms on hsp-loguniform, hsp-half-empty and hsp-extreme:
    #   dQ in registers                      3.48, 1.62, 0.94
    #   and two tiles of V in flight         3.55, 1.65, 0.94
    #   and one tile of K in flight          3.92, 1.88, 1.14
    #   dQ added up in memory                4.02, 1.94, 1.19
    # That one, TFLOP/s on self-lognormal, dense-512, dense-1024, dense-2048 and dense-4096 (13 runs in turn, of which
    # only medians were kept):
    #   this                                 531, 392, 467, 508, 550
    #   without prefetch                     524, 392, 462, 504, 541
    #   in another run this                  530, 384, 469, 525, 534
    #   and three stages                     533, 385, 471, 528, 525
    #   and two tiles of K in flight         515, 382, 454, 510, 514
    # Since dQ is staged without bank conflicts (`impl/hopper/dq.py`), on a slower H200, self-lognormal, dense-1024,
    # dense-2048 and dense-4096 (12 runs in turn, of which only medians were kept):
    #   before                               504, 451, 496, 535
    #   two stages                           531, 474, 526, 571
    #   three stages, this                   534, 476, 534, 575
    # Slower: dQ added by threads, 16 bytes each; statistics as what the products' accumulators begin with, although it
    # spills less; the last tile of a sequence rounding its dQ.
    # Alike or slower too: dQ's product before dK's; whole dQ by one warpgroup, in turns; dQ's rows begun elsewhere by
    # each tile. A tile of queries of 128 does not fit the registers.
    return HopperResidentConfig() if resident else HopperBackwardConfig()


def dq_config(capability: tuple[int, int] | None, head_dim: int, itemsize: int) -> BackwardConfig:
    """The configuration of dQ in a fixed order: ``block_q`` rows of a tile, ``block_kv`` keys a step."""
    if capability is None:
        return INTERPRETED_BACKWARD
    if itemsize == 4:
        return BackwardConfig(block_q=32, block_kv=32, num_warps=4, num_stages=1, ctas_per_sm=1)
    if capability[0] == 9 or _datacenter_blackwell(capability):
        # Compiled, not run: 225 registers and no spill for D 128 on sm_90, 215 on sm_100.
        return BackwardConfig(block_q=128, block_kv=64, num_warps=8, num_stages=2, ctas_per_sm=1)
    # Compiled, not run: 176 bytes of stack for D 128 on sm_80, none on sm_89; 64 rows and four warps spill 704 and 536.
    return BackwardConfig(block_q=128, block_kv=32, num_warps=8, num_stages=2, ctas_per_sm=1)


def backward_config(capability: tuple[int, int] | None, head_dim: int, itemsize: int) -> BackwardConfig:
    """The backward's configuration, chosen as the forward's."""
    if capability is None:
        return INTERPRETED_BACKWARD
    if itemsize == 4:
        # As the forward's.
        return BackwardConfig(block_q=32, block_kv=32, num_warps=4, num_stages=1, ctas_per_sm=1)
    if capability[0] == 9:
        # Measured as the forward, D 128, on the same four workloads:
        #   this                                 237, 324, 306, 329
        #   dQ by atomic adds                    203, 299, 283, 304
        #   one stage                            154, 188, 178, 182
        #   64 keys a tile                       144, 179, 177, 174
        return BackwardConfig(block_q=64, block_kv=128, num_warps=8, num_stages=2, ctas_per_sm=1, reduce="tma")
    if _datacenter_blackwell(capability):
        # Compiled, not run: 512 tensor-memory columns; 128 keys a tile would need 544.
        return BackwardConfig(block_q=64, block_kv=64, num_warps=8, num_stages=2, ctas_per_sm=1, reduce="tma")
    # Compiled, not run: 53 KB of shared memory at most; D 128 spills, over 1 KB a thread on sm_80 and sm_89.
    return BackwardConfig(block_q=32, block_kv=64, num_warps=8, num_stages=1, ctas_per_sm=1)
