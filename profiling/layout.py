"""What a figure needs to know before it draws: lanes, joined rectangles, bins of lengths, padding."""

import heapq
from dataclasses import dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class PaddingWaste:
    """Tokens that a batch padded to its longest sequence would hold."""

    tokens: int
    padded: int

    @property
    def share(self) -> float:
        """Share of the padded batch that is padding; 0 for an empty batch."""
        return 1 - self.tokens / self.padded if self.padded else 0.0


def padding_waste(lens: np.ndarray) -> PaddingWaste:
    """Padding of int lengths [B] to their maximum."""
    lens = np.asarray(lens, dtype=np.int64)
    longest = int(lens.max()) if len(lens) else 0
    return PaddingWaste(tokens=int(lens.sum()), padded=longest * len(lens))


def length_bins(lens: np.ndarray, low: int, high: int) -> pd.DataFrame:
    """Counts of lengths in two bins an octave from low's octave to high's, and one for 0 that stands apart.

    Columns: place (two units an octave: log2 × 2), low (first length), high (one past the last), sequences,
    token_share. Bins that would hold no integer are left out, and a 0 bin without sequences.
    """
    first, last = int(np.floor(np.log2(low))), int(np.floor(np.log2(high))) + 1
    places = np.arange(2 * first, 2 * last)
    edges = np.ceil(2.0 ** (np.arange(2 * first, 2 * last + 1) / 2)).astype(np.int64)
    lens = np.asarray(lens, dtype=np.int64)
    positive = lens[lens > 0]
    which = np.searchsorted(edges, positive, side="right") - 1
    tokens = max(1, int(lens.sum()))
    table = pd.DataFrame(
        {
            "place": places.astype(float),
            "low": edges[:-1],
            "high": edges[1:],
            "sequences": np.bincount(which, minlength=len(places)),
            "token_share": np.bincount(which, weights=positive, minlength=len(places)) / tokens,
        }
    )
    table = table[table["high"] > table["low"]]
    empty = int((lens == 0).sum())
    if empty:
        zero = pd.DataFrame(
            {"place": [2.0 * first - 2], "low": [0], "high": [1], "sequences": [empty], "token_share": [0.0]}
        )
        table = pd.concat([zero, table], ignore_index=True)
    return table


def pack_lanes(spans: pd.DataFrame) -> pd.DataFrame:
    """Spans with a column `lane`: on each SM the lowest lane that is free at the span's start.

    Spans of one lane do not overlap, and an SM has as many lanes as it ever has spans at once.
    """
    spans = spans.sort_values(["sm", "start_ns", "end_ns"]).reset_index(drop=True)
    return spans.assign(lane=lowest_free(*(spans[name].to_numpy() for name in ("sm", "start_ns", "end_ns"))))


def lowest_free(place: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """For each span the lowest lane that is free at its start, int32 [n]; lanes begin anew at each place (an SM).

    Spans are ordered by place, then start.
    """
    lanes = np.zeros(len(start), dtype=np.int32)
    here: int | None = None
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for at, (where, begin, stop) in enumerate(zip(place.tolist(), start.tolist(), end.tolist(), strict=True)):
        if where != here:
            here, busy, free = where, [], []
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lanes[at] = heapq.heappop(free) if free else len(busy)  # without a free one, all that were opened are busy
        heapq.heappush(busy, (stop, int(lanes[at])))
    return lanes


def merge_short(spans: pd.DataFrame, most: int) -> tuple[pd.DataFrame, int]:
    """Join short neighbours on a lane until at most `most` rectangles remain.

    Neighbours shorter than a width and starting in the same slot of that width become one rectangle from the first's
    start to the last's end, its kv_len their mean. The width doubles until the number fits.

    Returns
    -------
    The rectangles with a column `tiles` (how many each stands for), and the width in ns: 0 when nothing was joined.
    """
    if len(spans) <= most:
        return spans.assign(tiles=1), 0
    length = spans["end_ns"] - spans["start_ns"]
    end = int(spans["end_ns"].max())
    width = max(1, end // (4 * most))
    while True:
        slot = np.where(length < width, spans["start_ns"] // width, -1 - np.arange(len(spans)))
        groups = spans.assign(slot=slot).groupby(["sm", "lane", "slot"], sort=False)
        if groups.ngroups <= most or width > end:
            break
        width *= 2
    first = groups.first().reset_index()
    joined = first.assign(
        start_ns=groups["start_ns"].min().to_numpy(),
        end_ns=groups["end_ns"].max().to_numpy(),
        kv_len=groups["kv_len"].mean().round().astype(np.int64).to_numpy(),
        tiles=groups.size().to_numpy(),
    )
    return joined.drop(columns="slot"), int(width)
