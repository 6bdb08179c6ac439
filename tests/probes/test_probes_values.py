"""The registry, and every built-in value against a direct computation of the same thing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hybrid_lm.gated_delta import decay as decayed
from hybrid_lm.model import GatedDeltaNet, HybridLM, HybridLMConfig, Layout
from hybrid_lm.probes import final_state
from torch import Tensor, nn

from lightning_sentinel.probes import probe_of, register_probe
from lightning_sentinel.probes.collect import Stats
from lightning_sentinel.probes.generic import QUANTILES, largest, rms
from lightning_sentinel.probes.observer import Observer
from lightning_sentinel.probes.registry import _PROBES
from lightning_sentinel.probes.trend import RangeTrend

CPU = torch.device("cpu")


def observed(module: nn.Module, *args: Any, max_modules: int = 32, call: Any = None) -> Observer:
    """One forward of the module under an observer; the hooks stay, so use the module once."""
    observer = Observer(max_modules)
    with observer.watching(module):
        call() if call is not None else module(*args)
    assert observer.failed == {}
    return observer


def values(observer: Observer) -> dict[str, dict[str, Any]]:
    return observer.stats.read(CPU)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------------ registry


def test_the_nearest_class_counts_and_a_later_one_replaces() -> None:
    class Mine(nn.Linear):
        pass

    class Yours(Mine):
        pass

    linear = probe_of(nn.Linear(2, 2))
    assert probe_of(Yours(2, 2)) is linear
    try:
        first = register_probe(Mine)(lambda module, args, kwargs, output: {"first": output.sum()})
        assert probe_of(Yours(2, 2)) is first
        second = register_probe(Yours, Mine)(lambda module, args, kwargs, output: {"second": output.sum()})
        assert probe_of(Yours(2, 2)) is second
        assert probe_of(Mine(2, 2)) is second
        assert probe_of(nn.Linear(2, 2)) is linear
        module = Yours(2, 2)
        x = randn(3, 2)
        assert values(observed(module, x)) == {"": {"second": pytest.approx(module(x).sum().item(), rel=1e-5)}}
    finally:
        _PROBES.pop(Mine), _PROBES.pop(Yours)


@pytest.mark.parametrize("kinds", [(), (nn.Linear(1, 1),), (int,)])
def test_only_module_classes_are_registered(kinds: Any) -> None:
    with pytest.raises(TypeError, match=r"register_probe expects subclasses of torch\.nn\.Module, found"):
        register_probe(*kinds)


def test_a_probe_that_fails_is_named_and_the_others_go_on() -> None:
    class Bad(nn.Identity):
        pass

    @register_probe(Bad)
    def bad(module: Any, args: Any, kwargs: Any, output: Any) -> dict[str, Tensor]:
        raise KeyError("no such thing")

    try:
        observer = Observer(4)
        module = nn.Sequential(Bad(), nn.Linear(2, 2))
        with observer.watching(module):
            module(randn(3, 2))
        assert observer.failed == {"0": "KeyError: 'no such thing'"}
        assert list(values(observer)) == ["1"]
    finally:
        _PROBES.pop(Bad)


def test_a_probe_may_call_parts_of_its_module_and_they_stay_silent() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x

    register_probe(Twice)(lambda module, args, kwargs, output: {"inner": module.inner(args[0]).sum()})
    try:
        assert list(values(observed(Twice(), randn(3, 2)))) == [""]
    finally:
        _PROBES.pop(Twice)


def test_many_modules_are_thinned_evenly_and_long_values_shortened() -> None:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
    observer = observed(module, randn(2, 4), max_modules=4)
    assert list(values(observer)) == ["0", "13", "26", "39"]
    assert observer.left_out == 36
    stats = Stats()
    stats.add("heads", {"many": torch.arange(1000.0)})
    assert stats.read(CPU) == {"heads": {"many": [0.0, 499.0, 999.0]}}


def test_nothing_is_read_by_the_host() -> None:
    """On the meta device every read by the host raises."""
    config = HybridLMConfig(vocab_size=64, width=32, layers=4, ffn_width=64)
    with torch.device("meta"):
        model = HybridLM(config)
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        documents = torch.zeros(2, 64, dtype=torch.int64)
        other = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.BatchNorm1d(8), nn.Sigmoid())

        def everything() -> None:
            logits = model(tokens, documents)
            F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

        observer = observed(model, call=everything)
        assert {"GatedDeltaNet", "FeedForward", "RMSNorm", "attention", "tokens"} <= set(observer.stats.kinds.values())
        observed(other, torch.zeros(4, 8))
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        x = torch.zeros(2, 5, 8)
        observed(attention, call=lambda: attention(x, x, x))


# -------------------------------------------------------------------------------------------------------- their values


def entropy(probability: Tensor) -> Tensor:
    return -(probability * probability.clamp(min=1e-30).log()).sum(-1)


@pytest.mark.parametrize("way", ["plain", "causal", "boolean", "additive", "grouped", "scaled", "long"])
def test_attention_logits_and_entropy_by_head(way: str) -> None:
    heads, length = 4, 300 if way == "long" else 7
    query, key = randn(2, heads, length, 8), randn(2, heads // 2 if way == "grouped" else heads, length, 8, seed=1)
    options: dict[str, Any] = {}
    seen = torch.ones(length, length, dtype=torch.bool)
    if way in ("causal", "long"):
        options["is_causal"], seen = True, seen.tril()
    if way in ("boolean", "additive"):
        seen[:, 2] = False
        seen[3, :] = False  # a row that sees nothing
        mask = seen if way == "boolean" else torch.zeros(length, length).masked_fill(~seen, -math.inf)
        options["attn_mask"] = mask.expand(2, 1, length, length)
    options |= {"enable_gqa": True} if way == "grouped" else {"scale": 0.5} if way == "scaled" else {}
    found = values(
        observed(nn.Identity(), call=lambda: F.scaled_dot_product_attention(query, key, key.clone(), **options))
    )[":attention"]
    wide = key.repeat_interleave(2, dim=1) if way == "grouped" else key
    scores = query @ wide.transpose(-1, -2) * (0.5 if way == "scaled" else 8**-0.5)
    masked = scores.masked_fill(~seen, -math.inf)
    rows = seen.any(-1)
    by_head = entropy(masked[:, :, rows].softmax(-1)).mean((0, 2))
    tolerance = 0.02 if way == "long" else 1e-4  # 256 of 300 queries
    assert found["logit_max"] == pytest.approx(masked.amax((0, 2, 3)).tolist(), rel=0.1 if way == "long" else 1e-4)
    assert found["entropy_nats"] == pytest.approx(by_head.tolist(), rel=tolerance)
    assert found["masked_rows"] == pytest.approx(0.0 if rows.all() else 1 / 7, rel=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_has_the_entropy_of_its_weights(need_weights: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=batch_first)
    x = randn(2, 6, 16)
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    given = x if batch_first else x.transpose(0, 1)
    _, weights = module(given, given, given, attn_mask=mask, average_attn_weights=False)
    observer = observed(module, call=lambda: module(given, given, given, attn_mask=mask, need_weights=need_weights))
    found = values(observer)[""]
    assert found["entropy_nats"] == pytest.approx(entropy(weights).mean((0, 2)).tolist(), rel=1e-4)


def test_attention_written_out_is_seen_by_its_softmax() -> None:
    scores = randn(2, 3, 5, 5)
    found = values(observed(nn.Identity(), call=lambda: scores.softmax(-1)))[":attention"]
    assert found["logit_max"] == pytest.approx(scores.amax((0, 2, 3)).tolist(), rel=1e-5)
    assert values(observed(nn.Identity(), call=lambda: randn(4, 9).softmax(-1))) == {}


def test_quantiles_of_the_single_targets_losses() -> None:
    logits, targets = randn(200, 11), torch.arange(200) % 11
    targets[::3] = -100
    found = values(observed(nn.Identity(), call=lambda: F.cross_entropy(logits, targets)))[":tokens"]
    nats = -logits.log_softmax(-1)[torch.arange(200), targets.clamp(min=0)][targets >= 0]
    assert found["loss_nats"] == pytest.approx(nats.quantile(torch.tensor(QUANTILES)).tolist(), rel=1e-5)
    assert found["targets"] == (targets >= 0).sum().item()
    by_sequence, wanted = logits.view(4, 50, 11).movedim(-1, 1), targets.view(4, 50)
    sequence = values(observed(nn.Identity(), call=lambda: nn.CrossEntropyLoss()(by_sequence, wanted)))
    assert sequence[":tokens"] == found


def test_sizes_of_tensors_are_measured_once_until_they_are_written_to() -> None:
    x = randn(50, 3)
    x[4, 1] = -9.0
    assert largest(x).item() == 9.0
    assert rms(x).item() == pytest.approx(x.square().mean().sqrt().item(), rel=1e-6)
    x *= 2.0
    assert largest(x).item() == 18.0
    assert math.isnan(largest(torch.tensor([1.0, math.nan])).item())
    assert rms(torch.full((4096,), 200.0, dtype=torch.float16)).item() == pytest.approx(200.0)


def test_silent_and_saturated_units() -> None:
    x = torch.tensor([[-1.0, 2.0, -3.0], [1.0, 2.0, -0.5]])
    found = values(observed(nn.ReLU(), x))[""]
    assert (found["silent"], found["dead_units"]) == pytest.approx((0.5, 1 / 3), rel=1e-5)
    found = values(observed(nn.Sigmoid(), torch.tensor([[-10.0, 0.0, 10.0, 10.0]])))[""]
    assert (found["low"], found["high"]) == (0.25, 0.5)
    norm = nn.BatchNorm1d(3)
    found = values(observed(norm, x))[""]
    assert found["running_var_min"] == pytest.approx(norm.running_var.min().item(), rel=1e-5)  # type: ignore[union-attr]
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, num_layers=2)
    state = lstm(randn(5, 2, 3))[1][0]
    assert values(observed(lstm, randn(5, 2, 3)))[""]["state_norm"] == pytest.approx(
        state.norm(dim=-1).mean(1).tolist(), rel=1e-5
    )


# --------------------------------------------------------------------------------------------------- the example's own


def example() -> tuple[GatedDeltaNet, Layout]:
    torch.manual_seed(0)
    config = HybridLMConfig(vocab_size=64, width=32, layers=1, ffn_width=64, linear_head_dim=8, chunk_size=16)
    model = HybridLM(config)
    documents = torch.tensor([[0] * 20 + [1] * 25, [0] * 45])
    return model.layers[0].mixer, Layout.of(documents, config, torch.float32)  # type: ignore[return-value]


def test_recurrent_state_is_that_of_the_definition() -> None:
    module, layout = example()
    _, key, value, log_decay, beta = module.rule_inputs(randn(2, 45, 32), layout)
    state = torch.zeros(2, key.shape[2], 8, 8)
    fade = decayed(log_decay, torch.zeros_like(log_decay, dtype=torch.bool))
    for t in range(45):
        if t == 20:
            state[0] = 0.0  # a new document
        state = fade[:, t, :, None, None] * state
        held = torch.einsum("bhk,bhkv->bhv", key[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], beta[:, t, :, None] * (value[:, t] - held))
    torch.testing.assert_close(final_state(key, value, log_decay, beta, layout), state, atol=1e-5, rtol=1e-4)


def test_a_dead_and_a_forgetful_head_are_seen() -> None:
    module, layout = example()
    with torch.no_grad():
        module.beta.weight.zero_()
        module.log_rate[1] = 12.0
    module.beta.register_forward_hook(lambda m, a, out: out - torch.tensor([50.0, 0.0]))  # head 0 never writes
    found = values(observed(module, randn(2, 45, 32), layout))[""]
    assert found["write_dead"] == [1.0, 0.0]
    assert found["write_closed"] == [1.0, 0.0]
    assert found["write_mean"][1] == pytest.approx(0.5)
    assert found["decay_forgets"] == [0.0, 1.0]
    assert found["state_norm"][0] < 1e-6 < found["state_norm"][1]


# --------------------------------------------------------------------------------------------------------------- trend


def looks(magnitudes: list[float], limit: float = 65504.0, every: int = 10, horizon: int = 80) -> list[int]:
    """At which looks a warning is given."""
    trend = RangeTrend(horizon)
    return [i for i, m in enumerate(magnitudes) if trend.look(i * every, {"x": (m, limit)})]


@pytest.mark.parametrize(
    ("magnitudes", "expected"),
    [
        # 7.77 doublings left at 0.0433 a step: 179 steps at first, 80 after ten looks; once only
        ([300.0 * 1.35**i for i in range(18)], [10]),
        ([300.0] * 20, []),
        ([300.0 * (1.0 + 0.5 * (i % 2)) for i in range(20)], []),  # it swings
        ([1.0 * 1.5**i for i in range(12)], []),  # it doubles fast and is far away
        ([20000.0 + 100.0 * i for i in range(20)], []),  # slow: not within the horizon
        ([40000.0, 40000.0], [0]),  # less than one doubling
        ([65504.0] * 5, []),  # a mask filled with the lowest number
        ([math.inf, math.nan, 0.0], []),
        ([60000.0, 200.0, 200.0, 200.0, 60000.0], [0, 4]),  # gone in between
    ],
)
def test_growth_towards_the_limit(magnitudes: list[float], expected: list[int]) -> None:
    assert looks(magnitudes) == expected


def test_bfloat16_and_float32_are_far_from_their_limit() -> None:
    assert looks([1000.0 * 2.0**i for i in range(20)], torch.finfo(torch.bfloat16).max) == []


def test_the_trend_s_state_goes_round() -> None:
    def at(i: int) -> dict[str, tuple[float, float]]:
        return {"x": (300.0 * 1.35**i, 65504.0)}

    trend, fresh = RangeTrend(80), RangeTrend(80)
    for i in range(9):
        assert trend.look(i * 10, at(i)) == []
    fresh.loads(trend.dumps())
    assert fresh.dumps() == trend.dumps()
    later = [fresh.look(i * 10, at(i)) for i in (9, 10, 11)]
    assert later == [trend.look(i * 10, at(i)) for i in (9, 10, 11)]
    assert [len(w) for w in later] == [0, 1, 0]
