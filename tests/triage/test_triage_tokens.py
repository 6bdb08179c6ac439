"""Losses of single tokens, whatever the loss is computed by: heard, told by the module, or said not to be available."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from sentinel_kit import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from triage_models import Gate
from triage_models import fit as fit_samples

from lightning_sentinel import DeepProbe
from lightning_sentinel.triage.replay import replay
from lightning_sentinel.triage.tokens import NOT_HEARD, CrossEntropies, TokenLosses, told_by

BATCH, TIME, CLASSES = 4, 6, 11
generator = torch.Generator().manual_seed(0)
LOGITS = torch.randn(BATCH, TIME, CLASSES, generator=generator)
TARGETS = torch.randint(CLASSES, (BATCH, TIME), generator=generator)
TARGETS[1, 2:4] = -100
SHIFTED = torch.cat(
    [torch.zeros(BATCH, 1, dtype=torch.int64), TARGETS], 1
)  # targets are its entries from the second on
IGNORED = TARGETS < 0
# An independent reference: the definition, in float64.
LOGS = LOGITS.double() - LOGITS.double().exp().sum(-1, keepdim=True).log()
NATS = torch.where(IGNORED, math.nan, -LOGS.take_along_dim(TARGETS.clamp(min=0)[..., None], -1)[..., 0])
ENTROPY = torch.where(IGNORED, math.nan, -(LOGS.exp() * LOGS).sum(-1))


class Fused(torch.autograd.Function):
    """A loss that computes on its own: nothing of it is heard."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return (logits.logsumexp(1) - logits.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.zeros_like(ctx.saved_tensors[0]), None


def chunked(parts: int, along: int, flat: bool = True) -> Callable[[], Any]:
    def loss() -> Tensor:
        total = torch.zeros(())
        for x, y in zip(LOGITS.chunk(parts, along), TARGETS.chunk(parts, along), strict=True):
            total = total + F.cross_entropy(x.reshape(-1, CLASSES), y.reshape(-1), reduction="sum")
        return total

    return loss


def masked_gather() -> Tensor:
    logs = LOGITS.log_softmax(-1)
    picked = logs.gather(-1, TARGETS.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * ~IGNORED).sum()


def indexed() -> Tensor:
    logs = F.log_softmax(LOGITS.float(), dim=-1).view(-1, CLASSES)
    return -logs[torch.arange(BATCH * TIME), TARGETS.clamp(min=0).reshape(-1)].mean()


FLAT, WANTED = LOGITS.reshape(-1, CLASSES), TARGETS.reshape(-1)


