"""The replay's own verdict: what its experiments alone say of the cause, beside what the run's examination said.

It names less than the triage of the run, which had snapshots, other batches and other ranks to compare with. Where one step
computed again leaves several causes open, the verdict is *undetermined* and says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..incidents import Finding, Verdict, VerdictKind

if TYPE_CHECKING:
    from .replay import RankReplay, ReplayReport

_GIVEN = ("batch", "parameter", "buffer")  # what was given to the step explains what was made in it


def verdict_of(
    report: ReplayReport, invalid: Sequence[Finding], *, nonfinite_recorded: bool, doubts: Sequence[str]
) -> Verdict:
    """What the replay convicts, a pure function of what it found.

    Args:
        report: All that was computed.
        invalid: What is wrong with the step's inputs by the checks of ``BatchValidator``.
        nonfinite_recorded: Whether a loss or a gradient of the step was not finite in the run, on any rank.
        doubts: Sentences on what was not as in the run; while there are any, a difference from the run proves nothing.
    """
    if invalid:
        culprits = tuple(dict.fromkeys(c for f in invalid for c in f.culprits))
        message = invalid[0].message.rstrip(".")
        return Verdict(VerdictKind.DATA, culprits, f"the step's inputs are not valid: {message}.")
    raised = next((r for r in report.ranks if r.outcome == "raised"), None)
    if raised is not None:
        return _undetermined(f"training_step raises {raised.computed[0].raised}, which names no cause by itself.")
    broken = [r for r in report.ranks if not r.computed[0].finite]
    if broken:
        return _nonfinite(broken, nonfinite_recorded)
    if nonfinite_recorded:
        return _gone([r for r in report.ranks if not r.recorded_finite], doubts)
    return _finite(report, doubts)


def _nonfinite(broken: Sequence[RankReplay], recorded: bool) -> Verdict:
    """By the first non-finite value, as the armed replay found it here."""
    if not recorded:
        return _undetermined("the step is not finite only here, so this is not what the run computed.")
    traced = [r for r in broken if r.computed[0].first]
    row = min(traced, key=lambda r: ((r.computed[0].first or {})["kind"] not in _GIVEN, r.rank), default=None)
    first = (row.computed[0].first or {}) if row is not None else {}
    match first.get("kind"):
        case "operator" | "constant":
            module = first["module"] or "training_step"
            kind, culprits, sentence = (
                VerdictKind.NUMERICS,
                [f"module:{module}"],
                "the first non-finite value is made there.",
            )
        case "batch":
            assert row is not None
            named = first["samples"] or row.samples[first["micro_batch"]]
            kind, culprits = VerdictKind.DATA, [f"sample:{s}" for s in named]
            sentence = f"{first['operator']} of the batch is not finite before the step."
        case "parameter" | "buffer":
            kind, culprits = VerdictKind.NUMERICS, [f"{first['kind']}:{first['operator']}"]
            sentence = "it is not finite before the step."
        case _:
            return _undetermined("the step is not finite again, but where that begins was not found.")
    return Verdict(kind, tuple(culprits), sentence, reproducible=True)


def _gone(rows: Sequence[RankReplay], doubts: Sequence[str]) -> Verdict:
    """Recorded as not finite, finite here."""
    if doubts:
        return _undetermined(
            f"not reproduced, but the replay may differ from the step: {doubts[0]}", reproducible=False
        )
    if not rows:
        return _undetermined(
            "not reproduced: the run's gradient was not finite, every replayed rank's own is; this replay does not tell"
            " the reduction from the hardware.",
            reproducible=False,
        )
    culprits = tuple(f"rank:{r.rank}" for r in rows)
    sentence = "not reproduced from the recorded weights, data and random state: transient, or state outside of them."
    return Verdict(VerdictKind.INFRASTRUCTURE, culprits, sentence, reproducible=False)


def _finite(report: ReplayReport, doubts: Sequence[str]) -> Verdict:
    """Finite in the run, finite here."""
    if report.module is not None and report.module.wrong:
        words = "computed alone, it is farther from float64 than rounding explains."
        return Verdict(VerdictKind.NUMERICS, (f"module:{report.module.path}",), words, reproducible=True)
    if report.update is not None and report.update.broken_state:
        keys = tuple(dict.fromkeys(f"optimizer:{what}" for what, _, _ in report.update.broken_state))
        return Verdict(VerdictKind.OPTIMIZATION, keys, "no sequence of updates can have made this state.")
    # A one-off of the hardware is convicted only where it would explain the incident: the loss is lower without it.
    lower = [
        r for r in report.ranks if r.outcome == "different" and math.fsum(r.computed[0].losses) < math.fsum(r.recorded)
    ]
    if lower and not doubts:
        words = "from the recorded weights, data and random state the loss is lower: the run computed something else."
        return Verdict(VerdictKind.INFRASTRUCTURE, tuple(f"rank:{r.rank}" for r in lower), words, reproducible=False)
    if report.outcome == "different":
        why = doubts[0] if doubts else "the loss is not lower here."
        return _undetermined(f"the loss is another one, but that convicts nobody: {why}", reproducible=False)
    if report.reduction is not None and not report.reduction["equal"]:
        return _undetermined(
            "the ranks' gradients do not give the recorded norm; which rank's, one process cannot tell."
        )
    return _undetermined(
        "the step comes out as recorded, so data or state made it what it was; one step alone does not tell them apart.",
        reproducible=True,
    )


def _undetermined(sentence: str, reproducible: bool | None = None) -> Verdict:
    return Verdict(VerdictKind.UNDETERMINED, (), sentence, reproducible=reproducible)


def agreement(mine: Verdict, recorded: Verdict) -> bool | None:
    """Whether two verdicts name the same kind and a common culprit; None where one of them is undetermined.

    Example:
        >>> agreement(Verdict(VerdictKind.DATA, ("sample:a",)), Verdict(VerdictKind.DATA, ("sample:a", "sample:b")))
        True
        >>> agreement(Verdict(VerdictKind.DATA, ("sample:a",)), Verdict(VerdictKind.NUMERICS, ("module:b",)))
        False
        >>> agreement(Verdict(VerdictKind.DATA, ("sample:a",)), Verdict(VerdictKind.DATA))  # hard data, nobody's fault
        False
    """
    if VerdictKind.UNDETERMINED in (mine.kind, recorded.kind):
        return None
    named = mine.culprits == recorded.culprits or bool(set(mine.culprits) & set(recorded.culprits))
    return mine.kind is recorded.kind and named


def in_words(verdict: Verdict) -> str:
    """Kind and culprits.

    Example:
        >>> in_words(Verdict(VerdictKind.NUMERICS, ("module:a",)))
        'numerics module:a'
    """
    return f"{verdict.kind} {', '.join(verdict.culprits)}".strip()
