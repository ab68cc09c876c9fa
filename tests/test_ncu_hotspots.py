"""Where samples stand: source pages of this project's kernels as ncu printed them, and pages that hold none."""

from __future__ import annotations

import csv
import io
import json
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ncu_kernels import file

from profiling import doctor
from profiling.__main__ import main
from profiling.errors import UserError
from profiling.ncu import source_page
from profiling.ncu.hotspots import BARRIER, FENCE, ISSUING, MBARRIER, PRODUCTS, UNSAID, Hotspots, hotspots
from profiling.ncu.source_page import read_source

BACKWARD, RESIDENT = "h200_hopper_backward.source.csv", "h200_hopper_resident.source.csv"


def of(name: str) -> Hotspots:
    (listing,) = read_source(file(name))
    return hotspots(listing)


@pytest.fixture(scope="module")
def backward() -> Hotspots:
    return of(BACKWARD)


class TestTheBackwardsPage:
    """dQ added up in memory; dense-1024: 393,216 steps of two warpgroups of four warps."""

    def test_every_sample_is_somewhere_once(self, backward):
        assert backward.samples == backward.code["samples"].sum() == 697_182
        assert backward.loops["samples"].sum() == backward.samples
        assert backward.loops["instructions"].sum() == len(backward.code) == 3800
        assert backward.waits["samples"].sum() == backward.samples
        assert backward.loops["share"].sum() == pytest.approx(1) == backward.waits["share"].sum()
        assert backward.leaving == 0

    def test_samples_without_a_reason_at_a_product_wait_for_products(self, backward):
        """37,480 samples, all at wgmma: this page has no column for their reason."""
        (listing,) = read_source(file(BACKWARD))
        missing = listing.code["samples"] - listing.stalls.sum(axis=1)
        assert missing.sum() == 37_480 and set(listing.code["text"][missing > 0].str[:5]) == {"HGMMA"}
        found = backward.waits.set_index("what")["samples"][PRODUCTS]
        assert found > 37_480 and (backward.code.loc[[1662, 3096], "what"] == PRODUCTS).all()

    def test_each_warpgroup_has_a_loop_over_its_steps(self, backward):
        loops = backward.loops[backward.loops["products"] > 30]
        assert list(loops["rounds"]) == [4 * 393_216] * 2
        assert list(loops["products"]) == [34, 34] and list(loops["wavefronts"]) == [320, 320]
        assert (loops["share"] > 0.3).all() and (loops["depth"] == 2).all()

    def test_samples_behind_dqs_stores_are_a_fences(self, backward):
        """Found at the fence, and at the barrier and the store behind it, under the name of a memory's answer."""
        one, other = (backward.code[backward.code["loop"] == name] for name in ("4.2.1", "4.6.1"))
        hottest = one.loc[one["samples"].idxmax()]
        assert hottest["text"].startswith("FENCE") and hottest["what"] == FENCE
        assert hottest["samples"] / one["samples"].sum() == pytest.approx(0.142, abs=5e-4)
        assert one.loc[hottest.name + 1, "text"].startswith("BAR.SYNC") and one.loc[hottest.name + 1, "what"] == FENCE
        assert other.loc[3161, "text"].startswith("BAR.SYNC") and other.loc[3161, "what"] == FENCE  # five behind
        loops = backward.loops.set_index("name")
        assert loops.loc["4.2.1", "what"] == FENCE and loops.loc["4.2.1", "what_share"] > 0.2
        assert (other["what"] == MBARRIER).any() and (other["what"] == PRODUCTS).any()

    def test_a_jump_behind_a_try_waits_for_an_mbarrier(self, backward):
        hottest = backward.code.loc[backward.code["samples"].idxmax()]
        assert "BRA" in hottest["text"] and hottest["what"] == MBARRIER and hottest["share"] > 0.2
        assert "TRYWAIT" in backward.code.loc[hottest.name - 1, "text"]

    def test_the_kinds_of_waits(self, backward):
        share = backward.waits.set_index("what")["share"]
        assert share.index[0] == MBARRIER
        assert {ISSUING, FENCE, BARRIER, PRODUCTS, "data from global or local memory"} <= set(share.index)
        assert not any(name.startswith("waiting for") for name in share.index)


def test_roles_behind_an_indirect_jump_have_their_loops():
    """The other backward: a load role and three of products, each a loop over 177,248 tiles."""
    loops = of(RESIDENT).loops
    roles = loops[loops["share"] > 0.2]
    assert list(roles["rounds"]) == [708_992] * 4 and list(roles["products"]) == [0, 24, 16, 24]
    assert roles["share"].sum() > 0.99 and (roles["depth"] == 0).all(), "retries at the code's end are part of them"
    assert loops["instructions"].sum() == 3472


@pytest.fixture
def run(capsys, monkeypatch):
    def hotspots(*words, columns=200) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        code = main(["hotspots", *map(str, words)])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return out

    return hotspots


