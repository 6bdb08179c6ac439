"""Power loss at every single filesystem operation, ``kill -9`` at random moments, a full disk, a read-only folder."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_disk import CrashingDisk, FullDisk, PowerLoss, QuickDisk, ReadOnlyDisk

from lightning_sentinel.checkpoint import Checkpoint, CheckpointStore, Disk, Status

LUCKY_DRAWS = 5  # states of the disk that are looked at after each loss of power
KILLS = int(os.environ.get("SENTINEL_KILLS", "200"))


def save(store: CheckpointStore, step: int, *, world_size: int = 1, fill: int = 0) -> Checkpoint:
    """A checkpoint whose every tensor tells its step."""
    pending = store.begin(step)
    try:
        pending.write_torch("model.pt", {"weight": torch.full((8,), float(step))})
        for rank in range(world_size):
            pending.write_torch(f"rank-{rank:05d}.pt", {"cursor": step, "rank": rank, "fill": torch.zeros(fill)})
        return store.publish(pending, step=step, tokens=step, world_size=world_size)
    except OSError:
        store.drop(pending)
        raise


def check_truth(store: CheckpointStore) -> list[Checkpoint]:
    """Whatever verifies must be true; returns those, oldest first."""
    sound = [c for c in store.checkpoints() if not store.verify(c.path)]
    for checkpoint in sound:
        step = int(checkpoint.path.name.split("-")[1])
        assert checkpoint.step == step
        assert torch.equal(store.load_torch(checkpoint, "model.pt")["weight"], torch.full((8,), float(step)))
        for rank in range(checkpoint.manifest.world_size):
            part = store.load_torch(checkpoint, f"rank-{rank:05d}.pt")
            assert (part["cursor"], part["rank"]) == (step, rank)
    return sound


def promote_second(store: CheckpointStore) -> None:
    store.promote(store.root / "step-00000002")


def rotate(store: CheckpointStore) -> None:
    store.rotate(1)


def poison(store: CheckpointStore) -> None:
    store.mark_poisoned_since(1)


OPERATIONS: dict[str, Callable[[CheckpointStore], object]] = {
    "save": lambda store: save(store, 4),
    "save-two-ranks": lambda store: save(store, 4, world_size=2),
    "promote": promote_second,
    "rotate": rotate,
    "poison": poison,
}


def prepared(root: Path) -> None:
    """Steps 0 and 1 (known-good), 2 and 3 (candidates)."""
    store = CheckpointStore(root / "checkpoints", QuickDisk())
    for step in (0, 1, 2, 3):
        save(store, step)
    store.promote(store.root / "step-00000000")
    store.promote(store.root / "step-00000001")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_power_loss_at_every_single_operation(operation: str, tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    prepared(template)
    act = OPERATIONS[operation]

    shutil.copytree(template, tmp_path / "whole")
    disk = CrashingDisk(tmp_path / "whole")
    act(CheckpointStore(tmp_path / "whole" / "checkpoints", disk))
    total = disk.count
    assert total >= {"promote": 5, "rotate": 8, "poison": 15}.get(operation, 12)

    work, after = tmp_path / "work", tmp_path / "after"
    for k in range(total):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(template, work)
        disk = CrashingDisk(work, stop_at=k)
        with pytest.raises(PowerLoss):
            act(CheckpointStore(work / "checkpoints", disk))
        for draw in range(LUCKY_DRAWS):
            shutil.rmtree(after, ignore_errors=True)
            disk.survivors(after, random.Random(1000 * k + draw))
            check_after_power_loss(operation, after, where=f"{operation}, operation {k} of {total}, draw {draw}")


def check_after_power_loss(operation: str, root: Path, where: str) -> None:
    store = CheckpointStore(root / "checkpoints", QuickDisk())
    lines: list[str] = []
    store.clean()
    sound = check_truth(store)
    assert store.verify(store.root / "step-00000001") == [], where
    good = store.newest_verified(say=lines.append)
    assert good is not None, where
    if operation == "promote":
        assert good.step in (1, 2), where
    else:
        assert good.step == 1, where
    if operation == "poison":  # all of the later ones or none
        later = {store.read(store.root / f"step-0000000{s}").status.status for s in (2, 3)}
        assert len(later) == 1, where
    if operation != "rotate":
        assert {1, 2, 3} <= {c.step for c in sound}, where
    assert not lines, f"{where}: {lines}"
    assert not [p.name for p in store.root.iterdir() if p.name.startswith(".")], where
    # and the run goes on
    saved = save(store, 5)
    assert store.verify(saved.path) == [], where
    assert store.promote(saved.path).step == 5
    assert store.newest_verified() is not None
    store.rotate(1)
    assert [c.step for c in check_truth(store) if c.status.status is not Status.POISONED] == [5], where


def test_the_model_of_the_disk_notices_a_missing_fsync(tmp_path: Path) -> None:
    """The shim can fail: without the fsync of files a checkpoint is lost although its save had returned."""

    class Forgetful(CrashingDisk):
        def sync(self, file: object) -> None:
            return None

    root = tmp_path / "root"
    root.mkdir()
    disk = Forgetful(root)
    save(CheckpointStore(root / "checkpoints", disk), 1)
    problems = []
    for draw in range(20):
        shutil.rmtree(tmp_path / "after", ignore_errors=True)
        disk.survivors(tmp_path / "after", random.Random(draw))
        problems += CheckpointStore(tmp_path / "after" / "checkpoints").verify(
            tmp_path / "after" / "checkpoints" / "step-00000001"
        )
    assert problems


# --------------------------------------------------------------------------------------------------------- kill -9


def work_forever(root: Path, acknowledge: int) -> None:
    """The child: save, promote, rotate, poison now and then; tells what is certain through a pipe."""
    store = CheckpointStore(root)
    store.clean()
    os.write(acknowledge, b"0\n")
    newest = max((c.step for c in store.checkpoints()), default=0)
    for step in range(newest + 1, newest + 10_000):
        saved = save(store, step)
        if step % 5 == 0:
            store.mark_poisoned_since(step - 1)
        else:
            store.promote(saved.path)
            os.write(acknowledge, f"{step}\n".encode())
        store.rotate(2)


@contextlib.contextmanager
def child_at_work(root: Path) -> Iterator[tuple[int, int]]:
    """A forked child that has begun, and the pipe on which it tells; killed at the end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        os.close(reader)
        try:
            work_forever(root, writer)
        finally:
            os._exit(1)
    os.close(writer)
    try:
        assert os.read(reader, 2) == b"0\n"
        yield child, reader
    finally:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the child ended by itself"


