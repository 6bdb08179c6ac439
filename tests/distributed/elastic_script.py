"""One worker of a small real training under torchrun or Lightning's launcher, which can kill itself at set points.

Started by the tests beside it and by ``benchmarks/soak.py``. ``--kills`` is a JSON list with one entry for each attempt:
``null``, or ``{"rank": 1, "step": 17, "where": "gather"}``. The victim ends by SIGKILL, in the middle of what is named.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from distributed_kit import MEETING, CollectiveLimit
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import lightning_sentinel
from lightning_sentinel import ForensicCheckpoint, Rollback, collectives
from lightning_sentinel.callbacks import rank_telemetry
from lightning_sentinel.checkpoint.atomic import Disk
from lightning_sentinel.data import MixtureLoader
from lightning_sentinel.distributed import init_process_group
from lightning_sentinel.incidents import Action
from lightning_sentinel.state import snapshot as snapshots
from lightning_sentinel.state.tree import local

torch.set_num_threads(1)


class Points:
    """A source of regression samples, each a function of its index."""

    def __init__(self, name: str, n: int) -> None:
        self.name, self.n = name, n

    def __len__(self) -> int:
        return self.n

    def sample(self, index: int) -> dict[str, Any]:
        x = np.cos(np.arange(1, 9) * (index + 1)).astype(np.float32)
        return {"x": x, "y": np.array([x[:3].sum()], dtype=np.float32)}

    def sample_id(self, index: int) -> str:
        return f"{self.name}/{index}"


class Net(L.LightningModule):
    """Dropout draws differ between ranks, so every rank's own random state must come back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for part in (part for part in self.net if any(True for _ in part.parameters())):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def on_train_start(self) -> None:
        if self.trainer.global_step == 0:
            torch.manual_seed(1000 + self.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return ((self.net(batch["x"]) - batch["y"]) ** 2).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9), "interval": "step"}]


class Killer(L.Callback):
    """Ends this process in the middle of what the plan names, at the first chance from the plan's step on.

    Just before, it leaves the plan's entry as ``killed-<attempt>`` in the run folder: what shows that the kill took place.
    A ``resume`` has no step of its own: it is the one with which its attempt begins.
    """

    def __init__(self, plan: dict[str, Any], folder: Path, attempt: int) -> None:
        self.where, self.step, self.armed = plan["where"], plan["step"], False
        self.checkpoints, self.after = folder / "checkpoints", plan.get("after")
        self.marker, self.entry = folder / f"killed-{attempt}", json.dumps(plan)

    def die(self) -> None:
        self.marker.write_text(self.entry)
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.where == "resume":
            _after(snapshots, "restore_cursor", 1, self.die)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert self.where != "resume"
        if self.armed or trainer.global_step < self.step:
            return
        end = time.monotonic() + 5  # for the thread that writes; the status itself rank 0 writes between two steps
        while not self.is_there() and time.monotonic() < end:
            time.sleep(0.02)
        if not self.is_there():
            return
        self.armed = True
        if self.where == "step":
            self.die()
        elif self.where == "gather":  # the others are in it already, or will wait in it
            rank_telemetry.gather_flat = lambda *_: self.die()
        elif self.where == "sent":  # its own part is on its way to them
            _during(collectives, "_gather", self.die)
        elif self.where == "backward":  # behind the last layer, before the first
            pl_module.net[2].register_full_backward_hook(lambda *_: self.die())
        elif self.where == "checkpoint":
            _after(Disk, "write", 2, self.die)
        elif self.where == "publish":
            _after(Disk, "rename", 1, self.die)
        elif self.where == "rollback":
            _after(snapshots, "restore_cursor", 1, self.die)

    def is_there(self) -> bool:
        """Whether the checkpoint is known-good that the plan wants first; after a resume its name bears the attempt, too."""
        return self.after is None or any(map(is_known_good, self.checkpoints.glob(f"{self.after}*")))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert not self.armed or self.where in ("checkpoint", "publish", "rollback")


def is_known_good(checkpoint: Path) -> bool:
    """Whether the thread that writes has come as far as that."""
    status = checkpoint / "status.json"
    return status.exists() and json.loads(status.read_text())["status"] == "known_good"


def _after(owner: Any, name: str, calls: int, die: Callable[[], None]) -> None:
    """Die right after the ``calls``-th call of ``owner.name``."""
    original: Callable[..., Any] = getattr(owner, name)
    count = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        result = original(*args, **kwargs)
        count += 1
        if count >= calls:
            die()
        return result

    setattr(owner, name, call)


