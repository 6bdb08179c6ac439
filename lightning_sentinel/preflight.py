"""What can be known to be wrong before the first step: one function a check, each gives remarks in plain sentences.

A check looks at this rank only. What it finds is exchanged once, so that all ranks say, and refuse, alike.
"""

from __future__ import annotations

import copy
import hashlib
import math
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .journal import to_json
from .state import lightning_private as private
from .state.cursor import cursor_problems
from .state.fingerprint import digest, fingerprints, parted
from .state.tree import local

WARNING, NOTE = "warning", "note"
CHECKS = (
    "parameters",
    "warmup",
    "clipping",
    "epsilon",
    "coverage",
    "loader",
    "run_folder",
    "ranks",
    "initial_loss",
)

RISE_STEPS = 10  # steps of a schedule that are looked at for a rising rate
NAMED = 8  # names in one sentence
UNWRITABLE = "can't be written"

# Untrained logits of standard deviation s cost about s^2 / 2 nats above ln(vocabulary): half a nat is a deviation of 1.
LOSS_MARGIN_NATS, LOSS_MARGIN_RELATIVE = 0.5, 0.1

# State tensors of a parameter's size that an optimizer will make, by class; 2 for those that are not listed.
STATE_TENSORS = {"SGD": 1, "Adagrad": 1, "RMSprop": 1, "Lion": 1, "Adafactor": 1}


@dataclass(frozen=True)
class Remark:
    """One thing that a check has to say.

    Attributes:
        check: One of :data:`CHECKS`.
        message: What was found, what was expected, and what to do.
        level: ``warning``, or ``note`` for what may well be intended or could not be looked at.
        names: Parameters, files or keys concerned.
        ranks: Ranks that it holds for; empty for all.
    """

    check: str
    message: str
    level: str = WARNING
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "level": self.level,
            "message": self.message,
            "names": list(self.names[:64]),
            "ranks": list(self.ranks),
        }


def some(names: Sequence[str]) -> str:
    """A few names for a sentence.

    Example:
        >>> some(["a", "b"]), some([f"p{i}" for i in range(20)])
        ('a, b', 'p0, p1, p2, p3, p4, p5, p6, p7 and 12 more')
    """
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


# ---------------------------------------------------------------------------------------------------------- parameters


@dataclass(frozen=True)
class Weights:
    """What one rank sees of its parameters.

    Attributes:
        ranges: Least and largest value by name; NaN where the parameter holds one.
        bits: A fingerprint of all parameters that have the same values on every rank; None where they are sharded.
    """

    ranges: dict[str, tuple[float, float]]
    bits: tuple[int, ...] | None


@torch.no_grad()
def weights_of(module: nn.Module, device: torch.device, compare: bool = True) -> Weights:
    """Ranges, and to ``compare`` with other ranks a fingerprint, of the parameters; the host reads once."""
    named = [(n, local(p.detach())) for n, p in module.named_parameters()]
    # Uninitialised lazy parameters and those on the meta device have no values yet.
    held = [(n, t) for n, t in named if t.numel() and not t.is_meta and not nn.parameter.is_lazy(t)]
    if not held:
        return Weights({}, None)
    ranges = []
    for _, tensor in held:
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if values.element_size() == 1:  # 8-bit kinds have no minimum on every device
            values = values.to(torch.float32)
        ranges.append(torch.stack(values.aminmax()).to(device, torch.float64))
    sharded = any(hasattr(p, "_local_tensor") for p in module.parameters())
    compare = compare and not sharded
    bits = digest(*fingerprints(held, device)) if compare else torch.zeros(2, dtype=torch.int64, device=device)
    # One copy to the host for both: the integers travel as the bits of float64.
    packed = torch.cat([torch.stack(ranges).reshape(-1), bits.view(torch.float64)]).cpu().numpy()
    low_high = packed[:-2].reshape(-1, 2).tolist()
    return Weights(
        {n: (low, high) for (n, _), (low, high) in zip(held, low_high, strict=True)},
        tuple(packed[-2:].view(np.int64).tolist()) if compare else None,
    )


def over_ranks(everyone: Sequence[Weights]) -> dict[str, tuple[float, float]]:
    """The ranges of whole parameters, whose parts may lie on several ranks; NaN wins."""
    found: dict[str, tuple[float, float]] = {}
    for one in everyone:
        for name, (low, high) in one.ranges.items():
            before = found.get(name, (math.inf, -math.inf))
            found[name] = (float(np.minimum(before[0], low)), float(np.maximum(before[1], high)))
    return found


