"""``--check`` of the benchmarks: what is beyond a bound, or missing, gives exit status 1."""

from __future__ import annotations

import math
from typing import Any

import pytest
from bounds import beyond, verdict

MOST = {"ratio": 1.1, "interval.1": 1.03, "host_syncs.lagged": 0}
GOOD = {"ratio": 1.1, "interval": (0.9, 1.02), "host_syncs": {"gate": 1, "lagged": 0}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, []),
        ({"ratio": 1.2}, ["ratio is 1.2, at most 1.1 expected"]),
        ({"ratio": math.nan}, ["ratio is nan, at most 1.1 expected"]),
        ({"interval": (0.9, 1.04)}, ["interval.1 is 1.04, at most 1.03 expected"]),
        ({"host_syncs": {"lagged": 1}}, ["host_syncs.lagged is 1, at most 0 expected"]),
        ({"host_syncs": {}}, ["host_syncs.lagged is missing, at most 0 expected"]),
    ],
)
def test_what_is_beyond_its_bound(change: dict[str, Any], told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    result = GOOD | change
    assert beyond(result, MOST) == told
    assert verdict(result, MOST, check=True) == bool(told)
    assert verdict(result, MOST, check=False) == 0
    assert f"{3 - len(told)} of 3 bounds kept" in capsys.readouterr().out
