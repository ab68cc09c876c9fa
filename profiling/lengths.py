"""Sequence lengths from a user's file: .npy, .parquet or .csv, checked before anything is computed with them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from profiling.errors import UserError
from profiling.text import plain

SUFFIXES = (".npy", ".parquet", ".csv")
LONGEST = 2**31 - 1
EXPECTED = f"expected whole numbers, 0 to {LONGEST:,} tokens, one a sequence"
NPY_MAGIC = b"\x93NUMPY"
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars", " ": "spaces"}


def read_lengths(path: Path, column: str | None = None) -> np.ndarray:
    """One length a sequence, int64 [B], in tokens.

    ``column`` picks one of a table's; a table with a single column needs none. A .csv may have a heading or none.

    Raises:
        UserError: no such file, another kind, no or several columns, no lengths, values that are no numbers; a length
            that is missing, not whole, negative, or over LONGEST: which one, and where.
    """
    if path.is_dir():
        raise UserError(f"{path}: is a folder; expected a file of lengths: {', '.join(SUFFIXES)}")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: expected lengths as {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    try:
        values = _read_array(path, column) if path.suffix == ".npy" else _read_column(path, column)
    except UserError:
        raise
    except Exception as error:  # each reader has its own kinds
        raise UserError(f"{path}: could not be read as {path.suffix}: {' '.join(str(error).split())[:200]}") from error
    if not len(values):
        raise UserError(f"{path}: holds no lengths; expected one a sequence")
    _expect_numbers(values, path)
    return _checked(values.to_numpy(), path)


def offsets_note(lengths: np.ndarray, source: object) -> str:
    """A warning where lengths look like running sums, as the op's kv_offsets are; else empty."""
    if len(lengths) < 3 or lengths[0] != 0 or (np.diff(lengths) < 0).any() or lengths[-1] == lengths[1]:
        return ""
    return (
        f"{source}: begins at 0 and never falls, as offsets do, and is taken as lengths; of offsets, give the "
        "differences (numpy.diff)"
    )


def _read_array(path: Path, column: str | None) -> pd.Series:
    if column is not None:
        raise UserError(f"{path}: an .npy file has no columns; leave --column out")
    with path.open("rb") as file:
        if file.read(len(NPY_MAGIC)) != NPY_MAGIC:
            raise UserError(f"{path}: does not begin as an .npy file does; write it with numpy.save, or name it .csv")
    try:
        values = np.load(path, allow_pickle=False)
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise
        raise UserError(f"{path}: holds Python objects (dtype object); {EXPECTED}") from error
    if values.ndim != 1:
        raise UserError(f"{path}: has shape {values.shape}; expected one row of lengths, one a sequence")
    if values.dtype.kind not in "iuf":
        raise UserError(f"{path}: holds values of dtype {values.dtype}; {EXPECTED}")
    return pd.Series(values.astype(values.dtype.newbyteorder("=")))  # pandas takes no other byte order


def _read_column(path: Path, column: str | None) -> pd.Series:
    table = pd.read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    if path.suffix == ".csv":
        _expect_commas(table, path)
        _expect_heading(table, path)
    names = [str(name) for name in table.columns]
    if column is not None:
        if column not in names:
            raise UserError(f"{path}: has no column {column!r}; it has {', '.join(names[:8]) or 'none'}")
        return table.iloc[:, names.index(column)]
    if len(names) != 1:
        raise UserError(f"{path}: has {len(names)} columns ({', '.join(names[:8])}); say which with --column")
    return table.iloc[:, 0]


def _expect_commas(table: pd.DataFrame, path: Path) -> None:
    """A line that other separators part is read as one cell of text."""
    if len(table.columns) != 1:
        return
    first = str(table.iloc[0, 0] if len(table) else table.columns[0]).strip()
    for separator, what in SEPARATORS.items():
        cells = first.split(separator)
        are_numbers = [_is_number(cell) for cell in cells]
        # Words have spaces too.
        if len(cells) > 1 and (all(are_numbers) if separator == " " else any(are_numbers)):
            raise UserError(
                f"{path}: its lines look parted by {what} ({plain(first, 40)!r}); expected commas, or one length a line"
            )


def _expect_heading(table: pd.DataFrame, path: Path) -> None:
    """A length that is written so that it is none would be lost as a heading."""
    first = str(table.columns[0]).strip()
    if len(table.columns) == 1 and first[:1].isdigit():
        raise UserError(
            f"{path}: its first line, {plain(first, 40)!r}, is neither a heading nor a number as 1234; {EXPECTED}"
        )


def _expect_numbers(values: pd.Series, path: Path) -> None:
    """pandas would make numbers of what is none: days of periods, nanoseconds of dates, ones of yes, digits of text."""
    types = pd.api.types
    kind = values.dtype.categories.dtype if isinstance(values.dtype, pd.CategoricalDtype) else values.dtype
    numbers = types.is_numeric_dtype(kind) and not types.is_bool_dtype(kind) and not types.is_complex_dtype(kind)
    # Of a .csv every cell that is no number is text, and Python's objects may be numbers: each is looked at later.
    text = types.is_string_dtype(values)
    if not (numbers or (text if path.suffix == ".csv" else types.is_object_dtype(kind) and not text)):
        raise UserError(f"{path}: holds values of dtype {values.dtype}; {EXPECTED}")


def _read_csv(path: Path) -> pd.DataFrame:
    table = _read_lines(path)
    if not len(table.columns):
        raise UserError(f"{path}: its first line is empty; expected a heading, or a length")
    first = str(table.columns[0]).strip()
    if len(table.columns) == 1 and _is_number(first):
        return _read_lines(path, header=None, names=["length"])
    return table


def _read_lines(path: Path, **heading: Any) -> pd.DataFrame:
    with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
        try:
            # Else cells without a heading become the rows' names.
            return pd.read_csv(path, index_col=False, skip_blank_lines=False, low_memory=False, **heading)
        except pd.errors.ParserWarning as error:
            raise UserError(
                f"{path}: has lines of more cells than its first; expected as many in each, or one length a line"
            ) from error


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _checked(values: np.ndarray, path: Path) -> np.ndarray:
    numbers = pd.to_numeric(pd.Series(values), errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan).copy()
    if values.dtype == object:
        numbers[[isinstance(value, bool | np.bool_ | bytes) for value in values]] = np.nan
    for wrong, what in (
        (np.isnan(numbers), "is not a number"),
        (numbers < 0, "is negative"),
        (numbers > LONGEST, f"is over {LONGEST:,}"),
        (np.isfinite(numbers) & (numbers != np.floor(numbers)), "is not whole"),
    ):
        if wrong.any():
            at = int(np.argmax(wrong))
            raise UserError(f"{path}: length {at} (counted from 0) is {values[at]!s}: it {what}; {EXPECTED}")
    return numbers.astype(np.int64)
