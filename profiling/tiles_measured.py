"""One launch's tiles with what each cost, in the natural order: what replays deal again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiling.errors import RecordingError, UserError
from profiling.recording import Recording
from profiling.sm_time import summary
from profiling.text import plain
from profiling.tiles import tile_cost

DIRECTIONS = ("forward", "backward")
MOST_TILES = 100_000_000
"""Some 10 GB of arrays."""


@dataclass(frozen=True)
class Shape:
    """What, beside lengths, makes the tiles of a launch.

    Attributes:
        direction: forward tiles own a block of queries, backward tiles a block of keys.
        block: rows of a tile; heads: tiles of one block, side by side in every order.
        window: (left, right) columns that a row sees beside its own, aligned to the ends, −1 for all.
    """

    direction: str
    block: int
    heads: int
    window: tuple[int, int] = (-1, -1)

    def layout(self, q_lens: np.ndarray, kv_lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(columns, place) of each tile of these lengths: int64 [T] each, in natural order (batch, block, head).

        Columns are those that at least one row of the tile sees, what schedules sort by; the place is the number of the
        block in its sequence. UserError: more than MOST_TILES.
        """
        forward = self.direction == "forward"
        rows, columns = (q_lens, kv_lens) if forward else (kv_lens, q_lens)
        blocks = -(-rows // self.block)
        if (count := int(blocks.sum()) * self.heads) > MOST_TILES:
            raise UserError(
                f"lengths: make {count:,} tiles, expected {MOST_TILES:,} at most; give fewer or shorter ones"
            )
        batch = np.repeat(np.arange(len(rows)), blocks)
        place = np.arange(len(batch)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        first, rows, columns = place * self.block, rows[batch], columns[batch]
        shift, (left, right) = columns - rows, self.window
        before, after = (left, right) if forward else (right, left)
        low = np.maximum(first + shift - before, 0) if before >= 0 else np.zeros_like(first)
        last = np.minimum(first + self.block, rows) + shift + after
        high = np.minimum(columns, last) if after >= 0 else columns
        return np.repeat(np.maximum(high - low, 0), self.heads), np.repeat(place, self.heads)


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tiles of one launch in natural order.

    Attributes:
        cost: float64 [T], ns; of tiles without work as measured, or what clearing their rows took a tile.
        columns, place: int64 [T], as of `Shape.layout`.
        sms: SMs of the recording; ramp_ns: until an SM's first tile, on average; fetch_ns: of a tile, as measured.
        schedule: the recording's; measured_ns: its makespan, NaN where the costs are modelled.
        cluster: 2 where its CTAs took neighbouring blocks in pairs.
    """

    shape: Shape
    cost: np.ndarray
    columns: np.ndarray
    place: np.ndarray
    sms: int
    ramp_ns: float
    fetch_ns: float
    schedule: str
    measured_ns: float
    cluster: int = 1


def tiles_of(recording: Recording) -> Tiles:
    """The tiles of the launch of median makespan.

    Raises:
        RecordingError: no tiles, lengths missing, events lost, or sequences cut into parts, whose pieces have no length
            of their own to be sorted by; or a kernel that no schedule deals to.
    """
    if recording.get("kernel.config.kind") == "HopperResidentConfig":
        raise RecordingError(
            f"{recording.source}: its CTAs take equal shares of the tiles whatever the schedule, so that there is "
            "nothing to replay; record --impl triton, or jagged queries"
        )
    if recording.get("kernel.split"):
        raise RecordingError(
            f"{recording.source}: its long sequences are cut into parts; replay one without cuts (record --impl triton)"
        )
    shape = _shape(recording)
    totals = summary(recording).sort_values("makespan_ns", kind="stable")
    launch = totals.iloc[len(totals) // 2]
    costs = tile_cost(recording)
    costs = costs[costs["launch"] == launch["launch"]]
    q_lens, kv_lens = (np.asarray(recording.get(f"workload.{which}_lens"), dtype=np.int64) for which in ("q", "kv"))
    columns, place = shape.layout(q_lens, kv_lens)
    cost, at = np.full(len(columns), np.nan), costs["tile"].to_numpy()
    if len(at) and int(at.max()) >= len(cost):
        raise RecordingError(
            f"{recording.source}: has a tile {at.max():,}; its lengths and block size make only {len(cost):,} tiles"
        )
    cost[at] = costs["cost_ns"].to_numpy()
    missing = np.isnan(cost)
    if (missing & (columns > 0)).any():
        lacking = int((missing & (columns > 0)).sum())
        part = recording.get("excerpt")
        why = f": it is an excerpt ({plain(part, 80)}); give a whole recording, as `record` writes it" if part else ""
        raise RecordingError(f"{recording.source}: {lacking:,} of {len(cost):,} tiles with work were not recorded{why}")
    if missing.any():
        cost[missing] = _cleared(recording, int(launch["launch"])) / missing.sum()
    sms = recording.sm_count - recording.sms_left
    return Tiles(
        shape=shape,
        cost=cost,
        columns=columns,
        place=place,
        sms=sms,
        ramp_ns=float(launch["ramp_ns"]) / sms,
        fetch_ns=float(launch["fetch_ns"]) / max(float(launch["tiles"]), 1.0),
        schedule=recording.schedule,
        measured_ns=float(launch["makespan_ns"]),
        cluster=int(recording.get("kernel.blocks") or 1),
    )


def _shape(recording: Recording) -> Shape:
    forward = recording.direction == "forward"
    block = recording.get("kernel.config.block_q" if forward else "kernel.config.block_kv")
    heads = recording.get("workload.heads" if forward else "workload.heads_kv")
    if recording.direction not in DIRECTIONS or not isinstance(block, int) or not isinstance(heads, int):
        raise RecordingError(
            f"{recording.source}: does not say direction, block size and heads (kernel.direction, kernel.config, "
            "workload.heads), without which its tiles cannot be dealt again; `record` writes them"
        )
    if block < 1 or heads < 1:
        raise RecordingError(f"{recording.source}: block size {block} and heads {heads}; expected 1 or more each")
    left, right = recording.get("workload.window") or (-1, -1)
    return Shape(recording.direction, block, heads, (int(left), 0 if recording.get("workload.causal") else int(right)))


def _cleared(recording: Recording, launch: int) -> float:
    """Time that CTAs spent clearing rows without work, ns over all of them."""
    events = recording.events
    own = events[(events["launch"] == launch) & (events["event"] == "zero")]
    return float((own["end_ns"] - own["start_ns"]).sum())
