"""A small training run with everything in it that a rollback has to put back, and a comparison of two such runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from lightning_sentinel.callbacks.rollback import Rollback
from lightning_sentinel.incidents import Action

Batch = tuple[Tensor, Tensor, Tensor]


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    """Map-style: features, target and the sample's number."""

    def __init__(self, count: int = 48) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = torch.randn(count, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Stream(IterableDataset[tuple[Tensor, Tensor, int]]):
    """Iterable without ``__len__``, with a state of its own, split over workers."""

    def __init__(self, count: int = 48) -> None:
        self.samples, self.count, self.next = Samples(count), count, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        info = torch.utils.data.get_worker_info()
        self.worker, self.workers = (info.id, info.num_workers) if info else (0, 1)
        return self

    def __next__(self) -> tuple[Tensor, Tensor, int]:
        index = self.next * self.workers + self.worker
        if index >= self.count:
            self.next = 0
            raise StopIteration
        self.next += 1
        return self.samples[index]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def map_loader(workers: int = 0, every: int = 1, **options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(
        Samples(), batch_size=4, shuffle=True, num_workers=workers, snapshot_every_n_steps=every, **options
    )


def distributed_loader(workers: int = 0) -> StatefulDataLoader:
    samples = Samples()
    sampler = StatefulDistributedSampler(samples, num_replicas=1, rank=0, shuffle=True)
    return StatefulDataLoader(samples, batch_size=4, sampler=sampler, num_workers=workers)


def stream_loader(workers: int = 0, **options: Any) -> StatefulDataLoader:
    return StatefulDataLoader(Stream(), batch_size=4, num_workers=workers, **options)


class Net(L.LightningModule):
    """Dropout, BatchNorm, a metric, logged epoch values, extra state and a random draw from each generator."""

    def __init__(
        self,
        scheduler: str = "step",
        manual: bool = False,
        two_optimizers: bool = False,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        step_every: int = 1,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.other = nn.Linear(8, 1)
        self.error = torchmetrics.MeanMetric()
        self.scheduler, self.two, self.make_optimizer = scheduler, two_optimizers, optimizer
        self.step_every = step_every  # batches that manual optimization accumulates itself
        self.automatic_optimization = not manual
        self.calls = 0  # plain on purpose: counts all passes, the abandoned ones too
        self.seen_loss = torch.zeros(())
        self.seen_ids: tuple[int, ...] = ()

    def get_extra_state(self) -> dict[str, int]:
        return {"extra": getattr(self, "extra", 0)}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = state["extra"]

    def parts(self, batch: Any) -> list[Batch]:
        if "sample_id" in batch:
            return [(batch["x"], batch["y"], torch.tensor([int(i.split("/")[1]) for i in batch["sample_id"]]))]
        if isinstance(batch, dict):
            return [b for b in batch.values() if b is not None]
        return [batch]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.calls += 1
        self.extra = getattr(self, "extra", 0) + 1
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        parts = self.parts(batch)
        loss = sum(((self.net(x) + self.other(x) - y) ** 2).mean() for x, y, _ in parts) * (1 + 0.01 * noise)
        assert isinstance(loss, Tensor)
        self.seen_loss = loss.detach()
        self.seen_ids = tuple(int(i) for _, _, ids in parts for i in ids)
        self.error(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        self.log("error", self.error, on_epoch=True, batch_size=4)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max", batch_size=4)
        self.log("smallest", loss, on_step=False, on_epoch=True, reduce_fx=min, batch_size=4)
        if self.automatic_optimization:
            return loss
        self.step_by_hand(loss, batch_idx)
        return None

    def step_by_hand(self, loss: Tensor, batch_idx: int) -> None:
        optimizers = self.optimizers() if self.two else [self.optimizers()]
        self.manual_backward(loss / self.step_every)
        if (batch_idx + 1) % self.step_every:
            return
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        schedulers = self.lr_schedulers()
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            scheduler.step()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y, _ = batch
        # the draw would shift every later one if validation were repeated or left out
        self.log("val_loss", ((self.net(x) - y) ** 2).mean() + 0 * torch.rand(()), batch_size=4)

    def configure_optimizers(self) -> Any:
        groups = [list(self.net.parameters()), list(self.other.parameters())]
        made = [self.make_optimizer(g, lr=1e-2) for g in (groups if self.two else [groups[0] + groups[1]])]
        out = []
        for optimizer in made:
            if self.scheduler == "plateau":
                plan: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
                out.append({"optimizer": optimizer, "lr_scheduler": {"scheduler": plan, "monitor": "val_loss"}})
            elif self.scheduler == "none":
                out.append(optimizer)
            elif self.scheduler == "epoch":
                out.append([torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)])
                out[-1] = {"optimizer": optimizer, "lr_scheduler": {"scheduler": out[-1][0], "interval": "epoch"}}
            else:
                plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=200)
                out.append({"optimizer": optimizer, "lr_scheduler": {"scheduler": plan, "interval": "step"}})
        return out if self.two else out[0]


class Recorder(L.Callback):
    """Per-step log and epoch values. Both are its state, so a rollback that forgets a user's callback shows up here."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []
        self.epochs: list[tuple[Any, ...]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = float(module.seen_loss).hex()
        self.steps.append((trainer.current_epoch, batch_idx, trainer.global_step, module.seen_ids, loss))

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        values = {k: float(v).hex() for k, v in sorted(trainer.callback_metrics.items())}
        self.epochs.append((trainer.current_epoch, trainer.global_step, values))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps), "epochs": list(self.epochs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.epochs = list(state["steps"]), list(state["epochs"])


class Hurt(L.Callback):
    """At the end of one batch (counted over all), spoils everything there is and asks for a rollback."""

    def __init__(self, rollback: Rollback, batch: int, before_step: int, times: int = 1) -> None:
        self.rollback, self.batch, self.before_step, self.times = rollback, batch, before_step, times
        self.batches = self.fired = 0
        self.restored: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        if self.fired >= self.times or self.batches != self.batch:
            return
        self.fired += 1
        spoil(trainer, module)
        snapshot = self.rollback.request(
            trainer, before_step=self.before_step, action=Action.ROLLBACK_REPLAY, incident=1, reason="a test"
        )
        self.restored.append(snapshot.step)
        self.batches = self.batch - 2  # the next one, if there is to be one, two batches later
        if self.fired == self.times:
            self.batches = 10_000


def spoil(trainer: L.Trainer, module: Net, value: float = float("nan")) -> None:
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.fill_(value if tensor.is_floating_point() else 99)
    for optimizer in trainer.strategy.optimizers:
        for state in optimizer.state.values():
            for moment in state.values():
                moment.fill_(77.0)
        for group in optimizer.param_groups:
            group["lr"] = 123.0 if value != value else 1e-9
    for config in trainer.lr_scheduler_configs:
        config.scheduler.last_epoch += 50
    module.error.update(1e9)
    module.extra = -1
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        scaler.update(2.0)


@dataclass
class Cell:
    """One setting of the matrix: what to train, where to be hurt and how far to go back."""

    name: str
    batch: int = 9
    before_step: int = 8
    every: int = 4
    restored: int | None = None
    loader: Callable[[], Any] = map_loader
    net: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    fp16: bool = False
    validation: bool = False
    callbacks: Callable[[], list[L.Callback]] = list

    def __or__(self, options: dict[str, Any]) -> Cell:
        """The same with more options of the Trainer."""
        return replace(self, trainer=self.trainer | options)


@dataclass
class Outcome:
    steps: list[tuple[Any, ...]]
    epochs: list[tuple[Any, ...]]
    state: dict[str, Any]
    calls: int
    trainer: L.Trainer
    module: Net


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def make_trainer(cell: Cell, callbacks: list[L.Callback]) -> L.Trainer:
    options: dict[str, Any] = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "callbacks": callbacks,
        **({} if cell.validation else {"limit_val_batches": 0}),
        **cell.trainer,
    }
    if cell.fp16:
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_interval=7))]
    return L.Trainer(**options)


def run(cell: Cell, *callbacks: L.Callback, seed: int = 0) -> Outcome:
    seed_all(seed)
    recorder = Recorder()
    module = Net(**cell.net)
    trainer = make_trainer(cell, [recorder, *cell.callbacks(), *callbacks])
    validation = DataLoader(Samples(8), batch_size=4)
    seed_all(seed + 1)
    trainer.fit(module, cell.loader(), validation)
    return Outcome(recorder.steps, recorder.epochs, final_state(trainer, module), module.calls, trainer, module)


def final_state(trainer: L.Trainer, module: Net) -> dict[str, Any]:
    state: dict[str, Any] = {
        "module": module.state_dict(),
        "optimizers": [o.state_dict() for o in trainer.strategy.optimizers],
        "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "scaler": trainer.precision_plugin.state_dict(),
        "metric": module.error.metric_state,
        "metric_updates": module.error.update_count,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches_that_stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "logged": dict(trainer.callback_metrics),
        "draw": torch.rand(4),
    }
    return state


def same(a: Any, b: Any, where: str = "state") -> None:
    """Assert equality bit for bit, naming the first place that differs."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor), where
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b) or bool(
            (a.isnan() == b.isnan()).all() and torch.equal(a.nan_to_num(), b.nan_to_num())
        ), f"{where}: {a} is not {b}"
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{where}: {a.keys() ^ b.keys()}"
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}[{i}]")
    else:
        assert a == b, f"{where}: {a} is not {b}"


def assert_same_run(outcome: Outcome, reference: Outcome) -> None:
    assert outcome.steps == reference.steps
    assert outcome.epochs == reference.epochs
    same(outcome.state, reference.state)
