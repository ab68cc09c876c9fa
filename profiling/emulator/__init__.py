"""TLX kernels on the CPU: every role of every CTA of a cluster as a task of its own, taking turns in a random order.

What runs is the kernel's own source, on torch tensors: barriers with their phases and transaction bytes, TMA loads and
stores that happen some time after they were issued, tensor-core products that read their operands only when they are
waited for. So a buffer that is released too early, a barrier that nobody arrives at, an address out of bounds or a
missing fence shows, under one seed or another: as a wrong result, a deadlock that names what each role waits for, or an
error. It models no time, no registers and no memory model beyond that.

    with emulated(module, "jfa_backward_resident", seed=3):
        module.backward(...)          # its launches of that kernel are emulated
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from profiling.emulator.launch import EmulatedKernel
from profiling.emulator.scheduler import Deadlock, EmulationError

__all__ = ["Deadlock", "EmulatedKernel", "EmulationError", "emulated"]


@contextmanager
def emulated(module: Any, name: str, *, seed: int = 0) -> Iterator[EmulatedKernel]:
    """Launches of ``module.name`` inside are emulated; the kernel object tells how many there were."""
    original = getattr(module, name)
    kernel = EmulatedKernel(original, seed)
    setattr(module, name, kernel)
    try:
        yield kernel
    finally:
        setattr(module, name, original)
