"""Sequence lengths from a user's file: .npy, .parquet or .csv, checked before anything is computed with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from profiling.errors import UserError

SUFFIXES = (".npy", ".parquet", ".csv")
LONGEST = 2**31 - 1


def read_lengths(path: Path, column: str | None = None) -> np.ndarray:
    """One length a sequence, int64 [B], in tokens.

    ``column`` picks one of a table's; a table with a single column needs none. A .csv may have a heading or none.

    Raises:
        UserError: no such file, another kind, no or several columns, no lengths; a length that is missing, not whole,
            negative, or over LONGEST: which one, and where.
    """
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
    return _checked(values, path)


def _read_array(path: Path, column: str | None) -> np.ndarray:
    if column is not None:
        raise UserError(f"{path}: an .npy file has no columns; leave --column out")
    values = np.load(path, allow_pickle=False)
    if values.ndim != 1:
        raise UserError(f"{path}: has shape {values.shape}; expected one row of lengths, one a sequence")
    return values


def _read_column(path: Path, column: str | None) -> np.ndarray:
    table = pd.read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    names = [str(name) for name in table.columns]
    if column is not None:
        if column not in names:
            raise UserError(f"{path}: has no column {column!r}; it has {', '.join(names[:8]) or 'none'}")
        return table.iloc[:, names.index(column)].to_numpy()
    if len(names) != 1:
        raise UserError(f"{path}: has {len(names)} columns ({', '.join(names[:8])}); say which with --column")
    return table.iloc[:, 0].to_numpy()


def _read_csv(path: Path) -> pd.DataFrame:
    table = pd.read_csv(path, skip_blank_lines=False)
    if len(table.columns) == 1 and _is_number(str(table.columns[0])):
        return pd.read_csv(path, header=None, names=["length"], skip_blank_lines=False)
    return table


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _checked(values: np.ndarray, path: Path) -> np.ndarray:
    numbers = pd.to_numeric(pd.Series(values), errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    for wrong, what in (
        (np.isnan(numbers), "is not a number"),
        (numbers < 0, "is negative"),
        (numbers > LONGEST, f"is over {LONGEST:,}"),
        (np.isfinite(numbers) & (numbers != np.floor(numbers)), "is not whole"),
    ):
        if wrong.any():
            at = int(np.argmax(wrong))
            raise UserError(f"{path}: length {at} (counted from 0) is {values[at]!s}: it {what}; expected tokens, ≥ 0")
    return numbers.astype(np.int64)
