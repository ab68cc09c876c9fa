"""Files that hold no lengths: each kind is one line that says what was found and what was expected, and no warning."""

from __future__ import annotations

import datetime
import re
import warnings

import numpy as np
import pandas as pd
import pytest

from profiling.__main__ import main
from profiling.errors import UserError
from profiling.lengths import read_lengths

ARRAYS = {
    "complex": np.array([1 + 2j, 3]),
    "bool": np.array([True, False]),
    "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "spans": np.array([3, 4], dtype="timedelta64[s]"),
    "text": np.array(["3", "4"]),
    "bytes": np.array([b"3", b"4"]),
    "records": np.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")]),
    "objects": np.array([3, None], dtype=object),
}
COLUMNS = {
    "bool": [True, False],
    "maybe": pd.array([True, None], dtype="boolean"),
    "dates": pd.to_datetime(["2020-01-01", "2021-01-01"]),
    "zoned": pd.to_datetime(["2020-01-01"]).tz_localize("UTC"),
    "spans": pd.to_timedelta([1, 2]),
    "days": pd.period_range("2020-01-01", periods=2, freq="D"),
    "text": ["3", "4"],
}


def refused(path, expected: str) -> None:
    with warnings.catch_warnings(action="error"), pytest.raises(UserError, match=expected):
        read_lengths(path)


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_of_another_kind_is_refused_with_its_dtype(kind, tmp_path):
    np.save(tmp_path / "x.npy", ARRAYS[kind], allow_pickle=True)
    refused(tmp_path / "x.npy", rf"dtype {re.escape(str(ARRAYS[kind].dtype))}\)?; expected whole numbers, 0 to 2,147")


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_of_another_kind_is_refused_with_its_dtype(kind, tmp_path):
    pd.DataFrame({"n": COLUMNS[kind]}).to_parquet(tmp_path / "x.parquet")
    refused(tmp_path / "x.parquet", "holds values of dtype .*; expected whole numbers, 0 to 2,147,483,647 tokens")


@pytest.mark.parametrize("values", [[b"3", b"4"], [datetime.date(2020, 1, 1)], [[1], [2]]])
def test_objects_in_a_column_are_no_numbers(values, tmp_path):
    pd.DataFrame({"n": values}).to_parquet(tmp_path / "x.parquet")
    refused(tmp_path / "x.parquet", "length 0 .* is not a number; expected whole numbers")


@pytest.mark.parametrize("dtype", [">i4", ">f8", "u1", "f2", "u8", np.longdouble])
def test_numbers_of_every_width_and_order_are_read(dtype, tmp_path):
    np.save(tmp_path / "x.npy", np.array([3, 4], dtype=dtype))
    assert read_lengths(tmp_path / "x.npy").tolist() == [3, 4]


@pytest.mark.parametrize("content", [b"1\n2\n", b"", b"PK\x03\x04", b"\x80\x04K\x03."])
def test_a_file_that_is_only_named_npy_gets_no_advice_to_unpickle(content, tmp_path, capsys):
    (tmp_path / "x.npy").write_bytes(content)
    assert main(["advise", "--lengths", str(tmp_path / "x.npy")]) == 2
    error = capsys.readouterr().err
    assert "does not begin as an .npy file does; write it with numpy.save" in error and error.count("\n") == 1
    assert "pickle" not in error


@pytest.mark.parametrize("values", [[3_000_000_000], [2**64 - 1], [-1], [1.5]])
def test_the_expectation_names_the_limit(values, tmp_path):
    np.save(tmp_path / "x.npy", np.array(values))
    refused(tmp_path / "x.npy", r"length 0 .* expected whole numbers, 0 to 2,147,483,647 tokens")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3;4\n5;6\n", "parted by semicolons"),
        ("3;4\n", "parted by semicolons"),
        ("id;length\na;4\nb;5\n", "parted by semicolons"),
        ("id\tlength\n0\t4\n", "parted by tabs"),
        ("3|4\n5|6\n", "parted by bars"),
        ("0 4\n1 5\n", "parted by spaces"),
        ("length\n1,2\n3,4\n", "lines of more cells than its first"),
        ("a,b\n1,2,3\n", "lines of more cells than its first"),
        ("3\n4,5\n", "lines of more cells than its first"),
        ("n\nTrue\nFalse\n", "holds values of dtype bool"),
        ("n\nTrue\n3\n", "length 0 .* is True: it is not a number"),
        ("n\n 5\nfive six\n", "length 1 .* is five six: it is not a number"),
        ("n\n5 tokens\n", "length 0 .* is 5 tokens: it is not a number"),
    ],
)
def test_lines_that_are_not_parted_by_commas_say_so(text, expected, tmp_path):
    (tmp_path / "x.csv").write_text(text)
    refused(tmp_path / "x.csv", expected)


def test_a_heading_of_two_words_is_a_heading(tmp_path):
    (tmp_path / "x.csv").write_text("seq len\n3\n4\n")
    assert read_lengths(tmp_path / "x.csv").tolist() == [3, 4]


@pytest.mark.parametrize("first", ['"1,234"', "1 234", "1k", "2³", "12 tokens"])
def test_a_first_line_that_is_half_a_number_is_no_heading(first, tmp_path):
    """Taken for a heading, it would be lost without a word."""
    (tmp_path / "x.csv").write_text(f"{first}\n512\n300\n")
    refused(tmp_path / "x.csv", "its first line, .* is neither a heading nor a number|its lines look parted by spaces")


def test_an_empty_first_line_is_named(tmp_path):
    (tmp_path / "x.csv").write_text("\n512\n300\n")
    refused(tmp_path / "x.csv", "its first line is empty; expected a heading, or a length")


def test_a_folder_is_named(tmp_path):
    refused(tmp_path, "is a folder; expected a file of lengths")


@pytest.mark.parametrize(
    ("values", "doubtful"),
    [
        ([0, 10, 30, 60], True),
        ([0, 0, 5, 9], True),
        ([0, 10, 5, 60], False),
        ([1, 2, 3], False),
        ([0, 0, 0], False),
        ([0, 7], False),
    ],
)
def test_what_looks_like_offsets_is_taken_with_a_warning(values, doubtful, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.array(values))
    assert main(["advise", "--lengths", str(tmp_path / "x.npy"), "--queries", "64"]) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert ("begins at 0 and never falls, as offsets do" in said) == doubtful
