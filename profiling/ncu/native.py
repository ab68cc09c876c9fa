"""Run as a script, by `profiling.ncu.binary`: reads one .ncu-rep with NVIDIA's reader and writes JSON to a file.

It imports nothing of the package and nothing heavy: a crash or a hang of the native reader stays in this process, and
the process starts quickly. Arguments: the report, the file to write, "instances" or "", and which launches: "1 4" is
the second of every four; then a regular expression of the metrics to bring, "" for all.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any


def main(report: str, output: str, what: str, part: str, parts: str, wanted: str) -> None:
    import ncu_report  # NVIDIA's reader

    ncu_report.load_report  # noqa: B018  another package of that name would lack it
    context = ncu_report.load_report(report)
    ranges = context.num_ranges() if context is not None else None
    document: dict[str, Any] = {
        "readable": ranges is not None,
        "launches": [],
        "names": {},
        "rules": [],
        "instances": [],
    }
    pattern = re.compile(wanted or ".*")
    place = -1
    for number in range(ranges or 0):
        profiled = context.range_by_idx(number)
        for index in range(profiled.num_actions()):
            place += 1
            if place % int(parts) != int(part):
                continue
            action = profiled.action_by_idx(index)
            launch = _launch(ncu_report, action, number, document["names"], what == "instances", pattern)
            document["instances"].append(launch.pop("instances"))
            document["launches"].append(launch)
            document["rules"].append(_rules(ncu_report, action))
    # A name that is no UTF-8 comes as lone surrogates, which nothing can be written with. (json.dump would be slow.)
    with open(output, "w", encoding="utf-8", errors="replace") as out:
        out.write(json.dumps(document, ensure_ascii=False))


def _launch(
    reader: Any, action: Any, number: int, names: dict[str, list[Any]], instances: bool, wanted: re.Pattern[str]
) -> dict[str, Any]:
    """One action; what a metric's name fixes (unit, label) goes into ``names`` once."""
    values: dict[str, list[Any]] = {}
    spread: dict[str, Any] = {}
    for name in action.metric_names():
        if not wanted.fullmatch(name):
            continue
        metric = action.metric_by_name(name)
        if metric is None:
            continue
        if name not in names:
            names[name] = [metric.unit() or "", metric.label() or ""]
        count = metric.num_instances()
        values[name] = [_value(reader, metric), count, metric.unit() or ""]
        if instances and count:
            spread[name] = _instances(reader, metric, count)
    push_pop, start_end = _nvtx(action)
    return {
        "range": number,
        "name": action.name(),
        "full_name": action.name(reader.IAction.NameBase_DEMANGLED),
        "values": values,
        "push_pop": push_pop,
        "start_end": start_end,
        "sections": _sections(action),
        "instances": spread,
    }


def _value(reader: Any, metric: Any) -> Any:
    """A number, a text, or None where the report holds none; a number that is not finite is spelled out."""
    if not metric.has_value():
        return None
    kind = metric.kind()
    if kind == reader.IMetric.ValueKind_STRING:
        return metric.as_string()
    if kind in (reader.IMetric.ValueKind_UINT32, reader.IMetric.ValueKind_UINT64):
        return metric.as_uint64()
    if kind in (reader.IMetric.ValueKind_FLOAT, reader.IMetric.ValueKind_DOUBLE):
        return metric.as_double()
    value = metric.value()
    return value if isinstance(value, int | float | str) else None


def _instances(reader: Any, metric: Any, count: int) -> list[Any]:
    """[correlation ids, values]; ids are positions where the report has none, texts are left as they are."""
    ids: list[Any] = list(range(count))
    if metric.has_correlation_ids():
        keys = metric.correlation_ids()
        if keys.kind() != reader.IMetric.ValueKind_STRING:
            ids = [keys.as_uint64(i) for i in range(count)]
    text = metric.kind() == reader.IMetric.ValueKind_STRING
    return [ids, [metric.as_string(i) if text else metric.as_double(i) for i in range(count)]]


def _nvtx(action: Any) -> tuple[list[str], list[str]]:
    state = action.nvtx_state()
    push_pop: list[str] = []
    start_end: list[str] = []
    if state is not None:
        for identifier in state.domains():
            domain = state.domain_by_id(identifier)
            name = domain.name() or ""
            push_pop += [f"{name}:{message}" for message in domain.push_pop_ranges()]
            start_end += [f"{name}:{message}" for message in domain.start_end_ranges()]
    return push_pop, start_end


def _sections(action: Any) -> dict[str, str]:
    """The section in which ncu's details page shows a metric: the first that has it in its header."""
    found: dict[str, str] = {}
    for section in action.sections():
        for metric in section.header_metrics():
            found.setdefault(metric.name(), section.name())
    return found


def _rules(reader: Any, action: Any) -> list[dict[str, Any]]:
    kinds = {
        reader.MsgType_OPTIMIZATION: "optimization",
        reader.MsgType_WARNING: "warning",
        reader.MsgType_ERR: "error",
    }
    scopes = {reader.SpeedupType_GLOBAL: "global", reader.SpeedupType_LOCAL: "local"}
    rules = []
    for result in action.rule_results_as_dicts():
        message = result.get("rule_message") or {}
        speedup = result.get("speedup_estimation") or {}
        rules.append(
            {
                "name": result.get("name", ""),
                "section": result.get("section_identifier", ""),
                "title": message.get("title", ""),
                "message": message.get("message", ""),
                "kind": kinds.get(message.get("type"), "info"),
                "speedup": speedup.get("speedup", math.nan),
                "scope": scopes.get(speedup.get("type"), ""),
            }
        )
    return rules


if __name__ == "__main__":
    main(*sys.argv[1:7])
