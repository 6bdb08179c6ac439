"""The code blocks and commands of the documentation are run, as far as one process can.

Python runs in the order of the page, in an empty folder. ``<!-- before: ... -->`` above a block holds what the page takes for
granted (a model, a loader, a file); ``<!-- elsewhere: FILE -->`` names the test that runs what needs several processes or
minutes. Shell lines are run as they stand, with these changes: the example trains two steps of its smallest model, in this
process, too few for a fault to strike (tests/faults have each strike); with several processes only its Trainer is built;
``make`` and ``pip`` lines are checked against what they name, ``torchrun`` and the tools' lines not at all, because running
them is what CI is. YAML is composed by Hydra, JSON is parsed, ``text`` is output.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from sentinel_kit import Loader, Net

import lightning_sentinel
from lightning_sentinel import cli
from lightning_sentinel.config import build_callbacks

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"((?:^<!-- \w[^\n]*-->\n)?)^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
OUTPUT = {"text"}


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Comment, language and content of each block."""
    found = []
    for comment, indent, language, content in BLOCK.findall(page.read_text()):
        lines = [line.removeprefix(indent) for line in content.splitlines()]
        found.append((comment.strip().removeprefix("<!--").removesuffix("-->").strip(), language, "\n".join(lines)))
    return found


def is_shell(language: str, content: str) -> bool:
    first = content.split("\n", 1)[0].split(" ")[0]
    commands = ("python", "make", "pip", "lightning-sentinel", "torchrun", ".venv/bin/python", ".venv/bin/ruff")
    return language in ("bash", "console", "sh") or (not language and first in commands)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with an incident, a checkpoint and a page."""
    folder = tmp_path_factory.mktemp("docs") / "a"
    callbacks = lightning_sentinel.default_callbacks(folder, "recover", checkpoint_every_n_steps=10)
    trainer = lightning_trainer(callbacks, 60)
    torch.manual_seed(0)
    trainer.fit(Net({30: float("nan")}), Loader())
    return folder


def lightning_trainer(callbacks: list[Any], steps: int) -> Any:
    import lightning.pytorch as L

    return L.Trainer(
        max_steps=steps,
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks(page: Path, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for link in ("examples", "configs"):
        (tmp_path / link).symlink_to(ROOT / link)
    shutil.copytree(finished_run, tmp_path / "runs" / "a")
    names: dict[str, Any] = {"__name__": "docs"}
    for comment, language, content in blocks(page):
        if comment.startswith("elsewhere:"):
            assert (ROOT / comment.removeprefix("elsewhere:").strip()).is_file(), comment
            continue
        if comment.startswith("before:"):
            exec(comment.removeprefix("before:").strip(), names)
        if language == "python":
            exec(compile(shortened(content), str(page), "exec"), names)
        elif language == "yaml":
            names["cfg"] = composes(content, tmp_path)
        elif language == "json":
            json.loads(content)
        elif is_shell(language, content):
            for line in commands(content):
                run(line, monkeypatch)
        else:
            assert language in OUTPUT or looks_like_output(content), f"what is this block in {page.name}?\n{content}"


def shortened(code: str) -> str:
    """A Trainer of the documentation, quiet and ready after a few steps."""
    code = re.sub(r"max_steps=[\d_]+", "max_steps=8", code)
    return code.replace("L.Trainer(", "L.Trainer(enable_progress_bar=False, enable_model_summary=False, ", 1)


def composes(content: str, folder: Path) -> Any:
    """A whole configuration is composed; a part of one must name options that exist."""
    document = OmegaConf.create(content)
    if "defaults" not in document:
        content = "defaults:\n  - callbacks: sentinel/default\n  - policy: observe\n  - _self_\n" + content
    (folder / "page.yaml").write_text(content)
    with initialize_config_dir(str(folder), version_base="1.3"):
        cfg = compose("page")
    build_callbacks(cfg.callbacks)
    return cfg


def commands(content: str) -> list[str]:
    joined = content.replace("\\\n", " ")
    lines = [line.split("  #")[0].strip() for line in joined.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line and not line.startswith("#")]


def run(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line)
    while re.match(r"^[A-Z_]+=", words[0]):
        words = words[1:]
    name = words[0].removeprefix(".venv/bin/")
    if name == "lightning-sentinel":
        assert cli.main(words[1:]) in (0, 1), line  # 1: something needs a person, e.g. an incident was found
    elif name == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
        assert set(words[1:]) <= targets, line
    elif name == "pip":
        assert "lightning-sentinel" in line or "-e" in words
    elif name in ("ruff", "torchrun") or words[1] == "-m":
        pass  # the tools that CI itself is made of; torchrun is started in tests/distributed
    elif words[1] == "examples/pretrain.py":
        pretrain(words[2:])
    else:
        program(words[1:], monkeypatch)


def pretrain(overrides: list[str]) -> None:
    """The example as configured, for two steps of its smallest model (the parade: its configuration)."""
    folder = f"runs/page-{len(list(Path('runs').iterdir()))}"
    small = [f"hydra.run.dir={folder}", "trainer.max_steps=2", "trainer.enable_progress_bar=false", "threads=1"]
    if not any(o.startswith("model=") for o in overrides):
        small.append("model=tiny")
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("config", overrides=[*overrides, *small], return_hydra_config=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        import pretrain as example

        OmegaConf.set_struct(cfg, False)
        cfg.run_dir = folder
        if cfg.get("mode") == "parade" or cfg.trainer.devices != 1:
            example.build_trainer(cfg)  # several processes; these run in tests/faults and tests/examples
        else:
            example.pretrain(cfg)


def program(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another example, with few steps."""
    assert (ROOT / words[0]).is_file(), words
    short = [*words, "--steps", "6"] if words[0].startswith("examples/") and "--steps" not in words else words
    monkeypatch.setattr(sys, "argv", short)
    runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def looks_like_output(content: str) -> bool:
    """A tree of files, a table or a list of commands with their meaning."""
    return bool(re.search(r"  \S", content)) or content.lstrip().startswith(("<", "{", "batch "))


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    missing = [
        str(p.relative_to(ROOT / "docs"))
        for p in (ROOT / "docs").rglob("*.md")
        if f" {p.relative_to(ROOT / 'docs')}\n" not in nav
    ]
    assert missing == []
