"""The faults of the matrix: in the data, in what is computed, in the state, in the plan, on a rank."""

from __future__ import annotations

import math
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hybrid_lm import gated_delta
from hybrid_lm.model import Attention, FeedForward, GatedDeltaNet, Layout, RMSNorm, rotate
from hybrid_lm.module import IGNORED, AdamWCosine
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_sentinel import ForensicCheckpoint, RankTelemetry
from lightning_sentinel.data.mixture import MixtureLoader

from .fault import ALL, AT, SECOND, Case, become, on_output
from .world import BATCH, LENGTH, TEXT, VOCABULARY, WEIGHTS, World, loader, sources, warm_world

MIXER, FFN = "model.layers.1.mixer", "model.layers.0.ffn"
GDN = "model.layers.0.mixer"


# ------------------------------------------------------------------------------------------------------------ the data


def _random(case: Case, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * case.seed + salt)
    return torch.randint(TEXT, shape, generator=generator)


class CorruptBatch(Case):
    """Random tokens, all within the vocabulary, in every sample of one batch."""

    kind, ranks = "data", SECOND

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        noise = _random(self, (BATCH, LENGTH + 1))
        batch["input_ids"], batch["targets"] = noise[:, :-1].clone(), noise[:, 1:].clone()
        self.named |= {f"sample:{i}" for i in batch["sample_id"]}


class PoisonedSpan(Case):
    """The labels of a span of one sample are another text's."""

    kind, ranks = "data", SECOND

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        row = self.seed % BATCH
        targets = batch["targets"].clone()
        # No token of the hard samples' range follows a token of the text: the labels contradict the inputs.
        targets[row, 2:] = TEXT + _random(self, (LENGTH - 2,), 1)
        batch["targets"] = targets
        self.named = {f"sample:{batch['sample_id'][row]}"}


class RecurringSample(Case):
    """The same spoilt sample comes again and again."""

    kind, duration = "data", None

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        if (trainer.global_step - self.at) % 4 == 0:
            tokens = _random(self, (LENGTH + 1,), 2)
            batch["input_ids"], batch["targets"] = batch["input_ids"].clone(), batch["targets"].clone()
            batch["input_ids"][3], batch["targets"][3] = tokens[:-1], tokens[1:] + TEXT
            batch["sample_id"] = [*batch["sample_id"][:3], "prose/spoilt"]
            batch["sample_pass"] = [*batch["sample_pass"][:3], trainer.global_step]
            self.named = {"sample:prose/spoilt"}


class OutOfRangeToken(Case):
    """One id beyond the vocabulary."""

    kind, ranks = "data", SECOND

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        tokens = batch["input_ids"].clone()
        tokens[2, 5] = VOCABULARY + 7
        batch["input_ids"] = tokens
        self.named = {f"sample:{batch['sample_id'][2]}"}


class NoSupervisedTokens(Case):
    """Every target of the batch is ignored."""

    kind, ranks = "data", SECOND

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        batch["targets"] = torch.full_like(batch["targets"], IGNORED)
        self.named |= {f"sample:{i}" for i in batch["sample_id"]}


class DuplicatedData(Case):
    """The loader delivers one sample in every place of the batch."""

    kind, duration = "data", 12

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        for key in ("input_ids", "targets", "document_ids", "source"):
            batch[key] = batch[key][:1].expand_as(batch[key]).clone()
        batch["sample_id"] = [batch["sample_id"][0]] * BATCH
        if "sample_pass" in batch:
            batch["sample_pass"] = [batch["sample_pass"][0]] * BATCH
        self.named.add(f"sample:{batch['sample_id'][0]}")


class LevelShift(Case):
    """From a step on the text of one source has its tokens exchanged, in each sample differently."""

    kind, duration, culprits = "data", None, ("source:prose",)

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        tokens = torch.cat([batch["input_ids"], batch["targets"][:, -1:]], 1)
        for row in (batch["source"] == 2).nonzero().flatten().tolist():
            salt = int(batch["sample_id"][row].rpartition("/")[2])
            table = torch.arange(VOCABULARY)
            table[:TEXT] = torch.randperm(TEXT, generator=torch.Generator().manual_seed(salt))
            tokens[row] = table[tokens[row]]
            self.instead.add(f"sample:{batch['sample_id'][row]}")
        batch["input_ids"], batch["targets"] = tokens[:, :-1].clone(), tokens[:, 1:].clone()


class MixtureShift(Case):
    """From a step on the mixture is half of the hard source; every sample is in order."""

    kind, duration, culprits = "data", None, ("mixture",)

    def loader(self) -> MixtureLoader:
        after = WEIGHTS | {"logs": 3.0}
        knots = [{"draw": 0, "weights": WEIGHTS}, {"draw": AT * BATCH, "weights": after}]
        return loader(self.seed, weights=knots)


class HardValidBatch(Case):
    """A batch of samples that are hard for a good reason: the model knows of their kind, and that it cannot know them."""

    kind, ranks = "data", ALL

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        source = sources(self.seed)[3]
        start = 3000 + BATCH * trainer.global_rank
        chosen = range(start, start + BATCH)
        for key in ("input_ids", "targets"):
            batch[key] = torch.stack([torch.as_tensor(source.sample(i)[key]) for i in chosen])
        batch["source"] = torch.full_like(batch["source"], 3)
        batch["sample_id"] = [source.sample_id(i) for i in chosen]


class CursorRewind(Case):
    """The loader starts over."""

    kind, culprits, ranks = "data", ("cursor",), ALL

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        stream = trainer.train_dataloader
        if trainer.global_step == 4:
            self.position = stream.state_dict()
        if trainer.global_step == AT:
            stream.load_state_dict(self.position)


# ------------------------------------------------------------------------------------------------------- the computation


def _one_row(value: Tensor, row: int) -> Tensor:
    """1 everywhere and 0 in one row of the first dimension."""
    weight = torch.ones(value.shape[:1] + (1,) * (value.dim() - 1), dtype=value.dtype)
    weight[row] = 0.0
    return weight


class NanForward(Case):
    """0/0 in one sample of a module's output."""

    kind, culprits, ranks = "numerics", (f"module:{GDN}",), SECOND

    def world(self) -> World:
        world = super().world()
        on_output(world, GDN, lambda y: y * _one_row(y, 1) / _one_row(y, 1))
        return world