def test_what_is_printed(run):
    out = run(file(BACKWARD))
    assert "697,182 samples at 3,800 instructions" in out and "measured (Nsight Compute's samples" in out
    assert "a fence: the stores before it" in out and "4.2.1" in out and "1,572,864" in out
    assert "of the loop's" not in out


def test_a_loop_in_its_order(run, backward):
    out = run(file(BACKWARD), "--loop", "4.2.1", "--top", "5")
    places = [int(line.split("#")[1].split()[0]) for line in out.splitlines() if "#" in line]
    own = backward.code[backward.code["loop"] == "4.2.1"]
    assert places == sorted(own["samples"].nlargest(5).index)
    assert "up to here" in out and "FENCE" in out


def test_json_has_all(run, backward):
    (document,) = json.loads(run(file(BACKWARD), "--json"))
    assert document["kernel"] == "jfa_backward_hopper" and document["samples"] == 697_182
    assert len(document["code"]) == 3800 and len(document["loops"]) == len(backward.loops)
    assert document["loops"][-1]["name"] == "–" and document["loops"][-1]["rounds"] is None
    (one,) = json.loads(run(file(BACKWARD), "--json", "--loop", "4.2.1"))
    assert {row["loop"] for row in one["code"]} == {"4.2.1"}


def both(folder: Path) -> Path:
    path = folder / "both.csv"
    path.write_bytes(file(BACKWARD).read_bytes() + file(RESIDENT).read_bytes())
    return path


def test_two_kernels_in_a_page(run, tmp_path):
    out = run(both(tmp_path))
    assert "jfa_backward_hopper (launch 1 of 2):" in out and "jfa_backward_resident (launch 2 of 2):" in out
    assert "jfa_backward_hopper" not in run(both(tmp_path), "--kernel", "resident$")
    assert "jfa_backward_resident:" in run(both(tmp_path), "--launch", "2", "--loop", "6")


def test_a_narrow_terminal_breaks_no_word(run):
    for words in ((), ("--loop", "4.2.1")):
        out = run(file(BACKWARD), *words, columns=80)
        assert "instructions" in out and "FENCE.VIEW.ASYNC.S" in out and max(map(len, out.splitlines())) <= 80
    assert out.count("samples") >= 1


def test_a_page_cut_at_the_end_of_a_line(run, tmp_path):
    lines = file(BACKWARD).read_text().splitlines(keepends=True)
    out = run(written(tmp_path, "".join(lines[:1800])))
    assert "warning: " in out and "jumps to instructions that are not there: was the page cut?" in out


