"""Each fault alone on the example's model, and nothing tells the suite what was injected: what it finds out by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pretrain
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lightning_sentinel import FaultInjector
from lightning_sentinel.context import context_of
from lightning_sentinel.journal import read_journal
from lightning_sentinel.report.summary import incident_rows, load_run

STEP = 14


@pytest.fixture(autouse=True)
def fresh_hydra() -> Iterator[None]:
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()


def run(run_dir: Path, fault: str) -> Any:
    overrides = [
        *(f"run_dir={run_dir}", "model=tiny", "data=text_tiny", "policy=recover", "logger=none"),
        *(f"faults={fault}", f"faults.{fault}.step={STEP}", "callbacks.fault_injector.journal=false"),
        *("trainer.max_steps=24", "trainer.enable_progress_bar=false", "trainer.limit_val_batches=0"),
        *("callbacks.run_journal.report=false", "callbacks.forensic_checkpoint=null"),
    ]
    with initialize_config_dir(str(pretrain.CONFIGS), version_base="1.3"):
        return pretrain.pretrain(compose("config", overrides))


@pytest.mark.parametrize(
    ("fault", "verdict", "culprits", "actions"),
    [
        ("nan_forward", "numerics", ["module:model.layers.2.mixer"], ["skip_step"]),
        ("nan_backward", "numerics", ["module:model.layers.2.mixer"], ["skip_step"]),
        ("transient_nan", "infrastructure", ["module:model.layers.2", "rank:0"], ["retry_step"]),
        ("no_supervised_tokens", "data", "both samples", ["skip_step"]),
        ("out_of_range_token", "data", "first sample", ["quarantine"]),
        ("cursor_rewind", "data", ["cursor"], ["rollback_replay"]),
    ],
)
def test_fault_that_nobody_announced(
    tmp_path: Path, fault: str, verdict: str, culprits: list[str] | str, actions: list[str]
) -> None:
    trainer = run(tmp_path, fault)
    (injector,) = (c for c in trainer.callbacks if isinstance(c, FaultInjector))
    assert injector.fired[fault] >= 1
    events = read_journal(tmp_path)
    assert [e for e in events if e["event"] == "fault.injected"] == []
    if isinstance(culprits, str):
        step = next(e for e in events if e["event"] == "step" and e["step"] == STEP)
        ids = [f"sample:{name}" for name in step["sample_ids"]]
        culprits = ids if culprits == "both samples" else ids[:1]
    (row,) = incident_rows(load_run(tmp_path))
    assert (row["opened_step"], row["verdict"], row["culprits"]) == (STEP, verdict, culprits)
    assert row["actions"] == actions
    quarantined = [name for e in events if e["event"] == "quarantine.added" for name in e["names"]]
    assert sorted(quarantined) == sorted(culprits if culprits[0].startswith("sample:") else [])
    assert trainer.global_step == 24
    assert context_of(trainer).attempt == int(actions[0] in ("retry_step", "rollback_replay"))
