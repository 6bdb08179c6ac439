"""A hybrid language model: three Gated DeltaNet layers to one layer of softmax attention, on packed documents.

The residual stream is never normalised; each sublayer reads it through its own RMSNorm and adds to it:

    h = h + mixer(mixer_norm(h))        Gated DeltaNet, or attention in every fourth layer
    h = h + ffn(ffn_norm(h))            SiLU-gated feed-forward

A sequence holds several documents, numbered by ``document_ids``. Nothing crosses a document boundary: attention is masked,
the short convolution and the state of the delta rule start empty. What that means for each kind of layer is worked out once
per forward (:class:`Layout`).

Example:
    >>> model = HybridLM(HybridLMConfig(vocab_size=259, width=32, layers=4, ffn_width=64, linear_value_heads=2))
    >>> [type(layer.mixer).__name__ for layer in model.layers]
    ['GatedDeltaNet', 'GatedDeltaNet', 'GatedDeltaNet', 'Attention']
    >>> model(torch.zeros(2, 48, dtype=torch.int64)).shape
    torch.Size([2, 48, 259])
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gated_delta import ChunkMasks, chunked


@dataclass(frozen=True, kw_only=True)
class HybridLMConfig:
    """Sizes of a :class:`HybridLM`.

    Attributes:
        vocab_size: Number of token ids.
        width: Size of the residual stream.
        layers: Number of blocks; block ``i`` (from 0) is attention where ``(i + 1) % attention_every == 0``.
        ffn_width: Inner size of the feed-forward.
        attention_every: One attention layer in so many layers.
        attention_heads: Query heads of the attention layers.
        attention_kv_heads: Key and value heads of the attention layers; each serves an equal share of the query heads.
        attention_head_dim: Size of an attention head.
        rotary_fraction: Share of an attention head that carries the rotary position.
        rotary_base: Base of the rotary wavelengths.
        linear_key_heads: Query and key heads of the Gated DeltaNet layers; each serves an equal share of the value heads.
        linear_value_heads: Value heads of the Gated DeltaNet layers.
        linear_head_dim: Size of a Gated DeltaNet head; the state of one head is ``linear_head_dim ** 2`` numbers.
        conv_size: Taps of the short convolution before the delta rule.
        chunk_size: Tokens in a chunk of the chunked delta rule; changes the speed and the rounding, nothing else.
        tie_embeddings: Use the embedding as the output matrix.
        norm_eps: Added to the mean square in every RMSNorm.
        init_std: Standard deviation of the initial weights; what writes to the residual stream gets
            ``init_std / sqrt(2 * layers)``.
    """

    vocab_size: int
    width: int
    layers: int
    ffn_width: int
    attention_every: int = 4
    attention_heads: int = 2
    attention_kv_heads: int = 2
    attention_head_dim: int = 16
    rotary_fraction: float = 0.5
    rotary_base: float = 10_000.0
    linear_key_heads: int = 2
    linear_value_heads: int = 2
    linear_head_dim: int = 16
    conv_size: int = 4
    chunk_size: int = 32
    tie_embeddings: bool = True
    norm_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name, kind in self.__annotations__.items():
            value = getattr(self, name)
            if kind == "int" and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("norm_eps", "init_std", "rotary_base"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for heads, shared in (
            ("attention_heads", "attention_kv_heads"),
            ("linear_value_heads", "linear_key_heads"),
        ):
            if getattr(self, heads) % getattr(self, shared):
                raise ValueError(
                    f"{heads} must be a multiple of {shared}={getattr(self, shared)}, got {getattr(self, heads)}"
                )
        if not 0 <= self.rotary_fraction <= 1:
            raise ValueError(f"rotary_fraction must be in [0, 1], got {self.rotary_fraction}")
        if self.rotary_dim % 2:
            raise ValueError(
                "rotary_fraction must leave an even number of rotary dimensions, got"
                f" {self.rotary_fraction} x attention_head_dim={self.attention_head_dim} -> {self.rotary_dim}"
            )

    @property
    def rotary_dim(self) -> int:
        """Dimensions of an attention head that carry the rotary position."""
        return int(self.attention_head_dim * self.rotary_fraction)

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_every == 0


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a packed batch stand, worked out once per forward and read by every layer.

    Attributes:
        attention_mask: True where query ``i`` may see key ``j``: not later, same document; ``[B, 1, T, T]``.
        conv_masks: For each lag 1, 2 ... of the short convolution, 1 where the token so far back is of the same document,
            else 0; ``[B, T, 1]`` each.
        chunk_masks: Decays that the chunked delta rule cuts.
        rotary: Cosine and sine of the rotary angles, ``[T, rotary_dim]`` each. Only distances matter, so the positions
            run on through document boundaries.
    """

    attention_mask: Tensor
    conv_masks: tuple[Tensor, ...]
    chunk_masks: ChunkMasks
    rotary: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, document_ids: Tensor, config: HybridLMConfig, dtype: torch.dtype) -> Layout:
        length, device = document_ids.shape[1], document_ids.device
        not_later = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        same = document_ids[:, :, None] == document_ids[:, None, :]
        padded = F.pad(document_ids, (config.conv_size - 1, 0), value=-1)
        conv_masks = tuple(
            (padded[:, config.conv_size - 1 - lag :][:, :length] == document_ids).unsqueeze(-1).to(dtype)
            for lag in range(1, config.conv_size)
        )
        frequency = config.rotary_base ** -(torch.arange(0, config.rotary_dim, 2, device=device) / config.rotary_dim)
        angle = torch.outer(torch.arange(length, device=device), frequency).repeat(1, 2)
        return cls(
            attention_mask=(same & not_later).unsqueeze(1),
            conv_masks=conv_masks,
            chunk_masks=ChunkMasks.from_documents(document_ids, config.chunk_size),
            rotary=(angle.cos().to(dtype), angle.sin().to(dtype)),
        )


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32 if it is half precision, unchanged if it is wider (a replay in float64 stays in float64)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 at least; keeps the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


