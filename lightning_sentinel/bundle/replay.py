"""Computes the step of an incident again, offline, on one device, from its bundle alone; and says what came out.

Each rank's part is replayed after the other, from the weights that this rank had. The step is first computed as it was, which
must give the recorded loss to the bit on the same kind of machine; where it is not finite it is computed again in float64,
which tells a value that left its range from a value that does not exist.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor

from ..checkpoint.describe import library_versions
from ..checkpoint.plain import decode
from ..context import context_of
from ..data.identity import SampleIdFn, batch_hash
from ..incidents import Finding, Verdict
from ..journal import number
from ..record import SIGNAL_INDEX
from ..state import lightning_private as private
from ..triage.replay import ReplayResult, replay
from ..triage.window import MicroBatch, StepWindow, tensors
from .alone import ModuleCheck, module_alone
from .drill import Drill, recorded_callbacks
from .fetch import FetchError, fetch_batch
from .reading import Bundle, BundleError
from .rebuild import code_from, rebuild
from .session import in_session, load_weights, place
from .update import UpdateCheck, checkpoint_of, update_of
from .verdict import agreement, in_words, verdict_of

AS_RUN = "as in the run"
# Another device, another version or another number of threads sums in another order: 32 bits agree to about 1e-6 of the
# loss then, 16-bit formats (8 or 11 bits of mantissa) to some of their 4e-3.
CLOSE, CLOSE_16 = 1e-4, 2e-2
REDUCED = 1e-3  # relative distance of the gradient norm from the recorded one, beyond which the reduction differs
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TELLING = ("lightning", "torch", "numpy", "lightning-sentinel")


@dataclass(frozen=True)
class Computed:
    """One computation of one rank's step.

    Attributes:
        dtype: :data:`AS_RUN`, or the dtype that everything was computed in.
        losses: Loss of each micro-batch, in nats where the model's is.
        bits: The same as hex digits of float32.
        grad_norm: 2-norm of this rank's gradient, unscaled, before clipping.
        finite: Whether losses and gradient are.
        raised: The error that ``training_step`` ended with, or empty.
        first: The first non-finite value: operator, module, phase, line, samples; None where there is none.
        seconds: Wall time.
    """

    dtype: str
    losses: tuple[float, ...] = ()
    bits: tuple[str, ...] = ()
    grad_norm: float = math.nan
    finite: bool = False
    raised: str = ""
    first: dict[str, Any] | None = None
    seconds: float = 0.0


@dataclass
class RankReplay:
    """What one rank's part gave.

    Attributes:
        rank: The rank.
        samples: Ids by micro-batch.
        batch: ``captured`` (from the bundle) or ``fetched`` (again, by ids).
        batch_equal: Whether what was fetched is what the step was computed from, by its hash.
        recorded: Losses of the run.
        recorded_bits: As hex digits of float32.
        recorded_finite: Whether loss and gradient were, in the run.
        equal: Losses equal to the recorded ones to the bit.
        difference: Largest relative difference of a loss; NaN where one is not finite.
        outcome: ``reproduced``, ``close``, ``different``, ``not reproduced`` or ``raised``.
        computed: The computations.
        worst_samples: ``[id, loss]`` of the samples that carry most, where ``training_step`` leaves losses by sample.
    """

    rank: int
    samples: list[list[str]]
    batch: str
    batch_equal: bool | None
    recorded: list[float]
    recorded_bits: list[str]
    recorded_finite: bool
    equal: bool = False
    difference: float = math.nan
    outcome: str = "not reproduced"
    computed: list[Computed] = field(default_factory=list)
    worst_samples: list[tuple[str, float]] = field(default_factory=list)


@dataclass
class ReplayReport:
    """Outcome of an offline replay.

    Attributes:
        incident: Number of the incident.
        step: Its step.
        reproduced: Whether every rank's step came out as recorded: same bits, or the same kind of non-finite value.
        outcome: The ranks' worst outcome.
        sentence: All of it in words.
        verdict: What this replay alone says of the cause: kind, culprits, and why in a sentence.
        recorded_verdict: What the run's own examination said.
        agrees: Whether both name the same kind and a common culprit; None where one of them is undetermined.
        ranks: By rank.
        module: What one module gave alone, if asked for.
        reduction: Gradient norm of the mean over ranks against the recorded one, where all ranks could be replayed.
        update: The update that the step makes, if asked for.
        notes: What could not be as it was: older weights, other versions, other devices.
        seconds: Wall time.
    """

    incident: int
    step: int
    reproduced: bool
    outcome: str
    sentence: str
    recorded_verdict: str
    ranks: list[RankReplay]
    verdict: Verdict = field(default_factory=Verdict)
    agrees: bool | None = None
    module: ModuleCheck | None = None
    reduction: dict[str, Any] | None = None
    update: UpdateCheck | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Tick = Callable[[str, int], None]


def replay_incident(
    run_dir: str | Path,
    incident: int,
    model: LightningModule | None = None,
    datamodule: LightningDataModule | None = None,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    module: str | None = None,
    ranks: Sequence[int] | None = None,
    rebuild_with: str | None = None,
    app_dirs: Sequence[str | Path] | None = None,
    sample_id_fn: SampleIdFn | None = None,
    drill: bool = True,
    update: bool = False,
    progress: Tick | None = None,
) -> ReplayReport:
    """Compute the step of an incident again from its bundle, on one device, whatever the run had.

    Without ``model`` both model and data are rebuilt from the configuration that the bundle holds, by the code that it
    names: replay only what you trust as much as your own code. The files themselves are checked and loaded as plain data.

    Args:
        run_dir: The run folder.
        incident: Number of the incident.
        model: The LightningModule, untrained, for a run without a recorded configuration.
        datamodule: Its data, needed where the bundle holds ids and no batches.
        dtype: Also compute in ``float64``, ``float32``, ``bfloat16`` or ``float16``.
        device: Where, as torch names it.
        module: Path of one module, to be computed alone from its captured inputs in several dtypes.
        ranks: Only these; None for all.
        rebuild_with: Dotted path of ``cfg -> (module, datamodule)`` in place of the configuration's ``rebuild``.
        app_dirs: Folders that the application's modules are imported from; None takes the recorded ones.
        sample_id_fn: ``batch -> ids``, where the run named its samples by one.
        drill: Where the recorded configuration injects faults, inject them into the replay too.
        update: Also make the step's update, by the optimizer state of the checkpoint that the bundle refers to.
        progress: Called with what is being done and how many micro-batches are planned (0 for one that is done).

    Returns:
        What came out, and whether it is what was recorded.

    Raises:
        ValueError: The bundle is missing or damaged, the model is another one, or samples cannot be had again; the
            message says which, and what to do.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}.")
    started = time.monotonic()
    tick = progress or (lambda words, more: None)
    tick("checking hashes", 0)
    bundle = Bundle.open(run_dir, incident)
    chosen = _ranks(bundle, ranks)
    folders = bundle.run["code"]["path"] if app_dirs is None else app_dirs
    with ExitStack() as stack:
        stack.enter_context(code_from(folders))
        if model is None:
            tick("building model and data", 0)
            model, made = rebuild(bundle.run["config"], rebuild_with)
            datamodule = datamodule or made
        faults = Drill.recorded(bundle.run["config"]) if drill else Drill([])
        work = _Work(bundle, chosen, dtype, module, sample_id_fn, faults, update, tick)
        if not drill and (left_out := _left_out(bundle)):
            work.doubts.append(f"it leaves out the faults that the recorded configuration injects: {left_out}.")
        report: ReplayReport = in_session(bundle, model, datamodule, device, work)
    report.seconds = round(time.monotonic() - started, 3)
    return report


