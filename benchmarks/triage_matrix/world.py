"""The run that is hurt: a hybrid Gated DeltaNet/attention model of 9 k parameters on three sources of Markov text.

Three sources are first-order chains over 24 tokens. The fourth, ``logs``, is genuinely hard: independent tokens from a range
of their own, of which a trained model knows that it cannot know them. It is a sixth of what the warm weights have seen and
rare in the run. Warm weights and moments are made once for each seed and shared by all cases.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hybrid_lm.model import HybridLMConfig
from hybrid_lm.module import IGNORED, AdamWCosine, HybridLMModule
from torch import Tensor, nn

from lightning_sentinel.data.mixture import MixtureLoader

VOCABULARY, LENGTH, BATCH = 96, 64, 4
TEXT = 24  # tokens below are text, those from here on are what the logs are made of
SOURCES = ("notes", "tables", "prose", "logs")
SUCCESSORS = (0.7, 0.15, 0.1, 0.05)  # probabilities of what follows a token: 0.91 nats in every chain
WARM_WEIGHTS = {"notes": 1.0, "tables": 1.0, "prose": 1.0, "logs": 0.6}
WEIGHTS = WARM_WEIGHTS | {"logs": 0.001}
WARM_STEPS = 400


class MarkovSource:
    """Samples of one source; the same index always gives the same sample."""

    def __init__(self, name: str, seed: int, size: int = 6000) -> None:
        self.name, self.seed, self.size = name, seed, size
        rng = np.random.default_rng([seed, *name.encode()])
        self.hard = name == "logs"
        self.following = np.stack([rng.permutation(TEXT)[: len(SUCCESSORS)] for _ in range(TEXT)])

    def __len__(self) -> int:
        return self.size

    def sample_id(self, index: int) -> str:
        return f"{self.name}/{index}"

    def sample(self, index: int) -> Mapping[str, Any]:
        rng = np.random.default_rng([self.seed, index, *self.name.encode()])
        tokens = np.empty(LENGTH + 1, dtype=np.int64)
        if self.hard:
            tokens[:] = rng.integers(TEXT, VOCABULARY, size=LENGTH + 1)
        else:
            tokens[0] = rng.integers(TEXT)
            for t, choice in enumerate(rng.choice(len(SUCCESSORS), p=SUCCESSORS, size=LENGTH)):
                tokens[t + 1] = self.following[tokens[t], choice]
        return {
            "input_ids": tokens[:-1],
            "targets": tokens[1:],
            "document_ids": np.zeros(LENGTH, dtype=np.int32),
        }


def sources(seed: int) -> list[MarkovSource]:
    return [MarkovSource(name, seed) for name in SOURCES]


def loader(seed: int, part: int = 1, weights: Any = None) -> MixtureLoader:
    """The training stream; ``part`` 0 is what the warm weights have seen."""
    weights = weights or (WEIGHTS if part else WARM_WEIGHTS)
    # The warm weights are every rank's own computation: all of it on the same data.
    place = {} if part else {"rank": 0, "world_size": 1}
    return MixtureLoader(sources(seed), weights, BATCH, seed=1000 * part + seed, **place)


class World(HybridLMModule):
    """The model in training, with one switch for each fault that needs code of its own in the model.

    Attributes:
        armed: Whether a fault in the code is in force in this step. Faults set it; the modules that have one read it.
    """

    rate = 4e-3

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        config = HybridLMConfig(
            vocab_size=VOCABULARY,
            width=24,
            layers=2,
            ffn_width=48,
            attention_every=2,
            attention_head_dim=8,
            linear_head_dim=8,
            chunk_size=32,
            tie_embeddings=False,
        )
        super().__init__(config, AdamWCosine(learning_rate=self.rate, total_steps=2000, warmup_steps=20))
        self.seed, self.armed = seed, False
        self.warm: dict[str, Any] | None = None
        self.start = WARM_STEPS
        self.extra_loss: Any = None

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.extra_loss is None else loss + self.extra_loss(batch)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.make_optimizer()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.optimizer_config.optimizer(self)
        if self.warm is not None:
            state = copy.deepcopy(self.warm["optimizer"])
            fresh = optimizer.state_dict()
            for group, planned in zip(state["param_groups"], fresh["param_groups"], strict=True):
                group |= {k: planned[k] for k in ("lr", "eps", "betas")}
            optimizer.load_state_dict(state)
        return optimizer

    def share(self, step: int) -> float:
        return self.optimizer_config.share(step + self.start)


@lru_cache(maxsize=8)
def warmed(seed: int) -> dict[str, Any]:
    """Weights and moments after a short training, which every case of this seed starts from."""
    module = World(seed)
    module.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    optimizer = module.optimizer_config.optimizer(module)
    batches = iter(loader(seed, part=0))
    module.train()
    for step in range(WARM_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = module.rate * module.optimizer_config.share(step)
        optimizer.zero_grad()
        module.training_step(next(batches), step).backward()
        optimizer.step()
    return {"weights": copy.deepcopy(module.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}


def warm_world(seed: int) -> World:
    module = World(seed)
    module.warm = warmed(seed)
    module.load_state_dict(module.warm["weights"])
    return module


__all__ = [
    "BATCH",
    "IGNORED",
    "LENGTH",
    "TEXT",
    "VOCABULARY",
    "F",
    "Tensor",
    "World",
    "loader",
    "math",
    "nn",
    "warm_world",
]
