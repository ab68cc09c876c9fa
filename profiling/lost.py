"""What the compute roles lose to waiting: which barrier costs most, who is late, and what addresses it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from jfa.config import RESIDENT_ROWS
from profiling.errors import RecordingError
from profiling.gpus import BF16_OPERATIONS
from profiling.late import late
from profiling.recording import Recording
from profiling.text import percent
from profiling.waits import PREFIX, role_time

HALVES = ("bfloat16", "float16")
LITTLE = 0.05
"""Of a role's life: what waits less in all is bound by what it computes."""

REMEDIES = {
    "in flight": "loads begin too late to hide their latency: more stages of that buffer, or fewer bytes (multicast)",
    "in use": "the buffer is held too long: more stages, or release it as soon as its last read is done",
    "issuing": "the tensor cores are taken in turns: try without ping-pong",
    "item_full": "the next tile arrives late: fetch it earlier, or take longer tiles",
    "working": "the late role does too much between its waits: move work to another role",
    "ds_full": "the warpgroups exchange dS in each step: keep dQ in registers, or more work between the two",
    "weights_full": "what makes P and dS is late: more stages of the other side, fewer instructions a score",
    "weights_empty": "what uses P and dS is late: a second buffer of them, or fewer bytes through shared memory",
    "part_full": "the other CTA of the pair is late: even shares, or send its part earlier",
}
"""By what the late role does, or by the barrier, where that says more."""


@dataclass(frozen=True)
class LostTime:
    """The compute roles' lives (those that have tiles), as shares that sum to 1.

    Attributes:
        roles: which they are.
        work: neither waiting nor between tiles; between: between tiles; waits: by barrier, longest first.
        barrier, late, doing: the costliest barrier, who was late most of its time, doing what; "" without waits.
        words: the verdict, a sentence; remedy: what addresses it.
        products: share of the plain launch that the useful products alone take, as of `products_share`.
        tensor: share of the launch in which the tensor pipe was active, from a profiler; NaN without one.
        residual: tensor − products: padding of tiles, and how far the two clocks and runs are apart. NaN without.
        beside: work − tensor, without a profiler work − products: softmax, issuing, stores.
    """

    roles: tuple[str, ...]
    work: float
    between: float
    waits: dict[str, float]
    barrier: str
    late: str
    doing: str
    words: str
    remedy: str
    products: float
    tensor: float
    residual: float
    beside: float


def lost_time(recording: Recording, tensor: float = math.nan) -> LostTime:
    """What the compute roles lose; ``tensor``: the tensor pipe's share of the same launch, in [0, 1], if known.

    Raises:
        RecordingError: as `profiling.waits.waits_of`, or no role has tiles.
    """
    parts = role_time(recording)
    roles = tuple(parts.loc[parts["part"] == "between tiles", "role"])
    if not roles:
        raise RecordingError(f"{recording.source}: no role has tile spans, so that none is known to compute")
    own = parts[parts["role"].isin(roles)]
    lived = own["total_ns"].sum()
    shares = (own.groupby("part")["total_ns"].sum() / lived).to_dict()
    work, between = shares.pop("work"), shares.pop("between tiles")
    ranked = {str(part).removeprefix(PREFIX): s for part, s in sorted(shares.items(), key=lambda item: -item[1])}
    barrier = next(iter(ranked), "")
    who, doing = _who(recording, roles, barrier)
    waited = sum(ranked.values())
    words, remedy = _words(roles, work, waited, barrier, ranked.get(barrier, 0.0), who, doing)
    if recording.get("kernel.blocks") == 2:
        remedy = remedy.replace(" (multicast)", "")  # two CTAs load for both already
    products = products_share(recording)
    beside = work - (products if math.isnan(tensor) else tensor)
    return LostTime(
        roles, work, between, ranked, barrier, who, doing, words, remedy, products, tensor, tensor - products, beside
    )


def products_share(recording: Recording) -> float:
    """Share of the plain launch that its useful products take at the rate of the card's tensor cores, in [0, 1].

    flop / (operations a cycle and SM · the kernel's SMs · SM clock · time): the workload's own operations, the clock
    of the recording's fit, and its makespan less what recording cost. NaN where one of them is not known, for float32,
    and for one of several passes.
    """
    capability = recording.get("gpu.capability")
    known = isinstance(capability, list) and recording.get("workload.dtype") in HALVES
    rate = BF16_OPERATIONS.get(".".join(map(str, capability)), math.nan) if known else math.nan
    spans = [rows["end_ns"].max() - rows["start_ns"].min() for _, rows in recording.events.groupby("launch")]
    plain, recorded, clock, sms, flop = map(
        recording.number,
        ("durations.plain_ns", "durations.recorded_ns", "clock.rate_ghz", "gpu.sm_count", "workload.flop"),
    )
    if recording.get("kernel.sms_left"):
        sms -= recording.sms_left
    if not all(value > 0 for value in (*spans, plain, recorded, clock, sms)) or _is_one_pass_of_several(recording):
        return math.nan
    return flop / (rate * sms * clock * float(median(spans)) * plain / recorded)


def _is_one_pass_of_several(recording: Recording) -> bool:
    """Whether this is the first launch of a backward whose shared Q has more rows than a cluster keeps."""
    lengths = recording.get("workload.q_lens")
    longest = max(lengths, default=0) if isinstance(lengths, list) else 0
    kept = RESIDENT_ROWS * recording.number("kernel.cluster")
    return recording.get("kernel.name") == "jfa_backward_resident" and not longest <= kept


def _who(recording: Recording, roles: tuple[str, ...], barrier: str) -> tuple[str, str]:
    table = late(recording)
    table = table[table["role"].isin(roles) & (table["barrier"] == barrier)]
    if table.empty:
        return "", ""
    summed = table.groupby(["late", "doing"])["total_ns"].sum().sort_values(ascending=False).reset_index()
    return str(summed["late"].iloc[0]), str(summed["doing"].iloc[0])


def _words(
    roles: tuple[str, ...], work: float, waited: float, barrier: str, share: float, who: str, doing: str
) -> tuple[str, str]:
    names = " and ".join([", ".join(roles[:-1]), roles[-1]] if len(roles) > 1 else roles)
    if waited < LITTLE or not barrier:
        return (
            f"{names} wait for {percent(waited)} of their time only: the kernel is bound by what they compute",
            "fewer instructions a product: softmax, masks, conversions",
        )
    remedy = REMEDIES.get(barrier) or REMEDIES.get(doing) or "look at what the late role waits for in turn"
    part = "most of it" if share > waited / 2 else "the largest part"
    return (
        f"{names} compute for {percent(work)} of their time and wait for {percent(waited)}, {part} "
        f"({percent(share)}) for {barrier}; late is {who}, {doing.replace(PREFIX, 'itself waiting for ')}",
        remedy,
    )
