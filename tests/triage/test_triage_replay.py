"""A replay gives the step's own bits and leaves no trace, in every way of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from triage_models import Gate, Net, fingerprint, fit

from lightning_sentinel.context import context_of
from lightning_sentinel.triage import window as window_module
from lightning_sentinel.triage.replay import ReplayUnavailableError, block_paths, outer_blocks, replay
from lightning_sentinel.triage.sandbox import is_replaying
from lightning_sentinel.triage.window import forget_after, healthy_windows, release_capture, restore_buffers

WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "accumulation of 3": {"accumulate_grad_batches": 3},
    "manual": {"manual": True},
    "fp16": {"fp16": True},
    "fp16, manual": {"fp16": True, "manual": True},
}


def _replayed(trainer: Any, module: Any, optimizer: Any, record: Any) -> Any:
    return replay(trainer, module, optimizer, armed=True, keep_grads=True, watch=["blocks.0"])


@pytest.mark.parametrize("way", WAYS)
def test_a_replay_has_the_steps_bits_and_leaves_no_trace(way: str) -> None:
    options = dict(WAYS[way])
    manual = options.pop("manual", False)
    prints, gates = [], []
    for replaying in (False, True):
        module, gate = Net(manual=manual), Gate(_replayed if replaying else None, every_step=True)
        prints.append(fingerprint(fit(module, [gate], **options), module))
        gates.append(gate)
    assert prints[0] == prints[1]
    results = gates[1].results
    assert len(results) == 8
    assert [(r.bitwise_equal, r.grads_equal, r.origin) for r in results] == [(True, True, None)] * 8
    assert all(r.activation_rms["blocks.0"] > 0 for r in results)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at activations
def test_a_compiled_module_is_replayed_eagerly_and_without_a_trace() -> None:
    prints = []
    for replaying in (False, True):
        module, gate = Net(), Gate(_replayed if replaying else None, every_step=True)
        module.blocks[0].compile(backend="eager")
        prints.append(fingerprint(fit(module, [gate], steps=4), module))
    assert prints[0] == prints[1]
    assert [(r.bitwise_equal, r.grads_equal) for r in gate.results] == [(True, True)] * 4


def test_a_checkpointed_block_is_replayed() -> None:
    class Checkpointed(Net):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                inner = block.forward
                block.forward = lambda h, t, f=inner: torch.utils.checkpoint.checkpoint(f, h, t, use_reentrant=False)

    gate = Gate(_replayed, every_step=True)
    fit(Checkpointed(), [gate], steps=3)
    assert [(r.bitwise_equal, r.grads_equal) for r in gate.results] == [(True, True)] * 3


def test_a_wider_dtype_gives_nearly_the_same_loss_and_puts_the_parameters_back() -> None:
    def at_gate(trainer: Any, module: Any, optimizer: Any, record: Any) -> Any:
        before = [(id(p), p.dtype) for p in module.parameters()]
        wide, same = replay(trainer, module, optimizer, dtype=torch.float64), replay(trainer, module, optimizer)
        assert [(id(p), p.dtype) for p in module.parameters()] == before
        return wide.loss, same.loss, wide.bitwise_equal

    gate = Gate(at_gate, every_step=True)
    fit(Net(), [gate], steps=2)
    for wide, same, equal in gate.results:
        assert wide == pytest.approx(same, rel=1e-2)  # random numbers of another dtype are other numbers
        assert wide != same
        assert equal is None


def test_a_single_micro_batch_of_a_window_is_replayed_with_its_own_random_states() -> None:
    def at_gate(trainer: Any, module: Any, optimizer: Any, record: Any) -> Any:
        return replay(trainer, module, optimizer, micro_batches=[2]).losses, context_of(trainer).scratch["live_losses"]

    gate = Gate(at_gate, every_step=True)
    fit(Net(), [gate], steps=3, accumulate_grad_batches=4)
    for replayed, live in gate.results:
        assert replayed == [float(live[2])]


def test_a_batch_that_was_changed_in_place_is_named() -> None:
    def at_gate(trainer: Any, module: Any, optimizer: Any, record: Any) -> str:
        context_of(trainer).window.micro_batches[0].batch["x"].mul_(2.0)
        with pytest.warns(UserWarning, match=r"The replay of step 0 is not exact: micro-batch 0 was changed in place"):
            return replay(trainer, module, optimizer).inexact

    gate = Gate(at_gate, every_step=True)
    fit(Net(), [gate], steps=1)
    assert gate.results == ["micro-batch 0 was changed in place after its capture"]


def test_without_a_capture_the_refusal_says_what_to_do() -> None:
    def at_gate(trainer: Any, module: Any, optimizer: Any, record: Any) -> None:
        context_of(trainer).window = None
        with pytest.raises(
            ReplayUnavailableError, match="no micro-batch was captured for this step; call lightning_sent"
        ):
            replay(trainer, module, optimizer)
        assert not is_replaying(trainer)
        trainer.should_stop = True

    module = Net()
    with pytest.raises(AttributeError):  # the test's own gate goes on to the window that is gone
        fit(module, [_Bare(at_gate)], steps=1)


class _Bare(Gate):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.at_gate(trainer, pl_module, optimizer, None)
        raise AttributeError


def test_an_error_in_the_replayed_step_puts_everything_back() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if is_replaying(self.trainer):
                self.seen.append("replayed")
                self.drop = None
                raise RuntimeError("only in the replay")
            return super().training_step(batch, batch_idx)

    def at_gate(trainer: Any, module: Any, optimizer: Any, record: Any) -> None:
        with pytest.raises(RuntimeError, match="only in the replay"):
            replay(trainer, module, optimizer)

    prints = []
    for gate in (Gate(), Gate(at_gate, every_step=True)):
        module = Fails()
        prints.append(fingerprint(fit(module, [gate], steps=3), module))
    assert prints[0] == prints[1]


def test_windows_follow_the_steps_and_healthy_ones_are_kept() -> None:
    def at_gate(trainer: Any, module: Any, optimizer: Any, record: Any) -> Any:
        window, healthy = context_of(trainer).window, context_of(trainer).healthy_window
        return window.step, window.sample_ids, None if healthy is None else (healthy.step, len(healthy.losses))

    gate = Gate(at_gate, every_step=True)
    trainer = fit(Net(), [gate], steps=4)
    assert [step for step, _, _ in gate.results] == [0, 1, 2, 3]
    assert gate.results[1][1] == ("s4", "s5", "s6", "s7")
    assert [healthy for _, _, healthy in gate.results] == [None, (0, 1), (1, 1), (2, 1)]
    assert [w.step for w in healthy_windows(trainer)] == [2, 0]
    assert healthy_windows(trainer, before_step=0) == []
    release_capture(trainer)
    assert "on_train_batch_start" not in trainer.strategy.__dict__


def test_buffers_go_back_to_the_windows_start() -> None:
    def at_gate(trainer: Any, module: Any, optimizer: Any, record: Any) -> bool:
        start = {n: b.clone() for n, b in context_of(trainer).window.buffers.items()}
        moved = any(not torch.equal(b, start[n]) for n, b in module.named_buffers())
        restore_buffers(trainer)
        return moved and all(torch.equal(b, start[n]) for n, b in module.named_buffers())

    gate = Gate(at_gate, every_step=True)
    fit(Net(), [gate], steps=3)
    assert gate.results == [True] * 3


class GoesBack(Gate):
    """Goes back from step 6 to step 3 as a rollback does: another attempt, an earlier step, the path's facts forgotten."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        context = context_of(trainer)
        if batch_idx == 5:
            progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
            progress.total.completed = 3
            context.attempt += 1
            context.forget_after(3)
            self.kept = [w.step for w in healthy_windows(trainer)]
        if batch_idx == 6:
            self.left = [(w.step, w.attempt) for w in healthy_windows(trainer)]


