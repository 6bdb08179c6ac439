"""A folder of checkpoints that can be trusted after a crash at any moment: pure files, no Lightning.

::

    <root>/step-00001200/            one directory, written beside as .tmp-step-00001200 and renamed
      model.pt  optimizer.pt         torch files, loaded with weights_only=True after their hash was checked
      rank-00000.pt  run.json
      status.json                    candidate -> known_good | poisoned, replaced atomically
      manifest.json                  written last: SHA-256 and size of every file
    <root>/poisoning.json            only while several checkpoints are being marked poisoned

Several ranks write into the same temporary directory; rank 0 alone makes it, writes the manifest and renames.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .atomic import HIDDEN, Disk, FileEntry, HashingWriter, publish_dir, remove_tree, replace_file, write_file
from .manifest import MANIFEST, STATUS, Manifest, Status, StatusRecord, rank_file, seal, unseal

log = logging.getLogger("lightning_sentinel")

_NAME = re.compile(r"step-(\d{8,})(?:-attempt-(\d{4,}))?(?:\.(\d+))?")
_TEMPORARY = f"{HIDDEN}tmp-"
_INTENT = "poisoning.json"
HANDOVER = "handover"  # in the manifest's extra facts


class CheckpointError(RuntimeError):
    """A checkpoint that must not be used; the message names the file and the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest and status have been read and are whole (its files may still be bad)."""

    path: Path
    manifest: Manifest
    status: StatusRecord
    serial: int = 0

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def sha256(self) -> str:
        """SHA-256 of the manifest, and so of everything in the checkpoint."""
        return self.status.manifest_sha256

    @property
    def age_key(self) -> tuple[int, int, int]:
        """Order of saving: attempts rise with each rollback and each resume, steps within an attempt."""
        return (self.manifest.attempt, self.manifest.step, self.serial)

    @property
    def handed_over(self) -> bool:
        """Saved by a healthy run as it was told to end, and not resumed from yet: its probation goes on in the next one."""
        candidate = self.status.status is Status.CANDIDATE and not self.status.reason
        return candidate and bool(self.manifest.extra.get(HANDOVER))


class PendingCheckpoint:
    """A checkpoint being written: every rank writes its own files, the rank that began it publishes or drops it.

    Attributes:
        directory: Where the files go until they are published.
        entries: What this rank has written.
        progress: Called with every number of bytes that has been written.
    """

    def __init__(self, disk: Disk, directory: Path) -> None:
        self.directory = directory
        self.entries: dict[str, FileEntry] = {}
        self.progress: Callable[[int], None] | None = None
        self._disk = disk

    def write_torch(self, name: str, content: Any, *, mode: int = 0o666) -> FileEntry:
        return self._write(name, partial(_save_torch, content), mode)

    def write_bytes(self, name: str, content: bytes) -> FileEntry:
        return self._write(name, partial(_save_bytes, content), 0o666)

    def write_json(self, name: str, content: Mapping[str, Any]) -> FileEntry:
        return self.write_bytes(name, (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())

    def _write(self, name: str, fill: Callable[[HashingWriter], None], mode: int) -> FileEntry:
        entry = write_file(self._disk, self.directory / name, fill, mode=mode, progress=self.progress)
        self.entries[name] = entry
        return entry


class CheckpointStore:
    """All checkpoints of one run.

    Example:
        >>> import tempfile
        >>> store = CheckpointStore(Path(tempfile.mkdtemp()) / "checkpoints")
        >>> pending = store.begin(step=1200)
        >>> _ = pending.write_torch("model.pt", {"weight": torch.ones(2)})
        >>> _ = pending.write_torch("rank-00000.pt", {"cursor": 1200})
        >>> saved = store.publish(pending, step=1200, tokens=9600)
        >>> store.verify(saved.path)
        []
        >>> store.promote(saved.path).status.status.value
        'known_good'
        >>> store.newest_verified().step
        1200

    Args:
        root: Folder of the checkpoints; made when the first one is saved.
        disk: Filesystem operations; a test passes its own.
    """

    def __init__(self, root: str | Path, disk: Disk | None = None) -> None:
        self.root = Path(root)
        self.disk = disk or Disk()

    # ----------------------------------------------------------------------------------------------------- writing

    def clean(self) -> list[str]:
        """Remove what a crash has left and finish a poisoning it interrupted. Returns the names of what was removed."""
        removed: list[str] = []
        if not self.root.is_dir():
            return removed
        self._finish_poisoning()
        for entry in sorted(os.scandir(self.root), key=lambda e: e.name):
            path = Path(entry.path)
            if entry.name.startswith((_TEMPORARY, f"{HIDDEN}removing-")):
                remove_tree(self.disk, path)
                removed.append(entry.name)
            elif entry.name.startswith(HIDDEN) and entry.name.endswith(".tmp"):
                self.disk.remove(path)
                removed.append(entry.name)
            elif entry.is_dir() and (path / f"{HIDDEN}{STATUS}.tmp").exists():
                self.disk.remove(path / f"{HIDDEN}{STATUS}.tmp")
                removed.append(f"{entry.name}/{HIDDEN}{STATUS}.tmp")
        return removed

    def begin(self, step: int, attempt: int = 0, *, name: str | None = None) -> PendingCheckpoint:
        """A new temporary directory. ``name`` overrides ``step-...`` (such a checkpoint is never resumed by itself)."""
        final = self._free_name(name or checkpoint_name(step, attempt))
        temporary = self.root / f"{_TEMPORARY}{final}"
        self._make_root()
        if temporary.exists():
            remove_tree(self.disk, temporary)
        self.disk.make_dir(temporary)
        return PendingCheckpoint(self.disk, temporary)

    def join(self, directory: str | Path) -> PendingCheckpoint:
        """The view of another rank on what rank 0 has begun."""
        return PendingCheckpoint(self.disk, Path(directory))

    def publish(
        self,
        pending: PendingCheckpoint,
        *,
        step: int,
        attempt: int = 0,
        tokens: int = 0,
        world_size: int = 1,
        entries: Mapping[str, FileEntry] | None = None,
        versions: Mapping[str, str] | None = None,
        status: Status = Status.CANDIDATE,
        reason: str = "",
        since_step: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Write status and manifest, then give the directory its name. ``entries`` holds the files of other ranks."""
        files = dict(entries or {}) | pending.entries
        missing = [rank_file(r) for r in range(world_size) if rank_file(r) not in files]
        if missing:
            raise CheckpointError(f"{pending.directory.name}: {', '.join(missing)} was not written; not published")
        manifest = Manifest(
            step=step,
            attempt=attempt,
            tokens=tokens,
            world_size=world_size,
            files=files,
            versions=dict(versions or {}),
            created=round(time.time(), 3),
            extra=dict(extra or {}),
        )
        raw = manifest.to_bytes()
        record = StatusRecord(status, hashlib.sha256(raw).hexdigest(), reason, since_step)
        for name, data in ((STATUS, record.to_bytes()), (MANIFEST, raw)):
            write_file(self.disk, pending.directory / name, partial(_save_bytes, data))
        final = self.root / pending.directory.name.removeprefix(_TEMPORARY)
        publish_dir(self.disk, pending.directory, final)
        return Checkpoint(final, manifest, record, _serial(final.name))

    def drop(self, pending: PendingCheckpoint) -> None:
        """Remove what could not be finished; what can't be removed now goes at the next start."""
        with contextlib.suppress(OSError):
            remove_tree(self.disk, pending.directory)

    # ------------------------------------------------------------------------------------------------------ status

    def promote(self, path: Path) -> Checkpoint:
        """candidate → known_good. A poisoned checkpoint stays poisoned, with an error."""
        checkpoint = self.read(path)
        if checkpoint.status.status is Status.POISONED:
            raise CheckpointError(f"{path.name} is poisoned ({checkpoint.status.reason}); it can't become known-good")
        return self._set_status(checkpoint, Status.KNOWN_GOOD, "", None, None)

    def note_resumed(self, path: Path) -> None:
        """From here on a checkpoint that was handed over is a candidate like any other: it is trusted once."""
        checkpoint = self.read(path)
        if checkpoint.handed_over:
            self._set_status(checkpoint, Status.CANDIDATE, "resumed from", None, None)

    def poison(self, path: Path, reason: str, *, since_step: int | None = None, incident: int | None = None) -> None:
        checkpoint = self.read(path)
        if checkpoint.status.status is not Status.POISONED:
            self._set_status(checkpoint, Status.POISONED, reason, since_step, incident)

    def mark_poisoned_since(self, step: int, *, reason: str = "", incident: int | None = None) -> list[Checkpoint]:
        """Poison, retroactively too, every checkpoint that holds an update of ``step`` or later (``.step > step``).

        All of them or, after a crash in between, all of them at the next :meth:`clean`: the intent is written first.
        """
        reason = reason or f"since step {step}"
        concerned = [c for c in self.checkpoints() if c.step > step and c.status.status is not Status.POISONED]
        if not concerned:
            return []
        if len(concerned) > 1:
            intent = {"names": [c.path.name for c in concerned], "step": step, "reason": reason, "incident": incident}
            replace_file(self.disk, self.root / _INTENT, seal(intent))
        marked = [self._set_status(c, Status.POISONED, reason, step, incident) for c in concerned]
        if len(concerned) > 1:
            self.disk.remove(self.root / _INTENT)
            self.disk.sync_dir(self.root)
        return marked

    def _finish_poisoning(self) -> None:
        path = self.root / _INTENT
        try:
            intent = unseal(path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("%s %s; it is removed, the checkpoints keep their status", path, error)
            intent = {"names": []}
        for name in intent["names"]:
            with contextlib.suppress(CheckpointError):
                self.poison(self.root / name, intent["reason"], since_step=intent["step"], incident=intent["incident"])
        self.disk.remove(path)
        self.disk.sync_dir(self.root)

    def _set_status(
        self, checkpoint: Checkpoint, status: Status, reason: str, since_step: int | None, incident: int | None
    ) -> Checkpoint:
        record = StatusRecord(status, checkpoint.sha256, reason, since_step, incident)
        if record != checkpoint.status:
            replace_file(self.disk, checkpoint.path / STATUS, record.to_bytes())
        return Checkpoint(checkpoint.path, checkpoint.manifest, record, checkpoint.serial)

    # ----------------------------------------------------------------------------------------------------- reading

    def read(self, path: Path) -> Checkpoint:
        """Manifest and status of one checkpoint, both checked; :class:`CheckpointError` names file and reason."""
        raw = _read_sealed(path, MANIFEST)
        try:
            manifest = Manifest.from_bytes(raw)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{MANIFEST} {_reason(error)}") from None
        try:
            status = StatusRecord.from_bytes(_read_sealed(path, STATUS))
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{STATUS} {_reason(error)}") from None
        if status.manifest_sha256 != hashlib.sha256(raw).hexdigest():
            raise CheckpointError(f"{STATUS} belongs to another checkpoint (it names another manifest)")
        return Checkpoint(path, manifest, status, _serial(path.name))

    def verify(self, path: str | Path, hashed: Callable[[int], object] | None = None) -> list[str]:
        """Everything that is wrong with a checkpoint, a sentence each with the file's name; empty if it can be used.

        Args:
            path: The checkpoint's folder.
            hashed: Told of so many more bytes that have been hashed, about once a MiB.
        """
        path = Path(path)
        if not path.is_dir():
            return [f"{path.name} is not a directory"]
        try:
            manifest = self.read(path).manifest
        except CheckpointError as error:
            return [str(error)]
        problems = [p for entry in manifest.files.values() if (p := _check_file(path / entry.name, entry, hashed))]
        wanted = (rank_file(rank) for rank in range(manifest.world_size))
        problems += [f"{name} is not in {MANIFEST}" for name in wanted if name not in manifest.files]
        return problems

    def checkpoints(self) -> list[Checkpoint]:
        """Those with a whole manifest and status, oldest first. Their files are not hashed here; see :meth:`verify`."""
        found = []
        for path in self.paths():
            with contextlib.suppress(CheckpointError):
                found.append(self.read(path))
        return sorted(found, key=lambda c: c.age_key)

    def paths(self) -> list[Path]:
        """Every directory that bears a checkpoint's name, whole or not, oldest first."""
        if not self.root.is_dir():
            return []
        named = ((_age_of_name(p.name), p) for p in self.root.iterdir() if p.is_dir())
        return [p for age, p in sorted((age, p) for age, p in named if age is not None)]

    def newest_verified(
        self, known_good: bool = True, *, say: Callable[[str], None] = log.warning
    ) -> Checkpoint | None:
        """The newest checkpoint whose every byte is as written; falls back by name, saying so in one line each.

        Args:
            known_good: Only known-good ones; otherwise candidates too. Poisoned ones never.
            say: Where a line about each refused checkpoint goes.
        """
        for path, problems in self.candidates(known_good):
            if not problems:
                return self.read(path)
            say(f"checkpoint {path.name} refused: {'; '.join(problems)}; trying the one before it")
        return None

    def candidates(
        self, known_good: bool = True, verify: Callable[[Path], list[str]] | None = None
    ) -> Iterator[tuple[Path, list[str]]]:
        """Usable ones by status, newest first, each with what ``verify`` says; damaged manifests are told too.

        One that was handed over counts with the known-good ones while nothing usable is newer: a job that is told to end
        before each probation is over would otherwise begin at the same known-good one for ever.
        """
        newer = False
        for path in reversed(self.paths()):
            try:
                checkpoint = self.read(path)
            except CheckpointError as error:
                yield path, [str(error)]
                continue
            status = checkpoint.status.status
            candidate = status is Status.CANDIDATE and (not known_good or (checkpoint.handed_over and not newer))
            newer |= status is not Status.POISONED
            if status is Status.KNOWN_GOOD or candidate:
                yield path, (verify or self.verify)(path)

    def load_torch(self, checkpoint: Checkpoint, name: str, hashed: Callable[[int], object] | None = None) -> Any:
        """One torch file, hashed before anything in it is interpreted, then loaded with ``weights_only=True``."""
        with self._open_checked(checkpoint, name, hashed) as file:
            return torch.load(file, map_location="cpu", weights_only=True)

    def load_json(self, checkpoint: Checkpoint, name: str) -> Any:
        with self._open_checked(checkpoint, name) as file:
            return json.load(file)

    @contextlib.contextmanager
    def _open_checked(
        self, checkpoint: Checkpoint, name: str, hashed: Callable[[int], object] | None = None
    ) -> Iterator[BinaryIO]:
        entry = checkpoint.manifest.files.get(name)
        if entry is None:
            raise CheckpointError(f"{name} is not in {MANIFEST}")
        with open_checked(checkpoint.path, entry, hashed) as file:
            yield file

    # ---------------------------------------------------------------------------------------------------- rotation

    def rotate(
        self, keep: int, keep_every_tokens: int | None = None, *, protect: Collection[Path] = ()
    ) -> list[Checkpoint]:
        """Remove old checkpoints. Never the newest known-good one, nor the oldest candidate after it.

        Kept are the ``keep`` newest ones that are not poisoned, the first one in each span of ``keep_every_tokens``
        tokens, and the newest poisoned one (to look at). The oldest candidate after the newest known-good one stays
        because it is the next to pass probation: with a probation longer than ``keep`` intervals none ever would.
        ``protect`` names further ones.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        everything = self.checkpoints()
        kept = _worth_keeping(everything, keep, keep_every_tokens) | set(protect)
        removed = [c for c in everything if c.path not in kept]
        for checkpoint in removed:
            remove_tree(self.disk, checkpoint.path, last=MANIFEST)
        return removed

    # ---------------------------------------------------------------------------------------------------- inside

    def _make_root(self) -> None:
        missing = [p for p in (self.root, *self.root.parents) if not p.exists()]
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self.disk.make_dir(path)
                self.disk.sync_dir(path.parent)

    def _free_name(self, name: str) -> str:
        """``name``, or ``name.1``, ``name.2`` ...: nothing published is ever overwritten."""
        candidate, serial = name, 0
        while (self.root / candidate).exists():
            serial += 1
            candidate = f"{name}.{serial}"
        return candidate


def checkpoint_name(step: int, attempt: int = 0) -> str:
    """``step-00001200``, or ``step-00001200-attempt-0002`` after a rollback or resume."""
    return f"step-{step:08d}" + (f"-attempt-{attempt:04d}" if attempt else "")


def _worth_keeping(everything: list[Checkpoint], keep: int, keep_every_tokens: int | None) -> set[Path]:
    healthy = [c for c in everything if c.status.status is not Status.POISONED]
    kept = {c.path for c in healthy[-keep:]}
    poisoned = [c for c in everything if c.status.status is Status.POISONED]
    kept |= {c.path for c in poisoned[-1:]}
    good = [i for i, c in enumerate(healthy) if c.status.status is Status.KNOWN_GOOD]
    newest_good = good[-1] if good else -1
    if good:
        kept.add(healthy[newest_good].path)
    kept |= {c.path for c in healthy[newest_good + 1 : newest_good + 2]}
    if keep_every_tokens:
        spans: set[int] = set()
        for checkpoint in healthy:
            span = checkpoint.manifest.tokens // keep_every_tokens
            if span not in spans:
                spans.add(span)
                kept.add(checkpoint.path)
    return kept


def _age_of_name(name: str) -> tuple[int, int, int] | None:
    match = _NAME.fullmatch(name)
    return (int(match[2] or 0), int(match[1]), int(match[3] or 0)) if match else None


def _serial(name: str) -> int:
    age = _age_of_name(name)
    return age[2] if age else 0


def _save_torch(content: Any, writer: HashingWriter) -> None:
    try:
        torch.save(content, writer)  # type: ignore[arg-type]
    except RuntimeError as error:
        # torch's zip writer answers an error of the file underneath with one of its own; the first one says more
        cause = error.__context__
        raise cause if isinstance(cause, OSError) else error from None


def _save_bytes(content: bytes, writer: HashingWriter) -> None:
    writer.write(content)


def _read_sealed(path: Path, name: str) -> bytes:
    try:
        return (path / name).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{name} {_os_reason(error)}") from None


def _check_file(path: Path, entry: FileEntry, hashed: Callable[[int], object] | None = None) -> str | None:
    try:
        return _compare(entry, *_hash_file(path, hashed))
    except OSError as error:
        return f"{entry.name} {_os_reason(error)}"


def open_checked(folder: Path, entry: FileEntry, hashed: Callable[[int], object] | None = None) -> BinaryIO:
    """A file that has been hashed through the handle that is then read: what is interpreted is what was hashed.

    ``hashed`` is told how many bytes have been hashed, piece by piece.

    Raises:
        CheckpointError: It is missing or damaged; the message begins with its name.
    """
    try:
        file = (folder / entry.name).open("rb")
    except OSError as error:
        raise CheckpointError(f"{entry.name} {_os_reason(error)}") from None
    try:
        problem = _compare(entry, *_hash_stream(file, hashed))
        if problem:
            raise CheckpointError(problem)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _compare(entry: FileEntry, digest: str, size: int) -> str | None:
    if size != entry.bytes:
        return f"{entry.name} has {size} bytes, its manifest says {entry.bytes}"
    return None if digest == entry.sha256 else f"{entry.name} fails SHA-256"


def _hash_file(path: Path, hashed: Callable[[int], object] | None = None) -> tuple[str, int]:
    with path.open("rb") as file:
        return _hash_stream(file, hashed)


def _hash_stream(file: io.BufferedIOBase | BinaryIO, hashed: Callable[[int], object] | None = None) -> tuple[str, int]:
    digest = hashlib.sha256()
    size = 0
    while chunk := file.read(1 << 20):
        digest.update(chunk)
        size += len(chunk)
        if hashed is not None:
            hashed(len(chunk))
    return digest.hexdigest(), size


def _os_reason(error: OSError) -> str:
    return "is missing" if isinstance(error, FileNotFoundError) else f"can't be read ({error.strerror or error})"


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"is malformed ({type(error).__name__}: {error})"
