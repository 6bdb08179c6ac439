"""Public case pytorch#41508: a fully masked attention row, in a sample that the loss leaves out."""

from __future__ import annotations

from nonfinite_origins import Hidden, assert_named


def test_the_softmax_is_named_although_the_loss_hides_it() -> None:
    assert_named(Hidden, loss_is_finite=True, phase="forward", operator="aten._softmax.default")
