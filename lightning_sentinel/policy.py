"""The response ladder: incident and history in, one action out. Pure: it reads no tensor and touches no trainer.

A *case* names what is to be answered (see :func:`case_of`). Each case has a ladder of actions; the n-th time that the same
incident needs an answer, the n-th rung is taken. A rung that cannot be done here, or whose budget is spent, is passed over.
The last rung of every ladder is ``stop``: a run that was helped in vain ends visibly instead of looping. Where nothing on the
ladder can be done at all (no cursor, say), the step is skipped if it is still held, and training goes on.

Example:
    >>> policy = Policy(mode="recover")
    >>> situation = Situation(case="infrastructure/transient", repetition=0, step_is_held=True)
    >>> str(policy.choose(situation).action)
    'retry_step'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .incidents import Action, FindingKind, Verdict, VerdictKind
from .limits import CHOICES, nearest

MODES = CHOICES["policy"]["mode"]

# case -> actions by repetition. The reasons stand beside each.
DEFAULT_LADDERS: dict[str, tuple[Action, ...]] = {
    # The samples are bad: keep the update out, and never draw them again.
    "data/samples": (Action.SKIP_STEP, Action.ROLLBACK_SKIP, Action.ROLLBACK_SKIP, Action.STOP),
    # The samples were taken out of the batch before the forward pass: the rest of the step is good.
    "data/neutralised": (Action.QUARANTINE, Action.SKIP_STEP, Action.STOP),
    # The loader is at the wrong place: only the true cursor helps.
    "data/cursor": (Action.ROLLBACK_REPLAY, Action.ROLLBACK_REPLAY, Action.STOP),
    # A whole source has changed: back to before, and go on without it.
    "data/source": (Action.ROLLBACK_SKIP, Action.ROLLBACK_SKIP, Action.STOP),
    # Hard, not wrong; or another mixture of good samples. The update goes in, and nobody is quarantined.
    "data/hard": (Action.NONE,),
    # What was given to the step is damaged: no data and no skipping changes that.
    "numerics/state": (Action.ROLLBACK_REPLAY, Action.ROLLBACK_REPLAY, Action.STOP),
    # The same numbers overflow again: this step cannot be taken.
    "numerics/step": (Action.SKIP_STEP, Action.SKIP_STEP, Action.SKIP_STEP, Action.ROLLBACK_SKIP, Action.STOP),
    # Overflow after overflow: the loss scale is already damaged, so skipping forward is not enough.
    # Once the scale is back and the module is known, further steps of the same kind are passed over one by one.
    "numerics/scale": (Action.ROLLBACK_SKIP, *(Action.SKIP_STEP,) * 64, Action.LOWER_LOSS_SCALE, Action.STOP),
    # Gone on replay: nothing is wrong with data or weights.
    "infrastructure/transient": (Action.RETRY_STEP, Action.RETRY_STEP, Action.ROLLBACK_REPLAY, Action.STOP),
    # One rank's state is damaged: every rank goes back, the data stays.
    "infrastructure/rank": (Action.ROLLBACK_REPLAY, Action.ROLLBACK_REPLAY, Action.STOP),
    # A rate that is too high by plan comes again: lower it, and take the damaged steps again at the lower one.
    "optimization/lr": (Action.ROLLBACK_REPLAY, Action.REDUCE_LR, Action.ROLLBACK_REPLAY, Action.STOP),
    "optimization/state": (Action.ROLLBACK_REPLAY, Action.RESTORE_OPTIMIZER, Action.REDUCE_LR, Action.STOP),
    # The schedule lost its place at a restart: put it back before the first update.
    "optimization/scheduler": (Action.RESTORE_OPTIMIZER, Action.RESTORE_OPTIMIZER, Action.STOP),
    "optimization/other": (Action.ROLLBACK_REPLAY, Action.REDUCE_LR, Action.ROLLBACK_SKIP, Action.STOP),
    # Cause unknown. The damage is kept out; after that the cheapest change is tried first.
    "undetermined/nonfinite": (Action.SKIP_STEP, Action.SKIP_STEP, Action.ROLLBACK_REPLAY, Action.STOP),
    "undetermined/loss": (
        Action.SKIP_STEP,
        Action.ROLLBACK_REPLAY,
        Action.ROLLBACK_SKIP,
        Action.REDUCE_LR,
        Action.STOP,
    ),
    # Nothing that an action of ours would improve.
    "report_only": (Action.NONE,),
}

# How often each action may be taken within ``budget_steps`` steps.
DEFAULT_BUDGETS: dict[Action, int] = {
    Action.RETRY_STEP: 4,
    Action.SKIP_STEP: 64,
    Action.ROLLBACK_REPLAY: 6,
    Action.ROLLBACK_SKIP: 10,
    Action.QUARANTINE: 64,
    Action.REDUCE_LR: 3,
    Action.LOWER_LOSS_SCALE: 3,
    Action.RESTORE_OPTIMIZER: 3,
}

NONFINITE = frozenset({FindingKind.NONFINITE_LOSS, FindingKind.NONFINITE_GRADS})
REPORT_ONLY = frozenset({FindingKind.STRAGGLER, FindingKind.UNSEEN_SAMPLES, FindingKind.NO_GRADIENT})
NEEDS_ROLLBACK = frozenset({Action.RETRY_STEP, Action.ROLLBACK_REPLAY, Action.ROLLBACK_SKIP})


def case_of(
    verdict: Verdict,
    kinds: frozenset[FindingKind] | set[FindingKind],
    *,
    neutralised: bool = False,
    scaled: bool = False,
) -> str:
    """Which ladder answers this verdict.

    Args:
        verdict: What the triage found.
        kinds: Kinds of the incident's findings of severity *incident*.
        neutralised: True if the bad samples were taken out of the batch before the forward pass.
        scaled: True if a loss scale is in force: then every non-finite step also damages the scale.
    """
    culprits = verdict.culprits

    def named(*prefixes: str) -> bool:
        return any(c.startswith(prefixes) for c in culprits)

    if kinds and kinds <= REPORT_ONLY:
        return "report_only"
    if FindingKind.SCALE_COLLAPSE in kinds and verdict.kind not in (VerdictKind.DATA, VerdictKind.OPTIMIZATION):
        return "numerics/scale"  # whatever overflowed, the scale needs help
    match verdict.kind:
        case VerdictKind.DATA:
            if "cursor" in culprits:
                return "data/cursor"
            if "mixture" in culprits or (not culprits and "hard_samples" in verdict.evidence):
                return "data/hard"
            if named("source:"):
                return "data/source"
            return "data/neutralised" if neutralised else "data/samples"
        case VerdictKind.NUMERICS:
            if scaled and kinds & NONFINITE:
                return "numerics/scale"
            given = named("parameter:", "buffer:") and verdict.evidence.get("phase") != "reduction"
            return "numerics/state" if given else "numerics/step"
        case VerdictKind.INFRASTRUCTURE:
            if FindingKind.REPLICA_DRIFT in kinds:
                return "infrastructure/rank"  # whoever it was: only an older state is the same everywhere
            if verdict.reproducible is False:
                return "infrastructure/transient"
            return "infrastructure/rank" if named("rank:", "buffer:", "parameter:") else "infrastructure/transient"
        case VerdictKind.OPTIMIZATION:
            if named("scheduler"):
                return "optimization/scheduler"
            if named("optimizer:lr"):
                return "optimization/lr"
            if named("optimizer:"):
                return "optimization/state"
            return "optimization/other"
        case _:
            return "undetermined/nonfinite" if kinds & NONFINITE else "undetermined/loss"


@dataclass(frozen=True)
class Situation:
    """What the policy knows.

    Attributes:
        case: See :func:`case_of`.
        repetition: How many answers this incident has had.
        step_is_held: The first affected step is the current one, whose update has not been made yet.
        nonfinite: The current step's loss or gradients are not finite.
        unavailable: Actions that cannot be done here, with the reason.
        spent: How often each action was taken within the budget's window.
    """

    case: str
    repetition: int = 0
    step_is_held: bool = False
    nonfinite: bool = False
    unavailable: Mapping[Action, str] = field(default_factory=dict)
    spent: Mapping[Action, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The action and why, with the rungs that were passed over."""

    action: Action
    reason: str
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Policy:
    """Mode, ladders and budgets.

    Attributes:
        mode: ``observe`` watches and records; ``guard`` also keeps non-finite updates out; ``recover`` answers.
        ladders: Overrides of :data:`DEFAULT_LADDERS` by case.
        budgets: Overrides of :data:`DEFAULT_BUDGETS` by action.
        budget_steps: Window of the budgets in steps.
    """

    mode: str = "observe"
    ladders: Mapping[str, Sequence[str | Action]] = field(default_factory=dict)
    budgets: Mapping[str, int] = field(default_factory=dict)
    budget_steps: int = 1000

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(
                f"policy: mode is {self.mode!r}, expected one of {', '.join(MODES)}.{nearest(self.mode, MODES, 0.0)}"
            )
        if self.budget_steps < 1:
            raise ValueError(f"policy: budget_steps is {self.budget_steps}, expected at least 1.")
        ladders = dict(DEFAULT_LADDERS)
        for case, rungs in self.ladders.items():
            if case not in DEFAULT_LADDERS:
                raise ValueError(f"policy: ladders has no case {case!r}.{nearest(case, DEFAULT_LADDERS, 0.0)}")
            ladders[case] = tuple(_action(r, f"ladders[{case!r}]") for r in rungs)
            if not ladders[case]:
                raise ValueError(f"policy: ladders[{case!r}] is empty, expected at least one action.")
        budgets = dict(DEFAULT_BUDGETS)
        for name, count in self.budgets.items():
            if count < 0:
                raise ValueError(f"policy: budgets[{str(name)!r}] must be at least 0, found {count}.")
            budgets[_action(name, "budgets")] = count
        object.__setattr__(self, "ladders", ladders)
        object.__setattr__(self, "budgets", budgets)

    def choose(self, situation: Situation) -> Choice:
        """The action for this situation."""
        if self.mode == "observe":
            return Choice(Action.NONE, "policy observe: watched and recorded only")
        if self.mode == "guard":
            if situation.nonfinite:
                return Choice(Action.SKIP_STEP, "policy guard: non-finite updates are kept out")
            return Choice(Action.NONE, "policy guard: only non-finite updates are kept out")
        ladder = [Action(a) for a in self.ladders[situation.case]]
        passed: list[str] = []
        spent = False
        for rung in ladder[min(situation.repetition, len(ladder) - 1) :]:
            if rung is Action.STOP and passed and not spent:
                break  # nothing was tried because nothing is possible here: that is no reason to end the run
            impossible, exhausted = self._impossible(rung, situation), self._exhausted(rung, situation)
            spent |= impossible is None and exhausted is not None
            obstacle = impossible or exhausted
            if obstacle is None:
                reason = f"{situation.case}, answer {situation.repetition + 1}"
                return Choice(rung, reason, tuple(passed))
            passed.append(f"{rung}: {obstacle}")
        if situation.step_is_held or situation.nonfinite:
            return Choice(Action.SKIP_STEP, f"{situation.case}: nothing else is possible here", tuple(passed))
        return Choice(Action.NONE, f"{situation.case}: nothing on the ladder is possible here", tuple(passed))

    @staticmethod
    def _impossible(action: Action, situation: Situation) -> str | None:
        """Why this run cannot take the action at all."""
        if action in situation.unavailable:
            return situation.unavailable[action]
        if action in (Action.SKIP_STEP, Action.RETRY_STEP) and not situation.step_is_held:
            return "the first affected update is already in the weights"
        return None

    def _exhausted(self, action: Action, situation: Situation) -> str | None:
        budget = self.budgets.get(action)
        if budget is not None and situation.spent.get(action, 0) >= budget:
            return f"budget of {budget} in {self.budget_steps} steps is spent"
        return None


def _action(name: str | Action, where: str) -> Action:
    try:
        return Action(name)
    except ValueError:
        raise ValueError(f"policy: {where} names {name!r}, which is no action.{nearest(name, Action, 0.0)}") from None
