"""The decision of one step at 64, 1,024 and 16,384 ranks: time, memory, journal bytes, and who is named.

    python benchmarks/scale.py [--json FILE] [--png FILE] [--quick] [--telemetry FILE]

The telemetry of a real run with four processes (the example's ``tiny`` model over gloo; ``--telemetry`` takes a recorded
one) is replicated: each made rank repeats one of the four, with noise of the size that the four have among themselves.
What is timed is what every rank does after the gather: every detector of the default suite, the record's place in the
history, the step's line in the journal. What cannot be measured without so many processes is the gather itself; its
bytes are stated.

``--json`` holds, by number of ranks, ``ms_per_step`` (processor time), ``journal_bytes_per_step`` (with eight sample ids),
``memory_mb`` (MiB that the suite holds after 550 steps: detectors, history of records), ``gather_bytes``; and ``missed``
(share of the trials, by sigma), ``named_another`` and ``false_names`` (outliers and stragglers). The exit code is 1
where a bound below is not kept, or where time, journal or memory grow faster than the ranks; ``--quick`` has too few
trials to judge the rare ones.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import numpy.typing as npt

from lightning_sentinel import DivergenceDetector, LossScaleMonitor, RankOutlierDetector, SpikeDetector
from lightning_sentinel.callbacks.rank_telemetry import step_fields
from lightning_sentinel.context import RunContext
from lightning_sentinel.detectors import NonFinite, RankOutlier
from lightning_sentinel.incidents import FindingKind
from lightning_sentinel.journal import Journal
from lightning_sentinel.record import SIGNAL_INDEX, SIGNALS, StepRecord

ROOT = Path(__file__).resolve().parent.parent
SIZES = (4, 64, 1024, 16384)
MANY, LARGEST = (64, 1024, 16384), "16384"
TRIALS, CLEAN_STEPS = 1000, 100_000
COST_STEPS, WARM_STEPS, MADE_STEPS = 500, 50, 100  # measured, before that, and how many made records take turns
HISTORY = 200  # healthy steps before a trial: offsets and noise of the ranks are estimates
# At most: processor time and journal of a step at 16,384 ranks; trials missed, by sigma; names in the clean steps, and
# trials in which a healthy rank is named.
MOST_MS, MOST_BYTES, MOST_MISSED, MOST_FALSE = 20.0, 4096.0, {10: 0.0, 5: 0.05}, 1
LINEAR = {"ms_per_step": "ms a step", "journal_bytes_per_step": "bytes of journal a step", "memory_mb": "MiB of memory"}
FALSE_KINDS = (FindingKind.RANK_OUTLIER, FindingKind.STRAGGLER)
SAMPLE_IDS = tuple(f"prose/955c44a4db/{6656 + i}" for i in range(8))  # of one rank's batch, as the example names them
Array = npt.NDArray[np.float64]
LOSS, TIME = SIGNAL_INDEX["loss_nats"], SIGNAL_INDEX["step_seconds"]


class Recorder(L.Callback):
    """Keeps the matrix of each step; rank 0 writes them at the end."""

    def __init__(self, file: str) -> None:
        self.file, self.rows = file, list[Array]()

    def observe(self, record: StepRecord) -> list[Any]:
        self.rows.append(record.values[:, : len(SIGNALS)].copy())
        return []

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            np.save(self.file, np.stack(self.rows))


def record_four_ranks(file: Path, steps: int = 120) -> None:
    """A real run of four processes, whose telemetry goes to ``file``."""
    command = [
        sys.executable, str(ROOT / "examples" / "pretrain.py"), "trainer=ddp", "trainer.devices=4", "model=tiny",
        f"trainer.max_steps={steps}", "logger=none", "policy=observe", "optimizer.learning_rate=8e-3",
        "trainer.enable_progress_bar=false", f"hydra.run.dir={file.parent / 'run'}",
        "+callbacks.recorder._target_=scale.Recorder", f"+callbacks.recorder.file={file}",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "benchmarks")}
    print("training with four processes to record their telemetry ...", flush=True)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode or not file.exists():
        raise RuntimeError(
            f"The run with four processes ended with exit code {done.returncode}:\n{done.stderr[-2000:]}"
        )


class Replica:
    """Steps of a job of any size, made from the recorded ones.

    The recorded steps are walked through forwards and backwards, so that there is no jump at an end; each rank's distance
    from the mean of its step is drawn anew, normal, of the recorded size.
    """

    def __init__(self, recorded: Array, ranks: int, seed: int) -> None:
        self.recorded, self.ranks = recorded[len(recorded) // 3 :], ranks  # past the steep beginning
        self.draw = np.random.default_rng([7, ranks, seed])
        losses = self.recorded[:, :, LOSS]
        self.sigma = float(np.sqrt(((losses - losses.mean(axis=1, keepdims=True)) ** 2).sum() / (losses.size * 3 / 4)))
        self.offsets = 0.5 * self.sigma * self.draw.standard_normal(ranks)
        self.source = np.arange(ranks) % self.recorded.shape[1]

    def step(self, step: int, bad: tuple[int, float] | None = None) -> StepRecord:
        """One step; ``bad`` is a rank and how many sigma its loss is too high."""
        turn = 2 * len(self.recorded) - 2
        at = step % turn
        at = at if at < len(self.recorded) else turn - at
        # signal by signal in memory, as a detector reads it: most of the time here is filling
        values = self.recorded[at].T.take(self.source, axis=1).T
        values[:, LOSS] = (
            self.recorded[at][:, LOSS].mean() + self.offsets + self.sigma * self.draw.standard_normal(self.ranks)
        )
        values[:, TIME] *= 1 + 0.02 * self.draw.standard_normal(self.ranks)
        if bad is not None:
            values[bad[0], LOSS] += bad[1] * self.sigma
        return StepRecord(step=step, values=values, tokens=1024 * self.ranks * (step + 1), learning_rates=(1e-3,))


class Suite:
    """What every rank does with a record after the gather: the default detectors, the history, the step's line."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.context = folder, RunContext()
        self.context.journal = Journal(folder, 0)
        self.observers = [NonFinite(), SpikeDetector(), DivergenceDetector(), RankOutlierDetector(), LossScaleMonitor()]

    def take(self, record: StepRecord) -> None:
        for observer in self.observers:
            observer.observe(record)
        self.context.remember(record)
        fields = step_fields(record, True, record.step, 0, record.step, 0)
        self.context.journal.write("step", step=record.step, attempt=0, tokens=record.tokens, **fields)

    def journal_bytes(self) -> int:
        self.context.journal.flush()
        return sum(f.stat().st_size for f in self.folder.rglob("*.jsonl"))


