"""What holds for every callback of the suite, whatever it does."""

from __future__ import annotations

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
from lightning_sentinel.callbacks.base import SentinelCallback
from lightning_sentinel.callbacks.defaults import ORDER
from lightning_sentinel.conf.generate import argument_docs

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
