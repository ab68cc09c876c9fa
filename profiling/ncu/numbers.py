"""Numbers as Nsight Compute prints them, in the locale of whoever ran it: which separator means what, file by file.

A cell alone may not say: "117.344" is 117.344 or 117344. So every cell of a file is heard before the first is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from profiling.errors import UserError
from profiling.text import plain

POINT, COMMA = "point", "comma"

NO_VALUE = frozenset("n/a na nan -nan (nan) inf -inf +inf infinity -infinity - -- (not_available) no_data".split())
"""What stands in a cell where the GPU or the tool had no number to give; blanks as underscores."""

TEXTS = frozenset(
    "device__attribute_confidential_computing_mode device__attribute_display_name launch__cluster_scheduling_policy "
    "launch__func_cache_config launch__kernel_name launch__tpc_enabled".split()
)
"""Metrics whose values are texts, although "0,1" may look like a number."""

_WHOLE_UNITS = frozenset("block register/thread pass SM cluster".split())
_COUNTED = frozenset("inst sector request byte".split())
_UNSCALED = frozenset(["", "thread", "byte", "byte/block"])
_FRACTIONS = ("waves_per_multiprocessor", "occupancy")

_BLANKS = " \u00a0\u2009\u202f'’"
_WITH_POINT = re.compile(
    rf"""[+-]?(?:
        (?:[1-9][0-9]{{0,2}}(?:,[0-9]{{2,3}})*,[0-9]{{3}}         # 13,485 and, as in India, 12,34,567
         | [1-9][0-9]{{0,2}}(?:[{_BLANKS}][0-9]{{3}})+            # 13 485
         | [0-9]+)(?:\.[0-9]+)?
      | [0-9]+(?:\.[0-9]+)?[eE][+-]?[0-9]+ )""",
    re.VERBOSE,
)
_ONLY_POINT = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})*\.(?:[0-9]{1,2}|[0-9]{4,})")
_SWAP = str.maketrans(".,", ",.")
_UNGROUP = str.maketrans("", "", _BLANKS)
_INSTANCED = re.compile(r"(?P<total>[^(]+?)\s\((?P<values>[^()]*)\)")
_OF_THREE = re.compile(r"(?P<start>.*)\.(?P<which>min|avg|max)(?P<end>\..*)?")


class Cell(NamedTuple):
    """One cell that may hold a number: where it is, what it measures, and `known`, its value where that is certain."""

    text: str
    line: int
    metric: str
    unit: str
    launch: int = 0
    known: float = math.nan


class Number(NamedTuple):
    """A number read: its value, the size of its last digit, and the instances printed behind it with their ids."""

    value: float
    step: float
    ids: tuple[float, ...] = ()
    instances: tuple[float, ...] = ()


@dataclass(frozen=True)
class Convention:
    """What a file's separators mean: `decimal` is "point" or "comma"; `note` says how that was decided, or nothing."""

    decimal: str = POINT
    note: str = ""

    def read(self, text: str) -> Number | None:
        """The cell's number, None where it is none."""
        return _number(text, self.decimal)


def has_no_value(text: str) -> bool:
    """Whether the cell says that there is no value."""
    return text.strip().lower().replace(" ", "_") in NO_VALUE


def decide(cells: Iterable[Cell], path: str, decimal: str | None = None) -> Convention:
    """The convention that all cells of a file were written in, or that of ``decimal`` where it is given.

    ``cells`` may be gone through twice.

    Raises:
        UserError: cells contradict each other or ``decimal``; or all of them can be read both ways.
    """
    if decimal not in (None, POINT, COMMA):
        raise UserError(f"--decimal: {decimal!r} is neither point nor comma")
    proofs: dict[str, Cell] = {}
    open_cells: list[Cell] = []
    for cell in cells:
        if _ONLY_POINT.fullmatch(cell.text):  # most cells of most files
            if POINT not in proofs:
                proofs[POINT] = cell
            continue
        can = _readings(cell.text)
        if len(can) == 1:
            proofs.setdefault(can[0], cell)
        elif can:
            open_cells.append(cell)
    if decimal:
        _check(proofs, decimal, path)
        return Convention(decimal, f"numbers read with a decimal {decimal}, as asked" if open_cells else "")
    if len(proofs) == 2:
        raise _contradiction(path, proofs[POINT], proofs[COMMA], "")
    if proofs:
        ((decimal, proof),) = proofs.items()
        told = bool(open_cells) or decimal == COMMA
        why = f"{_said(proof)} can be nothing else"
        return Convention(decimal, f"numbers read with a decimal {decimal}: {why}" if told else "")
    return _weigh(cells, open_cells, path) if open_cells else Convention()


def _check(proofs: dict[str, Cell], decimal: str, path: str) -> None:
    other = COMMA if decimal == POINT else POINT
    if other in proofs:
        cell = proofs[other]
        raise UserError(
            f"{path}: line {cell.line}: {plain(cell.metric)} is {plain(cell.text, 40)!r}, which is no number with a "
            f"decimal {decimal}: read it with --decimal {other}, or separate the files if it was joined from two"
        )


def _contradiction(path: str, point: Cell, comma: Cell, why: str) -> UserError:
    return UserError(
        f"{path}: {_said(point)} has a decimal point and {_said(comma)} a decimal comma{why}: separate the files if "
        "two were joined, or say which holds with --decimal point or --decimal comma"
    )


def _said(cell: Cell) -> str:
    return f'"{plain(cell.text, 40)}" (line {cell.line}, {plain(cell.metric, 80)})'


