"""Figures of waits: where each role's life went, and who was late for whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from profiling import theme
from profiling.text import for_plotly, percent
from profiling.waits import PREFIX

COLOURS = (theme.VERMILION, theme.GREEN, theme.ORANGE, theme.PURPLE, theme.YELLOW, theme.SKY, theme.INK)
SMALLEST = 0.0005
"""Of a role's life: what is less has no column of its own in the matrix."""
MOST_COLUMNS = 14
"""Of the matrix: more names than these cannot be read below it."""


def role_time_bars(parts: pd.DataFrame) -> go.Figure:
    """Each role's life as a bar of 100 %: `parts` is the result of `profiling.waits.role_time`."""
    roles = list(dict.fromkeys(parts["role"]))
    order = ["work", "between tiles", *sorted(p for p in set(parts["part"]) if p.startswith(PREFIX))]
    # The two barriers of a buffer, full and empty, share a colour: no role waits for both.
    stems = list(dict.fromkeys(_stem(part) for part in order[2:]))
    figure = go.Figure()
    for part in order:
        own = parts[parts["part"] == part].set_index("role")["share"].reindex(roles).fillna(0.0)
        colour = {"work": theme.BLUE, "between tiles": theme.GREY}.get(part)
        colour = colour or COLOURS[stems.index(_stem(part)) % len(COLOURS)]
        figure.add_bar(
            y=roles,
            x=100 * own.to_numpy(),
            orientation="h",
            name=for_plotly(part.replace(PREFIX, "waits for ")),
            marker={"color": colour, "line": {"color": "white", "width": 0.5}},
            text=[percent(value) if value >= 0.04 else "" for value in own],
            hovertemplate="%{y}: %{x:.1f} % " + for_plotly(part) + "<extra></extra>",
        )
    figure.update_layout(
        barmode="stack",
        xaxis={"title": {"text": "share of the role's life, %"}, "range": [0, 100]},
        yaxis={"title": {"text": "role"}, "autorange": "reversed"},
        legend={"orientation": "h", "y": -0.3, "yref": "paper", "yanchor": "top", "x": 0},
        margin={"b": 130},
    )
    return _titled(figure, "Where each role's time went", parts, 240 + 50 * len(roles))


def _stem(part: str) -> str:
    return part.removeprefix(PREFIX).removesuffix("_full").removesuffix("_empty")


def late_matrix(table: pd.DataFrame) -> go.Figure:
    """Who waits for whom: `table` is the result of `profiling.late.late`. Rows wait, columns are late.

    Less than SMALLEST is left out; beyond MOST_COLUMNS the smallest columns are one, "all else".
    """
    named = table[table["share"] >= SMALLEST]
    named = named.assign(
        waits=[f"{role} waits for {barrier}" for role, barrier in zip(named["role"], named["barrier"], strict=True)],
        late=[
            f"{late}: {doing.replace(PREFIX, 'waits for ')}"
            for late, doing in zip(named["late"], named["doing"], strict=True)
        ],
    )
    grid = named.pivot_table(index="waits", columns="late", values="share", aggfunc="sum", fill_value=0.0)
    grid = grid.loc[grid.sum(axis=1).sort_values(ascending=False).index]
    grid = grid[grid.sum(axis=0).sort_values(ascending=False).index]
    if len(grid.columns) > MOST_COLUMNS:
        few = grid.columns[MOST_COLUMNS - 1 :]
        grid = grid.drop(columns=few).assign(**{"all else": grid[few].sum(axis=1)})
    share = 100 * grid.to_numpy(dtype=float)
    figure = go.Figure(
        go.Heatmap(
            z=share,
            x=[for_plotly(name) for name in grid.columns],
            y=[for_plotly(name) for name in grid.index],
            colorscale=theme.OCCUPANCY_SCALE,
            zmin=0,
            colorbar={"title": {"text": "% of the<br>waiting role's<br>life"}},
            text=np.where(share >= 0.05, np.char.mod("%.1f", share), ""),
            texttemplate="%{text}",
            hovertemplate="%{y}<br>late: %{x}<br>%{z:.2f} %<extra></extra>",
        )
    )
    figure.update_layout(
        xaxis={"title": {"text": "who was late, and doing what"}, "tickangle": -35},
        yaxis={"title": {"text": "who waited, and for which barrier"}, "autorange": "reversed"},
    )
    return _titled(figure, "Who waited for whom", table, 260 + 34 * len(grid))


def late_flow(table: pd.DataFrame) -> go.Figure:
    """The same as a flow from the roles that are late, through the barriers, to the roles that wait."""
    late_names = sorted(set(table["late"]))
    barriers = sorted(set(table["barrier"]))
    waiting = sorted(set(table["role"]))
    labels = [f"{n} is late" for n in late_names] + barriers + [f"{n} waits" for n in waiting]
    at_barrier, at_role = len(late_names), len(late_names) + len(barriers)
    links: dict[tuple[int, int], float] = {}
    for late, barrier, role, total in zip(
        table["late"], table["barrier"], table["role"], table["total_ns"], strict=True
    ):
        middle = at_barrier + barriers.index(barrier)
        for pair in ((late_names.index(late), middle), (middle, at_role + waiting.index(role))):
            links[pair] = links.get(pair, 0.0) + float(total) / 1e6
    figure = go.Figure(
        go.Sankey(
            node={"label": [for_plotly(label) for label in labels], "color": theme.BLUE, "pad": 18, "thickness": 14},
            link={
                "source": [source for source, _ in links],
                "target": [target for _, target in links],
                "value": list(links.values()),
                "color": "rgba(0,114,178,0.25)",
            },
            valueformat=",.2f",
            valuesuffix=" ms over all CTAs",
        )
    )
    return _titled(figure, "From the late role to the waiting one", table, 420)


def _titled(figure: go.Figure, title: str, table: pd.DataFrame, height: int) -> go.Figure:
    facts: Any = table.attrs
    figure.update_layout(
        template=theme.TEMPLATE,
        title={"text": f"{title}<br><sub>{for_plotly(facts['title'])} · {facts['grade']}</sub>"},
        height=height,
    )
    return figure
