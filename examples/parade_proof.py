"""What the legs of the fault parade show: for each fault, what was seen, named and done, and the proof of the recovery.

*Exact*: the final weights and the per-step log equal those of the clean leg, bit for bit. *Band*: the loss is back
inside the clean leg's band within :data:`WITHIN_STEPS` steps after the last answer, and the forecast that was made
before the incident, which is all that a user without a clean leg has, says so too. *Event*: nothing was an incident, and
the run equals the one without the suite, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hybrid_lm.recorder import first_difference, read_path, weights_differ

from lightning_sentinel.journal import number, read_journal
from lightning_sentinel.report.data import RunData, load_run
from lightning_sentinel.report.summary import incident_rows

if TYPE_CHECKING:
    from parade import Leg

WITHIN_STEPS = 20  # after the last answer, until the band's test holds
BAND_SIGMA = 4.0  # half width of the clean leg's band, in robust sigma of single steps
BAND_STEPS = 10  # steps in a row that are tested; one may lie outside
NEIGHBOURS = 10  # steps on each side that make the middle of the clean leg's band


@dataclass(frozen=True)
class Expected:
    """What the suite should make of a fault.

    Attributes:
        verdict: Kind of the verdict; ``none`` where a fault is an event only.
        culprits: What the verdict must name, each a word with ``{...}`` for what the fault's own line in the journal says.
        actions: Any of these must be among the answers; none other than these may be.
        proof: ``exact``, ``band`` or ``event``.
        also: What it may name besides, likewise: right, too, and not known in every case.
    """

    verdict: str
    culprits: tuple[str, ...]
    actions: frozenset[str]
    proof: str
    also: tuple[str, ...] = ()


def _expected(verdict: str, culprits: str, actions: str, proof: str, also: str = "") -> Expected:
    return Expected(verdict, tuple(culprits.split()), frozenset(actions.split()), proof, tuple(also.split()))


EXPECTED: dict[str, Expected] = {
    "corrupt_batch": _expected("data", "sample:{samples}", "rollback_skip skip_step quarantine", "band"),
    "out_of_range_token": _expected("data", "sample:{samples}", "quarantine", "band"),
    "no_supervised_tokens": _expected("data", "sample:{samples}", "skip_step quarantine", "band"),
    "nan_forward": _expected("numerics", "module:{module}", "skip_step", "band"),
    "nan_backward": _expected("numerics", "module:{module}", "skip_step", "band"),
    "transient_nan": _expected("infrastructure", "module:{module} rank:{rank}", "retry_step", "exact"),
    # The tensor is named where the replicas happen to be compared in the very step.
    "bad_rank": _expected("infrastructure", "rank:{rank}", "rollback_replay", "exact", also="parameter:{parameter}"),
    "fp16_overflow": _expected("none", "", "", "event"),
    "fp16_collapse": _expected("numerics", "module:{module}", "rollback_skip lower_loss_scale skip_step", "band"),
    "lr_spike": _expected("optimization", "optimizer:lr", "rollback_replay", "exact"),
    "optimizer_corruption": _expected("optimization", "optimizer:{key}", "restore_optimizer rollback_replay", "exact"),
    "scheduler_reset": _expected("optimization", "scheduler", "restore_optimizer", "exact"),
    "level_shift": _expected("data", "source:{source}", "rollback_skip quarantine", "band"),
    "cursor_rewind": _expected("data", "cursor", "rollback_replay", "exact"),
}


def judge(run: Path, legs: Sequence[Leg], exit_codes: Mapping[str, int]) -> dict[str, Any]:
    """The parade's summary."""
    results = {leg.name: LegResult.of(run, leg, exit_codes.get(leg.name, -1)) for leg in legs}
    rows = [
        row_of(name, leg, results)
        for leg in legs
        for name in leg.faults
        # An overflow stands in every fp16 leg; it is judged where nothing else happens.
        if leg.suite and not (name == "fp16_overflow" and len(leg.faults) > 1)
    ]
    order = list(EXPECTED)
    rows.sort(key=lambda row: order.index(row["name"]))
    differences = None
    if "clean" in results and "bare" in results:
        differences = difference(results["clean"], results["bare"])
    false = [
        {
            "leg": result.leg.name,
            "number": incident["number"],
            "step": incident["opened_step"],
            "message": incident["message"],
        }
        for result in results.values()
        for incident in result.unexplained()
    ]
    failed = {name: code for name, code in exit_codes.items() if code}
    passed = (
        not failed
        and not false
        and (differences is None)
        and all(row["recovered"] and row["as_expected"] for row in rows)
    )
    return {
        "schema": 1,
        "passed": passed,
        "clean_bit_identical": None if "bare" not in results or "clean" not in results else differences is None,
        "clean_difference": differences,
        "false_incidents": len(false),
        "false_incident_list": false,
        "faults": rows,
        "legs": {name: result.to_dict() for name, result in results.items()},
    }


