"""Every filesystem operation that changes a checkpoint folder, one method each, and the few sequences built from them.

Nothing else in the suite creates, renames or removes checkpoint files. A test replaces :class:`Disk` by one that counts
the operations and stops at the k-th, for every k, and forgets what was not synced.

What the sequences rely on, as databases do: a file's content is durable after ``fsync`` of the file, its name after
``fsync`` of its folder, and a rename within one folder happens entirely or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

CHUNK_BYTES = 1 << 20
HIDDEN = "."  # names with a leading dot are work in progress; nobody reads them


class Disk:
    """The operations themselves. Paths are absolute or relative to the working folder."""

    def make_dir(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path, mode: int = 0o666) -> BinaryIO:
        """A new, empty, unbuffered file; an error where the name is taken."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        return cast(BinaryIO, os.fdopen(descriptor, "wb", buffering=0))

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view:  # a raw file may write less than asked, e.g. just before the disk is full
            view = view[file.write(view) :]

    def sync(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())

    def sync_dir(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_path(self, path: Path) -> None:
        """Make a file durable that somebody else has written."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file or folder within its parent; a file at ``target`` is replaced, a folder must not be there."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_dir(self, path: Path) -> None:
        os.rmdir(path)


@dataclass(frozen=True)
class FileEntry:
    """Name, content hash and size of one file of a checkpoint."""

    name: str
    sha256: str
    bytes: int


class HashingWriter:
    """A file-like object for ``torch.save``: hashes and counts what goes through it, in chunks of 1 MiB."""

    def __init__(self, disk: Disk, file: BinaryIO, progress: Callable[[int], None] | None = None) -> None:
        self._disk, self._file, self._progress = disk, file, progress
        self._waiting = bytearray()
        self._hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        size = memoryview(data).nbytes
        if size >= CHUNK_BYTES:
            self.flush()
            view = memoryview(data).cast("B")
            for start in range(0, size, 16 * CHUNK_BYTES):
                self._out(view[start : start + 16 * CHUNK_BYTES])
        else:
            self._waiting += data
            if len(self._waiting) >= CHUNK_BYTES:
                self.flush()
        return size

    def flush(self) -> None:
        if self._waiting:
            self._out(self._waiting)
            self._waiting = bytearray()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def _out(self, data: bytearray | memoryview) -> None:
        self._hash.update(data)
        self._disk.write(self._file, data)
        self.bytes += len(data)
        if self._progress is not None:
            self._progress(len(data))


def write_file(
    disk: Disk,
    path: Path,
    fill: Callable[[HashingWriter], None],
    *,
    mode: int = 0o666,
    progress: Callable[[int], None] | None = None,
) -> FileEntry:
    """A new file whose content is durable on return (its name is durable once the folder is synced)."""
    file = disk.create(path, mode)
    try:
        writer = HashingWriter(disk, file, progress)
        fill(writer)
        writer.flush()
        disk.sync(file)
    finally:
        file.close()
    return FileEntry(path.name, writer.sha256, writer.bytes)


def replace_file(disk: Disk, path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Old content or new content, whatever happens: temporary file, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f"{HIDDEN}{path.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        disk.remove(temporary)
    try:
        write_file(disk, temporary, lambda writer: _write_all(writer, data), mode=mode)
        disk.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            disk.remove(temporary)
        raise
    disk.sync_dir(path.parent)


def publish_dir(disk: Disk, temporary: Path, final: Path) -> None:
    """Give a finished folder its name. Before this nobody sees it, afterwards it is whole."""
    disk.sync_dir(temporary)
    disk.rename(temporary, final)
    disk.sync_dir(final.parent)


def remove_tree(disk: Disk, path: Path, *, last: str | None = None) -> None:
    """Remove a folder: out of sight by one rename first, so that a half-removed folder never bears a real name.

    ``last`` names the file whose absence marks the folder as invalid; where the rename is refused it goes first.
    """
    if not path.name.startswith(HIDDEN):
        hidden = path.with_name(f"{HIDDEN}removing-{path.name}")
        try:
            disk.rename(path, hidden)
            disk.sync_dir(hidden.parent)
            path = hidden
        except OSError:
            if last is None or not (path / last).exists():
                raise
            disk.remove(path / last)
            disk.sync_dir(path)
    _remove_contents(disk, path)
    disk.sync_dir(path.parent)


def _remove_contents(disk: Disk, path: Path) -> None:
    for entry in sorted(os.scandir(path), key=lambda e: e.name):
        if entry.is_dir(follow_symlinks=False):
            _remove_contents(disk, Path(entry.path))
        else:
            disk.remove(Path(entry.path))
    disk.remove_dir(path)


def _write_all(writer: HashingWriter, data: bytes) -> None:
    writer.write(data)
