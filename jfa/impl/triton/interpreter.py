"""Make Triton's interpreter multiply as the compiled kernels do.

fbtriton 3.7.4's compiler hands ``dot`` one argument (two_ctas) that its own interpreter does not take; and the
interpreter keeps bfloat16 as 16-bit integers, which its ``dot`` multiplies as such.
"""

from __future__ import annotations

import inspect
from typing import Any


def repair() -> None:
    """Let the interpreter's dot ignore arguments that it does not know, and widen bfloat16 operands first."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_dot
    known = len(inspect.signature(original).parameters) - 1

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.view(np.uint16).astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return original(self, widened(a), widened(b), *args[: known - 2])

    InterpreterBuilder.create_dot = create_dot
