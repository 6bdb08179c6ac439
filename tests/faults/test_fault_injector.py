"""Each fault in a real Trainer: it strikes exactly as often as said and changes exactly what it says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_sentinel import FaultInjector
from lightning_sentinel.context import context_of
from lightning_sentinel.faults import (
    BadRank,
    CorruptBatch,
    CursorRewind,
    Fault,
    Fp16Collapse,
    Fp16Overflow,
    LearningRateSpike,
    LevelShift,
    NanBackward,
    NanForward,
    NoSupervisedTokens,
    OptimizerCorruption,
    OutOfRangeToken,
    SchedulerReset,
    TransientNan,
)

VOCABULARY, TIME, BATCH = 32, 8, 4


class Loader:
    """A deterministic loader with a cursor and two sources; sample ids count up from 0."""

    sources = ("prose", "code")

    def __init__(self, batches: int = 12) -> None:
        self.batches, self.position = batches, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.position < self.batches:
            first, self.position = self.position * BATCH, self.position + 1
            yield batch_of(range(first, first + BATCH))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def batch_of(samples: range) -> dict[str, Any]:
    text = torch.stack([(torch.arange(TIME + 1) * 3 + i) % VOCABULARY for i in samples])
    targets = text[:, 1:].clone()
    targets[:, 0] = -100
    return {
        "input_ids": text[:, :-1].clone(),
        "targets": targets,
        "source": torch.tensor([i % 2 for i in samples]),
        "sample_id": [str(i) for i in samples],
    }


class LM(L.LightningModule):
    """Embedding, two blocks, head; remembers what each training step saw."""

    def __init__(self, schedule: str = "lambda", gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.schedule = schedule
        self.seen: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.replay_at: int | None = None
        self.replayed: list[float] = []

    def loss(self, batch: dict[str, Any]) -> Tensor:
        x = self.embedding(batch["input_ids"])
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), batch["targets"].flatten(), ignore_index=-100)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.seen.append(dict(batch))
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        if self.trainer.global_step == self.replay_at:
            batch = self.seen[-1]
            kept = [p.grad for p in self.parameters()]
            for p in self.parameters():
                p.grad = None
            loss = self.loss(batch)
            loss.backward()
            self.replayed += [float(loss.detach()), max(float(p.grad.abs().max()) for p in self.parameters())]
            for p, grad in zip(self.parameters(), kept, strict=True):
                p.grad = grad

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedules = {
            "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
            "exponential": lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            "sequential": lambda: torch.optim.lr_scheduler.SequentialLR(
                optimizer,
                [
                    torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
                    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
                ],
                milestones=[3],
            ),
        }
        if self.schedule == "none":
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedules[self.schedule](), "interval": "step"}}


class Validated(LM):
    def __init__(self) -> None:
        super().__init__()
        self.losses_in_validation: list[float] = []

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.losses_in_validation.append(float(self.loss(batch)))


class Lines:
    """Takes the events that would go to the journal."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, event: str, *, step: int, attempt: int, tokens: int, **fields: Any) -> None:
        self.lines.append({"event": event, "step": step, "attempt": attempt, **fields})

    def flush(self) -> None:
        return None


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def train(
    *faults: Fault, module: LM | None = None, max_steps: int = 6, journal: bool = True, **options: Any
) -> tuple[LM, L.Trainer, list[dict[str, Any]]]:
    module = module or LM()
    trainer = L.Trainer(
        **QUIET,
        max_steps=max_steps,
        num_sanity_val_steps=0,
        callbacks=[*options.pop("callbacks", []), FaultInjector(faults, journal=journal)],
        **options,
    )
    context_of(trainer).journal = lines = Lines()
    batches = torch.utils.data.DataLoader([expected_batch(0)], batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, Loader(), batches if isinstance(module, Validated) else None)
    return module, trainer, lines.lines


def expected_batch(step: int) -> dict[str, Any]:
    return batch_of(range(step * BATCH, (step + 1) * BATCH))


def untouched(batch: dict[str, Any], step: int) -> bool:
    good = expected_batch(step)
    return torch.equal(batch["input_ids"], good["input_ids"]) and torch.equal(batch["targets"], good["targets"])


