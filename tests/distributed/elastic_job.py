"""A job of several processes, killed and started anew by torchelastic's agent, and its journal held against a calm one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

SCRIPT = Path(__file__).with_name("elastic_script.py")
ROLLBACK_EVERY = 9

# The agent of torchrun itself, with its own environment for the workers; they are forked from a process that has
# imported everything, because fifty restarts would otherwise spend most of their time on imports. One job after another.
AGENT = """
import json, os, runpy, signal, sys
sys.path.insert(0, {folder!r})
import elastic_script
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def worker(script, folder, *arguments):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's own, which a forked worker inherits
    os.chdir(folder)
    sys.argv = [script, *arguments]
    try:
        elastic_script.main() if script == elastic_script.__file__ else runpy.run_path(script, run_name="__main__")
    except SystemExit as end:  # a forked worker must return, or the agent waits for its result
        if end.code:
            raise

for job in json.loads(sys.argv[1]):
    os.environ.update(job["environment"])
    config = LaunchConfig(
        min_nodes=job["nodes"], max_nodes=job["nodes"], nproc_per_node=job["ranks"], run_id="job", rdzv_backend="c10d",
        rdzv_endpoint=job["endpoint"], rdzv_configs=job["meeting"], max_restarts=job["restarts"],
        start_method="fork", monitor_interval=0.1,
    )
    try:
        elastic_launch(config, worker)(job["script"], job["folder"], *job["arguments"])
    except ChildFailedError:
        if not job["fails"]:
            raise
"""


@dataclass
class Job:
    """What one agent starts, again and again if need be: this module's script, or another one in a folder of its own.

    Attributes:
        ranks: On this agent; the others have as many.
        nodes: Agents that meet at ``endpoint``, and how: ``--rdzv-conf``.
        fails: Whether it shall come to nothing, and the agent's next job follow all the same.
    """

    arguments: Sequence[str] = ()
    ranks: int = 2
    restarts: int = 0
    script: str = str(SCRIPT)
    folder: str = "."
    nodes: int = 1
    endpoint: str = "localhost:0"
    meeting: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    fails: bool = False


def agent_of(*jobs: Job) -> list[str]:
    """torchelastic's agent with forked workers: one job after the other, for which everything is imported once."""
    code = AGENT.format(folder=str(SCRIPT.parent))
    return [sys.executable, "-W", "ignore", "-c", code, json.dumps([asdict(job) for job in jobs])]


def agent_command(ranks: int, restarts: int, *arguments: str) -> list[str]:
    """That agent with one job."""
    return agent_of(Job(arguments, ranks, restarts))


def torchrun_command(ranks: int, restarts: int, *arguments: str) -> list[str]:
    """``torchrun`` as a user types it."""
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *options, str(SCRIPT), *arguments]


