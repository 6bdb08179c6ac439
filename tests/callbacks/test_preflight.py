"""Each check of the preflight on both sides: what is wrong is said once, what is right is not mentioned."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from hybrid_lm.model import HybridLMConfig
from hybrid_lm.module import AdamWCosine, HybridLMModule
from preflight_ranks import SCENARIOS
from sentinel_kit import Loader, Net, make_trainer, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sentinel import ForensicCheckpoint, Preflight, RankTelemetry, RunJournal
from lightning_sentinel import preflight as checks
from lightning_sentinel.callbacks.preflight import PreflightError
from lightning_sentinel.context import context_of

SCRIPT = Path(__file__).with_name("preflight_ranks.py")
VOCABULARY = 50


class Good(Net):
    """Nothing to say: warm-up, one optimizer over everything; clipping is the Trainer's."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def make(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)

    def share(self, step: int) -> float:
        return min(1.0, (step + 1) / 100)


def remarks(module: L.LightningModule, data: Any = None, **options: Any) -> list[tuple[str, str]]:
    return [(r.check, r.level) for r in fly(module, data, **options).remarks]


def fly(
    module: L.LightningModule, data: Any = None, *, others: Any = (), preflight: Any = None, **options: Any
) -> Preflight:
    flight: Preflight = preflight or Preflight()
    trainer, _ = make_trainer(
        [*others, flight, RankTelemetry()], **{"max_steps": 2, "gradient_clip_val": 1.0, **options}
    )
    trainer.fit(module, data or Loader())
    return flight


def message(flight: Preflight, check: str) -> str:
    (found,) = [r for r in flight.remarks if r.check == check]
    return found.message


def test_a_sound_run_passes_every_check_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    flight = Preflight()
    trainer, sink = make_trainer([flight, RankTelemetry()], max_steps=2, gradient_clip_val=1.0)
    with caplog.at_level(logging.WARNING, "lightning_sentinel"):
        trainer.fit(Good(), Loader())
    assert flight.remarks == []
    assert not caplog.records
    assert sink.named("preflight.warning", "preflight.note") == []
    (done,) = sink.named("preflight.done")
    assert done["warnings"] == 0
    assert done["checks"] == dict.fromkeys(checks.CHECKS, "passed") | {"initial_loss": "in the first step"}


# ---------------------------------------------------------------------------------------------------------- parameters


def test_parameters_that_are_not_finite_or_all_the_same() -> None:
    module = Good()
    module.first.weight.data.fill_(0.02)
    assert "1 matrices hold one and the same value everywhere: first.weight." in message(fly(module), "parameters")
    module = Good()
    module.last.bias.data.fill_(math.nan)
    flight = fly(module)
    assert message(flight, "parameters").startswith(
        "1 parameters hold non-finite values before the first step: last.bias."
    )


