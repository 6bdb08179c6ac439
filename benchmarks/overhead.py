"""What the suite costs a training step, beside what people would use instead.

The example's ``small`` model is trained by several Trainers of one process that take turns (see ``turns.py``): a block of
steps of the bare Trainer, a block of the one with the suite or with a peer, and so on, so that whatever else the machine
does slows both alike. Only one of them computes at any time; each has its own copy of the model and draws the same data.

    ratio_median, ratio_interval  default suite / bare Trainer, wall time of a step: the median over rounds of neighbouring
                                  blocks, and the 95 % bootstrap interval of that median
    ratio_mean                    the same of all steps together, as means without the slowest and fastest tenth
    cpu_ratio_median, ..._interval  the same in processor time, which other processes disturb less
    bare_again                    the ratio of a second bare Trainer, which is not 1 either: where each Trainer's memory lies
                                  makes one or the other faster by a percent or two, anew in every process
    own_share                     time inside the suite's own code, its hooks on the model's layers included / time of a
                                  step, in the same run
    own_ms, own_share_at_100ms    that time, and as a share of a step of 100 ms; full snapshots, one in 50 steps, lie in the
                                  worst tenth of the blocks, which is left out: own_us_by_hook tells what they cost where
                                  one fell into the steps that count
    norm_ms                       of it the norm of the gradients, which the clipping that follows does not compute again
    own_added_ms                  own_ms less norm_ms: what a step that clips has more than without the suite
    added                         hooks_ms: what the suite adds where Lightning runs through the callbacks, its dispatch
                                  included; update_ms: what the update takes more or less; net_ms: both
    host_syncs                    host reads of the signal path a step, counted on tensors that have no values
    peers                         the ratio of each peer, with its interval in peers_interval
    peers_own_ms                  time inside the hooks of those peers that are callbacks, to be held against own_added_ms:
                                  ratios this near to 1 do not tell them apart
    deep_probe                    time of one deep probe (deep_probe_ms) / its default interval / time of a step
    first_step_ms                 time inside the suite's own code from the start of the fit to its first step, in a new
                                  Trainer (imports apart), and of that the scan at step 0

``--growth STEPS`` runs so many steps of a very small model with simulated losses instead, through the whole pipeline with a
rotating journal: time and resident memory by tenths of the run. ``--scaling`` measures the suite's own time against the
number of parameters (at equal count of tensors) and against the number of layers.

All Trainers clip the norm of their gradients, as the example's configuration does. Run it with ``python
benchmarks/overhead.py [--rounds 100] [--keep FILE] [--json FILE] [--png FILE] [--check]``; with ``--keep`` the rounds are
added to those of earlier runs, so that a busy machine can be measured in pieces. The peers are Lightning's
``SpikeDetection`` and ``detect_anomaly=True``, transformers' ``DebugUnderflowOverflow``, and the norm of every parameter's
gradient in the manner of Composer's ``OptimizerMonitor``, each in every step.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from bounds import add_check, verdict
from example import named_config
from torch import Tensor, nn
from turns import Instrument, Lane, OwnTime, Phases, ended, in_pairs, median_interval, trimmed_mean

from lightning_sentinel import DeepProbe, RankTelemetry, default_callbacks

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from hybrid_lm.datamodule import TextMixtureDataModule  # noqa: E402  # the examples are no installed package
from hybrid_lm.module import AdamWCosine, HybridLMModule  # noqa: E402

MOST = {
    "ratio_median": 1.01,
    "ratio_interval.1": 1.03,
    "own_share": 0.01,
    "own_share_at_100ms": 0.01,
    "deep_probe": 0.01,
    "first_step_ms": 50.0,
    "host_syncs.gate": 1,
    "host_syncs.lagged": 0,
}
# The last tenth of a long run beside the second one; the dearest layer beside what all of them cost on average.
MOST_GROWTH = {"us_last_over_second_tenth": 1.1, "mib_last_over_second_tenth": 1.05}
MOST_SCALING = {"layers_off_the_line": 0.5, "parameters_off_the_line": 0.5}  # the largest does not fit into a cache

BLOCK = 2  # steps of one turn
PROBE_EVERY = 4  # steps; what a probe costs is then divided by its default interval
CLIP = 1.0  # as in configs/trainer/default.yaml
WARM_UP = 12  # steps of each lane that do not count
SETTLED = 300  # of lanes whose own time is told: detectors look at a young history more often than at a long one
FOREVER = 10_000_000

Callbacks = Callable[[L.LightningModule], list[L.Callback]]

# ---------------------------------------------------------------------------------------------------------- the peers


class GradientNorms(L.Callback):
    """The norm of each parameter's gradient and of all together, read in every step, as Composer's monitor does."""

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        norms = {
            f"l2_norm/grad/{name}": torch.linalg.vector_norm(p.grad)
            for name, p in pl_module.named_parameters()
            if p.grad is not None
        }
        total = sum(norm**2 for norm in norms.values()) ** 0.5
        self.last = {name: norm.item() for name, norm in norms.items()} | {"l2_norm/grad/global": float(total)}


def spike_detection(module: L.LightningModule) -> list[L.Callback]:
    from lightning.pytorch.callbacks.spike import SpikeDetection

    # A spike would end the run; it looks all the same.
    return [SpikeDetection(rtol=1e9, atol=1e9, finite_only=False)]


def debug_underflow(module: L.LightningModule) -> list[L.Callback]:
    from transformers.debug_utils import DebugUnderflowOverflow

    module.debug_overflow = DebugUnderflowOverflow(module.model)  # type: ignore[assignment, arg-type]
    return []


# ---------------------------------------------------------------------------------------------------------- the lanes


def trainer_of(callbacks: list[L.Callback], **options: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": FOREVER,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    return L.Trainer(callbacks=callbacks, **(quiet | options))


def train(lane: Lane | None, callbacks: Callbacks, size: str = "small", **options: Any) -> None:
    torch.manual_seed(0)
    module = HybridLMModule(named_config(size), AdamWCosine(learning_rate=3e-3, total_steps=FOREVER))
    added = callbacks(module)
    options = {"gradient_clip_val": CLIP} | options
    trainer = trainer_of([*([lane.callback] if lane else []), *added], **options)
    length = 256 if size == "small" else 64
    data = TextMixtureDataModule(max_bytes=200_000, validation_sequences=0, sequence_length=length)
    trainer.fit(module, datamodule=data)


def suite(folder: Path, name: str, **options: Any) -> list[L.Callback]:
    return default_callbacks(run_dir=folder / name, vocabulary_size=257, **options)


def suite_lane(
    folder: Path, name: str, size: str, change: Callable[[list[L.Callback]], list[L.Callback]] = list, **o: Any
) -> Lane:
    """The suite, with everything that it does timed."""
    own, norm = OwnTime(), OwnTime()

    def callbacks(module: L.LightningModule) -> list[L.Callback]:
        made = change(suite(folder, name, **o))
        [telemetry] = [c for c in made if isinstance(c, RankTelemetry)]
        telemetry._norm_of = norm.timed("norm", telemetry._norm_of)  # type: ignore[method-assign]
        return [*made, Instrument(made, own)]

    return Lane(name, lambda lane: train(lane, callbacks, size), own=own, part=norm)


def peer_lane(name: str, callbacks: Callbacks, size: str) -> Lane:
    """A peer that is a callback, with its hooks timed."""
    own = OwnTime()

    def instrumented(module: L.LightningModule) -> list[L.Callback]:
        made = callbacks(module)
        return [*made, Instrument(made, own)]

    return Lane(name, lambda lane: train(lane, instrumented, size), own=own)


def often_probed(made: list[L.Callback]) -> list[L.Callback]:
    return [DeepProbe(every_n_steps=PROBE_EVERY) if isinstance(c, DeepProbe) else c for c in made]


def lanes(folder: Path, size: str) -> dict[str, Lane]:
    anomaly = {
        "resume": lambda: torch.autograd.set_detect_anomaly(True),
        "pause": lambda: torch.autograd.set_detect_anomaly(False),
    }
    found = {
        "suite": Lane("suite", lambda lane: train(lane, lambda m: suite(folder, "suite"), size)),
        "bare again": Lane("bare again", lambda lane: train(lane, lambda m: [], size)),
        "timed": suite_lane(folder, "timed", size),
        "recover": suite_lane(folder, "recover", size, policy="recover"),
        "SpikeDetection": peer_lane("SpikeDetection", spike_detection, size),
        "detect_anomaly": Lane(
            "detect_anomaly", lambda lane: train(lane, lambda m: [], size, detect_anomaly=True), **anomaly
        ),
        "DebugUnderflowOverflow": Lane("DebugUnderflowOverflow", lambda lane: train(lane, debug_underflow, size)),
        "gradient norms": peer_lane("gradient norms", lambda m: [GradientNorms()], size),
    }
    found["deep probe"] = suite_lane(folder, "deep-probe", size, often_probed)
    return found


def phases(folder: Path, rounds: int, size: str) -> dict[str, Any]:
    """What the callbacks of the suite add to those parts of a step in which they run, by the median of each part."""
    marks = {"bare": Phases(), "suite": Phases()}
    made: dict[str, Callbacks] = {"bare": lambda m: [], "suite": lambda m: suite(folder, "phases")}

    def lane_of(name: str) -> Lane:
        first, last = marks[name].first, marks[name].last
        return Lane(name, lambda lane: train(lane, lambda m: [first, *made[name](m), last], size))

    pair = [lane_of("bare"), lane_of("suite")]
    with ended(pair):
        for lane in pair:
            lane.run(WARM_UP, count=False)
        for i in range(rounds):
            for lane in pair if i % 2 else pair[::-1]:
                lane.run(BLOCK)
    raw: dict[str, Any] = {}
    for name, mark in marks.items():
        raw |= {f"{name}_hooks": mark.hooks[WARM_UP:-1], f"{name}_update": mark.update[WARM_UP:]}
    return raw


def added(raw: dict[str, Any]) -> dict[str, float]:
    """Milliseconds a step, snapshots and the writing of lines included; negative: what the update takes less."""
    ms = {name: 1e3 * trimmed_mean(np.array(seconds), 0.02) for name, seconds in raw.items()}
    hooks, update = ms["suite_hooks"] - ms["bare_hooks"], ms["suite_update"] - ms["bare_update"]
    return {"hooks_ms": hooks, "update_ms": update, "net_ms": hooks + update}


PEERS = ("SpikeDetection", "detect_anomaly", "DebugUnderflowOverflow", "gradient norms")


Raw = dict[str, dict[str, Any]]


def measure(rounds: int, folder: Path, only: Sequence[str] | None = None, size: str = "small") -> Raw:
    """By lane what its rounds have given: ratios, seconds of every step, and of an instrumented one its own time."""
    bare = Lane("bare", lambda lane: train(lane, lambda m: [], size))
    others = {name: lane for name, lane in lanes(folder, size).items() if only is None or name in only}
    raw: Raw = {}
    with ended([bare, *others.values()]):
        for name, lane in {"bare": bare, **others}.items():
            settled = min(SETTLED, 10 * rounds) if name in ("timed", "recover") else 0
            lane.run(max(WARM_UP, settled), count=False)
        for name, lane in others.items():
            for own in (lane.own_time, lane.part_time):
                if own is not None:
                    own.seconds.clear()
                    own.calls.clear()
            part = {"suite": 1, "bare again": 1, "timed": 3, "SpikeDetection": 3, "gradient norms": 3}.get(name, 8)
            turns = max(min(8, rounds), rounds // part)
            cpu_before = len(bare.cpu)
            pairs = in_pairs(bare, lane, turns, BLOCK)
            raw[name] = {key: values.tolist() for key, values in pairs.items()} | {"runs": [turns]}
            raw[name]["bare_cpu"] = [s for b in bare.cpu[cpu_before:] for s in b]
            if lane.own_time is not None:
                raw[name] |= {"own": lane.own, "blocks": lane.wall, "hooks": dict(lane.own_time.seconds)}
            if lane.part_time is not None:
                raw[name]["norm"] = lane.part_time.total
            print(f"{name:24s} {told(raw[name])}", flush=True)
    return raw


def told(lane: dict[str, Any]) -> str:
    median, interval = interval_of(lane, "wall")
    cpu_median, cpu_interval = interval_of(lane, "cpu")
    return (
        f"ratio {median:7.4f}  [{interval[0]:.4f}, {interval[1]:.4f}]   processor time {cpu_median:7.4f}"
        f"  [{cpu_interval[0]:.4f}, {cpu_interval[1]:.4f}]   trimmed means {mean_ratio(lane):7.4f}"
        f"   ({len(lane['wall'])} rounds in {len(lane['runs'])} runs)"
    )


def interval_of(lane: dict[str, Any], what: str) -> tuple[float, tuple[float, float]]:
    """Median of the rounds' ratios and its interval; of several runs these are drawn first, then the rounds in them."""
    return median_interval(np.array(lane[what]), runs=lane["runs"])


