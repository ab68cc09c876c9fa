"""The public op: attention over jagged sequences, differentiable and compilable.

The kernels sit behind two custom operators, ``jfa::forward`` and ``jfa::backward``; :func:`jagged_attention` checks its
arguments, calls the first, and autograd calls the second.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jfa import schedule as schedules
from jfa.config import dq_config
from jfa.schedule import Items, Lengths, TileTable
from jfa.validation import Problem, check_kernel_limits, check_values, validate

if TYPE_CHECKING:
    from jfa.impl.choice import Backward, Forward
    from jfa.impl.triton.dq import FixedOrder
    from jfa.impl.triton.launch import Run

# As Triton reads it, and before Triton is imported.
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_offsets: Tensor,
    q_offsets: Tensor | None = None,
    *,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    impl: str = "auto",
    schedule: str | TileTable = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · Q Kᵀ) V for every sequence of a jagged batch.

    Args:
        q: (total_q, H, D) with ``q_offsets``; or (L_q, H, D) without, and then every sequence is attended by this one
            q, which is never expanded; its gradient is summed over the batch. bfloat16, float16 or float32.
        k, v: (total_kv, H_kv, D); H is a multiple of H_kv, and query head h uses head h // (H / H_kv).
        kv_offsets, q_offsets: int32 or int64 (B + 1), the running sums of the lengths, on q's device. Tokens behind
            the last offset belong to no sequence: zeros in the output and the gradients.
        max_q_len, max_kv_len: upper bounds of the lengths as Python ints; they tighten launches. They are checked
            where reading the offsets costs nothing (on the CPU) or where JFA_CHECK=1; too small, they leave rows out,
            whose results are then undefined.
        scale: of the scores; 1 / sqrt(D) by default.
        causal, window: what a query sees, with the ends of the two sequences aligned: row i sees keys
            i + L_kv − L_q − left … i + L_kv − L_q + right of ``window`` = (left, right), −1 being unbounded; causal
            is right = 0.
        return_lse: also return the log of the softmax's denominator, float32 (H, rows of the output), −inf where a
            row sees nothing. It is differentiable.
        deterministic: bitwise repeatable gradients. The kernels' dK, dV and outputs are so anyway, and dQ where
            "hopper" keeps it in registers (on GPUs with as many SMs); elsewhere dQ then comes from a kernel of its own,
            which adds up in one order and does two of the backward's five products again.
        impl: "reference" (eager, any dtype up to float64, on any device); "triton", plain Triton, on CUDA devices and
            in its interpreter; "hopper", kernels for sm_90 (bfloat16, float16), triton's backward where deterministic
            and dQ does not stay in registers; "hopper-autotune", the same with the forward by trial: its first call on
            lengths of a kind times a few configurations; or "auto": hopper where it runs, triton on other CUDA devices
            and in the interpreter, the reference elsewhere.
        schedule: how tiles meet SMs: "grid", "static", "balanced", "dynamic", "balanced-dynamic", "auto" (the last),
            or a table made by :func:`plan`, which saves building one in every call. The reference has no tiles and
            ignores it.

    Returns:
        (total_q, H, D), or (B, L_q, H, D) for broadcast q, in q's dtype; with ``return_lse`` a pair.

    Raises:
        TypeError, ValueError: an argument breaks a rule; the message names it.
    """
    problem = validate(
        q, k, v, kv_offsets, q_offsets, max_q_len, max_kv_len, scale, causal, window, deterministic, impl, schedule
    )
    if _resolve(impl, q) == "reference":
        out, lse = _reference(q, k, v, kv_offsets, q_offsets, problem)
        return (out, lse) if return_lse else out
    check_kernel_limits(q.dtype, problem.head_dim, impl)
    _check_device(f"impl={impl!r}", q)
    table = schedule if isinstance(schedule, TileTable) else None
    if table is not None:
        _check_table(table, problem, q)
    out, lse = torch.ops.jfa.forward(
        q,
        k,
        v,
        kv_offsets.contiguous(),
        None if q_offsets is None else q_offsets.contiguous(),
        table.forward.pairs if table else None,
        table.forward.counts if table else None,
        table.backward.pairs if table else None,
        table.backward.counts if table else None,
        [table.block_q, table.block_kv, table.forward.split] if table else [0, 0, 0],
        impl,
        table.schedule if table else _schedule_name(schedule),
        problem.max_q_len,
        problem.max_kv_len,
        problem.scale,
        problem.window_left,
        problem.window_right,
        deterministic,
    )
    if problem.broadcast_q:
        out = out.view(problem.batch, problem.q_len, problem.heads, problem.head_dim)
    return (out, lse) if return_lse else out


