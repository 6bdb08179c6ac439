"""The memory of samples that have been seen."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sentinel.data import seen as seen_module
from lightning_sentinel.data.seen import SeenSamples


def keys(*numbers: int) -> np.ndarray:
    return SeenSamples.keys([str(n) for n in numbers], [0] * len(numbers))


def test_first_sight_counts() -> None:
    seen = SeenSamples()
    seen.add(keys(1, 2), 5)
    seen.add(keys(2, 3), 6)
    assert seen.find(keys(3, 2, 1, 4)).tolist() == [2, 1, 0, -1]
    assert [seen.step_of(place) for place in (0, 1, 2)] == [5, 5, 6]
    assert len(seen) == 3


def test_another_pass_is_another_sample() -> None:
    seen = SeenSamples()
    seen.add(seen.keys(["a"], [0]), 0)
    assert seen.find(seen.keys(["a", "a"], [0, 1])).tolist() == [0, -1]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=8), max_size=30), st.integers(1, 12))
def test_like_a_dict(batches: list[list[int]], recent: int) -> None:
    seen, model = SeenSamples(), {}
    before, seen_module.RECENT = seen_module.RECENT, recent
    try:
        for step, batch in enumerate(batches):
            seen.add(keys(*batch), step)
            for n in batch:
                model.setdefault(n, (len(model), step))
            if step % 7 == 3:
                other = SeenSamples()
                other.load_state_dict(copy.deepcopy(seen.state_dict()))
                seen = other
            found = seen.find(keys(*range(61))).tolist()
            assert found == [model.get(n, (-1, 0))[0] for n in range(61)]
            assert all(seen.step_of(place) == model[n][1] for n, place in enumerate(found) if place >= 0)
    finally:
        seen_module.RECENT = before


def test_an_old_state_is_not_changed_by_what_follows() -> None:
    seen = SeenSamples()
    seen.add(keys(*range(10)), 0)
    state = seen.state_dict()
    kept = {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
    seen.add(keys(*range(10, 5000)), 1)
    seen.load_state_dict(state)
    seen.add(keys(*range(20, 40)), 2)
    assert all(torch.equal(state[name], value) for name, value in kept.items())
    assert seen.find(keys(9, 10, 20)).tolist() == [9, -1, 10]


def test_memory_is_bounded_and_still_covers_the_run() -> None:
    seen = SeenSamples(max_samples=1000)
    for step in range(2000):
        seen.add(keys(*range(step * 8, step * 8 + 8)), step)
        assert len(seen) <= 1000
    kept = seen.kept(keys(*range(16_000)))
    # of 16,000 samples a sixteenth or a thirty-second, binomially
    assert 350 < kept.sum() <= 1000
    found = seen.find(keys(*range(16_000)))
    assert ((found >= 0) == kept).all()
    assert (np.diff(found[kept]) > 0).all()
    assert {seen.step_of(p) for p in found[kept].tolist()} >= {int(n) // 8 for n in np.flatnonzero(kept)[:5]}
    again = SeenSamples(max_samples=1000)
    again.load_state_dict(seen.state_dict())
    assert (again.find(keys(*range(16_000))) == found).all()


def test_bounds() -> None:
    with pytest.raises(ValueError, match="max_samples is 1, expected at least 2"):
        SeenSamples(1)
