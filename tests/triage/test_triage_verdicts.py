"""Verdicts on faults in the real computation: the kind, the culprit, since when, and no trace of the examination."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from triage_models import Net, fingerprint, fit

from lightning_sentinel import IncidentResponse, LossScaleMonitor, NonFiniteTracer, RankTelemetry
from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import Finding, FindingKind, Incident, Verdict, VerdictKind
from lightning_sentinel.state.snapshot import take
from lightning_sentinel.triage import investigate
from lightning_sentinel.triage.sandbox import is_replaying

STEP = 32
Hurt = Callable[[L.Trainer, Any, Any], None]


class Smooth(Net):
    """A regression without noise, so that a jump is a jump; inputs of 32 steps repeat every 12 batches."""

    def __init__(self, kind: str = "") -> None:
        super().__init__(kind)
        self.drop = torch.nn.Identity()


class Case(L.Callback):
    """Takes snapshots, does the harm, and has the incident examined at its step. Stands before the telemetry."""

    def __init__(self, hurt: Hurt | None, at: int, findings: list[Finding] | None = None, examine: bool = True) -> None:
        self.hurt, self.at, self.examine, self.findings = hurt, at, examine, findings
        self.verdicts: list[Verdict] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in (10, 20, 30):
            context_of(trainer).snapshots.append(take(trainer))
        if self.hurt is not None and trainer.global_step == self.at:
            self.hurt(trainer, pl_module, batch)


class Gavel(L.Callback):
    """Stands behind the telemetry: the record is there, the update is not."""

    def __init__(self, case: Case, kind: FindingKind, at: int, since: int, options: dict[str, Any]) -> None:
        self.case, self.kind, self.at, self.since, self.options = case, kind, at, since, options

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step != self.at or not self.case.examine:
            return
        findings = self.case.findings
        if findings is None:
            findings = [Finding(self.kind, "test", self.at, 1.0, 0.0, "it jumped", since_step=self.since)]
        incident = Incident(1, self.at, self.since, 0, 0, findings=findings)
        record = context_of(trainer).record
        self.case.verdicts.append(investigate(trainer, pl_module, optimizer, incident, record, **self.options))


def run(
    hurt: Hurt | None,
    kind: FindingKind = FindingKind.SPIKE,
    *,
    at: int = STEP,
    since: int | None = None,
    module: Any = None,
    hurt_at: int = STEP,
    findings: list[Finding] | None = None,
    examine: bool = True,
    fit_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Verdict | None, list[str]]:
    module = module or Smooth()
    case = Case(hurt, hurt_at, findings, examine)
    gavel = Gavel(case, kind, at, at if since is None else since, options)
    callbacks = [case, NonFiniteTracer(), RankTelemetry(), gavel]
    trainer = fit(module, callbacks, steps=at + 2, **(fit_options or {}))
    return (case.verdicts[0] if case.verdicts else None), fingerprint(trainer, module)


def _names(verdict: Verdict) -> list[str]:
    return [e.name for e in verdict.experiments]


def _wrong_targets(trainer: Any, module: Any, batch: Any) -> None:
    batch["y"] = batch["y"] + 30.0


def _one_wrong_target(trainer: Any, module: Any, batch: Any) -> None:
    batch["y"] = batch["y"].clone()
    batch["y"][2] += 60.0


def _rate(trainer: Any, module: Any, batch: Any) -> None:
    for group in trainer.optimizers[0].param_groups:
        group["lr"] *= 50.0


def _moments(trainer: Any, module: Any, batch: Any) -> None:
    for state in trainer.optimizers[0].state.values():
        state["exp_avg_sq"].fill_(1e-14)


def _weights(trainer: Any, module: Any, batch: Any) -> None:
    module.head.weight.data[0] += 5.0


def test_a_bad_batch_is_data_and_all_its_samples_are_named() -> None:
    verdict, _ = run(_wrong_targets)
    assert verdict is not None
    ids = tuple(f"s{i}" for i in range((STEP % 12) * 4, (STEP % 12) * 4 + 4))
    assert verdict.kind is VerdictKind.DATA
    assert verdict.culprits == tuple(f"sample:{i}" for i in ids)
    assert (verdict.sample_ids, verdict.since_step, verdict.reproducible) == (ids, STEP, True)
    assert set(verdict.evidence["comparisons"]) == {
        "token_level_losses",
        "rank_values",
        "gradient_norms",
        "activation_norms",
        "first_deviating_layer",
        "first_deviating_gradient",
        "first_layer_apart_from_a_healthy_batch",
        "input_manifest",
    }
    assert verdict.evidence["comparisons"]["first_deviating_layer"] is None  # one rank: nobody to compare with
    assert verdict.evidence["comparisons"]["first_deviating_gradient"] is None
    assert verdict.evidence["comparisons"]["input_manifest"][0]["sample_ids"] == list(ids)
    values = verdict.evidence["comparisons"]["rank_values"]
    assert values["topology"] == {"ranks": 1, "nodes": 1, "strategy": "SingleDeviceStrategy"}
    assert {name: len(seconds) for name, seconds in values["seconds"].items()} == {"step": 1, "data": 1, "wait": 1}
    by_layer = verdict.evidence["comparisons"]["gradient_norms"]["rms_by_layer"]
    assert by_layer
    assert all(x > 0 for x in by_layer.values())


def test_one_bad_sample_in_a_batch_is_named_alone() -> None:
    verdict, _ = run(_one_wrong_target)
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DATA, (f"sample:s{(STEP % 12) * 4 + 2}",))


@pytest.mark.parametrize(
    ("hurt", "kind", "culprits", "since"),
    [
        (_rate, VerdictKind.OPTIMIZATION, ("optimizer:lr",), STEP),
        (_moments, VerdictKind.OPTIMIZATION, ("optimizer:exp_avg_sq",), 30),
        (_weights, VerdictKind.INFRASTRUCTURE, ("parameter:head.weight", "rank:0"), 30),
    ],
)
def test_damage_to_the_state_is_told_from_data(hurt: Hurt, kind: VerdictKind, culprits: Any, since: int) -> None:
    verdict, _ = run(hurt, at=STEP + 1)
    assert verdict is not None
    assert (verdict.kind, verdict.culprits, verdict.since_step) == (kind, culprits, since)


def test_nothing_wrong_is_undetermined() -> None:
    verdict, _ = run(None)
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == (VerdictKind.UNDETERMINED, ())
    assert "replay" in _names(verdict)


@pytest.mark.parametrize("hurt", [None, _wrong_targets])
@pytest.mark.parametrize("fit_options", [{}, {"accumulate_grad_batches": 2}])
def test_an_examination_leaves_no_trace(hurt: Hurt | None, fit_options: dict[str, Any]) -> None:
    prints = [run(hurt, examine=examine, fit_options=fit_options)[1] for examine in (False, True)]
    assert prints[0] == prints[1]


def test_a_computation_that_went_wrong_once_is_infrastructure() -> None:
    def once(trainer: Any, module: Any, batch: Any) -> None:
        fired: list[int] = []

        def hook(m: Any, args: Any, output: Any) -> Any:
            if not fired:
                fired.append(1)
                return output + 30.0
            return output

        module.head.register_forward_hook(hook)

    verdict, _ = run(once)
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == (VerdictKind.INFRASTRUCTURE, ("rank:0",))
    assert (verdict.reproducible, verdict.since_step) == (False, STEP)


def test_a_non_finite_step_is_numerics_with_the_module() -> None:
    verdict, _ = run(None, FindingKind.NONFINITE_LOSS, at=3, module=Smooth("root"), fit_options={"kind": "root"})
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NUMERICS, ("module:blocks.1.mixer",))
    assert (verdict.sample_ids, verdict.since_step, verdict.reproducible) == (("s14",), 3, True)
    assert verdict.evidence["operator"] == "aten.sqrt.default"
    [wider] = [e for e in verdict.experiments if e.name == "wider dtype"]
    assert wider.result == "not finite in float64 either"


@pytest.mark.parametrize("fault", ["kernel", "where"])
def test_a_gradient_without_a_value_has_none_in_wider_numbers_either(fault: str) -> None:
    verdict, _ = run(None, FindingKind.NONFINITE_GRADS, at=3, module=Smooth(fault), fit_options={"kind": fault})
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NUMERICS, ("module:blocks.1.mixer",))
    [wider] = [e for e in verdict.experiments if e.name == "wider dtype"]
    assert wider.result == "not finite in float64 either"
    assert math.isnan(wider.detail["grad_norm"])
    assert math.isfinite(wider.detail["loss"])
    assert verdict.sentence.endswith("The step is not finite in float64 either.")


def test_a_gradient_that_left_the_range_of_float32_is_finite_in_wider_numbers() -> None:
    def steep(trainer: Any, module: Any, batch: Any) -> None:
        for p in module.head.parameters():  # 1e25 times 1e25 behind it
            p.data.mul_(1e25)

    verdict, _ = run(steep, FindingKind.NONFINITE_LOSS, at=3, hurt_at=3)
    assert verdict is not None
    [wider] = [e for e in verdict.experiments if e.name == "wider dtype"]
    assert wider.result == "finite in float64"
    assert verdict.sentence.endswith("The step is finite in float64. It left the range of float32.")


def test_a_transient_value_is_infrastructure_with_module_and_rank() -> None:
    def once(trainer: Any, module: Any, batch: Any) -> None:
        fired: list[int] = []

        def hook(m: Any, args: Any, output: Any) -> Any:
            if not fired:
                fired.append(1)
                return output / torch.zeros_like(output)
            return output

        module.blocks[2].mixer.register_forward_hook(hook)

    verdict, _ = run(once, FindingKind.NONFINITE_LOSS, at=5, hurt_at=5)
    assert verdict is not None
    assert verdict.kind is VerdictKind.INFRASTRUCTURE
    assert verdict.culprits == ("module:blocks.2", "rank:0")  # live flags are at the blocks; no replay shows more
    assert (verdict.reproducible, verdict.since_step) == (False, 5)


@pytest.mark.parametrize(
    ("where", "kind", "culprits"),
    [
        ("module", VerdictKind.NUMERICS, ("module:blocks.2.mixer.wide",)),
        ("module itself", VerdictKind.UNDETERMINED, ()),
    ],
)
def test_a_scale_collapse_that_does_not_come_again_is_no_ranks_fault(where: str, kind: Any, culprits: Any) -> None:
    class Overflows(Smooth):
        """From step 2 on a gradient overflows in every step, and in no replay."""

        def __init__(self) -> None:
            super().__init__()
            self.bare = torch.nn.Parameter(torch.ones(1))
            target = self.blocks[2].mixer.wide.weight if where == "module" else self.bare
            target.register_hook(lambda g: g * math.inf if self.broken() else g)

        def broken(self) -> bool:
            return self.trainer.global_step >= 2 and not is_replaying(self.trainer)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.bare.sum()

    callbacks = [NonFiniteTracer(), LossScaleMonitor(), RankTelemetry(), IncidentResponse()]
    trainer = fit(Overflows(), callbacks, fp16=True, steps=8)
    incident = context_of(trainer).incidents[0]
    assert (incident.opened_step, incident.kinds) == (7, {FindingKind.SCALE_COLLAPSE})
    verdict = incident.verdict
    assert (verdict.kind, verdict.culprits) == (kind, culprits)
    assert (verdict.since_step, verdict.reproducible) == (2, False)
    assert verdict.sample_ids == tuple(f"s{i}" for i in range(8, 32))


def test_a_batch_that_is_not_finite_is_data() -> None:
    def spoil(trainer: Any, module: Any, batch: Any) -> None:
        batch["x"] = batch["x"].clone()
        batch["x"][1, 0] = float("nan")

    verdict, _ = run(spoil, FindingKind.NONFINITE_LOSS, at=2, hurt_at=2)
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DATA, ("sample:s9",))


def test_a_parameter_that_is_not_finite_leads_to_the_snapshot_before_it() -> None:
    def spoil(trainer: Any, module: Any, batch: Any) -> None:
        module.head.weight.data[0, 3] = float("inf")

    verdict, _ = run(spoil, FindingKind.NONFINITE_LOSS, at=STEP)
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NUMERICS, ("parameter:head.weight",))
    assert verdict.since_step == 30


@pytest.mark.parametrize(
    ("kind", "named", "verdict_kind", "culprits", "samples"),
    [
        (FindingKind.INVALID_BATCH, ("sample:a",), VerdictKind.DATA, ("sample:a",), ("a",)),
        (
            FindingKind.NO_SUPERVISED_TOKENS,
            ("sample:a", "sample:b"),
            VerdictKind.DATA,
            ("sample:a", "sample:b"),
            ("a", "b"),
        ),
        (FindingKind.REPEATED_SAMPLES, ("cursor",), VerdictKind.DATA, ("cursor",), ()),
        (FindingKind.RESTART_JUMP, ("scheduler",), VerdictKind.OPTIMIZATION, ("scheduler",), ()),
        (FindingKind.RESTART_JUMP, ("cursor",), VerdictKind.DATA, ("cursor",), ()),
        (FindingKind.NONFINITE_STATE, ("parameter:head.bias",), VerdictKind.NUMERICS, ("parameter:head.bias",), ()),
    ],
)
def test_findings_that_are_measurements_need_no_experiment(
    kind: FindingKind, named: Any, verdict_kind: VerdictKind, culprits: Any, samples: Any
) -> None:
    findings = [Finding(kind, "test", 3, 1.0, 0.0, "seen", since_step=2, culprits=named)]
    verdict, _ = run(None, kind, at=3, findings=findings, max_forwards=0)
    assert verdict is not None
    assert (verdict.kind, verdict.culprits, verdict.sample_ids) == (verdict_kind, culprits, samples)
    assert verdict.since_step == (0 if kind is FindingKind.NONFINITE_STATE else 2)
    assert verdict.evidence["forwards"] == 0


def test_the_budget_is_kept_and_said() -> None:
    verdict, _ = run(_wrong_targets, max_forwards=1)
    assert verdict is not None
    assert verdict.kind is VerdictKind.UNDETERMINED
    assert verdict.evidence["forwards"] == 1
    assert [e.name for e in verdict.experiments if e.result == "not run: budget spent"] == [
        "healthy step from its own snapshot",
        "healthy batch, current weights",
    ]


def test_a_verdict_goes_through_json() -> None:
    verdict, _ = run(_wrong_targets)
    assert verdict is not None
    assert Verdict.from_dict(verdict.to_dict()).culprits == verdict.culprits


@pytest.mark.parametrize(("moved", "kind", "culprits"), [([1], "data", ("source:code",)), ([0, 1], "undetermined", ())])
def test_a_level_shift_of_one_source_is_that_sources(moved: list[int], kind: str, culprits: Any) -> None:
    class Mixture(Case):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            batch["source"] = torch.tensor([0, 1, 0, 1])
            if trainer.global_step >= STEP - 3:
                shifted = torch.isin(batch["source"], torch.tensor(moved))
                batch["y"] = torch.where(shifted[:, None], batch["y"] + 30.0, batch["y"])
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    case = Mixture(None, STEP)
    gavel = Gavel(case, FindingKind.LEVEL_SHIFT, STEP, STEP - 3, {})
    fit(Smooth(), [case, NonFiniteTracer(), RankTelemetry(sources=("prose", "code")), gavel], steps=STEP + 1)
    [verdict] = case.verdicts
    assert (str(verdict.kind), verdict.culprits) == (kind, culprits)
    assert verdict.since_step == STEP - 3
    if culprits:
        assert verdict.sample_ids == (f"s{(STEP % 12) * 4 + 1}", f"s{(STEP % 12) * 4 + 3}")


class Descends(Smooth):
    """Plain gradient descent: nothing bounds how far an update moves a weight, so only an experiment tells damage."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-5)


