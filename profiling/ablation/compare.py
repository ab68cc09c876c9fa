"""Two ablations side by side, as a change to a kernel would need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from profiling.errors import UserError
from profiling.text import significant
from profiling.word_table import Table

NOISE = 0.01
"""Of two runs of one configuration in different processes: clocks differ by about as much."""


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Table, list[str]]:
    """Each variant's time in both, and what else differs between them, which comes first.

    Raises:
        UserError: different workloads, kernels or directions; no variant with a time in both.
    """
    for what in ("workload", "impl", "direction"):
        if before[what] != after[what]:
            raise UserError(
                f"diff-report: {what} differs ({before[what]} and {after[what]}); compare ablations of one kernel and "
                "workload"
            )
    warnings = [
        f"{what} differs: {before['environment'].get(what)} and {after['environment'].get(what)}"
        for what in ("gpu", "driver", "torch", "triton", "ptxas")
        if before["environment"].get(what) != after["environment"].get(what)
    ]
    old = {row["name"]: row for row in before["rows"]}
    rows = []
    for row in after["rows"]:
        was = old.pop(row["name"], None)
        rows.append((row["name"], _time(was), _time(row), _change(was, row), _config(was, row)))
    rows += [(name, _time(row), "–", "only in the first", "") for name, row in old.items()]
    if all(cells[3] in ("–", "only in the first", "only in the second") for cells in rows):
        raise UserError("diff-report: no configuration has a time in both; ablate with a GPU")
    spread = "changes: derived; none: within 1 %, or within both spreads"
    headings = ("configuration", "before", "after", "change", "note")
    return Table("Each configuration, before and after", headings, rows, (1, 2, 3), spread), warnings


def _time(row: Mapping[str, Any] | None) -> str:
    return f"{significant(row['time']['median_ms'], 4)} ms" if row and row["time"] else "–"


def _change(was: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    if was is None:
        return "only in the second"
    if not was["time"] or not now["time"]:
        return "–"
    change = now["time"]["median_ms"] / was["time"]["median_ms"] - 1
    spread = max((row["time"]["iqr_ms"] or 0.0) / row["time"]["median_ms"] for row in (was, now))
    return "none" if abs(change) <= max(NOISE, spread) or math.isnan(change) else f"{100 * change:+.1f} %"


def _config(was: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    if was is None or was["values"] == now["values"]:
        return now["failed"]
    old, new = was["values"], now["values"]
    changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return f"set otherwise: {', '.join(changed)}"
