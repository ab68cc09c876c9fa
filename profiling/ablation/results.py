"""One document of an ablation: plain values, from which pages, tables and comparisons are made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from profiling.ablation.checks import DOCUMENT, check
from profiling.ablation.clocks import moved
from profiling.ablation.effects import drift, effect
from profiling.ablation.plan import Plan, dq_of
from profiling.ablation.run import Measured, described
from profiling.errors import UserError
from profiling.text import plain

SCHEMA = 1
RESULTS, SAMPLES = "results.json", "samples.parquet"
AGAIN = "make it again with `ablate`"


def assemble(
    plan: Plan,
    workload: str,
    measured: Measured | None,
    compiled: Mapping[str, dict[str, Any]],
    modelled: Mapping[str, float],
    environment: Mapping[str, Any],
    replays: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The document: kernel, workload, environment, the full setting, switches, and a row a variant.

    A row: name, kind, switch, values, against; time (median_ms, iqr_ms, rounds, grade) or None; effect (change, low,
    high, differs, words) relative to ``against``; resources with their grade; sm_time, waits; ncu, as of
    `profiling.ablation.counters.count`, or None; recording, a name in the folder's `recordings` (``replays``: of those
    that are modelled, by key), or None, and no_recording (why); failed (why) or "".
    """
    rows = [_row(plan, variant.name, measured, compiled, modelled) for variant in plan.variants]
    for row in rows:
        row["recording"] = row["recording"] or (replays or {}).get(row["key"])
    samples = measured.samples if measured else {}
    full = plan.named("full").key
    return {
        "schema": SCHEMA,
        "kind": "ablation",
        "workload": workload,
        "impl": plan.setting.impl,
        "direction": plan.setting.direction,
        "grade": "measured" if samples else "compiled",
        "interrupted": bool(measured and measured.interrupted),
        "drift": None if math.isnan(longer := drift(np.asarray(samples.get(full, [])))) else longer,
        "clocks": moved(measured.clocks) if measured else {},
        "environment": dict(environment),
        "setting": {**described(plan.setting), "dq": dq_of(plan.setting.config)},
        "switches": [
            {"name": s.name, "full": s.full, "other": s.other, "what": s.what, "extra": s.extra} for s in plan.switches
        ],
        "rows": rows,
    }


def _row(
    plan: Plan,
    name: str,
    measured: Measured | None,
    compiled: Mapping[str, dict[str, Any]],
    modelled: Mapping[str, float],
) -> dict[str, Any]:
    variant = plan.named(name)
    facts = measured.facts.get(variant.key, {}) if measured else {}
    samples = measured.samples if measured else {}
    own = np.asarray(samples.get(variant.key, []), float)
    failed = measured.failed.get(variant.key, "") if measured else ""
    row: dict[str, Any] = {
        "name": name,
        "kind": variant.kind,
        "switch": variant.switch,
        "values": variant.values,
        "against": variant.against,
        "key": variant.key,
        "time": None,
        "effect": None,
        "resources": None,
        "sm_time": facts.get("sm_time"),
        "waits": facts.get("waits"),
        "ncu": facts.get("ncu"),
        "recording": facts.get("recording"),
        "no_recording": facts.get("no_recording") or facts.get("no_why") or "",
        "failed": failed or compiled.get(variant.key, {}).get("why_not", ""),
    }
    if len(own) and not failed:
        low, high = np.percentile(own, [25, 75])
        row["time"] = {
            "median_ms": float(np.median(own)), "iqr_ms": float(high - low), "rounds": len(own), "grade": "measured",
        }  # fmt: skip
    elif variant.key in modelled:
        row["time"] = {"median_ms": modelled[variant.key], "iqr_ms": None, "rounds": 0, "grade": "modelled"}
    if variant.against:
        row["effect"] = _effect(own, samples, modelled, variant.key, plan.named(variant.against).key, failed)
    given = {name: facts[name] for name in ("registers", "stack", "shared") if name in facts}
    if given:
        row["resources"] = {**given, "grade": "measured"}
    elif variant.key in compiled and "why_not" not in compiled[variant.key]:
        row["resources"] = {**compiled[variant.key], "grade": "compiled"}
    return row


def _effect(
    own: np.ndarray,
    samples: Mapping[str, list[float]],
    modelled: Mapping[str, float],
    key: str,
    other: str,
    failed: str,
) -> dict[str, Any] | None:
    if len(own) and samples.get(other) and not failed:
        found = effect(own, np.asarray(samples[other]))
        return {
            "change": found.change, "low": found.low, "high": found.high, "differs": found.differs,
            "words": found.words, "grade": "measured",
        }  # fmt: skip
    if key in modelled and other in modelled:
        change = modelled[key] / modelled[other] - 1
        return {
            "change": change, "low": None, "high": None, "differs": True, "words": f"{change * 100:+.1f} %",
            "grade": "modelled",
        }  # fmt: skip
    return None


def read(folder: Path) -> dict[str, Any]:
    """The document of a report folder. UserError: there is none, or it is another's, or damaged."""
    path = folder / RESULTS if folder.is_dir() else folder
    try:
        document = _ablation(path)
    except OSError as error:
        raise UserError(
            f"{folder}: holds no {RESULTS} ({error.strerror or error}); give a folder of `ablate`"
        ) from None
    if (schema := document.get("schema")) != SCHEMA or type(schema) is not int:
        said = plain(json.dumps(schema), 40)
        raise UserError(f"{path}: schema is {said}, this version reads {SCHEMA} (a number); {AGAIN}")
    if lacking := [name for name in DOCUMENT.parts if not name.endswith("?") and name not in document]:
        raise UserError(f"{path}: is not whole, {', '.join(lacking)} missing; {AGAIN}")
    try:
        check(document)
    except UserError as error:
        raise UserError(f"{path}: {error}; {AGAIN}") from None
    return document


def is_there(folder: Path) -> bool:
    """Whether the folder holds an ablation's results, or what is left of them: a file that is no JSON, and samples."""
    try:
        document = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    except OSError:
        return False
    except (ValueError, RecursionError):
        return (folder / SAMPLES).exists()
    return _is_ablation(document)


def _is_ablation(document: Any) -> bool:
    return isinstance(document, dict) and document.get("kind") == "ablation"


def _ablation(path: Path) -> dict[str, Any]:
    """What this file holds, of which nothing but its kind is known. UserError: no JSON, or not of an ablation."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        written(document).encode()  # half a surrogate pair can be read and not written again
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is no JSON ({error}); {AGAIN}") from None
    if not _is_ablation(document):
        raise UserError(f'{path}: is not of an ablation, its kind is not "ablation"; give a folder of `ablate`')
    return document


def written(document: Mapping[str, Any]) -> str:
    """The document as its file's text."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False) + "\n"