def test_bisection_finds_the_newest_snapshot_in_order() -> None:
    verdict, _ = run(_weights, hurt_at=22, since=22, module=Descends(), max_forwards=40)
    assert verdict is not None
    [bisected] = [e for e in verdict.experiments if e.name == "bisected snapshots"]
    assert (bisected.result, bisected.detail["steps"]) == ("in order until step 20", [10, 20, 30])
    assert (verdict.kind, verdict.culprits, verdict.since_step) == (VerdictKind.UNDETERMINED, (), 20)
    assert "The snapshot of step 20 is in order." in verdict.sentence


class Jitters(Smooth):
    """Its loss is another one every time it is computed, replays and healthy steps included; step ``STEP`` drew badly."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(seed)
        self.draw = lambda: float(torch.randn((), generator=draws))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rare = self.trainer.global_step == STEP and not is_replaying(self.trainer)
        return super().training_step(batch, batch_idx) * 0.01 + 10.0 + (5.0 if rare else self.draw())


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_difference_within_the_noise_of_healthy_replays_convicts_nobody(seed: int) -> None:
    verdict, _ = run(None, module=Jitters(seed))
    assert verdict is not None
    [replayed] = [e for e in verdict.experiments if e.name == "replay"]
    [noise], [spread], [live], [again] = (replayed.detail[k] for k in ("noise", "spread", "live", "losses"))
    assert replayed.detail["bitwise_equal"] == [False]
    assert live - again > 2.5  # most of the jump is gone
    assert 0.0 < live - again < 4.0 * max(noise, spread)
    assert verdict.kind is not VerdictKind.INFRASTRUCTURE
    assert verdict.culprits == ()
