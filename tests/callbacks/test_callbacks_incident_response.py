"""The response in real runs: what reaches the weights, what is written down, when it stops."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from sentinel_kit import Loader, Net, Sink, make_trainer, same_bits, weights

from lightning_sentinel import (
    ForensicCheckpoint,
    IncidentResponse,
    LossScaleMonitor,
    NonFiniteTracer,
    RankTelemetry,
    Rollback,
    RunJournal,
)
from lightning_sentinel.actuator import Actuator
from lightning_sentinel.callbacks.incident_response import EXIT_CODE_STOPPED, TrainingStopped
from lightning_sentinel.context import context_of
from lightning_sentinel.faults.computation import with_backward
from lightning_sentinel.incidents import Finding, FindingKind
from lightning_sentinel.journal import read_journal
from lightning_sentinel.record import StepRecord
from lightning_sentinel.report.data import load_run
from lightning_sentinel.report.summary import summarise

NAN = math.nan


def suite(**options: Any) -> list[L.Callback]:
    return [
        NonFiniteTracer(),
        RankTelemetry(),
        IncidentResponse(**{"probation_steps": 8, **options}),
        Rollback(every_n_steps=5, keep=3),
    ]


def fit(module: L.LightningModule, callbacks: list[L.Callback], **options: Any) -> tuple[L.Trainer, Sink]:
    trainer, sink = make_trainer(callbacks, **options)
    torch.manual_seed(7)
    trainer.fit(module, Loader())
    return trainer, sink


def net(**options: Any) -> Net:
    torch.manual_seed(1)
    return Net(**options)


def incidents(trainer: L.Trainer) -> list[Any]:
    return context_of(trainer).incidents


def test_no_incident_changes_nothing() -> None:
    bare, watched = net(), net()
    fit(bare, [])
    trainer, sink = fit(watched, suite(mode="recover"))
    assert same_bits(weights(bare), weights(watched))
    assert incidents(trainer) == []
    assert sink.named("incident.opened", "action.skip_step") == []


def test_observe_watches_and_lets_it_pass() -> None:
    module = net(gains={30: NAN})
    trainer, _ = fit(module, suite(mode="observe"), max_steps=33)
    assert incidents(trainer)[0].opened_step == 30
    assert incidents(trainer)[0].actions == []
    assert not torch.isfinite(module.first.weight).any()


@pytest.mark.parametrize("mode", ["guard", "recover"])
def test_a_reproducible_nan_never_reaches_weights_moments_or_buffers(mode: str) -> None:
    module = net(gains={30: NAN})
    trainer, sink = fit(module, suite(mode=mode), max_steps=31)
    healthy = net()
    fit(healthy, [], max_steps=30)
    assert same_bits(weights(module), weights(healthy))
    state = next(iter(trainer.optimizers[0].state.values()))
    assert float(state["step"]) == 30.0
    (incident,) = incidents(trainer)
    assert [a["action"] for a in incident.actions] == ["skip_step"]
    assert incident.verdict.kind == "numerics"
    assert [e["applied"] for e in sink.steps()] == [True] * 30 + [False]


def test_guard_keeps_the_update_out_and_quarantines_nobody() -> None:
    class Alarm(L.Callback):
        """Names a bad sample at step 30."""

        def observe(self, record: StepRecord) -> list[Finding]:
            if record.step != 30:
                return []
            return [Finding(FindingKind.INVALID_BATCH, "alarm", 30, 1.0, 0.0, "bad", culprits=("sample:s120",))]

    answered = {}
    for mode in ("guard", "recover"):
        trainer, sink = fit(net(gains={30: NAN}), [Alarm(), *suite(mode=mode)], max_steps=33)
        (incident,) = incidents(trainer)
        assert (incident.verdict.kind, [a["action"] for a in incident.actions]) == ("data", ["skip_step"])
        answered[mode] = [e["names"] for e in sink.named("quarantine.added")]
    assert answered == {"guard": [], "recover": [["sample:s120"]]}


def test_a_transient_nan_is_tried_again_and_leaves_no_trace() -> None:
    clean, module = net(), net(gains={30: NAN}, once=True)
    fit(clean, [])
    trainer, _ = fit(module, suite(mode="recover"))
    assert module.struck == [30]
    assert same_bits(weights(clean), weights(module))
    (incident,) = incidents(trainer)
    assert incident.verdict.kind == "infrastructure"
    assert incident.verdict.reproducible is False
    assert [a["action"] for a in incident.actions] == ["retry_step"]
    assert incident.status == "recovered"
    assert context_of(trainer).attempt == 1


def test_an_incident_is_said_once_when_it_opens_and_once_when_it_closes(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    run = tmp_path / "my run"
    journal = RunJournal(run, report=False)
    trainer, _ = make_trainer([journal, *suite(mode="recover")], max_steps=90)
    with caplog.at_level(logging.INFO, "lightning_sentinel"):
        torch.manual_seed(0)
        trainer.fit(net(gains={30: NAN}, once=True), Loader())
    (incident,) = incidents(trainer)
    assert incident.status == "recovered"
    command = f" Look: lightning-sentinel report '{run}'"
    said = [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("lightning_sentinel")]
    opened = [(level, words) for level, words in said if words.startswith("incident 1 at step 30: ")]
    closed = [(level, words) for level, words in said if words.startswith("incident 1 recovered: ")]
    assert [level for level, _ in opened] == ["WARNING"]
    assert opened[0][1].endswith(command)
    assert closed == [("INFO", f"incident 1 recovered: {incident.closing}.{command}")]
    assert len([words for _, words in said if words.endswith(command)]) == 2


def test_an_incident_that_does_not_come_back_is_an_error(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    class Worse(L.Callback):
        """The loss is twice as high from the incident on, whatever is done."""

        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            batch["y"] *= 3.0 if trainer.global_step > 60 else 1.0

    journal = RunJournal(tmp_path / "run", report=False)
    trainer, _ = make_trainer([Worse(), journal, *suite(mode="guard", probation_steps=5)], max_steps=90)
    with caplog.at_level(logging.INFO, "lightning_sentinel"):
        torch.manual_seed(0)
        trainer.fit(net(gains={60: NAN}), Loader())
    (incident,) = incidents(trainer)
    assert incident.status == "escalated"
    said = [(r.levelname, r.getMessage()) for r in caplog.records if "incident 1 escalated" in r.getMessage()]
    assert said == [
        ("ERROR", f"incident 1 escalated: {incident.closing}. Look: lightning-sentinel report {tmp_path / 'run'}")
    ]


def test_a_run_that_cannot_be_helped_stops_visibly_with_its_exit_code(caplog: pytest.LogCaptureFixture) -> None:
    module = net(gains=dict.fromkeys(range(30, 200), NAN))
    trainer, sink = make_trainer(suite(mode="recover"), max_steps=200)
    torch.manual_seed(7)
    with pytest.raises(TrainingStopped) as stopped:
        trainer.fit(module, Loader())
    assert stopped.value.code == EXIT_CODE_STOPPED == 77
    words = str(stopped.value)
    (incident,) = incidents(trainer)
    step = incident.actions[-1]["step"]
    tried = ", ".join(a["action"] for a in incident.actions[:-1])
    assert (incident.status, incident.closed_step) == ("escalated", step)
    assert incident.closing == (
        f"the run stops at step {step}: {tried} did not help, and numerics/step has no further answer"
    )
    assert [e["incident"] for e in sink.named("incident.closed")] == [incident.to_dict()]
    assert sink.named("incident.opened", "incident.updated", "incident.closed")[-1]["event"] == "incident.closed"
    errors = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert errors == [f"incident 1 escalated: {incident.closing}.", words]
    assert "incident 1 (numerics" in words
    assert words.index("skip_step") < words.index("rollback_skip") or "rollback_skip" not in words
    assert all(torch.isfinite(p).all() for p in module.parameters())


LADDER = [
    ("skip_step", None),
    ("retry_step", None),
    ("rollback_replay", None),
    ("rollback_skip", None),
    ("reduce_lr", None),
    ("restore_optimizer", None),
    ("lower_loss_scale", 2.0**10),
]


@pytest.mark.parametrize(("action", "scale"), LADDER, ids=[a for a, _ in LADDER])
def test_every_action_has_a_budget_and_a_spent_one_ends_the_run_with_the_history(
    action: str, scale: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    module = net(gains=dict.fromkeys(range(30, 200), NAN))
    case = "numerics/step" if scale is None else "numerics/scale"
    response = suite(mode="recover", ladders={case: [*[action] * 9, "stop"]}, budgets={action: 2})
    plugins = (
        [] if scale is None else [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))]
    )
    with pytest.raises(TrainingStopped) as stopped:
        fit(module, response, max_steps=200, plugins=plugins)
    assert stopped.value.code == EXIT_CODE_STOPPED
    words = str(stopped.value)
    told = [
        f"{action} ({case}, answer 1)",
        f"{action} ({case}, answer 2)",
        f"stop ({case}, answer 3), passed over {action}:",
    ]
    assert [words.count(t) for t in told] == [1, 1, 1]
    assert sorted(told, key=words.index) == told
    assert f"{action}: budget of 2 in 1000 steps is spent" in words
    assert words.endswith("Exit code 77.")
    # The last lines that a person sees of the run.
    assert words in [r.getMessage() for r in caplog.records if r.levelname == "ERROR"][-1]
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_the_launcher_sees_the_exit_code_and_the_last_lines_tell_the_ladder_s_history(tmp_path: Path) -> None:
    program = """
