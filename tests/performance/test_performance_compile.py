"""The suite beside a compiled model: nothing is different, and what goes wrong is still found and traced."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from sentinel_kit import Loader, make_trainer, same_bits, weights
from torch import Tensor, nn

from lightning_sentinel import IncidentResponse, NonFiniteTracer, RankTelemetry, Rollback, SpikeDetector
from lightning_sentinel.context import context_of

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

    def __init__(self, bad: int) -> None:
        super().__init__(None, bad)
        for block in self.model[1]:
            block.compile(backend="eager")

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


def test_layers_compiled_on_their_own_are_flagged_and_left_as_they_were() -> None:
    torch.compiler.reset()
    L.seed_everything(0, verbose=False)
    module = ByLayer(bad=27)
    compiled = [block._compiled_call_impl for block in module.model[1]]
    suite = [NonFiniteTracer(), RankTelemetry(), IncidentResponse(mode="recover", exit_on_stop=False), Rollback()]
    trainer, _ = make_trainer(suite, max_steps=40)
    trainer.fit(module, Loader())
    [incident] = context_of(trainer).incidents
    # It does not come again, so only its flag tells where it was; and an eager replay does not clear a compiled step.
    assert str(incident.verdict.kind) == "undetermined"
    assert "the output of model.1.1 on rank 0 was not finite" in incident.verdict.sentence
    assert "the step ran compiled, the replay did not" in incident.verdict.sentence
    assert [block._compiled_call_impl for block in module.model[1]] == compiled
