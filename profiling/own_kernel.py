"""Recordings of a kernel of your own: instrument it with `jfa.instrument`, run it, and hand its recorder in.

    recorder = Recorder.allocate("tile", lane_count=ctas, capacity=tiles_a_cta, device="cuda")
    kernel[(ctas,)](…, recorder.buffer, recorder.capacity, LEVEL=recorder.number)
    recording = recording_of(recorder, kernel="my kernel")

Every analysis, figure and command then works on it, but for those that need the lengths of an attention workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from profiling.errors import UserError
from profiling.recording import SCHEMA, Recording

if TYPE_CHECKING:
    from jfa.instrument import Recorder

MAPPINGS = {
    "workload": "{'name': 'my batch'}",
    "gpu": "{'name': 'NVIDIA H200', 'sm_count': 132}",
    "durations": "{'plain_ns': 1e6, 'recorded_ns': 1.01e6}",
    "versions": "{'triton': '3.7.4'}",
}
"""Keys of the metadata that hold others, and how they are given."""


def recording_of(
    recorders: Recorder | Sequence[Recorder],
    *,
    kernel: str,
    roles: Sequence[str] = ("cta",),
    plain_ns: float | None = None,
    recorded_ns: float | None = None,
    **metadata: Any,
) -> Recording:
    """What one launch, or several, of a kernel did.

    Args:
        recorders: one a launch, each zero before it; their launches are waited for.
        kernel: its name. roles: the warpgroups of a CTA that record by themselves, in the order of their lanes: lane =
            cta · len(roles) + role. plain_ns, recorded_ns: how long it took without and with the recorder, so that the
            recording can say what recording cost.
        metadata: further keys, such as ``workload={"name": …}``; a mapping adds to the one that is made here.

    Raises:
        UserError: no recorder, one of level off, or none that any lane wrote to; a key that is no mapping, but must be.
    """
    from profiling.lane_rows import losses, rows_of, worst_clock

    launches = [recorders] if not isinstance(recorders, Sequence) else list(recorders)
    if not launches:
        raise UserError("recording_of: expected at least one recorder, got none")
    if any(recorder.buffer is None for recorder in launches):
        raise UserError("recording_of: a recorder of level off records nothing; allocate it with level cta or tile")
    for key, value in metadata.items():
        if key in MAPPINGS and not isinstance(value, dict):
            raise UserError(f"recording_of: {key} is {value!r}; expected a mapping, such as {MAPPINGS[key]}")
    levels = {recorder.level for recorder in launches}
    if len(levels) > 1:
        raise UserError(f"recording_of: recorders of one recording have one level, got {', '.join(sorted(levels))}")
    level = levels.pop()
    try:
        taken = [recorder.read() for recorder in launches]
    except ValueError as error:
        raise UserError(f"recording_of: {error}") from None
    import pandas as pd

    frames = [rows_of(lanes, roles, level, _numbered, index) for index, lanes in enumerate(taken)]
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "grade": "measured",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": _gpu(launches[0], median(lanes.clock.rate_ghz for lanes in taken)),
        "kernel": {"name": kernel},
        "level": level,
        "launches": len(taken),
        "events": losses(taken),
        "clock": worst_clock(taken),
    }
    if plain_ns is not None and recorded_ns is not None:
        facts["durations"] = {"plain_ns": plain_ns, "recorded_ns": recorded_ns}
    for key, value in metadata.items():
        both = isinstance(value, dict) and isinstance(facts.get(key), dict)
        facts[key] = {**facts[key], **value} if both else value
    return Recording(pd.concat(frames, ignore_index=True), facts, source=kernel)


def _numbered(tile: np.ndarray, cta: np.ndarray) -> dict[str, np.ndarray]:
    """The kernel's own numbers of its tiles; what a batch or a head is, only attention knows."""
    nothing = np.full(len(tile), -1)
    return {"tile": tile, "batch": nothing, "head": nothing, "block": nothing}


def _gpu(recorder: Recorder, rate_ghz: float) -> dict[str, Any]:
    import torch

    assert recorder.buffer is not None
    device = recorder.buffer.device
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "sm_count": properties.multi_processor_count,
        "capability": [properties.major, properties.minor],
        "clock_mhz": round(rate_ghz * 1000),
    }