def plan(
    kv_offsets: Tensor,
    q_offsets: Tensor | None = None,
    *,
    q: Tensor,
    k: Tensor,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    deterministic: bool = False,
    impl: str = "auto",
    schedule: str = "auto",
) -> TileTable:
    """The tile tables of a batch, for the ``schedule`` argument of every call on the same lengths.

    ``q`` and ``k`` only lend their shapes, dtype and device. Nothing is read back from the device. The table serves
    any tensors of that head dimension, dtype and number of rows, with the same ``causal``, ``window``,
    ``deterministic`` and ``impl``.
    """
    if not isinstance(schedule, str):
        raise TypeError(f"schedule must be the name of one to plan: got {type(schedule).__name__}")
    problem = validate(
        q, k, k, kv_offsets, q_offsets, max_q_len, max_kv_len, None, causal, window, deterministic, impl, schedule
    )
    if impl == "reference":
        raise ValueError("impl='reference' has no tiles to plan: call it without a plan, or plan for another impl")
    check_kernel_limits(q.dtype, problem.head_dim, impl)
    _check_device("plan", q, ", which needs no plan")
    if _reading_is_wanted(q):
        check_values(kv_offsets, q_offsets, problem)
    kv_offsets = kv_offsets.contiguous()
    q_offsets = None if q_offsets is None else q_offsets.contiguous()
    name = _schedule_name(schedule)
    kernel = _kernel(impl, q)
    block_q, block_kv, split = _blocks(q, problem, _forward_kernel(kernel, q), kernel, deterministic)
    with _device_of(q):
        forward = forward_items(kv_offsets, q_offsets, problem, block_q, name, split)
        backward = backward_items(kv_offsets, q_offsets, problem, block_kv, name)
    return TileTable(
        schedule=name,
        forward=forward,
        backward=backward,
        block_q=block_q,
        block_kv=block_kv,
        broadcast_q=problem.broadcast_q,
        batch=problem.batch,
        rows=(q.shape[0], k.shape[0]),
        window=(problem.window_left, problem.window_right),
    )


def forward_items(
    kv_offsets: Tensor, q_offsets: Tensor | None, problem: Problem, block: int, schedule: str, split: int = 0
) -> Items:
    """The forward's table: blocks of queries, by the keys that they see; longer sequences cut every ``split`` keys."""
    queries, keys = _lengths(kv_offsets, q_offsets, problem)
    window = (problem.window_left, problem.window_right)
    return _items(queries, keys, window, problem.batch, block, schedule, split)


def backward_items(kv_offsets: Tensor, q_offsets: Tensor | None, problem: Problem, block: int, schedule: str) -> Items:
    """The backward's table: blocks of keys, by the queries that see them; the window's sides change places."""
    queries, keys = _lengths(kv_offsets, q_offsets, problem)
    return _items(keys, queries, (problem.window_right, problem.window_left), problem.batch, block, schedule)


def _lengths(kv_offsets: Tensor, q_offsets: Tensor | None, problem: Problem) -> tuple[Lengths, Lengths]:
    """The two sides: queries, keys."""
    queries = Lengths(q_offsets, problem.q_len, problem.total_q, problem.max_q_len)
    return queries, Lengths(kv_offsets, 0, problem.total_kv, problem.max_kv_len)


def _items(
    rows: Lengths,
    columns: Lengths,
    window: tuple[int, int],
    batch: int,
    block: int,
    schedule: str,
    split: int = 0,
) -> Items:
    """The table of the side that owns tiles; ``window`` as that side's rows see the other's columns."""
    from jfa.impl.triton.tables import build_items
    from jfa.instrument import launch_range

    before, after = window
    by_cost = schedules.is_sorted(schedule)
    with launch_range("jfa_table", schedule):
        return build_items(rows, columns, batch, block, before=before, after=after, by_cost=by_cost, split=split)


def _resolve(impl: str, q: Tensor) -> str:
    if impl != "auto":
        return impl
    return "triton" if q.is_cuda or _INTERPRETED else "reference"


def _check_device(what: str, q: Tensor, because: str = "") -> None:
    if not q.is_cuda and not _INTERPRETED:
        raise ValueError(
            f"{what} needs CUDA tensors, q is on {q.device}: move the inputs, set TRITON_INTERPRET=1 before "
            f"importing triton, or use impl='reference'{because}"
        )


