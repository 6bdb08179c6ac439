"""The journal's thread: what waits gets written while training stands still; order, failures, forks and the thread's end."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_sentinel.journal import Journal, journal_files, read_journal

MARGIN = 10.0  # seconds that a busy machine may take for what takes milliseconds

forks = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


def later(journal: Journal, step: int, make: Callable[[], dict[str, Any]] = dict) -> None:
    journal.write_later("step", make, step=step, attempt=0, tokens=0)


def write(journal: Journal, event: str, step: int = 0, **fields: Any) -> None:
    journal.write(event, step=step, attempt=0, tokens=0, **fields)


def steps(folder: Path) -> list[int]:
    return [e["step"] for e in read_journal(folder)]


def until(true: Callable[[], bool], seconds: float = MARGIN) -> bool:
    """Whether it becomes true in that time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def in_a_child(work: Callable[[], None]) -> int:
    """The exit status of a forked child that does this: 0, 1 where it raises, -9 where it hangs."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    ended = []
    if not until(lambda: ended.append(os.waitpid(child, os.WNOHANG)) or ended[-1][0] == child):
        os.kill(child, signal.SIGKILL)
        ended.append(os.waitpid(child, 0))
    return os.waitstatus_to_exitcode(ended[-1][1])


class SlowDisk:
    """Stands still in the first write of a thread other than this one, until it is let go or ``MARGIN`` is over."""

    def __init__(self) -> None:
        self.here, self.go_on = threading.Event(), threading.Event()
        self.waited_in_vain = False
        self.real, self.mine = os.write, threading.get_ident()

    def write(self, fd: int, data: bytes) -> int:
        if threading.get_ident() != self.mine and not self.here.is_set():
            self.here.set()
            self.waited_in_vain = not self.go_on.wait(MARGIN)
        return self.real(fd, data)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk()
    monkeypatch.setattr(os, "write", disk.write)
    yield disk
    disk.go_on.set()


# -------------------------------------------------------------------------------------------------------- standing still


def test_the_last_lines_of_a_thread_that_stands_still_for_ever_are_written(tmp_path: Path) -> None:
    journal, never = Journal(tmp_path, 0, buffer_seconds=0.3), threading.Event()

    def train() -> None:
        for step in range(8):
            later(journal, step)
        never.wait()

    training = threading.Thread(target=train)
    training.start()
    try:
        assert until(lambda: steps(tmp_path) == list(range(8)), 0.3 + MARGIN)
    finally:
        never.set()
        training.join()
        journal.close()


def test_lines_wait_for_the_buffers_time_and_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(bytes(data).count(b"\n")) or real(fd, data))
    journal = Journal(tmp_path, 0, buffer_seconds=0.5)
    began = time.monotonic()
    for step in range(10):
        later(journal, step)
    assert written == []
    assert until(lambda: sum(written) == 10)
    assert time.monotonic() - began >= 0.5
    assert written == [10]
    journal.close()


def test_a_line_is_added_while_the_disk_stands_still(tmp_path: Path, slow_disk: SlowDisk) -> None:
    journal = Journal(tmp_path, 0, buffer_seconds=0.01)
    later(journal, 0)
    assert slow_disk.here.wait(MARGIN)
    # not the time after which whoever adds a line waits for the disk, too
    journal.buffer_seconds = 3600
    for step in range(1, 100):
        later(journal, step)
    assert not slow_disk.waited_in_vain
    slow_disk.go_on.set()
    journal.flush()
    assert steps(tmp_path) == list(range(100))


def test_what_has_waited_much_too_long_is_written_by_who_adds_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, 0, buffer_seconds=600)
    clock = [1000.0]
    monkeypatch.setattr("lightning_sentinel.journal.time.time", lambda: clock[0])
    for now in (1000.0, 1600.0, 6999.0):  # the thread is asleep
        clock[0] = now
        later(journal, int(now))
    assert steps(tmp_path) == []
    clock[0] = 7000.0
    later(journal, 7000)
    assert steps(tmp_path) == [1000, 1600, 6999, 7000]
    journal.close()


def test_without_a_thread_lines_are_written_when_they_have_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    clock = [1000.0]
    monkeypatch.setattr("lightning_sentinel.journal.time.time", lambda: clock[0])
    journal = Journal(tmp_path, 0, buffer_seconds=1)
    for now in (1000.0, 1000.9):
        clock[0] = now
        later(journal, 0)
    assert steps(tmp_path) == []
    clock[0] = 1001.0
    later(journal, 1)
    assert steps(tmp_path) == [0, 0, 1]


# ----------------------------------------------------------------------------------------------------------------- order


def test_order_and_completeness_under_two_threads_that_write_all_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, buffer_seconds=0.002, max_bytes=20_000)
    missing: list[str] = []

    def numbers(events: list[dict[str, Any]], who: int) -> list[int]:
        return [e["step"] for e in events if e["attempt"] == who]

    def work(who: int) -> None:
        for n in range(1500):
            if n % 7 == 3:
                journal.write("infra.event", step=n, attempt=who, tokens=0)
            elif n % 11 == 5:
                journal.write("step", step=n, attempt=who, tokens=0)
            else:
                journal.write_later("step", dict, step=n, attempt=who, tokens=0)
            if n % 101 == 100:
                journal.flush()
            if n % 350 == 3 and numbers(read_journal(tmp_path), who) != list(range(n + 1)):
                missing.append(f"thread {who} at {n}")  # an event is written when the call returns, and all before it

    threads = [threading.Thread(target=work, args=(who,)) for who in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    events = read_journal(tmp_path)
    assert missing == []
    assert [numbers(events, who) for who in range(2)] == [list(range(1500))] * 2
    assert len(events) == 3000
    assert len(journal_files(tmp_path)) > 10
    assert journal.failures == []


def test_an_event_written_while_a_line_is_made_comes_after_it_and_nothing_twice(tmp_path: Path) -> None:
    """As a signal's handler does that tells of an infrastructure event."""
    journal, told = Journal(tmp_path, 0, buffer_seconds=3600), []

    def make() -> dict[str, Any]:
        if not told:
            told.append(True)
            write(journal, "infra.event", step=2)
        return {}

    later(journal, 0)
    later(journal, 1, make)
    journal.flush()
    assert steps(tmp_path) == [0, 1, 2]
    journal.close()


