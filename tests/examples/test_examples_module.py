"""Loss, schedule, parameter groups and validation of the example's LightningModule."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from hybrid_lm.model import HybridLMConfig
from hybrid_lm.module import AdamWCosine, HybridLMModule
from torch.utils.data import DataLoader

# Most of these train without validation data.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

MODEL = HybridLMConfig(vocab_size=40, width=16, layers=4, ffn_width=32, attention_head_dim=8, linear_head_dim=8)


def build_module(**optimizer: Any) -> HybridLMModule:
    torch.manual_seed(0)
    return HybridLMModule(MODEL, AdamWCosine(**{"learning_rate": 1e-2, "total_steps": 20, **optimizer}))


def make_batch(seed: int = 0, size: int = 3, length: int = 24) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(MODEL.vocab_size, (size, length + 1), generator=g)
    return {
        "input_ids": tokens[:, :-1],
        "targets": tokens[:, 1:].clone(),
        "document_ids": torch.zeros(size, length, dtype=torch.int32),
    }


def loader(*batches: dict[str, Any]) -> DataLoader[dict[str, Any]]:
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


def make_trainer(**options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


def test_loss_is_the_mean_over_supervised_tokens_and_samples_keep_their_own() -> None:
    module, batch = build_module(), make_batch()
    batch["targets"][0, 4:] = -100
    batch["targets"][1] = -100
    make_trainer(max_steps=1).fit(module, loader(batch))

    fresh = build_module()
    log_probability = F.log_softmax(fresh.model(batch["input_ids"]), dim=-1)
    nats = [
        [-log_probability[b, t, y].item() for t, y in enumerate(row) if y != -100]
        for b, row in enumerate(batch["targets"].tolist())
    ]
    assert module.sample_tokens is not None
    assert module.sample_loss_nats is not None
    assert module.sample_tokens.tolist() == [4, 0, 24]
    assert module.sample_loss_nats[0].item() == pytest.approx(sum(nats[0]) / 4, rel=1e-5)
    assert math.isnan(module.sample_loss_nats[1])
    assert module.sample_loss_nats[2].item() == pytest.approx(sum(nats[2]) / 24, rel=1e-5)
    assert not module.sample_loss_nats.requires_grad
    assert module.trainer.callback_metrics["train/loss_nats"].item() == pytest.approx(
        sum(map(sum, nats)) / 28, rel=1e-5
    )


def test_a_batch_without_supervision_is_nan_and_not_papered_over() -> None:
    module, batch = build_module(), make_batch()
    batch["targets"].fill_(-100)
    make_trainer(max_steps=1).fit(module, loader(batch))
    assert math.isnan(module.trainer.callback_metrics["train/loss_nats"])


def test_untrained_loss_is_near_the_uniform_baseline() -> None:
    nats, tokens = build_module().sample_losses(make_batch())
    assert (nats.sum() / tokens.sum()).item() == pytest.approx(math.log(MODEL.vocab_size), abs=0.05)


def test_validation_is_the_geometric_mean_probability_over_all_batches() -> None:
    module, batches = build_module(), [make_batch(1, size=4), make_batch(2, size=1)]
    batches[0]["targets"][:, 10:] = -100
    make_trainer().validate(module, loader(*batches), verbose=False)
    with torch.no_grad():
        losses = [module.sample_losses(batch) for batch in batches]
    mean = sum(nats.sum().item() for nats, _ in losses) / (4 * 10 + 24)
    metrics = module.trainer.callback_metrics
    assert metrics["val/token_probability"].item() == pytest.approx(math.exp(-mean), rel=1e-5)
    assert metrics["val/loss_nats"].item() == pytest.approx(mean, rel=1e-5)


def test_rate_rises_linearly_then_falls_as_a_cosine_and_stays() -> None:
    optimizer = AdamWCosine(learning_rate=1.0, total_steps=12, warmup_steps=4, final_share=0.1)
    shares = [optimizer.share(step) for step in range(15)]
    assert shares[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert shares[8] == pytest.approx(0.1 + 0.9 * 0.5)
    assert shares[12:] == [pytest.approx(0.1)] * 3
    assert shares[4:12] == sorted(shares[4:12], reverse=True)


def test_rates_of_a_real_run_follow_the_schedule_step_by_step() -> None:
    rates = []

    class Watch(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
            rates.append([group["lr"] for group in optimizer.param_groups])

    module = build_module(warmup_steps=2, total_steps=6)
    make_trainer(max_steps=6, max_epochs=-1, callbacks=[Watch()]).fit(module, loader(make_batch(0), make_batch(1)))
    expected = [1e-2 * module.optimizer_config.share(step) for step in range(6)]
    assert rates == [[pytest.approx(rate)] * 2 for rate in expected]


def test_only_linear_maps_and_embeddings_are_decayed() -> None:
    module = build_module(weight_decay=0.3)
    optimizer = module.configure_optimizers()["optimizer"]
    names = {id(p): name for name, p in module.named_parameters()}
    decayed, rest = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert len(decayed) + len(rest) == len(names) == len({*decayed, *rest})
    assert {name.rsplit(".", 1)[-1] for name in decayed} == {"weight"}
    assert "model.layers.0.mixer.qkv.weight" in decayed
    leaves = {name.split(".", 3)[-1] for name in rest if name.startswith("model.layers.0.")}
    assert leaves == {
        *("mixer_norm.weight", "ffn_norm.weight"),
        *("mixer.conv.weight", "mixer.log_rate", "mixer.decay_bias", "mixer.out_norm.weight"),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0.0"),
        ({"eps": -1e-8}, "eps must be above 0, got -1e-08"),
        ({"total_steps": -1}, "total_steps must be at least 1, got -1; set it when the Trainer has no max_steps"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"final_share": 1.5}, r"final_share must be in \[0, 1\], got 1.5"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
    ],
)
def test_errors_name_the_field_and_the_bound(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        build_module(**change)
