"""Proton's intra-kernel scopes in our kernels, at the places where the recorder notes waits: to compare what both cost.

Only what runs on the GPU is compared: the kernel is compiled with Proton's passes and given a buffer that stays, so
that none of its host work (a new buffer, a copy back) counts. Its passes want every scope closed where it is opened,
which spans of tiles are not; those have no scope. Needs Triton with Proton.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import triton
import triton.language as tl
import triton.profiler.language as proton

from jfa import instrument
from profiling.errors import UserError

if TYPE_CHECKING:
    import torch

    from jfa.impl.triton.launch import Run
    from profiling.launching import Launcher

MODE = "default"
"""Proton's: 64-bit cycles of every warp, into a ring in what shared memory the kernel leaves."""


@triton.jit
def open_lane(recorder, lane, capacity, LEVEL: tl.constexpr, ROLES: tl.constexpr = False):
    return 0, 0


@triton.jit
def begin_span(lane, count, capacity, KIND: tl.constexpr, stage, LEVEL: tl.constexpr, AT: tl.constexpr):
    pass


@triton.jit
def end_span(lane, count, capacity, tile, LEVEL: tl.constexpr, AT: tl.constexpr):
    return count


@triton.jit
def behind(count, LEVEL: tl.constexpr, AT: tl.constexpr):
    return count


@triton.jit
def begin_wait(count, capacity, LEVEL: tl.constexpr):
    proton.enter_scope("wait")
    return 0


@triton.jit
def end_wait(lane, count, capacity, began, KIND: tl.constexpr, stage, tile, LEVEL: tl.constexpr):
    proton.exit_scope("wait")
    return count


@triton.jit
def wait_ended(count, capacity, LEVEL: tl.constexpr):
    proton.exit_scope("wait")
    return 0


@triton.jit
def note_wait(lane, count, capacity, began, ended, KIND: tl.constexpr, stage, tile, LEVEL: tl.constexpr):
    return count


@triton.jit
def close_lane(lane, count, LEVEL: tl.constexpr):
    pass


_SCOPES = (open_lane, begin_span, end_span, behind, begin_wait, end_wait, wait_ended, note_wait, close_lane)


@contextmanager
def compiling(shared_bytes: int, mode: str = MODE) -> Iterator[None]:
    """Inside, kernels are compiled with scopes instead of the recorder; ``shared_bytes``: of shared memory a CTA."""
    from triton.backends import backends
    from triton.profiler.flags import flags
    from triton.profiler.hooks import instrumentation as hooks

    how = hooks.InstrumentationHook(mode).mode

    def to_llvm_ir(passes: Any) -> None:
        hooks.triton_proton.add_convert_proton_to_protongpu(
            passes, how.metric_type, how.sampling_strategy, how.sampling_options, how.granularity, how.buffer_strategy,
            how.buffer_type, how.buffer_size, shared_bytes, hooks.InstrumentationHook.profile_buffer_size,
            hooks.InstrumentationHook.profile_buffer_alignment, True,
        )  # fmt: skip
        hooks.triton_passes.common.add_cse(passes)
        hooks.triton_proton.add_allocate_proton_shared_memory(passes)

    def to_llvm(passes: Any) -> None:
        hooks.triton_proton.add_convert_proton_nvidia_gpu_to_llvm(passes)

    added = hooks.Instrumentation({"ttgpuir_to_llvmir": to_llvm_ir, "llvmir_to_llvm": to_llvm})
    with ExitStack() as stack:
        for function in _SCOPES:
            stack.enter_context(patch.object(instrument, function.__name__, function))
        stack.enter_context(patch.object(backends["nvidia"].compiler, "instrumentation", added))
        stack.enter_context(patch.object(flags, "instrumentation_on", True))
        # The functions that were exchanged are not in the key of what was compiled: nothing of it may be found later.
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(patch.object(triton.knobs.cache, "dir", folder))
        stack.enter_context(_mode(mode))
        yield


def _mode(mode: str) -> Any:
    from triton.profiler.hooks.instrumentation import InstrumentationHook

    return patch.object(triton.knobs.compilation, "instrumentation_mode", str(InstrumentationHook(mode).mode))


def with_scopes(launcher: Launcher, device: torch.device) -> Callable[[], Run]:
    """The launcher's kernel with scopes, compiled: each call runs it.

    Raises:
        UserError: a kernel without roles that wait.
    """
    import torch
    from triton.runtime import _allocation
    from triton.runtime.driver import driver

    from jfa.instrument import OFF

    if launcher.roles == ("cta",):
        raise UserError(f"Proton's scopes stand at waits of roles, which the {launcher.impl} kernel does not have")
    module = _module_of(launcher.kernel)
    kernel = getattr(module, launcher.kernel)
    copy = triton.jit(
        kernel.fn,
        do_not_specialize=kernel.do_not_specialize,
        do_not_specialize_on_alignment=kernel.do_not_specialize_on_alignment,
    )
    buffers: dict[int, torch.Tensor] = {}

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        if size not in buffers:
            buffers[size] = torch.zeros(size, dtype=torch.uint8, device=device)
        return buffers[size]

    def run() -> Run:
        before = _allocation._profile_allocator.get()
        _allocation.set_profile_allocator(allocate)
        try:
            # A launch looks for what was compiled in this mode.
            with patch.object(module, launcher.kernel, copy), _mode(MODE):
                return launcher.run(OFF)
        finally:
            _allocation.set_profile_allocator(before)

    with compiling(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]):
        run()
    return run


def _module_of(kernel: str) -> ModuleType:
    from jfa.impl.hopper import backward, forward, resident

    return next(module for module in (forward, backward, resident) if hasattr(module, kernel))