class Again(L.Callback):
    """Sends the loader back after a step, as a rollback does with the data; the attempt rises."""

    def __init__(self, after_step: int, position: int) -> None:
        self.after_step, self.position = after_step, position

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.after_step + 1 and context_of(trainer).attempt == 0:
            context_of(trainer).attempt = 1
            trainer.train_dataloader.position = self.position


# ---------------------------------------------------------------------- data


def test_corrupt_batch_is_random_in_range_and_consistent() -> None:
    fault = CorruptBatch(step=2, vocabulary=VOCABULARY)
    module, _, lines = train(fault)
    assert fault.fired == 1
    assert [untouched(batch, step) for step, batch in enumerate(module.seen)] == [True, True, False, True, True, True]
    bad, good = module.seen[2], expected_batch(2)
    assert int(bad["input_ids"].min()) >= 0
    assert int(bad["input_ids"].max()) < VOCABULARY
    assert (bad["input_ids"] != good["input_ids"]).float().mean() > 0.8
    assert torch.equal(bad["targets"][:, 1:-1], bad["input_ids"][:, 2:])
    assert (bad["targets"][:, 0] == -100).all()
    assert lines == [
        {
            "event": "fault.injected",
            "step": 2,
            "attempt": 0,
            "name": "corrupt_batch",
            "fired": 1,
            "sample_ids": ["8", "9", "10", "11"],
            "tokens_replaced": BATCH * TIME,
        }
    ]


def test_bad_samples_are_bad_again_and_in_the_same_way() -> None:
    fault = CorruptBatch(step=2, vocabulary=VOCABULARY, samples=3)
    module, _, lines = train(fault, callbacks=[Again(after_step=3, position=1)], max_steps=8)
    seen = module.seen  # samples of the batches 0 1 2 3 | 1 2 3 4
    assert [batch["sample_id"][0] for batch in seen] == [str(4 * i) for i in (0, 1, 2, 3, 1, 2, 3, 4)]
    assert fault.fired == 2
    assert [line["step"] for line in lines] == [2, 5]
    assert torch.equal(seen[2]["input_ids"], seen[5]["input_ids"])
    assert torch.equal(seen[2]["input_ids"][3], expected_batch(2)["input_ids"][3])
    assert [untouched(b, s) for b, s in zip(seen, (0, 1, 2, 3, 1, 2, 3, 4), strict=True)].count(False) == 2


def test_a_data_fault_that_is_not_on_replay_is_gone() -> None:
    fault = CorruptBatch(step=2, vocabulary=VOCABULARY, on_replay=False)
    train(fault, callbacks=[Again(after_step=3, position=1)], max_steps=8)
    assert fault.fired == 1


def test_out_of_range_token_reaches_the_embedding() -> None:
    fault = OutOfRangeToken(step=1, token=VOCABULARY, position=3)
    module = LM()
    with pytest.raises(IndexError):
        train(fault, module=module)
    assert fault.fired == 1
    assert (module.seen[1]["input_ids"] != expected_batch(1)["input_ids"]).nonzero().tolist() == [[0, 3]]
    assert module.seen[1]["input_ids"][0, 3] == VOCABULARY


def test_out_of_range_token_position_beyond_the_sample() -> None:
    with pytest.raises(ValueError, match="position is 8, but the samples have 8 tokens"):
        train(OutOfRangeToken(step=0, position=8))


def test_no_supervised_tokens_ignores_every_target() -> None:
    fault = NoSupervisedTokens(step=1)
    module, _, lines = train(fault, max_steps=2)
    assert fault.fired == 1
    assert (module.seen[1]["targets"] == -100).all()
    assert torch.equal(module.seen[1]["input_ids"], expected_batch(1)["input_ids"])
    assert math.isnan(module.losses[1])
    assert lines[0]["targets_ignored"] == BATCH * (TIME - 1)


