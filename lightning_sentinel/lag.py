"""Reading a step's record one step later: what is kept until then, and what must not wait.

At the gate of step k the gathered rows start their way to the host, and the rows of step k - 1, which have arrived, are
read. The device is never waited for. What makes that safe:

- A step that looks wrong on the device (a loss or a gradient that is not finite on any rank; with ``recover`` also a loss
  above the level that the detectors would accept) is kept out of the weights on the device, by the flag that fused
  optimizers have for gradient scalers. The limit comes from the records read so far.
- Where an answer is needed, the run goes back to before that step, which then runs again under the gate: examined,
  judged and answered exactly as if it had been so from the start.
- Steps at which a state is put away (a snapshot, a checkpoint, the last step), and all steps while an incident is open,
  are read at once: nothing unread is ever in what is kept.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from .context import context_of
from .incidents import Finding
from .record import SIGNAL_INDEX
from .state.lightning_private import scaler_of
from .state.transfer import Transfer, read_now
from .triage.window import StepWindow, ensure_capture, restore_buffers

log = logging.getLogger("lightning_sentinel")


LOSS, WEIGHT = SIGNAL_INDEX["loss_nats"], SIGNAL_INDEX["supervised_tokens"]
BAD_LOSS, NORM, INVALID = (SIGNAL_INDEX[n] for n in ("nonfinite_loss", "grad_norm", "invalid_batch"))


@dataclass
class Facts:
    """What the host knows of a step at its gate, beside the gathered rows.

    Attributes:
        step: ``trainer.global_step`` before the update.
        attempt: Which pass over the step this is.
        learning_rates: Rate of each parameter group; NaN for one on a device that has not been read yet.
        late: What to call for the findings of a batch whose flag has come with the rows.
        planned_rates: What the scheduler set, likewise; None without one.
        riding: So many of these rates, in this order, stand behind the signals in the rows.
        sample_ids: This rank's samples.
        findings: What other callbacks of this rank have left for the gate.
        losses: Loss of each micro-batch, on the device.
        has_grads: Whether any parameter has a gradient.
        sharded: Whether every rank holds only a part of each gradient.
        epoch: ``trainer.current_epoch``.
        batch_idx: Index of the step's last batch.
        window: The captured micro-batches.
        applied: Whether the update goes in, once judged.
    """

    step: int
    attempt: int
    learning_rates: tuple[float, ...]
    sample_ids: tuple[str, ...]
    findings: list[Finding]
    losses: list[Tensor]
    has_grads: bool
    sharded: bool
    epoch: int
    batch_idx: int
    window: StepWindow | None = None
    planned_rates: tuple[float, ...] | None = None
    riding: int = 0
    late: list[Callable[[], list[Finding]]] = field(default_factory=list, compare=False)
    applied: bool = field(default=False, compare=False)


@dataclass
class _Unread:
    facts: Facts
    transfer: Transfer
    shape: tuple[int, int]
    flagged: bool  # the last number says whether the update was kept out
    judged: bool = False  # it has been read before, and nothing followed from it


class Lag:
    """The unread record of one run on this rank, and the decisions about it that every rank takes alike."""

    def __init__(self, sync: str) -> None:
        self.sync = sync
        self.earlier: _Unread | None = None
        self._memory: deque[_Unread] = deque(maxlen=4)  # outlives a rollback: what was unread at the restore point
        self._gate_until = -1
        self._mode = "observe"
        self._limit = math.inf
        self._due: tuple[int, ...] = ()
        self._off: str | None = "training has not started"
        self._hooks: list[Any] = []

    @property
    def unread_step(self) -> int | None:
        return None if self.earlier is None else self.earlier.facts.step

    def start(self, trainer: Trainer) -> None:
        """At the start of a fit: whether it can be done here, said once."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.earlier, self._gate_until, self._limit = None, -1, math.inf
        self._memory.clear()
        if self.sync == "gate":
            return
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        response = next((c for c in callbacks if hasattr(c, "decide_late")), None)
        self._mode = "observe" if response is None else response.policy.mode
        self._due = tuple(n for c in callbacks if (n := _puts_away_every(c, trainer)) > 0)
        self._off = None
        if scaler_of(trainer) is not None:
            self._off = "a gradient scaler waits for the device in every step anyway"
        elif not trainer.lightning_module.automatic_optimization:
            self._off = "manual optimization may step several times in a batch"
        slow = [type(o).__name__ for o in trainer.optimizers if not can_skip_on_device(o)]
        context = context_of(trainer)
        note = None
        if self._off is not None:
            note = f"Records are read at the gate although sync is 'lagged': {self._off}."
        elif self._mode != "observe" and slow:
            note = (
                f"{', '.join(slow)} is not fused and cannot skip an update on the device: one flag is read in every step."
                " Make it with fused=True to have no wait at all."
            )
        if note is not None:
            log.warning("%s", note)
        context.write(trainer, "sync.lagged", off=self._off, note=note, mode=self._mode)
        if self._off is None:
            ensure_capture(trainer).keeps_previous = True
            self._hooks = [o.register_step_post_hook(_unmark) for o in trainer.optimizers]

    def look_closer(self, step: int) -> None:
        """Read at once up to and with this step, which runs again."""
        self._gate_until = max(self._gate_until, step)

    def reads_now(self, trainer: Trainer, facts: Facts) -> bool:
        """Whether this step's record is read before its update. The same on every rank."""
        if self.sync == "gate" or self._off is not None or facts.step <= self._gate_until:
            return True
        following, context = facts.step + 1, context_of(trainer)
        if any(i.is_open for i in context.incidents) or any(following % n == 0 for n in self._due):
            return True
        if trainer.is_last_batch or (trainer.max_steps > 0 and following >= trainer.max_steps):
            return True
        if facts.findings and trainer.world_size == 1:
            return True  # known on the host already
        if self._mode == "recover":
            callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
            limits = [c.detector.limit() for c in callbacks if hasattr(getattr(c, "detector", None), "limit")]
            self._limit = min(limits, default=math.inf)
            return self._limit == -math.inf
        return False

    @torch.no_grad()
    def keep_out(self, trainer: Trainer, optimizer: Optimizer, rows: Tensor, facts: Facts) -> bool:
        """Send the rows on their way; keep a step that looks wrong out of the weights.

        Returns:
            True if the step looks wrong and the optimizer cannot skip on the device: then it is judged at once.
        """
        payload, flagged = rows.reshape(-1), False
        if self._mode != "observe":
            wrong = self._looks_wrong(rows)
            if can_skip_on_device(optimizer):
                mark_to_skip(optimizer, wrong)
                if self._mode == "guard":  # with recover the run goes back, buffers and all
                    restore_buffers(trainer, where=wrong)
                payload, flagged = torch.cat([payload, wrong.double().reshape(1)]), True
            elif read_now(wrong.reshape(1))[0]:
                return True
        self.earlier = _Unread(facts, Transfer(payload), (rows.shape[0], rows.shape[1]), flagged)
        self._memory.append(self.earlier)
        return False

    def _looks_wrong(self, rows: Tensor) -> Tensor:
        """0-dim bool on the device; the same on every rank, for it is made of the gathered rows."""
        wrong = (rows[:, BAD_LOSS] > 0).any() | ~torch.isfinite(rows[:, NORM]).all()
        if math.isfinite(self._limit):
            loss, weight = rows[:, LOSS], rows[:, WEIGHT]
            mean = torch.where(weight > 0, loss * weight, 0.0).sum() / weight.sum()
            # One rank's loss scatters more than the mean; a rank that is wrong is further out than that.
            highest = torch.where(weight > 0, loss, -math.inf).max()
            wrong = wrong | (mean > self._limit) | (highest > self._limit * math.sqrt(rows.shape[0]))
            wrong = wrong | (rows[:, INVALID] > 0).any()
        return wrong

    def arrived(self) -> tuple[Facts, NDArray[np.float64], bool, bool]:
        """The earlier step's facts and rows, whether its update was kept out, and whether it has been judged before.

        That is so after going back to a point at which it was unread: the detectors have to see it again, nobody else.
        """
        unread, self.earlier = self.earlier, None
        assert unread is not None
        again, unread.judged = unread.judged, True
        flat = unread.transfer.read()
        rows = flat[: unread.shape[0] * unread.shape[1]].reshape(unread.shape).copy()
        return unread.facts, rows, unread.flagged and bool(flat[-1]), again

    def go_back(self, step: int | None) -> None:
        """After a rollback: the record that was unread at the restore point is to be read again."""
        self.earlier = next((u for u in reversed(self._memory) if u.facts.step == step), None)


def _puts_away_every(callback: Any, trainer: Trainer) -> int:
    """Steps between two states that a callback puts away; 0 for one that does not."""
    name = type(callback).__name__
    if name == "Rollback":
        return int(callback.interval(trainer))
    return int(callback.every_n_steps) if name == "ForensicCheckpoint" else 0


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """True for fused optimizers, whose kernels leave everything as it is where their ``found_inf`` is 1.

    A momentum buffer that SGD makes in a skipped first step would hold whatever was in memory, so not that one.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return not (isinstance(optimizer, torch.optim.SGD) and not optimizer.state and optimizer.defaults.get("momentum"))


def mark_to_skip(optimizer: Optimizer, flag: Tensor) -> None:
    """Skip the coming update on the device where ``flag`` is true."""
    optimizer.found_inf = flag.float().reshape(())  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]


def _unmark(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for name in ("found_inf", "grad_scale"):
        vars(optimizer).pop(name, None)
