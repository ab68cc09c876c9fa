"""The recording: what the CTAs of one or more launches did, one row a span, with everything known about the run.

A recording is a pandas DataFrame and a JSON-like dict; on disk it is one Parquet file (see `profiling.storage`).
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
import pandas as pd

from profiling.errors import RecordingError
from profiling.text import count, coverage, plain

SCHEMA = "1.0"
"""Version of the columns and the metadata. A reader refuses a newer major version and reads every older one."""

INTEGER_COLUMNS: dict[str, str] = {
    "launch": "int32",
    "cta": "int32",
    "sm": "int16",
    "tile": "int32",
    "batch": "int32",
    "head": "int32",
    "block": "int32",
    "stage": "int32",
    "start_ns": "int64",
    "end_ns": "int64",
}
CATEGORY_COLUMNS = ("role", "event")
COLUMNS = ("launch", "cta", "sm", "role", "event", "tile", "batch", "head", "block", "stage", "start_ns", "end_ns")

GRADES = ("measured", "modelled", "compiled", "derived")
WORK_EVENTS = ("tile", "zero")

_NUMBERS = tuple(
    f"{part}.{name}"
    for part, names in {
        "durations": ("plain_ns", "plain_iqr_ns", "recorded_ns", "recorded_iqr_ns", "repeats"),
        "workload": ("flop",),
        "clock": (
            "rate_ghz",
            "residual_ns_p99",
            "residual_ns_max",
            "sms_fitted",
            "sms_median_rate",
            "order_violations",
        ),
    }.items()
    for name in names
)
_NEVER_NEGATIVE = ("launch", "cta", "sm", "start_ns", "end_ns")
_LATEST_NS = 1 << 47  # 39 hours: later than this, the clock was never set to the launch's first start
_LARGE_RESIDUAL_NS = 1000.0
_LARGE_OVERHEAD = 0.05


@dataclass(frozen=True, eq=False)
class Recording:
    """What one or more launches did.

    Args:
        events: a row a span, columns `COLUMNS`: launch, cta int32; sm int16; role, event category; tile, batch, head,
            block, stage int32, −1 where one does not apply; start_ns, end_ns int64, ns from the launch's first start.
            Other integer widths and column orders are converted, further columns are dropped.
        metadata: JSON-like; keys may be missing. NumPy values become Python's, NaN and infinity become None.
        source: where it came from, named in messages.

    The rows of `events` are always in this order, and so are those of a file: launch, cta, role (alphabetical),
    start_ns rising, then end_ns falling, so that a span comes before the spans inside it; ties keep the order given.

    Raises:
        RecordingError: a column is missing or not integral, no rows, a span ends before it starts, a negative or
            impossible time, a CTA on two SMs.
    """

    events: pd.DataFrame
    metadata: dict[str, Any]
    source: str = field(default="recording", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", _plain(self.metadata))
        object.__setattr__(self, "events", _settled(self.events, self.source))

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Recording:
        """Read a Parquet file made by `write`.

        Raises:
            RecordingError: missing, a folder, empty, truncated, damaged, not Parquet, not a recording, of a newer major
                schema, or with rows that the class refuses.
        """
        from profiling.storage import read

        events, metadata = read(path)
        return cls(events, metadata, source=str(path))

    def write(self, path: str | PathLike[str]) -> None:
        """Write one Parquet file; what `read` brings back equals this recording.

        Raises:
            RecordingError: the file cannot be written.
        """
        from profiling.storage import write

        write(self, path)

    # -- metadata ------------------------------------------------------------------------------------------------------

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata at a dotted key, such as "gpu.sm_count"; `default` where it is missing or null."""
        value: Any = self.metadata
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def require(self, key: str, why: str) -> Any:
        """As `get`, but a missing key is an error that names it.

        Raises:
            RecordingError: the key is missing or null.
        """
        value = self.get(key)
        if value is None:
            raise RecordingError(
                f"{self.source}: metadata key {key!r} is missing; {why} needs it: record again, or add it"
            )
        return value

    def number(self, key: str) -> float:
        """The metadata's number at a dotted key; NaN where it is missing, or is no number ≥ 0, of which `warnings`
        speaks."""
        value = self.get(key)
        good = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        return float(value) if good else math.nan

    @property
    def grade(self) -> str:
        """How the times were obtained: one of `GRADES`, or "unknown"."""
        return str(self.get("grade", "unknown"))

    @property
    def level(self) -> str:
        """How much was recorded: "cta", "tile" or "wait"; where the metadata does not say, what the rows show."""
        return str(self.get("level") or self._level_of_rows())

    def _level_of_rows(self) -> str:
        names = [str(name) for name in self.events["event"].cat.categories]
        if any(name.startswith("wait:") for name in names):
            return "wait"
        return "tile" if any(name in WORK_EVENTS for name in names) else "cta"

    @property
    def gpu_name(self) -> str:
        return str(self.get("gpu.name", "unknown GPU"))

    @property
    def sm_count(self) -> int:
        """How many SMs the GPU has.

        Raises:
            RecordingError: metadata key gpu.sm_count is missing or no positive integer.
        """
        count = self.require("gpu.sm_count", "counting SMs that ran nothing")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise RecordingError(
                f"{self.source}: metadata key 'gpu.sm_count' is {count!r}, expected a positive integer"
            )
        return count

    @property
    def sms_left(self) -> int:
        """How many SMs of the GPU the kernel leaves to another that runs beside it; 0 where the file does not say.

        Raises:
            RecordingError: metadata key kernel.sms_left is no number of SMs below gpu.sm_count.
        """
        count = self.get("kernel.sms_left", 0)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < self.sm_count:
            raise RecordingError(
                f"{self.source}: metadata key 'kernel.sms_left' is {plain(count, 40)}, expected a number of SMs below "
                f"the GPU's {self.sm_count}"
            )
        return count

    @property
    def kernel(self) -> str:
        return str(self.get("kernel.name", "unknown kernel"))

    @property
    def schedule(self) -> str:
        return str(self.get("kernel.schedule", "unknown"))

    @property
    def direction(self) -> str:
        return str(self.get("kernel.direction", "unknown"))

    @property
    def impl(self) -> str:
        return str(self.get("kernel.impl", "unknown"))

    @property
    def workload_name(self) -> str:
        return str(self.get("workload.name", "unknown"))

    @property
    def launches(self) -> int:
        """How many launches have rows."""
        return int(self.events["launch"].nunique())

    @property
    def lost(self) -> int:
        """Events lost for want of room; 0 also where the metadata does not say, of which `warnings` speaks."""
        return _count(self, "events.lost")

    def coverage(self) -> float:
        """Events written / (written + lost), in [0, 1]; NaN where the metadata does not say how many were lost."""
        if self.get("events.lost") is None:
            return math.nan
        written = _count(self, "events.written") if self.get("events.written") is not None else len(self.events)
        return written / (written + self.lost) if written + self.lost else math.nan

    def overhead(self) -> float:
        """What recording cost, as a share of the plain kernel's time: 0 within the larger of the two interquartile
        ranges, NaN where the metadata does not say."""
        plain_ns, recorded_ns = self.number("durations.plain_ns"), self.number("durations.recorded_ns")
        if not plain_ns > 0 or math.isnan(recorded_ns):
            return math.nan
        spreads = [self.number(f"durations.{which}_iqr_ns") for which in ("plain", "recorded")]
        within = abs(recorded_ns - plain_ns) <= max((s for s in spreads if not math.isnan(s)), default=0.0)
        return 0.0 if within else recorded_ns / plain_ns - 1

    def lengths(self, which: str, why: str) -> np.ndarray:
        """The sequences' lengths, int64 [B]; `which` is "q" or "kv".

        Raises:
            RecordingError: metadata key workload.{which}_lens is missing, or no list of integers ≥ 0.
        """
        key = f"workload.{which}_lens"
        values = self.require(key, why)
        good = isinstance(values, Sequence) and not isinstance(values, str)
        if not good or not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise RecordingError(f"{self.source}: metadata key {key!r} must be a list of integers ≥ 0")
        return np.asarray(values, dtype=np.int64)

    # -- for people ----------------------------------------------------------------------------------------------------

    def title(self) -> str:
        """For a heading: "hsp-loguniform · forward · static · triton · NVIDIA H200"; what is not known is left out.

        A kernel that is none of ours, and so of no implementation, is named first.
        """
        own = ("kernel.name",) if self.get("kernel.impl") is None else ()
        keys = (*own, "workload.name", "kernel.direction", "kernel.schedule", "kernel.impl", "gpu.name")
        parts = [str(self.get(key)) for key in keys if self.get(key) is not None]
        if self.get("kernel.deterministic"):
            parts.insert(-1, "deterministic")
        return " · ".join(parts) or self.source

    def warnings(self) -> list[str]:
        """What a reader must know before believing a number from this recording; a line each."""
        found = (
            _grade_warning,
            _excerpt_warning,
            _loss_warning,
            _config_warning,
            _overhead_warning,
            _clock_warning,
            _number_warning,
        )
        return [line for check in found for line in check(self)]

    def _repr_html_(self) -> str:
        makespans = self.events.groupby("launch")["end_ns"].max()
        facts = [
            f"grade: {self.grade}",
            f"level: {self.level}",
            f"{len(self.events):,} spans",
            count(self.launches, "launch", "launches"),
            f"makespan {makespans.median() / 1e3:,.1f} µs",
            f"coverage {coverage(self.coverage())}",
        ]
        warned = "".join(f"<li>{html.escape(line)}</li>" for line in self.warnings())
        return (
            f"<div><b>{html.escape(self.title())}</b><br>{html.escape(' · '.join(facts))}"
            + (f"<ul>{warned}</ul>" if warned else "")
            + "</div>"
        )


