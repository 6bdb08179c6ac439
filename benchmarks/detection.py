"""Detection quality on made curves with known truth: false incidents, delays, ranks, speed, and a sweep beside peers' rules.

    python benchmarks/detection.py                        # the tables of docs/detection.md (some minutes)
    python benchmarks/detection.py --quick                # a tenth of the steps and trials
    python benchmarks/detection.py --json FILE --png FILE

Everything is seeded. Sigma is the marginal standard deviation of the noise. The suite is the shipped default one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_sentinel.detectors import RankOutlier
from lightning_sentinel.incidents import FindingKind, Severity
from lightning_sentinel.record import StepRecord
from lightning_sentinel.scan import Watch, default_detectors

Array = npt.NDArray[np.float64]
SIGMA = 0.05
SHIFTS = (FindingKind.LEVEL_SHIFT, FindingKind.DIVERGENCE)
# (name, autocorrelation, degrees of freedom; 0: normal)
CELLS = (
    ("normal phi=0", 0.0, 0),
    ("normal phi=0.5", 0.5, 0),
    ("normal phi=0.9", 0.9, 0),
    ("student-t3 phi=0", 0.0, 3),
    ("student-t3 phi=0.5", 0.5, 3),
)


# ---------------------------------------------------------------------------------------------------- made curves


def noise(rng: np.random.Generator, n: int, phi: float, degrees: int, sigma: float = SIGMA) -> Array:
    """AR(1) noise of marginal standard deviation ``sigma``, ``[n]``, from its stationary state."""
    warm = 200 if phi else 0
    if degrees:
        shocks = rng.standard_t(degrees, n + warm) / math.sqrt(degrees / (degrees - 2))
    else:
        shocks = rng.standard_normal(n + warm)
    shocks = shocks * (sigma * math.sqrt(1 - phi * phi))
    if not phi:
        return np.asarray(shocks)
    values = np.empty(n + warm)
    last = 0.0
    for i, shock in enumerate(shocks.tolist()):
        last = phi * last + shock
        values[i] = last
    return values[warm:]


def descent(n: int, start: float = 9.0, end: float = 2.0, power: float = 0.35) -> Array:
    """A power law from ``start`` towards ``end`` nats, ``[n]``."""
    return end + (start - end) * np.arange(1, n + 1, dtype=np.float64) ** -power


# ---------------------------------------------------------------------------------------------------- the suite


def run(losses: Array, overrides: dict[str, dict[str, Any]] | None = None) -> Watch:
    """Feed a curve to a fresh suite."""
    suite = Watch(overrides)
    for step, loss in enumerate(losses.tolist()):
        suite.look(step, loss)
    return suite


def first_incident(
    losses: Array, onset: int, overrides: dict[str, dict[str, Any]] | None = None
) -> tuple[int, str] | None:
    """Delay in steps from ``onset`` and kind of the first incident at or after it; None if there is none."""
    suite = Watch(overrides)
    for step, loss in enumerate(losses.tolist()):
        for finding in suite.look(step, loss):
            if step >= onset and finding.severity is Severity.INCIDENT:
                return step - onset, str(finding.kind)
    return None


def false_incidents(steps: int, *, length: int = 20_000, seed: int = 1) -> dict[str, float]:
    """False incidents per 10^6 steps for each kind of noise, over runs of ``length`` steps from their first step on."""
    rates = {}
    for index, (name, phi, degrees) in enumerate(CELLS):
        count = 0
        length = min(length, steps)
        runs = steps // length
        for i in range(runs):
            rng = np.random.default_rng([seed, index, i])
            count += len(run(descent(length) + noise(rng, length, phi, degrees)).incidents)
        rates[name] = count * 1e6 / (runs * length)
        print(f"  {name:20} {count:4d} in {runs * length:,} steps", flush=True)
    return rates


def delays(make: Callable[[np.random.Generator], tuple[Array, int]], trials: int, seed: int) -> dict[str, Any]:
    """Median and 95th percentile of the delay (missed ones count as endless) and the kinds first stated."""
    found: list[float] = []
    kinds: dict[str, int] = {}
    for i in range(trials):
        losses, onset = make(np.random.default_rng([seed, i]))
        first = first_incident(losses, onset)
        found.append(math.inf if first is None else first[0])
        kind = "missed" if first is None else first[1]
        kinds[kind] = kinds.get(kind, 0) + 1
    ordered = sorted(found)
    p95 = ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]
    return {"median": ordered[len(ordered) // 2], "p95": p95, "kinds": kinds}


def level_curve(
    level: float,
    change: Callable[[Array], Array],
    phi: float = 0.0,
    degrees: int = 0,
    before: int = 1500,
    after: int = 1000,
) -> Callable[[np.random.Generator], tuple[Array, int]]:
    """A plateau at ``level`` that ``change(steps since onset)`` is added to after ``before`` steps."""

    def make(rng: np.random.Generator) -> tuple[Array, int]:
        losses = level + noise(rng, before + after, phi, degrees)
        losses[before:] += change(np.arange(after, dtype=np.float64))
        return losses, before

    return make


def delay_table(trials: int) -> dict[str, dict[str, Any]]:
    """Delays of the faults that a detector has to see."""
    constant: Callable[[float], Callable[[Array], Array]] = lambda height: lambda t: np.full_like(t, height)  # noqa: E731
    ramp: Callable[[Array], Array] = lambda t: 0.004 * t  # noqa: E731
    cases = {
        "ramp +0.004/step from 2.0": level_curve(2.0, ramp),
        "ramp, phi=0.5": level_curve(2.0, ramp, 0.5),
        "ramp, phi=0.9": level_curve(2.0, ramp, 0.9),
        "shift +2 sigma": level_curve(2.0, constant(2 * SIGMA)),
        "shift +2 sigma, phi=0.5": level_curve(2.0, constant(2 * SIGMA), 0.5),
        "shift +2 sigma, phi=0.9": level_curve(2.0, constant(2 * SIGMA), 0.9),
        "shift +2 sigma, t3": level_curve(2.0, constant(2 * SIGMA), 0.0, 3),
        "shift +2 sigma, t3, phi=0.5": level_curve(2.0, constant(2 * SIGMA), 0.5, 3),
        "2.05 -> 2.59": level_curve(2.05, constant(0.54), after=100),
        "2.05 -> 2.59, phi=0.9": level_curve(2.05, constant(0.54), 0.9, after=100),
        "random tokens, +1.5 nats": level_curve(2.5, constant(1.5), before=300, after=5),
    }
    table = {}
    for seed, (name, make) in enumerate(cases.items()):
        table[name] = delays(make, trials, 100 + seed)
        row = table[name]
        print(f"  {name:30} median {row['median']:6g}  95 % {row['p95']:6g}  {row['kinds']}", flush=True)
    return table


def single_events(trials: int) -> dict[str, float]:
    """A single outlier of +6 sigma is no incident; a spike of five steps is one."""
    outlier_incidents = spikes_not_one = 0
    for i in range(trials):
        rng = np.random.default_rng([7, i])
        losses = 2.0 + noise(rng, 1000, 0.0, 0)
        losses[600] = 2.0 + 6 * SIGMA
        outlier_incidents += len(run(losses).incidents)
        losses = 2.0 + noise(rng, 1000, 0.0, 0)
        losses[600:605] += np.array([0.8, 1.2, 1.0, 0.6, 0.4])
        spikes_not_one += len(run(losses).incidents) != 1
    print(f"  +6 sigma outliers that became incidents: {outlier_incidents}/{trials}")
    print(f"  five-step spikes that were not exactly one incident: {spikes_not_one}/{trials}")
    return {"outlier_incidents": outlier_incidents, "five_step_spikes_not_one": spikes_not_one, "trials": trials}


# ---------------------------------------------------------------------------------------------------- ranks


def rank_records(
    rng: np.random.Generator, ranks: int, steps: int, offsets: Array, bad: tuple[int, int, float] | None = None
) -> Iterator[StepRecord]:
    """Records of ranks with their own offsets around a falling loss; ``bad`` is (rank, from step, nats)."""
    for step in range(steps):
        losses = 2.0 + 0.5 / (1 + step) ** 0.3 + offsets + SIGMA * rng.standard_normal(ranks)
        if bad is not None and step >= bad[1]:
            losses[bad[0]] += bad[2]
        yield StepRecord.from_losses(step, losses)  # type: ignore[arg-type]


def rank_table(trials: int, quiet_steps: int) -> dict[str, Any]:
    """Share of bad ranks named within 3 steps, and ranks named without reason."""
    result: dict[str, Any] = {"named_within_3": {}}
    for ranks in (8, 64, 1024, 16384):
        for height in (5.0, 10.0):
            count = max(min(20, trials), trials if ranks <= 1024 else trials // 10)
            hits = wrong = 0
            for i in range(count):
                rng = np.random.default_rng([11, ranks, int(height), i])
                offsets = 0.1 * rng.standard_normal(ranks)
                victim = int(rng.integers(ranks))
                detector = RankOutlier()
                named: set[int] = set()
                for record in rank_records(rng, ranks, 123, offsets, (victim, 120, height * SIGMA)):
                    named |= {r for f in detector.observe(record) for r in f.ranks}
                hits += victim in named
                wrong += bool(named - {victim})
            result["named_within_3"][f"{ranks} ranks, +{height:g} sigma"] = hits / count
            print(f"  {ranks:6d} ranks +{height:2g} sigma: named in {hits}/{count}, another one in {wrong}", flush=True)
    false = 0
    for ranks, steps in ((2, quiet_steps), (8, quiet_steps), (64, quiet_steps)):
        rng = np.random.default_rng([13, ranks])
        detector = RankOutlier()
        found = sum(len(detector.observe(r)) for r in rank_records(rng, ranks, steps, 0.2 * rng.standard_normal(ranks)))
        print(f"  {ranks:6d} ranks with own offsets: {found} findings in {steps:,} steps", flush=True)
        false += found
    result["false"] = false
    return result


# ---------------------------------------------------------------------------------------------------- speed


def speed() -> dict[str, float]:
    """Processor time of the whole default suite: microseconds a step at one rank, milliseconds at 16,384."""
    rng = np.random.default_rng(3)
    losses = descent(20_000) + noise(rng, 20_000, 0.5, 0)
    records = [StepRecord.from_losses(i, [x]) for i, x in enumerate(losses.tolist())]
    detectors = default_detectors()
    start = time.process_time()
    for record in records:
        for detector in detectors:
            detector.observe(record)
    one = 1e6 * (time.process_time() - start) / len(records)
    many = list(rank_records(rng, 16384, 60, 0.1 * rng.standard_normal(16384)))
    detectors = default_detectors()
    start = time.process_time()
    for record in many:
        for detector in detectors:
            detector.observe(record)
    rank = 1e3 * (time.process_time() - start) / len(many)
    print(f"  1 rank {one:.1f} us a step, 16,384 ranks {rank:.2f} ms a step")
    return {"us_per_step_1_rank": one, "ms_per_step_16384_ranks": rank}


# ---------------------------------------------------------------------------------------------------- peers

# Alarm rules as published by others, each with its one number free; alarms of a whole curve at once.
Rule = Callable[[Array, float], npt.NDArray[np.bool_]]


def _trailing(losses: Array, window: int) -> tuple[Array, Array]:
    """Mean and standard deviation of the ``window`` values before each one; NaN where there are fewer."""
    total = np.concatenate(([0.0], np.cumsum(losses)))
    square = np.concatenate(([0.0], np.cumsum(losses * losses)))
    mean = np.full(len(losses), np.nan)
    deviation = np.full(len(losses), np.nan)
    mean[window:] = (total[window:-1] - total[: -window - 1]) / window
    deviation[window:] = np.sqrt(
        np.maximum((square[window:-1] - square[: -window - 1]) / window - mean[window:] ** 2, 0.0)
    )
    return mean, deviation


def sigma_rule(losses: Array, k: float) -> npt.NDArray[np.bool_]:
    """k standard deviations above the mean of the last 128 (OLMo's step skipping uses 6)."""
    mean, deviation = _trailing(losses, 128)
    return np.asarray(losses - mean >= k * deviation)


def ratio_rule(losses: Array, k: float) -> npt.NDArray[np.bool_]:
    """k times the mean of the last 10 (ByteRobust uses 5)."""
    return np.asarray(losses >= k * _trailing(losses, 10)[0])


def sustained_ratio_rule(losses: Array, k: float) -> npt.NDArray[np.bool_]:
    """Five in a row at k times the mean of the last 100 (llm-foundry's spike killer uses 2)."""
    high = losses >= k * _trailing(losses, 100)[0]
    return np.asarray(np.convolve(high, np.ones(5), "full")[: len(losses)] >= 5)


PEERS: dict[str, tuple[Rule, tuple[float, ...]]] = {
    "mean of 128 + k sigma": (sigma_rule, (2.0, 3.0, 4.0, 5.0, 6.0, 7.0)),
    "k x mean of 10": (ratio_rule, (1.02, 1.05, 1.08, 1.12, 1.2, 2.0, 5.0)),
    "5 at k x mean of 100": (sustained_ratio_rule, (1.005, 1.01, 1.02, 1.05, 1.2, 2.0)),
}


def alarm_events(alarms: npt.NDArray[np.bool_], gap: int = 25) -> int:
    """Alarms less than ``gap`` steps apart are one event."""
    where = np.flatnonzero(alarms)
    return 0 if not len(where) else 1 + int((np.diff(where) >= gap).sum())


def sweep(steps: int, trials: int) -> list[dict[str, Any]]:
    """False events per 10^6 steps and median delay of a +2 sigma shift and of 2.05 -> 2.59, for thresholds of every rule."""
    length = min(20_000, steps)
    quiet = [descent(length) + noise(np.random.default_rng([21, i]), length, 0.5, 0) for i in range(steps // length)]
    small = level_curve(2.0, lambda t: np.full_like(t, 2 * SIGMA), 0.5)
    large = level_curve(2.05, lambda t: np.full_like(t, 0.54), 0.5)
    cases = {
        "shift_delay": [small(np.random.default_rng([22, i])) for i in range(trials)],
        "step_delay": [large(np.random.default_rng([23, i])) for i in range(trials)],
    }
    total = sum(len(q) for q in quiet)
    rows = []
    for factor in (0.4, 0.6, 0.8, 1.0, 1.5):
        overrides = scaled_thresholds(factor)
        false = sum(len(run(q, overrides).incidents) for q in quiet)
        row: dict[str, Any] = {"rule": "lightning-sentinel", "k": factor, "false_per_1e6": false * 1e6 / total}
        for name, curves in cases.items():
            firsts = [first_incident(losses, onset, overrides) for losses, onset in curves]
            row[name] = float(np.median([math.inf if f is None else f[0] for f in firsts]))
        rows.append(row)
    for rule_name, (rule, ks) in PEERS.items():
        for k in ks:
            false = sum(alarm_events(rule(q, k)) for q in quiet)
            row = {"rule": rule_name, "k": k, "false_per_1e6": false * 1e6 / total}
            for name, curves in cases.items():
                firsts = [np.flatnonzero(rule(losses, k)[onset:]) for losses, onset in curves]
                row[name] = float(np.median([f[0] if len(f) else math.inf for f in firsts]))
            rows.append(row)
    print(f"  {'rule':24} {'k':>6} {'false/1e6':>10} {'+2 sigma':>9} {'2.05->2.59':>10}")
    for row in rows:
        print(
            f"  {row['rule']:24} {row['k']:6g} {row['false_per_1e6']:10.1f} {row['shift_delay']:9g} {row['step_delay']:10g}"
        )
    return rows


def scaled_thresholds(factor: float) -> dict[str, dict[str, Any]]:
    """All thresholds of the loss detectors times ``factor``."""
    from lightning_sentinel.detectors import Divergence, Spike

    return {
        "spike_detector": {"threshold": factor * Spike.threshold, "gross": factor * Spike.gross},
        "divergence_detector": {
            "threshold": factor * Divergence.threshold,
            "trend_z": factor * Divergence.trend_z,
        },
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Delay against false alarms, one line for each rule."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for axis, key, title in (
        (axes[0], "shift_delay", "a level shift of +2 sigma that stays"),
        (axes[1], "step_delay", "2.05 to 2.59 nats"),
    ):
        for rule in dict.fromkeys(r["rule"] for r in rows):
            mine = [r for r in rows if r["rule"] == rule]
            x = [max(r["false_per_1e6"], 1.0) for r in mine]
            y = [min(r[key], 1000.0) + 1 for r in mine]
            own = rule == "lightning-sentinel"
            axis.plot(x, y, "o-", label=rule, linewidth=2.2 if own else 1.2, markersize=5, zorder=3 if own else 2)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("false incidents per 1,000,000 steps (1: one or none)")
        axis.set_ylabel("median delay, steps (1,000: missed)")
        axis.set_title(f"{title}; AR(1) phi = 0.5", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


# ---------------------------------------------------------------------------------------------------- command


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts, print the tables, write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--quick",
        type=int,
        nargs="?",
        const=10,
        default=1,
        metavar="N",
        help="a tenth (or 1/N) of the steps and trials",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the picture of the sweep")
    args = parser.parse_args(argv)
    scale = args.quick
    trials = max(200 // scale, 2)
    print("False incidents:")
    false = false_incidents(1_000_000 // scale)
    print("Delays, steps from the onset:")
    table = delay_table(trials)
    print("Single events:")
    single = single_events(trials)
    print("Ranks:")
    ranks = rank_table(trials, 100_000 // scale)
    print("Speed, processor time:")
    times = speed()
    print("Sweep:")
    rows = sweep(200_000 // scale, 40 if scale == 1 else max(100 // scale, 2))
    if args.png is not None:
        draw(rows, args.png)
    if args.json is not None:
        numbers = {
            "false_per_1e6_worst_cell": max(false.values()),
            "ramp_delay_steps": table["ramp +0.004/step from 2.0"]["median"],
            "shift_delay_steps": table["shift +2 sigma"]["median"],
            "step_2_05_to_2_59_delay_steps": table["2.05 -> 2.59"]["median"],
            **times,
            "false_per_1e6": false,
            "delays": table,
            "single": single,
            "ranks": ranks,
            "sweep": rows,
        }
        args.json.write_text(json.dumps(_finite(numbers), indent=1) + "\n", encoding="utf-8")
    return 0


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return value


if __name__ == "__main__":
    sys.exit(main())
