"""Recordings on disk: exact round trips, small files, and one line for every file that is no good."""

from __future__ import annotations

import io
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal
from spans import frame, recording, rows
from synthetic import SCHEDULES, synthetic_recording

from profiling.errors import RecordingError
from profiling.recording import COLUMNS, Recording

SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=9)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))


def _same(one: Recording, other: Recording) -> None:
    assert_frame_equal(one.events, other.events)
    assert one.metadata == other.metadata


@given(rows(latest=2**40), JSON)
@settings(max_examples=60)
def test_round_trip_is_exact(spans: list[dict[str, Any]], anything: Any) -> None:
    before = recording(spans, anything=anything)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "r.parquet"
        before.write(path)
        after = Recording.read(path)
        _same(before, after)
        assert after.source == str(path)
        again = Path(folder) / "again.parquet"
        after.write(again)
        assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("level", ["cta", "tile", "wait"])
def test_round_trip_of_the_model(tmp_path: Path, level: str) -> None:
    before = synthetic_recording([100, 300], [900, 0], schedule="dynamic", level=level, launches=2)
    before.write(tmp_path / "r.parquet")
    _same(before, Recording.read(tmp_path / "r.parquet"))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_bytes_a_row(tmp_path: Path, direction: str) -> None:
    rng = np.random.default_rng(0)
    kv_lens = np.exp(rng.uniform(np.log(16), np.log(8192), 1024)).astype(int)
    sizes, rows = [], []
    for schedule in SCHEDULES:
        made = synthetic_recording(256, kv_lens, sms=132, heads=4, schedule=schedule, direction=direction)
        made.write(tmp_path / "r.parquet")
        sizes.append((tmp_path / "r.parquet").stat().st_size)
        rows.append(len(made.events))
    assert sum(sizes) / sum(rows) <= 8, (sizes, rows)


# -- files that are no good --------------------------------------------------------------------------------------------


def _refused(path: Path, *words: str) -> str:
    with pytest.raises(RecordingError) as caught:
        Recording.read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    for word in words:
        assert word in message
    return message


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.parquet"
    synthetic_recording([256, 256], [4000, 700], name="good").write(path)
    return path


def test_no_such_file(tmp_path: Path) -> None:
    _refused(tmp_path / "none.parquet", "no such file", "record -o")


def test_a_folder(tmp_path: Path) -> None:
    _refused(tmp_path, "is a folder")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "e.parquet").write_bytes(b"")
    _refused(tmp_path / "e.parquet", "is empty")


@pytest.mark.parametrize("content", [b"launch,cta\n0,1\n", b"PK\x03\x04zip", b"\x1f\x8bgz", b"P", b"{}"])
def test_not_parquet(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.parquet").write_bytes(content)
    _refused(tmp_path / "x.parquet", "is not a Parquet file")


def test_truncated_anywhere(good: Path) -> None:
    whole = good.read_bytes()
    cut = good.with_name("cut.parquet")
    places = {1, 3, 4, 5, 7, 8, 11, 12, len(whole) // 2, len(whole) - 1, len(whole) - 4, len(whole) - 8, len(whole) - 9}
    places |= set(range(13, len(whole), 97))
    for place in sorted(places):
        cut.write_bytes(whole[:place])
        _refused(cut)


def test_a_hole_in_the_middle(good: Path) -> None:
    whole = good.read_bytes()
    for place in range(4, len(whole) - 8, 211):
        good.write_bytes(whole[:place] + whole[place + 40 :])
        _refused(good)


def test_a_flipped_bit_is_refused_or_harmless(good: Path) -> None:
    """Pages carry checksums; what is left are unused bits of headers and the text of the metadata."""
    events = Recording.read(good).events
    whole = good.read_bytes()
    refused = 0
    for place in range(0, len(whole), 101):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        good.write_bytes(damaged)
        try:
            assert_frame_equal(Recording.read(good).events, events)
        except RecordingError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 5


def _rewritten(path: Path, metadata: Any = None, **columns: Any) -> None:
    """Writes the file again as another program might: plain Arrow, other metadata (str as is), other columns."""
    table = pq.read_table(path)
    known = json.loads(pq.read_metadata(path).metadata[b"jfa"])
    for name, values in columns.items():
        table = table.drop_columns(name)
        if values is not None:
            table = table.append_column(name, values)
    text = metadata if isinstance(metadata, str) else json.dumps(metadata(known) if metadata else known)
    pq.write_table(table.replace_schema_metadata({"jfa": text}), path)


def test_parquet_of_another_kind(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1, 2]}).to_parquet(tmp_path / "other.parquet")
    _refused(tmp_path / "other.parquet", "no recording", "'jfa' is missing")


