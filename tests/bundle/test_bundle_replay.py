"""Bundles of runs without Hydra: what is captured, what is fetched again, what comes out, and what is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from bundle_world import BROKEN, Data, Net, Samples, collate, fit, suite
from sentinel_kit import run_ranks
from torch import Tensor

import lightning_sentinel
from lightning_sentinel.bundle.reading import Bundle, BundleError
from lightning_sentinel.bundle.rebuild import RebuildError
from lightning_sentinel.bundle.replay import AS_RUN
from lightning_sentinel.bundle.verdict import verdict_of
from lightning_sentinel.checkpoint.atomic import Disk
from lightning_sentinel.journal import read_journal


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [e for e in read_journal(run_dir) if e["event"] == name]


def test_a_healthy_step_is_equal_to_the_bit_with_dropout_buffers_and_accumulation(tmp_path: Path) -> None:
    fit(suite(tmp_path, 8), data=Data(Samples(broken=False)))
    report = lightning_sentinel.replay_incident(tmp_path, 1, Net(), Data(Samples(broken=False)))
    (row,) = report.ranks
    assert (report.reproduced, row.equal, row.batch, row.batch_equal) == (True, True, "fetched", True)
    step = next(e for e in events(tmp_path, "step") if e["step"] == 8)
    assert row.samples == [step["sample_ids"][:4], step["sample_ids"][4:]]
    assert sum(row.recorded) / 2 == pytest.approx(step["loss"], rel=1e-6)
    assert row.computed[0].bits == tuple(row.recorded_bits)
    assert row.computed[0].grad_norm == pytest.approx(step["grad_norm"], rel=1e-5)
    assert report.notes == []
    # Sorted by what they carry, and their mean is the loss.
    worst = [loss for _, loss in row.worst_samples]
    assert worst == sorted(worst, reverse=True)
    wide = lightning_sentinel.replay_incident(tmp_path, 1, Net(), Data(Samples(broken=False)), dtype="float64")
    (in_run, in_64) = wide.ranks[0].computed
    assert (in_run.dtype, in_64.dtype) == (AS_RUN, "float64")
    assert in_64.losses == pytest.approx(in_run.losses, rel=1e-5)
    assert in_64.losses != in_run.losses


def test_a_replay_leaves_this_process_as_it_was(tmp_path: Path) -> None:
    fit(suite(tmp_path, 3, capture_batch=True), data=Data(Samples(broken=False)))
    module = Net()
    torch.manual_seed(11)
    before = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype(), list(sys.path)
    assert lightning_sentinel.replay_incident(tmp_path, 1, module, dtype="float64").reproduced
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_num_threads(), torch.get_default_dtype(), list(sys.path)) == before[1:]


def test_a_broken_sample_is_named_and_a_repaired_one_is_another_batch(tmp_path: Path) -> None:
    fit(suite(tmp_path))
    bundle = Bundle.open(tmp_path, 1)
    assert BROKEN in range(bundle.step * 8, bundle.step * 8 + 8)
    report = lightning_sentinel.replay_incident(tmp_path, 1, Net(), Data())
    (row,) = report.ranks
    first = row.computed[0].first
    assert (report.outcome, row.equal, row.batch_equal) == ("reproduced", True, True)
    assert first is not None
    assert (first["kind"], first["operator"], first["samples"]) == ("batch", "x", [f"s{BROKEN}"])
    assert (report.verdict.kind, report.verdict.culprits) == ("data", (f"sample:s{BROKEN}",))
    assert report.agrees is None  # the run was told not to examine
    repaired = lightning_sentinel.replay_incident(tmp_path, 1, Net(), Data(Samples(broken=False)))
    assert (repaired.outcome, repaired.ranks[0].batch_equal) == ("not reproduced", False)
    assert (repaired.verdict.kind, repaired.verdict.culprits) == ("undetermined", ())
    assert "are not what the step was computed from" in repaired.verdict.sentence
    assert "are not what the step was computed from" in repaired.notes[0]


def test_a_fault_of_a_module_and_one_that_does_not_come_again_have_verdicts_of_their_own(tmp_path: Path) -> None:
    class Zero(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / torch.zeros_like(x) if self.strikes else x

        strikes = False

    class Faulty(Net):
        def __init__(self, *steps: int) -> None:
            super().__init__()
            self.drop, self.steps = Zero(), steps

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.drop.strikes = self.trainer.global_step in self.steps
            return super().training_step(batch, batch_idx)

    fit(suite(tmp_path, capture_batch=True, triage=True), Faulty(4), data=Data(Samples(broken=False)))
    again = lightning_sentinel.replay_incident(tmp_path, 1, Faulty(4))
    assert (again.outcome, again.verdict.kind, again.verdict.culprits) == ("reproduced", "numerics", ("module:drop",))
    assert again.verdict.sentence == "the first non-finite value is made there."
    assert (again.recorded_verdict, again.agrees) == ("numerics module:drop", True)
    # A model that does not do it again stands for hardware that did it once: nothing in the bundle explains it.
    once = lightning_sentinel.replay_incident(tmp_path, 1, Faulty())
    assert (once.outcome, once.verdict.kind, once.verdict.culprits) == ("not reproduced", "infrastructure", ("rank:0",))
    assert (once.verdict.reproducible, once.agrees) == (False, False)
    assert "transient, or state outside of them" in once.verdict.sentence
    once.ranks[0].recorded_finite = True  # only the gradient was not finite, on a rank that is not told
    one = verdict_of(once, [], nonfinite_recorded=True, doubts=[])
    assert (one.kind, one.culprits) == ("undetermined", ())
    doubtful = verdict_of(once, [], nonfinite_recorded=True, doubts=["The weights are older."])
    assert doubtful.sentence == "not reproduced, but the replay may differ from the step: The weights are older."


def test_what_cannot_be_fetched_again_is_said_with_what_to_do(tmp_path: Path) -> None:
    fit(suite(tmp_path))

    class Fewer(Data):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([self.samples[i] for i in range(8)], batch_size=4, collate_fn=collate)

    with pytest.raises(ValueError, match=r"sample:s16, sample:s17, sample:s18 and 1 more cannot be fetched again: the"):
        lightning_sentinel.replay_incident(tmp_path, 1, Net(), Fewer())

    class Endless(Data):
        def train_dataloader(self) -> Any:
            return [collate([self.samples[0]])]

    with pytest.raises(
        ValueError, match=r"list offers neither fetch\(ids\) nor a map-style data set. Give the datamodule"
    ):
        lightning_sentinel.replay_incident(tmp_path, 1, Net(), Endless())

    class Asked(Data):
        def fetch_samples(self, ids: list[str]) -> Any:
            return collate([self.samples[int(i[1:])] for i in ids])

        def train_dataloader(self) -> Any:
            return [collate([self.samples[0]])]

    assert lightning_sentinel.replay_incident(tmp_path, 1, Net(), Asked()).reproduced
    with pytest.raises(ValueError, match="there is no data module to fetch them from"):
        lightning_sentinel.replay_incident(tmp_path, 1, Net())
    with pytest.raises(RebuildError, match="The bundle holds no configuration"):
        lightning_sentinel.replay_incident(tmp_path, 1)


def test_another_model_is_refused_by_its_names_and_shapes(tmp_path: Path) -> None:
    fit(suite(tmp_path, 1, capture_batch=True), data=Data(Samples(broken=False)))

    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.more = torch.nn.Linear(16, 2), torch.nn.Linear(1, 1)

    with pytest.raises(
        BundleError, match=r"it has more.bias, more.weight beside them; last.weight is \[2, 16\], recorded"
    ):
        lightning_sentinel.replay_incident(tmp_path, 1, Wider())


def test_a_loss_that_depends_on_the_step_is_computed_at_that_step(tmp_path: Path) -> None:
    class Ramp(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (1 + self.trainer.global_step) + self.trainer.current_epoch

    fit(suite(tmp_path, 8, capture_batch=True), Ramp(), data=Data(Samples(broken=False)))
    assert lightning_sentinel.replay_incident(tmp_path, 1, Ramp()).reproduced


def test_manual_optimization(tmp_path: Path) -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()

    fit(suite(tmp_path, 5), Manual(), data=Data(Samples(broken=False)), accumulate_grad_batches=1)
    assert lightning_sentinel.replay_incident(tmp_path, 1, Manual(), Data(Samples(broken=False))).reproduced


def test_one_module_alone_shows_a_finite_wrong_backward(tmp_path: Path) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.tanh()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            # right in float64, and a wrong kernel in float32
            return grad * (1 - x.tanh().square()) * (1.0 if x.dtype is torch.float64 else 1.3)

    class Kernel(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Wrong.apply(x)

    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.drop = Kernel()

    fit(suite(tmp_path, 2, capture_batch=True), Odd(), data=Data(Samples(broken=False)))
    report = lightning_sentinel.replay_incident(tmp_path, 1, Odd(), module="drop")
    check = report.module
    assert check is not None
    run = check.by_dtype[0]
    assert run.output_error < 1e-6
    assert run.gradient_error == pytest.approx(0.3, abs=1e-3)
    assert "its gradient is 0.3 of its size away from float64" in check.sentence
    assert (report.verdict.kind, report.verdict.culprits) == ("numerics", ("module:drop",))
    other = lightning_sentinel.replay_incident(tmp_path, 1, Odd(), module="first")
    assert (other.verdict.kind, other.verdict.culprits, other.verdict.reproducible) == ("undetermined", (), True)
    healthy = other.module
    assert healthy is not None
    assert "finite, and within" in healthy.sentence


def test_a_module_under_autocast_is_not_blamed_for_its_16_bits(tmp_path: Path) -> None:
    fit(suite(tmp_path, 2, capture_batch=True), data=Data(Samples(broken=False)), precision="bf16-mixed")
    report = lightning_sentinel.replay_incident(tmp_path, 1, Net(), module="first")
    assert report.module is not None
    assert report.module.precision == "bf16-mixed"
    # Far beyond what a thousand units in the last place of its inputs' float32 would explain.
    assert 1e-3 < report.module.by_dtype[0].output_error < 1e-2
    assert "finite, and within" in report.module.sentence
    assert (report.verdict.kind, report.verdict.culprits) == ("undetermined", ())


# ------------------------------------------------------------------------------------------------- what is not captured


class Patient(L.Callback):
    """Waits in step 4 until its checkpoint is published."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        deadline = time.monotonic() + 120
        while trainer.global_step == 4 and not list((self.run_dir / "checkpoints").glob("step-*")):
            assert time.monotonic() < deadline, "the checkpoint of step 4 was not published"
            time.sleep(0.01)


