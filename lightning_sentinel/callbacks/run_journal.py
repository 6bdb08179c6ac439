"""Opens the journal of a run, writes its beginning and its end, and leaves a summary, a picture and a report behind."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from .._version import __version__
from ..alerts import Webhook, alert_of
from ..context import LogSink
from ..distributed.earlier import Earlier, changes, read_earlier
from ..folders import as_folder, root_folder
from ..images import log_curve
from ..incidents import IncidentStatus, action_name
from ..infra import note_infra
from ..journal import Journal, redact, to_json
from ..limits import check_limits
from ..progress import TRAINING_LOG, Progress
from .base import SentinelCallback, gather_objects, note_restart

log = logging.getLogger("lightning_sentinel")

# A planned schedule moves smoothly. A rate this far (relative) from where the two before it point has been changed.
LR_JUMP = 0.2
# Schedules of mixtures move in small steps; only what a reader would see in the curve is an event.
MIXTURE_CHANGE = 0.02
_FLOAT = {float}

# A report made while training goes on is followed by a pause of so many times what it took.
REPORT_SHARE = 20.0
# How long the end of a fit waits for one that is still being made: what it was making is made anew there.
REPORTER_WAIT_SECONDS = 2.0


class RunJournal(SentinelCallback):
    """Writes the run folder: the journal of every rank and, on rank 0, ``summary.json``, ``loss.png``, ``report.html``.

    Put it before the suite's other callbacks: what they write before its ``setup`` goes to the log only. With
    ``fast_dev_run`` nothing is written. A run folder that cannot be written to costs one warning, never the training; the
    summary says what is missing.

    Example:
        >>> RunJournal(run_dir="runs/a", step_interval=10).step_interval
        10

    Events written here: ``run.started`` (one for each fit: versions, configuration, seeds, topology), ``run.resumed``,
    ``run.ended`` (status, exception), ``topology.changed``, ``lr.changed`` (a rate that leaves its smooth path),
    ``mixture.changed`` (a loader that offers ``mixture_weights()``).

    Progress bars that have ``get_metrics`` (Lightning's own do) show one more entry, ``sentinel``: ``ok``, or the number of
    open incidents, then the newest action and the step of the newest known-good checkpoint. Loggers that take pictures
    (TensorBoard, W&B, MLflow) are given the curve as ``sentinel/curve`` whenever it has been made.

    Args:
        run_dir: The run folder; None: ``<trainer.default_root_dir>/sentinel/<time stamp>``. Rank 0 decides for all.
        step_interval: Journal every Nth step's signals; 0: none.
        report: Write summary, picture and report at the end of the fit, and when an incident opens or closes.
        report_every_seconds: At most that often while training goes on, the first incident at once (made by a child process,
            at low priority, and never for more than a twentieth of the time).
        config: The run's configuration, any mapping; journalled with secrets redacted.
        max_bytes: Size at which the next journal file begins.
        progress_bar: Show the status in the progress bar.
        log_image: Give the curve to the Trainer's loggers.
        webhook: Address to which rank 0 posts a short JSON message when an incident opens or closes and when the run ends
            badly; None: nobody is told. A secret: the journal does not repeat it.
        webhook_timeout_seconds: How long one try may take, in a thread of its own.
        webhook_retries: Further tries of a message, after pauses of 1, 2, 4, ... seconds.
    """

    rewinds = False

    def __init__(
        self,
        run_dir: str | Path | None = None,
        step_interval: int = 1,
        report: bool = True,
        report_every_seconds: float = 120.0,
        config: Mapping[str, Any] | None = None,
        max_bytes: int = 256 * 2**20,
        progress_bar: bool = True,
        log_image: bool = True,
        webhook: str | None = None,
        webhook_timeout_seconds: float = 5.0,
        webhook_retries: int = 3,
    ) -> None:
        check_limits("RunJournal", locals())
        if webhook is not None:
            Webhook(webhook)  # an address that is none is an error now, not at the first incident
        self.requested_run_dir = None if run_dir is None else as_folder(run_dir, "RunJournal: run_dir")
        self.step_interval = step_interval
        self.report = report
        self.report_every_seconds = report_every_seconds
        self.config = config
        self.max_bytes = max_bytes
        self.progress_bar = progress_bar
        self.log_image = log_image
        self.webhook = webhook
        self.webhook_timeout_seconds = webhook_timeout_seconds
        self.webhook_retries = webhook_retries
        self.run_dir: Path | None = None
        self.summary: dict[str, Any] | None = None
        self.status = Status()
        self._before = Earlier()
        self._hosts: list[str] = []
        self._restarts = 0
        self._changes_told = True
        self._pictures_refused: set[str] = set()
        self._journal: Journal | None = None
        self._ended = True
        self._failures: list[str] = []
        self._rates: list[tuple[int, list[float]]] = []
        self._mixture: dict[str, float] | None = None
        self._mixture_told: list[Any] = []
        self._mixing: list[Any] = []  # loaders that say how they mix
        self._mixing_of: Any = None
        self._reporter: subprocess.Popen[bytes] | None = None
        self._reported_changes = 0
        self._reported_at = 0.0
        self._report_seconds = 0.0
        self._unwrap_bar: Callable[[], None] | None = None
        self._alerts: Webhook | None = None

    # ------------------------------------------------------------------------------------------------- beginning

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        context = self.context(trainer)
        context.scratch["step_interval"] = self.step_interval
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            context.journal, context.run_dir = LogSink(), None
            return
        chosen = self.run_dir or self.requested_run_dir or _default_run_dir(trainer)
        # Ranks that were started separately may each have made their own time stamp; rank 0's counts.
        self.run_dir = Path(trainer.strategy.broadcast(str(chosen) if trainer.is_global_zero else "", src=0))
        mine = read_earlier(self.run_dir, trainer.global_rank, trainer.world_size)
        told = gather_objects(trainer, [(mine, socket.gethostname(), restart_count())])
        self._before = Earlier.merged(part for part, _, _ in told)
        self._hosts = [host for _, host, _ in told]
        # An agent that follows another's restart does not raise its own count, so that nodes differ in it.
        self._restarts = max(count for _, _, count in told)
        self._earlier = self._before.world_sizes
        self._journal = Journal(self.run_dir, trainer.global_rank, max_bytes=self.max_bytes, listener=self._see)
        if self.webhook is not None and trainer.is_global_zero:
            self._alerts = Webhook(
                self.webhook, timeout_seconds=self.webhook_timeout_seconds, retries=self.webhook_retries
            )
        self._failures = []
        self._rates, self._mixture, self._mixture_told = [], None, []
        self._mixing, self._mixing_of = [], None
        self._ended = False
        vars(trainer.strategy).pop("on_exception", None)  # left over where another callback failed on an exception
        self._reported_at, self._report_seconds = -math.inf, 0.0  # the first incident's page is due at once
        self._reported_changes = self.status.changes
        context.journal, context.run_dir = self._journal, self.run_dir
        self._wrap_bar(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._journal is None or self._ended:
            return
        config = plain_config(self.config)
        self.context(trainer).write(
            trainer,
            "run.started",
            segment=len(self._earlier),
            versions=versions(),
            world_size=trainer.world_size,
            nodes=trainer.num_nodes,
            strategy=type(trainer.strategy).__name__,
            accelerator=type(trainer.accelerator).__name__,
            precision=str(trainer.precision),
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            max_steps=trainer.max_steps,
            max_epochs=trainer.max_epochs,
            seeds={"PL_GLOBAL_SEED": os.environ.get("PL_GLOBAL_SEED"), "torch": torch.initial_seed()},
            model=type(pl_module).__name__,
            parameters=sum(p.numel() for p in pl_module.parameters()),
            callbacks=[type(c).__name__ for c in trainer.callbacks],  # type: ignore[attr-defined]
            step_interval=self.step_interval,
            config=config,
            config_sha256=None if config is None else hashlib.sha256(to_json(config).encode()).hexdigest(),
            command=redact(" ".join(sys.argv)),
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        self._changes_told = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._changes_told:
            self.tell_changes(trainer, trainer.global_step)

    def idle_hooks(self, trainer: Trainer) -> Collection[str]:
        return ("on_train_batch_start",) if self._changes_told else ()

    def tell_changes(self, trainer: Trainer, step: int) -> None:
        """What has changed since the last fit in this folder, once it is known that this one goes on at ``step``.

        Before the state is put back: a start that dies in that is told of, too.
        """
        if self._changes_told:
            return
        self._changes_told = True
        if not trainer.is_global_zero:
            return
        if self._earlier and self._earlier[-1] != trainer.world_size:
            context, sizes = self.context(trainer), (self._earlier[-1], trainer.world_size)
            where = {"step": step, "attempt": context.attempt, "tokens": context.tokens}
            context.journal.write("topology.changed", **where, old_world_size=sizes[0], world_size=sizes[1])
        for kind, text in changes(self._before, self._hosts, self._restarts):
            note_infra(trainer, kind, text, step)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        note_restart(trainer)
        self._continue_counts(trainer)
        if self._journal is not None and not self._ended and trainer.global_step > 0:
            self.context(trainer).write(
                trainer,
                "run.resumed",
                checkpoint=None if trainer.ckpt_path is None else str(trainer.ckpt_path),
                epoch=trainer.current_epoch,
            )

    def _continue_counts(self, trainer: Trainer) -> None:
        """Attempts and incidents go on where the journal of this folder ends: no pair of attempt and step comes twice.

        A resume by ``ForensicCheckpoint`` comes later and sets the attempt by what it knows of the checkpoint.
        """
        context = self.context(trainer)
        if self._journal is None or ("first_incident" in context.scratch and trainer.ckpt_path is None):
            return  # the same Trainer goes on: its own counts do
        context.scratch["first_incident"] = self._before.incident
        repeated = self._before.reached > trainer.global_step
        context.attempt = max(context.attempt, self._before.attempt + repeated)

    # --------------------------------------------------------------------------------------------------- each step

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._journal is None or self._ended:
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        if not _FLOAT.issuperset(map(type, rates)):
            rates = [number for rate in rates if (number := _host_number(rate)) is not None]
        self._watch_rates(trainer, rates)
        self._watch_mixture(trainer)

    def _watch_rates(self, trainer: Trainer, rates: list[float]) -> None:
        step, before = trainer.global_step, self._rates
        if before and (step != before[-1][0] + 1 or len(rates) != len(before[-1][1])):
            before = []  # a rollback, or several optimizers taking turns: no path to compare with
        group = lr_jump([before[0][1], before[1][1]], rates) if len(before) > 1 else None
        if group is not None:
            old, new = before[-1][1][group], rates[group]
            self.context(trainer).write(trainer, "lr.changed", old=old, new=new, group=group)
            before = [(step - 1, rates)]  # the new level is the path from here on
        self._rates = [*before[-1:], (step, rates)]

    def _watch_mixture(self, trainer: Trainer) -> None:
        loaders = trainer.train_dataloader
        if loaders is not self._mixing_of:
            self._mixing_of = loaders
            self._mixing = [x for x in _leaves(loaders) if callable(getattr(x, "mixture_weights", None))]
        if not self._mixing:
            return
        told = [loader.mixture_weights() for loader in self._mixing]
        if told == self._mixture_told:  # between two knots of its schedule
            return
        # A copy: a loader may hand out the mapping that it will change.
        self._mixture_told = [dict(t) if isinstance(t, Mapping) else list(t) for t in told]
        weights: dict[str, float] = {}
        for loader, given in zip(self._mixing, self._mixture_told, strict=True):
            weights |= _named_weights(loader, given)
        old = self._mixture
        if not weights or (old is not None and not mixture_moved(old, weights)):
            return
        self._mixture = weights
        self.context(trainer).write(trainer, "mixture.changed", weights=weights, old=old)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._journal is None or not self.report or not trainer.is_global_zero:
            return
        self._reap_reporter(trainer)
        # A long run's report takes long: never more than a small share of one core. What opens or closes meanwhile is told
        # by the next one, or by the fit's end.
        pause = max(self.report_every_seconds, REPORT_SHARE * self._report_seconds)
        due = time.monotonic() - self._reported_at >= pause
        ending = self.status.stopped  # the page is made at the end, which is now
        if self.status.changes > self._reported_changes and due and not ending and self._reporter is None:
            self._reported_changes, self._reported_at = self.status.changes, time.monotonic()
            self._journal.flush()
            self._reporter = _start_reporter(self._journal.run_dir)

    # --------------------------------------------------------------------------------------------------------- end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # No collective here: the other ranks may never arrive, and a timeout would hide the exception.
        if self._journal is None or self._ended:
            return
        self._journal.flush()
        interrupted = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        status = "interrupted" if interrupted else "stopped" if self.status.stopped else "failed"
        # The callbacks after this one still have things to write: the exception itself, a last checkpoint. The strategy
        # hears of the exception when all of them have.
        strategy = trainer.strategy

        def end(error: BaseException) -> None:
            vars(strategy).pop("on_exception", None)
            self._end(trainer, status, exception)
            strategy.on_exception(error)

        strategy.on_exception = end  # type: ignore[method-assign, assignment]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._journal is not None:
            self._journal.flush()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self._journal is not None and not self._ended:
            if trainer.world_size > 1:
                self._journal.flush()
                trainer.strategy.barrier("lightning_sentinel.RunJournal")  # rank 0 reads what the others have written
            self._end(trainer, "stopped" if self.status.stopped else "finished", None)

    def _end(self, trainer: Trainer, status: str, exception: BaseException | None) -> None:
        if self._unwrap_bar is not None:
            self._unwrap_bar()
            self._unwrap_bar = None
        if self._journal is None or self._ended:
            return
        self.tell_changes(trainer, trainer.global_step)
        self._ended = True
        context = self.context(trainer)
        context.write(
            trainer,
            "run.ended",
            status=status,
            exception=None if exception is None else type(exception).__name__,
            message=None if exception is None else redact(str(exception))[:500],
            nominal_steps=context.nominal_steps,
            applied_steps=context.applied_steps,
            open_incidents=sorted(self.status.open),
        )
        self._journal.close()
        if trainer.is_global_zero:
            self._stop_reporter(trainer)
            self._write_summary()
            if self.report:
                self._show_curve(trainer)
        if self._alerts is not None:
            self._alerts.close()
            self._alerts = None

    def _write_summary(self) -> None:
        """Summary and reports. What fails here is said once and never hides how the training ended."""
        assert self._journal is not None
        from ..report.build import write_reports

        failures = [*self._journal.failures, *self._failures]
        run_dir = self._journal.run_dir
        try:
            with Progress(f"report of {run_dir}", unit="B", log=TRAINING_LOG) as bar:
                result = write_reports(run_dir, failures=failures, files=self.report, progress=bar)
        except Exception as error:
            log.error("No report for %s: %s: %s", run_dir, type(error).__name__, error)
            return
        self.summary = result.summary
        for note in result.notes:
            log.info("%s", note)
        for failure in result.summary["failures"]:
            log.error("%s", failure)

    def _see(self, event: str, step: int, fields: Mapping[str, Any]) -> None:
        """Each event as it is written, on this rank."""
        self.status.see(event, step, fields)
        if self._alerts is not None and self.run_dir is not None:
            message = alert_of(event, step, fields, self.run_dir)
            if message is not None:
                self._alerts.send(message)

    def _show_curve(self, trainer: Trainer) -> None:
        if not self.log_image or not trainer.loggers or self.run_dir is None:
            return
        picture = self.run_dir / "loss.png"
        if picture.exists():
            for problem in log_curve(trainer.loggers, picture, trainer.global_step):
                if problem not in self._pictures_refused:
                    self._pictures_refused.add(problem)
                    log.warning("%s", problem)

    def _reap_reporter(self, trainer: Trainer) -> None:
        if self._reporter is None or self._reporter.poll() is None:
            return
        self._report_seconds = time.monotonic() - self._reported_at
        if self._reporter.returncode:
            _, stderr = self._reporter.communicate()
            lines = redact(stderr.decode(errors="replace")).strip().splitlines() or [
                f"exit {self._reporter.returncode}"
            ]
            self._failures = [f"The report could not be made while training: {lines[-1]}"]
        elif self._reporter.stderr is not None:
            self._reporter.stderr.close()
            self._show_curve(trainer)
        self._reporter = None

    def _stop_reporter(self, trainer: Trainer) -> None:
        if self._reporter is None:
            return
        try:
            self._reporter.wait(timeout=REPORTER_WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._reporter.kill()  # no failure: what it was making is made anew now
            self._reporter.communicate()
            self._reporter = None
            assert self.run_dir is not None
            from ..report.build import remove_leftovers

            remove_leftovers(self.run_dir)
        else:
            self._reap_reporter(trainer)

    # ------------------------------------------------------------------------------------------------ progress bar

    def _wrap_bar(self, trainer: Trainer) -> None:
        bar = trainer.progress_bar_callback
        if not self.progress_bar or bar is None or self._unwrap_bar is not None:
            return
        original = bar.get_metrics

        def get_metrics(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
            return {**original(trainer, pl_module), "sentinel": self.status.line}

        def unwrap() -> None:
            bar.__dict__.pop("get_metrics", None)

        bar.get_metrics = get_metrics  # type: ignore[method-assign]
        self._unwrap_bar = unwrap


class Status:
    """What one line can say about the run, kept from the events as they are written."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.escalated: set[int] = set()
        self.changes = 0  # incidents opened and closed, so far
        self.stopped = False
        self.last_action: str | None = None
        self.known_good: int | None = None

    def see(self, event: str, step: int, fields: Mapping[str, Any]) -> None:
        """Take one event in."""
        if event == "run.started":
            self.stopped = False
        elif event.startswith("action."):
            self.last_action = f"{action_name(event, fields)}@{step}"
            self.stopped = self.stopped or event == "action.stop"
        elif event == "checkpoint.known_good":
            self.known_good = int(fields.get("checkpoint_step", fields.get("event_step", step)))
        elif event in ("incident.opened", "incident.updated", "incident.closed"):
            self._incident(event, fields.get("incident"))

    def _incident(self, event: str, incident: Any) -> None:
        if not isinstance(incident, Mapping) or not isinstance(incident.get("number"), int):
            return
        number = incident["number"]
        if event == "incident.closed":
            self.changes += number in self.open
            self.open.discard(number)
            if incident.get("status") == IncidentStatus.ESCALATED:
                self.escalated.add(number)  # stays, as on the page: it was not put right
        elif event == "incident.opened":
            self.changes += number not in self.open
            self.open.add(number)

    @property
    def line(self) -> str:
        """For the progress bar.

        Example:
            >>> Status().line
            'ok'
        """
        parts = ["stopped"] if self.stopped and not self.open else []
        for words, numbers in (("open", self.open), ("escalated", self.escalated)):
            if numbers:
                parts.append(f"{len(numbers)} {words} (#{max(numbers)})")
        parts = parts or ["ok"]
        if self.last_action:
            parts.append(self.last_action)
        if self.known_good is not None:
            parts.append(f"good@{self.known_good}")
        return ", ".join(parts)


def lr_jump(before: list[list[float]], now: list[float]) -> int | None:
    """The first parameter group whose rate is not where its two predecessors point, or None.

    A linear warm-up, a cosine and an exponential decay are smooth; a milestone, a reset and a hand on the rate are not. One
    rate alone shows no slope: the second step of a warm-up doubles the first.

    Example:
        >>> lr_jump([[1e-3], [1e-3]], [5e-2])
        0
        >>> lr_jump([[0.1], [0.2]], [0.3]) is None
        True
    """
    if len(before) < 2:
        return None
    for group, (a, b, rate) in enumerate(zip(before[-2], before[-1], now, strict=True)):
        if rate == b:
            continue
        scale = LR_JUMP * max(abs(rate), abs(b))
        if abs(rate - b) > scale and abs(rate - (2 * b - a)) > scale:
            return group
    return None


def mixture_moved(old: Mapping[str, float], new: Mapping[str, float]) -> bool:
    """Whether a mixture differs visibly from the one journalled last."""
    return old.keys() != new.keys() or any(abs(old[k] - new[k]) >= MIXTURE_CHANGE for k in new)


def versions() -> dict[str, str]:
    """Versions of what the result depends on."""
    found = {
        "lightning_sentinel": __version__,
        "lightning": lightning.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def restart_count() -> int:
    """How often torchelastic's agent has started this process's worker anew; 0 under another launcher."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0


def _default_run_dir(trainer: Trainer) -> Path:
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    return root_folder(trainer.default_root_dir) / "sentinel" / stamp


def plain_config(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A configuration as plain data, secrets redacted."""
    if config is None:
        return None
    from omegaconf import DictConfig, OmegaConf

    plain = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config)
    redacted: dict[str, Any] = redact(json.loads(to_json(plain)))
    return redacted


def _host_number(value: Any) -> float | None:
    """A rate as a float; None where reading it would make the host wait for a device."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" else None
    return float(value)


def _leaves(loaders: Any) -> Iterator[Any]:
    """The loaders inside lists, tuples, dicts and ``CombinedLoader``."""
    if isinstance(loaders, (list, tuple)):
        for item in loaders:
            yield from _leaves(item)
    elif isinstance(loaders, Mapping):
        for item in loaders.values():
            yield from _leaves(item)
    elif hasattr(loaders, "flattened"):
        yield from loaders.flattened
    elif loaders is not None:
        yield loaders


def _named_weights(loader: Any, weights: Any) -> dict[str, float]:
    if isinstance(weights, Mapping):
        return {str(k): round(float(v), 6) for k, v in weights.items()}
    return {str(name): round(float(w), 6) for name, w in zip(loader.sources, weights, strict=True)}


def _start_reporter(run_dir: Path) -> subprocess.Popen[bytes] | None:
    """Make the report in a child: drawing takes a second that the ranks would otherwise spend waiting for this one."""
    package_root = str(Path(__file__).resolve().parents[2])
    code = (
        f"import sys, os; sys.path.insert(0, {package_root!r}); os.nice(10);"
        f" from lightning_sentinel.cli import main; sys.exit(main(['report', {str(run_dir)!r}, '--quiet']))"
    )
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=env,
        )
    except OSError as error:
        log.warning("The report is made at the end of the run only: a child process cannot be started (%s).", error)
        return None
