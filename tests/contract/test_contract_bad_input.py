"""Runs that are set up oddly, with the whole suite and ``policy="recover"``: what is said, and that training goes on."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from sentinel_kit import Loader, Net, make_trainer, same_bits, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_sentinel
from lightning_sentinel import default_callbacks
from lightning_sentinel.callbacks.base import DetectorCallback

DATA_SEED = 7


def suite(folder: Path, **options: Any) -> list[L.Callback]:
    return default_callbacks(**{"run_dir": folder / "run", "policy": "recover", **options})


def fit(folder: Path, module: L.LightningModule, *loaders: Any, **options: Any) -> L.Trainer:
    """Ten steps with the whole suite and its real journal."""
    trainer, _ = make_trainer(
        suite(folder), **{"max_steps": 10, "default_root_dir": folder, "logger": CSVLogger(folder / "csv"), **options}
    )
    trainer.fit(module, *loaders)
    return trainer


def events(folder: Path, *names: str) -> list[dict[str, Any]]:
    path = folder / "run" / "journal" / "rank-00000.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if not names or line["event"] in names]


def steps(folder: Path) -> list[int]:
    return [event["step"] for event in events(folder, "step")]


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return found


@pytest.fixture(autouse=True)
def same_start() -> None:
    L.seed_everything(1, verbose=False)


def data(samples: int = 64) -> Loader:
    """Batches of which none is much harder than the first ones."""
    return Loader(samples, seed=DATA_SEED)


class Shapes(Net):
    """``Net`` on tensors, tuples and dicts, whose ``training_step`` may return a dict, a tensor or nothing."""

    def __init__(self, returns: str = "tensor") -> None:
        super().__init__()
        self.returns = returns

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, dict):
            x, y = batch["x"], batch["y"]
        elif isinstance(batch, Tensor):
            x, y = batch[:, :6], batch[:, 6:]
        else:
            x, y = batch
        loss = (self(x) - y).square().mean()
        if self.returns == "none" or (self.returns == "sometimes none" and batch_idx % 2):
            return None
        return {"loss": loss} if self.returns == "dict" else loss


class Shaped(Loader):
    """``Loader`` that gives its batches as dict, tuple or tensor."""

    def __init__(self, kind: str) -> None:
        super().__init__(samples=64, seed=DATA_SEED)
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if self.kind == "dict":
                yield batch
            elif self.kind == "tuple":
                yield batch["x"], batch["y"]
            else:
                yield torch.cat([batch["x"], batch["y"]], dim=1)


# ------------------------------------------------------------------------------------------------------ the set-up


def test_no_logger(tmp_path: Path) -> None:
    fit(tmp_path, Net(), data(), logger=False)
    assert steps(tmp_path) == list(range(10))
    assert summary(tmp_path)["failures"] == []


@pytest.mark.parametrize("batches", [True, 3])
def test_fast_dev_run_trains_and_writes_nothing(tmp_path: Path, batches: Any) -> None:
    trainer = fit(tmp_path, Net(), data(), fast_dev_run=batches)
    assert trainer.global_step == int(batches)
    assert list(tmp_path.iterdir()) == []


def test_limit_train_batches(tmp_path: Path) -> None:
    trainer = fit(tmp_path, Net(), data(), limit_train_batches=4)
    assert steps(tmp_path) == list(range(10))
    assert [event["epoch"] for event in events(tmp_path, "step")] == [0] * 4 + [1] * 4 + [2] * 2
    bare, _ = make_trainer([], max_steps=10, limit_train_batches=4)
    bare.fit(Net(), data())
    assert (trainer.current_epoch, trainer.fit_loop.epoch_progress) == (
        bare.current_epoch,
        bare.fit_loop.epoch_progress,
    )
    assert events(tmp_path, "incident.opened") == []


@pytest.mark.parametrize(
    "options", [{}, {"limit_val_batches": 0}, {"val_check_interval": 3, "num_sanity_val_steps": 2}]
)
def test_with_and_without_validation_inside_the_epoch(tmp_path: Path, options: dict[str, Any]) -> None:
    validated = []

    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            validated.append(self.trainer.global_step)

    loaders = (data(), plain_loader(8)) if options else (data(),)
    fit(tmp_path, Validated() if options else Net(), *loaders, **options)
    assert steps(tmp_path) == list(range(10))
    assert validated == ([0, 0, 3, 3, 6, 6, 9, 9] if "val_check_interval" in options else [])
    assert events(tmp_path, "incident.opened") == []


def test_accumulation(tmp_path: Path) -> None:
    fit(tmp_path, Net(), data(256), accumulate_grad_batches=3)
    lines = events(tmp_path, "step")
    assert [line["step"] for line in lines] == list(range(10))
    assert [line["sample_ids"] for line in lines[:2]] == [[f"s{i}" for i in range(k, k + 12)] for k in (0, 12)]
    assert events(tmp_path, "incident.opened") == []


def test_manual_optimization(tmp_path: Path) -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward((self(batch["x"]) - batch["y"]).square().mean())
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.02)

    fit(tmp_path, Manual(), data())
    assert steps(tmp_path) == list(range(10))
    assert events(tmp_path, "incident.opened") == []


# --------------------------------------------------------------------------------------------- the user's own shapes


@pytest.mark.parametrize("returns", ["tensor", "dict"])
@pytest.mark.parametrize("kind", ["dict", "tuple", "tensor"])
def test_batch_and_result_of_any_kind_change_no_weight(tmp_path: Path, kind: str, returns: str) -> None:
    trained = []
    for name in ("bare", "watched"):
        L.seed_everything(3, verbose=False)
        module = Shapes(returns)
        if name == "bare":
            trainer, _ = make_trainer([], max_steps=10)
            trainer.fit(module, Shaped(kind))
        else:
            fit(tmp_path, module, Shaped(kind))
        trained.append(weights(module))
    assert same_bits(*trained)
    lines = events(tmp_path, "step")
    assert [len(line["sample_ids"]) for line in lines] == [4] * 10
    assert events(tmp_path, "incident.opened") == []


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_training_step_that_returns_nothing_now_and_then(tmp_path: Path) -> None:
    """Lightning counts such a batch as a step without a gradient; nothing of it is called an incident."""
    module = Shapes("sometimes none")
    trainer = fit(tmp_path, module, Shaped("tuple"))
    assert trainer.global_step == 10
    assert events(tmp_path, "incident.opened") == []
    assert steps(tmp_path) == list(range(10))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_training_step_that_never_returns_a_loss(tmp_path: Path) -> None:
    before = weights(module := Shapes("none"))
    trainer = fit(tmp_path, module, Shaped("tuple"))
    assert trainer.global_step == 10
    after = weights(module)
    assert all(torch.equal(before[name], after[name]) for name in before if "norm" not in name)
    assert events(tmp_path, "incident.opened") == []


# ------------------------------------------------------------------------------------------------------------- data


def plain_loader(samples: int = 64) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(samples, 6, generator=generator), torch.zeros(samples, 1)), batch_size=4
    )


def test_loader_without_state_turns_only_rollback_off(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Rollback") as caught:
        trainer = fit(tmp_path, Shapes(), plain_loader(), max_epochs=1)
    ours = [str(w.message) for w in caught if "Rollback" in str(w.message)]
    assert ours == [
        "Rollback is off, training goes on without it. Rollback needs a data loader with `state_dict` and"
        " `load_state_dict`; DataLoader has none. Use torchdata.stateful_dataloader.StatefulDataLoader, or"
        " lightning_sentinel.data.MixtureLoader."
    ]
    assert trainer.global_step == 10
    assert steps(tmp_path) == list(range(10))


def test_loader_without_state_and_a_non_finite_loss_is_skipped(tmp_path: Path) -> None:
    class Broken(Shapes):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 5 else loss

    module = Broken()
    with pytest.warns(UserWarning, match="Rollback is off"):
        fit(tmp_path, module, plain_loader(), max_epochs=1)
    assert all(bool(torch.isfinite(p).all()) for p in module.parameters())
    assert [event["step"] for event in events(tmp_path, "incident.opened")] == [5]
    assert [event["step"] for event in events(tmp_path, "action.skip_step")] == [5]


def test_empty_dataset(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Total length of") as caught:
        trainer = fit(tmp_path, Shapes(), plain_loader(0), max_epochs=1)
    said = {str(w.message) for w in caught if str(w.message).startswith("Total length")}
    expected = "Total length of `{}` across ranks is zero. Please make sure this was your intention."
    assert said == {expected.format("DataLoader"), expected.format("CombinedLoader")}
    assert trainer.global_step == 0
    assert steps(tmp_path) == []
    assert [event["status"] for event in events(tmp_path, "run.ended")] == ["finished"]


def test_two_fits_on_one_trainer(tmp_path: Path) -> None:
    trainer = fit(tmp_path, module := Net(), loader := data(), max_steps=5)
    trainer.fit_loop.epoch_loop.max_steps = 10
    trainer.fit(module, loader)
    assert steps(tmp_path) == list(range(10))
    assert [e["event"] for e in events(tmp_path, "run.started", "run.ended")] == ["run.started", "run.ended"] * 2


# ------------------------------------------------------------------------------------------------------- run folder


def one_warning_about_the_journal(caplog: pytest.LogCaptureFixture, reason: str) -> str:
    (found,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "journal" in r.getMessage()]
    assert f": {reason}. Training goes on without it" in found
    return found


def test_run_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its parent is a file: not even root can write there."""
    (tmp_path / "run").write_text("in the way")
    module = Net()
    trainer = fit(tmp_path, module, data())
    assert trainer.global_step == 10
    found = one_warning_about_the_journal(caplog, "Not a directory")
    assert found == (
        f"The journal cannot open {tmp_path}/run/journal/rank-00000.jsonl: Not a directory. Training goes on without it;"
        " writing is tried again every 5 s. Free space or make the folder writable, or give RunJournal another run_dir."
    )
    journal = trainer.callbacks[0]  # type: ignore[attr-defined]
    assert isinstance(journal, lightning_sentinel.RunJournal)
    assert journal.summary is not None
    failure, *others = journal.summary["failures"]
    cannot_open = re.escape(f"The journal cannot open {tmp_path}/run/journal/rank-00000.jsonl: Not a directory.")
    assert re.fullmatch(rf"{cannot_open} \d+ events could not be written\.", failure)
    assert others == [f"The report cannot be written to {tmp_path}/run: File exists."]
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == [failure, *others]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB for the run folder, where the machine allows to mount one."""
    folder = tmp_path / "run"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("mounting a tmpfs needs root and CAP_SYS_ADMIN")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_run_folder(tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    (small_disk / "ballast").write_bytes(b"\0" * 65536)
    trainer = fit(tmp_path, Net(), data())
    assert trainer.global_step == 10
    one_warning_about_the_journal(caplog, "No space left on device")


def test_read_only_run_folder(tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    trainer = fit(tmp_path, Net(), data())
    assert trainer.global_step == 10
    one_warning_about_the_journal(caplog, "Read-only file system")


# ------------------------------------------------------------------------------------------------------ the callbacks

DETECTORS = [
    name
    for name in lightning_sentinel.__all__
    if isinstance(cls := getattr(lightning_sentinel, name), type) and issubclass(cls, DetectorCallback)
]


@pytest.mark.parametrize("name", DETECTORS)
def test_detector_without_telemetry(name: str) -> None:
    trainer, _ = make_trainer([getattr(lightning_sentinel, name)()])
    with pytest.raises(ValueError, match="needs RankTelemetry") as caught:
        trainer.fit(Net(), data())
    assert str(caught.value) == (
        f"{name} needs RankTelemetry, which gathers the record that it judges; the Trainer has none. Add"
        " lightning_sentinel.RankTelemetry() to the Trainer's callbacks, or use lightning_sentinel.default_callbacks()."
    )


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("SpikeDetector", {"threshold": -8.0}, "Spike: threshold must be greater than 0, found -8.0."),
        ("DivergenceDetector", {"threshold": -1.0}, "Divergence: threshold must be greater than 0, found -1.0."),
        ("RankOutlierDetector", {"threshold": -7.5}, "RankOutlier: threshold must be greater than 0, found -7.5."),
        ("LossScaleMonitor", {"max_consecutive": -1}, "LossScale: max_consecutive must be at least 2, found -1."),
        ("NonFiniteTracer", {"every_n": -1}, "NonFiniteTracer: every_n must be at least 1 or None, found -1."),
        ("Rollback", {"every_n_steps": -25}, "Rollback: every_n_steps must be at least 1 or None, found -25."),
        (
            "ForensicCheckpoint",
            {"every_n_steps": -1},
            "ForensicCheckpoint: every_n_steps must be at least 0, found -1.",
        ),
        (
            "IncidentResponse",
            {"recovered_z": -4.0},
            "IncidentResponse: recovered_z must be greater than 0, found -4.0.",
        ),
        (
            "IncidentResponse",
            {"lr_factor": -0.1},
            "IncidentResponse: lr_factor must be greater than 0 and less than 1, found -0.1.",
        ),
        (
            "RankTelemetry",
            {"update_norm_every_n_steps": -1},
            "RankTelemetry: update_norm_every_n_steps must be at least 0 (0: never), found -1.",
        ),
        (
            "BatchValidator",
            {"vocabulary_size": -1},
            "BatchValidator: vocabulary_size must be at least 1 or None, found -1.",
        ),
        (
            "RunJournal",
            {"step_interval": -1},
            "RunJournal: step_interval must be at least 0 (0: no step lines), found -1.",
        ),
    ],
)
def test_thresholds_of_the_wrong_sign(name: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        getattr(lightning_sentinel, name)(**values)


def test_the_suite_leaves_a_module_of_the_user_alone(tmp_path: Path) -> None:
    """Hooks, wrapped methods and the like are gone after the fit."""
    module = Net()
    before = {name: set(vars(part)) for name, part in module.named_modules()}
    fit(tmp_path, module, data(), logger=False)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in module.modules()]
    assert sum(hooks) == 0
    # Lightning itself caches the hyperparameters that it offers to loggers.
    added = {name: set(vars(part)) - before[name] - {"_hparams"} for name, part in module.named_modules()}
    assert {name: extra for name, extra in added.items() if extra} == {}
    assert isinstance(module.first, nn.Linear)
