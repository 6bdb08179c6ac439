"""The fault parade: runs with faults beside clean ones, and one table of what was seen, named, done and proved.

Each leg is a child process that trains the example with the configuration of its overrides, in ``<run>/legs/<name>/``.
At most ``parade.jobs`` processes train at the same time. When all have ended, :mod:`parade_proof` compares them.

    python examples/pretrain.py experiment=parade
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from parade_proof import judge, print_table
from tqdm import tqdm

from lightning_sentinel.canary.app import end_group
from lightning_sentinel.journal import to_json

PATIENCE = (10.0, 10.0)  # seconds that a leg has to end, after being asked and after being told
PRETRAIN = Path(__file__).resolve().parent / "pretrain.py"


@dataclass(frozen=True)
class Leg:
    """One run of the parade.

    Attributes:
        name: Also the name of its folder.
        steps: Optimizer steps, replays not counted.
        overrides: Hydra overrides beside those that all legs share.
        faults: Faults with the step at which each strikes.
        suite: Whether the suite's callbacks are there.
        clean: The leg that it is compared with.
        after: Legs that must have ended before it starts.
        processes: How many ranks it trains with.
        first_step: Step at which it begins.
        everywhere: Overrides of every leg of this parade.
        with_suite: Overrides of every leg with the suite.
    """

    name: str
    steps: int
    overrides: tuple[str, ...] = ()
    faults: dict[str, int] = field(default_factory=dict)
    suite: bool = True
    clean: str | None = None
    after: tuple[str, ...] = ()
    processes: int = 1
    first_step: int = 0
    everywhere: tuple[str, ...] = ()
    with_suite: tuple[str, ...] = ()

    def command(self, run: Path, shared: Sequence[str]) -> list[str]:
        """The child's command line."""
        faults = ",".join(self.faults) or "none"
        return [
            sys.executable,
            str(PRETRAIN),
            *shared,
            "experiment=leg",
            "logger=none",
            "policy=recover",
            *self.everywhere,
            *(self.with_suite if self.suite else ()),
            f"hydra.run.dir='{folder(run, self.name)}'",
            f"trainer.max_steps={self.steps}",
            f"callbacks={'sentinel/default' if self.suite else 'none'}",
            f"faults=[{faults}]" if self.faults else "faults=none",
            *(f"faults.{name}.step={step}" for name, step in self.faults.items()),
            *(override.format(run=run) for override in self.overrides),
        ]


def folder(run: Path, leg: str) -> Path:
    return run / "legs" / leg


def variant(legs: Sequence[Leg], sync: str, backend: str | None) -> list[Leg]:
    """The same legs with records read one step later (``lagged``), and with compiled layers.

    Under fp16 records are read at the gate in any case, and Lightning refuses to clip the gradients of a fused optimizer
    there, so these legs keep theirs.
    """
    everywhere = [f"compile={backend}"] if backend else []
    with_suite = [f"callbacks.rank_telemetry.sync={sync}"] if sync != "gate" else []
    changed = []
    for leg in legs:
        fused = ["optimizer.fused=true"] if sync == "lagged" and "trainer=fp16" not in leg.overrides else []
        changed.append(replace(leg, everywhere=(*everywhere, *fused), with_suite=tuple(with_suite)))
    return changed


def plan(short: bool) -> list[Leg]:
    """The legs, those that take longest first.

    Faults stand far enough apart for an incident to be closed before the next one, and not on steps at which snapshots
    are taken: the leg should show what is usual, and a test of its own what is not.
    """
    steps, restart = 290, 200
    exact = {"transient_nan": 72, "lr_spike": 116, "optimizer_corruption": 161, "cursor_rewind": 207}
    band = {
        "corrupt_batch": 66,
        "out_of_range_token": 92,
        "no_supervised_tokens": 118,
        "nan_forward": 144,
        "nan_backward": 170,
        "level_shift": 204,
    }
    size = ("model=tiny", "optimizer.learning_rate=8e-3") if short else ()
    # A smaller model knows less, so more must be wrong before it is as surprised.
    louder = ("faults.level_shift.share=1.0",) if short else ()
    # A level that has shifted is seen only after some dozens of steps, and the way back leads to before the shift.
    far_back = "callbacks.rollback.keep=5"
    checkpoint = "{run}/legs/clean/checkpoints/step-" + f"{restart:08d}"
    fp16 = ("trainer=fp16", "model=micro", "data.sequence_length=64")
    overflow, collapse = (
        "faults.fp16_overflow.target=model.layers.0.mixer",
        "faults.fp16_collapse.target=model.layers.0.mixer",
    )
    noise = ("faults.bad_rank.std=2.5",) if short else ()  # the same loss from a smaller width
    return [
        Leg("band", steps, (*size, *louder, far_back), band, clean="clean"),
        Leg("exact", steps, size, exact, clean="clean"),
        Leg("clean", steps, (*size, f"callbacks.forensic_checkpoint.every_n_steps={restart}")),
        Leg("bare", steps, size, suite=False),
        Leg("fp16", 140, (*fp16, overflow, collapse), {"fp16_overflow": 40, "fp16_collapse": 70}, clean="fp16-clean"),
        Leg("fp16-clean", 140, (*fp16, overflow), {"fp16_overflow": 40}, clean="fp16-bare"),
        Leg("fp16-bare", 140, (*fp16, overflow), {"fp16_overflow": 40}, suite=False),
        Leg(
            "restart",
            steps,
            (*size, f"callbacks.forensic_checkpoint.resume={checkpoint}"),
            {"scheduler_reset": 1},
            clean="clean",
            after=("clean",),
            first_step=restart,
        ),
        Leg("ranks", 90, ("trainer=ddp", *size, *noise), {"bad_rank": 60}, clean="ranks-clean", processes=2),
        Leg("ranks-clean", 90, ("trainer=ddp", *size), processes=2),
    ]


