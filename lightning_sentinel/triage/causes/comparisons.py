"""The five comparisons that precede a hypothesis."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ladder import Ladder
from ..layers import first_deviation
from ..window import tensors


class Comparisons(Ladder):
    """Token-level losses, per-rank values, gradient norms, activation norms, the input manifest."""

    def comparisons(self) -> dict[str, Any]:
        """The five comparisons that precede a hypothesis: each with its values, or why it is missing."""
        worst = self.record.worst_rank
        unrun = "not measured: the verdict needed no replay" if self.trace is None else "the armed replay measures none"
        main = self.main
        mine: dict[str, Any] = {"token_level_losses": unrun, "activation_norms": unrun}
        replayed = math.nan
        if main is not None:
            replayed = main.grad_norm
            known = [[round(x, 6) for x in s.tolist()] for s in main.sample_losses if s is not None]
            mine["token_level_losses"] = known or "not known: training_step sets no module.sample_loss_nats"
            mine["activation_norms"] = main.activation_rms or "not known: the module has no blocks to watch"
        try:
            mine["input_manifest"] = self._manifest()
        except Exception as failure:  # the user's batch: it may hold anything
            mine["input_manifest"] = f"not available: {type(failure).__name__}: {failure}"
        mine["replayed_grad_norm"] = replayed
        everyone = self.peers.gather(mine)
        shown = everyone[worst]
        return {
            "token_level_losses": shown["token_level_losses"],
            "rank_values": {
                "loss_nats": [float(x) for x in self.record.column("loss_nats")[:64]],
                "level_before": [float(x) for x in self.base[:64]],
                "worst_rank": worst,
            },
            "gradient_norms": {
                "live": [float(x) for x in self.record.column("grad_norm")[:64]],
                "replayed": shown["replayed_grad_norm"],
                "before": float(np.median([r.grad_norm for r in self.context.history]))
                if self.context.history
                else math.nan,
            },
            "activation_norms": shown["activation_norms"],
            "first_deviating_layer": first_deviation([m["activation_norms"] for m in everyone], worst),
            "input_manifest": shown["input_manifest"],
        }

    def _manifest(self) -> Any:
        """Ids, hash, shapes and integer ranges of this rank's micro-batches; never their content."""
        window = self.context.window
        if window is None or not window.micro_batches:
            return "not captured"
        from ...data.identity import batch_hash

        return [
            {
                "sample_ids": list(micro.sample_ids)[:64],
                "hash": batch_hash(micro.batch),
                "tensors": [_described(t) for t in tensors(micro.batch)][:16],
            }
            for micro in window.micro_batches[:8]
        ]


def _described(tensor: Tensor) -> dict[str, Any]:
    described: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if tensor.numel() and not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool:
        described |= {"min": int(tensor.min()), "max": int(tensor.max())}
    return described