def _left_out(bundle: Bundle) -> str:
    """Names of the faults that a replay without them leaves out; empty where the run injected none."""
    try:
        return ", ".join(Drill.recorded(bundle.run["config"]).names)
    except Exception as error:  # whoever leaves the faults out may not have their code
        return f"they cannot be built here ({type(error).__name__}: {error})"[:300]


def _ranks(bundle: Bundle, ranks: Sequence[int] | None) -> list[int]:
    if ranks is None:
        return bundle.ranks
    absent = sorted(set(ranks) - set(bundle.ranks))
    if absent:
        raise BundleError(f"{bundle.path} holds the ranks {bundle.ranks}, not {absent}.")
    return list(dict.fromkeys(ranks))


class _Work:
    """All that is done in the session."""

    def __init__(
        self,
        bundle: Bundle,
        ranks: list[int],
        dtype: str | None,
        module: str | None,
        sample_id_fn: SampleIdFn | None,
        drill: Drill,
        update: bool,
        tick: Tick,
    ) -> None:
        self.update = update
        self.bundle, self.ranks, self.dtype, self.path = bundle, ranks, dtype, module
        self.sample_id_fn, self.drill, self.tick = sample_id_fn, drill, tick
        self.notes: list[str] = []
        self.doubts: list[str] = []  # of the notes, those by which the replay may differ from the step
        self.invalid: list[Finding] = []
        self.exact_state = True
        self.alone: ModuleCheck | None = None
        self.mean_gradient: dict[str, Tensor] | None = {}

    def __call__(self, trainer: Trainer, module: LightningModule) -> ReplayReport:
        if self.path is not None and self.path not in dict(module.named_modules()):
            from ..faults.base import nearest

            raise BundleError(
                f"{type(module).__name__} has no module {self.path!r}."
                f" Nearest names: {nearest(self.path, dict(module.named_modules()))}."
            )
        self._environment(trainer)
        self.drill.install(trainer, module)
        try:
            found = [self._rank(trainer, module, rank) for rank in self.ranks]
        finally:
            self.drill.uninstall()
        report = self._report(found)
        if self.update:
            self.tick("the update", 0)
            load_weights(module, self._weights(self.ranks[0]))
            report.update = update_of(trainer, module, self._optimizer(trainer), self.bundle, self._gradient())
            report.sentence = f"{report.sentence} {report.update.sentence}"
        signals = [SIGNAL_INDEX["nonfinite_loss"], SIGNAL_INDEX["nonfinite_grads"]]
        recorded = any(number(row[i]) > 0 for row in self.bundle.run["record"] for i in signals)
        report.verdict = verdict_of(report, self.invalid, nonfinite_recorded=recorded, doubts=self.doubts)
        report.agrees = agreement(report.verdict, self.bundle.incident.verdict)
        return report

    # --------------------------------------------------------------------------------------------------- one rank

    def _rank(self, trainer: Trainer, module: LightningModule, rank: int) -> RankReplay:
        part = self.bundle.rank(rank)
        if not part["micro_batches"]:
            raise BundleError(
                f"{self.bundle.path} holds no micro-batch of rank {rank}: {self._why_no_window()}."
                " There is nothing to replay; incident.json has the evidence."
            )
        for note in place(trainer, module, self.bundle, part):
            self._note(note, doubt=True)
        load_weights(module, self._weights(rank))
        window, row = self._window(trainer, module, part, rank)
        recorded = [float(x) for x in part["live_losses"]]
        row.recorded, row.recorded_bits = recorded, [bits_of(x) for x in recorded]
        row.recorded_finite = all(map(math.isfinite, recorded)) and not self._nonfinite_gradient(rank)
        context = context_of(trainer)
        context.window, context.scratch["live_losses"] = window, part["live_losses"]
        self.tick(f"rank {rank}", len(window.micro_batches))
        base, result = self._compute(trainer, module, window, None, armed=not row.recorded_finite)
        if result is not None and base.finite is False and row.recorded_finite:
            self.tick(f"rank {rank}, traced", len(window.micro_batches))
            base, result = self._compute(trainer, module, window, None, armed=True)
        row.computed.append(base)
        self._judge(row, base, result)
        self._wider(trainer, module, window, row, base)
        if self.path is not None and self.alone is None:
            self.tick(f"{self.path} alone", 0)
            self.alone = module_alone(trainer, module, self._optimizer(trainer), window, self.path, self.dtype)
        self._accumulate(result)
        return row

    def _compute(
        self, trainer: Trainer, module: LightningModule, window: StepWindow, dtype: str | None, armed: bool = False
    ) -> tuple[Computed, ReplayResult | None]:
        begun = time.monotonic()
        keep = (self.bundle.world_size > 1 or self.update) and dtype is None
        try:
            with self._ticking(module):
                result = replay(
                    trainer,
                    module,
                    self._optimizer(trainer),
                    window,
                    dtype=None if dtype is None else DTYPES[dtype],
                    armed=armed,
                    keep_grads=keep,
                )
        except Exception as error:  # what the user's training_step does with such a batch is a result, too
            text = f"{type(error).__name__}: {error}".strip()
            return Computed(dtype or AS_RUN, raised=text[:500], seconds=round(time.monotonic() - begun, 3)), None
        first = None
        if result.origin is not None:
            origin = result.origin
            ids = window.micro_batches[origin.micro_batch].sample_ids
            first = {
                "kind": origin.kind,
                "operator": origin.name,
                "module": origin.module,
                "phase": origin.phase,
                "line": origin.line,
                "micro_batch": origin.micro_batch,
                "samples": [ids[r] for r in origin.rows if r < len(ids)] if origin.rows else [],
                "inputs": [asdict(r) for r in origin.inputs],
            }
        finite = all(map(math.isfinite, result.losses)) and math.isfinite(result.grad_norm)
        computed = Computed(
            dtype or AS_RUN,
            tuple(result.losses),
            tuple(map(bits_of, result.losses)),
            result.grad_norm,
            finite,
            first=first,
            seconds=round(time.monotonic() - begun, 3),
        )
        return computed, result

    def _judge(self, row: RankReplay, base: Computed, result: ReplayResult | None) -> None:
        if result is None:
            row.outcome = "raised"
            return
        row.equal = bool(result.bitwise_equal)
        row.worst_samples = _worst(row, result)
        finite = [(a, b) for a, b in zip(row.recorded, base.losses, strict=False) if math.isfinite(a + b)]
        if len(finite) == len(row.recorded) > 0:
            row.difference = max(abs(a - b) / max(abs(a), 1e-12) for a, b in finite)
        if not row.recorded_finite:
            row.outcome = "not reproduced" if base.finite else "reproduced"
        elif row.equal and base.finite:
            row.outcome = "reproduced"
        elif base.finite and row.difference <= self._tolerance():
            row.outcome = "close"
        else:
            row.outcome = "different"

    def _wider(
        self, trainer: Trainer, module: LightningModule, window: StepWindow, row: RankReplay, base: Computed
    ) -> None:
        """The same in the dtype that was asked for, and in wider ones where the step is not finite."""
        wanted = [self.dtype] if self.dtype else []
        if not base.finite and not base.raised:
            wanted += ["float64"] if self._is_32_bit() else ["float32", "float64"]
        for name in dict.fromkeys(wanted):
            self.tick(f"rank {row.rank} in {name}", len(window.micro_batches))
            row.computed.append(self._compute(trainer, module, window, name)[0])

    def _accumulate(self, result: ReplayResult | None) -> None:
        """Keep the sum of the ranks' gradients, which the collective should have given."""
        if self.mean_gradient is None or (self.bundle.world_size == 1 and not self.update):
            return
        if result is None or result.grads is None or not result.finite:
            self.mean_gradient = None
            return
        for name, grad in result.grads.items():
            have = self.mean_gradient.get(name)
            self.mean_gradient[name] = grad.detach().double() if have is None else have + grad.detach().double()

    def _ticking(self, module: LightningModule) -> Any:
        return _Ticking(module, self.drill, self.tick)

    # ------------------------------------------------------------------------------------------- what it starts from

    def _weights(self, rank: int) -> dict[str, Tensor]:
        if self.bundle.has_state:
            return self.bundle.weights(rank)
        state = self.bundle.run["state"]
        reference = state["checkpoint"]
        if reference is None:
            raise BundleError(
                f"{self.bundle.path} holds no weights ({state['why_not']}) and there was no checkpoint to refer to. Let"
                " IncidentResponse write them: capture_state=True, a larger bundle_bytes."
            )
        weights = _from_checkpoint(self.bundle, reference)
        behind = self.bundle.step - int(reference["step"])
        if behind and self.exact_state:
            self.exact_state = False
            self._note(
                f"The bundle holds no weights ({state['why_not']}): these are of the checkpoint of step"
                f" {reference['step']}, {behind} step{'s' if behind > 1 else ''} older than the incident's.",
                doubt=True,
            )
        return weights

    def _window(
        self, trainer: Trainer, module: LightningModule, part: dict[str, Any], rank: int
    ) -> tuple[StepWindow, RankReplay]:
        window = StepWindow(self.bundle.step, int(self.bundle.manifest["attempt"]))
        self.drill.moments.clear()
        self.drill.remember(part.get("faults", {}))
        device = trainer.strategy.root_device
        window.buffers = {n: b.to(device) for n, b in part["buffers"].items()}
        window.scale = None if part["scale"] is None else part["scale"].to(device)
        equal: list[bool] = []
        for micro in part["micro_batches"]:
            batch = self._batch(trainer, module, micro)
            if not micro["captured"]:
                equal.append(batch_hash(batch) == micro["hash"])
            generators = {(path, key): state for path, key, state in micro["generators"]}
            window.micro_batches.append(
                MicroBatch(
                    batch,
                    int(micro["batch_idx"]),
                    self._rng(micro["rng"]),
                    [t._version for t in tensors(batch)],
                    tuple(micro["ids"]),
                    generators,
                )
            )
            if micro["changed_in_place"]:
                self._note("training_step changes its batch in place: the replay sees it as it was left.", doubt=True)
        self._check_inputs(window, rank)
        captured = not equal
        if not captured and not all(equal):
            self._note(
                f"The samples fetched again for rank {rank} are not what the step was computed from: another hash. They"
                + (
                    " were taken out of the batch by the run's validator, and are in it here."
                    if any(f.evidence.get("neutralised") for f in self.bundle.incident.findings)
                    else " were changed between their source and the step, or the source has changed since."
                ),
                doubt=True,
            )
        row = RankReplay(
            rank,
            [list(m["ids"]) for m in part["micro_batches"]],
            "captured" if captured else "fetched",
            None if captured else all(equal),
            [],
            [],
            True,
        )
        return window, row

    def _check_inputs(self, window: StepWindow, rank: int) -> None:
        """What the run's ``BatchValidator``, or one with its defaults, says of the step's batches."""
        from ..callbacks.batch_validator import BatchValidator  # callbacks import this package

        config = self.bundle.run["config"]
        nodes = [{}] if config is None else list(recorded_callbacks(config, BatchValidator.__name__))
        for node in nodes[:1]:  # a configured run without one has not wanted its inputs checked
            options = {k: node[k] for k in ("vocabulary_size", "ignore_index", "targets_key") if k in node}
            try:
                validator = BatchValidator(**options, sample_id_fn=self.sample_id_fn, repeats="allow")
                for micro in window.micro_batches:
                    self.invalid += validator.check(micro.batch, step=window.step, rank=rank)
            except Exception as error:  # a batch of whatever kind: the replay itself does without
                self._note(f"The inputs could not be checked: {type(error).__name__}: {error}"[:300])

    def _batch(self, trainer: Trainer, module: LightningModule, micro: dict[str, Any]) -> Any:
        """The micro-batch on the device, from the bundle or fetched again."""
        if micro["captured"]:
            batch = trainer.strategy.batch_to_device(decode(micro["batch"]), module.device, 0)
            self.drill.hurt(trainer, module, self.bundle, batch, micro["ids"], fetched=False)
            return batch
        if micro["why_not"]:
            self._note(f"The bundle has no batch: {micro['why_not']}.")
        if private.datamodule_of(trainer) is None and not private.overrides(module, "train_dataloader"):
            raise FetchError(
                "The bundle holds the ids of the samples and no batch, and there is no data module to fetch them from."
                " Give datamodule=..., or let the run write its batches (IncidentResponse(capture_batch=True))."
            )
        self.tick("fetching samples", 0)
        batch = fetch_batch(trainer, micro["ids"], sample_id_fn=self.sample_id_fn, progress=self._walking)
        batch = trainer.strategy.batch_to_device(batch, module.device, 0)
        self.drill.hurt(trainer, module, self.bundle, batch, micro["ids"], fetched=True)
        return batch

    def _walking(self, items: Iterable[int], words: str) -> Iterable[int]:
        for i in items:
            if i % 1000 == 0:
                self.tick(f"{words}: {i:,} looked at", 0)
            yield i

    def _rng(self, states: Any) -> dict[str, Any]:
        found: dict[str, Any] = decode(states)
        cuda = found.pop("torch.cuda", None)
        if cuda and torch.cuda.is_available() and torch.cuda.device_count() == len(cuda):
            found["torch.cuda"] = cuda
        elif cuda:
            self._note(
                "Random numbers that the run drew on its GPU (dropout, for one) are drawn anew here.", doubt=True
            )
        return found

    def _environment(self, trainer: Trainer) -> None:
        ran_on, here = str(self.bundle.run["trainer"]["device"]), str(trainer.strategy.root_device)
        if torch.device(ran_on).type != torch.device(here).type:
            self._note(f"The run computed on {ran_on}, this is {here}: the last bits may differ.", doubt=True)
        then, now = self.bundle.run["versions"], library_versions()
        other = [f"{n} {then[n]}, here {now[n]}" for n in TELLING if n in then and n in now and then[n] != now[n]]
        if other:
            self._note(f"Other versions than the run's: {'; '.join(other)}.", doubt=True)
        if self.drill.names:
            self._note(
                f"The recorded configuration injects faults, and so does this replay: {', '.join(self.drill.names)}."
            )

    def _note(self, sentence: str, *, doubt: bool = False) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)
            if doubt:
                self.doubts.append(sentence)

    # -------------------------------------------------------------------------------------------------- the verdict

    def _report(self, found: list[RankReplay]) -> ReplayReport:
        order = ("reproduced", "close", "different", "raised", "not reproduced")
        outcome = max((r.outcome for r in found), key=order.index)
        reduction = self._reduction()
        sentences = [self._words(row) for row in found]
        if reduction is not None and not reduction["equal"]:
            sentences.append(
                f"The mean of the ranks' gradients has norm {reduction['recomputed']:.6g}, the collective gave"
                f" {reduction['recorded']:.6g}."
            )
        if self.alone is not None:
            sentences.append(self.alone.sentence)
        return ReplayReport(
            incident=self.bundle.incident.number,
            step=self.bundle.step,
            reproduced=outcome == "reproduced",
            outcome=outcome,
            sentence=" ".join(sentences),
            recorded_verdict=in_words(self.bundle.incident.verdict),
            ranks=found,
            module=self.alone,
            reduction=reduction,
            notes=self.notes,
        )

    def _words(self, row: RankReplay) -> str:
        said = self._said(row)
        return f"Rank {row.rank}: {said}" if self.bundle.world_size > 1 else said[0].upper() + said[1:]

    def _said(self, row: RankReplay) -> str:
        base = row.computed[0]
        if row.outcome == "raised":
            return f"the step ends with {base.raised}."
        recorded, now = _shown(row.recorded), _shown(base.losses)
        if not row.recorded_finite and base.finite:
            tail = (
                "with other weights than the step's, this proves nothing"
                if not self.exact_state
                else "the batch is another one"
                if row.batch_equal is False
                else "nothing in weights, data or random state explains it: transient, or state outside of them"
            )
            return f"not reproduced: recorded {recorded}, here {now} and finite; {tail}."
        if not base.finite:
            first = base.first or {}
            what = "different: not finite here" if row.recorded_finite else "reproduced: not finite again"
            text = f"{what} (loss {now}, gradient norm {base.grad_norm:.4g})"
            if first:
                where = f" in {first['module']}" if first["module"] else ""
                line = f", {first['line']}" if first["line"] else ""
                text += f"; first {first['kind']} {first['operator']}{where} ({first['phase']}{line})"
                if first["samples"]:
                    text += f", samples {', '.join(first['samples'][:3])}"
            return text + ". " + _in_wider(row)
        how = {
            "reproduced": f"reproduced: loss {now}, equal to the bit",
            "close": f"reproduced within rounding: loss {now}, recorded {recorded} ({row.difference:.2g} apart)",
            "different": f"different: loss {now}, recorded {recorded}",
        }[row.outcome]
        return " ".join(part for part in (f"{how}.", _in_wider(row), _carried(row)) if part)

    def _gradient(self) -> dict[str, Tensor] | None:
        """Mean over the ranks of their gradients; None where one is missing or not finite."""
        if not self.mean_gradient or self.ranks != list(range(self.bundle.world_size)):
            return None
        return {n: g / self.bundle.world_size for n, g in self.mean_gradient.items()}

    def _reduction(self) -> dict[str, Any] | None:
        if self.bundle.world_size == 1:
            return None
        if not self.mean_gradient or self.ranks != list(range(self.bundle.world_size)) or not self.exact_state:
            return None
        squares = sum(float((g / self.bundle.world_size).square().sum()) for g in self.mean_gradient.values())
        recorded = number(self.bundle.run["record"][0][SIGNAL_INDEX["grad_norm"]])
        mine = math.sqrt(squares)
        equal = math.isfinite(recorded) and abs(mine - recorded) <= REDUCED * max(recorded, 1e-12)
        return {"recorded": recorded, "recomputed": mine, "equal": equal}

    # ------------------------------------------------------------------------------------------------------- small

    def _nonfinite_gradient(self, rank: int) -> bool:
        row = self.bundle.run["record"][rank]
        # Under data parallelism one rank's NaN is everybody's: the rank's own loss decides where there are several.
        alone = self.bundle.world_size == 1
        return alone and bool(number(row[SIGNAL_INDEX["nonfinite_grads"]]) > 0)

    def _optimizer(self, trainer: Trainer) -> Any:
        index = int(self.bundle.run["optimizer"]["index"])
        return trainer.optimizers[min(index, len(trainer.optimizers) - 1)]

    def _is_32_bit(self) -> bool:
        return str(self.bundle.run["trainer"]["precision"]).startswith(("32", "64"))

    def _tolerance(self) -> float:
        return CLOSE if self._is_32_bit() else CLOSE_16

    def _why_no_window(self) -> str:
        return str(self.bundle.run["batch"]["why_not"] or self.bundle.run["state"]["why_not"] or "none was captured")


