"""What the suite costs a training step, beside what people would use instead.

The example's ``small`` model is trained once for each of them, and within that run blocks of 6 steps with it and without it
take turns (see ``turns.py``): one Trainer, one model, so that where the memory lies and whatever else the machine does slow
both alike. A round is four blocks, ``bare on on bare`` or the other way round; the first two steps after each switch do
not count, because they bring back into the caches what the other side has driven out. In a bare step nothing of the suite
or peer runs, the journal's thread apart: neither a hook of a callback nor what it has put into modules, optimizers, strategy
or loops. That is compared at the end of each bare block, and the run ends with an error if it is not so, or if the suite
found anything.

    ratio_median, ratio_interval  default suite / bare, wall time of a step: the median over rounds of the ratio of the median
                                  steps, and the 95 % bootstrap interval of that median
    ratio_all_steps, ratio_mean   the same with the two steps after each switch, in which the suite also catches up on what
                                  came due in the bare block; and of all steps that count, as means without the slowest and
                                  fastest tenth
    cpu_ratio_median, ..._interval  the same in processor time, which other processes disturb less
    bare_again                    the ratio where nothing is turned on and off: what the measurement is good for;
                                  bare_again_added_ms is the net_ms of it
    own_share                     time inside the suite's own code, its hooks on the model's layers included / time of a
                                  step, in the same run; it is reported and has no bound, because it counts the norm that
                                  clipping would compute in any case
    own_ms, own_share_at_100ms    that time, and as a share of a step of 100 ms
    norm_ms                       of it the norm of the gradients, which the clipping that follows does not compute again
    own_added_ms, ..._share       own_ms less norm_ms: what a step that clips has more than without the suite
    added                         what a step has more with the suite, in milliseconds of processor time. hooks_ms: where
                                  Lightning runs through the callbacks, its dispatch included; update_ms: the update, which
                                  takes less; around_ms: what is done at the start of a step outside of these, such as
                                  snapshots; net_ms: these together. passes_ms, not in net_ms: forward and backward with the
                                  hooks on layers, which caches make longer or shorter
    peers_added_ms                net_ms of the peers that are callbacks
    host_syncs                    host reads of the signal path a step, counted on tensors that have no values
    peers                         the ratio of each peer, with its interval in peers_interval
    peers_own_ms                  time inside the hooks of those peers that are callbacks
    deep_probe                    time of one deep probe (deep_probe_ms) / its default interval / time of a step
    first_step_ms                 time inside the suite's own code from the start of the fit to its first step, in a new
                                  Trainer (imports apart), and of that the scan at step 0

Own and added times are means over the steps that count in 8 rounds together, and of these means the median. A snapshot every
50 steps counts as in a run that keeps the suite on: those that came due in a bare block lie in the steps after it, which
do not count. The journal's thread, which encodes the step lines once a second, runs in steps of both kinds: it is in none of
the figures.

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
import gc
import json
import logging
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from bounds import add_check, verdict
from example import named_config
from torch import Tensor, nn
from turns import (
    BLOCK,
    ROUND,
    BoolArray,
    FloatArray,
    Instrument,
    OwnTime,
    Turns,
    counting,
    median_interval,
    round_of,
    trimmed_mean,
)

from lightning_sentinel import DeepProbe, RankTelemetry, default_callbacks
from lightning_sentinel.journal import read_journal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from hybrid_lm.datamodule import TextMixtureDataModule  # noqa: E402  # the examples are no installed package
from hybrid_lm.module import AdamWCosine, HybridLMModule  # noqa: E402

MOST = {
    "ratio_median": 1.01,
    "ratio_interval.1": 1.03,
    "own_added_share_at_100ms": 0.01,
    "deep_probe": 0.01,
    "first_step_ms": 50.0,
    "host_syncs.gate": 1,
    "host_syncs.lagged": 0,
}
# The last tenth of a long run beside the second one; the dearest layer beside what all of them cost on average.
MOST_GROWTH = {"us_last_over_second_tenth": 1.1, "mib_last_over_second_tenth": 1.05}
MOST_SCALING = {"layers_off_the_line": 0.5, "parameters_off_the_line": 0.5}  # the largest does not fit into a cache

PROBE_EVERY = 4  # steps; what a probe costs is then divided by its default interval
CLIP = 1.0  # as in configs/trainer/default.yaml
WARM_UP = 12  # steps of each lane that do not count
TOGETHER = 8  # rounds in one mean of own and added times: about 70 steps that count, longer than any regular interval
FOREVER = 10_000_000

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


class DebugUnderflow(L.Callback):
    """transformers' ``DebugUnderflowOverflow`` on the model."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from transformers.debug_utils import DebugUnderflowOverflow

        self.debug = DebugUnderflowOverflow(pl_module.model)  # type: ignore[arg-type]