@pytest.mark.parametrize("same_for_all", [False, True])
def test_level_shift_exchanges_values_of_one_source_for_good(same_for_all: bool) -> None:
    fault = LevelShift(step=2, source="code", share=0.5, high=VOCABULARY, same_for_all=same_for_all)
    module, _, lines = train(fault)
    assert fault.fired == 4
    assert [line["step"] for line in lines] == [2, 3, 4, 5]
    assert lines[0]["sample_ids"] == ["9", "11"]
    assert lines[0]["values_exchanged"] == VOCABULARY // 2
    assert torch.equal(fault.table("9"), fault.table("11")) is same_for_all
    for step, batch in enumerate(module.seen):
        good = expected_batch(step)
        for row in range(BATCH):
            table = fault.table(batch["sample_id"][row])
            assert sorted(table.tolist()) == list(range(VOCABULARY))
            assert int((table != torch.arange(VOCABULARY)).sum()) == VOCABULARY // 2
            if step >= 2 and batch["source"][row] == 1:
                assert torch.equal(batch["input_ids"][row], table[good["input_ids"][row]])
                assert torch.equal(batch["targets"][row, 1:], table[good["targets"][row, 1:]])
                assert batch["targets"][row, 0] == -100
            else:
                assert torch.equal(batch["input_ids"][row], good["input_ids"][row])


def test_level_shift_names_the_sources_there_are() -> None:
    with pytest.raises(ValueError, match="no source 'cod'; it has 'code', 'prose'"):
        train(LevelShift(step=0, source="cod", high=VOCABULARY))


def test_a_missing_key_is_named() -> None:
    with pytest.raises(KeyError, match=r"the batch has no 'tokens'; it has \['input_ids', 'sample_id', 'source', 'tar"):
        train(CorruptBatch(step=0, input_key="tokens"))


# ---------------------------------------------------------------------- computation


def test_nan_forward_also_on_replay_but_not_in_validation() -> None:
    module = Validated()
    module.replay_at = 2
    fault = NanForward(step=2, target="blocks.1", row=1)
    _, _, lines = train(fault, module=module, val_check_interval=1)
    assert fault.fired == 1
    assert [math.isfinite(loss) for loss in module.losses[:3]] == [True, True, False]
    assert math.isnan(module.replayed[0])
    # The validation after step 1 runs at global_step 2.
    assert all(math.isfinite(loss) for loss in module.losses_in_validation[:2])
    assert lines == [
        {"event": "fault.injected", "step": 2, "attempt": 0, "name": "nan_forward", "fired": 1, "module": "blocks.1"}
    ]


def test_nan_forward_hurts_one_sample_alone() -> None:
    value = torch.randn(3, 5)
    hurt = NanForward(step=0, target="x", row=1).hurt(value)
    assert hurt[1].isnan().all()
    assert torch.equal(hurt[[0, 2]], value[[0, 2]])


def test_nan_backward_has_a_finite_loss_and_a_nan_gradient_also_on_replay() -> None:
    module = LM()
    module.replay_at = 2
    fault = NanBackward(step=2, target="blocks.0")
    train(fault, module=module, max_steps=3)
    assert fault.fired == 1
    assert all(math.isfinite(loss) for loss in module.losses)
    assert math.isfinite(module.replayed[0])
    assert math.isnan(module.replayed[1])
    assert module.embedding.weight.isnan().any()
    assert module.head.weight.isfinite().all()  # nothing behind the module is touched


def test_transient_nan_is_gone_on_replay() -> None:
    module = LM()
    module.replay_at = 2
    fault = TransientNan(step=2, target="blocks.1")
    train(fault, module=module, max_steps=3)
    assert fault.fired == 1
    assert math.isnan(module.losses[2])
    assert math.isfinite(module.replayed[0])
    assert math.isfinite(module.replayed[1])


def test_a_module_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"LM has no module 'block\.1'\. Nearest names: 'blocks\.1', 'blocks\.0', 'bl"):
        train(NanForward(step=0, target="block.1"))


def test_hooks_are_gone_after_fit_and_after_an_error() -> None:
    module, _, _ = train(NanForward(step=50, target="blocks.1"))
    assert not module.blocks[1]._forward_hooks
    module = LM()
    with pytest.raises(IndexError):
        train(NanForward(step=50, target="blocks.1"), OutOfRangeToken(step=0), module=module)
    assert not module.blocks[1]._forward_hooks


