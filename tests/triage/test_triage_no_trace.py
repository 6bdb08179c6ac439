"""A run whose incidents were examined, and nothing done about them, is the run without any: to the bit, in all that it holds.

And the budget: never more forward passes than were allowed, whatever is examined.
"""

from __future__ import annotations

import csv
from collections import Counter
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from sentinel_kit import make_trainer
from torchdata.stateful_dataloader import StatefulDataLoader
from triage_models import Net, Samples, collate, fingerprint

from lightning_sentinel import DeepProbe, IncidentResponse, NonFiniteTracer, RankTelemetry, Rollback
from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import Finding, FindingKind
from lightning_sentinel.record import StepRecord
from lightning_sentinel.triage.sandbox import is_replaying

STEPS = 44
CALLED: Counter[str] = Counter()  # by "live" or "replayed"; outside of the module, which a replay works on a copy of

SPIKE, SHIFT, NONFINITE = (18, FindingKind.SPIKE), (26, FindingKind.LEVEL_SHIFT), (34, FindingKind.NONFINITE_LOSS)


class Accuser(L.Callback):
    """Sees an incident where there is none that matters."""

    def __init__(self, steps: dict[int, FindingKind]) -> None:
        self.steps = steps

    def observe(self, record: StepRecord) -> list[Finding]:
        kind = self.steps.get(record.step)
        return [] if kind is None else [Finding(kind, "accuser", record.step, 9.0, 1.0, "seen")]


class Watched(Net):
    """Dropout, BatchNorm, a metric, logged values, a private generator; its loss depends on step and epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        CALLED["replayed" if is_replaying(self.trainer) else "live"] += 1
        if self.trainer.global_step in (SPIKE[0], SHIFT[0], NONFINITE[0]):
            batch = batch | {"y": batch["y"] + 20.0}
        batch = batch | {"y": batch["y"] + 0.1 * self.trainer.current_epoch}
        return super().training_step(batch, batch_idx)


class Ids(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((trainer.global_step, batch_idx, tuple(batch["sample_id"]), float(outputs["loss"])))


def run(
    accused: dict[int, FindingKind] | None,
    folder: Any,
    accumulate: int = 1,
    module: Net | None = None,
    steps: int = STEPS,
    **options: Any,
) -> dict[str, Any]:
    torch.manual_seed(3)
    module, ids = module or Watched(), Ids()
    suite: list[L.Callback] = []
    if accused is not None:
        suite = [
            NonFiniteTracer(),
            Accuser(accused),
            RankTelemetry(),
            IncidentResponse("observe", **options),
            DeepProbe(every_n_steps=0),
            Rollback(every_n_steps=5),
        ]
    trainer, _ = make_trainer(
        [ids, *suite],
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        max_epochs=-1,
    )
    loader = StatefulDataLoader(Samples("", 24 * 4, 0), batch_size=4, shuffle=True, collate_fn=collate, num_workers=0)
    CALLED.clear()
    trainer.fit(module, loader)
    trainer.logger.save()
    with next(iter(sorted(folder.glob("**/metrics.csv")))).open() as lines:
        logged = [{k: v for k, v in row.items() if not k.startswith("sentinel/")} for row in csv.DictReader(lines)]
    return {
        "ids": ids.seen,
        "print": fingerprint(trainer, module),
        "cursor": str(loader.state_dict()),
        "logged": [row for row in logged if any(v for k, v in row.items() if k not in ("step", "epoch"))],
        "live": CALLED["live"],
        "replayed": CALLED["replayed"],
        "verdicts": [i.verdict for i in context_of(trainer).incidents],
        "actions": [a for i in context_of(trainer).incidents for a in i.actions],
    }


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for what in ("ids", "print", "cursor", "logged", "live"):
        assert one[what] == other[what], what


def test_an_incident_that_is_examined_leaves_no_trace(tmp_path: Any) -> None:
    accused = dict([SPIKE, SHIFT, NONFINITE])
    unwatched = run(None, tmp_path / "bare")
    quiet = run({}, tmp_path / "quiet")
    examined = run(accused, tmp_path / "examined", max_forwards=64)
    assert quiet["verdicts"] == []
    assert examined["actions"] == []
    assert quiet["replayed"] == 0
    assert examined["replayed"] >= 12
    spike, shift, nonfinite = ({e.name: e.result for e in v.experiments} for v in examined["verdicts"])
    # All of the ladder was climbed, nothing was skipped for want of a snapshot, a batch or a budget.
    assert spike["replay"] == "equal to the bit"
    assert spike["healthy step from its own snapshot"] == "gives its loss again"
    assert {"same data, snapshot's weights", "healthy batch, current weights", "samples"} <= spike.keys()
    assert "healthy batch, current weights" in shift
    assert nonfinite["armed replay"] == "finite on replay"
    assert not [r for found in (spike, shift, nonfinite) for r in found.values() if r.startswith("not ")]
    assert_same(examined, quiet)
    for what in ("ids", "cursor", "logged", "live"):
        assert examined[what] == unwatched[what], what
    assert examined["print"][:-1] == unwatched["print"][:-1]  # but for the capture, which hangs on the strategy


class Told(Watched):
    """A module that says its tokens' losses itself, by a forward of its own that moves BatchNorm and draws dropout."""

    def token_losses(self, batch: Any, batch_idx: int) -> Any:
        Watched.training_step(self, batch, batch_idx)
        return self.sample_loss_nats[:, None]


@pytest.mark.parametrize("kind", [SPIKE[1], SHIFT[1], NONFINITE[1]])
@pytest.mark.parametrize(("forwards", "accumulate"), [(0, 1), (2, 1), (6, 1), (2, 3), (5, 3), (16, 3)])
def test_never_more_forward_passes_than_allowed(
    forwards: int, accumulate: int, kind: FindingKind, tmp_path: Any
) -> None:
    steps = SPIKE[0] + 2
    found = run({SPIKE[0]: kind}, tmp_path, accumulate, Told(), steps, max_forwards=forwards)
    [verdict] = found["verdicts"]
    own = 2  # DeepProbe's one micro-batch at an incident, and the module's word on it
    assert found["replayed"] - own <= forwards, verdict.experiments
    assert verdict.evidence["forwards"] <= forwards
    assert found["live"] == steps * accumulate


def test_no_experiment_starts_after_the_seconds_are_over(tmp_path: Any) -> None:
    found = run({SPIKE[0]: SPIKE[1]}, tmp_path, steps=SPIKE[0] + 2, max_seconds=1e-9)
    [verdict] = found["verdicts"]
    assert found["replayed"] == 1  # DeepProbe's own look at the incident
    skipped = [e for e in verdict.experiments if e.result == "not run: budget spent"]
    assert skipped
    assert verdict.evidence["comparisons"]["token_level_losses"].startswith("not measured: not run: budget spent")
