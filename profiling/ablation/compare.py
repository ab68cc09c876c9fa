"""Two ablations side by side, as a change to a kernel would need.

What is unlike is named, and not compared, unless it is a switch that only one of the two kernels has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from profiling.errors import UserError
from profiling.text import plain, significant
from profiling.word_table import Table

NOISE = 0.01
"""Of two runs of one configuration in different processes: clocks differ by about as much."""
VERSIONS = ("driver", "torch", "triton", "ptxas")
UNLIKE = "not compared"
ONLY_FIRST, ONLY_SECOND = "only in the first", "only in the second"


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Table, list[str]]:
    """Each variant's time in both, and what else differs between them, a line each, which come first.

    Times of different GPUs, of different configurations, and modelled ones beside measured ones, stand side by side
    without a change. Versions may differ: they are named, and times compared. So may a switch that the kernel of one of
    them does not have: that is a change to look at, and each row says what it is set to (not of an older document
    without its setting: it does not say what the kernel has).

    Raises:
        UserError: different workloads, kernels or directions; no variant with a time in both.
    """
    unlike = [
        f"{what} differs ({plain(before[what])} and {plain(after[what])})"
        for what in ("workload", "impl", "direction")
        if before[what] != after[what]
    ]
    if unlike:
        raise UserError(f"diff-report: {'; '.join(unlike)}; compare ablations of one kernel and workload")
    apart = list(_apart(before, after))
    warnings = [f"{line}: times are not compared" for line in apart]
    warnings += [
        f"{what} differs: {was} and {now}"
        for what in VERSIONS
        if (was := before["environment"].get(what)) != (now := after["environment"].get(what))
    ]
    old = {row["name"]: row for row in before["rows"]}
    new = {row["name"]: row for row in after["rows"]}
    for where, here, there in ((ONLY_FIRST, old, new), (ONLY_SECOND, new, old)):
        if lacking := [plain(name, 60) for name in here if name not in there]:
            warnings.append(f"{where}: {', '.join(lacking)}")
    rows = []
    switches = _switches(before, after)
    strange = _strange(before, after), _strange(after, before)
    warnings += [
        f"only the {which} has the switch {plain(name, 40)}: what it is set to is in the notes"
        for which, names in zip(("second", "first"), strange, strict=True)
        for name in sorted(names)
    ]
    switches -= {*strange[0], *strange[1]}
    differing: dict[str, list[str]] = {}
    values = [{row["name"]: _values(document, row) for row in document["rows"]} for document in (before, after)]
    for name in [*new, *(name for name in old if name not in new)]:
        was, now = old.get(name), new.get(name)
        otherwise = _otherwise(values[0].get(name), values[1].get(name), switches)
        if otherwise:
            differing.setdefault(otherwise, []).append(plain(name, 60))
        change = _change(was, now, comparable=not apart and not otherwise)
        added = [_set_to(values[1].get(name), strange[0]), _set_to(values[0].get(name), strange[1])]
        rows.append((name, _time(was), _time(now), change, _note(was, now, otherwise, added if was and now else [])))
    warnings += [
        f"{', '.join(names)}: not the same configuration in both ({otherwise}), not compared"
        for otherwise, names in differing.items()
    ]
    if not any(_median(old.get(name)) and _median(row) for name, row in new.items()):
        raise UserError("diff-report: no configuration has a time in both; ablate with a GPU")
    spread = "changes: derived; none: within 1 %, or within both spreads"
    headings = ("configuration", "before", "after", "change", "note")
    return Table("Each configuration, before and after", headings, rows, (1, 2, 3), spread), warnings


def _apart(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """What sets all times of the two apart: the GPU, or what the kernel has beside its switches."""
    was, now = before["environment"].get("gpu"), after["environment"].get("gpu")
    if was != now:
        yield f"gpu differs: {was or 'none'} and {now or 'none'}"
    switches = _switches(before, after)
    old, new = _fixed(before), _fixed(after)
    if old and new:  # older documents do not say
        names = sorted(name for name in {*old, *new} - switches if old.get(name, "–") != new.get(name, "–"))
        if names:
            different = ", ".join(f"{name} {old.get(name, '–')} and {new.get(name, '–')}" for name in names)
            yield f"the configuration beside the switches differs: {different}"


def _switches(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    return {switch["name"] for document in (before, after) for switch in document["switches"]}


def _strange(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Switches of ``other`` that the kernel of ``one`` does not have, with what each is where it is off."""
    has = {*_fixed(one), *(switch["name"] for switch in one["switches"])}
    if not _fixed(one):  # an older document: --switches may have left them out
        return {}
    return {
        switch["name"]: switch["full" if switch["extra"] else "other"]
        for switch in other["switches"]
        if switch["name"] not in has
    }