class FeedForward(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, config: HybridLMConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ShortConv(nn.Module):
    """Depthwise causal convolution over a few tokens that never reaches into the document before."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, channels))  # row = lag in tokens

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        length, taps = x.shape[1], self.weight.shape[0]
        padded = F.pad(x, (0, 0, taps - 1, 0))
        out = x * self.weight[0]
        for lag, same_document in enumerate(layout.conv_masks, start=1):
            before = padded[:, taps - 1 - lag :][:, :length]
            out = out + before * same_document * self.weight[lag]
        return out


class GatedDeltaNet(nn.Module):
    """Linear attention whose state forgets by a learned decay and is corrected by the delta rule.

    The rule itself runs in float32 at least, whatever the precision around it: its state sums over a whole document.
    """

    def __init__(self, config: HybridLMConfig) -> None:
        super().__init__()
        self.key_heads, self.value_heads = config.linear_key_heads, config.linear_value_heads
        self.head_dim = config.linear_head_dim
        key_width, value_width = self.key_heads * self.head_dim, self.value_heads * self.head_dim
        self.qkv = nn.Linear(config.width, 2 * key_width + value_width, bias=False)
        self.gate = nn.Linear(config.width, value_width, bias=False)
        self.beta = nn.Linear(config.width, self.value_heads, bias=False)
        self.decay = nn.Linear(config.width, self.value_heads, bias=False)
        self.conv = ShortConv(2 * key_width + value_width, config.conv_size)
        # Per head: log decay = -exp(log_rate) * softplus(decay + decay_bias).
        self.log_rate = nn.Parameter(torch.empty(self.value_heads))
        self.decay_bias = nn.Parameter(torch.empty(self.value_heads))
        self.out_norm = RMSNorm(self.head_dim, config.norm_eps)
        self.out = nn.Linear(value_width, config.width, bias=False)

    def rule_inputs(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value ``[B, T, H, D]``, log decay and beta ``[B, T, H]`` of the delta rule."""
        mixed = at_least_float32(F.silu(self.conv(self.qkv(x), layout)))
        query, key, value = mixed.unflatten(-1, (-1, self.head_dim)).split(
            [self.key_heads, self.key_heads, self.value_heads], dim=-2
        )
        query, key = unit_length(query), unit_length(key)
        if self.key_heads != self.value_heads:
            query, key = (t.repeat_interleave(self.value_heads // self.key_heads, dim=2) for t in (query, key))
        rate = at_least_float32(self.log_rate).exp()
        step = at_least_float32(self.decay(x)) + self.decay_bias
        # Flat, so that its gradient is contiguous: from a strided one, torch 2.13's softplus_backward makes a strided result
        # where it tells compilers of a contiguous one, and their views of it fail.
        log_decay = -rate * F.softplus(step.flatten()).view_as(step)
        return query, key, value, log_decay, at_least_float32(self.beta(x)).sigmoid()

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        inputs = self.rule_inputs(x, layout)
        with without_autocast(x.device.type):
            read = chunked(*inputs, layout.chunk_masks)
        gate = F.silu(self.gate(x)).unflatten(-1, (-1, self.head_dim))
        return self.out((self.out_norm(read) * gate).flatten(-2))


def without_autocast(device_type: str) -> AbstractContextManager[None]:
    """Matrix products in the dtype of their inputs, also inside autocast."""
    if not torch.amp.is_autocast_available(device_type):  # the meta device has none
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def unit_length(x: Tensor) -> Tensor:
    """``x`` scaled to length 1 over the last dimension; zeros stay zeros."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class Attention(nn.Module):
    """Causal softmax attention with normed queries and keys, rotary positions and an output gate."""

    def __init__(self, config: HybridLMConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.attention_heads,
            config.attention_kv_heads,
            config.attention_head_dim,
        )
        self.query = nn.Linear(config.width, self.heads * self.head_dim, bias=False)
        self.key = nn.Linear(config.width, self.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.width, self.kv_heads * self.head_dim, bias=False)
        self.gate = nn.Linear(config.width, self.heads * self.head_dim, bias=False)
        self.query_norm = RMSNorm(self.head_dim, config.norm_eps)
        self.key_norm = RMSNorm(self.head_dim, config.norm_eps)
        self.out = nn.Linear(self.heads * self.head_dim, config.width, bias=False)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query = rotate(self.query_norm(query), layout.rotary).to(value.dtype)
        key = rotate(self.key_norm(key), layout.rotary).to(value.dtype)
        seen = F.scaled_dot_product_attention(
            query, key, value, attn_mask=layout.attention_mask, enable_gqa=self.heads != self.kv_heads
        )
        return self.out(seen.transpose(1, 2).flatten(-2) * self.gate(x).sigmoid())


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first ``rotary_dim`` numbers of each head ``[B, H, T, D]`` by the token's position."""
    cos, sin = rotary
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


class Block(nn.Module):
    """One layer: a mixer over tokens, then a feed-forward, each behind its own norm."""

    def __init__(self, config: HybridLMConfig, layer: int) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.width, config.norm_eps)
        self.mixer = Attention(config) if config.is_attention(layer) else GatedDeltaNet(config)
        self.ffn_norm = RMSNorm(config.width, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), layout)
        return x + self.ffn(self.ffn_norm(x))


class HybridLM(nn.Module):
    """The language model; see the module's docstring."""

    def __init__(self, config: HybridLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        std = self.config.init_std
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                writes_residual = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=std / math.sqrt(2 * self.config.layers) if writes_residual else std)
            elif isinstance(module, ShortConv):
                nn.init.uniform_(module.weight, -(module.weight.shape[0] ** -0.5), module.weight.shape[0] ** -0.5)
            elif isinstance(module, GatedDeltaNet):
                # Heads remember from one token to about a thousand: rate 1 to 16, step 0.001 to 0.1 (as in Mamba-2).
                module.log_rate.uniform_(1, 16).log_()
                step = module.decay_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
                step.add_(torch.log(-torch.expm1(-step)))  # the inverse of softplus

    def forward(self, input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Logits ``[B, T, vocab_size]`` for the token after each of ``input_ids`` ``[B, T]``.

        ``document_ids`` ``[B, T]`` rises at each document boundary; without it a sequence is one document.
        """
        if document_ids is None:
            document_ids = torch.zeros_like(input_ids)
        x = self.embedding(input_ids)
        layout = Layout.of(document_ids, self.config, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, layout)
        return self.head(self.norm(x))
