"""Going back to a restore point in memory, in the middle of a run: weights, optimizer, data position and all the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from ..incidents import Action
from ..limits import check_limits
from ..state import lightning_private as private
from ..state.snapshot import (
    Snapshot,
    cursor_problems,
    light_problems,
    parameter_versions,
    restore_between_batches,
    state_problems,
    take,
)
from .base import (
    SentinelCallback,
    apply_quarantine,
    find_callback,
    ledger_of,
    note_restart,
    poison_lightning_files,
    watch_lightning_files,
)
from .forensic_checkpoint import ForensicCheckpoint

# Going back costs the steps since the snapshot, so it is worth its price more often than a look back is.
EVERY_N_STEPS, EVERY_N_STEPS_AS_EVIDENCE = 25, 50

_ROLLBACKS = (Action.RETRY_STEP, Action.ROLLBACK_REPLAY, Action.ROLLBACK_SKIP)


class RollbackUnavailable(RuntimeError):  # noqa: N818 - a state of affairs, not a mistake
    """A rollback was asked for that cannot be done exactly; the message says why."""


@dataclass
class _Request:
    snapshot: Snapshot
    before_step: int
    action: Action
    incident: int
    reason: str
    exclude: tuple[str, ...]
    checkpoint: str | None = None  # its name where the restore point comes from disk
    untouched: bool = False


class Rollback(SentinelCallback):
    """Keeps restore points in host memory and goes back to one on request.

    A restore point holds weights, optimizers, schedulers, gradient scaler, loop progress, data position with prefetched
    batches, logged values, metrics, the state of modules and callbacks, and the random state, all of the same moment. After
    going back the run takes the path it would have taken, bit for bit where the kernels allow it. Nothing is
    journalled twice and nothing is lost: every rollback writes one ``action.rollback`` event with the sample ids that are
    replayed and those that are left out.

    Snapshots are taken before the first batch of a step: one before the first step of the fit, then every
    :meth:`interval` steps. The newest known-good snapshot and the newest one from before each open incident are never
    dropped. What began before all of them, or long after the newest one that is old enough, goes back to the newest
    known-good checkpoint of ``ForensicCheckpoint`` on the same path, where the Trainer has that callback; for the moment of
    the restore this takes the memory of one more snapshot.

    Where the data position cannot be put back (see :meth:`unavailable`) rollback is off, with one warning at the start;
    training and all other callbacks go on.

    Example:
        >>> rollback = Rollback(every_n_steps=50, keep=2)
        >>> rollback.every_n_steps, rollback.keep
        (50, 2)

    Args:
        every_n_steps: Optimizer steps between two snapshots. None: 25 where the run may go back to them; 50 under a
            response that never does (``observe``, ``guard``), for which they are evidence only.
        keep: Snapshots in memory, at least 2 (one known-good, one candidate). Each holds as many bytes as weights and
            optimizer state together.
        retry: Also keep a light snapshot of each step's start, so that a single step can be tried again without going
            back further. It holds no weights. Under a response that never retries (``observe``, ``guard``) it is left out.
        cursor: ``"auto"`` turns rollback off where the data position cannot be put back; ``"require"`` raises instead.
    """

    rewinds = False

    def __init__(
        self, every_n_steps: int | None = None, keep: int = 2, retry: bool = True, cursor: str = "auto"
    ) -> None:
        check_limits("Rollback", locals())
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.retry = retry
        self.cursor = cursor
        self.executed = 0
        self._problem: str | None = "training has not started"
        self._light_problem: str | None = None
        self._light: Snapshot | None = None
        self._spare: Snapshot | None = None
        self._spare_light: Snapshot | None = None
        self._request: _Request | None = None
        self._trainer: Trainer | None = None
        self._last_step = -1
        self._interval = every_n_steps or EVERY_N_STEPS
        self._probation: int | None = None  # steps, as seen from the calls of mark_known_good
        self._unwatch: Callable[[], None] = lambda: None
        self._starts: dict[int, int] = {}  # step at which each attempt began

    # --- What others call ---------------------------------------------------------------------------------------

    def interval(self, trainer: Trainer) -> int:
        """Optimizer steps between two snapshots in this run."""
        if self.every_n_steps is not None:
            return self.every_n_steps
        return EVERY_N_STEPS if _may_go_back(trainer) else EVERY_N_STEPS_AS_EVIDENCE

    def unavailable(self, trainer: Trainer) -> str | None:
        """Why rollback is off in this run, as a sentence, or None if it works. The same on every rank."""
        return self._problem

    @property
    def pending(self) -> bool:
        """True between a request and its execution at the end of the batch."""
        return self._request is not None

    def replay_problem(self, trainer: Trainer, before_step: int) -> str | None:
        """Why a replay from ``before_step`` on would repeat what is wrong, as a sentence, or None. The same on every rank.

        A fault that came with the restart of this process, such as a loader that lost its place, is in every state that
        the process has had.
        """
        if not self._began_with_restart(trainer, before_step):
            return None
        if self._saved_step(trainer, before_step) is not None:
            return None
        restart = self.context(trainer).restart_step
        return (
            f"every restore point of this process was taken after the restart at step {restart}; resume from a"
            " checkpoint of ForensicCheckpoint instead."
        )

    def reaches(self, trainer: Trainer, before_step: int) -> bool:
        """True if there is a restore point from before ``before_step``, in memory or on disk. Every rank must ask alike."""
        snapshots = self.context(trainer).snapshots
        return any(s.position <= before_step for s in snapshots) or self._saved_step(trainer, before_step) is not None

    def _began_with_restart(self, trainer: Trainer, before_step: int) -> bool:
        restart = self.context(trainer).restart_step
        return restart is not None and before_step <= restart

    def request(
        self,
        trainer: Trainer,
        *,
        before_step: int,
        action: Action,
        incident: int,
        reason: str,
        exclude: Sequence[str] = (),
        untouched: bool = False,
    ) -> Snapshot:
        """Ask for a rollback at the end of the current batch. Every rank must ask alike.

        Args:
            trainer: The Trainer that is fitting.
            before_step: First step that must run again; the newest snapshot at or before its start is used.
            action: ``retry_step`` (the light snapshot of this very step if its update never reached the weights, else a
                full one), ``rollback_replay`` or ``rollback_skip``.
            incident: Number of the incident that asks.
            reason: A sentence for the journal.
            exclude: ``sample:<id>`` and ``source:<name>`` that shall not be drawn again.
            untouched: The updates since ``before_step`` are known to have been kept out on the device, which the
                parameters' version counters do not show.

        Returns:
            The snapshot that will be restored.

        Raises:
            RollbackUnavailable: No restore point is old enough, a replay would begin with the first state after a restart,
                or rollback is off here.
        """
        if action not in _ROLLBACKS:
            raise ValueError(f"Rollback.request: {action} is not a rollback; use one of {', '.join(_ROLLBACKS)}.")
        if self._problem is not None:
            raise RollbackUnavailable(self._problem)
        if exclude and not any(hasattr(x, "exclude") for x in private.train_loaders(trainer)):
            names = ", ".join(sorted({type(x).__name__ for x in private.train_loaders(trainer)}))
            raise RollbackUnavailable(
                f"{names} has no `exclude(names)`, so {len(exclude)} samples or sources cannot be left out. Use"
                " lightning_sentinel.data.MixtureLoader, or skip the step instead."
            )
        if action is Action.ROLLBACK_REPLAY and (problem := self.replay_problem(trainer, before_step)):
            raise RollbackUnavailable(problem)
        snapshot, name = self._choose(trainer, before_step, action, untouched)
        made = _Request(snapshot, before_step, action, incident, reason, tuple(exclude), name, untouched)
        earlier = self._request
        if earlier is not None:
            # two incidents in one step: one way back, far enough for both
            made.exclude = tuple(dict.fromkeys((*earlier.exclude, *made.exclude)))
            if earlier.snapshot.position < snapshot.position:
                made.snapshot, made.before_step = earlier.snapshot, earlier.before_step
                made.checkpoint = earlier.checkpoint
        self._request = made
        return made.snapshot

    def mark_known_good(self, trainer: Trainer, step: int) -> None:
        """Every snapshot at or before ``step`` has passed its probation; called after each healthy step."""
        self._probation = trainer.global_step - step
        for snapshot in self.context(trainer).snapshots:
            if snapshot.step <= step:
                snapshot.known_good = True

    # --- Hooks --------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        context = self.context(trainer)
        context.snapshots.clear()
        note_restart(trainer)
        apply_quarantine(trainer)
        private.advance_control(trainer).layout = None
        self._light = self._spare = self._spare_light = self._request = self._probation = None
        self._trainer, self._last_step = trainer, -1
        self._unwatch = watch_lightning_files(trainer)
        problems = [*cursor_problems(trainer), *state_problems(trainer)]
        if not trainer.strategy.reduce_boolean_decision(not problems, all=True) and not problems:
            problems = ["Rollback is off on another rank, and no rank goes back alone; see that rank's log."]
        self._problem = problems[0] if problems else None
        if problems:
            if self.cursor == "require":
                raise RollbackUnavailable(" ".join(dict.fromkeys(problems)))
            reasons = list(dict.fromkeys(problems))
            context.write(trainer, "rollback.off", reasons=reasons)
            rank_zero_warn("Rollback is off, training goes on without it. " + " ".join(reasons))
            return
        self._interval = self.interval(trainer)
        may_retry = self.retry and _may_go_back(trainer)
        self._light_problem = next(iter(light_problems(trainer)), None) if may_retry else "retry=False"
        control = private.advance_control(trainer)
        control.before.append(self._before_batch)
        control.after.append(self._after_batch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._detach(trainer)
            self._unwatch()
            self._unwatch = lambda: None
            self._light = self._spare = self._spare_light = None
            self._problem = "training has ended"

    def _detach(self, trainer: Trainer) -> None:
        control = private.advance_control(trainer)
        if self._before_batch in control.before:
            control.before.remove(self._before_batch)
            control.after.remove(self._after_batch)
        self._request = None

    def state_dict(self) -> dict[str, Any]:
        return {"executed": self.executed, "starts": dict(self._starts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.executed = state_dict["executed"]
        self._starts = dict(state_dict.get("starts", {}))

    # --- Taking snapshots ---------------------------------------------------------------------------------------

    def _before_batch(self) -> None:
        trainer = self._trainer
        assert trainer is not None
        step = trainer.global_step
        self._starts.setdefault(self.context(trainer).attempt, step)
        if private.window_open(trainer) or step == self._last_step:
            return
        # A batch may hold several steps (several optimizers), so a multiple can be passed without being met.
        passed = step // self._interval > (self._last_step if self._last_step >= 0 else step - 1) // self._interval
        self._last_step = step
        context = self.context(trainer)
        unanswered = context.held and any(i.is_open and not i.actions for i in context.incidents)
        first = not context.snapshots
        due = first or (passed and all(s.step != step for s in context.snapshots))
        if due and not unanswered:
            # Untrained weights are good, and so is a state that has earned it in an earlier process. What was resumed
            # from anything else has to earn it here.
            untrained = step == 0 and context.restart_step is None
            inherited = context.scratch.get("known_good_step") == step
            self._take_full(trainer, known_good=first and (untrained or inherited))
        if self._light_problem is None:
            # two light snapshots take turns: the older one's buffers are written while the newer one is still valid
            self._light, self._spare_light = take(trainer, tensors=False, into=self._spare_light), self._light

    def _take_full(self, trainer: Trainer, known_good: bool) -> None:
        snapshots = self.context(trainer).snapshots
        if len(snapshots) >= self.keep:
            victim = self._victim(trainer)
            if victim is None:
                return
            snapshots.remove(victim)
            self._spare = victim
        into, self._spare = self._spare, None
        snapshot = take(trainer, into=into)
        snapshot.known_good = known_good
        snapshots.append(snapshot)

    def _victim(self, trainer: Trainer) -> Snapshot | None:
        """The snapshot to give up for a new one, or None if all are needed."""
        context = self.context(trainer)
        good = [s for s in context.snapshots if s.known_good]
        needed = set(map(id, good[-1:])) if self._probation is not None else set()
        for incident in context.incidents:
            if incident.is_open:
                before = [s for s in context.snapshots if s.position <= incident.since_step]
                needed |= set(map(id, before[-1:]))
        free = [s for s in context.snapshots if id(s) not in needed]
        if not free:
            return None
        waiting = trainer.global_step - free[0].step
        superseded = bool(good) and free[0].position < good[-1].position
        if self._probation is None or waiting > self._probation or superseded:
            return free[0]
        # The oldest candidate is closest to the end of its probation: dropping it each time would leave the run without a
        # fresh known-good snapshot forever. A newer one can go.
        return free[-1] if len(free) > 1 else None

    # --- Going back ---------------------------------------------------------------------------------------------

    def _on_path(self, attempt: int, step: int) -> bool:
        """True if what was saved then is on the path that the run is on: no later attempt began before that step."""
        return all(step <= start for later, start in self._starts.items() if later > attempt)

    def _much_newer(self, saved: int | None, snapshot: Snapshot) -> bool:
        """Reading a checkpoint pays where it spares more steps than usually lie between two snapshots."""
        return saved is not None and saved > snapshot.step + self._interval

    def _saved_step(self, trainer: Trainer, before_step: int) -> int | None:
        checkpoint = find_callback(trainer, ForensicCheckpoint)
        return None if checkpoint is None else checkpoint.restore_step(trainer, before_step, self._on_path)

    def _choose(
        self, trainer: Trainer, before_step: int, action: Action, untouched: bool = False
    ) -> tuple[Snapshot, str | None]:
        """The restore point, and the name of its checkpoint where it comes from disk."""
        if action is Action.RETRY_STEP:
            kept = (self._light, self._spare_light) if untouched else (self._light,)
            light = next((s for s in kept if s is not None and s.step == before_step), None)
            usable = light is not None and (untouched or self._weights_untouched(trainer, light))
            if self._on_all_ranks(trainer, usable):
                assert light is not None
                return light, None
        # what this process has had in memory may be as wrong as what it has now
        distrusted = action is Action.ROLLBACK_REPLAY and self._began_with_restart(trainer, before_step)
        return self._choose_full(trainer, before_step, memory=not distrusted)

    def _choose_full(self, trainer: Trainer, before_step: int, *, memory: bool = True) -> tuple[Snapshot, str | None]:
        snapshots = self.context(trainer).snapshots
        old_enough = [s for s in snapshots if memory and s.position <= before_step]
        newest = old_enough[-1] if old_enough else None
        if newest is not None and not self._much_newer(self._saved_step(trainer, before_step), newest):
            return newest, None
        checkpoint = find_callback(trainer, ForensicCheckpoint)
        saved = None if checkpoint is None else checkpoint.restore_point(trainer, before_step, self._on_path)
        if saved is not None and (newest is None or self._much_newer(saved[0].step, newest)):
            return saved[0], saved[1].name
        if newest is not None:
            return newest, None
        oldest = snapshots[0].step if snapshots else None
        raise RollbackUnavailable(
            f"No snapshot from before step {before_step} is left; the oldest is of step {oldest}, and no known-good"
            f" checkpoint is older. Raise `keep` ({self.keep}) or `every_n_steps` ({self._interval}), or add"
            " lightning_sentinel.ForensicCheckpoint."
        )

    @staticmethod
    def _weights_untouched(trainer: Trainer, light: Snapshot) -> bool:
        return light.versions == parameter_versions(trainer)

    @staticmethod
    def _on_all_ranks(trainer: Trainer, mine: bool) -> bool:
        """Counters of writes are each rank's own; no rank may take another way back than the others."""
        if trainer.world_size == 1:
            return mine
        return bool(trainer.strategy.reduce_boolean_decision(mine, all=True))

    def _after_batch(self) -> None:
        request, trainer = self._request, self._trainer
        if request is None or trainer is None:
            return
        self._request = None
        context = self.context(trainer)
        snapshot = request.snapshot
        untouched = request.untouched or (snapshot.light and self._weights_untouched(trainer, snapshot))
        if snapshot.light and not self._on_all_ranks(trainer, untouched):
            # the step was not kept out of the weights after all
            snapshot, request.checkpoint = self._choose_full(trainer, request.before_step)
        replayed = self._replayed(trainer, snapshot.step)
        context.attempt += 1
        self.executed += 1
        context.write(
            trainer,
            "action.rollback",
            action=str(request.action),
            from_step=request.before_step,
            to_step=snapshot.step,
            incident=request.incident,
            reason=request.reason,
            light=snapshot.light,
            replayed=replayed,
            excluded=list(request.exclude),
            **({} if request.checkpoint is None else {"checkpoint": request.checkpoint}),
        )
        context.journal.flush()
        if request.exclude:
            self._exclude(trainer, request)
        restore_between_batches(trainer, snapshot)
        poison_lightning_files(
            trainer,
            request.before_step,
            request.incident,
            "written on a path that was abandoned, after the trouble began",
        )
        for newer in [s for s in context.snapshots if s.position > snapshot.position]:
            context.snapshots.remove(newer)
            self._spare = newer
        self._starts[context.attempt] = snapshot.step
        if request.checkpoint is not None:
            context.scratch["known_good_step"] = (
                snapshot.step
            )  # the snapshot that is taken of it now has earned it, too
        self._last_step = -1
        self._light = self._spare_light = None
        context.held = False
        context.record = context.window = None
        if context.healthy_window is not None and context.healthy_window.step >= snapshot.step:
            context.healthy_window = None

    def _replayed(self, trainer: Trainer, step: int) -> list[str]:
        """This rank's samples of ``step`` and later on the path that is given up, each once, in the order drawn."""
        context = self.context(trainer)
        ids = [i for drawn, names in context.drawn if drawn >= step for i in names]
        if private.window_open(trainer):
            ids += context.scratch.get("sample_ids", ())  # a window that has not come to its gate yet
        return list(dict.fromkeys(ids))

    def _exclude(self, trainer: Trainer, request: _Request) -> None:
        ledger_of(trainer).add(
            request.exclude,
            step=request.before_step,
            incident=request.incident,
            policy=str(request.action),
            reason=request.reason,
        )


def _may_go_back(trainer: Trainer) -> bool:
    """Whether anybody may ask for a rollback: a response that only watches or guards never does."""
    response = next((c for c in trainer.callbacks if hasattr(c, "decide")), None)  # type: ignore[attr-defined]
    return response is None or response.policy.mode == "recover"
