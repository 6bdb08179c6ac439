"""What a replay hears of single tokens: the loss of each, and how much the model itself expected.

The place where logits and targets meet is heard: torch's ``cross_entropy`` and ``nll_loss`` (and so ``nn.CrossEntropyLoss``
and ``nn.NLLLoss``), in one call or in chunks, and a ``gather`` or an index from a ``log_softmax``. A loss that never has
logits at hand (a fused kernel) is not heard; a module may then say it itself, by ``token_losses(batch, batch_idx)``.

The entropy of the prediction is the loss that the model expects there. On data of a kind that it knows, its mean loss is
close to that (a trained model is calibrated); where labels contradict the inputs, the loss is far above it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..state import lightning_private as _private
from .window import tensors

HOOK = "token_losses"
NOT_HEARD = (
    "not available: neither cross_entropy or nll_loss of torch nor an index into a log_softmax was called (a fused loss?);"
    " give the module a method token_losses(batch, batch_idx), see docs/probes.md"
)
NOT_HEARD_COMPILED = "not available: the loss is computed inside of what is compiled"
ELEMENTS = 2**24  # of logits at a time: 64 MiB in float32, whatever the vocabulary


@dataclass(frozen=True)
class TokenLosses:
    """Losses of one micro-batch's tokens.

    Attributes:
        loss: Nats, flat, on the CPU; NaN where a target is ignored.
        entropy: What the model expected there, nats, likewise; NaN where that is not known.
        heard: Where they were heard: ``cross_entropy``, ``nll_loss``, ``log_softmax`` or ``token_losses``.
        in_order: Whether they lie sample after sample.
    """

    loss: Tensor
    entropy: Tensor
    heard: str = "cross_entropy"
    in_order: bool = True

    def by_sample(self, batch_size: int) -> tuple[Tensor, Tensor] | None:
        """Loss and entropy as ``[batch, tokens]``; None where that is not known, or they do not divide evenly."""
        if batch_size < 1 or self.loss.numel() % batch_size or not self.in_order:
            return None
        return self.loss.view(batch_size, -1), self.entropy.view(batch_size, -1)

    def quantiles(self, at: Sequence[float]) -> list[float]:
        """Quantiles of the losses that are known, in nats; none where none is."""
        known = self.loss[~self.loss.isnan()].double()
        if not known.numel():
            return []
        places = torch.tensor(at, dtype=torch.float64) * (known.numel() - 1)
        ordered = known.sort().values  # torch's own quantile takes 2**24 values at most
        low, high = ordered[places.floor().long()], ordered[places.ceil().long()]
        share = places.frac()
        found: list[float] = torch.where(share == 0, low, low + share * (high - low)).tolist()
        return found


@dataclass(frozen=True)
class _Call:
    """One call in which logits met targets; all flat, on the CPU."""

    kind: str
    classes: int
    targets: Tensor
    loss: Tensor
    entropy: Tensor


class CrossEntropies(TorchFunctionMode):
    """Listens to losses with class indices; changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._heard: list[_Call] = []
        self._logs: MutableMapping[Tensor, None] = WeakIdKeyDictionary()  # what came out of a log_softmax

    def aside(self) -> AbstractContextManager[None]:
        """Does not listen inside: for what was compiled where nobody listened."""
        return _private.without_mode(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy or func is F.nll_loss:
            self._listen(func, *args, **kwargs)
        out = func(*args, **kwargs)
        if func in _LOG_SOFTMAX or (func in _VIEWS and args and self._is_log(args[0])):
            self._follow(func, out, args, kwargs)
        elif func in _PICKS and args and self._is_log(args[0]):
            self._picked(func, *args, **kwargs)
        return out

    # ------------------------------------------------------------------------------- losses that are given as such

    @torch.no_grad()
    def _listen(
        self,
        func: Any,
        input: Tensor,
        target: Tensor,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        *_: Any,
        **__: Any,
    ) -> None:
        if target.is_floating_point() or input.dim() < 2 or target.dim() != input.dim() - 1 or not target.numel():
            return
        rows, wanted = input.detach().movedim(1, -1).reshape(-1, input.shape[1]), target.reshape(-1)
        kind = "cross_entropy" if func is F.cross_entropy else "nll_loss"
        self._add(kind, rows, wanted, wanted != ignore_index, logits=func is F.cross_entropy)

    def _add(self, kind: str, rows: Tensor, wanted: Tensor, known: Tensor, *, logits: bool) -> None:
        """Take up ``rows``, logits or log probabilities ``[N, C]``, and their targets ``[N]``."""
        losses, entropies = [], []
        size = max(1, ELEMENTS // rows.shape[1])
        for part, picks in zip(torch.split(rows, size), torch.split(wanted, size), strict=True):
            logs = part.float().log_softmax(1) if logits else part.float()
            losses.append(-logs.gather(1, picks.clamp(0, rows.shape[1] - 1).unsqueeze(1)).squeeze(1))
            entropies.append(-(logs.exp() * logs).nan_to_num().sum(1))
        nan = torch.full_like(losses[0][:1], torch.nan)
        loss, entropy = (torch.where(known, torch.cat(x), nan).cpu() for x in (losses, entropies))
        targets = torch.where(known, wanted, -1).cpu()
        self._heard.append(_Call(kind, rows.shape[1], targets, loss, entropy))

    # ------------------------------------------------------------------------------ log probabilities and an index

    def _is_log(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value in self._logs

    def _follow(self, func: Any, out: Any, args: Any, kwargs: Any) -> None:
        """Note what is a table of log probabilities: a log_softmax over the last dimension, and views of one."""
        if func in _LOG_SOFTMAX:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if dim is None or dim % args[0].dim() != args[0].dim() - 1:
                return
        elif isinstance(args[1] if len(args) > 1 else None, tuple) and any(
            isinstance(i, Tensor) and not i.dtype.is_floating_point and i.dtype != torch.bool for i in args[1]
        ):
            self._indexed(*args)
            return
        if isinstance(out, Tensor) and out.dim() > 1 and out.shape[-1] == args[0].shape[-1]:
            self._logs[out] = None

    @torch.no_grad()
    def _picked(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> None:
        """``gather`` and ``take_along_dim``: one entry of each row."""
        given = [*args, *kwargs.values()]
        index = next((x for x in given if isinstance(x, Tensor)), None)
        dim = next((x for x in given if isinstance(x, int) and not isinstance(x, bool)), None)
        if index is None or dim is None or dim % input.dim() != input.dim() - 1 or index.shape[-1] != 1:
            return
        if index.shape[:-1] != input.shape[:-1]:
            return
        wanted = index.reshape(-1)
        rows = input.detach().reshape(-1, input.shape[-1])
        self._add("log_softmax", rows, wanted, torch.ones_like(wanted, dtype=torch.bool), logits=False)

    @torch.no_grad()
    def _indexed(self, input: Tensor, place: Any, *_: Any) -> None:
        """``logs[rows, targets]``."""
        rows_and_targets = [i for i in place if isinstance(i, Tensor)] if input.dim() == 2 and len(place) == 2 else []
        if len(rows_and_targets) != 2 or rows_and_targets[0].shape != rows_and_targets[1].shape:
            return
        rows, wanted = (i.reshape(-1) for i in rows_and_targets)
        known = torch.ones_like(wanted, dtype=torch.bool)
        self._add("log_softmax", input.detach()[rows], wanted, known, logits=False)

    # ------------------------------------------------------------------------------------------------------ result

    def result(self, batch: Any = None) -> TokenLosses | None:
        """The model's own loss: the calls with the most targets.

        Several calls of one kind over the same number of classes are the chunks of one loss if together they have no more
        targets than the batch; otherwise they are several losses (heads that predict further ahead), and the first of the
        largest is taken. ``batch`` also tells which targets are none, where the call itself does not.
        """
        integers = [t for t in tensors(batch) if not t.is_floating_point() and t.dtype != torch.bool and t.dim() > 0]
        most = max((t.numel() for t in integers), default=0)
        groups: dict[tuple[str, int], list[_Call]] = {}
        for call in self._heard:
            groups.setdefault((call.kind, call.classes), []).append(call)
        chosen: list[list[_Call]] = []
        for calls in groups.values():
            chunks = len(calls) > 1 and sum(c.targets.numel() for c in calls) <= most
            chosen.append(calls if chunks else [max(calls, key=lambda c: c.targets.numel())])
        parts = max(chosen, key=lambda calls: sum(c.targets.numel() for c in calls), default=None)
        if parts is None:
            return None
        order = _order([c.targets for c in parts], integers)
        joined = [torch.cat([getattr(c, name) for c in parts]) for name in ("targets", "loss", "entropy")]
        targets, loss, entropy = joined if order is None else [x[order] for x in joined]
        if parts[0].kind == "log_softmax" and (ignored := _ignored(targets, integers)) is not None:
            nan = torch.full_like(loss, torch.nan)
            loss, entropy = torch.where(ignored, nan, loss), torch.where(ignored, nan, entropy)
        return TokenLosses(loss, entropy, parts[0].kind, in_order=len(parts) == 1 or order is not None)


_LOG_SOFTMAX = frozenset({F.log_softmax, torch.log_softmax, Tensor.log_softmax})
_VIEWS = frozenset(
    {
        Tensor.__getitem__,
        Tensor.view,
        Tensor.reshape,
        Tensor.flatten,
        Tensor.contiguous,
        Tensor.float,
        Tensor.squeeze,
        torch.reshape,
        torch.flatten,
        torch.squeeze,
    }
)
_PICKS = frozenset({torch.gather, Tensor.gather, torch.take_along_dim, Tensor.take_along_dim})


def _candidates(count: int, integers: Sequence[Tensor]) -> list[Tensor]:
    """The batch's integers that may be the targets: as they are, or without the first of each row (shifted)."""
    found = [t.detach().cpu() for t in integers if t.numel() == count]
    return found + [s.detach().cpu() for t in integers if t.dim() == 2 and (s := t[:, 1:]).numel() == count]


def _agree(targets: Tensor, flat: Tensor) -> bool:
    """Whether the batch's targets, flat, are the heard ones wherever both are targets."""
    both = (flat >= 0) & (targets >= 0)
    return bool(both.any()) and bool((flat == targets)[both].all())


def _order(parts: Sequence[Tensor], integers: Sequence[Tensor]) -> Tensor | None:
    """The place of each of the batch's targets, sample after sample, in the chunks one after the other; None: not known."""
    if len(parts) == 1:
        return None
    heard = torch.cat(list(parts))
    for wanted in _candidates(heard.numel(), integers):
        if _agree(heard, wanted.reshape(-1)):
            return torch.arange(heard.numel())
        rows = wanted.shape[0]
        if any(p.numel() % rows for p in parts):
            continue
        starts = [0, *torch.tensor([p.numel() for p in parts]).cumsum(0).tolist()]
        along = [torch.arange(a, b).view(rows, -1) for a, b in pairwise(starts)]
        order = torch.cat(along, 1).reshape(-1)  # chunks of time
        if _agree(heard[order], wanted.reshape(-1)):
            return order
    return None


def _ignored(targets: Tensor, integers: Sequence[Tensor]) -> Tensor | None:
    """Which of these indices stand for no target, by the batch's own negative entries; None where the batch has none."""
    for wanted in _candidates(targets.numel(), integers):
        flat = wanted.reshape(-1)
        if bool((flat < 0).any()) and _agree(targets, flat):
            return flat < 0
    return None


# ------------------------------------------------------------------------------------------------ the module's own word


def hook_of(module: nn.Module) -> Callable[..., Any] | None:
    """The module's ``token_losses``, if it has one."""
    hook = getattr(module, HOOK, None)
    return hook if callable(hook) else None


def told_by(answer: Any) -> TokenLosses:
    """What ``token_losses`` has returned: ``[batch, tokens]`` nats, or that and the expected loss of each.

    Raises:
        TypeError: It is something else.
    """
    loss, entropy = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or loss.dim() < 1:
        raise TypeError(
            f"token_losses returned {type(loss).__name__}, expected a floating-point tensor [batch, tokens] in nats (NaN"
            " where there is no target), or that and the entropy of each prediction."
        )
    if entropy is not None and (not isinstance(entropy, Tensor) or entropy.shape != loss.shape):
        found = list(entropy.shape) if isinstance(entropy, Tensor) else type(entropy).__name__
        raise TypeError(f"token_losses returned entropies of {found}, expected the losses' shape {list(loss.shape)}.")
    flat = loss.detach().float().flatten().cpu()
    expected = torch.full_like(flat, torch.nan) if entropy is None else entropy.detach().float().flatten().cpu()
    return TokenLosses(flat, expected, HOOK)
