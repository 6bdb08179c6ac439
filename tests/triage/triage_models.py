"""A small network with a switchable fault, a gate that records without any other callback, and a fit around them."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

import lightning as L
import torch
import torchmetrics
from collective_limit import CollectiveLimit
from lightning.fabric.utilities.seed import _collect_rng_states
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from lightning_sentinel.context import context_of
from lightning_sentinel.record import StepRecord
from lightning_sentinel.triage.window import ensure_capture

BAD_STEP, BAD_ROW = 3, 2


class NanBackward(torch.autograd.Function):
    """A kernel whose forward is right and whose backward is NaN where the trigger is set."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, trigger: Tensor) -> Tensor:
        ctx.save_for_backward(trigger)
        return h * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (trigger,) = ctx.saved_tensors
        return grads[0] * torch.where(trigger > 0, math.nan, 1.0), None


class Mixer(nn.Module):
    """The part of a block in which a fault may sit; ``trigger`` is 1 for the bad sample of the bad step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.wide = kind, nn.Linear(16, 16)
        if kind == "fp16 overflow":
            nn.init.constant_(self.wide.weight[:, :3], 8.0)

    def forward(self, h: Tensor, trigger: Tensor) -> Tensor:
        match self.kind:
            case "root":
                h = h * torch.sqrt(1 - 2 * trigger)
            case "where":
                z = (h * (1 - trigger)).square()
                h = torch.where(z > 0, z.sqrt(), 0.0)
            case "kernel":
                h = NanBackward.apply(h, trigger)
            case "masked row":
                q = h.view(-1, 4, 4)
                mask = torch.zeros(4, 4, dtype=torch.bool)
                mask[1] = True
                mask = mask & (trigger > 0)[:, :, None]
                h = (q @ q.mT).masked_fill(mask, -math.inf).softmax(-1) @ q
                h = torch.where(mask[..., :1], 0.0, h).flatten(1)
            case "decay":
                h = _decay(h, -torch.arange(1.0, 17.0) * (1 + 30 * trigger))
        return self.wide(h * (1 + 1.5e4 * trigger) if self.kind == "fp16 overflow" else h)


def _decay(h: Tensor, log_decay: Tensor) -> Tensor:
    """Decay between positions, masked after ``exp``: infinity times zero above the diagonal where the decay is strong."""
    between = torch.exp(log_decay[:, :, None] - log_decay[:, None, :]) * torch.ones(16, 16).tril()
    return (between @ h[:, :, None]).squeeze(-1)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.mixer = nn.BatchNorm1d(16), Mixer(kind)

    def forward(self, h: Tensor, trigger: Tensor) -> Tensor:
        return h + self.mixer(self.norm(h), trigger)


class Net(L.LightningModule):
    """Everything that a replay could leave a trace in: dropout, running statistics, a metric, lists, logged values."""

    def __init__(self, kind: str = "", manual: bool = False, layers: int = 3, guilty: int = 1) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(kind if i == guilty else "") for i in range(layers))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(16, 1)
        self.mean, self.seen, self.running = torchmetrics.MeanMetric(), [], torch.zeros(1)
        self.private, self.automatic_optimization = torch.Generator().manual_seed(3), not manual

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y, trigger = batch["x"], batch["y"], batch["x"][:, -1:]
        h = self.stem(x) + torch.rand(16, generator=self.private) * 0.01
        for block in self.blocks:
            h = block(h, trigger)
        per_sample = (self.head(self.drop(h)) - y).square().mean(1)
        if self.blocks[1].mixer.kind == "masked row":
            per_sample = torch.where(trigger[:, 0] > 0, 0.0, per_sample)  # the loss never sees that sample
        self.sample_loss_nats = per_sample.detach()
        loss = per_sample.mean()
        self.running += 1
        self.mean.update(y.mean())
        self.seen.append(batch_idx)
        self.log("mean", self.mean, on_step=False, on_epoch=True, batch_size=len(y))
        self.log("loss", loss.nan_to_num(), on_step=True, on_epoch=True, batch_size=len(y))
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Samples(Dataset):
    """Samples of eight features; the last one, the trigger, is 1 for one row of the bad step and 0 elsewhere."""

    def __init__(self, kind: str, size: int, bad: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(size, 8, generator=generator), torch.randn(size, 1, generator=generator)
        self.x[:, -1] = 0.0
        if kind:
            self.x[bad, -1] = 1.0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i], "sample_id": f"s{i}"}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        k: [s[k] for s in samples] if k == "sample_id" else torch.stack([s[k] for s in samples]) for k in samples[0]
    }


class Gate(L.Callback):
    """Records losses and gradients at the gate and calls ``at_gate`` there; keeps bad steps out of the weights."""

    def __init__(self, at_gate: Any = None, every_step: bool = False) -> None:
        self.at_gate, self.every_step, self.results = at_gate, every_step, []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        ensure_capture(trainer)
        self.losses: list[Tensor] = []

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        value = loss.detach().float() / (scaler.get_scale() if scaler else 1.0)
        self.losses.append(value * (trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        context = context_of(trainer)
        context.scratch["live_losses"], self.losses = self.losses, []
        losses = torch.stack(context.scratch["live_losses"]).double()
        bad_grad = any(not p.grad.isfinite().all() for p in pl_module.parameters() if p.grad is not None)
        mine = torch.tensor([float(losses.mean()), float((~losses.isfinite()).sum()), float(bad_grad)])
        rows = [mine] * trainer.world_size
        if trainer.world_size > 1:
            rows = [torch.empty_like(mine) for _ in rows]
            torch.distributed.all_gather(rows, mine)
        record = StepRecord.from_losses(
            trainer.global_step, [float(r[0]) for r in rows], grad_norm=math.inf if any(r[2] for r in rows) else 1.0
        )
        context.record = record
        if self.at_gate is not None and (record.has_nonfinite or self.every_step):
            self.results.append(self.at_gate(trainer, pl_module, optimizer, record))
        if record.has_nonfinite:
            context.held = True
            buffers = context.window.buffers
            for p in pl_module.parameters():
                p.grad = None if getattr(trainer.precision_plugin, "scaler", None) is None else p.grad
            for name, b in pl_module.named_buffers():
                b.copy_(buffers[name])
        else:
            context.held = False


def fit(
    module: L.LightningModule,
    callbacks: list[L.Callback],
    *,
    kind: str = "",
    fp16: bool = False,
    scale: float = 64.0,
    steps: int = 8,
    batch_size: int = 4,
    bad: int | None = None,
    **options: Any,
) -> L.Trainer:
    L.seed_everything(0, verbose=False)
    accumulate = options.get("accumulate_grad_batches", 1)
    bad = BAD_STEP * accumulate * batch_size + BAD_ROW if bad is None else bad
    data = Samples(kind, 12 * batch_size * accumulate, bad)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if fp16 else []
    defaults: dict[str, Any] = {
        "max_steps": steps,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "plugins": plugins,
    }
    trainer = L.Trainer(callbacks=callbacks, **(defaults | options))
    trainer.fit(module, DataLoader(data, batch_size=batch_size, collate_fn=collate))
    return trainer


def fingerprint(trainer: L.Trainer, module: Any) -> list[str]:
    """Everything that a replay might have touched, to the bit."""
    everything = [
        module.state_dict(),
        trainer.optimizers[0].state_dict(),
        [p.grad for p in module.parameters()],
        [p.requires_grad for p in module.parameters()],
        _collect_rng_states(),
        trainer.fit_loop.state_dict(),
        trainer.callback_metrics,
        trainer.logged_metrics,
        trainer.precision_plugin.state_dict(),
        trainer._results,
        module.mean.metric_state,
        module.mean._update_count,
        module.seen,
        module.running,
        module.private.get_state(),
        [b for _, b in module.named_buffers()],
        sorted(module.__dict__),
        sorted(trainer.strategy.__dict__),
    ]
    return [str([x.tolist() if isinstance(x, Tensor) else x for x in tree_leaves(e)]) for e in everything]


def one_of_two_ranks(callbacks: list[L.Callback], max_steps: int, **options: Any) -> L.Trainer:
    """In a script that Lightning starts on two ranks: this rank's Trainer, quiet and on one thread."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    return L.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        devices=2,
        strategy=L.pytorch.strategies.DDPStrategy(process_group_backend="gloo"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[CollectiveLimit(), *callbacks],
        **options,
    )
