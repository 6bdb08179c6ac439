"""The registry, and every built-in value against a direct computation of the same thing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hybrid_lm.gated_delta import decay as decayed
from hybrid_lm.model import FeedForward, GatedDeltaNet, HybridLM, HybridLMConfig, Layout
from hybrid_lm.model import RMSNorm as ExampleNorm
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


def same(found: dict[str, Any], direct: dict[str, Any]) -> None:
    """Neither more nor fewer values than were computed directly, and each of them right."""
    assert found.keys() == direct.keys()
    for name, expected in direct.items():
        assert found[name] == pytest.approx(expected, rel=1e-4, abs=1e-7), name


def of_size(x: Tensor, of: str) -> dict[str, float]:
    """Root mean square and largest magnitude by their definition, in float64."""
    numbers = x.detach().double().flatten().tolist()
    return {
        f"{of}_rms": math.sqrt(sum(n * n for n in numbers) / len(numbers)),
        f"{of}_max": max(abs(n) for n in numbers),
    }


def linear(module: Any, x: Tensor) -> dict[str, Any]:
    return of_size(x, "input") | {"output_max": of_size(x @ module.weight.T + module.bias, "output")["output_max"]}


def embedding(module: Any, x: Tensor) -> dict[str, Any]:
    return of_size(module.weight[x], "output")


def batch_norm(module: Any, x: Tensor) -> dict[str, Any]:
    """Running values after the first batch, at a momentum of 0.1."""
    mean, variance = 0.1 * x.mean(0), 0.9 + 0.1 * x.var(0)
    return of_size(x, "input") | {
        "running_mean_max": max(abs(m) for m in mean.tolist()),
        "running_var_min": min(variance.tolist()),
    }


def lstm(module: Any, x: Tensor) -> dict[str, Any]:
    """Two layers by their equations; norms of the last hidden and cell state, mean over the batch."""
    found: dict[str, Any] = {"state_norm": [], "cell_norm": []}
    for layer in range(2):
        w, u, b, c = (getattr(module, f"{n}_l{layer}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        state, cell, outputs = torch.zeros(2, 4), torch.zeros(2, 4), []
        for now in x:
            i, f, g, o = (now @ w.T + b + state @ u.T + c).chunk(4, -1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            state = o.sigmoid() * cell.tanh()
            outputs.append(state)
        x = torch.stack(outputs)
        for name, last in (("state_norm", state), ("cell_norm", cell)):
            found[name].append(sum(math.sqrt(float(row.square().sum())) for row in last) / 2)
    return found


def saturation(lowest: float, output: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], dict[str, Any]]:
    def direct(module: Any, x: Tensor) -> dict[str, Any]:
        numbers = output(x).flatten().tolist()
        low, high = sum(n < lowest + 0.01 for n in numbers), sum(n > 0.99 for n in numbers)
        assert low > 0 < high
        return {"low": low / len(numbers), "high": high / len(numbers), "mean": sum(numbers) / len(numbers)}

    return direct


def relu(module: Any, x: Tensor) -> dict[str, Any]:
    output = x.clamp(min=0)
    dead = [bool((unit < 1e-3).all()) for unit in output.flatten(0, -2).T]
    assert sum(dead) == 1
    shares = {"silent": float((output < 1e-3).double().mean()), "dead_units": sum(dead) / len(dead)}
    return shares | {"rms": of_size(output, "o")["o_rms"]}


def feed_forward(module: Any, x: Tensor) -> dict[str, Any]:
    """A quarter of the units is driven shut for every token; others are shut for some."""
    opened = x @ module.gate.weight.T
    gate = opened / (1.0 + (-opened).exp())
    shut = (gate.abs() < 1e-3).flatten(0, -2)
    dead = [bool(unit.all()) for unit in shut.T]
    assert dead == [i < 16 for i in range(64)]
    assert shut.double().mean() > 0.25
    output = (gate * (x @ module.up.weight.T)) @ module.down.weight.T
    return {
        "gate_rms": of_size(gate, "gate")["gate_rms"],
        "gate_shut": int(shut.sum()) / shut.numel(),
        "gate_dead_units": sum(dead) / len(dead),
        "output_rms": of_size(output, "output")["output_rms"],
    }


def shut_feed_forward() -> FeedForward:
    module = FeedForward(HybridLMConfig(vocab_size=64, width=32, layers=1, ffn_width=64))
    with torch.no_grad():
        module.gate.weight[:16] = 0.0
        module.gate.weight[:16, 0] = -50.0  # the first feature is 1 in every token
    return module


def tokens_with_a_one() -> Tensor:
    x = randn(2, 9, 32)
    x[..., 0] = 1.0
    return x


def one_dead_unit() -> Tensor:
    x = randn(5, 4, 6)
    x[..., 2] = -1.0 - x[..., 2].abs()
    return x


@pytest.mark.parametrize(
    ("module", "given", "direct"),
    [
        pytest.param(lambda: nn.Linear(6, 3), lambda: 5 * randn(7, 6), linear, id="linear"),
        pytest.param(
            lambda: nn.Embedding(9, 4), lambda: torch.tensor([[1, 8, 1], [0, 3, 5]]), embedding, id="embedding"
        ),
        *(
            pytest.param(kind, lambda: 3 * randn(4, 6) - 2, lambda module, x: of_size(x, "input"), id=name)
            for name, kind in {
                "layer norm": lambda: nn.LayerNorm(6),
                "rms norm": lambda: nn.RMSNorm(6),
                "group norm": lambda: nn.GroupNorm(2, 6),
                "example's rms norm": lambda: ExampleNorm(6, 1e-6),
                "batch norm without running values": lambda: nn.BatchNorm1d(6, track_running_stats=False),
            }.items()
        ),
        pytest.param(lambda: nn.BatchNorm1d(6), lambda: 3 * randn(5, 6) - 2, batch_norm, id="batch norm"),
        pytest.param(lambda: nn.LSTM(3, 4, num_layers=2), lambda: randn(5, 2, 3), lstm, id="lstm"),
        pytest.param(
            nn.Sigmoid, lambda: 5 * randn(9, 7), saturation(0.0, lambda x: 1 / (1 + (-x).exp())), id="sigmoid"
        ),
        pytest.param(
            nn.Tanh, lambda: 3 * randn(9, 7), saturation(-1.0, lambda x: 1 - 2 / ((2 * x).exp() + 1)), id="tanh"
        ),
        pytest.param(nn.ReLU, one_dead_unit, relu, id="relu"),
        pytest.param(shut_feed_forward, tokens_with_a_one, feed_forward, id="feed-forward"),
    ],
)
def test_every_value_of_a_module(
    module: Callable[[], nn.Module], given: Callable[[], Tensor], direct: Callable[[Any, Tensor], dict[str, Any]]
) -> None:
    torch.manual_seed(0)
    made, x = module(), given()
    with torch.no_grad():
        expected = direct(made, x)
    same(values(observed(made, x))[""], expected)


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


def defined_state(key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """State at the end, token by token; the first sequence's second document begins at token 20."""
    state = torch.zeros(2, key.shape[2], 8, 8)
    fade = decayed(log_decay, torch.zeros_like(log_decay, dtype=torch.bool))
    for t in range(45):
        if t == 20:
            state[0] = 0.0
        state = fade[:, t, :, None, None] * state
        held = torch.einsum("bhk,bhkv->bhv", key[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], beta[:, t, :, None] * (value[:, t] - held))
    return state