def _device_of(q: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the one that holds the tensors."""
    return torch.cuda.device(q.device) if q.is_cuda else nullcontext()


def _reading_is_wanted(q: Tensor) -> bool:
    """Whether to check the offsets' values: free on the CPU, a wait for the device elsewhere."""
    return not q.is_cuda or os.environ.get("JFA_CHECK") == "1"


def _schedule_name(schedule: Any) -> str:
    return schedules.AUTO_SCHEDULE if schedule == "auto" else schedule


def _reference(
    q: Tensor, k: Tensor, v: Tensor, kv_offsets: Tensor, q_offsets: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor]:
    from jfa import reference

    check_values(kv_offsets, q_offsets, problem)
    return reference.attention(
        q,
        k,
        v,
        kv_offsets,
        q_offsets,
        scale=problem.scale,
        window_left=problem.window_left,
        window_right=problem.window_right,
    )


def _check_table(table: TileTable, problem: Problem, q: Tensor) -> None:
    rows = problem.q_len if problem.broadcast_q else problem.total_q
    for what, planned, given in (
        ("tensors on", table.forward.pairs.device, q.device),
        ("broadcast q:", table.broadcast_q, problem.broadcast_q),
        ("sequences", table.batch, problem.batch),
        ("rows of q and k", table.rows, (rows, problem.total_kv)),
        ("window", table.window, (problem.window_left, problem.window_right)),
    ):
        if planned != given:
            raise ValueError(
                f"schedule: the table was planned for {what} {planned}, this call has {given}; make one with "
                "jfa.plan(...) from this call's tensors, causal and window"
            )


def _kernel(impl: str, q: Tensor) -> str:
    """The kernel that serves q: "triton", "hopper" or "hopper-autotune"."""
    from jfa.impl.choice import resolve
    from jfa.impl.triton import launch

    return resolve(impl, launch.capability(q.device), q.dtype)


def _forward_kernel(impl: str, q: Tensor) -> Forward:
    from jfa.impl.choice import forward_kernel
    from jfa.impl.triton import launch

    return forward_kernel(impl, launch.capability(q.device), q.shape[2], q.element_size())


def _backward_kernel(impl: str, q: Tensor, problem: Problem, deterministic: bool) -> Backward:
    from jfa.impl.choice import backward_kernel
    from jfa.impl.triton import launch

    return backward_kernel(impl, launch.capability(q.device), problem, q.element_size(), deterministic)


def _blocks(q: Tensor, problem: Problem, forward: Forward, impl: str, deterministic: bool) -> tuple[int, int, int]:
    """Rows of the forward's and of the backward's tiles, and from how many keys on the forward cuts a sequence."""
    from jfa.impl.triton import launch

    backward = _backward_kernel(impl, q, problem, deterministic)
    split = forward.split(problem, launch.sm_count(q.device) * forward.ctas_per_sm)
    return forward.config.block_q * forward.cluster_of(problem, forward.config, split), backward.config.block_kv, split


def _check_blocks(planned: list[int], used: tuple[int, int, int]) -> None:
    if planned[0] and tuple(planned) != used:
        words = "blocks of {} queries and {} keys, sequences cut every {} keys (0: uncut)"
        raise ValueError(
            f"schedule: the table was planned for {words.format(*planned)}, this call uses {words.format(*used)}; make "
            "it with this call's impl, deterministic, max_q_len and max_kv_len, and a q of its dtype, head dimension "
            "and device"
        )


def _problem(
    q: Tensor,
    k: Tensor,
    kv_offsets: Tensor,
    q_offsets: Tensor | None,
    max_q_len: int,
    max_kv_len: int,
    scale: float,
    window_left: int,
    window_right: int,
) -> Problem:
    batch = kv_offsets.shape[0] - 1
    return Problem(
        broadcast_q=q_offsets is None,
        batch=batch,
        heads=q.shape[1],
        heads_kv=k.shape[1],
        head_dim=q.shape[2],
        total_q=q.shape[0] if q_offsets is not None else batch * q.shape[0],
        q_len=0 if q_offsets is not None else q.shape[0],
        total_kv=k.shape[0],
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        scale=scale,
        window_left=window_left,
        window_right=window_right,
    )


def _positive_scale(q: Tensor, problem: Problem) -> tuple[Tensor, Problem]:
    """The same problem with a scale ≥ 0, which the kernels' running maximum relies on: the sign goes into q."""
    return (q, problem) if problem.scale >= 0 else (-q, replace(problem, scale=-problem.scale))


def fixed_order(offsets: tuple[Tensor, Tensor | None], problem: Problem, q: Tensor) -> FixedOrder:
    """How dQ is added up in one order; with the table of its blocks, where queries are jagged."""
    from jfa.impl.triton import launch
    from jfa.impl.triton.dq import FixedOrder

    config = dq_config(launch.capability(q.device), problem.head_dim, q.element_size())
    if problem.broadcast_q:
        return FixedOrder(config, None)
    return FixedOrder(config, forward_items(*offsets, problem, config.block_q, "static"))


def _run(schedule: str, pairs: Tensor | None, counts: Tensor | None, split: int, build: Callable[[], Items]) -> Run:
    """The planned table, where there is one; else one built for this launch alone."""
    from jfa.impl.triton.launch import Run

    if pairs is None or counts is None:
        return Run(schedule, build(), fresh=True)
    return Run(schedule, Items(pairs, counts, split))


@torch.library.custom_op("jfa::forward", mutates_args=())
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_offsets: Tensor,
    q_offsets: Tensor | None,
    pairs: Tensor | None,
    counts: Tensor | None,
    backward_pairs: Tensor | None,
    backward_counts: Tensor | None,
    planned_blocks: list[int],
    impl: str,
    schedule: str,
    max_q_len: int,
    max_kv_len: int,
    scale: float,
    window_left: int,
    window_right: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    offsets = (kv_offsets, q_offsets)
    problem = _problem(q, k, *offsets, max_q_len, max_kv_len, scale, window_left, window_right)
    if _reading_is_wanted(q):
        check_values(kv_offsets, q_offsets, problem)
    resolved = _kernel(impl, q)
    kernel = _forward_kernel(resolved, q)
    block, _, split = used = _blocks(q, problem, kernel, resolved, deterministic)
    _check_blocks(planned_blocks, used)
    with _device_of(q):
        run = _run(schedule, pairs, counts, split, lambda: forward_items(*offsets, problem, block, schedule, split))
        q, problem = _positive_scale(q, problem)
        return kernel.run(q, k, v, *offsets, problem, kernel.config, run)


@_forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_offsets: Tensor,
    q_offsets: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    rows = q.shape[0] if q_offsets is not None else (kv_offsets.shape[0] - 1) * q.shape[0]
    return q.new_empty((rows, q.shape[1], q.shape[2])), q.new_empty((q.shape[1], rows), dtype=torch.float32)


@torch.library.custom_op("jfa::backward", mutates_args=())
def _backward_op(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_offsets: Tensor,
    q_offsets: Tensor | None,
    pairs: Tensor | None,
    counts: Tensor | None,
    impl: str,
    schedule: str,
    max_q_len: int,
    max_kv_len: int,
    scale: float,
    window_left: int,
    window_right: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    offsets = (kv_offsets, q_offsets)
    problem = _problem(q, k, *offsets, max_q_len, max_kv_len, scale, window_left, window_right)
    if problem.total_q == 0 or problem.total_kv == 0:  # no tile has anything to do
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    kernel = _backward_kernel(_kernel(impl, q), q, problem, deterministic)
    block = kernel.config.block_kv
    with _device_of(q):
        run = _run(schedule, pairs, counts, 0, lambda: backward_items(*offsets, problem, block, schedule))
        order = (fixed_order(offsets, problem, q),) if deterministic and kernel.impl == "triton" else ()
        signed_q, problem = _positive_scale(q, problem)
        dq, dk, dv = kernel.run(
            grad_out, grad_lse, signed_q, k, v, out, lse, *offsets, problem, kernel.config, run, *order
        )
    return (dq if signed_q is q else -dq), dk, dv


@_backward_op.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, kv_offsets, q_offsets, _, _, pairs, counts, _, *rest = inputs
    ctx.save_for_backward(q, k, v, *output, kv_offsets, q_offsets, pairs, counts)
    ctx.rest = rest
    from jfa.instrument import current_workload

    ctx.workload = current_workload()  # autograd runs the backward in a thread of its own, which does not know it
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, kv_offsets, q_offsets, pairs, counts = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * 18
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    from jfa.instrument import workload_label

    with workload_label(ctx.workload):
        grads = torch.ops.jfa.backward(
            grad_out, grad_lse, q, k, v, out, lse, kv_offsets, q_offsets, pairs, counts, *ctx.rest
        )
    return (*grads, *(None,) * 15)


_forward_op.register_autograd(_differentiate, setup_context=_save_for_backward)
