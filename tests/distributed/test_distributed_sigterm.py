"""SIGTERM on several ranks: one step for all, a verified checkpoint, a clean exit, and on from there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from elastic_job import SCRIPT, agent_command, compare, read, run, torchrun_command

from lightning_sentinel.checkpoint import CheckpointStore

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
STEPS = 24


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm")
    assert run(agent_command(2, 0, str(folder), f"--steps={STEPS}"), 100).returncode == 0
    return folder


def ended(folder: Path, rank: int) -> tuple[str, int]:
    """Status and step of this rank's newest end."""
    event = [e for e in read(folder, rank) if e["event"] == "run.ended"][-1]
    return event["status"], event["step"]


def check_saved(folder: Path) -> int:
    """All ranks ended at one step, which is saved and verifies; returns it."""
    status, step = ended(folder, 0)
    assert status == "interrupted"
    assert ended(folder, 1) == (status, step)
    store = CheckpointStore(folder / "checkpoints")
    newest = store.newest_verified(known_good=False)
    assert newest is not None
    assert newest.step == step
    assert newest.manifest.world_size == 2
    return step


@pytest.mark.timeout(500)
def test_one_rank_hears_it_and_all_agree(calm: Path, tmp_path: Path) -> None:
    """Rank 1 alone is told, in the middle of step 7; rank 0 would never know. Then on from there, exactly."""
    options = [str(tmp_path), f"--steps={STEPS}", "--every=5"]
    terminate = json.dumps({"1": 7})
    assert run(agent_command(2, 0, *options, f"--terminate={terminate}"), 100).returncode == 0
    assert check_saved(tmp_path) == 8
    told = [e["text"] for e in read(tmp_path, 0) if e["event"] == "infra.event"]
    assert told == ["rank 1 received SIGTERM; all ranks end at step 8"]
    assert run(agent_command(2, 0, *options), 100).returncode == 0
    found = compare(calm, tmp_path, 2, STEPS)
    assert found.problems == []
    assert [e["checkpoint_step"] for e in found.resumed] == [8]  # although 5 is known-good: handed over
    assert found.repeated_steps == 0
    promoted = [
        (e["rank"], e["checkpoint_step"]) for r in (0, 1) for e in read(tmp_path, r) if "known_good" in e["event"]
    ]
    assert promoted.count((0, 8)) == 1  # its probation has gone on, and rank 0 alone writes the status
    assert all(rank == 0 for rank, _ in promoted)
    assert not [e for r in (0, 1) for e in read(tmp_path, r) if e["event"] == "checkpoint.failed"]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
def test_a_job_that_is_preempted(launcher: str, calm: Path, tmp_path: Path) -> None:
    """The launcher is told from outside, as by a scheduler, and passes it on; both launchers leave the same behind."""
    options = [str(tmp_path), f"--steps={STEPS}", "--every=5"]
    slowly = ["--pace=0.1"]
    command = torchrun_command(2, 0, *options, *slowly)
    if launcher == "lightning":
        command = [sys.executable, "-W", "ignore", str(SCRIPT), *options, *slowly]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_for_step(tmp_path, 3)
        job.send_signal(signal.SIGTERM)
        output, _ = job.communicate(timeout=100)
    finally:
        job.kill()
    # torchrun itself ends by its SignalException; Lightning's launcher is a rank, and leaves cleanly
    assert (job.returncode == 0) == (launcher == "lightning"), output.decode()[-4000:]
    assert b"Unable to shutdown" not in output  # torchrun kills after 30 s, and says so
    step = check_saved(tmp_path)
    assert 3 < step < STEPS
    assert run(agent_command(2, 0, *options), 100).returncode == 0
    found = compare(calm, tmp_path, 2, STEPS)
    assert found.problems == []
    assert [e["checkpoint_step"] for e in found.resumed] == [step]
    assert found.repeated_steps == 0


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        ranks = [rank for rank in (0, 1) if (folder / "journal" / f"rank-{rank:05d}.jsonl").exists()]
        if any(e["event"] == "step" and e["step"] >= step for rank in ranks for e in read(folder, rank)):
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} was not reached")
