"""Looks at every training batch before the forward: is it well-formed, and has it been seen before?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from numpy.typing import NDArray
from torch import Tensor

from ..data.identity import IGNORE_INDEX, Part, SampleIdFn, has_own_ids, is_integer, parts, sample_ids
from ..data.seen import SeenSamples
from ..incidents import Finding, FindingKind, Severity
from ..limits import check_limits
from .base import SentinelCallback, apply_quarantine, find_callback, ledger_of

NAMED = 8  # samples written out in a message
LASTING_REPEATS = 3  # batches in a row, half of each repeated, from which repeats are an incident


@dataclass(frozen=True)
class _Check:
    """One check of one part: a flag for each sample, and how to describe the first element that is flagged."""

    name: str
    flags: Tensor  # [B] bool
    wrong: Tensor  # the elements at fault, [B, ...] bool
    values: Tensor
    bound: str
    severity: Severity = Severity.INCIDENT
    repair: Literal["tokens", "targets", ""] = ""


class BatchValidator(SentinelCallback):
    """Checks each training batch on its own rank before the forward, and names samples, positions and values.

    Understands a tensor, a tuple ``(inputs, targets)``, a dict (``input_ids`` with ``targets`` or ``labels``, masks,
    ``document_ids``, ``sample_weight``), a dataclass and nested batches; what is not there is not checked. A healthy batch
    costs one host read; with ``RankTelemetry(sync="lagged")`` on an accelerator none, for its flag travels with the step's
    record and is read with that. Findings wait in the shared context for the gate, where all ranks see them; without
    ``RankTelemetry`` they are only journalled.

    Example:
        >>> from lightning_sentinel import BatchValidator
        >>> validator = BatchValidator(vocabulary_size=257)
        >>> batch = {"input_ids": torch.tensor([[5, 6], [7, 300]]), "sample_id": ["prose/a/0", "prose/b/0"]}
        >>> [finding.message for finding in validator.check(batch, step=3)]
        ['rank 0: token 300 at [1, 1] of sample prose/b/0, expected 0 <= token < 257 (1 of 2 samples)']

    Journalled:

    ======================  ==========================================================================================
    event                   fields
    ======================  ==========================================================================================
    ``batch.invalid``       ``finding`` (kind ``invalid_batch``, ``no_supervised_tokens``, ``repeated_samples`` or
                            ``unseen_samples``; evidence: check, position, value, bound, count, neutralised)
    ``quarantine.refused``  ``reason``: why a loader can not leave out who is in the run folder's quarantine ledger,
                            which is opened and applied when training starts
    ======================  ==========================================================================================

    Args:
        vocabulary_size: Token ids must be below it; None checks only that ids under a name such as ``input_ids`` are not
            negative.
        ignore_index: Target value that carries no loss.
        sample_id_fn: ``batch -> ids`` where the batch has none of its own; by default a content hash per sample.
        targets_key: Key of the targets in a dict; None looks for ``targets``, ``labels``, ``target``, ``label``.
        repeats: ``report`` finds samples that come again within one pass over the data and a cursor that has gone back;
            ``allow`` does not look (sampling with replacement, or a data set that is cycled within an epoch). A pass is what
            the loader counts in ``sample_pass``, else the Trainer's epoch. A gone-back cursor is an incident where the ids
            come from the loader or ``sample_id_fn``, and an alarm where they are content hashes.
        known_ids: ``id -> bool``, False for an id that the data should not hold; None does not look.
        neutralise: Where a token or target out of range would crash the forward, put a valid token in its place and ignore
            all targets of that sample, in place, so that the rest of the batch still trains. ``policy="recover"`` sets it.
        max_remembered: Bound on the samples kept in memory for ``repeats``, some 30 bytes each.
    """

    name = "BatchValidator"

    fresh_state = True

    def __init__(
        self,
        vocabulary_size: int | None = None,
        ignore_index: int = IGNORE_INDEX,
        sample_id_fn: SampleIdFn | None = None,
        targets_key: str | None = None,
        repeats: Literal["report", "allow"] = "report",
        known_ids: Callable[[str], bool] | None = None,
        neutralise: bool = False,
        max_remembered: int = 1_048_576,
    ) -> None:
        check_limits("BatchValidator", locals())
        if vocabulary_size is not None and 0 <= ignore_index < vocabulary_size:
            raise ValueError(
                f"ignore_index is {ignore_index}, a token of the vocabulary of {vocabulary_size}; expected a value outside it"
            )
        self.vocabulary_size = vocabulary_size
        self.ignore_index = ignore_index
        self.sample_id_fn = sample_id_fn
        self.targets_key = targets_key
        self.repeats = repeats
        self.known_ids = known_ids
        self.neutralise = neutralise
        self._seen = SeenSamples(max_remembered)
        self._epoch = -1  # pass over the data of loaders that do not count passes themselves
        self._run_place = -1  # place in memory of the newest sample of a run that repeats in order; -1: no run
        self._run_length = 0
        self._run_since = -1
        self._lasting: list[
            tuple[int, list[str]]
        ] = []  # steps and repeated samples of the newest batches in a row of which
        # half or more was repeated
        self._window_ids: list[str] = []
        self._window_findings: list[Finding] = []
        self._window: tuple[int, int] | None = None
        self._flags: list[tuple[Tensor, Callable[[], list[Finding]]]] = []  # of the window, not read yet
        self._late: Callable[..., Callable[[], list[Finding]]] | None = None
        self._parts: list[Part] = []  # of the newest batch
        self._all_supervised = False  # every target of it is known to carry loss

    # -- hooks -------------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ledger_of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from .rank_telemetry import RankTelemetry

        apply_quarantine(trainer)
        telemetry = find_callback(trainer, RankTelemetry)
        # A repair has to come before the forward, so what repairs reads at once.
        lags = telemetry is not None and telemetry.sync == "lagged" and not self.neutralise
        self._late = partial(self._look, trainer) if lags and trainer.strategy.root_device.type != "cpu" else None

    def _look(
        self, trainer: Trainer, part: Part, ids: Sequence[str], step: int, rank: int
    ) -> Callable[[], list[Finding]]:
        """What finds out later why a flag is set, and writes it down."""

        def findings() -> list[Finding]:
            found = list(self._describe_all(part, ids, step, rank))
            for finding in found:
                self.context(trainer).write(trainer, "batch.invalid", finding=finding.to_dict())
            return found

        return findings

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        context = self.context(trainer)
        if self._starts_window(trainer, pl_module, batch_idx, context.attempt):
            self._window_ids, self._window_findings, self._flags = [], [], []
        context.scratch["sample_ids"] = self._window_ids
        context.scratch["batch_findings"] = self._window_findings
        context.scratch["batch_flags"] = self._flags
        findings = self.check(batch, step=trainer.global_step, rank=trainer.global_rank, epoch=trainer.current_epoch)
        # What was repaired has new targets: then the telemetry looks for itself.
        shared = self.targets_key is None and not findings
        context.scratch["batch_parts"] = (batch, self._parts, self._all_supervised) if shared else None
        self._window_ids.extend(self._ids)
        self._window_findings.extend(findings)
        for finding in findings:
            # at once: if the forward crashes on this batch, the gate is never reached
            context.write(trainer, "batch.invalid", finding=finding.to_dict())

    def _starts_window(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int, attempt: int) -> bool:
        if pl_module.automatic_optimization:
            return batch_idx % trainer.accumulate_grad_batches == 0
        # manual optimization decides for itself when a step ends
        last, self._window = self._window, (trainer.global_step, attempt)
        return last != self._window

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": self._seen.state_dict(),
            "epoch": self._epoch,
            "run": [self._run_place, self._run_length, self._run_since],
            "lasting": [[step, list(names)] for step, names in self._lasting],
            "window_ids": list(self._window_ids),
            "window_findings": [finding.to_dict() for finding in self._window_findings],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seen.load_state_dict(state_dict["seen"])
        self._epoch = state_dict["epoch"]
        self._run_place, self._run_length, self._run_since = state_dict["run"]
        self._lasting = [
            (step, list(names)) for step, names in state_dict.get("lasting", ())
        ]  # checkpoints from before it was counted have none
        self._window_ids = list(state_dict["window_ids"])
        self._window_findings = [Finding.from_dict(finding) for finding in state_dict["window_findings"]]

    # -- the decision ------------------------------------------------------------------------------------------------------

    def check(self, batch: Any, *, step: int, rank: int = 0, epoch: int = 0) -> list[Finding]:
        """Findings on one batch of one rank; remembers its samples, and repairs it where ``neutralise`` says so."""
        self._all_supervised = False
        found = self._parts = parts(batch, self.targets_key)
        if len(found) == 1 and found[0].holder is batch and found[0].ids is not None:
            ids, trusted = list(found[0].ids), True
        else:
            ids = sample_ids(batch, self.sample_id_fn)
            trusted = self.sample_id_fn is not None or has_own_ids(batch)
        self._ids = ids
        findings: list[Finding] = []
        if not (len(found) == 1 and len(ids) == found[0].size and self._is_clean(found[0])):
            findings = [f for part, names in _with_ids(found, ids) for f in self._check_part(part, names, step, rank)]
        if self.known_ids is not None:
            findings += self._unseen(ids, step, rank)
        if self.repeats == "report" and ids:
            passes = self._passes(found, ids, epoch)
            numbers = self._seen.numbers(ids, passes)
            if self._seen.all_new(numbers):
                self._lasting, self._run_place, self._run_length = [], -1, 0
                self._seen.add_new(numbers, step)
            else:
                findings += self._repeated(ids, passes, step, rank, trusted)
        return findings

    def _is_clean(self, part: Part) -> bool:
        """True for a batch on the CPU that the screen passes and that fits, told with as few operations as possible."""
        documents = part.document_ids
        if self._screens(part) and (documents is None or documents.shape == part.tokens.shape):  # type: ignore[union-attr]
            assert part.tokens is not None
            assert part.targets is not None
            if part.tokens.is_cpu and part.targets.is_cpu:
                return not self._screen_on_host(part.tokens.numpy(), part.targets.numpy(), documents)
        return False

    def _check_part(self, part: Part, ids: Sequence[str], step: int, rank: int) -> Iterator[Finding]:
        size = part.size
        if part.ids is not None and len(part.ids) != size:
            message = f"rank {rank}: the batch has {size} samples but {len(part.ids)} sample ids"
            yield self._finding(message, step, rank, (), {"check": "sample_ids", "value": len(part.ids), "bound": size})
        for what, message, evidence in self._misfits(part):
            yield self._finding(f"rank {rank}: {message}", step, rank, ids, {"check": what, **evidence})
        trouble = self._screen(part)
        if self._late is not None:
            if not isinstance(trouble, Tensor):
                trouble = self._any_trouble(part)
            if trouble is not None:
                self._flags.append((trouble, self._late(part, ids, step, rank)))
            return
        if trouble is not None:
            found = trouble if isinstance(trouble, bool) else trouble.tolist()  # the one host read of a healthy batch
            if not found:
                return
        yield from self._describe_all(part, ids, step, rank)

    def _any_trouble(self, part: Part) -> Tensor | None:
        """Whether any check fails, 0-dim on the device; None where there is nothing to check."""
        supervised = self._supervised(part)
        flags = [check.flags.any() for check in self._checks(part)]
        flags += [] if supervised is None else [~supervised.any()]
        return torch.stack(flags).any() if flags else None

    def _describe_all(self, part: Part, ids: Sequence[str], step: int, rank: int) -> Iterator[Finding]:
        """Findings of the checks that need values, which are read here."""
        checks, supervised = list(self._checks(part)), self._supervised(part)
        columns = [check.flags for check in checks] + ([] if supervised is None else [~supervised])
        if not columns:
            return
        flags = iter(torch.cat(columns).tolist())
        flagged = [list(islice(flags, len(column))) for column in columns]
        if supervised is not None and all(flagged.pop()):
            yield self._nothing_supervised(ids, step, rank, part.size)
        for check, rows in zip(checks, flagged, strict=True):
            if any(rows):
                yield self._describe(check, part, [i for i, bad in enumerate(rows) if bad], ids, step, rank)

    def _misfits(self, part: Part) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Types and shapes that do not fit; known on the host without reading the device."""
        tokens, targets = part.tokens, part.targets
        if tokens is None:
            return
        size = tuple(tokens.shape)
        if part.named_tokens and not is_integer(tokens):
            yield "dtype", f"tokens are {tokens.dtype}, expected an integer type", {"value": str(tokens.dtype)}
        if targets is not None and tokens.dim() > 0 and tuple(targets.shape[:1]) != size[:1]:
            message = f"targets have shape {list(targets.shape)}, inputs {list(size)}; expected as many samples"
            yield "shape", message, {"value": list(targets.shape), "bound": list(size)}
        elif (
            targets is not None and part.named_tokens and targets.dim() == tokens.dim() and tuple(targets.shape) != size
        ):
            message = f"targets have shape {list(targets.shape)}, expected that of the tokens, {list(size)}"
            yield "shape", message, {"value": list(targets.shape), "bound": list(size)}
        for name in ("attention_mask", "loss_mask", "document_ids"):
            other: Tensor | None = getattr(part, name)
            # attention masks may also be [B, T, T] or [B, 1, T, T]
            if other is not None and other.dim() == tokens.dim() and tuple(other.shape) != size:
                message = f"{name} has shape {list(other.shape)}, expected that of the tokens, {list(size)}"
                yield "shape", message, {"value": list(other.shape), "bound": list(size)}

    def _screen(self, part: Part) -> Tensor | bool | None:
        """Whether any check may fail, 0-dim, for the usual batch of token ids and targets; None for any other.

        Says the same of a healthy batch as :meth:`_checks`, at a quarter of its operations; what it raises is looked at
        by them.
        """
        if not self._screens(part):
            return None
        tokens, targets, documents = part.tokens, part.targets, part.document_ids
        assert tokens is not None
        assert targets is not None
        assert self.vocabulary_size is not None
        if tokens.device.type == targets.device.type == "cpu":
            return self._screen_on_host(tokens.numpy(), targets.numpy(), documents)
        ignored = targets == self.ignore_index
        both = torch.stack((tokens, targets.masked_fill(ignored, 0)))
        low, high = both.aminmax()
        trouble = (low < 0) | (high >= self.vocabulary_size) | ignored.all()
        if documents is not None and documents.dim() == 2 and documents.shape[1] > 1:
            trouble = trouble | (documents[:, 1:] < documents[:, :-1]).any()
        return trouble

    def _screens(self, part: Part) -> bool:
        """Whether this is the usual batch, which is screened before any check is made."""
        tokens, targets = part.tokens, part.targets
        return (
            tokens is not None
            and targets is not None
            and self.vocabulary_size is not None
            and tokens.dim() == 2
            and tokens.shape == targets.shape
            and is_integer(tokens)
            and tokens.dtype is targets.dtype
            and tokens.numel() > 0
            and part.attention_mask is None
            and part.loss_mask is None
            and part.weights is None
        )

    def _screen_on_host(
        self, tokens: NDArray[np.integer], targets: NDArray[np.integer], documents: Tensor | None
    ) -> bool:
        assert self.vocabulary_size is not None
        # Seen without their sign, negative numbers are the largest: one reduction for both bounds.
        if _largest_unsigned(tokens) >= self.vocabulary_size:
            return True
        if _largest_unsigned(targets) < self.vocabulary_size:
            self._all_supervised = self.ignore_index < 0 and len(self._parts) == 1
            if self.ignore_index >= 0 and (targets == self.ignore_index).all():
                return True
        else:
            supervised = targets[targets != self.ignore_index]
            if not supervised.size or _largest_unsigned(supervised) >= self.vocabulary_size:
                return True
        if documents is None or documents.dim() != 2 or documents.shape[1] < 2:
            return False
        rises = documents.numpy() if documents.is_cpu else documents.cpu().numpy()
        return bool(np.logical_or.reduce(rises[:, 1:] < rises[:, :-1], axis=None))

    def _checks(self, part: Part) -> Iterator[_Check]:
        """The checks that need values; each a flag for each sample, still on the device."""
        tokens, targets, vocabulary = part.tokens, part.targets, self.vocabulary_size
        if (
            tokens is not None
            and is_integer(tokens)
            and tokens.dim() > 1
            and (part.named_tokens or vocabulary is not None)
        ):
            yield _check("token", _outside(tokens, vocabulary), tokens, _range("token", vocabulary), "tokens")
        like_tokens = tokens is not None and targets is not None and targets.shape == tokens.shape
        if targets is not None and is_integer(targets) and like_tokens and tokens is not None and is_integer(tokens):
            if part.named_tokens or vocabulary is not None:
                wrong = _outside(targets, vocabulary) & (targets != self.ignore_index)
                bound = f"{_range('target', vocabulary)} or {self.ignore_index}"
                yield _check("target", wrong, targets, bound, "targets")
            for name, mask in (("attention_mask", part.attention_mask), ("loss_mask", part.loss_mask)):
                if mask is not None and mask.shape == targets.shape:
                    yield from self._mask_checks(name, mask, targets)
        documents = part.document_ids
        if documents is not None and documents.dim() == 2 and documents.shape[1] > 1:
            wrong = torch.zeros_like(documents, dtype=torch.bool)
            torch.lt(documents[:, 1:], documents[:, :-1], out=wrong[:, 1:])
            yield _check("document id", wrong, documents, "no smaller than the one before it")
        weights = part.weights
        if weights is not None and weights.dim() > 0 and weights.shape[0] == part.size:
            yield _check("sample weight", ~(torch.isfinite(weights) & (weights >= 0)), weights, "finite and >= 0")

    def _mask_checks(self, name: str, mask: Tensor, targets: Tensor) -> Iterator[_Check]:
        if mask.is_floating_point():
            yield _check(name, ~(torch.isfinite(mask) & (mask >= 0)), mask, "finite and >= 0")
        if name == "attention_mask":
            # a habit of some collators, so shown but not answered
            wrong = (mask == 0) & (targets != self.ignore_index)
            bound = f"{self.ignore_index} where attention_mask is 0"
            yield _check("target under the mask", wrong, targets, bound, severity=Severity.ALARM)

    def _supervised(self, part: Part) -> Tensor | None:
        """Which samples have at least one target that carries loss, ``[B]``; None where targets are not token ids."""
        targets = part.targets
        if targets is None or not is_integer(targets) or targets.dim() == 0:
            return None
        supervised = targets != self.ignore_index
        if part.loss_mask is not None and part.loss_mask.shape == targets.shape:
            supervised = supervised & (part.loss_mask != 0)
        return supervised.reshape(supervised.shape[0], -1).any(dim=1)

    # -- findings ----------------------------------------------------------------------------------------------------------

    def _finding(
        self,
        message: str,
        step: int,
        rank: int,
        samples: Sequence[str],
        evidence: Mapping[str, Any],
        severity: Severity = Severity.INCIDENT,
        kind: FindingKind = FindingKind.INVALID_BATCH,
    ) -> Finding:
        return Finding(
            kind=kind,
            detector=self.name,
            step=step,
            score=float(max(len(samples), 1)),
            threshold=0.0,
            unit="samples",
            message=message,
            severity=severity,
            ranks=(rank,),
            culprits=tuple(f"sample:{name}" for name in dict.fromkeys(samples)),
            evidence=dict(evidence),
        )

    def _describe(
        self, check: _Check, part: Part, rows: Sequence[int], ids: Sequence[str], step: int, rank: int
    ) -> Finding:
        positions = check.wrong.nonzero()
        position = positions[0].tolist()
        value = check.values[tuple(position)].item()
        evidence: dict[str, Any] = {
            "check": check.name,
            "position": position,
            "value": value,
            "bound": check.bound,
            "count": len(positions),
        }
        repaired = False
        if check.repair:
            repaired = evidence["neutralised"] = self.neutralise and _neutralise(part, check, rows, self.ignore_index)
        names = [_name(ids, row) for row in rows]
        message = (
            f"rank {rank}: {check.name} {value} at {position} of sample {_name(ids, position[0])}, expected {check.bound}"
            f" ({len(rows)} of {part.size} samples)"
        )
        if repaired:
            message += "; taken out of the loss"
        return self._finding(message, step, rank, names, evidence, check.severity)

    def _nothing_supervised(self, ids: Sequence[str], step: int, rank: int, size: int) -> Finding:
        message = (
            f"rank {rank}: none of the {size} samples has a target that carries loss (all are {self.ignore_index} or masked):"
            f" {_names(ids)}"
        )
        evidence = {"check": "supervised", "value": 0, "bound": 1, "count": size}
        return self._finding(message, step, rank, ids, evidence, kind=FindingKind.NO_SUPERVISED_TOKENS)

    def _unseen(self, ids: Sequence[str], step: int, rank: int) -> Iterator[Finding]:
        assert self.known_ids is not None
        strangers = [name for name in ids if not self.known_ids(name)]
        if strangers:
            message = f"rank {rank}: {len(strangers)} of {len(ids)} samples are not of this data: {_names(strangers)}"
            evidence = {"check": "known_ids", "position": [ids.index(strangers[0])], "count": len(strangers)}
            yield self._finding(message, step, rank, strangers, evidence, kind=FindingKind.UNSEEN_SAMPLES)

    # -- repeats -----------------------------------------------------------------------------------------------------------

    def _passes(self, found: Sequence[Part], ids: Sequence[str], epoch: int) -> list[int]:
        """Which pass over its data each sample belongs to: as the loader says, else the Trainer's epoch."""
        counted = [number for part in found for number in part.passes or ()]
        if len(counted) == len(ids):
            return counted
        if epoch != self._epoch:
            self._epoch = epoch
            self._seen.clear()
            self._run_place, self._run_length = -1, 0
        return [epoch] * len(ids)

    def _repeated(
        self, ids: Sequence[str], passes: Sequence[int], step: int, rank: int, trusted: bool
    ) -> Iterator[Finding]:
        drawn = list(zip(ids, passes, strict=True))
        keys = self._seen.keys(ids, passes)
        places = self._seen.find(keys)
        again = places >= 0
        counts = Counter(drawn)
        repeated = [d for d, old in zip(drawn, again.tolist(), strict=True) if old or counts[d] > 1]
        lasts = trusted and len(drawn) > 1 and 2 * len(repeated) >= len(drawn)
        self._lasting = [*self._lasting[-63:], (step, sorted({name for name, _ in repeated}))] if lasts else []
        # equal content is no proof of an equal sample, so single repeats of content hashes say nothing
        if trusted and len(set(drawn)) < len(drawn):
            twice = [name for (name, _), count in Counter(drawn).items() if count > 1]
            yield self._repeat_finding(twice, "more than once in this batch", step, rank, ids)
        if again.any() and again[self._seen.kept(keys)].all():
            self._follow(places[again], step)
        else:
            self._run_place, self._run_length = -1, 0
        if self._run_length > 1:
            yield self._cursor_finding(ids, places, step, rank, trusted)
        elif trusted and again.any():
            names = [name for name, old in zip(ids, again.tolist(), strict=True) if old]
            since = self._seen.step_of(int(places[again][0]))
            yield self._repeat_finding(names, f"already drawn, at step {since}", step, rank, ids, since)
        self._seen.add(keys, step)

    def _follow(self, places: np.ndarray[Any, np.dtype[np.int64]], step: int) -> None:
        """Is this the same order as before? A run of repeats in order, over batches, tells a cursor from duplicates."""
        if not (np.diff(places) > 0).all():
            self._run_place, self._run_length = -1, 0
            return
        goes_on = self._run_place >= 0 and int(places[0]) > self._run_place
        if not goes_on:
            self._run_length, self._run_since = 0, step
        self._run_length += len(places)
        self._run_place = int(places[-1])

    def _cursor_finding(
        self, ids: Sequence[str], places: np.ndarray[Any, np.dtype[np.int64]], step: int, rank: int, trusted: bool
    ) -> Finding:
        place = int(np.argmax(places >= 0))
        first_step = self._seen.step_of(int(places[place]))
        repeated = int((places >= 0).sum())
        message = (
            f"rank {rank}: {repeated} of {len(ids)} samples come again in the order in which they were drawn at step"
            f" {first_step} (first: {ids[place]}); the data cursor has gone back"
        )
        return Finding(
            kind=FindingKind.REPEATED_SAMPLES,
            detector=self.name,
            step=step,
            since_step=self._run_since,
            score=float(repeated),
            threshold=0.0,
            unit="samples",
            message=message,
            severity=Severity.INCIDENT if trusted else Severity.ALARM,
            ranks=(rank,),
            culprits=("cursor",),
            evidence={
                "check": "repeats",
                "first_repeated": ids[place],
                "position": [place],
                "first_drawn_step": first_step,
                "repeated": repeated,
                "samples": len(ids),
                "in_order": True,
            },
        )

    def _repeat_finding(
        self,
        names: Sequence[str],
        how: str,
        step: int,
        rank: int,
        ids: Sequence[str],
        first_step: int | None = None,
    ) -> Finding:
        evidence = {
            "check": "repeats",
            "first_repeated": names[0],
            "position": [list(ids).index(names[0])],
            "first_drawn_step": step if first_step is None else first_step,
            "repeated": len(names),
            "samples": len(ids),
            "in_order": False,
        }
        message = f"rank {rank}: {len(names)} of {len(ids)} samples {how}: {_names(names)}"
        severity = Severity.ALARM
        if len(self._lasting) >= LASTING_REPEATS:
            severity = Severity.INCIDENT
            message += f"; half or more of each batch since step {self._lasting[0][0]} was repeated"
            names = list(dict.fromkeys(name for _, repeated in self._lasting for name in repeated))
        return self._finding(message, step, rank, names, evidence, severity, FindingKind.REPEATED_SAMPLES)


