"""A part of the matrix of faults: every fault once on one rank, six of those of a rank on two. All seeds: the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fork_server import run_forked
from sentinel_kit import make_trainer, rank_environments
from triage_matrix import run
from triage_matrix.faults import FAULTS, plan
from triage_matrix.ranks import run_together
from triage_matrix.run import grade, run_case, suite
from triage_matrix.world import BATCH, LENGTH, World, loader

from lightning_sentinel import Preflight
from lightning_sentinel.context import context_of
from lightning_sentinel.faults import CATALOGUE

SEED = 0
OF_A_RANK = (
    "bad_rank",
    "flaky_rank",
    "scaled_rank",
    "stale_rank",
    "transient_garbage",
    "weight_bit_flip",
    "straggler",
    "reduction_overflow",
)


@pytest.fixture(autouse=True)
def third_party_warnings() -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's about a short run without workers, and the replay's about itself
        yield


# What can be injected, where its case here has another name.
CASE_OF = {"nan_backward": "kernel_nan_backward", "lr_spike": "learning_rate_spike"}


def test_every_fault_that_can_be_injected_has_its_case() -> None:
    assert set(CASE_OF) <= set(CATALOGUE)
    assert {CASE_OF.get(name, name) for name in CATALOGUE} - set(FAULTS) == set()


def test_the_matrix_is_large_enough() -> None:
    assert len(FAULTS) >= 24
    assert {"hard_valid_batch", "mixture_shift", "duplicated_data", "straggler"} <= set(FAULTS)
    assert {r for _, _, r in plan()} == {1, 2}
    assert len(plan()) > 150


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, _, r in plan(seeds=[SEED]) if r == 1])
def test_the_verdict_and_the_culprit_are_right(name: str) -> None:
    outcome = run_case(name, SEED)
    assert outcome.fired > 0 or name in ("mixture_shift", "cursor_rewind")  # those are in the loader
    assert outcome.outcome == "right", outcome
    assert outcome.unlisted == []


def test_a_poor_initialization_that_is_finite_is_left_to_the_preflight() -> None:
    world = World(SEED)
    world.start = 0
    world.model.head.weight.data.mul_(300.0)
    callbacks = suite()
    trainer, _ = make_trainer(callbacks, max_steps=12, gradient_clip_val=1.0)
    trainer.fit(world, loader(SEED))
    (flight,) = (c for c in callbacks if isinstance(c, Preflight))
    (remark,) = (r for r in flight.remarks if r.check == "initial_loss")
    first, last = context_of(trainer).history[0], context_of(trainer).history[-1]
    assert remark.level == "warning"
    assert f"The first loss is {first.mean_loss:.3f} nats, expected about ln(96) = 4.564 nats" in remark.message
    assert (first.step, last.step) == (0, 11)
    assert 4.564 < last.mean_loss < first.mean_loss
    assert context_of(trainer).incidents == []


@pytest.mark.slow
def test_the_loudest_token_and_the_batch_s_rank_in_its_source_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sinks: list[run.Sink] = []

    class Kept(run.Sink):
        def __init__(self) -> None:
            super().__init__()
            sinks.append(self)

    monkeypatch.setattr(run, "Sink", Kept)
    outcome = run_case("poisoned_span", SEED)
    [culprit] = outcome.culprits
    verdict = sinks[0].verdicts[0]
    sample = culprit.removeprefix("sample:")
    [(named, position)] = verdict["evidence"]["places"].items()
    highest, _ = verdict["evidence"]["comparisons"]["token_level_losses"]["tokens"][0]["highest"][0]
    assert named == sample
    assert divmod(highest, LENGTH) == (SEED % BATCH, position)
    assert position >= 2  # the span begins there
    assert verdict["sentence"].endswith(f"The loss is highest at position {position} of sample {sample}.")
    assert (
        verdict["evidence"]["source_rank"][sample.partition("/")[0]] == 1.0
    )  # above every earlier batch of its source


def start_forked(module: str, arguments: Sequence[str], *folders: Path, timeout: float) -> list[int]:
    codes, said = run_forked(module, arguments, rank_environments(2, *folders), timeout)
    print(said[-6000:])  # pytest shows it where the test fails
    return codes


@pytest.mark.slow
@pytest.mark.distributed
def test_the_rank_at_fault_is_named(tmp_path: Path) -> None:
    cases = [(name, SEED) for name in OF_A_RANK]
    here = Path(__file__).parent
    beside = ("triage_beside.Beside", here, here.parent)
    outcomes = run_together(cases, tmp_path / "outcomes.jsonl", timeout=280, beside=beside, start=start_forked)
    assert {o["name"]: o["outcome"] for o in outcomes} == dict.fromkeys(OF_A_RANK, "right")
    assert {o["name"]: o["unlisted"] for o in outcomes} == {name: [] for name in OF_A_RANK}
    of_reduction = outcomes[-1]["sentence"]
    assert "Every rank's own gradient is finite; their reduction in float16 is not" in of_reduction


@pytest.mark.parametrize(
    ("expected", "named", "kind", "culprits", "outcome"),
    [
        ("data", {"sample:a", "sample:b"}, "data", ["sample:a"], "right"),  # half of them
        ("data", {"sample:a", "sample:b", "sample:c"}, "data", ["sample:a"], "wrong"),
        ("data", {"sample:a"}, "data", ["sample:a", "sample:x"], "wrong"),  # somebody innocent
        ("data", {"sample:a"}, "data", [], "undetermined"),
        ("data", set(), "data", [], "right"),  # hard and valid: nobody is to be named
        ("data", set(), "data", ["sample:a"], "wrong"),
        ("data", {"mixture"}, "data", ["mixture", "source:logs"], "right"),
        ("numerics", {"module:m"}, "numerics", ["module:n"], "wrong"),
        ("numerics", {"module:m"}, "infrastructure", ["rank:0"], "wrong"),
        ("infrastructure", {"rank:1"}, "infrastructure", ["rank:1", "parameter:p"], "right"),
        ("infrastructure", {"rank:1"}, "infrastructure", ["rank:0"], "wrong"),
        ("infrastructure", {"rank:1"}, "undetermined", [], "undetermined"),
        ("infrastructure", {"rank:1"}, "none", [], "missed"),
        ("none", set(), "none", [], "right"),
        ("none", set(), "numerics", ["module:m"], "wrong"),
    ],
)
def test_what_counts_as_right(expected: str, named: set[str], kind: str, culprits: list[str], outcome: str) -> None:
    assert grade(expected, named, kind, culprits) == outcome
