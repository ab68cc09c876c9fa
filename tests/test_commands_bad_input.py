"""Files that are no recordings, or not whole: one line and exit code 2, or a warning beside every number."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import synthetic_recording

from profiling.__main__ import main
from profiling.recording import Recording


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.parquet"
    synthetic_recording(256, [100, 4000, 0, 900]).write(path)
    return path


def truncated(path, good):
    path.write_bytes(good.read_bytes()[:-200])


def cut_short(path, good):
    path.write_bytes(good.read_bytes()[:100])


def empty(path, good):
    path.write_bytes(b"")


def text(path, good):
    path.write_text("launch,cta,sm\n0,0,0\n")


def a_folder(path, good):
    path.mkdir()


def foreign(path, good):
    pq.write_table(pa.table({"x": [1, 2, 3]}), path)


def without_rows(path, good):
    pq.write_table(pq.read_table(good).slice(0, 0), path)


def without_a_column(path, good):
    pq.write_table(pq.read_table(good).drop_columns(["sm"]), path)


def newer(path, good):
    with_metadata(path, good, schema="2.0")


def not_json(path, good):
    table = pq.read_table(good)
    pq.write_table(table.replace_schema_metadata({b"jfa": b"{not json"}), path)


def with_metadata(path, good, **changes):
    table = pq.read_table(good)
    metadata = json.loads(table.schema.metadata[b"jfa"]) | changes
    pq.write_table(table.replace_schema_metadata({b"jfa": json.dumps(metadata).encode()}), path)


def commands(path, good, folder):
    """Every command that reads a recording, on this one."""
    return {
        "show": ["show", path],
        "show --json": ["show", path, "--json"],
        "compare": ["compare", good, path],
        "heatmap": ["heatmap", path, "-o", folder / "x.html"],
        "report": ["report", path, "-o", folder / "report"],
        "export": ["export", path, "-o", folder / "x.json"],
    }


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (truncated, ""),
        (cut_short, ""),
        (empty, "empty"),
        (text, "Parquet"),
        (a_folder, "folder"),
        (foreign, ""),
        (without_rows, "no spans"),
        (without_a_column, "'sm'"),
        (newer, "2.0"),
        (not_json, ""),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_2(tmp_path, good, capsys, spoil, expected):
    path = tmp_path / "bad.parquet"
    spoil(path, good)
    for name, arguments in commands(path, good, tmp_path).items():
        assert main([str(word) for word in arguments]) == 2, name
        output, errors = capsys.readouterr()
        assert output == "", name
        assert errors.startswith("error: ") and errors.count("\n") == 1, (name, errors)
        assert "bad.parquet" in errors and expected in errors, (name, errors)
    assert not (tmp_path / "x.html").exists() and not (tmp_path / "x.json").exists()


@pytest.fixture
def partial(tmp_path):
    path = tmp_path / "partial.parquet"
    recording = synthetic_recording(256, [100, 4000, 0, 900])
    recording.metadata["events"] = {"written": len(recording.events), "lost": 7, "lost_by_lane": {"3": 7}}
    recording.write(path)
    return path


def test_lost_events_are_a_warning_beside_every_number_they_touch(tmp_path, good, partial, capsys):
    for name, arguments in commands(partial, good, tmp_path).items():
        assert main([str(word) for word in arguments]) == 0, name
        output, errors = capsys.readouterr()
        assert errors == ""
        assert "7 events lost in 1 lane (3)" in output, name
    assert "7 events lost" in (tmp_path / "x.html").read_text()


def test_what_a_partial_recording_cannot_tell_is_refused_not_guessed(partial, capsys):
    assert main(["show", str(partial), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["tail"]) == {"refused"} and "lost" in found["tail"]["refused"]
    written = len(Recording.read(partial).events)
    assert found["coverage"] == pytest.approx(written / (written + 7))


def test_a_strangers_file_without_the_gpu_is_an_error_that_names_the_key(tmp_path, good, capsys):
    path = tmp_path / "bare.parquet"
    table = pq.read_table(good)
    pq.write_table(table.replace_schema_metadata({b"jfa": b'{"schema": "1.0"}'}), path)
    assert main(["show", str(path)]) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.count("\n") == 1 and "'gpu.sm_count'" in errors


def test_a_strangers_file_with_the_gpu_alone_is_shown(tmp_path, good, capsys):
    path = tmp_path / "bare.parquet"
    table = pq.read_table(good)
    pq.write_table(table.replace_schema_metadata({b"jfa": b'{"schema": "1.0", "gpu": {"sm_count": 16}}'}), path)
    assert main(["show", str(path)]) == 0
    output = capsys.readouterr().out
    assert "coverage     unknown" in output
    assert "the file does not say how these times were obtained" in output


@pytest.mark.parametrize("where", ["durations", "workload", "versions", "kernel", "events", "clock", "gpu"])
def test_metadata_of_the_wrong_kind_never_ends_in_a_traceback(tmp_path, good, capsys, where):
    path = tmp_path / "odd.parquet"
    for value in ("words", 3, None, [], {"plain_ns": "x", "recorded_ns": [], "kv_lens": "abc", "flop": "x"}):
        with_metadata(path, good, **{where: value})
        code = main(["show", str(path)])
        output, errors = capsys.readouterr()
        assert code in (0, 2)
        assert (errors == "") if code == 0 else (errors.count("\n") == 1 and output == "")
        assert main(["show", str(path), "--json"]) == code
        capsys.readouterr()


@pytest.mark.parametrize("value", ["12", -5, True, {"ns": 1}])
def test_a_duration_that_is_none_is_missing_and_that_is_said(tmp_path, good, capsys, value):
    path = tmp_path / "odd.parquet"
    with_metadata(path, good, durations={"plain_ns": value, "recorded_ns": 1000, "repeats": 3})
    assert main(["show", str(path)]) == 0
    output = capsys.readouterr().out
    assert f"'durations.plain_ns' is {value!r}, expected a number" in output
    assert "slower" not in output and "recorded," not in output
    assert main(["show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["launches"]


@pytest.mark.parametrize(("recorded", "words"), [(1009, "no difference beyond the spread"), (1020, "+2.0 %")])
def test_what_recording_cost_is_none_within_the_spread(tmp_path, good, capsys, recorded, words):
    path = tmp_path / "timed.parquet"
    durations = {"plain_ns": 1000, "plain_iqr_ns": 10, "recorded_ns": recorded, "recorded_iqr_ns": 3, "repeats": 9}
    with_metadata(path, good, durations=durations)
    assert main(["show", str(path)]) == 0
    assert f"plain: {words}" in capsys.readouterr().out


def test_coverage_of_a_recording_that_lost_one_event_is_not_100_percent(tmp_path, good, capsys):
    path = tmp_path / "one.parquet"
    with_metadata(path, good, events={"written": 1_000_000, "lost": 1})
    assert main(["show", str(path)]) == 0
    output = capsys.readouterr().out
    assert "1 event lost, coverage > 99.99 %" in output and "100.00 %" not in output
