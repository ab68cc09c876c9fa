"""Recordings on disk: one Parquet file each, small enough to ship, checked when read."""

from __future__ import annotations

import io
import json
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from profiling.errors import RecordingError
from profiling.files import replacing
from profiling.recording import CATEGORY_COLUMNS, COLUMNS, INTEGER_COLUMNS, SCHEMA

if TYPE_CHECKING:
    import pandas as pd

    from profiling.recording import Recording

METADATA_KEY = b"jfa"
"""Key of the Parquet schema's metadata that holds the recording's metadata as JSON."""

_ENCODINGS = ("DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN")
_SAMPLE_ROWS = 16_384
_SMALL_ROWS = 1_000_000  # above, the strongest compression would take minutes

_DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, OverflowError)


def write(recording: Recording, path: str | PathLike[str]) -> None:
    """Write a recording to one Parquet file, its rows in the recording's order (see `Recording`).

    Raises:
        RecordingError: the folder does not exist, or the file cannot be written.
    """
    metadata = {**recording.metadata, "schema": SCHEMA}
    text = json.dumps(metadata, separators=(",", ":"), allow_nan=False)
    table = _table(recording.events)
    options = _options(len(table)) | {
        "use_dictionary": list(CATEGORY_COLUMNS),
        "column_encoding": {name: _smallest_encoding(table, name) for name in INTEGER_COLUMNS},
    }
    try:
        with replacing(Path(path)) as part, pq.ParquetWriter(part, table.schema, **options) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata({METADATA_KEY: text.encode()})
    except (OSError, pa.ArrowException) as error:
        raise RecordingError(f"{path}: cannot be written: {error}; give a path in an existing folder") from error


def _options(rows: int) -> dict[str, Any]:
    return {
        "compression": "zstd",
        "compression_level": 19 if rows <= _SMALL_ROWS else 3,
        "write_statistics": False,
        "write_page_checksum": True,
        # else Arrow's own copy of the schema holds the metadata a second time
        "store_schema": False,
    }


def _smallest_encoding(table: pa.Table, name: str) -> str:
    """Which encoding suits a column depends on the schedule and the kernel, so the first rows are tried with each."""
    sample = table.select([name]).slice(0, _SAMPLE_ROWS)
    sizes = {}
    for encoding in _ENCODINGS:
        buffer = io.BytesIO()
        options = _options(len(sample)) | {"use_dictionary": False, "column_encoding": {name: encoding}}
        pq.write_table(sample, buffer, **options)
        sizes[encoding] = buffer.tell()
    return min(sizes, key=lambda encoding: sizes[encoding])


def _table(events: pd.DataFrame) -> pa.Table:
    arrays = {}
    for name in COLUMNS:
        if name in CATEGORY_COLUMNS:
            values = events[name].array
            codes = pa.array(values.codes.astype("int32"))
            arrays[name] = pa.DictionaryArray.from_arrays(codes, pa.array(list(values.categories), pa.string()))
        else:
            arrays[name] = pa.array(events[name].to_numpy())
    return pa.table(arrays)


def read(path: str | PathLike[str]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Read what `write` wrote: the columns `COLUMNS` as they are in the file, and the metadata.

    Raises:
        RecordingError: missing, a folder, empty, truncated, damaged, not Parquet, no recording's metadata, a newer
            major schema, a missing column, an empty cell.
    """
    _check_path(Path(path))
    try:
        with pq.ParquetFile(path) as file:
            metadata = _metadata(file.metadata.metadata or {}, path)
            _check_columns(file.schema_arrow, path)
        with pq.ParquetFile(path, read_dictionary=list(CATEGORY_COLUMNS), page_checksum_verification=True) as file:
            table = file.read(columns=list(COLUMNS))
    except _DAMAGE as error:
        raise RecordingError(
            f"{path}: truncated or damaged ({_first_line(error)}); copy it or record it again"
        ) from error
    return _frame(table, path), metadata


def _check_path(path: Path) -> None:
    try:
        if path.is_dir():
            raise RecordingError(f"{path}: is a folder; expected a recording's Parquet file")
        with path.open("rb") as file:
            head = file.read(4)
    except FileNotFoundError:
        raise RecordingError(f"{path}: no such file; make one with `python -m profiling record -o {path}`") from None
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not head:
        raise RecordingError(f"{path}: is empty; the recording was not finished: record it again")
    if head != b"PAR1":
        raise RecordingError(
            f"{path}: is not a Parquet file; expected a recording made by `python -m profiling record`"
        )


def _metadata(schema_metadata: dict[bytes, bytes], path: str | PathLike[str]) -> dict[str, Any]:
    text = schema_metadata.get(METADATA_KEY)
    if text is None:
        raise RecordingError(f"{path}: is Parquet but no recording: its metadata key 'jfa' is missing")
    try:
        metadata = json.loads(text)
        if not isinstance(metadata, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{path}: metadata key 'jfa' holds no JSON object ({error}); record it again") from error
    schema = metadata.get("schema")
    major, dot, minor = str(schema).partition(".")
    if not (isinstance(schema, str) and major.isdecimal() and (minor.isdecimal() if dot else True)):
        raise RecordingError(f"{path}: metadata key 'schema' is {schema!r}; expected a version such as {SCHEMA!r}")
    if int(major) > int(SCHEMA.partition(".")[0]):
        raise RecordingError(f"{path}: has schema {schema}, newer than this program's {SCHEMA}: update the program")
    return metadata


def _check_columns(schema: pa.Schema, path: str | PathLike[str]) -> None:
    for name in COLUMNS:
        indices = schema.get_all_field_indices(name)
        if len(indices) != 1:
            problem = "missing" if not indices else "there more than once"
            raise RecordingError(f"{path}: column {name!r} is {problem}; a recording has {', '.join(COLUMNS)}")
        kind = schema.field(indices[0]).type
        if name in INTEGER_COLUMNS and not pa.types.is_integer(kind):
            raise RecordingError(f"{path}: column {name!r} has type {kind}; expected {INTEGER_COLUMNS[name]}")
        names = kind.value_type if pa.types.is_dictionary(kind) else kind
        if name in CATEGORY_COLUMNS and not (pa.types.is_string(names) or pa.types.is_large_string(names)):
            raise RecordingError(f"{path}: column {name!r} has type {kind}; expected names (text)")


def _frame(table: pa.Table, path: str | PathLike[str]) -> pd.DataFrame:
    for name in COLUMNS:
        empty = table.column(name).null_count
        if empty:
            raise RecordingError(f"{path}: column {name!r} has {empty} empty cells; expected a value in each row")
    # split and destroyed column by column: ten million rows must not be held twice
    return table.to_pandas(split_blocks=True, self_destruct=True, ignore_metadata=True, zero_copy_only=False)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