class Started(subprocess.Popen[bytes]):
    """A command that is running; what it says goes to a file, so that it never waits for a reader."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end and by kill_all
        try:
            super().__init__(list(command), stdout=self.output, stderr=subprocess.STDOUT, **options)
        except BaseException:
            self.output.close()
            raise

    def end(self, seconds: float) -> str:
        """Wait for its end and say what it has said; after so many seconds it and all that it has started are killed."""
        try:
            self.wait(timeout=seconds)
        finally:
            self._kill()
            with self.output as file:
                file.seek(0)
                said = file.read().decode(errors="replace")
            if self.returncode:
                print(said[-12000:])  # pytest shows it where the test fails
        return said

    def kill_all(self) -> None:
        """``kill -9`` for it and everything that it has started, as when a machine goes; nothing where it has ended."""
        self._kill()
        self.output.close()

    def _kill(self) -> None:
        if self.poll() is None:
            agent = psutil.Process(self.pid)
            agent.suspend()  # it starts no other worker meanwhile
            # workers first: a forked one is sent SIGINT where its agent dies, and would have a last word
            for process in (*agent.children(recursive=True), agent):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.wait()


def as_here(text: str, changes: dict[str, str]) -> str:
    """Words of a page as they are in a test; each stands there once."""
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old} is {text.count(old)} times in\n{text}"
        text = text.replace(old, new)
    return text


def typed(line: str, *arguments: str, **options: Any) -> Started:
    """A command line of a page, with the programs that lie beside this Python."""
    environment = os.environ | {"PYTHONWARNINGS": "ignore"} | options.pop("env", {})
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    return Started([*shlex.split(line), *arguments], env=environment, **options)


def run(command: Sequence[str], seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    started = Started(command, **options)
    said = started.end(seconds)
    return subprocess.CompletedProcess(command, started.returncode, said)


def wait_for_step(folder: Path, step: int, attempt: int = 0, seconds: float = 200.0) -> None:
    """Until any rank's journal says that the step is done, in that attempt or a later one."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ranks = [int(path.name[5:10]) for path in folder.glob("journal/rank-*.jsonl")]
        steps = [e for rank in ranks for e in read(folder, rank) if e["event"] == "step" and e["attempt"] >= attempt]
        if any(e["step"] >= step for e in steps):
            return
        time.sleep(0.1)
    raise AssertionError(f"step {step} of attempt {attempt} was not reached in {seconds:g} s")


def kill_plan(seed: int, kills: int, ranks: int, steps: int) -> list[dict[str, Any]]:
    """Who dies in which attempt, at which step and in the middle of what; every named middle comes up early."""
    luck = random.Random(seed)
    named = ["gather", "checkpoint", "rollback", "publish", "backward", "resume", "sent", "step"]
    plan = []
    for number, step in enumerate(sorted(luck.choices(range(2, steps - 2), k=kills))):
        where = named[number % len(named)]
        if where == "rollback" and step > (steps - 1) // ROLLBACK_EVERY * ROLLBACK_EVERY:
            where = "step"  # no rollback follows
        if where in ("checkpoint", "publish") and step > steps - 6:
            where = "gather"  # no save may follow
        if where == "resume" and step < 8:
            where = "step"  # nothing has been saved
        rank = 0 if where == "publish" else luck.randrange(ranks)  # rank 0 alone publishes
        plan.append({"rank": rank, "step": step, "where": where})
    return plan


@dataclass
class Found:
    """What the journals of two runs say about each other; ``problems`` is empty where nothing is lost or repeated unseen."""

    problems: list[str] = field(default_factory=list)
    resumed: list[dict[str, Any]] = field(default_factory=list)  # rank 0's lines
    repeated_steps: int = 0  # over all ranks


