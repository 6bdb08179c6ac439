"""Validation metric: the geometric mean of the probability that the model gives to the true next token."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class GeometricMeanTokenProbability(Metric):
    """``exp(-mean nats)`` over all supervised tokens, of all batches and all ranks.

    Each batch counts by its supervised tokens, so neither a ragged last batch nor an uneven split over ranks moves the
    result. The sums are float64: 1e9 tokens at 2 nats would stall a float32 sum.

    Example:
        >>> metric = GeometricMeanTokenProbability()
        >>> metric.update(torch.tensor(2.0), torch.tensor(300))
        >>> metric.update(torch.tensor(2.5), torch.tensor(100))
        >>> round(metric.compute().item(), 4)  # exp(-2.125)
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

    def update(self, mean_nats: Tensor, tokens: Tensor) -> None:
        """Add a batch (or one value per sample): its mean loss in nats and its number of supervised tokens.

        Entries without tokens are left out: their mean is 0/0.
        """
        nats = mean_nats.detach().double() * tokens
        self.nats += nats.masked_fill(tokens == 0, 0.0).sum()
        self.tokens += tokens.sum()

    def compute(self) -> Tensor:
        """The probability; NaN where nothing was supervised."""
        return torch.exp(-self.nats / self.tokens)
