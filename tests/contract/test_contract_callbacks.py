"""What holds for every callback of the suite, whatever it does."""

from __future__ import annotations

import copy
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from sentinel_kit import Loader, Net, make_trainer

import lightning_sentinel
from lightning_sentinel import RankTelemetry, default_callbacks
from lightning_sentinel.callbacks.base import SentinelCallback, declares
from lightning_sentinel.callbacks.defaults import ORDER
from lightning_sentinel.conf.generate import argument_docs
from lightning_sentinel.state.snapshot import take

PUBLIC = {name: getattr(lightning_sentinel, name) for name in lightning_sentinel.__all__}
CALLBACKS = {name: cls for name, cls in PUBLIC.items() if inspect.isclass(cls) and issubclass(cls, Callback)}

every_callback = pytest.mark.parametrize("name", CALLBACKS)


def fit_twice(callbacks: list[Callback], folder: Path) -> None:
    """Two fits on one Trainer, the second going on from the first."""
    trainer, _ = make_trainer(callbacks, max_steps=6, default_root_dir=folder)
    module = Net()
    trainer.fit(module, Loader(64))
    trainer.fit_loop.epoch_loop.max_steps = 12
    trainer.fit(module, Loader(64))
    assert trainer.global_step == 12


def with_company(callback: Callback) -> list[Callback]:
    """Detectors and the response need the heartbeat beside them."""
    return [callback] if isinstance(callback, RankTelemetry) else [callback, RankTelemetry()]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))


def test_all_are_here() -> None:
    assert {kind.__name__ for kind in ORDER} | {"FaultInjector"} == set(CALLBACKS)


@every_callback
def test_constructs_with_defaults_and_has_a_key_of_its_own(name: str) -> None:
    callback = CALLBACKS[name]()
    assert isinstance(callback, SentinelCallback)
    assert callback.state_key == f"lightning_sentinel.{name}"


@every_callback
def test_fits_twice_and_its_state_goes_round(name: str, tmp_path: Path) -> None:
    callback = CALLBACKS[name]()
    fit_twice(with_company(callback), tmp_path)
    state = callback.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    fresh = CALLBACKS[name]()
    fresh.load_state_dict(loaded)
    assert equal(fresh.state_dict(), state)


def test_the_whole_suite_fits_twice_and_its_state_goes_round(tmp_path: Path) -> None:
    options = {"run_dir": tmp_path / "run", "policy": "recover", "checkpoint_every_n_steps": 4}
    callbacks = default_callbacks(**options)  # type: ignore[arg-type]
    fit_twice(callbacks, tmp_path)
    for callback, fresh in zip(callbacks, default_callbacks(**options), strict=True):  # type: ignore[arg-type]
        state = callback.state_dict()
        fresh.load_state_dict(state)
        assert equal(fresh.state_dict(), state), callback.state_key


def test_a_state_that_a_snapshot_keeps_as_it_is_never_changes(tmp_path: Path) -> None:
    """``fresh_state``: what the callback sees, and what it is put back to, later leaves such a state alone."""

    class Keeps(Callback):
        def __init__(self) -> None:
            self.kept: list[tuple[SentinelCallback, dict[str, Any], dict[str, Any]]] = []

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step in (3, 30):
                for callback in trainer.callbacks:
                    if declares(callback, "fresh_state"):
                        state = callback.state_dict()
                        self.kept.append((callback, state, copy.deepcopy(state)))
            if trainer.global_step == 40:
                for callback, state, _ in self.kept:
                    callback.load_state_dict(state)

    keeps = Keeps()
    trainer, _ = make_trainer(
        [*default_callbacks(tmp_path / "run", "recover"), keeps], max_steps=60, default_root_dir=tmp_path
    )
    trainer.fit(Net(), Loader(64))
    assert {type(callback).__name__ for callback, *_ in keeps.kept} == {
        "BatchValidator",
        "DeepProbe",
        "DivergenceDetector",
        "LossScaleMonitor",
        "RankOutlierDetector",
        "ReplicaConsistency",
        "SpikeDetector",
    }
    for callback, state, then in keeps.kept:
        assert equal(state, then), callback.state_key
    changed = [c.state_key for c, state, _ in keeps.kept[:7] if not equal(state, c.state_dict())]
    assert changed == [
        "lightning_sentinel.BatchValidator",
        "lightning_sentinel.SpikeDetector",
        "lightning_sentinel.DivergenceDetector",
    ]


def test_nothing_is_taken_for_granted_of_what_the_user_has_put_in_place() -> None:
    """A subclass, or a detector of the user's own, may keep more, hand it out alive, and look at a run on one rank."""

    class Mine(lightning_sentinel.RankOutlierDetector):
        pass

    own, mine, foreign = lightning_sentinel.RankOutlierDetector(), Mine(), lightning_sentinel.RankOutlierDetector()
    foreign.detector = lightning_sentinel.SpikeDetector().detector  # type: ignore[assignment]
    for what in ("fresh_state", "compares_ranks"):
        assert [declares(c, what) for c in (own, mine, foreign, RankTelemetry())] == [True, False, False, False]
    assert declares(lightning_sentinel.BatchValidator(), "fresh_state")
    assert not declares(type("Callback", (Callback,), {})(), "fresh_state")


def test_a_snapshot_in_memory_copies_nothing_of_the_samples_seen() -> None:
    """Their memory only grows at its end: a light snapshot of every step would else copy megabytes in a long run."""
    validator = lightning_sentinel.BatchValidator()
    looks = _Looks()
    trainer, _ = make_trainer([validator, RankTelemetry(), looks], max_steps=8)
    trainer.fit(Net(), Loader(64))
    keys = validator.state_dict()["seen"]["keys"]
    assert len(keys) > looks.length > 0
    assert looks.address == keys.data_ptr()


class _Looks(Callback):
    """At step 5: where the keys of samples lie that a light snapshot holds, and how many they are."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 5:
            state = take(trainer, tensors=False).callbacks["lightning_sentinel.BatchValidator#0"]["state_dict"]
            self.address, self.length = state["seen"]["keys"].data_ptr(), len(state["seen"]["keys"])


@every_callback
def test_never_logs_through_the_module(name: str) -> None:
    """``log`` of the user's module would change what their own logging reduces, and when."""
    assert not {"log", "log_dict"} & set(dir(CALLBACKS[name]))
    module = inspect.getmodule(CALLBACKS[name])
    assert module is not None
    assert not re.search(r"(module|self)\.log(_dict)?\(", inspect.getsource(module))


@every_callback
def test_docstring_has_an_example_and_every_argument(name: str) -> None:
    cls = CALLBACKS[name]
    assert ">>> " in cls.__doc__
    documented = argument_docs(cls)
    assert list(documented) == list(inspect.signature(cls).parameters)
    for argument, meaning in documented.items():
        assert meaning.endswith("."), f"{name}.{argument}: {meaning!r} is no sentence"


@pytest.mark.parametrize("name", [n for n in PUBLIC if n != "__version__"])
def test_every_public_name_is_documented(name: str) -> None:
    assert inspect.getdoc(PUBLIC[name])
    if inspect.isclass(PUBLIC[name]):
        for member, value in vars(PUBLIC[name]).items():
            # Lightning's hooks are documented by Lightning; state_dict and the like by torch.
            if callable(value) and not member.startswith("_") and not hasattr(Callback, member):
                assert inspect.getdoc(value), f"{name}.{member}"
