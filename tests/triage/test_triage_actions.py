"""Each verdict's answer in a real run: a fault for which it is right, the recovery, and the distance to the clean path."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from sentinel_kit import Sink, make_trainer
from triage_matrix.fault import Case
from triage_matrix.faults import FAULTS, Fp16Overflow, NoWarmup, OutOfRangeToken, TransientNan
from triage_matrix.run import suite

from lightning_sentinel import IncidentResponse
from lightning_sentinel.callbacks.incident_response import EXIT_CODE_STOPPED, TrainingStopped
from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import Incident, IncidentStatus

pytestmark = pytest.mark.slow
STEPS, NEWEST = 66, 6


@pytest.fixture(autouse=True)
def third_party_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class Run:
    """What a run left: its incidents, the losses of its path, its weights, what was said at its end."""

    incidents: list[Incident]
    losses: dict[int, float]
    weights: dict[str, torch.Tensor]
    sink: Sink
    excluded: frozenset[str] = frozenset()
    last_words: str = ""
    exit_code: int | None = None
    actions: list[str] = field(default_factory=list)


def go(
    name: str,
    strikes: bool = True,
    steps: int = STEPS,
    case: Case | None = None,
    more: Sequence[L.Callback] = (),
    **options: Any,
) -> Run:
    case = case or FAULTS[name](0, 1)
    L.seed_everything(0, verbose=False)
    world, stream = case.world(), case.loader()
    if not strikes:
        case.at = 10**9
    response = IncidentResponse(mode="recover", probation_steps=8, **options)
    callbacks = [response if isinstance(c, IncidentResponse) else c for c in suite()]
    clip = None if case.fp16 else 1.0
    trainer, sink = make_trainer([case, *callbacks, *more], max_steps=steps, gradient_clip_val=clip, **case.options())
    words, code = "", None
    try:
        trainer.fit(world, stream)
    except TrainingStopped as stopped:
        words, code = str(stopped), int(stopped.code or 0)
    context = context_of(trainer)
    weights = {n: v.detach().clone() for n, v in world.state_dict().items()}
    found = Run(list(context.incidents), {e["step"]: e["loss"] for e in sink.steps()}, weights, sink)
    found.excluded = frozenset() if context.ledger is None else frozenset(context.ledger.active)
    found.last_words, found.exit_code = words, code
    found.actions = [a["action"] for i in found.incidents for a in i.actions]
    return found


@lru_cache(maxsize=4)
def clean(name: str) -> Run:
    return go(name, strikes=False)


def distance(run: Run, other: Run) -> tuple[float, float]:
    """From the clean path: the largest difference of a weight, and of the mean loss of the newest steps, in nats."""
    far = max(float((run.weights[n].double() - w.double()).abs().max()) for n, w in other.weights.items())
    newest = [sum(r.losses[s] for s in range(STEPS - NEWEST, STEPS)) / NEWEST for r in (run, other)]
    return far, abs(newest[0] - newest[1])


# fault, overrides of the ladders, the answers, whether the path is the clean one to the bit
EXERCISED: list[tuple[str, Mapping[str, Any], list[str], bool]] = [
    ("out_of_range_token", {}, ["quarantine"], False),
    ("corrupt_batch", {}, ["skip_step"], False),
    ("nan_forward", {}, ["skip_step"], False),
    ("transient_nan", {}, ["retry_step"], True),
    ("transient_garbage", {}, ["retry_step"], True),
    ("learning_rate_spike", {}, ["rollback_replay"], True),
    ("optimizer_corruption", {}, ["rollback_replay"], True),
    ("poisoned_buffer", {}, ["rollback_replay"], True),
    ("hard_valid_batch", {}, [], False),
]


@pytest.mark.parametrize(("name", "ladders", "actions", "exact"), EXERCISED, ids=[e[0] for e in EXERCISED])
def test_the_answer_brings_the_run_back(name: str, ladders: Mapping[str, Any], actions: list[str], exact: bool) -> None:
    run = go(name, ladders=ladders)
    assert run.actions == actions
    assert [i.status for i in run.incidents] == [IncidentStatus.RECOVERED]
    path_z = run.incidents[0].path_z
    assert path_z is not None
    assert abs(path_z) <= 4.0
    far, nats = distance(run, clean(name) if name == "poisoned_buffer" else clean("corrupt_batch"))
    if exact:
        assert (far, nats) == (0.0, 0.0)
    else:
        assert 0.0 < far < 0.1
        assert nats < 0.05
    if name == "hard_valid_batch":
        assert run.excluded == frozenset()


def assert_back(run: Run, other: Run, actions: list[str], nats: float = 0.05) -> None:
    """One incident, these answers to it, recovered, and near the clean path although not on it to the bit."""
    assert run.actions == actions
    [incident] = run.incidents
    assert incident.status is IncidentStatus.RECOVERED
    assert incident.closing.startswith("back on the path")
    assert incident.path_z is not None
    assert abs(incident.path_z) <= 4.0
    far, apart = distance(run, other)
    assert 0.0 < far < 0.1
    assert apart < nats


def test_a_source_that_has_changed_is_left_out() -> None:
    run = go("level_shift")
    assert "rollback_skip" in run.actions
    assert "source:prose" in run.excluded
    assert run.incidents[-1].status is IncidentStatus.RECOVERED
    # Every source of text has the same entropy: the path without one of them is as high.
    assert distance(run, clean("corrupt_batch"))[1] < 0.15


class StretchTooHigh(NoWarmup):
    """The plan has a stretch of twelve steps at a rate that is far too high, and is as it was after it."""

    at = 40

    def world(self) -> Any:
        world = super().world()
        world.share = self.share
        return world

    def share(self, step: int) -> float:
        return 1.0 if self.at <= step < self.at + 12 else 1e-5


class Rates(L.Callback):
    """The rate that each step was taken with, by step; of a step that was taken again the newest."""

    def __init__(self) -> None:
        self.used: dict[int, float] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def note(optimizer: Any, *_: Any) -> None:
            self.used[trainer.global_step] = optimizer.param_groups[0]["lr"]

        trainer.optimizers[0].register_step_pre_hook(note)


def test_a_rate_that_the_plan_has_too_high_is_made_smaller_for_a_while() -> None:
    # Going back alone meets the same plan again. With the smaller rate in force it helps, and the plan comes back.
    fault, rates = StretchTooHigh(0, 1), Rates()
    run = go("stretch", case=fault, steps=90, more=[rates], lr_factor=0.02, lr_steps=20)
    unhurt = go("stretch", case=StretchTooHigh(0, 1), strikes=False, steps=90)
    assert_back(run, unhurt, ["rollback_replay", "reduce_lr", "rollback_replay"])
    assert run.incidents[0].verdict.culprits == ("optimizer:lr",)
    [started], [ended] = run.sink.named("experiment.started"), run.sink.named("experiment.ended")
    assert (started["kind"], started["factor"], started["until"] - started["from"]) == ("reduce_lr", 0.02, 21)
    assert ended["until"] == started["until"] < 80
    back = run.incidents[0].actions[-1]["to_step"]
    planned = {step: fault.peak * fault.share(step) for step in rates.used}
    reduced = {s: rates.used[s] / planned[s] for s in range(back, started["until"])}
    assert reduced == pytest.approx(dict.fromkeys(reduced, 0.02), rel=1e-9)
    assert any(planned[s] == fault.peak for s in reduced)  # the damaged steps were taken again, at the lower rate
    later = range(started["until"], 90)
    assert [rates.used[s] for s in later] == pytest.approx([planned[s] for s in later], rel=1e-12)


def test_a_quarantine_has_a_budget() -> None:
    spoilt = OutOfRangeToken(0, 1)
    spoilt.duration = None  # type: ignore[misc]
    ladders = {"data/neutralised": ["quarantine", "quarantine", "quarantine", "stop"]}
    run = go("spoilt", case=spoilt, ladders=ladders, budgets={"quarantine": 2})
    assert run.exit_code == EXIT_CODE_STOPPED
    assert run.actions == ["quarantine", "quarantine", "stop"]
    assert "passed over quarantine: budget of 2 in 1000 steps is spent" in run.last_words
    assert len(run.excluded) == 2


class MomentsAndForward(TransientNan):
    """Memory goes bad once: one forward is not finite, and the second moments are lost before they were used."""

    passing = True

    def strike(self, trainer: Any, world: Any, batch: Any) -> None:
        for state in trainer.optimizers[0].state.values():
            state["exp_avg_sq"].fill_(1e-14)


def test_moments_that_were_lost_before_an_update_are_restored_alone() -> None:
    ladders = {"optimization/state": ["restore_optimizer", "stop"]}
    run = go("moments", case=MomentsAndForward(0, 1), ladders=ladders)
    assert_back(run, clean("corrupt_batch"), ["restore_optimizer"])
    assert run.incidents[0].verdict.culprits == ("optimizer:exp_avg_sq",)


class ScaleTooHigh(Fp16Overflow):
    """The loss scale is set 2**18 times too high, as by a wrong growth factor."""

    kind, passing = "numerics", True

    def strike(self, trainer: Any, world: Any, batch: Any) -> None:
        trainer.precision_plugin.scaler.update(2.0**28)
        world.armed = False  # the gradients themselves are as they were


def test_a_loss_scale_far_too_high_is_lowered() -> None:
    ladders = {"numerics/scale": ["lower_loss_scale", "lower_loss_scale", "lower_loss_scale", "stop"]}
    run = go("scale", case=ScaleTooHigh(0, 1), ladders=ladders)
    unhurt = go("scale", case=ScaleTooHigh(0, 1), strikes=False)
    assert_back(run, unhurt, ["lower_loss_scale"] * len(run.actions))
    assert 1 <= len(run.actions) <= 2
    scales = {e["step"]: e["loss_scale"] for e in run.sink.steps()}
    step = run.incidents[0].actions[0]["step"]
    assert scales[step + 1] == scales[step] / 16
    assert [e["step"] for e in run.sink.steps() if not e["applied"]] == list(range(44, 44 + 6 + len(run.actions) - 1))


def test_when_the_budget_is_spent_the_run_stops_with_the_history_in_its_last_words() -> None:
    run = go("exploding_residual", steps=80, budgets={"rollback_skip": 1, "rollback_replay": 1, "skip_step": 1})
    assert run.exit_code == EXIT_CODE_STOPPED == 77
    last = run.incidents[-1]
    told = [a["action"] for a in last.actions]
    assert told[-1] == "stop"
    assert len(told) >= 3
    assert any("budget of 1 in 1000 steps is spent" in p for p in last.actions[-1]["passed_over"])
    words = run.last_words
    assert words.startswith(f"training stops at step {last.actions[-1]['step']}: incident {last.number} (numerics")
    assert "module:model.layers.1.mixer" in words
    places = [words.index(f"step {a['step']}: {a['action']} ({a['reason']})") for a in last.actions]
    assert places == sorted(places)
    assert words.endswith("Exit code 77.")
    assert all(torch.isfinite(w).all() for w in run.weights.values())


def test_the_examinations_of_one_incident_share_its_budget() -> None:
    run = go("exploding_residual", steps=80, max_forwards=10)
    (incident,) = run.incidents
    verdicts = [e["verdict"] for e in run.sink.named("triage.verdict")]
    spent = [v["evidence"]["forwards"] for v in verdicts]
    assert len(spent) >= 5  # each answer that did not help had it examined again
    assert spent[:3] == [3, 3, 3]
    assert sum(spent) <= 10
    said = f"The budget of this incident is spent ({sum(spent)} of 10 forward passes"
    assert [said in v["sentence"] for v in (verdicts[0], verdicts[-1])] == [False, True]
    assert any(e["result"] == "not run: budget spent" for e in verdicts[-1]["experiments"])
    assert verdicts[-1]["culprits"] == verdicts[0]["culprits"] == ("module:model.layers.1.mixer",)
    assert verdicts[-1]["sentence"].startswith(f"As found before: {verdicts[-1]['evidence']['stands']} The budget")
    assert verdicts[-1]["sentence"].count("The budget of this incident") == 1
    assert incident.actions[-1]["action"] == "stop"
