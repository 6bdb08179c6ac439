"""Public case fla#111: a strong log decay is masked after ``exp``, infinity times zero."""

from __future__ import annotations

import pytest
from nonfinite_origins import Decay, assert_named


def test_the_exponential_is_named_with_the_range_of_the_log_decay() -> None:
    found = assert_named(Decay, loss_is_finite=False, phase="forward", operator="aten.exp.default")
    assert found["finite_max"] == pytest.approx(15 * 30.1, rel=1e-5)
