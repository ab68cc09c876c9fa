"""Recordings without a GPU: a list-scheduling model of a kernel over jagged lengths, and a very large generator."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from profiling.recording import Recording

SCHEDULES = ("grid", "static", "balanced", "dynamic", "balanced-dynamic")

_RAMP_NS = 1500.0  # the launch reaches the last SM this long after the first
_FETCH_NS = {"grid": 0.0, "static": 60.0, "balanced": 90.0, "dynamic": 420.0, "balanced-dynamic": 450.0}
_PROLOGUE_NS = 700.0
_EPILOGUE_NS = 900.0
_ZERO_NS = 500.0
_BLOCK_NS = 620.0
_NOISE = 0.03


class Tiles(NamedTuple):
    """The tiles of a problem in natural order (batch, block, head), int64 [T] each; `steps` are the inner loop's."""

    batch: np.ndarray
    head: np.ndarray
    block: np.ndarray
    steps: np.ndarray


def synthetic_recording(
    q_lens: int | Sequence[int] | np.ndarray,
    kv_lens: Sequence[int] | np.ndarray,
    *,
    sms: int = 16,
    schedule: str = "static",
    heads: int = 2,
    block: int = 128,
    level: str = "tile",
    seed: int = 0,
    direction: str = "forward",
    launches: int = 1,
    ctas_per_sm: int | None = None,
    name: str = "synthetic",
) -> Recording:
    """A modelled recording: tiles go in the schedule's order to the CTA that comes free, or to whom they belong.

    `q_lens` as one integer is broadcast Q. Forward: a tile a block of queries, cost rising with the KV length;
    backward: a tile a block of keys. `ctas_per_sm` defaults to 2 for `grid`, so that CTAs overlap there, and to 1
    otherwise.
    """
    kv = np.asarray(kv_lens, dtype=np.int64)
    q = np.broadcast_to(np.asarray(q_lens, dtype=np.int64), kv.shape)
    broadcast = np.ndim(q_lens) == 0
    per_sm = ctas_per_sm or (2 if schedule == "grid" else 1)
    tiles = _tiles(q, kv, heads, block, direction)
    frames = [
        _launch(tiles, launch, sms, per_sm, schedule, level, np.random.default_rng(seed + launch))
        for launch in range(launches)
    ]
    events = pd.concat(frames, ignore_index=True)
    metadata = _metadata(q, kv, broadcast, sms, schedule, heads, block, level, seed, direction, launches, name)
    ctas = int(events["cta"].max()) + 1
    metadata["kernel"]["num_ctas"] = ctas
    metadata["events"] = {"written": len(events), "lost": 0, "lost_by_lane": {}}
    makespan = float(events.groupby("launch")["end_ns"].max().median())
    metadata["durations"] = {
        "plain_ns": round(makespan * 0.985, 1),
        "plain_iqr_ns": round(makespan * 0.004, 1),
        "recorded_ns": makespan,
        "recorded_iqr_ns": round(makespan * 0.005, 1),
        "repeats": 20,
    }
    metadata["clock"] = {
        "rate_ghz": 1.98,
        "rate_spread_ppm": 3.0,
        "residual_ns_max": 80.0,
        "sms_fitted": sms,
        "sms_median_rate": 0,
        "order_violations": 0,
    }
    return Recording(events, metadata, source=name)


