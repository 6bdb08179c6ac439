"""What a snapshot and a rollback cost, as ratios measured in one run.

    snapshot_ratio      time of one full snapshot into reused memory / time of a plain copy of the same bytes
    rollback_ratio      time of one restore without its loaders / time of a plain copy of the same bytes
    light_ms            time of one light snapshot, in milliseconds
    peak_memory_ratio   growth of the resident memory with K snapshots / (K x bytes of the state)

Run it with ``python benchmarks/state.py [--parameters 20000000] [--repeat 15] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_sentinel.state import snapshot as state

WIDTH = 1024


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


def seconds(call: Callable[[], Any], repeat: int) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return median(times)


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

        copy()
        # plain copies before and after each measurement, so that a busy machine slows down both
        plain = [seconds(copy, self.repeat)]
        snapshot = seconds(lambda: state.take(trainer, into=kept[0]), self.repeat)
        plain.append(seconds(copy, self.repeat))
        restore = seconds(lambda: state.restore(trainer, kept[0]), self.repeat)
        plain.append(seconds(copy, self.repeat))
        loaders = seconds(lambda: state.restore_cursor(trainer, kept[0].cursor, None), self.repeat)
        light = seconds(lambda: state.take(trainer, tensors=False), 5 * self.repeat)
        self.result = {
            "state_mib": nbytes / 2**20,
            "plain_copy_ms": median(plain) * 1e3,
            "snapshot_ratio": snapshot / (0.5 * (plain[0] + plain[1])),
            "rollback_ratio": max(0.0, restore - loaders) / (0.5 * (plain[1] + plain[2])),
            "loader_restart_ms": loaders * 1e3,
            "light_ms": light * 1e3,
            "peak_memory_ratio": grown / (self.keep * nbytes),
        }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--parameters", type=int, default=20_000_000, help="parameters of the model")
    arguments.add_argument("--repeat", type=int, default=15, help="measurements; the median counts")
    arguments.add_argument("--keep", type=int, default=2, help="snapshots in memory at once")
    arguments.add_argument("--json", type=Path, help="write the numbers to this file too")
    options = arguments.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    measure = Measure(options.repeat, options.keep)
    trainer = L.Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[measure],
    )
    trainer.fit(Deep(options.parameters), StatefulDataLoader(torch.randn(64, WIDTH), batch_size=8))
    for name, value in measure.result.items():
        print(f"{name:20s} {value:10.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(measure.result, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
