"""The validation metric against the plain formula, over uneven batches and two ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from collective_limit import limit_groups
from fork_server import call_on_ranks
from hybrid_lm.metrics import GeometricMeanTokenProbability
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(("nats", "probability"), [(2.05, 0.129), (2.90, 0.055), (0.0, 1.0)])
def test_known_values(nats: float, probability: float) -> None:
    metric = GeometricMeanTokenProbability()
    metric.update(torch.tensor(nats * 40), torch.tensor(40))
    assert round(metric.compute().item(), 3) == probability


@given(st.lists(st.lists(st.floats(0, 20), min_size=1, max_size=8), min_size=1, max_size=5))
def test_every_token_counts_alike_however_batches_are_cut(batches: list[list[float]]) -> None:
    metric = GeometricMeanTokenProbability()
    for batch in batches:
        metric.update(torch.tensor(batch, dtype=torch.float64), torch.ones(len(batch), dtype=torch.int64))
    tokens = [nats for batch in batches for nats in batch]
    assert metric.compute().item() == pytest.approx(math.exp(-math.fsum(tokens) / len(tokens)), rel=1e-9)


def test_tokens_count_up_to_sums_at_which_float32_is_deaf() -> None:
    metric = GeometricMeanTokenProbability()
    metric.update(torch.tensor(2.0**26), torch.tensor(2**25))
    for _ in range(1000):
        metric.update(torch.tensor(1.0), torch.tensor(1))
    assert metric.nats.item() == 2.0**26 + 1000


def test_nothing_supervised_is_nan_and_a_reset_forgets() -> None:
    metric = GeometricMeanTokenProbability()
    metric.update(torch.tensor(5.0), torch.tensor(1))
    metric.reset()
    metric.update(torch.tensor([0.0, 0.0]), torch.tensor([0, 0]))
    assert math.isnan(metric.compute().item())


def on_rank(rank: int, rendezvous: str, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    limit_groups()
    metric = GeometricMeanTokenProbability()
    metric.update(*((torch.tensor(200.0), torch.tensor(100)), (torch.tensor(3.0), torch.tensor(1)))[rank])
    Path(results, str(rank)).write_text(repr(metric.compute().item()))
    dist.destroy_process_group()


@pytest.mark.distributed
def test_two_ranks_with_uneven_shares_agree_on_the_mean_over_tokens(tmp_path: Path) -> None:
    call_on_ranks(on_rank, str(tmp_path / "rendezvous"), str(tmp_path))
    values = [float((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    assert values == [pytest.approx(math.exp(-203 / 101), rel=1e-12)] * 2