def _during(owner: Any, name: str, die: Callable[[], None]) -> None:
    """Die when the collective ``owner.name`` has begun and is not waited for yet."""
    original: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs, async_op=True)
        die()

    setattr(owner, name, call)


class GoesBack(L.Callback):
    """Asks for a rollback with a replay every so many steps, on every rank alike, once for each step in each process."""

    def __init__(self, every: int) -> None:
        self.every, self.done = every, set[int]()

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step and step % self.every == 0 and step not in self.done:
            self.done.add(step)
            rollback = next(c for c in trainer.callbacks if isinstance(c, Rollback))  # type: ignore[attr-defined]
            rollback.request(
                trainer, before_step=step, action=Action.ROLLBACK_REPLAY, incident=0, reason="a drill", exclude=()
            )


class Terminator(L.Callback):
    """Sends itself SIGTERM at a step, as a scheduler would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class Hang(L.Callback):
    """Stands still in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            time.sleep(45)  # longer than the time-out, and not for ever: nobody else ends this process


class Pace(L.Callback):
    """Makes a step last, so that something outside can happen in it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(self.seconds)


def strategy_of(name: str, devices: int) -> Strategy:
    if name == "fsdp2":
        return ModelParallelStrategy(devices, 1, process_group_backend="gloo", timeout=MEETING)
    return DDPStrategy(timeout=MEETING)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="over all ranks")
    parser.add_argument(
        "--endless", action="store_true", help="a loader without length: Lightning fetches a batch ahead"
    )
    parser.add_argument("--samples", type=int, default=400, help="in each of the two sources")
    parser.add_argument("--kills", type=json.loads, default=[])
    parser.add_argument("--in-turn", action="store_true", help="kills come in their order, whatever an agent counts")
    parser.add_argument("--rollback-every", type=int, default=0)
    parser.add_argument("--terminate", type=json.loads, default=None, help='{"1": 7}: step by rank, in attempt 0')
    parser.add_argument("--hosts", type=json.loads, default={}, help='{"1": "node-b"}: name of a rank\'s machine')
    parser.add_argument("--skew", type=float, default=0.0, help="seconds by which rank 1 is late in later attempts")
    parser.add_argument("--hang", type=int, default=-1, help="rank 1 stands still at this step")
    parser.add_argument("--timeout", type=float, default=60.0, help="of collectives")
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true", help="leave the process group to Lightning")
    parser.add_argument("--policy", default="recover")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if str(rank) in arguments.hosts:
        socket.gethostname = lambda: arguments.hosts[str(rank)]
    if rank == 1 and attempt > 0:
        time.sleep(arguments.skew)
    if not arguments.plain:
        init_process_group(timeout=MEETING)

    mine: list[L.Callback] = [CollectiveLimit(timedelta(seconds=arguments.timeout))]
    if arguments.pace:
        mine.append(Pace(arguments.pace))
    if arguments.rollback_every:
        mine.append(GoesBack(arguments.rollback_every))
    done = len(list(arguments.folder.glob("killed-*"))) if arguments.in_turn else attempt
    kill = arguments.kills[done] if done < len(arguments.kills) else None
    if kill is not None and kill["rank"] == rank:
        mine.append(Killer(kill, arguments.folder, done))
    if arguments.hang >= 0 and rank == 1:
        mine.append(Hang(arguments.hang))
    if attempt == 0 and str(rank) in (arguments.terminate or {}):
        mine.append(Terminator(arguments.terminate[str(rank)]))
    suite = lightning_sentinel.default_callbacks(arguments.folder, policy=arguments.policy)
    suite[0].report = False  # type: ignore[attr-defined]
    saver = ForensicCheckpoint(every_n_steps=arguments.every, probation_steps=1, save_on_exception=False)
    # other weights in each start that has something to go on from; before the first checkpoint it is the same run again
    torch.manual_seed(arguments.seed + (7 * attempt if any(arguments.folder.glob("checkpoints/step-*")) else 0))
    module = Net()
    sources = [Points("a", arguments.samples), Points("b", arguments.samples)]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy=strategy_of(arguments.strategy, arguments.devices),
        max_epochs=-1,
        max_steps=arguments.steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        callbacks=[*mine, *suite, saver],
    )
    per_epoch = None if arguments.endless else 10
    batch_size = arguments.batch // trainer.world_size
    trainer.fit(module, MixtureLoader(sources, batch_size=batch_size, steps_per_epoch=per_epoch, seed=3))
    bits = [struct.pack(">f", float(v)).hex() for p in module.state_dict().values() for v in local(p).flatten()]
    (arguments.folder / f"weights-{rank}.json").write_text(json.dumps(bits))


if __name__ == "__main__":
    main()
