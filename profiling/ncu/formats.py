"""The findings written as Markdown, CSV, JSON or one offline HTML page."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from profiling.ncu import tables
from profiling.ncu.analysis import KernelFindings, ReportFindings, document
from profiling.ncu.words import name_of
from profiling.text import plain
from profiling.word_table import Table, escaped
from profiling.word_table import markdown as table_markdown

FORMATS = ("table", "md", "csv", "json", "html")
LONGEST = 10_000
DETAILED = 5
"""Kernels of a report whose numbers are shown in full, the longest first; the others have their row and verdict."""

BARS = ("tensor", "busiest_pipe", "issue", "dram_throughput", "l2_throughput", "l1_throughput")
CSV_COLUMNS = (
    "report", "kernel", "grid", "block", "launches", "gpu", "capability", "fact", "words", "value", "unit", "grade",
    "source",
)  # fmt: skip


def detail_tables(findings: ReportFindings) -> Iterator[Table]:
    """The tables under a report's overview: of its longest kernels verdict, numbers, deltas and NVIDIA's rules."""
    matches = {id(match.kernel): match for match in (findings.comparison.matches if findings.comparison else ())}
    for item in findings.kernels[:DETAILED]:
        yield tables.verdicts(item)
        if match := matches.get(id(item.kernel)):
            yield tables.deltas(match)
        yield tables.numbers(item)
        if (rules := tables.rules(item)) is not None:
            yield rules


def left_out(findings: ReportFindings) -> str:
    """A sentence on the kernels beyond DETAILED; "" where there are none."""
    more = len(findings.kernels) - DETAILED
    return f"{more} shorter kernels have no table of their own; choose with --kernel" if more > 0 else ""


def markdown(found: Sequence[ReportFindings]) -> str:
    """GitHub's Markdown."""
    parts = ["# What limits these kernels\n"]
    parts += [f"> {escaped(note)}\n" for note in (*tables.differences(found), *tables.notes(found))]
    for findings in found:
        parts.append(table_markdown(tables.overview(findings), 2))
        parts += [table_markdown(table, 3) for table in detail_tables(findings)]
        if more := left_out(findings):
            parts.append(more + "\n")
    return "\n".join(parts)


def comma_separated(found: Sequence[ReportFindings]) -> str:
    """A row a number, long: CSV_COLUMNS. Verdicts are rows of the fact "verdict", stall reasons of "stall: …"."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for findings in found:
        for item in findings.kernels:
            launch = item.kernel.launch
            own = (findings.report.path, launch.kernel, _dims(launch.grid), _dims(launch.block), item.kernel.launches)
            for rest in _facts(item):
                row = (*own, launch.gpu, launch.capability, *rest)
                # A carriage return inside a name would end the row for some readers, an escape reaches a terminal.
                writer.writerow([plain(cell, LONGEST) if isinstance(cell, str) else cell for cell in row])
    return out.getvalue()


def _dims(dims: Sequence[int]) -> str:
    return "x".join(map(str, dims))


def _facts(item: KernelFindings) -> Iterator[tuple[object, ...]]:
    """(fact, words, value, unit, grade, source) of everything that is said of a kernel."""
    for fact, value in {**item.kernel.numbers, **item.attention}.items():
        yield fact, name_of(fact), repr(value.value), value.unit, value.grade, value.source
    for fact, why in item.kernel.absent.items():
        yield fact, name_of(fact), "", "", "", why
    for stall in item.kernel.stalls:
        yield f"stall: {stall.reason}", stall.meaning, repr(stall.share), "%", stall.grade, stall.source
    if item.lost:
        for part in ("tensor", "inside", "imbalance"):
            yield f"sm_time: {part}", "", repr(getattr(item.lost, part)), "%", "derived", item.lost.recording
    for verdict in item.verdicts:
        yield "verdict", f"{verdict.what}: {verdict.why}", "", "", "derived", ", ".join(verdict.evidence)


def as_json(found: Sequence[ReportFindings]) -> str:
    """Everything, as `profiling.ncu.analysis.document` has it; what is no finite number is null."""
    made = json.dumps(_finite(document(found)), indent=2, ensure_ascii=False) + "\n"
    return made.encode("utf-8", "replace").decode("utf-8")  # a path may hold what is no UTF-8


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def html(found: Sequence[ReportFindings]) -> str:
    """One page that opens offline and runs no script."""
    from profiling.page import render

    sections = []
    for findings in found:
        notes = [*tables.differences([findings]), *tables.notes([findings])]
        if more := left_out(findings):
            notes.append(more)
        sections.append(
            {
                "overview": tables.overview(findings),
                "notes": notes,
                "bars": list(_bars(findings)),
                "tables": list(detail_tables(findings)),
            }
        )
    return render("ncu.html", inline_plotly=False, title="What limits these kernels", sections=sections)


def _bars(findings: ReportFindings) -> Iterator[tuple[str, str, float]]:
    for item in findings.kernels[:DETAILED]:
        for fact in BARS:
            if (value := item.kernel.get(fact)) == value:
                yield item.kernel.name, name_of(fact), value
