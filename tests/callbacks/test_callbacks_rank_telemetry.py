"""RankTelemetry in real Trainer runs: every signal has the right value, however the user trains."""

from __future__ import annotations

import json
import math
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from sentinel_kit import Sink, make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sentinel import RankTelemetry
from lightning_sentinel.callbacks.rank_telemetry import step_fields, token_probability
from lightning_sentinel.context import RunContext, context_of
from lightning_sentinel.journal import to_json
from lightning_sentinel.record import SIGNAL_INDEX, StepRecord


class Net(L.LightningModule):
    def __init__(self, manual: bool = False, returns: str = "tensor", rate: float = 0.1) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.automatic_optimization = not manual
        self.returns, self.rate = returns, rate
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.records: list[StepRecord] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list | tuple) else batch
        loss = self.layer(x).square().mean()
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None
        if self.returns == "none" and batch_idx == 1:
            return None
        return {"loss": loss} if self.returns == "dict" else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad.double() for p in self.parameters() if p.grad is not None]
        self.norms.append(math.sqrt(sum(float(g.square().sum()) for g in grads)))
        self.records.append(context_of(self.trainer).record)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.rate)


def fit(
    module: Net, telemetry: RankTelemetry | None = None, data: Any = None, **options: Any
) -> tuple[L.Trainer, Sink]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 3)) if data is None else data
    options = {"max_epochs": 1, "max_steps": -1, "callbacks": [telemetry or RankTelemetry()], **options}
    trainer, sink = make_trainer(**options)
    trainer.fit(module, DataLoader(data, batch_size=4))
    return trainer, sink


def test_loss_and_gradient_norm_are_read_as_the_user_means_them() -> None:
    module = Net()
    _, sink = fit(module)
    assert [e["loss"] for e in sink.steps()] == pytest.approx(module.losses, rel=1e-7)
    assert [e["grad_norm"] for e in sink.steps()] == pytest.approx(module.norms, rel=1e-6)
    assert [e["step"] for e in sink.steps()] == list(range(6))
    assert [e["tokens"] for e in sink.steps()] == [4, 8, 12, 16, 20, 24]  # no tokens in this batch: samples count


def test_accumulation_does_not_divide_the_loss() -> None:
    module = Net()
    _, sink = fit(module, accumulate_grad_batches=3)
    expected = [np.mean(module.losses[:3]), np.mean(module.losses[3:])]
    assert [e["loss"] for e in sink.steps()] == pytest.approx(expected, rel=1e-6)
    assert [len(e["sample_ids"]) for e in sink.steps()] == [12, 12]


def test_the_last_incomplete_window_is_still_the_mean_of_its_micro_batches() -> None:
    module = Net()
    _, sink = fit(module, accumulate_grad_batches=4)
    expected = [np.mean(module.losses[:4]), np.mean(module.losses[4:])]
    assert [e["loss"] for e in sink.steps()] == pytest.approx(expected, rel=1e-6)


def test_manual_optimization() -> None:
    module = Net(manual=True)
    _, sink = fit(module)
    assert [e["loss"] for e in sink.steps()] == pytest.approx(module.losses, rel=1e-7)
    assert [e["grad_norm"] for e in sink.steps()] == pytest.approx(module.norms, rel=1e-6)


