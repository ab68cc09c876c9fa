"""Make Triton's interpreter multiply as the compiled kernels do.

fbtriton 3.7.4's compiler hands ``dot`` one argument (two_ctas) that its own interpreter does not take; and the
interpreter keeps bfloat16 as 16-bit integers, which its ``dot`` multiplies as such, and to which its casts truncate
float32 where GPUs round to nearest even: twice the error, all of it towards zero.
"""

from __future__ import annotations

import inspect
from typing import Any


def repair() -> None:
    """Let the interpreter's dot ignore unknown arguments and widen bfloat16; let its casts to bfloat16 round."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original, original_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    known = len(inspect.signature(original).parameters) - 1

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.view(np.uint16).astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return original(self, widened(a), widened(b), *args[: known - 2])

    def cast(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return original_cast(self, source, target)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return TensorHandle(np.where(np.isnan(source.data), 0x7FC0, nearest).astype(np.uint16), tl.bfloat16)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast
