"""The canary of the example, from the command line, as its README says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from docs_pages import ROOT, Block, not_shown

from lightning_sentinel import progress
from lightning_sentinel.canary import app
from lightning_sentinel.canary.app import shared_overrides
from lightning_sentinel.canary.drill import DEFAULT, timeline
from lightning_sentinel.canary.judge import LegEnd, judge
from lightning_sentinel.cli import main
from lightning_sentinel.journal import read_journal


@pytest.mark.slow
def test_the_example_passes_and_leaves_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, documented: list[Block]
) -> None:
    """The command line of the page, on less text, with what it prints there; it is also the example in the help."""
    command, page = documented
    words = shlex.split(command.take())[1:]
    with pytest.raises(SystemExit):
        main(["canary", "--help"])
    assert f"example:\n  {command.content}\n" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    for link in ("examples", "configs"):
        (tmp_path / link).symlink_to(ROOT / link)
    out = tmp_path / "canary" / "here"
    words = [words[0], "--out", str(out), *words[1:], "data=text_tiny", "trainer.enable_progress_bar=false"]
    code = main(words)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert (missing := not_shown(printed, page.take())) is None, missing
    report = json.loads((out / "canary.json").read_text())
    assert [(row["fault"], row["answers"], row["path"]) for row in report["drill"][:2]] == [
        ("transient_nan", ["retry_step"], "equal to the clean leg's to the bit"),
        ("cursor_rewind", ["rollback_replay"], "equal to the clean leg's to the bit"),
    ]
    checks = {c["name"]: c["words"] for c in report["checks"]}
    assert checks["drill leg"] == "86 of 86 steps"
    assert "every hash right" in checks["checkpoint"]
    assert report["facts"]["world_size"] == 1
    started = next(e for e in read_journal(out / "drill") if e["event"] == "run.started")
    assert started["config"]["callbacks"]["spike_detector"]["threshold"] == 6.0  # three quarters of 8
    capsys.readouterr()
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)

    def ends() -> list[LegEnd]:
        return [LegEnd(out / leg) for leg in ("clean", "drill")]

    assert judge(out, timeline(DEFAULT), *ends(), progress=True).passed
    assert re.search(r"^verifying step-\d+: done after ", capsys.readouterr().err, re.MULTILINE)
    assert (out / "canary.html").is_file()
    assert (out / "clean" / "output.log").is_file()
    assert main([*words[:3], "--json", *words[3:]]) == 2
    assert "is there already. Give --out a folder that is not." in capsys.readouterr().err
    monkeypatch.setattr(app, "run_app", lambda *_, **__: judge(out, timeline(DEFAULT), *ends()))  # the legs are there
    assert main([words[0], "--json", *words[1:]]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((out / "canary.json").read_text())


def test_what_is_not_an_application_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert main(["canary", "--out", str(tmp_path / "out"), *arguments]) == 2
        return capsys.readouterr().err

    assert "Give --app the script of the Hydra application" in refused("--app", str(tmp_path / "none.py"))
    broken = tmp_path / "app.py"
    broken.write_text("raise SystemExit('no such luck')")
    assert f"{broken} --cfg job fails: no such luck" in refused("--app", str(broken))
    assert "drill has lr_spke; there are" in refused("--app", str(broken), "--drill", "lr_spke")
    assert not (tmp_path / "out").exists()


def test_a_configuration_without_the_suite_or_the_steps_is_refused() -> None:
    plan = timeline(("transient_nan",))
    with pytest.raises(ValueError, match=r"callbacks lack RunJournal, RankTelemetry, IncidentResponse, Rollback\. Add"):
        shared_overrides({"trainer": {}, "callbacks": None}, plan, "trainer.max_steps")
    suite: dict[str, Any] = {
        key: {"_target_": f"lightning_sentinel.{name}"}
        for key, name in (("j", "RunJournal"), ("t", "RankTelemetry"), ("r", "IncidentResponse"), ("b", "Rollback"))
    }
    with pytest.raises(ValueError, match=r"has no 'trainer', so the number of steps cannot be set\. Give --steps-key"):
        shared_overrides({"callbacks": suite}, plan, "trainer.max_steps")
    suite["s"] = {"_target_": "lightning_sentinel.SpikeDetector", "threshold": 4.0, "gross": "${other}"}
    assert shared_overrides({"callbacks": suite, "fit": {}}, plan, "fit.steps") == [
        "++fit.steps=41",
        "++callbacks.j.step_interval=1",
        "++callbacks.j.report=false",
        "++callbacks.r.mode=recover",
        "++callbacks.r.probation_steps=8",
        "++callbacks.b.every_n_steps=10",
        "++callbacks.s.threshold=3",
    ]


def test_help_names_the_faults_without_importing_torch() -> None:
    code = "import sys; from lightning_sentinel.cli import build_parser; build_parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
