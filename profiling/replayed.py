"""A replay as a recording of grade "modelled": what the other analyses and figures take."""

from __future__ import annotations

import numpy as np
import pandas as pd

from profiling.recording import SCHEMA, Recording
from profiling.schedules import REPLAY_ERROR, timeline
from profiling.tiles_measured import tiles_of


def replayed(recording: Recording, schedule: str) -> Recording:
    """The recording's launch of median makespan as it would run under another schedule: a CTA an SM, one launch.

    Grade: modelled, with each tile at its measured cost; metadata key ``model`` says from which recording.

    Raises:
        UserError: unknown schedule.
        RecordingError: its tiles cannot be dealt again (see `profiling.tiles_measured.tiles_of`).
    """
    tiles = tiles_of(recording)
    dealt = timeline(tiles, schedule)
    ends = np.full(dealt.workers, tiles.ramp_ns)
    np.maximum.at(ends, dealt.worker, dealt.end_ns)
    rows = [_rows("tile", dealt.worker, dealt.start_ns, dealt.end_ns, **_places(recording, dealt.tile, tiles.place))]
    workers = np.arange(dealt.workers)
    if dealt.cleared_ns:
        rows.append(_rows("zero", workers, ends, ends + dealt.cleared_ns))
    rows.append(_rows("cta", workers, np.zeros(dealt.workers), ends + dealt.cleared_ns))
    events = pd.concat(rows, ignore_index=True)
    about = {"from": recording.title(), "measured_under": recording.schedule, "largest_error": REPLAY_ERROR}
    metadata = {
        "schema": SCHEMA,
        "grade": "modelled",
        "gpu": recording.get("gpu"),
        "kernel": {**recording.get("kernel", {}), "schedule": schedule},
        "workload": recording.get("workload"),
        "level": "tile",
        "launches": 1,
        "events": {"written": len(events), "lost": 0},
        "model": about,
    }
    return Recording(events, metadata, source=f"replay under {schedule} of {recording.source}")


def _places(recording: Recording, tile: np.ndarray, place: np.ndarray) -> dict[str, np.ndarray]:
    """tile, batch, head and block of tiles of the natural order (batch, block, head)."""
    forward = recording.direction == "forward"
    heads = int(recording.get("workload.heads" if forward else "workload.heads_kv"))
    block = int(recording.get("kernel.config.block_q" if forward else "kernel.config.block_kv"))
    rows = recording.lengths("q" if forward else "kv", "a replay")
    batch = np.repeat(np.arange(len(rows)), -(-rows // block) * heads)
    return {"tile": tile, "batch": batch[tile], "head": tile % heads, "block": place[tile]}


def _rows(event: str, worker: np.ndarray, start: np.ndarray, end: np.ndarray, **places: np.ndarray) -> pd.DataFrame:
    rows = pd.DataFrame({"cta": worker, "sm": worker, "start_ns": np.rint(start), "end_ns": np.rint(end)})
    rows = rows.astype(np.int64).assign(launch=0, role="cta", event=event, stage=-1)
    return rows.assign(**{name: places.get(name, -1) for name in ("tile", "batch", "head", "block")})
