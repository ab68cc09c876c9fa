"""What more can be said of a kernel whose attention workload is known: useful work, and where tensor time went.

The workload is the one that the kernel's NVTX range names (``workload=…``); its useful operations are those that the
benchmarks count. A recording of the same launch splits the tensor pipe's idle time into what imbalance cost and what
was lost while SMs worked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from profiling.errors import UserError
from profiling.gpus import BF16_OPERATIONS
from profiling.ncu.metrics import DERIVED, Number
from profiling.ncu.summary import KernelSummary
from profiling.recording import Recording
from profiling.sm_time import PARTS, summary

DIRECTIONS = {
    "jfa_forward": "forward",
    "jfa_forward_hopper": "forward",
    "jfa_backward": "backward",
    "jfa_backward_hopper": "backward",
    "jfa_backward_resident": "backward",
}
_FIELD = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True)
class LostTensorTime:
    """The launch's SM time (SMs x makespan) as shares in %, which sum to 100.

    Attributes:
        tensor: the tensor pipe was active (ncu, measured).
        inside: SMs worked and the tensor pipe did not (derived): latency, softmax, masking.
        imbalance: SMs did not work: ramp, fetch, tail and unused together, whose shares are in `parts` (derived).
    """

    tensor: float
    inside: float
    imbalance: float
    parts: dict[str, float]
    recording: str


def fields(kernel: KernelSummary) -> dict[str, str]:
    """The ``name=value`` words of the innermost range of domain jfa around the launch; empty where there is none."""
    for name in reversed(kernel.launch.push_pop + kernel.launch.start_end):
        domain, _, message = name.partition(":")
        if domain == "jfa":
            return dict(_FIELD.findall(message))
    return {}


def extras(kernel: KernelSummary) -> dict[str, Number]:
    """Useful TFLOP/s, share of the tensor peak at the clock of the measurement, and operations executed per useful one.

    Empty for a kernel that is not one of ours, or whose workload has no name known here.
    """
    from jfa import workloads

    direction, name = DIRECTIONS.get(kernel.name), fields(kernel).get("workload")
    if direction is None or name not in workloads.names():
        return {}
    useful = workloads.get(name).flop(direction)
    made = {"useful_operations": Number(useful, "", DERIVED, f"workload {name}, {direction}")}
    seconds = kernel.get("duration") / 1e9
    if seconds > 0:
        source = f"workload {name}, {kernel.numbers['duration'].source}"
        made["useful_rate"] = Number(useful / seconds, "1/s", DERIVED, source)
        each, clock, sms = BF16_OPERATIONS.get(kernel.launch.capability), kernel.get("sm_clock"), kernel.get("sms")
        if each and clock > 0 and sms > 0:
            peak = each * clock * sms
            made["tensor_peak"] = Number(
                peak, "1/s", DERIVED, f"{each} a cycle and SM, {kernel.numbers['sm_clock'].source}"
            )
            made["peak_share"] = Number(100 * useful / seconds / peak, "%", DERIVED, source)
    executed = kernel.numbers.get("tensor_operations")
    if executed and useful > 0:
        made["executed_per_useful"] = Number(executed.value / useful, "x", DERIVED, executed.source)
    return made


def lost_tensor_time(kernel: KernelSummary, recording: Recording) -> LostTensorTime:
    """Tensor time lost to imbalance beside tensor time lost inside the work.

    The recording must be of the same kernel, workload, schedule and GPU as far as both say.

    Raises:
        UserError: they are of different launches, or the report has no tensor pipe.
    """
    same_launch(kernel, recording)
    tensor = kernel.get("tensor")
    if tensor != tensor:
        raise UserError(
            f"{kernel.report}: has no tensor-pipe metric of {kernel.name}, so that its lost time cannot be split; "
            "collect ComputeWorkloadAnalysis, or --set full"
        )
    totals = summary(recording)
    median = totals.sort_values("makespan_ns", kind="stable").iloc[len(totals) // 2]
    shares = {part.removesuffix("_ns"): 100 * float(median[part.replace("_ns", "_share")]) for part in PARTS}
    work = shares.pop("work")
    return LostTensorTime(tensor, work - tensor, 100 - work, shares, recording.title())


def same_launch(kernel: KernelSummary, recording: Recording, option: str = "--recording") -> None:
    """Raise UserError, naming ``option``, unless both are of one kernel, workload, schedule and GPU where they say."""
    said = fields(kernel)
    pairs = [
        ("kernel", kernel.name, recording.get("kernel.name")),
        ("workload", said.get("workload"), recording.get("workload.name")),
        ("schedule", said.get("schedule"), recording.get("kernel.schedule")),
        ("GPU", kernel.launch.gpu, recording.get("gpu.name")),
    ]
    for what, in_report, in_recording in pairs:
        if in_report and in_recording and str(in_report) != str(in_recording):
            raise UserError(
                f"{option}: {recording.source} ({what} {in_recording}) and {kernel.report} ({what} {in_report}) are of "
                "different launches; record and collect the same kernel, workload and schedule"
            )
