"""A recording as a Chrome trace (JSON), which Perfetto and chrome://tracing open.

A process is a launch, a thread a track: an SM, or one of several tracks of it where CTAs overlap on the SM or several
roles are recorded. The format is the Trace Event Format's: complete events (ph X) and metadata events (ph M).
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import pandas as pd

from profiling.errors import UserError
from profiling.files import replacing
from profiling.layout import lowest_free
from profiling.recording import Recording

LIMIT = 1_000_000
"""Spans that a trace holds unless told otherwise; viewers become slow with more."""

_CHUNK_ROWS = 50_000


@dataclass(frozen=True)
class Trace:
    """What `write_trace` wrote.

    Attributes:
        path: the file.
        written: spans in it.
        left_out: spans of the recording that are not in it.
        notice: what was left out, in words, "" where nothing was; the file says the same.
    """

    path: Path
    written: int
    left_out: int
    notice: str


class _Track(NamedTuple):
    """Where a span is drawn. Those of one track nest or do not touch, which is all that the format allows."""

    launch: int
    sm: int
    lane: int
    role: str
    overlap: int


def write_trace(recording: Recording, path: str | PathLike[str], *, limit: int | None = LIMIT) -> Trace:
    """Write a recording as Chrome trace JSON, gzipped when the name ends in .gz.

    Times are µs with three decimals, so whole ns. An event's args are its cta, tile, batch, head, block, stage, q_len
    and kv_len, as far as they apply. Rows are written in portions, so that memory does not grow with the file.

    Args:
        limit: how many spans at most; of more, the shortest are left out, and the trace and the result say so. None
            writes all.

    Raises:
        UserError: limit < 1, or the file cannot be written.
        RecordingError: metadata's lengths are no lengths.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit is {limit}; expected 1 or more spans")
    rows, notice = _longest(recording, limit)
    writer = _Writer(recording, notice)
    try:
        with replacing(Path(path)) as part, _opened(part, packed=Path(path).suffix == ".gz") as file:
            file.write('{"displayTimeUnit":"ns","otherData":' + _json(_about(recording, notice)) + ',"traceEvents":[\n')
            separator = ""
            for text in writer.lines(rows):
                file.write(separator + text)
                separator = ",\n"
            file.write("\n]}\n")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {error.strerror or error}; give a path in a folder that exists"
        ) from error
    return Trace(Path(path), len(rows), len(recording.events) - len(rows), notice)


@contextmanager
def _opened(path: Path, packed: bool) -> Iterator[TextIO]:
    if not packed:
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    # no name and no time inside, so that one recording always gives the same file
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as squeezed,
        io.TextIOWrapper(squeezed, encoding="utf-8") as file,
    ):
        yield file


def _longest(recording: Recording, limit: int | None) -> tuple[np.ndarray, str]:
    """Which rows to write, rising, and what to say about the others."""
    total = len(recording.events)
    if limit is None or total <= limit:
        return np.arange(total), ""
    length = recording.events["end_ns"].to_numpy() - recording.events["start_ns"].to_numpy()
    order = np.argsort(-length, kind="stable")
    longest = int(length[order[limit]])
    notice = f"the {total - limit:,} shortest of {total:,} spans are left out, each {longest:,} ns or shorter"
    return np.sort(order[:limit]), notice


def _about(recording: Recording, notice: str) -> dict[str, Any]:
    coverage = recording.coverage()
    return {
        "title": recording.title(),
        "grade": recording.grade,
        "level": recording.level,
        "coverage": None if np.isnan(coverage) else coverage,
        "left_out": notice,
        "warnings": recording.warnings(),
        "command": recording.get("command"),
    }


