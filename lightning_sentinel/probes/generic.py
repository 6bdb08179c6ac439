"""Built-in probes: torch's own modules, and calls of attention and cross-entropy wherever they stand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .registry import register_probe

Values = dict[str, Tensor]

SAMPLES = 2  # sequences whose attention logits are computed again
QUERIES = 256  # of these, positions spread evenly over the sequence
TOKENS = 16_384  # targets whose loss is computed again, spread evenly over the micro-batch
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99, 1.0)

SILENT = 1e-3  # a gate whose magnitude is below this lets nothing through


def once(measure: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Measure each tensor once, however many modules it goes through, until it is gone or written to."""
    known: MutableMapping[Tensor, tuple[int, Tensor]] = WeakIdKeyDictionary()

    @wraps(measure)
    def measured(x: Tensor) -> Tensor:
        found = known.get(x)
        if found is None or found[0] != x._version:
            found = known[x] = (x._version, measure(x))
        return found[1]

    return measured


@once
def rms(x: Tensor) -> Tensor:
    """Root mean square over all elements, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dtype=wide)
    return norm / math.sqrt(max(x.numel(), 1))


@once
def largest(x: Tensor) -> Tensor:
    """Largest magnitude; NaN if there is one."""
    if not x.numel():
        return x.new_zeros(())
    low, high = x.aminmax()  # on a CPU a hundred times as fast as the norm of order infinity
    return torch.maximum(high, -low)


def share(where: Tensor) -> Tensor:
    """Share of True."""
    return where.double().mean()


def spread_evenly(length: int, count: int, device: torch.device) -> Tensor:
    """At most ``count`` places of ``length``, the last one included."""
    if length <= count:
        return torch.arange(length, device=device)
    return torch.linspace(0, length - 1, count, device=device).round().long()


def attention_values(scores: Tensor) -> Values:
    """Largest logit and mean entropy of each head.

    Args:
        scores: Logits ``[B, H, Q, K]``, minus infinity where masked. Rows that are masked throughout count for nothing.
    """
    seen = torch.isfinite(scores)
    row = seen.any(-1)
    top = scores.masked_fill(~seen, -math.inf).amax((0, 2, 3))
    probability = scores.masked_fill(~row.unsqueeze(-1), 0.0).softmax(-1)
    nats = torch.special.entr(probability).sum(-1)
    entropy = (nats * row).sum((0, 2)) / row.sum((0, 2)).clamp(min=1)
    return {"logit_max": top, "entropy_nats": entropy, "masked_rows": share(~row)}


def attention_scores(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, grouped: bool
) -> Tensor | None:
    """Logits ``[B, H, Q, K]`` of some queries in float32, from the arguments of ``scaled_dot_product_attention``."""
    if query.dim() < 3:
        return None
    if query.dim() == 3:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
        mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
    query, key = query.flatten(0, -4), key.flatten(0, -4)
    _, heads, length, size = query.shape
    places = spread_evenly(length, QUERIES, query.device)
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], length, key.shape[-2]) if mask.dim() >= 2 else mask
        while mask.dim() < 4:
            mask = mask.unsqueeze(0)
        mask = mask.flatten(0, -4)[:SAMPLES, :, places]
    q, k = query[:SAMPLES, :, places].float(), key[:SAMPLES].float()
    if grouped and k.shape[1] != heads:
        k = k.repeat_interleave(heads // k.shape[1], dim=1)
    scores = q @ k.transpose(-1, -2) * (size**-0.5 if scale is None else scale)
    if is_causal:
        later = torch.arange(k.shape[-2], device=k.device) > places.unsqueeze(-1)
        scores = scores.masked_fill(later, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask.float()
    return scores


def token_losses(logits: Tensor, targets: Tensor, ignore_index: int) -> Values:
    """Quantiles of the single targets' losses in nats, over those that carry loss.

    Args:
        logits: ``[N, C]`` or ``[N, C, ...]``.
        targets: Class indices ``[N]`` or ``[N, ...]``.
        ignore_index: Target without loss.
    """
    flat, wanted = logits.movedim(1, -1).reshape(-1, logits.shape[1]), targets.reshape(-1)
    places = spread_evenly(len(wanted), TOKENS, logits.device)
    flat, wanted = flat[places], wanted[places]
    nats = F.cross_entropy(flat.float(), wanted, ignore_index=ignore_index, reduction="none")
    nats = torch.where(wanted == ignore_index, math.nan, nats)
    return {
        "loss_nats": nats.nanquantile(torch.tensor(QUANTILES, device=nats.device)),
        "targets": (wanted != ignore_index).sum(),
    }


# ----------------------------------------------------------------------------------------------------- torch's modules


@register_probe(nn.Linear)
def linear(module: nn.Linear, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> Values:
    return {"input_rms": rms(args[0]), "input_max": largest(args[0]), "output_max": largest(output)} if args else {}


@register_probe(nn.Embedding)
def embedding(module: nn.Embedding, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> Values:
    return {"output_rms": rms(output), "output_max": largest(output)}


@register_probe(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
def norm(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> Values:
    return {"input_rms": rms(args[0]), "input_max": largest(args[0])} if args else {}


@register_probe(nn.modules.batchnorm._BatchNorm)
def batch_norm(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> Values:
    values = norm(module, args, kwargs, output)
    if module.running_var is not None:
        values |= {"running_mean_max": largest(module.running_mean), "running_var_min": module.running_var.amin()}
    return values


@register_probe(nn.MultiheadAttention)
def multihead(module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Values:
    """Computes queries and keys again; biases added to the keys (``bias_k``, ``add_zero_attn``) are left out."""
    named = dict(zip(("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask"), args, strict=False))
    named |= kwargs
    query, key = named["query"], named["key"]
    if query.dim() == 2:
        query, key = (
            query.unsqueeze(1 if not module.batch_first else 0),
            key.unsqueeze(1 if not module.batch_first else 0),
        )
    if not module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    size = module.embed_dim
    wq, wk = (
        (module.in_proj_weight[:size], module.in_proj_weight[size : 2 * size])
        if module.in_proj_weight is not None
        else (module.q_proj_weight, module.k_proj_weight)
    )
    bias = module.in_proj_bias
    bq, bk = (None, None) if bias is None else (bias[:size], bias[size : 2 * size])
    q, k = (
        F.linear(x.to(w.dtype), w, b).reshape(*x.shape[:-1], module.num_heads, -1).transpose(1, 2)
        for x, w, b in ((query, wq, bq), (key, wk, bk))
    )
    mask, padding = named.get("attn_mask"), named.get("key_padding_mask")
    if mask is not None and mask.dim() == 3:
        mask = mask.view(-1, module.num_heads, *mask.shape[1:])
    scores = attention_scores(
        q, k, None if mask is None else _additive(mask), bool(named.get("is_causal")) and mask is None, None, False
    )
    assert scores is not None
    if padding is not None:
        scores = scores + _additive(padding.reshape(-1, padding.shape[-1]))[:SAMPLES, None, None]
    return attention_values(scores)


def _additive(mask: Tensor) -> Tensor:
    """A mask that is True where nothing may be seen, as what is added to the logits."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -math.inf)


@register_probe(nn.RNN, nn.LSTM, nn.GRU)
def recurrent(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Values:
    state = output[1][0] if isinstance(output[1], tuple) else output[1]
    values = {"state_norm": torch.linalg.vector_norm(state.float(), dim=-1).reshape(len(state), -1).mean(1)}
    if isinstance(output[1], tuple):
        values["cell_norm"] = torch.linalg.vector_norm(output[1][1].float(), dim=-1).reshape(len(state), -1).mean(1)
    return values


@register_probe(nn.ReLU, nn.SiLU, nn.GELU, nn.ELU, nn.LeakyReLU)
def activation(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> Values:
    units = output.reshape(-1, output.shape[-1]) if output.dim() > 1 else output.reshape(1, -1)
    silent = units.abs() < SILENT
    return {"silent": share(silent), "dead_units": share(silent.all(0)), "rms": rms(output)}


@register_probe(nn.Sigmoid, nn.Tanh, nn.Hardsigmoid)
def saturating(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> Values:
    low = -1.0 if isinstance(module, nn.Tanh) else 0.0
    return {"low": share(output < low + 1e-2), "high": share(output > 1.0 - 1e-2), "mean": output.float().mean()}
