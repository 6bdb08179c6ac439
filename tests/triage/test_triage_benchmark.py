"""``benchmarks/triage.py`` as it is started: what it prints, its numbers as JSON, and a run that goes on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triage  # the benchmark

SCRIPT = Path(triage.__file__)
FAULT = "poor_initialization"  # strikes in the first step, and needs no trained weights
COUNTS = {"cases": 1, "faults": 1, "right": 1, "wrong": 0, "undetermined": 0, "missed": 0, "unlisted": 0}


@pytest.mark.slow
def test_the_benchmark_prints_its_matrix_writes_its_numbers_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers, keep = tmp_path / "numbers.json", tmp_path / "kept.jsonl"
    options = ["--faults", FAULT, "--seeds", "0", "--ranks", "1", "--json", str(numbers), "--keep", str(keep)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"1/1 {FAULT} seed 0: right" in done.stderr
    assert "1 cases of 1 faults: right 1 (100.0 %), wrong 0 (0.0 %), undetermined 0 (0.0 %)" in done.stdout
    found = json.loads(numbers.read_text())
    assert set(found) == {*COUNTS, "confusion", "outcomes"}
    assert {name: found[name] for name in COUNTS} == COUNTS
    assert found["confusion"]["numerics"] == dict.fromkeys(triage.KINDS, 0) | {"numerics": 1}
    assert sum(sum(row.values()) for row in found["confusion"].values()) == 1
    (outcome,) = found["outcomes"]
    assert (outcome["name"], outcome["seed"], outcome["ranks"]) == (FAULT, 0, 1)
    assert outcome["culprits"] == outcome["expected_culprits"] == ["parameter:model.head.weight"]
    assert [json.loads(line) for line in keep.read_text().splitlines()] == [outcome]

    def again(*_: Any) -> None:
        raise AssertionError("a case that is kept was run again")

    numbers.unlink()
    monkeypatch.setattr(triage, "run_case", again)
    monkeypatch.setattr(triage, "quiet", lambda: None)  # it silences loggers for the whole process
    monkeypatch.setattr(sys, "argv", ["triage.py", *options])
    triage.main()
    assert json.loads(numbers.read_text()) == found
    assert capsys.readouterr().out == done.stdout


def test_what_is_counted_and_how_it_is_shown() -> None:
    def outcome(name: str, expected: str, kind: str, grade: str, seed: int = 0) -> dict[str, Any]:
        case = {"name": name, "seed": seed, "ranks": 1, "expected": expected, "kind": kind, "outcome": grade}
        return case | {"culprits": ["rank:0"] if grade == "wrong" else [], "unlisted": []}

    outcomes = [
        outcome("a", "data", "data", "right"),
        outcome("a", "data", "infrastructure", "wrong", 1),
        outcome("b", "numerics", "none", "missed"),
        outcome("b", "numerics", "undetermined", "undetermined", 1) | {"unlisted": ["rank_values"]},
    ]
    found = triage.summary(outcomes)
    expected = {"cases": 4, "faults": 2, "right": 1, "wrong": 1, "undetermined": 2, "missed": 1, "unlisted": 1}
    assert {name: found[name] for name in expected} == expected
    none = dict.fromkeys(triage.KINDS, 0)
    assert found["confusion"]["data"] == none | {"data": 1, "infrastructure": 1}
    assert found["confusion"]["numerics"] == none | {"none": 1, "undetermined": 1}
    lines = triage.table(found).splitlines()
    assert lines[1].split() == ["data", "1", ".", ".", "1", ".", "."]
    assert "1 of 2  seed 1 on 1: wrong infrastructure rank:0" in next(line for line in lines if line.startswith("a "))
    assert "right 1 (25.0 %), wrong 1 (25.0 %), undetermined 2 (50.0 %) of which 1 had no incident" in lines[-2]
