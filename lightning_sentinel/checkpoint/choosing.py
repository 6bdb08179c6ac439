"""Which checkpoint to resume from: the same on every rank, verified, and every refused one named with its reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from ..callbacks.base import gather_objects
from ..progress import TRAINING_LOG
from . import aloud, reshape
from .contents import Loaded, load
from .manifest import Status
from .saving import words
from .store import Checkpoint, CheckpointError, CheckpointStore

log = logging.getLogger("lightning_sentinel")

AUTO, LATEST = "auto", "latest"


def choose(
    trainer: Trainer, store: CheckpointStore, resume: str | Path, refuse: Callable[[Path, str], None]
) -> Loaded | None:
    """Look, verify and load until every rank has its part of one checkpoint.

    Rank 0 looks and hashes everything; the others are told and hash what they load.

    Args:
        refuse: Called on every rank with each checkpoint that can't be used and the reason.

    Returns:
        None where there is no checkpoint to resume from.

    Raises:
        CheckpointError: There are some, and none can be used.
    """
    refused: list[str] = []
    looking = _look(trainer, store, resume) if trainer.is_global_zero else iter(())
    while True:
        path, problem, note = told_by_rank_0(trainer, lambda: next(looking, ("", "", "")))
        if not path:
            break
        loaded = None
        if not problem:
            loaded, problem = load_everywhere(trainer, store, Path(path))
        if loaded is not None:
            if note:
                log.warning("%s", note)
            return loaded
        refused.append(f"{Path(path).name}: {problem}")
        refuse(Path(path), problem)
    if refused:
        raise CheckpointError(
            f"resume={str(resume)!r}: no checkpoint in {store.root} can be used: {'; '.join(refused)}. Repair one, name"
            " one by resume=<path>, or set resume=None to start afresh."
        )
    return None


def told_by_rank_0(trainer: Trainer, ask: Callable[[], Any]) -> Any:
    """What ``ask`` gives on rank 0, on every rank.

    Raises:
        CheckpointError: On every rank, where it raises on rank 0: nobody waits for an answer that does not come.
    """
    answer, problem = None, None
    if trainer.is_global_zero:
        try:
            answer = ask()
        except Exception as error:
            problem = error
    answer, failed = trainer.strategy.broadcast((answer, "" if problem is None else words(problem)), src=0)
    if isinstance(problem, CheckpointError):
        raise problem
    if failed:
        raise CheckpointError(f"rank 0 could not look for a checkpoint: {failed}") from problem
    return answer


def next_attempt(store: CheckpointStore, checkpoint: Checkpoint, attempt: int, last_step: int) -> int:
    """The checkpoint's attempt if nothing is known to come after it, else the next free one.

    ``attempt`` and ``last_step`` are the furthest that any rank's journal holds; -1 without a journal.
    """
    mine = checkpoint.manifest.attempt
    others = [c for c in store.checkpoints() if c.age_key > checkpoint.age_key]
    highest = max([mine, attempt, *(c.manifest.attempt for c in others)])
    repeated = attempt > mine or (attempt == mine and last_step >= checkpoint.step)
    return highest + 1 if repeated or others else mine


def _look(trainer: Trainer, store: CheckpointStore, resume: str | Path) -> Iterator[tuple[str, str, str]]:
    """(path, problem, note) of each candidate, best first; an empty problem where it verifies."""
    if str(resume) not in (AUTO, LATEST):
        path = Path(resume)
        yield (
            str(path),
            "; ".join(aloud.verify(store, path, log=TRAINING_LOG)) or reshape.problem(trainer, store, path),
            "",
        )
        return
    seen: set[Path] = set()
    for known_good in (True, False) if resume == AUTO else (False,):
        for path, problems in store.candidates(known_good, partial(aloud.verify, store, log=TRAINING_LOG)):
            if path not in seen:
                seen.add(path)
                note = "" if known_good or resume == LATEST else _no_known_good(store, path)
                yield str(path), "; ".join(problems) or reshape.problem(trainer, store, path), note


def load_everywhere(trainer: Trainer, store: CheckpointStore, path: Path) -> tuple[Loaded | None, str]:
    """Every rank's own part of one checkpoint, or None on all of them with the reasons of those that could not."""
    loaded, problem = None, ""
    try:
        checkpoint = store.read(path)
        source = reshape.source_rank(trainer.global_rank, checkpoint.manifest.world_size)
        loaded = load(store, checkpoint, source, aloud=trainer.is_global_zero)
        loaded.left_out = reshape.adapt(trainer, store, loaded)
    except Exception as error:
        problem = f"rank {trainer.global_rank}: {words(error)}"
    problem = "; ".join(gather_objects(trainer, [problem] if problem else []))
    return (None, problem) if problem else (loaded, "")


def _no_known_good(store: CheckpointStore, path: Path) -> str:
    good = any(c.status.status is Status.KNOWN_GOOD for c in store.checkpoints())
    why = "no known-good checkpoint can be used" if good else "no checkpoint is known-good yet"
    return f"{why}; resuming from the newest candidate that verifies, {path.name}"
