"""Jagged Flash Attention: attention over sequences of very different lengths, and the recorder that watches it.

Nothing here imports torch or Triton before it is used: :mod:`jfa.workloads` and :mod:`jfa.lanes` work without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["TileTable", "__version__", "jagged_attention", "nested_attention", "plan"]

if TYPE_CHECKING:
    from jfa.attention import jagged_attention, plan
    from jfa.nested import nested_attention
    from jfa.schedule import TileTable

_HOME = {
    "jagged_attention": "jfa.attention",
    "nested_attention": "jfa.nested",
    "plan": "jfa.attention",
    "TileTable": "jfa.schedule",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jfa' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
