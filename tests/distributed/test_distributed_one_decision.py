"""Every rank takes the same decision from the same matrix, whatever else differs between the processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "distributed_decide.py"
STREAMS, STEPS = 60, 100  # six thousand matrices


def decide(rank: int, hash_seed: str) -> list[list[object]]:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(rank), str(STREAMS), str(STEPS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    decided: list[list[object]] = json.loads(done.stdout)
    return decided


def test_ranks_that_differ_in_all_else_decide_alike_on_thousands_of_random_matrices() -> None:
    first, second = decide(0, "1"), decide(1, "4711")
    assert sum(int(str(count)) for _, count in first) > 1000  # there was something to decide
    assert [stream for stream, (a, b) in enumerate(zip(first, second, strict=True)) if a != b] == []
