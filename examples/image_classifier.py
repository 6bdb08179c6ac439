"""An image classifier with BatchNorm and dropout, to show that nothing in the suite asks for a language model.

    python examples/image_classifier.py
    python examples/image_classifier.py --broken-image 40
    python examples/image_classifier.py --fault transient_nan --steps 200

The images are drawn, not downloaded: filled circles, squares, triangles and crosses at random places, 16 x 16 pixels,
with noise. They come through :class:`lightning_sentinel.data.MixtureLoader`, because it has what going back and keeping
samples out need (``state_dict``, ``exclude``); any loader with these two would do.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn

import lightning_sentinel
from lightning_sentinel.data import MixtureLoader
from lightning_sentinel.faults import (
    CursorRewind,
    Fault,
    LearningRateSpike,
    NanBackward,
    NanForward,
    OptimizerCorruption,
    TransientNan,
)

SIZE = 16
KINDS = ("circle", "square", "triangle", "cross")
# Each strikes the real computation; the last is seen only when the loader hands out what it has handed out before.
FAULTS: dict[str, type[Fault]] = {
    kind.default_name: kind
    for kind in (NanForward, NanBackward, TransientNan, LearningRateSpike, OptimizerCorruption, CursorRewind)
}
IN_A_MODULE = (NanForward, NanBackward, TransientNan)


class Shapes:
    """Drawn shapes. The same index always gives the same picture.

    Args:
        count: How many pictures there are.
        noise: Standard deviation of the noise on each pixel, where ink is 1.
        broken: Index of one picture whose file "was cut off": half of its pixels are not a number.
    """

    name = "shapes"

    def __init__(self, count: int = 4096, noise: float = 0.3, broken: int | None = None) -> None:
        self.count, self.noise, self.broken = count, noise, broken

    def __len__(self) -> int:
        return self.count

    def sample_id(self, index: int) -> str:
        return f"shapes/{index}"

    def sample(self, index: int) -> Mapping[str, Any]:
        """``image`` ``[1, 16, 16]`` float32 and ``label`` (index into :data:`KINDS`)."""
        draw = np.random.default_rng(index)
        label = index % len(KINDS)
        radius, (row, column) = draw.uniform(3.0, 5.0), draw.uniform(5.0, SIZE - 5.0, 2)
        y, x = np.mgrid[:SIZE, :SIZE]
        down, right = y - row, x - column
        ink = (
            down**2 + right**2 <= radius**2,
            np.maximum(abs(down), abs(right)) <= radius * 0.85,
            (down <= radius * 0.7) & (2.0 * abs(right) <= down + radius),
            (np.minimum(abs(down), abs(right)) <= 1.0) & (np.maximum(abs(down), abs(right)) <= radius),
        )[label]
        image = (ink + self.noise * draw.standard_normal((SIZE, SIZE))).astype(np.float32)
        if index == self.broken:
            image[SIZE // 2 :] = np.nan
        return {"image": image[None], "label": np.int64(label)}


class Classifier(L.LightningModule):
    """Two convolutions with BatchNorm, dropout, one linear layer.

    Args:
        width: Channels of the first convolution; the second has twice as many.
        learning_rate: Of AdamW, reached after ten steps of warm-up.
    """

    def __init__(self, width: int = 8, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32 * width, len(KINDS)))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(len(KINDS))

    def forward(self, image: Tensor) -> Tensor:
        """``[B, 1, 16, 16]`` to logits ``[B, 4]``."""
        return self.head(self.features(image))

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        logits = self(batch["image"])
        loss = nn.functional.cross_entropy(logits, batch["label"])
        self.accuracy(logits, batch["label"])
        self.log("loss", loss)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


def train(
    run_dir: Path | str,
    steps: int = 200,
    faults: tuple[Fault, ...] = (),
    broken_image: int | None = None,
    policy: str = "recover",
    suite: bool = True,
    **options: Any,
) -> tuple[L.Trainer, Classifier]:
    """Train on one CPU and return the Trainer and the model as they are at the end.

    Args:
        run_dir: Where journal, report and restore points go.
        steps: Optimizer steps.
        faults: What is to go wrong.
        broken_image: Index of a picture that can't be read properly.
        policy: ``observe``, ``guard`` or ``recover``.
        suite: Whether the suite's callbacks are there.
        options: Further arguments of the Trainer.
    """
    callbacks: list[L.Callback] = []
    if faults:
        callbacks.append(lightning_sentinel.FaultInjector(faults))
    if suite:
        callbacks += lightning_sentinel.default_callbacks(run_dir=run_dir, policy=policy)
    defaults = {"max_epochs": -1, "gradient_clip_val": 1.0, "logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=steps, callbacks=callbacks, **(defaults | options))
    L.seed_everything(1, verbose=False)
    loader = MixtureLoader([Shapes(broken=broken_image)], batch_size=32, seed=1, steps_per_epoch=128)
    model = Classifier()
    trainer.fit(model, loader)
    return trainer, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=sorted(FAULTS), help="what is to go wrong, at step 100")
    parser.add_argument("--broken-image", type=int, metavar="INDEX", help="a picture whose pixels are not numbers")
    parser.add_argument("--policy", choices=("observe", "guard", "recover"), default="recover")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/image-classifier"))
    args = parser.parse_args()
    kind = FAULTS.get(args.fault)
    where = {"target": "features.4"} if kind in IN_A_MODULE else {}
    faults = () if kind is None else (kind(step=100, **where),)
    trainer, _ = train(args.run_dir, args.steps, faults, args.broken_image, args.policy)
    print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.3f} nats")
    print(f"What happened: {args.run_dir}/report.html")


if __name__ == "__main__":
    main()
