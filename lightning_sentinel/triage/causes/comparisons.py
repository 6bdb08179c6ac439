"""The five comparisons that precede a hypothesis."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...record import StepRecord
from ..ladder import Ladder
from ..layers import GRADIENT_FACTOR, first_deviation
from ..replay import ReplayResult
from ..window import tensors

APART = 0.5  # relative difference of root mean squares from which two layers are apart


def unmeasured(record: StepRecord, why: str) -> dict[str, Any]:
    """The five comparisons of a verdict that rests on the findings: what the record holds, and why the rest is missing.

    Args:
        record: The step's.
        why: A sentence.
    """
    return {
        "token_level_losses": why,
        "rank_values": {
            "loss_nats": [float(x) for x in record.column("loss_nats")[:64]],
            "worst_rank": record.worst_rank,
        },
        "gradient_norms": {"live": [float(x) for x in record.column("grad_norm")[:64]]},
        "activation_norms": why,
        "input_manifest": {"sample_ids": list(record.sample_ids)[:64]} if record.sample_ids else why,
    }


class Comparisons(Ladder):
    """Token-level losses, per-rank values, gradient norms, activation norms, the input manifest."""

    def comparisons(self) -> dict[str, Any]:
        """The five comparisons that precede a hypothesis: each with its values, or why it is missing."""
        worst = self.record.worst_rank
        unrun = self._why_no_replay()
        main = self.main
        mine: dict[str, Any] = {"token_level_losses": unrun, "activation_norms": unrun}
        replayed = math.nan
        if main is not None:
            replayed = main.grad_norm
            try:
                mine["token_level_losses"] = self._token_losses(main)
            except Exception as failure:  # what the user's loss was given may be of any shape
                mine["token_level_losses"] = f"not available: {type(failure).__name__}: {failure}"
            mine["activation_norms"] = main.activation_rms or "not known: the module has no blocks to watch"
        try:
            mine["input_manifest"] = self._manifest()
        except Exception as failure:  # the user's batch: it may hold anything
            mine["input_manifest"] = f"not available: {type(failure).__name__}: {failure}"
        mine["replayed_grad_norm"] = replayed
        mine["rms"] = {} if main is None else main.activation_rms
        mine["healthy_rms"] = self.healthy_rms
        # In the order of the backward, in which a damage of gradients spreads.
        mine["gradient_rms"] = {} if main is None else dict(reversed(main.gradient_rms.items()))
        everyone = self.peers.gather(mine)
        shown = everyone[worst]
        return {
            "token_level_losses": shown["token_level_losses"],
            "rank_values": {
                "loss_nats": [float(x) for x in self.record.column("loss_nats")[:64]],
                "level_before": [float(x) for x in self.base[:64]],
                "worst_rank": worst,
                "seconds": {
                    name: [float(x) for x in self.record.column(f"{name}_seconds")[:64]]
                    for name in ("step", "data", "wait")
                },
                "topology": {
                    "ranks": self.trainer.world_size,
                    "nodes": self.trainer.num_nodes,
                    "strategy": type(self.trainer.strategy).__name__,
                },
            },
            "gradient_norms": {
                "live": [float(x) for x in self.record.column("grad_norm")[:64]],
                "rms_by_layer": shown["gradient_rms"] or unrun,
                "replayed": shown["replayed_grad_norm"],
                "before": float(np.median([r.grad_norm for r in self.context.history]))
                if self.context.history
                else math.nan,
            },
            "activation_norms": shown["activation_norms"],
            "first_deviating_layer": first_deviation([m["activation_norms"] for m in everyone], worst),
            "first_deviating_gradient": first_deviation(
                [m["gradient_rms"] or unrun for m in everyone], worst, GRADIENT_FACTOR
            ),
            "first_layer_apart_from_a_healthy_batch": _first_apart(shown["rms"], shown["healthy_rms"]),
            "input_manifest": shown["input_manifest"],
        }

    def _why_no_replay(self) -> str:
        """Why the step was not computed again, where it was not."""
        for experiment in self.experiments:
            if experiment.name in ("replay", "armed replay"):
                return f"not measured: {experiment.result}: {experiment.detail.get('reason', 'see the experiments')}"
        window = self.context.window
        if window is None or not window.micro_batches:
            return "not measured: the step was not captured"
        return "not measured: the verdict needed no replay"

    def _token_losses(self, main: ReplayResult) -> Any:
        """Losses of samples, and of the tokens with the highest loss, as far as the replay has heard them."""
        samples = [[round(x, 6) for x in s.tolist()] for s in main.sample_losses if s is not None]
        tokens = []
        for index, heard in zip(main.micro_batches, main.tokens, strict=False):
            if heard is not None and bool(heard.loss.isfinite().any()):
                top = heard.loss.nan_to_num(nan=-math.inf).topk(min(8, heard.loss.numel()))
                quantiles = heard.quantiles([0.5, 0.9, 0.99])
                tokens.append(
                    {
                        "micro_batch": index,
                        "heard": heard.heard,
                        "median_p90_p99": [round(q, 6) for q in quantiles],
                        "mean_entropy": round(float(heard.entropy.nanmean()), 6),
                        "highest": [
                            (i, round(x, 6)) for x, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)
                        ],
                    }
                )
        why = main.no_tokens or "not available: no loss of a token is finite"
        if not samples and not tokens:
            return why
        return {"samples": samples, "tokens": tokens or why}

    def _manifest(self) -> Any:
        """Ids, hash, shapes and integer ranges of this rank's micro-batches; never their content."""
        window = self.context.window
        if window is None or not window.micro_batches:
            return "not available: the step was not captured"
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


def _first_apart(now: dict[str, float], healthy: dict[str, float]) -> str:
    """First watched module, in forward order, whose activations are far from those of a healthy batch on the same state."""
    if not now or not healthy:
        return "not known: no healthy batch was computed on this state"
    for path, rms in now.items():
        before = healthy.get(path)
        if before is not None and not abs(rms - before) <= APART * max(abs(before), 1e-12):
            return f"{path}: {rms:.4g}, in a healthy batch {before:.4g}"
    return "none"
