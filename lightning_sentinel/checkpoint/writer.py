"""The one thread that hashes and writes while training goes on.

Example:
    >>> told = []
    >>> writer = Writer()
    >>> writer.submit(lambda: 2 + 2, told.append, print)
    >>> writer.settle(wait=True)
    >>> told
    [4]
    >>> writer.close()
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

# Where the cores are all taken (by data workers, by other ranks) the writer gets about a tenth of what training gets. Lower
# still would hurt: whoever waits for Python's lock waits for a thread that hardly runs.
NICENESS = 10


class Writer:
    """Carries out work in the order it was given; the outcome is told in :meth:`settle`, on the thread that calls it.

    Attributes:
        hurry: Set where the process is about to end: whoever waits for something on the thread waits no longer than needed.
    """

    def __init__(self) -> None:
        self.hurry = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ForensicCheckpoint", initializer=_give_way)
        self._jobs: deque[tuple[Future[Any], Callable[[Any], None], Callable[[BaseException], None]]] = deque()

    def submit(self, work: Callable[[], T], then: Callable[[T], None], failed: Callable[[BaseException], None]) -> None:
        self._jobs.append((self._pool.submit(work), then, failed))

    def settle(self, *, wait: bool) -> None:
        """Tell the outcome of what is done, of everything if ``wait``."""
        while self._jobs and (wait or self._jobs[0][0].done()):
            future, then, failed = self._jobs.popleft()
            try:
                result = future.result()
            except Exception as error:
                failed(error)
            else:
                then(result)

    @property
    def busy(self) -> bool:
        """True while something is being written or waits for its turn."""
        return any(not future.done() for future, _, _ in self._jobs)

    def close(self) -> None:
        """Finish what was given and end the thread."""
        self._pool.shutdown(wait=True)


def _give_way() -> None:
    """Lower the priority of the calling thread. On Linux it belongs to a thread; elsewhere it is the whole process's."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _raised(NICENESS))


def _raised(by: int) -> int:
    return min(19, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) + by)
