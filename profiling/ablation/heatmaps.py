"""SM-occupancy heatmaps of an ablation on one time axis: the full configuration beside those that differ most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiling.ablation.figures import about
from profiling.ablation.run import RECORDINGS
from profiling.errors import UserError
from profiling.recording import Recording
from profiling.sm_time import Occupancy, occupancy
from profiling.text import plain

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST = 4
"""Panels, the full configuration's included: more do not fit on a screen."""
DARKER = "Darker is busier; zooming or panning one moves all."
MOST_BINS, MOST_CELLS = 400, 600_000
"""Time bins of a panel, and cells of all panels: with plotly.js a page stays far below 8 MB."""


@dataclass(frozen=True)
class Heatmaps:
    """Linked heatmaps: zooming or panning one panel moves all.

    Attributes:
        figure: a panel a configuration; None where there is no recording.
        lead: what is seen; missing: what is not, and why, a line each.
    """

    figure: go.Figure | None
    lead: str
    missing: tuple[str, ...]


def heatmaps(document: Mapping[str, Any], folder: Path) -> Heatmaps:
    """Of the recordings in the document's folder: the full configuration, then those with one switch otherwise whose
    time differs most from it."""
    rows = {row["name"]: row for row in document["rows"] if row["kind"] in ("full", "without")}
    if not any(row.get("recording") for row in rows.values()):
        return Heatmaps(None, "", (_why_none(document, rows),))
    if not (folder / RECORDINGS).is_dir():
        return Heatmaps(None, "", (f"no heatmaps: {RECORDINGS}/ was not kept here; the command makes it again",))
    shown: dict[str, Occupancy] = {}
    missing: dict[str, list[str]] = {}
    for name in sorted(rows, key=lambda name: (rows[name]["kind"] != "full", -_differs(rows[name]))):
        if len(shown) == MOST:
            break
        try:
            shown[name] = _occupancy(document, rows[name], folder)
        except UserError as error:
            missing.setdefault(str(error), []).append(name)
    lines = [f"{', '.join(names)}: {why}" for why, names in missing.items()]
    if not shown:
        return Heatmaps(None, "", tuple(lines))
    if len(shown) == 1:
        lines.append("there is no other recording to set beside it")
    from profiling.figures import occupancy_comparison, occupancy_heatmap

    found = list(shown.values())
    figure = occupancy_comparison(found) if len(found) > 1 else occupancy_heatmap(found[0])
    each = "One modelled launch of each" if document["grade"] == "compiled" else "One recorded launch of each"
    beside = "the full configuration, and below it the single switches whose time differs most from it"
    return Heatmaps(figure, f"{each}: {beside if len(found) > 1 else ', '.join(shown)}. {DARKER}", tuple(lines))


def _differs(row: Mapping[str, Any]) -> float:
    return abs(row["effect"]["change"]) if row["effect"] else 0.0


def _occupancy(document: Mapping[str, Any], row: Mapping[str, Any], folder: Path) -> Occupancy:
    """UserError: no recording, or none that can be read or that is of this ablation."""
    if row["failed"]:
        raise UserError(f"no heatmap, for it failed: {plain(row['failed'], 200)}")
    name = row.get("recording")
    if not name:
        default = "only schedules are replayed" if document["grade"] == "compiled" else "not recorded"
        raise UserError(plain(row.get("no_recording") or default, 200))
    if not isinstance(name, str) or Path(name).name != name or "\0" in name:
        raise UserError(f"its recording is {plain(name, 60)!r}, expected the name of a file in {RECORDINGS}")
    recording = Recording.read(folder / RECORDINGS / name)
    for what, mine, its in (
        ("workload", document["workload"], recording.workload_name),
        ("direction", document["direction"], recording.direction),
    ):
        if mine != its:
            raise UserError(f"its recording is of another {what} ({plain(its, 60)}, not {plain(mine, 60)})")
    bins = max(20, min(MOST_BINS, MOST_CELLS // (MOST * recording.sm_count)))
    return replace(occupancy(recording, bins=bins), title=f"{about(document)} · {row['name']}")


def _why_none(document: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> str:
    if document["grade"] == "compiled":
        return (
            "no heatmaps: no GPU was here, and schedules are replayed only where a recording of this kernel, "
            "configuration and workload is in the package"
        )
    if "--no-why" in str(document["environment"].get("command") or "").split():
        return (
            "no heatmaps: nothing was recorded, for --no-why was given; ablate again without it (with "
            "--resume where the run is still in its folder)"
        )
    reason = next((said for row in rows.values() if (said := row.get("no_recording"))), "")
    if reason:
        return f"no heatmaps: nothing was recorded: {plain(reason, 300)}"
    return "no heatmaps: these results keep no recordings (those of an older version have none); ablate with --force"
