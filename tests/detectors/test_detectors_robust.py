"""Rolling order statistics and trend tests against NumPy, SciPy and pymannkendall."""

import math
import re

import numpy as np
import pymannkendall
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sentinel import limits
from lightning_sentinel.detectors.robust import (
    RollingWindow,
    average_ranks,
    mann_kendall,
    sorted_mad,
    theil_sen,
)

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(finite, min_size=1, max_size=60), st.integers(1, 20))
def test_rolling_window_equals_numpy(values, size):
    window = RollingWindow(size)
    for i, value in enumerate(values):
        window.push(value)
        newest = values[max(0, i + 1 - size) : i + 1]
        assert window.values == newest
        assert window.ordered == sorted(newest)
        assert window.median == pytest.approx(np.median(newest))
        assert window.mad == pytest.approx(np.median(np.abs(np.array(newest) - np.median(newest))))


@given(st.lists(finite, min_size=1, max_size=40), finite)
def test_mad_around_any_centre(values, center):
    assert sorted_mad(sorted(values), center) == pytest.approx(np.median(np.abs(np.array(values) - center)))


def test_sigma_is_scipys_scaled_mad():
    values = np.random.default_rng(0).standard_normal(101)
    expected = scipy.stats.median_abs_deviation(values, scale="normal")
    assert RollingWindow(101, values.tolist()).sigma == pytest.approx(expected)


def test_window_state_round_trip():
    window = RollingWindow(4, [3.0, 1.0, 2.0, 5.0, 4.0])
    other = RollingWindow(4)
    other.load_state_dict(window.state_dict())
    for w in (window, other):
        w.push(0.5)
    assert other.values == window.values == [2.0, 5.0, 4.0, 0.5]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 0.8]), st.sampled_from([0.0, 0.02, -0.05]), st.integers(8, 60))
def test_mann_kendall_equals_pymannkendall(seed, phi, slope, n):
    rng = np.random.default_rng(seed)
    x = np.empty(n)
    last = 0.0
    for i in range(n):
        last = phi * last + rng.standard_normal()
        x[i] = last + slope * i
    with np.errstate(invalid="ignore"):  # the corrected variance can come out negative; theirs is then NaN
        expected = pymannkendall.hamed_rao_modification_test(x)
    z, s, variance = mann_kendall(x)
    assert s == expected.s
    assert variance == pytest.approx(expected.var_s, rel=1e-9)
    if expected.var_s > 0:
        assert z == pytest.approx(expected.z, rel=1e-9)


def test_mann_kendall_with_ties():
    x = np.array([1.0, 2, 2, 3, 3, 3, 4, 5, 5, 6, 2, 7])
    expected = pymannkendall.hamed_rao_modification_test(x)
    assert mann_kendall(x)[0] == pytest.approx(expected.z)
    assert np.array_equal(average_ranks(x), scipy.stats.rankdata(x))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30))
def test_theil_sen_equals_scipy(values):
    assert theil_sen(values) == pytest.approx(scipy.stats.theilslopes(values)[0], abs=1e-9)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.0, "X: y must be greater than 0 and at most 1, found 0.0."),
        (-1.0, "X: y must be greater than 0 and at most 1, found -1.0."),
        (math.nan, "X: y must be a number, found nan."),
        ("8", "X: y must be a number, found '8'."),
        (True, "X: y must be a number, found True."),
        (2.0, "X: y must be greater than 0 and at most 1, found 2.0."),
    ],
)
def test_bounds_name_field_found_and_bound(value, message, monkeypatch):
    monkeypatch.setitem(limits.LIMITS, "X", {"y": limits.Limit("parts", above=0.0, most=1.0)})
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        limits.check_limits("X", {"y": value})


def test_counts_are_whole_numbers(monkeypatch):
    monkeypatch.setitem(limits.LIMITS, "X", {"n": limits.Limit("steps", least=3, whole=True)})
    with pytest.raises(ValueError, match=r"X: n must be a whole number, found 2\.5\."):
        limits.check_limits("X", {"n": 2.5})
    with pytest.raises(ValueError, match=r"X: n must be at least 3, found 2\."):
        limits.check_limits("X", {"n": 2})
