"""``hotspots``: where in a kernel's machine code its warps stand, and what they wait for."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from profiling.commands import arguments, printing
from profiling.commands.printing import Column
from profiling.errors import UserError
from profiling.text import count, percent, plain, significant

if TYPE_CHECKING:
    from profiling.ncu.hotspots import Hotspots

LEAST_SHARE = 0.005
"""Loops and waits with less of the samples are not printed; --json has all."""
WIDE = 150
"""Columns of a terminal below which loops are printed in two tables."""
GRADE = "measured (Nsight Compute's samples of warps); shares and what is waited for: derived"


def hotspots(
    report: Annotated[
        Path, typer.Argument(metavar="REPORT", help=".ncu-rep, or what `ncu --page source --csv` prints of it.")
    ],
    kernel: Annotated[str | None, typer.Option("--kernel", metavar="REGEX", help="Only kernels it matches.")] = None,
    loop: Annotated[
        str | None, typer.Option("--loop", metavar="NAME", help="A loop's instructions in their order, of one kernel.")
    ] = None,
    launch: Annotated[
        int | None, typer.Option("--launch", min=1, help="Only the launch of this number, of those that match.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many instructions to show.")] = 12,
    json: arguments.Json = False,
) -> None:
    """Say where in a kernel's machine code its warps stand, and what they wait for there.

    From the samples of a report's source page (profile with `--section SourceCounters`). Samples are laid at the door
    of what is waited for: a jump behind the try of an mbarrier waits for that, what follows a fence for the stores
    before it. Loops are those of the machine code, each warp-specialised role's among them, with the MMAs, spills and
    wavefronts of shared memory of a round. With --loop, its instructions in order with what has gone by up to there.

    \b
    Examples:
      python -m profiling hotspots backward.ncu-rep
      python -m profiling hotspots source.csv --loop 4.2.1 --top 40
    """
    from profiling.ncu.hotspots import hotspots as where
    from profiling.ncu.source_page import read_source
    from profiling.ncu.summary import pattern_of

    listings = read_source(report)
    pattern = pattern_of(kernel or "")
    chosen = [listing for listing in listings if pattern.search(listing.kernel)]
    if not chosen:
        names = ", ".join(dict.fromkeys(plain(listing.kernel, 60) for listing in listings))
        raise UserError(f"--kernel {kernel!r}: none of the kernels in {report} matches; it holds: {names}")
    if launch is not None:
        if launch > len(chosen):
            raise UserError(f"--launch {launch}: {report} holds {count(len(chosen), 'launch', 'launches')} that match")
        chosen = chosen[launch - 1 : launch]
    if loop is not None and len(chosen) > 1:
        raise UserError(f"--loop: {report} holds {len(chosen)} launches; choose one with --kernel or --launch")
    found = [where(listing) for listing in chosen]
    if loop is not None:
        arguments.choice(loop, list(found[0].loops["name"]), "loop")
    if json:
        printing.document([_document(of, loop) for of in found])
        return
    for number, of in enumerate(found, 1):
        which = f" (launch {number} of {len(found)})" if len(found) > 1 else ""
        name = of.kernel or "a kernel without a name"
        printing.line(f"{name}{which}: {count(of.samples, 'sample')} at {count(len(of.code), 'instruction')}")
        if of.leaving:
            printing.warnings([f"{count(of.leaving, 'jump')} to instructions that are not there: was the page cut?"])
        if loop is None:
            _print_waits(of)
            _print_loops(of)
            _print_hottest(of, top)
        else:
            _print_loop(of, loop, top)


def _document(of: "Hotspots", loop: str | None) -> dict[str, object]:
    code = of.code if loop is None else of.code[of.code["loop"] == loop]
    return {
        "kernel": of.kernel,
        "grade": GRADE,
        "samples": of.samples,
        "leaving": of.leaving,
        "waits": printing.records(of.waits),
        "loops": printing.records(of.loops),
        "code": printing.records(code.rename_axis("place").reset_index()),
    }


def _print_waits(of: "Hotspots") -> None:
    columns = [Column("what", "warps wait for", right=False), Column("share", "of the samples", percent)]
    rows = of.waits[of.waits["share"] >= LEAST_SHARE]
    printing.table(printing.records(rows), columns, title="What warps stand for", grade=GRADE)


def _print_loops(of: "Hotspots") -> None:
    rows = of.loops[of.loops["share"] >= LEAST_SHARE]
    hidden = len(of.loops) - len(rows)
    more = f"; {hidden} more with less than {percent(LEAST_SHARE)} each" if hidden else ""
    title, grade = f"Loops, each without those in it{more}", f"{GRADE}; MMAs, spills and wavefronts: a round of a warp"
    if printing.console().width >= WIDE:
        printing.table(printing.records(rows), [*LOOP, *ROUND, *SAMPLES], title=title, grade=grade)
    else:
        printing.table(printing.records(rows), [*LOOP, *SAMPLES], title=title, grade="")
        printing.table(printing.records(rows), [*LOOP, *ROUND], title="", grade=grade)


LOOP = [Column("name", "loop", right=False)]
ROUND = [
    Column("first", "from", lambda place: f"#{place}" if place >= 0 else "–"),
    Column("instructions", "instructions", "{:,}".format),
    Column("rounds", "rounds of warps", lambda value: f"{value:,.0f}" if math.isfinite(value) else "–"),
    *(
        Column(key, heading, lambda value: f"{value:,.0f}" if float(value).is_integer() else significant(value))
        for key, heading in (("products", "MMAs"), ("spills", "spills"), ("wavefronts", "SMEM wavefronts"))
    ),
]
SAMPLES = [
    Column("share", "samples", percent),
    Column("what", "wait most for", right=False),
    Column("what_share", "of its samples", percent),
]
PLACE = Column("index", "", "#{}".format)
TEXT = Column("text", "instruction", lambda text: plain(text, 60), right=False)
WAITS = Column("what", "waits for", right=False)


def _print_hottest(of: "Hotspots", top: int) -> None:
    code = of.code.rename_axis("index").reset_index()
    rows = code.sort_values("samples", ascending=False, kind="stable").head(top)
    columns = [PLACE, TEXT, Column("loop", "loop", right=False), Column("share", "samples", percent), WAITS]
    printing.table(printing.records(rows), columns, title="Instructions with the most samples", grade=GRADE)


def _print_loop(of: "Hotspots", loop: str, top: int) -> None:
    code = of.code.rename_axis("index").reset_index()
    code = code[code["loop"] == loop]
    code = code.assign(share=code["samples"] / max(code["samples"].sum(), 1.0))
    code["upto"] = code["share"].cumsum()
    rows = code[code["samples"].rank(method="first", ascending=False) <= top]
    columns = [PLACE, TEXT, Column("share", "of the loop's", percent), Column("upto", "up to here", percent), WAITS]
    most = count(len(rows), "instruction")
    title = f"Loop {loop}: the {most} with the most samples of its {len(code):,}, in their order"
    printing.table(printing.records(rows), columns, title=title, grade=GRADE)
