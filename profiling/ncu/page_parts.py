"""What one table of a page says of one launch: who it was, its metrics in base units, its rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from profiling.errors import UserError
from profiling.ncu.numbers import TEXTS, Cell, Convention, has_no_value
from profiling.ncu.report import MISSING, NOT_AVAILABLE, OK, KernelLaunch, Metric, Rule
from profiling.ncu.units import to_base
from profiling.text import plain


class Measured(NamedTuple):
    """A metric and the size of the last digit that was printed of it, both in its base unit."""

    metric: Metric
    step: float = 0.0


@dataclass
class Part:
    """One launch as one table has it. Parts with the same `key` may be one launch."""

    key: tuple[object, ...]
    launch: KernelLaunch
    line: int
    form: str
    metrics: dict[str, Measured] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)
    instances: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)


class Reader(Protocol):
    """A table of one of the two pages: all its cells first, then, with the file's convention, its parts."""

    def cells(self) -> Iterator[Cell]: ...

    def parts(self, convention: Convention, notes: list[str]) -> list[Part]: ...


def measure(cell: Cell, convention: Convention, path: str) -> tuple[Measured, tuple[list[float], list[float]] | None]:
    """The metric in a cell, and its instances' (ids, values) where they are printed too.

    Raises:
        UserError: the cell has a unit and is no number.
    """
    text = cell.text.strip()
    unit = to_base(1.0, cell.unit)[1]
    if not text:
        return Measured(Metric(cell.metric, unit=unit, state=MISSING)), None
    if has_no_value(text):
        return Measured(Metric(cell.metric, unit=unit, state=NOT_AVAILABLE)), None
    number = None if cell.metric in TEXTS else convention.read(text)
    if number is None:
        if cell.unit and cell.metric not in TEXTS:
            raise UserError(
                f"{path}: line {cell.line}: {plain(cell.metric)} is {plain(text, 40)!r}, which is no number although "
                f"its unit is {plain(cell.unit, 40)}: correct the cell, or export the page again"
            )
        return Measured(Metric(cell.metric, text=text, unit=unit)), None
    value, unit = to_base(number.value, cell.unit)
    step = abs(to_base(number.step, cell.unit)[0])
    if not unit and text.endswith("%"):
        unit = "%"
    metric = Metric(cell.metric, value, unit=unit, state=OK, instances=len(number.instances))
    factor = to_base(1.0, cell.unit)[0]
    spread = (list(number.ids), [value * factor for value in number.instances]) if number.instances else None
    return Measured(metric, step), spread


def part(fields: Mapping[str, str], line: int, form: str, path: str) -> Part:
    """The launch that a row's columns describe, without metrics.

    Raises:
        UserError: the row has no ID, or a grid or block that is none.
    """
    if not fields["ID"].strip():
        raise UserError(f"{path}: line {line}: a row without an ID; every launch has one: export the page again")
    push_pop = next((text for name, text in fields.items() if "Push/Pop_Range" in name), "")
    start_end = next((text for name, text in fields.items() if "Start/Stop_Range" in name), "")
    launch = KernelLaunch(
        id=fields["ID"].strip(),
        kernel=fields["Kernel Name"],
        process=fields["Process ID"].strip(),
        grid=_shape(fields.get("Grid Size", ""), line, "grid", path),
        block=_shape(fields.get("Block Size", ""), line, "block", path),
        capability=fields.get("CC", "").strip().replace(",", "."),
        push_pop=nvtx_ranges(push_pop),
        start_end=nvtx_ranges(start_end, numbered=True),
    )
    where = tuple(fields.get(name, "") for name in ("Host Name", "Context", "Stream", "Device"))
    return Part((launch.id, launch.process, launch.kernel, launch.grid, launch.block, *where), launch, line, form)


def with_metrics(launch: KernelLaunch, metrics: Mapping[str, Measured]) -> KernelLaunch:
    """The launch with what its own metrics say of the GPU, the cluster, and a grid and block that no column gave."""

    def shape(what: str) -> tuple[int, ...]:
        values = [metrics[name].metric.value for axis in "xyz" if (name := f"launch__{what}_dim_{axis}") in metrics]
        return tuple(int(v) for v in values) if len(values) == 3 and all(1 <= v < 2**63 for v in values) else ()

    cluster = shape("cluster")
    name = metrics.get("device__attribute_display_name")
    return replace(
        launch,
        gpu=name.metric.text if name else launch.gpu,
        grid=launch.grid or shape("grid"),
        block=launch.block or shape("block"),
        cluster=cluster if any(size > 1 for size in cluster) else launch.cluster,
    )


def _shape(text: str, line: int, what: str, path: str) -> tuple[int, ...]:
    """ "(256, 1, 1)" as numbers, whose thousands may be separated; () where the cell says nothing."""
    if not text.strip() or has_no_value(text):
        return ()
    sizes = re.findall(r"[0-9]+", text)
    if len(sizes) != 3:
        sizes = [re.sub(r"[^0-9]", "", size) for size in re.split(r"[,;]\s+|;|x", text.strip().strip("()"))]
    if len(sizes) != 3 or not all(0 < len(size) < 19 for size in sizes):
        raise UserError(
            f"{path}: line {line}: {plain(text, 40)!r} is no {what} such as (256, 1, 1): correct it, or export again"
        )
    shape = tuple(int(size) for size in sizes)
    return shape if all(shape) else ()


def nvtx_ranges(text: str, *, numbered: bool = False) -> tuple[str, ...]:
    """The ranges in a cell such as `962  "domain:name:none:none:RGB:0xff:REGISTERED:name" "…" `, as "domain:name".

    Those of start/end ranges are ``numbered``: their id stands before the domain. Both name and message may hold
    colons; what has another form is given as it is.
    """
    first, last = text.find('"'), text.rfind('"')
    if first < 0 or first == last:
        return (text.strip(),) if text.strip() else ()
    items = re.split(r'"\s+(?:[0-9]+\s+)?"', text[first + 1 : last])
    return tuple(_range(item, numbered) for item in items)


def _range(item: str, numbered: bool) -> str:
    words = item.split(":")
    if numbered and len(words) > 8 and words[0].isdecimal():
        words = words[1:]
    if len(words) < 8:
        return item
    # domain, name, payload type, payload, colour type, colour, message type, message: the message repeats the name
    # or is "none".
    domain, rest = words[0], words[1:]
    length, odd = divmod(len(rest) - 5, 2)
    if not odd and rest[:length] == rest[length + 5 :]:
        return f"{domain}:{':'.join(rest[:length])}"
    return f"{domain}:{':'.join(rest[:-6])}"
