"""Figures of analyses' results, one function each. A figure draws: it reads no recording and computes no analysis.

Every function returns a `plotly.graph_objects.Figure` whose title says what is seen and whose subtitle says of which
recording and with which grade. `notes` takes the recording's warnings, so that they stand beside what they touch.
Text from recordings is escaped. What is drawn is bounded, and a figure that reaches its bound says so.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from profiling.compare import median_launch
from profiling.text import duration, for_plotly, gathered, percent, significant, split_titles, time_unit
from profiling.theme import INK, OCCUPANCY_SCALE, PARTS, VERMILION, attribute, colorbar_title, finish, warned
from profiling.tile_figures import length_histogram, tile_cost, tile_gantt

__all__ = [
    "length_histogram",
    "occupancy_comparison",
    "occupancy_heatmap",
    "sm_time_bars",
    "sm_time_split",
    "tile_cost",
    "tile_gantt",
]


SIDE_BY_SIDE = "Where the SMs worked, on one time axis"


# --- SM × time ---------------------------------------------------------------------------------------------------


def occupancy_heatmap(occupancy: Any, *, notes: Sequence[str] | None = None) -> go.Figure:
    """SM × time, coloured by the share of each bin in which the SM worked.

    Parameters
    ----------
    occupancy : profiling.sm_time.Occupancy
    """
    unit, size = time_unit(occupancy.makespan_ns)
    figure = go.Figure(_heat(occupancy, size, unit))
    figure.update_traces(showscale=True, colorbar=_share_colorbar(), selector={"type": "heatmap"})
    figure.update_xaxes(title_text=f"time since the launch's first start ({unit})", showgrid=False)
    figure.update_yaxes(**_sm_axis(occupancy))
    title = f"SMs worked {percent(float(occupancy.share.mean()))} of {duration(occupancy.makespan_ns)}"
    bins = f"{occupancy.share.shape[0]} SMs × {occupancy.share.shape[1]} bins of {duration(_bin_ns(occupancy), 3)}"
    return finish(
        figure, title, f"{occupancy.title} · {bins}", occupancy.grade, height=430, notes=warned(notes, [occupancy])
    )


def occupancy_comparison(
    occupancies: Sequence[Any], *, comparable: bool = True, notes: Sequence[str] | None = None
) -> go.Figure:
    """Occupancy heatmaps one above the other on one common time axis, each one's makespan marked.

    Zooming or panning one moves all: in time, and over the SMs where all have the same.

    Parameters
    ----------
    occupancies : Occupancy results, drawn from top to bottom in this order.
    comparable : False where they are not of one workload, direction, GPU and grade: the title then names no factor.
    """
    if not occupancies:
        raise ValueError("occupancies: expected at least one Occupancy, got none")
    longest = max(o.makespan_ns for o in occupancies)
    unit, size = time_unit(longest)
    common, own = split_titles([o.title for o in occupancies])
    grades = list(dict.fromkeys(str(o.grade) for o in occupancies))
    if len(grades) > 1:
        own = [f"{name} · {o.grade}" for name, o in zip(own, occupancies, strict=True)]
    panel = 190 if len(occupancies) > 2 else 260
    figure = make_subplots(
        rows=len(occupancies), cols=1, shared_xaxes=True, vertical_spacing=min(0.2, 46 / (panel * len(occupancies)))
    )
    for row, (occupancy, name) in enumerate(zip(occupancies, own, strict=True), start=1):
        figure.add_trace(_heat(occupancy, size, unit), row=row, col=1)
        figure.update_yaxes(**_sm_axis(occupancy), row=row, col=1)
        figure.update_xaxes(range=[0, longest / size * 1.004], showgrid=False, row=row, col=1)
        _mark_makespan(figure, occupancy, name, longest, size, row)
    if all(np.array_equal(o.sms, occupancies[0].sms) for o in occupancies):
        for row in range(2, len(occupancies) + 1):
            figure.update_yaxes(matches="y", row=row, col=1)
    figure.data[0].update(showscale=True, colorbar=_share_colorbar())
    figure.update_xaxes(title_text=f"time since each launch's first start ({unit})", row=len(occupancies), col=1)
    title = _comparison_title(occupancies, own) if comparable else SIDE_BY_SIDE
    if notes is None:
        notes = gathered((name, o.warnings) for name, o in zip(own, occupancies, strict=True))
    return finish(
        figure,
        title,
        common,
        " and ".join(grades),
        height=panel * len(occupancies),
        extra=22,
        notes=warned(notes, occupancies),
    )


def _heat(occupancy: Any, size: float, unit: str) -> go.Heatmap:
    bin_ns = _bin_ns(occupancy)
    worked = np.rint(np.clip(occupancy.share, 0, 1) * 100).astype(np.uint8)  # a byte a cell keeps a report small
    return go.Heatmap(
        z=worked,
        x0=(occupancy.edges_ns[0] + bin_ns / 2) / size,
        dx=bin_ns / size,
        y=np.asarray(occupancy.sms, dtype=np.int16),
        zmin=0,
        zmax=100,
        zsmooth=False,
        colorscale=OCCUPANCY_SCALE,
        showscale=False,
        hovertemplate=f"SM %{{y}} at %{{x:.4~g}} {unit}<br>worked %{{z}} % of the bin<extra></extra>",
    )


def _bin_ns(occupancy: Any) -> float:
    return float(occupancy.edges_ns[-1] - occupancy.edges_ns[0]) / (len(occupancy.edges_ns) - 1)


def _share_colorbar() -> dict[str, Any]:
    return {
        "title": colorbar_title("worked (% of the bin)"),
        "thickness": 14,
        "tickvals": [0, 25, 50, 75, 100],
        "outlinewidth": 0,
        "len": 1.0,
    }


def _sm_axis(occupancy: Any) -> dict[str, Any]:
    sms = np.asarray(occupancy.sms)
    low, high = int(sms.min()), int(sms.max())
    step = next((step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if (high - low) / step <= 8), 1000)
    return {
        "title_text": "SM",
        "autorange": False,
        "range": [high + 0.5, low - 0.5],
        "tick0": 0,
        "dtick": step,
        "showgrid": False,
    }


def _mark_makespan(figure: go.Figure, occupancy: Any, name: str, longest: float, size: float, row: int) -> None:
    end = occupancy.makespan_ns / size
    figure.add_vline(x=end, line={"color": VERMILION, "width": 2}, row=row, col=1)
    worked = percent(float(occupancy.share.mean()))
    axis = "" if row == 1 else str(row)
    place = {"xref": "paper", "yref": f"y{axis} domain", "y": 1, "yanchor": "bottom", "showarrow": False}
    figure.add_annotation(
        text=f"<b>{for_plotly(name)}</b>  ·  SMs worked {worked}", x=0, xanchor="left", font={"size": 14}, **place
    )
    # Above the panel a short makespan would be written over the name; beside the line there is room for it.
    right = occupancy.makespan_ns > 0.8 * longest
    figure.add_annotation(
        **place | {"xref": f"x{axis}"} | ({} if right else {"y": 0.5, "yanchor": "middle"}),
        text=f"<b>{duration(occupancy.makespan_ns, like=longest)}</b>",
        x=end,
        xanchor="right" if right else "left",
        xshift=0 if right else 4,
        font={"color": VERMILION, "size": 14},
    )


def _comparison_title(occupancies: Sequence[Any], names: Sequence[str]) -> str:
    spans = [o.makespan_ns for o in occupancies]
    if len(spans) < 2 or min(spans) <= 0 or max(spans) < 1.01 * min(spans):  # closer is within a launch's spread
        return SIDE_BY_SIDE
    fast, slow = int(np.argmin(spans)), int(np.argmax(spans))
    times = significant(spans[slow] / spans[fast])
    return f"{for_plotly(names[slow], 60)} takes {times}× as long as {for_plotly(names[fast], 60)}"


# --- where SM time went ------------------------------------------------------------------------------------------


def sm_time_bars(
    sm_time: pd.DataFrame,
    *,
    title: str = "",
    grade: str = "",
    launch: int | None = None,
    order: str = "work",
    notes: Sequence[str] | None = None,
) -> go.Figure:
    """One stacked bar an SM: work, fetch, launch ramp, tail and never used, which sum to the makespan.

    Parameters
    ----------
    sm_time : the result of profiling.sm_time.sm_time.
    title, grade : of the recording; by default those that the frame carries in its attrs.
    launch : which launch; by default the first.
    order : "work" (most work first) or "sm" (by SM number).
    """
    if order not in ("work", "sm"):
        raise ValueError(f'order: expected "work" or "sm", got {order!r}')
    chosen = int(sm_time["launch"].iloc[0]) if launch is None else launch
    rows = sm_time[sm_time["launch"] == chosen]
    if rows.empty:
        raise ValueError(f"launch: expected one of {sorted(sm_time['launch'].unique().tolist())[:10]}, got {launch}")
    rows = rows.sort_values(["work_ns", "sm"], ascending=[False, True]) if order == "work" else rows.sort_values("sm")
    makespan = float(rows["total_ns"].max())
    unit, size = time_unit(makespan)
    sms = rows["sm"].to_numpy().astype(np.int16)
    figure = go.Figure()
    for part, words, colour in PARTS:
        figure.add_bar(
            x=np.arange(len(rows), dtype=np.int16),
            y=(rows[f"{part}_ns"].to_numpy() / size).astype(np.float32),
            customdata=rows[["sm", "tiles", "ctas"]].to_numpy().astype(np.int32) if part == "work" else sms,
            name=words,
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate=f"SM %{{customdata{'[0]' if part == 'work' else ''}}}: {words} %{{y:.4~g}} {unit}"
            + ("<br>%{customdata[1]} tiles, %{customdata[2]} CTAs" if part == "work" else "")
            + "<extra></extra>",
        )
    mean = float(rows["work_ns"].mean())
    figure.add_hline(
        y=mean / size,
        line={"color": INK, "dash": "dash", "width": 1.5},
        annotation={
            "text": f"work spread perfectly: {duration(mean, like=makespan)} (derived)",
            "bgcolor": "rgba(255,255,255,0.85)",
            "font": {"size": 12},
        },
        annotation_position="bottom left",
    )
    figure.update_layout(barmode="stack", bargap=0)
    by = "most work first" if order == "work" else "by number"
    _sm_ticks(figure, rows["sm"].to_numpy(), f"SM ({by})")
    figure.update_yaxes(title_text=f"time ({unit})")
    worked = rows["work_ns"].sum() / max(1, rows["total_ns"].sum())
    most = duration(float(rows["work_ns"].max()), like=makespan)
    say = f"The busiest SM worked {most}, the average one {duration(mean, like=makespan)}"
    about = f"{attribute(sm_time, 'title', title)} · makespan {duration(makespan)} · SMs worked {percent(worked)}"
    return finish(
        figure, say, about, attribute(sm_time, "grade", grade), height=330, notes=warned(notes, [sm_time]), legend=True
    )


def _sm_ticks(figure: go.Figure, sms: np.ndarray, title: str) -> None:
    step = max(1, len(sms) // 16)
    places = np.arange(0, len(sms), step)
    figure.update_xaxes(
        title_text=title, tickvals=places, ticktext=[str(s) for s in sms[places]], range=[-0.5, len(sms) - 0.5]
    )


def sm_time_split(
    summaries: Sequence[pd.DataFrame],
    *,
    labels: Sequence[str] | None = None,
    grade: str = "",
    notes: Sequence[str] | None = None,
) -> go.Figure:
    """One stacked bar a recording: how its SM time divides. Bars have the length of the makespan.

    Parameters
    ----------
    summaries : results of profiling.sm_time.summary; of several launches the one with the median makespan is drawn.
    labels : a name a bar; by default the titles that the frames carry in their attrs, without what all share.
    """
    if not summaries:
        raise ValueError("summaries: expected at least one, got none")
    rows = pd.DataFrame([median_launch(summary) for summary in summaries])
    common, own = split_titles(
        labels or [attribute(s, "title", "") or f"recording {i + 1}" for i, s in enumerate(summaries)]
    )
    longest = float(rows["makespan_ns"].max())
    unit, size = time_unit(longest)
    names = [for_plotly(name, 60) for name in own]
    figure = go.Figure()
    for part, words, colour in PARTS:
        share = rows[f"{part}_share"].to_numpy(dtype=float)
        figure.add_bar(
            y=names,
            x=share * rows["makespan_ns"].to_numpy() / size,
            customdata=share * 100,
            orientation="h",
            name=words,
            marker={"color": colour, "line": {"color": "white", "width": 1}},
            text=[f"{s * 100:.0f} %" if s >= 0.04 else "" for s in share],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"color": "white" if part in ("work", "tail") else INK},
            hovertemplate=f"{words}: %{{customdata:.1f}} % of the SM time<br>%{{x:.4~g}} {unit} an SM<extra></extra>",
        )
    for name, makespan in zip(names, rows["makespan_ns"], strict=True):
        figure.add_annotation(
            x=makespan / size,
            y=name,
            text=f"<b>{duration(makespan, like=longest)}</b>",
            xanchor="left",
            showarrow=False,
            xshift=6,
        )
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    figure.update_xaxes(title_text=f"time of an average SM ({unit}); a bar ends at the makespan", rangemode="tozero")
    figure.update_xaxes(range=[0, longest / size * 1.09])
    grades = grade or " and ".join(dict.fromkeys(attribute(s, "grade", "") for s in summaries))
    if notes is None:
        notes = gathered((name, s.attrs.get("warnings", ())) for name, s in zip(own, summaries, strict=True))
    height = 46 + 46 * len(summaries)
    return finish(
        figure, "Where the SMs' time went", common, grades, height=height, notes=warned(notes, summaries), legend=True
    )