def again(made: list[StepRecord], step: int) -> StepRecord:
    """One of the made records as that of ``step``, in memory of its own."""
    given = made[step % len(made)]
    return dataclasses.replace(given, step=step, values=given.values.copy(), sample_ids=SAMPLE_IDS)


def cost(recorded: Array, ranks: int, steps: int) -> dict[str, float]:
    """What one step costs each rank after the gather."""
    replica = Replica(recorded, ranks, 0)
    made = [replica.step(i) for i in range(MADE_STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        suite = Suite(Path(folder))
        before, spent = 0, 0.0
        for i in range(WARM_STEPS + steps):
            record = again(made, i)
            if i == WARM_STEPS:
                before, spent = suite.journal_bytes(), 0.0
            start = time.process_time()
            suite.take(record)
            spent += time.process_time() - start
        written = suite.journal_bytes() - before
        suite.context.journal.close()
    return {
        "ms_per_step": 1e3 * spent / steps,
        "journal_bytes_per_step": written / steps,
        "memory_mb": memory(made, steps),
        "gather_bytes": 8.0 * len(SIGNALS) * ranks,
    }


def memory(made: list[StepRecord], steps: int) -> float:
    """MiB that the suite holds after so many steps, by what Python and NumPy have allocated and not freed.

    Not the process's resident memory: pages that an earlier size has left behind would be filled first. A pass of its own,
    because the tracing costs time.
    """
    with tempfile.TemporaryDirectory() as folder:
        tracemalloc.start()
        try:
            suite = Suite(Path(folder))
            for i in range(WARM_STEPS + steps):
                suite.take(again(made, i))
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        suite.context.journal.close()
    return held / 2**20


def named(recorded: Array, ranks: int, trials: int, sigma: float, seed: int) -> tuple[int, int]:
    """Trials in which the bad rank was not named within three steps, and those in which another one was."""
    missed = wrong = 0
    replica = Replica(recorded, ranks, seed)
    detector = RankOutlier()
    step = 0
    for _ in range(HISTORY):
        detector.observe(replica.step(step))
        step += 1
    calm = detector.state_dict()
    for _ in range(trials):
        detector.load_state_dict(copy.deepcopy(calm))
        victim = int(replica.draw.integers(ranks))
        names: set[int] = set()
        for i in range(3):
            findings = detector.observe(replica.step(step + i, (victim, sigma)))
            names |= {r for f in findings if f.kind == FindingKind.RANK_OUTLIER for r in f.ranks}
        missed += victim not in names
        wrong += bool(names - {victim})
    return missed, wrong


def false_names(recorded: Array, ranks: int, steps: int) -> int:
    """Ranks named, as outliers or as slow, in steps in which nothing is wrong."""
    replica, detector = Replica(recorded, ranks, 3), RankOutlier()
    total = 0
    for step in range(steps):
        found = detector.observe(replica.step(step))
        total += sum(len(f.ranks) for f in found if f.kind in FALSE_KINDS)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument(
        "--telemetry", type=Path, help="recorded matrices, [steps, 4, signals] as .npy; made if missing"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the trials and steps")
    args = parser.parse_args()
    scale = 10 if args.quick else 1
    with tempfile.TemporaryDirectory() as folder:
        file = args.telemetry or Path(folder) / "four-ranks.npy"
        if not file.exists():
            record_four_ranks(file.resolve())
        recorded = np.load(file)
    print(f"recorded: {recorded.shape[0]} steps of {recorded.shape[1]} ranks")
    result: dict[str, Any] = {"ms_per_step": {}, "journal_bytes_per_step": {}, "memory_mb": {}, "gather_bytes": {}}
    print(f"{'ranks':>7} {'ms a step':>10} {'journal bytes':>14} {'memory, MiB':>11} {'gathered bytes':>15}")
    for ranks in SIZES:
        row = cost(recorded, ranks, COST_STEPS)
        for key, value in row.items():
            result[key][str(ranks)] = round(value, 3)
        print(
            f"{ranks:7,} {row['ms_per_step']:10.3f} {row['journal_bytes_per_step']:14.0f} {row['memory_mb']:11.1f}"
            f" {row['gather_bytes']:15,.0f}",
            flush=True,
        )
    result["missed"], result["named_another"], result["false_names"] = {}, {}, {}
    trials, steps = TRIALS // scale, CLEAN_STEPS // scale
    for sigma in MOST_MISSED:
        for ranks in MANY:
            missed, wrong = named(recorded, ranks, trials, sigma, sigma)
            key = f"{ranks} ranks, +{sigma} sigma"
            result["missed"][key], result["named_another"][key] = missed / trials, wrong
            print(f"{key:26} missed {missed} of {trials}, another one named in {wrong}", flush=True)
    for ranks in SIZES:
        count = false_names(recorded, ranks, steps)
        result["false_names"][f"{ranks} ranks, {steps:,} steps"] = count
        print(f"{ranks:7,} ranks: {count} names in {steps:,} clean steps", flush=True)
    broken = over_bounds(result)
    for problem in broken:
        print(f"over the bound: {problem}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if args.png:
        draw(result, args.png)
    return int(bool(broken))


def over_bounds(result: dict[str, Any]) -> list[str]:
    """Which of the bounds at the top are not kept."""
    found = []
    if (spent := result["ms_per_step"][LARGEST]) > MOST_MS:
        found.append(f"{spent:.1f} ms a step at {LARGEST} ranks, {MOST_MS:g} allowed")
    if (written := result["journal_bytes_per_step"][LARGEST]) > MOST_BYTES:
        found.append(f"{written:.0f} bytes of journal a step at {LARGEST} ranks, {MOST_BYTES:g} allowed")
    for sigma, most in MOST_MISSED.items():
        missed = {key: share for key, share in result["missed"].items() if key.endswith(f"+{sigma} sigma")}
        found += [f"{key}: {share:.1%} missed, {most:.0%} allowed" for key, share in missed.items() if share > most]
    for key, what in LINEAR.items():
        for (fewer, less), (more, value) in pairwise(result[key].items()):
            if value > (times := int(more) / int(fewer)) * less:
                found.append(
                    f"{value:.1f} {what} at {more} ranks, {less:.1f} at {fewer}: more than {times:g} times as much"
                )
    for key, count in result["named_another"].items():
        if count > MOST_FALSE:
            found.append(f"{key}: a healthy rank named in {count} trials, {MOST_FALSE} allowed")
    names = {key: count for key, count in result["false_names"].items() if count > MOST_FALSE}
    return found + [f"{key}: {count} healthy ranks named, {MOST_FALSE} allowed" for key, count in names.items()]


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for ax, key, title, bound in zip(
        axes,
        ("ms_per_step", "journal_bytes_per_step", "gather_bytes"),
        ("Processor time a step, ms", "Journal, bytes a step", "Gathered, bytes a step"),
        (20.0, 4096.0, None),
        strict=True,
    ):
        sizes = [int(k) for k in result[key]]
        ax.plot(sizes, list(result[key].values()), "o-", color="#0072b2")
        ax.set(xscale="log", yscale="log", title=title, xlabel="ranks")
        ax.set_xticks(sizes, [f"{n:,}" for n in sizes])
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
        if bound is not None:
            ax.axhline(bound, color="#d55e00", linestyle="--", label="bound at 16,384")
            ax.legend(frameon=False)
    fig.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