HEADER = '"Address","Source","# Samples","Instructions Executed","stall_wait"\n'
ROW = '"0x10","EXIT","3","4","3"\n'


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "page.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_page_without_a_name_and_with_less(tmp_path):
    said = "\ufeff==PROF== Connected\r\n" + HEADER + ROW + "==PROF== Disconnected\r\n"
    (listing,) = read_source(written(tmp_path, said))
    found = hotspots(listing)
    assert (found.kernel, found.samples) == ("", 3) and np.isnan(found.loops["wavefronts"]).all()
    assert list(found.loops["name"]) == ["–"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        (b"\0\1\2", "this is no text"),
        ("hello\n", "holds no source page of machine code"),
        ('"ID","Process ID","Kernel Name"\n"0","1","k"\n', "holds no source page of machine code"),
        (HEADER, "line 1: a header and no instruction under it: the page was cut"),
        (HEADER + ROW + '"0x20","EX', "line 3: 2 fields under a header of 5: the page was cut"),
        (HEADER + '"1","EXIT // no","3","4","3"\n"x","EXIT","3","4","3"\n', "line 3: 'x' is no instruction's address"),
        (HEADER + '"0x10","EXIT","many","4","3"\n', "line 2: # Samples is 'many'; expected a count"),
        (HEADER + '"0x10","EXIT","32.5","4","3"\n', "line 2: # Samples is '32.5'; expected a count"),
        (HEADER + '"0x10","EXIT","1,234.567","4","3"\n', "line 2: # Samples is '1,234.567'; expected a count"),
        (HEADER + f'"0x10","EXIT","{"9" * 400}","4","3"\n', "expected a count"),
        (HEADER + '"0x10","EXIT","-","-",""\n', "line 1: no instruction has a sample"),
        (
            '"Address","Source","Instructions Executed"\n"0x10","EXIT","4"\n',
            "line 1: the page has no samples of stalls",
        ),
        ('"Address","Source","# Samples"\n"0x10","EXIT","4"\n', "profile with --section SourceCounters"),
    ],
)
def test_what_is_no_page_is_one_line(text, said, tmp_path, capsys):
    assert main(["hotspots", str(written(tmp_path, text))]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and not out


def test_what_is_asked_for_and_not_there(tmp_path, capsys, monkeypatch):
    page = str(file(BACKWARD))
    report = written(tmp_path, b"NVR\0 and more")
    monkeypatch.setattr(source_page, "find_ncu", lambda: None)
    for words, said in (
        ([page, "--kernel", "forward"], "none of the kernels in"),
        ([page, "--kernel", "("], "is not a regular expression"),
        ([page, "--loop", "4.2.7"], "did you mean"),
        ([page, "--launch", "2"], "holds 1 launch that match"),
        ([str(both(tmp_path)), "--loop", "1"], "holds 2 launches; choose one with --kernel or --launch"),
        ([str(tmp_path / "none.csv")], "No such file"),
        ([str(tmp_path)], "is a folder"),
        ([str(report)], "only ncu reads the source page of a report"),
    ):
        assert main(["hotspots", *words]) == 2
        out, err = capsys.readouterr()
        assert said in err and err.count("\n") == 1 and not out, words


def test_a_report_is_printed_by_the_ncu_that_is_there(tmp_path, monkeypatch):
    """A stand-in for ncu: it prints the page only where it is asked for it rightly."""
    report = written(tmp_path, b"NVR\0 and more")
    stand_in = tmp_path / "ncu"
    stand_in.write_text(
        f'#!/bin/sh\n[ "$*" = "--import {report} --csv --page source --print-source sass" ] && cat "{file(BACKWARD)}"\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr(source_page, "find_ncu", lambda: str(stand_in))
    (listing,) = read_source(report)
    assert listing.kernel == "jfa_backward_hopper"
    stand_in.write_text("#!/bin/sh\necho 'no report of mine' >&2\nexit 1\n")
    with pytest.raises(UserError, match=r"ncu --import failed \(no report of mine\)$"):
        read_source(report)


WHOLE_LINES = 300


@given(
    lines=st.integers(2, WHOLE_LINES),
    at=st.integers(0, WHOLE_LINES),
    column=st.integers(0, 60),
    text=st.one_of(st.text(max_size=8), st.sampled_from(["1,234", "-", "1e9", "BRA 0x0", "@P0 BRA 0x7fcdab7c5b10"])),
)
def test_a_damaged_page_never_ends_in_a_traceback(lines, at, column, text, tmp_path_factory):
    """Cut at a line's end, with any text in a field: told in one line, or read."""
    rows = list(csv.reader(file(BACKWARD).read_text().splitlines()[:lines]))
    row = rows[at % len(rows)]
    row[column % len(row)] = text
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows(rows)
    path = written(tmp_path_factory.mktemp("pages"), out.getvalue())
    try:
        for listing in read_source(path):
            found = hotspots(listing)
            assert found.loops["samples"].sum() == pytest.approx(found.samples)
    except UserError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)


def test_separators_of_thousands(tmp_path):
    (listing,) = read_source(written(tmp_path, HEADER + '"0x10","EXIT","1,234","1.234.567","1\u202f234"\n'))
    assert list(listing.code[["samples", "executed"]].iloc[0]) == [1234, 1_234_567]
    assert listing.stalls["wait"].iloc[0] == 1234


def test_issuing_is_what_an_instruction_does_only_where_nothing_waits(tmp_path):
    header = '"Address","Source","# Samples","stall_selected","stall_wait","stall_dispatch"\n'
    counts = ('"9","5","2","1"', '"3","3","0","0"', '"4","0","0","0"', '"0","0","0","0"')
    rows = [f'"{16 * place:#x}","FADD",{row}\n' for place, row in enumerate(counts)]
    (listing,) = read_source(written(tmp_path, header + "".join(rows)))
    assert list(hotspots(listing).code["what"]) == ["the result before it (fixed latency)", ISSUING, UNSAID, ""]


def test_a_large_kernel_takes_no_time(tmp_path):
    """50,000 instructions, a loop in every ten."""
    header = HEADER.replace('"stall_wait"', '"stall_wait","stall_long_sb","stall_selected"')
    texts = [f"@P0 BRA {16 * (place - 9):#x}" if place % 10 == 9 else "FADD R0" for place in range(50_000)]
    lines = [f'"{16 * place:#x}","{text}","3","4","1","1","1"\n' for place, text in enumerate(texts)]
    begun = time.process_time()
    (listing,) = read_source(written(tmp_path, header + "".join(lines)))
    assert len(hotspots(listing).loops) == 5001
    assert time.process_time() - begun < 10


def test_the_other_reader_names_this_one(capsys):
    assert main(["ncu", str(file(BACKWARD))]) == 2
    assert "`hotspots` reads" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_real_ncus_source_page(tmp_path, program):
    if doctor.find_ncu() is None:
        pytest.skip("no ncu")
    report = tmp_path / "forward.ncu-rep"
    command = [sys.executable, "-m", "profiling", "launch", "--workload", "self-lognormal"]
    result = program("ncu-collect", "--set", "full", "--kernel", "jfa", "-o", report, "--timeout", 300, "--", *command)
    if "counters" in result.stderr and result.returncode == 2:
        pytest.skip(textwrap.shorten(result.stderr.splitlines()[-1], 200))
    assert result.returncode == 0, result.stderr
    found = [hotspots(listing) for listing in read_source(report)]
    assert any(of.kernel.startswith("jfa_forward") for of in found)
    for of in found:
        assert of.loops["share"].sum() == pytest.approx(1)
        assert of.loops.loc[of.loops["share"].idxmax(), "products"] > 0
