"""Two processes: every rank gets the same verdict, and the rank at fault is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("triage_two_ranks.py")


def verdicts_of(fault: str) -> list[dict[str, Any]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), fault], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("VERDICT")]
    return [json.loads(text) for _, _, text in sorted(lines, key=lambda x: int(x[1]))]


@pytest.mark.parametrize(
    ("fault", "kind", "culprits", "since", "reproducible"),
    [
        ("bad_rank", "infrastructure", ["rank:1"], 4, None),
        ("transient", "infrastructure", ["module:blocks.2.mixer", "rank:1"], 6, False),
        ("masked_rank", "numerics", ["module:training_step"], 6, True),
        ("healthy", "undetermined", [], 6, None),
    ],
)
def test_every_rank_gets_the_same_verdict(
    fault: str, kind: str, culprits: list[str], since: int, reproducible: bool | None
) -> None:
    first, second = verdicts_of(fault)
    assert first == second
    assert (first["kind"], first["culprits"], first["since_step"]) == (kind, culprits, since)
    assert first["reproducible"] is reproducible
    results = {e["name"]: e["result"] for e in first["experiments"]}
    assert results["replicas"] == ("differ" if fault == "bad_rank" else "equal to the bit")
    if fault == "masked_rank":
        assert first["evidence"]["ranks"] == [1]
        assert first["evidence"]["operator"] == "aten.div.Tensor"
