"""Run a kernel of ours with its recorder on, and bring back a :class:`Recording`. Needs a CUDA GPU and Triton."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from jfa.workloads import Workload
from profiling.bench import WARMUP_RUNS, GpuClock
from profiling.errors import UserError
from profiling.lane_rows import losses, rows_of, worst_clock
from profiling.launching import Launcher, gpu, prepare
from profiling.recording import SCHEMA, Recording
from profiling.versions import versions

if TYPE_CHECKING:
    import torch

    from jfa.impl.triton.launch import Run
    from jfa.instrument import Recorder
    from jfa.lanes import Lanes


WAITS_A_TILE, WAITS_A_STEP = 12, 4
"""Waits of a warpgroup at most: for the item, and a tile's buffers; for those of a step over the other side."""


def record(
    workload: Workload,
    *,
    schedule: str = "balanced-dynamic",
    direction: str = "forward",
    impl: str = "auto",
    level: str = "tile",
    launches: int = 1,
    repeats: int = 20,
    deterministic: bool = False,
) -> Recording:
    """Run ``workload`` and record ``launches`` launches at ``level`` (cta, tile or wait).

    ``deterministic``: the backward with repeatable gradients; where dQ has a kernel of its own, that of dK and dV is
    recorded, and dQ's timed with it.

    The plain and the recorded kernel are timed ``repeats`` times, in turn, in this process, as ``bench`` times; both
    medians and spreads go into the metadata. The tile table is built before: its cost is not in these times.

    Raises:
        UserError: no GPU, a workload without rows, or an unknown schedule, direction, implementation or level.
    """
    for name, given, known in (
        ("direction", direction, ("forward", "backward")),
        ("impl", impl, ("auto", "triton", "hopper")),
        ("level", level, ("cta", "tile", "wait")),
    ):
        if given not in known:
            raise UserError(f"{name}: expected one of {', '.join(known)}, got {given!r}")
    if deterministic and direction != "backward":
        raise UserError("deterministic: a forward always repeats; leave it out, or record direction backward")
    device = gpu()
    launcher = prepare(workload, schedule, direction, device, impl, deterministic=deterministic)
    return record_launcher(launcher, workload, device, level, launches, repeats)


def record_launcher(
    launcher: Launcher, workload: Workload, device: torch.device, level: str, launches: int, repeats: int
) -> Recording:
    """As :func:`record`, of a kernel that is ready. UserError: level wait of one without roles, a stage left out."""
    from jfa import instrument

    if launcher.leave_out:
        raise UserError(
            f"a {launcher.kernel} without {launcher.leave_out} is no kernel to record: its results are wrong"
        )
    if level == "wait" and launcher.roles == ("cta",):
        mend = "on an sm_90 GPU with impl hopper, or at level tile"
        if launcher.deterministic:
            mend = "at level tile, or without deterministic on an sm_90 GPU with impl hopper"
        raise UserError(
            f"level wait: the {launcher.impl} {launcher.direction} has no roles that wait for each other; record it "
            f"{mend}"
        )
    recorder = partial(room, launcher, workload, level, device)
    with instrument.workload_label(workload.name):
        clock = GpuClock()
        durations = _durations(launcher, recorder(), clock, repeats)
        taken = []
        for _ in range(launches):
            fresh = recorder()
            clock.time(partial(launcher.run, fresh))
            taken.append(fresh.read())
    metadata = {
        "schema": SCHEMA,
        "grade": "measured",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": _gpu(device, taken),
        "versions": versions(),
        "kernel": _kernel(launcher, device) | _resources(launcher, recorder()),
        "workload": workload.metadata(launcher.direction),
        "level": level,
        "launches": launches,
        "events": losses(taken),
        "durations": durations,
        "clock": worst_clock(taken),
        "command": _command(workload, launcher, level, launches, repeats),
    }
    columns = partial(_tile_columns, launcher=launcher, workload=workload)
    frames = [rows_of(spans, launcher.roles, level, columns, index) for index, spans in enumerate(taken)]
    return Recording(pd.concat(frames, ignore_index=True), metadata)


def room(launcher: Launcher, workload: Workload, level: str, device: torch.device) -> Recorder:
    """A recorder with a lane a CTA and role, and room for all that they note."""
    from jfa.instrument import Recorder

    lanes = launcher.ctas * len(launcher.roles)
    return Recorder.allocate(level, lanes, _capacity(launcher, workload, level), device)