_UNSIGNED = {np.dtype(f"i{n}"): np.dtype(f"u{n}") for n in (1, 2, 4, 8)}


def _largest_unsigned(values: NDArray[np.integer]) -> int:
    dtype = _UNSIGNED.get(values.dtype)
    return int(np.maximum.reduce(values if dtype is None else values.view(dtype), axis=None))


def _check(
    name: str,
    wrong: Tensor,
    values: Tensor,
    bound: str,
    repair: Literal["tokens", "targets", ""] = "",
    severity: Severity = Severity.INCIDENT,
) -> _Check:
    return _Check(name, wrong.reshape(wrong.shape[0], -1).any(dim=1), wrong, values, bound, severity, repair)


def _outside(values: Tensor, vocabulary: int | None) -> Tensor:
    return values < 0 if vocabulary is None else (values < 0) | (values >= vocabulary)


def _range(name: str, vocabulary: int | None) -> str:
    return f"{name} >= 0" if vocabulary is None else f"0 <= {name} < {vocabulary}"


def _with_ids(found: Sequence[Part], ids: Sequence[str]) -> Iterator[tuple[Part, list[str]]]:
    """Each part with its own samples' ids, in the order in which the batch lists them."""
    start = 0
    for part in found:
        if part.ids is not None:
            yield part, list(part.ids)
            start += len(part.ids)
        else:
            yield part, list(ids[start : start + part.size])
            start += part.size


def _name(ids: Sequence[str], row: int) -> str:
    return ids[row] if row < len(ids) else f"number {row} of the batch"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _neutralise(part: Part, check: _Check, rows: Sequence[int], ignore_index: int) -> bool:
    """Take samples out of the loss and make their tokens valid, in place; False where the batch does not allow it."""
    tokens, targets = part.tokens, part.targets
    if targets is None or not is_integer(targets):
        return False
    if tokens is not None and tokens.data_ptr() == targets.data_ptr():
        # Hugging Face collators may hand over the same tensor as input and labels
        if part.target_key is None or not isinstance(part.holder, MutableMapping):
            return False
        targets = part.holder[part.target_key] = targets.clone()
    index = torch.tensor(list(rows), device=targets.device)
    if check.repair == "tokens" and tokens is not None:
        tokens.masked_fill_(check.wrong, 0)
    targets[index] = ignore_index
    return True
