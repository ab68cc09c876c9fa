"""Damaged results of an ablation: one line that says what is wrong and where, from every command that reads them."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from profiling.__main__ import main  # noqa: E402
from profiling.ablation import results  # noqa: E402
from profiling.ablation.compare import compare  # noqa: E402
from profiling.ablation.compiled import modelled_ms  # noqa: E402
from profiling.ablation.plan import full_setting, make_plan  # noqa: E402
from profiling.ablation.report import write_report  # noqa: E402
from profiling.ablation.run import Measured  # noqa: E402
from profiling.errors import UserError  # noqa: E402

GONE = object()
"""Takes a part out."""
NCU = {
    "kernel": "jfa_forward",
    "launches": 2,
    "numbers": {"duration": {"value": 2219136.0, "unit": "ns", "source": "gpu__time_duration.sum"}},
    "verdict": "latency-bound",
}


@pytest.fixture
def kept(repository) -> Path:
    """A committed report, which holds no run.json."""
    return repository / "reports" / "ablation" / "dense-1024-forward"


@pytest.fixture
def sound(kept) -> dict[str, Any]:
    """The document of a committed report: a row of each kind, the first of which has everything that a row can have."""
    document = results.read(kept)
    wanted = ("full", "without peel", "plain", "plain + peel", "rung 1: + schedule", "rung 7: + multicast")
    rows = [row for row in document["rows"] if row["name"] in wanted]
    assert len(rows) == len(wanted)
    rows[0] = {
        **rows[0],
        "ncu": NCU,
        "effect": rows[1]["effect"],
        "resources": rows[0]["resources"] | {"loop_spills": 0},
    }
    return document | {"rows": rows, "switches": document["switches"][:2]}


def changed(document: dict[str, Any], place: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """A copy with another value at this place."""
    document = copy.deepcopy(document)
    holder: Any = document
    for step in place[:-1]:
        holder = holder[step]
    if value is GONE:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return document


def kept_in(folder: Path, document: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / results.RESULTS).write_text(document if isinstance(document, str) else json.dumps(document))
    return folder


def row(*place: str | int) -> tuple[str | int, ...]:
    return ("rows", 0, *place)


TIME = row("time")
DAMAGES = [
    (row(), None, "row 0: is null, expected an object"),
    (row(), "x", 'row 0: is "x", expected an object'),
    (row("name"), GONE, "row 0: name is missing"),
    (row("name"), 3, "row 0: name is 3, expected a text"),
    (row("kind"), "half", "row 0 ('full'): kind is \"half\", expected full or plain or without or with or rung"),
    (row("values"), "x", "row 0 ('full'): values is \"x\", expected an object"),
    (row("failed"), None, "row 0 ('full'): failed is null, expected a text"),
    (row("sm_time"), "x", "row 0 ('full'): sm_time is \"x\", expected an object or null"),
    (row("sm_time", "work"), GONE, "row 0 ('full'): sm_time.work is missing"),
    (row("waits"), [1], "row 0 ('full'): waits is [1], expected an object or null"),
    (row("waits", "words"), 1, "row 0 ('full'): waits.words is 1, expected a text"),
    (row("effect", "differs"), "no", "row 0 ('full'): effect.differs is \"no\", expected true or false"),
    (row("effect", "change"), math.nan, "row 0 ('full'): effect.change is NaN, expected a number"),
    (row("resources", "registers"), "x", "row 0 ('full'): resources.registers is \"x\", expected a whole number"),
    (row("ncu"), "x", "row 0 ('full'): ncu is \"x\", expected an object or null"),
    (row("ncu", "numbers", "duration"), 1, "row 0 ('full'): ncu.numbers.duration is 1, expected an object"),
    (TIME, GONE, "row 0 ('full'): time is missing"),
    (TIME, "fast", "row 0 ('full'): time is \"fast\", expected an object or null"),
    ((*TIME, "grade"), GONE, "row 0 ('full'): time.grade is missing"),
    ((*TIME, "grade"), 7, "row 0 ('full'): time.grade is 7, expected measured or modelled"),
    ((*TIME, "median_ms"), GONE, "row 0 ('full'): time.median_ms is missing"),
    *(
        ((*TIME, "median_ms"), value, f"row 0 ('full'): time.median_ms is {said}, expected a number above 0")
        for value, said in ((math.nan, "NaN"), (math.inf, "Infinity"), (-1.5, "-1.5"), (0, "0"), ("1", '"1"'),
                            (None, "null"), (True, "true"), (10**400, "1" + 38 * "0" + "…"))
    ),
    ((*TIME, "iqr_ms"), GONE, "row 0 ('full'): time.iqr_ms is missing"),
    *(
        ((*TIME, "iqr_ms"), value, f"row 0 ('full'): time.iqr_ms is {said}, expected a number of at least 0 or null")
        for value, said in ((math.nan, "NaN"), (-0.1, "-0.1"), ("1", '"1"'))
    ),
    (("rows",), "x", 'rows is "x", expected a list'),
    (("rows",), [], "rows is empty, expected a row for each configuration"),
    (row(), GONE, "no row is named 'full', which all others are set against"),
    (("rows", 2, "name"), "without peel", "2 rows are named 'without peel', expected one"),
    (("switches",), None, "switches is null, expected a list"),
    (("switches", 1), "x", 'switch 1: is "x", expected an object'),
    (("switches", 1, "what"), GONE, "switch 1 ('split'): what is missing"),
    (("drift",), "x", 'drift is "x", expected a number or null'),
    (("interrupted",), "x", 'interrupted is "x", expected true or false'),
    (("grade",), 7, "grade is 7, expected measured or compiled"),
    (("environment",), "x", 'environment is "x", expected an object'),
    (("environment", "gpu"), 7, "environment.gpu is 7, expected a text or null"),
    (("setting",), "x", 'setting is "x", expected an object or null'),
    (("setting", "config"), "x", 'setting.config is "x", expected an object or null'),
    (("workload",), GONE, "is not whole, workload missing"),
    (("schema",), "1", 'schema is "1", this version reads 1 (a number)'),
    (("schema",), 2, "schema is 2, this version reads 1 (a number)"),
    (("schema",), True, "schema is true, this version reads 1 (a number)"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "expected"), DAMAGES, ids=[said[:60] for _, _, said in DAMAGES])
def test_damage_is_one_line_of_both_commands(place, value, expected, sound, tmp_path, capsys):
    whole = kept_in(tmp_path / "whole", sound)
    folder = kept_in(tmp_path / "damaged", changed(sound, place, value))
    for command in (["ablation-page", folder], ["diff-report", folder, whole], ["diff-report", whole, folder]):
        assert main([str(word) for word in command]) == 2
        said, error = capsys.readouterr()
        assert not said and error.startswith(f"error: {folder / results.RESULTS}: {expected}"), error
        assert error.endswith("; make it again with `ablate`\n") and error.count("\n") == 1
    assert [entry.name for entry in folder.iterdir()] == [results.RESULTS], "no page of damaged results"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"kind": "ablation", ', "is no JSON (", ),
        ("", "is no JSON ("),
        ("[" * 100_000, "is no JSON ("),
        ('{"kind": "ablation", "schema": 1, "workload": "\\ud800"}', "is no JSON ("),
        ("[1]", 'is not of an ablation, its kind is not "ablation"; give a folder of `ablate`'),
        ("null", 'is not of an ablation, its kind is not "ablation"; give a folder of `ablate`'),
        ('{"kind": "sweep"}', 'is not of an ablation, its kind is not "ablation"; give a folder of `ablate`'),
    ],
)  # fmt: skip
def test_what_is_no_document_at_all_is_one_line_with_a_way_out(content, expected, kept, tmp_path, capsys):
    folder = kept_in(tmp_path / "odd", content)
    for command in (["ablation-page", folder], ["diff-report", kept, folder]):
        assert main([str(word) for word in command]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {folder / results.RESULTS}: {expected}") and error.count("\n") == 1
        assert "`ablate`" in error


def places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place of a document, of its lists' entries only the first."""
    if place:
        yield place
    if isinstance(value, dict):
        for name in value:
            yield from places(value[name], (*place, name))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*place, 0))


