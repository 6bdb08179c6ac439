"""Pretrain the example's language model, with lightning-sentinel's callbacks.

    python examples/pretrain.py
    python examples/pretrain.py faults=corrupt_batch policy=recover trainer.max_steps=200
    python examples/pretrain.py trainer=fp16 model=micro

Every key of ``configs/`` can be set on the command line; ``--help`` shows them all. The run folder is
``runs/<time stamp>/`` unless ``hydra.run.dir`` says otherwise.
"""

from __future__ import annotations

import time
from typing import Any

import hydra
import lightning.pytorch as L
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig


def build_callbacks(cfg: DictConfig) -> list[L.Callback]:
    """The callbacks of the configuration, in the order in which they must run."""
    try:
        from lightning_sentinel.config import build_callbacks as build
    except ModuleNotFoundError:
        return [instantiate(node) for node in (cfg.get("callbacks") or {}).values()]
    return build(cfg)


def pretrain(cfg: DictConfig) -> L.Trainer:
    """Train as configured, and return the Trainer as it is at the end."""
    torch.set_num_threads(cfg.threads)
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    data: Any = instantiate(cfg.data)
    # Data and callbacks come before the weights, so that what they draw at random would show; the seed is set again.
    callbacks = build_callbacks(cfg)
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    module = build_module(cfg)
    if data.vocab_size > module.vocab_size:
        raise ValueError(
            f"The data has {data.vocab_size} token ids, the model only {module.vocab_size};"
            f" set model.vocab_size={data.vocab_size}"
        )
    loggers = [instantiate(node) for node in (cfg.get("logger") or {}).values()]
    trainer: L.Trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=loggers or False)
    trainer.fit(module, datamodule=data)
    return trainer


def build_module(cfg: DictConfig) -> Any:
    """The LightningModule with its model, optimizer and schedule."""
    from hybrid_lm.module import HybridLMModule

    return HybridLMModule(model=instantiate(cfg.model), optimizer=instantiate(cfg.optimizer))


@hydra.main(version_base="1.3", config_path="../configs", config_name="config")
def main(cfg: DictConfig) -> None:
    started = time.monotonic()
    trainer = pretrain(cfg)
    if trainer.is_global_zero:
        metrics = {name: f"{value:.4f}" for name, value in sorted(trainer.callback_metrics.items())}
        print(f"{trainer.global_step} steps in {time.monotonic() - started:.1f} s: {metrics}")
        print(f"Run folder: {cfg.run_dir}")


if __name__ == "__main__":
    main()
