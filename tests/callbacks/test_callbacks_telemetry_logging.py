"""What RankTelemetry logs: every documented key, in every logger, with the value computed by hand."""

from __future__ import annotations

import csv
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from sentinel_kit import Sink, make_trainer
from torch import Tensor, nn

from lightning_sentinel import IncidentResponse, NonFiniteTracer, RankTelemetry, Rollback

VOCABULARY, STEPS, SOURCES = 11, 6, ("prose", "code")


class Mixture:
    """Four sequences of five tokens a batch from two sources, some targets ignored, one sample wholly."""

    sources = SOURCES

    def __init__(self) -> None:
        self.position, self.excluded = 0, frozenset[str]()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            generator = torch.Generator().manual_seed(self.position)
            tokens = torch.randint(VOCABULARY, (4, 6), generator=generator)
            targets = tokens[:, 1:].clone()
            targets[1, : 1 + self.position % 3] = -100
            targets[3 if self.position % 2 else 2] = -100
            ids = [f"{self.position}-{i}" for i in range(4)]
            self.position += 1
            source = torch.tensor([0, 1, 1, 0])
            yield {"input_ids": tokens[:, :-1], "targets": targets, "source": source, "sample_id": ids}

    def exclude(self, names: Any) -> None:
        self.excluded = frozenset(names)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Bigram(L.LightningModule):
    """Keeps what it saw: one row of ``(source, mean nats, tokens)`` per sample, and its weights before each step."""

    def __init__(self, nan_once_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)
        self.nan_once_at = nan_once_at
        self.batches: list[list[tuple[int, float, int]]] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.weights: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.weights.append(torch.cat([p.detach().double().flatten() for p in self.parameters()]))
        logits = self.head(self.embedding(batch["input_ids"])).float()
        targets = batch["targets"]
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
        nats, tokens = nats.view_as(targets).sum(1), (targets != -100).sum(1)
        self.sample_loss_nats, self.sample_tokens = nats.detach() / tokens, tokens
        rows = zip(batch["source"].tolist(), self.sample_loss_nats.tolist(), tokens.tolist(), strict=True)
        self.batches.append(list(rows))
        loss = nats.sum() / tokens.sum()
        self.losses.append(loss.item())
        if self.nan_once_at == self.trainer.global_step:
            self.nan_once_at = None
            loss = loss * math.nan
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad.double() for p in self.parameters() if p.grad is not None]
        self.norms.append(math.sqrt(sum(float(g.square().sum()) for g in grads)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)


def by_source(batches: list[list[tuple[int, float, int]]]) -> dict[str, float]:
    """Token-weighted mean loss of each source, in nats; a sample without supervision has no weight."""
    result = {}
    for k, name in enumerate(SOURCES):
        rows = [(loss, n) for batch in batches for source, loss, n in batch if source == k and n]
        result[name] = sum(loss * n for loss, n in rows) / sum(n for _, n in rows)
    return result


# The first only with a scaler, the others only on several ranks.
ELSEWHERE = {"sentinel/loss_scale", "sentinel/slowest_rank", "sentinel/own_seconds"}


def documented() -> set[str]:
    """Keys of the table in the docstring of the class."""
    found = set(re.findall(r"``(sentinel/[^`]+)``", RankTelemetry.__doc__ or ""))
    assert "sentinel/loss/<source>" in found
    return {key for key in found if "<" not in key} | {f"sentinel/loss/{name}" for name in SOURCES}


def fit(folder: Path, module: Bigram, callbacks: list[L.Callback], **options: Any) -> Sink:
    options = {"max_steps": STEPS, "log_every_n_steps": 1, "logger": CSVLogger(folder, "", ""), **options}
    trainer, sink = make_trainer(callbacks, **options)
    trainer.fit(module, Mixture())
    return sink


def rows(folder: Path) -> list[dict[str, float]]:
    """Lines of the CSV that the telemetry logged, without their empty cells."""
    with (folder / "metrics.csv").open() as file:
        lines = [{key: float(value) for key, value in line.items() if value} for line in csv.DictReader(file)]
    return [line for line in lines if "sentinel/attempt" in line]


def test_every_documented_key_has_the_value_computed_by_hand(tmp_path: Path) -> None:
    module = Bigram()
    telemetry = RankTelemetry(update_norm_every_n_steps=1, vocabulary_size=VOCABULARY)
    fit(tmp_path, module, [telemetry])
    lines = rows(tmp_path)
    assert [line["step"] for line in lines] == list(range(STEPS))
    logged = {key for line in lines for key in line if key.startswith("sentinel/")}
    assert logged == documented() - ELSEWHERE
    for k, line in enumerate(lines):
        loss = module.losses[k]
        expected = {f"sentinel/loss_{name}": loss for name in ("mean", "min", "median", "max")}
        expected |= {
            "sentinel/worst_rank": 0,
            "sentinel/token_probability": math.exp(-loss),
            "sentinel/nats_below_uniform": math.log(VOCABULARY) - loss,
            "sentinel/grad_norm": module.norms[k],
            "sentinel/tokens": 20 * (k + 1),
            "sentinel/attempt": 0,
        }
        expected |= {f"sentinel/loss/{name}": value for name, value in by_source(module.batches[k : k + 1]).items()}
        if k:
            update = torch.linalg.vector_norm(module.weights[k] - module.weights[k - 1]).item()
            expected["sentinel/update_norm"] = update
        assert {key: line[key] for key in expected} == pytest.approx(expected, rel=1e-5)
        assert 0 <= line["sentinel/data_seconds"] <= line["sentinel/step_seconds"] < 60


class Slow(Mixture):
    """Two of its batches take their time."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            if self.position in (3, 4):
                time.sleep(0.5)
            yield batch


def test_waiting_for_a_slow_loader_is_data_seconds(tmp_path: Path) -> None:
    trainer, _ = make_trainer(
        [RankTelemetry()], max_steps=STEPS, log_every_n_steps=1, logger=CSVLogger(tmp_path, "", "")
    )
    trainer.fit(Bigram(), Slow())
    seconds = [(line["sentinel/data_seconds"], line["sentinel/step_seconds"]) for line in rows(tmp_path)]
    assert all(0 <= data <= step for data, step in seconds)
    # Lightning fetches the batch behind the one that is trained, as the loader has no length
    assert all(data >= 0.5 for data, _ in seconds[1:3])
    assert sum(data for data, _ in seconds) >= 1.0
    assert min(data for data, _ in seconds) < 0.5


def test_tensorboard_gets_the_same_as_the_csv(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [CSVLogger(tmp_path, "", ""), TensorBoardLogger(tmp_path, "", "board")]
    telemetry = RankTelemetry(update_norm_every_n_steps=1, vocabulary_size=VOCABULARY)
    fit(tmp_path, Bigram(), [telemetry], logger=loggers)
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    lines = rows(tmp_path)
    for key in documented() - ELSEWHERE:
        expected = {line["step"]: line[key] for line in lines if key in line}
        assert {e.step: e.value for e in board.Scalars(key)} == pytest.approx(expected, rel=1e-6), key


def test_the_loss_scale_is_logged_with_a_scaler(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    fit(tmp_path, Bigram(), [RankTelemetry()], max_steps=2, plugins=plugins)
    assert [line["sentinel/loss_scale"] for line in rows(tmp_path)] == [2048.0, 2048.0]


def test_logging_keeps_to_the_trainers_interval_and_leaves_unknown_baselines_out(tmp_path: Path) -> None:
    fit(tmp_path, Bigram(), [RankTelemetry()], log_every_n_steps=3)
    lines = rows(tmp_path)
    assert [line["step"] for line in lines] == [0, 3]
    assert not any("sentinel/nats_below_uniform" in line for line in lines)


def test_a_step_that_is_done_again_is_logged_with_its_attempt(tmp_path: Path) -> None:
    module = Bigram(nan_once_at=3)
    fit(tmp_path, module, [NonFiniteTracer(), RankTelemetry(), IncidentResponse(mode="recover"), Rollback()])
    passes = [(line["step"], line["sentinel/attempt"]) for line in rows(tmp_path)]
    assert passes == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (4, 1), (5, 1)]
    first, again = (line for line in rows(tmp_path) if line["step"] == 3)
    assert "sentinel/loss_mean" not in first  # a NaN is left out of the loggers; the journal has it
    assert math.isfinite(again["sentinel/loss_mean"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_journal_has_the_token_weighted_loss_of_each_source(tmp_path: Path, accumulate: int) -> None:
    module = Bigram()
    sink = fit(tmp_path, module, [RankTelemetry()], accumulate_grad_batches=accumulate)
    assert len(module.batches) == STEPS * accumulate
    for k, event in enumerate(sink.steps()):
        window = module.batches[k * accumulate : (k + 1) * accumulate]
        assert event["sources"] == pytest.approx(by_source(window), rel=1e-6)