class TwoZeros(Good):
    """With ``both`` neither of the matrices that follow each other ever gets a gradient; with one, both come alive."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False)
        nn.init.zeros_(self.down.weight)
        if both:
            nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.down(self.up(x)))


def test_a_zero_matrix_is_noted_and_warned_of_only_where_no_update_can_move_it() -> None:
    assert remarks(TwoZeros(both=False)) == [("parameters", "note")]
    flight = fly(TwoZeros(both=True))
    assert [(r.level, r.names) for r in flight.remarks] == [
        ("note", ("up.weight", "down.weight")),
        ("warning", ("up.weight", "down.weight")),
    ]
    assert "No update will ever move them" in flight.remarks[1].message


# ------------------------------------------------------------------------------------------------ schedule and clipping


lr = torch.optim.lr_scheduler
SCHEDULES: dict[str, tuple[Any, bool]] = {
    "linear": (lambda o: lr.LinearLR(o, 0.1), True),
    "one cycle": (lambda o: lr.OneCycleLR(o, 0.1, total_steps=100), True),
    "lambda": (lambda o: lr.LambdaLR(o, lambda s: min(1.0, (s + 1) / 10)), True),
    "cosine": (lambda o: lr.CosineAnnealingLR(o, 50), False),
    "exponential": (lambda o: lr.ExponentialLR(o, 0.99), False),
    "constant": (lambda o: lr.LambdaLR(o, lambda s: 1.0), False),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_tried_out_without_a_trace(name: str) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=0.1)
    make, expected = SCHEDULES[name]
    scheduler = make(optimizer)
    before = (scheduler.state_dict(), [dict(g) for g in optimizer.param_groups])
    assert checks.rises(scheduler) is expected
    assert (scheduler.state_dict(), [dict(g) for g in optimizer.param_groups]) == before


def test_schedules_in_a_sequence() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=0.1)
    parts: list[Any] = [lr.LinearLR(optimizer, 0.01, total_iters=5), lr.CosineAnnealingLR(optimizer, 50)]
    sequence = lr.SequentialLR(optimizer, parts, [5])
    rate = optimizer.param_groups[0]["lr"]
    assert checks.rises(sequence) is True
    assert optimizer.param_groups[0]["lr"] == rate
    assert sequence.last_epoch == 0
    assert checks.rises(lr.ReduceLROnPlateau(optimizer)) is False
    assert checks.rises(object()) is None


def test_warm_up_and_clipping() -> None:
    assert remarks(Net()) == [("warmup", "warning")]  # AdamW with an exponential schedule
    assert remarks(Good(), gradient_clip_val=None) == [("clipping", "warning")]

    class Plain(Good):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    class Itself(Plain):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            return None

    assert remarks(Plain()) == []
    assert remarks(Itself(), gradient_clip_val=None) == [("warmup", "note")]


# ------------------------------------------------------------------------------------------------------------- epsilon


def test_an_epsilon_that_vanishes_in_the_dtype() -> None:
    class Half(Good):
        def __init__(self, eps: float) -> None:
            super().__init__()
            self.eps = eps
            self.norm = nn.Identity()  # type: ignore[assignment]
            self.half = nn.Linear(6, 6).to(torch.float16)

        def make(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 0.01, eps=self.eps)

    flight = fly(Half(1e-8))
    assert "AdamW adds eps=1e-08 to moments in float16, whose smallest normal number is 6.1e-05" in message(
        flight, "epsilon"
    )
    assert remarks(Half(1e-4)) == []
    assert remarks(Good()) == []  # the same 1e-8 in float32
    for eps, gone in ((1e-8, [("extra (1e-08 in float16)",)]), (1e-5, [])):
        module = Half(1e-4)
        module.extra = nn.LayerNorm(4, eps=eps).to(torch.float16)
        assert [r.names for r in fly(module).remarks] == gone


# ------------------------------------------------------------------------------------------------------------ coverage


def test_every_parameter_in_an_optimizer_once() -> None:
    class Some(Good):
        def __init__(self, which: str) -> None:
            super().__init__()
            self.which = which
            self.outside = [nn.Parameter(torch.zeros(3))]

        def make(self) -> torch.optim.Optimizer:
            if self.which == "missing":
                return torch.optim.AdamW([*self.first.parameters(), *self.norm.parameters()], 0.01)
            return torch.optim.AdamW([*self.parameters(), *(self.outside if self.which == "strange" else [])], 0.01)

    flight = fly(Some("missing"))
    assert message(flight, "coverage").startswith(
        "2 of 6 trainable parameters are in no optimizer and never change: last.weight, last.bias."
    )
    assert "1 parameters in the optimizers are none of the module's" in message(fly(Some("strange")), "coverage")
    frozen = Some("missing")
    frozen.last.requires_grad_(False)
    assert remarks(frozen) == []


class Gan(L.LightningModule):
    """Two optimizers in manual optimization; with ``shared`` both step the generator."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic, self.shared = nn.Linear(6, 6), nn.Linear(6, 1), shared

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (-1.0, 1.0), strict=True):  # type: ignore[arg-type]
            loss = sign * self.critic(self.generator(batch["x"])).mean() + self.critic(batch["x"]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 1.0)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        critic = [*self.critic.parameters(), *(self.generator.parameters() if self.shared else [])]
        return torch.optim.Adam(self.generator.parameters(), 1e-3), torch.optim.Adam(critic, 1e-3)


def test_two_optimizers_in_manual_optimization() -> None:
    assert remarks(Gan(shared=False), gradient_clip_val=None) == [
        ("warmup", "note"),
        ("warmup", "note"),
        ("clipping", "note"),
    ]
    flight = fly(Gan(shared=True), gradient_clip_val=None)
    assert "2 parameters are in more than one optimizer" in message(flight, "coverage")


class Twice(Good):
    """A weight stands twice in the optimizer's only group, as by ``[*parameters(), head.weight]``."""

    def make(self) -> torch.optim.Optimizer:
        optimizer = super().make()
        params = optimizer.param_groups[0]["params"]
        params.append(params[0])
        return optimizer


def test_a_parameter_that_is_twice_in_one_optimizer() -> None:
    module = Twice()
    first = next(n for n, _ in module.named_parameters())
    assert message(fly(module), "coverage") == (
        f"1 parameters are more than once in one optimizer, which steps them as often: {first}."
        " Give each parameter once."
    )


