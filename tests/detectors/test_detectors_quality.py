"""The promises of docs/detection.md on made curves, in a short form of ``benchmarks/detection.py``."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_sentinel.scan import Watch

PATH = Path(__file__).parents[2] / "benchmarks" / "detection.py"
spec = importlib.util.spec_from_file_location("detection_benchmark", PATH)
bench = importlib.util.module_from_spec(spec)
sys.modules["detection_benchmark"] = bench
spec.loader.exec_module(bench)


def constant(height):
    return lambda t: np.full_like(t, height)


@pytest.mark.parametrize("cell", range(5))
def test_no_false_incident_in_twenty_thousand_steps(cell):
    _, phi, degrees = bench.CELLS[cell]
    losses = bench.descent(20_000) + bench.noise(np.random.default_rng([99, cell]), 20_000, phi, degrees)
    assert bench.run(losses).incidents == []


@pytest.mark.parametrize(
    ("change", "phi", "limit"),
    [
        (lambda t: 0.004 * t, 0.0, 80),
        (constant(0.1), 0.0, 100),
        (constant(0.1), 0.5, 100),
        (constant(0.54), 0.0, 5),
    ],
)
def test_delays(change, phi, limit):
    row = bench.delays(bench.level_curve(2.05, change, phi, before=1000, after=200), 9, seed=5)
    assert row["median"] <= limit
    if limit > 5:
        assert set(row["kinds"]) <= {"level_shift", "divergence"}


def test_a_single_outlier_is_no_incident_and_a_short_spike_is_one():
    result = bench.single_events(10)
    assert (result["outlier_incidents"], result["five_step_spikes_not_one"]) == (0, 0)


@pytest.mark.parametrize("height", [1.5, 3.0])
def test_a_batch_of_random_tokens_is_an_incident_at_its_first_step(height):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        t = np.arange(200)
        losses = 2.4 + 3.1 * np.exp(-t / 35) + 0.05 * rng.standard_normal(200)
        losses[120] += height
        [incident] = bench.run(losses).incidents
        assert incident.opened_step == 120
        assert incident.findings[0].severity == "incident"


def test_no_alarm_in_short_clean_runs():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        t = np.arange(250)
        losses = 2.5 + 3.0 / (1 + np.exp((t - 30) / 8)) + 0.1 * rng.standard_normal(250)
        assert bench.run(losses).episodes == []


def test_memory_does_not_grow():
    suite = Watch()
    rng = np.random.default_rng(0)
    sizes = []
    for step in range(9000):
        suite.look(step, 2.0 + 0.05 * rng.standard_normal())
        if step in (5000, 8999):
            sizes.append(len(json.dumps([d.state_dict() for d in suite.detectors if d.name != "rank_outlier"])))
    assert sizes[1] < 1.2 * sizes[0]
