"""The training of the example: loss, validation, optimizer and schedule as a LightningModule."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import probes  # noqa: F401 - what DeepProbe measures in this model's layers
from .metrics import GeometricMeanTokenProbability
from .model import HybridLM, HybridLMConfig, at_least_float32

IGNORED = -100
"""Target of a token that carries no loss."""


@dataclass(frozen=True, kw_only=True)
class AdamWCosine:
    """AdamW with a linear warm-up and a cosine down to a share of the peak rate.

    Attributes:
        learning_rate: Peak rate.
        total_steps: Steps until the cosine has come down; the rate stays there afterwards.
        warmup_steps: Steps of linear rise; the first step already uses ``learning_rate / warmup_steps``.
        final_share: Rate at the end, as a share of the peak.
        weight_decay: Of matrices; norms, biases, decays and the convolution's taps are not decayed.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        fused: One kernel for all parameters, which can also skip an update on the device; None leaves the choice to torch.
    """

    learning_rate: float
    total_steps: int
    warmup_steps: int = 20
    final_share: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    fused: bool | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.total_steps < 1:
            raise ValueError(
                f"total_steps must be at least 1, got {self.total_steps}; set it when the Trainer has no max_steps"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}")
        if not 0 <= self.final_share <= 1:
            raise ValueError(f"final_share must be in [0, 1], got {self.final_share}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {tuple(self.betas)}")

    def share(self, step: int) -> float:
        """Rate of a step (from 0) as a share of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.final_share + (1 - self.final_share) * 0.5 * (1 + math.cos(math.pi * progress))

    def optimizer(self, module: nn.Module) -> torch.optim.AdamW:
        """AdamW over the module's parameters: the decayed matrices, then the rest."""
        decayed, rest = decay_groups(module)
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": self.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            lr=self.learning_rate,
            betas=tuple(self.betas),
            eps=self.eps,
            fused=self.fused,
        )


def decay_groups(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights of linear maps and embeddings, which weight decay shrinks, and all other parameters."""
    matrices = {m.weight for m in module.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    parameters = list(module.parameters())
    return [p for p in parameters if p in matrices], [p for p in parameters if p not in matrices]


class HybridLMModule(L.LightningModule):
    """Next-token training of a :class:`HybridLM`.

    A batch is a dict with ``input_ids`` and ``targets`` ``[B, T]`` (already shifted; -100 carries no loss) and
    ``document_ids`` ``[B, T]``.

    Example:
        >>> module = HybridLMModule(
        ...     model=HybridLMConfig(vocab_size=259, width=32, layers=4, ffn_width=64),
        ...     optimizer=AdamWCosine(learning_rate=3e-3, total_steps=200),
        ... )
        >>> tokens = torch.arange(64).view(2, 32)
        >>> batch = {"input_ids": tokens, "targets": tokens + 1, "document_ids": torch.zeros_like(tokens)}
        >>> nats, supervised = module.sample_losses(batch)
        >>> nats.shape, supervised.tolist()
        (torch.Size([2]), [32, 32])

    Logs:
        ======================== ============================================================
        ``train/loss_nats``      mean loss over the batch's supervised tokens of this rank
        ``val/loss_nats``        the same over the validation set
        ``val/token_probability`` ``exp(-loss)`` over the validation set, of all ranks
        ======================== ============================================================

    Args:
        model: Sizes of the model.
        optimizer: Optimizer and schedule.

    Attributes:
        sample_loss_nats: Mean loss of each sample of the last batch, ``[B]``, detached; NaN for one without supervision.
        sample_tokens: Supervised tokens of each sample of the last batch, ``[B]``.
    """

    def __init__(self, model: HybridLMConfig, optimizer: AdamWCosine) -> None:
        super().__init__()
        self.save_hyperparameters({"model": asdict(model), "optimizer": asdict(optimizer)})
        self.model = HybridLM(model)
        self.optimizer_config = optimizer
        self.token_probability = GeometricMeanTokenProbability()
        self.sample_loss_nats: Tensor | None = None
        self.sample_tokens: Tensor | None = None

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def sample_losses(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Loss of each sample in nats, summed over its supervised tokens, and their number; ``[B]`` each."""
        logits = at_least_float32(self.model(batch["input_ids"], batch["document_ids"]))
        targets = batch["targets"]
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
        return nats.view_as(targets).sum(1), (targets != IGNORED).sum(1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        nats, tokens = self.sample_losses(batch)
        self.sample_loss_nats, self.sample_tokens = nats.detach() / tokens, tokens
        # A batch without supervision is 0/0. That it comes out as NaN is right: there is nothing to learn from it, and
        # a zero in its place would count as a perfect prediction.
        loss = nats.sum() / tokens.sum()
        self.log("train/loss_nats", loss.detach(), prog_bar=True, batch_size=len(tokens))
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.token_probability.update(*self.sample_losses(batch))

    def on_validation_epoch_end(self) -> None:
        probability = self.token_probability.compute()
        self.token_probability.reset()
        # Already reduced over the ranks.
        self.log("val/token_probability", probability, prog_bar=True)
        self.log("val/loss_nats", -probability.log())

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.optimizer_config.optimizer(self)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.optimizer_config.share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