def test_whatever_is_put_in_a_part_s_place_is_read_or_refused(sound, tmp_path):
    """What passes the check can be written up and compared, from either side."""
    passed = refused = 0
    odd = (GONE, None, "x", 7, -0.5, math.nan, 10**400, True, [], [1], {}, {"x": 1})
    for number, place in enumerate(places(sound)):
        for value in odd:
            document = changed(sound, place, value)
            try:
                document = results.read(kept_in(tmp_path / "odd", document))
            except UserError:
                refused += 1
                continue
            passed += 1
            if document["direction"] == sound["direction"] and place[0] not in ("workload", "impl"):
                compare(document, sound)
                compare(sound, document)
            # A page takes a moment: of the places that nothing reads, some are enough.
            if place[:1] != ("setting",) and (number + passed) % 5 == 0:
                write_report(document, tmp_path / "page")
    assert passed > 100 and refused > 300


NO_NAME = "full: its recording is {}, expected the name of a file in recordings"


@pytest.mark.parametrize(
    ("name", "note"),
    [
        (7, NO_NAME.format("'7'")),
        (["x"], "expected the name of a file in recordings"),
        ("..", "is a folder; expected a recording's Parquet file"),
        ("../x.parquet", NO_NAME.format("'../x.parquet'")),
        ("a\0b", NO_NAME.format("'a b'")),
        ("a" * 5000, "full: "),
        ("none.parquet", "none.parquet: no such file"),
    ],
)
def test_a_damaged_name_of_a_recording_is_a_note_of_the_page(name, note, sound, tmp_path, capsys):
    folder = kept_in(tmp_path / "r", changed(sound, row("recording"), name))
    (folder / "recordings").mkdir()
    assert main(["ablation-page", str(folder)]) == 0, capsys.readouterr().err
    (said,) = [line for line in (folder / "report.md").read_text().splitlines() if line.startswith("> full: ")]
    assert note in said


