"""Progress: silent for two seconds, one live line on a terminal, few lines elsewhere."""

from __future__ import annotations

import io
import logging

import pytest

from lightning_sentinel.progress import Progress, track


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(bar: Progress, clock: Clock, seconds: float, steps: int) -> None:
    with bar:
        for i in range(steps):
            clock.now += seconds / steps
            bar.advance(note=f"step {i}")


def work_that_fails(bar: Progress, clock: Clock) -> None:
    with bar:
        clock.now += 3
        bar.advance()
        raise OSError("the disk is gone")


def test_what_is_done_within_two_seconds_says_nothing() -> None:
    clock, out = Clock(), Terminal()
    work(Progress("replaying", total=10, stream=out, clock=clock), clock, 1.9, 10)
    assert out.getvalue() == ""


def test_a_terminal_has_one_line_that_is_taken_away() -> None:
    clock, out = Clock(), Terminal()
    work(Progress("replaying", total=10, unit="steps", stream=out, clock=clock), clock, 5.0, 10)
    looks = out.getvalue().split("\r")
    assert looks[1] == "replaying: 4 of 10 steps (40 %), 3 s left, step 3\033[K"
    assert looks[-2] == "replaying: 10 of 10 steps (100 %), step 9\033[K"
    assert looks[-1] == "\033[K"
    assert "\n" not in out.getvalue()


def test_a_file_gets_few_lines_and_how_it_ended() -> None:
    clock, out = Clock(), io.StringIO()
    work(Progress("scanning", stream=out, unit="rows", clock=clock), clock, 60.0, 480)
    assert out.getvalue().splitlines() == [
        "scanning: 16 rows, 2 s, step 15",
        "scanning: 136 rows, 17 s, step 135",
        "scanning: 256 rows, 32 s, step 255",
        "scanning: 376 rows, 47 s, step 375",
        "scanning: done after 1 min 0 s",
    ]
    out = io.StringIO()
    clock.now = 100.0
    bar = Progress("scanning", stream=out, clock=clock)
    with pytest.raises(OSError, match="disk"):
        work_that_fails(bar, clock)
    assert out.getvalue().splitlines()[-1] == "scanning: given up after 3 s"


def test_under_a_trainer_it_goes_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    clock, out = Clock(), Terminal()
    log = logging.getLogger("lightning_sentinel.test")
    with caplog.at_level(logging.INFO, log.name):
        work(Progress("replaying", total=2, log=log, stream=out, clock=clock), clock, 8.0, 2)
    assert (out.getvalue(), [r.getMessage() for r in caplog.records]) == (
        "",
        ["replaying: 1 of 2 (50 %), 4 s left, step 0", "replaying: done after 8 s"],
    )


def test_other_ranks_are_silent_and_items_come_through() -> None:
    clock, out = Clock(), Terminal()
    work(Progress("replaying", total=2, stream=out, enabled=False, clock=clock), clock, 8.0, 2)
    assert out.getvalue() == ""
    assert list(track(iter("abc"), "reading")) == ["a", "b", "c"]
