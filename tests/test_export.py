"""The trace is valid, complete, exact to the ns, and drawable: on one track spans nest or follow each other."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from spans import recording, rows
from synthetic import SCHEDULES, large_recording, synthetic_recording

from profiling.errors import UserError
from profiling.export import _CHUNK_ROWS, write_trace
from profiling.recording import Recording


def _trace(made: Recording, path: Path, **options: Any) -> dict[str, Any]:
    write_trace(made, path, **options)
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(text, parse_float=Decimal)


def _spans(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def _names(trace: dict[str, Any], kind: str) -> dict[tuple[int, int], str]:
    named = [event for event in trace["traceEvents"] if event["ph"] == "M" and event["name"] == kind]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in named}
    assert len(names) == len(named)
    return names


def _assert_drawable(trace: dict[str, Any]) -> None:
    tracks = defaultdict(list)
    for event in _spans(trace):
        tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for spans in tracks.values():
        open_ends: list[Decimal] = []
        for start, negative in sorted(spans):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or start - negative <= open_ends[-1]
            open_ends.append(start - negative)


@given(rows(latest=3000))
@settings(max_examples=60)
def test_every_span_is_there_exactly_and_drawable(spans: list[dict[str, Any]]) -> None:
    with TemporaryDirectory() as folder:
        trace = _trace(recording(spans), Path(folder) / "t.json")
    _assert_drawable(trace)
    threads, processes = _names(trace, "thread_name"), _names(trace, "process_name")
    found = []
    for event in _spans(trace):
        sm = int(threads[event["pid"], event["tid"]].split(" · ")[0].removeprefix("SM "))
        assert processes[event["pid"], 0].startswith(f"launch {event['pid'] - 1} · ")
        start, end = event["ts"] * 1000, (event["ts"] + event["dur"]) * 1000
        found.append((event["pid"] - 1, event["args"]["cta"], sm, event["cat"], event["name"], start, end))
    keys = ("launch", "cta", "sm", "role", "event", "start_ns", "end_ns")
    assert sorted(found) == sorted(tuple(row[key] for key in keys) for row in spans)
    assert all(tid >= 1 for _, tid in threads)
    assert len({tid for _, tid in threads}) == len(threads)
    assert len({(pid, name) for (pid, _), name in threads.items()}) == len(threads)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tracks_of_the_model(tmp_path: Path, schedule: str) -> None:
    made = synthetic_recording(256, [900, 4000, 0, 64], sms=3, schedule=schedule)
    trace = _trace(made, tmp_path / "t.json")
    _assert_drawable(trace)
    expected = {f"SM {sm}" for sm in range(3)}
    if schedule == "grid":  # two CTAs at once on each SM
        expected |= {f"SM {sm} · lane 2" for sm in range(3)}
    assert set(_names(trace, "thread_name").values()) == expected


def test_roles_have_tracks_of_their_own(tmp_path: Path) -> None:
    trace = _trace(synthetic_recording(256, [900], sms=1, heads=1, level="wait"), tmp_path / "t.json")
    _assert_drawable(trace)
    assert set(_names(trace, "thread_name").values()) == {"SM 0", "SM 0 · load", "SM 0 · mma", "SM 0 · softmax"}


def test_args_of_a_tile(tmp_path: Path) -> None:
    made = recording(
        [
            {"cta": 4, "sm": 2, "tile": 6, "batch": 1, "head": 0, "block": 2, "start_ns": 1_234, "end_ns": 5_000_001},
            {"cta": 4, "sm": 2, "event": "cta", "end_ns": 5_000_002},
        ],
        workload={"q_lens": [8, 300], "kv_lens": [0, 77]},
    )
    cta, tile = _spans(_trace(made, tmp_path / "t.json"))
    lengths = {"q_len": 300, "kv_len": 77}
    assert tile["args"] == {"cta": 4, "tile": 6, "batch": 1, "head": 0, "block": 2, **lengths}
    assert (str(tile["ts"]), str(tile["dur"])) == ("1.234", "4998.767")
    assert cta["args"] == {"cta": 4}


def test_it_says_what_it_is(tmp_path: Path) -> None:
    trace = _trace(synthetic_recording(256, [900], name='a "quoted" name \n<b>'), tmp_path / "t.json")
    assert trace["displayTimeUnit"] == "ns"
    assert trace["otherData"]["grade"] == "modelled"
    assert trace["otherData"]["title"].startswith('a "quoted" name \n<b> · forward')
    assert trace["otherData"]["warnings"] == ["modelled, not measured: these times come from a model, not from a GPU"]
    (labels,) = [e["args"]["labels"] for e in trace["traceEvents"] if e["name"] == "process_labels"]
    assert labels == "modelled"


def test_limit_keeps_the_longest_and_says_so(tmp_path: Path) -> None:
    made = synthetic_recording(256, [900, 4000, 64], sms=4)
    length = made.events["end_ns"] - made.events["start_ns"]
    done = write_trace(made, tmp_path / "t.json", limit=10)
    trace = _trace(made, tmp_path / "t.json", limit=10)
    assert (done.written, done.left_out) == (10, len(made.events) - 10)
    kept = sorted(int(event["dur"] * 1000) for event in _spans(trace))
    assert kept == sorted(length)[-10:]
    assert f"{done.left_out} shortest of {len(made.events)} spans are left out" in done.notice
    assert trace["otherData"]["left_out"] == done.notice
    assert done.notice in next(e for e in trace["traceEvents"] if e["name"] == "process_labels")["args"]["labels"]
    everything = write_trace(made, tmp_path / "t.json", limit=None)
    assert (everything.written, everything.left_out, everything.notice) == (len(made.events), 0, "")


def test_gzip_and_plain_hold_the_same_and_are_reproducible(tmp_path: Path) -> None:
    made = synthetic_recording(256, [900, 4000], schedule="grid")
    plain = _trace(made, tmp_path / "t.json")
    assert _trace(made, tmp_path / "a.json.gz") == plain
    write_trace(made, tmp_path / "b.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_a_recording_without_metadata(tmp_path: Path) -> None:
    trace = _trace(Recording(recording([{"batch": 3}]).events, {}), tmp_path / "t.json")
    assert trace["otherData"]["grade"] == "unknown"
    assert trace["otherData"]["coverage"] is None
    assert _spans(trace)[0]["args"] == {"cta": 0, "batch": 3}


def test_senseless_arguments(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="limit is 0; expected 1 or more spans"):
        write_trace(recording([{}]), tmp_path / "t.json", limit=0)
    with pytest.raises(UserError, match="cannot be written"):
        write_trace(recording([{}]), tmp_path / "none" / "t.json")


def test_portions_join(tmp_path: Path) -> None:
    made = large_recording(60_000, sms=8, launches=2)
    trace = _trace(made, tmp_path / "t.json.gz")
    assert len(_spans(trace)) == len(made.events) == 60_000 > _CHUNK_ROWS
    _assert_drawable(trace)
