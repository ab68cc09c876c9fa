"""Where in a kernel's machine code its warps stand: by what they wait for, by loop, by instruction.

Nsight Compute samples warps' program counters. A warp that waits is found at the instruction that it cannot issue,
which says less than what stands before it: a jump behind the try of an mbarrier waits for that, and what follows a
fence waits for the stores before it. So samples are laid at the door of what is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from profiling.ncu.control_flow import Loop, loops, opcode
from profiling.ncu.source_page import Listing
from profiling.ncu.stalls import MEANING, WORKING

ISSUING = "issuing, or ready to"
MBARRIER = "an mbarrier"
FENCE = "a fence: the stores before it"
BARRIER = "other warps at a barrier"
PRODUCTS = "its warpgroup's products (wgmma)"
_REASONS = {
    "long_sb": "long_scoreboard", "short_sb": "short_scoreboard", "math": "math_pipe_throttle", "mio": "mio_throttle",
    "lg": "lg_throttle", "tex": "tex_throttle", "no_inst": "no_instruction", "no_instructions": "no_instruction",
    "dispatch": "dispatch_stall", "imc": "imc_miss", "sleep": "sleeping", "warpgroup_arrive": "gmma",
}  # fmt: skip
"""How the source page abbreviates reasons, and what they are called elsewhere."""
_OTHERS = {
    "long_scoreboard": "data from global or local memory",
    "wait": "the result before it (fixed latency)",
    "dispatch_stall": "the dispatcher",
    "math_pipe_throttle": "a busy math pipe",
    "mio_throttle": "the queue for shared memory and special functions",
    "lg_throttle": "the queue for global and local memory",
    "tex_throttle": "the queue for textures",
}
"""What is waited for, where it is said otherwise than `MEANING` does."""
_PRODUCTS = ("HGMMA", "IGMMA", "QGMMA", "BGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA", "HMMA", "IMMA", "QMMA", "DMMA")
_SPILLS = ("LDL", "STL")
_NEAR = 3
"""Instructions behind a fence or a try of an mbarrier that still wait for it, at most."""


@dataclass(frozen=True, eq=False)
class Hotspots:
    """Where one kernel's samples stand.

    Attributes:
        kernel: its name; samples: in all.
        waits: what for, most first: columns what, samples, share.
        loops: in the order of the code, and a last row for what is in none: name ("1", in it "1.1", …; "–"), depth,
            first (place of its first instruction), instructions, rounds (times its first was executed, by warps; NaN
            where not counted), products (MMA instructions a round), spills (loads and stores of local memory),
            wavefronts (of shared memory a round of a warp, NaN likewise), samples, share, what and what_share (for
            which most of its samples wait, and their share of its samples). Each without the loops in it.
        code: the listing with the columns loop, reason (why most of an instruction's samples wait), what and share.
    """

    kernel: str
    samples: float
    waits: pd.DataFrame
    loops: pd.DataFrame
    code: pd.DataFrame


def hotspots(listing: Listing) -> Hotspots:
    """Where a kernel's samples stand."""
    code, total = listing.code.copy(), float(listing.code["samples"].sum())
    stalls = listing.stalls.rename(columns=lambda name: _REASONS.get(name, name))
    stalls = stalls.T.groupby(level=0).sum().T
    texts = list(code["text"])
    what = [[_what(place, reason) for reason in stalls.columns] for place in _places(texts)]
    waits = pd.DataFrame({"what": np.ravel(np.array(what, dtype=object)), "samples": stalls.to_numpy().ravel()})
    found = loops(list(code["address"]), texts)
    names = _names(found)
    code["loop"] = "–"
    for loop, name in zip(found, names, strict=True):
        code.loc[list(loop.own), "loop"] = name
    most = stalls.to_numpy().argmax(axis=1)
    code["reason"] = np.where(code["samples"] > 0, stalls.columns.to_numpy()[most], "")
    code["what"] = [of[place] if at else "" for of, place, at in zip(what, most, code["samples"], strict=True)]
    code["share"] = code["samples"] / total
    waits["loop"] = np.repeat(code["loop"].to_numpy(), stalls.shape[1])
    return Hotspots(listing.kernel, total, _ranked(waits), _table(found, names, code, waits, total), code)


class _Place(NamedTuple):
    """What says for what a warp waits at an instruction: its own name, and what stands right before it."""

    own: str
    tried: bool
    fenced: bool


def _places(texts: Sequence[str]) -> list[_Place]:
    names = [opcode(text) for text in texts]
    found = []
    for place, own in enumerate(names):
        near = range(max(0, place - _NEAR), place + 1)
        fenced = any(names[at] in ("FENCE", "MEMBAR") for at in near)
        found.append(_Place(own, any("TRYWAIT" in texts[at] for at in near), fenced))
    return found


@cache
def _what(place: _Place, reason: str) -> str:
    """What a warp waits for at an instruction for a reason."""
    if reason in WORKING:
        return ISSUING
    if place.own == "WARPGROUP" or reason == "gmma":
        return PRODUCTS
    if reason in ("long_scoreboard", "membar", "branch_resolving"):
        if place.own in ("BRA", "SYNCS") and place.tried:
            return MBARRIER
        if place.fenced:
            return FENCE
    if reason == "barrier" or place.own == "BAR":
        return BARRIER
    return _OTHERS.get(reason) or MEANING.get(reason, reason).partition(":")[0].removeprefix("waiting for ")


def _names(found: Sequence[Loop]) -> list[str]:
    """ "1", "2", and for loops in the second "2.1", "2.2", …"""
    counters: list[int] = []
    names = []
    for loop in found:
        counters = counters[: loop.depth + 1] + [0] * (loop.depth + 1 - len(counters))
        counters[loop.depth] += 1
        names.append(".".join(map(str, counters)))
    return names


def _ranked(waits: pd.DataFrame) -> pd.DataFrame:
    of_each = waits.groupby("what")["samples"].sum().sort_values(ascending=False, kind="stable")
    ranked = of_each[of_each > 0].reset_index()
    return ranked.assign(share=ranked["samples"] / ranked["samples"].sum())


def _table(
    found: Sequence[Loop], names: Sequence[str], code: pd.DataFrame, waits: pd.DataFrame, total: float
) -> pd.DataFrame:
    rows = []
    opcodes = [opcode(text) for text in code["text"]]
    parts = [*((name, loop.depth, loop.first) for name, loop in zip(names, found, strict=True)), ("–", 0, -1)]
    for name, depth, first in parts:
        own = np.flatnonzero(code["loop"] == name)
        ranked = _ranked(waits[(waits["loop"] == name) & (waits["what"] != ISSUING)])
        samples = float(code["samples"].iloc[own].sum())
        rounds = float(code["executed"].iloc[first]) if first >= 0 else np.nan
        wavefronts = float(code["wavefronts"].iloc[own].sum())
        rows.append(
            {
                "name": name,
                "depth": depth,
                "first": first,
                "instructions": len(own),
                "rounds": rounds,
                "products": sum(opcodes[place].startswith(_PRODUCTS) for place in own),
                "spills": sum(opcodes[place] in _SPILLS for place in own),
                "wavefronts": wavefronts / rounds if rounds > 0 else np.nan,
                "samples": samples,
                "share": samples / total,
                "what": ranked["what"].iloc[0] if len(ranked) else "",
                "what_share": float(ranked["samples"].iloc[0]) / samples if len(ranked) and samples else np.nan,
            }
        )
    return pd.DataFrame(rows)
