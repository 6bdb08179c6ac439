"""What a replay hears of single tokens: the loss of each, and how much the model itself expected.

A cross-entropy of torch is the place where logits and targets meet. The entropy of the prediction is the loss that the model
expects there. On data of a kind that it knows, its mean loss is close to that (a trained model is calibrated); where labels
contradict the inputs, the loss is far above it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class TokenLosses:
    """Losses of one micro-batch's tokens.

    Attributes:
        loss: Nats, flat, on the CPU; NaN where a target is ignored.
        entropy: What the model expected there, nats, likewise.
    """

    loss: Tensor
    entropy: Tensor

    def by_sample(self, batch_size: int) -> tuple[Tensor, Tensor] | None:
        """Loss and entropy as ``[batch, tokens]``; None where the tokens do not divide evenly."""
        if batch_size < 1 or self.loss.numel() % batch_size:
            return None
        return self.loss.view(batch_size, -1), self.entropy.view(batch_size, -1)


class CrossEntropies(TorchFunctionMode):
    """Listens to ``cross_entropy`` and ``nll_loss`` with class indices; changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._heard: list[TokenLosses] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy or func is F.nll_loss:
            self._listen(func, *args, **kwargs)
        return func(*args, **kwargs)

    @torch.no_grad()
    def _listen(self, func: Any, input: Tensor, target: Tensor, *_: Any, ignore_index: int = -100, **__: Any) -> None:
        if target.is_floating_point() or input.dim() < 2 or target.dim() != input.dim() - 1:
            return
        logs = input.detach().float()
        logs = logs.log_softmax(1) if func is F.cross_entropy else logs
        known = target != ignore_index
        loss = -logs.gather(1, target.masked_fill(~known, 0).unsqueeze(1)).squeeze(1)
        entropy = -(logs.exp() * logs).nan_to_num().sum(1)
        nan = torch.full_like(loss, torch.nan)
        heard = [torch.where(known, x, nan).flatten().cpu() for x in (loss, entropy)]
        self._heard.append(TokenLosses(*heard))

    def result(self) -> TokenLosses | None:
        """The call with the most targets: a model's auxiliary losses are smaller."""
        return max(self._heard, key=lambda h: h.loss.numel(), default=None)
