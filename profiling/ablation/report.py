"""An ablation written up: one folder with a page, Markdown, the document as JSON, the raw samples and recordings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiling.ablation.clocks import words
from profiling.ablation.counters import GRADE, LSU
from profiling.ablation.figures import about, ladder, tornado
from profiling.ablation.heatmaps import heatmaps
from profiling.ablation.results import RESULTS, SAMPLES, written
from profiling.ablation.run import Measured
from profiling.errors import UserError
from profiling.files import replacing
from profiling.ncu.metrics import Number
from profiling.ncu.words import show
from profiling.page import PLOTLY_FILE, plotly_js, render, write
from profiling.text import percent, significant
from profiling.word_table import Table, escaped, markdown

PAGE, MARKDOWN = "index.html", "report.md"
NUMBER_PARTS = {"value", "unit", "source"}
"""Of a counter in a document; one of others is left out."""
DRIFTED = 0.02
"""Change of the full configuration's time over a run from which it is said: then the card was not in one state."""


def write_report(document: Mapping[str, Any], folder: Path, measured: Measured | None = None) -> Path:
    """Write everything; the page's path. Heatmaps are of the folder's recordings. UserError: it cannot be written."""
    shown, warnings = tables(document), notes(document)
    figures = [figure for figure in (tornado(document), ladder(document)) if figure is not None]
    linked = heatmaps(document, folder)
    title = f"What each optimisation buys: {about(document)}"
    write(folder / RESULTS, written(document))
    parts = [f"# {title}\n", *(f"> {line}\n" for line in warnings), *(markdown(table, 2) for table in shown)]
    parts += [f"> {escaped(line)}\n" for line in linked.missing]
    if told := words(document.get("clocks") or {}):
        parts.append(f"By NVML, from the first third of the rounds to the last: {told}\n")
    parts.append(f"Command: `{document['environment'].get('command', '')}`\n")
    write(folder / MARKDOWN, "\n".join(parts))
    if measured and measured.samples:
        _write_samples(document, measured, folder / SAMPLES)
    if figures or linked.figure:
        write(folder / PLOTLY_FILE, plotly_js())
    write(
        folder / PAGE,
        render(
            "ablation.html",
            inline_plotly=False,
            title=title,
            figures=figures,
            heatmaps=linked,
            tables=shown,
            warnings=warnings,
            command=document["environment"].get("command", ""),
            clocks=words(document.get("clocks") or {}),
        ),
    )
    return folder / PAGE


def _write_samples(document: Mapping[str, Any], measured: Measured, path: Path) -> None:
    import pandas as pd

    names = {row["key"]: row["name"] for row in reversed(document["rows"])}
    rows = [
        {"variant": names[key], "round": number, "ms": took}
        for key, samples in measured.samples.items()
        for number, took in enumerate(samples)
        if key in names
    ]
    try:
        with replacing(path) as part:
            pd.DataFrame(rows).to_parquet(part, index=False)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error


def notes(document: Mapping[str, Any]) -> list[str]:
    """What a reader must know first."""
    lines = []
    if document["interrupted"]:
        lines.append("interrupted: what was measured until then; the same command with --resume goes on")
    if abs(document["drift"] if document["drift"] is not None else math.nan) > DRIFTED:
        told = words(document.get("clocks") or {})
        seen = f" (from the first third of the rounds to the last {told}, by NVML)" if told else ""
        lines.append(f"the full configuration's own time moved by {document['drift'] * 100:+.1f} % over the run{seen}")
    if document["grade"] == "compiled":
        lines.append("no GPU was here: resources are compiled, times modelled where there are any; nothing was run")
    return lines


def tables(document: Mapping[str, Any]) -> list[Table]:
    """The switches, the variants with their times, effects and reasons, and what ncu measured where it was asked."""
    switches = Table(
        "Switches",
        ("switch", "full", "otherwise", "what it is"),
        [(s["name"], str(s["full"]), str(s["other"]), s["what"]) for s in document["switches"]],
    )
    titles = {
        ("full", "without"): "From the full configuration, each switch otherwise alone",
        ("plain", "with"): "From the plain one, each switch alone",
        ("plain", "rung"): "The ladder, each rung against the one before",
    }
    counted = [table] if (table := _counters(document)) else []
    return [switches, *(_variants(document, kinds, title) for kinds, title in titles.items()), *counted]


