"""What `sweep` says beside its grid: lengths that were cut, and where its cost model is extrapolated."""

from __future__ import annotations

import json

import numpy as np
import pytest

from profiling import examples
from profiling.__main__ import main
from profiling.errors import UserError
from profiling.sweep import Population, sweep
from profiling.tiles_measured import tiles_of


@pytest.fixture(scope="module")
def like():
    return tiles_of(examples.load())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--median", "32769"],
            "median: expected 1 to 32,768, got 32,769; give a larger longest length as well (--longest)",
        ),
        (["--median", "100", "--longest", "99"], "median: expected 1 to 99, got 100; give a larger longest length"),
        (["--longest", "3000000000"], "longest: expected 1 to 2,147,483,647, got 3,000,000,000"),
        (["--batch", "1000000000000"], "batch: expected 1 to 100,000,000"),
        (["--queries", "3000000000"], "queries: expected 1 to 2,147,483,647"),
    ],
)
def test_a_population_beyond_its_limits_is_refused(options, expected, capsys):
    assert main(["sweep", *options]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


@pytest.mark.parametrize(("median", "longest"), [(1, 32768), (1000, 1000), (1000, 1500), (20, 10**6)])
@pytest.mark.parametrize("skew", [0.0, 0.5, 3.0])
def test_lengths_drawn_outside_are_counted(median, longest, skew):
    population = Population(batch=500, median=median, longest=longest)
    free = Population(batch=500, median=median, longest=2**31 - 1)
    raised, cut = population.outside(0.5, skew)
    kept, whole = population.lengths(0.5, skew), free.lengths(0.5, skew)
    assert cut == (whole > longest).sum() == (kept < whole).sum() and kept.max() <= longest
    rng = np.random.default_rng(population.seed)
    drawn = median * np.exp(skew * rng.standard_normal(500))[np.flatnonzero(kept)]
    assert raised == (drawn < 1).sum() <= (kept == 1).sum() and (kept > 0).sum() == 250
    assert raised or median > 1 or not skew
    assert (raised, cut) == (0, 0) or skew > 0


def test_every_point_says_how_many_lengths_were_cut(like):
    population = Population(batch=64, median=1000, longest=1200)
    table = sweep(like, population, [0.5, 1.0], [0.0, 1.0])
    for (density, skew), rows in table.groupby(["density", "skew"]):
        assert set(rows["cut"]) == {population.outside(density, skew)[1]} and set(rows["sequences"]) == {64 * density}
    most = table["cut"].max()
    (note,) = table.attrs["notes"]
    assert (
        f"over 1,200 keys and cut to that (--longest): at 2 of 4 points, at most {most} of 64 lengths (density 1"
        in note
    )


def test_a_grid_within_the_model_has_nothing_to_say(like):
    assert sweep(like, Population(), [1.0], [0.0, 0.4]).attrs["notes"] == ()


def test_what_was_cut_and_extrapolated_is_on_the_terminal_in_the_document_and_in_the_figure(capsys, tmp_path):
    page = tmp_path / "s.html"
    command = ["sweep", "--densities", "1", "--skews", "0,1.8", "--gpu", "B200"]
    assert main([*command, "-o", str(page)]) == 0
    text = capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = (
        "tiles cost what they cost on NVIDIA H200, not on B200",
        "tiles of up to 32,768 columns at 1 of 2 points: the model was fitted to 16 to 8,166",
        "lengths that were drawn over 32,768 keys and cut to that",
    )
    for part in expected:
        assert f"warning: {part}" in text and any(line.startswith(part) for line in found["warnings"])
        assert part[:50] in page.read_text()
    assert "median 1,024 keys, at most 32,768" in found["about"]
    rule = "the plainest within the replay's error (3.5 %) of the quickest is to be chosen"
    assert rule in " ".join(text.split()) and "within the replay's error (3.5 %)" in page.read_text()
    assert [row["cut"] > 0 for row in found["rows"]] == [False] * 4 + [True] * 4


def test_a_longer_limit_moves_the_cut(capsys):
    assert (
        main(["sweep", "--densities", "1", "--skews", "1", "--median", "40000", "--longest", "9000000", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert {row["cut"] for row in found["rows"]} == {0} and not any("cut to" in line for line in found["warnings"])
    assert any("how far off it is there is not known" in line for line in found["warnings"])


def test_no_population_is_bounded_from_python_alone(like):
    with pytest.raises(UserError, match="median: expected 1 to 32,768, got 100,000"):
        sweep(like, Population(median=100_000))
    assert Population(median=100_000, longest=200_000).lengths(1.0, 1.0).max() == 200_000


def test_values_given_twice_are_one_point(like):
    once, twice = (sweep(like, Population(batch=64), [0.5] * n, [1.0] * n) for n in (1, 2))
    assert twice.equals(once) and twice.attrs["notes"] == once.attrs["notes"]
