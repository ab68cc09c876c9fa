"""Numbers and strangers' words as a reader sees them: times with units, shares, counts, escaped text."""

import html
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import PurePath

WHOLE_CTAS = "recorded at level cta: whole CTAs count as work, so what they spend between tiles hides in it"
TIME_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))


def short_names(sources: Sequence[str]) -> list[str]:
    """Files' names without suffixes, and without the folder that all share; as they are where two would be alike."""
    paths = [PurePath(source) for source in sources]
    short = [path.stem for path in paths] if len({path.parent for path in paths}) == 1 else list(sources)
    return short if len(set(short)) == len(set(sources)) else list(sources)


def time_unit(largest_ns: float) -> tuple[str, float]:
    """The unit for an axis that ends at largest_ns: (name, nanoseconds in one)."""
    for name, size in TIME_UNITS:
        if largest_ns >= size:
            return name, size
    return TIME_UNITS[-1]


def significant(value: float, digits: int = 3) -> str:
    """A number with that many significant digits, never in exponents: 1234.5 → 1,234; 0.012345 → 0.0123."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def duration(ns: float, digits: int = 4, like: float | None = None) -> str:
    """A time in the unit that suits it, or that suits `like`: 1234567 → "1.235 ms". Not a number → "–"."""
    if not math.isfinite(ns):
        return "–"
    name, size = time_unit(abs(ns) if like is None else like)
    return f"{int(ns):,} ns" if name == "ns" and float(ns).is_integer() else f"{significant(ns / size, digits)} {name}"


def percent(share: float) -> str:
    """A share of one as a percentage with one decimal; what is above zero never reads 0.0 %."""
    if not math.isfinite(share):
        return "–"
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{share * 100:.1f} %"


def coverage(share: float) -> str:
    """The share of events that were kept, with two decimals; what lost some never reads 100 %."""
    if not math.isfinite(share):
        return "unknown"
    return "> 99.99 %" if 0.99995 <= share < 1 else f"{share * 100:.2f} %"


def overhead(share: float) -> str:
    """What recording cost, as `Recording.overhead` gives it: "+2.3 %", or that there is none beyond the spread."""
    return f"{share * 100:+.1f} %" if share else "no difference beyond the spread"


def times(factor: float) -> str:
    """A factor with three significant digits: 1.2345 → "1.23×"."""
    return f"{significant(factor)}×" if math.isfinite(factor) else "–"


def count(number: float, one: str = "", many: str = "") -> str:
    """A count with its noun: count(1, "tile") → "1 tile", count(2048, "tile") → "2,048 tiles"."""
    noun = one if number == 1 else many or (one + "s" if one else "")
    return f"{int(number):,} {noun}".rstrip()


def short(number: float) -> str:
    """A large count in few characters: 1234567 → "1.23 M"."""
    for name, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{significant(number / size)} {name}"
    return f"{number:,.0f}"


def together(words: str) -> str:
    """The words with no line break between a number and its unit."""
    return re.sub(r"(\d) (%|ns|µs|ms|s)(?!\w)", "\\1\u00a0\\2", words)


def plain(words: object, limit: int = 160) -> str:
    """One line of a stranger's text: no control characters or line breaks, at most limit characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(words)).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def for_plotly(words: object, limit: int = 160) -> str:
    """A stranger's text for a figure: Plotly reads tags such as <a href> and <b> in titles, names and hovers."""
    return html.escape(plain(words, limit), quote=False)


def lines_for_plotly(words: object, width: int = 130, limit: int = 400) -> str:
    """As for_plotly, broken into lines: Plotly wraps no text."""
    return "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap(plain(words, limit), width))


def split_titles(titles: Sequence[str]) -> tuple[str, list[str]]:
    """What titles such as "extreme · forward · static" share, and what is each one's own; equal ones are numbered."""
    parts = [str(title).split(" · ") for title in titles]
    if len(parts) == 1 or len({len(p) for p in parts}) != 1:
        return "", distinct([str(title) for title in titles])
    shared = [len(set(column)) == 1 for column in zip(*parts, strict=True)]
    common = " · ".join(word for word, same in zip(parts[0], shared, strict=True) if same)
    own = [" · ".join(word for word, same in zip(p, shared, strict=True) if not same) for p in parts]
    return common, distinct([name or "recording" for name in own])


def gathered(warnings: Iterable[tuple[str, Iterable[str]]]) -> list[str]:
    """The warnings of several recordings, (name, lines) each: every line once, with the names of those it touches."""
    touched: dict[str, list[str]] = {}
    names = []
    for name, lines in warnings:
        names.append(name)
        for line in lines:
            touched.setdefault(line, []).append(name)
    if len(names) == 1:
        return list(touched)
    return [
        f"{'all' if len(who) == len(names) else ', '.join(dict.fromkeys(who))}: {line}" for line, who in touched.items()
    ]


def distinct(names: Sequence[str]) -> list[str]:
    """The names, of which equal ones are numbered: bars of one name would be drawn on top of each other."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(f"{name} ({seen[name]})" if list(names).count(name) > 1 else name)
    return result
