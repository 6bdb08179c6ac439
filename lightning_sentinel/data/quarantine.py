"""Who is not drawn any more: an append-only ledger of quarantined samples and sources.

Names are written ``sample:<id>`` and ``source:<name>``. Each entry says who, when, at which step, by which incident, under
which policy and why; a revert is a further entry with its own reason, nothing is ever erased. On disk the ledger is one JSON
line for each entry in ``<run_dir>/quarantine.jsonl``, written with one system call and synced, so that a crash can at worst
truncate the last line, which reading skips. A ledger is never taken back by a rollback.

Example:
    >>> ledger = QuarantineLedger()
    >>> ledger.add(["sample:prose/3fa9c1d2e0/4096"], step=120, incident=1, policy="recover", reason="random tokens")
    >>> sorted(ledger.active)
    ['sample:prose/3fa9c1d2e0/4096']
    >>> ledger.revert("sample:prose/3fa9c1d2e0/4096", "read by a person: a table of numbers, harmless")
    >>> sorted(ledger.active)
    []
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

log = logging.getLogger("lightning_sentinel")

FILE_NAME = "quarantine.jsonl"
PREFIXES = ("sample:", "source:")
SCHEMA = 1


@dataclass(frozen=True)
class Entry:
    """One line of the ledger.

    Attributes:
        event: ``added`` or ``reverted``.
        name: ``sample:<id>`` or ``source:<name>``.
        time: Seconds since the epoch.
        step: Optimizer step at which it was decided; None for a revert by a person.
        incident: Number of the incident that led to it, or None.
        policy: Policy in force, e.g. ``recover``; empty for a revert.
        reason: A sentence.
    """

    event: str
    name: str
    time: float
    step: int | None
    incident: int | None
    policy: str
    reason: str

    @property
    def key(self) -> tuple[str, str, int | None, int | None, str]:
        """What makes an entry the same on every rank and in every copy (clocks differ)."""
        return self.event, self.name, self.step, self.incident, self.reason

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Entry:
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise ValueError(f"a quarantine entry is {data!r:.100}, expected schema {SCHEMA}")
        entry = cls(
            event=str(data["event"]),
            name=check_name(data["name"]),
            time=float(data["time"]),
            step=None if data["step"] is None else int(data["step"]),
            incident=None if data["incident"] is None else int(data["incident"]),
            policy=str(data["policy"]),
            reason=str(data["reason"]),
        )
        if entry.event not in ("added", "reverted"):
            raise ValueError(f"quarantine entry has event {entry.event!r}, expected 'added' or 'reverted'")
        return entry


def check_name(name: Any) -> str:
    """The name itself if it can be quarantined."""
    if isinstance(name, str) and name.startswith(PREFIXES) and not name.endswith(PREFIXES):
        return name
    raise ValueError(f"{name!r} can not be quarantined; write 'sample:<id>' or 'source:<name>'")


class QuarantineLedger:
    """Quarantined samples and sources of a run.

    Args:
        path: JSON lines file to read now and to append to, or None to keep the ledger in memory only.
        write: False reads the file but never writes it (all ranks but the first).
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, write: bool = True) -> None:
        self.path = None if path is None else Path(path)
        self.entries: list[Entry] = []
        self.unreadable_lines = 0
        self.write_error: str | None = None
        self._write = write
        if self.path is not None:
            self.entries, self.unreadable_lines = read_ledger(self.path)

    @property
    def active(self) -> frozenset[str]:
        """Names that are quarantined now."""
        names: set[str] = set()
        for entry in self.entries:
            if entry.event == "added":
                names.add(entry.name)
            else:
                names.discard(entry.name)
        return frozenset(names)

    def add(self, names: Sequence[str], *, step: int | None, incident: int | None, policy: str, reason: str) -> None:
        """Quarantine ``names``; those that are quarantined already keep their first entry."""
        if isinstance(names, str):
            names = [names]
        active = self.active
        new = [name for name in dict.fromkeys(check_name(n) for n in names) if name not in active]
        now = time.time()
        self._append([Entry("added", name, now, step, incident, policy, reason) for name in new])

    def revert(self, name: str, reason: str, *, step: int | None = None) -> None:
        """Let ``name`` be drawn again, from the next :meth:`apply` on."""
        if not reason.strip():
            raise ValueError(f"reverting the quarantine of {name!r} needs a reason; the ledger keeps it")
        active = self.active
        if check_name(name) not in active:
            near = get_close_matches(name, active, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; {len(active)} names are"
            raise KeyError(f"{name!r} is not quarantined{hint}")
        self._append([Entry("reverted", name, time.time(), step, None, "", reason)])

    def apply(self, loaders: Iterable[Any]) -> list[str]:
        """Give the active names to every loader that has ``exclude(names)``.

        ``exclude`` takes *all* names that are not to be drawn from now on, so that a reverted one is drawn again.

        Returns:
            A sentence for each loader that could not follow; empty if all did.
        """
        names = sorted(self.active)
        problems = []
        for loader in loaders:
            kind = type(loader).__name__
            exclude = getattr(loader, "exclude", None)
            if exclude is None:
                if names:
                    problems.append(
                        f"{kind} has no exclude(names), so its {len(names)} quarantined names are still drawn; use"
                        " lightning_sentinel.data.mixture.MixtureLoader or give the loader an exclude method."
                    )
                continue
            try:
                exclude(names)
            except ValueError as error:
                problems.append(f"{kind} refuses the quarantine: {error}")
        return problems

    def state_dict(self) -> dict[str, Any]:
        return {"entries": [entry.to_dict() for entry in self.entries]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over entries that this ledger lacks; nothing that is known already is forgotten."""
        known = {entry.key for entry in self.entries}
        self._append([e for e in map(Entry.from_dict, state["entries"]) if e.key not in known])

    def _append(self, entries: Sequence[Entry]) -> None:
        self.entries.extend(entries)
        if not entries or self.path is None or not self._write:
            return
        lines = "".join(json.dumps(entry.to_dict(), allow_nan=False) + "\n" for entry in entries)
        try:
            append_lines(self.path, lines)
        except OSError as error:
            # the quarantine itself holds; only its record on disk is missing, and training must not stop for that
            if self.write_error is None:
                log.warning("The quarantine ledger %s can not be written (%s); it is kept in memory.", self.path, error)
            self.write_error = str(error)


def append_lines(path: Path, lines: str) -> None:
    """Append whole lines with one write and sync; a truncated last line is closed off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.lseek(descriptor, 0, os.SEEK_END)
        if size > 0 and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = "\n" + lines
        data = lines.encode()
        written = os.write(descriptor, data)
        if written != len(data):
            raise OSError(f"only {written} of {len(data)} bytes were written")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_ledger(path: Path) -> tuple[list[Entry], int]:
    """Entries of a ledger file and the number of lines that could not be read; a missing file is an empty ledger."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return [], 0
    except OSError as error:
        log.warning("The quarantine ledger %s can not be read: %s", path, error)
        return [], 0
    entries, unreadable = [], 0
    for line_number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            entries.append(Entry.from_dict(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            unreadable += 1
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            log.warning("Line %d of the quarantine ledger %s is skipped: %s", line_number, path, why)
    return entries, unreadable
