"""The offline HTML report of one or more recordings: a folder of two files, index.html and plotly.js, under 8 MB."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from profiling.compare import compare, median_launch
from profiling.errors import RecordingError, UserError
from profiling.page import GENERATOR, PLOTLY_FILE, plotly_js, render, write
from profiling.recording import Recording
from profiling.sm_time import occupancy, sm_time, summary
from profiling.tail import tail
from profiling.text import (
    WHOLE_CTAS,
    count,
    coverage,
    distinct,
    duration,
    gathered,
    overhead,
    percent,
    plain,
    significant,
    split_titles,
    times,
)
from profiling.tiles import tail_tiles, tile_cost, tile_spans

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_BYTES = 8_000_000
MOST_RECORDINGS = 32
INDEX = "index.html"
PAGE_BYTES = 3_000_000  # what plotly.js (4.82 MB) leaves of MOST_BYTES, with a margin
FIXED_BYTES = 54_000  # of a recording: tables, bars, lengths, density
TAIL_ROWS = 8
TELLING = "the last to end, those in the middle, the first to run dry"
REST = {"fetch": "fetching", "ramp": "the launch ramp", "tail": "the tail", "unused": "unused SMs"}


@dataclass(frozen=True)
class Bounds:
    """How much each figure may draw, so that a page of many recordings stays under MOST_BYTES."""

    bins: int
    points: int
    rectangles: int

    @classmethod
    def of(cls, recordings: Sequence[Recording], page_bytes: float = PAGE_BYTES) -> "Bounds":
        """Bounds for a page; the divisors are bytes as base64: a heatmap's cell, drawn alone and compared; a rectangle;
        a point."""
        each = max(0.0, page_bytes / len(recordings) - FIXED_BYTES)
        sms = max(recording.sm_count for recording in recordings)
        return cls(
            bins=int(np.clip(0.6 * each / (2.67 * sms), 20, 400)),
            rectangles=int(np.clip(0.2 * each / 60, 100, 1500)),
            points=int(np.clip(0.2 * each / 27, 500, 10_000)),
        )

    def words(self) -> str:
        return (
            f"heatmaps have {self.bins} time bins; tile costs are drawn as points up to {self.points:,} tiles and as "
            f"densities above; a Gantt chart joins short neighbours above {self.rectangles:,} rectangles."
        )


def write_report(recordings: Sequence[Recording], out_dir: str | Path) -> Path:
    """Write the report into a folder of its own and return the path of its index.html.

    The folder is made, or was empty, or holds a previous report, which is replaced.

    Raises
    ------
    UserError : no recordings or more than 32; the folder holds something else or cannot be written.
    RecordingError : a recording lacks what SM time needs.
    """
    if not recordings:
        raise UserError("report: expected at least one recording, got none")
    if len(recordings) > MOST_RECORDINGS:
        raise UserError(
            f"report: {len(recordings)} recordings, but a page under 8 MB holds {MOST_RECORDINGS}; give fewer"
        )
    folder = Path(out_dir)
    refuse_foreign(folder)
    plotly, index = plotly_js(), folder / INDEX
    page = _page_below(MOST_BYTES - len(plotly.encode()), recordings)
    write(folder / PLOTLY_FILE, plotly)
    write(index, page)
    return index


def _page_below(most: int, recordings: Sequence[Recording]) -> str:
    """The page, drawn again with less in its figures while it has more than `most` bytes."""
    for budget in (PAGE_BYTES, PAGE_BYTES / 2, 0):
        page = render("report.html", inline_plotly=False, **contents(recordings, Bounds.of(recordings, budget)))
        if len(page.encode()) < most:
            return page
    raise UserError(f"report: {len(recordings)} recordings would make a page of more than 8 MB; give fewer")


def refuse_foreign(folder: Path) -> None:
    """Raise UserError unless the folder is absent, empty or a previous report and nothing else."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder}: is a file; a report is a folder: choose another place with -o")
    others = sorted(entry.name for entry in folder.iterdir() if entry.name not in (INDEX, PLOTLY_FILE))
    index = folder / INDEX
    if not others and index.exists():
        with index.open(encoding="utf-8", errors="replace") as file:
            if f'name="generator" content="{GENERATOR}"' not in file.read(8192):
                others = [INDEX]
    if others:
        raise UserError(
            f"{folder}: already holds {plain(others[0], 60)}{' and more' if len(others) > 1 else ''}, which no report "
            "made; choose a new or empty folder with -o"
        )


