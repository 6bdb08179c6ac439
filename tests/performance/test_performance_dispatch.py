"""Hooks of the suite's callbacks that do nothing are not called by Lightning, which would spend more on them than they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.profilers import PassThroughProfiler
from sentinel_kit import Loader, Net, make_trainer

from lightning_sentinel import LossScaleMonitor, Preflight, RankTelemetry, RunJournal, SpikeDetector, default_callbacks
from lightning_sentinel.callbacks import base
from lightning_sentinel.callbacks.base import STEP_HOOKS


class Calls(PassThroughProfiler):
    """Which hook of which of the suite's callbacks Lightning calls, by optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.by_step: list[Counter[tuple[str, str]]] = [Counter()]

    def profile(self, action_name: str) -> Any:
        if action_name.startswith("[Callback]lightning_sentinel."):
            _, callback, hook = action_name.split(".")
            if hook in STEP_HOOKS:
                if (callback, hook) == ("RankTelemetry", "on_train_batch_start"):
                    self.by_step.append(Counter())
                self.by_step[-1][callback, hook] += 1
        return super().profile(action_name)


BUSY = {
    ("RunJournal", "on_before_optimizer_step"),
    ("RunJournal", "on_train_batch_end"),
    ("BatchValidator", "on_train_batch_start"),
    ("NonFiniteTracer", "on_train_batch_start"),
    ("NonFiniteTracer", "on_before_backward"),
    ("NonFiniteTracer", "on_after_backward"),
    ("NonFiniteTracer", "on_before_optimizer_step"),
    ("NonFiniteTracer", "on_train_batch_end"),
    ("RankTelemetry", "on_train_batch_start"),
    ("RankTelemetry", "on_before_backward"),
    ("RankTelemetry", "on_before_optimizer_step"),
    ("RankTelemetry", "on_train_batch_end"),
    ("IncidentResponse", "on_train_batch_end"),
    ("DeepProbe", "on_before_optimizer_step"),
    ("DeepProbe", "on_train_batch_end"),
}


def asleep(callbacks: list[L.Callback]) -> set[tuple[str, str]]:
    return {(type(c).__name__, hook) for c in callbacks for hook in STEP_HOOKS if vars(c).get(hook, c) is None}


@pytest.mark.filterwarnings("ignore:Rollback is off:UserWarning")
def test_of_78_calls_a_step_15_are_left(tmp_path: Path) -> None:
    """One process on the CPU, without a loss scaler; what is done once has been done in the first step."""
    callbacks = default_callbacks(run_dir=tmp_path)
    trainer, _ = make_trainer(callbacks, max_steps=4, profiler=Calls())
    trainer.fit(Net(), Loader())
    calls: Calls = trainer.profiler  # type: ignore[assignment]
    assert len(callbacks) * len(STEP_HOOKS) == 78
    assert set(calls.by_step[3]) == BUSY
    assert set(calls.by_step[3].values()) == {1}
    assert asleep(callbacks) == set()  # after the fit they are as they were


def test_what_wakes_them() -> None:
    """The end of a fit, an exception, and each fit decides anew."""
    callbacks: list[L.Callback] = [Preflight(), LossScaleMonitor(), SpikeDetector(), RankTelemetry()]
    seen: list[set[tuple[str, str]]] = []

    class Looks(L.Callback):
        fail_at = 3

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(asleep(callbacks))
            if trainer.global_step == self.fail_at:
                raise InterruptedError

    trainer, _ = make_trainer([*callbacks, looks := Looks()], max_steps=5)
    with pytest.raises(InterruptedError):
        trainer.fit(Net(), Loader())
    assert [len(s) for s in seen] == [0, 20, 20]  # of 24; four of the telemetry do something
    assert asleep(callbacks) == set()
    looks.fail_at = -1
    seen.clear()
    trainer, _ = make_trainer([*callbacks, looks], max_steps=3)
    trainer.fit(Net(), Loader())
    assert seen[0] == set()
    assert ("Preflight", "on_train_batch_end") in seen[-1]
    assert asleep(callbacks) == set()


