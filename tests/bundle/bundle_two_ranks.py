"""Two processes: rank 1's replica drifts in step 0, its data hold a NaN in step 1; a detector speaks at step 3.

Usage: ``python bundle_two_ranks.py FOLDER``, for ``FOLDER/ddp`` and, without the drift, ``FOLDER/fsdp2``
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from bundle_world import Net, fit, suite
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_sentinel import DeepProbe


class Drift(L.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 0 and trainer.global_rank == 1 and batch_idx == 1:
            with torch.no_grad():
                pl_module.last.weight.mul_(1.5)


class Sharded(Net):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for layer in (self.first, self.norm, self.last):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    fit(
        [Drift(), *suite(folder / "ddp", 3), DeepProbe(every_n_steps=1)],
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
    )
    fit(
        suite(folder / "fsdp2", 3),
        Sharded(),
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"),
    )
