"""Ranks by fork: what a script has imported is imported once, however many ranks it starts.

Lightning sees what its own launcher would have left: ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))  # torchrun knows the script's own folder only
from collective_limit import LIMIT as LIMIT
from collective_limit import CollectiveLimit as CollectiveLimit
from sentinel_kit import free_port

# Ranks of a loaded machine may meet late; once they train, nothing may wait for longer than the limit.
MEETING = timedelta(minutes=5)


def fork_ranks(ranks: int, main: Callable[[], None], seconds: float = 1500.0, *, end_others: bool = True) -> int:
    """Run ``main`` in so many forked processes; 0 if all of them came through.

    When one falls the others are ended, unless they shall show that they end by themselves (``end_others=False``).
    """
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ["LOCAL_RANK"] = str(rank)
            code = 1
            try:
                main()
                code = 0
            except BaseException:
                print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr)
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)  # without the parent's clean-up
        children[pid] = rank
    end, failed = time.monotonic() + seconds, 0
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            failed = failed or status
            del children[pid]
        elif time.monotonic() > end:
            print(f"ranks {sorted(children.values())} were not through in {seconds:g} s", file=sys.stderr)
            failed = failed or 1
        if failed and (end_others or time.monotonic() > end):
            for left in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
        time.sleep(0.02)
    return int(failed != 0)


def run_script(script: Path, *arguments: object, seconds: float = 1700.0) -> None:
    """Run a script of ranks; its complaints are the test's."""
    command: Sequence[str] = [sys.executable, str(script), *map(str, arguments)]
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests / "callbacks")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-6000:]
