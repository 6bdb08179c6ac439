"""Progress of whatever takes longer than two seconds: hashing, a replay, a scan.

Nothing is shown before that. On a terminal one line on standard error is kept up to date and taken away at the end; elsewhere
(a file, a pipe, a cluster's log) a line is added now and then. While a Trainer runs, its progress bar owns the terminal: give
``log`` and the lines go there as messages.

Example:
    >>> for name in track(["model.pt", "rank-00000.pt"], "hashing"):  # done at once: prints nothing
    ...     _ = name
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from types import TracebackType
from typing import TextIO, TypeVar

T = TypeVar("T")
Scale = Callable[[float], str]

# Where a Trainer's own words go: Lightning shows the information of its own loggers by default.
TRAINING_LOG = logging.getLogger("lightning.pytorch.lightning_sentinel")
QUIET_SECONDS = 2.0
# Between two looks of the live line; between two lines of a file or a logger.
LIVE_SECONDS, LINE_SECONDS = 0.2, 15.0


class Progress:
    """How far one piece of work is. Use as a context manager.

    Args:
        what: What is being done, e.g. ``"hashing step-00001200"``.
        total: How much there is, in whatever ``advance`` counts; None where nobody knows.
        unit: Written after the numbers, e.g. ``"steps"``; ``"B"`` for bytes, which are then written as MiB or GiB.
        log: Say it here, as information, instead of on standard error.
        stream: Instead of standard error.
        enabled: False keeps it silent: on ranks other than 0, under ``--json``.
        clock: Seconds; for tests.

    Example:
        >>> with Progress("replaying", total=12, unit="steps") as bar:
        ...     for step in range(12):
        ...         bar.advance(note=f"step {step}")
    """

    def __init__(
        self,
        what: str,
        *,
        total: float | None = None,
        unit: str = "",
        log: logging.Logger | None = None,
        stream: TextIO | None = None,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.unit, self.enabled = what, total, unit, enabled
        self.done = 0.0
        self.note = ""
        self._log, self._clock = log, clock
        self._stream = sys.stderr if stream is None else stream
        self._live = log is None and self._stream.isatty()
        self._begun = clock()
        self._next = self._begun + QUIET_SECONDS
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def advance(self, amount: float = 1, note: str = "") -> None:
        """``amount`` more is done; ``note`` says what is in hand now."""
        self.done += amount
        self.note = note
        now = self._clock()
        if self.enabled and now >= self._next:
            self._next = now + (LIVE_SECONDS if self._live else LINE_SECONDS)
            self._show(self.line)

    def close(self, *, failed: bool = False) -> None:
        """Take the live line away; where lines were added, say how long it took."""
        if not self._shown:
            return
        self._shown = False
        if self._live:
            self._stream.write("\r\033[K")
            self._stream.flush()
        else:
            self._say(f"{self.what}: {'given up' if failed else 'done'} after {duration(self._clock() - self._begun)}")

    @property
    def line(self) -> str:
        """What is shown.

        Example:
            >>> bar = Progress("hashing", total=4 << 30, unit="B", clock=iter([0.0, 6.0, 6.0]).__next__, enabled=False)
            >>> bar.advance(3 << 30, "model.pt")
            >>> bar.line
            'hashing: 3.0 of 4.0 GiB (75 %), 2 s left, model.pt'
        """
        seconds = self._clock() - self._begun
        if self.unit == "B":
            power = 30 if max(self.done, self.total or 0) >= 1 << 30 else 20
            scale: Scale = lambda amount: f"{amount / (1 << power):.1f}"  # noqa: E731
            unit = "GiB" if power == 30 else "MiB"
        else:
            scale, unit = (lambda amount: f"{amount:,.0f}"), self.unit
        unit = unit and f" {unit}"
        if self.total:
            share = self.done / self.total
            text = f"{self.what}: {scale(self.done)} of {scale(self.total)}{unit} ({share:.0%})".replace("%", " %")
            if 0 < share < 1:
                text += f", {duration(seconds * (1 - share) / share)} left"
        else:
            text = f"{self.what}: {scale(self.done)}{unit}, {duration(seconds)}"
        return f"{text}, {self.note}" if self.note else text

    def _show(self, text: str) -> None:
        self._shown = True
        if self._live:
            self._stream.write(f"\r{text}\033[K")
            self._stream.flush()
        else:
            self._say(text)

    def _say(self, text: str) -> None:
        if self._log is not None:
            self._log.info("%s", text)
        else:
            print(text, file=self._stream, flush=True)


def track(
    items: Iterable[T],
    what: str,
    *,
    unit: str = "",
    log: logging.Logger | None = None,
    stream: TextIO | None = None,
    enabled: bool = True,
) -> Iterator[T]:
    """The items one by one, with progress. The one in hand counts as not done."""
    total = len(items) if isinstance(items, Sized) else None
    with Progress(what, total=total, unit=unit, log=log, stream=stream, enabled=enabled) as bar:
        for item in items:
            yield item
            bar.advance()


def duration(seconds: float) -> str:
    """A length of time in two units at most.

    Example:
        >>> duration(3.4), duration(200), duration(7500)
        ('3 s', '3 min 20 s', '2 h 5 min')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
