"""Where Lightning clips by the norm that the gate has measured, nothing but the second measurement is missing."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn

from lightning_sentinel import RankTelemetry, RunJournal, default_callbacks

STEPS = 12


class Net(L.LightningModule):
    """Layers of different sizes, one of them without a gradient; losses that need clipping and losses that do not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        self.unused = nn.Linear(3, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (30.0 if batch_idx % 2 else 0.01) * self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Touches(Net):
    """Changes its gradients after every callback's hook, behind the version counters' back."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.net.parameters():
            p.grad.data.mul_(3.0)  # type: ignore[union-attr]


class ClipsItself(Net):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
        for p in self.net.parameters():
            p.grad.data.mul_(3.0)  # type: ignore[union-attr]
        self.clip_gradients(optimizer, 0.5, "norm")


class Later(L.Callback):
    """A callback of the user's that comes after the suite."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: L.LightningModule, optimizer: Any) -> None:
        for p in pl_module.net.parameters():  # type: ignore[operator, union-attr]
            p.grad.data.mul_(3.0)


def fit(module: L.LightningModule, suite: list[L.Callback], more: list[L.Callback], **options: Any) -> list[Tensor]:
    defaults: dict[str, Any] = {"gradient_clip_val": 0.5, "accelerator": "cpu"}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        max_steps=STEPS, callbacks=[*suite, *more], enable_model_summary=False, **quiet, **(defaults | options)
    )
    rows = torch.randn(STEPS * 2, 4, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=None))  # type: ignore[arg-type]
    return [p.detach().clone() for p in module.parameters()]


def bits(weights: list[Tensor]) -> list[bytes]:
    return [w.numpy().tobytes() for w in weights]


@pytest.mark.filterwarnings("ignore:Rollback is off:UserWarning", "ignore:.*does not have many workers.*")
@pytest.mark.parametrize(
    ("module", "more", "options", "shared"),
    [
        (Net, [], {}, STEPS),
        (Net, [], {"accumulate_grad_batches": 2}, STEPS),
        (Net, [], {"plugins": [lambda: MixedPrecision("16-mixed", "cpu")]}, STEPS),
        (Net, [], {"precision": "bf16-mixed"}, STEPS),
        (Net, [], {"gradient_clip_algorithm": "value"}, 0),
        (Net, [], {"gradient_clip_val": None}, 0),
        (Touches, [], {}, 0),
        (ClipsItself, [], {}, 0),
        (Net, [Later], {}, 0),
    ],
)
def test_weights_are_those_of_a_run_without_the_suite(
    module: type[Net], more: list[type[L.Callback]], options: dict[str, Any], shared: int
) -> None:
    def made() -> dict[str, Any]:
        plugins = [make() for make in options.get("plugins", ())]
        return options | ({"plugins": plugins} if plugins else {})

    bare = fit(module(), [], [c() for c in more], **made())
    suite = [c for c in default_callbacks() if not isinstance(c, RunJournal)]
    watched = fit(module(), suite, [c() for c in more], **made())
    assert bits(watched) == bits(bare)
    [telemetry] = [c for c in suite if isinstance(c, RankTelemetry)]
    assert telemetry.shared_norm.used == shared


def halves(plugin: Precision, calls: list[float]) -> Any:
    def clip_grad_by_norm(optimizer: Any, most: float) -> None:
        calls.append(most)
        torch.nn.utils.clip_grad_norm_(plugin.main_params(optimizer), most / 2)

    return clip_grad_by_norm


def leaves_the_last_layer(plugin: Precision, calls: list[float]) -> Any:
    def main_params(optimizer: Any) -> list[Tensor]:
        calls.append(0.5)
        return optimizer.param_groups[0]["params"][:4]  # type: ignore[no-any-return]

    return main_params


