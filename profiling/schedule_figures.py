"""Figures of replays: what each schedule is expected to take, and from where on which one wins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from profiling import theme
from profiling.sweep import SHORT
from profiling.text import duration, for_plotly, time_unit, times

GAIN_SCALE = [[0.0, "#F7FBFF"], [0.33, "#9ECAE1"], [0.66, "#3B7C95"], [1.0, "#0B3C5D"]]


def replay_bars(rows: Sequence[dict[str, Any]], about: str, grade: str, notes: Sequence[str] = ()) -> go.Figure:
    """Predicted makespans as bars, the bound of each as a line, what was measured as a mark.

    ``rows``: dicts with schedule, predicted_ns, bound_ns, measured_ns (NaN where there is none).
    """
    names = [for_plotly(row["schedule"]) for row in rows]
    unit, size = time_unit(max(row["predicted_ns"] for row in rows))
    predicted = [row["predicted_ns"] / size for row in rows]
    figure = go.Figure()
    figure.add_bar(
        x=names,
        y=predicted,
        name="predicted (modelled)",
        marker={"color": theme.SKY},
        text=[duration(row["predicted_ns"]) for row in rows],
        textposition="inside",
        insidetextanchor="start",
        textfont={"size": 14, "color": theme.INK},
        hovertemplate="%{x}: %{y:.4~g} " + unit + " predicted<extra></extra>",
    )
    figure.add_scatter(
        x=names,
        y=[row["bound_ns"] / size for row in rows],
        mode="markers",
        name="no schedule below (derived)",
        marker={"symbol": "line-ew", "size": 46, "line": {"width": 3, "color": theme.VERMILION}},
        hovertemplate="%{x}: not below %{y:.4~g} " + unit + "<extra></extra>",
    )
    if any(row["measured_ns"] == row["measured_ns"] for row in rows):
        figure.add_scatter(
            x=names,
            y=[row["measured_ns"] / size for row in rows],
            mode="markers",
            name="measured",
            marker={"symbol": "diamond", "size": 13, "color": theme.INK},
            hovertemplate="%{x}: %{y:.4~g} " + unit + " measured<extra></extra>",
        )
    figure.update_yaxes(title_text=f"makespan ({unit})", rangemode="tozero")
    figure.update_xaxes(title_text="schedule")
    best = min(rows, key=lambda row: row["predicted_ns"])
    title = f"{for_plotly(best['schedule'])} is expected to end first, after {duration(best['predicted_ns'])}"
    return theme.finish(figure, title, about, grade, height=360, notes=notes, legend=True)


def sweep_map(table: pd.DataFrame, about: str, notes: Sequence[str] = ()) -> go.Figure:
    """Density × skew: coloured by what the quickest schedule gains on `static`; each cell names the one to choose.

    ``table``: the result of `profiling.sweep.sweep`.
    """
    best = table.loc[table.groupby(["density", "skew"])["gain"].idxmax()]
    grid = best.pivot(index="density", columns="skew", values="gain").sort_index(ascending=False)
    names = best.pivot(index="density", columns="skew", values="best").reindex(grid.index)
    gain = grid.to_numpy(dtype=float)
    figure = go.Figure(
        go.Heatmap(
            z=gain,
            x=[f"{skew:g}" for skew in grid.columns],
            y=[f"{density * 100:.3g}" for density in grid.index],
            zmin=1.0,
            zmax=max(float(gain.max()), 1.05),
            colorscale=GAIN_SCALE,
            text=names.map(SHORT.get).to_numpy(),
            texttemplate="%{text}",
            textfont={"size": 11},
            xgap=1,
            ygap=1,
            colorbar={"title": theme.colorbar_title("quickest schedule against static, ×"), "thickness": 14},
            hovertemplate="skew %{x}, %{y} % not empty<br>%{z:.3f}× static; choose %{text}<extra></extra>",
        )
    )
    figure.update_xaxes(
        title_text="skew: standard deviation of the lengths' logarithm", type="category", showgrid=False
    )
    figure.update_yaxes(title_text="sequences that are not empty (%)", type="category", showgrid=False)
    figure.update_yaxes(autorange="reversed")
    enough = int((best["best"] == "static").sum())
    title = f"static is enough at {enough} of {len(best)} points; the quickest schedule gains up to {times(gain.max())}"
    key = "a cell names the plainest schedule that is as quick as any; dyn.: dynamic, bal.: balanced"
    grade = str(table.attrs.get("grade", ""))
    return theme.finish(figure, title, about, grade, height=430, notes=[key, *notes])
