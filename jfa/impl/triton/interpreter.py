"""Make Triton's interpreter do what the compiled kernels do.

fbtriton 3.7.4's compiler hands ``dot`` one argument (two_ctas) that its own interpreter does not take; the interpreter
keeps bfloat16 as 16-bit integers, which its ``dot`` multiplies as such, and to which its casts truncate float32 where
GPUs round to nearest even: twice the error, all of it towards zero; and it cannot add through a tensor descriptor.
"""

from __future__ import annotations

import inspect
from typing import Any


def repair() -> None:
    """Let dot ignore unknown arguments and widen bfloat16, casts to bfloat16 round, and descriptors add float32."""
    import numpy as np
    import triton.language as tl
    from triton._C.libtriton import ir
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

    def add_through_descriptor(self: Any, kind: Any, descriptor: Any, value: Any, indices: Any) -> Any:
        if kind != ir.DESCRIPTOR_REDUCE_KIND.ADD or value.dtype.scalar != tl.float32:
            raise NotImplementedError(f"the interpreter adds float32 through descriptors: got {kind} of {value.dtype}")
        pointers, inside = descriptor.materialize_pointers(indices)
        mask = TensorHandle(inside, tl.int1)
        return self.create_atomic_rmw(
            ir.ATOMIC_OP.FADD, pointers, value, mask, ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU
        )

    InterpreterBuilder.create_descriptor_reduce = add_through_descriptor
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast
