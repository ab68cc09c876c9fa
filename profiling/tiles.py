"""What single tiles cost, and which tiles and sequences caused a launch's tail."""

from __future__ import annotations

import numpy as np
import pandas as pd

from profiling.errors import RecordingError
from profiling.launches import basis_of, blocks_of, labelled, one_launch, own_sms
from profiling.recording import Recording
from profiling.text import count, coverage

TILE_COLUMNS = ("tile", "batch", "head", "block", "kv_len", "q_len")
COST_COLUMNS = ("launch", *TILE_COLUMNS, "cost_ns")
TAIL_COLUMNS = (*TILE_COLUMNS, "cta", "sm", "start_ns", "end_ns", "tail_ns", "late_ns")


def tail_tiles(recording: Recording, launch: int = 0, count: int | None = 10) -> pd.DataFrame:
    """The tiles that still ran when perfectly spread work (work_ns / SMs) would have ended, the latest end first.

    Returns:
        tile, batch, head, block, kv_len, q_len, cta, sm, start_ns, end_ns; tail_ns, how long past that moment it ended;
        late_ns, how long past that moment it ran. kv_len and q_len are −1 where the metadata has no lengths. `count`
        None gives all. attrs: fair_ns (that moment), late_tiles (how many there are in all), and those of `sm_time`.

    Raises:
        RecordingError: as `sm_time`, recorded at level cta, or events lost (a full lane keeps its first, so just the
            tail is missing).
        UserError: no such launch.
    """
    late, fair = _late_tiles(recording, launch)
    result = late if count is None else late.head(count)
    result = labelled(result[list(TAIL_COLUMNS)].reset_index(drop=True), recording)
    result.attrs |= {"fair_ns": fair, "late_tiles": len(late)}
    return result


def tail_sequences(recording: Recording, launch: int = 0, count: int | None = 10) -> pd.DataFrame:
    """The sequences to whom the late tiles of `tail_tiles` belong, the most time past that moment first.

    Tiles of no sequence, as a kernel other than attention has them, are left out.

    Returns:
        batch, kv_len, q_len, tiles (late ones), late_ns (their time past the moment, summed), late_share (of all late
        time), tail_ns (the latest end past it). attrs: fair_ns, late_tiles, and those of `sm_time`.

    Raises:
        RecordingError, UserError: as `tail_tiles`.
    """
    late, fair = _late_tiles(recording, launch)
    groups = late[late["batch"] >= 0].groupby("batch", as_index=False, sort=True)
    result = groups.agg(
        kv_len=("kv_len", "first"),
        q_len=("q_len", "first"),
        tiles=("tile", "nunique"),
        late_ns=("late_ns", "sum"),
        tail_ns=("tail_ns", "max"),
    )
    result.insert(5, "late_share", result["late_ns"] / max(int(late["late_ns"].sum()), 1))
    result = result.sort_values(["late_ns", "batch"], ascending=[False, True], ignore_index=True)
    result = labelled(result if count is None else result.head(count), recording)
    result.attrs |= {"fair_ns": fair, "late_tiles": len(late)}
    return result


def tile_spans(recording: Recording, launch: int = 0) -> pd.DataFrame:
    """Where and when each tile of a launch ran, as far as it was recorded: for Gantt charts.

    Returns:
        A row a (tile, CTA): launch, tile, batch, head, block, kv_len (−1 where the metadata has no lengths), cta, sm,
        start_ns, end_ns; spans of several roles merged. attrs as of `sm_time`.

    Raises:
        RecordingError: as `sm_time`, or recorded at level cta.
        UserError: no such launch.
    """
    spans = _tile_spans(recording, one_launch(recording, launch).rows)
    known = recording.get("workload.kv_lens") is not None
    spans["kv_len"] = _of_batch(recording, "kv", spans["batch"].to_numpy(), "the tiles of a launch") if known else -1
    return labelled(spans, recording)


def tile_cost(recording: Recording, *, allow_partial: bool = False) -> pd.DataFrame:
    """What each tile cost beside its sequence's lengths, for scatter plots and for replays under other schedules.

    Args:
        allow_partial: take a recording that lost events, and give the tiles that it has; a replay must not.

    Returns:
        A row a (launch, tile), ordered so: launch, tile, batch, head, block, kv_len, q_len, cost_ns int64. A tile that
        several roles record costs from its first start to its last end; one that several CTAs share, their sum. attrs
        as of `sm_time`.

    Raises:
        RecordingError: recorded at level cta, lengths missing in the metadata, events lost without `allow_partial`.
    """
    if not allow_partial:
        _refuse_loss(recording, "the costs of all tiles")
    spans = _tile_spans(recording, slice(None))
    spans["cost_ns"] = spans["end_ns"] - spans["start_ns"]
    keys = ["launch", "tile"]
    packed = (spans["launch"].to_numpy().astype(np.int64) << 32) | spans["tile"].to_numpy()
    order = np.argsort(packed, kind="stable")
    packed = packed[order]
    spans = spans.take(order)
    if (packed[1:] == packed[:-1]).any():
        same = {name: (name, "first") for name in ("batch", "head", "block")}
        spans = spans.groupby(keys, as_index=False, sort=False).agg(**same, cost_ns=("cost_ns", "sum"))
    for which in ("kv", "q"):
        spans[f"{which}_len"] = _of_batch(recording, which, spans["batch"].to_numpy(), "the cost of tiles by length")
    return labelled(spans[list(COST_COLUMNS)].reset_index(drop=True), recording)


def _late_tiles(recording: Recording, launch: int) -> tuple[pd.DataFrame, float]:
    _refuse_loss(recording, "what caused the tail")
    rows = one_launch(recording, launch)
    blocks = blocks_of(rows)
    fair = float((blocks.end - blocks.start).sum()) / own_sms(recording, len(rows.sms))
    spans = _tile_spans(recording, rows.rows, after=fair)
    spans["tail_ns"] = np.ceil(spans["end_ns"] - fair).astype(np.int64)
    spans["late_ns"] = np.minimum(spans["tail_ns"], spans["end_ns"] - spans["start_ns"])
    for which in ("kv", "q"):
        known = recording.get(f"workload.{which}_lens") is not None
        batch = spans["batch"].to_numpy()
        spans[f"{which}_len"] = _of_batch(recording, which, batch, "what caused the tail") if known else -1
    return spans.sort_values(["end_ns", "tile"], ascending=[False, True]), fair


def _tile_spans(recording: Recording, rows: slice, after: float = -1.0) -> pd.DataFrame:
    """A row a (launch, tile, CTA) that ends later than `after`: the tile spans, those of several roles merged."""
    events = recording.events
    if "tile" not in events["event"].cat.categories:
        if basis_of(recording) == "cta":
            raise RecordingError(f"{recording.source}: recorded at level cta, without tiles; record with --level tile")
        picked = np.zeros(0, dtype=np.int64)
    else:
        code = list(events["event"].cat.categories).index("tile")
        in_rows = (events["event"].cat.codes.to_numpy()[rows] == code) & (events["end_ns"].to_numpy()[rows] > after)
        picked = np.flatnonzero(in_rows) + (rows.start or 0)
    names = ["launch", "tile", "batch", "head", "block", "cta", "sm", "role", "start_ns", "end_ns"]
    spans = pd.DataFrame({name: events[name].array[picked] for name in names}, copy=False)
    if len(spans) and int(spans["tile"].min()) < 0:
        raise RecordingError(f"{recording.source}: tile spans without a tile number; column 'tile' must be 0 or more")
    if spans["role"].nunique() > 1:
        keys = ["launch", "tile", "cta"]
        same = {name: (name, "first") for name in ("batch", "head", "block", "sm")}
        ends = {"start_ns": ("start_ns", "min"), "end_ns": ("end_ns", "max")}
        spans = spans.groupby(keys, as_index=False, sort=False).agg(**same, **ends)
    return spans.drop(columns="role", errors="ignore")


def _of_batch(recording: Recording, which: str, batch: np.ndarray, why: str) -> np.ndarray:
    """The length of each row's sequence, int64 [rows]."""
    lengths = recording.lengths(which, why)
    if len(batch) and not (0 <= int(batch.min()) and int(batch.max()) < len(lengths)):
        raise RecordingError(
            f"{recording.source}: column 'batch' spans {int(batch.min())} to {int(batch.max())}, but metadata key "
            f"'workload.{which}_lens' has {len(lengths)} lengths"
        )
    return lengths[batch]


def _refuse_loss(recording: Recording, wanted: str) -> None:
    if recording.lost:
        lost, share = count(recording.lost, "event"), coverage(recording.coverage())
        raise RecordingError(
            f"{recording.source}: {lost} lost (coverage {share}), so {wanted} cannot be told; "
            "record with more room a lane, or at a coarser level"
        )
