"""Small recordings for tests: written by hand, or drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from hypothesis import strategies as st

from profiling.recording import COLUMNS, INTEGER_COLUMNS, Recording

SMS = 5
EVENTS = ("cta", "tile", "zero", "wait:kv_full")
ROLES = ("cta", "load", "mma")


def frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Rows of a recording; what a row leaves out is launch 0, cta 0, SM 0, role cta, event tile and −1."""
    base: dict[str, Any] = dict.fromkeys(COLUMNS, -1)
    base |= {"launch": 0, "cta": 0, "sm": 0, "role": "cta", "event": "tile", "start_ns": 0, "end_ns": 1}
    events = pd.DataFrame([base | row for row in rows], columns=list(COLUMNS))
    return events.astype({**INTEGER_COLUMNS, "role": "category", "event": "category"})


def recording(rows: Sequence[dict[str, Any]], *, sms: int = SMS, level: str = "tile", **metadata: Any) -> Recording:
    """A measured recording of `rows` on a GPU of `sms` SMs."""
    known: dict[str, Any] = {
        "schema": "1.0",
        "grade": "measured",
        "level": level,
        "gpu": {"name": "a GPU", "sm_count": sms},
        "events": {"written": len(rows), "lost": 0, "lost_by_lane": {}},
    }
    return Recording(frame(rows), known | metadata, source="by-hand.parquet")


@st.composite
def rows(draw: st.DrawFn, events: Sequence[str] = EVENTS, latest: int = 60, launches: int = 3) -> list[dict[str, Any]]:
    """Any spans at all, in any order: several launches and roles, overlapping CTAs, zero-length spans, idle SMs."""
    homes = draw(
        st.dictionaries(
            st.tuples(st.integers(0, launches - 1), st.integers(0, 7)), st.integers(0, SMS - 1), min_size=1, max_size=8
        )
    )
    spans = []
    for launch, cta in homes:
        for _ in range(draw(st.integers(1, 4))):
            start, end = sorted(draw(st.tuples(st.integers(0, latest), st.integers(0, latest))))
            spans.append(
                {
                    "launch": launch,
                    "cta": cta,
                    "sm": homes[launch, cta],
                    "role": draw(st.sampled_from(ROLES)),
                    "event": draw(st.sampled_from(list(events))),
                    "tile": draw(st.integers(0, 9)),
                    "batch": draw(st.integers(0, 3)),
                    "start_ns": start,
                    "end_ns": end,
                }
            )
    return draw(st.permutations(spans))
