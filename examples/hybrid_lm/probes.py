"""What ``lightning_sentinel.DeepProbe`` measures in the layers of this model.

The attention logits need no probe of their own: ``scaled_dot_product_attention`` is seen wherever it is called. The rest is
registered by class, as you would for modules of your own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sentinel.probes import register_probe

from .gated_delta import ChunkMasks, chunked
from .model import FeedForward, GatedDeltaNet, Layout, RMSNorm, at_least_float32

SAMPLES = 2  # sequences whose recurrent state is computed again
STATE_TOKENS = 512  # of these, the last so many tokens: what came before has faded

FORGETS, KEEPS = 0.01, 0.9999  # decay of a token below which a head remembers nothing, above which it forgets nothing
CLOSED = 0.01  # write gate below which a token leaves no mark
SILENT = 1e-3  # magnitude of a gate that lets nothing through


@register_probe(RMSNorm)
def norm(module: RMSNorm, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> dict[str, Tensor]:
    """How large the input has become that the norm takes back."""
    x = at_least_float32(args[0])
    return {"input_rms": x.square().mean().sqrt(), "input_max": x.abs().amax()}


@register_probe(FeedForward)
def feed_forward(
    module: FeedForward, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor
) -> dict[str, Tensor]:
    """The gate of the feed-forward: how much of it is shut, and units that are shut for every token."""
    gate = F.silu(module.gate(args[0])).flatten(0, -2)
    shut = gate.abs() < SILENT
    return {
        "gate_rms": at_least_float32(gate).square().mean().sqrt(),
        "gate_shut": shut.double().mean(),
        "gate_dead_units": shut.all(0).double().mean(),
        "output_rms": at_least_float32(output).square().mean().sqrt(),
    }


@register_probe(GatedDeltaNet)
def gated_delta(
    module: GatedDeltaNet, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor
) -> dict[str, Tensor]:
    """Decay and write gate of each head, and the size of its state at the end of the sequence; ``[H]`` each."""
    x, layout = args
    _, key, value, log_decay, beta = module.rule_inputs(x, layout)
    decay, heads = log_decay.exp(), tuple(range(log_decay.dim() - 1))
    gate = F.silu(module.gate(x)).unflatten(-1, (-1, module.head_dim))
    state = final_state(key, value, log_decay, beta, layout)
    return {
        "decay_mean": decay.mean(heads),
        "decay_forgets": (decay < FORGETS).double().mean(heads),
        "decay_keeps": (decay > KEEPS).double().mean(heads),
        "log_decay_min": log_decay.amin(heads),
        "write_mean": beta.mean(heads),
        "write_closed": (beta < CLOSED).double().mean(heads),
        "write_dead": (beta < CLOSED).all(0).all(0).double(),
        "output_gate_shut": (gate.abs() < SILENT).double().mean((0, 1, 3)),
        "state_norm": torch.linalg.vector_norm(state, dim=(-2, -1)).mean(0),
    }


def final_state(key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, layout: Layout) -> Tensor:
    """State after the last token of some sequences, ``[B, H, D_k, D_v]``, from what their last tokens have written.

    The rule is read out rather than written anew: after the sequence come ``D_k`` tokens that neither fade nor write, and
    whose queries are the unit vectors. What they read are the rows of the state.
    """
    start = max(0, key.shape[1] - STATE_TOKENS)
    key, value, log_decay, beta = (t[:SAMPLES, start:] for t in (key, value, log_decay, beta))
    size = key.shape[-1]

    def then_zeros(t: Tensor) -> Tensor:
        return torch.cat([t, t.new_zeros(t.shape[0], size, *t.shape[2:])], dim=1)

    units = torch.eye(size, dtype=key.dtype, device=key.device) * size**0.5
    query = torch.cat([torch.zeros_like(key), units[None, :, None].expand(len(key), -1, key.shape[2], -1)], dim=1)
    same_as_before = layout.attention_mask[:SAMPLES, 0].diagonal(-1, 1, 2)[:, start:]
    documents = F.pad((~same_as_before).cumsum(1), (1, size), mode="replicate")
    masks = ChunkMasks.from_documents(documents, layout.chunk_masks.into.shape[-1])
    read = chunked(query, then_zeros(key), then_zeros(value), then_zeros(log_decay), then_zeros(beta), masks)
    return read[:, -size:].transpose(1, 2)
