"""Disks that fail: one that loses power at the k-th operation, one that is full, one that is read-only."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from lightning_sentinel.checkpoint import Disk


class PowerLoss(BaseException):
    """Nothing may catch this as an ordinary error."""


class QuickDisk(Disk):
    """Asks the machine for no fsync: they are modelled, or they do not matter to the test."""

    def sync(self, file: BinaryIO) -> None:
        return None

    def sync_dir(self, path: Path) -> None:
        return None

    def sync_path(self, path: Path) -> None:
        return None


@dataclass
class _File:
    live: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class _Dir:
    live: dict[str, _File | _Dir] = field(default_factory=dict)
    synced: dict[str, _File | _Dir] = field(default_factory=dict)


class CrashingDisk(QuickDisk):
    """Does everything on the real disk, and models beside it what would have survived a loss of power.

    A file's bytes survive once the file was synced, a folder's entries once the folder was synced; whatever was not
    synced may have survived or not. Operation number ``stop_at`` (from 0) raises :class:`PowerLoss` instead of happening.
    """

    def __init__(self, root: Path, stop_at: int | None = None) -> None:
        self.root, self.stop_at, self.count = root, stop_at, 0
        self.log: list[str] = []
        self._top = self._adopt(root)
        self._open: dict[int, _File] = {}
        self._names: dict[int, Path] = {}

    def survivors(self, target: Path, luck: random.Random) -> None:
        """Write into ``target`` one state of the disk that is possible after the loss of power.

        ``luck`` says of each unsynced change whether it has survived. Entries of one folder survive in their order.
        """
        self._write_out(self._top, target, luck)

    # ------------------------------------------------------------------------------------------------- operations

    def make_dir(self, path: Path) -> None:
        self._tick("make_dir", path)
        super().make_dir(path)
        self._parent(path).live[path.name] = _Dir()

    def create(self, path: Path, mode: int = 0o666) -> BinaryIO:
        self._tick("create", path)
        file = super().create(path, mode)
        self._names[id(file)] = path
        self._open[id(file)] = self._parent(path).live[path.name] = _File()
        return file

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        node = self._open[id(file)]
        if self.stop_at == self.count:  # the power goes in the middle of the data
            node.live += bytes(data)[: len(data) // 2]
        self._tick("write", self._names[id(file)])
        super().write(file, data)
        node.live += bytes(data)

    def sync(self, file: BinaryIO) -> None:
        self._tick("sync", self._names[id(file)])
        node = self._open[id(file)]
        node.synced = bytes(node.live)

    def sync_dir(self, path: Path) -> None:
        self._tick("sync_dir", path)
        node = self._node(path)
        node.synced = dict(node.live)

    def sync_path(self, path: Path) -> None:
        self._tick("sync_path", path)
        node = self._parent(path).live[path.name] = _File(bytearray(path.read_bytes()), path.read_bytes())
        assert isinstance(node, _File)

    def rename(self, source: Path, target: Path) -> None:
        self._tick("rename", target)
        super().rename(source, target)
        parent = self._parent(source)
        parent.live[target.name] = parent.live.pop(source.name)

    def remove(self, path: Path) -> None:
        self._tick("remove", path)
        super().remove(path)
        del self._parent(path).live[path.name]

    def remove_dir(self, path: Path) -> None:
        self._tick("remove_dir", path)
        super().remove_dir(path)
        del self._parent(path).live[path.name]

    # -------------------------------------------------------------------------------------------------------- model

    def _tick(self, name: str, path: Path) -> None:
        if self.count == self.stop_at:
            self.count += 1
            raise PowerLoss(f"{name} {path.name}")
        self.count += 1
        self.log.append(f"{name} {path.relative_to(self.root)}")

    def _adopt(self, path: Path) -> _Dir:
        """What is there already is durable."""
        entries: dict[str, _File | _Dir] = {}
        for entry in os.scandir(path):
            if entry.is_dir():
                entries[entry.name] = self._adopt(Path(entry.path))
            else:
                data = Path(entry.path).read_bytes()
                entries[entry.name] = _File(bytearray(data), data)
        return _Dir(dict(entries), dict(entries))

    def _node(self, path: Path) -> _Dir:
        node = self._top
        for part in path.relative_to(self.root).parts:
            child = node.live[part]
            assert isinstance(child, _Dir)
            node = child
        return node

    def _parent(self, path: Path) -> _Dir:
        return self._node(path.parent)

    def _write_out(self, node: _Dir, target: Path, luck: random.Random) -> None:
        target.mkdir(exist_ok=True)
        for name, child in self._entries(node, luck).items():
            if isinstance(child, _Dir):
                self._write_out(child, target / name, luck)
            else:
                (target / name).write_bytes(self._bytes(child, luck))

    @staticmethod
    def _entries(node: _Dir, luck: random.Random) -> dict[str, _File | _Dir]:
        """The synced entries with none, some or all of the later changes. A moved entry is never in two places."""
        choice = luck.random()
        if choice < 0.35 or node.live == node.synced:
            return dict(node.synced)
        if choice < 0.7:
            return dict(node.live)
        entries = dict(node.synced)
        for name in sorted({*node.live, *node.synced}):
            if node.live.get(name) is not node.synced.get(name) and luck.random() < 0.5:
                entries.pop(name, None)
                if name in node.live:
                    entries = {n: c for n, c in entries.items() if c is not node.live[name]}
                    entries[name] = node.live[name]
        return entries

    @staticmethod
    def _bytes(file: _File, luck: random.Random) -> bytes:
        choice = luck.random()
        if bytes(file.live) == file.synced or choice < 0.35:
            return file.synced
        if choice < 0.6:
            return bytes(file.live)
        if choice < 0.8:
            return bytes(len(file.live))  # the size was written, the data was not
        return bytes(file.live[: luck.randrange(len(file.live) + 1)])


class FullDisk(QuickDisk):
    """Takes ``free`` more bytes and new names; removing gives nothing back. Then there is no space left."""

    def __init__(self, free: int) -> None:
        self.free = free

    def make_dir(self, path: Path) -> None:
        self._need(1)
        super().make_dir(path)

    def create(self, path: Path, mode: int = 0o666) -> BinaryIO:
        self._need(1)
        return super().create(path, mode)

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        if len(data) > self.free:
            super().write(file, bytes(data)[: self.free])
        self._need(len(data))
        super().write(file, data)

    def _need(self, amount: int) -> None:
        if amount > self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.free -= amount


class ReadOnlyDisk(Disk):
    def make_dir(self, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def create(self, path: Path, mode: int = 0o666) -> BinaryIO:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def rename(self, source: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))

    def remove(self, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