@pytest.mark.parametrize(
    ("loss", "heard"),
    [
        (lambda: F.cross_entropy(FLAT, WANTED), "cross_entropy"),
        (lambda: F.cross_entropy(LOGITS.mT, TARGETS), "cross_entropy"),
        (lambda: nn.CrossEntropyLoss(label_smoothing=0.1)(FLAT, WANTED), "cross_entropy"),
        (lambda: F.nll_loss(FLAT.log_softmax(1), WANTED), "nll_loss"),
        (lambda: nn.NLLLoss()(nn.LogSoftmax(-1)(FLAT), WANTED), "nll_loss"),
        (masked_gather, "log_softmax"),
        (indexed, "log_softmax"),
        (chunked(2, 0), "cross_entropy"),
        (chunked(3, 1), "cross_entropy"),  # chunks of time: put in order again
        (lambda: F.cross_entropy(FLAT, WANTED) + F.cross_entropy(FLAT * 2, WANTED), "cross_entropy"),  # two heads
        (lambda: F.cross_entropy(FLAT, WANTED) + F.cross_entropy(FLAT[:3, :2], WANTED[:3] % 2), "cross_entropy"),
    ],
)
@pytest.mark.parametrize("batch", [{"x": LOGITS, "y": TARGETS}, [SHIFTED]], ids=["targets", "shifted"])
def test_the_losses_are_those_of_the_definition(loss: Callable[[], Any], heard: str, batch: Any) -> None:
    listening = CrossEntropies()
    expected = loss()
    with listening:
        given = loss()
    assert torch.equal(given, expected)  # it listens, and changes nothing
    found = listening.result(batch)
    assert found is not None
    assert (found.heard, found.in_order) == (heard, True)
    by_sample = found.by_sample(BATCH)
    assert by_sample is not None
    for mine, exact in zip(by_sample, (NATS, ENTROPY), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_what_is_no_loss_over_classes_is_not_heard() -> None:
    with CrossEntropies() as listening:
        F.cross_entropy(FLAT, FLAT.softmax(1))  # targets are probabilities
        LOGITS.log_softmax(-1).gather(-1, TARGETS.clamp(min=0)[..., None].expand(-1, -1, 2))  # two of each row
        LOGITS.softmax(-1).gather(-1, TARGETS.clamp(min=0)[..., None])  # no log
        LOGITS.log_softmax(1).gather(1, (TARGETS % TIME)[:, :1, None].expand(-1, -1, CLASSES))  # over positions
        Fused.apply(FLAT, WANTED)
    assert listening.result({"y": TARGETS}) is None


def test_chunks_whose_places_are_not_known_are_not_given_to_samples() -> None:
    order = torch.randperm(BATCH * TIME, generator=torch.Generator().manual_seed(1))
    with CrossEntropies() as listening:
        for part in order.chunk(3):
            F.cross_entropy(FLAT[part], WANTED[part])
    found = listening.result({"y": TARGETS})
    assert found is not None
    assert found.by_sample(BATCH) is None
    torch.testing.assert_close(
        found.loss.nan_to_num(-1.0).sort().values.double(),
        NATS.flatten().nan_to_num(-1.0).sort().values,
        rtol=1e-5,
        atol=0,
    )


def test_quantiles_are_numpys() -> None:
    import numpy as np

    at = [0.0, 0.01, 0.37, 0.5, 0.9, 1.0]
    found = TokenLosses(NATS.flatten(), ENTROPY.flatten()).quantiles(at)
    assert found == pytest.approx(np.nanquantile(NATS.numpy(), at).tolist(), rel=1e-12)
    assert TokenLosses(torch.full((3,), math.nan), torch.zeros(3)).quantiles(at) == []


@pytest.mark.parametrize("answer", [None, 1.0, TARGETS, (NATS, ENTROPY[:1]), (NATS, None, 1)])
def test_an_answer_that_is_none_says_what_was_expected(answer: Any) -> None:
    with pytest.raises(TypeError, match="token_losses returned"):
        told_by(answer)


class Fusing(L.LightningModule):
    """A language model whose loss has no logits that torch would see; ``told`` and ``refuses`` give it its own word."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.norm = kind, nn.Embedding(CLASSES, CLASSES), nn.BatchNorm1d(CLASSES)
        if kind != "silent":
            self.token_losses = self._token_losses

    def logits(self, batch: Any) -> Tensor:
        return self.norm(self.table(batch["x"]).flatten(0, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return Fused.apply(self.logits(batch), batch["y"].flatten())

    def _token_losses(self, batch: Any, batch_idx: int) -> Any:
        if self.kind == "refuses":
            raise RuntimeError("no logits here")
        logits, wanted = self.logits(batch), batch["y"].flatten()
        nats = torch.nn.functional.cross_entropy(logits, wanted, reduction="none")
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        return nats.view_as(batch["y"]), entropy.view_as(batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def lines() -> DataLoader[Any]:
    tokens = torch.randint(CLASSES, (24, TIME + 1), generator=torch.Generator().manual_seed(2))
    return DataLoader([{"x": t[:-1], "y": t[1:]} for t in tokens], batch_size=BATCH)


@pytest.mark.parametrize("kind", ["told", "silent", "refuses"])
def test_deep_probe_says_the_quantiles_or_why_there_are_none(kind: str) -> None:
    module = Fusing(kind)
    trainer, sink = make_trainer([Gate(), DeepProbe(every_n_steps=2)], max_steps=5)
    bare = Fusing(kind)
    bare.load_state_dict(module.state_dict())
    trainer.fit(module, lines())
    plain, _ = make_trainer([Gate()], max_steps=5)
    plain.fit(bare, lines())
    # What token_losses computes leaves nothing behind, the norm's statistics included.
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), bare.state_dict().values(), strict=True))
    told = [e["token_losses"] for e in sink.named("probe.deep")]
    assert len(told) == 2
    if kind == "told":
        assert [(t["heard"], t["targets"], len(t["loss_nats"])) for t in told] == [
            ("token_losses", BATCH * TIME, 6)
        ] * 2
        assert 1.0 < told[0]["loss_nats"]["0.5"] < 4.0
    else:
        wanted = NOT_HEARD if kind == "silent" else "not available: token_losses raised RuntimeError: no logits here"
        assert told == [{"unavailable": wanted}] * 2


def test_the_module_s_word_is_asked_after_each_micro_batch_and_changes_no_replay() -> None:
    found: list[Any] = []

    class Told(Fusing):
        pass

    def at_gate(trainer: Any, module: Any, optimizer: Any, record: Any) -> None:
        found.append((replay(trainer, module, optimizer, tokens=True), replay(trainer, module, optimizer)))

    trainer, _ = make_trainer([Gate(at_gate, every_step=True)], max_steps=2, accumulate_grad_batches=2)
    trainer.fit(Told("told"), lines())
    for asked, plain in found:
        assert asked.losses == plain.losses
        assert asked.bitwise_equal
        assert plain.tokens == []
        for loss, tokens in zip(asked.losses, asked.tokens, strict=True):
            assert float(tokens.loss.mean()) == pytest.approx(loss, rel=1e-5)
            assert tokens.entropy.isfinite().all()


def test_a_regression_has_no_tokens() -> None:
    from triage_models import Net

    results: list[Any] = []
    gate = Gate(lambda *a: results.append(replay(*a[:3], tokens=True)), every_step=True)
    fit_samples(Net(), [gate], steps=1)
    assert results[0].tokens == [None]
    assert results[0].no_tokens == NOT_HEARD
