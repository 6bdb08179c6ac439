"""What all callbacks of the suite have in common."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from lightning.pytorch import Callback, Trainer

from ..collectives import gather_object
from ..context import context_of
from ..data.quarantine import FILE_NAME, QuarantineLedger
from ..detectors.base import Detector
from ..incidents import Finding
from ..record import StepRecord
from ..state import lightning_private as private

C = TypeVar("C", bound=Callback)

_LOG = logging.getLogger("lightning_sentinel")
_OTHER_RANKS = logging.getLogger("lightning_sentinel.other_ranks")
_OTHER_RANKS.setLevel(logging.CRITICAL)


def find_callback(trainer: Trainer, kind: type[C]) -> C | None:
    """The Trainer's first callback of this type, or None."""
    return next((c for c in trainer.callbacks if isinstance(c, kind)), None)  # type: ignore[attr-defined]


def gather_objects(trainer: Trainer, mine: list[Any]) -> list[Any]:
    """All ranks' lists, joined in rank order, on every rank. For rare events only: it pickles and waits."""
    return [item for part in gather_object(mine, trainer.world_size) for item in part]


def log_of(trainer: Trainer) -> logging.Logger:
    """Where a decision that all ranks make alike is said: rank 0 speaks, the others are silent unless asked to speak, too.

    Example:
        ``logging.getLogger("lightning_sentinel.other_ranks").setLevel("INFO")`` asks them.
    """
    return _LOG if trainer.is_global_zero else _OTHER_RANKS


def look(trainer: Trainer) -> str:
    """The end of a log message: the command that shows more; empty without a run folder."""
    run_dir = context_of(trainer).run_dir
    return "" if run_dir is None else f" Look: lightning-sentinel report {shlex.quote(str(run_dir))}"


def ledger_of(trainer: Trainer) -> QuarantineLedger:
    """The run's quarantine ledger, opened in the run folder on first use (in memory only where there is none)."""
    context = context_of(trainer)
    if context.ledger is None:
        path = None if context.run_dir is None else context.run_dir / FILE_NAME
        context.ledger = QuarantineLedger(path, write=trainer.is_global_zero)
    return context.ledger


def apply_quarantine(trainer: Trainer) -> None:
    """Who was quarantined in an earlier run of this folder, or by a person since, is not drawn; for ``on_train_start``."""
    from ..state.cursor import apply_ledger

    ledger, context = ledger_of(trainer), context_of(trainer)
    if not ledger.active:
        return
    told = context.scratch.setdefault("quarantine_refused", set())
    for problem in apply_ledger(trainer, ledger):
        if problem not in told:
            told.add(problem)
            context.write(trainer, "quarantine.refused", reason=problem)


def watch_lightning_files(trainer: Trainer) -> Callable[[], None]:
    """Take note of every file that ``trainer.save_checkpoint`` writes, with its step; returns what undoes it.

    ``ModelCheckpoint`` itself does not remember the files that it keeps without a ``monitor``.
    """
    if "save_checkpoint" in vars(trainer):
        return lambda: None
    save, written = trainer.save_checkpoint, context_of(trainer).scratch.setdefault("lightning_files", {})

    def save_checkpoint(filepath: Any, *args: Any, **options: Any) -> None:
        save(filepath, *args, **options)
        written[str(filepath)] = trainer.global_step

    trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]
    return lambda: vars(trainer).pop("save_checkpoint", None)


def poison_lightning_files(trainer: Trainer, since_step: int, incident: int | None, reason: str) -> None:
    """Journal that Lightning's own files with an update of ``since_step`` or later hold the damage; each once."""
    context = context_of(trainer)
    written: dict[str, int] = context.scratch.get("lightning_files", {})
    for path in sorted(p for p, step in written.items() if step > since_step):
        del written[path]
        if "://" in path or Path(path).exists():  # rotation may have removed it since
            context.write(
                trainer, "checkpoint.poisoned", path=path, reason=reason, since_step=since_step, incident=incident
            )


def note_restart(trainer: Trainer) -> None:
    """Note where ``fit(ckpt_path=...)`` goes on: for ``on_train_start`` of each callback that needs to know."""
    if trainer.ckpt_path is not None and trainer.global_step > 0:
        context_of(trainer).restart_step = trainer.global_step


