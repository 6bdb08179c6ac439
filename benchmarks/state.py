"""What a snapshot, a rollback and a checkpoint cost, as ratios measured in one run.

    snapshot_ratio            time of one full snapshot into reused memory / time of a plain copy of the same bytes
    rollback_ratio            time of one restore without its loaders / time of a plain copy of the same bytes
    light_ms                  time of one light snapshot, in milliseconds
    peak_memory_ratio         growth of the resident memory with K snapshots / (K x bytes of the state)
    checkpoint_step_slowdown  time of the steps from the start of a save until it is on the disk, the copy to host memory
                              included / the same number of quiet steps between the saves

Run it with ``python benchmarks/state.py [--parameters 20000000] [--repeat 15] [--saves 8] [--json FILE] [--check]``. What is
compared is measured in turns, so that what else the machine does slows both alike; medians count.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from bounds import add_check, verdict
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_sentinel import ForensicCheckpoint
from lightning_sentinel.state import snapshot as state

WIDTH = 1024
MOST = {"snapshot_ratio": 1.5, "rollback_ratio": 2.0, "peak_memory_ratio": 1.1, "checkpoint_step_slowdown": 1.2}


class Deep(L.LightningModule):
    """A stack of linear layers with as many parameters as asked for."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        layers = max(1, round(parameters / WIDTH**2))
        self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def resident_bytes() -> int:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def in_turns(*calls: Callable[[], Any], repeat: int) -> list[list[float]]:
    """Seconds of each call, one list per call; they take turns, after one round that does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeat + 1):
        for mine, call in zip(times, calls, strict=True):
            begin = time.perf_counter()
            call()
            if turn:
                mine.append(time.perf_counter() - begin)
    return times


class Measure(L.Callback):
    """Measures at the end of the third batch, when the optimizer has its state."""

    def __init__(self, repeat: int, keep: int) -> None:
        self.repeat, self.keep = repeat, keep
        self.result: dict[str, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step != 3:
            return
        optimizer = trainer.strategy.optimizers[0]
        live = [p.detach() for p in module.parameters()]
        live += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        nbytes = sum(t.nbytes for t in live)
        before = resident_bytes()
        kept = [state.take(trainer) for _ in range(self.keep)]
        grown = resident_bytes() - before
        target = [torch.empty_like(t) for t in live]

        def copy() -> None:
            for to, source in zip(target, live, strict=True):
                to.copy_(source)

        def restart_loaders() -> None:
            state.restore_cursor(trainer, kept[0].cursor, None)

        plain, snapshot, restore, loaders = in_turns(
            copy,
            lambda: state.take(trainer, into=kept[0]),
            lambda: state.restore(trainer, kept[0]),
            restart_loaders,
            repeat=self.repeat,
        )
        light = median(in_turns(lambda: state.take(trainer, tensors=False), repeat=5 * self.repeat)[0])
        self.result = {
            "state_mib": nbytes / 2**20,
            "plain_copy_ms": median(plain) * 1e3,
            "snapshot_ratio": median(s / p for s, p in zip(snapshot, plain, strict=True)),
            "rollback_ratio": median((r - i) / p for r, i, p in zip(restore, loaders, plain, strict=True)),
            "loader_restart_ms": median(loaders) * 1e3,
            "light_ms": light * 1e3,
            "peak_memory_ratio": grown / (self.keep * nbytes),
        }


class Clock(L.Callback):
    """Times every step from one batch's start to the next one's, and saves at the end of a step now and then."""

    QUIET_STEPS = 8  # between two saves

    def __init__(self, checkpoint: ForensicCheckpoint, saves: int) -> None:
        self.checkpoint, self.saves = checkpoint, saves
        self.quiet: list[list[float]] = [[]]  # seconds of the steps before each save and after the last
        self.beside: list[list[float]] = []  # seconds of the steps beside each save
        self._begun: float | None = None
        self._saving = False

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        now = time.perf_counter()
        if self._begun is not None:
            (self.beside if self._saving else self.quiet)[-1].append(now - self._begun)
        if self._saving and not self.checkpoint.writing:
            self._saving = False
            self.quiet.append([])
        self._begun = now

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self._saving or len(self.quiet[-1]) < self.QUIET_STEPS:
            return
        if len(self.beside) > self.saves:
            trainer.should_stop = True
            return
        self._saving = True
        self.beside.append([])
        self.checkpoint.save(trainer)

    def slowdown(self) -> float:
        """Median over the saves of the time of their steps / of as many steps like the quiet ones around them.

        The first save does not count: in it the memory for the copy is touched for the first time.
        """
        ratios = []
        for i, steps in list(enumerate(self.beside))[1:]:
            ratios.append(sum(steps) / (len(steps) * median(self.quiet[i] + self.quiet[i + 1])))
        return median(ratios)


def measure_saving(options: argparse.Namespace) -> dict[str, float]:
    """A training that saves now and then, with quiet steps between."""
    with TemporaryDirectory(dir=options.folder) as folder:
        checkpoint = ForensicCheckpoint(every_n_steps=0, keep=1, probation_steps=3, run_dir=folder)
        clock = Clock(checkpoint, options.saves)
        batches = StatefulDataLoader(torch.randn(64 * 100, WIDTH), batch_size=64)
        trainer_of([clock, checkpoint], -1).fit(Deep(options.parameters), batches)
    return {
        "checkpoint_step_slowdown": clock.slowdown(),
        "steps_beside_a_save": median(len(steps) for steps in clock.beside),
        "quiet_step_ms": median(s for steps in clock.quiet for s in steps) * 1e3,
    }


def trainer_of(callbacks: list[L.Callback], steps: int) -> L.Trainer:
    return L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--parameters", type=int, default=20_000_000, help="parameters of the model")
    arguments.add_argument("--repeat", type=int, default=15, help="measurements; the median counts")
    arguments.add_argument("--keep", type=int, default=2, help="snapshots in memory at once")
    arguments.add_argument("--saves", type=int, default=8, help="checkpoints whose steps are measured")
    arguments.add_argument("--folder", type=Path, help="where checkpoints are written; by default the temporary folder")
    arguments.add_argument("--json", type=Path, help="write the numbers to this file too")
    add_check(arguments)
    options = arguments.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    measure = Measure(options.repeat, options.keep)
    batches = StatefulDataLoader(torch.randn(64, WIDTH), batch_size=8)
    trainer_of([measure], 3).fit(Deep(options.parameters), batches)
    result = measure.result | measure_saving(options)
    for name, value in result.items():
        print(f"{name:25s} {value:10.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    return verdict(result, MOST, options.check)


if __name__ == "__main__":
    sys.exit(main())