def test_what_ablate_writes_passes(tmp_path):
    """Measured with failures, interrupted before any time, modelled, and only compiled."""
    plan = make_plan(full_setting("triton", "forward", (9, 0), 128, 2), ["schedule", "peel"])
    keys = list(plan.settings())
    shares = {"work": math.nan, "tail": 0.0}
    some = Measured(
        samples={key: [1.0, 1.5, 1.25] for key in keys[:-1]},
        facts={keys[0]: {"registers": 255, "sm_time": shares, "waits": {"words": "–"}, "ncu": NCU},
               keys[1]: {"ncu": {"failed": "ncu did not end within 1 s"}, "no_why": "OutOfMemoryError"}},
        failed={keys[-1]: "hung: no answer in 1 s"},
    )  # fmt: skip
    none = Measured(interrupted=True)
    compiled = {keys[0]: {"registers": 8, "stack": 0, "shared": 0, "loop_spills": 0}, keys[1]: {"why_not": "too large"}}
    from jfa import workloads

    modelled = modelled_ms(plan, workloads.get("hsp-extreme"))
    assert modelled
    for given in ((some, {}, {}), (none, {}, {}), (None, compiled, modelled), (None, compiled, {})):
        document = results.assemble(plan, "hsp-extreme", *given, {"command": "a test", "gpu": "a GPU"})
        write_report(document, tmp_path)
        assert json.dumps(results.read(tmp_path)) == json.dumps(document)


@pytest.mark.parametrize(
    ("failed", "note"),
    [
        ("", "no time in the second"),
        ("CompilationError: too\nlarge", "failed in the second: CompilationError: too large"),
    ],
)
def test_a_row_that_has_lost_its_time_says_why(failed, note, sound, tmp_path, capsys):
    before = kept_in(tmp_path / "a", sound)
    without = changed(changed(sound, row("time"), None), row("failed"), failed)
    after = kept_in(tmp_path / "b", without)
    notes = []
    for command in ([before, after], [after, before], [after, after]):
        done = main(["diff-report", *map(str, command), "--json"])
        assert done == 0, capsys.readouterr().err
        found = json.loads(capsys.readouterr().out)["rows"]
        notes.append(next(row["note"] for row in found if row["configuration"] == "full"))
        assert all(row["note"] == "" for row in found if row["configuration"] != "full")
    both = f"{note.replace('second', 'first')}; {note}" if failed else ""
    assert notes == [note, note.replace("second", "first"), both]


# --- the folder that ablate is given -------------------------------------------------------------------------------

ABLATE = ["ablate", "--workload", "tiny", "--impl", "triton", "--compiled", "-o"]


@pytest.mark.parametrize("more", [[], ["--force"], ["--resume"]])
@pytest.mark.parametrize("paged", [False, True])
def test_kept_results_are_neither_resumed_nor_replaced(more, paged, kept, tmp_path, capsys):
    folder = Path(shutil.copytree(kept, tmp_path / "copy"))
    if paged:
        assert main(["ablation-page", str(folder)]) == 0
        (folder / "recordings").mkdir()
    before = {entry: entry.stat().st_mtime_ns for entry in folder.iterdir()}
    capsys.readouterr()
    assert main([*ABLATE, str(folder), *more]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"error: -o {folder}: holds an ablation's results but not its run.json: it can be neither resumed nor "
        "replaced; give a new folder\n"
    )
    assert {entry: entry.stat().st_mtime_ns for entry in folder.iterdir()} == before


@pytest.mark.parametrize("more", [[], ["--force"], ["--resume"]])
@pytest.mark.parametrize("content", ["", "[]", '{"kind": "sweep"}', None])
def test_foreign_results_are_named_as_foreign(content, more, kept, tmp_path, capsys):
    """A results.json of something else; or one of an ablation, beside a file that is not."""
    if content is None:
        folder, foreign = Path(shutil.copytree(kept, tmp_path / "copy")), "thesis.tex"
        (folder / foreign).write_text("years of work")
    else:
        folder, foreign = kept_in(tmp_path / "other", content), results.RESULTS
    names = sorted(entry.name for entry in folder.iterdir())
    assert main([*ABLATE, str(folder), *more]) == 2
    error = capsys.readouterr().err
    assert f"holds {foreign}, which no ablation made; give a new or empty folder" in error and error.count("\n") == 1
    assert sorted(entry.name for entry in folder.iterdir()) == names


def test_kept_results_that_are_cut_off_are_known_all_the_same(kept, tmp_path, capsys):
    folder = Path(shutil.copytree(kept, tmp_path / "copy"))
    text = (folder / results.RESULTS).read_text()
    (folder / results.RESULTS).write_text(text[: len(text) // 2])
    assert main([*ABLATE, str(folder)]) == 2
    assert "holds an ablation's results but not its run.json" in capsys.readouterr().err


def test_rows_without_a_name_are_not_two_of_one(sound, tmp_path):
    document = changed(changed(sound, ("rows", 1, "name"), ""), ("rows", 2, "name"), "")
    with pytest.raises(UserError, match="2 rows are named '', expected one"):
        results.read(kept_in(tmp_path / "r", document))
