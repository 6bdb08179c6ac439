"""Looks at the run before its first step, and says what is likely to break it later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from .. import preflight as checks
from ..data.identity import is_integer, parts
from ..incidents import Finding
from ..limits import check_limits
from ..preflight import CHECKS, NOTE, WARNING, OutputWidth, Remark, Weights
from ..record import StepRecord
from ..state.tree import local
from .base import SentinelCallback, find_callback, gather_objects

log = logging.getLogger("lightning_sentinel")

SHOWN = 32  # classes up to this many are no vocabulary that a loss is worth comparing with


class PreflightError(ValueError):
    """Raised by :class:`Preflight` with ``strict=True``; lists everything that was found."""

    def __init__(self, remarks: Sequence[Remark]) -> None:
        lines = [f"{i}. {r.check}: {r.message}" for i, r in enumerate(remarks, 1)]
        count = f"{len(remarks)} problem{'s' if len(remarks) > 1 else ''}"
        super().__init__("\n".join([f"Preflight found {count}; strict=True refuses to train:", *lines]))
        self.remarks = tuple(remarks)


@dataclass
class _Seen:
    """What one rank tells the others."""

    remarks: list[Remark]
    weights: Weights
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, str] = field(default_factory=dict)


class Preflight(SentinelCallback):
    """Checks the run at its start. Warns by default, once; with ``strict`` it refuses.

    ==================  ==================================================================================================
    check               what is looked at
    ==================  ==================================================================================================
    ``parameters``      finite; no matrix with one value everywhere; no zero matrix without a gradient in the first step
    ``warmup``          the rate of Adam and its relatives rises over the first steps
    ``clipping``        gradients are clipped
    ``epsilon``         no epsilon that vanishes in the dtype in which it is added
    ``coverage``        every trainable parameter is in an optimizer, once
    ``loader``          the data position can be saved and put back
    ``run_folder``      writable, with space for ``ForensicCheckpoint``'s checkpoints
    ``ranks``           same versions, configuration and initial weights on every rank
    ``initial_loss``    the first loss is that of a uniform guess, ``ln(vocabulary)``
    ==================  ==================================================================================================

    All but the last two parts that need the first step are made before it, with one exchange between the ranks and one
    read by the host. The first loss and the gradients of zero matrices are looked at before the first update.

    Example:
        >>> from lightning_sentinel import Preflight
        >>> Preflight(strict=True, skip=["clipping"]).skip
        ('clipping',)

    Journalled: ``preflight.warning`` and ``preflight.note`` (``check``, ``message``, ``names``, ``ranks``) once each,
    ``preflight.done`` with the outcome of each check and the seconds it took. Nothing is logged to the loggers.

    Args:
        strict: Raise :class:`PreflightError` with all warnings instead of training on. Notes never refuse.
        skip: Names of checks that are left out; None for none of them.
        vocabulary_size: For the first loss. None takes that of RankTelemetry or BatchValidator, an attribute of the module
            (``vocab_size``, also of its ``config``), or else the last dimension of the model's output.
        checkpoints: Checkpoints that must fit into the run folder. None takes what ForensicCheckpoint keeps, and the one that
            it is writing; without ForensicCheckpoint none.
    """

    rewinds = False

    def __init__(
        self,
        strict: bool = False,
        skip: Sequence[str] | None = None,
        vocabulary_size: int | None = None,
        checkpoints: int | None = None,
    ) -> None:
        unknown = sorted(set(skip or ()) - set(CHECKS))
        if unknown:
            raise ValueError(f"Preflight: skip names {', '.join(unknown)}, expected some of {', '.join(CHECKS)}.")
        check_limits("Preflight", locals())
        self.strict, self.skip = strict, tuple(skip or ())
        self.vocabulary_size, self.checkpoints = vocabulary_size, checkpoints
        self.remarks: list[Remark] = []
        self._forget()

    def _forget(self) -> None:
        self._fit: tuple[Trainer, LightningModule] | None = None
        self._zero: set[str] = set()
        self._width: OutputWidth | None = None
        self._first = False

    # ------------------------------------------------------------------------------------------------ before the start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        started = time.perf_counter()
        self._forget()
        self._fit = (trainer, pl_module)
        self._first = trainer.global_step == 0
        everyone = gather_objects(trainer, [self._look(trainer, pl_module)])
        self.remarks = checks.merged([seen.remarks for seen in everyone])
        if "parameters" not in self.skip and self._first:
            shapes = {n: p.dim() for n, p in pl_module.named_parameters()}
            found = checks.parameters(checks.over_ranks([s.weights for s in everyone]), shapes)
            self._zero = {n for r in found if r.level == NOTE for n in r.names}
            self.remarks += found
        if "ranks" not in self.skip and trainer.world_size > 1:
            self.remarks += checks.ranks(
                [s.versions for s in everyone],
                [s.config for s in everyone],
                [s.weights.bits for s in everyone],
            )
        self._say(trainer, self.remarks)
        levels = {c: "skipped" if c in self.skip else "passed" for c in CHECKS}
        for remark in sorted(self.remarks, key=lambda r: r.level):  # a warning outweighs a note
            levels[remark.check] = remark.level
        if "initial_loss" not in self.skip:
            levels["initial_loss"] = "in the first step" if self._first else "not a first step"
        self.context(trainer).write(
            trainer,
            "preflight.done",
            checks=levels,
            warnings=sum(r.level == WARNING for r in self.remarks),
            seconds=round(time.perf_counter() - started, 4),
        )
        self._refuse(trainer, self.remarks)

    def _look(self, trainer: Trainer, module: LightningModule) -> _Seen:
        """Every check of this rank alone. One that fails is a note: looking must not be what ends a run."""
        remarks: list[Remark] = []
        config, folder = self._config(trainer), str(self.context(trainer).run_dir or "")
        local_checks: dict[str, Callable[[], list[Remark]]] = {
            "warmup": lambda: checks.warmup(trainer, module),
            "clipping": lambda: checks.clipping(trainer, module),
            "epsilon": lambda: checks.epsilon(trainer, module),
            "coverage": lambda: checks.coverage(trainer, module),
            "loader": lambda: checks.loader(trainer, module),
            "run_folder": lambda: self._run_folder(trainer, module),
        }
        for name, check in local_checks.items():
            if name not in self.skip:
                remarks += _guarded(name, check, remarks)
        seen = _Seen(remarks, Weights({}, None))
        if not {"parameters", "ranks"} <= set(self.skip):
            weights = _guarded("parameters", lambda: self._weights(trainer, module), remarks)
            seen.weights = weights if isinstance(weights, Weights) else seen.weights
        if "ranks" not in self.skip and trainer.world_size > 1:
            from .run_journal import versions

            seen.versions = versions()
            settings = _guarded("ranks", lambda: checks.settings(trainer, config, module, folder), remarks)
            seen.config = dict(settings) if isinstance(settings, dict) else {}
        return seen

    @staticmethod
    def _weights(trainer: Trainer, module: LightningModule) -> Weights:
        return checks.weights_of(module, trainer.strategy.root_device, compare=trainer.world_size > 1)

    def _config(self, trainer: Trainer) -> Mapping[str, Any] | None:
        """The run's configuration, where a callback was given it."""
        from .forensic_checkpoint import ForensicCheckpoint
        from .run_journal import RunJournal, plain_config

        holders = (find_callback(trainer, RunJournal), find_callback(trainer, ForensicCheckpoint))
        given = next((h.config for h in holders if h is not None and h.config is not None), None)
        return plain_config(given)

    def _run_folder(self, trainer: Trainer, module: LightningModule) -> list[Remark]:
        from .forensic_checkpoint import ForensicCheckpoint

        if trainer.local_rank != 0 or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return []
        keeper = find_callback(trainer, ForensicCheckpoint)
        folder = self.context(trainer).run_dir
        if folder is None and keeper is not None and keeper.run_dir is not None:
            folder = Path(keeper.run_dir)
        if folder is None:
            return []
        count = self.checkpoints if self.checkpoints is not None else keeper.keep + 1 if keeper is not None else 0
        return checks.run_folder(folder, checks.checkpoint_bytes(trainer, module), count)

    # ------------------------------------------------------------------------------------------------- the first step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._first or self._width is not None or "initial_loss" in self.skip:
            return
        if self._known_vocabulary(trainer, pl_module) is None and not checks.is_compiled(pl_module):
            targets = _class_targets(batch)
            if targets is not None:
                self._width = OutputWidth(pl_module, targets)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._zero and self._first:
            self._look_at_zeros(trainer, pl_module, optimizer)

    def _look_at_zeros(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(n, p) for n, p in module.named_parameters() if n in self._zero and id(p) in mine]
        self._zero -= {n for n, _ in named}
        if not named:
            return
        alive = [
            torch.zeros((), dtype=torch.bool, device=trainer.strategy.root_device)
            if p.grad is None
            else (_values(p.grad) != 0).any().to(trainer.strategy.root_device)
            for _, p in named
        ]
        everyone = gather_objects(trainer, [torch.stack(alive).tolist()])
        dead = [n for (n, _), column in zip(named, zip(*everyone, strict=True), strict=True) if not any(column)]
        if dead:
            self._later(trainer, [checks.zero_forever(dead)])

    def observe(self, record: StepRecord) -> list[Finding]:
        """Looks at the first record's loss. Called by RankTelemetry at the gate; makes no findings."""
        if self._fit is None or not self._first:
            return []
        self._first = False
        trainer, module = self._fit
        vocabulary = self._known_vocabulary(trainer, module)
        if self._width is not None:
            vocabulary = vocabulary or self._width.width
            self._width.remove()
            self._width = None
        # A Trainer that resumes may have put its state back after this fit's start.
        if "initial_loss" in self.skip or record.step != 0 or record.attempt != 0 or record.restart_step is not None:
            return []
        if trainer.world_size > 1:  # only together; rank 0's word counts
            (vocabulary, *_) = gather_objects(trainer, [vocabulary])
        if vocabulary is not None and vocabulary > SHOWN:
            self._later(trainer, checks.initial_loss(record.mean_loss, vocabulary))
        return []

    def _known_vocabulary(self, trainer: Trainer, module: LightningModule) -> int | None:
        from .batch_validator import BatchValidator
        from .rank_telemetry import RankTelemetry

        told = [self.vocabulary_size]
        told += [
            getattr(find_callback(trainer, kind), "vocabulary_size", None) for kind in (RankTelemetry, BatchValidator)
        ]
        told += [getattr(owner, "vocab_size", None) for owner in (module, getattr(module, "config", None))]
        return next((v for v in told if isinstance(v, int) and v > 1), None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (self._first or self._width is not None) and trainer.global_step > 0:
            self._first = False
            self._stop_looking()

    def idle_hooks(self, trainer: Trainer) -> Collection[str]:
        looks = self._first or self._width is not None
        return () if looks else ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_looking()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_looking()
        self._fit = None

    def _stop_looking(self) -> None:
        if self._width is not None:
            self._width.remove()
            self._width = None

    # -------------------------------------------------------------------------------------------------------- telling

    def _later(self, trainer: Trainer, remarks: list[Remark]) -> None:
        self.remarks += remarks
        self._say(trainer, remarks)
        self._refuse(trainer, remarks)

    def _say(self, trainer: Trainer, remarks: Sequence[Remark]) -> None:
        context = self.context(trainer)
        for remark in remarks:
            fields = remark.to_dict()
            context.write(trainer, f"preflight.{fields.pop('level')}", **fields)
            shown = trainer.is_global_zero and remark.level == WARNING and not self.strict
            if shown and not _said_elsewhere(trainer, remark):
                log.warning("Preflight, %s: %s", remark.check, remark.message)

    def _refuse(self, trainer: Trainer, remarks: Sequence[Remark]) -> None:
        refused = [r for r in remarks if r.level == WARNING]
        if self.strict and refused:
            self.context(trainer).journal.flush()
            raise PreflightError(refused)


def _guarded(name: str, check: Callable[[], Any], remarks: list[Remark]) -> Any:
    try:
        return check()
    except Exception as error:  # the user's modules, loaders and file systems: they may fail in any way
        remarks.append(Remark(name, f"This could not be looked at: {type(error).__name__}: {error}", NOTE))
        return []


def _said_elsewhere(trainer: Trainer, remark: Remark) -> bool:
    """Whether another callback of this Trainer warns of the same thing at the start."""
    from .rollback import Rollback
    from .run_journal import RunJournal

    if remark.check == "loader":
        return find_callback(trainer, Rollback) is not None
    unwritable = remark.check == "run_folder" and checks.UNWRITABLE in remark.message
    return unwritable and find_callback(trainer, RunJournal) is not None


def _class_targets(batch: Any) -> Tensor | None:
    """The batch's integer targets, where it has exactly one set of them."""
    found = [p.targets for p in parts(batch) if p.targets is not None and is_integer(p.targets)]
    return found[0] if len(found) == 1 and found[0].dim() >= 1 else None


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else local(grad)
