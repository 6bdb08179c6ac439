"""Ranks by fork: what a script has imported is imported once, however many ranks it starts.

Lightning sees what its own launcher would have left: ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))  # torchrun knows the script's own folder only
from collective_limit import LIMIT as LIMIT
from collective_limit import CollectiveLimit as CollectiveLimit
from fork_server import run_forked
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
    """Run a script that forks ranks; its complaints are the test's."""
    path = str(Path(__file__).parents[1] / "callbacks")
    codes, said = run_forked(script, arguments, [{"PYTHONPATH": path}], seconds)
    assert codes == [0], said[-6000:]
