"""Processes forked from the server: their own words and environment, their exit codes, and an end for those that are left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from fork_server import call_on_ranks, run_forked

PROGRAM = """
import multiprocessing, os, sys, time
imported, method = "lightning.pytorch" in sys.modules, multiprocessing.get_start_method()
print("imported" if imported else "bare", method, os.environ["WHO"], *sys.argv[1:], flush=True)
if os.environ["WHO"] == "falls":
    raise SystemExit(3)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_each_has_its_environment_and_all_that_they_say_is_kept(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_forked(script, [0], [{"WHO": "starts the server"}], 200)
    monkeypatch.setenv("WHO", "nobody")
    codes, said = run_forked(script, [0, "x"], [{"WHO": "a"}, {"WHO": "b"}], 200)
    first = f"imported {multiprocessing.get_start_method()}"
    assert (codes, said) == ([0, 0], f"{first} a 0 x\n\n{first} b 0 x\n")
    assert os.environ["WHO"] == "nobody"


def test_a_module_is_found_where_its_environment_says(script: Path) -> None:
    codes, said = run_forked("program", [0], [{"WHO": "a", "PYTHONPATH": str(script.parent)}], 200)
    assert codes == [0]
    assert said.endswith(" a 0\n")
    codes, said = run_forked("program", [0], [{"WHO": "a"}], 200)
    assert codes == [1]
    assert "No module named program" in said


def test_where_one_falls_the_others_are_ended_unless_they_shall_end_by_themselves(script: Path) -> None:
    pair = [{"WHO": "falls"}, {"WHO": "waits"}]
    begun = time.monotonic()
    codes, _ = run_forked(script, [600], pair, 500)
    assert codes == [3, -signal.SIGKILL]
    assert time.monotonic() - begun < 500
    assert run_forked(script, [0.5], pair, 500, end_others=False)[0] == [3, 0]


def test_who_is_late_is_killed_and_named(script: Path) -> None:
    codes, said = run_forked(script, [600], [{"WHO": "a"}], 2)
    assert codes == [-signal.SIGKILL]
    assert said.endswith("processes [0] were not through in 2 s")


def raise_on(rank: int, bad: int) -> None:
    if rank == bad:
        raise LookupError(f"rank {rank}")


def test_what_a_function_raises_on_a_rank_is_raised() -> None:
    call_on_ranks(raise_on, 2)
    with pytest.raises(Exception, match="LookupError: rank 1"):
        call_on_ranks(raise_on, 1)