class _Gradient(torch.autograd.Function):
    """Identity with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.change(grads[0]), None


class KernelNanBackward(Case):
    """A kernel whose backward is NaN on finite input."""

    kind, culprits, ranks = "numerics", (f"module:{FFN}",), SECOND

    def world(self) -> World:
        world = super().world()
        on_output(world, FFN, lambda y: _Gradient.apply(y, lambda g: g * _one_row(g, 2) / _one_row(g, 2)))
        return world


class KernelWrongBackward(Case):
    """A kernel whose forward is right and whose backward is finite and wrong."""

    kind, culprits, ranks, duration = "numerics", (f"module:{GDN}",), ALL, None

    def world(self) -> World:
        world = super().world()
        on_output(world, GDN, lambda y: _Gradient.apply(y, lambda g: -40.0 * g))
        return world


class TransientNan(Case):
    """0/0 in one single forward: a replay of the same step finds nothing."""

    kind, ranks = "infrastructure", SECOND

    def world(self) -> World:
        world = super().world()
        on_output(world, "model.layers.0", self._once)
        return world

    def _once(self, y: Tensor) -> Tensor:
        if self.fired > 1:
            return y
        self.fired = 2
        self.named = {"module:model.layers.0", f"rank:{self.rank or 0}"}
        return y * _one_row(y, 0) / _one_row(y, 0)


class TransientGarbage(Case):
    """One forward gives finite garbage, once."""

    kind, ranks = "infrastructure", SECOND

    def world(self) -> World:
        world = super().world()
        on_output(world, "model.head", self._once)
        return world

    def _once(self, y: Tensor) -> Tensor:
        if self.fired > 1:
            return y
        self.fired = 2
        self.named = {f"rank:{self.rank or 0}"}
        return y.roll(7, -1)


class FlakyRank(Case):
    """A rank that computes something else every time, from a step on."""

    kind, ranks, duration = "infrastructure", {2: 1}, None
    culprits = ("rank:1",)

    def world(self) -> World:
        world = super().world()
        self.noise = torch.Generator().manual_seed(self.seed)
        on_output(world, "model.head", lambda y: y + 6.0 * torch.randn(y.shape, generator=self.noise))
        return world


class _NaiveAttention(Attention):
    """Attention written out, with a softmax of its own."""

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query = rotate(self.query_norm(query), layout.rotary).to(value.dtype)
        key = rotate(self.key_norm(key), layout.rotary).to(value.dtype)
        scores = query @ key.mT / math.sqrt(self.head_dim)
        seen = self.softmax(scores, layout.attention_mask) @ value
        return self.out(seen.transpose(1, 2).flatten(-2) * self.gate(x).sigmoid())

    def softmax(self, scores: Tensor, mask: Tensor) -> Tensor:
        if self.armed_in.armed:
            mask = mask.clone()
            mask[self.row, :, 9] = False
        return scores.masked_fill(~mask, -math.inf).softmax(-1)


class _OverflowingAttention(_NaiveAttention):
    def softmax(self, scores: Tensor, mask: Tensor) -> Tensor:
        # exp without taking off the largest score first
        weights = (scores * (200.0 if self.armed_in.armed else 1.0)).exp() * mask
        return weights / weights.sum(-1, keepdim=True)


class _Armed:
    """Lets a module's own code know whether the fault is in force, without making the world its child."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def armed(self) -> bool:
        return self._world.armed


class FullyMaskedRow(Case):
    """An attention row that is fully masked, at a position that carries no loss."""

    kind, culprits, ranks = "numerics", (f"module:{MIXER}",), SECOND

    def world(self) -> World:
        world = super().world()
        become(world.get_submodule(MIXER), _NaiveAttention, armed_in=_Armed(world), row=self.seed % BATCH)
        return world

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        batch["targets"] = batch["targets"].clone()
        batch["targets"][self.seed % BATCH, 9] = IGNORED


class SoftmaxOverflow(Case):
    """A softmax that does not take off the largest score, and scores that have grown."""

    kind, culprits = "numerics", (f"module:{MIXER}",)

    def world(self) -> World:
        world = super().world()
        become(world.get_submodule(MIXER), _OverflowingAttention, armed_in=_Armed(world))
        return world


class _LateMasked(GatedDeltaNet):
    """The decay is masked after ``exp``, and one sample forgets hard."""

    def rule_inputs(self, x: Tensor, layout: Layout) -> Any:
        query, key, value, log_decay, beta = super().rule_inputs(x, layout)
        strong = torch.ones(len(x), 1, 1)
        if self.armed_in.armed:
            strong[self.row] = 3000.0
        return query, key, value, log_decay * strong, beta

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        before = gated_delta.decay
        gated_delta.decay = lambda log_decay, cut: log_decay.exp() * ~cut
        try:
            return super().forward(x, layout)
        finally:
            gated_delta.decay = before


class GdnDecayOverflow(Case):
    """Infinity times zero in the decay of a Gated DeltaNet layer."""

    kind, culprits, ranks = "numerics", (f"module:{GDN}",), SECOND

    def world(self) -> World:
        world = super().world()
        become(world.get_submodule(GDN), _LateMasked, armed_in=_Armed(world), row=self.seed % BATCH)
        return world


