"""What triage costs, as ratios measured in one run.

    capture_ratio   time of noting one micro-batch for a replay / time of one plain step
    flags_ratio     time of one step with flags at the boundaries / time of one plain step
    replay_ratio    time of one replay of a step / time of one plain step
    armed_ratio     time of one replay with the tracing armed / time of one plain step

A plain step is forward, backward and update with nothing of the suite in the Trainer. Run it with
``python benchmarks/triage_cost.py [--width 256] [--layers 8] [--batch 32] [--steps 40] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sentinel import NonFiniteTracer, RankTelemetry
from lightning_sentinel.triage import window
from lightning_sentinel.triage.replay import replay

WARM_UP = 5


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = h + self.down(torch.nn.functional.gelu(self.up(self.norm(h))))
        return out


class Deep(L.LightningModule):
    """A stack of residual blocks under a regression."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = batch
        for block in self.blocks:
            h = block(h)
        return (h - batch.roll(1, 1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Clock(L.Callback):
    """Seconds of each step, from its batch's start to its end; replays the steps if asked to, outside that time."""

    def __init__(self, replays: int = 0) -> None:
        self.steps: list[float] = []
        self.plain: list[float] = []
        self.armed: list[float] = []
        self.replays, self._begin, self._away = replays, 0.0, 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._begin, self._away = time.perf_counter(), 0.0

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        if trainer.global_step < WARM_UP or len(self.plain) >= self.replays:
            return
        begin = time.perf_counter()
        replay(trainer, module, optimizer)
        middle = time.perf_counter()
        replay(trainer, module, optimizer, armed=True)
        end = time.perf_counter()
        self.plain.append(middle - begin)
        self.armed.append(end - middle)
        self._away = end - begin

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append(time.perf_counter() - self._begin - self._away)


class TimedCapture:
    """Seconds of every call of the capture, while inside."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __enter__(self) -> TimedCapture:
        self._inner = inner = window.StepCapture._on_batch

        def timed(capture: window.StepCapture, batch: Any, batch_idx: int) -> None:
            begin = time.perf_counter()
            inner(capture, batch, batch_idx)
            self.seconds.append(time.perf_counter() - begin)

        window.StepCapture._on_batch = timed  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *exc: object) -> None:
        window.StepCapture._on_batch = self._inner  # type: ignore[method-assign]


def usual(seconds: list[float]) -> float:
    """The lower quartile: what it costs, not what else the machine does."""
    return sorted(seconds)[len(seconds) // 4]


def fit(options: argparse.Namespace, callbacks: list[L.Callback]) -> None:
    torch.manual_seed(0)
    trainer = L.Trainer(
        max_steps=options.steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    data = torch.randn(options.steps * options.batch, options.width)
    trainer.fit(Deep(options.width, options.layers), DataLoader(data, batch_size=options.batch))  # type: ignore[arg-type]


def measured(options: argparse.Namespace) -> dict[str, float]:
    """The ratios. Plain runs before and after the others, so that a busy machine slows down both."""
    before, captured, flagged, after = Clock(), Clock(options.replays), Clock(), Clock()
    fit(options, [before])
    with TimedCapture() as capture:
        fit(options, [captured, NonFiniteTracer(boundaries=[]), RankTelemetry()])
    fit(options, [flagged, NonFiniteTracer()])
    fit(options, [after])
    plain = usual(before.steps[WARM_UP:] + after.steps[WARM_UP:])
    return {
        "plain_step_ms": plain * 1e3,
        "capture_ms": usual(capture.seconds[WARM_UP:]) * 1e3,
        "capture_ratio": usual(capture.seconds[WARM_UP:]) / plain,
        "flags_ratio": usual(flagged.steps[WARM_UP:]) / plain,
        "replay_ratio": usual(captured.plain) / plain,
        "armed_ratio": usual(captured.armed) / plain,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--width", type=int, default=256, help="width of the residual stream")
    arguments.add_argument("--layers", type=int, default=8, help="residual blocks")
    arguments.add_argument("--batch", type=int, default=32, help="rows of a batch")
    arguments.add_argument("--steps", type=int, default=40, help=f"steps of each run, the first {WARM_UP} do not count")
    arguments.add_argument("--replays", type=int, default=10, help="replays of each kind")
    arguments.add_argument("--json", type=Path, help="write the numbers to this file too")
    options = arguments.parse_args()
    if options.steps <= WARM_UP + 1 or options.replays < 1:
        arguments.error(f"--steps must be more than {WARM_UP + 1} and --replays at least 1.")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    result = measured(options)
    for name, value in result.items():
        print(f"{name:16s} {value:10.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