# ----------------------------------------------------------------------------------------------------------------- forks


@forks
def test_a_child_forked_while_the_thread_writes_neither_hangs_nor_writes_what_waits(
    tmp_path: Path, slow_disk: SlowDisk
) -> None:
    journal = Journal(tmp_path, 0, buffer_seconds=0.01)
    later(journal, 0)
    assert slow_disk.here.wait(MARGIN)
    later(journal, 1)

    def child() -> None:
        journal.flush()
        later(journal, 10)
        write(journal, "infra.event", step=11)
        later(journal, 12)
        assert until(lambda: 12 in steps(tmp_path))  # by a thread of the child's own
        journal.close()

    assert in_a_child(child) == 0
    assert not slow_disk.waited_in_vain
    slow_disk.go_on.set()
    journal.close()
    assert steps(tmp_path) == [10, 11, 12, 0, 1]


@forks
def test_a_fork_waits_until_the_thread_is_out_of_other_code(tmp_path: Path) -> None:
    """The child would find a lock that is held there taken for ever."""
    journal, lock, inside = Journal(tmp_path, 0, buffer_seconds=0.01), threading.Lock(), threading.Event()

    def make() -> dict[str, Any]:
        with lock:
            inside.set()
            time.sleep(0.3)
        return {}

    later(journal, 0, make)
    assert inside.wait(MARGIN)

    def child() -> None:
        assert lock.acquire(timeout=1)

    assert in_a_child(child) == 0
    journal.close()
    assert steps(tmp_path) == [0]


@forks
def test_forks_at_any_moment(tmp_path: Path) -> None:
    journal, ended = Journal(tmp_path, 0, buffer_seconds=0.001), threading.Event()
    written = [0]

    def train() -> None:
        while not ended.is_set():
            later(journal, written[0])
            written[0] += 1
            time.sleep(0.0002)

    training = threading.Thread(target=train)
    training.start()
    try:
        assert [in_a_child(lambda: write(journal, "infra.event", step=-1)) for _ in range(40)] == [0] * 40
    finally:
        ended.set()
        training.join()
    journal.close()
    found = steps(tmp_path)
    assert [s for s in found if s >= 0] == list(range(written[0]))
    assert found.count(-1) == 40
    assert journal.failures == []


# ------------------------------------------------------------------------------------------------------ the thread's life


def test_one_thread_from_the_first_line_that_waits_to_the_close(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    journal = Journal(tmp_path, 0, buffer_seconds=3600)
    write(journal, "infra.event")
    assert set(threading.enumerate()) == before
    for step in range(100):
        later(journal, step)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    journal.close()
    assert not thread.is_alive()
    assert len(read_journal(tmp_path)) == 101
    journal.close()
    journal.buffer_seconds = 0.01
    later(journal, 100)
    assert until(lambda: len(read_journal(tmp_path)) == 102)
    (again,) = set(threading.enumerate()) - before
    journal.close()
    assert not again.is_alive()


def test_a_journal_that_writes_at_once_has_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    journal = Journal(tmp_path, 0, buffer_seconds=0)
    later(journal, 0)
    assert steps(tmp_path) == [0]
    assert set(threading.enumerate()) == before


def test_a_journal_that_is_dropped_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    journal = Journal(tmp_path, 0, buffer_seconds=3600)
    later(journal, 0)
    (thread,) = set(threading.enumerate()) - before
    del journal
    gc.collect()
    thread.join(MARGIN)
    assert not thread.is_alive()


def test_training_gets_its_turn_while_very_many_lines_are_written(tmp_path: Path) -> None:
    """In pieces: an event that is written at once waits for one piece, and takes the rest with it."""
    pieces: list[int] = []
    journal = Journal(tmp_path, 0, buffer_seconds=0.2)

    def make() -> dict[str, Any]:
        pieces.append(threading.get_ident())
        return {"filler": list(range(200))}

    for step in range(20_000):
        later(journal, step, make)
    assert until(lambda: len(pieces) > 0)
    write(journal, "infra.event", step=20_000)
    assert steps(tmp_path) == list(range(20_001))
    mine = threading.get_ident()
    assert pieces[0] != mine
    assert pieces[-1] == mine
    assert pieces == sorted(pieces, key=lambda thread: thread == mine)  # the thread's first, then all others
    journal.close()
