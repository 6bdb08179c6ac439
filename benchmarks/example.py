"""What the example's model costs: a training step of each size, and Gated DeltaNet beside attention.

    <model>_<n>t_ms              forward, backward and AdamW of one step at n threads, milliseconds
    <model>_2t_over_1t           the step at 2 threads / at 1 thread
    delta_over_attention_<n>t    forward and backward of a Gated DeltaNet layer / of an attention layer of the same width,
                                 4 sequences of 256 tokens, at n threads

Run it with ``python benchmarks/example.py [--rounds 15] [--json FILE] [--check]``. All pieces of work are measured in
turns, so that what else the machine does slows all of them alike; the median of the three fastest rounds counts, in wall
time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bounds import add_check, verdict
from omegaconf import OmegaConf
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from hybrid_lm.model import HybridLM, HybridLMConfig, Layout  # noqa: E402  # the examples are no installed package

MOST = {"delta_over_attention_1t": 2.0}

# Sequences and tokens of a step, as in the configurations' own words.
SHAPES = {"micro": (4, 64), "tiny": (4, 64), "small": (4, 256)}


def named_config(name: str) -> HybridLMConfig:
    """A model of ``configs/model``."""
    node = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / "model" / f"{name}.yaml"))
    assert isinstance(node, dict)
    return HybridLMConfig(**{key: value for key, value in node.items() if key != "_target_"})


def documents(sequences: int, length: int) -> Tensor:
    """Two packed documents in each sequence, ``[sequences, length]``."""
    row = (torch.arange(length) >= length // 3).int()
    return row.expand(sequences, -1)


def training_pass(module: nn.Module, *args: Any) -> Callable[[], None]:
    """Forward and backward."""

    def run() -> None:
        out = module(*args)
        torch.autograd.backward(out, torch.ones_like(out))
        module.zero_grad()

    return run


def training_step(name: str) -> Callable[[], None]:
    """Forward, loss, backward and update of a model of ``configs/model``."""
    config = named_config(name)
    torch.manual_seed(0)
    model = HybridLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(config.vocab_size, SHAPES[name])
    packed = documents(*SHAPES[name])

    def run() -> None:
        optimizer.zero_grad()
        logits = model(ids, packed)
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()

    return run


def layers() -> tuple[Callable[[], None], Callable[[], None]]:
    """A Gated DeltaNet layer and an attention layer of the small model."""
    config = named_config("small")
    torch.manual_seed(0)
    model = HybridLM(config)
    x = torch.randn(4, 256, config.width)
    layout = Layout.of(documents(4, 256), config, torch.float32)
    delta, attention = (training_pass(model.layers[i].mixer, x, layout) for i in (0, config.attention_every - 1))
    return delta, attention


def fastest(work: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds of each piece of work: the median of the three fastest rounds, all taken in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for do in work.values():
        do()
    for _ in range(rounds):
        for name, do in work.items():
            start = time.perf_counter()
            do()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(sorted(times)[:3]) for name, times in seconds.items()}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=15, help="measurements of each piece of work")
    arguments.add_argument("--json", type=Path, help="write the numbers to this file too")
    add_check(arguments)
    options = arguments.parse_args()
    result: dict[str, float] = {}
    delta, attention = layers()
    work = {name: training_step(name) for name in SHAPES} | {"delta": delta, "attention": attention}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        seconds = fastest(work, options.rounds)
        result |= {f"{name}_{threads}t_ms": 1e3 * seconds[name] for name in SHAPES}
        result[f"delta_over_attention_{threads}t"] = seconds["delta"] / seconds["attention"]
    result |= {f"{name}_2t_over_1t": result[f"{name}_2t_ms"] / result[f"{name}_1t_ms"] for name in SHAPES}
    for name, value in result.items():
        print(f"{name:25s} {value:8.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    return verdict(result, MOST, options.check)


if __name__ == "__main__":
    sys.exit(main())