class _WhereFeedForward(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        n = x.abs().mean(-1, keepdim=True)
        if self.armed_in.armed:
            n = n * _one_row(n, self.row)
        scaled = torch.where(n == 0, torch.zeros_like(x), x / n) * 0.05
        return super().forward(x) + scaled


class WhereBranch(Case):
    """``where(n == 0, 0, x / n)``: finite forward, 0 times infinity in the backward."""

    kind, culprits = "numerics", (f"module:{FFN}",)

    def world(self) -> World:
        world = super().world()
        become(world.get_submodule(FFN), _WhereFeedForward, armed_in=_Armed(world), row=self.seed % BATCH)
        return world


class _RootFeedForward(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.armed_in.armed:
            y = y * _one_row(y, self.row)
        return y + 0.01 * y.square().sum(-1, keepdim=True).sqrt()


class RootAtZero(Case):
    """The square root of a norm that is zero: an infinite slope."""

    kind, culprits = "numerics", (f"module:{FFN}",)

    def world(self) -> World:
        world = super().world()
        become(world.get_submodule(FFN), _RootFeedForward, armed_in=_Armed(world), row=self.seed % BATCH)
        return world


class _DividingFeedForward(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        scale = y.square().mean((-1, -2), keepdim=True)
        if self.armed_in.armed:
            scale = scale * _one_row(scale, self.row)
        return y + 0.01 * y / scale


class DivisionByZero(Case):
    """A normaliser that is zero for one sample."""

    kind, culprits = "numerics", (f"module:{FFN}",)

    def world(self) -> World:
        world = super().world()
        become(world.get_submodule(FFN), _DividingFeedForward, armed_in=_Armed(world), row=self.seed % BATCH)
        return world


class ExplodingResidual(Case):
    """A layer writes more to the residual stream with every step."""

    kind, culprits, duration = "numerics", (f"module:{MIXER}",), None

    def world(self) -> World:
        world = super().world()
        on_output(world, MIXER, lambda y: y * 2.5 ** min(self.fired, 20))
        return world


class _Fp16(Case):
    """In float16 with a loss scale."""

    fp16 = True

    def options(self) -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10_000)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


class Fp16Overflow(_Fp16):
    """One gradient beyond 65,504: the scaler skips the step and halves its scale. An event, not an incident."""

    kind = "none"
    patience = 12

    def world(self) -> World:
        world = super().world()
        on_output(world, FFN, lambda y: _Gradient.apply(y, lambda g: g * 1e9))
        return world


class Fp16Collapse(_Fp16):
    """A module's activations leave the range of float16 in one sample of every batch, step after step."""

    kind, culprits, duration = "numerics", (f"module:{FFN}",), 20

    def world(self) -> World:
        world = super().world()
        on_output(world, FFN, lambda y: (y.float() * (1.0 + 1e9 * (1.0 - _one_row(y.float(), 1)))).to(y.dtype))
        return world


class PrecisionRecipe(_Fp16):
    """A projection whose values need more than 65,504, in a precision that ends there."""

    kind, culprits, duration = "numerics", ("module:model.layers.0.ffn.up",), None

    def world(self) -> World:
        world = super().world()
        world.model.layers[0].ffn.up.register_forward_hook(lambda m, a, y: y * 4e6 if world.armed else y)
        return world


# ------------------------------------------------------------------------------------------------------------- the state


class LearningRateSpike(Case):
    """The rate is 60 times the planned one for three steps."""

    kind, culprits, ranks, duration = "optimization", ("optimizer:lr",), ALL, 3

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 60.0


class OptimizerCorruption(Case):
    """The second moments are overwritten with something far too small."""

    kind, culprits, ranks = "optimization", ("optimizer:exp_avg_sq",), ALL

    passing = True

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        for state in trainer.optimizers[0].state.values():
            state["exp_avg_sq"].fill_(1e-14)


class NegativeMoments(Case):
    """Some second moments are negative, as after a bad conversion of a checkpoint."""

    kind, culprits = "optimization", ("optimizer:exp_avg_sq",)

    passing = True

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        for state in trainer.optimizers[0].state.values():
            state["exp_avg_sq"].view(-1)[::5].neg_()


class SchedulerReset(Case):
    """The run is resumed from its checkpoint, and the schedule begins anew: a restart that never loads it."""

    kind, culprits = "optimization", ("scheduler",)

    def world(self) -> World:
        self.folder = tempfile.TemporaryDirectory()
        first = L.Trainer(
            max_steps=self.at,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[RankTelemetry(), ForensicCheckpoint(every_n_steps=self.at, run_dir=self.folder.name)],
            gradient_clip_val=1.0,
        )
        first.fit(super().world(), self.loader())
        return super().world()

    def suite(self, callbacks: Sequence[L.Callback]) -> list[L.Callback]:
        # The checkpoint is as old as the run was: still on probation.
        resumed = ForensicCheckpoint(every_n_steps=0, run_dir=self.folder.name, resume="latest")
        return [*callbacks, resumed]

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        (live,) = (config.scheduler for config in trainer.lr_scheduler_configs)
        fresh = world.configure_optimizers()
        live.load_state_dict(fresh["lr_scheduler"]["scheduler"].state_dict())
        for group, new in zip(live.optimizer.param_groups, fresh["optimizer"].param_groups, strict=True):
            group["lr"] = new["lr"]

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.folder.cleanup()


class NoWarmup(Case):
    """Trained weights, fresh moments, and the full rate at once after a few steps; the rate is what the schedule says."""

    kind, culprits, at, patience = "optimization", ("optimizer:lr",), 6, 40
    peak = 0.05

    def world(self) -> World:
        world = warm_world(self.seed)
        world.warm = None
        world.optimizer_config = AdamWCosine(learning_rate=self.peak, total_steps=2000, warmup_steps=0)
        world.share = lambda step: 1.0 if step >= self.at else 1e-5
        return world


class QuietGradients(Case):
    """Gradients are tiny for long and come back: Adam's epsilon is too small to hold the first updates."""

    kind, culprits, duration, patience = "optimization", ("optimizer:eps",), None, 40

    def world(self) -> World:
        world = warm_world(self.seed)
        world.optimizer_config = AdamWCosine(
            learning_rate=5 * world.rate, total_steps=4000, warmup_steps=20, betas=(0.9, 0.999), eps=1e-15
        )
        moments = {
            i: {"step": s["step"] * 20, "exp_avg": s["exp_avg"] * 1e-9, "exp_avg_sq": s["exp_avg_sq"] * 1e-18}
            for i, s in world.warm["optimizer"]["state"].items()
        }
        world.warm = world.warm | {"optimizer": {**world.warm["optimizer"], "state": moments}}
        for p in world.parameters():
            p.register_hook(lambda g: g if world.armed else g * 1e-9)
        return world


class WeightBitFlip(Case):
    """The highest bit of one weight's exponent flips: it becomes 2**128 times as large."""

    kind, ranks = "infrastructure", SECOND

    passing = True

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        name = ("model.head.weight", FFN + ".up.weight", MIXER + ".out.weight")[self.seed % 3]
        flat = world.get_parameter(name).data.view(-1).view(torch.int32)
        flat[101 * (self.seed + 1)] ^= 1 << 30
        self.named |= {f"rank:{self.rank or 0}"}
        if self.world_size == 1:
            self.named |= {f"parameter:{name}"}  # the only rank there is says nothing: the weight has to be named


class BadRank(Case):
    """One rank's output weights are overwritten."""

    kind, ranks = "infrastructure", {2: 1}
    culprits = ("rank:1",)

    passing = True

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        weight = world.model.head.weight
        weight.data.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(self.seed)))


