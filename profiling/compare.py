"""Set recordings side by side: what changed between them, by how much, and whether they may be compared at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from profiling.errors import UserError
from profiling.recording import Recording
from profiling.sm_time import PARTS as SM_TIME_PARTS
from profiling.sm_time import summary

PARTS = tuple(part.removesuffix("_ns") for part in SM_TIME_PARTS)
# What must be the same for one kernel time to be called faster than another, and how each is read.
PREMISES = {
    "workload": lambda r: r.workload_name,
    "direction": lambda r: r.direction,
    "GPU": lambda r: r.gpu_name,
    "grade": lambda r: r.grade,
    "lengths": lambda r: (r.get("workload.q_lens"), r.get("workload.kv_lens")),
    "heads": lambda r: (r.get("workload.heads"), r.get("workload.heads_kv")),
    "head size": lambda r: r.get("workload.head_dim"),
    "dtype": lambda r: r.get("workload.dtype"),
    "mask": lambda r: (r.get("workload.causal"), r.get("workload.window")),
    "broadcast Q": lambda r: r.get("workload.broadcast_q"),
}
NOTABLE = {
    "excerpt": lambda r: r.get("excerpt", "the whole launch"),
    "implementation": lambda r: r.impl,
    "deterministic": lambda r: bool(r.get("kernel.deterministic")),
    "kernel configuration": lambda r: r.get("kernel.plain_config_hash", r.get("kernel.config_hash")),
    "level": lambda r: r.level,
    "torch": lambda r: r.get("versions.torch"),
    "Triton": lambda r: r.get("versions.triton"),
    "driver": lambda r: r.get("versions.driver"),
}

NO_KERNEL_TIME = (
    "a recording without the plain kernel's time: speedups are of one launch's makespan each, whose spread is not known"
)


@dataclass(frozen=True, eq=False)
class Comparison:
    """A row a recording, in the order given, and what else than the schedule differs.

    ``table``: recording, schedule, impl, level, grade, basis (str); kernel_ns, kernel_iqr_ns (the plain kernel's median
    and spread, NaN where the file does not say), makespan_ns, work_share … unused_share, headroom (of the launch with
    the median makespan), tflops, speedup (the first's time / this one's: 1.0 when the difference is within the spread,
    NaN when the two may not be compared).
    ``speedup_of``: "kernel time", or "makespan" where a file does not have it.
    ``obstacles``: differences that forbid a speedup; ``differences``: others that a reader should know.
    """

    table: pd.DataFrame
    obstacles: list[str]
    differences: list[str]
    speedup_of: str


def compare(recordings: Sequence[Recording]) -> Comparison:
    """Compare recordings with the first of them.

    Raises:
        UserError: fewer than two. RecordingError: one lacks what SM time needs.
    """
    if len(recordings) < 2:
        raise UserError(f"compare: expected two recordings or more, got {len(recordings)}")
    rows = [split(recording) for recording in recordings]
    obstacles, differences = unlike(recordings)
    all_plain = all(not math.isnan(row["kernel_ns"]) for row in rows)
    key = "kernel_ns" if all_plain else "makespan_ns"
    if not all_plain and not obstacles:
        differences.append(NO_KERNEL_TIME)
    for row in rows:
        row["speedup"] = math.nan if obstacles else ratio_beyond_spread(rows[0], row, key)
    return Comparison(pd.DataFrame(rows), obstacles, differences, "kernel time" if all_plain else "makespan")


def unlike(recordings: Sequence[Recording]) -> tuple[list[str], list[str]]:
    """What of recordings differs: (what makes times another's, what else a reader should know), a line each."""
    kinds = (PREMISES, NOTABLE)
    first, second = ([line for name in kind for line in _differing(name, kind[name], recordings)] for kind in kinds)
    return first, second


def split(recording: Recording) -> dict[str, Any]:
    """One recording's row: see `Comparison`."""
    launches = summary(recording)
    launch = median_launch(launches)
    kernel_ns = recording.number("durations.plain_ns")
    return {
        "recording": recording.source,
        "schedule": recording.schedule,
        "impl": recording.impl,
        "level": recording.level,
        "grade": recording.grade,
        "basis": str(launches.attrs.get("basis", "")),
        "kernel_ns": kernel_ns,
        "kernel_iqr_ns": recording.number("durations.plain_iqr_ns"),
        "makespan_ns": int(launch["makespan_ns"]),
        **{f"{part}_share": float(launch[f"{part}_share"]) for part in PARTS},
        "headroom": float(launch["headroom"]),
        "tflops": recording.number("workload.flop") / kernel_ns / 1e3 if kernel_ns else math.nan,
    }


def median_launch(launches: pd.DataFrame) -> pd.Series:
    """The row of `sm_time.summary` whose makespan is the lower median."""
    return launches.sort_values(["makespan_ns", "launch"]).iloc[(len(launches) - 1) // 2]


def ratio_beyond_spread(first: dict[str, Any], other: dict[str, Any], key: str) -> float:
    """first / other at ``key``; 1.0 where they differ by no more than the larger interquartile range."""
    spreads = [row["kernel_iqr_ns"] for row in (first, other) if not math.isnan(row["kernel_iqr_ns"])]
    if abs(first[key] - other[key]) <= max(spreads, default=0.0):
        return 1.0
    return float(first[key] / other[key]) if other[key] else math.nan


def _differing(name: str, read: Any, recordings: Sequence[Recording]) -> list[str]:
    values = [read(recording) for recording in recordings]
    if all(value == values[0] for value in values):
        return []
    if name == "lengths":
        return ["lengths differ: the sequences are not the same ones"]
    return [f"{name} differs: {', '.join(dict.fromkeys(str(value) for value in values))}"]