def spike_detection() -> list[L.Callback]:
    from lightning.pytorch.callbacks.spike import SpikeDetection

    # A spike would end the run; it looks all the same.
    return [SpikeDetection(rtol=1e9, atol=1e9, finite_only=False)]


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


def train(callbacks: list[L.Callback], size: str = "small", **options: Any) -> None:
    torch.manual_seed(0)
    module = HybridLMModule(named_config(size), AdamWCosine(learning_rate=3e-3, total_steps=FOREVER))
    trainer = trainer_of(callbacks, **({"gradient_clip_val": CLIP} | options))
    length = 256 if size == "small" else 64
    data = TextMixtureDataModule(max_bytes=200_000, validation_sequences=0, sequence_length=length)
    trainer.fit(module, datamodule=data)


def suite(run_dir: Path, **options: Any) -> list[L.Callback]:
    return default_callbacks(run_dir=run_dir, vocabulary_size=257, **options)


@dataclass
class Lane:
    """What is on in one half of the steps of a run.

    Attributes:
        callbacks: Of the Trainer.
        part: One in so many of the rounds asked for.
        timed: Their instrumented code.
        switch: Turns on and off what is no callback.
        run_dir: Of the suite.
    """

    callbacks: list[L.Callback]
    part: int = 1
    timed: dict[str, OwnTime] = field(default_factory=dict)
    switch: Callable[[bool], None] = lambda on: None
    run_dir: Path | None = None


def timed_suite(run_dir: Path, part: int, change: Callable[[L.Callback], L.Callback] = lambda c: c, **o: Any) -> Lane:
    """The suite, with everything that it does timed."""
    own, norm = OwnTime(), OwnTime()
    made = [change(c) for c in suite(run_dir, **o)]
    [telemetry] = [c for c in made if isinstance(c, RankTelemetry)]
    telemetry._norm_of = norm.timed("norm", telemetry._norm_of)  # type: ignore[method-assign]
    return Lane([*made, Instrument(made, own)], part, {"own": own, "norm": norm}, run_dir=run_dir)


def timed_peer(made: list[L.Callback], part: int) -> Lane:
    own = OwnTime()
    return Lane([*made, Instrument(made, own)], part, {"own": own})


def often_probed(callback: L.Callback) -> L.Callback:
    return DeepProbe(every_n_steps=PROBE_EVERY) if isinstance(callback, DeepProbe) else callback


def detect_anomaly(on: bool) -> None:
    torch.autograd.set_detect_anomaly(on)  # as Trainer(detect_anomaly=True) does around a fit


LANES: dict[str, Callable[[Path], Lane]] = {
    "suite": lambda folder: Lane(suite(folder), run_dir=folder),
    "bare again": lambda folder: Lane([]),
    "timed": lambda folder: timed_suite(folder, 3),
    "recover": lambda folder: timed_suite(folder, 8, policy="recover"),
    "SpikeDetection": lambda folder: timed_peer(spike_detection(), 3),
    "detect_anomaly": lambda folder: Lane([], 8, switch=detect_anomaly),
    "DebugUnderflowOverflow": lambda folder: Lane([DebugUnderflow()], 8),
    "gradient norms": lambda folder: timed_peer([GradientNorms()], 3),
    "deep probe": lambda folder: timed_suite(folder, 8, often_probed),
}
PEERS = ("SpikeDetection", "detect_anomaly", "DebugUnderflowOverflow", "gradient norms")

Raw = dict[str, dict[str, Any]]