import sys, math, torch
from sentinel_kit import Loader, Net, make_trainer
from lightning_sentinel import default_callbacks
torch.manual_seed(1)
trainer, _ = make_trainer(default_callbacks(sys.argv[1], "recover"), max_steps=200)
trainer.fit(Net(gains=dict.fromkeys(range(30, 200), math.nan)), Loader())
print("never reached")
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == EXIT_CODE_STOPPED == 77, done.stderr[-2000:]
    assert "never reached" not in done.stdout
    [last] = [line for line in done.stderr.splitlines()[-3:] if "training stops at step" in line]
    assert "Tried: step 30: skip_step (numerics/step, answer 1); step 31: skip_step (numerics/step, answer 2)" in last
    assert "rollback_skip" in last
    assert "stop (numerics/step, answer 5)" in last
    assert "Exit code 77." in last
    events = list(read_journal(tmp_path / "run"))
    assert [e["status"] for e in events if e["event"] == "run.ended"] == ["stopped"]
    [closed] = [e["incident"] for e in events if e["event"] == "incident.closed"]
    [bundle] = (tmp_path / "run").rglob("incident.json")
    assert json.loads(bundle.read_text())["incident"]["status"] == closed["status"] == "escalated"
    assert [e for e in events if e["event"] == "checkpoint.known_good" and e["checkpoint_step"] > 30] == []
    summary = summarise(load_run(tmp_path / "run"))
    assert summary["headline"] == "The run was stopped by the policy; 1 incident: 1 escalated."
    assert summary["open_incidents"] == []