# ---------------------------------------------------------------------------------------------------------- one leg


@dataclass
class LegResult:
    """What a leg left behind."""

    leg: Leg
    folder: Path
    exit_code: int
    journal: RunData
    incidents: list[dict[str, Any]]
    strikes: dict[str, list[dict[str, Any]]]
    steps: dict[int, dict[str, Any]]
    events: list[dict[str, Any]]

    @classmethod
    def of(cls, run: Path, leg: Leg, exit_code: int) -> LegResult:
        where = run / "legs" / leg.name
        try:
            journal, events = load_run(where), read_journal(where, problems=[])
        except FileNotFoundError:
            journal, events = RunData.from_events([]), []
        steps = live_steps([e for e in events if e["event"] == "step" and e["rank"] == 0])
        strikes: dict[str, list[dict[str, Any]]] = {}
        for event in journal.of("fault.injected"):
            strikes.setdefault(str(event["name"]), []).append(event)
        return cls(leg, where, exit_code, journal, incident_rows(journal), strikes, steps, events)

    def opened(self, incident: Mapping[str, Any]) -> float:
        """When an incident was opened, in the journal's time."""
        for event in self.journal.of("incident.opened"):
            if event["incident"]["number"] == incident["number"]:
                return float(event["time"])
        return math.inf

    def cause(self, incident: Mapping[str, Any]) -> str | None:
        """The newest fault that had begun when an incident was opened."""
        began = {name: float(events[0]["time"]) for name, events in self.strikes.items()}
        before = [name for name, time in began.items() if time <= self.opened(incident)]
        return max(before, key=lambda name: began[name]) if before else None

    def of_fault(self, name: str) -> list[dict[str, Any]]:
        return [incident for incident in self.incidents if self.cause(incident) == name]

    def unexplained(self) -> list[dict[str, Any]]:
        """Incidents that no fault explains."""
        return [i for i in self.incidents if self.cause(i) is None and not (self.leg.faults and not self.strikes)]

    def samples_of(self, action: Mapping[str, Any]) -> list[str]:
        """The samples of the step at which an action was taken, on its rank."""
        for event in self.events:
            if event["event"] == "step" and all(event[key] == action[key] for key in ("step", "attempt", "rank")):
                return list(event["sample_ids"])
        return []

    def loss(self, source: str | None = None) -> dict[int, float]:
        """Mean loss of each applied step of the live path, of one source or of all, in nats."""
        values = {}
        for step, event in self.steps.items():
            value = number(event["loss"] if source is None else (event.get("sources") or {}).get(source))
            if event.get("applied", True) and math.isfinite(value):
                values[step] = value
        return values

    def to_dict(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code,
            "steps": max(self.steps, default=-1) + 1,
            "incidents": self.incidents,
            "fired": {name: events[-1]["fired"] for name, events in self.strikes.items()},
        }