def mean_ratio(lane: dict[str, Any]) -> float:
    return trimmed_mean(np.array(lane["steps_other"])) / trimmed_mean(np.array(lane["steps_bare"]))


def joined(earlier: Raw, new: Raw) -> Raw:
    """Rounds of several runs: lists one after the other, sums added."""
    found: Raw = {name: dict(lane) for name, lane in earlier.items()}
    for name, lane in new.items():
        old = found.setdefault(name, {})
        for key, value in lane.items():
            if isinstance(value, dict):
                before = old.get(key, {})
                old[key] = {
                    k: before.get(k, 0.0) + value.get(k, 0.0) for k in [*before, *(value.keys() - before.keys())]
                }
            else:
                old[key] = old[key] + value if key in old else value
    return found


def evaluate(raw: Raw) -> dict[str, Any]:
    """The numbers of the table from all rounds."""
    result: dict[str, Any] = {"peers": {}, "peers_interval": {}, "peers_own_ms": {}}
    if "phases" in raw:
        result["added"] = added(raw["phases"])
    raw = {name: lane for name, lane in raw.items() if name != "phases"}
    if not raw:
        return result
    for name, lane in raw.items():
        median, interval = interval_of(lane, "wall")
        if name in PEERS:
            result["peers"][name], result["peers_interval"][name] = median, interval
            if "own" in lane:
                result["peers_own_ms"][name] = own_of(lane)["ms"]
        elif name == "bare again":
            result |= {"bare_again": median, "bare_again_interval": interval}
        elif name == "suite":
            cpu_median, cpu_interval = interval_of(lane, "cpu")
            result |= {"ratio_median": median, "ratio_interval": interval, "ratio_mean": mean_ratio(lane)}
            result["runs"] = len(lane["runs"])
            result |= {"cpu_ratio_median": cpu_median, "cpu_ratio_interval": cpu_interval, "rounds": len(lane["wall"])}
    result["step_ms"] = 1e3 * float(np.median([s for lane in raw.values() for s in lane["steps_bare"]]))
    result["step_cpu_ms"] = 1e3 * float(np.median([s for lane in raw.values() for s in lane["bare_cpu"]]))
    if "timed" in raw:
        own = own_of(raw["timed"])
        result |= {"own_share": own["share"], "own_ms": own["ms"], "own_share_at_100ms": own["ms"] / 100.0}
        result |= {"own_median_ms": own["median_ms"], "norm_ms": own["norm_ms"], "own_us_by_hook": own["us_by_hook"]}
        result["own_added_ms"] = own["ms"] - own["norm_ms"]
    if "recover" in raw:
        result["recover_own"] = {k: v for k, v in own_of(raw["recover"]).items() if k != "us_by_hook"}
    if "deep probe" in raw:
        hooks = own_of(raw["deep probe"])["us_by_hook"]
        result["deep_probe_ms"] = PROBE_EVERY * sum(us for n, us in hooks.items() if n.startswith("DeepProbe.")) / 1e3
        result["deep_probe"] = result["deep_probe_ms"] / DeepProbe().every_n_steps / result["step_cpu_ms"]
    return result


