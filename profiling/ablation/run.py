"""Runs the child process over a plan's variants, minds it, and keeps every event as it comes.

A child that says nothing for ``limit_s`` seconds hangs: it is killed, the variant that it was at fails, and another
child goes on with the rest. So does one that dies. What was measured stays in ``progress.jsonl``, where a later run
goes on, and recordings in ``recordings/``. Nsight Compute's counters come last, when no round is timed any more.
"""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any

from profiling.ablation.clocks import UNITS
from profiling.ablation.plan import Plan, Setting
from profiling.errors import UserError
from profiling.ncu.collection import of_the_machine

PROGRESS, RECORDINGS = "progress.jsonl", "recordings"
LIMIT_S = 180.0
"""The first variant of a child pays for its imports and may compile for a minute."""


@dataclass
class Measured:
    """What is known of each key so far: samples (ms, in the order of the rounds), facts, and why it failed; and of the
    GPU: clocks, a reading of `profiling.ablation.clocks` a round."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    explained: set[str] = field(default_factory=set)
    clocks: list[dict[str, float]] = field(default_factory=list)
    interrupted: bool = False

    def take(self, event: dict[str, Any]) -> None:
        """Note one event of the child, or that one begins."""
        key, kind = event.get("key", ""), event["event"]
        if kind == "child":
            self._align()
        elif kind == "sample":
            self.samples.setdefault(key, []).append(event["ms"])
        elif kind == "clocks":
            self.clocks.append({name: value for name, value in event.items() if name in UNITS})
        elif kind == "told":
            self.explained |= set(event["keys"])
        elif kind == "failed":
            self.failed[key] = event["why"]
        elif kind == "ncu":
            self.facts.setdefault(key, {})["ncu"] = event["ncu"]
        elif kind in ("checked", "why"):
            known = {name: value for name, value in event.items() if name not in ("event", "key")}
            self.facts.setdefault(key, {}).update(known)
            self.explained |= {key} if kind == "why" else set()

    def _align(self) -> None:
        """Drop what a round that was cut short left: samples are compared by their place."""
        lengths = {key: len(taken) for key, taken in self.samples.items() if key not in self.failed}
        for key in lengths:
            del self.samples[key][min(lengths.values()) :]

    def unexplained(self, keys: list[str]) -> list[str]:
        """Those with times of which nobody has said, or tried to say, why."""
        able = self.samples.keys() - self.failed.keys() - self.explained
        return [key for key in keys if key in able and self.samples[key]]

    def uncounted(self, keys: list[str]) -> list[str]:
        """Those with times of which ncu has measured nothing yet; where it failed, it is asked again."""
        done = {key for key, facts in self.facts.items() if "failed" not in facts.get("ncu", {"failed": ""})}
        return [key for key in keys if self.samples.get(key) and key not in self.failed and key not in done]

    def missing(self, keys: list[str], rounds: int) -> int:
        """Rounds that some variant, which has not failed, still lacks."""
        return max((rounds - len(self.samples.get(key, [])) for key in keys if key not in self.failed), default=0)


def described(setting: Setting) -> dict[str, Any]:
    """A setting as JSON, for the child."""
    from jfa.config import describe

    return {
        "impl": setting.impl,
        "direction": setting.direction,
        "schedule": setting.schedule,
        "split": setting.split,
        "config": describe(setting.config),
    }


def recording_names(plan: Plan) -> dict[str, str]:
    """key → the name of its recording's file: full.parquet, schedule-static.parquet, after the first of that key."""
    first = {variant.key: variant.name for variant in reversed(plan.variants)}
    return {key: re.sub(r"[^a-z0-9_.]+", "-", name.lower()) + ".parquet" for key, name in first.items()}