def parameters(ranges: Mapping[str, tuple[float, float]], shapes: Mapping[str, int]) -> list[Remark]:
    """Parameters that are not finite, and matrices whose elements are all the same.

    Args:
        ranges: Least and largest value by name.
        shapes: Number of dimensions by name; scales and offsets of one dimension usually start constant.
    """
    bad = [n for n, (low, high) in ranges.items() if not (math.isfinite(low) and math.isfinite(high))]
    flat = [n for n, (low, high) in ranges.items() if low == high and shapes.get(n, 0) >= 2 and n not in bad]
    constant, zero = [n for n in flat if ranges[n][0] != 0.0], [n for n in flat if ranges[n][0] == 0.0]
    remarks = []
    if bad:
        remarks.append(
            Remark(
                "parameters",
                f"{len(bad)} parameters hold non-finite values before the first step: {some(bad)}. Check their"
                " initialisation, or the checkpoint they were loaded from.",
                names=tuple(bad),
            )
        )
    if constant:
        remarks.append(
            Remark(
                "parameters",
                f"{len(constant)} matrices hold one and the same value everywhere: {some(constant)}. All their units"
                " compute the same and get the same gradient. Initialise them with random values.",
                names=tuple(constant),
            )
        )
    if zero:
        remarks.append(
            Remark(
                "parameters",
                f"{len(zero)} matrices are zero: {some(zero)}. That is usual for the last matrix of a branch; whether"
                " they receive a gradient is looked at in the first step.",
                NOTE,
                tuple(zero),
            )
        )
    return remarks


def zero_forever(names: Sequence[str]) -> Remark:
    """Zero matrices that receive no gradient."""
    return Remark(
        "parameters",
        f"{len(names)} matrices are zero and their gradient in the first step is zero, too: {some(names)}. No update will"
        " ever move them. Initialise at least one of two matrices that follow each other with random values.",
        names=tuple(names),
    )


# ------------------------------------------------------------------------------------------------ schedule and clipping


def is_adaptive(optimizer: Optimizer) -> bool:
    """Adam and its relatives, whose first updates have the full step size in every element; RAdam warms up by itself."""
    return any("betas" in group for group in optimizer.param_groups) and type(optimizer).__name__ != "RAdam"


def warmup(trainer: Trainer, module: LightningModule) -> list[Remark]:
    """Whether the rate of an adaptive optimizer rises at first."""
    if trainer.global_step > 0:
        return []
    rising = {id(o) for o, s in _schedulers(trainer) if rises(s)}
    unknown = {id(o) for o, s in _schedulers(trainer) if rises(s) is None}
    unseen = private.overrides(module, "optimizer_step") or private.overrides(module, "lr_scheduler_step")
    remarks = []
    for index, optimizer in enumerate(trainer.optimizers):
        if not is_adaptive(optimizer) or id(optimizer) in rising:
            continue
        name = type(optimizer).__name__ + (f" {index}" if len(trainer.optimizers) > 1 else "")
        if id(optimizer) in unknown or unseen or not (module.automatic_optimization or trainer.lr_scheduler_configs):
            where = (
                "the scheduler is none of torch's" if id(optimizer) in unknown else "the module sets the rate itself"
            )
            remarks.append(Remark("warmup", f"Whether {name}'s learning rate warms up can't be seen: {where}.", NOTE))
            continue
        remarks.append(
            Remark(
                "warmup",
                f"The learning rate of {name} starts at its peak: no schedule raises it over the first steps. The first"
                " updates of adaptive optimizers have full size in every element while the second moment rests on a few"
                " gradients. Start with a linear warm-up, e.g. LambdaLR(optimizer, lambda s: min(1, (s + 1) / 100)).",
            )
        )
    return remarks


def _schedulers(trainer: Trainer) -> Iterator[tuple[Any, Any]]:
    for config in trainer.lr_scheduler_configs:
        yield getattr(config.scheduler, "optimizer", None), config.scheduler


