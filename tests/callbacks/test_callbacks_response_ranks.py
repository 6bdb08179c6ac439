"""A held step leaves no trace: under accumulation, and on every rank of two processes."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from statistics import mean
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from callbacks_two_ranks import BAD_STEP, NAN_STEP, RESTORE_POINTS, STEPS
from sentinel_kit import Loader, Net, make_trainer, run_ranks, same_bits, weights
from torch import Tensor

from lightning_sentinel import IncidentResponse, NonFiniteTracer, RankTelemetry, Rollback
from lightning_sentinel.context import context_of

SCRIPT = Path(__file__).with_name("callbacks_two_ranks.py")
HELD, ACCUMULATE = 9, 2


# ------------------------------------------------------------------------------------------------------ accumulation


class OneBadMicroBatch(Net):
    def __init__(self, bad: int | None) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.bad = bad

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if batch_idx == self.bad else loss


class NeverUpdated(L.Callback):
    """What holding one window comes to, done by hand: no gradients for the optimizer, buffers from before the window."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == HELD * ACCUMULATE:
            self.before = [buffer.clone() for buffer in pl_module.buffers()]

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == HELD:
            for parameter in pl_module.parameters():
                parameter.grad = None
            for buffer, before in zip(pl_module.buffers(), self.before, strict=True):
                buffer.copy_(before)


def fit(module: L.LightningModule, callbacks: list[L.Callback]) -> L.Trainer:
    trainer, _ = make_trainer(callbacks, max_steps=16, accumulate_grad_batches=ACCUMULATE)
    torch.manual_seed(7)
    trainer.fit(module, Loader())
    return trainer


@pytest.mark.parametrize("mode", ["guard", "recover"])
@pytest.mark.parametrize("which", [0, 1])
def test_one_bad_micro_batch_holds_its_whole_window(mode: str, which: int) -> None:
    module, expected = OneBadMicroBatch(HELD * ACCUMULATE + which), OneBadMicroBatch(None)
    suite = [NonFiniteTracer(), RankTelemetry(), IncidentResponse(mode=mode), Rollback(every_n_steps=5)]
    trainer, reference = fit(module, suite), fit(expected, [NeverUpdated()])
    (incident,) = context_of(trainer).incidents
    assert [action["action"] for action in incident.actions] == ["skip_step"]
    assert same_bits(weights(module), weights(expected))  # parameters and the buffers of BatchNorm
    ours, theirs = trainer.optimizers[0].state_dict()["state"], reference.optimizers[0].state_dict()["state"]
    assert ours[0]["step"].item() == 15.0
    assert all(same_bits(ours[i], theirs[i]) for i in theirs)


# -------------------------------------------------------------------------------------------------------- two ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(SCRIPT, folder, seconds=120)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def at(result: dict[str, Any], step: int) -> list[str]:
    """Weights and moments at the start of a step, one entry for each pass over it."""
    seen: list[str] = result["seen"][str(step)]
    return seen


@pytest.mark.distributed
def test_both_ranks_tell_the_same_story(ranks: list[dict[str, Any]]) -> None:
    ours, theirs = ({k: v for k, v in result.items() if k not in ("losses", "seen", "said")} for result in ranks)
    assert ours == theirs
    assert ranks[0]["seen"] == ranks[1]["seen"]
    assert sorted(map(int, ranks[0]["seen"])) == list(range(STEPS))


@pytest.mark.distributed
def test_a_healthy_step_costs_one_gather(ranks: list[dict[str, Any]]) -> None:
    """Before the first incident: the gate's, and nothing else of the suite; restore points may ask for more."""
    for result in ranks:
        healthy = [step for step in range(1, NAN_STEP) if step % RESTORE_POINTS]
        made = {
            step: result["collectives"][str(step)][0] for step in healthy
        }  # of the first pass: a rollback repeats some
        assert made == {step: ["gate's all_gather"] for step in healthy}
        assert len(result["collectives"][str(NAN_STEP)][0]) > 1  # the incident asks the ranks for more


@pytest.mark.distributed
def test_each_incident_is_said_once_by_rank_0(ranks: list[dict[str, Any]]) -> None:
    said = [[tuple(line) for line in result["said"] if "incident" in line[1]] for result in ranks]
    assert said[1] == []
    for incident in ranks[0]["incidents"]:
        number = incident["number"]
        opened = [level for level, words in said[0] if words.startswith(f"incident {number} at step ")]
        closed = [level for level, words in said[0] if words.startswith(f"incident {number} recovered: ")]
        assert (opened, closed) == (["WARNING"], ["INFO"] if incident["status"] == "recovered" else [])
    assert [incident["status"] for incident in ranks[0]["incidents"]].count("recovered") >= 2


@pytest.mark.distributed
def test_a_nan_of_one_rank_is_held_on_both(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert at(result, NAN_STEP + 1)[0] == at(result, NAN_STEP)[0]  # bit for bit as before
        assert at(result, NAN_STEP)[0] != at(result, NAN_STEP - 1)[0]
        assert [int(step) for step, applied in result["applied"].items() if not applied] == [NAN_STEP, BAD_STEP]
        first = result["incidents"][0]
        assert first["opened_step"] == NAN_STEP
        assert [action["action"] for action in first["actions"]] == ["skip_step"]
    assert math.isfinite(ranks[0]["losses"][str(NAN_STEP)])
    assert math.isnan(ranks[1]["losses"][str(NAN_STEP)])


@pytest.mark.distributed
def test_a_bad_rank_is_named_and_both_go_back(ranks: list[dict[str, Any]]) -> None:
    healthy, bad = ranks[0]["rank_losses"][str(BAD_STEP)]
    assert healthy < 4.0
    assert 30.0 < bad < 60.0
    for result in ranks:
        second = result["incidents"][1]
        assert second["opened_step"] == BAD_STEP
        assert second["verdict"]["kind"] == "infrastructure"
        assert second["verdict"]["culprits"] == ["rank:1"]
        assert [action["action"] for action in second["actions"]] == ["rollback_replay"]
        assert second["status"] == "recovered"
        assert result["attempt"] == 1
        # The way back leads over the step with the NaN, which is there again: an incident of its own.
        third = result["incidents"][2]
        assert (third["opened_step"], third["attempt"], third["verdict"]["kind"]) == (NAN_STEP, 1, "numerics")
        assert [action["action"] for action in third["actions"]] == ["skip_step"]
        assert len(result["incidents"]) == 3
        before, again = at(result, BAD_STEP)
        assert again == before  # the replay arrives at the very same weights and moments, on both ranks
        assert len(at(result, BAD_STEP - 1)) == 2
        assert len(at(result, BAD_STEP + 1)) == 1


@pytest.mark.distributed
def test_the_logger_gets_both_ranks_and_never_only_their_mean(folder: Path, ranks: list[dict[str, Any]]) -> None:
    with (folder / "metrics.csv").open() as file:
        lines = [{k: float(v) for k, v in line.items() if v} for line in csv.DictReader(file)]
    step = NAN_STEP - 4
    (line,) = (each for each in lines if each["step"] == step and "sentinel/loss_mean" in each)
    losses = [result["losses"][str(step)] for result in ranks]
    expected = {"mean": mean(losses), "min": min(losses), "median": mean(losses), "max": max(losses)}
    assert {k: line[f"sentinel/loss_{k}"] for k in expected} == pytest.approx(expected, rel=1e-6)
    assert line["sentinel/worst_rank"] == losses.index(max(losses))
    assert line["sentinel/slowest_rank"] in (0, 1)
    assert 0 < line["sentinel/own_seconds"] <= line["sentinel/step_seconds"]
