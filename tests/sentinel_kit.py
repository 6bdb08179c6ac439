"""What several rooms share: a sink that keeps events in memory, a small stateful loader, a quiet Trainer, two processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from collective_limit import limited
from fork_server import run_forked
from torch import Tensor, nn

from lightning_sentinel.context import context_of


class Sink:
    """Stands where the journal stands and keeps every event."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def flush(self) -> None:
        return None

    def named(self, *events: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] in events]

    def steps(self) -> list[dict[str, Any]]:
        return self.named("step")


class Loader:
    """A loader with a cursor: batches of a regression task in a fixed order, dicts with ids, samples can be excluded."""

    def __init__(self, samples: int = 512, batch_size: int = 4, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(samples, 6, generator=generator)
        self.y = self.x @ torch.randn(6, 1, generator=generator) + 0.1 * torch.randn(samples, 1, generator=generator)
        self.batch_size, self.position, self.excluded = batch_size, 0, set[str]()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            rows: list[int] = []
            while len(rows) < self.batch_size:
                if self.position >= len(self.x):
                    self.position = 0
                    return
                if f"sample:s{self.position}" not in self.excluded:
                    rows.append(self.position)
                self.position += 1
            yield {"x": self.x[rows].clone(), "y": self.y[rows].clone(), "sample_id": [f"s{i}" for i in rows]}

    def exclude(self, names: Any) -> None:
        self.excluded = set(names)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Net(L.LightningModule):
    """Two layers with BatchNorm and dropout; ``gains`` multiplies the output at chosen steps (NaN, 1e3 ...)."""

    def __init__(self, gains: dict[int, float] | None = None, once: bool = False, rate: float = 0.02) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.last, self.drop = nn.Linear(8, 1), nn.Dropout(0.1)
        self.gains, self.once, self.rate = dict(gains or {}), once, rate
        self.struck: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self(batch["x"])
        gain = self.gains.get(self.trainer.global_step)
        if gain is not None and not (self.once and self.trainer.global_step in self.struck):
            self.struck.append(self.trainer.global_step)
            out = out * gain
        return (out - batch["y"]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.rate)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_trainer(callbacks: list[L.Callback], **options: Any) -> tuple[L.Trainer, Sink]:
    """A quiet Trainer on one CPU, and the sink that its events go to."""
    sink = Sink()
    trainer = L.Trainer(
        **{
            "max_steps": 60,
            "max_epochs": -1,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": limited(callbacks, options),
            **options,
        }
    )
    context_of(trainer).journal = sink
    return trainer, sink


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def rank_environments(ranks: int, *folders: Path) -> list[dict[str, str]]:
    """What Lightning's launcher would give each of them, on a free port; and where modules are beside these tests' own."""
    path = os.pathsep.join(map(str, [*folders, Path(__file__).parent]))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", "WORLD_SIZE": str(ranks)}
    return [shared | {"LOCAL_RANK": str(rank), "PYTHONPATH": path} for rank in range(ranks)]


def run_ranks(script: Path, *arguments: object, ranks: int = 2, seconds: float = 280) -> None:
    """Run a script as so many ranks; its complaints are the test's."""
    codes, said = run_forked(script, arguments, rank_environments(ranks), seconds)
    assert codes == [0] * ranks, said[-6000:]
