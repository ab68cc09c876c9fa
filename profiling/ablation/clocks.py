"""The GPU's clock, temperature and power while variants are timed, as NVIDIA's management library (NVML) tells them.

A card that warms up, or is near its limit of power, lowers its clock: then one round is not as quick as another.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from profiling.ablation.effects import thirds

UNITS = {"sm_mhz": "MHz", "celsius": "°C", "watt": "W"}
_LIBRARY = "libnvidia-ml.so.1"
_CLOCK_SM, _TEMPERATURE_GPU = 1, 0
"""NVML_CLOCK_SM and NVML_TEMPERATURE_GPU, of NVML's API reference; power is in milliwatts there."""


class Watch:
    """One GPU's readings."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def of(cls, uuid: str, load: Callable[[str], Any] = ctypes.CDLL) -> Watch | None:
        """Of the GPU of that UUID; None where there is no NVML, or it does not know that GPU."""
        try:
            library = load(_LIBRARY)
        except OSError:
            return None
        handle = ctypes.c_void_p()
        name = ("" if uuid.startswith("GPU-") else "GPU-") + uuid
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
            return None
        return cls(library, handle)

    def read(self) -> dict[str, float]:
        """Those of `UNITS` that can be read now."""
        asked = {
            "sm_mhz": (self._library.nvmlDeviceGetClockInfo, (_CLOCK_SM,), 1.0),
            "celsius": (self._library.nvmlDeviceGetTemperature, (_TEMPERATURE_GPU,), 1.0),
            "watt": (self._library.nvmlDeviceGetPowerUsage, (), 1000.0),
        }
        found = {}
        for name, (ask, words, parts) in asked.items():
            value = ctypes.c_uint()
            if ask(self._handle, *words, ctypes.byref(value)) == 0:
                found[name] = value.value / parts
        return found


def moved(readings: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """By name of `UNITS`, the median of the first and of the last third of the rounds, and the least and the most."""
    found = {}
    for name in UNITS:
        values = np.array([reading[name] for reading in readings if name in reading])
        first, last = thirds(values)
        if len(values) and not math.isnan(first):
            found[name] = {"first": first, "last": last, "low": float(values.min()), "high": float(values.max())}
    return found


def words(found: Mapping[str, Mapping[str, float]]) -> str:
    """How they moved, for a reader: "SM clock 1,620 → 1,480 MHz, 52 → 61 °C, 640 → 690 W"; "" of nothing."""
    parts = [f"{of['first']:,.0f} → {of['last']:,.0f} {UNITS[name]}" for name, of in found.items()]
    return ("SM clock " if "sm_mhz" in found else "") + ", ".join(parts) if parts else ""