def test_without_weights_the_checkpoint_that_is_named_stands_in(tmp_path: Path) -> None:
    callbacks = suite(tmp_path, 4, 7, capture_state=False, capture_batch=True, probation_steps=2)
    keeper = lightning_sentinel.ForensicCheckpoint(every_n_steps=4, keep=5)
    fit([Patient(tmp_path), *callbacks, keeper], data=Data(Samples(broken=False)))
    first, second = (Bundle.open(tmp_path, n) for n in (1, 2))
    assert not first.has_state
    assert first.run["state"]["checkpoint"]["step"] == 4
    # Saved right before the step that the first incident is about: the very weights.
    assert lightning_sentinel.replay_incident(tmp_path, 1, Net()).reproduced
    assert second.run["state"]["checkpoint"]["step"] == 4
    older = lightning_sentinel.replay_incident(tmp_path, 2, Net())
    assert older.notes[0].endswith("these are of the checkpoint of step 4, 3 steps older than the incident's.")
    assert not older.reproduced
    for folder in (tmp_path / "checkpoints").iterdir():
        folder.rename(tmp_path / f"gone-{folder.name}")
    with pytest.raises(BundleError, match=r"holds no weights and refers to .* which is gone"):
        lightning_sentinel.replay_incident(tmp_path, 2, Net())


