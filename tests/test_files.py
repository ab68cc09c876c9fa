"""A file is written whole or not at all, whoever writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import synthetic_recording

from profiling import storage
from profiling.errors import UserError
from profiling.export import write_trace
from profiling.files import replacing


def test_what_was_there_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "old"
    with replacing(path) as part:
        part.write_text("new")
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["new"]


def test_a_full_disk_leaves_no_half_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = synthetic_recording(64, [5, 700, 0])

    class Full(storage.pq.ParquetWriter):
        def write_table(self, *arguments: object, **options: object) -> None:
            super().write_table(*arguments, **options)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.pq, "ParquetWriter", Full)
    with pytest.raises(UserError, match="No space left"):
        recording.write(tmp_path / "a.parquet")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_an_interrupt_leaves_no_half_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from profiling import export

    def interrupted(self: object, rows: object) -> object:
        yield "{}"
        raise KeyboardInterrupt

    monkeypatch.setattr(export._Writer, "lines", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_trace(synthetic_recording(64, [5, 700, 0]), tmp_path / name)
    assert not list(tmp_path.iterdir())