@pytest.mark.parametrize("patch", [halves, leaves_the_last_layer])
def test_what_somebody_has_put_into_the_plugin_is_what_clips(patch: Any) -> None:
    def fitted(*suite: L.Callback) -> list[bytes]:
        plugin, calls = Precision(), list[float]()
        own = patch(plugin, calls)
        setattr(plugin, own.__name__, own)
        ended = bits(fit(Net(), [*suite], [], plugins=[plugin]))
        assert calls == [0.5] * STEPS
        assert vars(plugin) == {own.__name__: own}
        return ended

    telemetry = RankTelemetry()
    watched = fitted(telemetry)
    assert watched == fitted()
    assert telemetry.shared_norm.used == 0
    assert (watched == bits(fit(Net(), [], [], gradient_clip_val=0.25))) == (patch is halves)
    assert watched != bits(fit(Net(), [], []))


def test_what_is_put_around_it_in_the_fit_stays() -> None:
    calls: list[float] = []

    class Wraps(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                inner = plugin.clip_grad_by_norm

                def around(optimizer: Any, most: float) -> None:
                    calls.append(most)
                    inner(optimizer, most)

                plugin.clip_grad_by_norm = around  # type: ignore[method-assign]

    plugin, telemetry = Precision(), RankTelemetry()
    watched = fit(Net(), [telemetry], [Wraps()], plugins=[plugin])
    assert bits(watched) == bits(fit(Net(), [], []))
    assert (calls, telemetry.shared_norm.used) == ([0.5] * STEPS, STEPS)
    assert [*vars(plugin)] == ["clip_grad_by_norm"]
    assert bits(fit(Net(), [RankTelemetry()], [], plugins=[plugin])) == bits(watched)
    assert calls == [0.5] * STEPS * 2


@pytest.mark.filterwarnings("ignore:Rollback is off:UserWarning", "ignore:.*does not have many workers.*")
def test_a_step_has_one_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms of the gradients are computed once a step, and no longer once the fit is over."""
    calls: list[int] = []
    inner = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda *a, **k: calls.append(1) or inner(*a, **k))
    telemetry = RankTelemetry(update_norm_every_n_steps=0)
    fit(Net(), [telemetry], [])
    assert len(calls) == STEPS
    assert telemetry.shared_norm.used == STEPS
    assert not telemetry.shared_norm.wanted
    del calls[:]
    fit(Net(), [], [])
    assert len(calls) == STEPS


def test_a_gradient_that_has_changed_is_measured_again() -> None:
    """Known norms are used once, for the very gradients that they are of."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], 0.1)
    shared = RankTelemetry().shared_norm

    def known() -> None:
        parameter.grad = torch.full((4,), 2.0)
        shared.keep([parameter.grad], torch._foreach_norm([parameter.grad], 2))

    known()
    assert shared._clip(optimizer, 1.0)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == pytest.approx([0.5] * 4, rel=1e-6)
    assert not shared._clip(optimizer, 1.0)  # used up
    known()
    parameter.grad.mul_(2.0)
    assert not shared._clip(optimizer, 1.0)
    known()
    parameter.grad = parameter.grad.clone()
    assert not shared._clip(optimizer, 1.0)
    known()
    parameter.grad = None  # held
    assert not shared._clip(optimizer, 1.0)


class Tiny(Net):
    """Gradients of which some are below the normal numbers."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1.0 if batch_idx % 2 else 1e-37)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-2)


class Versions(L.Callback):
    """How often the first gradient has been written to when its update has been made."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        weight = pl_module.net[0].weight  # type: ignore[index, union-attr]
        trainer.optimizers[0].register_step_post_hook(lambda *_: self.seen.append(weight.grad._version))


@pytest.mark.parametrize("flush", [False, True])
def test_gradients_within_the_limit_are_not_multiplied_by_one(flush: bool) -> None:
    """Unless that would change them: where denormal numbers are flushed to 0, it makes them 0."""
    if flush and not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormal numbers")
    try:
        bare = bits(fit(Tiny(), [], []))
        versions = Versions()
        watched = fit(Tiny(), [telemetry := RankTelemetry(), versions], [])
    finally:
        torch.set_flush_denormal(False)
    assert bits(watched) == bare
    assert telemetry.shared_norm.used == STEPS
    first = versions.seen[0]
    assert versions.seen == [first, first + (not flush)] * (STEPS // 2)