def _variants(document: Mapping[str, Any], kinds: tuple[str, ...], title: str) -> Table:
    rows = [row for row in document["rows"] if row["kind"] in kinds]
    graded = {row["time"]["grade"] for row in rows if row["time"]}
    graded |= {row["resources"]["grade"] for row in rows if row["resources"]}
    headings = ("configuration", "time", "spread", "effect", "registers", "stack", "in the loop", "SM time", "why")
    cells = [
        (
            row["name"],
            f"{significant(row['time']['median_ms'], 4)} ms" if row["time"] else "–",
            f"{significant(row['time']['iqr_ms'], 2)} ms" if row["time"] and row["time"]["iqr_ms"] is not None else "–",
            row["effect"]["words"] if row["effect"] else "–",
            _resource(row, "registers", ""),
            _resource(row, "stack", " B"),
            _resource(row, "loop_spills", " spills"),
            _sm_time(row),
            row["failed"] or (row["waits"] or {}).get("words", "–"),
        )
        for row in rows
    ]
    words = ", ".join(sorted(graded)) or "nothing known"
    if "measured" in graded:
        words += "; effects: 95 % bootstrap intervals over rounds"
    # A column that says nothing of any row is left out.
    told = [i for i in range(len(headings)) if any(cell[i] != "–" for cell in cells)]
    right = tuple(place for place, i in enumerate(told) if i in (1, 2, 4, 5, 6))
    return Table(
        title, tuple(headings[i] for i in told), [tuple(cell[i] for i in told) for cell in cells], right, words
    )


COUNTERS = (
    ("duration", "duration"),
    ("tensor", "tensor pipe"),
    ("shared_wavefronts", "SMEM pipe"),
    (LSU, "LSU pipe"),
    ("l2_throughput", "L2"),
    ("dram_throughput", "DRAM"),
    ("occupancy_achieved", "occupancy"),
    ("registers", "registers"),
)
"""Facts of a row's counters, and their headings."""


def _counters(document: Mapping[str, Any]) -> Table | None:
    """What ncu measured of one launch of each configuration, or why it did not; None where it was not asked."""
    rows: dict[str, Mapping[str, Any]] = {}
    for row in document["rows"]:
        if row.get("ncu"):
            rows.setdefault(row["key"], row)
    if not rows:
        return None
    cells = []
    for row in rows.values():
        said = row["ncu"]
        told = said.get("numbers") or {}
        whole = [fact for fact, _ in COUNTERS if set(told.get(fact, ())) == NUMBER_PARTS]
        numbers = {fact: Number(**told[fact], grade=GRADE) for fact in whole}
        several = f" ({said['launches']} launches, one's numbers)" if said.get("launches", 1) > 1 else ""
        verdict = f"not measured: {said['failed']}" if "failed" in said else said.get("verdict", "–") + several
        cells.append((row["name"], *(show(numbers.get(fact)) for fact, _ in COUNTERS), verdict))
    title = "What Nsight Compute measured of one launch of each"
    headings = ("configuration", *(heading for _, heading in COUNTERS), "verdict")
    grade = (
        f"{GRADE}, after the rounds, clocks as they are, caches emptied: durations are not those of the rounds; pipes, "
        "L2 and DRAM: % of their peak; verdicts: derived"
    )
    return Table(title, headings, cells, tuple(range(1, 1 + len(COUNTERS))), grade)


def _sm_time(row: Mapping[str, Any]) -> str:
    split = row["sm_time"]
    return f"work {percent(split['work'])}, tail {percent(split['tail'])}" if split else "–"


def _resource(row: Mapping[str, Any], name: str, unit: str) -> str:
    resources = row["resources"] or {}
    return f"{resources[name]:,}{unit}" if name in resources else "–"