class Moved(L.Callback):
    """By how much of its size each parameter moved in step 4, in the run."""

    def __init__(self) -> None:
        self.sizes: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 4:
            self.before = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5 and not self.sizes:
            for name, p in pl_module.named_parameters():
                moved, size = p.detach().double() - self.before[name].double(), self.before[name].double()
                self.sizes[name] = float(moved.square().mean().sqrt() / size.square().mean().sqrt())


def test_the_update_of_the_step_is_that_of_the_run(tmp_path: Path) -> None:
    moved = Moved()
    callbacks = suite(tmp_path, 4, 7, capture_batch=True, probation_steps=2)
    keeper = lightning_sentinel.ForensicCheckpoint(every_n_steps=4, keep=5)
    fit([Patient(tmp_path), moved, *callbacks, keeper], data=Data(Samples(broken=False)), gradient_clip_val=0.5)
    replayed = lightning_sentinel.replay_incident(tmp_path, 1, Net(), update=True)
    assert replayed.reproduced
    update = replayed.update
    assert update is not None
    assert (update.available, update.checkpoint_step, update.behind, update.finite) == (True, 4, 0, True)
    assert update.clipped_from is not None
    assert update.clipped_from > 0.5
    assert dict(update.largest) == pytest.approx(
        {n: s for n, s in moved.sizes.items() if n in dict(update.largest)}, rel=1e-4
    )
    assert update.largest[0][1] == pytest.approx(max(moved.sizes.values()), rel=1e-4)
    assert update.sentence.startswith("With the optimizer state of the checkpoint of step 4 (the step's own) and")
    assert replayed.sentence.endswith(update.sentence)
    older = lightning_sentinel.replay_incident(tmp_path, 2, Net(), update=True).update
    assert older is not None
    assert (older.behind, older.finite) == (3, True)
    assert "(3 steps older)" in older.sentence
    assert lightning_sentinel.replay_incident(tmp_path, 2, Net()).update is None
    for folder in (tmp_path / "checkpoints").iterdir():
        folder.rename(tmp_path / f"gone-{folder.name}")
    gone = lightning_sentinel.replay_incident(tmp_path, 2, Net(), update=True)
    assert gone.reproduced  # the weights are the bundle's own
    assert gone.update is not None
    assert not gone.update.available
    assert gone.update.sentence.startswith("The update was not computed: ")
    assert gone.update.sentence.endswith("which is gone")


