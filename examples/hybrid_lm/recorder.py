"""What two runs are compared by: the final weights, and one line for each micro-batch with the bits of its loss."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import IO, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class Recorder(Callback):
    """Writes ``final.pt`` (state dict, rank 0) and ``steps-<rank>.jsonl`` into a folder; knows nothing of any suite.

    A line is ``{"epoch": 0, "batch_idx": 7, "step": 7, "samples": [...], "loss": "4059999a"}``, the loss being the bits of
    this rank's float32. Lines are only ever appended: when a run goes back, the same places are written once more, and
    :func:`read_path` keeps the newest.

    Args:
        folder: Where to write; made if missing.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file: IO[str] | None = None
        self._flushed = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / f"steps-{trainer.global_rank}.jsonl").open("a")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._file is not None
        line = {
            "epoch": trainer.current_epoch,
            "batch_idx": batch_idx,
            "step": self._step,
            "samples": list(batch["sample_id"]),
            "loss": struct.pack(">f", float(outputs["loss"])).hex(),
        }
        self._file.write(json.dumps(line) + "\n")
        if time.monotonic() - self._flushed > 0.5:
            self._file.flush()
            self._flushed = time.monotonic()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            torch.save(pl_module.state_dict(), self.folder / "final.pt")
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_path(folder: str | Path, rank: int = 0) -> list[dict[str, Any]]:
    """The lines of the path that the run took in the end: what it went back over is left out."""
    path: list[dict[str, Any]] = []
    for line in lines(folder, rank):
        place = (line["epoch"], line["batch_idx"])
        while path and (path[-1]["epoch"], path[-1]["batch_idx"]) >= place:
            path.pop()
        path.append(line)
    return path


def lines(folder: str | Path, rank: int = 0) -> list[dict[str, Any]]:
    """All lines of a rank in the order in which they were written; an unfinished last one is left out."""
    file = Path(folder) / f"steps-{rank}.jsonl"
    if not file.exists():
        return []
    return [json.loads(text) for text in file.read_text().split("\n")[:-1]]


def first_difference(path: list[dict[str, Any]], reference: list[dict[str, Any]]) -> str | None:
    """Where two paths part, in words, or None if they are equal. ``path`` may begin later than ``reference``."""
    if not path:
        return "nothing was recorded"
    reference = [line for line in reference if line["step"] >= path[0]["step"]]
    for line, other in zip(path, reference, strict=False):
        for key in ("epoch", "batch_idx", "step", "samples", "loss"):
            if line[key] != other[key]:
                return f"{key} differs at step {line['step']}: {line[key]} and {other[key]}"
    if len(path) != len(reference):
        return f"{len(path)} and {len(reference)} micro-batches"
    return None


def weights_differ(folder: str | Path, reference: str | Path) -> str | None:
    """The first tensor of the final weights that is not equal to the bit, in words, or None."""
    missing = [str(f) for f in (folder, reference) if not (Path(f) / "final.pt").exists()]
    if missing:
        return f"no final weights in {', '.join(missing)}"
    one, two = (torch.load(Path(f) / "final.pt", weights_only=True) for f in (folder, reference))
    if one.keys() != two.keys():
        return "the models have different tensors"
    for name, tensor in one.items():
        # Bits, so that NaN equals itself and -0 does not equal 0.
        if not torch.equal(tensor.contiguous().view(torch.uint8), two[name].contiguous().view(torch.uint8)):
            return f"{name} differs by up to {float((tensor.double() - two[name].double()).abs().max()):.3g}"
    return None
