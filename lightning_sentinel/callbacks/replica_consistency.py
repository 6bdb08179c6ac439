"""Compares the replicas of a data-parallel run bit by bit, and names the rank and the tensor that drifted."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives import gather_flat
from ..incidents import Finding, FindingKind
from ..limits import check_limits
from ..record import StepRecord
from ..state import lightning_private as private
from ..state.fingerprint import Difference, differences, digest, fingerprints
from ..state.tree import local
from .base import SentinelCallback, gather_objects, needs_telemetry

log = logging.getLogger("lightning_sentinel")

AGAIN = 10  # steps until the next look while the replicas differ: fewer than the probation of an incident
SYNCHRONISED = 3  # changes of a buffer that all replicas made alike, after which it is taken for synchronised
NAMED = 8  # tensors named in a finding, and compared by value
COMPARED_NUMEL = 2**22  # larger tensors are not exchanged to measure how far they have drifted apart
FAILED = -2  # in place of an owner: this rank could not look


@dataclass
class Witness:
    """What one rank says when the digests differ; exchanged as plain data.

    Attributes:
        table: Fingerprint of each tensor.
        owners: The lowest rank that holds the same part of each tensor.
        changed: Whether the tensor's bits have changed since the last look; a name is missing where that is not known.
        updated: Names of tensors that the optimizers' updates may change.
        counted: Updates since the last look by the optimizers' own counters; None where they do not count.
        applied: Updates since the last look by what telemetry saw on this rank.
    """

    table: dict[str, tuple[int, int]]
    owners: dict[str, int]
    changed: dict[str, bool]
    updated: set[str]
    counted: int | None
    applied: int


class ReplicaConsistency(SentinelCallback):
    """Compares parameters, buffers and optimizer state of all data-parallel replicas, bit by bit.

    Every ``every_n_steps`` steps, at the gate, each rank folds its tensors into one fingerprint where they lie; one gather
    of a few integers tells whether all replicas agree. Only where they do not are the fingerprints of the single tensors
    exchanged: the finding names the tensors and the rank outside the majority. Two replicas have no majority: then the count
    of updates decides (a rank that skipped one), or a tensor that no update touches and that has changed on one rank only;
    otherwise the finding names no rank, and triage compares both with the snapshots.

    Needs :class:`~lightning_sentinel.RankTelemetry`, which calls :meth:`observe`. With one process, and where the strategy
    keeps no replicas (a fully sharded model), it does nothing and says so once. Under HSDP and tensor parallelism only ranks
    that hold the same shard are compared.

    Running statistics of BatchNorm differ between ranks by design unless they are synchronised (``SyncBatchNorm``). With
    ``buffers="auto"`` they are left out, and so is every buffer that all ranks change, each by its own data.

    Example:
        >>> from lightning_sentinel import ReplicaConsistency
        >>> ReplicaConsistency(every_n_steps=100).every_n_steps
        100

    Journalled: ``replicas.compared`` at the start (how many tensors, what is left out and why),
    ``replicas.local_buffers`` when further buffers are left out, ``replicas.agree_again`` where replicas have differed and
    ``replicas.still_differ`` where they do at the end of a fit that no exception ends, ``replicas.not_compared`` where a
    rank could not look (no memory left): then no rank goes by that look; and the finding ``replica_drift``, an
    incident, with ``rank:<r>`` and ``parameter:<name>``, ``buffer:<name>`` or ``optimizer:<key>`` as culprits. Nothing is
    logged to the loggers.

    Args:
        every_n_steps: Steps between two looks. While replicas differ, at most 10.
        buffers: ``auto`` compares the buffers that are the same on all ranks by design, ``all`` every one, ``none`` none.
        optimizer: Also compare the optimizers' state and learning rates.
    """

    fresh_state = compares_ranks = True

    def __init__(self, every_n_steps: int = 25, buffers: str = "auto", optimizer: bool = True) -> None:
        check_limits("ReplicaConsistency", locals())
        self.every_n_steps, self.buffers, self.optimizer = every_n_steps, buffers, optimizer
        self.equal_step: int | None = None
        self.local_buffers: set[str] = set()
        self._fit: tuple[Trainer, LightningModule] | None = None
        self._differ = False
        self._parted_step: int | None = None
        self._forget()

    def _forget(self) -> None:
        """What is known of the last look, gone: another fit, or another path."""
        self._looked: tuple[int, int] | None = None
        self._last: tuple[list[str], Tensor] | None = None
        self._counters: list[Tensor | float | None] | None = None
        self._applied = 0
        self._alike: dict[str, int] = {}

    # ------------------------------------------------------------------------------------------------- life of a fit

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        needs_telemetry(trainer, self, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        self._fit = None
        if trainer.world_size == 1:
            return
        reason = private.no_replicas(trainer)
        self._layouts = _layouts(pl_module)
        named = list(self._named(trainer, pl_module)) if reason is None else []
        everyone = gather_objects(trainer, [(reason, [n for n, _ in named], list(self._layouts))])
        reason = next((r for r, _, _ in everyone if r is not None), None)
        if reason is None and any(part[1:] != everyone[0][1:] for part in everyone):
            reason = "the ranks hold tensors of different names"
        owners = [self._owner(t) for _, t in named]
        held = [o for o in owners if o is not None]
        if reason is None and not held:
            reason = "every tensor is sharded: no rank holds a replica of another's part"
        self.context(trainer).write(
            trainer,
            "replicas.compared",
            tensors=len(held) if reason is None else 0,
            reason=reason,
            left_out=sorted({n for n, t in pl_module.named_buffers() if not self._compares(n)})[:64],
        )
        if reason is not None:
            log.info("ReplicaConsistency compares nothing: %s.", reason)
            return
        self._fit = (trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._fit = None
        self._forget()

    # ------------------------------------------------------------------------------------------------ what is compared

    def _named(self, trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, Tensor]]:
        """Everything that may have replicas: ``parameter:``, ``buffer:`` and ``optimizer:`` names."""
        sharded = private.shards(trainer)
        ignored = private.ddp_ignored(trainer)
        # What a sharding strategy leaves alone it does not synchronise either: only frozen it is the same everywhere.
        compared = {
            name: parameter
            for name, parameter in module.named_parameters()
            if name not in ignored and (not sharded or _is_sharded(parameter) or not parameter.requires_grad)
        }
        for name, parameter in compared.items():
            yield f"parameter:{name}", parameter
        if self.buffers != "none":
            self._own_by_design = _own_statistics(module) if self.buffers == "auto" else set()
            for name, buffer in module.named_buffers():
                if name not in ignored and self._compares(name):
                    yield f"buffer:{name}", buffer
        if self.optimizer:
            for index, optimizer in enumerate(trainer.optimizers):
                if not private.partitions_state(optimizer):
                    yield from _state_of(optimizer, index, {id(p): n for n, p in compared.items()})

    def _compares(self, buffer: str) -> bool:
        return buffer not in self.local_buffers and buffer not in getattr(self, "_own_by_design", ())

    def _owner(self, tensor: Tensor) -> int | None:
        """The lowest rank that holds the same part of the tensor; None where no other rank does."""
        if not _is_sharded(tensor):
            return 0
        layout = _layout(tensor)
        return self._layouts.get(layout)

    # ------------------------------------------------------------------------------------------------------- the look

    def observe(self, record: StepRecord) -> list[Finding]:
        """Compare if it is time; the same findings on every rank."""
        if self._fit is None or not self._due(record):
            return []
        trainer, module = self._fit
        self._looked = (record.attempt, record.step)
        device = trainer.strategy.root_device
        owned: list[tuple[str, Tensor, int]] = []
        names: list[str] = []
        table = torch.zeros(0, 2, dtype=torch.int64, device=device)
        classes, problem = [0, *self._layouts.values()], ""
        try:
            owned = [(n, t, o) for n, t in self._named(trainer, module) if (o := self._owner(t)) is not None]
            names, table = fingerprints(((n, t) for n, t, _ in owned), device)
            packed = self._packed(owned, names, table, classes)
        except Exception as error:  # no memory left on this rank, say: the others are waiting in the gather
            problem = f"rank {trainer.global_rank}: {type(error).__name__}: {error}"[:300]
            packed = torch.full((3 * len(classes),), FAILED, dtype=torch.int64, device=device)
        everyone = gather_flat(packed, trainer.world_size).view(-1, len(classes), 3).cpu().tolist()
        if any(row[0][0] == FAILED for row in everyone):
            self._say_not_compared(trainer, problem)
            return []
        owners = {n: o for n, _, o in owned}
        findings = [] if _agree(everyone) else self._name(trainer, record, owned, names, table, owners)
        self._note_episode(trainer, record.step, bool(findings))
        if not findings:
            self._count_changes(names, table)
            self.equal_step = record.step
            self._last = (names, table)
            self._counters = [_counter(o) for o in trainer.optimizers]
            self._applied = self.context(trainer).applied_steps
        return findings

    @staticmethod
    def _packed(
        owned: list[tuple[str, Tensor, int]], names: list[str], table: Tensor, classes: list[int | None]
    ) -> Tensor:
        """Owner and digest of each class of tensors, ``[3 * classes]`` int64."""
        mine = []
        for i, owner in enumerate(classes):
            # The replicated tensors are a class of their own, although rank 0 may own a shard, too.
            chosen = [k for k, (_, t, o) in enumerate(owned) if o == owner and _is_sharded(t) == (i > 0)]
            rows = torch.tensor(chosen, dtype=torch.int64, device=table.device)
            part = digest([names[k] for k in chosen], table[rows])
            mine.append(torch.cat([part.new_tensor([-1 if owner is None else owner]), part]))
        return torch.stack(mine).reshape(-1)

    def _say_not_compared(self, trainer: Trainer, problem: str) -> None:
        """A look that failed on some rank tells nothing on any; the next one is at the next interval."""
        problems = gather_objects(trainer, [problem] if problem else [])
        self.context(trainer).write(trainer, "replicas.not_compared", reason="; ".join(problems[:NAMED]))
        if trainer.is_global_zero:
            log.warning("ReplicaConsistency could not compare the replicas this time: %s.", "; ".join(problems[:NAMED]))

    def _note_episode(self, trainer: Trainer, step: int, differ: bool) -> None:
        """Where a drift begins and where it ends; what lies between is looked at, and not written again."""
        if differ and not self._differ:
            self._parted_step = step
        elif self._differ and not differ:
            self.context(trainer).write(trainer, "replicas.agree_again", seen_step=self._parted_step, agree_step=step)
            self._parted_step = None
        self._differ = differ

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None and self._differ:
            self.context(trainer).write(
                trainer, "replicas.still_differ", seen_step=self._parted_step, equal_step=self.equal_step
            )

    def _due(self, record: StepRecord) -> bool:
        if self._looked is None or self._looked[0] != record.attempt:
            return True
        step = self._looked[1]
        if self._differ:
            return record.step >= step + min(AGAIN, self.every_n_steps)
        return record.step // self.every_n_steps > step // self.every_n_steps

    def _count_changes(self, names: list[str], table: Tensor) -> None:
        """How often each buffer has changed alike on all replicas. Buffers are few: what is read here is small."""
        before = self._before()
        buffers = [i for i, n in enumerate(names) if n.startswith("buffer:")]
        if not before or not buffers:
            return
        for i, row in zip(buffers, table[buffers].tolist(), strict=True):
            if names[i] in before and before[names[i]] != tuple(row):
                self._alike[names[i]] = self._alike.get(names[i], 0) + 1

    def _before(self) -> dict[str, tuple[int, int]]:
        if self._last is None:
            return {}
        names, table = self._last
        return {n: (a, b) for n, (a, b) in zip(names, table.tolist(), strict=True)}

    # ---------------------------------------------------------------------------------- who differs: the rare, slow part

    def _witness(
        self,
        trainer: Trainer,
        owned: list[tuple[str, Tensor, int]],
        names: list[str],
        table: Tensor,
        owners: dict[str, int],
    ) -> Witness:
        current = {n: (a, b) for n, (a, b) in zip(names, table.tolist(), strict=True)}
        before = self._before()
        counts = [_counter(o) for o in trainer.optimizers]
        counted = None
        if self._counters is not None and len(self._counters) == len(counts) and None not in counts:
            counted = sum(int(now or 0) - int(then or 0) for now, then in zip(counts, self._counters, strict=True))
        return Witness(
            table=current,
            owners=owners,
            changed={n: value != before[n] for n, value in current.items() if n in before},
            updated={n for n, t, _ in owned if n.startswith("optimizer:") or t.requires_grad},
            counted=counted,
            applied=self.context(trainer).applied_steps - self._applied,
        )

    def _name(
        self,
        trainer: Trainer,
        record: StepRecord,
        owned: list[tuple[str, Tensor, int]],
        names: list[str],
        table: Tensor,
        owners: dict[str, int],
    ) -> list[Finding]:
        mine = self._witness(trainer, owned, names, table, owners)
        everyone: list[Witness] = gather_objects(trainer, [mine])
        found = differences([w.table for w in everyone], [w.owners for w in everyone])
        if self.buffers == "auto":
            found = self._without_local(trainer, found, everyone)
        if not found:
            return []
        judged = judge(found, everyone)
        largest = _largest_difference(trainer, found, {n: t for n, t, _ in owned})
        return [self._finding(record, found, judged, largest)]

    def _without_local(self, trainer: Trainer, found: list[Difference], everyone: list[Witness]) -> list[Difference]:
        """Leave out the buffers that each rank changes by its own data."""
        own = [d.name for d in found if d.name.startswith("buffer:") and self._is_local(d, everyone)]
        if own:
            self.local_buffers |= {n.removeprefix("buffer:") for n in own}
            self.context(trainer).write(
                trainer,
                "replicas.local_buffers",
                buffers=[n.removeprefix("buffer:") for n in own],
                reason="every rank has changed them, each by its own data",
            )
        return [d for d in found if d.name not in own]

    def _is_local(self, difference: Difference, everyone: list[Witness]) -> bool:
        if self._alike.get(difference.name, 0) >= SYNCHRONISED:
            return False
        # At the first look nothing is known of before: the forward has run, DDP had made them equal until then.
        return all(everyone[r].changed.get(difference.name, True) for r in difference.replicas)

    def _finding(
        self, record: StepRecord, found: list[Difference], judged: Judgement, largest: float | None
    ) -> Finding:
        names = [d.name for d in found]
        replicas = sorted({r for d in found for r in d.replicas})
        last = "at the first look" if self.equal_step is None else f"equal at step {self.equal_step}"
        apart = "" if largest is None else f", by up to {largest:.3g}" if largest else ", in the sign of zero"
        who = (
            f"rank {', '.join(map(str, judged.ranks))} has drifted from the other replicas"
            if judged.ranks
            else f"the replicas on ranks {', '.join(map(str, replicas))} differ"
        )
        message = (
            f"Before step {record.step}'s update {who} in {len(found)} tensor{'s' if len(found) > 1 else ''} ({last}):"
            f" {', '.join(names[:3])}{' ...' if len(found) > 3 else ''}{apart}. {judged.reason}"
        )
        return Finding(
            kind=FindingKind.REPLICA_DRIFT,
            detector="replica_consistency",
            step=record.step,
            score=float(len(found)),
            threshold=0.0,
            unit="tensors",
            message=message,
            since_step=record.step if self.equal_step is None else min(self.equal_step, record.step),
            ranks=judged.ranks,
            culprits=(*(f"rank:{r}" for r in judged.ranks), _culprit(names)),
            evidence={
                "tensors": names[:NAMED],
                "equal_step": self.equal_step,
                "replicas": replicas[:64],
                "decided_by": judged.rule,
                "largest_difference": largest,
            },
        )

    # -------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "equal_step": self.equal_step,
            "differ": self._differ,
            "parted_step": self._parted_step,
            "local_buffers": sorted(self.local_buffers),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.equal_step = state_dict["equal_step"]
        if not self._differ:  # a drift that a rollback has undone is over when the next look says so
            self._differ = state_dict["differ"]
            self._parted_step = state_dict.get("parted_step")  # states from before this was kept have none
        self.local_buffers = set(state_dict["local_buffers"])
        self._forget()


# --------------------------------------------------------------------------------------------------- the pure decision


@dataclass(frozen=True)
class Judgement:
    """Who is wrong (nobody named where it cannot be told), by which rule, and a sentence."""

    ranks: tuple[int, ...]
    rule: str
    reason: str = field(compare=False, default="")


def judge(found: list[Difference], everyone: list[Witness]) -> Judgement:
    """Which ranks have drifted: outside the majority; or, without one, by what updates can and cannot have done."""
    if all(d.majority for d in found):
        ranks = tuple(sorted({r for d in found for r in d.parted}))
        return Judgement(ranks, "majority", "The other replicas agree to the bit.")
    involved = sorted({r for d in found for r in d.replicas})
    due = max(everyone[r].applied for r in involved)
    made = {r: everyone[r].applied if everyone[r].counted is None else everyone[r].counted for r in involved}
    late = tuple(r for r in involved if made[r] != due)
    if late and len(late) < len(involved):
        told = ", ".join(f"rank {r} made {made[r]}" for r in late)
        return Judgement(late, "updates", f"{due} updates were due since then; {told}.")
    for difference in found:
        if all(difference.name in everyone[r].updated for r in difference.replicas):
            continue
        moved = tuple(r for r in difference.replicas if everyone[r].changed.get(difference.name))
        if moved and len(moved) < len(difference.replicas):
            named = ", ".join(map(str, moved))
            return Judgement(
                moved, "untouched", f"No update touches {difference.name}: it has changed on rank {named}."
            )
    return Judgement(
        (), "tie", "Neither has a majority: which of them is wrong cannot be told from the replicas alone."
    )


def _culprit(names: list[str]) -> str:
    """The first parameter, else the first buffer, else the optimizer's state by its key."""
    for kind in ("parameter:", "buffer:"):
        if first := next((n for n in names if n.startswith(kind)), None):
            return first
    return names[0].partition(" ")[0]