def rises(scheduler: Any, steps: int = RISE_STEPS) -> bool | None:
    """Whether a schedule's rate rises within its next steps; None where that can't be tried out.

    A shallow copy is stepped over a stand-in for the optimizer: neither schedule nor optimizer notice.

    Example:
        >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> rises(torch.optim.lr_scheduler.LinearLR(optimizer, 0.01)), rises(
        ...     torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        ... )
        (True, False)
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        return False
    if not isinstance(scheduler, LRScheduler):
        return None
    groups = scheduler.optimizer.param_groups
    plain = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    stand_in = torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(()))], **copy.deepcopy(values)} for values in plain], lr=0.0
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is stepped without its optimizer, on purpose
            tried = _standing_in(scheduler, stand_in)
            first = [float(group["lr"]) for group in stand_in.param_groups]
            for _ in range(steps):
                tried.step()
                now = [float(group["lr"]) for group in stand_in.param_groups]
                if any(b > a * (1.0 + 1e-9) for a, b in zip(first, now, strict=True)):
                    return True
    except Exception:  # a schedule of the user's own may need whatever it likes
        return None
    return False


def _standing_in(scheduler: LRScheduler, optimizer: Optimizer) -> LRScheduler:
    twin = copy.copy(scheduler)
    twin.optimizer = optimizer
    inner = getattr(twin, "_schedulers", None)
    if inner is not None:
        twin._schedulers = [_standing_in(s, optimizer) for s in inner]  # type: ignore[attr-defined]
    return twin


def clipping(trainer: Trainer, module: LightningModule) -> list[Remark]:
    """Whether gradients are clipped."""
    own = private.overrides(module, "configure_gradient_clipping")
    if (
        trainer.gradient_clip_val
        or own
        or any("max_grad_norm" in g for o in trainer.optimizers for g in o.param_groups)
    ):
        return []
    if not module.automatic_optimization:
        message = (
            "Whether gradients are clipped can't be seen in manual optimization: call self.clip_gradients yourself."
        )
        return [Remark("clipping", message, NOTE)]
    return [
        Remark(
            "clipping",
            "Gradients are not clipped: one bad batch moves the weights as far as it likes. Set"
            " Trainer(gradient_clip_val=1.0), or define configure_gradient_clipping.",
        )
    ]


# ------------------------------------------------------------------------------------------------------------- epsilon


def epsilon(trainer: Trainer, module: LightningModule) -> list[Remark]:
    """Epsilons that vanish in the dtype that they are added in."""
    remarks = []
    for optimizer in trainer.optimizers:
        found: dict[tuple[float, torch.dtype], int] = {}
        for group in optimizer.param_groups:
            if not isinstance(group.get("eps"), int | float):
                continue
            for dtype in {p.dtype for p in group["params"] if p.is_floating_point()}:
                # In a dtype's subnormal numbers a divisor has lost its digits, and many devices flush them to zero.
                if group["eps"] < torch.finfo(dtype).tiny:
                    found[group["eps"], dtype] = found.get((group["eps"], dtype), 0) + 1
        for eps, dtype in found:
            tiny = torch.finfo(dtype).tiny
            remarks.append(
                Remark(
                    "epsilon",
                    f"{type(optimizer).__name__} adds eps={eps:g} to moments in {_name(dtype)}, whose smallest normal"
                    f" number is {tiny:.3g}: after quiet gradients it divides by zero. Keep the parameters in float32"
                    f" (mixed precision), or use eps of at least {tiny:.0e}.",
                )
            )
    gone = []
    for path, m in module.named_modules():
        own = [m.__dict__.get(key) for key in ("eps", "epsilon", "variance_epsilon")]
        added = next((value for value in own if isinstance(value, float)), None)
        kept = next((p.dtype for p in m.parameters(recurse=False) if p.is_floating_point()), None)
        if added is not None and kept is not None and float(torch.tensor(added, dtype=kept)) == 0.0:
            gone.append(f"{path} ({added:g} in {_name(kept)})")
    if gone:
        remarks.append(
            Remark(
                "epsilon",
                f"The epsilon of {len(gone)} modules is zero in the dtype of their parameters: {some(gone)}. A row of zeros"
                " divides by zero.",
                names=tuple(gone),
            )
        )
    return remarks


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------------------ coverage


def coverage(trainer: Trainer, module: LightningModule) -> list[Remark]:
    """Every trainable parameter in an optimizer, once."""
    within = [Counter(id(p) for group in o.param_groups for p in group["params"]) for o in trainer.optimizers]
    owners = Counter(p for counts in within for p in counts)
    names = {id(p): n for n, p in module.named_parameters()}
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
    missing = [n for n, p in trainable.items() if id(p) not in owners]
    twice = [n for n, p in trainable.items() if owners[id(p)] > 1]
    repeated = [n for n, p in trainable.items() if any(counts[id(p)] > 1 for counts in within)]
    strangers = len(owners.keys() - names.keys())
    remarks = []
    if missing:
        remarks.append(
            Remark(
                "coverage",
                f"{len(missing)} of {len(trainable)} trainable parameters are in no optimizer and never change:"
                f" {some(missing)}. Add them in configure_optimizers, or set requires_grad=False.",
                names=tuple(missing),
            )
        )
    if twice:
        remarks.append(
            Remark(
                "coverage",
                f"{len(twice)} parameters are in more than one optimizer, and each of them steps: {some(twice)}.",
                names=tuple(twice),
            )
        )
    if repeated:
        remarks.append(
            Remark(
                "coverage",
                f"{len(repeated)} parameters are more than once in one optimizer, which steps them as often:"
                f" {some(repeated)}. Give each parameter once.",
                names=tuple(repeated),
            )
        )
    if strangers:
        remarks.append(
            Remark(
                "coverage",
                f"{strangers} parameters in the optimizers are none of the module's: they are neither saved nor moved to"
                " the device, nor synchronised between ranks. Make them attributes of the module.",
            )
        )
    return remarks


# -------------------------------------------------------------------------------------------------- loader and run folder


def loader(trainer: Trainer, module: LightningModule) -> list[Remark]:
    """Whether the data position can be saved and put back."""
    return [Remark("loader", problem) for problem in dict.fromkeys(cursor_problems(trainer))]


def checkpoint_bytes(trainer: Trainer, module: nn.Module) -> int:
    """About the size of one checkpoint of all ranks: parameters, buffers, and the state that the optimizers will hold."""
    size = sum(local(t).nbytes for t in [*module.parameters(), *module.buffers()])
    for optimizer in trainer.optimizers:
        copies = STATE_TENSORS.get(type(optimizer).__name__, 2)
        if type(optimizer).__name__ == "SGD" and not any(g.get("momentum") for g in optimizer.param_groups):
            copies = 0
        size += copies * sum(local(p).nbytes for group in optimizer.param_groups for p in group["params"])
    sharded = any(hasattr(p, "_local_tensor") for p in module.parameters())
    return size * (trainer.world_size if sharded else 1)


def run_folder(folder: Path, needed: int, checkpoints: int) -> list[Remark]:
    """Whether the folder can be written and holds so many checkpoints.

    Args:
        folder: The run folder; it may not exist yet.
        needed: Bytes of one checkpoint.
        checkpoints: How many must fit, the one being written included.
    """
    existing = next(p for p in [folder, *folder.parents] if p.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"preflight")
            file.flush()
    except OSError as error:
        message = f"{existing} {UNWRITABLE} ({error.strerror or error}): neither journal nor checkpoints will be kept."
        return [Remark("run_folder", f"{message} Set run_dir to a folder with write permission and space.")]
    free = shutil.disk_usage(existing).free
    if checkpoints and free < checkpoints * needed:
        return [
            Remark(
                "run_folder",
                f"{existing} has {free / 2**30:.3g} GiB free, {checkpoints} checkpoints of about {needed / 2**30:.3g} GiB"
                f" need {checkpoints * needed / 2**30:.3g} GiB. Free space, lower ForensicCheckpoint's keep, or move"
                " run_dir.",
            )
        ]
    return []


# --------------------------------------------------------------------------------------------------------------- ranks


def settings(
    trainer: Trainer, config: Mapping[str, Any] | None, module: LightningModule, folder: str
) -> dict[str, str]:
    """Short hashes of what must be the same on every rank, by key. The run folder is left out: its name may hold a time."""
    values: dict[str, Any] = {
        "trainer.accumulate_grad_batches": trainer.accumulate_grad_batches,
        "trainer.max_steps": trainer.max_steps,
        "trainer.max_epochs": trainer.max_epochs,
        "trainer.gradient_clip_val": trainer.gradient_clip_val,
        "trainer.precision": str(trainer.precision),
    }
    for index, optimizer in enumerate(trainer.optimizers):
        for number, group in enumerate(optimizer.param_groups):
            plain = {k: v for k, v in group.items() if isinstance(v, int | float | str | bool | tuple | None)}
            values |= {f"optimizer[{index}].{number}.{k}": v for k, v in plain.items()}
    values |= dict(_flat("config", config or {}))
    values |= dict(_flat("hparams", dict(module.hparams)))
    found = {}
    for key, value in values.items():
        text = to_json({"": value}) if _is_plain(value) else type(value).__qualname__
        if not folder or folder not in text:
            found[key] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return found


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}", inner)
    else:
        yield prefix, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(v) for v in value)
    return value is None or isinstance(value, str | int | float | bool)


def ranks(
    versions: Sequence[Mapping[str, str]], configs: Sequence[Mapping[str, str]], bits: Sequence[tuple[int, ...] | None]
) -> list[Remark]:
    """Where ranks differ: software, configuration, initial weights. One entry for each rank in each argument."""
    remarks = []
    for what, told, advice in (
        ("software versions", versions, "Start all ranks from the same environment."),
        ("configuration", configs, "Start all ranks with the same configuration."),
    ):
        keys = dict.fromkeys(k for one in told for k in one)
        differing = {k: odd for k in keys if (odd := parted([one.get(k) for one in told]))}
        if differing:
            odd = sorted({r for who in differing.values() for r in who})
            values = ""
            if what == "software versions":
                first = next(iter(differing))
                values = f" ({first}: {', '.join(sorted({str(one.get(first)) for one in told}))})"
            remarks.append(
                Remark(
                    "ranks",
                    f"The {what} of {_of(odd, len(told))} differ: {some(list(differing))}{values}. {advice}",
                    names=tuple(differing),
                    ranks=tuple(odd) if len(odd) < len(told) else (),
                )
            )
    held = [b for b in bits if b is not None]
    odd = parted(held) if len(held) == len(bits) else []
    if odd:
        remarks.append(
            Remark(
                "ranks",
                f"The initial weights of {_of(odd, len(bits))} differ, bit for bit. Build the model from the same seed on"
                " every rank, and check that the strategy sends rank 0's weights to all.",
                ranks=tuple(odd) if len(odd) < len(bits) else (),
            )
        )
    return remarks


def _of(odd: Sequence[int], world: int) -> str:
    if len(odd) == world:
        return "the ranks"
    return f"rank{'s' if len(odd) > 1 else ''} {some([str(r) for r in odd])} and of the others"


def merged(everyone: Sequence[Sequence[Remark]]) -> list[Remark]:
    """Every rank's remarks, each once, with the ranks that have it where not all do."""
    holders: dict[Remark, list[int]] = {}
    for rank, mine in enumerate(everyone):
        for remark in mine:
            holders.setdefault(remark, []).append(rank)
    return [
        r if r.ranks or len(who) == len(everyone) else replace(r, ranks=tuple(dict.fromkeys(who)))
        for r, who in holders.items()
    ]