def test_the_budget_of_bytes_is_kept_and_said(tmp_path: Path) -> None:
    size = sum(p.nbytes for p in Net().parameters())
    fit(suite(tmp_path, 2, 9, bundle_bytes=2 * size - 1, probation_steps=2), data=Data(Samples(broken=False)))
    first, second = events(tmp_path, "incident.bundle")
    assert (first["state"], second["state"]) == (True, False)
    assert (
        second["why_no_state"] == f"it takes {size:,} bytes, bundles of this run have {size - 1:,} left (bundle_bytes)"
    )
    with pytest.raises(BundleError, match=r"there was no checkpoint to refer to\. Let IncidentResponse write them"):
        lightning_sentinel.replay_incident(tmp_path, 2, Net(), Data())


def test_a_batch_of_a_class_of_its_own_is_left_out_with_the_reason(tmp_path: Path) -> None:
    @dataclass
    class Batch:
        x: Tensor
        y: Tensor

    class Classy(Data):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {
                "x": batch["x"],
                "y": batch["y"],
                "sample_id": batch["sample_id"],
                "extra": Batch(batch["x"], batch["y"]),
            }

    fit(suite(tmp_path, 3, capture_batch=True), data=Classy(Samples(broken=False)))
    (micro, _) = Bundle.open(tmp_path, 1).rank(0)["micro_batches"]
    assert micro["captured"] is False
    assert "the batch holds a " in micro["why_not"]
    report = lightning_sentinel.replay_incident(tmp_path, 1, Net(), Classy(Samples(broken=False)))
    assert report.reproduced
    assert report.ranks[0].batch == "fetched"


