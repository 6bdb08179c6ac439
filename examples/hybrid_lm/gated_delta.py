"""The gated delta rule: in chunks for training, token by token for checking.

Each head keeps a matrix ``S`` that maps keys to values. Token ``t`` first lets it fade, then corrects what it holds under
the key towards the token's value, then reads it:

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - k_t^T exp(g_t) S_{t-1}))^T
    o_t = (q_t / sqrt(d_k))^T S_t

``g <= 0`` is the log decay, ``0 <= beta <= 1`` the strength of the correction. ``S`` is empty at the start of every
document of a packed sequence.

**Chunks.** Inside a chunk the corrections ``u_t`` depend on each other, but linearly: ``(I + A) U = beta (V - K' S_0)``,
with ``K'`` the decayed keys and ``A`` strictly lower triangular. One triangular solve replaces the walk over tokens, and only
the state between chunks is sequential (Yang et al., "Gated Delta Networks", 2024, section 3.3).

**Decays are masked before ``exp``.** The decay from token ``j`` to ``i`` is ``exp(G_i - G_j)`` with ``G`` the running sum of
``g``. For ``j > i`` that difference is positive and its ``exp`` overflows as soon as some tokens forget hard. A mask put on
afterwards hides the inf in the forward, and the backward multiplies it by zero: NaN, in finite weights, on a healthy batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ChunkMasks:
    """Which decays between the tokens of a chunk exist at all, given the documents of a packed sequence.

    The sequence is cut into ``N`` chunks of ``C`` tokens (padded at the end). All masks are True where the decay is *cut*.

    Attributes:
        pairs: From token ``j`` to token ``i`` of one chunk: the future, or another document; ``[N, B, 1, C, C]``.
        into: From the end of the chunk before to token ``i``: another document; ``[N, B, 1, C]``.
        out_of: From token ``j`` to the end of its chunk: another document; ``[N, B, 1, C]``.
    """

    pairs: Tensor
    into: Tensor
    out_of: Tensor

    @classmethod
    def from_documents(cls, document_ids: Tensor, chunk_size: int) -> ChunkMasks:
        """Masks for document numbers ``[B, T]`` that rise at each document boundary."""
        padded = pad_to_chunks(document_ids, chunk_size, dim=1)
        chunks = padded.unflatten(1, (-1, chunk_size)).transpose(0, 1).unsqueeze(2)  # [N, B, 1, C]
        last = chunks[..., -1:]
        before = torch.cat([chunks[:1, ..., :1], last[:-1]])
        future = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=document_ids.device).triu(1)
        return cls(
            pairs=future | (chunks.unsqueeze(-1) != chunks.unsqueeze(-2)),
            into=chunks != before,
            out_of=chunks != last,
        )


def pad_to_chunks(x: Tensor, chunk_size: int, dim: int) -> Tensor:
    """``x`` with zeros appended along ``dim`` up to a multiple of ``chunk_size``."""
    missing = -x.shape[dim] % chunk_size
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x


def decay(log_decay: Tensor, cut: Tensor) -> Tensor:
    """``exp(log_decay)``, and 0 where ``cut``, whatever stands there."""
    return log_decay.masked_fill(cut, -torch.inf).exp()


def chunked(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, masks: ChunkMasks) -> Tensor:
    """The gated delta rule over whole chunks.

    Args:
        query: ``[B, T, H, D_k]``, used divided by ``sqrt(D_k)``.
        key: ``[B, T, H, D_k]``, of length 1 at most, or the rule does not contract.
        value: ``[B, T, H, D_v]``.
        log_decay: ``[B, T, H]``, at most 0.
        beta: ``[B, T, H]`` in [0, 1].
        masks: From :meth:`ChunkMasks.from_documents`; they also set the chunk size.

    Returns:
        What each token reads, ``[B, T, H, D_v]``.
    """
    length, chunk_size = query.shape[1], masks.into.shape[-1]

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [N, B, H, C, ...], the sequential dimension first
        x = pad_to_chunks(x, chunk_size, dim=1).unflatten(1, (-1, chunk_size))
        return x.movedim(1, 0).transpose(2, 3).contiguous()

    q, k, v, g, b = (chunks(x) for x in (query * query.shape[-1] ** -0.5, key, value, log_decay, beta.unsqueeze(-1)))

    total = g.cumsum(-1)  # G, within the chunk
    pair_decay = decay(total.unsqueeze(-1) - total.unsqueeze(-2), cut=masks.pairs)
    decay_into = decay(total, cut=masks.into).unsqueeze(-1)
    decay_out_of = decay(total[..., -1:] - total, cut=masks.out_of).unsqueeze(-1)

    kb = k * b
    keys = k.transpose(-1, -2)
    # Corrections without the state before the chunk, and how much of that state each one takes away again.
    rows = torch.cat([v * b, kb * decay_into], dim=-1)
    solved = torch.linalg.solve_triangular((kb @ keys) * pair_decay, rows, upper=False, unitriangular=True)
    own, seen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    read_own = (q @ keys) * pair_decay
    read_state = q * decay_into
    write = (k * decay_out_of).transpose(-1, -2)
    keep = decay_into[..., -1:, :]  # decay of the state over the whole chunk

    state = v.new_zeros(*v.shape[1:3], k.shape[-1], v.shape[-1])
    out = []
    # unbind, not indexing: the backward of x[n] fills a zero tensor of x's full size for every n.
    for own_n, seen_n, read_own_n, read_state_n, write_n, keep_n in zip(
        *(x.unbind() for x in (own, seen, read_own, read_state, write, keep)), strict=True
    ):
        corrections = own_n - seen_n @ state
        out.append(read_state_n @ state + read_own_n @ corrections)
        state = keep_n * state + write_n @ corrections
    return torch.stack(out, dim=1).transpose(2, 3).flatten(1, 2)[:, :length]


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, document_ids: Tensor
) -> Tensor:
    """The same rule as its definition says it, one token after the other; arguments and result as in :func:`chunked`."""
    query = query * query.shape[-1] ** -0.5
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    fade = decay(log_decay, cut=starts.unsqueeze(-1))

    state = value.new_zeros(value.shape[0], value.shape[2], key.shape[-1], value.shape[-1])
    out = []
    for t in range(query.shape[1]):
        state = fade[:, t, :, None, None] * state
        held = torch.einsum("bhk,bhkv->bhv", key[:, t], state)
        correction = beta[:, t, :, None] * (value[:, t] - held)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], correction)
        out.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state))
    return torch.stack(out, dim=1)
