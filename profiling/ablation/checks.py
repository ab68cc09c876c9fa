"""What a document of an ablation is made of, checked before anything reads it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from profiling.ablation.clocks import UNITS
from profiling.ablation.counters import FACTS, LSU
from profiling.errors import UserError
from profiling.text import plain

LARGEST = 1e300
"""Of a number: what is larger, as JSON's integers can be, overflows where it is divided or made a percentage."""


@dataclass(frozen=True)
class Kind:
    """What a value is expected to be.

    Attributes:
        expected, fits: the same in words and as a test.
        parts: of an object, those that are read, by name; "name?" may be missing.
    """

    expected: str
    fits: Callable[[Any], bool]
    parts: Mapping[str, Kind] = field(default_factory=dict)

    def or_null(self) -> Kind:
        """This, or null."""
        return replace(self, expected=f"{self.expected} or null", fits=lambda value: value is None or self.fits(value))


def _object(**parts: Kind) -> Kind:
    return Kind("an object", lambda value: isinstance(value, dict), parts)


def _one_of(*words: str) -> Kind:
    return Kind(" or ".join(words), lambda value: isinstance(value, str) and value in words)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST  # NaN and infinities are not


TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
LIST = Kind("a list", lambda value: isinstance(value, list))
ANY = Kind("anything", lambda value: True)
COUNT = Kind("a whole number of at least 0", lambda value: type(value) is int and value >= 0)
NUMBER = Kind("a number", _is_number)
DURATION = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
SPREAD = Kind("a number of at least 0", lambda value: _is_number(value) and value >= 0)
SHARE = Kind("a number or NaN", lambda value: _is_number(value) or value != value)
"""Of SM time, which is NaN where a recording does not say."""
GRADE = _one_of("measured", "modelled")

NUMBER_OF_NCU = _object(**{"value?": NUMBER, "unit?": TEXT, "source?": TEXT})
NCU = _object(
    **{
        "numbers?": _object(**{f"{fact}?": NUMBER_OF_NCU for fact in (*FACTS, LSU)}).or_null(),
        "launches?": COUNT,
        "verdict?": TEXT,
        "failed?": TEXT,
    }
)
ROW = _object(
    **{
        "name": TEXT,
        "kind": _one_of("full", "plain", "without", "with", "rung"),
        "switch": TEXT,
        "values": _object(),
        "key": TEXT,
        "time": _object(median_ms=DURATION, iqr_ms=SPREAD.or_null(), grade=GRADE).or_null(),
        "effect": _object(
            change=NUMBER, low=NUMBER.or_null(), high=NUMBER.or_null(), differs=FLAG, words=TEXT, grade=GRADE
        ).or_null(),
        "resources": _object(
            **{"registers?": COUNT, "stack?": COUNT, "loop_spills?": COUNT, "grade": _one_of("measured", "compiled")}
        ).or_null(),
        "sm_time": _object(work=SHARE, tail=SHARE).or_null(),
        "waits": _object(**{"words?": TEXT}).or_null(),
        "ncu?": NCU.or_null(),
        "failed": TEXT,
    }
)
SWITCH = _object(name=TEXT, full=ANY, other=ANY, what=TEXT, extra=FLAG)
DOCUMENT = _object(
    **{
        "workload": TEXT,
        "impl": TEXT,
        "direction": TEXT,
        "grade": _one_of("measured", "compiled"),
        "interrupted": FLAG,
        "drift": NUMBER.or_null(),
        "clocks?": _object(**{f"{name}?": _object(first=NUMBER, last=NUMBER) for name in UNITS}).or_null(),
        "environment": _object(**{"gpu?": TEXT.or_null(), "command?": TEXT}),
        "setting?": _object(**{"config?": _object().or_null()}).or_null(),
        "switches": LIST,
        "rows": LIST,
    }
)


def check(document: Mapping[str, Any]) -> None:
    """UserError: the first part that is missing or not as `profiling.ablation.results.assemble` makes it."""
    _check(DOCUMENT, document)
    _check_each("switch", SWITCH, document["switches"])
    _check_each("row", ROW, document["rows"])
    names = [row["name"] for row in document["rows"]]
    if not names:
        raise UserError("rows is empty, expected a row for each configuration")
    if "full" not in names:
        raise UserError("no row is named 'full', which all others are set against")
    often, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise UserError(f"{times} rows are named {plain(often, 60)!r}, expected one")


def _check_each(noun: str, kind: Kind, entries: list[Any]) -> None:
    for number, entry in enumerate(entries):
        try:
            _check(kind, entry)
        except UserError as error:
            name = entry.get("name") if isinstance(entry, dict) else None
            known = f" ({plain(name, 60)!r})" if isinstance(name, str) else ""
            raise UserError(f"{noun} {number}{known}: {error}") from None


def _check(kind: Kind, value: Any, place: str = "") -> None:
    if not kind.fits(value):
        raise UserError(f"{place} is {_shown(value)}, expected {kind.expected}")
    for word, part in kind.parts.items() if value is not None else ():
        name = word.removesuffix("?")
        inner = f"{place}.{name}" if place else name
        if name in value:
            _check(part, value[name], inner)
        elif name == word:
            raise UserError(f"{inner} is missing")


def _shown(value: Any) -> str:
    return plain(json.dumps(value, ensure_ascii=False), 40)
