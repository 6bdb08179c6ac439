"""No rank goes back alone, and each goes back to its own data position: DDP and FSDP2 with two processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.distributed
def test_rollback_on_two_ranks_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("state_two_ranks.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "ddp:1", "ddp:2", "fsdp2:1", "uneven:early", "uneven:late"],
        env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, restored in (("ddp-1", 4), ("ddp-2", 2), ("fsdp2-1", 4)):
        for rank in (0, 1):
            result = json.loads((tmp_path / f"{name}-rank-{rank}.json").read_text())
            assert result == {"executed": 1, "restored": [restored], "problem": "", "steps": 16}, (name, rank)
    for name, light in (("early", [False]), ("late", [True])):
        results = [json.loads((tmp_path / f"uneven-{name}-rank-{rank}.json").read_text()) for rank in (0, 1)]
        for result in results:
            assert (result["light"], result["executed"], len(result["steps"])) == (light, 1, 16), name