# ------------------------------------------------------------------------------------------------------ disks that fail


class FullDisk(Disk):
    """Takes 20,000 bytes and is full."""

    def __init__(self) -> None:
        self.room = 2_000

    def write(self, file: Any, data: Any) -> None:
        self.room -= len(memoryview(data))
        if self.room < 0:
            raise OSError(28, "No space left on device")
        super().write(file, data)


def test_a_full_disk_is_journalled_and_training_goes_on(tmp_path: Path) -> None:
    callbacks = suite(tmp_path, 5)
    callbacks[-1].bundles.disk = FullDisk()  # type: ignore[attr-defined]
    trainer = fit(callbacks, data=Data(Samples(broken=False)))
    assert trainer.global_step == 12
    (failed,) = events(tmp_path, "incident.bundle_failed")
    assert (failed["incident"], failed["step"], failed["reason"]) == (1, 5, "No space left on device")
    assert not events(tmp_path, "incident.bundle")
    assert list((tmp_path / "incidents").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0 and not hasattr(os, "chflags"), reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "incidents").mkdir(mode=0o500)
    fit(suite(tmp_path, 5), data=Data(Samples(broken=False)))
    (failed,) = events(tmp_path, "incident.bundle_failed")
    assert "Permission denied" in failed["reason"]


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "incidents").write_text("")
    trainer = fit(suite(tmp_path, 5), data=Data(Samples(broken=False)))
    assert trainer.global_step == 12
    (failed,) = events(tmp_path, "incident.bundle_failed")
    assert "File exists" in failed["reason"] or "Not a directory" in failed["reason"]


def test_without_a_run_folder_there_is_no_bundle_and_no_complaint(tmp_path: Path) -> None:
    trainer = fit(suite(None, 5), data=Data(Samples(broken=False)), default_root_dir=tmp_path)
    assert trainer.global_step == 12
    assert list(tmp_path.iterdir()) == []


def test_capturing_does_not_change_the_run(tmp_path: Path) -> None:
    def weights(**options: Any) -> dict[str, Tensor]:
        trainer = fit(suite(tmp_path / str(options), 3, 6, **options), data=Data(Samples(broken=False)))
        return trainer.lightning_module.state_dict()

    bare, full = weights(capture_state=False), weights(capture_batch=True)
    assert all(torch.equal(value, bare[name]) for name, value in full.items())


# ---------------------------------------------------------------------------------------------------------- two ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders of two processes: ``ddp``, in which rank 1's replica drifts, and ``fsdp2``."""
    folder, script = tmp_path_factory.mktemp("ranks"), Path(__file__).with_name("bundle_two_ranks.py")
    run_ranks(script, folder, seconds=400)
    return folder


@pytest.mark.distributed
def test_shards_of_two_ranks_are_put_together(two_ranks: Path) -> None:
    run_dir = two_ranks / "fsdp2"
    bundle = Bundle.open(run_dir, 2)
    assert {n: list(w.shape) for n, w in bundle.weights(1).items()} == {
        n: list(p.shape) for n, p in Net().named_parameters()
    }
    assert bundle.rank(1)["layout"]["first.weight"] == ([16, 6], [8, 0])
    report = lightning_sentinel.replay_incident(run_dir, 2, Net(), Data())
    assert [(r.rank, r.equal, r.outcome) for r in report.ranks] == [(0, True, "reproduced"), (1, True, "reproduced")]
    assert report.reduction is not None
    assert report.reduction["equal"]


