"""What the separators of a file's numbers mean, decided for the file as a whole."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiling.errors import UserError
from profiling.ncu.numbers import COMMA, POINT, Cell, Convention, decide, has_no_value


def cells(*texts, metric="m__x", unit=""):
    return [Cell(text, line, metric, unit) for line, text in enumerate(texts, 2)]


@pytest.mark.parametrize(
    ("text", "point", "comma"),
    [
        ("0", 0, 0),
        ("-17", -17, -17),
        ("2402368", 2402368, 2402368),
        ("13,485", 13485, 13.485),
        ("117.344", 117.344, 117344),
        ("65,77", None, 65.77),
        ("65.77", 65.77, None),
        ("0,123", None, 0.123),
        ("0.123", 0.123, None),
        ("1.234.567", None, 1234567),
        ("1,234,567", 1234567, None),
        ("4,963,609,951.19", 4963609951.19, None),
        ("4.963.609.951,19", None, 4963609951.19),
        ("1 234,5", None, 1234.5),
        ("1\u00a0234,5", None, 1234.5),
        ("1\u202f234,5", None, 1234.5),
        ("1'234.5", 1234.5, None),
        ("1’234", 1234, 1234),
        ("12,34,567", 1234567, None),
        ("1234.567", 1234.567, None),
        ("5.460000", 5.46, None),
        ("1.2e+09", 1.2e9, None),
        ("1,234e-3", None, 0.001234),
        ("-1,5", None, -1.5),
        ("65.77%", 65.77, None),
        ("65,77 %", None, 65.77),
        ("1,23,4", None, None),
        ("1,2345", None, 1.2345),
        ("12,", None, None),
        (".5", None, None),
        ("0x1F", None, None),
        ("12 apples", None, None),
        ("9" * 400, None, None),
        ("1e999", None, None),
        ("", None, None),
        ("٣", None, None),
    ],
)
def test_reads_a_number_by_convention(text, point, comma):
    for decimal, expected in ((POINT, point), (COMMA, comma)):
        number = Convention(decimal).read(text)
        assert (number and number.value) == expected


@pytest.mark.parametrize(
    "text", ["0e9999", "1e-9999", "1" * 5000, "1." + "0" * 5000, "1e+0000000009", "(" * 5000 + ")"]
)
def test_extreme_spellings_end(text):
    for decimal in (POINT, COMMA):
        number = Convention(decimal).read(text)
        assert number is None or math.isfinite(number.value)


def test_reads_instances_behind_their_total():
    number = Convention(COMMA).read("5,46 (0,01; n/a; 5,45)")
    assert number.value == 5.46
    assert number.ids == (0, 1, 2)
    assert number.instances[0] == 0.01 and math.isnan(number.instances[1]) and number.instances[2] == 5.45
    assert Convention(POINT).read("12 (16: 1; 32: 2; 48: 9)").ids == (16, 32, 48)
    assert Convention(POINT).read("(256, 1, 1)") is None
    assert Convention(POINT).read("12 (apples)") is None


@pytest.mark.parametrize("text", ["n/a", "N/A", "nan", "inf", "-inf", "-", "(not available)", "no data", " NaN "])
def test_knows_what_is_no_value(text):
    assert has_no_value(text)


@pytest.mark.parametrize(
    ("texts", "decimal", "proof"),
    [
        (["117.344", "65,77"], COMMA, '"65,77" (line 3'),
        (["13,485", "4,963.5"], POINT, '"4,963.5" (line 3'),
        (["13,485", "1.234.567"], COMMA, '"1.234.567" (line 3'),
        (["13,485", "0,123"], COMMA, '"0,123" (line 3'),
        (["13,485", "0.123"], POINT, '"0.123" (line 3'),
        (["13,485", "3 (0.01; 2.99)"], POINT, '"3 (0.01; 2.99)" (line 3'),
        (["65,77"], COMMA, '"65,77" (line 2'),
    ],
)
def test_a_cell_that_can_be_read_one_way_decides_for_all(texts, decimal, proof):
    for order in (texts, texts[::-1]):
        found = decide(cells(*order), "f.csv")
        assert found.decimal == decimal
        assert f"decimal {decimal}: {proof[: proof.index(' (line')]}" in found.note
    assert proof in decide(cells(*texts), "f.csv").note


@pytest.mark.parametrize("texts", [["12", "n/a", "all"], ["12.50", "3"], ["1'234"], []])
def test_a_file_with_one_reading_needs_no_note(texts):
    assert decide(cells(*texts), "f.csv") == Convention(POINT, "")


@pytest.mark.parametrize(
    ("cell", "decimal"),
    [
        (Cell("12,345", 2, "sm__throughput.avg.pct_of_peak_sustained_elapsed", "%"), COMMA),
        (Cell("12.345", 2, "sm__throughput.avg.pct_of_peak_sustained_elapsed", "%"), POINT),
        (Cell("33,792", 2, "launch__thread_count", "thread"), POINT),
        (Cell("33.792", 2, "launch__thread_count", "thread"), COMMA),
        (Cell("1,024", 2, "launch__block_size", ""), POINT),
        (Cell("1.024", 2, "x__y", "block"), COMMA),
        (Cell("1.255", 2, "x__y", "register/thread"), COMMA),
        (Cell("13,485", 2, "smsp__inst_executed.sum", "inst"), POINT),
        (Cell("117.344", 2, "gpu__time_duration.sum", "ns"), COMMA),
        (Cell("117,344", 2, "gpu__time_duration.sum", "nsecond"), POINT),
        (Cell("1,980,000"[:5], 2, "device__attribute_clock_rate", ""), POINT),
        (Cell("128,000", 2, "launch__thread_count", "thread", 0, 128000), POINT),
        (Cell("128,000", 2, "launch__thread_count", "thread", 0, 128), COMMA),
    ],
)
def test_meaning_decides_where_spelling_does_not(cell, decimal):
    found = decide([cell], "f.csv")
    assert found.decimal == decimal
    assert f'"{cell.text}" (line 2' in found.note


def test_minimum_average_and_maximum_keep_their_order():
    three = [Cell(t, 2 + i, f"x__c.{w}", "cycle", 1) for i, (w, t) in enumerate([("min", "90"), ("avg", "95,125")])]
    assert decide([*three, Cell("99", 4, "x__c.max", "cycle", 1)], "f.csv").decimal == COMMA
    assert decide([*three, Cell("99.000.000", 4, "x__c.max", "cycle", 1)], "f.csv").decimal == COMMA
    high = [Cell("90000", 2, "x__c.min", "cycle", 1), Cell("95,125", 3, "x__c.avg", "cycle", 1)]
    assert decide(high, "f.csv").decimal == POINT
    other_launch = [high[0]._replace(launch=2), high[1]]
    with pytest.raises(UserError, match="--decimal point or --decimal comma"):
        decide(other_launch, "f.csv")


@pytest.mark.parametrize(
    "cell",
    [
        Cell("13,485", 7, "dram__bytes.sum.per_second", "byte/s"),
        Cell("2,345", 7, "launch__waves_per_multiprocessor", ""),
        Cell("2.345", 7, "derived__pct_occupancy_per_block_size", "%"),
        Cell("131.190", 7, "launch__shared_mem_per_block_dynamic", "Kbyte/block"),
        Cell("8.123", 7, "sm__warps_active.avg.per_cycle_active", "warp"),
    ],
)
def test_asks_where_nothing_decides(cell):
    with pytest.raises(UserError) as error:
        decide([cell], "f.csv")
    message = str(error.value)
    assert (
        "f.csv" in message and f'"{cell.text}" (line 7' in message and "--decimal point or --decimal comma" in message
    )


@pytest.mark.parametrize("texts", [["65,77", "65.77"], ["1.234.567", "4,963.5"], ["0.5", "117.344", "0,5"]])
def test_proofs_that_contradict_each_other_are_named(texts):
    with pytest.raises(UserError) as error:
        decide(cells(*texts), "f.csv")
    message = str(error.value)
    assert "line 2" in message and f"line {len(texts) + 1}" in message
    assert "--decimal" in message and "separate the files" in message


def test_meanings_that_contradict_each_other_are_named():
    one = Cell("12,345", 2, "x__y.pct", "%")
    other = Cell("1,024", 9, "launch__block_size", "")
    with pytest.raises(UserError, match=r"line 9.*line 2.*separate the files"):
        decide([one, other], "f.csv")


def test_the_convention_asked_for_is_taken():
    both = cells("13,485", unit="byte/s")
    assert decide(both, "f.csv", POINT).read("13,485").value == 13485
    assert decide(both, "f.csv", COMMA).read("13,485").value == 13.485
    assert "as asked" in decide(both, "f.csv", COMMA).note
    with pytest.raises(UserError, match=r"line 2: m__x is .65,77.*--decimal comma"):
        decide(cells("65,77"), "f.csv", POINT)
    with pytest.raises(UserError, match="neither point nor comma"):
        decide([], "f.csv", "period")


@given(
    st.integers(-(10**12), 10**12),
    st.integers(0, 99),
    st.sampled_from([(POINT, ",", "."), (COMMA, ".", ","), (COMMA, "\u202f", ","), (POINT, "'", ".")]),
)
def test_what_a_locale_prints_is_read_back(whole, hundredths, locale):
    decimal, thousands, separator = locale
    text = f"{whole:,}".replace(",", thousands) + f"{separator}{hundredths:02}"
    number = decide(cells(text), "f.csv").read(text)
    expected = float(f"{whole}.{hundredths:02}")
    assert number.value == expected and number.step == pytest.approx(0.01)
    assert decide(cells(text), "f.csv").decimal == decimal


@given(st.lists(st.text("0123456789.,' eE+-%();:n/a", max_size=12), max_size=6))
def test_any_cells_decide_or_are_refused(texts):
    try:
        found = decide(cells(*texts, unit="%"), "f.csv")
    except UserError as error:
        assert "line" in str(error)
        return
    other = COMMA if found.decimal == POINT else POINT
    for text in texts:
        # nothing may be readable in the other way alone
        assert found.read(text) is not None or Convention(other).read(text) is None
