"""The suite beside a compiled model: nothing is different, and what goes wrong is still found and traced."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from sentinel_kit import Loader, Sink, make_trainer, same_bits, weights
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_sentinel import (
    FaultInjector,
    IncidentResponse,
    NonFiniteTracer,
    RankTelemetry,
    Rollback,
    SpikeDetector,
    default_callbacks,
)
from lightning_sentinel.context import context_of
from lightning_sentinel.faults import NanBackward, NanForward, TransientNan
from lightning_sentinel.faults.base import Fault
from lightning_sentinel.faults.computation import ModuleFault
from lightning_sentinel.state.lightning_private import hold_compiled, runs_compiled

# What torch itself warns of while it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:.*not recommended.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.narrow(torch.relu(self.wide(h)).sqrt())


class Compiled(L.LightningModule):
    """At step ``bad`` its input is infinite."""

    def __init__(self, backend: str | None, bad: int | None = None) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, 1))
        self.bad, self.calls = bad, 0
        if backend is not None:
            self.inner = torch.compile(self.run, backend=backend)
        else:
            self.inner = self.run

    def run(self, x: Tensor) -> Tensor:
        h = self.model[0](x)
        for block in self.model[1]:
            h = block(h)
        return self.model[2](h)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"]
        if self.trainer.global_step == self.bad:
            x = x * math.inf
        return (self.inner(x) - batch["y"]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-3, fused=True)


def run(backend: str | None, suite: bool = True, bad: int | None = None, sync: str = "gate") -> tuple[Any, Any]:
    torch.compiler.reset()
    L.seed_everything(0, verbose=False)
    callbacks: list[L.Callback] = [
        NonFiniteTracer(),
        SpikeDetector(),
        RankTelemetry(sync=sync),
        IncidentResponse(mode="recover", exit_on_stop=False),
        Rollback(every_n_steps=10),
    ]
    trainer, _ = make_trainer(callbacks if suite else [], max_steps=40)
    module = Compiled(backend, bad)
    trainer.fit(module, Loader())
    return trainer, module


def test_a_compiled_model_trains_to_the_same_bits_with_and_without_the_suite() -> None:
    assert same_bits(weights(run("eager")[1]), weights(run("eager", suite=False)[1]))


@pytest.mark.parametrize("sync", ["gate", "lagged"])
def test_a_step_of_a_compiled_model_is_traced_in_the_eager_module(sync: str) -> None:
    trainer, module = run("eager", bad=27, sync=sync)
    [incident] = context_of(trainer).incidents
    assert incident.opened_step == 27
    assert (str(incident.verdict.kind), incident.verdict.reproducible) == ("numerics", True)
    assert incident.verdict.culprits == ("module:model.0",)  # where the infinite input meets the weights
    assert [a["action"] for a in incident.actions] == ["skip_step"]
    assert all(torch.isfinite(p).all() for p in module.parameters())


class ByLayer(Compiled):
    """Each layer is compiled on its own; at step ``bad`` something outside of them spoils the second one's output, once."""

    def __init__(self, bad: int | None = None, backend: Any = "eager") -> None:
        super().__init__(None, bad)
        for block in self.model[1]:
            block.compile(backend=backend)

    def run(self, x: Tensor) -> Tensor:
        h = self.model[0](x)
        for i, block in enumerate(self.model[1]):
            if i and self.trainer.global_step == self.bad and not self.calls:
                self.calls += 1
                h = h * math.nan
            h = block(h)
        return self.model[2](h)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.run(batch["x"]) - batch["y"]).square().mean()


def fitted(module: L.LightningModule, *faults: Fault, suite: bool = True, steps: int = 40) -> tuple[Any, Sink]:
    """Trained from the same weights each time; the Trainer and what was journalled."""
    torch.compiler.reset()
    counters.clear()
    L.seed_everything(1, verbose=False)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    callbacks: list[L.Callback] = [
        FaultInjector(faults),
        NonFiniteTracer(),
        RankTelemetry(),
        IncidentResponse(mode="recover", exit_on_stop=False),
        Rollback(),
    ]
    trainer, sink = make_trainer(callbacks if suite else [], max_steps=steps)
    trainer.fit(module, Loader())
    return trainer, sink


def test_a_layer_compiled_on_its_own_is_flagged_and_cleared_as_it_ran() -> None:
    module, clean = ByLayer(bad=27), ByLayer()
    compiled = [block._compiled_call_impl for block in module.model[1]]
    trainer, _ = fitted(module)
    [incident] = context_of(trainer).incidents
    # It does not come again in the compiled step, so its flag tells where it was, and the step is tried again.
    assert (str(incident.verdict.kind), incident.verdict.reproducible) == ("infrastructure", False)
    assert incident.verdict.culprits == ("module:model.1.1", "rank:0")
    assert [a["action"] for a in incident.actions] == ["retry_step"]
    assert [block._compiled_call_impl for block in module.model[1]] == compiled
    fitted(clean, suite=False)
    assert same_bits(weights(module), weights(clean))


INSIDE = "model.1.1.wide"  # in the second compiled layer


