"""SIGTERM on several ranks: one step for all, a verified checkpoint, a clean exit, and on from there."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from elastic_job import SCRIPT, Job, Started, agent_of, compare, read, run, torchrun_command, wait_for_step

from lightning_sentinel.checkpoint import CheckpointStore

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
STEPS = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run folders: two whose launcher is told from outside, one whose rank 1 is told, each taken up again, and a calm one."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("calm", "one", "torchrun", "lightning")}
    options = {name: [str(folder), f"--steps={STEPS}", "--every=5"] for name, folder in made.items()}
    for launcher in ("torchrun", "lightning"):
        folder, slowly = made[launcher], [*options[launcher], "--pace=0.1"]
        command = [sys.executable, "-W", "ignore", str(SCRIPT), *slowly]
        job = Started(torchrun_command(2, 0, *slowly) if launcher == "torchrun" else command)
        try:
            wait_for_step(folder, 3)
            job.send_signal(signal.SIGTERM)
            (folder / "said").write_text(job.end(100))
        finally:
            job.kill_all()
        (folder / "left").write_text(json.dumps([job.returncode, check_saved(folder)]))
    terminate = ["--terminate=" + json.dumps({"1": 7})]
    again = [Job(options[name]) for name in ("one", "torchrun", "lightning")]
    assert run(agent_of(Job(options["calm"]), Job(options["one"] + terminate), *again), 400).returncode == 0
    return made


def ends(folder: Path, rank: int) -> list[tuple[str, int]]:
    """Status and step of each end of this rank."""
    return [(e["status"], e["step"]) for e in read(folder, rank) if e["event"] == "run.ended"]


def check_saved(folder: Path) -> int:
    """All ranks ended at one step, which is saved and verifies; returns it."""
    status, step = ends(folder, 0)[-1]
    assert status == "interrupted"
    assert ends(folder, 1)[-1] == (status, step)
    store = CheckpointStore(folder / "checkpoints")
    newest = store.newest_verified(known_good=False)
    assert newest is not None
    assert newest.step == step
    assert newest.manifest.world_size == 2
    return step


@pytest.mark.timeout(600)
def test_one_rank_hears_it_and_all_agree(folders: dict[str, Path]) -> None:
    """Rank 1 alone is told, in the middle of step 7; rank 0 would never know. Then on from there, exactly."""
    folder = folders["one"]
    for rank in range(2):
        assert ends(folder, rank) == [("interrupted", 8), ("finished", STEPS)]
    events = read(folder, 0)
    told = [e["text"] for e in events if e["event"] == "infra.event"]
    assert told == ["rank 1 received SIGTERM; all ranks end at step 8"]
    found = compare(folders["calm"], folder, 2, STEPS)
    assert found.problems == []
    assert [e["checkpoint_step"] for e in found.resumed] == [8]  # although 5 is known-good: handed over
    assert found.repeated_steps == 0
    promoted = [
        (e["rank"], e["checkpoint_step"]) for r in (0, 1) for e in read(folder, r) if "known_good" in e["event"]
    ]
    assert promoted.count((0, 8)) == 1  # its probation has gone on, and rank 0 alone writes the status
    assert all(rank == 0 for rank, _ in promoted)
    assert not [e for r in (0, 1) for e in read(folder, r) if e["event"] == "checkpoint.failed"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
def test_a_job_that_is_preempted(launcher: str, folders: dict[str, Path]) -> None:
    """The launcher is told from outside, as by a scheduler, and passes it on; both launchers leave the same behind."""
    folder = folders[launcher]
    said, (code, step) = (folder / "said").read_text(), json.loads((folder / "left").read_text())
    # torchrun itself ends by its SignalException; Lightning's launcher is a rank, and leaves cleanly
    assert (code == 0) == (launcher == "lightning"), said[-4000:]
    assert "Unable to shutdown" not in said  # torchrun kills after 30 s, and says so
    assert 3 < step < STEPS
    found = compare(folders["calm"], folder, 2, STEPS)
    assert found.problems == []
    assert [e["checkpoint_step"] for e in found.resumed] == [step]
    assert found.repeated_steps == 0
