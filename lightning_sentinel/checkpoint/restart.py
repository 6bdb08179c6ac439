"""Is a resumed run where it was? Saved against live, pure: schedule, rates, loss scale, update counts, sample ids.

Example:
    >>> saved = Plan(rates=((1e-3,),), schedulers=((("last_epoch", 12),),), scale=None, updates=(12,))
    >>> live = Plan(rates=((1e-2,),), schedulers=((("last_epoch", 0),),), scale=None, updates=(12,))
    >>> [finding.culprits for finding in differences(saved, live, step=12)]
    [('scheduler',)]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..incidents import Finding, FindingKind, Severity

DETECTOR = "ForensicCheckpoint"
_POSITION = ("last_epoch", "_step_count")


@dataclass(frozen=True)
class Plan:
    """What an optimizer step depends on besides weights, moments and data; the same on every rank.

    Attributes:
        rates: Learning rate of each parameter group, by optimizer.
        schedulers: Position of each scheduler, as (name, count) pairs; empty where it has none.
        scale: Loss scale, or None without a scaler.
        updates: Largest update count of each optimizer's state; None where it keeps none.
    """

    rates: tuple[tuple[float, ...], ...]
    schedulers: tuple[tuple[tuple[str, int], ...], ...]
    scale: float | None
    updates: tuple[int | None, ...]

    @classmethod
    def of(
        cls,
        optimizers: Iterable[Mapping[str, Any]],
        schedulers: Iterable[Mapping[str, Any]],
        precision: Mapping[str, Any],
    ) -> Plan:
        """From state dicts, live or saved."""
        optimizers = list(optimizers)
        return cls(
            rates=tuple(tuple(float(g["lr"]) for g in o["param_groups"]) for o in optimizers),
            schedulers=tuple(tuple((k, int(s[k])) for k in _POSITION if k in s) for s in schedulers),
            scale=float(precision["scale"]) if "scale" in precision else None,
            updates=tuple(_updates(o["state"].values()) for o in optimizers),
        )

    @classmethod
    def of_file(cls, checkpoint: Mapping[str, Any]) -> Plan | None:
        """From an ordinary Lightning checkpoint; None where it holds no optimizer state that can be read.

        Lightning keeps the scaler's state under the class name of the precision plugin and leaves it out silently where
        that name is another one now, so it is looked for by what it holds.
        """
        optimizers, schedulers = checkpoint.get("optimizer_states"), checkpoint.get("lr_schedulers", [])
        if not isinstance(optimizers, list) or not all(
            isinstance(o, Mapping) and "param_groups" in o for o in optimizers
        ):
            return None
        scalers = (v for v in checkpoint.values() if isinstance(v, Mapping) and {"scale", "growth_factor"} <= v.keys())
        return cls.of(optimizers, schedulers, next(scalers, {}))


def differences(saved: Plan, live: Plan, step: int, *, compare_rates: bool = True) -> list[Finding]:
    """One finding per thing that has jumped over a restart.

    A rate that differs because its scheduler does is the scheduler's. ``compare_rates=False`` leaves out schedule and
    rates, where something between the checkpoint and here may have moved them rightly.
    """
    findings = []
    if compare_rates and saved.schedulers != live.schedulers:
        findings.append(
            _finding(
                "scheduler",
                step,
                f"the schedule stands at {_words(live.schedulers)}, the checkpoint at {_words(saved.schedulers)};"
                f" rates {_flat(live.rates)} instead of {_flat(saved.rates)}",
                {"saved": _plain(saved.schedulers), "live": _plain(live.schedulers)}
                | {"saved_rates": _flat(saved.rates), "live_rates": _flat(live.rates)},
                _distance(saved.rates, live.rates),
            )
        )
    elif compare_rates and saved.rates != live.rates:
        findings.append(
            _finding(
                "optimizer:lr",
                step,
                f"the learning rates are {_flat(live.rates)}, in the checkpoint {_flat(saved.rates)}",
                {"saved_rates": _flat(saved.rates), "live_rates": _flat(live.rates)},
                _distance(saved.rates, live.rates),
            )
        )
    if saved.scale != live.scale:
        findings.append(
            _finding(
                "optimizer:loss_scale",
                step,
                f"the loss scale is {live.scale}, in the checkpoint {saved.scale}",
                {"saved": saved.scale, "live": live.scale},
                abs((live.scale or 0.0) - (saved.scale or 0.0)),
            )
        )
    if saved.updates != live.updates:
        findings.append(
            _finding(
                "optimizer:step",
                step,
                f"the optimizers have counted {list(live.updates)} updates, in the checkpoint {list(saved.updates)}",
                {"saved": list(saved.updates), "live": list(live.updates)},
                max(abs((a or 0) - (b or 0)) for a, b in zip(saved.updates, live.updates, strict=False)),
            )
        )
    return findings


def rates_finding(step: int, recorded: Sequence[float], live: Sequence[float]) -> Finding:
    """The rates are not those that the journal has at this step. An alarm: the plan may have been changed on purpose."""
    finding = _finding(
        "scheduler",
        step,
        f"the learning rates are {list(live)}, the journal has {list(recorded)} at this step",
        {"saved_rates": list(recorded), "live_rates": list(live)},
        _distance([recorded], [live]),
    )
    return replace(finding, severity=Severity.ALARM)


def cursor_finding(
    step: int,
    expected: Sequence[str],
    live: Sequence[str],
    ranks: Sequence[int],
    source: str,
    note: str = "",
    what: str = "the first batch after the restart is not the one",
) -> Finding:
    """The data is not where it was: ``expected`` and ``live`` are sample ids of the first batch, or of what ``what`` says;
    ``note`` says more."""
    lost = [i for i in expected if i not in set(live)]
    return _finding(
        "cursor",
        step,
        f"{note}{what} that {source}: expected {list(expected[:4])}, got {list(live[:4])}; {len(lost)} samples would be"
        f" lost: {lost[:16]}",
        {"expected": list(expected[:64]), "live": list(live[:64]), "lost": lost[:64]},
        float(len(lost)),
        tuple(ranks),
        unit="samples",
    )


def dropped_cursor_finding(step: int) -> Finding:
    return _finding(
        "cursor",
        step,
        "the checkpoint carries a data cursor that was never applied: the training loader was set up before Lightning"
        " read the checkpoint (as `estimated_stepping_batches` in `configure_optimizers` does), and starts over. Resume from"
        " a suite checkpoint (resume='auto'), or compute the number of steps without it",
        {},
        1.0,
        unit="loaders",
    )


def empty_epoch_finding(step: int, epoch: int) -> Finding:
    return _finding(
        "cursor",
        step,
        f"epoch {epoch} trained no batch: the loader was put back to the end of an epoch and had nothing left. Resume from"
        " a suite checkpoint (resume='auto'), which keeps the position after an epoch's last batch",
        {"epoch": epoch},
        1.0,
        unit="epochs",
    )


def ids_agree(recorded: Sequence[str], live: Sequence[str], *, mid_accumulation: bool) -> bool:
    """Whether ``live``, the ids of a step's first batch, are those of the recorded step.

    The recorded ids are those of the whole step, in order; after a resume in the middle of an accumulation the first
    batch is one of the later ones.

    Example:
        >>> ids_agree(["a", "b", "c", "d"], ["c", "d"], mid_accumulation=True)
        True
        >>> ids_agree(["a", "b", "c", "d"], ["c", "d"], mid_accumulation=False)
        False
    """
    recorded, live = list(recorded), list(live)
    starts = range(0, len(recorded) - len(live) + 1) if mid_accumulation else [0]
    return any(recorded[s : s + len(live)] == live for s in starts)


def _finding(
    culprit: str,
    step: int,
    message: str,
    evidence: Mapping[str, Any],
    score: float,
    ranks: tuple[int, ...] = (),
    unit: str = "",
) -> Finding:
    return Finding(
        kind=FindingKind.RESTART_JUMP,
        detector=DETECTOR,
        step=step,
        score=score,
        threshold=0.0,
        message=f"restart-aligned, {culprit}: {message}",
        severity=Severity.INCIDENT,
        ranks=ranks,
        culprits=(culprit,),
        unit=unit,
        restart_aligned=True,
        evidence=evidence,
    )


def _updates(states: Iterable[Mapping[str, Any]]) -> int | None:
    counts = [int(s["step"]) for s in states if "step" in s]
    return max(counts, default=None)


def _flat(rates: Sequence[Sequence[float]]) -> list[float]:
    return [rate for group in rates for rate in group]


def _plain(schedulers: Sequence[Sequence[tuple[str, int]]]) -> list[dict[str, int]]:
    return [dict(s) for s in schedulers]


def _words(schedulers: Sequence[Sequence[tuple[str, int]]]) -> str:
    return ", ".join(str(dict(s).get("last_epoch", "no position")) for s in schedulers) or "nothing"


def _distance(saved: Sequence[Sequence[float]], live: Sequence[Sequence[float]]) -> float:
    return max((abs(a - b) for a, b in zip(_flat(saved), _flat(live), strict=False)), default=0.0)
