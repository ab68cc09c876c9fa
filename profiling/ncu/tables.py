"""The findings as tables of words: overview, a kernel's numbers, verdicts and deltas; every format prints these."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from profiling.ncu.analysis import KernelFindings, ReportFindings
from profiling.ncu.attention import LostTensorTime
from profiling.ncu.baseline import Delta, Match
from profiling.ncu.metrics import DERIVED, Number
from profiling.ncu.summary import KernelSummary, busiest_pipe
from profiling.ncu.verdict import evidence
from profiling.ncu.words import SHOWN, name_of, shape, show
from profiling.text import duration, percent, plain, significant
from profiling.word_table import Table

TOP_STALLS = 6
RULE_CHARACTERS = 600
_LINK = re.compile(r"@(?:url|section|source|sass):(?:[^@:]*:)?([^@:]*)(?::https?:[^@]*)?@")
MEASURED_NOTE = "measured by ncu, on the GPU named; shares, bandwidths and verdicts: derived from them"


def overview(findings: ReportFindings) -> Table:
    """A row a kernel, longest in sum first."""
    rows = []
    for item in findings.kernels:
        kernel = item.kernel
        numbers = kernel.numbers
        rows.append(
            (
                plain(kernel.name, 60),
                f"{kernel.launches:,}",
                shape(kernel.launch),
                _durations(kernel),
                percent(kernel.share),
                _tensor(kernel),
                show(numbers.get("sm_throughput")),
                show(numbers.get("memory_throughput")),
                show(numbers.get("dram_rate")),
                _occupancy(kernel),
                verdict_words(item),
            )
        )
    headings = (
        "kernel", "launches", "shape", "duration", "share", "tensor", "SM", "memory", "DRAM", "occupancy", "verdict",
    )  # fmt: skip
    return Table(_title(findings), headings, rows, (1, 3, 4, 5, 6, 7, 8, 9), MEASURED_NOTE)


def _title(findings: ReportFindings) -> str:
    report = findings.report
    gpus = dict.fromkeys(_gpu(item.kernel) for item in findings.kernels)
    writer = f", ncu {report.writer}" if report.writer else ""
    return f"{report.path} ({report.form}): {', '.join(gpus)}{writer}"


def _gpu(kernel: KernelSummary) -> str:
    launch = kernel.launch
    if launch.gpu:
        return f"{launch.gpu} ({launch.capability})" if launch.capability else launch.gpu
    return f"compute capability {launch.capability}" if launch.capability else "GPU unknown"


def verdict_words(item: KernelFindings) -> str:
    """The first two verdicts' kinds."""
    return ", then ".join(verdict.what for verdict in item.verdicts[:2])


def _durations(kernel: KernelSummary) -> str:
    known = sorted(value for value in kernel.durations if value == value)
    if not known:
        return kernel.absent.get("duration", "–")
    middle = duration(kernel.get("duration"))
    return middle if len(known) == 1 else f"{middle} ({duration(known[0])} … {duration(known[-1])})"


def _tensor(kernel: KernelSummary) -> str:
    found = kernel.numbers.get("tensor") or kernel.numbers.get("tensor_active")
    if found is None:
        return kernel.absent.get("tensor", "–")
    return show(found) if kernel.has_tensor_work else "no tensor work"


def _occupancy(kernel: KernelSummary) -> str:
    achieved, theoretical = (kernel.numbers.get(f"occupancy_{which}") for which in ("achieved", "theoretical"))
    if achieved is None and theoretical is None:
        return "–"
    return f"{show(achieved)} of {show(theoretical)}"


def numbers(item: KernelFindings) -> Table:
    """A kernel's numbers: what, value, grade, source; what is not there says why."""
    kernel = item.kernel
    rows: list[tuple[str, ...]] = []
    for fact in SHOWN:
        found = kernel.numbers.get(fact)
        if found is not None:
            rows.append((name_of(fact), show(found) + _beside(kernel, fact), found.grade, found.source))
        elif fact in kernel.absent:
            rows.append((name_of(fact), kernel.absent[fact], "", ""))
    rows += [
        (f"stall: {stall.reason}", f"{significant(stall.share)} % of warp time", stall.grade, stall.source)
        for stall in kernel.stalls[:TOP_STALLS]
    ]
    rows += [(name_of(fact), show(value), value.grade, value.source) for fact, value in item.attention.items()]
    if item.lost:
        rows += list(_lost(item.lost, kernel.numbers["tensor"]))
    where = f", in {kernel.launch.push_pop[-1]}" if kernel.launch.push_pop else ""
    several = f", the launch of median duration of {kernel.launches:,}" if kernel.launches > 1 else ""
    title = f"{plain(kernel.name)}: {shape(kernel.launch)}{several}{where}"
    return Table(title, ("what", "value", "grade", "metric"), rows, (1,))


