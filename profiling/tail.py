"""What caused a tail: the SM that ended last, how much more than its share it had to do, and for which sequence."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from profiling.launches import own_sms
from profiling.recording import Recording
from profiling.sm_time import sm_time
from profiling.text import count, duration
from profiling.tiles import tail_sequences, tile_spans


@dataclass(frozen=True)
class LastSM:
    """The SM whose work ended last in one launch, and the sequence that took most of its time.

    Attributes:
        sm: its number.
        end_ns: when its last work ended, ns from the launch's first start.
        work_ns: how long it worked; fair_ns: what each SM would with perfectly spread work.
        tiles: how many tiles it ran.
        batch, kv_len: the sequence that took most of its tiles' time, and its KV length (−1 where not known, the batch
            too where the kernel's tiles are of no sequence).
        sequence_tiles: how many of the SM's tiles are that sequence's.
        sequence_share: that sequence's part of the time of all the SM's tiles, in [0, 1].
    """

    sm: int
    end_ns: int
    work_ns: int
    fair_ns: float
    tiles: int
    batch: int
    kv_len: int
    sequence_tiles: int
    sequence_share: float


def last_sm(recording: Recording, launch: int = 0) -> LastSM | None:
    """The SM that ended last; None where no SM ran a tile.

    Raises:
        RecordingError: as `sm_time`, or recorded at level cta. UserError: no such launch.
    """
    spans = tile_spans(recording, launch)
    if spans.empty:
        return None
    times = sm_time(recording)
    times = times[times["launch"] == launch]
    last = int(spans["sm"].to_numpy()[spans["end_ns"].to_numpy().argmax()])
    row = times[times["sm"] == last].iloc[0]
    mine = spans[spans["sm"] == last]
    cost = (mine["end_ns"] - mine["start_ns"]).groupby(mine["batch"]).sum()
    batch = int(cost.index.to_numpy()[cost.to_numpy().argmax()])
    own = mine[mine["batch"] == batch]
    return LastSM(
        sm=last,
        end_ns=int(mine["end_ns"].max()),
        work_ns=int(row["work_ns"]),
        fair_ns=float(times["work_ns"].sum()) / own_sms(recording, len(times)),
        tiles=int(mine["tile"].nunique()),
        batch=batch,
        kv_len=int(own["kv_len"].iloc[0]),
        sequence_tiles=int(own["tile"].nunique()),
        sequence_share=float(cost.max() / max(int(cost.sum()), 1)),
    )


@dataclass(frozen=True)
class Tail:
    """What ran past the moment at which perfectly spread work would have ended.

    Attributes:
        fair_ns: that moment, ns from the launch's first start.
        tiles: how many tiles ran past it.
        sequences: `tail_sequences` of all of them.
        last: the SM that ended last; None where no SM ran a tile.
        cleared: words for the clearing of empty tiles' output, where that ran past it; else empty.
    """

    fair_ns: float
    tiles: int
    sequences: pd.DataFrame
    last: LastSM | None
    cleared: str

    @property
    def late(self) -> str:
        """What ran past it, in words: "19 tiles of 3 sequences", or "19 tiles" of a kernel without sequences."""
        tiles = count(self.tiles, "tile")
        return f"{tiles} of {count(len(self.sequences), 'sequence')}" if len(self.sequences) else tiles


def tail(recording: Recording, launch: int = 0) -> Tail:
    """A launch's tail. Raises RecordingError as `tail_sequences` and `last_sm`."""
    sequences = tail_sequences(recording, launch, count=None)
    fair = float(sequences.attrs["fair_ns"])
    return Tail(
        fair_ns=fair,
        tiles=int(sequences.attrs["late_tiles"]),
        sequences=sequences,
        last=last_sm(recording, launch),
        cleared=clearing_after(recording, launch, fair),
    )


def clearing_after(recording: Recording, launch: int, after_ns: float) -> str:
    """Words for what may run later than that although no tile does: clearing the output of empty tiles is work too."""
    events = recording.events
    ends = events["end_ns"][(events["launch"] == launch) & (events["event"] == "zero")]
    late = bool((ends > after_ns).any())
    return f"clearing the output of empty tiles did, until {duration(int(ends.max()))}" if late else ""