def test_hooks_of_a_subclass_and_of_the_instance_are_called(tmp_path: Path) -> None:
    heard: list[str] = []

    class Own(SpikeDetector):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            heard.append("subclass")

    put = SpikeDetector()
    put.on_before_zero_grad = lambda *_: heard.append("instance")  # type: ignore[method-assign]
    trainer, _ = make_trainer([Own(), put, RankTelemetry()], max_steps=3)
    trainer.fit(Net(), Loader())
    assert Counter(heard) == {"subclass": 3, "instance": 3}
    assert vars(put)["on_before_zero_grad"] is not None


def test_a_subclass_of_one_that_tells_of_idle_hooks_keeps_its_own() -> None:
    heard: list[str] = []

    class Own(Preflight):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            heard.append("end")

    class Deeper(Own):
        def idle_hooks(self, trainer: L.Trainer) -> Collection[str]:
            return {*super().idle_hooks(trainer), "on_train_batch_end"} if trainer.global_step >= 1 else ()

    own, deeper = Own(), Deeper()
    seen: list[set[tuple[str, str]]] = []

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(asleep([own, deeper]))

    trainer, _ = make_trainer([own, deeper, RankTelemetry(), Looks()], max_steps=4)
    trainer.fit(Net(), Loader())
    assert ("Own", "on_train_batch_start") in seen[-1]
    assert ("Own", "on_train_batch_end") not in seen[-1]
    assert ("Deeper", "on_train_batch_end") in seen[-1]  # it says so of its own
    assert heard == ["end"] * (4 + 1)


def test_what_a_fit_has_left_asleep_wakes_in_the_next_one() -> None:
    """Where another callback's ``on_exception`` raises, Lightning tells nobody after it."""

    class Raises(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                raise InterruptedError

        def on_exception(self, *_: Any) -> None:
            raise KeyError

    monitor, telemetry = LossScaleMonitor(), RankTelemetry()
    trainer, _ = make_trainer([Raises(), monitor, telemetry], max_steps=5)
    with pytest.raises(KeyError):
        trainer.fit(Net(), Loader())
    assert ("LossScaleMonitor", "on_train_batch_end") in asleep([monitor])
    seen: list[set[tuple[str, str]]] = []

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(asleep([monitor]))

    trainer, _ = make_trainer(
        [monitor, RankTelemetry(), Looks()], max_steps=2
    )  # a new one; the old one knows nothing of it
    trainer.fit(Net(), Loader())
    assert seen[0] == set()
    assert ("LossScaleMonitor", "on_train_batch_end") in seen[1]
    assert asleep([monitor]) == set()


def test_a_hook_that_is_put_in_while_it_rests_stays() -> None:
    detector, heard = SpikeDetector(), list[str]()

    class Puts(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                assert vars(detector)["on_after_backward"] is None
                detector.on_after_backward = lambda *_: heard.append("called")  # type: ignore[method-assign]

    trainer, _ = make_trainer([detector, RankTelemetry(), Puts()], max_steps=4)
    trainer.fit(Net(), Loader())
    assert heard == ["called"] * 2
    assert callable(vars(detector)["on_after_backward"])


def test_a_lightning_that_calls_whatever_is_there_is_given_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.private, "passes_over_none", lambda: False)
    callbacks: list[L.Callback] = [SpikeDetector(), RankTelemetry()]
    seen: list[set[tuple[str, str]]] = []

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(asleep(callbacks))

    trainer, _ = make_trainer([*callbacks, Looks()], max_steps=3)
    trainer.fit(Net(), Loader())
    assert seen == [set()] * 3


def test_accumulation_rests_after_the_first_whole_step(tmp_path: Path) -> None:
    callbacks: list[L.Callback] = [Preflight(), RunJournal(tmp_path, report=False), RankTelemetry()]
    seen: list[bool] = []

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(("Preflight", "on_train_batch_end") in asleep(callbacks))

    trainer, _ = make_trainer([*callbacks, Looks()], max_steps=2, accumulate_grad_batches=3)
    trainer.fit(Net(), Loader())
    assert seen == [False] * 3 + [True] * 3
