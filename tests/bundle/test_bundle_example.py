"""The example's run leaves a bundle, and the command rebuilds model and data from it and computes the step again."""

from __future__ import annotations

import json
import math
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pretrain
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lightning_sentinel import progress
from lightning_sentinel.bundle.reading import Bundle
from lightning_sentinel.cli import main
from lightning_sentinel.journal import read_journal
from lightning_sentinel.report.data import load_run
from lightning_sentinel.report.html import cards
from lightning_sentinel.report.summary import summarise

TINY = ["model=tiny", "data=text_tiny", "logger=none", "trainer.enable_progress_bar=false"]
QUICK = ["callbacks.run_journal.report=false", "callbacks.incident_response.max_forwards=4"]


@pytest.fixture(autouse=True)
def fresh_hydra() -> Iterator[None]:
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()


def train(run_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    """The example in this process; its journal."""
    with initialize_config_dir(str(pretrain.CONFIGS), version_base="1.3"):
        cfg = compose("config", [f"run_dir={run_dir}", *TINY, *QUICK, *overrides])
    pretrain.pretrain(cfg)
    return read_journal(run_dir)


def replayed(capsys: pytest.CaptureFixture[str], run_dir: Path, *options: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["replay", str(run_dir), "--incident", "1", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def nan_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel that gives NaN at step 6; the bundle holds weights, and ids in place of the batch."""
    run_dir = tmp_path_factory.mktemp("nan") / "run"
    GlobalHydra.instance().clear()
    train(run_dir, "trainer.max_steps=8", "policy=recover", "faults=nan_forward", "faults.nan_forward.step=6")
    return run_dir


def test_the_bundle_is_whole_private_and_announced(nan_run: Path) -> None:
    events = read_journal(nan_run)
    (event,) = (e for e in events if e["event"] == "incident.bundle")
    (opened,) = (e for e in events if e["event"] == "incident.opened")
    assert (event["incident"], event["step"], event["path"]) == (1, 6, "incidents/0001")
    assert event["command"] == f"lightning-sentinel replay {nan_run} --incident 1"
    assert (event["state"], event["batch"], event["why_no_batch"]) == (True, False, "capture_batch is off")
    (card,) = cards(run := load_run(nan_run), summarise(run))
    assert card["replay"] == event["command"]
    folder = nan_run / "incidents" / "0001"
    assert sorted(p.name for p in folder.iterdir()) == [
        "incident.json",
        "manifest.json",
        "probe-00000.json",
        "rank-00000.pt",
        "run.json",
        "weights.pt",
    ]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}
    bundle = Bundle.open(nan_run, 1)
    assert bundle.step == 6
    # Written at the opening, brought up to date at the verdict and the action.
    assert bundle.incident.verdict.culprits == ("module:model.layers.2.mixer",)
    assert [a["action"] for a in bundle.incident.actions] == ["skip_step"]
    assert opened["incident"]["actions"] == []
    (micro,) = bundle.rank(0)["micro_batches"]
    step = next(e for e in events if e["event"] == "step" and e["step"] == 6)
    assert micro["ids"] == step["sample_ids"]
    assert micro["batch"] is None
    assert list(bundle.probes) == [0]
    assert (bundle.probes[0]["step"], bundle.probes[0]["incident"]) == (6, 1)
    assert bundle.run["config"]["rebuild"] == "hybrid_lm.rebuild.module_and_data"
    assert [h["step"] for h in bundle.run["history"]] == [0, 1, 2, 3, 4, 5]


def test_a_nan_is_reproduced_named_and_not_cured_by_float64(nan_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = replayed(capsys, nan_run, "--module", "model.layers.2.mixer")
    (row,) = report["ranks"]
    assert (code, report["outcome"], row["equal"], row["batch"], row["batch_equal"]) == (
        0,
        "reproduced",
        True,
        "fetched",
        True,
    )
    base, wide = row["computed"]
    assert (base["dtype"], base["finite"], wide["dtype"], wide["finite"]) == ("as in the run", False, "float64", False)
    first = base["first"]
    assert (first["operator"], first["module"], first["phase"]) == (
        "aten.div.Tensor",
        "model.layers.2.mixer",
        "forward",
    )
    assert first["samples"] == [row["samples"][0][0]]  # the fault hits the first sample of the batch
    assert (report["verdict"]["kind"], report["verdict"]["culprits"]) == ("numerics", ["module:model.layers.2.mixer"])
    assert (report["recorded_verdict"], report["agrees"]) == ("numerics module:model.layers.2.mixer", True)
    alone = report["module"]
    assert alone["path"] == "model.layers.2.mixer"
    assert [(d["dtype"], d["output_finite"]) for d in alone["by_dtype"]] == [
        ("as in the run", False),
        ("float32", False),
        ("float64", False),
    ]
    assert "from finite inputs: its output is not finite, and not finite in float64 either" in alone["sentence"]


def test_a_replay_says_how_far_it_is(
    nan_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    capsys.readouterr()
    main(["replay", str(nan_run), "--incident", "1"])
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if line.startswith("replaying incident 1: ")]
    assert "1 of 2 micro-batches (50 %)" in " ".join(told)
    assert told[-1].startswith("replaying incident 1: done after ")
    assert "replaying" not in out
    replayed(capsys, nan_run)  # standard output is JSON and nothing else
    capsys.readouterr()
    main(["replay", str(nan_run), "--incident", "1", "--json"])
    assert "replaying" not in capsys.readouterr().err


def test_without_the_injected_fault_the_same_step_is_finite(nan_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = replayed(capsys, nan_run, "--no-faults", "--dtype", "float64", "--device", "cpu")
    (row,) = report["ranks"]
    assert (code, row["outcome"]) == (1, "not reproduced")
    # A finite step is computed in float64 because it was asked for: the same loss, with other last digits.
    run, wide = row["computed"]
    assert [(c["dtype"], c["finite"]) for c in (run, wide)] == [("as in the run", True), ("float64", True)]
    assert math.isfinite(run["losses"][0])
    assert wide["losses"] == pytest.approx(run["losses"], rel=1e-4)
    assert wide["losses"] != run["losses"]
    assert "nothing in weights, data or random state explains it" in report["sentence"]
    assert (report["verdict"]["kind"], report["agrees"]) == ("undetermined", None)
    assert (
        "it leaves out the faults that the recorded configuration injects: nan_forward" in report["verdict"]["sentence"]
    )


def test_a_fault_in_earlier_samples_does_not_strike_in_the_replay_of_a_later_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault in data is remembered by its samples; the replay of another step must not take that step's for the first."""
    faults = [
        "faults=[out_of_range_token,nan_forward]",
        "faults.out_of_range_token.step=3",
        "faults.nan_forward.step=6",
    ]
    train(tmp_path / "run", "trainer.max_steps=8", "policy=recover", *faults)
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "run"), "--incident", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["ranks"]
    assert (row["batch_equal"], row["equal"]) == (True, True)


@pytest.mark.parametrize("name", ["rank-00000.pt", "weights.pt", "run.json", "manifest.json", "incident.json"])
def test_a_flipped_bit_is_refused_by_name(
    nan_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run_dir = tmp_path / "copy"
    shutil.copytree(nan_run / "incidents", run_dir / "incidents")
    file = run_dir / "incidents" / "0001" / name
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 4
    file.write_bytes(raw)
    capsys.readouterr()
    assert main(["replay", str(run_dir), "--incident", "1"]) == 2
    error = capsys.readouterr().err
    assert str(file) in error
    assert "the bundle is damaged and is not used" in error


def test_samples_that_are_gone_are_named(nan_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    import hybrid_lm.datamodule as data

    monkeypatch.setattr(data, "text_sources", _other_sources(data.text_sources))
    assert main(["replay", str(nan_run), "--incident", "1"]) == 2
    error = capsys.readouterr().err
    lost = Bundle.open(nan_run, 1).rank(0)["micro_batches"][0]["ids"]
    assert f"sample:{lost[0]}" in error
    assert "cannot be fetched again: MixtureLoader.fetch says: the sources ['prose', 'code'] have no sample" in error


def _other_sources(inner: Any) -> Any:
    """The text of the installation as another version of it might have it: other documents under the same sources."""

    def text_sources(*args: Any, **kwargs: Any) -> Any:
        sources = inner(*args, **kwargs)
        for source in sources:
            source._names = [f"0{name}" for name in source._names]
        return sources

    return text_sources


def test_an_incident_without_a_bundle_and_a_module_that_does_not_exist(
    nan_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(nan_run), "--incident", "4"]) == 2
    assert "has no bundle of incident 4; there are bundles of 1." in capsys.readouterr().err
    assert main(["replay", str(nan_run), "--incident", "1", "--module", "model.layers.2.mixr"]) == 2
    assert "has no module 'model.layers.2.mixr'. Nearest names: 'model.layers.2.mixer'" in capsys.readouterr().err


def test_a_batch_without_supervision_is_nan_from_the_captured_batch_and_fine_from_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = train(
        tmp_path,
        "trainer.max_steps=4",
        "faults=no_supervised_tokens",
        "faults.no_supervised_tokens.step=2",
        "callbacks.incident_response.capture_batch=true",
    )
    (event,) = (e for e in events if e["event"] == "incident.bundle")
    assert (event["batch"], event["state"]) == (True, True)
    code, report = replayed(capsys, tmp_path, "--no-faults")
    (row,) = report["ranks"]
    assert (code, row["outcome"], row["batch"], row["equal"]) == (0, "reproduced", "captured", True)
    assert row["recorded"] == ["nan"]
    assert (report["verdict"]["kind"], report["agrees"]) == ("data", True)
    assert report["verdict"]["culprits"] == [f"sample:{s}" for s in row["samples"][0]]
    # Without the batch, its samples come from their source, where nothing is wrong with them.
    other = tmp_path / "ids"
    train(other, "trainer.max_steps=4", "faults=no_supervised_tokens", "faults.no_supervised_tokens.step=2")
    code, report = replayed(capsys, other, "--no-faults")
    (row,) = report["ranks"]
    assert (code, row["outcome"], row["batch"], row["batch_equal"]) == (1, "not reproduced", "fetched", False)
    assert math.isfinite(row["computed"][0]["losses"][0])
    assert "the batch is another one" in report["sentence"]
    assert "were changed between their source and the step, or the source has changed since" in report["notes"][0]


def test_an_overflow_of_fp16_is_finite_in_float64(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(
        tmp_path,
        "trainer=fp16",
        "model=micro",
        "trainer.max_steps=6",
        "faults=fp16_collapse",
        "faults.fp16_collapse.step=4",
        "faults.fp16_collapse.target=model.layers.0.mixer",
    )
    code, report = replayed(capsys, tmp_path, "--module", "model.layers.0.mixer")
    (row,) = report["ranks"]
    assert (code, report["outcome"], row["equal"]) == (0, "reproduced", True)
    assert [(c["dtype"], c["finite"]) for c in row["computed"]] == [
        ("as in the run", False),
        ("float32", True),
        ("float64", True),
    ]
    assert row["computed"][0]["first"]["module"] == "model.layers.0.mixer"
    assert "In float64 it is finite" in report["sentence"]
    assert (report["verdict"]["kind"], report["verdict"]["culprits"]) == ("numerics", ["module:model.layers.0.mixer"])
    alone = {d["dtype"]: d for d in report["module"]["by_dtype"]}
    assert not alone["as in the run"]["output_finite"]
    assert alone["float32"]["largest"] > 65_504 > alone["as in the run"]["largest"]
    assert "its output is not finite, and finite in float64: a value left the range of its dtype" in report["sentence"]
