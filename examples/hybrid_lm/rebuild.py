"""Data and model from the configuration: for the training, and for whoever computes a step of it again."""

from __future__ import annotations

from omegaconf import DictConfig

from lightning_sentinel.config import build

from .datamodule import TextMixtureDataModule
from .model import HybridLMConfig
from .module import AdamWCosine, HybridLMModule


def data_and_parts(cfg: DictConfig) -> tuple[TextMixtureDataModule, tuple[HybridLMConfig, AdamWCosine]]:
    """The data, and what a :class:`HybridLMModule` is made of; nothing random is drawn."""
    data = build(cfg.data, "data")
    model, optimizer = build(cfg.model, "model"), build(cfg.optimizer, "optimizer")
    if data.vocab_size > model.vocab_size:
        raise ValueError(
            f"model.vocab_size is {model.vocab_size}, expected at least the {data.vocab_size} token ids of the data"
        )
    return data, (model, optimizer)


def module_and_data(cfg: DictConfig) -> tuple[HybridLMModule, TextMixtureDataModule]:
    """What ``rebuild`` in the configuration names: ``lightning-sentinel replay`` calls it."""
    data, parts = data_and_parts(cfg)
    return HybridLMModule(*parts), data
