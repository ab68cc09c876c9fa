"""Where a GPU kernel's time goes: recordings of what every CTA did, and analyses, figures and reports made from them.

Importing this package is cheap: pandas and pyarrow load when a recording is first touched, and neither torch, Triton
nor Plotly is needed to analyse one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiling.errors import RecordingError, UserError
    from profiling.recording import Recording

__version__ = "0.1.0"
__all__ = ["Recording", "RecordingError", "UserError", "__version__"]

_HOMES = {
    "Recording": "profiling.recording",
    "RecordingError": "profiling.errors",
    "UserError": "profiling.errors",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