def test_a_run_that_was_stopped_goes_on_from_before_the_incident_which_stays_escalated(tmp_path: Path) -> None:
    def start(gains: dict[int, float], steps: int) -> L.Trainer:
        saver = ForensicCheckpoint(every_n_steps=10, probation_steps=8)
        callbacks = [RunJournal(tmp_path, report=False), *suite(mode="recover"), saver]
        trainer, _ = make_trainer(callbacks, max_steps=steps)
        torch.manual_seed(7)
        try:
            trainer.fit(net(gains=gains), Loader())
        except TrainingStopped:
            assert gains
        return trainer

    always = dict.fromkeys(range(35, 200), NAN)
    first = start(always, 200)
    assert [(i.number, i.status) for i in incidents(first)] == [(1, "escalated")]
    saved = [e for e in read_journal(tmp_path) if e["event"] == "checkpoint.saved" and e["status"] != "exception"]
    assert [e["checkpoint_step"] for e in saved] == [10, 20, 30]  # nothing that came after is a restart point
    # Started again the trouble is there again, as an incident of its own; where it is not, the run goes through.
    again = start(always, 200)
    assert context_of(again).restart_step is not None
    assert [(i.number, i.opened_step, i.status) for i in incidents(again)] == [
        (1, 35, "escalated"),
        (2, 35, "escalated"),
    ]
    mended = start({}, 60)
    assert mended.global_step == 60
    assert [(i.number, i.status) for i in incidents(mended)] == [(1, "escalated"), (2, "escalated")]
    closed = [e["incident"]["number"] for e in read_journal(tmp_path) if e["event"] == "incident.closed"]
    assert closed == [1, 2]


