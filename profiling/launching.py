"""A kernel of ours on one workload, ready to run: what `record` records, and `launch` runs for another profiler.

Needs Triton, and a CUDA GPU unless Triton interprets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from jfa.workloads import Workload
from profiling.errors import UserError

if TYPE_CHECKING:
    import torch

    from jfa.config import Config
    from jfa.impl.triton.launch import Run
    from jfa.instrument import Recorder
    from jfa.schedule import Items


@dataclass(frozen=True)
class Launcher:
    """One kernel on one workload, ready to run again and again with any recorder."""

    kernel: str
    direction: str
    schedule: str
    config: Any
    """A `jfa.config.Config`, of that kernel's kind."""
    block: int
    heads: int
    items: Items
    ctas: int
    run: Callable[..., Run]
    """Called with a `Recorder`."""
    impl: str = "triton"
    cluster: int = 1
    """CTAs that do a tile together: where it has ``blocks``, each records its own, else each records the tile."""
    blocks: int = 1
    """Blocks of ``block`` rows in a tile: each CTA of a cluster does one, or all do the one together."""
    roles: tuple[str, ...] = ("cta",)
    """The CTA's warpgroups that record by themselves, in the order of their lanes; without them "cta"."""
    results: list[torch.Tensor] = field(default_factory=list, compare=False)
    """What the last run gave: out and lse, or dQ, dK and dV. Nothing, where a stage is left out."""
    leave_out: str = ""
    """The stage without which it runs."""
    deterministic: bool = False
    """Whether dQ is asked to be added up in one order."""
    sms_left: int = 0
    """SMs that it leaves to a kernel that runs beside it, which no recording shows."""

    def without(self, stage: str) -> Launcher:
        """The same kernel on the same tensors without a stage: for its time alone, results are thrown away.

        UserError: the kernel has no switch for that.
        """
        from jfa.impl.hopper import left_out

        try:
            left_out.code(self.kernel, stage)
        except ValueError as error:
            raise UserError(str(error)) from None
        return replace(self, run=partial(self.run, leave_out=stage), results=[], leave_out=stage)


def launch(
    workload: Workload,
    *,
    direction: str = "forward",
    schedule: str = "balanced-dynamic",
    impl: str = "auto",
    launches: int = 1,
    warmup: int = 2,
    device: torch.device | None = None,
    config: Config | None = None,
    split: bool = True,
) -> Launcher:
    """Run the plain kernel ``warmup`` times outside any NVTX range, then ``launches`` times, each under its own.

    A profiler that selects by the ranges of domain jfa so sees ``launches`` launches of a compiled kernel; the building
    of the tile table, and the forward that a backward needs, are outside ranges too. A backward launch is
    three ranges, jfa_delta, jfa_backward and jfa_round_dq (two kernels on a stream of their own, where dQ is rounded
    beside); of one that keeps dQ in registers jfa_delta, and for each pass, of 256 rows of a shared Q, jfa_backward and
    jfa_sum_dq. A forward for sm_90 that cuts long sequences is followed by jfa_merge. ``device``: this process's GPU,
    unless another is given. ``config`` and ``split``: as of `prepare`.

    Raises:
        UserError: no GPU, a workload without rows, an unknown schedule, direction or implementation, or one that cannot
            run here.
    """
    if direction not in ("forward", "backward"):
        raise UserError(f"direction: expected one of forward, backward, got {direction!r}")
    where = gpu() if device is None else device
    from jfa.instrument import OFF, workload_label

    with workload_label(workload.name):
        with _without_ranges():
            launcher = prepare(workload, schedule, direction, where, impl, config=config, split=split)
            for _ in range(warmup):
                launcher.run(OFF)
            _settle(where)
        for _ in range(launches):
            launcher.run(OFF)
        _settle(where)
    return launcher


