"""A collective fails: who was missing, and whose exception it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elastic_job import SCRIPT, read

from lightning_sentinel.distributed.earlier import Earlier, RankBefore, changes, read_earlier
from lightning_sentinel.distributed.lost import is_lost_connection, last_words, missing
from lightning_sentinel.journal import Journal

GLOO = "[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5"
TIMEOUT = "[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"


def journal(folder: Path, rank: int, *events: tuple[str, int, dict[str, Any]]) -> None:
    sink = Journal(folder, rank)
    for name, step, fields in events:
        sink.write(name, step=step, attempt=0, tokens=0, **fields)
    sink.close()


def told(folder: Path, others: list[int]) -> str:
    return missing(lambda rank: last_words(folder, rank), others, seconds=0.2)


def test_who_is_named(tmp_path: Path) -> None:
    started = ("run.started", 0, {"host": "a", "world_size": 5})
    journal(tmp_path, 1, started, ("exception", 7, {"type": "RuntimeError", "message": GLOO}))
    journal(tmp_path, 2, started, ("step", 6, {"loss": 1.0}))
    journal(tmp_path, 3, ("exception", 3, {"type": "ValueError", "message": "an older fit"}), started)
    assert told(tmp_path, [1]).startswith("no rank is missing: all have stopped because a collective failed")
    assert told(tmp_path, [1, 2, 4]) == "rank 2 (newest line at step 6); rank 4 ended without a word, or hangs"
    assert told(tmp_path, [1, 3]) == "rank 3 (newest line at step 0) ended without a word, or hangs"
    journal(tmp_path, 4, started, ("exception", 7, {"type": "ValueError", "message": "boom"}), ("run.ended", 7, {}))
    assert told(tmp_path, [1, 2, 3, 4]) == "rank 4 raised ValueError at step 7 (boom)"


@pytest.mark.parametrize(
    ("kind", "message", "lost"),
    [
        ("RuntimeError", GLOO, True),
        ("RuntimeError", TIMEOUT, True),
        ("RuntimeError", "Application timeout caused pair closure", True),  # the same, seen from another thread of gloo
        ("RuntimeError", "the reader gave up after its timeout", False),
        ("DistBackendError", "anything", True),
        ("RuntimeError", "CUDA error: an illegal memory access", False),
        ("ValueError", GLOO, False),
    ],
)
def test_a_failed_collective_is_known(kind: str, message: str, lost: bool) -> None:
    assert is_lost_connection(kind, message) is lost


def test_what_changed_since_the_last_fit(tmp_path: Path) -> None:
    for rank, host in enumerate(["a", "a", "b", "b"]):
        ended = [] if rank in (1, 2) else [("run.ended", 9, {})]
        journal(tmp_path, rank, ("run.started", 0, {"host": host, "world_size": 4}), ("step", 8 + rank, {}), *ended)
    # two ranks read the journals of four
    parts = [read_earlier(tmp_path, rank, 2) for rank in range(2)]
    before = Earlier.merged(parts)
    assert sorted(parts[1].ranks) == [1, 3]
    assert (before.world_sizes, before.reached) == ([4], 12)
    assert before.ranks[2] == RankBefore("b", 10, False)
    assert changes(before, ["a", "c"], restarts=0) == [
        (
            "lost_rank",
            "rank 1 (host a) ended without a word after step 9; rank 2 (host b) ended without a word after step 10",
        ),
        ("host", "rank 1 runs on host c, before on a"),
    ]
    assert changes(Earlier(), ["a"], restarts=0) == []


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_hangs_is_named_within_the_time_out(tmp_path: Path) -> None:
    """Rank 1 stands still in step 5; after the time-out rank 0 gives up, and says whom it waited for."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path), "--steps=9", "--hang=5", "--timeout=25"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode != 0
    [lost] = [e for e in read(tmp_path, 0) if e["event"] == "infra.event"]
    # step lines are written at intervals: rank 1's newest is at most that of step 4
    assert lost["kind"] == "lost_rank"
    assert lost["text"].startswith("rank 1 (newest line at step ")
    assert lost["text"].endswith("ended without a word, or hangs")
    assert lost["step"] == 5
    assert f"lightning-sentinel: {lost['text']}" in done.stderr  # with the traceback itself
    [error] = [e for e in read(tmp_path, 0) if e["event"] == "exception"]
    # gloo says it in either way, whichever of its threads is first
    assert "imed out" in error["message"] or error["message"] == "Application timeout caused pair closure"
    assert error["time"] <= lost["time"]
