"""Scripts in processes of their own, forked from a server that has imported torch and Lightning.

Each test process has one such server, started when it is first asked for. A script's start costs a fork in place of seconds
of imports, and what the test process holds is not in it. All of them hash strings alike, and a launcher that starts processes
itself does not come into it: what is about either starts its own Python.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context, get_start_method, set_start_method
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch

CONTEXT = get_context("forkserver")
IMPORTED = [
    "lightning.pytorch",
    "lightning_sentinel.callbacks",
    "lightning_sentinel.faults",
    "lightning_sentinel.triage",
    "torch.distributed.fsdp",
    "torchdata.stateful_dataloader",
]


def run_forked(
    script: Path | str,
    arguments: Sequence[object],
    environments: Sequence[dict[str, str]],
    seconds: float,
    *,
    end_others: bool = True,
) -> tuple[list[int], str]:
    """``python SCRIPT ARGUMENTS`` once with each of these beside the environment; exit codes, and what all have said.

    Args:
        script: Its file; or ``python -m``: the name of a module.
        arguments: The same for all.
        environments: ``PYTHONPATH`` comes before the folders in which the test process looks for modules.
        seconds: After so many those that are left are killed.
        end_others: Kill them as well when one has failed.
    """
    with TemporaryDirectory() as folder:
        outputs = [Path(folder, str(number)) for number in range(len(environments))]
        processes = [
            forked(script, arguments, more, output) for more, output in zip(environments, outputs, strict=True)
        ]
        try:
            for process in processes:
                process.start()
            end, left = time.monotonic() + seconds, list(processes)
            while left and wait([p.sentinel for p in left], timeout=max(0.0, end - time.monotonic())):
                left = [p for p in left if p.is_alive()]
                if end_others and any(p.exitcode for p in processes):
                    break
            late = [number for number, p in enumerate(processes) if p in left and time.monotonic() >= end]
        finally:
            for process in (p for p in processes if p.pid is not None):
                process.kill()
                process.join()
        said = "\n".join(output.read_text(errors="replace") for output in outputs if output.exists())
    if late:
        said += f"\nprocesses {late} were not through in {seconds:g} s"
    return [int(p.exitcode or 0) for p in processes], said


def start_server() -> None:
    """Where it does not run yet."""
    CONTEXT.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # read where torch is imported
        ensure_running()


def forked(
    script: Path | str, arguments: Sequence[object], more: dict[str, str], output: Path | str
) -> ForkServerProcess:
    """One of them, to be started; what it says goes to the file."""
    start_server()
    words = [str(script), *map(str, arguments)]
    given = (words, isinstance(script, str), dict(os.environ) | more, str(output), get_start_method())
    return CONTEXT.Process(target=_run, args=given)


def call_on_ranks(function: Callable[..., None], *arguments: object, ranks: int = 2) -> None:
    """``function(rank, *arguments)`` in so many processes; raises what one of them has raised."""
    start_server()
    torch.multiprocessing.start_processes(function, arguments, ranks, start_method="forkserver")


def _run(words: list[str], is_module: bool, environment: dict[str, str], output: str, start_method: str) -> None:
    set_start_method(start_method, force=True)  # of a loader's workers, say: a process inherits that of its own start
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    own = [] if is_module else [str(Path(words[0]).parent)]
    sys.path[:0] = [*own, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = words
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