def gpu() -> torch.device:
    """This process's current CUDA device. UserError: torch, Triton or a GPU is missing."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"running a kernel needs torch and Triton ({error}); install the extra: pip install '.[kernels]'"
        ) from None
    if not torch.cuda.is_available():
        raise UserError(
            "found no CUDA GPU; run this on a machine with one, what it writes can be looked at anywhere "
            "(`python -m profiling doctor` says what works here)"
        )
    return torch.device("cuda", torch.cuda.current_device())


def prepare(
    workload: Workload,
    schedule: str,
    direction: str,
    device: torch.device,
    impl: str = "auto",
    *,
    config: Config | None = None,
    split: bool = True,
    deterministic: bool = False,
) -> Launcher:
    """The kernel that the op would launch for this workload, its table built; ``config``, where given, is not pinned.

    ``split`` False: no sequence is cut. ``deterministic``: a backward that adds dQ up in one order; where that takes a
    kernel of its own, this runs behind it and takes no recorder. UserError: no rows, unknown schedule, an
    implementation that cannot run here. ValueError: both ``config`` and ``deterministic``, which has one of its own.
    """
    from jfa import attention, toolchain, validation
    from jfa.impl import choice
    from jfa.impl.triton import launch
    from jfa.schedule import AUTO_SCHEDULE

    if config is not None and deterministic:
        raise ValueError("a deterministic backward has a configuration of its own: leave out config")
    inputs = workload.inputs(device)
    q, k, v = inputs.q, inputs.k, inputs.v
    offsets = (inputs.kv_offsets, inputs.q_offsets)
    window = workload.window
    try:
        problem = validation.validate(
            q, k, v, *offsets, None, workload.max_kv_len, None, workload.causal, window, deterministic, impl, schedule
        )
        kernel = choice.resolve(impl, launch.capability(device), q.dtype)
    except (TypeError, ValueError) as error:
        raise UserError(f"workload {workload.name}: {error}") from None
    if kernel == "hopper":
        try:
            toolchain.require_safe_ptxas("the kernels for sm_90")
        except RuntimeError as error:
            raise UserError(f"{error}; or run --impl triton") from None
    if problem.total_q == 0 or (direction == "backward" and problem.total_kv == 0):
        raise UserError(f"the {direction} of {workload.name} has no rows, so that nothing runs; give it lengths")
    schedule = AUTO_SCHEDULE if schedule == "auto" else schedule
    capability, size = launch.capability(device), q.element_size()
    forward = choice.forward_kernel(kernel, capability, problem.head_dim, size)
    forward_as = forward.config if config is None or direction != "forward" else cast("Any", config)
    ctas_per_sm = getattr(forward_as, "ctas_per_sm", forward.ctas_per_sm)
    parts = forward.split(problem, launch.sm_count(device) * ctas_per_sm) if split else 0
    cluster = forward.cluster_of(problem, forward_as, parts)
    items = attention.forward_items(*offsets, problem, forward_as.block_q * cluster, schedule, parts)
    results: list[torch.Tensor] = []
    if direction == "forward":

        def run_forward(recorder: Recorder, leave_out: str = "") -> Run:
            run = launch.Run(schedule, items, recorder, leave_out=leave_out)
            found = forward.run(q, k, v, *offsets, problem, forward_as, run)
            if not leave_out:
                results[:] = found
            return run

        ctas = launch.grid(launch.Run(schedule, items), problem.heads, device, ctas_per_sm, cluster)
        return Launcher(
            kernel=forward.kernel,
            direction=direction,
            schedule=schedule,
            config=forward_as,
            block=forward_as.block_q,
            heads=problem.heads,
            items=items,
            ctas=ctas,
            run=run_forward,
            impl=kernel,
            cluster=cluster,
            blocks=cluster,
            roles=forward.roles,
            results=results,
        )
    out, lse = forward.run(q, k, v, *offsets, problem, forward_as, launch.Run(schedule, items))
    grad_out = inputs.grad_out.reshape(out.shape)
    if config is None or kernel == "triton":
        backward = choice.backward_kernel(kernel, capability, problem, size, deterministic)
    else:
        backward = choice.hopper_backward(cast("Any", config), problem)
    order = (attention.fixed_order(offsets, problem, q),) if deterministic and backward.impl == "triton" else ()
    backward_as = backward.config if config is None else cast("Any", config)
    key_items = attention.backward_items(*offsets, problem, backward_as.block_kv, schedule)

    def run_backward(recorder: Recorder, leave_out: str = "") -> Run:
        run = launch.Run(schedule, key_items, recorder, leave_out=leave_out)
        found = backward.run(grad_out, None, q, k, v, out, lse, *offsets, problem, backward_as, run, *order)
        if not leave_out:
            results[:] = found
        return run

    return Launcher(
        kernel=backward.kernel,
        direction=direction,
        schedule=schedule,
        config=backward_as,
        block=backward_as.block_kv,
        heads=problem.heads_kv,
        items=key_items,
        ctas=backward.ctas(launch.Run(schedule, key_items), problem, backward_as, device),
        sms_left=backward.sms_left(launch.Run(schedule, key_items), problem, backward_as, device),
        run=run_backward,
        impl=backward.impl,
        cluster=backward.cluster,
        roles=backward.roles,
        results=results,
        deterministic=deterministic,
    )


@contextmanager
def _without_ranges() -> Iterator[None]:
    """Launches inside push no NVTX range, as if the nvtx package were missing."""
    from jfa import instrument

    nvtx = instrument.nvtx
    instrument.nvtx = None
    try:
        yield
    finally:
        instrument.nvtx = nvtx


def _settle(device: torch.device) -> None:
    """Wait until what was launched is done; raises what it raised."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