def test_stop_without_raising() -> None:
    module = net(gains=dict.fromkeys(range(30, 200), NAN))
    response = suite(mode="recover", exit_on_stop=False)
    trainer, sink = fit(module, response, max_steps=200)
    assert trainer.global_step < 60
    assert sink.named("action.stop")[0]["incident"] == 1


def test_steps_that_lightning_still_makes_after_a_stop_open_no_further_incident() -> None:
    module = net(gains=dict.fromkeys(range(30, 200), NAN))
    trainer, sink = fit(module, suite(mode="recover", exit_on_stop=False), max_steps=200, min_steps=45)
    assert trainer.global_step >= 45  # skipped ones: the trainer's minimum holds
    (incident,) = incidents(trainer)
    assert (incident.status, incident.closed_step) == ("escalated", sink.named("action.stop")[0]["step"])
    assert len(sink.named("action.stop")) > 1
    assert len(sink.named("incident.closed")) == 1
    assert [i.number for i in context_of(trainer).unsolved()] == [1]
    assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.parametrize("rate", [0.02, torch.tensor(0.02, dtype=torch.float64)], ids=["number", "tensor"])
def test_a_temporary_rate_reduction_ends_and_the_schedule_never_saw_it(rate: Any) -> None:
    rates: list[float] = []
    here: set[int] = set()

    class Spy(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            trainer.optimizers[0].register_step_pre_hook(self.look)

        def look(self, optimizer: Any, *_: Any) -> None:
            rates.append(float(optimizer.param_groups[0]["lr"]))
            here.add(id(optimizer.param_groups[0]["lr"]))

    module = net(gains={20: NAN}, rate=rate)
    ladders = {"numerics/step": ["reduce_lr", "stop"]}
    callbacks = [*suite(mode="recover", ladders=ladders, lr_factor=0.5, lr_steps=6), Spy()]
    trainer, sink = fit(module, callbacks, max_steps=40)
    planned = [0.02 * 0.999**i for i in range(40)]
    ratio = [round(r / p, 6) for r, p in zip(rates, planned, strict=True)]
    assert ratio[:21] == [1.0] * 21  # step 20 itself is held
    assert ratio[21:27] == [0.5] * 6
    assert ratio[27:] == [1.0] * 13
    assert [i.number for i in incidents(trainer)] == [1]  # the reduced rate is not taken for a wrong one
    assert float(trainer.optimizers[0].param_groups[0]["lr"]) == pytest.approx(0.02 * 0.999**40, rel=1e-9)
    if isinstance(rate, torch.Tensor):
        assert here == {id(trainer.optimizers[0].param_groups[0]["lr"])}  # as a captured step needs it
    assert [e["kind"] for e in sink.named("experiment.started", "experiment.ended")] == ["reduce_lr", "reduce_lr"]


def test_restored_moments_leave_a_rate_alone_that_is_a_tensor() -> None:
    layer, rate = torch.nn.Linear(2, 1), torch.tensor(0.5)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=rate)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    older = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    rate.fill_(0.125)  # the schedule has gone on
    Actuator.restore_optimizers(SimpleNamespace(optimizers=[optimizer]), [older])  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.125
    assert float(optimizer.state[layer.weight]["step"]) == 1.0


def test_a_permanent_reduction_starts_a_new_experiment() -> None:
    ladders = {"numerics/step": ["reduce_lr", "stop"]}
    callbacks = suite(mode="recover", ladders=ladders, lr_permanent=True)
    trainer, sink = fit(net(gains={20: NAN}), callbacks, max_steps=40)
    assert sink.named("experiment.started")[0]["experiment"] == "lr-1-20"
    assert context_of(trainer).scratch["experiment"] == "lr-1-20"
    assert sink.named("experiment.ended") == []


