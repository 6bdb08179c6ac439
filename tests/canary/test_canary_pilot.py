"""A canary of a Python program: one that is ready, and ones that are not, each with what is wrong in words."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
from docs_pages import Block, not_shown
from sentinel_kit import Loader, Net

import lightning_sentinel
from lightning_sentinel import progress
from lightning_sentinel.canary.drill import EXERCISES, timeline
from lightning_sentinel.canary.judge import CanaryReport
from lightning_sentinel.canary.page import headline, text

pytestmark = pytest.mark.filterwarnings("ignore:Rollback is off")


class Stateless:
    """The same batches from a loader that cannot say where it is."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Loader())


def program(module: Callable[[], L.LightningModule] = Net, loader: Callable[[], Any] = Loader) -> Any:
    def train(callbacks: list[L.Callback], max_steps: int) -> None:
        L.seed_everything(3, verbose=False)
        trainer = L.Trainer(
            max_steps=max_steps,
            max_epochs=-1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )
        trainer.fit(module(), loader())

    return train


def canary(tmp_path: Path, train: Any, **options: Any) -> CanaryReport:
    return lightning_sentinel.run_canary(train, tmp_path / "canary", progress=False, **options)


def test_a_program_that_is_ready_passes_every_check(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    documented: list[Block],
) -> None:
    """The program of the page and of the docstring, which are one."""
    (block,) = documented
    code = block.take()
    example = inspect.getdoc(lightning_sentinel.run_canary) or ""
    lines = [line.strip() for line in code.splitlines() if line.strip()]
    assert lines == [
        line.strip() for line in example.partition("::\n")[2].partition("Args:")[0].splitlines() if line.strip()
    ]
    quiet = {"max_epochs": -1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    names: dict[str, Any] = {
        "lightning_sentinel": lightning_sentinel,
        "seed_everything": partial(L.seed_everything, verbose=False),
        "Trainer": partial(L.Trainer, **quiet),
        "mine": [],
        "MyModule": Net,
        "MyData": Loader,
    }
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    exec(code, names)
    out, err = capsys.readouterr()
    assert out == ""
    for begin in ("canary, clean leg: 1 of 86 steps", "canary, clean leg: done", "canary, drill leg: 86 of 86 steps"):
        assert any(line.startswith(begin) for line in err.splitlines()), err
    report = names["report"]
    assert [(d.fault, d.step, d.seen_step, d.verdict, d.answers) for d in report.drill] == [
        ("transient_nan", 26, 26, "infrastructure", ["retry_step"]),
        ("cursor_rewind", 41, 41, "data", ["rollback_replay"]),
        ("nan_forward", 56, 56, "numerics", ["skip_step"]),
        ("nan_backward", 71, 71, "numerics", ["skip_step"]),
    ]
    # Tried again or rolled back, the run is the clean one to the bit, up to the fault that costs it a step.
    assert [d.path for d in report.drill[:2]] == ["equal to the clean leg's to the bit"] * 2
    assert all(d.status == "recovered" and not d.refused for d in report.drill)
    assert {c.name: c.words for c in report.checks}["clean leg"] == "86 of 86 steps"
    assert report.false_incidents == []
    assert "warmup: " in {c.name: c.words for c in report.checks}["preflight"]  # this program has none
    folder = tmp_path / "runs" / "canary"
    assert json.loads((folder / "canary.json").read_text())["passed"] is True
    assert (folder / "canary.txt").read_text().startswith("Canary passed: 4 faults drilled")
    assert "  Not drilled: no_supervised_tokens, out_of_range_token, corrupt_batch, lr_spike," in text(report)
    assert "<h1>Canary passed" in (folder / "canary.html").read_text()
    assert sorted(p.name for p in folder.iterdir()) == ["canary.html", "canary.json", "canary.txt", "clean", "drill"]
    with pytest.raises(ValueError, match=r"clean is there already\. Give run_dir a folder that holds no canary yet\."):
        lightning_sentinel.run_canary(program(), folder, progress=False)


def test_a_loader_without_a_state_is_found_out(tmp_path: Path, documented: list[Block]) -> None:
    report = canary(tmp_path, program(loader=Stateless), drill=("transient_nan",))
    (row,) = report.drill
    assert not report.passed
    assert (row.seen_step, row.verdict, row.passed) == (26, "infrastructure", False)
    assert row.answers == ["skip_step"]  # kept out of the weights all the same
    assert row.why.startswith("refused: retry_step: ")
    assert "Stateless" in row.why
    assert "state_dict" in row.why
    (block,) = documented
    shown = block.take().splitlines()
    printed = text(report)
    assert not_shown(printed, f"{shown[0]}\n...\n" + "\n".join(shown[1:]) + "\n...") is None, printed
    assert headline(report) == "Canary failed: transient_nan. Do not start the long run before that is understood."


def test_an_incident_that_no_fault_explains_is_a_false_one(tmp_path: Path) -> None:
    report = canary(tmp_path, program(module=lambda: Net(gains={24: 400.0})), drill=("nan_forward",))
    assert not report.passed
    failed = [c.name for c in report.checks if not c.passed]
    assert failed == ["false incidents"]
    assert [line.partition(":")[0] for line in report.false_incidents] == ["clean leg, step 24", "drill leg, step 24"]
    assert report.drill[0].passed


def test_a_program_that_fails_says_how_far_it_came_and_why(tmp_path: Path) -> None:
    class Short(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 9:
                raise RuntimeError("out of something")
            return super().training_step(batch, batch_idx)

    report = canary(tmp_path, program(module=Short), drill=("nan_forward",))
    words = {c.name: (c.passed, c.words) for c in report.checks}
    assert words["clean leg"] == (False, "9 of 41 steps, exit code 1: RuntimeError: out of something")
    assert report.drill[0].why == "the drill leg ended before step 26"


def test_a_model_that_starts_elsewhere_each_time_is_not_the_same_run(tmp_path: Path) -> None:
    seeds = iter((1, 2))

    class Unseeded(Net):
        def on_fit_start(self) -> None:
            L.seed_everything(next(seeds), verbose=False)
            self.first.reset_parameters()

    report = canary(tmp_path, program(module=Unseeded), drill=("transient_nan",))
    (row,) = report.drill
    assert (row.passed, row.status) == (False, "recovered")
    assert row.why.startswith("recovered, but step 26 differs from the clean leg's (loss ")


def test_the_timeline_leaves_room_and_avoids_restore_points() -> None:
    plan = timeline(list(EXERCISES), warm=20)
    steps = list(plan.faults.values())
    assert all(b - a >= 15 for a, b in pairwise(steps))
    assert all(step % 10 for step in steps)
    exact = [EXERCISES[name].exact for name in plan.faults]
    assert exact == sorted(exact, reverse=True)
    assert plan.steps == steps[-1] + 15
    with pytest.raises(ValueError, match=r"drill has nan_forwad; there are transient_nan, "):
        timeline(["nan_forwad"])
