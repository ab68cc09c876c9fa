"""The sm_90 forward's configuration by trial: on request alone, as pinned ones make every run the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from jfa.config import HopperForwardConfig
from jfa.impl.hopper import forward as hopper
from jfa.impl.triton import launch
from jfa.instrument import OFF
from jfa.validation import Problem

WARMUP, ROUNDS = 2, 7
_chosen: dict[tuple[object, ...], HopperForwardConfig] = {}


def candidates(pinned: HopperForwardConfig) -> tuple[HopperForwardConfig, ...]:
    """What is tried: the pinned one first, then each of its neighbours; all with its blocks and pairs, as tables."""
    others: list[dict[str, int | bool]] = [{"pingpong": not pinned.pingpong}, {"early_fetch": not pinned.early_fetch}]
    # A tail of its own makes ptxas serialise the products of D 64, for which none is pinned.
    others += [{"tail": tail} for tail in (0, 32, 64) if tail != pinned.tail and pinned.tail]
    return (pinned, *(dataclasses.replace(pinned, **change) for change in others))  # type: ignore[arg-type]


def regime(q: Tensor, problem: Problem, config: HopperForwardConfig, split: int) -> tuple[object, ...]:
    """What a choice holds for: device, type, shape of the problem, how it is done, and its mean length up to a factor
    of two."""
    mean = problem.total_kv // max(problem.batch, 1)
    masked = problem.window_left >= 0 or problem.window_right >= 0
    return (
        q.device, q.dtype, problem.head_dim, problem.heads // problem.heads_kv, problem.broadcast_q, masked, split > 0,
        hopper.cluster(problem, config, split), mean.bit_length(), min(problem.max_q_len, 128),
    )  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_offsets: Tensor,
    q_offsets: Tensor | None,
    problem: Problem,
    config: HopperForwardConfig,
    run: launch.Run,
) -> tuple[Tensor, Tensor]:
    """As `forward.forward`, in the configuration that was quickest on the first call of this regime.

    That call runs each of the candidates ROUNDS times; ``config`` is the pinned one.
    """
    key = regime(q, problem, config, run.items.split)
    if key not in _chosen:
        trial = dataclasses.replace(run, recorder=OFF, fresh=False, compiled=[])

        def attempt(candidate: HopperForwardConfig) -> None:
            hopper.forward(q, k, v, kv_offsets, q_offsets, problem, candidate, trial)

        _chosen[key] = quickest(candidates(config), attempt, _events)
    return hopper.forward(q, k, v, kv_offsets, q_offsets, problem, _chosen[key], run)


def quickest(
    configs: tuple[HopperForwardConfig, ...],
    attempt: Callable[[HopperForwardConfig], None],
    clock: Callable[[Callable[[], None]], float],
) -> HopperForwardConfig:
    """The configuration of the smallest median time, all taking turns; one that raises is out, but for the first."""
    able = []
    for config in configs:
        try:
            for _ in range(WARMUP):
                attempt(config)
            able.append(config)
        except Exception:
            if config is configs[0]:
                raise
    times: dict[HopperForwardConfig, list[float]] = {config: [] for config in able}
    for _ in range(ROUNDS):
        for config in able:
            times[config].append(clock(lambda config=config: attempt(config)))  # type: ignore[misc]
    return min(able, key=lambda config: median(times[config]))


def _events(run: Callable[[], None]) -> float:
    """GPU time of one run, ms."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