def _weigh(cells: Iterable[Cell], open_cells: list[Cell], path: str) -> Convention:
    """Decides by what the values would mean, where no cell's spelling does."""
    found: dict[str, tuple[Cell, str]] = {}
    for impossible, cell, why in (*_objections(open_cells), *_disordered(cells)):
        found.setdefault(COMMA if impossible == POINT else POINT, (cell, why))
        if len(found) == 2:
            reasons = f" ({found[POINT][1]}; {found[COMMA][1]})"
            raise _contradiction(path, found[POINT][0], found[COMMA][0], reasons)
    if not found:
        cell = open_cells[0]
        whole, fraction = (f"{number.value:,g}" for number in sorted(_both(cell.text), key=lambda n: -abs(n.value)))
        raise UserError(
            f"{path}: {_said(cell)} may be {whole} or {fraction} and nothing else in the file says which: add "
            "--decimal point or --decimal comma"
        )
    ((decimal, (cell, why)),) = found.items()
    return Convention(decimal, f"numbers read with a decimal {decimal}: {_said(cell)} {why}")


def _objections(cells: list[Cell]) -> Iterable[tuple[str, Cell, str]]:
    """(the convention that cannot be, the cell that says so, why) of cells that can be read both ways."""
    for cell in cells:
        values = {decimal: number.value for decimal in (POINT, COMMA) if (number := _number(cell.text, decimal))}
        other = {POINT: values[COMMA], COMMA: values[POINT]}
        for decimal, value in values.items():
            if cell.unit == "%" and abs(value) >= 1000 and "occupancy_per" not in cell.metric:
                yield decimal, cell, f"would else be {value:,g} %"
            elif value % 1 and _is_whole(cell):
                yield decimal, cell, "is a whole number"
            elif other[decimal] == cell.known != value:
                yield decimal, cell, f"is {cell.known:,.0f} by the launch's grid and block"


def _disordered(cells: Iterable[Cell]) -> Iterable[tuple[str, Cell, str]]:
    """The same of metrics whose minimum, average and maximum would not be in that order."""
    threes: dict[tuple[int, str, str], dict[str, Cell]] = {}
    for cell in cells:
        if match := _OF_THREE.fullmatch(cell.metric):
            key = (cell.launch, f"{match['start']}{match['end'] or ''}", cell.unit)
            threes.setdefault(key, {})[match["which"]] = cell
    for three in threes.values():
        ordered = [three[which] for which in ("min", "avg", "max") if which in three]
        for low, high in zip(ordered, ordered[1:], strict=False):
            for decimal in (POINT, COMMA):
                below, above = _number(low.text, decimal), _number(high.text, decimal)
                if below and above and below.value > above.value * 1.01 + 1:
                    yield decimal, high, f"would else be less than {low.metric}, {plain(low.text, 40)}"


def _is_whole(cell: Cell) -> bool:
    """Whether the metric cannot have a fraction; times in ns are whole as ncu reports them."""
    name, unit = cell.metric, cell.unit
    if unit in _WHOLE_UNITS or (unit in _COUNTED and name.endswith(".sum")):
        return True
    if unit in ("ns", "nsecond"):
        return name.startswith("gpu__time_duration")
    if name.startswith("launch__"):
        return unit in _UNSCALED and not any(word in name for word in _FRACTIONS)
    return name.startswith("device__attribute_") and not unit


@lru_cache(maxsize=1 << 16)
def _readings(text: str) -> tuple[str, ...]:
    """The conventions that give the cell a meaning; none where both give the same one, or none does."""
    point, comma = _number(text, POINT), _number(text, COMMA)
    if point == comma:
        return ()
    return (*([POINT] if point else []), *([COMMA] if comma else []))


def _both(text: str) -> list[Number]:
    return [number for decimal in (POINT, COMMA) if (number := _number(text, decimal))]


@lru_cache(maxsize=1 << 16)
def _number(text: str, decimal: str) -> Number | None:
    text = text.strip()
    if text.endswith(")") and (instanced := _INSTANCED.fullmatch(text)):
        return _with_instances(instanced["total"], instanced["values"], decimal)
    if text.endswith("%"):
        text = text[:-1].rstrip()
    if decimal == COMMA:
        text = text.translate(_SWAP)
    if not _WITH_POINT.fullmatch(text):
        return None
    text = text.replace(",", "")
    if not text.isascii() or " " in text or "'" in text:
        text = text.translate(_UNGROUP)
    value = float(text)
    if not math.isfinite(value):
        return None
    mantissa, _, exponent = text.partition("e") if "e" in text else text.partition("E")
    point = mantissa.find(".")
    step = 1.0 if point < 0 else 10.0 ** (point + 1 - len(mantissa))
    return Number(value, step * float(f"1e{exponent}") if exponent else step)


def _with_instances(total: str, values: str, decimal: str) -> Number | None:
    """ "12 (1; 2; 9)", or "12 (7: 1; 8: 2; 9: 9)" with the id that each value belongs to."""
    number = _number(total, decimal)
    if number is None:
        return None
    ids, instances = [], []
    for position, word in enumerate(values.split(";")):
        key, _, word = word.rpartition(":")
        found = _number(word, decimal)
        if found is None and not has_no_value(word):
            return None
        instances.append(found.value if found else math.nan)
        correlation = _number(key, decimal)
        ids.append(correlation.value if correlation else float(position))
    return Number(number.value, number.step, tuple(ids), tuple(instances))
