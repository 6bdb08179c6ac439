"""A picture to whichever of a Trainer's loggers takes one: TensorBoard, Weights & Biases, MLflow.

=====================  ==========================================================================
logger                 where it lies
=====================  ==========================================================================
``TensorBoardLogger``  image ``sentinel/curve`` at the newest step
``WandbLogger``        media ``sentinel/curve``
``MLFlowLogger``       artifact ``sentinel/loss.png`` of the run
=====================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

CURVE = "sentinel/curve"


def log_curve(loggers: Iterable[Any], path: Path, step: int) -> list[str]:
    """Give the PNG at ``path`` to every logger that takes a picture.

    Returns:
        A sentence for each logger that takes one and failed; loggers that take none are passed over.
    """
    problems = []
    for logger in loggers:
        try:
            _log(logger, path, step)
        except Exception as error:  # a logger's server, disk or library: never the training's business
            problems.append(f"{type(logger).__name__} took no picture of the loss: {type(error).__name__}: {error}")
    return problems


def _log(logger: Any, path: Path, step: int) -> None:
    # By what they can do: importing the loggers' libraries to ask for their classes would cost seconds.
    kinds = {kind.__name__ for kind in type(logger).__mro__}
    if "TensorBoardLogger" in kinds:
        logger.experiment.add_image(CURVE, _pixels(path), global_step=step, dataformats="HWC")
    elif "WandbLogger" in kinds:
        logger.log_image(key=CURVE, images=[str(path)])  # no step: W&B's counter must not go back
    elif "MLFlowLogger" in kinds:
        logger.experiment.log_artifact(logger.run_id, str(path), "sentinel")


def _pixels(path: Path) -> Any:
    """Bytes ``[height, width, 3]``. Whoever has made the PNG has matplotlib, and so Pillow."""
    import numpy as np
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))