def test_lower_loss_scale_under_a_real_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    ladders = {"numerics/scale": ["lower_loss_scale", "stop"]}
    callbacks = suite(mode="recover", ladders=ladders)
    fit(net(gains={10: NAN}), callbacks, max_steps=12, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert scaler.get_scale() == 512.0 / 16


def test_trouble_that_comes_again_at_its_step_is_the_same_incident_whatever_came_on_the_way() -> None:
    """An ordinary overflow of the gradient at step 25, only on the way back to the step 27 that is not finite."""

    class OnTheWay(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            way = self.trainer.global_step == 25 and context_of(self.trainer).attempt == 1
            return with_backward(out, lambda grad: grad * 1e38) if way else out

    torch.manual_seed(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    callbacks = [LossScaleMonitor(), *suite(mode="recover", exit_on_stop=False)]
    trainer, _ = fit(
        OnTheWay(gains={27: NAN}), callbacks, max_steps=40, plugins=[MixedPrecision("16-mixed", "cpu", scaler)]
    )
    [incident] = incidents(trainer)
    assert incident.opened_step == 27
    assert [(a["action"], a["step"]) for a in incident.actions] == [
        ("rollback_skip", 27),
        ("skip_step", 25),
        ("skip_step", 27),
    ]


@pytest.mark.parametrize("fused", [False, True])
def test_held_under_fp16_with_and_without_a_fused_optimizer(fused: bool) -> None:
    class Fused(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.02, fused=fused)

    def made(**options: Any) -> Fused:
        torch.manual_seed(1)
        return Fused(**options)

    def run(module: Fused, callbacks: list[L.Callback], steps: int) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        fit(module, callbacks, max_steps=steps, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
        return scaler.get_scale()

    healthy, module = made(), made(gains={15: NAN})
    run(healthy, [], 15)
    assert run(module, suite(mode="guard"), 16) == 256.0  # the scale is not halved for a step that was held
    assert same_bits(weights(healthy), weights(module))


def test_an_earlier_optimizer_of_the_same_batch_is_undone() -> None:
    class Two(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b = torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)
            self.automatic_optimization = False
            self.batches = 0

        def training_step(self, batch: Any, batch_idx: int) -> None:
            bad = "s80" in batch["sample_id"]
            for optimizer, layer in zip(self.optimizers(), (self.a, self.b), strict=True):
                optimizer.zero_grad()
                loss = (layer(batch["x"]) - batch["y"]).square().mean()
                self.manual_backward(loss * NAN if bad and layer is self.b else loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(self.a.parameters(), 0.01), torch.optim.Adam(self.b.parameters(), 0.01)]

    module = Two()
    trainer, sink = fit(module, suite(mode="recover"), max_steps=80)
    without = Two()
    clean, _ = make_trainer([], max_steps=80)
    loader = Loader()
    loader.exclude([f"sample:s{i}" for i in range(80, 84)])
    torch.manual_seed(7)
    clean.fit(without, loader)
    assert same_bits(weights(module), weights(without))
    assert incidents(trainer)[0].opened_step == 41
    assert sink.steps()[-1]["tokens"] == 4 * 40  # a batch counts once, however many optimizers step in it


def test_restore_optimizer_takes_moments_back_and_leaves_weights_and_rate() -> None:
    ladders = {"numerics/step": ["restore_optimizer", "stop"]}
    module = net(gains={30: NAN})
    trainer, sink = fit(module, suite(mode="recover", ladders=ladders), max_steps=31)
    snapshot = [s for s in context_of(trainer).snapshots if s.step <= 30][-1]
    optimizer = trainer.optimizers[0]
    saved = snapshot.optimizers[0]["state"]
    for i, parameter in enumerate(module.parameters()):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], saved[i]["exp_avg"])
        assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], saved[i]["exp_avg_sq"])
    healthy = net()
    fit(healthy, [], max_steps=30)
    assert same_bits(weights(module), weights(healthy))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02 * 0.999**31)
    assert sink.named("action.restore_optimizer")[0]["incident"] == 1


