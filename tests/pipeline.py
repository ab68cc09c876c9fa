"""A modelled recording at level wait: one role loads into a ring of buffers, others consume, and the truth is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from profiling.recording import SCHEMA, Recording

ROLES = ("load", "mma0", "mma1")


@dataclass(frozen=True)
class Pipeline:
    """How long things take, ns: issuing a load, its flight, each consumer's use of a buffer and its work behind it."""

    stages: int = 2
    issue: int = 10
    flight: int = 100
    use: tuple[int, int] = (50, 50)
    work: tuple[int, int] = (5, 5)
    steps: Sequence[int] = (4, 3)
    """Buffers that each tile consumes."""
    ctas: int = 2
    slower: int | None = None
    """Where given, two CTAs load each buffer for both, and the second's consumers use it for that much longer."""


def recording(pipeline: Pipeline, **metadata: object) -> Recording:
    """Run the pipeline in every CTA, each a little later than the one before."""
    rows: list[tuple] = []
    if pipeline.slower is not None:
        rows = _pair(pipeline, pipeline.slower)
    else:
        for cta in range(pipeline.ctas):
            rows += _cta(pipeline, cta)
    columns = ["cta", "role", "event", "tile", "stage", "start_ns", "end_ns"]
    frame = pd.DataFrame(rows, columns=columns).assign(launch=0, batch=-1, head=-1, block=-1)
    frame["sm"] = frame["cta"]
    facts = {
        "schema": SCHEMA,
        "grade": "modelled",
        "level": "wait",
        "gpu": {"name": "a model", "sm_count": pipeline.ctas},
        "kernel": {"name": "jfa_forward_hopper", "direction": "forward", "schedule": "static", "impl": "hopper"},
        "workload": {"name": "pipeline"},
        "events": {"written": len(rows), "lost": 0, "lost_by_lane": {}},
    }
    return Recording(frame, {**facts, **metadata}, source="pipeline")


def _cta(p: Pipeline, cta: int) -> list[tuple]:
    """The rows of one CTA: waits of all roles, tiles of the consumers, lives."""
    begin = 7 * cta
    rows: list[tuple] = []
    arrived: list[int] = []  # when each buffer's load is there
    released: list[list[int]] = [[], []]  # when each consumer let go of each buffer
    consumers = [begin, begin]
    load = begin
    tiles = [(tile, step) for tile, steps in enumerate(p.steps) for step in range(steps)]
    tile_starts: list[dict[int, int]] = [{}, {}]
    tile_ends: list[dict[int, int]] = [{}, {}]
    for number, (tile, _) in enumerate(tiles):
        stage = number % p.stages
        free = max(done[number - p.stages] for done in released) if number >= p.stages else load
        got = max(load, free)
        rows.append((cta, "load", "wait:k_empty", tile, stage, load, got))
        load = got + p.issue
        arrived.append(load + p.flight)
        for which in (0, 1):
            at = consumers[which]
            tile_starts[which].setdefault(tile, at)
            ready = max(at, arrived[number])
            rows.append((cta, ROLES[1 + which], "wait:k_full", tile, stage, at, ready))
            released[which].append(ready + p.use[which])
            consumers[which] = ready + p.use[which] + p.work[which]
            tile_ends[which][tile] = consumers[which]
    for which in (0, 1):
        role = ROLES[1 + which]
        rows += [(cta, role, "tile", t, -1, tile_starts[which][t], tile_ends[which][t]) for t in tile_starts[which]]
        rows.append((cta, role, "cta", -1, -1, begin, consumers[which] + 3))
    rows.append((cta, "load", "cta", -1, -1, begin, load))
    return rows


def _pair(p: Pipeline, slower: int) -> list[tuple]:
    """The rows of two CTAs of which each brings half of a buffer to both, when all four consumers have let it go."""
    rows: list[tuple] = []
    load, consumers = [0, 0], [[0, 0], [0, 0]]
    released: list[list[int]] = []
    tiles = [(tile, step) for tile, steps in enumerate(p.steps) for step in range(steps)]
    spans: dict[tuple[int, int, int], tuple[int, int]] = {}
    for number, (tile, _) in enumerate(tiles):
        stage = number % p.stages
        for cta in (0, 1):
            got = max(load[cta], *released[number - p.stages]) if number >= p.stages else load[cta]
            rows.append((cta, "load", "wait:k_empty", tile, stage, load[cta], got))
            load[cta] = got + p.issue
        arrived = max(load) + p.flight
        released.append([])
        for cta in (0, 1):
            for which in (0, 1):
                at = consumers[cta][which]
                ready = max(at, arrived)
                rows.append((cta, ROLES[1 + which], "wait:k_full", tile, stage, at, ready))
                let_go = ready + p.use[which] + slower * cta
                released[number].append(let_go)
                consumers[cta][which] = let_go + p.work[which]
                begin, _ = spans.get((cta, which, tile), (at, 0))
                spans[cta, which, tile] = begin, consumers[cta][which]
    rows += [(cta, ROLES[1 + which], "tile", tile, -1, *span) for (cta, which, tile), span in spans.items()]
    for cta in (0, 1):
        rows.append((cta, "load", "cta", -1, -1, 0, load[cta]))
        rows += [(cta, ROLES[1 + which], "cta", -1, -1, 0, consumers[cta][which]) for which in (0, 1)]
    return rows