class _FrozenStatistics(RMSNorm):
    """The last norm, followed by statistics of its own that are kept and used in training, as a frozen BatchNorm's are."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.running_var.lerp_(y.detach().float().var((0, 1)), 0.001)
        return y * (self.first_var / self.running_var + 1e-5).sqrt()


class PoisonedBuffer(Case):
    """The running variance of a norm that is used in training is overwritten."""

    kind, culprits = "infrastructure", ("buffer:model.norm.running_var",)

    passing = True

    def world(self) -> World:
        world = super().world()
        norm = become(world.model.norm, _FrozenStatistics)
        norm.register_buffer("running_var", torch.ones(24))
        norm.register_buffer("first_var", torch.ones(24))
        return world

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        buffer = world.model.norm.running_var
        buffer.copy_(10.0 ** torch.linspace(-6, 2, len(buffer)))


class PoisonedEma(Case):
    """The averaged copy of the output layer, which the loss is tied to, is overwritten."""

    kind, culprits = "infrastructure", ("buffer:ema.weight",)

    passing = True

    def world(self) -> World:
        world = super().world()
        world.ema = nn.Module()
        world.ema.register_buffer("weight", world.model.head.weight.detach().clone())
        caught: dict[str, Tensor] = {}
        world.model.norm.register_forward_hook(lambda m, a, y: caught.__setitem__("features", y))
        world.model.head.register_forward_hook(lambda m, a, y: caught.__setitem__("logits", y))

        def tied(batch: Any) -> Tensor:
            teacher = F.linear(caught["features"].detach(), world.ema.weight).softmax(-1)
            return F.kl_div(caught["logits"].log_softmax(-1), teacher, reduction="none").sum(-1).mean()

        world.extra_loss = tied
        return world

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.ema.weight.lerp_(pl_module.model.head.weight.detach(), 0.05)

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        world.ema.weight.copy_(
            4.0 * torch.randn(world.ema.weight.shape, generator=torch.Generator().manual_seed(self.seed))
        )


class UpdateOverflow(Case):
    """A layer's first gradient squares to zero and epsilon is zero: the update is infinite."""

    kind, culprits = "numerics", ("parameter:adapter.weight",)
    duration = None

    def world(self) -> World:
        world = super().world()
        world.adapter = nn.Linear(24, 24, bias=False)
        nn.init.zeros_(world.adapter.weight)
        world.model.norm.register_forward_hook(lambda m, a, y: y + 1e-25 * world.adapter(y) if world.armed else y)
        plain = World.make_optimizer

        def make() -> torch.optim.Optimizer:
            adapter = world._modules.pop("adapter")
            optimizer = plain(world)
            world._modules["adapter"] = adapter
            optimizer.add_param_group({"params": list(adapter.parameters()), "eps": 0.0, "weight_decay": 0.0})
            return optimizer

        world.make_optimizer = make
        return world