class _Writer:
    """Turns rows into lines of JSON, and names each process and track when it first appears."""

    def __init__(self, recording: Recording, notice: str) -> None:
        self.recording = recording
        self.notice = notice
        events = recording.events
        self.events = [str(name) for name in events["event"].cat.categories]
        self.roles = [str(name) for name in events["role"].cat.categories]
        self.lanes = _lanes(events)
        self.lengths = {
            f"{which}_len": recording.lengths(which, "a trace").tolist()
            for which in ("q", "kv")
            if recording.get(f"workload.{which}_lens") is not None
        }
        self.tids: dict[_Track, int] = {}
        self.named: set[_Track] = set()
        self.launches: set[int] = set()

    def number(self, rows: np.ndarray) -> None:
        """Number the tracks by launch, SM, lane and role: not every viewer obeys thread_sort_index."""
        events = self.recording.events
        columns = [events["launch"].to_numpy()[rows], events["sm"].to_numpy()[rows], self.lanes[rows]]
        columns.append(events["role"].cat.codes.to_numpy()[rows])
        changes = np.flatnonzero(np.any([column[1:] != column[:-1] for column in columns], axis=0)) + 1
        firsts = np.concatenate([[0], changes])
        found = {tuple(int(column[row]) for column in columns) for row in firsts.tolist()}
        for launch, sm, lane, role in sorted(found):
            self.tids[_Track(launch, sm, lane, self.roles[role], 0)] = len(self.tids) + 1

    def lines(self, rows: np.ndarray) -> Iterator[str]:
        self.number(rows)
        group: tuple[int, int, int] | None = None
        open_ends: list[list[int]] = []
        for first in range(0, len(rows), _CHUNK_ROWS):
            frame = self.recording.events.take(rows[first : first + _CHUNK_ROWS])
            lanes = self.lanes[rows[first : first + _CHUNK_ROWS]].tolist()
            columns = [_plain(frame[name]) for name in ("launch", "cta", "sm", "role", "event", "start_ns", "end_ns")]
            details = [frame[name].tolist() for name in ("tile", "batch", "head", "block", "stage")]
            for lane, spans, (launch, cta, sm, role, event, start, end) in zip(
                lanes, zip(*details, strict=True), zip(*columns, strict=True), strict=True
            ):
                if group != (launch, cta, role):
                    group, open_ends = (launch, cta, role), []
                track = _Track(launch, sm, lane, self.roles[role], _place(open_ends, start, end))
                if track not in self.named:
                    yield from self._named(track)
                yield self._span(track, cta, self.events[event], start, end, spans)

    def _span(self, track: _Track, cta: int, event: str, start: int, end: int, details: tuple[int, ...]) -> str:
        args = {"cta": cta}
        for name, value in zip(("tile", "batch", "head", "block", "stage"), details, strict=True):
            if value >= 0:
                args[name] = value
        batch = details[1]
        for name, lengths in self.lengths.items():
            if 0 <= batch < len(lengths):
                args[name] = lengths[batch]
        inside = ",".join(f'"{name}":{value}' for name, value in args.items())
        return (
            f'{{"ph":"X","name":{_json(event)},"cat":{_json(track.role)},"pid":{track.launch + 1},'
            f'"tid":{self.tids[track]},"ts":{_microseconds(start)},"dur":{_microseconds(end - start)},'
            f'"args":{{{inside}}}}}'
        )

    def _named(self, track: _Track) -> Iterator[str]:
        """Metadata events. Process and thread numbers start at 1, since viewers take 0 for the idle thread."""
        pid = track.launch + 1
        if track.launch not in self.launches:
            self.launches.add(track.launch)
            labels = ", ".join(filter(None, [self.recording.grade, self.notice]))
            yield _metadata("process_name", pid, 0, name=f"launch {track.launch} · {self.recording.title()}")
            yield _metadata("process_labels", pid, 0, labels=labels)
            yield _metadata("process_sort_index", pid, 0, sort_index=track.launch)
        self.named.add(track)
        tid = self.tids.setdefault(track, len(self.tids) + 1)
        parts = [f"SM {track.sm}"]
        parts += [f"lane {track.lane + 1}"] if track.lane else []
        parts += [track.role] if track.role != "cta" else []
        parts += [f"overlap {track.overlap}"] if track.overlap else []
        order = 0
        for value, room in (
            (track.sm, 1 << 15),
            (track.lane, 64),
            (self.roles.index(track.role), 16),
            (track.overlap, 4),
        ):
            order = order * room + min(value, room - 1)
        yield _metadata("thread_name", pid, tid, name=" · ".join(parts))
        yield _metadata("thread_sort_index", pid, tid, sort_index=order)


def _place(open_ends: list[list[int]], start: int, end: int) -> int:
    """The first of a CTA's tracks on which the span nests in, or follows, those there; `open_ends` holds each track's
    enclosing spans' ends, the innermost last."""
    for index, ends in enumerate(open_ends):
        while ends and ends[-1] <= start:
            ends.pop()
        if not ends or end <= ends[-1]:
            ends.append(end)
            return index
    open_ends.append([end])
    return len(open_ends) - 1


def _lanes(events: pd.DataFrame) -> np.ndarray:
    """Each row's lane on its SM, int32 [rows]: CTAs that overlap on one SM get different ones, the lowest free."""
    launch, cta = events["launch"].to_numpy(), events["cta"].to_numpy()
    firsts = np.flatnonzero(np.concatenate([[True], (cta[1:] != cta[:-1]) | (launch[1:] != launch[:-1])]))
    starts = np.minimum.reduceat(events["start_ns"].to_numpy(), firsts)
    ends = np.maximum.reduceat(events["end_ns"].to_numpy(), firsts)
    place = (launch[firsts].astype(np.int64) << 16) | events["sm"].to_numpy()[firsts]
    order = np.lexsort((ends, starts, place))
    lane = np.zeros(len(firsts), dtype=np.int32)
    lane[order] = lowest_free(place[order], starts[order], ends[order])
    return np.repeat(lane, np.diff(np.append(firsts, len(events))))


def _plain(column: pd.Series) -> list[int]:
    values = column.cat.codes if isinstance(column.dtype, pd.CategoricalDtype) else column
    return values.tolist()


def _microseconds(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> str:
    return _json({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
