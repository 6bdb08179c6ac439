"""Several agents, as on several machines: a rank dies under one of them; a whole machine goes and another one comes.

Two agents with a rank each take one job after the other: one in which now this rank and now that one is killed, and one in
which an agent goes with all that it has started, and ``torchrun`` takes its place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from docs_pages import Block, documented_by
from elastic_job import (
    SCRIPT,
    Job,
    Started,
    agent_of,
    as_here,
    compare,
    kills_done,
    read,
    typed,
    wait_for_step,
)
from sentinel_kit import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
STEPS = 24
MORE = bool(os.environ.get("SENTINEL_AGENTS"))  # more of the same, and by torchrun alone: minutes
KILLS = [
    {"rank": 1, "step": 6, "where": "gather", "after": "step-00000004"},
    {"rank": 0, "step": 11, "where": "backward", "after": "step-00000008"},
    *([{"rank": i % 2, "step": 13 + i, "where": w} for i, w in enumerate(("checkpoint", "rollback", "resume"))] * MORE),
]
# That an agent is gone is noticed after three seconds. Each meeting has a store of its own: torch 2.13's agents do not tell a
# newcomer where the one is that they share.
GONE = {"keep_alive_interval": "1", "keep_alive_max_attempt": "3"}
NEWCOMERS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun_node(line: str, port: int, arguments: list[str], host: bool) -> Started:
    """The page's line on one of two nodes of one device each."""
    how = ",".join(f"{key}={value}" for key, value in (GONE | {"is_host": str(host).lower()}).items())
    changes = {
        "--nproc-per-node 8": "--nproc-per-node 1",
        "--rdzv-id job-17": "--rdzv-id job",
        "node-a:29400": f"localhost:{port} --rdzv-conf {how}",
        "train.py": str(SCRIPT),
    }
    return typed(as_here(line, changes), *arguments, env=NEWCOMERS)


@pytest.fixture
def agents() -> Iterator[list[Started]]:
    """What is left of them is ended."""
    started: list[Started] = []
    yield started
    for agent in started:
        agent.kill_all()


def told(folder: Path, kind: str) -> list[str]:
    return [e["text"] for e in read(folder, 0) if e["event"] == "infra.event" and e["kind"] == kind]


def lost(folder: Path) -> list[str]:
    """What each start says of ranks that ended without a word."""
    return [text.split(" (host")[0] for text in told(folder, "lost_rank") if "ended without a word after" in text]


@pytest.mark.timeout(900)
def test_ranks_die_under_two_agents_and_an_agent_is_replaced(
    tmp_path: Path, agents: list[Started], documented: list[Block]
) -> None:
    """Whichever agent starts its worker anew, the other follows because the members have changed; all of it exact."""
    (line,) = documented
    calm, ranks, machines = (tmp_path / name for name in ("calm", "ranks", "machines"))
    for folder in (calm, ranks, machines):
        folder.mkdir()
    steps = f"--steps={STEPS}"
    killed = [str(ranks), steps, f"--kills={json.dumps(KILLS)}", "--in-turn", "--rollback-every=9", "--skew=0.3"]
    paced = [str(machines), steps, "--pace=0.15"]
    port = free_port()
    first = Job(killed, 1, 3 * len(KILLS), nodes=2, endpoint=f"localhost:{free_port()}", meeting={"is_host": "true"})
    second = Job(
        paced, 1, 3, nodes=2, endpoint=f"localhost:{port}", meeting=GONE | {"is_host": "true"}, environment=NEWCOMERS
    )
    jobs = [first, second]
    agents.append(Started(agent_of(*jobs, Job([str(calm), steps]))))  # the one that stays, and hosts the rendezvous
    agents.append(Started(agent_of(*(replace(job, meeting=job.meeting | {"is_host": "false"}) for job in jobs))))
    wait_for_step(machines, 10, seconds=400)
    agents[1].kill_all()
    agents.append(torchrun_node(line.take(), port, paced, host=False))
    for agent in (agents[0], agents[2]):
        agent.end(200)
        assert agent.returncode == 0

    assert [{k: v for k, v in kill.items() if k != "attempt"} for kill in kills_done(ranks)] == KILLS
    found = compare(calm, ranks, 2, STEPS)
    assert found.problems == []
    assert len(found.resumed) == len(KILLS)
    numbers = [int(text.split("number ")[1]) for text in told(ranks, "restart")]
    assert len(numbers) == len(KILLS)
    assert numbers[0] == 1  # of the one agent; the other's own count need not show it
    assert lost(ranks)[:2] == ["rank 1", "rank 0"]

    found = compare(calm, machines, 2, STEPS)
    assert found.problems == []
    assert [(e["checkpoint_step"], e["status"]) for e in found.resumed] == [(8, "known_good")]
    assert lost(machines) == ["rank 1"]


@pytest.mark.skipif(not MORE, reason="SENTINEL_AGENTS=1 runs it")
@pytest.mark.timeout(1800)
def test_three_machines_go_one_after_the_other(tmp_path: Path, agents: list[Started]) -> None:
    """The same by ``torchrun`` alone."""
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
    assert Started(agent_of(Job([str(calm), f"--steps={STEPS}"]))).end(200) is not None
    port, arguments = free_port(), [str(killed), f"--steps={STEPS}", "--pace=0.15"]
    test = f"tests/distributed/{Path(__file__).name}::test_ranks_die_under_two_agents_and_an_agent_is_replaced"
    (line,) = (block.content for block in documented_by(test))
    agents += [torchrun_node(line, port, arguments, host=number == 0) for number in range(2)]
    for number in range(3):
        wait_for_step(killed, 10 + 4 * number, attempt=number)
        agents[-1].kill_all()
        agents.append(torchrun_node(line, port, arguments, host=False))
    for agent in (agents[0], agents[-1]):
        agent.end(200)
        assert agent.returncode == 0
    found = compare(calm, killed, 2, STEPS)
    assert found.problems == []
    assert len(found.resumed) == 3
    assert lost(killed) == ["rank 1"] * 3