class PoorInitialization(Case):
    """The output layer is initialised far too large."""

    kind, culprits, at, patience = "numerics", ("parameter:model.head.weight",), 0, 20

    def world(self) -> World:
        world = World(self.seed)
        world.start = 0
        world.model.head.weight.data.mul_(1e38)
        return world


# ------------------------------------------------------------------------------------------------------------- the ranks


class ScaledRank(Case):
    """One rank's gradients are scaled before they are reduced: on the parameters, or in the communication hook."""

    kind, culprits, ranks, duration, patience = "infrastructure", ("rank:1",), {2: 1}, None, 50

    def world(self) -> World:
        world = super().world()
        if self.seed % 2 == 0:
            for p in world.parameters():
                p.register_hook(lambda g: g * -12.0 if world.armed else g)
        return world

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def scaled(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            factor = -12.0 if pl_module.armed else 1.0
            tensor = bucket.buffer().mul_(factor / dist.get_world_size())
            return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])

        if self.seed % 2:
            trainer.model.register_comm_hook(None, scaled)


class StaleRank(Case):
    """One rank skips an update that the others make."""

    kind, culprits, ranks, duration = "infrastructure", ("rank:1",), {2: 1}, 1

    def world(self) -> World:
        world = super().world()
        self.held: dict[str, Tensor] | None = None
        return world

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pass

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        optimizer = trainer.optimizers[0]

        def restore(o: Any, *_: Any) -> None:
            if self.held is not None:
                with torch.no_grad():
                    for p, (value, state) in zip(world.parameters(), self.held, strict=True):
                        p.copy_(value)
                        for k, v in state.items():
                            o.state[p][k].copy_(v)
                self.held = None

        self.held = [
            (p.detach().clone(), {k: v.clone() for k, v in optimizer.state[p].items()}) for p in world.parameters()
        ]
        self.handle = optimizer.register_step_post_hook(restore)