class SentinelCallback(Callback):
    """Base of the suite's callbacks.

    Attributes:
        rewinds: Whether a rollback takes the callback's state back with it.
        fresh_state: Whether its ``state_dict`` gives nothing away that changes later, so that a snapshot in memory may keep
            it as it is; of a callback around a detector, the detector's type for which that is so.
        compares_ranks: Whether its ``observe`` has nothing to say of a run on one rank; likewise. See :func:`declares`.
    """

    rewinds = True
    fresh_state: ClassVar[bool | type] = False
    compares_ranks: ClassVar[bool | type] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Lightning asks for it at every hook of every callback: as a plain attribute, unless a subclass has its own property.
        if isinstance(cls.state_key, str) or cls.state_key is SentinelCallback.state_key:
            cls.state_key = f"lightning_sentinel.{cls.__qualname__}"  # type: ignore[method-assign, assignment]

    @property
    def state_key(self) -> str:
        return f"lightning_sentinel.{type(self).__qualname__}"

    context = staticmethod(context_of)

    def idle_hooks(self, trainer: Trainer) -> Collection[str]:
        """Those of :data:`STEP_HOOKS` that it has and that do nothing in the rest of this fit, once a step has been made."""
        return ()


# Lightning's hooks of one training step.
STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def rest_idle_hooks(trainer: Trainer) -> None:
    """Have Lightning pass over those hooks of the suite's callbacks that do nothing, until :func:`wake_hooks`.

    Calling one that does nothing takes 2 us (its profiler and the callback's key), and of a step's 78 two thirds are
    such. Lightning calls a hook where it is callable: a callback's own attribute that is None stands before its class.
    """
    if not private.passes_over_none():
        return
    for callback in _ours(trainer):
        own, kind = vars(callback), type(callback)
        # What a class says of its hooks does not hold for one that a subclass has put in its place.
        teller = next(c for c in kind.__mro__ if "idle_hooks" in vars(c))
        idle = callback.idle_hooks(trainer)
        for hook in STEP_HOOKS:
            found = getattr(kind, hook)
            nothing = found is getattr(Callback, hook) or (hook in idle and found is getattr(teller, hook))
            if nothing and hook not in own:
                own[hook] = None
                own.setdefault(_RESTING, []).append(hook)


def wake_hooks(trainer: Trainer) -> None:
    """Undo :func:`rest_idle_hooks`, also what an earlier fit has left behind."""
    for callback in _ours(trainer):
        own = vars(callback)
        for hook in own.pop(_RESTING, ()):
            if own.get(hook, own) is None:  # else somebody has put a hook there since
                del own[hook]


_RESTING = "_resting_hooks"


def _ours(trainer: Trainer) -> list[SentinelCallback]:
    return [c for c in trainer.callbacks if isinstance(c, SentinelCallback)]  # type: ignore[attr-defined]


def declares(callback: Any, what: str) -> bool:
    """Whether the class of this callback declares it, of itself and of the very detector that it holds.

    Nothing is inherited: a subclass, or a detector of the user's own, may do more.
    """
    declared = vars(type(callback)).get(what, False)
    return declared is True or (bool(declared) and type(callback.detector) is declared)


def needs_telemetry(trainer: Trainer, callback: Callback, stage: str) -> None:
    """Raise where a callback that judges records stands in a Trainer in which nobody gathers any."""
    from .rank_telemetry import RankTelemetry

    if stage == "fit" and find_callback(trainer, RankTelemetry) is None:
        raise ValueError(
            f"{type(callback).__name__} needs RankTelemetry, which gathers the record that it judges; the Trainer has"
            " none. Add lightning_sentinel.RankTelemetry() to the Trainer's callbacks, or use"
            " lightning_sentinel.default_callbacks()."
        )


class DetectorCallback(SentinelCallback):
    """A callback around one pure detector. ``RankTelemetry`` calls :meth:`observe` at the gate."""

    detector: Detector

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        needs_telemetry(trainer, self, stage)

    def observe(self, record: StepRecord) -> list[Finding]:
        """Findings on one record, the same on every rank."""
        return self.detector.observe(record)

    def state_dict(self) -> dict[str, Any]:
        return self.detector.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.detector.load_state_dict(state_dict)