def contents(recordings: Sequence[Recording], bounds: Bounds) -> dict[str, Any]:
    """What the template report.html shows: sections, groups and their figures."""
    titles = distinct([recording.title() for recording in recordings])
    common, names = split_titles(titles)
    sections = [
        {"name": name, **_section(recording, f"recording-{i}", title, bounds)}
        for i, (recording, title, name) in enumerate(zip(recordings, titles, names, strict=True), start=1)
    ]
    grades = " and ".join(dict.fromkeys(recording.grade for recording in recordings))
    return {
        "title": "Where the SMs' time went",
        "lead": f"{count(len(recordings), 'recording')}, {grades}.",
        "sections": sections,
        "groups": _groups(recordings, sections, bounds),
        "common": common,
        "longest_ns": max(section["row"]["makespan_ns"] for section in sections),
        "parts": _parts(),
        "bounds": bounds.words(),
    }


def _parts() -> tuple[tuple[str, str, str], ...]:
    from profiling.theme import PARTS

    return PARTS


# -- one recording -----------------------------------------------------------------------------------------------------


def _section(recording: Recording, anchor: str, title: str, bounds: Bounds) -> dict[str, Any]:
    sm_times = sm_time(recording)
    launches = summary(recording, sm_times)
    row = median_launch(launches)
    launch = int(row["launch"])
    one = recording
    if recording.launches > 1:
        events = recording.events
        one = replace(recording, events=events[events["launch"] == launch])
    tail = _tail(one, launch)
    drawn, refused = _figures(one, sm_times, launch, bounds)
    metadata, shortened = shorten(recording.metadata)
    return {
        "id": anchor,
        "title": title,
        "grade": recording.grade,
        "warnings": recording.warnings() + ([WHOLE_CTAS] if launches.attrs["basis"] == "cta" else []),
        "row": {**row.to_dict(), "launch": launch},
        "launches": launches,
        "which_launch": _which_launch(launches, launch),
        "verdict": _verdict(row),
        "figures": drawn,
        "refused": [line for line in refused if line not in tail["refusals"]],
        "tail": tail,
        "facts": _facts(recording),
        "metadata": json.dumps(metadata, indent=2, ensure_ascii=False),
        "shortened": shortened,
    }


def _which_launch(launches: pd.DataFrame, launch: int) -> str:
    if len(launches) == 1:
        return ""
    spans = launches["makespan_ns"]
    low, high = duration(float(spans.min())), duration(float(spans.max()))
    return f"launch {launch} of {len(launches)}, the one with the median makespan; they took {low} to {high}"


def _verdict(row: pd.Series) -> str:
    sms, makespan = int(row["sms"]), float(row["makespan_ns"])
    if not row["work_ns"] > 0:
        return f"No SM worked in {duration(makespan)}: the batch held no work, or the recording holds no tile."
    words = (
        f"{sms} SMs worked {percent(row['work_share'])} of {duration(makespan)}. Spread perfectly, the same work would "
        f"have ended after {duration(row['fair_ns'], like=makespan)}: {times(row['headroom'])} headroom."
    )
    part = max(REST, key=lambda name: row[f"{name}_share"])
    if row[f"{part}_share"] >= 0.005:
        words += f" Most of the rest is {REST[part]}, {percent(row[f'{part}_share'])} of the SM time"
        if part == "unused" and row["sms_left"]:
            words += f": {count(int(row['sms_left']), 'SM')} left to a kernel that runs beside this one"
        if part == "tail":
            idle, since = significant(row["tail_sms_idle"], 2), duration(row["tail_start_ns"], like=makespan)
            words += f": {idle} SMs idle on average after the first ran dry at {since}"
        words += "."
    return words


def _figures(
    recording: Recording, sm_times: pd.DataFrame, launch: int, bounds: Bounds
) -> "tuple[list[go.Figure], list[str]]":
    """One launch's figures, and why others could not be drawn."""
    from profiling import figures

    def gantt() -> "go.Figure | None":
        spans, sms = tile_spans(recording, launch), telling_sms(sm_times, launch)
        if not spans["sm"].isin(sms).any():
            return None
        return figures.tile_gantt(spans, sms, which=TELLING, launch=launch, most_rectangles=bounds.rectangles)

    def cost() -> "go.Figure | None":
        costs = tile_cost(recording, allow_partial=True)
        return figures.tile_cost(costs, most_points=bounds.points) if len(costs) else None

    def lengths() -> "go.Figure | None":
        q, kv = (recording.lengths(which, "the histogram of lengths") for which in ("q", "kv"))
        return figures.length_histogram(q, kv, title=recording.workload_name) if len(kv) else None

    drawn = [
        figures.occupancy_heatmap(occupancy(recording, bins=bounds.bins, launch=launch)),
        figures.sm_time_bars(sm_times, launch=launch),
    ]
    refused: dict[str, None] = {}
    # Another kernel than attention has no sequences whose lengths could be missing.
    attends = bool((recording.events["batch"] >= 0).any()) or recording.get("workload.kv_lens") is not None
    for draw in (gantt, cost, lengths) if attends else (gantt,):
        try:
            figure = draw()
        except RecordingError as error:
            refused[str(error)] = None
        else:
            drawn += [] if figure is None else [figure]
    return drawn, list(refused)


