"""Writes bundles beside the training: copies at the gate, files in a thread, and no error that training would feel."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from ..checkpoint.atomic import (
    HIDDEN,
    Disk,
    FileEntry,
    HashingWriter,
    publish_dir,
    remove_tree,
    replace_file,
    write_file,
)
from ..checkpoint.manifest import MANIFEST, rank_file, seal
from ..checkpoint.saving import part_name, words
from ..context import RunContext, context_of
from ..incidents import Incident
from ..journal import to_json
from ..record import StepRecord
from ..triage.peers import Peers
from .config import config_of
from .contents import SCHEMA, Part, Plan, collect, plain, plan, survey
from .place import bundle_dir, replay_command

log = logging.getLogger("lightning_sentinel")

INCIDENT, RUN, WEIGHTS = "incident.json", "run.json", "weights.pt"
MODE, DIR_MODE = 0o600, 0o700
PEER_SECONDS = 120.0  # how long rank 0 waits for the parts of the others, and they for its folder
END_SECONDS = 60.0  # how long the end of the fit waits for what is still being written
WAITING = 2  # bundles that may wait in host memory; a further one is written without weights and batch
_POLL_SECONDS = 0.05


class BundleWriter:
    """Leaves one bundle for each incident, at the first gate at which it is answered.

    Every rank calls :meth:`capture` alike: it exchanges what each would write. All else happens in a thread of each rank;
    ranks meet in the folder, without collectives.

    Args:
        capture_state: Write the parameters.
        capture_batch: Write the micro-batches; otherwise only the ids of their samples.
        bundle_bytes: What the bundles of one fit may take on disk together; later ones hold neither weights nor batch.
        disk: Filesystem operations; a test passes its own.
    """

    def __init__(
        self,
        capture_state: bool = True,
        capture_batch: bool = False,
        bundle_bytes: int = 8 * 2**30,
        disk: Disk | None = None,
    ) -> None:
        self.capture_state, self.capture_batch, self.bundle_bytes = capture_state, capture_batch, bundle_bytes
        self.disk = disk or Disk()
        self._spent = 0
        self._known: set[int] = set()
        self._mine: set[int] = set()  # of those, the bundles that this rank has its part in
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0  # bundles in the queue, this one's thread included

    # ------------------------------------------------------------------------------------------------- at the gate

    def capture(
        self,
        trainer: Trainer,
        module: LightningModule,
        optimizer: Optimizer,
        incident: Incident,
        record: StepRecord,
    ) -> None:
        """Copy what the step of a new incident was computed from, and have it written."""
        context = context_of(trainer)
        if context.run_dir is None or incident.number in self._known:
            return
        self._known.add(incident.number)
        folder = bundle_dir(context.run_dir, incident.number)
        busy = self._waiting >= WAITING
        everyone, error = Peers(trainer).measured(lambda: survey(trainer, module, record, folder, busy=busy))
        if error:
            self._failed(context, incident.number, record, error)
            return
        if any(s.there for s in everyone):
            return
        room = self.bundle_bytes - self._spent
        planned = plan(everyone, state=self.capture_state, batch=self.capture_batch, room=room)
        self._spent += planned.bytes
        try:
            config = config_of(trainer) if trainer.is_global_zero else None
            part = collect(trainer, module, optimizer, incident, record, planned, config)
        except Exception as failure:  # whatever the user's batch and state are made of: training goes on
            self._failed(context, incident.number, record, words(failure))
            return
        self._waiting += 1
        self._mine.add(incident.number)
        self._put(lambda: self._write(context, part, planned, record))

    def update(self, trainer: Trainer, incident: Incident) -> None:
        """The incident has changed: its verdict, its actions, its end."""
        context = context_of(trainer)
        if context.run_dir is None or incident.number not in self._known or not trainer.is_global_zero:
            return
        path = bundle_dir(context.run_dir, incident.number)
        now = plain(incident.to_dict())
        self._put(lambda: self._rewrite(path, now))

    def add_probe(self, trainer: Trainer, number: int, probe: Mapping[str, Any]) -> None:
        """What ``DeepProbe`` has measured on this rank at the incident; every rank adds its own to the bundle."""
        context = context_of(trainer)
        if context.run_dir is None or number not in self._mine:
            return
        folder, rank = bundle_dir(context.run_dir, number), trainer.global_rank
        measured = plain(probe)
        self._put(lambda: self._probe(folder, number, rank, measured))

    def close(self) -> None:
        """Wait for what is being written, at most :data:`END_SECONDS`; called at the end of the fit, also after an error."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._jobs.put(None)
        thread.join(2.0)
        if thread.is_alive():
            log.info("waiting for an incident's bundle to be written (at most %.0f s)", END_SECONDS)
            thread.join(END_SECONDS)
        if thread.is_alive():
            log.warning("a bundle is still being written after %.0f s; it is left unfinished", END_SECONDS)
        self._known.clear()
        self._mine.clear()
        self._spent = 0

    # ------------------------------------------------------------------------------------------------ in the thread

    def _put(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name="lightning_sentinel.bundle", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)

    def _write(self, context: RunContext, part: Part, planned: Plan, record: StepRecord) -> None:
        assert context.run_dir is not None
        begun = time.monotonic()
        final = bundle_dir(context.run_dir, part.number)
        temporary = final.with_name(f"{HIDDEN}tmp-{final.name}")
        try:
            if part.rank == 0:
                self._lead(temporary, final, part)
                size = sum(f.stat().st_size for f in final.iterdir())
                context.journal.write(
                    "incident.bundle",
                    step=record.step,
                    attempt=record.attempt,
                    tokens=record.tokens,
                    incident=part.number,
                    path=str(final.relative_to(context.run_dir)),
                    bytes=size,
                    seconds=round(time.monotonic() - begun, 3),
                    state=planned.state,
                    why_no_state=planned.why_no_state,
                    batch=planned.batch,
                    why_no_batch=planned.why_no_batch,
                    command=replay_command(context.run_dir, part.number),
                )
                context.journal.flush()
            else:
                self._follow(temporary, part)
        except Exception as error:  # a full disk, a folder that cannot be written to, a peer that is gone
            self._mine.discard(part.number)
            self._failed(context, part.number, record, words(error))
            if part.rank == 0:
                with contextlib.suppress(OSError):
                    remove_tree(self.disk, temporary)
        finally:
            self._waiting -= 1

    def _lead(self, temporary: Path, final: Path, part: Part) -> None:
        """Rank 0: make the folder, write its own, wait for the others, seal, publish."""
        final.parent.mkdir(parents=True, exist_ok=True)
        if temporary.exists():
            remove_tree(self.disk, temporary)  # a crash has left it
        if final.exists():
            raise FileExistsError(f"{final} is there already; nothing is overwritten")
        self.disk.make_dir(temporary)
        os.chmod(temporary, DIR_MODE)
        entries = self._files(temporary, part)
        missing: list[int] = []
        deadline = time.monotonic() + PEER_SECONDS
        for rank in range(1, part.world_size):
            note = temporary / part_name(rank)
            while not note.exists() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            if not note.exists():
                missing.append(rank)  # what the others have is still worth having
                continue
            entries |= {n: FileEntry(n, sha, size) for n, (sha, size) in json.loads(note.read_bytes()).items()}
            self.disk.remove(note)
        manifest = seal(
            {
                "schema": SCHEMA,
                "incident": part.number,
                "step": part.step,
                "attempt": part.attempt,
                "tokens": part.tokens,
                "world_size": part.world_size,
                "missing_ranks": missing,
                "created": round(time.time(), 3),
                "files": {n: {"sha256": e.sha256, "bytes": e.bytes} for n, e in sorted(entries.items())},
            }
        )
        digest = hashlib.sha256(manifest).hexdigest()
        story = seal({"incident": dict(part.incident), "manifest_sha256": digest})
        for name, data in ((INCIDENT, story), (MANIFEST, manifest)):
            write_file(self.disk, temporary / name, lambda w, d=data: _all(w, d), mode=MODE)  # type: ignore[misc]
        publish_dir(self.disk, temporary, final)

    def _follow(self, temporary: Path, part: Part) -> None:
        """Other ranks: wait for rank 0's folder, write into it, say what was written."""
        deadline = time.monotonic() + PEER_SECONDS
        while not temporary.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 has not begun bundle {part.number} within {PEER_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        entries = self._files(temporary, part)
        mine = {n: [e.sha256, e.bytes] for n, e in entries.items()}
        replace_file(self.disk, temporary / part_name(part.rank), json.dumps(mine).encode())

    def _files(self, folder: Path, part: Part) -> dict[str, FileEntry]:
        contents: dict[str, Any] = {rank_file(part.rank): part.own}
        if part.weights is not None:
            contents[WEIGHTS] = part.weights
        entries = {}
        for name, content in contents.items():
            entries[name] = write_file(
                self.disk,
                folder / name,
                lambda w, c=content: torch.save(c, w),  # type: ignore[misc]
                mode=MODE,
            )
        if part.run is not None:
            data = (to_json(part.run) + "\n").encode()
            entries[RUN] = write_file(self.disk, folder / RUN, lambda w: _all(w, data), mode=MODE)
        return entries

    def _probe(self, folder: Path, number: int, rank: int, measured: Any) -> None:
        if number not in self._mine:
            return  # this rank's part could not be written: the journal says why, and has the probe
        temporary, deadline = folder.with_name(f"{HIDDEN}tmp-{folder.name}"), time.monotonic() + PEER_SECONDS
        while not folder.exists():  # rank 0 waits for the parts of the others before it publishes
            if time.monotonic() > deadline or not (temporary.exists() or folder.exists()):
                log.info("the bundle %s was not published: it holds no probe of rank %d", folder, rank)
                return
            time.sleep(_POLL_SECONDS)
        try:
            self._beside_manifest(folder, probe_file(rank), {"rank": rank, "probe": measured})
        except OSError as error:  # the disk is full: the journal has it all the same
            log.info("the bundle %s holds no probe of rank %d: %s", folder, rank, words(error))

    def _beside_manifest(self, folder: Path, name: str, content: Mapping[str, Any]) -> None:
        """Write a sealed file that may change after the manifest, whose hash it names."""
        digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        replace_file(self.disk, folder / name, seal({**content, "manifest_sha256": digest}), mode=MODE)

    def _rewrite(self, path: Path, incident: Mapping[str, Any]) -> None:
        try:
            self._beside_manifest(path, INCIDENT, {"incident": dict(incident)})
        except OSError as error:  # not published, or the disk is full: the journal has it all the same
            log.info("the bundle %s was not brought up to date: %s", path, words(error))

    def _failed(self, context: RunContext, number: int, record: StepRecord, reason: str) -> None:
        log.warning("incident %d leaves no bundle: %s", number, reason)
        with contextlib.suppress(Exception):
            context.journal.write(
                "incident.bundle_failed",
                step=record.step,
                attempt=record.attempt,
                tokens=record.tokens,
                incident=number,
                reason=reason,
            )


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:
            log.exception("a bundle could not be written")


def probe_file(rank: int) -> str:
    """
    Example:
        >>> probe_file(1)
        'probe-00001.json'
    """
    return f"probe-{rank:05d}.json"


def _all(writer: HashingWriter, data: bytes) -> None:
    writer.write(data)
