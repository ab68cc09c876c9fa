"""A recording of someone else's kernel, from what its recorder's lanes hold."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")

from test_lanes import buffer, life  # noqa: E402

from jfa.instrument import OFF, Recorder  # noqa: E402
from profiling import examples  # noqa: E402
from profiling.__main__ import main  # noqa: E402
from profiling.errors import UserError  # noqa: E402
from profiling.own_kernel import recording_of  # noqa: E402
from profiling.report import write_report  # noqa: E402
from profiling.sm_time import summary, tail_sequences, tail_tiles  # noqa: E402

GPU = {"name": "a GPU", "sm_count": 4}


def recorder(*lives: dict, capacity: int = 2, level: str = "tile") -> Recorder:
    """As two lanes a CTA would leave it, each on its own SM."""
    return Recorder(level, capacity, torch.from_numpy(buffer(list(lives), capacity)))


def lane(sm: int, *events: tuple[int, int, int]) -> dict:
    return life(sm, 1.7, 0, 1_000_000, list(events), 9)


def test_its_spans_are_those_of_the_lanes():
    found = recording_of(recorder(lane(0, (10, 400_000, 0)), lane(1, (20, 900_000, 1))), kernel="mine", gpu=GPU)
    assert (
        found.title() == "mine · a GPU"
        and found.kernel == "mine"
        and found.grade == "measured"
        and found.level == "tile"
    )
    tiles = found.events[found.events["event"] == "tile"]
    assert tiles["tile"].tolist() == [0, 1] and set(tiles["batch"]) == {-1}
    total = summary(found).iloc[0]
    assert (total["tiles"], total["ctas"], total["sms"]) == (2, 2, 4)
    assert total["work_ns"] == pytest.approx(1_300_000, rel=0.001)
    assert found.get("events.lost") == 0 and found.get("clock.sms_fitted") == 2


def test_several_launches_and_roles():
    launches = [recorder(lane(0, (10, 20, 0)), lane(0, (30, 60, 0)))] * 3
    found = recording_of(launches, kernel="mine", roles=("load", "mma"), gpu=GPU, plain_ns=90.0, recorded_ns=99.0)
    assert found.launches == 3 and set(found.events["role"]) == {"load", "mma"} and set(found.events["cta"]) == {0}
    assert found.overhead() == pytest.approx(0.1)


def test_what_does_not_fit_is_counted():
    found = recording_of(recorder(lane(0, (1, 2, 0), (3, 4, 1), (5, 6, 2)), capacity=1), kernel="mine", gpu=GPU)
    assert found.lost == 2 and any("lost" in line for line in found.warnings())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], "expected at least one recorder"),
        ([OFF], "a recorder of level off"),
        ([recorder(lane(0)), recorder(lane(0), level="cta")], "have one level, got cta, tile"),
        ([Recorder("cta", 0, torch.zeros((2, 8), dtype=torch.int64))], "no lane was written"),
    ],
)
def test_wrong_recorders_are_refused(given, expected):
    with pytest.raises(UserError, match=expected):
        recording_of(given, kernel="mine")


@pytest.mark.parametrize(("key", "value"), [("workload", "ragged"), ("gpu", "H200"), ("durations", 3.0)])
def test_a_key_that_must_be_a_mapping_is_refused(key, value):
    with pytest.raises(UserError, match=f"^recording_of: {key} is .*; expected a mapping, such as"):
        recording_of(recorder(lane(0, (10, 20, 0))), kernel="mine", **{key: value})


def test_tiles_of_no_sequence_are_named_as_tiles(tmp_path, capsys):
    """Neither the tail nor the report speaks of sequences, or asks for lengths, that the kernel does not have."""
    lanes = [lane(0, (10, 400_000, 0)), lane(1, (20, 900_000, 1)), lane(2, (20, 90_000, 2))]
    found = recording_of(recorder(*lanes), kernel="mine", gpu=GPU)
    assert tail_sequences(found).empty and not tail_tiles(found).empty
    found.write(tmp_path / "own.parquet")
    assert main(["show", str(tmp_path / "own.parquet")]) == 0
    said = capsys.readouterr().out
    assert "mine · a GPU" in said and "2 tiles ran past" in " ".join(said.split()) and "sequence" not in said
    page = write_report([found], tmp_path / "report").read_text().split("<body>")[1]
    words = re.sub(r"(?s)<script.*?</script>|<h2 id=\"words\">.*", "", page)
    assert "Tiles that ended last" in words
    assert "sequence" not in words and "kv_lens" not in words and "<td>-1</td>" not in words


def test_examples_are_named():
    assert len(examples.names()) >= 16
    assert examples.load("hsp-extreme", schedule="static").schedule == "static"
    with pytest.raises(UserError, match="there is no hsp-extreme_forward_grid; there are hsp-"):
        examples.load("hsp-extreme", schedule="grid")