def telling_sms(sm_times: pd.DataFrame, launch: int, each: int = 2) -> list[int]:
    """SMs that show the spread, by the end of their work; `TELLING` says which."""
    rows = sm_times[(sm_times["launch"] == launch) & (sm_times["work_ns"] > 0)]
    by_end = rows.sort_values(["tail_ns", "sm"])["sm"].to_numpy()
    middle = max(0, len(by_end) // 2 - each // 2)
    chosen = [*by_end[:each], *by_end[middle : middle + each], *by_end[-each:]]
    return list(dict.fromkeys(int(sm) for sm in chosen))


def _lengths(recording: Recording) -> tuple[np.ndarray, np.ndarray] | None:
    try:
        q, kv = (recording.lengths(which, "the histogram of lengths") for which in ("q", "kv"))
    except RecordingError:
        return None
    return (q, kv) if len(kv) else None


def _tail(recording: Recording, launch: int) -> dict[str, Any]:
    try:
        tiles = tail_tiles(recording, launch=launch, count=TAIL_ROWS)
        late = tail(recording, launch)
    except RecordingError as error:
        return {"words": "", "refusals": [str(error)], "tiles": [], "sequences": [], "unit": 0.0, "late_unit": 0.0}
    sequences, last, fair = late.sequences, late.last, duration(late.fair_ns)
    if not late.tiles:
        words = f"No tile ran past the even end at {fair}" + (f"; {late.cleared}." if late.cleared else ".")
    else:
        words = f"Past the even end at {fair}, {late.late} ran."
        if len(sequences) > TAIL_ROWS:
            share = percent(float(sequences["late_share"].head(TAIL_ROWS).sum()))
            words += f" The {TAIL_ROWS} with the most late time make {share} of it."
    if last and late.tiles:
        length = f" ({last.kv_len:,} keys)" if last.kv_len >= 0 else ""
        most = f", {percent(last.sequence_share)} of it for sequence {last.batch}{length}" if last.batch >= 0 else ""
        words += (
            f" SM {last.sm} ended last: it had {times(last.work_ns / max(last.fair_ns, 1))} an average SM's work{most}."
        )
    return {
        "words": words,
        "refusals": [],
        "tiles": _records(tiles),
        "sequences": _records(sequences.head(TAIL_ROWS)),
        "unit": float(tiles["tail_ns"].max()) if late.tiles else 0.0,
        "late_unit": float(sequences["late_ns"].max()) if len(sequences) else 0.0,
    }


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def _facts(recording: Recording) -> list[tuple[str, str]]:
    """What a reader asks of a measurement: on what, with what, by which command; what is unknown is left out."""
    get = recording.get
    facts: list[tuple[str, Any]] = [
        ("kernel", _joined(get("kernel.name"), get("kernel.impl"), get("kernel.arch"), get("kernel.schedule"))),
        ("configuration", _flat(get("kernel.config"))),
        ("CTAs", get("kernel.num_ctas")),
        ("beside", _with(get("kernel.sms_left"), "SMs left to another kernel")),
        ("GPU", _joined(get("gpu.name"), _with(get("gpu.sm_count"), "SMs"), _with(get("gpu.clock_mhz"), "MHz"))),
        ("versions", _flat(get("versions"))),
        ("workload", _workload(recording)),
        ("level", recording.level),
        ("spans", f"{len(recording.events):,}, coverage {coverage(recording.coverage())}"),
        ("plain kernel", _timing(recording, "plain")),
        ("recorded kernel", _timing(recording, "recorded")),
        ("timer", _with(get("gpu.timer_resolution_ns"), "ns resolution")),
        ("clock fit", _clock(recording)),
        ("created", get("created")),
        ("command", get("command")),
        ("file", recording.source),
    ]
    return [(name, str(value)) for name, value in facts if value not in (None, "")]


def _joined(*parts: Any) -> str:
    return " · ".join(str(part) for part in parts if part not in (None, ""))


def _with(value: Any, unit: str) -> str:
    return "" if value is None else f"{value} {unit}"


def _flat(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "" if value is None else str(value)
    return ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)


def _timing(recording: Recording, which: str) -> str:
    number = recording.number
    if math.isnan(median := number(f"durations.{which}_ns")):
        return ""
    words = duration(median)
    if not math.isnan(spread := number(f"durations.{which}_iqr_ns")):
        words += f", interquartile range {duration(spread, 3)}"
    if not math.isnan(repeats := number("durations.repeats")):
        words += f", median of {repeats:.0f}"
    if which == "recorded" and not math.isnan(recording.overhead()):
        words += f" (against the plain one: {overhead(recording.overhead())})"
    return words


def _clock(recording: Recording) -> str:
    return ", ".join(
        words.format(value)
        for name, words in (
            ("rate_ghz", "{} GHz"),
            ("residual_ns_max", "off by at most {} ns"),
            ("sms_fitted", "{:,.0f} SMs fitted"),
            ("order_violations", "{:,.0f} spans out of order"),
        )
        if not math.isnan(value := recording.number(f"clock.{name}"))
    )


def _workload(recording: Recording) -> str:
    get, lengths = recording.get, _lengths(recording)
    heads = _joined(_with(get("workload.heads"), "heads"), _with(get("workload.heads_kv"), "KV heads"))
    words = _joined(get("workload.name"), heads, _with(get("workload.head_dim"), "wide"), get("workload.dtype"))
    if lengths is not None:
        words += f" · {count(len(lengths[1]), 'sequence')}, {count(int(lengths[1].sum()), 'key')}"
    return _joined(
        words, "broadcast Q" if get("workload.broadcast_q") else "", "causal" if get("workload.causal") else ""
    )


def shorten(value: Any, most: int = 12, depth: int = 8) -> tuple[Any, bool]:
    """JSON-like data with long lists, long texts and deep nesting cut, and whether anything was."""
    if isinstance(value, str):
        return (value, False) if len(value) <= 300 else (value[:300] + f"… ({len(value):,} characters)", True)
    if not isinstance(value, list | Mapping):
        return value, False
    if depth == 0:
        return f"… ({len(value):,} entries)", True
    if isinstance(value, list):
        kept = [shorten(item, most, depth - 1) for item in value[:most]]
        rest = [f"… ({len(value):,} entries)"] if len(value) > most else []
        return [item for item, _ in kept] + rest, bool(rest) or any(cut for _, cut in kept)
    names = list(value)[: 4 * most]
    inner = {plain(name, 80): shorten(value[name], most, depth - 1) for name in names}
    result = {name: item for name, (item, _) in inner.items()}
    if len(value) > len(names):
        result["…"] = f"({len(value):,} entries)"
    return result, len(value) > len(names) or any(cut for _, cut in inner.values())


# -- several recordings ------------------------------------------------------------------------------------------------


def _groups(recordings: Sequence[Recording], sections: list[dict[str, Any]], bounds: Bounds) -> list[dict[str, Any]]:
    """A comparison for each workload and direction of which there are two recordings or more."""
    members: dict[tuple[str, str], list[int]] = {}
    for i, recording in enumerate(recordings):
        members.setdefault((recording.workload_name, recording.direction), []).append(i)
    several = [(key, rows) for key, rows in members.items() if len(rows) > 1]
    return [
        _group(f"comparison-{i}", " · ".join(key), [recordings[r] for r in rows], [sections[r] for r in rows], bounds)
        for i, (key, rows) in enumerate(several, start=1)
    ]


def _group(
    anchor: str, title: str, recordings: list[Recording], sections: list[dict[str, Any]], bounds: Bounds
) -> dict[str, Any]:
    from profiling import figures

    result = compare(recordings)
    names = split_titles([section["title"] for section in sections])[1]
    busy = [
        replace(occupancy(recording, bins=bounds.bins, launch=section["row"]["launch"]), title=section["title"])
        for recording, section in zip(recordings, sections, strict=True)
    ]
    rows = [
        {**row, "id": section["id"], "name": name}
        for row, section, name in zip(_records(result.table), sections, names, strict=True)
    ]
    warnings = [(name, section["warnings"]) for name, section in zip(names, sections, strict=True)]
    blocked = [f"no speedup is given: {line}" for line in result.obstacles]
    split = figures.sm_time_split([s["launches"] for s in sections], labels=[s["title"] for s in sections])
    return {
        "id": anchor,
        "title": title,
        "rows": rows,
        "longest_ns": float(result.table["makespan_ns"].max()),
        "speedup_of": result.speedup_of,
        "verdict": _group_verdict(rows, result.speedup_of),
        "warnings": [*blocked, *result.differences, *gathered(warnings)],
        "figures": [figures.occupancy_comparison(busy, comparable=not result.obstacles), split],
    }


def _group_verdict(rows: list[dict[str, Any]], speedup_of: str) -> str:
    first, known = rows[0], [row for row in rows[1:] if not math.isnan(row["speedup"])]
    if not known:
        return ""
    best = max(known, key=lambda row: row["speedup"])
    if best["speedup"] <= 1.0:
        return f"None is faster than {plain(first['name'], 60)} beyond the spread of the measurements."
    tails = f"{percent(first['tail_share'])} to {percent(best['tail_share'])}"
    return (
        f"{plain(best['name'], 60)} is {best['speedup']:.2f}× as fast as {plain(first['name'], 60)} (by {speedup_of}); "
        f"the share of SM time without work left goes from {tails}."
    )