def _count(recording: Recording, key: str) -> int:
    value = recording.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RecordingError(f"{recording.source}: metadata key {key!r} is {value!r}, expected an integer ≥ 0")
    return value


# -- warnings ----------------------------------------------------------------------------------------------------------


def _grade_warning(recording: Recording) -> list[str]:
    if recording.grade == "modelled":
        return ["modelled, not measured: these times come from a model, not from a GPU"]
    if recording.grade not in GRADES:
        return [f"grade {recording.grade!r}: the file does not say how these times were obtained"]
    return []


def _excerpt_warning(recording: Recording) -> list[str]:
    what = recording.get("excerpt")
    return [f"an excerpt: {plain(str(what), 80)}; what is said of all SMs is of these alone"] if what else []


def _loss_warning(recording: Recording) -> list[str]:
    if recording.get("events.lost") is None:
        return ["metadata key 'events.lost' is missing: whether events were lost is not known"]
    if not recording.lost:
        return []
    lanes = recording.get("events.lost_by_lane", {})
    names = sorted(lanes, key=lambda name: (len(name), name)) if isinstance(lanes, Mapping) else []
    where = (
        f" in {count(len(names), 'lane')} ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})" if names else ""
    )
    lost, share = count(recording.lost, "event"), coverage(recording.coverage())
    return [f"{lost} lost{where}, coverage {share}: a full lane keeps its first, so work is a lower bound"]


