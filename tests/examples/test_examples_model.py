"""The hybrid model: its layers against transformers', its documents, its sizes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_lm.model import Attention, GatedDeltaNet, HybridLM, HybridLMConfig, Layout
from omegaconf import OmegaConf
from torch import Tensor, nn

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def named_config(name: str) -> HybridLMConfig:
    """A model of ``configs/model``."""
    node = OmegaConf.to_container(OmegaConf.load(CONFIGS / "model" / f"{name}.yaml"))
    assert isinstance(node, dict)
    assert node.pop("_target_") == "hybrid_lm.model.HybridLMConfig"
    return HybridLMConfig(**node)


TINY = named_config("tiny")
GROUPED = replace(
    TINY,
    attention_heads=4,
    attention_head_dim=16,
    rotary_fraction=0.25,
    linear_value_heads=4,
    linear_head_dim=8,
)


def documents(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().unsqueeze(0)


def build(config: HybridLMConfig, std: float = 0.3) -> HybridLM:
    """A model whose layers do something: with the initial weights of training, what they add is close to nothing."""
    torch.manual_seed(0)
    return HybridLM(replace(config, init_std=std))


# ---------------------------------------------------------------------------------------------- structure


def test_every_fourth_layer_is_attention_and_has_the_agreed_parts() -> None:
    model = build(TINY)
    assert [type(layer.mixer) for layer in model.layers] == [GatedDeltaNet] * 3 + [Attention]
    assert isinstance(model.layers, nn.ModuleList)
    for layer in model.layers:
        assert [name for name, _ in layer.named_children()] == ["mixer_norm", "mixer", "ffn_norm", "ffn"]


def test_residual_stream_is_not_normalised() -> None:
    """A block hands on its input plus what its sublayers add, so an input of any size passes through."""
    model = build(TINY)
    x = 1e4 * torch.randn(1, 24, TINY.width)
    layout = Layout.of(documents(24), TINY, torch.float32)
    for block in model.layers:
        assert torch.linalg.norm(block(x, layout) - x) < 0.01 * torch.linalg.norm(x)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_tied_on_request(tied: bool) -> None:
    model = build(replace(TINY, tie_embeddings=tied))
    assert (model.head.weight is model.embedding.weight) is tied
    untied = sum(p.numel() for p in build(TINY).parameters())
    assert sum(p.numel() for p in model.parameters()) == untied - tied * TINY.vocab_size * TINY.width


def reference_parameters() -> int:
    """Parameters of ``reference_64l``, counted by hand."""
    width, ffn, vocabulary = 5120, 17408, 248_320
    norms_and_ffn = 2 * width + 3 * width * ffn
    keys, values, heads = 16 * 128, 48 * 128, 48
    delta = (
        width * (2 * keys + values)  # query, key, value
        + width * values  # output gate
        + 2 * width * heads  # beta and decay
        + 4 * (2 * keys + values)  # taps of the short convolution
        + 2 * heads  # rate and bias of the decay
        + 128  # norm of a head's output
        + values * width  # out
    )
    queries, kv = 24 * 256, 4 * 256
    attention = 2 * width * queries + 2 * width * kv + 2 * 256 + queries * width
    return 2 * vocabulary * width + width + 64 * norms_and_ffn + 48 * delta + 16 * attention


def test_reference_shape_on_the_meta_device() -> None:
    config = named_config("reference_64l")
    with torch.device("meta"):
        model = HybridLM(config)
    mixers = [type(layer.mixer) for layer in model.layers]
    assert len(mixers) == 64
    assert mixers.count(GatedDeltaNet) == 48
    assert mixers.count(Attention) == 16
    assert mixers[3::4] == [Attention] * 16
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == reference_parameters() == 26_895_998_464
    first = model.layers[0].mixer
    assert (config.width, config.ffn_width, config.vocab_size) == (5120, 17408, 248_320)
    assert (first.conv.weight.shape[0], first.head_dim) == (4, 128)
    ids = torch.zeros(1, 128, dtype=torch.int64, device="meta")
    assert model(ids).shape == (1, 128, 248_320)


# ---------------------------------------------------------------------------------------------- against transformers


@pytest.fixture(scope="module")
def qwen() -> Any:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")


def qwen_config(qwen: Any, config: HybridLMConfig) -> Any:
    return qwen.Qwen3_5TextConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.ffn_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.attention_heads,
        num_key_value_heads=config.attention_kv_heads,
        head_dim=config.attention_head_dim,
        linear_num_key_heads=config.linear_key_heads,
        linear_num_value_heads=config.linear_value_heads,
        linear_key_head_dim=config.linear_head_dim,
        linear_value_head_dim=config.linear_head_dim,
        linear_conv_kernel_dim=config.conv_size,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        attn_implementation="eager",
    )


def copy(source: Tensor, target: Tensor) -> None:
    assert source.shape == target.shape
    with torch.no_grad():
        target.copy_(source)


@pytest.mark.parametrize("config", [TINY, GROUPED], ids=["plain heads", "grouped heads"])
def test_gated_delta_net_layer_equals_transformers(qwen: Any, config: HybridLMConfig) -> None:
    ours = build(config).layers[0].mixer
    theirs = qwen.Qwen3_5GatedDeltaNet(qwen_config(qwen, config), 0)
    copy(ours.qkv.weight, theirs.in_proj_qkv.weight)
    copy(ours.gate.weight, theirs.in_proj_z.weight)
    copy(ours.beta.weight, theirs.in_proj_b.weight)
    copy(ours.decay.weight, theirs.in_proj_a.weight)
    copy(ours.conv.weight.flip(0).t().unsqueeze(1), theirs.conv1d.weight)
    copy(ours.log_rate, theirs.A_log)
    copy(ours.decay_bias, theirs.dt_bias)
    copy(ours.out_norm.weight, theirs.norm.weight)
    copy(ours.out.weight, theirs.out_proj.weight)
    x = torch.randn(2, 50, config.width)
    layout = Layout.of(torch.zeros(2, 50, dtype=torch.int32), config, torch.float32)
    torch.testing.assert_close(ours(x, layout), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [TINY, GROUPED], ids=["plain heads", "grouped heads"])
def test_attention_layer_equals_transformers(qwen: Any, config: HybridLMConfig) -> None:
    ours = build(config).layers[3].mixer
    theirs = qwen.Qwen3_5Attention(qwen_config(qwen, config), 3)
    by_head = [w.weight.unflatten(0, (config.attention_heads, -1)) for w in (ours.query, ours.gate)]
    copy(torch.cat(by_head, dim=1).flatten(0, 1), theirs.q_proj.weight)
    copy(ours.key.weight, theirs.k_proj.weight)
    copy(ours.value.weight, theirs.v_proj.weight)
    copy(ours.query_norm.weight - 1, theirs.q_norm.weight)  # theirs is centred at zero
    copy(ours.key_norm.weight - 1, theirs.k_norm.weight)
    copy(ours.out.weight, theirs.o_proj.weight)
    x = torch.randn(2, 50, config.width)
    layout = Layout.of(torch.zeros(2, 50, dtype=torch.int32), config, torch.float32)
    positions = tuple(angle.expand(2, -1, -1) for angle in layout.rotary)
    causal = torch.full((50, 50), -torch.inf).triu(1).expand(2, 1, -1, -1)
    expected, _ = theirs(x, positions, causal)
    torch.testing.assert_close(ours(x, layout), expected, rtol=1e-5, atol=1e-5)


def test_reference_shape_has_the_parameters_of_the_published_architecture(qwen: Any) -> None:
    with torch.device("meta"):
        theirs = qwen.Qwen3_5ForCausalLM(qwen_config(qwen, named_config("reference_64l")))
    assert sum(p.numel() for p in theirs.parameters()) == reference_parameters()


# ---------------------------------------------------------------------------------------------- documents and time


@pytest.mark.parametrize("config", [TINY, GROUPED], ids=["plain heads", "grouped heads"])
def test_each_document_of_a_packed_sequence_is_as_if_alone(config: HybridLMConfig) -> None:
    model = build(config)
    lengths = (5, 1, 40, 2, 33)
    ids = torch.randint(config.vocab_size, (1, sum(lengths)))
    packed = model(ids, documents(*lengths))
    start = 0
    for length in lengths:
        alone = model(ids[:, start : start + length])
        torch.testing.assert_close(packed[:, start : start + length], alone, rtol=1e-4, atol=1e-4)
        start += length


def test_only_earlier_tokens_of_the_same_document_are_seen() -> None:
    model = build(TINY).double()  # rounding stays far below the smallest real influence
    ids = torch.randint(TINY.vocab_size, (1, 60))
    with torch.no_grad():
        before = model(ids, documents(25, 35))
        for changed in (10, 24, 25, 41):
            other = ids.clone()
            other[0, changed] = (other[0, changed] + 1) % TINY.vocab_size
            moved = (model(other, documents(25, 35)) - before).abs().amax(-1)[0] > 1e-10
            end = 25 if changed < 25 else 60
            assert moved.tolist() == [changed <= t < end for t in range(60)], changed


def test_without_document_ids_a_sequence_is_one_document() -> None:
    model = build(TINY)
    ids = torch.randint(TINY.vocab_size, (2, 40))
    assert torch.equal(model(ids), model(ids, torch.zeros(2, 40, dtype=torch.int32)))


# ---------------------------------------------------------------------------------------------- precision


def test_float64_stays_float64() -> None:
    """A replay in a wider type is worth nothing if a norm narrows it on the way."""
    model = build(TINY)
    ids = torch.randint(TINY.vocab_size, (1, 40))
    narrow = model(ids)
    wide = model.double()(ids)
    assert wide.dtype == torch.float64
    difference = (wide - narrow).abs().max()
    assert 0 < difference < 1e-4
    half_way = wide.float().double()
    assert (half_way - wide).abs().max() > 0  # it is not a float32 result in float64 clothes


def test_half_precision_keeps_the_rule_and_the_stream_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid_lm import model as model_module

    seen = []
    chunked = model_module.chunked

    def spy(*inputs: Any) -> Tensor:
        seen.extend(x.dtype for x in inputs[:5])
        return chunked(*inputs)

    monkeypatch.setattr(model_module, "chunked", spy)
    model = build(TINY, std=0.02)
    stream = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, out: stream.append(out.dtype))
    ids = torch.randint(TINY.vocab_size, (1, 40))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids)
    assert set(seen) == {torch.float32}
    assert set(stream) == {torch.float32}
    assert logits.dtype == torch.float16
    torch.testing.assert_close(logits.float(), model(ids), rtol=0.02, atol=0.02)


# ---------------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "width must be a whole number of at least 1, got 0"),
        ({"layers": 2.5}, "layers must be a whole number of at least 1, got 2.5"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number of at least 1, got 'many'"),
        ({"attention_heads": 3, "attention_kv_heads": 2}, "attention_heads must be a multiple of attention_kv_heads=2"),
        ({"linear_value_heads": 3}, "linear_value_heads must be a multiple of linear_key_heads=2, got 3"),
        ({"norm_eps": 0.0}, "norm_eps must be above 0, got 0.0"),
        ({"init_std": -1.0}, "init_std must be above 0, got -1.0"),
        ({"rotary_fraction": 1.5}, r"rotary_fraction must be in \[0, 1\], got 1.5"),
        ({"attention_head_dim": 6}, "rotary_fraction must leave an even number of rotary dimensions, got 0.5 x"),
    ],
)
def test_errors_name_the_field_and_the_bound(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        replace(TINY, **change)
