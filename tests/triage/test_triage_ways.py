"""The whole ladder in a compiled run, in a checkpointed one, and beside a run that must not notice it."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from test_triage_verdicts import STEP, Smooth, run
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchdata.stateful_dataloader import StatefulDataLoader
from triage_models import Net, Samples, collate, fingerprint

from lightning_sentinel.callbacks.defaults import default_callbacks
from lightning_sentinel.context import context_of
from lightning_sentinel.incidents import FindingKind, VerdictKind
from lightning_sentinel.triage.sandbox import is_replaying


class Counting:
    """A backend for ``torch.compile`` that runs the graph as it is and counts its calls, those in a replay apart."""

    def __init__(self) -> None:
        self.trainer: L.Trainer | None = None
        self.live = self.replayed = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def counted(*args: Any) -> Any:
            replaying = self.trainer is not None and is_replaying(self.trainer)
            self.live, self.replayed = self.live + (not replaying), self.replayed + replaying
            return graph.forward(*args)

        return counted


class Compiled(Smooth):
    def __init__(self, kind: str, backend: Counting) -> None:
        super().__init__(kind)
        self.backend = backend
        for block in self.blocks:
            block.compile(backend=backend)

    def on_train_start(self) -> None:
        self.backend.trainer = self.trainer


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at activations
def test_a_compiled_run_is_replayed_as_it_ran_and_examined_in_its_eager_modules() -> None:
    backend = Counting()
    verdict, _ = run(
        None, FindingKind.NONFINITE_LOSS, at=3, module=Compiled("root", backend), fit_options={"kind": "root"}
    )
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NUMERICS, ("module:blocks.1.mixer",))
    assert verdict.sample_ids == ("s14",)
    assert verdict.evidence["operator"] == "aten.sqrt.default"
    assert verdict.evidence["forwards"] >= 3  # armed, alone, in float64
    # Three steps from the third on are not finite; each is replayed once as it ran, and all else is eager.
    assert (backend.live, backend.replayed) == (5 * 3, 3 * 3)


class Checkpointed(Smooth):
    """Each block runs a second time in the backward."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.calls = 0
        for block in self.blocks:
            self._twice(block)

    def _twice(self, block: nn.Module) -> None:
        inner = block.forward

        def forward(h: torch.Tensor, trigger: torch.Tensor) -> Any:
            return checkpoint(inner, h, trigger, use_reentrant=False)

        block.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "operator", "phase"),
    [
        ("root", "aten.sqrt.default", "forward"),
        ("where", "aten.div.Tensor", "backward, SqrtBackward0"),
        ("kernel", "aten.scalar_tensor.default", "backward, NanBackwardBackward"),
    ],
)
def test_a_block_that_runs_twice_is_named_once_with_its_row(kind: str, operator: str, phase: str) -> None:
    module, calls = Checkpointed(kind), list[bool]()
    module.blocks[1].norm.register_forward_hook(
        lambda *_: calls.append(torch._C._current_graph_task_id() != -1) if module.trainer.global_step == 0 else None
    )
    at = FindingKind.NONFINITE_LOSS if kind == "root" else FindingKind.NONFINITE_GRADS
    verdict, _ = run(None, at, at=3, module=module, fit_options={"kind": kind})
    assert calls == [False, True]  # of one step: its forward, and the recomputation in its backward
    assert verdict is not None
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NUMERICS, ("module:blocks.1.mixer",))
    assert verdict.sample_ids == ("s14",)
    assert (verdict.evidence["operator"], verdict.evidence["phase"]) == (operator, phase)


def _wrong_targets(trainer: Any, module: Any, batch: Any) -> None:
    batch["y"] = batch["y"] + 30.0


def _rate(trainer: Any, module: Any, batch: Any) -> None:
    for group in trainer.optimizers[0].param_groups:
        group["lr"] *= 3000.0


def _once(trainer: Any, module: Any, batch: Any) -> None:
    fired: list[int] = []
    module.head.register_forward_hook(lambda m, args, y: y if fired else (fired.append(1), y + 60.0)[1])


class Hurts(L.Callback):
    def __init__(self, hurt: Any) -> None:
        self.hurt = hurt

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == STEP:
            self.hurt(trainer, pl_module, batch)


def _left_behind(hurt: Any, callbacks: list[L.Callback]) -> tuple[list[str], L.Trainer]:
    """All that a run holds at its end, with its loader's position and every loss that it logged."""
    L.seed_everything(0, verbose=False)
    module = Net()
    logged: list[str] = []

    class Listens(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            logged.append(str(sorted(trainer.callback_metrics.items())))

    trainer = L.Trainer(
        max_steps=STEP + 14,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=[Hurts(hurt), Listens(), *callbacks],
    )
    loader = StatefulDataLoader(Samples("", 400, 0), batch_size=4, shuffle=True, collate_fn=collate)
    trainer.fit(module, loader)
    held = fingerprint(trainer, module)[:-1]  # without the names in the strategy: the capture of batches stands there
    return [*held, str(loader.state_dict()), *logged], trainer


@pytest.mark.parametrize(
    ("hurt", "kind"), [(_wrong_targets, "data"), (_rate, "optimization"), (_once, "infrastructure")]
)
def test_a_run_goes_on_to_the_bit_beside_the_whole_ladder(hurt: Any, kind: str) -> None:
    alone, _ = _left_behind(hurt, [])
    watched, trainer = _left_behind(hurt, default_callbacks()[1:])  # without the run folder
    incidents = context_of(trainer).incidents
    assert incidents
    assert str(incidents[0].verdict.kind) == kind
    assert incidents[0].verdict.evidence["forwards"] > 0 or kind == "optimization"  # the rates stand in the books
    assert watched == alone