# ------------------------------------------------------------------------------------------------------------- helpers


def _agree(everyone: list[list[list[int]]]) -> bool:
    """Whether all ranks that hold the same parts have the same digests; ``[rank][class][owner, digest, digest]``."""
    for column in zip(*everyone, strict=True):
        by_owner: dict[int, set[tuple[int, ...]]] = {}
        for owner, *value in column:
            if owner >= 0:
                by_owner.setdefault(owner, set()).add(tuple(value))
        if any(len(values) > 1 for values in by_owner.values()):
            return False
    return True


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "_local_tensor")


def _layout(tensor: Any) -> str:
    """Mesh and placements of a DTensor in words: equal on all ranks, also where each sees its own part of the mesh."""
    kinds = ["replicate" if p.is_replicate() else "shard" for p in tensor.placements]
    return f"{tensor.device_mesh.mesh_dim_names} {tuple(tensor.device_mesh.shape)} {kinds}"


def _layouts(module: nn.Module) -> dict[str, int | None]:
    """Each layout of the sharded parameters, and the lowest rank that holds the same shard; None: nobody else does."""
    found: dict[str, int | None] = {}
    for tensor in module.parameters():
        if _is_sharded(tensor):
            found.setdefault(_layout(tensor), _lowest_replica(tensor))
    return found


