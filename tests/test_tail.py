"""Who ended last, worked out by hand."""

import pandas as pd
from synthetic import synthetic_recording

from profiling.recording import COLUMNS, Recording
from profiling.tail import last_sm


def recording(rows, **workload):
    """Rows (cta, sm, event, tile, batch, start, end) on two SMs."""
    frame = pd.DataFrame(rows, columns=["cta", "sm", "event", "tile", "batch", "start_ns", "end_ns"])
    frame = frame.assign(launch=0, role="cta", head=0, block=0, stage=-1)[list(COLUMNS)]
    return Recording(frame, {"schema": "1.0", "gpu": {"sm_count": 2}, "events": {"lost": 0}, "workload": workload})


ROWS = [
    (0, 0, "tile", 0, 0, 0, 100),
    (0, 0, "tile", 1, 1, 110, 130),
    (1, 1, "tile", 2, 2, 0, 50),
    (1, 1, "tile", 3, 3, 50, 350),
    (1, 1, "tile", 4, 3, 350, 400),
]


def test_the_sm_that_ended_last_and_its_largest_sequence():
    found = last_sm(recording(ROWS, kv_lens=[10, 20, 30, 40]))
    assert (found.sm, found.end_ns, found.work_ns, found.fair_ns) == (1, 400, 400, (120 + 400) / 2)
    assert (found.batch, found.kv_len, found.sequence_tiles, found.tiles) == (3, 40, 2, 3)
    assert found.sequence_share == 350 / 400


def test_lengths_need_not_be_known():
    assert last_sm(recording(ROWS)).kv_len == -1


def test_without_tiles_there_is_none():
    assert last_sm(recording([(0, 0, "zero", -1, -1, 0, 10)])) is None


def test_in_a_static_deal_the_longest_sequence_is_to_blame():
    kv_lens = [64] * 40
    kv_lens[0] = 30000
    found = last_sm(synthetic_recording(128, kv_lens, sms=8, heads=1, schedule="static"))
    assert found.batch == 0 and found.kv_len == 30000 and found.sequence_share > 0.9
    assert found.work_ns > 3 * found.fair_ns
