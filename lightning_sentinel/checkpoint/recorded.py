"""What the journal of an earlier process says about the steps that a resume trains again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..journal import JournalProblem, iter_events


@dataclass
class Recorded:
    """Attributes:
    attempt: Highest attempt of any step in the journal; -1 without one.
    last_step: Newest step in that attempt.
    steps: The first recorded steps after the checkpoint on its own path, by step.
    incidents: The newest state of each incident, by number.
    earlier_epochs: Sample ids of the step that ended with the batch ``at_batch``, by epoch.
    rate_changes: Steps at which a learning rate left its path; -1 where the run was changed on purpose.
    poisoned: Paths of checkpoints that hold what an incident has damaged, with the reason.
    """

    attempt: int = -1
    last_step: int = -1
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    incidents: dict[int, dict[str, Any]] = field(default_factory=dict)
    earlier_epochs: dict[int, list[str]] = field(default_factory=dict)
    rate_changes: set[int] = field(default_factory=set)
    poisoned: dict[str, str] = field(default_factory=dict)


def read_recorded(
    run_dir: Path | None, rank: int, *, step: int, attempt: int | None, steps: int, at_batch: int = -1
) -> Recorded:
    """Read this rank's journal once. ``steps`` says how many steps from ``step`` on are kept for the comparison.

    ``attempt=None``: of whichever attempt passed a step last. ``at_batch``: index of a batch in its epoch, see
    ``Recorded.earlier_epochs``.
    """
    found = Recorded()
    if run_dir is None:
        return found
    problems: list[JournalProblem] = []
    try:
        for event in iter_events(run_dir, rank=rank, problems=problems):
            _take(found, event, step, attempt, steps, at_batch)
    except OSError:  # no journal, or none that can be read: nothing to compare with
        return found
    return found


def _take(found: Recorded, event: dict[str, Any], step: int, attempt: int | None, steps: int, at_batch: int) -> None:
    name = event["event"]
    if name == "step":
        key = (int(event["attempt"]), int(event["step"]))
        if key > (found.attempt, found.last_step):
            found.attempt, found.last_step = key
        if attempt in (None, key[0]) and step <= key[1] < step + steps:
            found.steps[key[1]] = event
        if event.get("batch_idx") == at_batch and key[1] < step:
            epoch, ids = event.get("epoch"), event.get("sample_ids")
            if type(epoch) is int and (ids is None or isinstance(ids, list)):
                found.earlier_epochs[epoch] = list(ids or [])
    elif name == "lr.changed":
        found.rate_changes.add(int(event["step"]))
    elif name.startswith("experiment."):
        found.rate_changes.add(-1)
    elif name == "checkpoint.poisoned" and "path" in event:
        since = "" if event.get("since_step") is None else f"since step {event['since_step']}: "
        found.poisoned.setdefault(str(event["path"]), f"{since}{event.get('reason', '')}")
    elif name.startswith("incident.") and isinstance(event.get("incident"), dict):
        found.incidents[int(event["incident"]["number"])] = event["incident"]