class Scales(L.Callback):
    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


def train_fp16(fault: Fault, max_steps: int) -> tuple[LM, list[float]]:
    scales = Scales()
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    module, _, _ = train(fault, callbacks=[scales], plugins=[plugin], max_steps=max_steps)
    return module, scales.scales


def test_fp16_overflow_halves_the_scale_once() -> None:
    fault = Fp16Overflow(step=2, target="blocks.1")
    module, scales = train_fp16(fault, max_steps=4)
    assert fault.fired == 1
    assert all(math.isfinite(loss) for loss in module.losses)
    assert scales == [65536.0, 65536.0, 32768.0, 32768.0]
    assert all(p.isfinite().all() for p in module.parameters())


def test_fp16_collapse_overflows_for_its_batches_and_when_they_return() -> None:
    fault = Fp16Collapse(step=1, target="blocks.1", duration=3)
    module, scales = train_fp16(fault, max_steps=6)
    assert fault.fired == 3
    assert [math.isfinite(loss) for loss in module.losses] == [True, False, False, False, True, True]
    assert scales == [65536.0, 32768.0, 16384.0, 8192.0, 8192.0, 8192.0]
    assert fault.sample_ids == {str(i) for i in range(4, 16)}
    again = Fp16Collapse(step=1, target="blocks.1", duration=1)
    train(again, callbacks=[Again(after_step=2, position=1)], max_steps=5, precision="bf16-mixed")
    assert again.fired == 2


def test_fp16_collapse_takes_the_samples_of_as_many_steps_after_a_rollback_past_some() -> None:
    fault = Fp16Collapse(step=1, target="blocks.1", duration=3)
    # After step 2 the loader goes on behind the samples of the steps 1 and 2, which were two of the three.
    again = Again(after_step=2, position=4)
    module, _, lines = train(fault, callbacks=[again], max_steps=6, precision="bf16-mixed")
    assert fault.sample_ids == {str(i) for i in (*range(4, 12), *range(16, 20))}
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert fault.places == {(0, 1), (0, 2), (1, 3)}
    assert len(module.losses) == 6


# ---------------------------------------------------------------------- training state


@pytest.mark.parametrize("schedule", ["lambda", "exponential", "sequential", "none"])
def test_lr_spike_and_the_schedule_after_it(schedule: str) -> None:
    module, _, lines = train(LearningRateSpike(step=2, duration=2, factor=50.0), module=LM(schedule))
    planned = train(module=LM(schedule))[0].rates
    expected = [rate * (50.0 if step in (2, 3) else 1.0) for step, rate in enumerate(planned)]
    assert module.rates == expected
    assert [(line["step"], line["fired"]) for line in lines] == [(2, 1), (3, 2)]
    assert lines[0]["planned"] == planned[2]
    assert lines[0]["rate"] == planned[2] * 50.0


def test_lr_spike_is_gone_after_a_rollback() -> None:
    fault = LearningRateSpike(step=2, duration=5, factor=50.0)
    module, _, _ = train(fault, module=LM("none"), callbacks=[Again(after_step=3, position=2)], max_steps=6)
    assert fault.fired == 2
    assert module.rates == [1e-2, 1e-2, 0.5, 0.5, 1e-2, 1e-2]


class Moments(L.Callback):
    def __init__(self) -> None:
        self.smallest: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        states = optimizer.state.values()
        self.smallest.append(max((float(s["exp_avg_sq"].max()) for s in states), default=math.nan))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_optimizer_corruption_overwrites_the_moments_once(accumulate: int) -> None:
    moments = Moments()
    fault = OptimizerCorruption(step=2, value=1e-20)
    module, _, lines = train(fault, callbacks=[moments], max_steps=4, accumulate_grad_batches=accumulate)
    assert fault.fired == 1
    assert moments.smallest[2] == pytest.approx(1e-20)
    assert moments.smallest[1] > 1e-12
    assert moments.smallest[3] > 1e-12
    assert lines[0]["tensors"] == len(list(module.parameters()))
    assert all(p.isfinite().all() for p in module.parameters())


