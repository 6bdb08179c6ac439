"""When a step's record is read: at the gate, or one step later without waiting for the device."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from sentinel_kit import Loader, Net, make_trainer, same_bits, weights
from torch import nn

from lightning_sentinel import (
    BatchValidator,
    IncidentResponse,
    NonFiniteTracer,
    RankTelemetry,
    Rollback,
    SpikeDetector,
)
from lightning_sentinel import lag as lag_module
from lightning_sentinel.callbacks import nonfinite_tracer as tracer_module
from lightning_sentinel.callbacks import rank_telemetry as telemetry_module
from lightning_sentinel.context import context_of
from lightning_sentinel.lag import can_skip_on_device, mark_to_skip
from lightning_sentinel.record import SIGNAL_INDEX, SIGNALS


class Fused(Net):
    """The kit's network under fused AdamW, which can skip an update on the device."""

    def __init__(self, *args: Any, fused: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fused = fused

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.rate, fused=self.fused)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def run(
    sync: str, gains: dict[int, float] | None = None, mode: str = "recover", *, once: bool = False, fused: bool = True
) -> tuple[L.Trainer, Fused, Any]:
    L.seed_everything(0, verbose=False)
    module = Fused(gains, once, fused=fused)
    suite = [
        NonFiniteTracer(),
        SpikeDetector(),
        RankTelemetry(sync=sync),
        IncidentResponse(mode=mode, probation_steps=5, exit_on_stop=False),
        Rollback(every_n_steps=10, keep=3),
    ]
    trainer, sink = make_trainer(suite, max_steps=80)
    trainer.fit(module, Loader())
    return trainer, module, sink


def newest(sink: Any) -> dict[int, dict[str, Any]]:
    """The newest pass over each step."""
    return {e["step"]: e for e in sink.steps()}


# ---------------------------------------------------------------------------------------------- host reads