def read(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    lines = (run_dir / "journal" / f"rank-{rank:05d}.jsonl").read_bytes().splitlines()
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue  # cut short by a kill
    return events


def kills_done(killed: Path) -> list[dict[str, Any]]:
    """What the victims left behind just before their ends, by attempt."""
    markers = sorted(killed.glob("killed-*"), key=lambda path: int(path.name.split("-")[1]))
    return [json.loads(marker.read_text()) | {"attempt": int(marker.name.split("-")[1])} for marker in markers]


def unlike_the_plan(killed: Path, plan: Sequence[dict[str, Any]]) -> list[str]:
    """Kills that did not take place as planned, and restarts that did not follow one each or did not resume.

    An attempt that fails by itself, in which nobody could be killed, shows as a kill that is missing. A restart begins anew
    only while no checkpoint has been saved.
    """
    problems = []
    done = {kill.pop("attempt"): kill for kill in kills_done(killed)}
    for attempt in sorted({*range(len(plan)), *done}):
        wanted = plan[attempt] if attempt < len(plan) else None
        if done.get(attempt) != wanted:
            problems.append(f"attempt {attempt}: {done.get(attempt, 'nobody')} was killed, {wanted} was planned")
    restarts, started, resumed, saved = list[int](), 0, 0, False
    for event in read(killed, 0):
        if event["event"] == "infra.event" and event["kind"] == "restart":
            restarts.append(int(event["text"].split("number ")[1].split()[0]))
        elif event["event"] == "run.started":
            started, resumed = started + 1, resumed + saved  # from now on a start must resume
        elif event["event"] == "run.resumed":
            resumed -= saved
        elif event["event"] == "checkpoint.saved":
            saved = True
    if restarts != list(range(1, len(plan) + 1)):
        problems.append(f"restarts {restarts} are on rank 0's journal, {len(plan)} were planned")
    if resumed:
        problems.append(f"{resumed} of {started} starts did not resume although a checkpoint had been saved")
    return problems


def compare(calm: Path, killed: Path, ranks: int, steps: int) -> Found:
    """Every rank's path through the killed run against the calm one: samples, losses bit for bit, weights; and its seams.

    A step that a rank trained again is held against the first time as well: the same samples, the same loss to the bit.
    """
    found = Found()
    for rank in range(ranks):
        expected, _, _ = _path(read(calm, rank), found.problems, f"calm rank {rank}")
        live, resumed, repeated = _path(read(killed, rank), found.problems, f"rank {rank}")
        if rank == 0:
            found.resumed = resumed
        found.repeated_steps += repeated
        if sorted(live) != list(range(steps)):
            missing = sorted(set(range(steps)) - set(live))
            found.problems.append(f"rank {rank}: steps {missing} are on no path")
        for step in sorted(live.keys() & expected.keys()):
            if live[step] != expected[step]:
                found.problems.append(f"rank {rank} step {step}: {live[step]} instead of {expected[step]}")
        weights = [(folder / f"weights-{rank}.json").read_text() for folder in (calm, killed)]
        if weights[0] != weights[1]:
            found.problems.append(f"rank {rank}: other weights at the end")
    drawn = [_drawn(folder, ranks) for folder in (calm, killed)]
    if drawn[0] != drawn[1]:
        found.problems.append(f"samples differ: {(drawn[0] - drawn[1]) + (drawn[1] - drawn[0])}")
    return found


def _drawn(folder: Path, ranks: int) -> Counter[str]:
    """How often each sample lies on the path to the final weights, over all ranks."""
    paths = [_path(read(folder, rank), [], "")[0] for rank in range(ranks)]
    return Counter(sample for path in paths for row in path.values() for sample in row[0])


def _path(
    events: list[dict[str, Any]], problems: list[str], who: str
) -> tuple[dict[int, tuple[Any, ...]], list[dict[str, Any]], int]:
    """Steps on the path to the newest weights, each going back checked against the line that announces it."""
    live: dict[int, tuple[Any, ...]] = {}
    seen: set[tuple[int, int]] = set()
    first: dict[int, tuple[Any, ...]] = {}  # samples and loss of a step's first time
    resumed, repeated = [], 0
    told: int | None = None  # where the newest line about going back says that training goes on
    for event in events:
        name, step = event["event"], event["step"]
        if name == "run.started":
            told = 0  # from the beginning, unless a line after it says otherwise
        elif name == "run.resumed":
            told = event["checkpoint_step"]
            resumed.append(event)
        elif name == "action.rollback":
            told = event["to_step"]
        elif name == "step":
            key = (event["attempt"], step)
            if key in seen:
                problems.append(f"{who}: attempt {key[0]} holds step {step} twice")
            if step in live:
                if told is None or step < told:
                    problems.append(f"{who}: step {step} is repeated and no line says so")
                # only now: a rollback that a kill cut short has abandoned nothing
                live = {s: row for s, row in live.items() if s < step}
            row = (tuple(event["sample_ids"]), event["loss_bits"], event["epoch"], event["batch_idx"])
            if step in first:
                repeated += 1
                if row[:2] != first[step]:
                    problems.append(f"{who}: step {step} is repeated as {row[:2]}, it was {first[step]}")
            first.setdefault(step, row[:2])
            seen.add(key)
            told = None
            live[step] = row
    return live, resumed, repeated