def test_optimizer_corruption_of_a_state_that_is_not_there() -> None:
    with pytest.raises(
        ValueError, match=r"no optimizer state 'momentum' at step 1; there is \['exp_avg', 'exp_avg_sq'"
    ):
        train(OptimizerCorruption(step=1, key="momentum"))


@pytest.mark.parametrize("schedule", ["lambda", "exponential", "sequential"])
def test_scheduler_reset_strikes_at_a_restart_alone(tmp_path: Path, schedule: str) -> None:
    fault = SchedulerReset()
    _, trainer, lines = train(fault, module=LM(schedule), max_steps=4)
    assert (fault.fired, lines) == (0, [])
    trainer.save_checkpoint(tmp_path / "four.ckpt")

    resumed = LM(schedule)
    again = L.Trainer(
        **QUIET,
        max_steps=7,
        callbacks=[FaultInjector([fault])],
    )
    again.fit(resumed, Loader(), ckpt_path=tmp_path / "four.ckpt")
    assert fault.fired == 1
    fresh = train(module=LM(schedule), max_steps=3)[0].rates
    assert resumed.rates == fresh
    assert again.lr_scheduler_configs[0].scheduler.last_epoch == 3


def test_scheduler_reset_without_a_scheduler(tmp_path: Path) -> None:
    _, trainer, _ = train(module=LM("none"), max_steps=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    again = L.Trainer(
        **QUIET,
        max_steps=3,
        callbacks=[FaultInjector([SchedulerReset()])],
    )
    with pytest.raises(ValueError, match="no learning-rate scheduler"):
        again.fit(LM("none"), Loader(), ckpt_path=tmp_path / "two.ckpt")


class Unsized(Loader):
    """Lightning fetches one batch ahead from a loader without a length."""

    __len__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Loader, Unsized])
def test_cursor_rewind_repeats_the_early_batches_from_its_step_on(kind: type[Loader]) -> None:
    fault = CursorRewind(step=4)
    module = LM()
    trainer = L.Trainer(
        **QUIET,
        max_steps=8,
        callbacks=[FaultInjector([fault])],
    )
    context_of(trainer).journal = lines = Lines()
    trainer.fit(module, kind())
    first = 1 if kind is Loader else 2
    assert [int(batch["sample_id"][0]) // BATCH for batch in module.seen] == [0, 1, 2, 3, *range(first, first + 4)]
    assert fault.fired == 1
    assert [(line["step"], line["loaders"]) for line in lines.lines] == [(4, 1)]


def test_bad_rank_overwrites_the_weights_of_its_rank() -> None:
    fault = BadRank(step=1, parameter="head.weight", std=9.0, rank=0)
    other = BadRank(step=1, parameter="head.weight", rank=1, name="not here")
    module, _, lines = train(fault, other, max_steps=2)
    assert (fault.fired, other.fired) == (1, 0)
    assert float(module.head.weight.detach().std()) == pytest.approx(9.0, rel=0.1)
    assert module.losses[1] > 5 * module.losses[0]
    assert lines[0]["parameter"] == "head.weight"


def test_bad_rank_parameter_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"no parameter 'head\.weigth'\. Nearest names: 'head\.weight'"):
        train(BadRank(step=1, parameter="head.weigth"))


# ---------------------------------------------------------------------- the injector


def all_faults(step: int) -> list[Fault]:
    return [
        CorruptBatch(step),
        OutOfRangeToken(step),
        NoSupervisedTokens(step),
        LevelShift(step, source="code"),
        NanForward(step, target="blocks.0"),
        NanBackward(step, target="blocks.0"),
        TransientNan(step, target="blocks.0"),
        Fp16Overflow(step, target="blocks.0"),
        Fp16Collapse(step, target="blocks.0"),
        LearningRateSpike(step),
        OptimizerCorruption(step),
        SchedulerReset(),
        CursorRewind(step),
        BadRank(step, parameter="head.weight", rank=0),
    ]


