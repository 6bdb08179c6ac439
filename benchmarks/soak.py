"""A job that is killed again and again: is anything lost, or repeated without a line that says so?

    kills              ranks that really ended by SIGKILL: in a step, gather, backward, checkpoint, rollback, resume
    resumed            restarts that went on from a checkpoint (before the first one a restart begins anew)
    problems           kills and restarts that are not as planned, differences from the same training without a kill,
                       repetitions that differ from the first time or that no line announces; must be 0
    repeated_steps     how often a rank trained a step again, each time after a line in the journal
    seconds_per_kill   wall time for each kill: dying, restart by torchelastic's agent, resume, repetition

Workers are forked by torchelastic's own agent from a process that has imported everything, so a restart costs no imports.

Run it with ``python benchmarks/soak.py [--kills 50] [--ranks 2] [--seed 0] [--skew 0.2] [--keep DIR] [--json FILE]``.
The exit code is 1 where there is a problem, a job that did not come back among them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "distributed"))

from elastic_job import ROLLBACK_EVERY, agent_command, compare, kill_plan, kills_done, run, unlike_the_plan

STEPS_PER_KILL = 5


def soak(folder: Path, kills: int, ranks: int, seed: int, skew: float) -> dict[str, object]:
    """One calm and one killed training of the same thing, compared."""
    steps = STEPS_PER_KILL * kills + 10
    plan = kill_plan(seed, kills, ranks, steps)
    options = [f"--steps={steps}", f"--devices={ranks}", f"--batch={2 * ranks}", "--samples=4000"]
    calm, killed = folder / "calm", folder / "killed"
    for path in (calm, killed):
        path.mkdir(parents=True)
    if run(agent_command(ranks, 0, str(calm), *options), 3600).returncode:
        raise SystemExit("the calm training failed")
    begun = time.monotonic()
    more = [f"--rollback-every={ROLLBACK_EVERY}", f"--kills={json.dumps(plan)}", f"--skew={skew}"]
    done = run(agent_command(ranks, kills, str(killed), *options, *more), 36000)
    seconds = time.monotonic() - begun
    if done.returncode:
        raise SystemExit(f"the job did not come back after one of its {len(kills_done(killed))} kills")
    found = compare(calm, killed, ranks, steps)
    found.problems += unlike_the_plan(killed, plan)
    for problem in found.problems:
        print(problem)
    return {
        "kills": len(kills_done(killed)),
        "ranks": ranks,
        "steps": steps,
        "where": dict(Counter(p["where"] for p in plan)),
        "resumed": len(found.resumed),
        "problems": len(found.problems),
        "repeated_steps": found.repeated_steps,
        "seconds_per_kill": round(seconds / max(kills, 1), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skew", type=float, default=0.2, help="seconds by which rank 1 starts late")
    parser.add_argument("--keep", type=Path, help="leave the run folders here")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        numbers = soak(folder, arguments.kills, arguments.ranks, arguments.seed, arguments.skew)
    for name, value in numbers.items():
        print(f"{name:18} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n")
    raise SystemExit(bool(numbers["problems"]))


if __name__ == "__main__":
    main()
