"""Nsight Compute reports: read in every form that `ncu` writes, summarised per kernel, collected.

`load` gives the tidy DataFrame, `read` the report with its rules and instances, `collect` runs `ncu`;
`profiling.ncu.summary.summarise` gives each kernel's figures, `profiling.ncu.verdict.verdicts` what limits it;
`profiling.ncu.source_page.read_source` gives a kernel's machine code with its samples, and
`profiling.ncu.hotspots.hotspots` what warps wait for there.
Importing this costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiling.ncu.collection import collect
    from profiling.ncu.reading import load, read
    from profiling.ncu.report import Report

__all__ = ["Report", "collect", "load", "read"]

_HOMES = {
    "Report": "profiling.ncu.report",
    "collect": "profiling.ncu.collection",
    "load": "profiling.ncu.reading",
    "read": "profiling.ncu.reading",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
