"""A generative adversarial network with two optimizers in manual optimization, watched and rolled back like any other run.

    python examples/gan.py
    python examples/gan.py --fault transient_nan

The generator learns eight normal distributions on a circle from noise. Each batch updates the discriminator and then the
generator: the suite's gate stands before each of the two updates. Its loader is torchdata's ``StatefulDataLoader``, which
can be put back but can't keep samples out: bad steps are skipped instead.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_sentinel
from lightning_sentinel.faults import CursorRewind, Fault, NanBackward, NanForward, TransientNan

FAULTS: dict[str, type[Fault]] = {
    kind.default_name: kind for kind in (NanForward, NanBackward, TransientNan, CursorRewind)
}
IN_A_MODULE = (NanForward, NanBackward, TransientNan)
NOISE = 4


class Ring(Dataset[dict[str, Any]]):
    """Points from eight normal distributions whose centres lie on the unit circle."""

    def __init__(self, count: int = 8192, spread: float = 0.05) -> None:
        draw = torch.Generator().manual_seed(0)
        angle = torch.randint(8, (count,), generator=draw) * (math.pi / 4)
        centre = torch.stack([angle.cos(), angle.sin()], dim=1)
        self.points = centre + spread * torch.randn(count, 2, generator=draw)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"point": self.points[index], "sample_id": f"ring/{index}"}


def perceptron(inputs: int, outputs: int, width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


class Gan(L.LightningModule):
    """Discriminator and generator with the non-saturating loss.

    Args:
        learning_rate: Of both Adam optimizers.
    """

    def __init__(self, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.learning_rate = learning_rate
        self.generator, self.discriminator = perceptron(NOISE, 2), perceptron(2, 1)

    def forward(self, noise: Tensor) -> Tensor:
        """Noise ``[B, 4]`` to points ``[B, 2]``."""
        return self.generator(noise)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        of_discriminator, of_generator = self.optimizers()
        real, softplus = batch["point"], nn.functional.softplus
        fake = self(torch.randn(len(real), NOISE, device=self.device))

        loss = softplus(-self.discriminator(real)).mean() + softplus(self.discriminator(fake.detach())).mean()
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_discriminator, gradient_clip_val=5.0, gradient_clip_algorithm="norm")
        of_discriminator.step()
        self.log("discriminator", loss)

        self.toggle_optimizer(of_generator)
        loss = softplus(-self.discriminator(fake)).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_generator, gradient_clip_val=5.0, gradient_clip_algorithm="norm")
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.log("generator", loss)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(part.parameters(), self.learning_rate, betas=(0.5, 0.99))
            for part in (self.discriminator, self.generator)
        ]


def train(
    run_dir: Path | str,
    steps: int = 200,
    faults: tuple[Fault, ...] = (),
    policy: str = "recover",
    suite: bool = True,
    **options: Any,
) -> tuple[L.Trainer, Gan]:
    """Train on one CPU and return the Trainer and the model as they are at the end.

    Args:
        run_dir: Where journal, report and restore points go.
        steps: Optimizer steps of both optimizers together, i.e. twice the number of batches.
        faults: What is to go wrong.
        policy: ``observe``, ``guard`` or ``recover``.
        suite: Whether the suite's callbacks are there.
        options: Further arguments of the Trainer.
    """
    callbacks: list[L.Callback] = []
    if faults:
        callbacks.append(lightning_sentinel.FaultInjector(faults))
    if suite:
        callbacks += lightning_sentinel.default_callbacks(run_dir=run_dir, policy=policy)
    defaults = {"max_epochs": -1, "logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=steps, callbacks=callbacks, **(defaults | options))
    L.seed_everything(1, verbose=False)
    loader = StatefulDataLoader(Ring(), batch_size=64, shuffle=True, drop_last=True)
    model = Gan()
    trainer.fit(model, loader)
    return trainer, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=sorted(FAULTS), help="what is to go wrong, at step 100")
    parser.add_argument("--policy", choices=("observe", "guard", "recover"), default="recover")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/gan"))
    args = parser.parse_args()
    kind = FAULTS.get(args.fault)
    where = {"target": "discriminator.2"} if kind in IN_A_MODULE else {}
    faults = () if kind is None else (kind(step=100, **where),)
    trainer, _ = train(args.run_dir, args.steps, faults, args.policy)
    for name, value in sorted(trainer.callback_metrics.items()):
        print(f"{name:16} {value:.3f}")
    print(f"What happened: {args.run_dir}/report.html")


if __name__ == "__main__":
    main()
