"""FSDP2 dies and comes back: killed in the middle of things, started anew by ``torchrun``, told to end, taken up again.

Two starts of processes do it all: ``torchrun`` as typed, which is killed once and then told to end; and an agent that forks
its workers for the calm training, for more kills, and for what goes on from the torchrun job's last checkpoint.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from elastic_job import (
    ROLLBACK_EVERY,
    Job,
    Started,
    agent_of,
    compare,
    read,
    run,
    torchrun_command,
    unlike_the_plan,
    wait_for_step,
)
from test_distributed_sigterm import check_saved

from lightning_sentinel.checkpoint import CheckpointStore

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
STEPS = 24
AS_TYPED = [{"rank": 1, "step": 9, "where": "gather", "after": "step-00000008"}]
MORE = [
    {"rank": 1, "step": 5, "where": "checkpoint"},
    {"rank": 0, "step": 8, "where": "rollback"},
    {"rank": 1, "step": 14, "where": "resume"},
    {"rank": 1, "step": 17, "where": "backward"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``calm``, ``typed``, ``more``: the run folder of each training."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("calm", "typed", "more")}
    options = {name: [str(path), f"--steps={STEPS}", "--strategy=fsdp2"] for name, path in made.items()}
    typed = torchrun_command(2, 1, *options["typed"], f"--kills={json.dumps(AS_TYPED)}", "--pace=0.1")
    job = Started(typed)
    try:
        wait_for_step(made["typed"], 13)
        job.send_signal(signal.SIGTERM)
        output = job.end(100)
    finally:
        job.kill_all()
    assert "Unable to shutdown" not in output  # it kills after 30 s, and says so
    (made["typed"] / "step").write_text(str(check_saved(made["typed"])))
    killed = [*options["more"], f"--kills={json.dumps(MORE)}", f"--rollback-every={ROLLBACK_EVERY}", "--skew=0.3"]
    jobs = [Job(options["calm"]), Job(options["typed"]), Job(killed, restarts=len(MORE))]
    assert run(agent_of(*jobs), 250).returncode == 0
    return made


@pytest.mark.timeout(500)
def test_killed_under_torchrun_then_told_to_end_then_taken_up(folders: dict[str, Path]) -> None:
    """``kill -9``, back from the known-good checkpoint; SIGTERM, a verified checkpoint; both exact."""
    calm, typed = folders["calm"], folders["typed"]
    told = int((typed / "step").read_text())
    assert 13 < told < STEPS
    assert unlike_the_plan(typed, AS_TYPED) == []
    found = compare(calm, typed, 2, STEPS)
    assert found.problems == []
    assert [(e["checkpoint_step"], e["status"]) for e in found.resumed] == [(8, "known_good"), (told, "candidate")]
    assert found.repeated_steps <= 2  # step 8 or 9 of each rank, and nothing behind SIGTERM
    heard = [e["text"] for e in read(typed, 0) if e["event"] == "infra.event" and e["kind"] == "sigterm"]
    assert heard == [f"rank 0, 1 received SIGTERM; all ranks end at step {told}"]


@pytest.mark.timeout(500)
def test_killed_in_the_middle_of_things(folders: dict[str, Path]) -> None:
    """Of a checkpoint, a rollback, a resume, a backward."""
    assert unlike_the_plan(folders["more"], MORE) == []
    found = compare(folders["calm"], folders["more"], 2, STEPS)
    assert found.problems == []
    store = CheckpointStore(folders["more"] / "checkpoints")
    assert store.paths()
    assert all(store.verify(path) == [] for path in store.paths())
    weights = [(folders["more"] / f"weights-{rank}.json").read_text() for rank in range(2)]
    assert weights[0] != weights[1]  # each rank has parts of its own
