"""The README is true: its Python runs, its YAML composes, its command works, its links and names exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from sentinel_kit import Loader, Net

import lightning_sentinel
from lightning_sentinel.config import build_callbacks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_python_of_your_own_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks("python")[0].replace("max_steps=10_000", "max_steps=4, logger=False, enable_checkpointing=False")
    names: dict[str, object] = {}
    exec(code, names)
    names["trainer"].fit(Net(), Loader())  # type: ignore[attr-defined]
    assert (tmp_path / "runs/my-run/journal/rank-00000.jsonl").exists()
    assert (tmp_path / "runs/my-run/summary.json").exists()


def test_the_yaml_and_python_of_a_hydra_application(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(blocks("yaml")[0])
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = compose("config", overrides=["policy=recover"])
    names = {"cfg": cfg}
    exec(blocks("python")[1], names)
    callbacks = names["callbacks"]
    assert [type(c).__name__ for c in callbacks] == [type(c).__name__ for c in build_callbacks(cfg.callbacks)]
    response = next(c for c in callbacks if type(c).__name__ == "IncidentResponse")
    assert response.policy.mode == "recover"


@pytest.mark.slow
def test_the_command_with_overrides_on_a_small_model(tmp_path: Path) -> None:
    command = next(line for line in README.splitlines() if line.startswith("python examples/pretrain.py"))
    small = ["model=tiny", "trainer.max_steps=60", "faults.corrupt_batch.step=40", f"hydra.run.dir={tmp_path}"]
    run = subprocess.run(
        [sys.executable, *shlex.split(command)[1:], *small], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr
    journal = (tmp_path / "journal/rank-00000.jsonl").read_text()
    assert '"event":"fault.injected"' in journal
    assert '"event":"run.ended"' in journal


def test_every_callback_of_the_package_stands_in_the_table() -> None:
    table = set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))
    classes = {name for name in lightning_sentinel.__all__ if name[0].isupper()}
    assert table >= classes
    assert table - classes == {name for name in table - classes if name.islower()}  # faults are the only others


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_fault_of_the_catalogue_is_shown() -> None:
    from lightning_sentinel.faults import CATALOGUE

    shown = set(re.findall(r"`(\w+)`", "\n".join(line for line in README.splitlines() if line.startswith("| `"))))
    assert set(CATALOGUE) <= shown
