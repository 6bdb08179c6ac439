"""Two processes with the real response: a NaN on rank 1 alone, later the weights of rank 1 overwritten.

Usage: ``python callbacks_two_ranks.py FOLDER``. Each rank writes ``rank-<r>.json``, rank 0 also ``metrics.csv``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from collective_limit import CollectiveLimit
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from sentinel_kit import Sink
from torch import Tensor, nn

from lightning_sentinel import (
    FaultInjector,
    IncidentResponse,
    NonFiniteTracer,
    RankOutlierDetector,
    RankTelemetry,
    Rollback,
    SpikeDetector,
    collectives,
)
from lightning_sentinel.context import context_of
from lightning_sentinel.faults import BadRank

VOCABULARY, STEPS, NAN_STEP, BAD_STEP = 31, 60, 12, 36
RESTORE_POINTS = 10  # every so many steps
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all", "barrier",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce", "scatter",
)  # fmt: skip


class Sequences:
    """Rank-sharded sequences of a walk that a bigram model can learn; the cursor is the number of batches drawn."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.position + self.rank)
            start = torch.randint(VOCABULARY, (8, 1), generator=generator)
            moves = torch.randint(1, 4, (8, 16), generator=generator)
            tokens = torch.cat([start, start + moves.cumsum(1)], dim=1) % VOCABULARY
            ids = [f"{self.rank}-{self.position}-{i}" for i in range(8)]
            self.position += 1
            yield {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:], "sample_id": ids}

    def exclude(self, names: Any) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Bigram(L.LightningModule):
    """Its middle layer puts out a NaN on rank 1 in one step, also when that step is replayed."""

    nan_step = NAN_STEP

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(VOCABULARY, 32), nn.Linear(32, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY)
        self.losses: dict[int, float] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        h = self.middle(self.embedding(batch["input_ids"]))
        if self.global_rank == 1 and self.trainer.global_step == self.nan_step:
            h = h * torch.tensor(math.nan)
        loss = F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), batch["targets"].flatten())
        self.losses.setdefault(self.trainer.global_step, loss.item())  # of the first pass
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def digest(trainer: L.Trainer) -> str:
    """Of the bits of all weights and moments."""
    found = hashlib.sha256()
    for parameter in trainer.lightning_module.parameters():
        state = trainer.optimizers[0].state.get(parameter, {})
        for tensor in (parameter, *(state[key] for key in sorted(state))):
            found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


class Said(logging.Handler):
    """What the suite's logger was given on this rank: level and words."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def by_the_suite() -> bool:
    """Whether the suite is nearer to this call than Lightning's loops, which ask each other for SIGTERM at every batch."""
    for frame in reversed(traceback.extract_stack()):
        if f"{os.sep}lightning_sentinel{os.sep}" in frame.filename:
            return True
        if f"{os.sep}loops{os.sep}" in frame.filename:
            return False
    return False


class Witness(L.Callback):
    """Weights and moments at each optimizer step's beginning, and the suite's collectives in it: every pass, oldest first.

    Stands before the injector, so that it sees them before they are hurt.
    """

    def __init__(self) -> None:
        self.seen: dict[int, list[str]] = {}
        self.collectives: dict[int, list[list[str]]] = {}
        self.now: list[str] = []
        for name in COLLECTIVES:
            if hasattr(torch.distributed, name):
                setattr(torch.distributed, name, self._noted(getattr(torch.distributed, name), name))
        collectives._gather = self._noted(collectives._gather, "gate's all_gather")

    def _noted(self, original: Any, name: str) -> Any:
        """``original``, noted where the suite has called it, itself or through Lightning; DDP's own reductions are not."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if by_the_suite():
                self.now.append(name)
            return original(*args, **kwargs)

        return call

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.setdefault(trainer.global_step, []).append(digest(trainer))
        self.now = []
        self.collectives.setdefault(trainer.global_step, []).append(self.now)  # up to the next batch


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    said, logger = Said(), logging.getLogger("lightning_sentinel")
    logger.setLevel(logging.INFO)
    logger.addHandler(said)
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    folder, witness = Path(sys.argv[1]), Witness()
    trainer = L.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        logger=CSVLogger(folder, "", ""),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[
            CollectiveLimit(),
            witness,
            FaultInjector([BadRank(BAD_STEP, "head.weight", std=2.4)]),
            NonFiniteTracer(),
            SpikeDetector(),
            RankOutlierDetector(),
            RankTelemetry(),
            IncidentResponse(mode="recover"),
            Rollback(every_n_steps=RESTORE_POINTS),
        ],
    )
    context, sink = context_of(trainer), Sink()
    context.journal = sink
    module = Bigram()
    trainer.fit(module, Sequences(trainer.global_rank))
    result = {
        "seen": witness.seen,
        "collectives": witness.collectives,
        "said": said.lines,
        "end": digest(trainer),
        "losses": module.losses,
        "incidents": [incident.to_dict() for incident in context.incidents],
        "rank_losses": {event["step"]: event["rank_losses"] for event in sink.steps() if event["attempt"] == 0},
        "applied": {event["step"]: event["applied"] for event in sink.steps() if event["attempt"] == 0},
        "attempt": context.attempt,
    }
    (folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(result, default=str))


if __name__ == "__main__":
    main()
