"""The tolerance itself: what it must refuse, it refuses."""

import pytest

torch = pytest.importorskip("torch")

from tolerance import assert_close_to_reference, relative_error  # noqa: E402

OFFSETS = torch.tensor([0, 4, 4, 1000, 1010])


@pytest.fixture
def exact():
    result = torch.randn(1012, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result[1010:] = 0
    return result


def test_eager_itself_passes_and_float32_does(exact):
    low = exact.bfloat16()
    for actual in (low, exact.float(), exact):
        assert_close_to_reference(actual, exact, low, offsets=OFFSETS)


def test_three_times_eagers_error_is_too_much(exact):
    low = exact.bfloat16()
    actual = exact + 3 * (low.double() - exact)
    with pytest.raises(AssertionError, match="result: error"):
        assert_close_to_reference(actual, exact, low)
    assert_close_to_reference(actual, exact, low, factor=3.1)


def test_a_wrong_short_sequence_does_not_hide(exact):
    low = exact.bfloat16()
    actual = exact.clone()
    actual[:4] += 4 * (low.double() - exact)[:4]
    assert_close_to_reference(actual, exact, low)
    with pytest.raises(AssertionError, match="result of sequence 0"):
        assert_close_to_reference(actual, exact, low, offsets=OFFSETS)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_one_element_that_is_no_number_fails(exact, wrong):
    actual = exact.clone()
    actual[500, 1, 3] = wrong
    with pytest.raises(AssertionError):
        assert_close_to_reference(actual, exact, exact.bfloat16(), factor=1e9)


def test_a_nan_in_the_eager_result_fails_too(exact):
    low = exact.bfloat16()
    low[0] = float("nan")
    with pytest.raises(AssertionError):
        assert_close_to_reference(exact, exact, low)


def test_rows_past_the_end_must_be_exact(exact):
    actual = exact.clone()
    actual[1011] = 1e-30
    with pytest.raises(AssertionError, match="past the last offset"):
        assert_close_to_reference(actual, exact, exact.bfloat16(), offsets=OFFSETS)


def test_infinities_must_stand_where_they_are_due(exact):
    lse = exact[..., 0].T.contiguous()
    lse[:, 1010:] = -torch.inf
    low = lse.bfloat16()
    assert_close_to_reference(lse.float(), lse, low, offsets=OFFSETS, dim=1)
    for wrong in (0.0, float("inf"), float("nan")):
        actual = lse.float()
        actual[0, 1011] = wrong
        with pytest.raises(AssertionError, match="is due"):
            assert_close_to_reference(actual, lse, low)


def test_a_float32_exact_result_or_another_shape_is_refused(exact):
    with pytest.raises(AssertionError, match="exact result is torch.float32"):
        assert_close_to_reference(exact, exact.float(), exact)
    with pytest.raises(AssertionError, match="shape"):
        assert_close_to_reference(exact[:1], exact, exact)


def test_relative_error_of_zeros():
    zero, one = torch.zeros(3), torch.ones(3)
    assert relative_error(zero, zero) == 0
    assert relative_error(one, zero) == float("inf")
    assert relative_error(zero, one) == 1
