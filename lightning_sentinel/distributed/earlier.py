"""What the journals in a run folder say about earlier fits, over all ranks, and what has changed since.

Example:
    >>> before = Earlier(world_sizes=[2], ranks={0: RankBefore("a", 9, True), 1: RankBefore("b", 8, False)})
    >>> changes(before, ["a", "c"], restarts=1)  # doctest: +NORMALIZE_WHITESPACE
    [('restart', 'torchelastic has started the workers anew, restart number 1'),
     ('lost_rank', 'rank 1 (host b) ended without a word after step 8'),
     ('host', 'rank 1 runs on host c, before on b')]
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..journal import journal_files, parse_line
from .lost import listed

log = logging.getLogger("lightning_sentinel")

_POSITION = re.compile(rb'"attempt":(\d+),"step":(-?\d+),"tokens":\d+,"event":"([^"]+)"')


@dataclass
class RankBefore:
    """The newest fit of one rank: its host, the newest step that its journal holds, and whether it said that it ended."""

    host: str = ""
    step: int = 0
    ended: bool = False


@dataclass
class Earlier:
    """What the journals of some ranks say about earlier fits in the same run folder.

    Attributes:
        world_sizes: One for each fit, as rank 0 knows them.
        attempt: Highest attempt; 0 without any.
        reached: Highest value of ``global_step`` that has been seen.
        incident: Highest number of an incident; 0 without any.
        ranks: The newest fit of each rank.
    """

    world_sizes: list[int] = field(default_factory=list)
    attempt: int = 0
    reached: int = 0
    incident: int = 0
    ranks: dict[int, RankBefore] = field(default_factory=dict)

    def take(self, raw: bytes, rank: int = 0) -> None:
        """Take one line in. Step lines, most of all, are not decoded."""
        position = _POSITION.search(raw, 0, 300)
        if position is None:
            return
        attempt, step, event = int(position[1]), int(position[2]), position[3]
        self.attempt = max(self.attempt, attempt)
        # a step line is written when its step is done
        self.reached = max(self.reached, step + (event == b"step"))
        mine = self.ranks.setdefault(rank, RankBefore())
        mine.step = step
        if event == b"run.started":
            started = parse_line(raw)
            self.ranks[rank] = RankBefore(str(started.get("host") or ""))
            if rank == 0:
                self.world_sizes.append(int(started.get("world_size", 1)))
        elif event == b"run.ended":
            mine.ended = True
        elif event.startswith(b"incident."):
            incident = parse_line(raw).get("incident")
            if isinstance(incident, dict) and isinstance(incident.get("number"), int):
                self.incident = max(self.incident, incident["number"])

    @classmethod
    def merged(cls, parts: Iterable[Earlier]) -> Earlier:
        """Of all ranks together. A kill costs each rank other lines, so the furthest counts."""
        found = cls()
        for part in parts:
            found.world_sizes = part.world_sizes or found.world_sizes
            found.attempt = max(found.attempt, part.attempt)
            found.reached = max(found.reached, part.reached)
            found.incident = max(found.incident, part.incident)
            found.ranks |= part.ranks
        return found


def read_earlier(run_dir: Path, rank: int, world_size: int) -> Earlier:
    """This rank's part of the reading: its own journal, and those of ranks that there were once but are no more."""
    found = Earlier()
    for path in journal_files(run_dir):
        owner = int(path.name.removeprefix("rank-").split(".")[0])
        if owner % world_size != rank:
            continue
        try:
            with path.open("rb") as file:
                for raw in file:
                    with contextlib.suppress(ValueError):  # a line that a kill has cut short
                        found.take(raw, owner)
        except OSError as error:
            log.warning("The earlier journal %s cannot be read whole: %s", path, error)
    return found


def changes(before: Earlier, hosts: Sequence[str], restarts: int) -> list[tuple[str, str]]:
    """Infrastructure events of a new fit in an old run folder, ``(kind, text)`` each; empty where all is as it was.

    Args:
        before: What all ranks' journals say.
        hosts: Host name of each rank now.
        restarts: How often torchelastic has started the workers anew, 0 elsewhere.
    """
    found = []
    if restarts:
        found.append(("restart", f"torchelastic has started the workers anew, restart number {restarts}"))
    if not before.world_sizes:
        return found
    last = {rank: before.ranks[rank] for rank in range(before.world_sizes[-1]) if rank in before.ranks}
    lost = [
        f"rank {rank}{f' (host {r.host})' if r.host else ''} ended without a word after step {r.step}"
        for rank, r in last.items()
        if not r.ended
    ]
    if lost:
        found.append(("lost_rank", listed(lost)))
    moved = [
        f"rank {rank} runs on host {host}, before on {last[rank].host}"
        for rank, host in enumerate(hosts)
        if rank in last and last[rank].host not in ("", host)
    ]
    if moved:
        found.append(("host", listed(moved)))
    return found
