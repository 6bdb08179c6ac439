"""Reads a bundle back. Every hash is checked before anything is interpreted, and nothing in it can run code."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..checkpoint.atomic import FileEntry
from ..checkpoint.manifest import MANIFEST, rank_file, unseal
from ..checkpoint.plain import decode
from ..checkpoint.store import CheckpointError, open_checked
from ..incidents import Incident
from ..state.shards import Assembly, Part
from .contents import SCHEMA
from .place import bundle_dir, incidents_dir
from .writing import INCIDENT, RUN, WEIGHTS, probe_file


class BundleError(ValueError):
    """A bundle that must not or cannot be used; the message names the file, the reason and what to do."""


@dataclass(frozen=True)
class Bundle:
    """A bundle whose every file has the hash that its manifest names.

    Attributes:
        path: Its folder.
        manifest: Step, attempt, tokens, world size, missing ranks and files.
        incident: The incident as it was when the bundle was last brought up to date.
        run: Record, history, configuration, numerics and versions; see ``docs/replay.md``.
        probes: By rank, what ``DeepProbe`` measured there at the incident's step: the fields of ``probe.deep`` with step,
            attempt and tokens. Empty where there was no probe; a rank that could not write into the folder is missing.
    """

    path: Path
    manifest: dict[str, Any]
    incident: Incident
    run: dict[str, Any]
    probes: dict[int, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, run_dir: str | Path, incident: int) -> Bundle:
        """The bundle of one incident; :class:`BundleError` names what is missing or damaged."""
        run_dir = Path(run_dir)
        path = bundle_dir(run_dir, incident)
        if not path.is_dir():
            there = bundles(run_dir)
            have = f"there are bundles of {', '.join(map(str, there))}" if there else "there is no bundle at all"
            raise BundleError(
                f"{run_dir} has no bundle of incident {incident}; {have}. `lightning-sentinel report {run_dir}` lists the"
                " run's incidents; the journal's line incident.bundle_failed says why one has no bundle."
            )
        raw = _bytes(path, MANIFEST)
        try:
            manifest = unseal(raw)
        except ValueError as error:
            raise _damaged(f"{path / MANIFEST} {error}") from None
        if manifest.get("schema") != SCHEMA:
            raise BundleError(
                f"{path / MANIFEST} has schema {manifest.get('schema')!r}; this version reads schema {SCHEMA}."
            )
        for name in manifest["files"]:
            _check(path, name, manifest)
        story = _sealed(path, INCIDENT, raw)
        run = json.loads(_checked(path, RUN, manifest))
        return cls(path, manifest, Incident.from_dict(story["incident"]), run, _probes(path, manifest, raw))

    @property
    def probe(self) -> dict[str, Any] | None:
        """Rank 0's probe, or None."""
        return self.probes.get(0)

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def world_size(self) -> int:
        return int(self.manifest["world_size"])

    @property
    def ranks(self) -> list[int]:
        """Ranks whose part is there."""
        return [r for r in range(self.world_size) if r not in self.manifest["missing_ranks"]]

    @property
    def has_state(self) -> bool:
        return WEIGHTS in self.manifest["files"]

    def rank(self, rank: int) -> dict[str, Any]:
        """One rank's part: micro-batches, random states, buffers, losses."""
        found: dict[str, Any] = self._torch(rank_file(rank))
        return found

    def weights(self, rank: int = 0) -> dict[str, Tensor]:
        """Parameters of one rank at the gate of the step, by name."""
        shared: dict[str, Tensor] = self._torch(WEIGHTS)
        own = (self.rank(rank).get("own_weights") if rank else None) or {}
        return shared | own | (self._whole(shared) if self.rank(0)["layout"] else {})

    def _whole(self, first: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sharded parameters, put together from every rank's part."""
        if self.ranks != list(range(self.world_size)):
            raise BundleError(
                f"{self.path} lacks the parts of the ranks {self.manifest['missing_ranks']}, and the parameters are sharded"
                " over all of them."
            )
        whole: dict[str, Assembly] = {}
        for rank in self.ranks:
            part = self.rank(rank)
            mine = first if rank == 0 else part["own_weights"]
            for name, place in part["layout"].items():
                if name not in whole:
                    shape = tuple(place[0])
                    whole[name] = Assembly(Part(shape, (0,) * len(shape), shape), mine[name].dtype)
                whole[name].add(mine[name], Part.at(place, mine[name]))
        return {name: assembly.tensor for name, assembly in whole.items()}

    def _torch(self, name: str) -> Any:
        if name not in self.manifest["files"]:
            raise BundleError(f"{self.path} has no {name}.")
        with _open_checked(self.path, name, self.manifest) as file:
            return decode(torch.load(file, map_location="cpu", weights_only=True))


def bundles(run_dir: str | Path) -> list[int]:
    """Numbers of the incidents that have a bundle, in order."""
    folder = incidents_dir(Path(run_dir))
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.is_dir() and p.name.isdecimal())


def _damaged(what: str) -> BundleError:
    return BundleError(f"{what}; the bundle is damaged and is not used. Put an undamaged copy there.")


def _probes(path: Path, manifest: dict[str, Any], raw: bytes) -> dict[int, dict[str, Any]]:
    names = {r: probe_file(r) for r in range(int(manifest["world_size"])) if (path / probe_file(r)).is_file()}
    return {r: _sealed(path, name, raw)["probe"] for r, name in names.items()}


def _sealed(path: Path, name: str, manifest: bytes) -> dict[str, Any]:
    """A file that was written beside the manifest and names its hash."""
    try:
        content = unseal(_bytes(path, name))
    except ValueError as error:
        raise _damaged(f"{path / name} {error}") from None
    if content["manifest_sha256"] != hashlib.sha256(manifest).hexdigest():
        raise BundleError(f"{path / name} belongs to another bundle (it names another {MANIFEST}).")
    return content


def _bytes(path: Path, name: str) -> bytes:
    try:
        return (path / name).read_bytes()
    except FileNotFoundError:
        raise _damaged(f"{path / name} is missing") from None


def _check(path: Path, name: str, manifest: dict[str, Any]) -> None:
    _open_checked(path, name, manifest).close()


def _checked(path: Path, name: str, manifest: dict[str, Any]) -> bytes:
    with _open_checked(path, name, manifest) as file:
        return file.read()


def _open_checked(path: Path, name: str, manifest: dict[str, Any]) -> BinaryIO:
    """The file, hashed through the handle that is then read: what is interpreted is what was hashed."""
    entry = manifest["files"].get(name)
    if entry is None or Path(name).name != name:
        raise BundleError(f"{path / MANIFEST} names no file {name!r} that could be read.")
    try:
        return open_checked(path, FileEntry(name, entry["sha256"], entry["bytes"]))
    except CheckpointError as error:
        raise _damaged(str(path / str(error))) from None
