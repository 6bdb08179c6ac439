"""What a step asks of the device and of the other ranks, whatever the number of parameters."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from sentinel_kit import Loader, make_trainer, run_ranks
from torch import Tensor, nn

from lightning_sentinel import default_callbacks
from lightning_sentinel.state import tree

HERE = Path(__file__).parent
LOOKS = range(25, 60, 25)  # steps at which replicas are compared


@pytest.mark.distributed
def test_one_small_gather_a_step_and_nothing_else_between_ranks(tmp_path: Path) -> None:
    run_ranks(HERE / "performance_two_ranks.py", tmp_path)
    for rank in range(2):
        calls = {int(s): c for s, c in json.loads((tmp_path / f"{rank}.json").read_text()).items()}
        usual = [s for s in range(1, 59) if s not in LOOKS and s != 50]  # at 50 lies a snapshot, at 59 the end
        assert [calls[s] for s in usual] == [{"gather_flat": 1}] * len(usual)
        assert [calls[s]["gather_flat"] for s in LOOKS] == [2, 2]


class Many(L.LightningModule):
    """One layer with so many parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.shifts = nn.ParameterList(torch.zeros(4) for _ in range(count))
        self.layer = nn.Linear(6, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.layer(batch["x"])
        for shift in self.shifts:
            out = out + 0.0 * shift  # the same losses, however many there are
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)


class Calls(L.Callback):
    """Calls of the suite's own Python functions in steps 30 to 39."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 30:
            sys.setprofile(self._profile)
        elif trainer.global_step == 40:
            sys.setprofile(None)

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "lightning_sentinel/" in frame.f_code.co_filename:
            self.found[frame.f_code.co_qualname] += 1


def test_no_call_of_a_step_is_made_for_each_parameter(tmp_path: Path) -> None:
    found = {}
    for count in (3, 60):
        torch.manual_seed(0)
        calls = Calls()
        suite = default_callbacks(tmp_path / str(count))
        trainer, _ = make_trainer([calls, *suite], max_steps=42, gradient_clip_val=1.0)
        try:
            trainer.fit(Many(count), Loader(64))
        finally:
            sys.setprofile(None)
        # Lines are written when a second is over, not at given steps.
        found[count] = {name: n for name, n in calls.found.items() if n >= 10 and not _writes(name)}
    assert found[3]["RankTelemetry.on_before_optimizer_step"] == 10
    assert found[60] == found[3]


def _writes(name: str) -> bool:
    return name.split(".")[0] in (
        "Journal",
        "_plain",
        "_encoded",
        "_header",
        "to_json",
        "step_fields",
        "_one_rank",
        "redact",
    )


class Streams:
    """Stands in for a device's module: notes what is asked of its streams, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def Stream(self, device: torch.device) -> Any:  # noqa: N802
        self.log.append("side stream made")
        return Side(self.log)

    def current_stream(self, device: torch.device) -> str:
        return "current"

    def stream(self, side: Any) -> Any:
        return side

    def synchronize(self, device: torch.device) -> None:
        self.log.append("everything waited for")


class Side:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def wait_stream(self, other: str) -> None:
        self.log.append(f"waits for {other}")

    def synchronize(self) -> None:
        self.log.append("waited for")

    def __enter__(self) -> None:
        self.log.append("in")

    def __exit__(self, *args: Any) -> None:
        self.log.append("out")


def test_copies_to_the_host_run_beside_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream of their own, behind what computes the values; that stream alone is waited for."""
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    monkeypatch.setattr(tree, "_SIDE_STREAMS", {})
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda *a, non_blocking: streams.log.append(f"copied, {non_blocking=}")
    )
    for _ in range(2):
        copies = tree.HostCopies()
        copies.tensor(torch.empty(3, device="meta"))
        copies._sources = [_Elsewhere()]  # type: ignore[list-item]
        copies.run()
    step = ["waits for current", "in", "copied, non_blocking=True", "out", "waited for"]
    assert streams.log == ["side stream made", *step, *step]


class _Elsewhere:
    device = torch.device("cuda:0")