def own_of(lane: dict[str, Any]) -> dict[str, Any]:
    """Own time of the suite: the mean over blocks without the worst tenth, so that what else the machine did counts less."""
    blocks = lane["blocks"]
    steps = sum(map(len, blocks))
    per_block = np.array([seconds / len(block) for seconds, block in zip(lane["own"], blocks, strict=True)])
    share = np.array([seconds / sum(block) for seconds, block in zip(lane["own"], blocks, strict=True)])
    hooks = {name: round(1e6 * seconds / steps, 1) for name, seconds in lane["hooks"].items()}
    # The worst tenth of the blocks is what else the machine did, and the full snapshots.
    kept = np.sort(per_block)[: max(1, math.ceil(0.9 * len(per_block)))]
    return {
        "ms": 1e3 * float(kept.mean()),
        "median_ms": 1e3 * float(np.median(per_block)),
        "share": float(np.sort(share)[: len(kept)].mean()),
        "norm_ms": 1e3 * lane.get("norm", 0.0) / steps,
        "us_by_hook": dict(sorted(hooks.items(), key=lambda item: -item[1])),
    }


# ----------------------------------------------------------------------------------------------- the start of a fit


def first_step(folder: Path, times: int = 5) -> dict[str, float]:
    """Own time from the start of a fit to its first step, in milliseconds; the scan of the parameters at step 0 apart."""
    totals, scans = [], []
    for i in range(times + 1):
        own = OwnTime()
        made = suite(folder, f"start-{i}")
        before = OwnTime()
        for callback in made:
            if hasattr(callback, "_scan_state"):
                callback._scan_state = before.timed("scan", callback._scan_state)  # type: ignore[method-assign]

        class Ends(L.Callback):
            def on_train_batch_start(self, *args: Any) -> int:
                own.on = False  # noqa: B023
                return -1

        train(None, lambda m: [*made, Instrument(made, own, start=True), Ends()], max_steps=1)  # noqa: B023
        totals.append(own.total - before.total)
        scans.append(before.total)
    return {"first_step_ms": 1e3 * float(np.median(totals[1:])), "scan_ms": 1e3 * float(np.median(scans[1:]))}


