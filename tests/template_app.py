"""A small application in the style of lightning-hydra-template: own ``configs`` folder, own ``instantiate_callbacks``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TRAIN = '''
import hashlib
import json
from pathlib import Path

import hydra
import lightning as L
import torch
from omegaconf import DictConfig


def instantiate_callbacks(callbacks_cfg):
    """As in the template: whatever has a _target_, in the order of the configuration."""
    callbacks = []
    for _, cb_conf in (callbacks_cfg or {}).items():
        if isinstance(cb_conf, DictConfig) and "_target_" in cb_conf:
            callbacks.append(hydra.utils.instantiate(cb_conf))
    return callbacks


@hydra.main(version_base="1.3", config_path="../configs", config_name="train.yaml")
def main(cfg):
    L.seed_everything(cfg.seed, verbose=False)
    model = hydra.utils.instantiate(cfg.model)
    callbacks = instantiate_callbacks(cfg.get("callbacks"))
    trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks)
    trainer.fit(model, train_dataloaders=hydra.utils.instantiate(cfg.data))
    import lightning_sentinel
    import hydra_plugins.lightning_sentinel_search_path as plugin

    result = {
        "steps": trainer.global_step,
        "finite": all(bool(torch.isfinite(p).all()) for p in model.parameters()),
        "callbacks": [type(c).__name__ for c in trainer.callbacks],
        "package": lightning_sentinel.__file__,
        "plugin": plugin.__file__,
        "weights": hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest(),
    }
    Path(cfg.paths.output_dir, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
'''

PARTS = '''
import lightning as L
import torch
from torch import nn


class Batches:
    """Four samples at a time, with a cursor."""

    def __init__(self, n, batch_size):
        self.x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
        self.batch_size, self.position = batch_size, 0

    def __iter__(self):
        while self.position + self.batch_size <= len(self.x):
            start, self.position = self.position, self.position + self.batch_size
            yield self.x[start : self.position]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Model(L.LightningModule):
    """Predicts the sum of its inputs; from ``nan_step`` on the loss of one step is NaN."""

    def __init__(self, lr, nan_step):
        super().__init__()
        self.net, self.lr, self.nan_step = nn.Linear(3, 1), lr, nan_step

    def training_step(self, batch, batch_idx):
        out = self.net(batch)
        if self.trainer.global_step == self.nan_step:
            out = out * float("nan")
        return (out.squeeze(1) - batch.sum(1)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.lr)
'''

CONFIGS = {
    "train.yaml": """\
defaults:
  - _self_
  - data: toy
  - model: toy
  - callbacks: sentinel/default
  - policy: observe
  - trainer: default
  - paths: default
  - experiment: null
seed: 1
run_dir: ${paths.output_dir}
""",
    "data/toy.yaml": "_target_: parts.Batches\nn: 64\nbatch_size: 4\n",
    "model/toy.yaml": "_target_: parts.Model\nlr: 0.01\nnan_step: 5\n",
    "trainer/default.yaml": """\
_target_: lightning.pytorch.trainer.Trainer
default_root_dir: ${paths.output_dir}
accelerator: cpu
devices: 1
max_steps: 10
logger: false
enable_checkpointing: false
enable_progress_bar: false
enable_model_summary: false
""",
    "paths/default.yaml": "output_dir: ${hydra:runtime.output_dir}\n",
    # As in the template: one file that brings several callbacks, the application's own among them.
    "callbacks/many.yaml": "defaults:\n  - model_checkpoint\n  - /callbacks/sentinel/default@_here_\n  - _self_\n",
    "callbacks/model_checkpoint.yaml": """\
model_checkpoint:
  _target_: lightning.pytorch.callbacks.ModelCheckpoint
  dirpath: ${paths.output_dir}/checkpoints
""",
    "experiment/strict.yaml": """\
# @package _global_
defaults:
  - override /policy: guard
callbacks:
  spike_detector:
    threshold: 9.5
  rollback: null
""",
}


def write_app(folder: Path) -> Path:
    """Write the application into ``folder``; returns its script."""
    for name, text in CONFIGS.items():
        path = folder / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "src").mkdir()
    (folder / "src" / "parts.py").write_text(PARTS)
    script = folder / "src" / "train.py"
    script.write_text(TRAIN)
    return script


def run_app(script: Path, *overrides: str, python: Path | str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own that sees nothing of the caller's ``sys.path``."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [str(python), "-W", "ignore", str(script), *overrides]
    return subprocess.run(
        command, cwd=script.parent.parent, env=environment, capture_output=True, text=True, timeout=240
    )


def result_of(folder: Path) -> dict[str, Any]:
    """What the application wrote about its run."""
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result