# -------------------------------------------------------------------------------------------------- loader and run folder


def test_a_loader_without_a_position() -> None:
    rows = [dict(zip(("x", "y"), (torch.randn(6), torch.randn(1)), strict=True)) for _ in range(16)]
    flight = fly(Good(), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    assert "DataLoader has none" in message(flight, "loader")
    assert remarks(Good(), Loader()) == []


def test_the_run_folder_s_space_and_permission(tmp_path: Path) -> None:
    assert checks.run_folder(tmp_path / "not" / "there", 1, 4) == []
    (found,) = checks.run_folder(tmp_path, 2**60, 4)
    assert f"{tmp_path} has " in found.message
    assert "4 checkpoints of about 1.07e+09 GiB need 4.29e+09 GiB" in found.message
    (found,) = checks.run_folder(Path("/proc/self"), 1, 0)
    assert found.message.startswith("/proc/self can't be written")


def test_checkpoints_are_counted_and_their_size_is_that_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, keeper = RunJournal(tmp_path / "run", report=False), ForensicCheckpoint(every_n_steps=2, keep=2)
    flight = fly(Good(), others=[journal, keeper])
    assert flight.remarks == []
    trainer, _ = make_trainer([RankTelemetry()], max_steps=2)
    module = Good()
    trainer.fit(module, Loader())
    held = sum(t.nbytes for t in [*module.parameters(), *module.buffers()])
    held += sum(t.nbytes for s in trainer.optimizers[0].state.values() for t in s.values() if t.dim())
    assert checks.checkpoint_bytes(trainer, module) == held

    def with_free(space: int) -> Preflight:
        usage = type(shutil.disk_usage(tmp_path))(2**50, 2**50 - space, space)
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "disk_usage", lambda _: usage)
            others = [RunJournal(tmp_path / f"run-{space}", report=False), ForensicCheckpoint(every_n_steps=2, keep=2)]
            return fly(Good(), others=others)

    # The two that are kept, and the one that is being written.
    assert with_free(3 * held).remarks == []
    assert " GiB free, 3 checkpoints of about " in message(with_free(3 * held - 1), "run_folder")


# -------------------------------------------------------------------------------------------------------- initial loss


class Tokens(L.LightningModule):
    """A bigram model; ``gain`` makes it sure of itself, ``known`` tells the vocabulary by an attribute."""

    def __init__(self, gain: float = 1.0, known: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.gain = gain
        if known:
            self.vocab_size = VOCABULARY

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.head(self.embedding(batch["input_ids"])) * self.gain
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def tokens() -> Any:
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(VOCABULARY, (4, 9), generator=generator)
        yield {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}


@pytest.mark.parametrize("known", [False, True])
def test_the_first_loss_against_the_uniform_guess(known: bool) -> None:
    skip = Preflight(skip=["loader"])
    module = Tokens(known=known)
    assert fly(module, tokens(), preflight=skip).remarks == []
    assert not any(m._forward_hooks for m in module.modules())
    flight = fly(Tokens(gain=20.0, known=known), tokens(), preflight=Preflight(skip=["loader"]))
    assert "expected about ln(50) = 3.912 nats, the loss of a uniform guess" in message(flight, "initial_loss")
    flight = fly(Tokens(gain=20.0, known=known), tokens(), preflight=Preflight(skip=["loader", "initial_loss"]))
    assert flight.remarks == []


def test_a_first_loss_below_the_uniform_guess_is_a_note() -> None:
    (found,) = checks.initial_loss(2.1, 50_000)
    assert (found.level, found.check) == ("note", "initial_loss")
    assert checks.initial_loss(math.log(50_000) + 0.9, 50_000) == []
    assert checks.initial_loss(math.nan, 50_000) == []


# -------------------------------------------------------------------------------------------------------------- strict


def test_strict_refuses_with_everything_and_moves_no_weight() -> None:
    module = Net()
    before = module.first.weight.detach().clone()
    rows = [dict(zip(("x", "y"), (torch.randn(6), torch.randn(1)), strict=True)) for _ in range(16)]
    with pytest.raises(PreflightError) as caught:
        fly(
            module,
            DataLoader(rows, batch_size=4),  # type: ignore[arg-type]
            preflight=Preflight(strict=True),
            gradient_clip_val=None,
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "Preflight found 3 problems; strict=True refuses to train:"
    assert [line.split(":")[0] for line in lines[1:]] == ["1. warmup", "2. clipping", "3. loader"]
    assert torch.equal(module.first.weight, before)
    fly(Good(), preflight=Preflight(strict=True))


def test_strict_refuses_the_first_loss_before_the_update() -> None:
    module = Tokens(gain=20.0)
    before = module.head.weight.detach().clone()
    with pytest.raises(PreflightError, match="initial_loss: The first loss is"):
        fly(module, tokens(), preflight=Preflight(strict=True, skip=["loader"]))
    assert torch.equal(module.head.weight, before)


def test_what_cannot_be_looked_at_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no idea")

    monkeypatch.setattr(checks, "coverage", broken)
    flight = fly(Good(), preflight=Preflight(strict=True))
    assert message(flight, "coverage") == "This could not be looked at: RuntimeError: no idea"


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="skip names clippling, expected some of parameters, warmup"):
        Preflight(skip=["clippling"])
    with pytest.raises(ValueError, match="vocabulary_size must be at least 2"):
        Preflight(vocabulary_size=1)
    with pytest.raises(ValueError, match="checkpoints must be at least 0"):
        Preflight(checkpoints=-1)


@pytest.mark.parametrize("options", [{"fast_dev_run": 2}, {"accumulate_grad_batches": 3}])
def test_other_ways_to_train(options: dict[str, Any], tmp_path: Path) -> None:
    journal = RunJournal(tmp_path / "run", report=False)
    assert remarks(Good(), others=[journal], **options) == []
    assert (tmp_path / "run").exists() == ("fast_dev_run" not in options)


# --------------------------------------------------------------------------------------------------------- the example


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_the_example_s_own_configuration_has_no_warning() -> None:
    torch.manual_seed(0)
    config = HybridLMConfig(vocab_size=257, width=32, layers=4, ffn_width=64)
    module = HybridLMModule(config, AdamWCosine(learning_rate=3e-3, total_steps=200))
    ids = torch.randint(0, 257, (2, 33), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:], "document_ids": torch.zeros(2, 32, dtype=torch.int32)}
    flight = fly(
        module, DataLoader([batch] * 2, batch_size=None), preflight=Preflight(skip=["loader"]), limit_val_batches=0
    )
    assert flight.remarks == []