# ---------------------------------------------------------------------------------------------------------- host reads


def host_syncs() -> dict[str, int]:
    """Host reads of the signal path a step, by the test that counts them."""
    import pytest

    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "performance")]
    from test_performance_sync import Everything

    found = {}
    for sync, mode in (("gate", "recover"), ("lagged", "guard")):
        with pytest.MonkeyPatch.context() as patch:
            everything = Everything(sync, mode, patch)
            everything.start()
            for _ in range(10):
                everything.one_step()
            found[sync] = everything.reads // 10
    return found


# -------------------------------------------------------------------------------------------------- growth and scaling


class Simulated(L.LightningModule):
    """A model of ``layers`` linear layers whose loss is a simulated curve: slow descent, noise, now and then a jump."""

    def __init__(self, layers: int = 1, width: int = 4, steps: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        rng = np.random.default_rng(0)
        self.curve = (2.0 + 3.0 / np.sqrt(1.0 + np.arange(steps) / 500.0) + 0.05 * rng.standard_normal(steps)).tolist()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = batch
        for block in self.blocks:
            h = block(h)
        return h.square().mean() * 0.0 + (self.curve[self.global_step] if self.curve else h.square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Rows:
    """A few numbers and the position, with a cursor."""

    def __init__(self, width: int = 4) -> None:
        self.rows, self.position = torch.randn(64, 2, width, generator=torch.Generator().manual_seed(0)), 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.position += 1
            yield self.rows[self.position % len(self.rows)] + self.position  # no content twice: repeats are a finding

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Growth(L.Callback):
    """Seconds and resident bytes after each tenth of the run."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.every = steps // 10
        self.seconds: list[float] = []
        self.resident: list[int] = []
        self.begin = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step % self.every == 0:
            now = time.process_time()
            if trainer.global_step:
                self.seconds.append((now - self.begin) / self.every)
                self.resident.append(resident_bytes())
            self.begin = now


def resident_bytes() -> int:
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def growth(steps: int, folder: Path) -> dict[str, Any]:
    from lightning_sentinel import RunJournal

    meter = Growth(steps)
    made = [c for c in suite(folder, "growth") if not isinstance(c, RunJournal)]
    journal = RunJournal(folder / "growth", max_bytes=4 * 2**20, report=False)
    trainer = trainer_of([meter, journal, *made], max_steps=steps + 1)
    trainer.fit(Simulated(steps=steps + 1), Rows())
    files = sorted((folder / "growth" / "journal").glob("*.jsonl"))
    return {
        "steps": steps,
        "us_per_step_by_tenth": [round(1e6 * s, 1) for s in meter.seconds],
        "resident_mib_by_tenth": [round(r / 2**20, 1) for r in meter.resident],
        "journal_files": len(files),
        "journal_bytes_per_step": round(sum(f.stat().st_size for f in files) / steps, 1),
        "us_last_over_second_tenth": meter.seconds[-1] / meter.seconds[1],
        "mib_last_over_second_tenth": meter.resident[-1] / meter.resident[1],
    }


def own_us(module: L.LightningModule, width: int, folder: Path, name: str, steps: int) -> float:
    """Own processor time of the suite in a step, microseconds: the median of the blocks of ten."""
    own, blocks = OwnTime(), []
    made = [c for c in suite(folder, name, policy="observe") if type(c).__name__ != "Rollback"]

    class Blocks(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step % 10 == 0:
                blocks.append(own.total)

    trainer = trainer_of([Blocks(), *made, Instrument(made, own)], max_steps=steps)
    trainer.fit(module, Rows(width))
    return 1e5 * float(np.median(np.diff(blocks[2:])))


def scaling(folder: Path, steps: int) -> dict[str, Any]:
    # With simulated losses: on these rows a real one diverges, and the incidents would be measured.
    layers = {n: own_us(Simulated(n, 64, steps), 64, folder, f"layers-{n}", steps) for n in (1, 8, 32, 128, 256)}
    widths = {w: own_us(Simulated(8, w, steps), w, folder, f"width-{w}", steps) for w in (64, 256, 512, 1024, 2048)}
    parameters = {8 * (w * w + w): us for w, us in widths.items()}
    return {
        "own_us_by_layers": {n: round(us, 1) for n, us in layers.items()},
        "own_us_by_parameters": {n: round(us, 1) for n, us in parameters.items()},
        "us_per_layer": round(line(layers)[0], 2),
        "us_per_million_parameters": round(1e6 * line(parameters)[0], 1),
        "layers_off_the_line": line(layers)[1],
        "parameters_off_the_line": line(parameters)[1],
    }


def line(points: dict[int, float]) -> tuple[float, float]:
    """Least-squares slope, and how far the largest point lies above the line through the others, as a share of it."""
    x, y = np.array(list(points), dtype=float), np.array(list(points.values()))
    ahead = np.polyval(np.polyfit(x[:-1], y[:-1], 1), x[-1])
    return float(np.polyfit(x, y, 1)[0]), float(y[-1] / ahead - 1.0)


# ---------------------------------------------------------------------------------------------------------------- output


def picture(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [("the default suite", result["ratio_median"], result["ratio_interval"], "#1f6f8b")]
    rows += [(name, result["peers"][name], result["peers_interval"][name], "#9a9a9a") for name in PEERS]
    rows.sort(key=lambda row: row[1])
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=[3, 2])
    for y, (name, median, (low, high), colour) in enumerate(rows):
        left.plot([100 * (low - 1), 100 * (high - 1)], [y, y], color=colour, lw=5, alpha=0.45, solid_capstyle="round")
        left.plot(100 * (median - 1), y, "o", color=colour, ms=7)
        left.annotate(f"{100 * (median - 1):+.1f} %", (100 * (high - 1), y), (8, -4), textcoords="offset points")
        del name
    left.set_yticks(range(len(rows)), [name for name, *_ in rows])
    left.axvline(0, color="black", lw=0.8)
    left.axvline(1, color="#c1440e", lw=0.8, ls=":")
    left.set_xscale("symlog", linthresh=5)
    left.set_xticks(ticks := [0, 1, 2, 5, 10, 50, 100, 500], [f"{t:g}" for t in ticks])
    left.minorticks_off()
    left.set_xlim(min(-5.0, *(110 * (low - 1) for *_, (low, _), _ in rows)), max(150.0, 130 * (rows[-1][2][1] - 1)))
    left.set_xlabel("added to a step, % (median and its 95 % interval); dotted: 1 %")
    hooks = list(result["own_us_by_hook"].items())[:8][::-1]
    right.barh([n for n, _ in hooks], [us for _, us in hooks], color="#1f6f8b")
    right.set_xlabel(f"own time, µs a step (all: {1e3 * result['own_ms']:.0f} µs)")
    right.tick_params(axis="y", labelsize=7)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--rounds", type=int, default=100, help=f"rounds of four blocks of {BLOCK} steps; peers fewer"
    )
    arguments.add_argument(
        "--keep", type=Path, help="add the rounds to those of earlier runs in this file, and judge all of them"
    )
    arguments.add_argument("--lanes", nargs="+", help="only these beside the bare Trainer, e.g. suite timed")
    arguments.add_argument("--model", choices=("small", "tiny"), default="small", help="the example's model")
    arguments.add_argument("--growth", type=int, metavar="STEPS", help="instead: so many steps of a very small model")
    arguments.add_argument("--scaling", action="store_true", help="instead: own time by layers and by parameters")
    arguments.add_argument("--steps", type=int, default=150, help="of each training of --scaling, at least 40")
    arguments.add_argument("--json", type=Path, help="write the numbers to this file too")
    arguments.add_argument("--png", type=Path, help="draw them into this file")
    add_check(arguments)
    options = arguments.parse_args()
    if (options.rounds < 2 and not (options.rounds == 0 and options.keep)) or (
        options.growth is not None and options.growth < 10
    ):
        arguments.error(
            "--rounds must be at least 2 (with --keep also 0: judge what is there) and --growth at least 10."
        )
    if options.steps < 40:
        arguments.error(f"--steps must be at least 40, got {options.steps}.")
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning_sentinel"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.growth is not None:
            result = growth(options.growth, Path(folder))
        elif options.scaling:
            result = scaling(Path(folder), options.steps)
        else:
            load = os.getloadavg()[0]
            raw = measure(options.rounds, Path(folder), options.lanes, options.model) if options.rounds else {}
            if options.rounds and (options.lanes is None or "phases" in options.lanes):
                raw["phases"] = phases(Path(folder), max(min(8, options.rounds), options.rounds // 2), options.model)
            if options.keep is not None:
                raw = joined(json.loads(options.keep.read_text()) if options.keep.exists() else {}, raw)
                options.keep.write_text(json.dumps(raw))
                for name in raw.keys() - {"phases"}:
                    print(f"{name:24s} {told(raw[name])}")
            result = evaluate(raw) | {"load": [load, os.getloadavg()[0]]}
            if options.lanes is None:
                result |= first_step(Path(folder)) | {"host_syncs": host_syncs()}
    for name, value in result.items():
        print(f"{name:28s} {value if not isinstance(value, float) else round(value, 4)}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if options.png is not None and {*PEERS} <= {*result.get("peers", ())}:
        picture(result, options.png)
    if options.growth is not None:
        return verdict(result, MOST_GROWTH, options.check)
    if options.scaling:
        return verdict(result, MOST_SCALING, options.check)
    # Nor measurably more than the cheapest peer that does a part of it; of callbacks, whose ratios lie near 1, by own time.
    least = min((high for _, high in result["peers_interval"].values()), default=math.inf)
    most = MOST | {"ratio_median": min(MOST["ratio_median"], least)}
    if result["peers_own_ms"]:
        most["own_added_ms"] = min(result["peers_own_ms"].values())
    return verdict(result, most, options.check)


if __name__ == "__main__":
    sys.exit(main())
