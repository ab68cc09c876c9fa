"""A recording of someone else's kernel, from what its recorder's lanes hold."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from test_lanes import buffer, life  # noqa: E402

from jfa.instrument import OFF, Recorder  # noqa: E402
from profiling import examples  # noqa: E402
from profiling.errors import UserError  # noqa: E402
from profiling.own_kernel import recording_of  # noqa: E402
from profiling.sm_time import summary  # noqa: E402

GPU = {"name": "a GPU", "sm_count": 4}


def recorder(*lives: dict, capacity: int = 2, level: str = "tile") -> Recorder:
    """As two lanes a CTA would leave it, each on its own SM."""
    return Recorder(level, capacity, torch.from_numpy(buffer(list(lives), capacity)))


def lane(sm: int, *events: tuple[int, int, int]) -> dict:
    return life(sm, 1.7, 0, 1_000_000, list(events), 9)


def test_its_spans_are_those_of_the_lanes():
    found = recording_of(recorder(lane(0, (10, 400_000, 0)), lane(1, (20, 900_000, 1))), kernel="mine", gpu=GPU)
    assert found.title() == "a GPU" and found.kernel == "mine" and found.grade == "measured" and found.level == "tile"
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


def test_examples_are_named():
    assert len(examples.names()) >= 16
    assert examples.load("hsp-extreme", schedule="static").schedule == "static"
    with pytest.raises(UserError, match="there is no hsp-extreme_forward_grid; there are hsp-"):
        examples.load("hsp-extreme", schedule="grid")
