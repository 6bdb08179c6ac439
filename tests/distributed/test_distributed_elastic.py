"""Dying and coming back: ten kills at random steps, in the middle of a gather, a checkpoint, a rollback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from docs_pages import Block
from elastic_job import ROLLBACK_EVERY, agent_command, compare, kill_plan, read, run, torchrun_command

from lightning_sentinel.checkpoint import CheckpointStore

pytestmark = pytest.mark.distributed
STEPS = 48
SEED = int(os.environ.get("SENTINEL_KILL_SEED", "11"))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training without a kill."""
    folder = tmp_path_factory.mktemp("calm")
    assert run(agent_command(2, 0, str(folder), f"--steps={STEPS}"), 200).returncode == 0
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_kills_and_back_each_time(calm: Path, tmp_path: Path) -> None:
    """Ranks start half a second apart; the job ends as if nothing had been, and the journal tells each repetition."""
    plan = kill_plan(SEED, 10, 2, STEPS)
    assert {p["where"] for p in plan} >= {"gather", "checkpoint", "rollback"}
    options = [f"--steps={STEPS}", f"--rollback-every={ROLLBACK_EVERY}", f"--kills={json.dumps(plan)}", "--skew=0.5"]
    assert run(agent_command(2, 10, str(tmp_path), *options), 800).returncode == 0
    found = compare(calm, tmp_path, 2, STEPS)
    assert found.problems == []
    events = read(tmp_path, 0)
    restarts = [e["text"] for e in events if e["event"] == "infra.event" and e["kind"] == "restart"]
    assert [int(text.split("number ")[1].split()[0]) for text in restarts] == list(range(1, 11))
    assert len(found.resumed) == 10 - sum(p["step"] < 5 for p in plan)  # before the first checkpoint: from the start
    assert {e["status"] for e in found.resumed} <= {"known_good", "candidate"}
    store = CheckpointStore(tmp_path / "checkpoints")
    assert all(store.verify(path) == [] for path in store.paths())
    assert not [e for e in events if e["event"] in ("checkpoint.refused", "incident.opened")]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_brings_it_back_as_typed(calm: Path, tmp_path: Path, documented: list[Block]) -> None:
    """The command line itself, ranks that start three seconds apart, one kill in a gather.

    The script makes the calls of the page's program, with arguments of its own; the program is not run as it stands.
    """
    program, line = (block.take() for block in documented)
    script = (Path(__file__).parent / "elastic_script.py").read_text(encoding="utf-8")
    for call in ("init_process_group(timeout=", "L.Trainer(", "lightning_sentinel.default_callbacks(", "trainer.fit("):
        assert call in program
        assert call in script
    words = line.split()
    assert (words[0], words[1], words[3]) == ("torchrun", "--nproc-per-node", "--max-restarts")
    kills = json.dumps([{"rank": 1, "step": 21, "where": "gather", "after": "step-00000020"}])
    command = torchrun_command(2, 1, str(tmp_path), f"--steps={STEPS}", f"--kills={kills}", "--skew=3")
    assert run(command, 350).returncode == 0
    found = compare(calm, tmp_path, 2, STEPS)
    assert found.problems == []
    assert [e["checkpoint_step"] for e in found.resumed] == [20]