def _tiles(q: np.ndarray, kv: np.ndarray, heads: int, block: int, direction: str) -> Tiles:
    outer, inner = (q, kv) if direction == "forward" else (kv, q)
    blocks = -(-outer // block)
    batch = np.repeat(np.arange(len(q)), blocks * heads)
    rank = np.arange(len(batch)) - np.repeat(np.cumsum(blocks * heads) - blocks * heads, blocks * heads)
    return Tiles(batch, rank % heads, rank // heads, -(-inner[batch] // block))


def _order(tiles: Tiles, schedule: str) -> np.ndarray:
    if not schedule.startswith("balanced"):
        return np.arange(len(tiles.steps))
    order = np.argsort(-tiles.steps, kind="stable")
    return order[tiles.steps[order] > 0]


def _assign(
    order: np.ndarray, cost: np.ndarray, ready: np.ndarray, schedule: str, fetch: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each tile of `order`: the slot (an SM's place for a CTA) that runs it, and the time at which it starts."""
    slots = len(ready)
    position = np.arange(len(order))
    slot = position % slots
    if schedule == "balanced":
        slot = np.where((position // slots) % 2 == 0, slot, slots - 1 - slot)
    start = np.zeros(len(order))
    if schedule in ("static", "balanced"):
        free = ready.copy()
        for i, s in enumerate(slot):
            start[i] = free[s] + fetch[i]
            free[s] = start[i] + cost[order[i]]
        return slot, start
    heap = [(float(t), s) for s, t in enumerate(ready)]
    heapq.heapify(heap)
    for i, tile in enumerate(order):
        free_at, s = heap[0]
        slot[i], start[i] = s, free_at + fetch[i]
        extra = _PROLOGUE_NS + _EPILOGUE_NS if schedule == "grid" else 0.0
        heapq.heapreplace(heap, (float(start[i] + cost[tile] + extra), s))
    return slot, start


def _launch(
    tiles: Tiles, launch: int, sms: int, per_sm: int, schedule: str, level: str, rng: np.random.Generator
) -> pd.DataFrame:
    order = _order(tiles, schedule)
    noise = 1 + _NOISE * rng.standard_normal(len(tiles.steps))
    cost = np.where(tiles.steps > 0, (1100 + _BLOCK_NS * tiles.steps) * np.abs(noise), _ZERO_NS * np.abs(noise))
    slots = sms * per_sm
    slot_sm = np.arange(slots) % sms
    born = np.sort(rng.uniform(0, _RAMP_NS, slots))
    born -= born[0]
    fetch = _FETCH_NS[schedule] * rng.uniform(0.7, 1.3, len(order))
    slot, start = _assign(order, cost, born + _PROLOGUE_NS, schedule, fetch)
    end = start + cost[order]
    if schedule == "grid":
        cta, cta_start, cta_end = np.arange(len(order)), start - _PROLOGUE_NS, end + _EPILOGUE_NS
        cta_sm = slot_sm[slot]
    else:
        cta, cta_start, cta_sm = slot, born, slot_sm
        cta_end = born + _PROLOGUE_NS + _EPILOGUE_NS
        np.maximum.at(cta_end, slot, end + _EPILOGUE_NS)
    rows = [_rows(launch, np.arange(len(cta_sm)), cta_sm, "cta", "cta", cta_start, cta_end)]
    if level != "cta":
        for event, mask in (("tile", tiles.steps[order] > 0), ("zero", tiles.steps[order] == 0)):
            picked = np.flatnonzero(mask)
            rows.append(_tile_rows(launch, cta, slot_sm[slot], "cta", event, start, end, order, tiles, picked))
    if level == "wait":
        rows += _wait_rows(launch, cta, slot_sm[slot], start, end, order, tiles, rng)
    return pd.concat([frame for frame in rows if len(frame)], ignore_index=True)


def _wait_rows(launch, cta, sm, start, end, order, tiles, rng) -> list[pd.DataFrame]:  # type: ignore[no-untyped-def]
    rows = []
    picked = np.flatnonzero(tiles.steps[order] > 0)
    for role, event, share in (
        ("load", "wait:kv_empty", 0.7),
        ("mma", "wait:kv_full", 0.1),
        ("softmax", "wait:qk", 0.2),
    ):
        length = (end - start) * share * rng.uniform(0.8, 1.0, len(start))
        at = start + (end - start - length) * rng.uniform(0, 1, len(start))
        frame = _tile_rows(launch, cta, sm, role, event, at, at + length, order, tiles, picked)
        frame["stage"] = np.arange(len(frame)) % 2
        rows.append(frame)
    return rows


def _tile_rows(launch, cta, sm, role, event, start, end, order, tiles, picked) -> pd.DataFrame:  # type: ignore[no-untyped-def]
    frame = _rows(launch, cta[picked], sm[picked], role, event, start[picked], end[picked])
    tile = order[picked]
    return frame.assign(tile=tile, batch=tiles.batch[tile], head=tiles.head[tile], block=tiles.block[tile])


def _rows(launch, cta, sm, role, event, start, end) -> pd.DataFrame:  # type: ignore[no-untyped-def]
    columns: dict[str, Any] = {"launch": launch, "cta": cta, "sm": sm, "role": role, "event": event}
    columns |= dict.fromkeys(("tile", "batch", "head", "block", "stage"), -1)
    columns |= {"start_ns": np.rint(start).astype(np.int64), "end_ns": np.rint(end).astype(np.int64)}
    return pd.DataFrame(columns, index=range(len(cta)))


def _metadata(q, kv, broadcast, sms, schedule, heads, block, level, seed, direction, launches, name) -> dict[str, Any]:  # type: ignore[no-untyped-def]
    flop = 4.0 * heads * 128 * float((q * kv).sum()) * (1.0 if direction == "forward" else 2.5)
    return {
        "schema": "1.0",
        "grade": "modelled",
        "created": "2026-01-01T00:00:00+00:00",
        "gpu": {
            "name": f"model of {sms} SMs",
            "sm_count": sms,
            "capability": [9, 0],
            "clock_mhz": 1980,
            "timer_resolution_ns": 32,
        },
        "versions": {"torch": None, "triton": None, "driver": None, "jfa": "0.1.0"},
        "kernel": {
            "name": f"jfa_{direction}",
            "impl": "model",
            "direction": direction,
            "schedule": schedule,
            "arch": "sm_90",
            "config": {"block_q": block, "block_kv": block},
            "config_hash": "0000",
            "plain_config_hash": "0000",
        },
        "workload": {
            "name": name,
            "seed": seed,
            "heads": heads,
            "heads_kv": heads,
            "head_dim": 128,
            "dtype": "bfloat16",
            "broadcast_q": bool(broadcast),
            "causal": False,
            "window": None,
            "q_lens": q.tolist(),
            "kv_lens": kv.tolist(),
            "flop": flop,
        },
        "level": level,
        "launches": launches,
        "command": "tests/synthetic.py",
    }


def large_recording(spans: int = 10_000_000, *, sms: int = 132, launches: int = 10, seed: int = 0) -> Recording:
    """About `spans` tile spans in recording order, made by vectorised sums: as many a CTA, one CTA an SM."""
    rng = np.random.default_rng(seed)
    each = spans // (sms * launches)
    length = rng.integers(2_000, 20_000, (launches, sms, each), dtype=np.int64)
    gap = rng.integers(50, 500, (launches, sms, each), dtype=np.int64)
    end = np.cumsum(length + gap, axis=2)
    start = end - length
    shape = start.shape
    batches = 1024
    tile = np.broadcast_to(np.arange(each, dtype=np.int32) * sms, shape) + np.arange(sms, dtype=np.int32)[:, None]
    columns = {
        "launch": np.broadcast_to(np.arange(launches, dtype=np.int32)[:, None, None], shape).ravel(),
        "cta": np.broadcast_to(np.arange(sms, dtype=np.int32)[:, None], shape).ravel(),
        "sm": np.broadcast_to(np.arange(sms, dtype=np.int16)[:, None], shape).ravel(),
        "role": pd.Categorical.from_codes(np.zeros(start.size, np.int8), ["cta"]),
        "event": pd.Categorical.from_codes(np.zeros(start.size, np.int8), ["tile"]),
        "tile": tile.ravel(),
        "batch": (tile // 8 % batches).ravel(),
        "head": (tile % 4).ravel(),
        "block": (tile // 4 % 2).ravel(),
        "stage": np.full(start.size, -1, np.int32),
        "start_ns": start.ravel(),
        "end_ns": end.ravel(),
    }
    lens = rng.integers(16, 8192, batches)
    metadata = _metadata(
        np.full(batches, 256), lens, True, sms, "static", 4, 128, "tile", seed, "forward", launches, "large"
    )
    metadata["kernel"]["num_ctas"] = sms
    metadata["events"] = {"written": start.size, "lost": 0, "lost_by_lane": {}}
    return Recording(pd.DataFrame(columns, copy=False), metadata, source="large")
