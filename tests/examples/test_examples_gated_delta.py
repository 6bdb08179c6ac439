"""The gated delta rule against its definition and against transformers' pure-torch implementations."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hybrid_lm import gated_delta
from hybrid_lm.gated_delta import ChunkMasks, chunked, recurrent
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

Rule = Callable[..., Tensor]


def rule_inputs(
    length: int, *, batch: int = 2, heads: int = 3, dim: int = 16, decay: float = 1.0, seed: int = 0
) -> Any:
    """Query, key, value, log decay and beta as the layer makes them."""
    g = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(batch, length, heads, dim, generator=g) for _ in range(3))
    log_decay = -decay * F.softplus(torch.randn(batch, length, heads, generator=g))
    beta = torch.rand(batch, length, heads, generator=g)
    return [x.requires_grad_() for x in (F.normalize(query, dim=-1), F.normalize(key, dim=-1), value, log_decay, beta)]


def one_document(inputs: list[Tensor]) -> Tensor:
    return torch.zeros(inputs[0].shape[:2], dtype=torch.int32)


def in_chunks(inputs: list[Tensor], documents: Tensor, chunk_size: int = 16) -> Tensor:
    return chunked(*inputs, ChunkMasks.from_documents(documents, chunk_size))


def gradients(out: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a fixed random projection of the output."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True)


def assert_same(a: Tensor, b: Tensor, inputs: list[Tensor], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for name, x, y in zip(
        ("query", "key", "value", "log_decay", "beta"), gradients(a, inputs), gradients(b, inputs), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"gradient of {n}: {m}")


@pytest.fixture(scope="module")
def oracle() -> dict[str, Callable[..., Any]]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    return {
        "chunk": modeling.torch_chunk_gated_delta_rule,
        "recurrent": modeling.torch_recurrent_gated_delta_rule,
    }


@pytest.mark.parametrize("length", [1, 16, 37, 64])
@pytest.mark.parametrize("chunk_size", [1, 16, 64])
def test_chunked_equals_recurrent(length: int, chunk_size: int) -> None:
    inputs = rule_inputs(length)
    documents = one_document(inputs)
    assert_same(in_chunks(inputs, documents, chunk_size), recurrent(*inputs, documents), inputs)


@pytest.mark.parametrize("rule", ["chunk", "recurrent"])
@pytest.mark.parametrize("length", [64, 100])
def test_both_forms_equal_transformers(oracle: dict[str, Callable[..., Any]], rule: str, length: int) -> None:
    inputs = rule_inputs(length)
    query, key, value, log_decay, beta = inputs
    theirs, _ = oracle[rule](query, key, value, g=log_decay, beta=beta)
    documents = one_document(inputs)
    assert_same(in_chunks(inputs, documents, 32), theirs, inputs)
    assert_same(recurrent(*inputs, documents), theirs, inputs)


@settings(max_examples=25, deadline=None)
@given(
    boundaries=st.sets(st.integers(1, 69), max_size=6),
    chunk_size=st.sampled_from([8, 16, 32]),
    seed=st.integers(0, 100),
)
def test_each_document_of_a_packed_sequence_is_as_if_alone(boundaries: set[int], chunk_size: int, seed: int) -> None:
    inputs = [x.detach() for x in rule_inputs(70, batch=1, seed=seed)]
    documents = torch.zeros(1, 70, dtype=torch.int32)
    for at in boundaries:
        documents[:, at:] += 1
    packed = in_chunks(inputs, documents, chunk_size)
    torch.testing.assert_close(packed, recurrent(*inputs, documents), rtol=1e-5, atol=1e-5)
    edges = [0, *sorted(boundaries), 70]
    for start, end in itertools.pairwise(edges):
        alone = [x[:, start:end] for x in inputs]
        torch.testing.assert_close(
            packed[:, start:end], in_chunks(alone, one_document(alone), chunk_size), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("rule", [in_chunks, lambda inputs, documents: recurrent(*inputs, documents)])
def test_nothing_flows_back_in_time_or_out_of_a_document(rule: Rule) -> None:
    inputs = rule_inputs(48, batch=1)
    documents = (torch.arange(48) >= 20).int().unsqueeze(0)
    (seen,) = torch.autograd.grad(rule(inputs, documents)[:, 30].sum(), [inputs[2]])
    reached = seen.abs().sum((0, 2, 3)) > 0
    assert reached.tolist() == [20 <= t <= 30 for t in range(48)]


def strong_decays() -> list[Tensor]:
    """Log decays of about -80 a token: over a chunk their differences go beyond 88, where exp overflows float32."""
    return rule_inputs(64, decay=100.0)


def test_strong_decays_stay_finite(oracle: dict[str, Callable[..., Any]]) -> None:
    inputs = strong_decays()
    assert inputs[3].diff(dim=1).abs().max() > 88
    documents = one_document(inputs)
    out = in_chunks(inputs, documents)
    assert all(torch.isfinite(x).all() for x in (out, *gradients(out, inputs)))
    assert_same(out, recurrent(*inputs, documents), inputs)


def test_the_same_decays_masked_after_exp_poison_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the mask before exp is for: masked afterwards, the forward looks healthy and the backward is inf times zero."""
    monkeypatch.setattr(gated_delta, "decay", lambda log_decay, cut: log_decay.exp().masked_fill(cut, 0.0))
    inputs = strong_decays()
    out = in_chunks(inputs, one_document(inputs))
    assert torch.isfinite(out).all()
    log_decay_gradient = gradients(out, inputs)[3]
    assert torch.isnan(log_decay_gradient).any()


def test_repeated_keys_are_solved_without_cancellation() -> None:
    """A run of equal tokens makes the triangular system as hard as it gets; powers of it would reach 1e18."""
    inputs = rule_inputs(128, dim=16)
    query, key, value, log_decay, beta = (x.detach() for x in inputs)
    key = key[:, :1].expand_as(key).contiguous()
    hard = [x.requires_grad_() for x in (query, key, value, torch.zeros_like(log_decay), torch.ones_like(beta))]
    documents = one_document(hard)
    torch.testing.assert_close(in_chunks(hard, documents, 64), recurrent(*hard, documents), rtol=1e-5, atol=1e-5)


def test_gradients_equal_finite_differences() -> None:
    inputs = [x.detach().double().requires_grad_() for x in rule_inputs(11, batch=1, heads=1, dim=3)]
    documents = torch.tensor([[0] * 4 + [1] * 7])
    assert torch.autograd.gradcheck(lambda *x: in_chunks(list(x), documents, 4), inputs)
