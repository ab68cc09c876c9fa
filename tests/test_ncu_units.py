"""Units of Nsight Compute's pages in the base units of its reports."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiling.ncu.units import to_base


@pytest.mark.parametrize(
    ("unit", "factor", "base"),
    [
        ("ns", 1, "ns"),
        ("us", 1e3, "ns"),
        ("ms", 1e6, "ns"),
        ("s", 1e9, "ns"),
        ("nsecond", 1, "ns"),
        ("usecond", 1e3, "ns"),
        ("msecond", 1e6, "ns"),
        ("second", 1e9, "ns"),
        ("byte", 1, "byte"),
        ("Kbyte", 1e3, "byte"),
        ("Mbyte", 1e6, "byte"),
        ("Gbyte", 1e9, "byte"),
        ("Tbyte", 1e12, "byte"),
        ("hz", 1, "hz"),
        ("Khz", 1e3, "hz"),
        ("Mhz", 1e6, "hz"),
        ("Ghz", 1e9, "hz"),
        ("byte/s", 1, "byte/s"),
        ("byte/second", 1, "byte/s"),
        ("Mbyte/s", 1e6, "byte/s"),
        ("Tbyte/second", 1e12, "byte/s"),
        ("Kbyte/block", 1e3, "byte/block"),
        ("Kbyte/cycle", 1e3, "byte/cycle"),
        ("sector/ns", 1e9, "sector/s"),
        ("sector/us", 1e6, "sector/s"),
        ("sector/ms", 1e3, "sector/s"),
        ("inst/nsecond", 1e9, "inst/s"),
        ("cycle/nsecond", 1e9, "hz"),
        ("cycle/usecond", 1e6, "hz"),
        ("cycle/second", 1, "hz"),
        ("1/ns", 1e9, "1/s"),
        # ncu prints the 5460 %/byte of a report so, whatever the prefix ought to mean below the line
        ("%/Kbyte", 1e3, "%/byte"),
    ],
)
def test_scales_to_the_base(unit, factor, base):
    value, found = to_base(2.5, unit)
    assert found == base
    assert math.isclose(value, 2.5 * factor)


@pytest.mark.parametrize(
    "unit", ["", "%", "register/thread", "inst/cycle", "warp", "sector", "SM", "furlong", "Kfurlong", "a/b/c", "/", "1"]
)
def test_keeps_a_unit_it_does_not_know(unit):
    assert to_base(3.25, unit) == (3.25, unit)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.text("KMGTbytehzcyls/un%1 ", max_size=14))
def test_a_base_unit_is_its_own(value, unit):
    scaled, base = to_base(value, unit)
    assert to_base(scaled, base) == (scaled, base) or math.isinf(scaled)