@pytest.mark.distributed
def test_each_rank_leaves_its_own_probe_of_the_incidents_step(two_ranks: Path, tmp_path: Path) -> None:
    for number, step in ((1, 1), (2, 3)):
        bundle = Bundle.open(two_ranks / "ddp", number)
        probes = bundle.probes
        assert list(probes) == [0, 1]
        assert bundle.probe == probes[0]
        # Other probes, at every step, came after it.
        assert [(p["step"], p["reason"], p["incident"]) for p in probes.values()] == [(step, "incident", number)] * 2
        assert [p["unavailable"] for p in probes.values()] == ["", ""]
        first, second = (p["modules"]["first"]["input_rms"] for p in probes.values())
        assert first != second  # each has its own samples
        files = [two_ranks / "ddp" / "incidents" / f"{number:04d}" / f"probe-{r:05d}.json" for r in (0, 1)]
        assert [stat.S_IMODE(f.stat().st_mode) for f in files] == [0o600, 0o600]
    broken = Bundle.open(two_ranks / "ddp", 1).probes
    assert math.isfinite(broken[0]["modules"]["first"]["input_rms"])
    assert broken[1]["modules"]["first"]["input_rms"] == "nan"
    # Where nothing probes, there are none, and one that is damaged is refused by name.
    assert Bundle.open(two_ranks / "fsdp2", 2).probes == {}
    shutil.copytree(two_ranks / "ddp" / "incidents", tmp_path / "incidents")
    file = tmp_path / "incidents" / "0002" / "probe-00001.json"
    file.write_bytes(file.read_bytes().replace(b'"rank": 1', b'"rank": 0').replace(b'"rank":1', b'"rank":0'))
    with pytest.raises(BundleError, match=r"probe-00001\.json .*the bundle is damaged and is not used"):
        Bundle.open(tmp_path, 2)


@pytest.mark.distributed
def test_a_bundle_of_two_ranks_replays_on_one_process(two_ranks: Path) -> None:
    run_dir = two_ranks / "ddp"
    broken, told = Bundle.open(run_dir, 1), Bundle.open(run_dir, 2)
    assert (broken.ranks, broken.step, told.ranks, told.step) == ([0, 1], 1, [0, 1], 3)
    # Rank 1 drifted in the middle of step 0: from then on its replica is another one, and only what differs is its own.
    assert "last.weight" in told.run["state"]["differing_ranks"]["1"]
    assert told.weights(0)["last.weight"].tolist() != told.weights(1)["last.weight"].tolist()
    report = lightning_sentinel.replay_incident(run_dir, 1, Net(), Data())
    first, second = report.ranks
    assert (report.reproduced, first.equal, second.equal) == (True, True, True)
    assert (first.computed[0].finite, second.computed[0].finite) == (True, False)
    assert second.computed[0].first is not None
    assert second.computed[0].first["samples"] == [f"s{BROKEN}"]
    assert report.reduction is None  # one of the two gradients is not finite
    report = lightning_sentinel.replay_incident(run_dir, 2, Net(), Data())
    assert [r.outcome for r in report.ranks] == ["reproduced", "reproduced"]
    assert {i for r in report.ranks for b in r.samples for i in b} == {f"s{i}" for i in range(16)}
    assert report.reduction is not None
    assert report.reduction["equal"]
    assert math.isclose(report.reduction["recorded"], report.reduction["recomputed"], rel_tol=1e-5)
    alone = lightning_sentinel.replay_incident(run_dir, 2, Net(), Data(), ranks=[1])
    assert [r.rank for r in alone.ranks] == [1]
    with pytest.raises(BundleError, match=r"holds the ranks \[0, 1\], not \[2\]"):
        lightning_sentinel.replay_incident(run_dir, 2, Net(), Data(), ranks=[2])
    assert json.loads((run_dir / "incidents" / "0002" / "run.json").read_text())["trainer"]["world_size"] == 2