class _Ticking:
    """Around ``training_step``: brings the drill's faults to each micro-batch, and says when it is done."""

    def __init__(self, module: LightningModule, drill: Drill, tick: Tick) -> None:
        self.module, self.drill, self.tick = module, drill, tick

    def __enter__(self) -> None:
        inner, drill, tick = self.module.training_step, self.drill, self.tick
        places = count()

        @wraps(inner)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            drill.at(next(places))
            output = inner(*args, **kwargs)
            tick("", -1)
            return output

        self.module.__dict__["training_step"] = training_step

    def __exit__(self, *exc: object) -> None:
        self.module.__dict__.pop("training_step", None)


def bits_of(value: float) -> str:
    """A loss as the hex digits of its float32, as in the journal's ``loss_bits``.

    Example:
        >>> bits_of(1.0)
        '3f800000'
    """
    if math.isfinite(value) and abs(value) >= 3.4e38:
        return "overflow"
    return struct.pack(">f", value).hex()


def _from_checkpoint(bundle: Bundle, reference: dict[str, Any]) -> dict[str, Tensor]:
    """Parameters of the checkpoint that the bundle names, if it is still the same one."""
    from ..checkpoint.contents import MODEL
    from ..checkpoint.store import CheckpointError

    try:
        checkpoint, store = checkpoint_of(bundle, reference)
        found: dict[str, Tensor] = store.load_torch(checkpoint, MODEL)
    except (BundleError, CheckpointError) as error:
        raise BundleError(
            f"{bundle.path} holds no weights and refers to {reference['path']}: {error}. Let IncidentResponse write them"
            " (capture_state=True), or keep the checkpoint."
        ) from None
    return found


