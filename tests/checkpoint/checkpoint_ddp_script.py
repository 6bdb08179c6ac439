"""Two gloo ranks, one fit; each leaves its steps and weights. Started by the test beside it."""

from __future__ import annotations

import argparse
import json
import os
import struct
from pathlib import Path
from typing import Any

import lightning as L
import torch
from checkpoint_world import Net, Samples, seed, suite
from collective_limit import CollectiveLimit
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from lightning_sentinel.checkpoint import CheckpointError, choosing

torch.set_num_threads(1)


def fail_alone(step: int) -> None:
    """On this rank the checkpoint of this step can't be loaded, although every hash is right."""
    load = choosing.load

    def failing(store: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        if checkpoint.step == step:
            raise OSError("the disk of this node has gone")
        return load(store, checkpoint, *args, **kwargs)

    choosing.load = failing  # type: ignore[assignment]


class Ranked(Net):
    def on_train_start(self) -> None:
        if self.trainer.global_step == 0:
            torch.manual_seed(self.base_seed + 1000 * self.global_rank)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stop", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fails-alone", type=int, help="rank 1 can't load the checkpoint of this step")
    parser.add_argument("--then-none", action="store_true", help="try again with no checkpoint that rank 1 can load")
    arguments = parser.parse_args()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    seed(arguments.seed)
    if arguments.fails_alone is not None and rank == 1:
        fail_alone(arguments.fails_alone)
    fit(arguments, rank)
    if arguments.then_none:
        if rank == 1:
            choosing.load = no_load  # type: ignore[assignment]
        try:
            fit(arguments, rank)
            said = "it went on"
        except CheckpointError as error:
            said = str(error)
        (arguments.folder / f"none-{rank}.json").write_text(json.dumps(said))


def no_load(*_: Any, **__: Any) -> Any:
    raise OSError("the disk of this node has gone")


def fit(arguments: argparse.Namespace, rank: int) -> None:
    module = Ranked(fail_at=arguments.stop)
    module.base_seed = arguments.seed  # type: ignore[assignment]
    data = Samples()
    sampler: Any = StatefulDistributedSampler(data, num_replicas=2, rank=rank, shuffle=True)
    callbacks = suite(
        arguments.folder,
        every_n_steps=2,
        keep=9,
        probation_steps=1,
        write_lightning_ckpt=True,
        save_on_exception=False,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        callbacks=[CollectiveLimit(), *callbacks],
    )
    trainer.fit(module, StatefulDataLoader(data, batch_size=4, sampler=sampler))
    weights = [struct.pack(">f", float(v)).hex() for p in module.parameters() for v in p.detach().flatten()]
    text = json.dumps({"steps": module.steps, "weights": weights})
    (arguments.folder / f"steps-{rank}.json").write_text(text)


if __name__ == "__main__":
    main()
