"""Public case fla#913: a kernel whose backward is NaN on finite input."""

from __future__ import annotations

from nonfinite_origins import Kernel, assert_named


def test_the_kernel_is_named_and_not_the_first_parameter() -> None:
    assert_named(Kernel, loss_is_finite=True, phase="backward", operator="aten.scalar_tensor.default")
