"""DeepProbe in real Trainers: it changes nothing, sees what is wrong, and warns before a growing stream overflows."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from hybrid_lm.model import HybridLMConfig
from hybrid_lm.module import AdamWCosine, HybridLMModule
from lightning.pytorch.plugins import MixedPrecision
from probes_two_ranks import BAD, EVERY, FAILS, SCENES, STEPS, STRATEGIES
from sentinel_kit import Loader, Net, Sink, make_trainer, run_ranks, same_bits, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sentinel import DeepProbe, IncidentResponse, RankTelemetry, Rollback
from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import Finding, FindingKind

SCRIPT = Path(__file__).with_name("probes_two_ranks.py")


def fit(module: L.LightningModule, probe: DeepProbe | None, data: Any = None, **options: Any) -> tuple[L.Trainer, Sink]:
    callbacks = [RankTelemetry(), IncidentResponse(mode="guard"), *([probe] if probe else [])]
    trainer, sink = make_trainer(callbacks, **{"max_steps": 9, **options})
    torch.manual_seed(7)
    trainer.fit(module, data or Loader())
    return trainer, sink


class Logging(Net):
    """Logs, counts its forwards and draws random numbers; ``manual`` makes its own steps with two optimizers."""

    def __init__(self, manual: bool = False) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.automatic_optimization = not manual
        self.register_buffer("forwards", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.forwards += 1
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return super().configure_optimizers()
        first = torch.optim.Adam(self.first.parameters(), 0.01)
        return first, torch.optim.SGD([*self.norm.parameters(), *self.last.parameters()], 0.01, momentum=0.9)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "manual": {},
    "fp16": {"plugins": lambda: [MixedPrecision("16-mixed", "cpu")]},
    "bf16": {"precision": "bf16-mixed"},
}


# The scaler skips the first steps, and the schedule goes on: torch says so.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)` before `optimizer.step\\(\\)`")
@pytest.mark.parametrize("way", WAYS)
def test_a_probed_run_is_the_same_to_the_bit(way: str) -> None:
    options = {k: v() if callable(v) else v for k, v in WAYS[way].items()}
    bare, probed = Logging(way == "manual"), Logging(way == "manual")
    reference, _ = fit(bare, None, **options)
    draws = torch.rand(3)
    options = {k: v() if callable(v) else v for k, v in WAYS[way].items()}
    trainer, sink = fit(probed, DeepProbe(every_n_steps=2), **options)
    assert torch.equal(torch.rand(3), draws)
    assert same_bits(weights(bare), weights(probed))
    assert {k: v.item() for k, v in trainer.callback_metrics.items()} == {
        k: v.item() for k, v in reference.callback_metrics.items()
    }
    events = sink.named("probe.deep")
    assert [e["step"] for e in events] == [2, 4, 6, 8]
    assert all(e["unavailable"] == "" and e["failed"] == {} for e in events)
    assert {"first", "norm", "last"} <= set(events[0]["modules"])
    for m in probed.modules():  # nothing is left on the modules
        assert not m._forward_hooks
        assert not m._forward_pre_hooks


def test_norms_updates_and_moments_are_those_of_the_step() -> None:
    class Witness(L.Callback):
        seen: dict[str, Any] = {}  # noqa: RUF012

        def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 4:
                self.seen["gradient"] = {n: p.grad.clone() for n, p in pl_module.named_parameters()}
                self.seen["weight"] = {n: p.detach().clone() for n, p in pl_module.named_parameters()}
                self.seen["states"] = {
                    key: {n: optimizer.state[p][key].clone() for n, p in pl_module.named_parameters()}
                    for key in ("exp_avg", "exp_avg_sq")
                }

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            if trainer.global_step == 5:
                self.seen["after"] = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

    witness = Witness()
    trainer, sink = make_trainer([witness, RankTelemetry(), DeepProbe(every_n_steps=4)], max_steps=6)
    trainer.fit(Net(), Loader())
    (event,) = sink.named("probe.deep")

    def norm(tensors: Any) -> float:
        return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))

    seen = witness.seen
    update = {n: seen["after"][n] - w for n, w in seen["weight"].items()}
    whole = event["groups"]["optimizer group 0"]
    assert whole["gradient"] == pytest.approx(norm(seen["gradient"].values()), rel=1e-5)
    assert whole["weight"] == pytest.approx(norm(seen["weight"].values()), rel=1e-5)
    assert whole["update"] == pytest.approx(norm(update.values()), rel=1e-4)
    assert whole["update_to_weight"] == pytest.approx(norm(update.values()) / norm(seen["weight"].values()), rel=1e-4)
    first = event["groups"]["first"]
    assert first["gradient"] == pytest.approx(
        norm(v for n, v in seen["gradient"].items() if n.startswith("first")), rel=1e-5
    )
    assert set(event["optimizer"]) == {"exp_avg", "exp_avg_sq"}
    for key, states in seen["states"].items():
        told = event["optimizer"][key]
        lows, highs = {n: float(t.min()) for n, t in states.items()}, {n: float(t.max()) for n, t in states.items()}
        assert (told["min"], told["max"]) == pytest.approx((min(lows.values()), max(highs.values())), rel=1e-5)
        assert told["min_at"] == min(lows, key=lambda n: lows[n])
        assert told["max_at"] == max(highs, key=lambda n: highs[n])


class Dead(L.LightningModule):
    """Its middle is shut: no unit ever passes anything on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shut, self.last = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)
        self.unused = nn.Linear(3, 3)
        nn.init.constant_(self.first.bias, -1000.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.last(self.shut(self.first(batch["x"]))) - batch["y"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def test_dead_gradients_are_named() -> None:
    _, sink = fit(Dead(), DeepProbe(every_n_steps=3), max_steps=4)
    (event,) = sink.named("probe.deep")
    assert event["dead_gradients"] == {
        "zero": ["first.weight", "first.bias", "last.weight"],
        "zero_count": 3,
        "none": ["unused.weight", "unused.bias"],
    }
    assert event["modules"]["shut"] == {"kind": "ReLU", "silent": 1.0, "dead_units": 1.0, "rms": 0.0}


# --------------------------------------------------------------------------------------------------- the early warning


class Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float16)


class Stream(L.LightningModule):
    """Four blocks of which each adds to a float16 stream; ``rate`` sets how fast training makes them add more."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6, bias=False), Cast()) for _ in range(4))
        for block in self.blocks:
            nn.init.eye_(block[0].weight)  # type: ignore[index, arg-type]
        self.rate, self.overflow = rate, -1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = (20.0 * batch["x"]).to(torch.float16)
        for block in self.blocks:
            h = block(h.float())
        loss = -h.float().square().mean().log()
        if self.overflow < 0 and not math.isfinite(loss.item()):
            self.overflow = self.trainer.global_step
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.rate)


def test_a_growing_stream_is_warned_of_before_it_overflows() -> None:
    module = Stream(0.02)
    trainer, sink = make_trainer([RankTelemetry(), DeepProbe(every_n_steps=10)], max_steps=260)
    trainer.fit(module, Loader())
    assert module.overflow > 0  # it really happened
    warned = [e["finding"] for e in sink.named("finding") if e["finding"]["kind"] == "range_trend"]
    assert warned[0]["severity"] == "alarm"
    assert warned[0]["culprits"][0].startswith("module:blocks.3")
    early = module.overflow - warned[0]["step"]
    assert 10 <= early <= 160
    assert warned[0]["evidence"]["limit"] == 65504.0
    assert 0.25 < warned[0]["evidence"]["steps_left"] / early < 4.0  # the forecast was of the right size
    ranges = [e["range"]["headroom_bits"] for e in sink.named("probe.deep") if "range" in e]
    assert ranges[0] > 6.0 > ranges[-1]
    steps = [e["step"] for e in sink.named("probe.deep")]
    assert steps[0] == 10
    assert min(b - a for a, b in pairwise(steps)) == 1  # looked at more often when it is near


def test_a_stream_that_stays_is_not() -> None:
    trainer, sink = make_trainer([RankTelemetry(), DeepProbe(every_n_steps=5)], max_steps=60)
    trainer.fit(Stream(1e-5), Loader())
    assert len(sink.named("probe.deep")) == 11
    assert sink.named("finding") == []


# ------------------------------------------------------------------------------------------------------------ incidents


def test_an_incident_is_probed_before_its_update_with_this_rank_s_gradients() -> None:
    class Alarm(L.Callback):
        def observe(self, record: Any) -> list[Finding]:
            found = Finding(FindingKind.SPIKE, "test", record.step, 1.0, 0.0, "seen")
            return [found] if record.step == 5 else []

    callbacks = [Alarm(), RankTelemetry(), IncidentResponse(), DeepProbe(every_n_steps=0)]
    trainer, sink = make_trainer(callbacks, max_steps=8)
    trainer.fit(Net(gains={5: 1e4}), Loader())
    (event,) = sink.named("probe.deep")
    assert (event["step"], event["reason"], event["incident"], event["gradients_of"]) == (5, "incident", 1, "this rank")
    assert event["groups"]["last"]["gradient"] > 1e4
    assert "update" not in event["groups"]["last"]
    assert {k: event[k] for k in context_of(trainer).scratch["deep_probe"]} == context_of(trainer).scratch["deep_probe"]


def test_incidents_are_probed_where_the_run_goes_back_and_only_so_often() -> None:
    probe = DeepProbe(every_n_steps=0, max_incidents=1)
    module = Net(gains={5: math.nan, 12: math.nan})
    callbacks = [RankTelemetry(), IncidentResponse(mode="recover", probation_steps=2), probe, Rollback(every_n_steps=4)]
    trainer, sink = make_trainer(callbacks, max_steps=20)
    trainer.fit(module, Loader())
    assert len(sink.named("incident.opened")) >= 2
    (event,) = sink.named("probe.deep")
    assert event["step"] == 5
    none = [v["gradient"] for v in event["groups"].values()]
    assert any(not math.isfinite(v) for v in none)


# ------------------------------------------------------------------------------------------------------ ways and models


def test_the_eager_form_of_a_compiled_model_is_probed() -> None:
    class Compiled(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)), backend="eager")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.net(batch["x"]) - batch["y"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.01)

    _, sink = fit(Compiled(), DeepProbe(every_n_steps=3), max_steps=4)
    (event,) = sink.named("probe.deep")
    assert {"net._orig_mod.0", "net._orig_mod.1", "net._orig_mod.2"} <= set(event["modules"])


def example(layers: int = 4) -> tuple[HybridLMModule, DataLoader[Any]]:
    torch.manual_seed(0)
    config = HybridLMConfig(vocab_size=64, width=32, layers=layers, ffn_width=64)
    ids = torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:], "document_ids": torch.zeros(2, 32, dtype=torch.int32)}
    module = HybridLMModule(config, AdamWCosine(learning_rate=3e-3, total_steps=20))
    return module, DataLoader([batch] * 8, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_the_example_s_layers() -> None:
    module, data = example()
    _, sink = fit(module, DeepProbe(every_n_steps=2), data, max_steps=3)
    (event,) = sink.named("probe.deep")
    modules = event["modules"]
    depth = [modules[f"model.layers.{i}"] for i in range(4)]
    assert [sorted(d) for d in depth] == [["kind", "stream_max", "stream_rms"]] * 4
    assert depth[3]["stream_rms"] > depth[0]["stream_rms"] > 0.0
    heads = [modules[f"model.layers.{i}.mixer"] for i in range(3)]
    assert all(len(h["decay_mean"]) == len(h["state_norm"]) == len(h["write_dead"]) == 2 for h in heads)
    assert all(0.0 < d < 1.0 for h in heads for d in h["decay_mean"])
    attention = modules["model.layers.3.mixer:attention"]
    assert all(0.0 < e < math.log(32) for e in attention["entropy_nats"])
    assert modules["model.layers.0.ffn"]["gate_dead_units"] == 0.0
    quantiles = modules[":tokens"]["loss_nats"]
    assert quantiles == sorted(quantiles)
    assert quantiles[0] < math.log(64) < quantiles[-1]
    assert modules[":tokens"]["targets"] == 64.0
    assert event["unavailable"] == ""
    assert event["failed"] == {}
    assert len(json.dumps(event)) < 20_000


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_the_event_stays_small_however_deep_the_model_is() -> None:
    module, data = example(layers=24)
    _, sink = fit(module, DeepProbe(every_n_steps=1, max_modules=4), data, max_steps=2)
    (event,) = sink.named("probe.deep")
    kinds = [m["kind"] for m in event["modules"].values()]
    assert kinds.count("Block") == 24  # the stream by depth is always whole
    assert kinds.count("Linear") == kinds.count("GatedDeltaNet") == 4
    assert event["left_out"] > 100
    assert len(json.dumps(event)) < 20_000


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument in the `training_step`")
def test_without_a_captured_batch_the_training_is_measured_all_the_same() -> None:
    class Fetches(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 1)

        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, _, _ = next(dataloader_iter)
            return (self.last(batch["x"]) - batch["y"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer, sink = make_trainer([DeepProbe(every_n_steps=2)], max_steps=4)
    trainer.fit(Fetches(), Loader())
    (event,) = sink.named("probe.deep")
    assert event["unavailable"] == "training_step fetches its own batches"
    assert event["modules"] == {}
    assert event["groups"]["last"]["gradient"] > 0.0


def test_options_are_checked() -> None:
    for option, value, least in (
        ("every_n_steps", -1, 0),
        ("horizon_steps", 0, 1),
        ("max_modules", 0, 1),
        ("max_incidents", -1, 0),
    ):
        with pytest.raises(ValueError, match=rf"{option} must be at least {least}.*found {value}"):
            DeepProbe(**{option: value})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ real processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("probes")
    run_ranks(SCRIPT, folder, *STRATEGIES)
    names = (*STRATEGIES, *SCENES)
    return {s: [json.loads((folder / f"{s}-{r}.json").read_text()) for r in (0, 1)] for s in names}


@pytest.mark.distributed
@pytest.mark.parametrize("kind", STRATEGIES)
def test_all_ranks_probe_alike_and_nothing_changes(kind: str, ranks: Any) -> None:
    first, second = ranks[kind]
    assert first["same"]
    assert second["same"]
    due = [*range(EVERY, STEPS, EVERY), BAD]
    for result in (first, second):
        assert sorted(e["step"] for e in result["events"]) == sorted(due)
        assert all(e["unavailable"] == "" for e in result["events"])
        assert result["incidents"] == 1
    for ours, theirs in zip(first["events"], second["events"], strict=True):
        assert ours["step"] == theirs["step"]
        assert ours.get("range") == theirs.get("range")  # of the worst rank
        assert ours["groups"].keys() == theirs["groups"].keys()
        assert ours["modules"].keys() == theirs["modules"].keys()
        if ours["reason"] == "interval":
            assert ours["groups"] == theirs["groups"]  # reduced gradients, the same weights and updates
            assert ours["modules"]["blocks.0"] != theirs["modules"]["blocks.0"]  # each rank's own data


@pytest.mark.distributed
@pytest.mark.parametrize("scene", SCENES)
def test_a_probe_that_fails_on_one_rank_alone_is_none_on_any_and_nobody_waits(scene: str, ranks: Any) -> None:
    due = [*range(EVERY, STEPS, EVERY), BAD]
    for events in ranks[scene]:
        assert sorted(e["step"] for e in events) == sorted(due)
        told = {e["step"]: e["unavailable"] for e in events}
        assert told == dict.fromkeys(due, "") | {FAILS: "rank 1: OutOfMemoryError: nothing left here"}
        [failed] = [e for e in events if e["step"] == FAILS]
        assert (failed["modules"], failed["groups"]) == ({}, {})


@pytest.mark.distributed
def test_at_an_incident_the_rank_whose_gradients_are_bad_shows_it(ranks: Any) -> None:
    healthy, bad = ([e for e in r["events"] if e["reason"] == "incident"][0] for r in ranks["ddp"])  # noqa: RUF015
    assert healthy["groups"]["last"]["gradient"] < 1e3
    assert not math.isfinite(float(bad["groups"]["last"]["gradient"]))