def seconds_of_a_round(root: Path) -> float:
    """How long a save with its promotion and rotation takes here, now."""
    with child_at_work(root) as (_, reader):
        begun, told = time.monotonic(), b""
        while told.count(b"\n") < 8:
            told += os.read(reader, 1)
        os.close(reader)
        return (time.monotonic() - begun) / 8


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    """The newest step that the child has called known-good is there afterwards, whole, and a new child goes on."""
    root, luck, certain = tmp_path / "checkpoints", random.Random(0), 0
    a_round = seconds_of_a_round(tmp_path / "measured")
    for kill in range(KILLS):
        with child_at_work(root) as (_, reader):
            time.sleep(luck.uniform(0.0, 3.0) * a_round)
        with os.fdopen(reader) as pipe:
            told = [int(line) for line in pipe.read().splitlines()]
        certain = max([certain, *told])
        store = CheckpointStore(root)
        lines: list[str] = []
        if certain:
            good = store.newest_verified(say=lines.append)
            assert good is not None
            assert good.step >= certain, f"kill {kill}: step {certain} was known-good, {good.step} is left"
            assert not lines
        check_truth(store)
        store.clean()
        assert all(not store.verify(p) for p in store.paths())
    assert certain > KILLS // 8  # the children have really worked


# ------------------------------------------------------------------------------------------- full and read-only disks


def test_full_disk_at_every_byte(tmp_path: Path) -> None:
    """However far a save comes before the space ends: an error, no trace, and the old checkpoints stay."""
    prepared(tmp_path)
    plenty = FullDisk(10**9)
    save(CheckpointStore(tmp_path / "measured", plenty), 4)
    needed = 10**9 - plenty.free
    for free in [*range(0, needed - 16, 97), needed - 16]:
        store = CheckpointStore(tmp_path / "checkpoints", FullDisk(free))
        with pytest.raises(OSError, match="No space left"):
            save(store, 4)
        assert sorted(p.name for p in store.root.iterdir()) == [f"step-0000000{s}" for s in (0, 1, 2, 3)]
    full = CheckpointStore(tmp_path / "checkpoints", FullDisk(0))
    assert [c.step for c in full.rotate(1)] == [0]  # 1 is known-good, 2 next in probation, 3 newest
    with pytest.raises(OSError, match="No space left"):
        full.promote(full.root / "step-00000003")
    assert full.read(full.root / "step-00000003").status.status is Status.CANDIDATE
    newest = full.newest_verified()
    assert newest is not None
    assert newest.step == 1


def test_rotation_works_on_a_full_disk(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, FullDisk(10**6))
    for step in range(1, 6):
        store.promote(save(store, step).path)
    store.disk = FullDisk(0)
    assert [c.step for c in store.rotate(2)] == [1, 2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


def test_rotation_without_rename_takes_the_manifest_first(tmp_path: Path) -> None:
    """A filesystem that has no room even for a new name: a half-removed checkpoint must not look like one."""

    class NoRename(Disk):
        removed: list[str] = []  # noqa: RUF012

        def rename(self, source: Path, target: Path) -> None:
            raise OSError(28, "No space left on device")

        def remove(self, path: Path) -> None:
            self.removed.append(path.name)
            super().remove(path)

    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.promote(save(store, step).path)
    store.disk = NoRename()
    assert [c.step for c in store.rotate(1)] == [1]
    assert NoRename.removed[0] == "manifest.json"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002"]


def test_read_only_folder_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    prepared(tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints", ReadOnlyDisk())
    for act in (lambda: save(store, 4), lambda: store.promote(store.root / "step-00000002"), lambda: poison(store)):
        with pytest.raises(OSError, match="Read-only"):
            act()
    assert [c.status.status for c in check_truth(store)] == ["known_good", "known_good", "candidate", "candidate"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real tmpfs of 256 KiB, where we may mount one."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True)
    except OSError:
        pytest.skip("no mount program here")
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_real_full_disk(tiny_disk: Path) -> None:
    store = CheckpointStore(tiny_disk / "checkpoints")
    saved: list[int] = []
    with contextlib.suppress(OSError):
        for step in range(1, 1000):
            saved.append(save(store, step, fill=2000).step)
            store.promote(store.root / f"step-{step:08d}")
    assert 5 < len(saved) < 100
    assert [c.step for c in store.checkpoints() if not store.verify(c.path)] == saved
    with contextlib.suppress(OSError):
        (tiny_disk / "filler").write_bytes(bytes(10**6))
    store.rotate(2)
    assert [c.step for c in store.checkpoints()] == saved[-2:]
    assert save(store, saved[-1] + 1).step == saved[-1] + 1  # there is room again
