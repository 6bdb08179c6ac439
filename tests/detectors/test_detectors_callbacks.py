"""The detector callbacks: one set of defaults, state that survives a checkpoint, and the live scaler in a real Trainer."""

import dataclasses
import inspect
import math

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

import lightning_sentinel
from lightning_sentinel.callbacks.loss_scale_monitor import nonfinite_parameters, skipped_by_scaler
from lightning_sentinel.context import context_of
from lightning_sentinel.record import StepRecord
from lightning_sentinel.scan import DETECTORS, Watch, watch

CALLBACKS = {
    "spike_detector": lightning_sentinel.SpikeDetector,
    "divergence_detector": lightning_sentinel.DivergenceDetector,
    "rank_outlier_detector": lightning_sentinel.RankOutlierDetector,
    "loss_scale_monitor": lightning_sentinel.LossScaleMonitor,
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callback_scan_and_detector_have_the_same_arguments_and_defaults(name):
    fields = {f.name: f.default for f in dataclasses.fields(DETECTORS[name])}
    arguments = {n: p.default for n, p in inspect.signature(CALLBACKS[name].__init__).parameters.items() if n != "self"}
    assert arguments == fields
    shipped = next(d for d in watch(10).detectors if type(d) is DETECTORS[name])
    inside = CALLBACKS[name]().detector
    assert {n: getattr(inside, n) for n in fields} == {n: getattr(shipped, n) for n in fields} == fields


@pytest.mark.parametrize("name", CALLBACKS)
def test_every_argument_reaches_the_detector(name):
    fields = dataclasses.fields(DETECTORS[name])
    changed = {f.name: f.default * 1.5 if f.type == "float" else f.default + 1 for f in fields}
    for known in ("tail", "gross_tail", "false_per_step"):
        if known in changed:
            changed[known] = DETECTORS[name].__dataclass_fields__[known].default / 2
    detector = CALLBACKS[name](**changed).detector
    assert {n: getattr(detector, n) for n in changed} == changed


@pytest.mark.parametrize("name", CALLBACKS)
def test_state_survives_a_checkpoint_file(name, tmp_path):
    rng = np.random.default_rng(0)
    records = [StepRecord.from_losses(i, (2 + 0.05 * rng.standard_normal(4)).tolist()) for i in range(80)]
    records[60].values[2, 0] = 40.0
    first, second = CALLBACKS[name](), CALLBACKS[name]()
    for record in records[:50]:
        first.observe(record)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for record in records[50:]:
        assert first.observe(record) == second.observe(record)


class Tiny(L.LightningModule):
    """A linear layer whose loss is multiplied by ``boom[step]``, so that chosen steps overflow under the loss scale."""

    def __init__(self, boom, fused=False):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.spare = torch.nn.Linear(4, 1)
        self.boom, self.fused = boom, fused

    def training_step(self, batch, batch_idx):
        loss = 1e-4 * (self.layer(batch).float().square().mean() + self.spare(batch).float().square().mean())
        if batch_idx in self.boom:
            weight = self.layer.weight
            loss = loss + 1e38 * (weight - weight.detach()).sum()  # worth 0, with a gradient that overflows
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=self.fused)


class Lines:
    def __init__(self):
        self.events = []

    def write(self, event, *, step, attempt, tokens, **fields):
        self.events.append((event, step, fields))

    def flush(self):
        pass


def fit(boom, tmp_path, *callbacks, scaler=True, fused=False, steps=8, growth_interval=2000, extra=()):
    plugin = MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=growth_interval)
    )
    monitor = lightning_sentinel.LossScaleMonitor()
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        plugins=[plugin] if scaler else [],
        callbacks=[*extra, monitor, lightning_sentinel.RankTelemetry()],
    )
    lines = context_of(trainer).journal = Lines()
    torch.manual_seed(0)
    model = Tiny(boom, fused)
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(2 * steps, 4), batch_size=2))
    events = [(event, step, fields) for event, step, fields in lines.events if event.startswith("scaler.")]
    return trainer, events, [f["finding"] for event, _, f in lines.events if event == "finding"]


@pytest.mark.parametrize("fused", [False, True])
def test_one_overflow_is_journalled_with_its_cause(tmp_path, fused):
    trainer, events, findings = fit({3}, tmp_path, fused=fused)
    overflow, backoff = events
    assert overflow[:2] == ("scaler.overflow", 3)
    assert overflow[2] == {
        "old_scale": 65536.0,
        "new_scale": 32768.0,
        "rank": 0,
        "parameters": ["layer.weight"],
        "parameter_count": 1,
        "nonfinite_ranks": [0],
    }
    assert backoff[:2] == ("scaler.backoff", 3)
    assert backoff[2]["nonfinite_ranks"] == []
    assert [(f["kind"], f["severity"], f["step"]) for f in findings] == [("scaler_overflow", "event", 3)]
    assert (context_of(trainer).nominal_steps, context_of(trainer).applied_steps) == (8, 7)


def test_growth_and_manual_change(tmp_path):
    class Meddler(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 4:
                trainer.precision_plugin.scaler.update(1024.0)

    _, events, _ = fit(set(), tmp_path, growth_interval=3, steps=5, extra=[Meddler()])
    assert [(e, s, f["old_scale"], f["new_scale"]) for e, s, f in events] == [
        ("scaler.growth", 2, 65536.0, 131072.0),
        ("scaler.changed", 4, 131072.0, 1024.0),
    ]


def test_overflow_after_overflow_is_an_incident(tmp_path):
    _, events, findings = fit(set(range(2, 12)), tmp_path, steps=12)
    assert [s for e, s, _ in events if e == "scaler.overflow"] == list(range(2, 12))
    collapse = [f for f in findings if f["kind"] == "scale_collapse"]
    assert [(f["step"], f["severity"], f["since_step"]) for f in collapse] == [(7, "incident", 2)]
    assert "6 overflows in a row" in collapse[0]["message"]


def test_silent_without_a_scaler(tmp_path):
    _, events, findings = fit(set(), tmp_path, scaler=False)
    assert events == findings == []


def test_nonfinite_parameters_by_name():
    model = Tiny(set())
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model.layer.bias.grad[0] = math.nan
    model.spare.weight.grad[0, 0] = math.inf
    assert nonfinite_parameters(model, optimizer) == ["layer.bias"]
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert not skipped_by_scaler(trainer, optimizer)


def test_a_detector_without_telemetry_says_what_to_add(tmp_path):
    trainer = L.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning_sentinel.SpikeDetector()],
        default_root_dir=tmp_path,
    )
    with pytest.raises(ValueError, match=r"SpikeDetector needs RankTelemetry, which gathers the record that it judges"):
        trainer.fit(Tiny(set()), torch.utils.data.DataLoader(torch.randn(4, 4)))


def test_watch_takes_overrides():
    assert Watch({"spike_detector": {"threshold": 9.0}}).detectors[1].threshold == 9.0
