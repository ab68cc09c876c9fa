"""Figures of an ablation's document: the ladder from plain to full, and what each switch does alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from profiling import theme
from profiling.text import for_plotly, significant


def ladder(document: Mapping[str, Any], notes: Sequence[str] = ()) -> go.Figure | None:
    """The time of each rung, from plain to full; None where fewer than two rungs have a time."""
    rows = [row for row in document["rows"] if row["kind"] in ("plain", "rung") and row["time"]]
    if len(rows) < 2:
        return None
    times = [row["time"]["median_ms"] for row in rows]
    grades = [row["time"]["grade"] for row in rows]
    figure = go.Figure(
        go.Bar(
            y=[for_plotly(row["name"]) for row in rows],
            x=times,
            orientation="h",
            marker={"color": [theme.BLUE if grade == "measured" else theme.SKY for grade in grades]},
            error_x={"type": "data", "array": [(row["time"]["iqr_ms"] or 0) / 2 for row in rows], "thickness": 1},
            text=[f"{significant(row['time']['median_ms'], 4)} ms  {_words(row)}" for row in rows],
            textposition="inside",
            insidetextanchor="start",
            hovertemplate="%{y}: %{x:.4~g} ms<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed", title_text="configuration")
    figure.update_xaxes(title_text="time of a launch (ms); whiskers: interquartile range", rangemode="tozero")
    title = f"From plain to full: {significant(times[0] / times[-1])}× faster"
    grade = " and ".join(dict.fromkeys(grades))
    return theme.finish(figure, title, about(document), grade, height=70 + 42 * len(rows), notes=notes)


def tornado(document: Mapping[str, Any], notes: Sequence[str] = ()) -> go.Figure | None:
    """What each switch, otherwise than in the full configuration, costs alone; None where no effect is known."""
    rows = [row for row in document["rows"] if row["kind"] == "without" and row["effect"]]
    if not rows:
        return None
    rows.sort(key=lambda row: row["effect"]["change"])
    changes = [100 * row["effect"]["change"] for row in rows]
    spans = [
        (0.0, 0.0)
        if None in (row["effect"]["low"], row["effect"]["high"])
        else (100 * row["effect"]["high"] - change, change - 100 * row["effect"]["low"])
        for row, change in zip(rows, changes, strict=True)
    ]
    colours = [
        theme.GREY if not row["effect"]["differs"] else theme.VERMILION if change > 0 else theme.GREEN
        for row, change in zip(rows, changes, strict=True)
    ]
    figure = go.Figure(
        go.Bar(
            y=[f"{for_plotly(row['name'])}: {row['effect']['words'].split(' (')[0]}" for row in rows],
            x=changes,
            orientation="h",
            marker={"color": colours},
            error_x={
                "type": "data", "symmetric": False, "array": [up for up, _ in spans],
                "arrayminus": [down for _, down in spans], "thickness": 1.2, "color": theme.INK,
            },
            hovertemplate="%{y}<br>%{x:+.2f} %<extra></extra>",
        )
    )  # fmt: skip
    figure.add_vline(x=0, line={"color": theme.INK, "width": 1})
    figure.update_xaxes(title_text="time against the full configuration (%): right is slower; whiskers: 95 % interval")
    figure.update_yaxes(title_text="one switch otherwise")
    worst = rows[-1]
    title = (
        f"{for_plotly(worst['switch'])} buys most: otherwise {for_plotly(worst['effect']['words'].split(' (')[0])} time"
    )
    if not worst["effect"]["differs"] or worst["effect"]["change"] <= 0:
        title = "No switch makes a difference"
    grades = " and ".join(dict.fromkeys(row["effect"]["grade"] for row in rows))
    return theme.finish(figure, title, about(document), grades, height=90 + 42 * len(rows), notes=notes)


def about(document: Mapping[str, Any]) -> str:
    """What was looked at."""
    words = [document["workload"], document["direction"], document["impl"], document["environment"].get("gpu", "")]
    return " · ".join(str(word) for word in words if word)


def _words(row: Mapping[str, Any]) -> str:
    return f"({row['effect']['words'].split(' (')[0]})" if row["effect"] else ""
