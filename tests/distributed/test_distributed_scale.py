"""The benchmark of very many ranks does what it says, on a small scale, and says so where a bound is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scale

from lightning_sentinel.record import SIGNAL_INDEX, SIGNALS

RANKS = 64


@pytest.fixture
def recorded() -> Any:
    """Sixty steps of four ranks that learn: [60, 4, 14]."""
    draw = np.random.default_rng(0)
    values = np.zeros((60, 4, len(SIGNALS)))
    values[:, :, SIGNAL_INDEX["loss_nats"]] = (
        2 + np.exp(-np.arange(60) / 20)[:, None] + 0.05 * draw.standard_normal((60, 4))
    )
    for signal, level in {"supervised_tokens": 1024, "tokens": 1024, "grad_norm": 1, "loss_scale": 1}.items():
        values[:, :, SIGNAL_INDEX[signal]] = level
    values[:, :, SIGNAL_INDEX["update_norm"]] = np.nan
    values[:, :, SIGNAL_INDEX["step_seconds"]] = 0.1
    return values


def test_cost_is_that_of_the_whole_suite(recorded: Any) -> None:
    few, many = (scale.cost(recorded, ranks, 20) for ranks in (RANKS, 16 * RANKS))
    assert few["gather_bytes"] == 112 * RANKS
    assert many["gather_bytes"] == 16 * few["gather_bytes"]
    # 70 records of 112 bytes a rank are held, and the detectors' own numbers
    assert 70 * 112 * 16 * RANKS < many["memory_mb"] * 2**20 < 16 * few["memory_mb"] * 2**20
    assert 500 < many["journal_bytes_per_step"] < few["journal_bytes_per_step"] < 4096
    assert many["ms_per_step"] > 0


def test_bad_ranks_are_named_and_no_others(recorded: Any) -> None:
    assert scale.named(recorded, RANKS, trials=20, sigma=10, seed=1) == (0, 0)
    missed, wrong = scale.named(recorded, RANKS, trials=20, sigma=0, seed=1)
    assert (missed, wrong) == (20, 0)  # nothing is wrong with it
    assert scale.false_names(recorded, RANKS, 200) == 0


def test_slow_ranks_are_false_names_too(recorded: Any) -> None:
    """Of the four ranks one takes three times as long, and the others wait for it: each 4th of the made ones is slow."""
    recorded[:, :, SIGNAL_INDEX["step_seconds"]] = 0.3
    recorded[:, :3, SIGNAL_INDEX["wait_seconds"]] = 0.2
    assert scale.false_names(recorded, RANKS, 60) == RANKS / 4


def good() -> dict[str, Any]:
    return {
        "ms_per_step": {"4": 0.5, "16384": 19.0},
        "journal_bytes_per_step": {"4": 700.0, "16384": 4000.0},
        "memory_mb": {"4": 0.5, "16384": 100.0},
        "missed": {"64 ranks, +10 sigma": 0.0, "64 ranks, +5 sigma": 0.05},
        "named_another": {"64 ranks, +5 sigma": 1},
        "false_names": {"64 ranks, 100,000 steps": 1},
    }


@pytest.mark.parametrize(
    ("key", "entry", "value", "said"),
    [
        ("ms_per_step", "16384", 20.1, "20.1 ms a step at 16384 ranks, 20 allowed"),
        ("journal_bytes_per_step", "16384", 4097.0, "4097 bytes of journal a step at 16384 ranks, 4096 allowed"),
        ("ms_per_step", "4", 0.004, "19.0 ms a step at 16384 ranks, 0.0 at 4: more than 4096 times as much"),
        ("memory_mb", "4", 0.02, "100.0 MiB of memory at 16384 ranks, 0.0 at 4: more than 4096 times as much"),
        ("missed", "64 ranks, +10 sigma", 0.001, "64 ranks, +10 sigma: 0.1% missed, 0% allowed"),
        ("missed", "64 ranks, +5 sigma", 0.051, "64 ranks, +5 sigma: 5.1% missed, 5% allowed"),
        ("named_another", "64 ranks, +5 sigma", 2, "64 ranks, +5 sigma: a healthy rank named in 2 trials, 1 allowed"),
        ("false_names", "64 ranks, 100,000 steps", 2, "64 ranks, 100,000 steps: 2 healthy ranks named, 1 allowed"),
    ],
)
def test_each_bound(key: str, entry: str, value: float, said: str) -> None:
    result = good()
    assert scale.over_bounds(result) == []
    result[key][entry] = value
    assert scale.over_bounds(result) == [said]


@pytest.mark.parametrize(("bound", "code"), [(4096.0, 0), (600.0, 1)])
def test_the_exit_code_tells_of_a_broken_bound(
    recorded: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bound: float,
    code: int,
) -> None:
    """The whole command, at a hundredth of its trials and two sizes."""
    small = {
        "SIZES": (4, RANKS),
        "MANY": (RANKS,),
        "LARGEST": str(RANKS),
        "TRIALS": 10,
        "CLEAN_STEPS": 50,
        "COST_STEPS": 20,
    }
    # the sharing of the machine is not what is tested here
    for name, value in {**small, "MOST_BYTES": bound, "MOST_MS": 1e9, "MOST_MISSED": {10: 0.0}}.items():
        monkeypatch.setattr(scale, name, value)
    np.save(tmp_path / "four.npy", recorded)
    arguments = ["scale.py", "--telemetry", str(tmp_path / "four.npy"), "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", arguments)
    assert scale.main() == code
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["missed"] == {"64 ranks, +10 sigma": 0.0}
    assert list(written["memory_mb"]) == ["4", "64"]
    broken = [line for line in capsys.readouterr().out.splitlines() if line.startswith("over the bound")]
    assert len(broken) == code
    assert all("bytes of journal a step at 64 ranks, 600 allowed" in line for line in broken)
