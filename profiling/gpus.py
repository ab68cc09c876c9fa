"""How many SMs a GPU has, by name, for replays on a card that is not there; and what its tensor cores do a cycle."""

from __future__ import annotations

import difflib
import re

from profiling.errors import UserError

SMS = {
    "A100": 108,
    "H100": 132,
    "H100-PCIe": 114,
    "H200": 132,
    "B200": 148,
    "GB300": 160,
}
"""NVIDIA's architecture papers: A100, Hopper (SXM unless named otherwise), Blackwell. GB300: the whole Blackwell Ultra
chip; a card on which some are switched off says so in `nvidia-smi`, and --sms takes its number."""

BF16_OPERATIONS = {"8.0": 2048, "9.0": 4096, "10.0": 8192, "10.3": 8192}
"""Dense bfloat16 operations a cycle and SM, two a multiply-add, by compute capability; float16 the same. NVIDIA's data
sheets: A100 312 TFLOP/s (108 SMs, 1.41 GHz), H100 SXM 989 (132 SMs, 1.83 GHz), B200 2,250 (148 SMs, 1.85 GHz)."""


def is_recorded(name: str, recorded: str) -> bool:
    """Whether a GPU of the table is the one that a recording names in its driver's words, such as "NVIDIA H200"."""
    words = _words(recorded)
    fitting = [key for key in SMS if _words(key) <= words]
    return bool(fitting) and max(fitting, key=len).lower() == name.lower()


def other_gpu(name: str | None, sms: int | None, recorded: str, recorded_sms: int) -> list[str]:
    """A line that says what a replay takes over where it is not of the recording's GPU and SMs; none where it is.

    ``name``, ``sms``: the GPU asked for, where it was named, and its number of SMs; None for the recording's.
    """
    if name is not None and not is_recorded(name, recorded):
        known = _in_table(name) or name
        differs = (
            f"{sms}, as many as {recorded} has: nothing differs" if sms == recorded_sms else f"{sms} for {recorded_sms}"
        )
        return [
            f"tiles cost what they cost on {recorded}, not on {known}: only the number of SMs is {known}'s, {differs}"
        ]
    if sms not in (None, recorded_sms):
        return [
            f"tiles cost what they cost on {recorded} with {recorded_sms} SMs: only the number of SMs differs, {sms}"
        ]
    return []


def _in_table(name: str) -> str:
    """The name as the table has it; "" where it is not there."""
    return next((key for key in SMS if key.lower() == name.lower()), "")


def _words(name: str) -> set[str]:
    return set(re.findall("[a-z0-9]+", name.lower()))


def sm_count(name: str) -> int:
    """SMs of the GPU of that name, upper or lower case. UserError: the nearest names, or all."""
    if known := _in_table(name):
        return SMS[known]
    near = difflib.get_close_matches(name.lower(), [key.lower() for key in SMS], n=2)
    names = [key for key in SMS if key.lower() in near] or list(SMS)
    raise UserError(f"--gpu: {name!r} is not in the table ({', '.join(names)}); give its number of SMs with --sms")
