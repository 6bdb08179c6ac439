"""The parade's parts: which runs are equal, when a loss is back, what counts as named; and a suite that is not told."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parade
import parade_proof
import pretrain
import pytest
import torch
from hybrid_lm import recorder
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lightning_sentinel.faults import CATALOGUE
from lightning_sentinel.journal import read_journal
from lightning_sentinel.report.summary import incident_rows, load_run


@pytest.fixture(autouse=True)
def fresh_hydra() -> Iterator[None]:
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()


def line(step: int, loss: float = 2.0, sample: str = "a") -> dict[str, Any]:
    bits = struct.pack(">f", loss).hex()
    return {"epoch": 0, "batch_idx": step, "step": step, "samples": [sample], "loss": bits}


def write(folder: Path, lines: list[dict[str, Any]], end: str = "\n") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "steps-0.jsonl").write_text("\n".join(json.dumps(each) for each in lines) + end)
    return folder


# ---------------------------------------------------------------------- the plan


@pytest.mark.parametrize("short", [False, True])
def test_every_fault_has_a_leg_an_expectation_and_a_clean_leg(short: bool) -> None:
    legs = {leg.name: leg for leg in parade.plan(short)}
    judged = [name for leg in legs.values() if leg.suite for name in leg.faults]
    assert set(judged) == set(parade_proof.EXPECTED) == set(CATALOGUE)
    for leg in legs.values():
        assert leg.clean is None or leg.clean in legs
        assert all(step < leg.steps for step in leg.faults.values())
        if leg.clean is not None and parade_proof.EXPECTED[next(iter(leg.faults))].proof == "exact":
            assert legs[leg.clean].steps == leg.steps


def test_a_leg_composes_with_its_faults_at_their_steps(tmp_path: Path) -> None:
    for leg in parade.plan(short=True):
        overrides = [o for o in leg.command(tmp_path, ["seed=3"])[2:] if not o.startswith("hydra.")]
        with initialize_config_dir(str(pretrain.CONFIGS), version_base="1.3"):
            cfg = compose("config", [*overrides, f"run_dir={tmp_path}"])
        assert cfg.seed == 3
        assert cfg.trainer.max_steps == leg.steps
        assert {name: node.step for name, node in (cfg.get("faults") or {}).items()} == leg.faults
        assert ("rank_telemetry" in cfg.callbacks) is leg.suite
        assert ("fault_injector" in cfg.callbacks) is bool(leg.faults)
        assert cfg.callbacks.recorder.folder == str(tmp_path)
        assert cfg.policy.mode == "recover"


def test_only_what_concerns_every_leg_is_passed_on() -> None:
    given = [
        "experiment=parade",
        "parade.short=true",
        "seed=3",
        "hydra.run.dir=x",
        "faults=none",
        "+trainer.detect=true",
    ]
    assert parade.shared_overrides(given) == ["seed=3", "+trainer.detect=true"]


def test_an_unknown_leg_is_named(tmp_path: Path) -> None:
    with initialize_config_dir(str(pretrain.CONFIGS), version_base="1.3"):
        cfg = compose("config", ["experiment=parade", "parade.legs=[clean,exakt]", f"run_dir={tmp_path}"])
    with pytest.raises(ValueError, match=r"parade\.legs has \['exakt'\]; the legs are \['band', 'exact', 'clean'"):
        parade.main(cfg)


# ---------------------------------------------------------------------- equal paths


def test_the_newest_pass_over_a_step_counts_and_a_torn_line_does_not(tmp_path: Path) -> None:
    passes = [line(0), line(1), line(2, 9.0), line(1), line(2, 2.5), line(3)]
    folder = write(tmp_path, passes, end='\n{"epoch": 0, "ba')
    assert recorder.read_path(folder) == [line(0), line(1), line(2, 2.5), line(3)]
    assert parade.last_line(folder / "steps-0.jsonl") == line(3)


def test_paths_are_compared_by_bits_and_samples(tmp_path: Path) -> None:
    clean = [line(step) for step in range(4)]
    assert recorder.first_difference(clean, clean) is None
    assert recorder.first_difference(clean[2:], clean) is None  # a resumed run
    assert recorder.first_difference([], clean) == "nothing was recorded"
    assert recorder.first_difference(clean[:3], clean) == "3 and 4 micro-batches"
    other = [*clean[:3], line(3, math.nextafter(2.0, 3.0) + 1e-6)]
    assert str(recorder.first_difference(other, clean)).startswith("loss differs at step 3: 40000004 and 40000000")
    assert recorder.first_difference([*clean[:3], line(3, sample="b")], clean) == (
        "samples differs at step 3: ['b'] and ['a']"
    )


def test_weights_are_compared_by_bits(tmp_path: Path) -> None:
    def save(name: str, values: list[float]) -> Path:
        (tmp_path / name).mkdir()
        torch.save({"w": torch.tensor(values)}, tmp_path / name / "final.pt")
        return tmp_path / name

    one = save("one", [1.0, math.nan])
    assert recorder.weights_differ(one, save("same", [1.0, math.nan])) is None
    assert recorder.weights_differ(save("zero", [0.0]), save("minus", [-0.0])) == "w differs by up to 0"
    assert str(recorder.weights_differ(one, tmp_path / "none")).startswith("no final weights in ")


# ---------------------------------------------------------------------- back inside the band


def noisy(steps: int, level: float = 2.0) -> dict[int, float]:
    generator = torch.Generator().manual_seed(0)
    return {s: level + 0.1 * float(torch.randn((), generator=generator)) for s in range(steps)}


def test_a_loss_on_the_clean_path_is_back_at_once() -> None:
    found = parade_proof.steps_to_band(noisy(100), noisy(100), since=60)
    assert found is not None
    assert found[0] == 1
    assert found[1] < 1.0


def test_a_loss_that_comes_back_is_back_when_it_is() -> None:
    clean, path = noisy(100), noisy(100)
    path |= {s: path[s] + 1.0 for s in range(60, 72)}
    steps, distance = parade_proof.steps_to_band(path, clean, since=60) or (None, None)
    assert steps == 11  # the last step outside is the one that may be
    assert distance is not None
    assert distance < 1.0


@pytest.mark.parametrize("offset", [0.5, -0.5, 0.15])
def test_a_loss_that_stays_away_is_not_back(offset: float) -> None:
    path = {s: v + (offset if s >= 60 else 0.0) for s, v in noisy(100).items()}
    assert parade_proof.steps_to_band(path, noisy(100), since=60) is None


# ---------------------------------------------------------------------- named


@pytest.mark.parametrize(
    ("change", "right"),
    [
        ({}, True),
        ({"verdict": "numerics"}, False),
        ({"culprit": []}, False),
        ({"culprit": ["sample:a"]}, True),  # half of the bad ones
        ({"culprit": ["sample:a", "sample:x"]}, False),  # an innocent
        ({"action": []}, False),
        ({"action": ["skip_step", "stop"]}, False),
    ],
)
def test_verdict_culprit_and_action_must_all_be_right(change: dict[str, Any], right: bool) -> None:
    expected = parade_proof.EXPECTED["corrupt_batch"]
    strikes = [{"sample_ids": ["a", "b"]}]
    row = {
        "verdict": "data",
        "culprit": ["sample:a", "sample:b"],
        "expected_culprit": parade_proof.named_culprits(expected.culprits, strikes),
        "action": ["skip_step"],
        "incidents": 1,
    }
    assert row["expected_culprit"] == ["sample:a", "sample:b"]
    assert parade_proof.as_expected(row | change, expected) is right


def test_the_culprit_is_what_the_fault_says_it_hurt() -> None:
    expected = parade_proof.EXPECTED["transient_nan"]
    strikes = [{"module": "model.layers.2", "rank": 0, "name": "transient_nan"}]
    assert parade_proof.named_culprits(expected.culprits, strikes) == ["module:model.layers.2", "rank:0"]


@pytest.mark.parametrize(
    ("culprits", "right"),
    [
        (["rank:1"], True),
        (["rank:1", "parameter:head.weight"], True),  # the tensor that the fault has written
        (["rank:1", "parameter:embedding.weight"], False),
        (["parameter:head.weight"], False),  # nobody is named
    ],
)
def test_the_tensor_of_a_bad_rank_may_be_named_too(culprits: list[str], right: bool) -> None:
    expected = parade_proof.EXPECTED["bad_rank"]
    strikes = [{"rank": 1, "parameter": "head.weight"}]
    row = {
        "verdict": "infrastructure",
        "culprit": culprits,
        "expected_culprit": parade_proof.named_culprits(expected.culprits, strikes),
        "also_right": parade_proof.named_culprits(expected.also, strikes),
        "action": ["rollback_replay"],
        "incidents": 1,
    }
    assert parade_proof.as_expected(row, expected) is right


# ---------------------------------------------------------------------- real runs


def leg(run_dir: Path, *overrides: str) -> Path:
    command = [
        *(sys.executable, str(Path(pretrain.__file__)), f"hydra.run.dir='{run_dir}'"),
        *("model=tiny", "data=text_tiny", "policy=recover", "logger=none", "trainer.max_steps=60"),
        *("trainer.enable_progress_bar=false", "callbacks.run_journal.report=false", *overrides),
    ]
    done = subprocess.run(command, cwd=run_dir.parent, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return run_dir


@pytest.mark.slow
def test_the_suite_finds_the_same_whether_or_not_the_journal_tells_what_was_injected(tmp_path: Path) -> None:
    faults = [
        "faults=[nan_backward,transient_nan,cursor_rewind]",
        "faults.nan_backward.step=20",
        "faults.transient_nan.step=30",
        "faults.cursor_rewind.step=41",
    ]
    seen = leg(tmp_path / "seen", *faults)
    hidden = leg(tmp_path / "hidden", *faults, "callbacks.fault_injector.journal=false")
    names = [event["name"] for event in read_journal(seen) if event["event"] == "fault.injected"]
    assert names == ["nan_backward", "transient_nan", "cursor_rewind"]
    assert not [event for event in read_journal(hidden) if event["event"] == "fault.injected"]

    def found(run_dir: Path) -> list[tuple[Any, ...]]:
        rows = incident_rows(load_run(run_dir))
        return [(row["opened_step"], row["verdict"], row["culprits"], row["actions"]) for row in rows]

    assert found(hidden) == found(seen)
    assert found(hidden) == [
        (20, "numerics", ["module:model.layers.2.mixer"], ["skip_step"]),
        (30, "infrastructure", ["module:model.layers.2", "rank:0"], ["retry_step"]),
        (41, "data", ["cursor"], ["rollback_replay"]),
    ]


def test_a_variant_changes_every_leg_and_the_suite_only_where_it_is() -> None:
    legs = {leg.name: leg for leg in parade.variant(parade.plan(short=True), "lagged", "eager")}
    assert all("compile=eager" in leg.command(Path("r"), []) for leg in legs.values())
    # Lightning refuses to clip the gradients of a fused optimizer under a scaler; records are read at the gate there.
    fused = {name for name, leg in legs.items() if "optimizer.fused=true" in leg.command(Path("r"), [])}
    assert fused == {name for name in legs if not name.startswith("fp16")}
    with_sync = {n for n, leg in legs.items() if "callbacks.rank_telemetry.sync=lagged" in leg.command(Path("r"), [])}
    assert with_sync == {name for name, leg in legs.items() if leg.suite}
    plain = parade.variant(parade.plan(short=True), "gate", None)
    assert [leg.command(Path("r"), []) for leg in plain] == [
        leg.command(Path("r"), []) for leg in parade.plan(short=True)
    ]