class Everything:
    """The hooks of a step, driven by hand on tensors that have no values: every read of one raises."""

    def __init__(self, sync: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = 0
        self.sent = 0
        self.telemetry = RankTelemetry(sync=sync, update_norm_every_n_steps=3, sources=("a", "b"))
        self.validator = BatchValidator(vocabulary_size=16)
        self.tracer = NonFiniteTracer()
        suite = [self.validator, self.tracer, SpikeDetector(), self.telemetry, IncidentResponse(mode=mode)]
        self.trainer, _ = make_trainer(suite, max_steps=50)
        self.module = Net().to("meta")
        self.trainer.strategy.connect(self.module)
        self.trainer.strategy._root_device = torch.device("meta")
        monkeypatch.setattr(type(self.trainer.strategy), "root_device", property(lambda s: torch.device("meta")))
        monkeypatch.setattr(type(self.trainer), "global_step", property(lambda t: self.step))
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.1)
        self.optimizer._step_supports_amp_scaling = True  # as a fused optimizer says of itself
        self.optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")  # as for capturable optimizers
        self.trainer.strategy.optimizers = [self.optimizer]
        self.step = 0
        self.row = row = np.zeros((1, len(SIGNALS) + 4 + 1))
        row[0, :5] = [2.0, 4.0, 4.0, 1.0, math.nan]
        row[0, -1] = 0.25  # the learning rate

        def read_now(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
            self.reads += 1
            return row[:, : tensor.shape[-1]].copy()

        everything = self

        class Sent:
            def __init__(self, tensor: torch.Tensor) -> None:
                assert tensor.device.type == "meta"
                everything.sent += 1
                self.size = tensor.numel()
                self.flag = tensor.dtype is torch.bool

            def read(self) -> np.ndarray[Any, Any]:
                if self.flag:
                    return np.array(False)
                flat = np.zeros(self.size)
                flat[: row.size] = row[0]
                return flat

        monkeypatch.setattr(telemetry_module, "read_now", read_now)
        monkeypatch.setattr(lag_module, "read_now", read_now)
        monkeypatch.setattr(lag_module, "Transfer", Sent)
        monkeypatch.setattr(tracer_module, "Transfer", Sent)
        monkeypatch.setattr(type(self.trainer), "is_last_batch", property(lambda t: False))

    def start(self) -> None:
        self.validator.on_train_start(self.trainer, self.module)
        self.step = 1  # before step 0 the weights are looked at, once
        self.tracer.on_train_start(self.trainer, self.module)
        self.step = 0
        self.telemetry.on_train_start(self.trainer, self.module)

    def one_step(self) -> None:
        batch = {
            "x": torch.empty(4, 6, device="meta"),
            "sample_id": [f"{self.step}-{i}" for i in range(4)],
            "source": torch.empty(4, device="meta"),
            "input_ids": torch.empty(4, 6, device="meta", dtype=torch.int64),
            "targets": torch.empty(4, 6, device="meta", dtype=torch.int64),
            "document_ids": torch.empty(4, 6, device="meta", dtype=torch.int32),
        }
        self.module.sample_loss_nats = torch.empty(4, device="meta")
        trainer, module = self.trainer, self.module
        if self.telemetry.sync == "lagged":  # at the gate it reads for itself, before a forward that may crash
            self.validator.on_train_batch_start(trainer, module, batch, self.step)
        self.tracer.on_train_batch_start(trainer, module, batch, self.step)
        self.telemetry.on_train_batch_start(trainer, module, batch, self.step)
        trainer.strategy.on_train_batch_start(batch, self.step)  # here the step is captured
        loss = module.last(torch.relu(module.first(batch["x"]))).square().mean()
        self.tracer.on_before_backward(trainer, module, loss)
        self.telemetry.on_before_backward(trainer, module, loss)
        loss.backward()
        window = context_of(trainer).window
        self.flagged = [(path, total.device.type) for _, path, total in window.boundary_flags]
        self.tracer.on_before_optimizer_step(trainer, module, self.optimizer)
        self.telemetry.on_before_optimizer_step(trainer, module, self.optimizer)
        self.optimizer.zero_grad()
        self.tracer.on_train_batch_end(trainer, module, None, batch, self.step)
        self.telemetry.on_train_batch_end(trainer, module, None, batch, self.step)
        self.step += 1


@pytest.mark.parametrize(
    ("sync", "mode", "reads"),
    [("gate", "recover", 1), ("lagged", "recover", 0), ("lagged", "guard", 0), ("lagged", "observe", 0)],
)
def test_host_reads_of_the_signal_path(sync: str, mode: str, reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = Everything(sync, mode, monkeypatch)
    everything.start()
    warm = 40 if mode == "recover" and not reads else 0  # there a step is read at once until the detectors know the run
    for _ in range(warm):
        everything.one_step()
    everything.reads = everything.sent = 0
    for _ in range(6):
        everything.one_step()
        # The layers' sums stay on the device; one flag for all of them is on its way, and is read a step later.
        assert everything.flagged == [("first", "meta"), ("last", "meta")]
    assert everything.reads == 6 * reads
    assert everything.sent == 6 * (2 - reads)
    context = context_of(everything.trainer)
    assert context.nominal_steps == warm + (6 if reads else 5)  # the newest one is still on its way
    assert [r.step for r in context.history] == list(range(context.nominal_steps))
    assert {r.learning_rates for r in context.history} == {(0.25,)}
    assert {len(r.signals) for r in context.history} == {r.values.shape[1] for r in context.history}
    assert [rates for _, _, rates in context.rates][: context.nominal_steps] == [(0.25,)] * context.nominal_steps


def test_the_flag_of_a_batch_comes_with_its_record_and_is_explained_then(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = Everything("lagged", "observe", monkeypatch)
    everything.start()
    explained = []
    monkeypatch.setattr(everything.validator, "_describe_all", lambda *a: iter(explained.append(a[2]) or ()))
    for step in range(6):
        everything.row[0, SIGNAL_INDEX["invalid_batch"]] = float(step == 4)  # read in step 4: it belongs to step 3
        everything.one_step()
    assert explained == [3]


@pytest.mark.parametrize("masked", [False, True])
def test_a_batch_that_is_looked_at_later_gives_the_same_findings(masked: bool) -> None:
    batch = {
        "input_ids": torch.tensor([[1, 2, 99], [3, 4, 5]]),
        "targets": torch.tensor([[2, 99, 1], [4, 5, -100]]),
        "document_ids": torch.tensor([[0, 0, 0], [1, 0, 0]]),
        "sample_id": ["a", "b"],
    }
    if masked:
        batch["attention_mask"] = torch.ones(2, 3, dtype=torch.int64)
    trainer, sink = make_trainer([])
    now, later = BatchValidator(vocabulary_size=16), BatchValidator(vocabulary_size=16)
    expected = now.check(batch, step=7)
    assert len(expected) == 3
    later._late = partial(later._look, trainer)
    assert later.check(batch, step=7) == []
    [(flag, look)] = later._flags
    assert bool(flag)
    assert look() == expected
    assert [e["finding"]["message"] for e in sink.named("batch.invalid")] == [f.message for f in expected]


# ---------------------------------------------------------------------------------------------- the same answers


def test_without_an_incident_lagged_changes_nothing_and_reads_everything() -> None:
    prints = []
    for sync in ("gate", "lagged"):
        trainer, module, sink = run(sync)
        prints.append(weights(module))
        steps = newest(sink)
        assert sorted(steps) == list(range(80))
        assert all(e["applied"] for e in steps.values())
        assert [e["batch_idx"] for e in sink.steps()] == [s % 128 for s in range(80)]
        assert context_of(trainer).attempt == 0
    assert same_bits(*prints)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("gain", "once"), [(math.nan, True), (math.nan, False), (300.0, True), (300.0, False)])
def test_the_same_answer_and_the_same_weights_as_at_the_gate(gain: float, once: bool, fused: bool) -> None:
    found = {}
    for sync in ("gate", "lagged"):
        trainer, module, sink = run(sync, {47: gain}, once=once, fused=fused)
        [incident] = context_of(trainer).incidents
        steps = newest(sink)
        found[sync] = (
            {
                "opened": incident.opened_step,
                "verdict": str(incident.verdict.kind),
                "culprits": incident.verdict.culprits,
                "actions": [a["action"] for a in incident.actions],
                "status": str(incident.status),
                "applied": [steps[s]["applied"] for s in range(80)],
                "bits": [steps[s]["loss_bits"] for s in range(80)],
                "tokens": [steps[s]["tokens"] for s in range(80)],
            },
            weights(module),
        )
    (gate, gate_weights), (lagged, lagged_weights) = found["gate"], found["lagged"]
    assert lagged == gate
    assert same_bits(lagged_weights, gate_weights)
    assert gate["opened"] == 47
    if once:
        assert (gate["verdict"], gate["actions"]) == ("infrastructure", ["retry_step"])


def test_guard_keeps_the_update_out_on_the_device_and_puts_the_buffers_back() -> None:
    prints = []
    for sync in ("gate", "lagged"):
        trainer, module, sink = run(sync, {47: math.nan}, "guard")
        prints.append(weights(module))
        assert not newest(sink)[47]["applied"]
        [incident] = context_of(trainer).incidents
        assert incident.opened_step == 47
    assert all(torch.isfinite(w).all() for w in prints[1].values())
    assert same_bits(*prints)


def test_observe_keeps_nothing_out_and_reports_one_step_late() -> None:
    trainer, _, sink = run("lagged", {47: 300.0}, "observe")
    [incident] = context_of(trainer).incidents
    assert (incident.opened_step, incident.actions[:1]) == (47, [])
    [opened] = sink.named("incident.opened")
    assert opened["step"] == 48
    assert newest(sink)[47]["applied"]


def test_what_cannot_lag_is_said_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="lightning_sentinel"):
        _, _, sink = run("lagged", fused=False)
    [event] = sink.named("sync.lagged")
    assert event["off"] is None
    assert event["note"].startswith("AdamW is not fused and cannot skip an update on the device")
    assert event["note"] in caplog.text


@pytest.mark.parametrize(
    ("make", "momentum_key"),
    [
        (lambda p: torch.optim.AdamW(p, 1e-2, fused=True), "exp_avg"),
        (lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, fused=True), "momentum_buffer"),
    ],
)
def test_a_step_that_is_skipped_on_the_device_leaves_everything_as_it_is(make: Any, momentum_key: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    optimizer = make(layer.parameters())
    assert can_skip_on_device(optimizer) == (momentum_key == "exp_avg")  # SGD has yet to make its momentum
    layer(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    assert can_skip_on_device(optimizer)
    before = weights(layer), {k: v.clone() for k, v in optimizer.state[layer.weight].items()}
    layer.weight.grad[0, 0] = math.nan
    mark_to_skip(optimizer, torch.tensor(True))
    optimizer.step()
    assert same_bits(weights(layer), before[0])
    assert all(torch.equal(v, before[1][k]) for k, v in optimizer.state[layer.weight].items())


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sync is 'later', expected one of gate, lagged"):
        RankTelemetry(sync="later")
