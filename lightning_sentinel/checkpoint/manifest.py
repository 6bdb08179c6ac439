r"""What a checkpoint says about itself: ``manifest.json``, written last and never changed, and ``status.json``.

Both are JSON in one canonical form with a SHA-256 of their own content inside, so that a flipped bit anywhere in them,
white space included, is seen. ``status.json`` names the manifest that it belongs to: swapped files are seen too.

Example:
    >>> raw = seal({"step": 1200})
    >>> unseal(raw)
    {'step': 1200}
    >>> unseal(raw.replace(b"1200", b"1201"))
    Traceback (most recent call last):
    ...
    ValueError: fails SHA-256
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from .atomic import FileEntry

SCHEMA = 1
MANIFEST = "manifest.json"
STATUS = "status.json"
_SEAL = "sha256"


class Status(StrEnum):
    """Life of a checkpoint. ``poisoned`` is final; ``known_good`` can become ``poisoned`` when a late alarm says so."""

    CANDIDATE = "candidate"
    KNOWN_GOOD = "known_good"
    POISONED = "poisoned"


def seal(content: Mapping[str, Any]) -> bytes:
    """Canonical JSON of ``content`` with the SHA-256 of that content added."""
    if _SEAL in content:
        raise ValueError(f"{_SEAL!r} is the name of the seal itself; use another key")
    digest = hashlib.sha256(_encode(content)).hexdigest()
    return _encode({**content, _SEAL: digest})


def unseal(raw: bytes) -> dict[str, Any]:
    """The content of a sealed file; ValueError where a single bit differs from what :func:`seal` wrote."""
    try:
        content = json.loads(raw)
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(content, dict) or not isinstance(content.get(_SEAL), str):
        raise ValueError("holds no SHA-256 of its own content")
    digest = content.pop(_SEAL)
    try:
        if seal(content) == raw and hashlib.sha256(_encode(content)).hexdigest() == digest:
            return content
    except (ValueError, UnicodeEncodeError):
        pass
    raise ValueError("fails SHA-256")


def _encode(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


@dataclass(frozen=True)
class Manifest:
    """Attributes:
    step: First step that will be trained after a resume (``trainer.global_step`` at the save).
    attempt: Which pass over the steps this was.
    tokens: Tokens processed so far over all ranks.
    world_size: Ranks whose parts belong to the checkpoint.
    files: Hash and size of every file, by name.
    versions: Library versions at the save.
    created: Seconds since the epoch.
    extra: Further facts, plain JSON.
    """

    step: int
    attempt: int
    tokens: int
    world_size: int
    files: dict[str, FileEntry]
    versions: dict[str, str] = field(default_factory=dict)
    created: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        content = asdict(self) | {
            "schema": SCHEMA,
            "files": {name: {"sha256": e.sha256, "bytes": e.bytes} for name, e in sorted(self.files.items())},
        }
        return seal(content)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Manifest:
        """ValueError with the reason where the bytes are not a whole manifest of a schema known here."""
        content = unseal(raw)
        schema = content.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(f"has schema {schema!r}; this version reads schema {SCHEMA}")
        files = content.pop("files")
        return cls(files={n: FileEntry(n, e["sha256"], e["bytes"]) for n, e in files.items()}, **content)


@dataclass(frozen=True)
class StatusRecord:
    """What ``status.json`` holds: the status, why, and the SHA-256 of the manifest that it belongs to."""

    status: Status
    manifest_sha256: str
    reason: str = ""
    since_step: int | None = None
    incident: int | None = None

    def to_bytes(self) -> bytes:
        return seal(asdict(self) | {"status": str(self.status)})

    @classmethod
    def from_bytes(cls, raw: bytes) -> StatusRecord:
        content = unseal(raw)
        return cls(**{**content, "status": Status(content["status"])})


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"