def test_windows_of_an_abandoned_path_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "KEPT_EVERY", 1)
    gate = GoesBack()
    fit(Net(), [gate], steps=6)
    assert gate.kept == [4, 3, 2, 1, 0]
    assert gate.left == [(2, 0), (1, 0), (0, 0)]


def test_windows_can_be_let_go_from_a_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "KEPT_EVERY", 1)
    trainer = fit(Net(), [Gate()], steps=6)
    assert [w.step for w in healthy_windows(trainer)] == [4, 3, 2, 1, 0]
    forget_after(trainer, 2)
    assert [w.step for w in healthy_windows(trainer)] == [1, 0]
    assert context_of(trainer).window is None
    assert context_of(trainer).healthy_window is None


def test_boundaries_are_the_blocks_and_their_children() -> None:
    assert block_paths(Net(layers=2)) == [
        "blocks.0",
        "blocks.0.norm",
        "blocks.0.mixer",
        "blocks.1",
        "blocks.1.norm",
        "blocks.1.mixer",
    ]
    assert block_paths(Net(layers=2), ["*.mixer"]) == ["blocks.0.mixer", "blocks.1.mixer"]
    assert block_paths(Net(layers=2).blocks[0]) == ["norm", "mixer"]


def test_what_is_flagged_in_every_step_are_the_outermost_blocks() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(2, 2)
            self.tower = nn.Sequential(nn.Identity(), nn.ModuleList([Net(layers=1), nn.Linear(2, 2)]))
            self.heads = nn.ModuleList([nn.Linear(2, 1)])

    assert outer_blocks(Net(layers=2)) == ["blocks.0", "blocks.1"]
    assert outer_blocks(Routed()) == ["tower.1.0", "tower.1.1", "heads.0"]
    assert outer_blocks(Net(layers=2).blocks[0]) == ["norm", "mixer"]