def test_faults_that_do_not_fire_change_no_bit() -> None:
    bare = LM()
    trainer = L.Trainer(
        **QUIET,
        max_steps=6,
    )
    module = LM()
    L.seed_everything(3)
    trainer.fit(bare, Loader())
    drawn = torch.rand(3)
    L.seed_everything(3)
    _, _, lines = train(*all_faults(step=100), module=module)
    assert torch.equal(torch.rand(3), drawn)
    assert lines == []
    assert module.losses == bare.losses
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), bare.parameters(), strict=True))


def test_hidden_from_the_journal_but_counted() -> None:
    fault = NanForward(step=2, target="blocks.1")
    _, trainer, lines = train(fault, journal=False)
    assert lines == []
    (injector,) = (c for c in trainer.callbacks if isinstance(c, FaultInjector))
    assert injector.fired == {"nan_forward": 1}


def test_counters_survive_a_resume_and_do_not_rewind() -> None:
    assert FaultInjector.rewinds is False
    faults = [CorruptBatch(step=1, vocabulary=VOCABULARY), LearningRateSpike(step=1)]
    _, trainer, _ = train(*faults)
    (injector,) = (c for c in trainer.callbacks if isinstance(c, FaultInjector))
    state = injector.state_dict()
    loaded = FaultInjector([CorruptBatch(step=1), LearningRateSpike(step=1), CursorRewind(step=3)])
    loaded.load_state_dict(state)
    assert loaded.fired == {"corrupt_batch": 1, "lr_spike": 3, "cursor_rewind": 0}
    assert loaded.state_dict()["corrupt_batch"] == {
        "fired": 1,
        "attempt": 0,
        "sample_ids": ["4", "5", "6", "7"],
        "places": [[0, 1]],
    }


def test_a_batch_that_is_a_tuple_is_changed_in_place() -> None:
    class Pairs(LM):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step({"input_ids": batch[0], "targets": batch[1]}, batch_idx)

    pairs = [(b["input_ids"], b["targets"]) for b in (expected_batch(step) for step in range(4))]
    fault = CorruptBatch(step=1, vocabulary=VOCABULARY, input_key=0, target_key=1)
    module = Pairs()
    trainer = L.Trainer(
        **QUIET,
        max_steps=3,
        callbacks=[FaultInjector([fault])],
    )
    trainer.fit(module, torch.utils.data.DataLoader(pairs, batch_size=None))
    assert fault.fired == 1
    assert [untouched(batch, step) for step, batch in enumerate(module.seen)] == [True, False, True]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CorruptBatch(step=-1), "corrupt_batch: step is -1, expected 0 or more"),
        (lambda: CursorRewind(step=1), "cursor_rewind: step is 1, expected 2 or more"),
        (lambda: CorruptBatch(step=0, duration=0), "duration is 0 steps, expected 1 or more"),
        (lambda: CorruptBatch(step=0, samples=0), "samples is 0, expected 1 or more"),
        (lambda: CorruptBatch(step=0, vocabulary=1), "vocabulary is 1, expected 2 tokens or more"),
        (lambda: NanForward(step=0, target="x", rank=-1), "rank is -1, expected 0 or more"),
        (lambda: LearningRateSpike(step=0, factor=-2.0), "factor is -2.0, expected more than 0"),
        (lambda: Fp16Overflow(step=0, target="x", gain=1.0), "gain is 1.0, expected more than 1"),
        (lambda: Fp16Collapse(step=0, target="x", gain=0.5), "gain is 0.5, expected more than 1"),
        (lambda: BadRank(step=0, parameter="x", std=0.0), "std is 0.0, expected more than 0"),
        (lambda: LevelShift(step=0, share=0.0), "share is 0.0, expected more than 0 and at most 1"),
        (lambda: LevelShift(step=0, share=0.001), "0.001 of the values 0 .. 255 is 0, expected 2 or more"),
        (lambda: FaultInjector([CorruptBatch(1), CorruptBatch(2)]), r"several faults are called \['corrupt_batch'\]"),
    ],
)
def test_values_out_of_bounds(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_something_that_is_not_a_fault() -> None:
    with pytest.raises(TypeError, match=r"faults holds a str, expected lightning_sentinel\.faults\.Fault"):
        FaultInjector(["corrupt_batch"])  # type: ignore[list-item]
