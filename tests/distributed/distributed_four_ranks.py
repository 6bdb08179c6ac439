"""Four processes, one of which is hurt in eight ways: ``python distributed_four_ranks.py FOLDER``.

One fit for each bad rank, all in the same process group. In each, every rank writes ``bad-<b>-rank-<r>.json``: its
incidents, what it applied, and the bits that it ended with. Then, for each rank, one group of its own in which that rank
raises: there every rank leaves its journal in ``raises-<b>`` and its traceback in ``raises-<b>/traceback-<r>.txt``.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
import time
import traceback
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from callbacks_two_ranks import VOCABULARY, Bigram, Sequences, digest
from distributed_kit import MEETING, CollectiveLimit, fork_ranks
from lightning.pytorch.strategies import DDPStrategy
from sentinel_kit import Sink
from torch import Tensor

import lightning_sentinel
from lightning_sentinel import RankTelemetry, RunJournal
from lightning_sentinel.collectives import TwoStages, gather_flat
from lightning_sentinel.context import context_of
from lightning_sentinel.faults import BadRank, CursorRewind, NanBackward, NanForward, NoSupervisedTokens

# Far enough apart for each incident to be closed before the next fault, and away from the steps of restore points.
LOSS_40, FORWARD, BACKWARD, UNSUPERVISED, WEIGHTS, CURSOR, FLIP, SLOW = 43, 69, 95, 121, 147, 173, 200, 229
STEPS, SLOW_STEPS = 260, 28
BIT = 12  # of the 23 of the fraction: the loss does not show it
RANKS = range(4)
RAISES = 3
IN_TWO_STAGES = 3  # in this fit the rows are gathered by pairs first


class Hurt(Bigram):
    """Its loss is 40 on one rank in one step, and it is slow there for a while."""

    nan_step = -1  # the faults come from elsewhere

    def __init__(self, bad_rank: int) -> None:
        super().__init__()
        self.bad_rank, self.struck = bad_rank, False
        self.began: list[float] = []  # of each step, to be slow by the measure of this machine

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == self.bad_rank:
            step = self.trainer.global_step
            if step == LOSS_40 and not self.struck:  # for once: not in a replay
                self.struck = True
                loss = loss * (40.0 / loss.detach())
            elif SLOW <= step < SLOW + SLOW_STEPS:
                usual = statistics.median(b - a for a, b in pairwise(self.began[-STEPS // 4 :]))
                time.sleep(max(0.1, 2 * usual))
            else:
                self.began.append(time.perf_counter())
        return loss


class FlippedBit(L.Callback):
    """One bit of one weight of this rank's replica flips once, before a step at which the replicas are compared."""

    def __init__(self, rank: int) -> None:
        self.rank, self.struck = rank, False

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == FLIP and trainer.global_rank == self.rank and not self.struck:
            self.struck = True
            pl_module.middle.weight.data.view(-1).view(torch.int32)[7] ^= 1 << BIT


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for bad in RANKS:
        fit(Path(sys.argv[1]), bad)
    gather_both_ways(Path(sys.argv[1]))


def one_of_four(callbacks: list[L.Callback], max_steps: int) -> L.Trainer:
    """This rank's Trainer."""
    return L.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        devices=4,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=MEETING),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[CollectiveLimit(), *callbacks],
    )


def gather_both_ways(folder: Path) -> None:
    """The same rows, in one stage and in two, to the bit; and what does not divide the ranks."""
    rank = torch.distributed.get_rank()
    row = torch.randn(14, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    row[rank] = math.nan
    flat, staged = gather_flat(row, 4), gather_flat(row, 4, TwoStages(4, 2))
    try:
        TwoStages(4, 3)
        refused = ""
    except ValueError as error:
        refused = str(error)
    found = {"equal": flat.numpy().tobytes() == staged.numpy().tobytes(), "bytes": flat.nbytes, "refused": refused}
    (folder / f"gather-{rank}.json").write_text(json.dumps(found))


def fit(folder: Path, bad: int) -> None:
    L.seed_everything(0, verbose=False)
    faults = [
        NanForward(FORWARD, "middle", rank=bad),
        NanBackward(BACKWARD, "middle", rank=bad),
        NoSupervisedTokens(UNSUPERVISED, rank=bad),
        BadRank(WEIGHTS, "head.weight", std=2.4, rank=bad),
        CursorRewind(CURSOR, rank=bad),
    ]
    suite = lightning_sentinel.default_callbacks(policy="recover", vocabulary_size=VOCABULARY)
    suite = [callback for callback in suite if not isinstance(callback, RunJournal)]  # the sink stands in its place
    if bad == IN_TWO_STAGES:
        (telemetry,) = [callback for callback in suite if isinstance(callback, RankTelemetry)]
        telemetry.gather_within = 2
    flipped = FlippedBit(bad)
    trainer = one_of_four([lightning_sentinel.FaultInjector(faults), flipped, *suite], STEPS)
    context, sink = context_of(trainer), Sink()
    context.journal = sink
    trainer.fit(Hurt(bad), Sequences(trainer.global_rank))
    steps: dict[int, list[bool]] = {}
    for event in sink.steps():
        steps.setdefault(event["step"], []).append(event["applied"])
    result: dict[str, Any] = {
        "incidents": [incident.to_dict() for incident in context.incidents],
        "applied": steps,
        "quarantined": sorted(context.ledger.active) if context.ledger is not None else [],
        "end": digest(trainer),
        "step": trainer.global_step,
        "flipped": flipped.struck,
        "slowest": [e["slowest_rank"] for e in sink.steps() if SLOW <= e["step"] < SLOW + SLOW_STEPS],
    }
    (folder / f"bad-{bad}-rank-{trainer.global_rank}.json").write_text(json.dumps(result, default=str))


class Raising(Bigram):
    """One rank raises in a step, the others go on to the collective."""

    nan_step = -1

    def __init__(self, bad_rank: int) -> None:
        super().__init__()
        self.bad_rank = bad_rank

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == self.bad_rank and self.trainer.global_step == RAISES:
            raise LookupError(f"boom on rank {self.bad_rank}")
        return super().training_step(batch, batch_idx)


def fit_that_raises(folder: Path, bad: int) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    checkpoint = lightning_sentinel.ForensicCheckpoint(every_n_steps=100)
    trainer = one_of_four([RunJournal(folder, report=False), RankTelemetry(), checkpoint], 2 * RAISES)
    try:
        trainer.fit(Raising(bad), Sequences(trainer.global_rank))
    except BaseException:
        (folder / f"traceback-{trainer.global_rank}.txt").write_text(traceback.format_exc())
        raise


def launch(folder: Path) -> int:
    if fork_ranks(4, main):
        return 1
    for bad in RANKS:
        (folder / f"raises-{bad}").mkdir()
        if not fork_ranks(4, partial(fit_that_raises, folder / f"raises-{bad}", bad), end_others=False):
            return 1  # nobody has raised
    return 0


if __name__ == "__main__":
    sys.exit(launch(Path(sys.argv[1])))