def _set_to(values: Mapping[str, Any] | None, strange: Mapping[str, Any]) -> str:
    """Which of these switches are on: "multicast True"."""
    on = {name: values[name] for name in strange if values and values.get(name, strange[name]) != strange[name]}
    return ", ".join(f"{name} {value}" for name, value in sorted(on.items()))


def _fixed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The full configuration's own values, by name; empty of an older document, which does not say."""
    setting = document.get("setting") or {}
    others = {name: setting[name] for name in ("schedule", "split", "dq") if name in setting}
    return {**(setting.get("config") or {}), **others}


def _values(document: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's value of each switch; of a document with fewer switches, --switches, the others are as in full."""
    return {**_fixed(document), **row["values"]}


def _otherwise(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None, names: set[str]) -> str:
    """In which of these switches two variants of one name differ: "stages 2 and 3"; nothing where one is missing."""
    if old is None or new is None:
        return ""
    differ = sorted(name for name in names if old.get(name, "–") != new.get(name, "–"))
    return ", ".join(f"{name} {old.get(name, '–')} and {new.get(name, '–')}" for name in differ)


def _median(row: Mapping[str, Any] | None) -> float:
    return row["time"]["median_ms"] if row and row["time"] else 0.0


def _time(row: Mapping[str, Any] | None) -> str:
    if not row or not row["time"]:
        return "–"
    modelled = "" if row["time"]["grade"] == "measured" else f" ({row['time']['grade']})"
    return f"{significant(row['time']['median_ms'], 4)} ms{modelled}"


def _change(was: Mapping[str, Any] | None, now: Mapping[str, Any] | None, comparable: bool) -> str:
    if was is None or now is None:
        return ONLY_SECOND if was is None else ONLY_FIRST
    if not was["time"] or not now["time"]:
        return "–"
    if not comparable or was["time"]["grade"] != now["time"]["grade"]:
        return UNLIKE
    change = now["time"]["median_ms"] / was["time"]["median_ms"] - 1
    spread = max((row["time"]["iqr_ms"] or 0.0) / row["time"]["median_ms"] for row in (was, now))
    return "none" if abs(change) <= max(NOISE, spread) or math.isnan(change) else f"{100 * change:+.1f} %"


def _note(was: Mapping[str, Any] | None, now: Mapping[str, Any] | None, otherwise: str, added: list[str]) -> str:
    """Why there is no time or no change, and what only one of the two kernels has."""
    only = [f"only in the {which}: {what}" for which, what in zip(("second", "first"), added, strict=False) if what]
    untimed = [_untimed("first", was, now), _untimed("second", now, was)]
    return "; ".join(filter(None, [f"set otherwise: {otherwise}" if otherwise else "", *only, *untimed]))


def _untimed(which: str, row: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    """Why this row failed, or that it has no time where the other has one."""
    if row and row["failed"]:
        return f"failed in the {which}: {plain(row['failed'], 200)}"
    return f"no time in the {which}" if row and other and not row["time"] and other["time"] else ""