def _lowest_replica(tensor: Any) -> int | None:
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if here is None:
        return None
    index = tuple(slice(None) if p.is_replicate() else c for p, c in zip(tensor.placements, here, strict=True))
    ranks = mesh.mesh[index].reshape(-1).tolist()
    return min(ranks) if len(ranks) > 1 else None


def _own_statistics(module: nn.Module) -> set[str]:
    """Buffers of normalisations that keep running statistics of this rank's data."""
    found = set()
    for path, m in module.named_modules():
        if isinstance(m, nn.modules.batchnorm._NormBase) and not isinstance(m, nn.SyncBatchNorm):
            found |= {f"{path}.{n}".lstrip(".") for n in ("running_mean", "running_var")}
    return found


def _state_of(optimizer: Optimizer, index: int, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    """State tensors of these parameters and learning rates of one optimizer, in its order."""
    prefix = f"optimizer[{index}]:" if index else "optimizer:"
    rates: list[float] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = names.get(id(parameter))
            if owner is None:
                continue
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{prefix}{key} of {owner}", value
        if not isinstance(group["lr"], Tensor):
            rates.append(float(group["lr"]))
    if rates:
        yield f"{prefix}lr", torch.tensor(rates, dtype=torch.float64)


def _counter(optimizer: Optimizer) -> Tensor | float | None:
    """The optimizer's own count of its updates, from the first parameter that has one; None where nothing counts."""
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, Tensor):
            return local(step.detach()).clone()
        if isinstance(step, int | float):
            return float(step)
    return None


