"""Public case pytorch#16317: ``where(n == 0, 0, x / n)`` is finite forward, and NaN in the backward."""

from __future__ import annotations

from nonfinite_origins import Divided, assert_named


def test_the_division_in_the_backward_is_named() -> None:
    assert_named(Divided, loss_is_finite=True, phase="backward", operator="aten.div.Tensor")
