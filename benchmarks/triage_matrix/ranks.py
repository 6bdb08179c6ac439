"""Two processes that run cases one after the other: ``python -m triage_matrix.ranks FILE CALLBACK name:seed ...``."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WORLD = 2
ROOT = Path(__file__).parents[1]


def start_together(module: str, arguments: Sequence[str], *folders: Path, timeout: float = 1800.0) -> list[int]:
    """Run ``python -m MODULE ARGUMENTS`` in two processes of one group; their exit codes.

    Args:
        module: Module with a ``main``, found in ``folders`` or beside this package.
        arguments: The same for both.
        folders: Where the module, and what it imports, is.
        timeout: Seconds after which both are ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = [*map(str, folders), str(ROOT), str(ROOT.parent / "examples"), os.environ.get("PYTHONPATH", "")]
    processes = []
    for rank in range(WORLD):
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "LOCAL_RANK": str(rank),
            "NODE_RANK": "0",
            "WORLD_SIZE": str(WORLD),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(own),
        }
        command = [sys.executable, "-m", module, *arguments]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    try:
        return [p.wait(timeout=timeout) for p in processes]
    finally:
        for p in processes:
            p.kill()


def run_together(
    cases: Sequence[tuple[str, int]],
    file: Path,
    timeout: float = 1800.0,
    beside: Sequence[str | Path] = (),
    start: Callable[..., list[int]] = start_together,
) -> list[dict[str, Any]]:
    """Outcomes of these cases on two ranks, as rank 0 wrote them down.

    Args:
        cases: Name and seed.
        file: One line for each outcome.
        timeout: Seconds for all of them.
        beside: A callback for every Trainer, ``module.Class``, and the folders of its module and of what that imports.
        start: In place of :func:`start_together`.
    """
    callback, folders = (str(beside[0]), map(Path, beside[1:])) if beside else ("", ())
    arguments = [str(file), callback, *(f"{n}:{s}" for n, s in cases)]
    codes = start("triage_matrix.ranks", arguments, *folders, timeout=timeout)
    outcomes = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if any(codes) or len(outcomes) < len(cases):
        name, seed = cases[min(len(outcomes), len(cases) - 1)]
        raise RuntimeError(f"case {name}, seed {seed}, ended the processes with exit codes {codes}")
    return outcomes


def main() -> None:
    import torch

    from .run import quiet, run_case

    quiet()
    file, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
    module, _, beside = sys.argv[2].rpartition(".")
    for case in sys.argv[3:]:
        name, _, seed = case.partition(":")
        more = [getattr(importlib.import_module(module), beside)()] if module else []
        try:
            outcome = run_case(name, int(seed), WORLD, more).to_dict()
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None
        if rank == 0:
            with file.open("a") as lines:
                lines.write(json.dumps(outcome, default=str) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