def _largest_difference(trainer: Trainer, found: list[Difference], tensors: Mapping[str, Tensor]) -> float | None:
    """Largest distance between two replicas' values over the first tensors that differ on all ranks; None if not measured."""
    everybody = tuple(range(trainer.world_size))
    largest: float | None = None
    values = [d for d in found if not d.name.startswith("optimizer")] or found
    for difference in values[:NAMED]:
        tensor = tensors.get(difference.name)
        fits = bool(
            tensor is not None
            and difference.replicas == everybody
            and not _is_sharded(tensor)
            and tensor.is_floating_point()
            and 0 < tensor.numel() <= COMPARED_NUMEL
        )
        high = low = None
        if fits and tensor is not None:
            try:
                high = tensor.detach().to(trainer.strategy.root_device, torch.float32, copy=True)
                low = high.clone()
            except Exception:  # no memory for a copy on this rank
                low = None
        # A rank may lack the tensor (no state yet), or the memory: then nobody measures it.
        if not all(gather_objects(trainer, [low is not None])):
            continue
        assert high is not None
        assert low is not None
        torch.distributed.all_reduce(high, torch.distributed.ReduceOp.MAX)
        torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN)
        apart = float((high - low).max())
        largest = apart if largest is None else max(largest, apart)
    return largest