@pytest.mark.parametrize("schema", ["2.0", "2", "10.3"])
def test_a_newer_major_schema(good: Path, schema: str) -> None:
    _rewritten(good, lambda known: known | {"schema": schema})
    _refused(good, f"schema {schema}", "newer", "update")


@pytest.mark.parametrize("schema", ["1.0", "1.7", "0.9", "1"])
def test_other_schemas_are_read_and_written_as_this_one(good: Path, schema: str) -> None:
    events = Recording.read(good).events
    _rewritten(good, lambda known: known | {"schema": schema})
    read = Recording.read(good)
    assert_frame_equal(read.events, events)
    assert read.metadata["schema"] == schema
    read.write(good)
    assert Recording.read(good).metadata["schema"] == "1.0"


@pytest.mark.parametrize("schema", [None, 1.0, "one", "1.x", "", "-1.0", "1.0.0"])
def test_a_senseless_schema(good: Path, schema: Any) -> None:
    _rewritten(good, lambda known: known | {"schema": schema})
    _refused(good, "'schema'", repr(schema))


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '{"schema": "1.0"', "[" * 100_000])
def test_metadata_that_is_no_object(good: Path, text: str) -> None:
    _rewritten(good, text)
    _refused(good, "'jfa' holds no JSON object")


@pytest.mark.parametrize("name", COLUMNS)
def test_a_missing_column(good: Path, name: str) -> None:
    _rewritten(good, **{name: None})
    _refused(good, repr(name), "missing")


def test_columns_of_other_types(good: Path) -> None:
    rows = len(Recording.read(good).events)
    for name, values, word in (
        ("tile", pa.array(["x"] * rows), "string"),
        ("start_ns", pa.array([0.5] * rows), "double"),
        ("role", pa.array([1] * rows), "int64"),
        ("event", pa.array([b"tile"] * rows), "binary"),
    ):
        whole = good.read_bytes()
        _rewritten(good, **{name: values})
        _refused(good, repr(name), word)
        good.write_bytes(whole)


def test_empty_cells(good: Path) -> None:
    rows = len(Recording.read(good).events)
    _rewritten(good, tile=pa.array([None] + [1] * (rows - 1), pa.int32()))
    _refused(good, "'tile'", "1 empty cells")
    _rewritten(good, tile=pa.array([1] * rows), role=pa.array([None] + ["cta"] * (rows - 1)))
    _refused(good, "'role'", "1 empty cells")


def test_wide_integers_and_plain_text_are_read(good: Path) -> None:
    before = Recording.read(good)
    table = {name: pa.array(before.events[name].to_numpy().astype("int64")) for name in ("cta", "sm", "tile")}
    _rewritten(good, **table, role=pa.array(before.events["role"].astype(str).tolist()))
    _same(before, Recording.read(good))


def test_values_that_do_not_fit(good: Path) -> None:
    rows = len(Recording.read(good).events)
    _rewritten(good, sm=pa.array([70_000] * rows))
    _refused(good, "'sm'", "outside int16")


def test_no_rows_and_an_end_before_its_start(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    for events, word in ((frame([{}]).iloc[:0], "no spans"), (frame([{"start_ns": 9, "end_ns": 3}]), "9 to 3 ns")):
        table = pa.Table.from_pandas(events, preserve_index=False)
        pq.write_table(table.replace_schema_metadata({"jfa": '{"schema": "1.0"}'}), path)
        _refused(path, word)


def test_rows_in_any_order_are_read_in_this_one(good: Path) -> None:
    before = Recording.read(good)
    shuffled = pa.Table.from_pandas(before.events.sample(frac=1, random_state=0), preserve_index=False)
    pq.write_table(shuffled.replace_schema_metadata({"jfa": json.dumps(before.metadata)}), good)
    _same(before, Recording.read(good))


def test_writing_where_one_cannot(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"none/r.parquet: cannot be written: .*existing folder"):
        recording([{}]).write(tmp_path / "none" / "r.parquet")


def test_the_file_is_plain_parquet_to_others(good: Path) -> None:
    table = pq.read_table(io.BytesIO(good.read_bytes()))
    assert table.column_names == list(COLUMNS)
    assert json.loads(pq.read_metadata(good).metadata[b"jfa"])["workload"]["name"] == "good"
    assert table["event"].to_pylist() == Recording.read(good).events["event"].tolist()
