"""Two ranks under DDP with the default suite; each writes down which collectives the suite starts in which step.

Usage: ``python performance_two_ranks.py FOLDER``. Lightning starts the other rank.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from sentinel_kit import Loader, Net, make_trainer

import lightning_sentinel
from lightning_sentinel import collectives

COLLECTIVES = (
    *("all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "reduce", "monitored_barrier"),
)


class Count(L.Callback):
    """By step, what was called with a frame of the suite below it."""

    def __init__(self) -> None:
        self.step = -1
        self.calls: dict[int, Counter[str]] = {}

    def wrap(self, name: str, function: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            frame: Any = sys._getframe(1)
            while frame is not None and "lightning_sentinel/" not in frame.f_code.co_filename:
                # Lightning's loop lies below everything: what it asks the ranks by itself is not the suite's.
                frame = None if frame.f_code.co_name == "advance" else frame.f_back
            if frame is not None:
                self.calls.setdefault(self.step, Counter())[name] += 1
            return function(*args, **options)

        return counted

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.step = trainer.global_step


def main(folder: Path) -> None:
    count = Count()
    for name in COLLECTIVES:
        setattr(dist, name, count.wrap(name, getattr(dist, name)))
    collectives._gather = count.wrap("gather_flat", collectives._gather)
    torch.manual_seed(0)
    trainer, _ = make_trainer(
        [count, *lightning_sentinel.default_callbacks(folder / "run")],
        max_steps=60,
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    trainer.fit(Net(), Loader())  # the same data on both: an incident would have more to tell between them
    found = {step: dict(calls) for step, calls in count.calls.items()}
    (folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
