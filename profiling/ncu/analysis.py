"""Everything that is said of some reports, in one value that every output format is written from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from profiling.errors import UserError
from profiling.ncu.attention import LostTensorTime, extras, lost_tensor_time, same_launch
from profiling.ncu.baseline import Comparison, compare
from profiling.ncu.metrics import DERIVED, Number
from profiling.ncu.report import Report
from profiling.ncu.summary import KernelSummary, select, summarise
from profiling.ncu.verdict import Verdict, evidence, verdicts

if TYPE_CHECKING:
    from profiling.recording import Recording


@dataclass(frozen=True, eq=False)
class KernelFindings:
    """A kernel, what limits it, and, for attention of ours, its useful rate and where its tensor time went."""

    kernel: KernelSummary
    verdicts: tuple[Verdict, ...]
    attention: dict[str, Number]
    lost: LostTensorTime | None = None


@dataclass(frozen=True, eq=False)
class ReportFindings:
    """One report: its kernels, longest first, and its comparison with the baseline where one was given."""

    report: Report
    kernels: tuple[KernelFindings, ...]
    comparison: Comparison | None


def analyse(
    reports: Sequence[Report],
    *,
    kernel: str | None = None,
    nvtx: str | None = None,
    baseline: Report | None = None,
    recording: Recording | None = None,
) -> list[ReportFindings]:
    """Summaries and verdicts of the selected kernels of each report.

    A report without a match is an error only if no report has one. The recording is set beside each kernel that it can
    be of.

    Raises:
        UserError: nothing matches; the recording belongs to no kernel here.
    """
    chosen, refused = [], []
    for report in reports:
        try:
            chosen.append(select(report, kernel, nvtx))
        except UserError as error:
            refused.append(error)
    if not chosen:
        raise refused[0]
    left_out = (f"left out: {error}" for error in refused)
    chosen[0] = replace(chosen[0], notes=(*chosen[0].notes, *left_out))
    before = summarise(_selected(baseline, kernel, nvtx)) if baseline else []
    return _with_recording(
        [
            ReportFindings(
                report,
                tuple(KernelFindings(k, tuple(verdicts(k)), extras(k)) for k in kernels),
                compare(report, kernels, baseline, before) if baseline else None,
            )
            for report, kernels in ((report, summarise(report)) for report in chosen)
        ],
        recording,
    )


def _selected(report: Report, kernel: str | None, nvtx: str | None) -> Report:
    """Of a baseline, what the selection leaves; all of it where its names differ."""
    try:
        return select(report, kernel, nvtx)
    except UserError:
        return report


def _with_recording(found: list[ReportFindings], recording: Recording | None) -> list[ReportFindings]:
    if recording is None:
        return found
    refused: list[UserError] = []
    fits = 0
    result = []
    for findings in found:
        kernels = []
        for item in findings.kernels:
            lost = None
            try:
                same_launch(item.kernel, recording)
            except UserError as error:
                refused.append(error)
            else:
                try:
                    lost = lost_tensor_time(item.kernel, recording)
                    fits += 1
                except UserError as error:
                    refused.insert(0, error)  # of the right launch: the better reason
            kernels.append(KernelFindings(item.kernel, item.verdicts, item.attention, lost))
        result.append(ReportFindings(findings.report, tuple(kernels), findings.comparison))
    if not fits:
        raise refused[0]
    return result


def document(found: Sequence[ReportFindings]) -> dict[str, Any]:
    """The findings as plain values for JSON: every number with unit, grade and source."""
    return {"reports": [_report(findings) for findings in found]}


def _report(findings: ReportFindings) -> dict[str, Any]:
    report = findings.report
    made: dict[str, Any] = {
        "path": report.path,
        "form": report.form,
        "writer": report.writer,
        "command": report.command,
        "notes": list(report.notes),
        "kernels": [_kernel(item) for item in findings.kernels],
    }
    if findings.comparison is not None:
        made["baseline"] = _comparison(findings.comparison)
    return made


def _kernel(item: KernelFindings) -> dict[str, Any]:
    kernel = item.kernel
    made = {
        **asdict(kernel.launch),
        "launches": kernel.launches,
        "durations_ns": list(kernel.durations),
        "share": kernel.share,
        "numbers": {fact: asdict(value) for fact, value in kernel.numbers.items()},
        "absent": dict(kernel.absent),
        "tensor_work": kernel.has_tensor_work,
        "occupancy_limiters": kernel.limiters,
        "stalls": [asdict(stall) for stall in kernel.stalls],
        "noise": {"value": kernel.noise, "source": kernel.noise_source},
        "verdicts": [
            asdict(verdict) | {"grade": DERIVED, "evidence": {fact: asdict(n) for fact, n in evidence(kernel, verdict)}}
            for verdict in item.verdicts
        ],
        "rules": [asdict(rule) for rule in kernel.rules],
    }
    if item.attention:
        made["attention"] = {fact: asdict(value) for fact, value in item.attention.items()}
    if item.lost:
        made["tensor_time"] = asdict(item.lost)
    return made


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "warnings": list(comparison.warnings),
        "matches": [
            {
                "kernel": match.kernel.name,
                "baseline": match.baseline.report,
                "same_shape": match.same_shape,
                "deltas": [asdict(delta) | {"differs": delta.differs, "grade": DERIVED} for delta in match.deltas],
            }
            for match in comparison.matches
        ],
        "only_here": [kernel.name for kernel in comparison.only_here],
        "only_baseline": [kernel.name for kernel in comparison.only_baseline],
    }