@pytest.mark.parametrize("returns", ["tensor", "dict"])
def test_fp16_gradients_and_losses_are_reported_unscaled(returns: str) -> None:
    module = Net(returns=returns)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _, sink = fit(module, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert [e["loss"] for e in sink.steps()] == pytest.approx(module.losses, rel=2e-3)
    assert [e["grad_norm"] for e in sink.steps()] == pytest.approx(module.norms, rel=1e-6)
    assert {e["loss_scale"] for e in sink.steps()} == {1024.0}


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`.*")
def test_a_training_step_that_returns_none_is_not_an_alarm() -> None:
    module = Net(returns="none")
    _, sink = fit(module)
    assert math.isnan(sink.steps()[1]["loss"])
    assert [e["applied"] for e in sink.steps()] == [True, False, True, True, True, True]
    assert sink.steps()[-1]["applied_steps"] == 5
    assert [e for e in sink.events if e["event"] == "finding"] == []


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_any_batch_layout(kind: str) -> None:
    x = torch.randn(8, 3)
    data: Any = {
        "tensor": list(x),
        "tuple": [(row, 0) for row in x],
        "dict": [{"x": row} for row in x],
    }[kind]
    _, sink = fit(Net(), data=data)
    assert len(sink.steps()) == 2
    assert all(len(set(e["sample_ids"])) == 4 for e in sink.steps())


def test_a_finite_gradient_of_1e20_is_not_read_as_infinite() -> None:
    class Big(Net):
        def on_after_backward(self) -> None:
            self.layer.weight.grad.fill_(1e20)
            self.layer.bias.grad.zero_()

    module = Big(rate=0.0)
    _, sink = fit(module)
    assert sink.steps()[0]["grad_norm"] == pytest.approx(1e20 * math.sqrt(3), rel=1e-6)
    assert module.records[0].column("nonfinite_grads").tolist() == [0.0]


def test_update_norm_at_its_interval() -> None:
    module = Net(rate=0.5)
    _, sink = fit(module, RankTelemetry(update_norm_every_n_steps=2))
    norms = [e["update_norm"] for e in sink.steps()]
    assert math.isnan(norms[0])
    assert norms[1] == norms[2] == pytest.approx(0.5 * module.norms[0], rel=1e-5)
    assert norms[3] == pytest.approx(0.5 * module.norms[2], rel=1e-5)


def test_nothing_is_changed_by_watching() -> None:
    torch.manual_seed(3)
    watched = Net()
    fit(watched)
    torch.manual_seed(3)
    bare = Net()
    fit(bare, callbacks=[])
    assert watched.losses == bare.losses
    assert torch.equal(watched.layer.weight, bare.layer.weight)


def test_two_fits_on_one_trainer() -> None:
    module = Net()
    trainer, sink = fit(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=4))
    assert [e["step"] for e in sink.steps()] == list(range(12))


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"limit_train_batches": 1}])
def test_short_runs(options: dict[str, Any]) -> None:
    _, sink = fit(Net(), **options)
    assert len(sink.steps()) == 1


def test_lbfgs_is_refused_with_the_reason() -> None:
    class Second(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ValueError, match="found LBFGS, which calls its closure several times a step"):
        fit(Second())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update_norm_every_n_steps": -1}, r"update_norm_every_n_steps must be at least 0 \(0: never\), found -1"),
        ({"vocabulary_size": 1}, "vocabulary_size must be at least 2 or None, found 1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankTelemetry(**options)


def test_arithmetic_of_averaging() -> None:
    assert round(token_probability(2.05), 3) == 0.129
    assert round(token_probability(2.90), 3) == 0.055
    record = StepRecord.from_losses(5, [2.0] * 41 + [40.0] + [2.0] * 22)
    assert round(record.mean_loss, 3) == 2.594
    assert (record.worst_rank, record.step) == (41, 5)
    large = StepRecord.from_losses(5, [2.0] * 700 + [40.0] + [2.0] * 323)
    assert round(large.mean_loss - 2.0, 3) == 0.037
    assert large.worst_rank == 700


@pytest.mark.parametrize("ranks", [4, 400])
def test_the_line_names_the_rank_that_is_slow_and_not_those_that_wait_for_it(ranks: int) -> None:
    """All take half a second; rank 2 works for nearly all of it, rank 1 waits for its data, most wait for rank 2."""
    record = StepRecord.from_losses(5, [2.0] * ranks)
    record.values[:, SIGNAL_INDEX["step_seconds"]] = 0.5
    record.values[:, SIGNAL_INDEX["wait_seconds"]] = 0.3
    record.values[:, SIGNAL_INDEX["data_seconds"]] = 0.01
    record.values[2, SIGNAL_INDEX["wait_seconds"]] = 0.05
    record.values[1, SIGNAL_INDEX["data_seconds"]] = 0.1
    fields = step_fields(record, True, 5, 0, 5, rank=0)
    assert {k: v for k, v in fields.items() if "seconds" in k or "slow" in k} == {
        "step_seconds": 0.5,
        "data_seconds": 0.1,
        "wait_seconds": 0.3,
        "own_seconds": pytest.approx(0.45),
        "step_seconds_median": 0.5,
        "data_seconds_median": 0.01,
        "wait_seconds_median": 0.3,
        "own_seconds_median": 0.2,
        "slowest_rank": 2,
    }


def test_ranks_without_supervised_tokens_do_not_move_the_mean() -> None:
    record = StepRecord.from_losses(0, [math.nan, 2.0, 4.0], supervised_tokens=[0, 10, 30])
    assert record.mean_loss == 3.5
    assert record.values.shape == (3, len(SIGNAL_INDEX))


def test_the_history_of_very_many_ranks_stays_small() -> None:
    few, many = RunContext(), RunContext()
    for step in range(300):
        few.remember(StepRecord.from_losses(step, [2.0] * 8))
        many.remember(StepRecord.from_losses(step, [2.0] * 16_384))
    assert [r.step for r in few.history] == list(range(300 - 256, 300))
    assert [r.step for r in many.history] == list(range(300 - 48, 300))  # enough for a forecast


def test_a_line_of_very_many_ranks_stays_short() -> None:
    losses = [2.0 + 0.001 * (r % 7) for r in range(16_384)]
    fields = step_fields(StepRecord.from_losses(3, losses), True, 3, 0, 3, rank=0)
    assert (fields["loss_min"], fields["loss_median"], fields["loss_max"]) == (2.0, 2.003, 2.006)
    assert len(json.dumps(fields)) < 1024
    fields = step_fields(StepRecord.from_losses(3, [math.nan] * 16_384), False, 3, 0, 3, rank=0)
    assert fields["nonfinite_rank_count"] == 16_384
    assert math.isnan(fields["loss_median"])
    assert len(json.dumps(fields)) < 1024


def test_the_planned_rate_is_that_of_the_scheduler_in_place() -> None:
    """Callbacks such as ``StochasticWeightAveraging`` put another scheduler in place of the module's."""

    class Decays(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}
            ]

    class Replaces(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3:
                config = trainer.lr_scheduler_configs[0]
                optimizer = config.scheduler.optimizer
                optimizer.param_groups[0]["lr"] = 0.5
                optimizer.param_groups[0]["initial_lr"] = 0.5
                config.scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    trainer, _ = fit(Decays(), callbacks=[RankTelemetry(), Replaces()])
    rates = [(step, planned, actual) for step, planned, actual in context_of(trainer).rates]
    before = [0.1, 0.1 * 0.9, 0.1 * 0.9 * 0.9]
    assert rates == [(s, (r,), (r,)) for s, r in enumerate([*before, 0.5, 0.5, 0.5])]


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_worked_out_on_another_thread_does_not_turn_up_in_the_record(ranks: int) -> None:
    record = StepRecord.from_losses(step=7, losses=[2.0] * ranks, tokens=5)
    if ranks == 1:
        facts = {k: v for k, v in vars(record).items() if k != "values"}
        record = StepRecord.of_one(record.values[0].tolist(), **facts)
    before = set(vars(record))
    apart = to_json(step_fields(record.apart(), True, 1, 0, 7, 0))
    assert set(vars(record)) == before
    assert to_json(step_fields(record, True, 1, 0, 7, 0)) == apart
    assert set(vars(record)) > before  # it does by what is worked out from the record itself