def _config_warning(recording: Recording) -> list[str]:
    recorded, plain = recording.get("kernel.config_hash"), recording.get("kernel.plain_config_hash")
    if recorded is None or plain is None or recorded == plain:
        return []
    return [f"the recorded kernel (configuration {recorded}) is not the plain one (configuration {plain})"]


def _overhead_warning(recording: Recording) -> list[str]:
    cost = recording.overhead()
    return [f"recording made the kernel {cost * 100:.1f} % slower"] if cost > _LARGE_OVERHEAD else []


def _clock_warning(recording: Recording) -> list[str]:
    lines = []
    violations, guessed = recording.number("clock.order_violations"), recording.number("clock.sms_median_rate")
    residual = recording.number("clock.residual_ns_p99")
    if math.isnan(residual):
        residual = recording.number("clock.residual_ns_max")
    if violations > 0:
        lines.append(f"{violations:,.0f} spans are out of order after the clock fit: times between SMs are uncertain")
    if guessed > 0:
        lines.append(f"{guessed:,.0f} SMs were watched too briefly for a clock fit and use the launch's median rate")
    if residual > _LARGE_RESIDUAL_NS:
        lines.append(f"the clock fit is off by {residual:,.0f} ns: finer differences between SMs are not to be trusted")
    return lines


def _number_warning(recording: Recording) -> list[str]:
    odd = [key for key in _NUMBERS if recording.get(key) is not None and math.isnan(recording.number(key))]
    return [
        f"metadata key {key!r} is {plain(repr(recording.get(key)), 40)}, expected a number ≥ 0: taken as missing"
        for key in odd
    ]


# -- making rows fit ---------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A JSON-like copy: what comes back from a file equals what went in."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _settled(events: pd.DataFrame, source: str) -> pd.DataFrame:
    return _on_one_sm(_in_order(_checked(_typed(events, source), source)), source)