def test_state_survives_in_the_middle_of_an_incident() -> None:
    response = IncidentResponse(mode="recover", probation_steps=8)
    callbacks = [NonFiniteTracer(), RankTelemetry(), response, Rollback(every_n_steps=5, keep=3)]
    trainer, _ = fit(net(gains={30: NAN}), callbacks, max_steps=33)
    state = response.state_dict()
    other = IncidentResponse(mode="recover", probation_steps=8)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert list(other._watched) == [1]
    spent = response._watched[1].spent
    assert spent.forwards == context_of(trainer).incidents[0].verdict.evidence["forwards"] > 0
    assert spent.seconds > 0.0
    assert other._watched[1].spent == spent


def test_an_open_incident_is_closed_after_lightning_has_resumed(tmp_path: Path) -> None:
    file = tmp_path / "middle.ckpt"

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 33 and not file.exists():
                trainer.save_checkpoint(file)

    fit(net(gains={30: NAN}), [*suite(mode="recover"), Save()], max_steps=34)
    resumed, sink = make_trainer(suite(mode="recover"), max_steps=60)
    resumed.fit(net(), Loader(), ckpt_path=file, weights_only=False)
    (incident,) = incidents(resumed)
    assert (incident.number, incident.opened_step, incident.status) == (1, 30, "recovered")
    assert [e["incident"]["number"] for e in sink.named("incident.closed")] == [1]


def test_two_causes_two_steps_apart_are_two_incidents() -> None:
    class Twice(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * NAN if "s128" in batch["sample_id"] else loss

    torch.manual_seed(1)
    module = Twice(gains={30: NAN}, once=True)
    trainer, _ = fit(module, suite(mode="recover"))
    first, second = incidents(trainer)
    assert (first.opened_step, [a["action"] for a in first.actions]) == (30, ["retry_step"])
    assert (second.opened_step, [a["action"] for a in second.actions]) == (32, ["skip_step"])
    assert (first.verdict.kind, second.verdict.kind) == ("infrastructure", "numerics")


@pytest.mark.filterwarnings("ignore:.*Rollback is off.*")
def test_without_a_cursor_a_transient_nan_is_skipped_and_training_goes_on() -> None:
    class Plain:
        def __iter__(self) -> Any:
            return iter(Loader())

    module = net(gains={30: NAN}, once=True)
    trainer, _ = make_trainer(suite(mode="recover"))
    torch.manual_seed(7)
    trainer.fit(module, Plain())
    (incident,) = incidents(trainer)
    assert [a["action"] for a in incident.actions] == ["skip_step"]
    assert trainer.global_step == 60
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_the_rate_is_held_to_the_plan_after_a_wrong_one() -> None:
    class Wrong(L.Callback):
        """Multiplies the rate by 40 at steps 40 and 41, and again at 44 in the second attempt."""

        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            attempt, step = context_of(trainer).attempt, trainer.global_step
            if (attempt == 0 and step in (40, 41)) or (attempt == 1 and step == 44):
                for group in trainer.optimizers[0].param_groups:
                    group["lr"] *= 40

    class Alarm(L.Callback):
        """States a spike at step 42 of the first attempt."""

        def observe(self, record: StepRecord) -> list[Finding]:
            if (record.attempt, record.step) != (0, 42):
                return []
            return [Finding(FindingKind.SPIKE, "alarm", 42, 20.0, 8.0, "a spike", since_step=41)]

    module, clean = net(), net()
    fit(clean, [])
    trainer, sink = fit(module, [Wrong(), Alarm(), *suite(mode="recover", probation_steps=12)])
    assert incidents(trainer)[0].verdict.culprits == ("optimizer:lr",)
    assert [e["reason"] for e in sink.named("lr.changed")] == ["held to the plan"]
    assert len(incidents(trainer)) == 1
    assert same_bits(weights(clean), weights(module))


def test_without_telemetry_it_says_what_to_add() -> None:
    with pytest.raises(ValueError, match=r"Add lightning_sentinel\.RankTelemetry\(\) to the Trainer's callbacks"):
        fit(net(), [IncidentResponse()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probation_steps": 0}, "probation_steps must be at least 1"),
        ({"lr_factor": 1.5}, "lr_factor must be greater than 0 and less than 1"),
        ({"recovered_z": -1.0}, "recovered_z must be greater than 0"),
        ({"mode": "watch"}, "mode is 'watch', expected one of observe, guard, recover"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IncidentResponse(**options)
