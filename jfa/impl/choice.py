"""Which kernels a call runs: those for its architecture, or the compiler-scheduled ones that serve all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from jfa.config import (
    BackwardConfig,
    ForwardConfig,
    HopperBackwardConfig,
    HopperForwardConfig,
    HopperResidentConfig,
    backward_config,
    forward_config,
    hopper_backward_config,
    hopper_forward_config,
)
from jfa.validation import HOPPER_DTYPES, Problem

HOPPER = (9, 0)


@dataclass(frozen=True)
class Forward:
    """A forward kernel: its configuration, how it runs, and from how many keys on it cuts a sequence (0: never).

    ``kernel``: its function's name, which profilers show. ``roles``: its warpgroups that record by themselves; "cta"
    where the whole CTA does. ``cluster_of``: CTAs that do a tile together, each ``config.block_q`` rows of it,
    by problem, configuration and from how many keys on sequences are cut.
    """

    impl: str
    kernel: str
    config: ForwardConfig | HopperForwardConfig
    run: Callable[..., tuple[Tensor, Tensor]]
    split: Callable[[Problem, int], int]
    ctas_per_sm: int
    roles: tuple[str, ...] = ("cta",)
    cluster_of: Callable[[Problem, Any, int], int] = lambda problem, config, split: 1


@dataclass(frozen=True)
class Backward:
    """A backward kernel, as `Forward`; ``config.block_kv`` keys are a tile. ``ctas``: those of a launch;
    ``cluster``: CTAs that do a tile together; ``sms_left``: to a kernel that runs beside it."""

    impl: str
    kernel: str
    config: BackwardConfig | HopperBackwardConfig | HopperResidentConfig
    run: Callable[..., tuple[Tensor, Tensor, Tensor]]
    ctas: Callable[..., int]
    cluster: int = 1
    roles: tuple[str, ...] = ("cta",)
    sms_left: Callable[..., int] = lambda run, problem, config, device: 0


@lru_cache
def has_tlx() -> bool:
    """Whether the installed Triton brings TLX: fbtriton does, upstream Triton does not."""
    try:
        return find_spec("triton.language.extra.tlx") is not None
    except ModuleNotFoundError:
        return False


def resolve(impl: str, capability: tuple[int, int] | None, dtype: torch.dtype) -> str:
    """The kernel that "auto" means here, or what was asked for.

    ``capability`` None: the interpreter. Raises ValueError where what was asked for cannot run. What it names may still
    refuse: the kernel for sm_90 raises RuntimeError where ptxas may assemble it wrongly (`jfa.toolchain`).
    """
    fits = capability is not None and capability[0] == HOPPER[0] and has_tlx()
    if impl == "auto":
        return "hopper" if fits and dtype in HOPPER_DTYPES else "triton"
    if impl.startswith("hopper") and not fits:
        where = "Triton's interpreter" if capability is None else f"sm_{capability[0]}{capability[1]}"
        raise ValueError(
            f"impl={impl!r} needs an sm_90 GPU and a Triton with TLX (fbtriton), this is {where}"
            f"{'' if has_tlx() else ' without TLX'}; pass impl='auto' or impl='triton'"
        )
    return impl


def forward_kernel(impl: str, capability: tuple[int, int] | None, head_dim: int, itemsize: int) -> Forward:
    """The forward called ``impl`` ("triton", "hopper", "hopper-autotune") as configured for an architecture."""
    if impl.startswith("hopper"):
        from jfa.impl.hopper import forward as hopper
        from jfa.impl.hopper import tune

        pinned = hopper_forward_config(head_dim)
        name = hopper.jfa_forward_hopper.__name__

        def split(problem: Problem, ctas: int) -> int:
            return hopper.split_for(problem, pinned, ctas)

        run = tune.forward if impl == "hopper-autotune" else hopper.forward
        return Forward(impl, name, pinned, run, split, 1, hopper.ROLES, hopper.cluster)
    from jfa.impl.triton import forward

    config = forward_config(capability, head_dim, itemsize)
    name = forward.jfa_forward.__name__
    return Forward(impl, name, config, forward.forward, lambda problem, ctas: 0, config.ctas_per_sm)


def backward_kernel(
    impl: str, capability: tuple[int, int] | None, problem: Problem, itemsize: int, deterministic: bool = False
) -> Backward:
    """The backward called ``impl`` for this problem; a ``deterministic`` one adds dQ up in one order.

    That which keeps dQ in registers does so anyway; elsewhere it is triton's, which leaves dQ to a kernel of its own.
    """
    if impl.startswith("hopper"):
        from jfa.impl.hopper import resident

        if not deterministic or resident.serves(problem):
            return hopper_backward(hopper_backward_config(resident.serves(problem)), problem)
    from jfa.impl.triton import backward

    config = backward_config(capability, problem.head_dim, itemsize)
    return Backward("triton", backward.jfa_backward.__name__, config, backward.backward, backward.ctas)


def hopper_backward(config: HopperBackwardConfig | HopperResidentConfig, problem: Problem) -> Backward:
    """The backward for sm_90 that a configuration is of."""
    if isinstance(config, HopperResidentConfig):
        from jfa.impl.hopper import resident

        name = resident.jfa_backward_resident.__name__
        return Backward(
            "hopper", name, config, resident.backward, resident.ctas, resident.cluster(problem), resident.ROLES
        )
    from jfa.impl.hopper import backward, rounding

    name = backward.jfa_backward_hopper.__name__
    run, ctas = backward.backward, backward.ctas
    return Backward("hopper", name, config, run, ctas, roles=backward.ROLES, sms_left=rounding.sms_beside)
