"""What the documentation's commands train, made short, and the command line, both in this process."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from docs_pages import ROOT, blocks_of, commands
from hydra.core.global_hydra import GlobalHydra

from lightning_sentinel import cli
from lightning_sentinel.journal import read_journal

FULL = os.environ.get("SENTINEL_DOCS_FULL") == "1"
PRETRAIN = ROOT / "examples" / "pretrain.py"
QUIET = ["trainer.enable_progress_bar=false", "callbacks.run_journal.report=false"]
SMALL = ["model=tiny", "data.sequence_length=64", "data.batch_size=8", "optimizer.learning_rate=8e-3"]
# What a fault needs to be seen by so small a model: step of the fault, steps of the run, further overrides.
SHORT: dict[str, tuple[int, int, list[str]]] = {
    "corrupt_batch": (60, 85, ["data.batch_size=16", "optimizer.learning_rate=1e-2"]),
    "lr_spike": (46, 75, ["data.sequence_length=128", "data.batch_size=4"]),
    "optimizer_corruption": (46, 75, []),
    "nan_forward": (30, 55, []),
    "nan_backward": (30, 55, []),
    "transient_nan": (30, 55, []),
    "out_of_range_token": (30, 55, []),
    "no_supervised_tokens": (30, 55, []),
    "cursor_rewind": (41, 65, []),
    # Only after some dozens of steps is it seen, and one source must weigh enough for it.
    "level_shift": (
        90,
        150,
        [
            *("data.batch_size=16", "optimizer.learning_rate=1e-2", "faults.level_shift.share=1.0"),
            "data.weights=[{draw:0,weights:{prose:0.4,code:0.6}}]",
        ],
    ),
    "fp16_overflow": (20, 30, []),
    "fp16_collapse": (40, 100, []),
    "bad_rank": (60, 85, ["faults.bad_rank.std=2.5"]),
}
# Options that keep another example to a few seconds.
FEW = {
    "image_classifier.py": ["--steps", "85"],
    "gan.py": ["--steps", "130"],
}


class Prints:
    """What a command has printed and logged."""

    def __init__(self, out: str = "", log: str = "") -> None:
        self.out, self.log = out, log


def runs_a() -> str:
    """The command that the page on the command line makes its run folder with."""
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    (line,) = (x for b in blocks_of("", page) if b.is_shell for x in commands(b.content) if "hydra.run.dir=runs/a" in x)
    return line


def faults_of(words: Sequence[str]) -> list[str]:
    named = [w.partition("=")[2].strip("[]").split(",") for w in words if w.startswith("faults=")]
    return [name for names in named for name in names if name != "none"]


def shortening(words: Sequence[str]) -> list[str]:
    """Further overrides that make a run of the example short, with every fault it names still striking, and seen."""
    there = [q for q in QUIET if not (q.startswith("callbacks.") and "callbacks=none" in words)]
    quiet = [q for q in there if not any(w.startswith(q.partition("=")[0] + "=") for w in words)]
    if FULL or (any(w.startswith("trainer.max_steps=") for w in words) and "model=tiny" in words):
        return quiet
    more, steps = ([] if "trainer=fp16" in words else [*SMALL]), 4
    for name in faults_of(words):
        step, steps, overrides = SHORT[name]
        more += [f"faults.{name}.step={step}", *overrides]
    return [*quiet, *more, f"trainer.max_steps={steps}"]


def pretrain(words: Sequence[str], folder: Path) -> Prints:
    """``python examples/pretrain.py``: in this process, or in its own with its own ranks; its faults must have struck."""
    command = [str(PRETRAIN), *words, f"hydra.run.dir={folder}"]
    if "trainer=ddp" in words:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [
            sys.executable,
            "-W",
            "ignore",
            *command,
            "+callbacks.limit._target_=collective_limit.CollectiveLimit",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]
        log = [line.partition("] - ")[2] for line in done.stdout.splitlines() if "[lightning_sentinel]" in line]
        prints = Prints(done.stdout, "\n".join(log))
    else:
        prints = program(command)
    events = (
        [e for e in read_journal(folder) if e["event"] == "fault.injected"] if "callbacks=none" not in words else []
    )
    assert {e["name"] for e in events} == set(faults_of(words)), f"{words}: struck were {[e['name'] for e in events]}"
    return prints


def program(words: Sequence[str]) -> Prints:
    """A script in this process, with its own command line; what it does to logging is undone."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logging.getLogger(name).level for name in ("lightning.pytorch", "lightning_sentinel")}
    log, out = io.StringIO(), io.StringIO()
    mine = logging.StreamHandler(log)
    suite = logging.getLogger("lightning_sentinel")
    GlobalHydra.instance().clear()
    code: object = 0
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
            patch.setattr(sys, "argv", list(words))
            patch.setenv("HYDRA_FULL_ERROR", "1")
            patch.syspath_prepend(str(Path(words[0]).parent))
            suite.addHandler(mine)
            try:
                runpy.run_path(words[0], run_name="__main__")
            except SystemExit as end:
                code = end.code
    finally:
        GlobalHydra.instance().clear()
        suite.removeHandler(mine)
        for handler in [h for h in root.handlers if h not in handlers]:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)
        torch.set_num_threads(1)
    assert not code, f"{words} ends with {code}"
    return Prints(out.getvalue(), log.getvalue())


def sentinel(words: Sequence[str]) -> Prints:
    """``lightning-sentinel``: 0 or 1 (something needs a person, e.g. an incident was found)."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.main(words)
    assert code in (0, 1), f"{' '.join(words)}: {code}: {err.getvalue()}"
    if "--json" in words and words[0] != "watch":
        json.loads(out.getvalue())
    return Prints(out.getvalue(), err.getvalue())
