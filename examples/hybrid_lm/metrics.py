"""Validation metric: the geometric mean of the probability that the model gives to the true next token."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class GeometricMeanTokenProbability(Metric):
    """``exp(-mean nats)`` over all supervised tokens, of all batches and all ranks.

    Every token counts alike, whatever batch or rank it is on, so neither a ragged last batch nor an uneven split over ranks
    moves the result. The sums are float64: at 2 nats a token a float32 sum is deaf to single tokens from 3e7 on.

    Example:
        >>> metric = GeometricMeanTokenProbability()
        >>> metric.update(torch.tensor(600.0), torch.tensor(300))  # 300 tokens at 2 nats
        >>> metric.update(torch.tensor(250.0), torch.tensor(100))  # 100 tokens at 2.5 nats
        >>> round(metric.compute().item(), 4)  # exp(-850 / 400)
        0.1194
    """

    higher_is_better = True
    is_differentiable = False
    full_state_update = False

    nats: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, nats: Tensor, tokens: Tensor) -> None:
        """Add losses in nats, summed over supervised tokens, and the numbers of these tokens; of any equal shape."""
        self.nats += nats.detach().double().sum()
        self.tokens += tokens.sum()

    def compute(self) -> Tensor:
        """The probability; NaN where nothing was supervised."""
        return torch.exp(-self.nats / self.tokens)