class Straggler(Case):
    """One rank computes for three times as long."""

    kind, culprits, ranks, duration, patience = "infrastructure", ("rank:1",), {2: 1}, None, 40
    # A backward takes about two forwards: twice the three of them on top is three times as long.
    forwards_more = 6.0

    def __init__(self, seed: int, world_size: int = 1) -> None:
        super().__init__(seed, world_size)
        self.forwards: deque[float] = deque(maxlen=16)  # seconds of this rank's own, however fast the machine is

    def strike(self, trainer: Any, world: World, batch: Any) -> None:
        time.sleep(max(0.05, self.forwards_more * sorted(self.forwards)[len(self.forwards) // 2]))

    def after(self, trainer: Any, world: World, batch: Any) -> None:
        self.begun = time.perf_counter()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.forwards.append(time.perf_counter() - self.begun)


class ReductionOverflow(Case):
    """Gradients are exchanged in float16; every rank's own gradient is finite and too large for that."""

    kind, ranks = "numerics", {2: None}
    culprits = ("parameter:model.embedding.weight",)

    def world(self) -> World:
        world = super().world()
        on_output(world, FFN, lambda y: _Gradient.apply(y, lambda g: g * 1e8))
        return world

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        trainer.model.register_comm_hook(None, fp16_compress_hook)
        # Whatever lies before the module has such gradients; each of them overflows in the exchange.
        before = ("model.embedding.", "model.layers.0.")
        self.instead = {f"parameter:{n}" for n, _ in pl_module.named_parameters() if n.startswith(before)}


FAULTS: Mapping[str, type[Case]] = {
    kind.name(): kind
    for kind in (
        CorruptBatch,
        PoisonedSpan,
        RecurringSample,
        OutOfRangeToken,
        NoSupervisedTokens,
        DuplicatedData,
        LevelShift,
        MixtureShift,
        HardValidBatch,
        CursorRewind,
        NanForward,
        KernelNanBackward,
        KernelWrongBackward,
        TransientNan,
        TransientGarbage,
        FlakyRank,
        FullyMaskedRow,
        SoftmaxOverflow,
        GdnDecayOverflow,
        WhereBranch,
        RootAtZero,
        DivisionByZero,
        ExplodingResidual,
        Fp16Overflow,
        Fp16Collapse,
        PrecisionRecipe,
        LearningRateSpike,
        OptimizerCorruption,
        NegativeMoments,
        SchedulerReset,
        NoWarmup,
        QuietGradients,
        WeightBitFlip,
        BadRank,
        PoisonedBuffer,
        PoisonedEma,
        UpdateOverflow,
        PoorInitialization,
        ScaledRank,
        StaleRank,
        Straggler,
        ReductionOverflow,
    )
}


def plan(names: Sequence[str] | None = None, seeds: Sequence[int] = (0, 1, 2)) -> list[tuple[str, int, int]]:
    """All cases ``(name, seed, ranks)``, those on one rank first."""
    chosen = [n for n in FAULTS if names is None or n in names]
    return [(n, s, r) for r in (1, 2) for s in seeds for n in chosen if r in FAULTS[n].ranks]


__all__ = ["FAULTS", "L", "plan"]