@pytest.mark.parametrize("whole", [False, True], ids=["by layer", "whole"])
@pytest.mark.parametrize(
    ("fault", "kind", "actions"),
    [
        (NanForward(27, INSIDE, row=1), "numerics", ["skip_step"]),
        (NanBackward(27, INSIDE, row=1), "numerics", ["skip_step"]),
        (TransientNan(27, INSIDE), "infrastructure", ["retry_step"]),
        (TransientNan(27, "model.1.1"), "infrastructure", ["retry_step"]),
    ],
    ids=["nan_forward", "nan_backward", "transient_nan", "transient_nan in all of a layer"],
)
def test_a_fault_strikes_inside_of_what_is_compiled(
    fault: ModuleFault, kind: str, actions: list[str], whole: bool
) -> None:
    fault = copy.deepcopy(fault)
    trainer, sink = fitted(module := Compiled("aot_eager") if whole else ByLayer(backend="aot_eager"), fault)
    [strike] = sink.named("fault.injected")
    assert (strike["step"], strike["module"], fault.fired) == (27, fault.target, 1)
    assert strike["ran_eagerly"] == (["the step"] if whole else ["model.1.1"])
    [incident] = context_of(trainer).incidents
    assert (str(incident.verdict.kind), [a["action"] for a in incident.actions]) == (kind, actions)
    [trace] = sink.named("triage.nonfinite")
    assert trace["compiled"] == ("again" if kind == "numerics" else "finite")
    if kind == "numerics":
        assert incident.verdict.culprits == (f"module:{INSIDE}",)
        assert incident.verdict.sample_ids == ("s109",)  # 27 steps of 4, and the second row
        return
    # Its own replay ran compiled and was finite; the step that is tried again is that of the clean run.
    assert "rank:0" in incident.verdict.culprits
    graphs = counters["stats"]["unique_graphs"]
    fitted(clean := Compiled("aot_eager") if whole else ByLayer(backend="aot_eager"), suite=False)
    assert same_bits(weights(module), weights(clean))
    assert counters["stats"]["unique_graphs"] == graphs  # neither fault nor replay had anything compiled


def test_what_only_the_compiled_step_does_is_said_to_be_the_compilers() -> None:
    class Miscompiled(ByLayer):
        """The second layer's graph gives NaN in step 27, each time; its eager form does not."""

        def __init__(self) -> None:
            super().__init__(backend=self.spoils)
            self.compiled_layers = 0

        def spoils(self, graph: Any, inputs: Any) -> Any:
            def spoilt(*args: Any) -> Any:
                outs = graph.forward(*args)
                self.calls += 1
                second = self.calls % 2 == 0
                return tuple(o * math.nan if second and self.trainer.global_step == 27 else o for o in outs)

            return spoilt

    trainer, sink = fitted(Miscompiled())
    [incident] = context_of(trainer).incidents
    assert (str(incident.verdict.kind), incident.verdict.culprits) == ("numerics", ("module:model.1.1",))
    assert "not finite again as it ran, compiled, first in the output of model.1.1" in incident.verdict.sentence
    [trace] = sink.named("triage.nonfinite")
    assert (trace["kind"], trace["compiled"], trace["reproduced"], trace["forwards"]) == ("compiled", "again", True, 2)


def test_a_fault_that_compiled_code_keeps_from_striking_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("lightning_sentinel"), "warning", lambda text, *_: said.append(text))
    holder: list[Any] = []
    function = torch.compile(lambda x: holder[0].run(x), backend="eager")  # nobody can see that it calls the module

    class Hidden(Compiled):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (function(batch["x"]) - batch["y"]).square().mean()

    holder.append(Hidden(None))
    _, sink = fitted(holder[0], NanForward(5, INSIDE), NanForward(99, INSIDE, name="later"), steps=8)
    assert not sink.named("fault.injected")
    [missed] = sink.named("fault.missed")
    assert missed["name"] == "nan_forward"
    assert f"its module '{INSIDE}' was not called in a training step, or by compiled code" in missed["message"]
    assert said == [missed["message"]]


def test_what_is_compiled_is_seen_wherever_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(module: nn.Module) -> tuple[bool, bool]:
        return runs_compiled(module), hold_compiled(module.modules())

    assert seen(Compiled(None)) == (False, False)
    assert seen(ByLayer()) == (True, False)  # each such module is asked on its own
    assert seen(Compiled("eager")) == (True, True)
    assert seen(nn.Sequential(torch.compile(Block(), backend="eager"))) == (True, True)
    model = nn.Sequential(Block())
    with monkeypatch.context() as patch:  # a class that has been asked before
        assert seen(model) == (False, False)
        patch.setattr(Block, "forward", torch.compile(Block.forward, backend="eager"))
        assert seen(model) == (True, True)
    assert seen(model) == (False, False)


class Graphed(ByLayer):
    """Notes the storages of what its layers and its loss gave, and at the next step which of them are still alive.

    A CUDA graph writes into these the next time it runs: nothing that is read later may lie in them.
    """

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.given: list[StorageWeakRef] = []
        self.alive: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.alive.append(sum(not ref.expired() for ref in self.given))
        self.given, h = [], self.model[0](batch["x"])
        for block in self.model[1]:
            h = block(h)
            self.given.append(StorageWeakRef(h.untyped_storage()))
        loss = (self.model[2](h) - batch["y"]).square().mean()
        self.given.append(StorageWeakRef(loss.untyped_storage()))
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None


@pytest.mark.parametrize(("manual", "sync"), [(False, "gate"), (False, "lagged"), (True, "gate")])
def test_nothing_that_a_step_gave_is_held_until_the_next_one(manual: bool, sync: str, tmp_path: Any) -> None:
    torch.compiler.reset()
    module = Graphed(manual)
    suite = default_callbacks(tmp_path, policy="recover")
    suite = [RankTelemetry(sync=sync) if isinstance(c, RankTelemetry) else c for c in suite]
    trainer, _ = make_trainer(suite, max_steps=30)
    trainer.fit(module, Loader())
    assert len(module.alive) == 30
    assert not any(module.alive), module.alive
