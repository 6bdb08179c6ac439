"""The store: what is written is verified, what is damaged is refused by name, what is kept and what goes."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sentinel.checkpoint import CheckpointError, CheckpointStore, Status, checkpoint_name
from lightning_sentinel.checkpoint.manifest import seal, unseal
from lightning_sentinel.checkpoint.plain import decode, encode

CORRUPTIONS = 500
PAGE = 4096


def save(
    store: CheckpointStore, step: int, *, attempt: int = 0, tokens: int = 0, ranks: int = 1, size: int = 16
) -> Path:
    pending = store.begin(step, attempt)
    generator = torch.Generator().manual_seed(step)
    pending.write_torch("model.pt", {"weight": torch.randn(size, generator=generator)})
    pending.write_torch("optimizer.pt", [{"state": {0: {"step": torch.tensor(float(step))}}}])
    for rank in range(ranks):
        pending.write_torch(f"rank-{rank:05d}.pt", {"cursor": step, "rank": rank})
    pending.write_torch("lightning.ckpt", {"state_dict": torch.arange(size) + step})
    pending.write_json("run.json", {"step": step})
    return store.publish(pending, step=step, attempt=attempt, tokens=tokens, world_size=ranks).path


def corrupt(path: Path, other: Path, luck: random.Random) -> tuple[str, str]:
    """One random damage to one random file; returns what and where."""
    name = luck.choice(sorted(p.name for p in path.iterdir()))
    target = path / name
    data = bytearray(target.read_bytes())
    kind = luck.choice(["bit", "page", "truncated", "missing", "swapped", "swapped inside", "grown"])
    if kind == "bit":
        data[luck.randrange(len(data))] ^= 1 << luck.randrange(8)
        target.write_bytes(data)
    elif kind == "page":
        start = luck.randrange(0, len(data), PAGE)
        data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
        target.write_bytes(data)
    elif kind == "truncated":
        target.write_bytes(data[: luck.randrange(len(data))])
    elif kind == "missing":
        target.unlink()
    elif kind == "swapped":  # the file of the same name from another checkpoint
        target.write_bytes((other / name).read_bytes())
    elif kind == "swapped inside":
        second = luck.choice(sorted(p.name for p in path.iterdir() if p.name != name))
        mine, theirs = target.read_bytes(), (path / second).read_bytes()
        target.write_bytes(theirs)
        (path / second).write_bytes(mine)
        name = f"{name} {second}"
    else:
        target.write_bytes(data + b"\0")
    return kind, name


def test_every_one_of_500_random_corruptions_is_refused_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    old = save(store, 1, size=3000)
    store.promote(old)
    new = save(store, 2, size=3000)
    store.promote(new)
    whole = tmp_path / "whole"
    shutil.copytree(new, whole)
    seen: set[tuple[str, str]] = set()
    for number in range(CORRUPTIONS):
        luck = random.Random(number)
        shutil.rmtree(new)
        shutil.copytree(whole, new)
        kind, names = corrupt(new, old, luck)
        seen.add((kind, names.split()[0]))
        problems = store.verify(new)
        assert problems, f"{number}: {kind} of {names} was not noticed"
        blamed = names.split()
        if (kind, names) == ("swapped", "manifest.json"):
            blamed = ["status.json"]  # a whole manifest, but not the one whose hash the status holds
        assert all(any(problem.startswith(name) for name in blamed) for problem in problems), (kind, names, problems)
        lines: list[str] = []
        chosen = store.newest_verified(say=lines.append)
        assert chosen is not None
        assert chosen.path == old
        assert lines == [f"checkpoint step-00000002 refused: {'; '.join(problems)}; trying the one before it"]
    assert len({kind for kind, _ in seen}) == 7
    assert len({name for _, name in seen}) == 7  # every kind of file was hit


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda p: flip(p / "model.pt", 300), "model.pt fails SHA-256"),
        (lambda p: (p / "rank-00000.pt").unlink(), "rank-00000.pt is missing"),
        (lambda p: os.truncate(p / "optimizer.pt", 100), "optimizer.pt has 100 bytes, its manifest says "),
        (lambda p: flip(p / "manifest.json", 20), "manifest.json "),
        (lambda p: (p / "status.json").unlink(), "status.json is missing"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda p: (p / "manifest.json").write_bytes(b"[]"), "manifest.json holds no SHA-256 of its own content"),
        (lambda p: (p / "manifest.json").write_bytes(b"\xff"), "manifest.json is not JSON"),
    ],
)
def test_what_is_wrong_is_said_by_name(damage: Any, expected: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 1)
    damage(path)
    assert len(store.verify(path)) == 1
    assert store.verify(path)[0].startswith(expected)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def test_a_status_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    first, second = save(store, 1), save(store, 2)
    store.promote(first)
    shutil.copy(first / "status.json", second / "status.json")
    assert store.verify(second) == ["status.json belongs to another checkpoint (it names another manifest)"]


def test_nothing_is_unpickled_before_its_hash_is_checked(tmp_path: Path) -> None:
    """A pickle that would run code, in the place of a file: refused by its hash; with a right hash by weights_only."""
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(ran),))

    store = CheckpointStore(tmp_path / "checkpoints")
    path = save(store, 1)
    (path / "model.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"model\.pt has .* bytes, its manifest says"):
        store.load_torch(store.read(path), "model.pt")
    pending = store.begin(2)
    pending.write_torch("rank-00000.pt", Evil())
    evil = store.publish(pending, step=2)
    assert store.verify(evil.path) == []
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights.only"):
        store.load_torch(evil, "rank-00000.pt")
    assert not ran.exists()


def test_a_checkpoint_without_the_part_of_a_rank_is_never_published(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    pending = store.begin(7)
    pending.write_torch("rank-00000.pt", {})
    with pytest.raises(CheckpointError, match=r"rank-00001.pt, rank-00002.pt was not written; not published"):
        store.publish(pending, step=7, world_size=3)
    store.drop(pending)
    assert store.paths() == []


def test_status_moves_one_way(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 3)
    assert store.read(path).status.status is Status.CANDIDATE
    assert store.newest_verified() is None
    assert store.newest_verified(known_good=False) is not None
    store.promote(path)
    store.promote(path)
    assert store.newest_verified() is not None
    store.poison(path, "non-finite", since_step=2)
    with pytest.raises(CheckpointError, match=r"step-00000003 is poisoned \(non-finite\); it can't become known-good"):
        store.promote(path)
    assert store.newest_verified(known_good=False) is None


def test_poisoning_since_a_step_is_retroactive(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30, 40):
        save(store, step)
    store.promote(tmp_path / "step-00000010")
    store.promote(tmp_path / "step-00000030")
    marked = store.mark_poisoned_since(20, reason="since step 20: incident 3", incident=3)
    assert [c.step for c in marked] == [30, 40]  # step 20 holds the updates of steps 0 to 19
    assert [c.status.status for c in store.checkpoints()] == ["known_good", "candidate", "poisoned", "poisoned"]
    assert store.read(tmp_path / "step-00000030").status.since_step == 20
    assert not (tmp_path / "poisoning.json").exists()
    assert store.mark_poisoned_since(20) == []


def test_order_is_the_order_of_saving(tmp_path: Path) -> None:
    """After a rollback steps come again; a later attempt is newer whatever its step."""
    store = CheckpointStore(tmp_path)
    for step, attempt in ((100, 0), (50, 1), (60, 1)):
        save(store, step, attempt=attempt)
    assert [(c.step, c.manifest.attempt) for c in store.checkpoints()] == [(100, 0), (50, 1), (60, 1)]
    assert [p.name for p in store.paths()] == [
        "step-00000100",
        "step-00000050-attempt-0001",
        "step-00000060-attempt-0001",
    ]
    assert checkpoint_name(1200) == "step-00001200"


def test_nothing_published_is_overwritten(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert [save(store, 5).name for _ in range(3)] == ["step-00000005", "step-00000005.1", "step-00000005.2"]
    assert [c.path.name for c in store.checkpoints()][-1] == "step-00000005.2"


def test_rotation_keeps_what_must_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    paths = {step: save(store, step, tokens=step * 10) for step in range(1, 13)}
    for step in (2, 4):
        store.promote(paths[step])
    store.poison(paths[11], "since step 10")
    store.poison(paths[9], "since step 8")
    removed = store.rotate(2, keep_every_tokens=50, protect=[paths[7]])
    # newest two healthy: 12, 10; newest known-good: 4; next in probation: 5; spans of 50 tokens begin at 1, 5, 10;
    # the newest poisoned: 11; protected: 7
    assert [c.step for c in store.checkpoints()] == [1, 4, 5, 7, 10, 11, 12]
    assert [c.step for c in removed] == [2, 3, 6, 8, 9]
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        store.rotate(0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["candidate", "known_good", "poisoned"]), min_size=1, max_size=7), st.integers(1, 3))
def test_rotation_never_removes_the_newest_known_good(
    tmp_path_factory: pytest.TempPathFactory, statuses: list[str], keep: int
) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("store"))
    for step, status in enumerate(statuses):
        pending = store.begin(step)
        pending.write_bytes("rank-00000.pt", b"x")
        store.publish(pending, step=step, status=Status(status))
    good = [step for step, status in enumerate(statuses) if status == "known_good"]
    store.rotate(keep)
    newest = store.newest_verified()
    assert (newest.step if newest else None) == (good[-1] if good else None)
    healthy = [step for step, status in enumerate(statuses) if status != "poisoned"]
    assert set(healthy[-keep:]) <= {c.step for c in store.checkpoints()}


def test_leftovers_are_cleaned_and_nothing_else(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 1)
    store.begin(2).write_torch("model.pt", torch.zeros(3))
    (path / ".status.json.tmp").write_text("half")
    (tmp_path / ".removing-step-00000000").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    assert store.clean() == [".removing-step-00000000", ".tmp-step-00000002", "step-00000001/.status.json.tmp"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "other", "step-00000001"]
    assert store.verify(path) == []
    assert CheckpointStore(tmp_path / "absent").clean() == []


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=3), st.data())
def test_one_flipped_bit_breaks_the_seal(content: dict[str, Any], data: st.DataObject) -> None:
    content.pop("sha256", None)
    raw = bytearray(seal(content))
    assert unseal(bytes(raw)) == content
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match=r"is not JSON|fails SHA-256|holds no SHA-256"):
        unseal(bytes(raw))


def test_plain_round_trip_through_torch(tmp_path: Path) -> None:
    state = {
        "arrays": [np.arange(6, dtype=np.uint32).reshape(2, 3), np.zeros((0, 2)), np.array(True)],
        "scalar": np.float32(1.5),
        3: (Status.POISONED, {"b", "a"}, None),
    }
    torch.save(encode(state), tmp_path / "x.pt")
    back = decode(torch.load(tmp_path / "x.pt", weights_only=True))
    for mine, theirs in zip(state["arrays"], back["arrays"], strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert back["scalar"] == 1.5
    assert back[3] == ("poisoned", ["a", "b"], None)
    with pytest.raises(TypeError, match=r"state\['x'\]\[0\] is a object, which is not loaded back from a checkpoint"):
        encode({"x": [object()]})