def _beside(kernel: KernelSummary, fact: str) -> str:
    """What belongs beside a number: the occupancy's limiter, the pipe's name, that a share is no tensor work."""
    if fact == "occupancy_theoretical" and kernel.limiters:
        return f" (by {kernel.limiters})"
    if fact == "busiest_pipe":
        return f" ({busiest_pipe(kernel)})"
    if fact == "tensor" and not kernel.has_tensor_work:
        return " (no tensor work)"
    return ""


def _lost(lost: LostTensorTime, tensor: Number) -> Iterator[tuple[str, ...]]:
    parts = ", ".join(f"{name} {significant(share)} %" for name, share in lost.parts.items() if share >= 0.05)
    source = f"recording {lost.recording}, {tensor.source}"
    yield "SM time: tensor pipe active", f"{significant(lost.tensor)} %", tensor.grade, tensor.source
    yield "SM time: lost inside the work", f"{significant(lost.inside)} %", DERIVED, source
    yield "SM time: lost to imbalance", f"{significant(lost.imbalance)} % ({parts or 'none'})", DERIVED, source


def verdicts(item: KernelFindings) -> Table:
    """A kernel's verdicts, the first to look at first, with what they rest on."""
    rows = []
    for verdict in item.verdicts:
        rests = ", ".join(f"{name_of(fact)} {show(value)}" for fact, value in evidence(item.kernel, verdict))
        gain = f"at most {percent(verdict.gain)} of the time" if verdict.gain == verdict.gain else "–"
        rows.append((verdict.what, verdict.why, gain, rests))
    grade = "derived; a gain is an upper bound for that limit alone"
    return Table(f"{plain(item.kernel.name)}: verdict", ("limit", "why", "gain", "rests on"), rows, (), grade)


def rules(item: KernelFindings) -> Table | None:
    """What NVIDIA's own rules said, optimisations with an estimate first; None where the report holds none."""
    kept = [rule for rule in item.kernel.rules if rule.kind in ("optimization", "warning", "error")]
    if not kept:
        return None
    kept.sort(key=lambda rule: -rule.speedup_pct if rule.speedup_pct == rule.speedup_pct else 0.0)
    rows = [
        (
            rule.title or rule.name,
            f"{significant(rule.speedup_pct)} % ({rule.speedup_scope or 'scope unknown'})"
            if not math.isnan(rule.speedup_pct)
            else "–",
            plain(_LINK.sub(r"\1", rule.message), RULE_CHARACTERS),
        )
        for rule in kept
    ]
    grade = "NVIDIA's rules and their estimates, as the report holds them"
    return Table(f"{plain(item.kernel.name)}: NVIDIA's rules", ("rule", "estimate", "message"), rows, (1,), grade)


def deltas(match: Match) -> Table:
    """A kernel against its baseline; a change within the noise reads "none"."""
    rows = [
        (name_of(delta.fact), _value(delta, delta.before), _value(delta, delta.after), _change(delta))
        for delta in match.deltas
    ]
    noise = max(match.kernel.noise, match.baseline.noise)
    which = match.kernel if match.kernel.noise >= match.baseline.noise else match.baseline
    grade = f"changes: derived; none: within {percent(noise)} ({which.noise_source})"
    headings = ("what", "baseline", "now", "change")
    return Table(f"{plain(match.kernel.name)} against {match.baseline.report}", headings, rows, (1, 2, 3), grade)


def _value(delta: Delta, value: float) -> str:
    return show(Number(value, delta.unit, "", ""))


def _change(delta: Delta) -> str:
    if not delta.differs:
        return "none"
    return "from nothing" if math.isinf(delta.change) else f"{delta.change * 100:+.1f} %"


def notes(findings: Sequence[ReportFindings]) -> list[str]:
    """How files were read, each line with its file where there are several."""
    return [f"{_file(item, findings)}{note}" for item in findings for note in item.report.notes]


def differences(findings: Sequence[ReportFindings]) -> list[str]:
    """What differs from the baseline besides the kernels, and which kernels have no match: to be read first."""
    lines = []
    for item in findings:
        name = _file(item, findings)
        if item.comparison is not None:
            lines += [f"{name}{warning}" for warning in item.comparison.warnings]
            for words, kernels in (
                ("not in the baseline", item.comparison.only_here),
                ("only in the baseline", item.comparison.only_baseline),
            ):
                if kernels:
                    lines.append(f"{name}{words}: {', '.join(dict.fromkeys(plain(k.name, 60) for k in kernels))}")
    return lines


def _file(item: ReportFindings, findings: Sequence[ReportFindings]) -> str:
    return f"{item.report.path}: " if len(findings) > 1 else ""
