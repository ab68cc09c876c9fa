"""What an Nsight Compute report holds, whichever form it came in: launches, metrics, instances and rule results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

OK, NOT_AVAILABLE, MISSING, NOT_COLLECTED = "ok", "n/a", "missing", "not collected"
"""Whether a metric has a value: it has one; the GPU or the tool had none to give ("n/a"); other launches of the report
have the metric and this one does not; or a summary asks for it and no launch of the report has it."""


@dataclass(frozen=True)
class KernelLaunch:
    """One profiled kernel launch.

    Attributes:
        id: ncu's number of the launch in its report, as written.
        range: number of the profiled range, 0 where the form does not say.
        kernel: the function's name; kernel_full: with its signature, where the form has both.
        grid, block, cluster: (x, y, z); () where the form does not say, and for cluster where there is none.
        gpu: its marketing name, "" where unknown; capability: such as "9.0", "" where unknown.
        push_pop, start_end: the NVTX ranges around it, "domain:message" each, outermost first.
    """

    id: str
    kernel: str
    range: int = 0
    kernel_full: str = ""
    process: str = ""
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    cluster: tuple[int, ...] = ()
    gpu: str = ""
    capability: str = ""
    push_pop: tuple[str, ...] = ()
    start_end: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metric:
    """One metric of one launch: `value` in the base unit `unit` (ns, byte, hz, %, …), or `text`, or neither.

    `label` is what ncu's pages call it and `section` where ("" where the form does not say). `name` is the metric's own
    name; where a page has a label only and the name is not known, `section :: label`. `instances` counts the values of
    an instanced metric, of which `value` is the total.
    """

    name: str
    value: float = float("nan")
    text: str = ""
    unit: str = ""
    state: str = OK
    label: str = ""
    section: str = ""
    instances: int = 0


@dataclass(frozen=True)
class Rule:
    """What one of NVIDIA's rules said of a launch: its `kind` is "optimization", "warning", "info" or "error".

    `speedup_pct` is the rule's estimate, NaN where it gives none; `speedup_scope` is "global" (of the whole kernel),
    "local" (of the part it looked at) or "".
    """

    name: str
    message: str
    title: str = ""
    section: str = ""
    kind: str = ""
    speedup_pct: float = float("nan")
    speedup_scope: str = ""


@dataclass(frozen=True, eq=False)
class Report:
    """One report.

    Attributes:
        path: the file; form: "ncu-rep", "raw page" or "details page" (joined by " and " where a file holds several).
        launches: in the order of the file.
        metrics: per launch, by metric name.
        rules: per launch.
        writer: ncu's version that wrote it, "" where the form does not say; command: its command line, likewise.
        notes: how the file was read, where that was a decision: separators, lines skipped, duplicates.
        instances: per (launch, metric name): (correlation ids, values), where they were asked for.
    """

    path: str
    form: str
    launches: tuple[KernelLaunch, ...]
    metrics: tuple[dict[str, Metric], ...]
    rules: tuple[tuple[Rule, ...], ...] = ()
    writer: str = ""
    command: str = ""
    notes: tuple[str, ...] = ()
    instances: dict[tuple[int, str], tuple[list[float], list[float]]] = field(default_factory=dict)

    def select(self, keep: Sequence[int]) -> Report:
        """The same report with these launches only, in this order."""
        return replace(
            self,
            launches=tuple(self.launches[i] for i in keep),
            metrics=tuple(self.metrics[i] for i in keep),
            rules=tuple(self.rules[i] for i in keep) if self.rules else (),
            instances={
                (new, name): values
                for new, old in enumerate(keep)
                for (launch, name), values in self.instances.items()
                if launch == old
            },
        )

    def frame(self, wanted: Sequence[str] = ()) -> pd.DataFrame:
        """The tidy table: a row per (launch, metric), `COLUMNS` in order.

        A metric that other launches of this report have and this one lacks is a row of state "missing"; one of
        ``wanted`` that no launch has, of state "not collected". Raises nothing.
        """
        seen = dict.fromkeys(name for launch in self.metrics for name in launch)
        absent = [name for name in dict.fromkeys(wanted) if name not in seen]
        blank = {name: next(launch[name] for launch in self.metrics if name in launch) for name in seen}
        cells: list[tuple[int, Metric]] = []
        for index, launch in enumerate(self.metrics):
            for name in seen:
                found = launch.get(name)
                if found is None:
                    like = blank[name]
                    found = Metric(name, unit=like.unit, state=MISSING, label=like.label, section=like.section)
                cells.append((index, found))
            cells.extend((index, Metric(name, state=NOT_COLLECTED)) for name in absent)
        owner = np.fromiter((index for index, _ in cells), dtype=np.int64, count=len(cells))
        of_metric = [metric for _, metric in cells]
        columns: dict[str, object] = {
            "report": pd.Categorical.from_codes(np.zeros(len(cells), dtype=np.int8), pd.Index([self.path])),
            "writer": pd.Categorical.from_codes(np.zeros(len(cells), dtype=np.int8), pd.Index([self.writer])),
            "range": np.array([launch.range for launch in self.launches], dtype=np.int64)[owner],
            "launch": owner,
        }
        for name in ("id", "kernel", "kernel_full", "process", "gpu", "capability"):
            columns[name] = _by_launch([getattr(launch, name) for launch in self.launches], owner)
        for name in ("grid", "block", "cluster", "push_pop", "start_end"):
            values = np.empty(len(self.launches), dtype=object)
            values[:] = [getattr(launch, name) for launch in self.launches]
            columns[name] = values[owner]
        columns["metric"] = pd.Categorical([metric.name for metric in of_metric])
        columns["value"] = np.array([metric.value for metric in of_metric], dtype=np.float64)
        for name in ("text", "unit", "state", "label", "section"):
            columns[name] = pd.Categorical([getattr(metric, name) for metric in of_metric])
        columns["instances"] = np.array([metric.instances for metric in of_metric], dtype=np.int64)
        return pd.DataFrame(columns, columns=list(COLUMNS))


COLUMNS = (
    "report", "writer", "range", "launch", "id", "kernel", "kernel_full", "process", "gpu", "capability", "grid",
    "block", "cluster", "push_pop", "start_end", "metric", "value", "text", "unit", "state", "label", "section",
    "instances",
)  # fmt: skip
"""Columns of the tidy table: those of the report and launch, then the metric's."""


def _by_launch(values: list[str], owner: np.ndarray) -> pd.Categorical:
    codes, names = pd.factorize(np.array(values, dtype=object))
    return pd.Categorical.from_codes(codes[owner], pd.Index(names))
