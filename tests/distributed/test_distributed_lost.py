"""A collective fails: who was missing, and whose exception it was."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from elastic_job import SCRIPT, read
from fork_server import run_forked
from sentinel_kit import rank_environments

from lightning_sentinel.distributed.earlier import Earlier, RankBefore, changes, read_earlier
from lightning_sentinel.distributed.lost import is_lost_connection, last_words, missing
from lightning_sentinel.journal import Journal

GLOO = "[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:5"
TIMEOUT = "[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"
OLD_GLOO = "../third_party/gloo/gloo/transport/tcp/pair.cc:598"
WATCHDOG = "Watchdog caught collective operation timeout"


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
        ("RuntimeError", f"[{OLD_GLOO}] Read error [10.0.0.2]:41: Connection reset by peer", True),
        ("RuntimeError", "Connection closed by peer [127.0.0.1]:5", True),
        ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete", True),
        ("RuntimeError", "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 2000 ms", True),
        ("RuntimeError", "Operation timed out!", True),  # Work.wait of c10d
        ("RuntimeError", "Socket Timeout", True),  # c10d's store
        ("RuntimeError", "Broken pipe", True),
        (
            "RuntimeError",
            "[c10d] The client socket has timed out after 60s while trying to connect to (a, 29500).",
            True,
        ),
        ("RuntimeError", "NCCL communicator was aborted on rank 1. Original reason for failure was: ...", True),
        ("RuntimeError", "NCCL error in: ../ProcessGroupNCCL.cpp:1691, remote process exited or there was ...", True),
        ("RuntimeError", "Some NCCL operations have failed or timed out. Due to the asynchronous nature of ...", True),
        ("RuntimeError", f"[Rank 3] {WATCHDOG}: WorkNCCL(SeqNum=6, OpType=ALLREDUCE, NumelIn=1) ran for 5 ms", True),
        ("DistNetworkError", "failed to recv, got 0 bytes", True),
        ("DistStoreError", "wait timeout after 5000ms, keys: /x", True),
        ("RuntimeError", "DataLoader timed out after 5 seconds", False),
        ("RuntimeError", "DataLoader worker (pid(s) 41) exited unexpectedly", False),
        ("RuntimeError", f"Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback ...\n{GLOO}", False),
        ("RuntimeError", "Pin memory thread exited unexpectedly", False),
        ("RuntimeError", "Default process group has not been initialized, please make sure to call ...", False),
        ("RuntimeError", "Distributed package doesn't have NCCL built in", False),
        ("RuntimeError", "s3://bucket/shard-4: Connection reset by peer", False),
        ("RuntimeError", "the tokenizer's process has gone: Broken pipe", False),
        ("RuntimeError", "request timed out", False),
        ("TimeoutError", "timed out", False),
        ("BrokenPipeError", "[Errno 32] Broken pipe", False),
        ("RuntimeError", "the reader gave up after its timeout", False),
        ("DistBackendError", "anything", True),
        ("RuntimeError", "CUDA error: an illegal memory access", False),
        ("ValueError", GLOO, False),
    ],
)
def test_a_failed_collective_is_known(kind: str, message: str, lost: bool) -> None:
    assert is_lost_connection(kind, message) is lost


def test_a_loader_that_timed_out_is_named_as_the_cause(tmp_path: Path) -> None:
    """The victim says who it was, and not that no rank is missing."""
    journal(tmp_path, 1, ("exception", 4, {"type": "RuntimeError", "message": "DataLoader timed out after 5 seconds"}))
    assert told(tmp_path, [1]) == "rank 1 raised RuntimeError at step 4 (DataLoader timed out after 5 seconds)"


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


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_rank_that_hangs_is_named_with_its_newest_step(tmp_path: Path) -> None:
    """Its step lines of the last second are in its journal, too."""
    rank = os.fork()
    if not rank:
        try:
            sink = Journal(tmp_path, 1)
            sink.write("run.started", step=0, attempt=0, tokens=0)
            for step in range(8):
                sink.write_later("step", dict, step=step, attempt=0, tokens=0)
            threading.Event().wait()
        finally:
            os._exit(1)
    try:
        said = missing(lambda other: last_words(tmp_path, other), [1], seconds=5)
        assert said == "rank 1 (newest line at step 7) ended without a word, or hangs"
    finally:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_hangs_is_named_within_the_time_out(tmp_path: Path) -> None:
    """Rank 1 stands still in step 5; after the time-out rank 0 gives up, and says whom it waited for."""
    codes, said = run_forked(SCRIPT, [tmp_path, "--steps=9", "--hang=5", "--timeout=25"], rank_environments(2), 250)
    assert codes == [1, -signal.SIGKILL]  # rank 0 has failed; then the other was ended
    [lost] = [e for e in read(tmp_path, 0) if e["event"] == "infra.event"]
    assert lost["kind"] == "lost_rank"
    assert lost["text"] == "rank 1 (newest line at step 4) ended without a word, or hangs"
    assert lost["step"] == 5
    assert f"lightning-sentinel: {lost['text']}" in said  # with the traceback itself
    [error] = [e for e in read(tmp_path, 0) if e["event"] == "exception"]
    # gloo says it in either way, whichever of its threads is first
    assert "imed out" in error["message"] or error["message"] == "Application timeout caused pair closure"
    assert error["time"] <= lost["time"]
