"""How every figure looks: fonts, colours that a colour-blind reader can tell apart, where title and grade stand."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from profiling.text import WHOLE_CTAS, lines_for_plotly

# Okabe and Ito's palette: told apart with any of the common colour deficiencies.
BLUE, ORANGE, SKY, YELLOW, VERMILION, GREEN, PURPLE = (
    "#0072B2", "#E69F00", "#56B4E9", "#F0E442", "#D55E00", "#009E73", "#CC79A7",
)  # fmt: skip
GREY, INK, FAINT = "#B8BDC4", "#1B1F24", "#5A6470"

# The parts of an SM's time, in the order in which they are stacked: column, words, colour.
PARTS = (
    ("work", "work", BLUE),
    ("fetch", "fetch (between tiles)", SKY),
    ("ramp", "launch ramp", YELLOW),
    ("tail", "no work left (tail)", VERMILION),
    ("unused", "never used", GREY),
)

# From idle to busy. Lightness falls steadily, so that it survives greyscale print; idle stands out as near-white.
OCCUPANCY_SCALE = [
    [0.0, "#FBF4DF"], [0.25, "#E5C793"], [0.5, "#98A98D"], [0.75, "#3B7C95"], [1.0, "#0B3C5D"],
]  # fmt: skip
LENGTH_SCALE = "Cividis"
DENSITY_SCALE = [[0.0, "rgba(255,255,255,0)"], [0.0039, "#C6DBEF"], [0.5, "#4292C6"], [1.0, "#08306B"]]

FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"
TITLE_HEIGHT, LINE_HEIGHT = 54, 17

AXIS = {
    "showline": True, "linecolor": "#8A939D", "ticks": "outside", "tickcolor": "#8A939D", "ticklen": 4,
    "gridcolor": "#E8EBEE", "zeroline": False, "title": {"standoff": 8}, "automargin": True,
}  # fmt: skip

TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "colorway": [BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY],
        "xaxis": AXIS,
        "yaxis": AXIS,
        "hoverlabel": {
            "bgcolor": "white",
            "bordercolor": "#8A939D",
            "font": {"family": FONT, "size": 12, "color": INK},
        },
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.0,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "hovermode": "closest",
    }
)


def colorbar_title(words: str) -> dict[str, Any]:
    """Beside the bar: above it, Plotly writes the title over the uppermost tick's label."""
    return {"text": words, "side": "right", "font": {"size": 12}}


def finish(
    figure: go.Figure,
    title: str,
    about: str,
    grade: str,
    *,
    height: int,
    notes: Sequence[str] = (),
    legend: bool = False,
    extra: int = 0,
) -> go.Figure:
    """Give a figure its title, and under it what was looked at, the grade of its numbers and what limits them.

    Parameters
    ----------
    title : what the figure says, in our own words; may hold Plotly's tags.
    about : which recording; a stranger's text, escaped here.
    grade : measured, modelled, compiled or derived; an empty one reads "grade unknown".
    notes : warnings and stated bounds, a line each; escaped here.
    height : of the plotting area in pixels; title, notes and `extra` pixels come on top.
    """
    first = " · ".join(part for part in (about, grade or "grade unknown") if part)
    subtitle = "<br>".join(lines_for_plotly(line) for line in (first, *notes))
    above = TITLE_HEIGHT + LINE_HEIGHT * (subtitle.count("<br>") + 1) + extra + (26 if legend else 0)
    figure.update_layout(
        template=TEMPLATE,
        height=height + above,
        margin={"l": 70, "r": 24, "t": above, "b": 58},
        showlegend=legend,
        title={
            "text": f"<b>{title}</b>",
            "font": {"size": 17},
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 16},
            "subtitle": {"text": subtitle, "font": {"size": 12.5, "color": FAINT}},
        },
    )
    return figure


def attribute(frame: pd.DataFrame, key: str, given: str) -> str:
    """What the caller gave, else what the analysis left in the frame's attrs, else nothing."""
    return given or str(frame.attrs.get(key, ""))


def warned(notes: Sequence[str] | None, results: Sequence[Any]) -> list[str]:
    """The notes given, else the warnings of the results (a field, or in a frame's attrs), each once, marked.

    That whole CTAs count as work is said in any case.
    """
    said = [result.attrs if isinstance(result, pd.DataFrame) else vars(result) for result in results]
    lines = list(notes) if notes is not None else [line for facts in said for line in facts.get("warnings", ())]
    lines += [WHOLE_CTAS for facts in said if facts.get("basis") == "cta"]
    return [f"⚠ {line}" for line in dict.fromkeys(lines)]