# ------------------------------------------------------------------------------------------------------ real processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("preflight")
    run_ranks(SCRIPT, folder, *SCENARIOS)
    return {s: [json.loads((folder / f"{s}-{r}.json").read_text()) for r in (0, 1)] for s in SCENARIOS}


def said(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(r["check"], r["message"]) for r in result["remarks"]]


@pytest.mark.distributed
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_say_and_do_alike(scenario: str, ranks: Any) -> None:
    first, second = ranks[scenario]
    assert first == second
    assert first["steps"] == (0 if scenario == "strict" else 2)


@pytest.mark.distributed
def test_ranks_that_agree_and_ranks_that_do_not(ranks: Any) -> None:
    assert ranks["alike"][0]["remarks"] == []
    ((check, text),) = said(ranks["weights"][0])
    assert check == "ranks"
    assert text.startswith("The initial weights of the ranks differ, bit for bit.")
    ((_, text),) = said(ranks["config"][0])
    assert text.startswith("The configuration of the ranks differ: hparams.width.")
    ((_, text),) = said(ranks["versions"][0])
    assert text.startswith(f"The software versions of the ranks differ: torch (torch: 1.0, {torch.__version__}).")
    assert "initial weights" in ranks["strict"][0]["refused"]


@pytest.mark.distributed
def test_parts_of_sharded_parameters_are_seen_as_a_whole(ranks: Any) -> None:
    found = dict(said(ranks["sharded"][0]))
    assert "1 matrices hold one and the same value everywhere: last.weight." in found["parameters"]
    assert sorted(found) == ["clipping", "parameters", "warmup"]


def test_a_majority_names_the_rank() -> None:
    (found,) = checks.ranks([{"torch": "2"}] * 3, [{"a": "1"}] * 3, [(1, 1), (1, 1), (2, 1)])
    assert found.message.startswith("The initial weights of rank 2 and of the others differ")
    assert found.ranks == (2,)
    assert checks.ranks([{"torch": "2"}] * 3, [{"a": "1"}] * 3, [None] * 3) == []


def test_preflight_of_a_second_fit_says_it_again_and_looks_at_no_first_loss() -> None:
    flight = Preflight(skip=["loader"])
    trainer, sink = make_trainer([flight, RankTelemetry()], max_steps=2)
    module = Tokens(gain=20.0)
    trainer.fit(module, tokens())
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, tokens())
    assert [r["check"] for r in sink.named("preflight.warning")] == ["clipping", "initial_loss", "clipping"]
    assert context_of(trainer).incidents == []
