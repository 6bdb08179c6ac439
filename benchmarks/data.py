"""What checking a batch and setting up the example's data cost, as ratios measured in one run.

    check_ms            time of one check of a healthy batch by BatchValidator, in milliseconds
    check_ratio         the same / time of a plain pass over its tokens and targets (smallest and largest of each)
    setup_seconds       processor time of setting up the example's data, the first time in a process
    setup_ratio         the same / processor time of reading and joining the same files' lines

Run it with ``python benchmarks/data.py [--repeat 200] [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_sentinel import BatchValidator

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from hybrid_lm.corpus import collect, library_files
from hybrid_lm.datamodule import TextMixtureDataModule


def healthy_batch(number: int) -> dict[str, Any]:
    """Eight sequences of 256 tokens, as the example's loader gives them."""
    return {
        "input_ids": torch.randint(0, 257, (8, 256)),
        "targets": torch.randint(0, 257, (8, 256)),
        "document_ids": torch.zeros(8, 256, dtype=torch.int32),
        "sample_id": [f"prose/3fa9c1d2e0/{number * 8 + i}" for i in range(8)],
    }


def least(calls: list[Callable[[], Any]]) -> float:
    """Shortest time of the calls in seconds; the least of many is little moved by a busy machine."""
    times = []
    for call in calls:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure_check(repeat: int) -> dict[str, float]:
    validator = BatchValidator(257)
    batches = [healthy_batch(n) for n in range(repeat)]

    def check(number: int, batch: dict[str, Any]) -> None:
        findings = validator.check(batch, step=number)
        if findings:
            raise RuntimeError(f"a healthy batch gave {findings}; the time of something else was measured")

    def plain(batch: dict[str, Any]) -> list[tuple[int, int]]:
        return [(int(t.min()), int(t.max())) for t in (batch["input_ids"], batch["targets"])]

    mine = least([lambda n=n, b=b: check(n, b) for n, b in enumerate(batches)])  # type: ignore[misc]
    base = least([lambda b=b: plain(b) for b in batches])  # type: ignore[misc]
    return {"check_ms": mine * 1e3, "check_ratio": mine / base}


def measure_setup() -> dict[str, float]:
    files = library_files()
    begin = time.process_time()
    read = b"".join(b"".join(file.read_bytes().splitlines(keepends=True)) for file in files)
    base = time.process_time() - begin
    collect.cache_clear()
    begin = time.process_time()
    TextMixtureDataModule().setup("fit")
    mine = time.process_time() - begin
    return {"setup_seconds": mine, "setup_ratio": mine / base, "library_mb": len(read) / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=200, help="batches that are checked")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    result = measure_check(options.repeat) | measure_setup()
    for name, value in result.items():
        print(f"{name:20} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
