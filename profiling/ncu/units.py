"""Units as Nsight Compute's pages print them, scaled to the base units that its reports hold."""

from __future__ import annotations

import re
from functools import lru_cache

PREFIXES = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
NANOSECONDS = {"n": 1.0, "u": 1e3, "µ": 1e3, "μ": 1e3, "m": 1e6, "": 1e9}

_AMOUNT = re.compile(r"([KkMGTP]?)(byte|hz)s?", re.IGNORECASE)
_TIME = re.compile(r"([nuµμm]?)s(?:ec|econds?)?")


def to_base(value: float, unit: str) -> tuple[float, str]:
    """The value and its unit in base units: ns, byte, hz, and those over s, cycle, block and so on.

    `Kbyte` is 1000 byte; `sector/ns` becomes `sector/s`; cycles over a time become `hz`. A part of a unit that is
    neither an amount of bytes or hertz nor a time is kept, and so is its value.
    """
    factor, base = _base(unit)
    return value * factor, base


@lru_cache(maxsize=4096)
def _base(unit: str) -> tuple[float, str]:
    """How many of its base unit a unit is, and the base unit."""
    above, slash, below = unit.strip().partition("/")
    factor, above = _scaled(above)
    if not slash:
        return factor, above
    time = _nanoseconds(below)
    if time is not None:
        return factor * (1e9 / time), "hz" if above == "cycle" else f"{above}/s"
    # ncu scales `%/byte` as if the prefix were the whole unit's: 5460 %/byte is printed as 5.46 %/Kbyte.
    below_factor, below = _scaled(below)
    return factor * below_factor, f"{above}/{below}"


def _scaled(part: str) -> tuple[float, str]:
    """The factor from one part of a unit to its base, and the base."""
    amount = _AMOUNT.fullmatch(part)
    if amount and amount[1] in PREFIXES:
        return PREFIXES[amount[1]], amount[2].lower()
    time = _nanoseconds(part)
    return (1.0, part) if time is None else (time, "ns")


def _nanoseconds(part: str) -> float | None:
    time = _TIME.fullmatch(part)
    return NANOSECONDS[time[1]] if time else None