def _capacity(launcher: Launcher, workload: Workload, level: str) -> int:
    """Events a lane can hold: its tiles, the clearing of rows, and at level wait its waits.

    On demand a CTA may take many more tiles than its share, but not more than there are.
    """
    from jfa.schedule import DEAL_ON_DEMAND, deal

    if level == "cta":
        return 0
    tiles = launcher.items.max_items * launcher.heads
    share = -(-tiles * launcher.cluster // launcher.ctas)
    if deal(launcher.schedule) == DEAL_ON_DEMAND:
        share = min(tiles, 16 * share + 1024)
    if level == "tile":
        return share + 1
    own, other, step = workload.q_lens, workload.kv_lens, launcher.config.block_kv
    if launcher.direction == "backward":
        own, other = other, own
        step = getattr(launcher.config, "block_q", None) or max(int(other.max(initial=1)), 1)
    of_a_tile = (other // step + 2) * (workload.heads // launcher.heads)
    steps = int((of_a_tile * -(-own // launcher.block)).sum()) * launcher.heads
    longest = int(of_a_tile.max(initial=0))
    return WAITS_A_TILE * share + WAITS_A_STEP * (2 * steps // launcher.ctas + 2 * longest)


def _durations(launcher: Launcher, recorder: Recorder, clock: GpuClock, repeats: int) -> dict[str, float]:
    """Median and interquartile range of the plain and the recorded run, ns, taken in turn after a warm-up.

    A backward run includes its delta and rounding kernels, on both sides alike.
    """
    from jfa.instrument import OFF

    times: dict[str, list[float]] = {"plain": [], "recorded": []}
    for repeat in range(repeats + WARMUP_RUNS):
        order = (("plain", OFF), ("recorded", recorder))
        for name, which in order if repeat % 2 else order[::-1]:
            took = clock.time(partial(launcher.run, which)) * 1e6
            if repeat >= WARMUP_RUNS:
                times[name].append(took)
    summary: dict[str, float] = {"repeats": repeats}
    for name, values in times.items():
        low, high = np.percentile(values, [25, 75])
        summary[f"{name}_ns"] = round(median(values))
        summary[f"{name}_iqr_ns"] = round(float(high - low))
    return summary


def _tile_columns(tile: np.ndarray, cta: np.ndarray, launcher: Launcher, workload: Workload) -> dict[str, np.ndarray]:
    """tile (rank in the natural order), batch, head and block of tiles numbered in the schedule's order; −1 stays.

    The parts of a cut sequence are tiles of their own, one part after the other, and so are the blocks of a tile of
    which each ``cta`` of a cluster does one.
    """
    from jfa.schedule import PART_SHIFT

    pairs = launcher.items.pairs.cpu().numpy()
    owner = workload.q_lens if launcher.direction == "forward" else workload.kv_lens
    blocks = -(-owner // launcher.block)
    split = launcher.items.split
    items = blocks * np.maximum(-(-workload.kv_lens // split), 1) if split else blocks
    first = np.cumsum(items) - items
    real = tile >= 0
    item = np.where(real, tile // launcher.heads, 0)
    head = np.where(real, tile % launcher.heads, -1)
    batch, block = pairs[item, 0], pairs[item, 1] & ((1 << PART_SHIFT) - 1)
    block = block * launcher.blocks + cta % launcher.blocks
    part = pairs[item, 1] >> PART_SHIFT
    natural = (first[batch] + part * blocks[batch] + block) * launcher.heads + head
    return {
        "tile": np.where(real, natural, -1),
        "batch": np.where(real, batch, -1),
        "head": head,
        "block": np.where(real, block, -1),
    }


def _gpu(device: torch.device, taken: list[Lanes]) -> dict[str, Any]:
    import torch

    from jfa.instrument import timer_resolution_ns

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "sm_count": properties.multi_processor_count,
        "capability": [properties.major, properties.minor],
        "clock_mhz": round(median(spans.clock.rate_ghz for spans in taken) * 1000),
        "timer_resolution_ns": timer_resolution_ns(device),
    }


def _kernel(launcher: Launcher, device: torch.device) -> dict[str, Any]:
    """The recorded kernel is compiled from the plain one's configuration, so that their hashes are one."""
    import torch

    from jfa.config import config_hash, describe

    major, minor = torch.cuda.get_device_capability(device)
    return {
        "name": launcher.kernel,
        "impl": launcher.impl,
        "direction": launcher.direction,
        "schedule": launcher.schedule,
        "arch": f"sm_{major}{minor}",
        "config": describe(launcher.config),
        "config_hash": config_hash(launcher.config),
        "plain_config_hash": config_hash(launcher.config),
        "num_ctas": launcher.ctas,
        "split": launcher.items.split,
        "cluster": launcher.cluster,
        "blocks": launcher.blocks,
        **({"deterministic": True} if launcher.deterministic else {}),
        **({"sms_left": launcher.sms_left} if launcher.sms_left else {}),
    }


def _resources(launcher: Launcher, recorder: Recorder) -> dict[str, Any]:
    """What the compiler gave the plain and the recorded kernel: registers a thread, stack frame and SMEM in bytes.

    The two are compiled from one configuration; here stands whether they came out alike.
    """
    from jfa.instrument import OFF

    return {"plain_resources": resources_of(launcher, OFF), "recorded_resources": resources_of(launcher, recorder)}


def resources_of(launcher: Launcher, recorder: Recorder) -> dict[str, int]:
    """Registers a thread, stack frame and SMEM in bytes; empty where the kernel is interpreted."""
    return resources_of_run(launcher.run(recorder))


def resources_of_run(run: Run) -> dict[str, int]:
    """As `resources_of`, of what a run launched."""
    compiled = run.compiled
    if not compiled or not hasattr(compiled[-1], "n_regs"):
        return {}
    kernel = compiled[-1]
    # Triton calls the stack frame, in words, spills.
    return {"registers": kernel.n_regs, "stack_bytes": 4 * kernel.n_spills, "shared_bytes": kernel.metadata.shared}


def _command(workload: Workload, launcher: Launcher, level: str, launches: int, repeats: int) -> str:
    kind = " --deterministic" if launcher.deterministic else ""
    return (
        f"python -m profiling record --workload {workload.name} --schedule {launcher.schedule} "
        f"--direction {launcher.direction} --impl {launcher.impl} --level {level} --launches {launches} "
        f"--repeats {repeats}{kind}"
    )
