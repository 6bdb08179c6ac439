"""A canary of a Python program: a function that trains, called twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from ..callbacks.defaults import default_callbacks
from ..callbacks.divergence_detector import DivergenceDetector
from ..callbacks.incident_response import IncidentResponse
from ..callbacks.rank_outlier_detector import RankOutlierDetector
from ..callbacks.rollback import Rollback
from ..callbacks.run_journal import RunJournal
from ..callbacks.spike_detector import SpikeDetector
from ..config import build
from .app import THRESHOLDS
from .drill import DEFAULT, PROBATION_STEPS, ROLLBACK_EVERY, TIGHTER, Timeline, injector, timeline
from .judge import CanaryReport, LegEnd, judge
from .page import write

Train = Callable[[list[Callback], int], Any]


def run_canary(
    train: Train,
    run_dir: str | Path,
    *,
    drill: Sequence[str] = DEFAULT,
    warm_steps: int = 26,
    vocabulary_size: int | None = None,
    sample_id_fn: Callable[[Any], Sequence[str | int]] | None = None,
    progress: bool = True,
) -> CanaryReport:
    """Train twice for a few dozen steps, once with faults, and say whether the long run may start.

    Example:
        ::

            def train(callbacks, max_steps):
                seed_everything(0)
                Trainer(max_steps=max_steps, callbacks=[*mine, *callbacks]).fit(MyModule(), MyData())

            report = lightning_sentinel.run_canary(train, "runs/canary")
            assert report.passed, report.drill

    Args:
        train: Builds model, data and Trainer as the long run does, with these callbacks after its own and so many optimizer
            steps, and fits. It must start from the same seed each time.
        run_dir: A folder that does not hold a canary yet: ``clean/``, ``drill/`` and the page go there.
        drill: Names of the faults; see ``lightning_sentinel.canary.drill.EXERCISES``.
        warm_steps: Steps before the first fault.
        vocabulary_size: As for ``default_callbacks``.
        sample_id_fn: As for ``default_callbacks``.
        progress: Show it.

    Returns:
        The page as data; ``canary.txt``, ``canary.json`` and ``canary.html`` hold it too.
    """
    folder = Path(run_dir).resolve()
    taken = [folder / leg for leg in ("clean", "drill") if (folder / leg).exists()]
    if taken:
        raise ValueError(f"{taken[0]} is there already. Give run_dir a folder that holds no canary yet.")
    plan = timeline(drill, warm_steps)
    ends = {}
    for leg in ("clean", "drill"):
        suite = _suite(folder / leg, vocabulary_size, sample_id_fn)
        faults: list[Callback] = [build(injector(plan.faults), "canary")] if leg == "drill" else []
        ends[leg] = _leg(train, [*faults, *suite], folder / leg, plan, f"canary, {leg} leg", progress)
    report = judge(folder, plan, ends["clean"], ends["drill"], progress=progress)
    write(report, folder)
    return report


def _suite(
    folder: Path, vocabulary_size: int | None, sample_id_fn: Callable[[Any], Sequence[str | int]] | None
) -> list[Callback]:
    """The default callbacks, as in the pilot of an application: short probation, near restore points, tight thresholds."""
    made: list[Callback] = []
    for callback in default_callbacks(folder, "recover", vocabulary_size, sample_id_fn):
        if isinstance(callback, IncidentResponse):
            made.append(IncidentResponse("recover", probation_steps=PROBATION_STEPS))
        elif isinstance(callback, RunJournal):
            made.append(RunJournal(folder, report=False))
        elif isinstance(callback, Rollback):
            made.append(Rollback(every_n_steps=ROLLBACK_EVERY))
        elif isinstance(callback, SpikeDetector | DivergenceDetector | RankOutlierDetector):
            made.append(_tightened(type(callback)))
        else:
            made.append(callback)
    return made


def _tightened(kind: type[Any]) -> Callback:
    import inspect

    defaults = {name: p.default for name, p in inspect.signature(kind).parameters.items()}
    made: Callback = kind(**{name: TIGHTER * defaults[name] for name in THRESHOLDS[kind.__name__]})
    return made


def _leg(train: Train, callbacks: list[Callback], folder: Path, plan: Timeline, what: str, progress: bool) -> LegEnd:
    from ..progress import Progress

    with Progress(what, total=plan.steps, unit="steps", enabled=progress) as bar:
        try:
            train([*callbacks, _Steps(bar)], plan.steps)
        except KeyboardInterrupt:
            raise
        except SystemExit as stop:  # the ladder has ended in `stop`
            return LegEnd(folder, int(stop.code) if isinstance(stop.code, int) else 1, str(stop))
        except Exception as error:
            return LegEnd(folder, 1, f"{type(error).__name__}: {error}"[:300])
    return LegEnd(folder)


class _Steps(Callback):
    """Moves the progress."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step > self.bar.done:
            self.bar.advance(trainer.global_step - self.bar.done)
