"""Figures of tiles and of sequence lengths; `profiling.figures` offers them beside the others."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from profiling.layout import length_bins, merge_short, pack_lanes, padding_waste
from profiling.text import count, duration, percent, short, time_unit
from profiling.theme import (
    BLUE,
    DENSITY_SCALE,
    FAINT,
    LENGTH_SCALE,
    SKY,
    VERMILION,
    attribute,
    colorbar_title,
    finish,
    warned,
)

MOST_POINTS = 20_000
MOST_RECTANGLES = 2_000


# --- tiles -------------------------------------------------------------------------------------------------------


def tile_cost(
    costs: pd.DataFrame,
    *,
    title: str = "",
    grade: str = "",
    most_points: int = MOST_POINTS,
    notes: Sequence[str] | None = None,
) -> go.Figure:
    """A tile's cost against its sequence's KV length: a point a tile, or the density of tiles above most_points.

    Parameters
    ----------
    costs : the result of profiling.tiles.tile_cost.
    """
    if costs.empty:
        raise ValueError("costs: expected at least one tile, got none")
    unit, size = time_unit(float(costs["cost_ns"].quantile(0.5)) * 2)
    length = costs["kv_len"].to_numpy()
    spent = costs["cost_ns"].to_numpy() / size
    dense = len(costs) > most_points
    figure = go.Figure(_density(length, spent, unit) if dense else _points(costs, spent, unit))
    middle = _median_by_length(length, spent)
    figure.add_scatter(
        x=middle["x"],
        y=middle["median"],
        customdata=middle[["low", "high", "tiles"]].to_numpy(),
        mode="lines+markers",
        line={"color": VERMILION, "width": 2},
        marker={"size": 5},
        name="median of tiles of like length",
        hovertemplate=f"KV length about %{{x:,.0f}}: median %{{y:.4~g}} {unit}<br>10th to 90th percentile "
        f"%{{customdata[0]:.4~g}} to %{{customdata[1]:.4~g}} {unit}<br>%{{customdata[2]:,}} tiles<extra></extra>",
    )
    zero = ", 0 drawn at 0.5" if (length == 0).any() else ""
    figure.update_xaxes(title_text=f"KV length of the tile's sequence (tokens; log{zero})", type="log")
    _length_ticks(figure, length)
    figure.update_yaxes(title_text=f"cost of a tile ({unit}; log)", type="log", **_log_ticks(spent))
    cheap, dear = float(costs["cost_ns"].min()), float(costs["cost_ns"].max())
    say = f"A tile costs {duration(cheap, 3)} to {duration(dear, 3)}, by the KV length of its sequence"
    drawn = (
        f"density of {count(len(costs), 'tile')}, above {most_points:,} points" if dense else count(len(costs), "tile")
    )
    about = f"{attribute(costs, 'title', title)} · {drawn}"
    return finish(
        figure, say, about, attribute(costs, "grade", grade), height=360, notes=warned(notes, [costs]), legend=True
    )


def _points(costs: pd.DataFrame, spent: np.ndarray, unit: str) -> go.Scatter:
    return go.Scatter(
        x=np.maximum(costs["kv_len"].to_numpy(), 0.5).astype(np.float32),
        y=np.maximum(spent, 1e-6).astype(np.float32),
        customdata=costs[["batch", "head", "block"]].to_numpy().astype(np.int32),
        mode="markers",
        name="a tile",
        marker={"size": 4, "color": BLUE, "opacity": 0.35}
        if len(costs) > 300
        else {"size": 8, "color": BLUE, "opacity": 0.6},
        hovertemplate=f"KV length %{{x:,.0f}}: %{{y:.4~g}} {unit}<br>sequence %{{customdata[0]}}, "
        "head %{customdata[1]}, block %{customdata[2]}<extra></extra>",
    )


def _density(length: np.ndarray, spent: np.ndarray, unit: str, cells: tuple[int, int] = (96, 64)) -> go.Heatmap:
    x = np.log10(np.maximum(length, 0.5))
    y = np.log10(np.maximum(spent, 1e-6))
    tiles, x_edges, y_edges = np.histogram2d(x, y, bins=cells)
    most = max(10.0, float(tiles.max()))
    # A byte a cell, 0 for none and 1 to 255 on a log scale: counts as floats would make a report several times larger.
    shown = np.where(tiles > 0, 1 + np.rint(254 * np.log10(np.maximum(tiles, 1)) / np.log10(most)), 0)
    powers = np.arange(int(np.log10(most)) + 1)
    return go.Heatmap(
        x=(10 ** ((x_edges[:-1] + x_edges[1:]) / 2)).astype(np.float32),
        y=(10 ** ((y_edges[:-1] + y_edges[1:]) / 2)).astype(np.float32),
        z=shown.T.astype(np.uint8),
        customdata=tiles.T.astype(np.uint16 if most < 65536 else np.int32),
        zmin=0,
        zmax=255,
        colorscale=DENSITY_SCALE,
        colorbar={
            "title": colorbar_title("tiles in the cell"),
            "tickvals": (1 + 254 * powers / np.log10(most)).tolist(),
            "ticktext": [f"{10 ** int(p):,}" for p in powers],
            "thickness": 14,
            "outlinewidth": 0,
        },
        hovertemplate="%{customdata:,} tiles<br>"
        f"KV length about %{{x:,.0f}}, cost about %{{y:.4~g}} {unit}<extra></extra>",
    )


def _median_by_length(length: np.ndarray, spent: np.ndarray) -> pd.DataFrame:
    octave = np.where(length > 0, np.floor(np.log2(np.maximum(length, 1)) * 2), -1)
    groups = pd.DataFrame({"length": np.maximum(length, 0.5), "spent": spent}).groupby(octave)
    middle = pd.DataFrame(
        {
            "x": groups["length"].median(),
            "median": groups["spent"].median(),
            "low": groups["spent"].quantile(0.1),
            "high": groups["spent"].quantile(0.9),
            "tiles": groups.size(),
        }
    )
    # where no tile has a length, the line breaks
    return middle.reindex(np.arange(middle.index.min(), middle.index.max() + 1))


def _log_ticks(values: np.ndarray) -> dict[str, Any]:
    """Ticks at 1, 2 and 5 times the powers of ten where few decades are seen, else at the powers; even ones within half
    a decade."""
    positive = values[values > 0]
    if not len(positive):
        return {}
    least, most = float(positive.min()), float(positive.max())
    if least < most < 4 * least:
        power = 10.0 ** np.floor(np.log10((most - least) / 4))
        step = max(s for s in (1, 2, 5) if s * power <= (most - least) / 4) * power
        ticks = [round(n * step, 10) for n in range(int(least / step), int(np.ceil(most / step)) + 1) if n]
        return {"tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}
    low, high = int(np.floor(np.log10(positive.min()))), int(np.ceil(np.log10(positive.max())))
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    return {"tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}


def _length_ticks(figure: go.Figure, length: np.ndarray) -> None:
    positive = length[length > 0]
    low, high = (positive.min(), positive.max()) if len(positive) else (1, 1)
    powers = np.arange(int(np.floor(np.log2(low))), int(np.ceil(np.log2(high))) + 1)
    powers = powers[:: max(1, len(powers) // 12)]
    ticks = [float(2.0**p) for p in powers]
    words = [f"{int(t):,}" for t in ticks]
    if len(positive) < len(length):
        ticks, words = [0.5, *ticks], ["0", *words]
    figure.update_xaxes(tickvals=ticks, ticktext=words)


def tile_gantt(
    spans: pd.DataFrame,
    sms: Sequence[int],
    *,
    which: str = "",
    title: str = "",
    grade: str = "",
    launch: int | None = None,
    most_rectangles: int = MOST_RECTANGLES,
    notes: Sequence[str] | None = None,
) -> go.Figure:
    """The tiles of chosen SMs over time, coloured by KV length; CTAs that share an SM lie on lanes of it.

    Above most_rectangles, short neighbours on a lane are drawn as one rectangle of their mean KV length, and the figure
    says how short.

    Parameters
    ----------
    spans : columns launch, sm, cta, batch, head, block, kv_len, start_ns, end_ns: a row a tile.
    sms : the SMs to draw, from top to bottom.
    which : in words, why these.
    """
    chosen = int(spans["launch"].iloc[0]) if launch is None and len(spans) else launch
    rows = spans[(spans["launch"] == chosen) & spans["sm"].isin(list(sms))]
    if rows.empty:
        raise ValueError(f"sms: expected SMs that ran a tile in launch {chosen}, got {list(sms)[:10]}")
    rows = pack_lanes(rows)
    merged, shorter_ns = merge_short(rows, most_rectangles)
    unit, size = time_unit(float(rows["end_ns"].max()))
    place, lanes = _lane_places(merged, sms)
    figure = go.Figure(_rectangles(merged, place, size, unit))
    figure.update_xaxes(title_text=f"time since the launch's first start ({unit})", rangemode="tozero")
    figure.update_yaxes(
        title_text="SM",
        tickvals=[place[(sm, 0)] + (lanes[sm] - 1) / 2 for sm in lanes],
        ticktext=[str(sm) for sm in lanes],
        autorange="reversed",
        showgrid=False,
    )
    figure.update_layout(bargap=0.08)
    drawn = f"{count(len(rows), 'tile')} of {count(len(lanes), 'SM')}" + (f" ({which})" if which else "")
    if shorter_ns:
        drawn += f" as {count(len(merged), 'rectangle')}: neighbours shorter than {duration(shorter_ns, 3)} are joined"
    about = f"{attribute(spans, 'title', title)} · {drawn}"
    height = int(np.clip(18 * len(place), 180, 700))
    known = int(rows["kv_len"].max()) >= 0
    figure.update_traces(marker_showscale=known)
    say = (
        "Which tiles the SMs ran, coloured by KV length" if known else "Which tiles the SMs ran; lengths are not known"
    )
    return finish(figure, say, about, attribute(spans, "grade", grade), height=height, notes=warned(notes, [spans]))


def _lane_places(rows: pd.DataFrame, sms: Sequence[int]) -> tuple[dict[tuple[int, int], float], dict[int, int]]:
    """Where each (SM, lane) stands on the axis, and how many lanes each SM has; a gap between SMs."""
    lanes = {int(sm): int(rows.loc[rows["sm"] == sm, "lane"].max()) + 1 for sm in sms if (rows["sm"] == sm).any()}
    place, at = {}, 0.0
    for sm, number in lanes.items():
        for lane in range(number):
            place[(sm, lane)] = at
            at += 1
        at += 0.6
    return place, lanes


def _rectangles(rows: pd.DataFrame, place: dict[tuple[int, int], float], size: float, unit: str) -> go.Bar:
    y = np.array([place[key] for key in zip(rows["sm"].astype(int), rows["lane"].astype(int), strict=True)])
    log_length = np.log10(np.maximum(rows["kv_len"].to_numpy(dtype=float), 1))
    ticks = _powers_between(float(rows["kv_len"].min()), float(rows["kv_len"].max()))
    return go.Bar(
        orientation="h",
        y=y.astype(np.float32),
        base=np.round(rows["start_ns"].to_numpy() / size, 4),
        x=((rows["end_ns"] - rows["start_ns"]).to_numpy() / size).astype(np.float32),
        customdata=rows[["sm", "cta", "batch", "head", "block", "kv_len", "tiles"]].to_numpy().astype(np.int32),
        marker={
            "color": log_length.astype(np.float32),
            "colorscale": LENGTH_SCALE,
            "colorbar": {
                "title": colorbar_title("KV length (tokens)"),
                "tickvals": np.log10(ticks).tolist(),
                "ticktext": [f"{tick:,}" for tick in ticks],
                "thickness": 14,
                "outlinewidth": 0,
                "len": 1.0,
            },
            "line": {"color": "white", "width": 0.5},
        },
        hovertemplate=f"SM %{{customdata[0]}}, CTA %{{customdata[1]}}: %{{x:.4~g}} {unit}<br>"
        "sequence %{customdata[2]}, head %{customdata[3]}, block %{customdata[4]}<br>KV length %{customdata[5]:,}, "
        "%{customdata[6]} tile(s)<extra></extra>",
    )


def _powers_between(low: float, high: float, most: int = 5) -> list[int]:
    """At most that many powers of two from low to high; low and high where there are fewer than two."""
    powers = [2**p for p in range(40) if max(low, 1) <= 2**p <= high]
    if len(powers) < 2:
        return sorted({max(1, round(low)), max(1, round(high))})
    return powers[:: -(-len(powers) // most)]


# --- lengths -----------------------------------------------------------------------------------------------------


def length_histogram(
    q_lens: Sequence[int] | np.ndarray,
    kv_lens: Sequence[int] | np.ndarray,
    *,
    title: str = "",
    grade: str = "derived",
    notes: Sequence[str] | None = None,
) -> go.Figure:
    """How long the sequences are (logarithmic, with a bin of its own for 0), and what padding them would waste.

    Parameters
    ----------
    q_lens, kv_lens : int arrays [B], tokens of each sequence.
    """
    q, kv = np.asarray(q_lens, dtype=np.int64), np.asarray(kv_lens, dtype=np.int64)
    if len(kv) == 0:
        raise ValueError("kv_lens: expected at least one sequence, got none")
    same_q = len(np.unique(q)) <= 1
    kinds = [("KV", kv, BLUE)] if same_q else [("KV", kv, BLUE), ("Q", q, SKY)]
    figure = go.Figure()
    low = min(int(lens[lens > 0].min(initial=2**62)) for _, lens, _ in kinds)
    high = max(int(lens.max()) for _, lens, _ in kinds)
    for kind, lens, colour in kinds:
        figure.add_bar(**_length_bars(kind, lens, colour, min(low, max(high, 1)), max(high, 1)))
    ticks, words = _bin_ticks(min(low, max(high, 1)), max(high, 1), any((lens == 0).any() for _, lens, _ in kinds))
    figure.update_xaxes(title_text="length (tokens; two bins an octave, 0 apart)", tickvals=ticks, ticktext=words)
    tallest = max(int(np.max(trace.y)) for trace in figure.data)
    figure.update_yaxes(title_text="sequences", tickformat=",d", dtick=1 if tallest < 6 else None)
    figure.update_layout(bargap=0.06, bargroupgap=0)
    say, waste = _padding_words(q, kv)
    empty = int((kv == 0).sum())
    about = f"{title} · {count(len(kv), 'sequence')}, {f'{empty:,}' if empty else 'none'} without keys"
    about += f", every Q {count(int(q[0]), 'token')}" if same_q and len(q) else ""
    return finish(
        figure, say, about.lstrip(" ·"), grade, height=270, notes=[waste, *(notes or ())], legend=len(kinds) > 1
    )


def _length_bars(kind: str, lens: np.ndarray, colour: str, low: int, high: int) -> dict[str, Any]:
    bins = length_bins(lens, low, high)
    return {
        "x": bins["place"].to_numpy(),
        "y": bins["sequences"].to_numpy(),
        "customdata": [
            [f"{lo:,} tokens" if hi - lo <= 1 else f"{lo:,} to {hi - 1:,} tokens", f"{share * 100:.1f}"]
            for lo, hi, share in zip(bins["low"], bins["high"], bins["token_share"], strict=True)
        ],
        "name": f"{kind} length",
        "marker": {"color": [FAINT if lo == 0 else colour for lo in bins["low"]] if kind == "KV" else colour},
        "hovertemplate": f"{kind} length %{{customdata[0]}}<br>%{{y:,}} sequences, "
        "%{customdata[1]} % of all tokens<extra></extra>",
    }


def _bin_ticks(low: int, high: int, zero: bool) -> tuple[list[float], list[str]]:
    first, last = int(np.floor(np.log2(low))), int(np.floor(np.log2(high))) + 1
    powers = range(first, last + 1)
    ticks: list[float] = [2.0 * p - 0.5 for p in powers]
    words = [short(2**p) if p >= 20 else f"{2**p:,}" for p in powers]
    if zero:
        ticks, words = [2.0 * first - 2, *ticks], ["<b>0</b>", *words]
    return ticks, words


def _padding_words(q: np.ndarray, kv: np.ndarray) -> tuple[str, str]:
    waste = padding_waste(kv)
    if waste.padded == 0:
        return "Every sequence is empty", "there is nothing to pad"
    say = f"A batch padded to its longest sequence would be {percent(waste.share)} padding"
    words = f"padded: {short(waste.padded)} KV tokens, of which {short(waste.tokens)} are real"
    if len(np.unique(q)) > 1:
        of_q = padding_waste(q)
        words += (
            f"; {short(of_q.padded)} Q tokens, of which {short(of_q.tokens)} are real ({percent(of_q.share)} waste)"
        )
    return say, words
