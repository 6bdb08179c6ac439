"""Pretrain the example's language model, with lightning-sentinel's callbacks.

    python examples/pretrain.py
    python examples/pretrain.py faults=corrupt_batch policy=recover trainer.max_steps=200
    python examples/pretrain.py trainer=fp16 model=micro data.sequence_length=64
    python examples/pretrain.py experiment=parade

Every key of ``configs/`` can be set on the command line; ``--cfg job`` shows them all. The run folder is
``runs/<time stamp>/`` unless ``hydra.run.dir`` says otherwise.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import hydra
import lightning.pytorch as L
import torch
from hybrid_lm.module import HybridLMModule
from hybrid_lm.rebuild import data_and_parts
from omegaconf import DictConfig

from lightning_sentinel.config import build, build_callbacks, check_node, suggest_names

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def pretrain(cfg: DictConfig) -> L.Trainer:
    """Train as configured, and return the Trainer as it is at the end."""
    torch.set_num_threads(cfg.threads)
    data, parts = data_and_parts(cfg)
    trainer: L.Trainer = build_trainer(cfg)
    # Directly before the first weight is drawn: with or without callbacks, a run starts from the same weights.
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    module = HybridLMModule(*parts)
    if cfg.compile is not None:
        for layer in module.model.layers:  # not the model as a whole: its layers stay where the suite looks
            layer.compile(backend=cfg.compile)
    trainer.fit(module, datamodule=data)
    return trainer


def build_trainer(cfg: DictConfig) -> L.Trainer:
    """The Trainer with its loggers and callbacks; ``faults=<name>`` has put the injector among them."""
    for name, node in (cfg.get("faults") or {}).items():
        check_node(node, f"faults.{name}")
    callbacks = build_callbacks(cfg.get("callbacks"))
    loggers = [build(node, f"logger.{name}") for name, node in cfg.get("logger", {}).items()]
    return hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=loggers or False)


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")
def main(cfg: DictConfig) -> None:
    if cfg.get("mode") == "parade":
        import parade

        sys.exit(parade.main(cfg))
    started = time.monotonic()
    trainer = pretrain(cfg)
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps in {time.monotonic() - started:.0f} s")
        for name, value in sorted(trainer.callback_metrics.items()):
            print(f"  {name:40} {value:.4f}")
        print(f"Run folder: {cfg.run_dir}")


if __name__ == "__main__":
    with suggest_names(CONFIGS):
        main()
