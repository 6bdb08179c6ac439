"""Runs one case and judges what the triage made of it."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_sentinel import BatchValidator, Rollback
from lightning_sentinel.callbacks.defaults import default_callbacks
from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import Incident

from .fault import Case
from .faults import FAULTS
from .world import VOCABULARY

SETTLE = 4  # steps after which an incident's verdict is taken
UNSETTLED = 16  # the same while nobody is named: a later finding may tell more


@dataclass
class Outcome:
    """One case and what came of it.

    Attributes:
        outcome: ``right``, ``wrong`` (a cause or culprit was named that is not it), ``undetermined`` or ``missed``
            (nothing was found; counts as undetermined).
        unlisted: Of the five comparisons that each verdict has to list, those that one lists neither with values nor with
            the reason why it has none.
    """

    name: str
    seed: int
    ranks: int
    expected: str
    expected_culprits: list[str]
    kind: str
    culprits: list[str]
    outcome: str
    sentence: str = ""
    experiments: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    fired: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Sink:
    """Stands where the journal stands; keeps the verdicts."""

    def __init__(self) -> None:
        self.verdicts: list[dict[str, Any]] = []

    def write(self, event: str, **fields: Any) -> None:
        if event == "triage.verdict":
            self.verdicts.append(fields["verdict"])

    def flush(self) -> None:
        return None


class _Umpire(L.Callback):
    """Ends the run when the first incident after the strike has its verdict, or when patience is over."""

    def __init__(self, case: Case) -> None:
        self.case, self.known = case, None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        incidents = [i for i in context_of(trainer).incidents if i.opened_step >= self.case.at]
        if self.known is None and incidents and incidents[0].verdict.culprits:
            self.known = set(self.case.named)  # who can be named: not those that are hurt later
        done = trainer.global_step >= self.case.at + self.case.patience
        if incidents:
            settle = SETTLE if incidents[0].verdict.culprits else UNSETTLED
            done |= trainer.global_step >= incidents[0].opened_step + settle
        if done:
            trainer.should_stop = True


def suite() -> list[L.Callback]:
    callbacks = default_callbacks(vocabulary_size=VOCABULARY)[1:]  # no run folder: the events go to a sink
    for callback in callbacks:
        if isinstance(callback, Rollback):
            callback.every_n_steps = 10
        if isinstance(callback, BatchValidator):
            callback.neutralise = True  # otherwise a token out of range ends the run, as it does without the suite
    return callbacks


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning", "lightning_sentinel"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def run_case(name: str, seed: int, ranks: int = 1, beside: Sequence[L.Callback] = ()) -> Outcome:
    """One run under observation, with other callbacks beside. With two ranks every rank calls it alike."""
    started = time.perf_counter()
    case = FAULTS[name](seed, ranks)
    L.seed_everything(seed, verbose=False)
    world = case.world()
    options: dict[str, Any] = {"devices": 1}
    if ranks > 1:
        strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=False)
        options = {"devices": ranks, "strategy": strategy, "use_distributed_sampler": False}
    umpire = _Umpire(case)
    trainer = L.Trainer(
        max_steps=case.at + case.patience + 1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*beside, case, *case.suite(suite()), umpire],
        gradient_clip_val=1.0 if not case.fp16 else None,
        **options | case.options(),
    )
    sink = context_of(trainer).journal = Sink()
    trainer.fit(world, case.loader())
    named, fired = case.named if umpire.known is None else umpire.known, case.fired
    if ranks > 1:
        everyone: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(everyone, (named, fired))
        named, fired = set().union(*(n for n, _ in everyone)), sum(f for _, f in everyone)
    incidents = context_of(trainer).incidents
    result = judge(case, named, incidents, sink.verdicts)
    result.fired, result.seconds = fired, time.perf_counter() - started
    return result


def judge(case: Case, named: set[str], incidents: list[Incident], verdicts: list[dict[str, Any]]) -> Outcome:
    """The verdict of the first incident after the strike; a wrong one on the way there counts as wrong."""
    early = [i for i in incidents if i.opened_step < case.at]
    after = [i for i in incidents if i.opened_step >= case.at]
    chosen = after[0] if after else None
    kind = str(chosen.verdict.kind) if chosen else "none"
    culprits = list(chosen.verdict.culprits) if chosen else []
    outcome = grade(case.kind, named, kind, culprits, case.instead)
    ways = [grade(case.kind, named, v["kind"], list(v["culprits"]), case.instead) for v in verdicts]
    if early or "wrong" in ways:
        outcome = "wrong"
    return Outcome(
        name=case.name(),
        seed=case.seed,
        ranks=case.world_size,
        expected=case.kind,
        expected_culprits=sorted(named),
        kind=kind,
        culprits=culprits,
        outcome=outcome,
        sentence=chosen.verdict.sentence if chosen else "",
        experiments=[f"{e.name}: {e.result}" for e in chosen.verdict.experiments] if chosen else [],
        findings=[f"{f.kind}@{f.step}" for i in incidents for f in i.findings],
        steps=[i.opened_step for i in incidents],
        unlisted=sorted({name for v in verdicts for name in unlisted(v)}),
    )


COMPARISONS = ("token_level_losses", "rank_values", "gradient_norms", "activation_norms", "input_manifest")


def unlisted(verdict: Mapping[str, Any]) -> list[str]:
    """Comparisons that a verdict lists neither with values nor with a reason; a reason is a sentence."""
    listed = verdict["evidence"].get("comparisons", {})
    return [
        name
        for name in COMPARISONS
        if not (isinstance(listed.get(name), dict | list) and listed[name])
        and not (
            isinstance(listed.get(name), str) and listed[name].startswith("not ") and len(listed[name].split()) > 3
        )
    ]


def grade(expected: str, named: set[str], kind: str, culprits: list[str], instead: set[str] | None = None) -> str:
    """Right: the kind, every culprit, at least half of the samples, and nobody innocent."""
    if instead and kind == expected and culprits and set(culprits) <= instead:
        return "right"
    if expected == "none" and kind == "none":
        return "right"
    if kind in ("none", "undetermined"):
        return "missed" if kind == "none" else "undetermined"
    if kind == expected and named and not culprits:
        return "undetermined"  # the right kind, and nobody accused: nothing would be done to anybody
    guilty = {c for c in named if c.startswith("sample:")}
    others = named - guilty
    found = set(culprits)
    # A tensor named beside the right rank, or the source that has grown beside the mixture, is detail.
    detail = {c for c in found if c.startswith(("parameter:", "buffer:", "optimizer:", "source:"))}
    detail = detail if {c for c in others & found if c.startswith(("rank:", "mixture"))} else set()
    innocent = found - named - detail
    enough = others <= found and 2 * len(found & guilty) >= len(guilty)
    return "right" if kind == expected and enough and not innocent else "wrong"