def _typed(events: pd.DataFrame, source: str) -> pd.DataFrame:
    missing = [name for name in COLUMNS if name not in events.columns]
    if missing:
        raise RecordingError(f"{source}: column {missing[0]!r} is missing; a recording has {', '.join(COLUMNS)}")
    if not len(events):
        raise RecordingError(
            f"{source}: holds no spans; nothing was recorded: check the level and the launch, record again"
        )
    columns = {
        name: _category(events[name], source) if name in CATEGORY_COLUMNS else _integers(events[name], source)
        for name in COLUMNS
    }
    return pd.DataFrame(columns, index=pd.RangeIndex(len(events)), copy=False)


def _integers(column: pd.Series, source: str) -> np.ndarray:
    wanted = np.dtype(INTEGER_COLUMNS[str(column.name)])
    if column.dtype == wanted:
        return column.to_numpy()
    values = None if column.hasnans else column.to_numpy()
    if values is None or values.dtype.kind not in "iu":
        problem = "has empty cells" if values is None else f"has type {column.dtype}"
        raise RecordingError(f"{source}: column {str(column.name)!r} {problem}; expected {wanted} without empty cells")
    limits = np.iinfo(wanted)
    if len(values) and (int(values.min()) < limits.min or int(values.max()) > limits.max):
        raise RecordingError(f"{source}: column {str(column.name)!r} has values outside {wanted}")
    return values.astype(wanted)


def _category(column: pd.Series, source: str) -> pd.Categorical:
    if not isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype("category")
    values = column.array
    assert isinstance(values, pd.Categorical)
    if len(values) and int(values.codes.min()) < 0:
        raise RecordingError(f"{source}: column {str(column.name)!r} has empty cells; expected a name in each")
    is_used = np.zeros(len(values.categories), dtype=bool)
    is_used[values.codes] = True
    used = np.flatnonzero(is_used)
    names = [str(name) for name in values.categories.take(used)]
    ordered = sorted(set(names))
    if ordered == list(values.categories) and not values.ordered:
        return values
    new_codes = np.zeros(len(values.categories), dtype=np.int8 if len(ordered) < 128 else np.int32)
    new_codes[used] = [ordered.index(name) for name in names]
    return pd.Categorical.from_codes(new_codes[values.codes], categories=pd.Index(ordered, dtype=object))


def _checked(events: pd.DataFrame, source: str) -> pd.DataFrame:
    for name in _NEVER_NEGATIVE:
        lowest = int(events[name].to_numpy().min())
        if lowest < 0:
            raise RecordingError(f"{source}: column {name!r} holds {lowest}; expected 0 or more")
    start, end = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    if int(end.max()) > _LATEST_NS:
        raise RecordingError(
            f"{source}: a span ends at {int(end.max())} ns; times must count from the launch's first start: subtract it"
        )
    backwards = np.flatnonzero(end < start)
    if len(backwards):
        row = int(backwards[0])
        raise RecordingError(
            f"{source}: {len(backwards)} spans end before they start, the first in row {row} "
            f"({int(start[row])} to {int(end[row])} ns); the clocks were fitted wrongly: record again"
        )
    return events


def _in_order(events: pd.DataFrame) -> pd.DataFrame:
    launch, cta = events["launch"].to_numpy(), events["cta"].to_numpy()
    role = events["role"].array.codes
    start, end = events["start_ns"].to_numpy(), events["end_ns"].to_numpy()
    if not _is_ordered((launch, cta, role, start), end):
        events = events.take(np.lexsort((-end, start, role, cta, launch))).reset_index(drop=True)
    return events


def _on_one_sm(events: pd.DataFrame, source: str) -> pd.DataFrame:
    launch, cta, sm = (events[name].to_numpy() for name in ("launch", "cta", "sm"))
    moved = np.flatnonzero((sm[1:] != sm[:-1]) & (cta[1:] == cta[:-1]) & (launch[1:] == launch[:-1]))
    if len(moved):
        row = int(moved[0])
        raise RecordingError(
            f"{source}: CTA {cta[row]} of launch {launch[row]} is on SM {sm[row]} and on SM {sm[row + 1]}; "
            "a CTA runs on one: number CTAs by launch"
        )
    return events


def _is_ordered(rising: tuple[np.ndarray, ...], falling: np.ndarray) -> bool:
    """Whether rows are in lexicographic order of the `rising` keys, then of `falling` downwards."""
    good = falling[:-1] >= falling[1:]
    for key in reversed(rising):
        before, after = key[:-1], key[1:]
        good &= before == after
        good |= before < after
    return bool(good.all())
