"""When a collective fails: which rank was missing, read from the journals, for no rank can be asked any more.

Every rank flushes its exception to its own journal before anything else. So a rank that has an exception of its own is the
cause, one that says no more than that its collective has failed is a victim like this one, and one without a word was
killed or hangs. The journals lie where all ranks can read them, as the checkpoints do.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer

from ..context import context_of
from ..infra import infra_event
from ..journal import journal_files, parse_line

log = logging.getLogger("lightning_sentinel")

WAIT_SECONDS = 2.0  # for the others' last words
_POLL_SECONDS = 0.1
_TAIL_BYTES = 65536
_LOOK_AT = 64  # ranks of larger jobs look at that many of the ranks that follow them
_NAMED = 8
# What gloo, NCCL and c10d say when another rank does not answer. Words that others use too ("timed out", "broken pipe") count
# only in their form: a reader that has timed out is this rank's own trouble.
_FAILED = re.compile(
    r"gloo/\w+/"  # gloo's errors begin with the place in its source
    r"|\A(?:connection (?:closed|reset) by peer \[|application timeout caused pair closure|timed out waiting \d+ ?ms for )"
    r"|failed to pass monitoredBarrier"
    r"|NCCL (?:error|communicator|operations? (?:has|have)\b)|WorkNCCL|watchdog caught collective operation timeout"
    r"|\[c10d\]"
    r"|\A(?:operation timed out!|socket timeout|broken pipe|connection reset by peer)\s*\Z",  # c10d's work and store
    re.IGNORECASE,
)
# A loader's worker, or its thread that pins memory, takes part in no collective, whatever its traceback quotes.
_OF_THE_LOADER = re.compile(r"\A(?:DataLoader\b|Caught \w+ in (?:DataLoader worker|pin memory thread))")


def is_lost_connection(kind: str, message: str) -> bool:
    """Whether an exception is no more than a collective that failed because another rank was not there.

    Example:
        >>> is_lost_connection("RuntimeError", "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
        True
        >>> is_lost_connection("RuntimeError", "mat1 and mat2 shapes cannot be multiplied")
        False
        >>> is_lost_connection("RuntimeError", "DataLoader timed out after 5 seconds")
        False
    """
    if kind in ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError"):
        return True
    return kind == "RuntimeError" and _FAILED.search(message) is not None and _OF_THE_LOADER.match(message) is None


def lost_connection(trainer: Trainer, exception: BaseException) -> bool:
    """Whether this rank stops because of another one."""
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return False
    return is_lost_connection(type(exception).__name__, str(exception))


def name_missing(trainer: Trainer, exception: BaseException) -> None:
    """Say which rank was missing: in the journal as ``infra.event``, in the log, and with the exception's own traceback."""
    run_dir = context_of(trainer).run_dir
    if run_dir is None:
        return
    size, rank = trainer.world_size, trainer.global_rank
    others = [(rank + i) % size for i in range(1, min(size, _LOOK_AT + 1))]
    text = missing(lambda other: last_words(run_dir, other), others, seconds=WAIT_SECONDS)
    infra_event(trainer, "lost_rank", text)
    log.error("rank %d stops at step %d: %s", rank, trainer.global_step, text)
    exception.add_note(f"lightning-sentinel: {text}")


def missing(words_of: Callable[[int], dict[str, Any] | None], others: Sequence[int], seconds: float) -> str:
    """Who is the cause, in a sentence. Waits for last words until somebody is named by them, or ``seconds`` are over.

    Args:
        words_of: What :func:`last_words` returns, by rank.
        others: The ranks to ask for.
        seconds: How long to wait for those who have said nothing yet.
    """
    deadline = time.monotonic() + seconds
    while True:
        words = {other: words_of(other) for other in others}
        causes = [
            f"rank {other} raised {w['type']} at step {w['step']} ({str(w.get('message', ''))[:200]})"
            for other, w in words.items()
            if w is not None
            and w["event"] == "exception"
            and not is_lost_connection(str(w["type"]), str(w.get("message", "")))
        ]
        if causes:
            return listed(causes)
        silent = [
            f"rank {other}" + ("" if w is None else f" (newest line at step {w['step']})")
            for other, w in words.items()
            if w is None or w["event"] not in ("exception", "run.ended")
        ]
        if not silent:
            return (
                "no rank is missing: all have stopped because a collective failed, so the connection between them did"
            )
        if time.monotonic() > deadline:
            return f"{listed(silent)} ended without a word, or hangs"
        time.sleep(_POLL_SECONDS)


def last_words(run_dir: Path, rank: int) -> dict[str, Any] | None:
    """The exception of this rank's newest fit, else its end, else its newest line; None without a journal."""
    files = journal_files(run_dir, rank=rank)
    if not files:
        return None
    with files[-1].open("rb") as file:
        file.seek(max(0, files[-1].stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()
    newest = ended = None
    for line in reversed(lines):
        try:
            event = parse_line(line)
        except ValueError:
            continue  # cut at the tail's begin, or still being written
        newest = newest or event
        if event["event"] == "exception":
            return event
        if event["event"] == "run.ended":
            ended = ended or event
        if event["event"] == "run.started":
            break
    return ended or newest


def listed(sentences: Sequence[str]) -> str:
    more = len(sentences) - _NAMED
    return "; ".join(sentences[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
