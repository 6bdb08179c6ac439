"""The suite on models that are no language models: a classifier with BatchNorm, and a GAN in manual optimization."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gan
import image_classifier
import pytest
import torch
from sentinel_kit import same_bits, weights

from lightning_sentinel.data.quarantine import QuarantineLedger
from lightning_sentinel.faults import Fault
from lightning_sentinel.journal import read_journal

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}
STRIKE = 60  # the classifier; the GAN has two steps a batch
Weights = dict[str, Any]
Fit = Callable[..., tuple[Weights, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def classify(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    return fit_of(image_classifier, 95, tmp_path_factory)


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    return fit_of(gan, 160, tmp_path_factory)


def fit_of(example: Any, steps: int, folders: pytest.TempPathFactory) -> Fit:
    """Trains once for each set of options; gives the final weights and the journal."""
    done: dict[str, tuple[Weights, list[dict[str, Any]]]] = {}

    def fit(fault: str | None = None, **options: Any) -> tuple[Weights, list[dict[str, Any]]]:
        key = f"{fault}{options}"
        if key not in done:
            run = folders.mktemp("run")
            faults: tuple[Fault, ...] = ()
            if fault is not None:
                kind = example.FAULTS[fault]
                target = "features.4" if example is image_classifier else "discriminator.2"
                where = {"target": target} if kind in example.IN_A_MODULE else {}
                at = STRIKE if example is image_classifier else 100
                faults = (kind(step=at, **where),)
            trainer, model = example.train(run, steps, faults, **(QUIET | options))
            assert trainer.global_step == steps
            journal = read_journal(run) if options.get("suite", True) else []
            done[key] = weights(model), [*journal, {"event": "where", "run": run}]
        return done[key]

    return fit


def of(journal: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in journal if line["event"] == event]


def last_incident(journal: list[dict[str, Any]]) -> dict[str, Any]:
    closed = of(journal, "incident.closed")
    assert len(closed) == 1
    assert len(of(journal, "incident.opened")) == 1
    incident: dict[str, Any] = closed[0]["incident"]
    assert incident["status"] == "recovered"
    return incident


def test_classifier_learns_and_the_suite_changes_nothing(classify: Fit) -> None:
    watched, journal = classify()
    bare, _ = classify(suite=False)
    assert same_bits(watched, bare)
    assert not of(journal, "incident.opened")
    losses = [line["loss"] for line in of(journal, "step")]
    assert len(losses) == 95
    assert sum(losses[:10]) / 10 > 1.2  # ln 4 is 1.39
    assert sum(losses[-10:]) / 10 < 0.9


@pytest.mark.parametrize(
    ("fault", "kind", "culprit", "answer"),
    [
        ("transient_nan", "infrastructure", "rank:0", "retry_step"),
        ("lr_spike", "optimization", "optimizer:lr", "rollback_replay"),
        ("optimizer_corruption", "optimization", "optimizer:exp_avg_sq", "rollback_replay"),
        ("cursor_rewind", "data", "cursor", "rollback_replay"),
    ],
)
def test_classifier_returns_to_its_path_bit_for_bit(
    classify: Fit, fault: str, kind: str, culprit: str, answer: str
) -> None:
    after, journal = classify(fault)
    incident = last_incident(journal)
    assert incident["verdict"]["kind"] == kind
    assert culprit in incident["verdict"]["culprits"]
    assert {line["action"] for line in of(journal, "action.rollback")} == {answer}
    assert same_bits(after, classify()[0])  # BatchNorm's running statistics too


@pytest.mark.parametrize("fault", ["nan_forward", "nan_backward"])
def test_classifier_skips_a_step_that_no_replay_can_mend(classify: Fit, fault: str) -> None:
    after, journal = classify(fault)
    assert last_incident(journal)["verdict"]["culprits"] == ["module:features.4"]
    assert [line["step"] for line in of(journal, "action.skip_step")] == [STRIKE]
    assert [line["step"] for line in of(journal, "step") if not line["applied"]] == [STRIKE]
    assert all(value.isfinite().all() for value in after.values())


def test_one_broken_image_is_named_and_never_drawn_again(classify: Fit) -> None:
    clean_weights, clean = classify()
    broken = of(clean, "step")[STRIKE]["sample_ids"][0]
    after, journal = classify(broken_image=int(broken.removeprefix("shapes/")))
    assert last_incident(journal)["verdict"]["culprits"] == [f"sample:{broken}"]
    assert QuarantineLedger(of(journal, "where")[0]["run"] / "quarantine.jsonl").active == {f"sample:{broken}"}
    assert [line["step"] for line in of(journal, "action.skip_step")] == [STRIKE]
    assert all(value.isfinite().all() for value in after.values())
    # The running statistics did not see it either: to BatchNorm the step has not been.
    assert after["features.1.num_batches_tracked"] == clean_weights["features.1.num_batches_tracked"] - 1 == 94
    later = [name for line in of(journal, "step") if line["step"] > STRIKE for name in line["sample_ids"]]
    assert broken not in later


def test_gan_learns_and_the_suite_changes_nothing(play: Fit) -> None:
    watched, journal = play()
    bare, _ = play(suite=False)
    assert same_bits(watched, bare)
    assert not of(journal, "incident.opened")
    assert [line["step"] for line in of(journal, "step")] == list(range(160))  # both optimizers' steps
    before, after = gan.Gan(), gan.Gan()
    after.load_state_dict(watched)
    assert radius(before) < 0.4  # a new generator has all its points near the middle
    assert 0.8 < radius(after) < 1.4  # the real ones lie on the unit circle


def radius(model: gan.Gan) -> float:
    """Mean distance of the generator's points from the middle."""
    noise = torch.randn(2000, gan.NOISE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float(model(noise).norm(dim=1).mean())


@pytest.mark.parametrize("fault", ["transient_nan", "cursor_rewind"])
def test_gan_goes_back_to_before_both_updates(play: Fit, fault: str) -> None:
    after, journal = play(fault)
    last_incident(journal)
    assert of(journal, "action.rollback")
    assert same_bits(after, play()[0])


@pytest.mark.parametrize("fault", ["nan_forward", "nan_backward"])
def test_gan_keeps_a_broken_discriminator_out_of_both_updates(play: Fit, fault: str) -> None:
    after, journal = play(fault)
    assert last_incident(journal)["verdict"]["culprits"] == ["module:discriminator.2"]
    assert [line["step"] for line in of(journal, "step") if not line["applied"]] == [100, 101]
    assert all(value.isfinite().all() for value in after.values())


@pytest.mark.parametrize("example", [image_classifier, gan])
def test_from_the_command_line(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    command = [example.__name__, "--steps", "20", "--policy", "guard", "--run-dir", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", command)
    example.main()
    assert f"{tmp_path}/run/report.html" in capsys.readouterr().out
    assert (tmp_path / "run" / "report.html").is_file()
