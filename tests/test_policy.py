"""The response ladder as a table: which verdict, which time, what is possible, what is done."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sentinel.incidents import Action, FindingKind, Verdict, VerdictKind
from lightning_sentinel.policy import DEFAULT_BUDGETS, DEFAULT_LADDERS, Policy, Situation, case_of

DATA, NUMERICS, OPTIMIZATION, INFRASTRUCTURE, UNDETERMINED = (
    VerdictKind(k) for k in ("data", "numerics", "optimization", "infrastructure", "undetermined")
)
SPIKE, NAN, SHIFT = FindingKind.SPIKE, FindingKind.NONFINITE_LOSS, FindingKind.LEVEL_SHIFT
OUTLIER, COLLAPSE = FindingKind.RANK_OUTLIER, FindingKind.SCALE_COLLAPSE


@pytest.mark.parametrize(
    ("kind", "culprits", "kinds", "reproducible", "case"),
    [
        (DATA, ("sample:a",), {SPIKE}, True, "data/samples"),
        (DATA, ("cursor",), {FindingKind.REPEATED_SAMPLES}, None, "data/cursor"),
        (DATA, ("source:code",), {SHIFT}, None, "data/source"),
        (NUMERICS, ("module:layers.1",), {NAN}, True, "numerics/step"),
        (NUMERICS, ("module:layers.1",), {COLLAPSE}, True, "numerics/scale"),
        (INFRASTRUCTURE, ("module:layers.1", "rank:0"), {NAN}, False, "infrastructure/transient"),
        (INFRASTRUCTURE, ("rank:1",), {OUTLIER, SPIKE}, None, "infrastructure/rank"),
        (OPTIMIZATION, ("optimizer:lr",), {SPIKE}, None, "optimization/lr"),
        (OPTIMIZATION, ("optimizer:exp_avg_sq",), {SPIKE}, None, "optimization/state"),
        (OPTIMIZATION, ("scheduler",), {FindingKind.RESTART_JUMP}, None, "optimization/scheduler"),
        (OPTIMIZATION, (), {SPIKE}, None, "optimization/other"),
        (UNDETERMINED, (), {NAN}, None, "undetermined/nonfinite"),
        (UNDETERMINED, (), {SPIKE}, None, "undetermined/loss"),
        (UNDETERMINED, (), {FindingKind.STRAGGLER}, None, "report_only"),
    ],
)
def test_which_ladder(
    kind: VerdictKind, culprits: tuple[str, ...], kinds: set[FindingKind], reproducible: bool | None, case: str
) -> None:
    assert case_of(Verdict(kind, culprits, reproducible=reproducible), kinds) == case


def test_under_a_loss_scale_every_nonfinite_step_damages_the_scale() -> None:
    verdict = Verdict(NUMERICS, ("module:layers.1",), reproducible=True)
    assert case_of(verdict, {NAN}, scaled=True) == "numerics/scale"


def test_samples_taken_out_of_the_batch_beforehand() -> None:
    verdict = Verdict(DATA, ("sample:a",))
    assert case_of(verdict, {FindingKind.INVALID_BATCH}, neutralised=True) == "data/neutralised"


@pytest.mark.parametrize(
    ("case", "repetition", "held", "action"),
    [
        ("data/samples", 0, True, "skip_step"),
        ("data/samples", 0, False, "rollback_skip"),
        ("data/samples", 3, True, "stop"),
        ("data/samples", 30, True, "stop"),
        ("data/neutralised", 0, True, "quarantine"),
        ("data/cursor", 0, True, "rollback_replay"),
        ("data/source", 0, False, "rollback_skip"),
        ("numerics/step", 0, True, "skip_step"),
        ("numerics/step", 3, True, "rollback_skip"),
        ("numerics/scale", 0, True, "rollback_skip"),
        ("numerics/scale", 1, True, "skip_step"),
        ("infrastructure/transient", 0, True, "retry_step"),
        ("infrastructure/transient", 2, True, "rollback_replay"),
        ("infrastructure/rank", 0, True, "rollback_replay"),
        ("optimization/lr", 0, False, "rollback_replay"),
        ("optimization/lr", 1, False, "reduce_lr"),
        ("optimization/lr", 2, False, "rollback_replay"),
        ("optimization/state", 1, False, "restore_optimizer"),
        ("optimization/scheduler", 0, True, "restore_optimizer"),
        ("undetermined/loss", 0, False, "rollback_replay"),
        ("report_only", 0, True, "none"),
    ],
)
def test_recover(case: str, repetition: int, held: bool, action: str) -> None:
    choice = Policy("recover").choose(Situation(case, repetition, step_is_held=held))
    assert choice.action == action


@pytest.mark.parametrize("case", sorted(DEFAULT_LADDERS))
def test_observe_never_acts_and_guard_only_keeps_nonfinite_updates_out(case: str) -> None:
    for nonfinite in (False, True):
        situation = Situation(case, 0, step_is_held=True, nonfinite=nonfinite)
        assert Policy("observe").choose(situation).action is Action.NONE
        expected = Action.SKIP_STEP if nonfinite else Action.NONE
        assert Policy("guard").choose(situation).action is expected


def test_what_cannot_be_done_is_passed_over_and_said() -> None:
    why = "the loader has no cursor"
    none = {Action.ROLLBACK_REPLAY: why, Action.RETRY_STEP: why}
    choice = Policy("recover").choose(Situation("data/cursor", 0, unavailable=none))
    assert choice.action is Action.NONE  # nothing was tried, so nothing has failed: training goes on
    assert choice.passed_over == (f"rollback_replay: {why}", f"rollback_replay: {why}")
    held = Situation("infrastructure/transient", 0, step_is_held=True, nonfinite=True, unavailable=none)
    assert Policy("recover").choose(held).action is Action.SKIP_STEP


@pytest.mark.parametrize("case", sorted(DEFAULT_LADDERS))
def test_no_first_answer_ends_the_run_only_because_nothing_is_possible(case: str) -> None:
    everything = {a: "not here" for a in Action if a not in (Action.STOP, Action.NONE, Action.SKIP_STEP)}
    for held in (False, True):
        choice = Policy("recover").choose(Situation(case, 0, step_is_held=held, unavailable=everything))
        assert choice.action in (Action.SKIP_STEP, Action.NONE)


def test_a_collapsed_scale_is_helped_whatever_the_replay_says() -> None:
    for kind in (NUMERICS, INFRASTRUCTURE, UNDETERMINED):
        assert case_of(Verdict(kind, ("rank:0",), reproducible=False), {COLLAPSE}) == "numerics/scale"


def test_budgets_end_every_loop() -> None:
    spent = {Action.RETRY_STEP: DEFAULT_BUDGETS[Action.RETRY_STEP]}
    choice = Policy("recover").choose(Situation("infrastructure/transient", 0, step_is_held=True, spent=spent))
    assert choice.action is Action.ROLLBACK_REPLAY
    assert "budget of 4 in 1000 steps is spent" in choice.passed_over[0]


@given(st.sampled_from(sorted(DEFAULT_LADDERS)), st.booleans())
def test_every_ladder_reaches_its_end_within_its_length(case: str, held: bool) -> None:
    policy, last = Policy("recover"), Action.NONE
    for repetition in range(len(DEFAULT_LADDERS[case]) + 1):
        last = policy.choose(Situation(case, repetition, step_is_held=held)).action
    assert last in (Action.STOP, Action.NONE)
    assert (last is Action.NONE) == (case in ("report_only", "data/hard"))


def test_overrides() -> None:
    policy = Policy("recover", ladders={"numerics/step": ["rollback_skip", "stop"]}, budgets={"rollback_skip": 1})
    assert policy.choose(Situation("numerics/step", 0, step_is_held=True)).action is Action.ROLLBACK_SKIP
    spent = {Action.ROLLBACK_SKIP: 1}
    assert policy.choose(Situation("numerics/step", 0, step_is_held=True, spent=spent)).action is Action.STOP


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mode": "recvoer"},
            "mode is 'recvoer', expected one of observe, guard, recover. Nearest valid name: 'recover'",
        ),
        ({"ladders": {"numerics/steps": ["stop"]}}, "no case 'numerics/steps'. Nearest valid name: 'numerics/step'"),
        ({"ladders": {"data/cursor": ["rolback_replay"]}}, "Nearest valid name: 'rollback_replay'"),
        ({"ladders": {"data/cursor": []}}, "is empty, expected at least one action"),
        ({"budgets": {"stop": -1}}, r"budgets\['stop'\] must be at least 0, found -1"),
        ({"budget_steps": 0}, "budget_steps is 0, expected at least 1"),
    ],
)
def test_bad_policies(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**options)  # type: ignore[arg-type]