def live_steps(events: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Step lines by step, of the path that the run took in the end."""
    steps: dict[int, dict[str, Any]] = {}
    for event in events:
        for later in [s for s in steps if s >= event["step"]]:
            del steps[later]
        steps[event["step"]] = dict(event)
    return steps


def difference(result: LegResult, clean: LegResult) -> str | None:
    """Where two legs differ, in words: first the logs of all ranks, then the final weights; None if they are equal."""
    for one in (result, clean):
        if one.exit_code:
            return f"leg {one.leg.name} ended with exit code {one.exit_code}"
    for rank in range(result.leg.processes):
        differs = first_difference(read_path(result.folder, rank), read_path(clean.folder, rank))
        if differs:
            return f"rank {rank}: {differs}"
    return weights_differ(result.folder, clean.folder)


# -------------------------------------------------------------------------------------------------------- one fault


def row_of(name: str, leg: Leg, results: Mapping[str, LegResult]) -> dict[str, Any]:
    """One row of the table."""
    result, expected = results[leg.name], EXPECTED[name]
    strikes = result.strikes.get(name, [])
    incidents = result.of_fault(name)
    first = incidents[0] if incidents else None
    injected = strikes[0]["step"] if strikes else None
    detected = first["opened_step"] if first else None
    detector = detectors_of(result, first)
    row: dict[str, Any] = {
        "name": name,
        "leg": leg.name,
        "injected_step": injected,
        "detected_step": detected,
        "delay": None if injected is None or detected is None else detected - injected,
        "fired": strikes[-1]["fired"] if strikes else 0,
        "detector": detector,
        "verdict": first["verdict"] if first else "none",
        "expected_verdict": expected.verdict,
        "culprit": first["culprits"] if first else [],
        "expected_culprit": named_culprits(expected.culprits, strikes),
        "also_right": named_culprits(expected.also, strikes),
        "action": first["actions"] if first else [],
        "expected_action": sorted(expected.actions),
        "incidents": len(incidents),
        "status": first["status"] if first else None,
        "path_z": first["path_z"] if first else None,
    }
    row |= costs(result, incidents)
    proof = {"exact": exact_proof, "band": band_proof, "event": event_proof}[expected.proof]
    clean = results.get(leg.clean or "")
    row |= {"proof": expected.proof, "recovered": False, "path_distance": None}
    if clean is None:
        row["proof_detail"] = f"leg {leg.clean} was not run"
    elif not strikes:
        row["proof_detail"] = "the fault left no line in the journal"
    else:
        row |= proof(result, clean, strikes, incidents)
    row["as_expected"] = as_expected(row, expected)
    return row


def named_culprits(words: Sequence[str], strikes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What must be named, with the fault's own words in place; several samples become several culprits."""
    if not strikes:
        return list(words)
    first = strikes[0]
    samples = sorted({sample for strike in strikes for sample in strike.get("sample_ids", ())})
    named = []
    for word in words:
        if word == "sample:{samples}":
            named += [f"sample:{sample}" for sample in samples]
        else:
            named.append(word.format_map(first))
    return named


def as_expected(row: Mapping[str, Any], expected: Expected) -> bool:
    """Verdict right, every culprit named and nobody else, and only actions that are allowed for it."""
    if row["verdict"] != expected.verdict:
        return False
    if expected.verdict == "none":
        return not row["incidents"]
    # A number of innocents is as wrong as a culprit that got away; of bad samples at least half must be named.
    named, guilty = set(row["culprit"]), set(row["expected_culprit"])
    samples = {c for c in guilty if c.startswith("sample:")}
    rest = guilty - samples
    if not (
        rest <= named and named <= guilty | set(row.get("also_right", ())) and 2 * len(named & samples) >= len(samples)
    ):
        return False
    return bool(row["action"]) and set(row["action"]) <= expected.actions


def detectors_of(result: LegResult, incident: Mapping[str, Any] | None) -> str | None:
    """Who stated the findings with which the incident was opened."""
    for event in result.journal.of("incident.opened"):
        if incident is not None and event["incident"]["number"] == incident["number"]:
            return "+".join(sorted({finding["detector"] for finding in event["incident"]["findings"]}))
    return None


def costs(result: LegResult, incidents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the answers cost: updates lost for good, steps done again, samples (of all ranks) left out and repeated."""
    numbers = {incident["number"] for incident in incidents}
    lost = redone = repeated = 0
    skipped: set[str] = set()
    sources: set[str] = set()
    for event in result.events:
        if not isinstance(event.get("incident"), int) or event["incident"] not in numbers:
            continue
        if event["event"] == "action.skip_step":
            lost += event["rank"] == 0
            skipped |= {f"sample:{sample}" for sample in result.samples_of(event)}
        elif event["event"] == "action.rollback":
            redone += (event["step"] - event["to_step"]) * (event["rank"] == 0)
            repeated += len([s for s in event["replayed"] if f"sample:{s}" not in event["excluded"]])
        elif event["event"] == "quarantine.added":
            skipped |= {name for name in event["names"] if name.startswith("sample:")}
            sources |= {name for name in event["names"] if name.startswith("source:")}
    return {
        "applied_steps_lost": lost,
        "steps_redone": redone,
        "samples_skipped": len(skipped),
        "sources_skipped": sorted(sources),
        "samples_repeated": repeated,
    }


def exact_proof(
    result: LegResult,
    clean: LegResult,
    strikes: Sequence[Mapping[str, Any]],
    incidents: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    differs = difference(result, clean)
    return {
        "recovered": differs is None,
        "path_distance": 0.0 if differs is None else None,
        "proof_detail": differs or "final weights and every step's loss equal the clean leg's, bit for bit",
    }


def event_proof(
    result: LegResult,
    bare: LegResult,
    strikes: Sequence[Mapping[str, Any]],
    incidents: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    step = strikes[0]["step"]
    overflows = [e for e in result.journal.of("scaler.overflow") if e["step"] == step]
    differs = difference(result, bare)
    if incidents:
        differs = "an overflow that the scaler answers was made an incident"
    elif not overflows:
        differs = f"the journal has no overflow at step {step}"
    elif (overflows[0]["old_scale"], overflows[0]["new_scale"]) != (65536.0, 32768.0):
        differs = f"scale {overflows[0]['old_scale']} became {overflows[0]['new_scale']}"
    elif result.steps[step]["applied"]:
        differs = f"step {step} was applied"
    return {
        "recovered": differs is None,
        "path_distance": 0.0 if differs is None else None,
        "detected_step": overflows[0]["step"] if overflows else None,
        "delay": overflows[0]["step"] - step if overflows else None,
        "detector": "LossScaleMonitor" if overflows else None,
        "applied_steps_lost": int(not result.steps[step]["applied"]),
        "samples_skipped": len(result.samples_of(strikes[0])),
        "proof_detail": differs or "65,536 to 32,768, no update; equals the run without the suite, bit for bit",
    }


def band_proof(
    result: LegResult,
    clean: LegResult,
    strikes: Sequence[Mapping[str, Any]],
    incidents: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    if not incidents:
        return {"recovered": False, "proof_detail": "not detected"}
    # Where a source is gone the mean is another quantity; the sources that are left are compared.
    gone = {c.removeprefix("source:") for i in incidents for c in i["culprits"] if c.startswith("source:")}
    sources = {name for event in clean.steps.values() for name in (event.get("sources") or {})}
    stays: str | None = next(iter(sorted(sources - gone))) if gone & sources else None
    numbers = {incident["number"] for incident in incidents}
    answers = [e for e in result.journal.of("action.") if e.get("incident") in numbers]
    answered = max([e.get("to_step", e["step"]) for e in answers], default=incidents[0]["opened_step"])
    # Where the answer went back, the path is new from there on; what the fault still does comes before it is judged.
    back = steps_to_band(result.loss(stays), clean.loss(stays), answered)
    path_z = incidents[0]["path_z"]
    closed = incidents[0]["status"] == "recovered" and path_z is not None
    problem = None
    if back is None:
        problem = f"not inside the clean leg's band within {WITHIN_STEPS} steps after step {answered}"
    elif not closed:
        problem = (
            f"the forecast made before the incident does not confirm it (status {incidents[0]['status']}, z {path_z})"
        )
    steps, distance = back or (None, None)
    return {
        "recovered": problem is None,
        "path_distance": distance,
        "band_steps": steps,
        "band_source": stays,
        "proof_detail": problem
        or f"inside the clean leg's band {steps} steps after step {answered}, {distance:.1f} sigma from its middle;"
        f" forecast z {path_z:.1f}",
    }


def steps_to_band(path: Mapping[int, float], clean: Mapping[int, float], since: int) -> tuple[int, float] | None:
    """Steps after ``since`` until the loss stays in the clean band, and its distance from the middle in robust sigma.

    The clean band is the running median of the clean losses, ``BAND_SIGMA`` robust sigma of single steps wide on each
    side. The loss is back where all but one of ``BAND_STEPS`` steps in a row lie inside and their median is within one
    sigma; None if that does not begin within :data:`WITHIN_STEPS` steps.
    """
    steps = np.array(sorted(clean))
    if len(steps) < 4 * NEIGHBOURS:
        return None
    losses = np.array([clean[s] for s in steps])
    middles = {int(s): float(np.median(losses[np.abs(steps - s) <= NEIGHBOURS])) for s in steps}
    residuals = np.array([clean[int(s)] - middles[int(s)] for s in steps if s >= since - 5 * NEIGHBOURS])
    sigma = 1.4826 * float(np.median(np.abs(residuals)))
    after = [s for s in sorted(path) if s > since and s in middles]
    distances = np.array([(path[s] - middles[s]) / sigma for s in after])
    for i in range(min(WITHIN_STEPS + 1, len(after) - BAND_STEPS + 1)):
        tested = distances[i : i + BAND_STEPS]
        if (np.abs(tested) > BAND_SIGMA).sum() <= 1 and abs(float(np.median(tested))) <= 1.0:
            return after[i] - since, abs(float(np.median(tested)))
    return None


# ------------------------------------------------------------------------------------------------------------ table


COLUMNS = (
    "fault",
    "injected",
    "detected",
    "delay",
    "detector",
    "verdict",
    "culprit",
    "action",
    "lost",
    "redone",
    "skipped/repeated",
    "proof",
)


def print_table(summary: Mapping[str, Any]) -> None:
    """The parade in one table, with what is not as it should be below it."""
    rows = [COLUMNS, *(cells(row) for row in summary["faults"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for i, row in enumerate(rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if i == 0:
            print("  ".join("-" * width for width in widths))
    print("lost: updates lost for good. redone: steps taken again after a rollback. skipped/repeated: samples.")
    identical = {True: "equals the run without the suite, bit for bit", None: "was not compared"}
    print(f"Clean run: {identical.get(summary['clean_bit_identical'], summary['clean_difference'])}.", end=" ")
    print(f"False incidents: {summary['false_incidents']}.")
    for leg, result in summary["legs"].items():
        if result["exit_code"]:
            print(f"Leg {leg} ended with exit code {result['exit_code']}.")
    for row in summary["faults"]:
        if not (row["recovered"] and row["as_expected"]):
            expected = (
                f"{row['expected_verdict']}, {short(row['expected_culprit'])}, {'/'.join(row['expected_action'])}"
            )
            print(f"{row['name']}: expected {expected}; proof: {row['proof_detail']}.")
    for incident in summary["false_incident_list"]:
        print(f"False incident in leg {incident['leg']} at step {incident['step']}: {incident['message']}")


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of the table as text."""
    mark = "" if row["recovered"] else "FAILED "
    words = (
        row["proof"]
        if row["proof"] != "band" or row.get("band_steps") is None
        else f"band in {row['band_steps']} steps"
    )
    return (
        row["name"],
        text(row["injected_step"]),
        text(row["detected_step"]),
        text(row["delay"]),
        text(row["detector"]),
        row["verdict"],
        short(row["culprit"]),
        "+".join(dict.fromkeys(row["action"])) or "-",
        text(row["applied_steps_lost"]),
        text(row["steps_redone"]),
        f"{'+'.join(row['sources_skipped']) or row['samples_skipped']}/{row['samples_repeated']}",
        f"{mark}{words}",
    )


def text(value: Any) -> str:
    return "-" if value is None else str(value)


def short(culprits: Sequence[str], width: int = 36) -> str:
    """Culprits in one cell: the first one, and how many more."""
    if not culprits:
        return "-"
    first = culprits[0] if len(culprits[0]) <= width else culprits[0][: width - 1] + "…"
    if len(culprits) == 2 and len(culprits[1]) < 12:
        return f"{first} {culprits[1]}"
    return first if len(culprits) == 1 else f"{first} +{len(culprits) - 1}"