# -------------------------------------------------------------------------------------------------------- initial loss


def initial_loss(loss_nats: float, vocabulary: int) -> list[Remark]:
    """The first loss against the uniform guess.

    Example:
        >>> initial_loss(5.7, 257)
        []
        >>> [r.level for r in initial_loss(31.0, 257)], [r.level for r in initial_loss(1.2, 257)]
        (['warning'], ['note'])
    """
    uniform = math.log(vocabulary)
    margin = max(LOSS_MARGIN_NATS, LOSS_MARGIN_RELATIVE * uniform)
    if not math.isfinite(loss_nats):
        return []  # that has detectors of its own
    guess = f"ln({vocabulary}) = {uniform:.3f} nats, the loss of a uniform guess"
    if loss_nats > uniform + margin:
        spread = math.sqrt(2.0 * (loss_nats - uniform))
        message = (
            f"The first loss is {loss_nats:.3f} nats, expected about {guess}. An untrained model that is this sure of itself"
            f" has logits with a standard deviation of about {spread:.2g}: make the initial weights of the output (or of a"
            " tied embedding) smaller. Or the loss is summed where a mean is meant."
        )
        return [Remark("initial_loss", message)]
    if loss_nats < uniform - margin:
        message = (
            f"The first loss is {loss_nats:.3f} nats, below {guess}. That is right for weights that were trained before; with"
            " fresh weights the targets leak into the input, or the loss is divided once too often."
        )
        return [Remark("initial_loss", message, NOTE)]
    return []


class OutputWidth:
    """Learns the number of classes from the first forward: the last dimension of the last output with one row per target.

    Forward hooks for one micro-batch; nothing is computed and nothing read.
    """

    def __init__(self, module: nn.Module, targets: Tensor) -> None:
        self.width: int | None = None
        self._rows = targets.numel()
        self._handles = [m.register_forward_hook(self._look) for m in module.modules() if not any(m.children())]

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.dim() >= 2:
            rows = output.numel() // max(output.shape[-1], 1)
            # Hugging Face models shift inside: one row more per sequence than there are targets is theirs.
            if rows == self._rows and output.shape[-1] > 1:
                self.width = output.shape[-1]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def is_compiled(module: nn.Module) -> bool:
    """Whether a part of the module is compiled: hooks put on it now would make it compile again."""
    return any(
        private.is_compiled(m) or getattr(m, "_compiler_ctx", None) or hasattr(m, "_orig_mod") for m in module.modules()
    )
