"""What the triage makes of faults in the real computation: the confusion matrix.

Every case is a short run of a small hybrid language model under the whole suite, which only watches. A fault strikes, the
detectors see what they see, and the verdict of the first incident is compared with what was done. The suite is told nothing.
*Right* is the kind, every culprit (of several guilty samples at least half) and nobody innocent. *Undetermined* is a verdict
that accuses nobody, or no incident at all (*missed*). *Wrong* is any other, also one that was taken back later.

Run it with ``python benchmarks/triage.py [--seeds 0 1 2] [--ranks 1 2] [--faults NAME ...] [--json FILE] [--keep
FILE]``; with ``--keep`` a run that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from triage_matrix.faults import FAULTS, plan
from triage_matrix.ranks import run_together
from triage_matrix.run import quiet, run_case

KINDS = ("data", "numerics", "optimization", "infrastructure", "none", "undetermined")


def summary(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts, the confusion matrix of kinds (by what was done, then by what was said), and the cases."""
    counts = Counter(o["outcome"] for o in outcomes)
    confusion = {kind: dict.fromkeys(KINDS, 0) for kind in KINDS[:-1]}
    for o in outcomes:
        confusion[o["expected"]][o["kind"]] += 1
    return {
        "cases": len(outcomes),
        "faults": len({o["name"] for o in outcomes}),
        "right": counts["right"],
        "wrong": counts["wrong"],
        "undetermined": counts["undetermined"] + counts["missed"],
        "missed": counts["missed"],
        "unlisted": sum(bool(o["unlisted"]) for o in outcomes),
        "confusion": confusion,
        "outcomes": list(outcomes),
    }


def table(found: dict[str, Any]) -> str:
    """The matrix and the faults as text; a row is what was done, a column what was said."""
    width = max(len(k) for k in KINDS) + 2
    lines = ["done \\ said".ljust(width) + "".join(k.rjust(width) for k in KINDS)]
    for kind, row in found["confusion"].items():
        lines.append(kind.ljust(width) + "".join(str(row[k] or ".").rjust(width) for k in KINDS))
    lines.append("")
    by_fault: dict[str, list[dict[str, Any]]] = {}
    for o in found["outcomes"]:
        by_fault.setdefault(o["name"], []).append(o)
    for name, rows in by_fault.items():
        right = sum(o["outcome"] == "right" for o in rows)
        rest = "; ".join(
            f"seed {o['seed']} on {o['ranks']}: {o['outcome']} {o['kind']} {' '.join(o['culprits'][:3])}"
            for o in rows
            if o["outcome"] != "right"
        )
        lines.append(f"{name.ljust(24)}{rows[0]['expected'].ljust(width)}{right} of {len(rows)}  {rest}")
    share = {k: 100.0 * found[k] / max(found["cases"], 1) for k in ("right", "wrong", "undetermined")}
    lines.append("")
    lines.append(
        f"{found['cases']} cases of {found['faults']} faults: right {found['right']} ({share['right']:.1f} %), wrong"
        f" {found['wrong']} ({share['wrong']:.1f} %), undetermined {found['undetermined']} ({share['undetermined']:.1f} %)"
        f" of which {found['missed']} had no incident"
    )
    lines.append(
        f"cases with a verdict that leaves out one of the five comparisons without a reason: {found['unlisted']}"
    )
    return "\n".join(lines)


Case = tuple[str, int, int]  # fault, seed, ranks


def kept_outcomes(keep: Path | None) -> dict[Case, dict[str, Any]]:
    """What an earlier run has put down in this file, and in the one beside it, which its two ranks were writing to."""
    found: dict[Case, dict[str, Any]] = {}
    for file in () if keep is None else (keep, part_of(keep)):
        for line in file.read_text().splitlines() if file.exists() else ():
            outcome = json.loads(line)
            found[outcome["name"], outcome["seed"], outcome["ranks"]] = outcome
    return found


def part_of(keep: Path) -> Path:
    return keep.with_name(f"{keep.name}.part")


def measure(
    names: Sequence[str] | None,
    seeds: Sequence[int],
    ranks: Sequence[int],
    progress: bool = True,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Run the matrix; one-rank cases in this process, two-rank cases in two of their own, all of them one after the other.

    Args:
        names: Faults; None for all.
        seeds: Seeds.
        ranks: Numbers of ranks.
        progress: Show it.
        keep: Outcomes are put down here as they come, and cases that it holds already are not run again.
    """
    cases = [c for c in plan(names, seeds) if c[2] in ranks]
    known = kept_outcomes(keep)
    if keep is not None:
        keep.write_text("".join(json.dumps(o, default=str) + "\n" for o in known.values()))
        part_of(keep).unlink(missing_ok=True)
    started = time.perf_counter()
    for i, case in enumerate(c for c in cases if c[2] == 1 and c not in known):
        known[case] = run_case(*case).to_dict()
        if keep is not None:
            with keep.open("a") as lines:
                lines.write(json.dumps(known[case], default=str) + "\n")
        if progress:
            done = f"{i + 1}/{len(cases)} {case[0]} seed {case[1]}: {known[case]['outcome']}"
            print(f"\r{done:<70}{time.perf_counter() - started:6.0f} s", end="", file=sys.stderr, flush=True)
    together = [(name, seed) for name, seed, r in cases if r == 2 and (name, seed, r) not in known]
    if together:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "outcomes.jsonl" if keep is None else part_of(keep)
            known |= {(o["name"], o["seed"], o["ranks"]): o for o in run_together(together, file)}
    if progress:
        print(file=sys.stderr)
    return summary([known[c] for c in cases])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--faults", nargs="+", choices=sorted(FAULTS))
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="put outcomes down here, and go on from those it holds"
    )
    arguments = parser.parse_args()
    quiet()
    found = measure(arguments.faults, arguments.seeds, arguments.ranks, keep=arguments.keep)
    print(table(found))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