def test_recurrent_state_is_that_of_the_definition() -> None:
    module, layout = example()
    _, key, value, log_decay, beta = module.rule_inputs(randn(2, 45, 32), layout)
    state = defined_state(key, value, log_decay, beta)
    torch.testing.assert_close(final_state(key, value, log_decay, beta, layout), state, atol=1e-5, rtol=1e-4)


def test_every_value_of_a_gated_delta_layer() -> None:
    """Head 0 hardly forgets, head 1 forgets all; half of head 1's output gate is shut."""
    module, layout = example()
    x = randn(2, 45, 32)
    with torch.no_grad():
        module.log_rate.copy_(torch.tensor([-12.0, 6.0]))
        module.beta.weight.mul_(200.0)
        module.gate.weight[8:12] = 0.0
    with torch.no_grad():
        _, key, value, _, _ = module.rule_inputs(x, layout)
        step = x @ module.decay.weight.T + module.decay_bias
        log_decay = -module.log_rate.exp() * (1.0 + step.exp()).log()
        write = 1.0 / (1.0 + (-(x @ module.beta.weight.T)).exp())
        opened = x @ module.gate.weight.T
        gate = (opened * opened.sigmoid()).reshape(2, 45, 2, 8)
        state = defined_state(key, value, log_decay, write)

    def by_head(values: Tensor) -> list[float]:
        return [float(values[..., head].double().mean()) for head in range(2)]

    direct = {
        "decay_mean": by_head(log_decay.exp()),
        "decay_forgets": by_head(log_decay.exp() < 0.01),
        "decay_keeps": by_head(log_decay.exp() > 0.9999),
        "log_decay_min": [float(log_decay[..., head].min()) for head in range(2)],
        "write_mean": by_head(write),
        "write_closed": by_head(write < 0.01),
        "write_dead": [0.0, 0.0],
        "output_gate_shut": by_head((gate.abs() < 1e-3).double().mean(-1)),
        "state_norm": [sum(math.sqrt(float(s[head].square().sum())) for s in state) / 2 for head in range(2)],
    }
    assert direct["decay_keeps"] == [1.0, 0.0]
    assert direct["decay_forgets"] == [0.0, 1.0]
    assert 0.0 < direct["write_closed"][0] < 1.0
    assert direct["output_gate_shut"][0] < 0.1 < 0.5 <= direct["output_gate_shut"][1] < 0.6
    same(values(observed(module, x, layout))[""], direct)


def test_the_stream_by_depth() -> None:
    """Each block's output, not what it adds: the second of three adds far more than the others."""
    torch.manual_seed(0)
    config = HybridLMConfig(vocab_size=64, width=32, layers=3, ffn_width=64)
    model = HybridLM(config)
    tokens = torch.arange(90).reshape(2, 45) % 64
    documents = torch.zeros(2, 45, dtype=torch.int64)
    with torch.no_grad():
        model.layers[1].ffn.down.weight.mul_(1000.0)  # type: ignore[union-attr, operator]
        stream, layout, direct = model.embedding(tokens), Layout.of(documents, config, torch.float32), []
        for layer in model.layers:
            stream = layer(stream, layout)
            direct.append(of_size(stream, "stream"))
    found = values(observed(model, tokens, documents))
    for i, expected in enumerate(direct):
        same(found[f"layers.{i}"], expected)
    assert direct[1]["stream_rms"] > 5.0 * direct[0]["stream_rms"]


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
