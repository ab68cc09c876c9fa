"""What one table of a page says of one launch: who it was, its metrics in base units, its rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from profiling.errors import UserError
from profiling.ncu.numbers import TEXTS, Cell, Convention, has_no_value
from profiling.ncu.report import MISSING, NOT_AVAILABLE, KernelLaunch, Metric, Rule
from profiling.ncu.units import to_base
from profiling.text import plain


class Measured(NamedTuple):
    """A metric, the size of the last digit printed of it, in its base unit, and its instances' (ids, values)."""

    metric: Metric
    step: float = 0.0
    instances: tuple[list[float], list[float]] | None = None


@dataclass
class Part:
    """One launch as one table has it. Parts with the same `key` may be one launch.

    `steps` has the size of the last digit printed of each metric.
    """

    key: tuple[object, ...]
    launch: KernelLaunch
    line: int
    form: str
    metrics: dict[str, Metric] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)
    instances: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)

    def add(self, measured: Measured) -> None:
        """Takes a metric in."""
        name = measured.metric.name
        self.metrics[name] = measured.metric
        self.steps[name] = measured.step
        if measured.instances:
            self.instances[name] = measured.instances


class Reader(Protocol):
    """A table of one of the two pages: all its cells first, then, with the file's convention, its parts."""

    def cells(self) -> Iterator[Cell]: ...

    def parts(self, convention: Convention) -> list[Part]: ...


def measure(cell: Cell, convention: Convention, path: str) -> Measured:
    """The metric in a cell.

    Raises:
        UserError: the cell has a unit and is no number.
    """
    text = cell.text.strip()
    factor, unit = to_base(1.0, cell.unit)
    is_text = cell.metric in TEXTS
    number = None if is_text else convention.read(text)
    if number:
        if not unit and text.endswith("%"):
            unit = "%"
        metric = Metric(cell.metric, number.value * factor, unit=unit, instances=len(number.instances))
        spread = (list(number.ids), [value * factor for value in number.instances]) if number.instances else None
        return Measured(metric, number.step * factor, spread)
    if not text or has_no_value(text):
        return Measured(Metric(cell.metric, unit=unit, state=NOT_AVAILABLE if text else MISSING))
    if cell.unit and not is_text:
        raise UserError(
            f"{path}: line {cell.line}: {plain(cell.metric)} is {plain(text, 40)!r}, which is no number although its "
            f"unit is {plain(cell.unit, 40)}: correct the cell, or export the page again"
        )
    return Measured(Metric(cell.metric, text=text, unit=unit))


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


def with_metrics(launch: KernelLaunch, metrics: Mapping[str, Metric]) -> KernelLaunch:
    """The launch with what its own metrics say of the GPU, the cluster, and a grid and block that no column gave."""

    def shape(what: str) -> tuple[int, ...]:
        values = [metrics[name].value for axis in "xyz" if (name := f"launch__{what}_dim_{axis}") in metrics]
        return tuple(int(v) for v in values) if len(values) == 3 and all(1 <= v < 2**63 for v in values) else ()

    cluster = shape("cluster")
    name = metrics.get("device__attribute_display_name")
    return replace(
        launch,
        gpu=name.text if name else launch.gpu,
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
