"""Stages that a kernel for sm_90 can leave out, so that a profiler sees how much of its time goes with them.

What such a launch computes is wrong; the op never asks for one, only a `launch.Run` can. Every barrier is completed as
in the whole kernel and every address lies within its tensors, so that it ends and does no harm:

- ``exp``: weights are what the exponential would be taken of. The forward's factor of a row, one exponential beside
  those of its weights, stays: without it ptxas serialises the wgmma of the loop (C7514).
- ``loads``: what streams through the loop (the forward's and the resident backward's K and V, and that one's dO; the
  shared backward's Q and dO) comes by TMA from the same rows each time, which stay in the L2 cache.
- ``store``: the forward's output and lse are made, but neither staged nor stored. Rows without keys are cleared, and
  the parts of a cut sequence, whatever they hold, merged.
- ``dq store``: dQ of the shared backward is made, but neither staged nor added to the sum.
- ``dk/dv store``: dK and dV of the resident backward are staged, but not stored.
"""

from __future__ import annotations

CODES = {"": 0, "exp": 1, "loads": 2, "store": 3, "dq store": 4, "dk/dv store": 5}
"""What a kernel is compiled with, as LEAVE_OUT, by the stage's name; "" is the whole kernel."""

STAGES = {
    "jfa_forward_hopper": ("exp", "loads", "store"),
    "jfa_backward_hopper": ("exp", "loads", "dq store"),
    "jfa_backward_resident": ("exp", "loads", "dk/dv store"),
}
"""By kernel, what it can leave out."""


def code(kernel: str, stage: str) -> int:
    """LEAVE_OUT of a kernel without this stage; 0 for "", the whole kernel. ValueError: it cannot leave that out."""
    if stage and stage not in STAGES.get(kernel, ()):
        able = ", ".join(STAGES.get(kernel, ())) or "nothing"
        raise ValueError(f"leave_out: {kernel} can leave out {able}, got {stage!r}")
    return CODES[stage]
