"""Lightning#20187: rank 1 raises under DDP, an on-exception checkpoint waits in a collective, the error is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_sentinel.checkpoint import CheckpointStore

SCRIPT = Path(__file__).with_name("exception_hidden_script.py")


@pytest.mark.distributed
@pytest.mark.timeout(280)
def test_the_error_surfaces_at_once_on_its_rank(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0

    def events(rank: int, name: str) -> list[dict[str, Any]]:
        lines = (tmp_path / "journal" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["event"] == name]

    mine = events(1, "exception")
    # at once: seconds after the last good step, not the ten minutes of a collective's time-out, on the other rank too
    assert 0 <= mine[0]["time"] - events(1, "step")[-1]["time"] < 10
    assert 0 <= events(0, "exception")[0]["time"] - mine[0]["time"] < 30
    assert [(e["type"], e["message"], e["step"]) for e in mine] == [("ValueError", "boom on rank 1", 2)]
    assert mine[0]["frames"][-1].startswith("exception_hidden_script.py:")
    assert "ValueError: boom on rank 1" in (tmp_path / "stderr-1.txt").read_text()
    store = CheckpointStore(tmp_path / "checkpoints")
    dump = store.root / "exception-rank-00001"
    assert store.verify(dump) == []
    assert store.read(dump).status.reason == "ValueError on rank 1 at step 2"