def measure(rounds: int, folder: Path, only: Sequence[str] | None = None, size: str = "small") -> Raw:
    """By lane what its rounds have given: seconds of every step, and of an instrumented one its own time."""
    raw: Raw = {}
    for name, make in LANES.items():
        if only is None or name in only:
            lane = make(folder / name.replace(" ", "-"))
            raw[name] = run(lane, max(min(8, rounds), rounds // lane.part), size)
            print(f"{name:24s} {told(raw[name])}", flush=True)
            gc.collect()
    return raw


def run(lane: Lane, rounds: int, size: str) -> dict[str, Any]:
    turns = Turns(rounds, WARM_UP, lane.timed, lane.switch)
    try:
        train([turns, *lane.callbacks], size, max_steps=len(turns.plan))
    finally:
        lane.switch(False)
    found: dict[str, Any] = {"runs": [rounds], "first": [round_of(i)[0] for i in range(rounds)]}
    for name, seconds in turns.steps.items():
        found[name] = np.reshape(seconds, (rounds, ROUND)).round(8).tolist()
    if "own" in lane.timed:
        found["by_hook"] = dict(turns.by_hook["own"])
    if lane.run_dir is not None:
        probed = undisturbed(lane.run_dir, sum(turns.plan))
        flags = np.isin(np.arange(WARM_UP, len(turns.plan)), probed)
        found["probed"] = np.reshape(flags, (rounds, ROUND)).tolist()
    return found


DISTURBED = ("finding", "incident.", "triage.", "action.", "rollback.", "exception")


def undisturbed(run_dir: Path, steps: int) -> list[int]:
    """An error if the suite found something, or missed one of its steps; the steps of the deep probes."""
    events = read_journal(run_dir)
    found = [f"{e['event']} at step {e['step']}" for e in events if e["event"].startswith(DISTURBED)]
    if found:
        raise RuntimeError(f"the suite has not only watched, so this is not what a step costs: {', '.join(found)}.")
    written = sum(e["event"] == "step" for e in events)
    if written != steps:
        raise RuntimeError(f"the suite was on in {steps} steps and has written {written}.")
    return [e["step"] for e in events if e["event"] == "probe.deep"]


def told(lane: dict[str, Any]) -> str:
    median, interval = ratio_of(lane)
    cpu_median, cpu_interval = ratio_of(lane, "cpu")
    added = {name.removesuffix("_ms"): f"{ms:+.2f}" for name, ms in added_of(lane).items()}
    return (
        f"ratio {median:7.4f}  [{interval[0]:.4f}, {interval[1]:.4f}]   processor time {cpu_median:7.4f}"
        f"  [{cpu_interval[0]:.4f}, {cpu_interval[1]:.4f}]   added ms: {' '.join(f'{n} {ms}' for n, ms in added.items())}"
        f"   ({len(lane['wall'])} rounds in {len(lane['runs'])} runs)"
    )


def seconds_of(lane: dict[str, Any], what: str) -> FloatArray:
    """``[rounds, ROUND]``; ``cpu`` is the sum of the parts of a step."""
    if what == "cpu":
        return np.sum([lane[part] for part in Turns.PARTS], axis=0)
    return np.array(lane[what])


def kinds(lane: dict[str, Any]) -> tuple[BoolArray, BoolArray]:
    """Which steps are on, and which count, ``[rounds, ROUND]``.

    A step with a deep probe, one in 250, does not: what that costs is told by itself.
    """
    on = np.array([round_of(first) for first in lane["first"]])
    counts = np.array([counting(steps) for steps in on])
    return on, counts & ~np.array(lane["probed"]) if "probed" in lane else counts


def ratio_of(lane: dict[str, Any], what: str = "wall", all_steps: bool = False) -> tuple[float, tuple[float, float]]:
    """Median of the rounds' ratios and its interval; of several runs these are drawn first, then the rounds in them."""
    on, counts = kinds(lane)
    ratios = [
        float(np.median(seconds[o & c]) / np.median(seconds[~o & c]))
        for seconds, o, c in zip(seconds_of(lane, what), on, counts | all_steps, strict=True)
    ]
    return median_interval(np.array(ratios), runs=lane["runs"])


def mean_ratio(lane: dict[str, Any]) -> float:
    (on, counts), wall = kinds(lane), seconds_of(lane, "wall")
    return trimmed_mean(wall[on & counts]) / trimmed_mean(wall[~on & counts])


def means(lane: dict[str, Any], what: str, is_on: bool) -> FloatArray:
    """Mean seconds of a step of one kind that counts, in each ``TOGETHER`` rounds."""
    (on, counts), seconds = kinds(lane), seconds_of(lane, what)
    rounds = np.array_split(np.arange(len(seconds)), max(1, len(seconds) // TOGETHER))
    return np.array([seconds[r][(on[r] == is_on) & counts[r]].mean() for r in rounds])


def added_of(lane: dict[str, Any]) -> dict[str, float]:
    """Milliseconds that a step has more when it is on, by its parts."""
    ms = {
        f"{part}_ms": 1e3 * float(np.median(means(lane, part, is_on=True) - means(lane, part, is_on=False)))
        for part in ("hooks", "update", "around", "passes")
    }
    passes = ms.pop("passes_ms")
    return {**ms, "net_ms": sum(ms.values()), "passes_ms": passes}


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
    result: dict[str, Any] = {"peers": {}, "peers_interval": {}, "peers_own_ms": {}, "peers_added_ms": {}}
    if not raw:
        return result
    for name, lane in raw.items():
        median, interval = ratio_of(lane)
        if name in PEERS:
            result["peers"][name], result["peers_interval"][name] = median, interval
            if "own" in lane:
                result["peers_own_ms"][name] = own_of(lane)["ms"]
                result["peers_added_ms"][name] = added_of(lane)["net_ms"]
        elif name == "bare again":
            result |= {"bare_again": median, "bare_again_interval": interval}
            result["bare_again_added_ms"] = added_of(lane)["net_ms"]
        elif name == "suite":
            cpu_median, cpu_interval = ratio_of(lane, "cpu")
            result |= {"ratio_median": median, "ratio_interval": interval}
            result |= {"ratio_all_steps": ratio_of(lane, all_steps=True)[0], "ratio_mean": mean_ratio(lane)}
            result |= {"cpu_ratio_median": cpu_median, "cpu_ratio_interval": cpu_interval}
            result |= {"rounds": len(lane["wall"]), "runs": len(lane["runs"]), "added": added_of(lane)}
    result |= {"step_ms": bare_ms(raw, "wall"), "step_cpu_ms": bare_ms(raw, "cpu")}
    if "timed" in raw:
        own = own_of(raw["timed"])
        added = own["ms"] - own["norm_ms"]
        result |= {"own_share": own["share"], "own_ms": own["ms"], "own_share_at_100ms": own["ms"] / 100.0}
        result |= {"own_median_ms": own["median_ms"], "norm_ms": own["norm_ms"], "own_us_by_hook": own["us_by_hook"]}
        result |= {"own_added_ms": added, "own_added_share": added / result["step_ms"]}
        result["own_added_share_at_100ms"] = added / 100.0
    if "recover" in raw:
        result["recover_own"] = {k: v for k, v in own_of(raw["recover"]).items() if k != "us_by_hook"}
    if "deep probe" in raw:
        lane = raw["deep probe"]
        seconds = sum(s for hook, s in lane["by_hook"].items() if hook.startswith("DeepProbe."))
        probes = (np.array(lane["probed"]) & [counting(round_of(first)) for first in lane["first"]]).sum()
        result["deep_probe_ms"] = 1e3 * seconds / probes
        result["deep_probe"] = result["deep_probe_ms"] / DeepProbe().every_n_steps / result["step_cpu_ms"]
    return result


def bare_ms(raw: Raw, what: str) -> float:
    """Median over the bare steps of all lanes that count."""
    found = []
    for lane in raw.values():
        on, counts = kinds(lane)
        found.append(seconds_of(lane, what)[~on & counts])
    return 1e3 * float(np.median(np.concatenate(found)))


def own_of(lane: dict[str, Any]) -> dict[str, Any]:
    """Own time of the suite or a peer in a step that is on."""
    on, counts = kinds(lane)
    own = means(lane, "own", is_on=True)
    hooks = {name: round(1e6 * seconds / int((on & counts).sum()), 1) for name, seconds in lane["by_hook"].items()}
    return {
        "ms": 1e3 * float(np.median(own)),
        "median_ms": 1e3 * float(np.median(seconds_of(lane, "own")[on & counts])),
        "share": float(np.median(own / means(lane, "wall", is_on=True))),
        "norm_ms": 1e3 * float(np.median(means(lane, "norm", is_on=True))) if "norm" in lane else 0.0,
        "us_by_hook": dict(sorted(hooks.items(), key=lambda item: -item[1])),
    }


# ----------------------------------------------------------------------------------------------- the start of a fit


def first_step(folder: Path, times: int = 5) -> dict[str, float]:
    """Own time from the start of a fit to its first step, in milliseconds; the scan of the parameters at step 0 apart."""
    totals, scans = [], []
    for i in range(times + 1):
        own = OwnTime()
        made = suite(folder / f"start-{i}")
        before = OwnTime()
        for callback in made:
            if hasattr(callback, "_scan_state"):
                callback._scan_state = before.timed("scan", callback._scan_state)  # type: ignore[method-assign]

        class Ends(L.Callback):
            def on_train_batch_start(self, *args: Any) -> int:
                own.on = False  # noqa: B023
                return -1

        train([*made, Instrument(made, own, start=True), Ends()], max_steps=1)
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
    made = [c for c in suite(folder / "growth") if not isinstance(c, RunJournal)]
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
    made = [c for c in suite(folder / name, policy="observe") if type(c).__name__ != "Rollback"]

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

    added = {"the default suite": result["added"]["net_ms"], **result["peers_added_ms"]}
    rows = [("the default suite", result["ratio_median"], result["ratio_interval"], "#1f6f8b")]
    rows += [(name, result["peers"][name], result["peers_interval"][name], "#9a9a9a") for name in PEERS]
    rows.sort(key=lambda row: row[1])
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=[3, 2])
    for y, (name, median, (low, high), colour) in enumerate(rows):
        left.plot([100 * (low - 1), 100 * (high - 1)], [y, y], color=colour, lw=5, alpha=0.45, solid_capstyle="round")
        left.plot(100 * (median - 1), y, "o", color=colour, ms=7)
        words = f"{round(100 * (median - 1), 1) + 0.0:+.1f} %" + (
            f"   net {added[name]:+.2f} ms" if name in added else ""
        )
        at, offset, side = (low, -8, "right") if median > 2 else (high, 8, "left")
        left.annotate(words, (100 * (at - 1), y), (offset, -4), textcoords="offset points", ha=side)
    left.set_yticks(range(len(rows)), [name for name, *_ in rows])
    left.axvline(0, color="black", lw=0.8)
    left.axvline(1, color="#c1440e", lw=0.8, ls=":")
    left.set_xscale("symlog", linthresh=5)
    left.set_xticks(ticks := [0, 1, 2, 5, 10, 50, 100, 500], [f"{t:g}" for t in ticks])
    left.minorticks_off()
    left.set_xlim(min(-5.0, *(110 * (low - 1) for *_, (low, _), _ in rows)), max(150.0, 130 * (rows[-1][2][1] - 1)))
    left.set_xlabel(
        f"added to a step of {result['step_ms']:.0f} ms, % (median and its 95 % interval; dotted: 1 %)\n"
        "net: processor time added in hooks, less what the update saves"
    )
    # A deep probe comes once in 250 steps, and the times by hook are sums over all of them: it is told by itself.
    steady = [item for item in result["own_us_by_hook"].items() if not item[0].startswith("DeepProbe.")]
    hooks = steady[:8][::-1]
    right.barh([n for n, _ in hooks], [us for _, us in hooks], color="#1f6f8b")
    all_us, norm_us = 1e3 * result["own_ms"], 1e3 * result["norm_ms"]
    right.set_xlabel(f"the suite's own time, µs a step\n({norm_us:.0f} of {all_us:.0f}: the norm for clipping)")
    right.tick_params(axis="y", labelsize=7)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--rounds", type=int, default=100, help=f"rounds of four blocks of {BLOCK} steps; peers have fewer"
    )
    arguments.add_argument(
        "--keep", type=Path, help="add the rounds to those of earlier runs in this file, and judge all of them"
    )
    arguments.add_argument("--lanes", nargs="+", choices=LANES, metavar="LANE", help="only these, e.g. suite timed")
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
            if options.keep is not None:
                earlier = json.loads(options.keep.read_text()) if options.keep.exists() else {}
                if not all("first" in lane for lane in earlier.values()):
                    arguments.error(f"{options.keep} is of an older version, which measured in another way; remove it.")
                raw = joined(earlier, raw)
                options.keep.write_text(json.dumps(raw))
                for name, lane in raw.items():
                    print(f"{name:24s} {told(lane)}")
            result = evaluate(raw) | {"load": [load, os.getloadavg()[0]]}
            if options.lanes is None:
                result |= first_step(Path(folder)) | {"host_syncs": host_syncs()}
    for name, value in result.items():
        print(f"{name:28s} {value if not isinstance(value, float) else round(value, 4)}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    if options.png is not None and {*PEERS} <= {*result.get("peers", ())} and {"added", "own_ms"} <= {*result}:
        picture(result, options.png)
    if options.growth is not None:
        return verdict(result, MOST_GROWTH, options.check)
    if options.scaling:
        return verdict(result, MOST_SCALING, options.check)
    # Nor measurably more than the cheapest peer that does a part of it. Ratios near 1 hardly tell the callbacks apart: what
    # they add does.
    most = MOST | {
        "ratio_median": min([MOST["ratio_median"], *(high for _, high in result["peers_interval"].values())])
    }
    if result["peers_added_ms"]:
        most["added.net_ms"] = min(result["peers_added_ms"].values())
    return verdict(result, most, options.check)


if __name__ == "__main__":
    sys.exit(main())