class Runner:
    """Starts legs as they fit, shows how far they are, and never leaves a child behind."""

    def __init__(self, run: Path, legs: Sequence[Leg], shared: Sequence[str], cfg: DictConfig) -> None:
        self.run, self.legs, self.shared, self.cfg = run, list(legs), list(shared), cfg
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.started: dict[str, float] = {}
        self.ended: dict[str, int] = {}

    def all(self) -> dict[str, int]:
        """Run every leg; exit code by name."""
        total = sum(leg.steps - leg.first_step for leg in self.legs)
        # Where nobody looks on, a line every ten seconds is enough.
        every = 0.5 if sys.stderr.isatty() else 10.0
        try:
            with tqdm(total=total, unit=" steps", desc="parade", mininterval=every, dynamic_ncols=True) as bar:
                while len(self.ended) < len(self.legs):
                    self.start_what_fits()
                    time.sleep(0.25)
                    self.reap()
                    bar.set_postfix_str(", ".join(self.children), refresh=False)
                    bar.update(sum(self.done(leg) for leg in self.legs) - bar.n)
        finally:
            self.stop()
        return self.ended

    def start_what_fits(self) -> None:
        names = {leg.name for leg in self.legs}
        for leg in self.legs:
            busy = sum(other.processes for other in self.legs if other.name in self.children)
            waits = any(name not in self.ended for name in leg.after if name in names)
            known = leg.name in self.children or leg.name in self.ended
            if known or waits or (busy and busy + leg.processes > self.cfg.jobs):
                continue
            self.start(leg)

    def start(self, leg: Leg) -> None:
        where = folder(self.run, leg.name)
        where.mkdir(parents=True, exist_ok=True)
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with (where / "output.log").open("wb") as output:
            self.children[leg.name] = subprocess.Popen(
                leg.command(self.run, self.shared),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # its own group, so that the ranks that it starts end with it
            )
        self.started[leg.name] = time.monotonic()

    def reap(self) -> None:
        for name, child in list(self.children.items()):
            if child.poll() is None and time.monotonic() - self.started[name] > 60 * self.cfg.timeout_minutes:
                end_group(child, PATIENCE)
            if child.poll() is not None:
                self.ended[name] = child.returncode
                del self.children[name]
                if child.returncode:
                    tqdm.write(
                        f"leg {name} ended with exit code {child.returncode}; see {folder(self.run, name)}/output.log"
                    )

    def done(self, leg: Leg) -> int:
        """Steps behind the leg, as far as its recorder has written."""
        if leg.name in self.ended:
            return leg.steps - leg.first_step
        if leg.name not in self.children:
            return 0
        last = last_line(folder(self.run, leg.name) / "steps-0.jsonl")
        return 0 if last is None else max(0, min(leg.steps, last["step"] + 1) - leg.first_step)

    def stop(self) -> None:
        for child in self.children.values():
            end_group(child, PATIENCE)


def last_line(file: Path) -> dict[str, Any] | None:
    """The newest whole line of a JSON lines file."""
    try:
        with file.open("rb") as handle:
            handle.seek(max(0, file.stat().st_size - 8192))
            whole = handle.read().split(b"\n")[:-1]
        found: dict[str, Any] = json.loads(whole[-1])
    except (OSError, IndexError, ValueError):
        return None
    return found


def shared_overrides(overrides: Sequence[str]) -> list[str]:
    """What the person who started the parade wants to be different in every leg."""
    own = ("experiment", "parade", "mode", "hydra", "run_dir", "faults", "callbacks", "policy", "logger")
    return [
        o for o in overrides if not o.lstrip("+~").startswith(tuple(f"{name}{end}" for name in own for end in "=.@/"))
    ]


def main(cfg: DictConfig) -> int:
    """Run the parade as configured; 0 if everything was seen, named, answered and proved."""
    run = Path(cfg.run_dir).resolve()
    legs = variant(plan(cfg.parade.short), cfg.parade.sync, cfg.parade.compile)
    wanted = cfg.parade.legs
    if wanted is not None:
        unknown = sorted(set(wanted) - {leg.name for leg in legs})
        if unknown:
            raise ValueError(f"parade.legs has {unknown}; the legs are {[leg.name for leg in legs]}.")
        legs = [leg for leg in legs if leg.name in wanted]
    started = time.monotonic()
    print(f"Fault parade: {len(legs)} legs in {run}/legs")
    shared = shared_overrides(HydraConfig.get().overrides.task)
    exit_codes = Runner(run, legs, shared, cfg.parade).all()
    summary = judge(run, legs, exit_codes)
    summary["seconds"] = round(time.monotonic() - started, 1)
    (run / "summary.json").write_text(to_json(summary) + "\n")
    print_table(summary)
    print(f"{summary['seconds']:.0f} s. Run folder: {run}")
    return 0 if summary["passed"] else 1