def measure(
    workload: str,
    plan: Plan,
    folder: Path,
    *,
    rounds: int,
    device: str = "cuda",
    why: bool = True,
    count: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None,
    limit_s: float = LIMIT_S,
    progress: Callable[[int, int], None] = lambda done, total: None,
    child: tuple[str, ...] = ("-m", "profiling.ablation.child"),
) -> Measured:
    """Check every variant and time those that are right, ``rounds`` times in turn, going on from ``folder``'s progress.

    An interrupt ends it with what was measured until then, and ``interrupted`` set. ``count``, where given, says what
    ncu measures of a workload and a described setting, as `profiling.ablation.counters.count`: asked at the end, of
    each variant with times.

    Raises:
        UserError: the progress cannot be written (a full disk: what was written stays).
    """
    settings = plan.settings()
    found = read_progress(folder)
    total = len(settings) * rounds
    kept = {key: str(folder / RECORDINGS / name) for key, name in recording_names(plan).items()}
    try:
        with (folder / PROGRESS).open("a", encoding="utf-8") as log:
            while True:
                left = found.missing(list(settings), rounds)
                able = [key for key in settings if key not in found.failed]
                asked = (able if left else found.unexplained(able)) if why else []
                if not left and not asked:
                    break
                if asked:
                    (folder / RECORDINGS).mkdir(exist_ok=True)
                request = {
                    "workload": workload,
                    "device": device,
                    "rounds": left,
                    "why": asked,
                    "recordings": {key: kept[key] for key in asked},
                    "variants": {key: described(settings[key]) for key in (able if left else asked)},
                }
                for event in chain([{"event": "child"}], _events(request, limit_s, child)):
                    if event["event"] == "end":
                        event = {"event": "told", "keys": asked}  # as far as it could
                    if event["event"] != "begin":
                        found.take(event)
                        log.write(json.dumps(event) + "\n")
                        log.flush()
                    progress(sum(map(len, found.samples.values())), total)
            if count is not None:
                for done, event in enumerate(_counted(workload, settings, found, count), start=1):
                    progress(done, len(settings))
                    found.take(event)
                    log.write(json.dumps(event) + "\n")
                    log.flush()
    except KeyboardInterrupt:
        found.interrupted = True
    except OSError as error:
        raise UserError(
            f"{folder / PROGRESS}: cannot be written ({error.strerror or error}); what is there is kept: go on with "
            "--resume"
        ) from error
    return found


def _counted(
    workload: str,
    settings: dict[str, Setting],
    found: Measured,
    count: Callable[[str, dict[str, Any]], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """An event a variant with what ncu measured; what keeps ncu from one for good is said of the others, untried."""
    for_all: dict[str, Any] = {}
    for key in found.uncounted(list(settings)):
        said = for_all or count(workload, described(settings[key]))
        if of_the_machine(said.get("failed", "")):
            for_all = said
        yield {"event": "ncu", "key": key, "ncu": said}


def read_progress(folder: Path) -> Measured:
    """What a run before left in the folder; a line cut short by its end is left out."""
    found = Measured()
    path = folder / PROGRESS
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.take(json.loads(line))
            except (ValueError, KeyError):
                continue
    return found


def _events(request: dict[str, Any], limit_s: float, child: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The events of one child; where it hangs or dies, the failure of the variant that it was at."""
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8") as said:
        process = subprocess.Popen(
            [sys.executable, *child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
        )
        assert process.stdin is not None and process.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        current: dict[str, Any] = {}
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            while True:
                try:
                    line = lines.get(timeout=limit_s)
                except queue.Empty:
                    yield _failure(current, f"hung: no answer in {limit_s:g} s")
                    return
                if line is None:
                    break
                if not line.startswith("{"):
                    continue
                event = json.loads(line)
                current = event if event["event"] == "begin" else current
                yield event
                if event["event"] == "end":
                    return
            said.seek(0)
            last = said.read().strip().splitlines()[-1:] or ["nothing on stderr"]
            yield _failure(current, f"its process died ({process.wait()}): {last[0][:300]}")
        finally:
            process.kill()
            process.wait()


def _failure(begun: dict[str, Any], why: str) -> dict[str, Any]:
    """The failure of what was begun last: of the variant, or only of saying why it takes as long as it does."""
    if not begun:
        raise UserError(f"ablate: could not begin: {why}")
    if begun.get("phase") == "why":
        return {"event": "why", "key": begun["key"], "no_why": why}
    return {"event": "failed", "key": begun["key"], "why": why}


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
