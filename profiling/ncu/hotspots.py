"""Where in a kernel's machine code its warps stand: by what they wait for, by loop, by instruction.

Nsight Compute samples warps' program counters. A warp that waits is found at the instruction that it cannot issue,
which says less than what stands before it: a jump behind the try of an mbarrier waits for that, and what hands memory
on behind a fence waits for the stores before the fence. So samples are laid at the door of what is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from profiling.ncu.control_flow import Loop, leaving, loops, opcode
from profiling.ncu.source_page import Listing
from profiling.ncu.stalls import MEANING, SAME, WORKING

ISSUING = "issuing, or ready to"
MBARRIER = "an mbarrier"
FENCE = "a fence: the stores before it"
BARRIER = "other warps at a barrier"
PRODUCTS = "its warpgroup's products (wgmma)"
UNSAID = "a reason that the page does not say"
OUTSIDE = "–"
"""The name of what is in no loop."""
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
_ANSWERS = ("long_scoreboard", "membar", "branch_resolving", "barrier", "")
"""Reasons that stand for several: an answer that has not come, of memory or of what orders it; "": none was given."""
_PRODUCTS = ("HGMMA", "IGMMA", "QGMMA", "BGMMA")
_MMAS = (*_PRODUCTS, "UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA", "HMMA", "IMMA", "QMMA", "OMMA", "DMMA")
_SPILLS = ("LDL", "STL")
_FENCES = ("FENCE", "MEMBAR")
_HANDS_ON = (*_FENCES, "BAR", "SYNCS", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED")
"""What waits for a fence that stands before it, as others may see the memory then."""
_TRIED, _FENCED = 3, 12
"""Instructions between the try of an mbarrier, or a fence, and what waits for it, at most."""


@dataclass(frozen=True, eq=False)
class Hotspots:
    """Where one kernel's samples stand.

    Attributes:
        kernel: its name; samples: in all.
        leaving: jumps to instructions that are not in the listing: it was cut if there are any.
        waits: what for, most first: columns what, samples, share.
        loops: each before those in it, and a last row for what is in none: name (`OUTSIDE` there), depth, first (place
            of its first instruction), instructions, rounds (times its first was executed, by warps; NaN where not
            counted), products (MMA instructions) and spills (loads and stores of local memory), both a round of a warp
            where executions were counted, else as they stand in the code; wavefronts (of shared memory a round of a
            warp, NaN where not counted), samples, share, what and what_share (for which most of its samples wait, and
            their share of its samples). Each without the loops in it.
        code: the listing with the columns loop, share, and what (for which most of an instruction's samples wait).
    """

    kernel: str
    samples: float
    leaving: int
    waits: pd.DataFrame
    loops: pd.DataFrame
    code: pd.DataFrame


def hotspots(listing: Listing) -> Hotspots:
    """Where a kernel's samples stand."""
    code, texts = listing.code.copy(), list(listing.code["text"])
    addresses = list(code["address"])
    found = loops(addresses, texts)
    loop = np.full(len(code), len(found))
    for index, one in enumerate(found):
        loop[list(one.own)] = index
    what, samples = _by_what(listing, texts)
    total = float(samples.sum())
    code["loop"] = np.array([*(one.name for one in found), OUTSIDE], dtype=object)[loop]
    code["share"] = code["samples"] / total
    code["what"] = _most(what, samples, code["samples"].to_numpy())
    waits = pd.DataFrame({"what": what, "samples": samples.sum(axis=0)}).sort_values(
        "samples", ascending=False, kind="stable"
    )
    waits = waits[waits["samples"] > 0].assign(share=waits["samples"] / total).reset_index(drop=True)
    return Hotspots(
        listing.kernel, total, leaving(addresses, texts), waits, _table(found, loop, code, what, samples), code
    )


class _Place(NamedTuple):
    """What says for what a warp waits at an instruction: its own name, and what stands before it."""

    own: str
    for_products: bool
    tried: bool
    fenced: bool


def _places(texts: Sequence[str]) -> list[_Place]:
    names = [opcode(text) for text in texts]
    found = []
    tried = fenced = -_FENCED - 1
    for place, own in enumerate(names):
        tried = place if "TRYWAIT" in texts[place] else tried
        fenced = place if own in _FENCES else fenced
        near = place - tried <= _TRIED, place - fenced <= _FENCED
        found.append(_Place(own, "DEPBAR" in texts[place] and own == "WARPGROUP", *near))
        if own == "BRA":
            fenced = place - _FENCED - 1  # behind a jump something else may have come before
    return found


@cache
def _what(place: _Place, reason: str) -> str:
    """What a warp waits for at an instruction for a reason."""
    if reason in WORKING:
        return ISSUING
    if reason in _ANSWERS:
        if place.own in ("BRA", "SYNCS") and place.tried:
            return MBARRIER
        if place.own in _HANDS_ON and place.fenced and reason != "barrier":
            return FENCE
        if place.for_products:
            return PRODUCTS
        if place.own == "BAR":
            return BARRIER
    if reason == "":
        return PRODUCTS if place.own.startswith(_PRODUCTS) else UNSAID
    if reason in ("gmma", "barrier"):
        return PRODUCTS if reason == "gmma" else BARRIER
    return _OTHERS.get(reason) or MEANING.get(reason, reason).partition(":")[0].removeprefix("waiting for ")


def _by_what(listing: Listing, texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The kinds of waits, and the samples of each instruction (row) that stand for them (column).

    What a page counts at an instruction beyond the reasons that it has is a wait as well, for a reason without a name.
    """
    given = listing.stalls.to_numpy()
    missing = np.maximum(listing.code["samples"].to_numpy() - given.sum(axis=1), 0.0)
    reasons = [*(SAME.get(name, name) for name in listing.stalls.columns), ""]
    counts = np.column_stack([given, missing])
    index: dict[str, int] = {}
    column = np.array(
        [[index.setdefault(_what(place, reason), len(index)) for reason in reasons] for place in _places(texts)]
    )
    samples = np.zeros((len(texts), len(index)))
    np.add.at(samples, (np.arange(len(texts))[:, None], column), counts)
    return list(index), samples


def _most(what: Sequence[str], samples: np.ndarray, own: np.ndarray) -> np.ndarray:
    """For which most samples of each row wait; issuing only where nothing else is; "" where there are none."""
    waits = samples.copy()
    if ISSUING in what:
        at = what.index(ISSUING)
        others = np.delete(waits, at, axis=1).sum(axis=1) > 0
        waits[others, at] = 0.0
    return np.where(own > 0, np.array(what, dtype=object)[waits.argmax(axis=1)], "")


def _table(
    found: Sequence[Loop], loop: np.ndarray, code: pd.DataFrame, what: Sequence[str], samples: np.ndarray
) -> pd.DataFrame:
    opcodes = [opcode(text) for text in code["text"]]
    executed = code["executed"].to_numpy()
    counts = pd.DataFrame(
        {
            "instructions": 1,
            "products": [name.startswith(_MMAS) for name in opcodes],
            "spills": [name in _SPILLS for name in opcodes],
            "wavefronts": code["wavefronts"].to_numpy(),
            "samples": samples.sum(axis=1),
        }
    ).astype(float)
    done = counts[["products", "spills"]].mul(executed, axis=0)
    every = range(len(found) + 1)
    static, dynamic = (frame.groupby(loop).sum(min_count=1).reindex(every) for frame in (counts, done))
    waits = np.zeros((len(found) + 1, len(what)))
    np.add.at(waits, loop, samples)
    most = _most(what, waits, waits.sum(axis=1))
    first = [*(one.first for one in found), -1]
    rounds = np.array([executed[place] if place >= 0 else np.nan for place in first])
    counted = rounds > 0
    a_round = np.where(counted, rounds, np.nan)
    table = pd.DataFrame(
        {
            "name": [*(one.name for one in found), OUTSIDE],
            "depth": [*(one.depth for one in found), 0],
            "first": first,
            "instructions": static["instructions"].fillna(0).astype(int),
            "rounds": rounds,
        }
    )
    for name in ("products", "spills"):
        table[name] = np.where(counted, dynamic[name] / a_round, static[name].fillna(0))
    table["wavefronts"] = static["wavefronts"] / a_round
    table["samples"] = static["samples"].fillna(0)
    table["share"] = table["samples"] / samples.sum()
    table["what"] = most
    column = [what.index(name) if name else 0 for name in most]
    table["what_share"] = waits[np.arange(len(every)), column] / np.where(
        table["samples"] > 0, table["samples"], np.nan
    )
    return table
