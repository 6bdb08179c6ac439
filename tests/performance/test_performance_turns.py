"""The overhead benchmark: what is off does not run, what is on does, training does not notice, and which steps count."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import overhead
import pytest
import torch
from overhead import GradientNorms
from sentinel_kit import Loader, Net, same_bits, weights
from torch import Tensor
from turns import Attached, Instrument, OwnTime, Turns, counting, round_of

from lightning_sentinel import default_callbacks
from lightning_sentinel.callbacks.base import STEP_HOOKS
from lightning_sentinel.journal import read_journal

OFF_FIRST, ON_FIRST = "......++++++++++++......", "++++++............++++++"
WARM_UP = 3
PLAN = "+++" + OFF_FIRST + ON_FIRST
ON = [i for i, mark in enumerate(PLAN) if mark == "+"]
OFF = [i for i, mark in enumerate(PLAN) if mark == "."]


def turns_of(**options: Any) -> Turns:
    return Turns(rounds=2, warm_up=WARM_UP, **options)


def fit(callbacks: list[L.Callback], module: Net | None = None, **options: Any) -> Net:
    torch.manual_seed(0)
    module = module or Net()
    trainer = overhead.trainer_of(callbacks, **({"max_steps": len(PLAN), "gradient_clip_val": 0.5} | options))
    trainer.fit(module, Loader())
    return module


class Everywhere(L.Callback):
    """Hooks itself in wherever a callback can, and notes the step of each call; the one named ``slow`` takes 2 ms."""

    def __init__(self, slow: str = "") -> None:
        self.calls: dict[str, list[int]] = defaultdict(list)
        self.slow = slow
        for name in STEP_HOOKS:
            setattr(self, name, partial(self.note, name))

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.trainer = trainer
        trainer.optimizers[0].register_step_pre_hook(partial(self.note, "optimizer pre"))
        trainer.optimizers[0].register_step_post_hook(partial(self.note, "optimizer post"))

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.last.register_forward_pre_hook(partial(self.note, "forward pre"))
        pl_module.last.register_forward_hook(partial(self.note, "forward"))
        pl_module.last.register_full_backward_hook(partial(self.note, "backward"))
        owners = {"batch_to_device": trainer.strategy, "clip_grad_by_norm": trainer.precision_plugin}
        for name, owner in {**owners, "advance": trainer.fit_loop.epoch_loop}.items():
            setattr(owner, name, partial(self.around, name, getattr(owner, name)))

    def around(self, name: str, inner: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.note(name)
        return inner(*args, **options)

    def note(self, name: str, *args: Any) -> None:
        self.calls[name].append(self.trainer.fit_loop.epoch_loop.batch_progress.current.completed)
        end = time.process_time() + 0.002
        while name == self.slow and time.process_time() < end:
            pass


class Spied(Net):
    """Notes in each step what is attached, told by names."""

    def __init__(self) -> None:
        super().__init__()
        self.attached: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        now = Attached(self.trainer)
        hooks = [(type(owner).__name__, name, len(hooks)) for owner, name, hooks in now.hooks]
        methods = [
            (type(owner).__name__, sorted({*found} - {"on_iteration_done", "training_step"}))
            for owner, found in now.methods
        ]
        callbacks = [type(c).__name__ for c in self.trainer.callbacks if type(c) not in (Turns, L.Callback)]
        self.attached.append((hooks, methods, callbacks))
        return super().training_step(batch, batch_idx)


# ------------------------------------------------------------------------------------------------------------ the switch


def test_the_plan_of_blocks_and_which_steps_count() -> None:
    def drawn(steps: list[bool], marks: str) -> str:
        return "".join(marks[on] for on in steps)

    assert drawn(round_of(0), ".+") == OFF_FIRST
    assert drawn(round_of(1), ".+") == ON_FIRST
    for number in (0, 1):
        assert drawn(counting(round_of(number)).tolist(), ".x") == "..xxxx..xxxxxxxxxx..xxxx"
    turns = turns_of()
    assert drawn(turns.plan, ".+") == PLAN
    assert drawn(turns.counts, ".x") == "..." + 2 * "..xxxx..xxxxxxxxxx..xxxx"


def test_what_is_off_is_not_called_and_what_is_on_is() -> None:
    everywhere, turns = Everywhere(), turns_of()
    fit([turns, everywhere])
    places = {*STEP_HOOKS, "optimizer pre", "optimizer post", "forward pre", "forward", "backward"}
    assert {*everywhere.calls} == places | {"batch_to_device", "clip_grad_by_norm", "advance"}
    assert [*everywhere.calls.values()] == [ON] * len(everywhere.calls)
    assert {name: len(seconds) for name, seconds in turns.steps.items()} == dict.fromkeys(turns.steps, 48)


@pytest.mark.parametrize("make", [lambda folder: default_callbacks(run_dir=folder), lambda folder: [Everywhere()]])
def test_what_is_attached_in_a_bare_block_is_what_a_run_without_callbacks_has(
    make: Callable[[Path], list[L.Callback]], tmp_path: Path
) -> None:
    [bare] = {str(told) for told in fit([], Spied()).attached}
    attached = [str(told) for told in fit([turns_of(), *make(tmp_path)], Spied()).attached]
    assert [i for i, told in enumerate(attached) if told == bare] == OFF


def test_training_gives_the_numbers_of_an_undisturbed_run(tmp_path: Path) -> None:
    bare = fit([])
    watched = fit([turns_of(), *default_callbacks(run_dir=tmp_path, policy="recover")])
    assert same_bits(weights(watched), weights(bare))


def test_the_suite_is_not_disturbed_and_has_no_time_of_its_own_in_bare_blocks(tmp_path: Path) -> None:
    own = OwnTime()
    suite = default_callbacks(run_dir=tmp_path)
    turns = turns_of(timed={"own": own})
    fit([turns, *suite, Instrument(suite, own)])
    assert [e["step"] for e in read_journal(tmp_path) if e["event"] == "step"] == ON
    assert overhead.undisturbed(tmp_path, len(ON)) == []
    on = [mark == "+" for mark in PLAN[WARM_UP:]]
    assert [seconds > 0.0 for seconds in turns.steps["own"]] == on
    assert [seconds == 0.0 for seconds in turns.steps["own"]] == [not o for o in on]
    counted = [s for s, o, c in zip(turns.steps["own"], on, turns.counts[WARM_UP:], strict=True) if o and c]
    assert sum(turns.by_hook["own"].values()) == pytest.approx(sum(counted))
    # Hooks that do nothing any more are passed over, as without the clocks.
    assert own.calls["Preflight.on_train_batch_end"] == 2
    assert own.calls["RankTelemetry.on_train_batch_end"] == len(ON)


@pytest.mark.parametrize(
    ("slow", "part"),
    [
        ("advance", "around"),
        ("on_train_batch_start", "hooks"),
        ("forward", "passes"),
        ("on_before_optimizer_step", "hooks"),
        ("optimizer pre", "around"),
        ("optimizer post", "update"),
        ("on_train_batch_end", "hooks"),
    ],
)
def test_time_is_charged_to_its_part_of_the_step(slow: str, part: str) -> None:
    turns = turns_of()
    fit([turns, Everywhere(slow)])
    on = np.array([mark == "+" for mark in PLAN[WARM_UP:]])
    for name in Turns.PARTS:
        seconds = np.array(turns.steps[name])
        assert (seconds[on].min() >= 0.002) == (name == part)
        assert seconds[~on].min() < 0.002


def test_code_that_is_not_turned_off_is_an_error() -> None:
    own, norms = OwnTime(), GradientNorms()
    turns = turns_of(timed={"own": own})
    module = Net()
    module.on_after_backward = own.timed("left on", module.on_after_backward)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"step 3 is off, and yet these were called in it: left on\."):
        fit([turns, norms, Instrument([norms], own)], module)


class Sneaks(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == OFF[0]:
            self.last.register_forward_hook(lambda *args: None)
        return super().training_step(batch, batch_idx)


def test_a_hook_that_comes_in_a_bare_block_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a hook was added or removed while all was off, before step 9"):
        fit([turns_of(), Everywhere()], Sneaks())


def test_a_plan_that_the_trainer_does_not_follow_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a plan for max_steps=51, the Trainer has 50"):
        fit([turns_of()], max_steps=50)
    with pytest.raises(ValueError, match="Turns must be the first callback"):
        fit([Everywhere(), turns_of()])
    with pytest.raises(ValueError, match=r"Turns\(warm_up\) must be at least 1, got 0"):
        Turns(rounds=1, warm_up=0)


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == OFF[2]:
            raise ArithmeticError("in a bare block")
        return super().training_step(batch, batch_idx)


def test_an_exception_in_a_bare_block_is_told_to_all(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError, match="in a bare block"):
        fit([turns_of(), *default_callbacks(run_dir=tmp_path)], Fails())
    [ended] = [e for e in read_journal(tmp_path) if e["event"] == "run.ended"]
    assert ended["status"] == "failed"


class Anomaly(Net):
    def __init__(self) -> None:
        super().__init__()
        self.on: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if torch.is_anomaly_enabled():
            self.on.append(batch_idx)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_what_is_no_callback_is_switched_too() -> None:
    assert fit([turns_of(switch=overhead.detect_anomaly)], Anomaly()).on == ON[1:]  # the first step only warms up
    assert not torch.is_anomaly_enabled()


# ------------------------------------------------------------------------------------------------------------ the numbers

KINDS = np.array([[mark == "+" for mark in text] for text in (OFF_FIRST, ON_FIRST)] * 8)  # 16 rounds


def lane_of(on_ms: Any, off_ms: Any, **more: Any) -> dict[str, Any]:
    """Sixteen rounds whose steps take ``on_ms`` and ``off_ms``, and 50 ms more right after a switch."""
    counts = np.array([counting(on) for on in KINDS.tolist()])
    wall = 1e-3 * (np.where(KINDS, on_ms, off_ms) + np.where(counts, 0.0, 50.0))
    zeros = np.zeros_like(wall)
    parts = {"around": zeros, "hooks": zeros, "update": zeros, "passes": wall} | more
    return {"wall": wall, "first": KINDS[:, 0].tolist(), "runs": [16], **parts}


def test_the_ratio_is_that_of_the_steps_that_count() -> None:
    lane = lane_of(110.0, 100.0)
    lane["wall"][3, 9:12] = 7.0  # what else the machine did
    for what in ("wall", "cpu"):
        assert overhead.ratio_of(lane, what) == (pytest.approx(1.1), (pytest.approx(1.1), pytest.approx(1.1)))
    assert overhead.mean_ratio(lane) == pytest.approx(1.1)
    assert overhead.bare_ms({"suite": lane}, "wall") == pytest.approx(100.0)


def test_all_steps_include_those_after_a_switch() -> None:
    lane = lane_of(100.0, 100.0)
    lane["wall"] = np.tile(np.arange(1.0, 25.0), (16, 1))
    lane["wall"][:, 2:6] = 30.0
    # The middle blocks are 7 ... 18, of which 9 ... 18 count; the outer ones 1, 2, four times 30, and 19 ... 24, of which all
    # but 1, 2, 19 and 20 count.
    outer, outer_all, middle, middle_all = 27.0, 22.5, 13.5, 12.5
    counted, every = middle / outer, middle_all / outer_all
    assert overhead.ratio_of(lane)[0] == pytest.approx((counted + 1 / counted) / 2)
    assert overhead.ratio_of(lane, all_steps=True)[0] == pytest.approx((every + 1 / every) / 2)


def test_what_is_added_counts_a_snapshot_in_fifty_steps_and_not_a_disturbance() -> None:
    on, counts = KINDS, np.array([counting(steps) for steps in KINDS.tolist()])
    hooks, update, around = np.where(on, 1.2, 0.2), np.where(on, 1.5, 2.0), np.zeros(on.shape)
    counted = np.argwhere(on & counts)  # 72 in each 8 rounds
    for i in (5, 55, 72 + 5, 72 + 55):
        around[tuple(counted[i])] = 3.6
    lane = lane_of(110.0, 100.0, hooks=1e-3 * hooks, update=1e-3 * update, around=1e-3 * around)
    added = overhead.added_of(lane)
    snapshots = 2 * 3.6 / 72
    assert added == {
        "hooks_ms": pytest.approx(1.0),
        "update_ms": pytest.approx(-0.5),
        "around_ms": pytest.approx(snapshots),
        "net_ms": pytest.approx(0.5 + snapshots),
        "passes_ms": pytest.approx(10.0),
    }