def _worst(row: RankReplay, result: ReplayResult) -> list[tuple[str, float]]:
    finite = all(map(math.isfinite, result.losses))
    pairs = [
        (name, float(loss))
        for names, losses in zip(row.samples, result.sample_losses, strict=False)
        if losses is not None and len(losses) == len(names)
        for name, loss in zip(names, losses, strict=True)
        # Where the whole is finite, a sample that is not has nothing that carries loss.
        if not finite or math.isfinite(float(loss))
    ]
    return sorted(pairs, key=lambda p: (math.isfinite(p[1]), -p[1] if math.isfinite(p[1]) else 0.0))[:5]


def _carried(row: RankReplay) -> str:
    if not row.worst_samples:
        return ""
    shown = ", ".join(f"{name} ({loss:.4g})" for name, loss in row.worst_samples[:3])
    return f"Most of the loss: {shown}."


def _in_wider(row: RankReplay) -> str:
    """What the other dtypes tell."""
    base, parts = row.computed[0], []
    for other in row.computed[1:]:
        if other.raised:
            parts.append(f"In {other.dtype} it raises {other.raised}.")
        elif not base.finite and other.finite:
            parts.append(f"In {other.dtype} it is finite (loss {_shown(other.losses)}): a value left its range.")
        elif not base.finite:
            parts.append(f"In {other.dtype} it is not finite either: not a matter of range or precision.")
        else:
            state = f"loss {_shown(other.losses)}" if other.finite else "not finite"
            parts.append(f"In {other.dtype}: {state}.")
    return " ".join(parts)


def _shown(losses: Sequence[float]) -> str:
    return ", ".join(f"{x:.6g}" for x in losses[:4]) + (" ..." if len(losses) > 4 else "") if losses else "none"
