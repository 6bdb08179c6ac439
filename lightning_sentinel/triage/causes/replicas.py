"""The ranks' replicas against each other: who has parted, and since when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...incidents import Finding, FindingKind, Verdict, VerdictKind
from ...state.fingerprint import fingerprints, parted_ranks
from .. import experiments as ex
from ..ladder import Ladder
from ..window import tensors


class Replicas(Ladder):
    """Weights of the ranks against each other."""

    def _compare_replicas(self) -> list[int]:
        """Ranks whose parameters differ from the others'; the experiment is put down."""
        if self.peers.size == 1:
            return []
        if any(hasattr(p, "_local_tensor") for p in self.module.parameters()):
            self.note("replicas", "not compared: the parameters are sharded")
            return []
        compared = self._fingerprints("replicas", lambda: self.module.named_parameters())
        if compared is None:
            return []
        self.parameter_names, tables = compared
        parted, rows = parted_ranks(tables)
        if not parted:
            self.note("replicas", "equal to the bit", tensors=len(self.parameter_names))
            return []
        differing = [self.parameter_names[i] for i in rows]
        self.note("replicas", "differ", ranks=parted, parameters=differing[:8], tensors=len(differing))
        self.parted_parameters = differing
        return parted

    def _fingerprints(
        self, name: str, named: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> tuple[list[str], Tensor] | None:
        """Names and every rank's fingerprints of these tensors, ``[world_size, n, 2]``; None where a rank has others."""

        def measure() -> tuple[list[str], Any]:
            names, table = fingerprints(named(), self.trainer.strategy.root_device)
            return names, table.cpu().numpy()

        everyone = self.measured(name, measure)
        if everyone is None:
            return None
        if any(names != everyone[0][0] for names, _ in everyone):
            self.note(name, "not available", reason="the ranks hold tensors of different names")
            return None
        return everyone[0][0], torch.stack([torch.from_numpy(table) for _, table in everyone])

    def replicas(self) -> Verdict | None:
        """Weights of the ranks against each other; the rank that is alone in its weights is convicted."""
        drift = [f for f in self.findings if f.kind is FindingKind.REPLICA_DRIFT]
        if drift:
            return self._drifted(drift[0])
        parted = self._compare_replicas()
        if not parted:
            return None
        if len(parted) == self.peers.size:
            parted = self._who_left()
        since = self._newest_equal_snapshot()
        named = ", ".join(self.parted_parameters[:3])
        sentence = (
            f"The weights of the ranks differ ({named}), rank {', '.join(map(str, parted)) or '?'} from the others."
        )
        if not parted:
            return self.verdict(
                VerdictKind.INFRASTRUCTURE, (), sentence, since=since, parameters=self.parted_parameters[:8]
            )
        culprits = [f"rank:{r}" for r in parted]
        return self.verdict(
            VerdictKind.INFRASTRUCTURE, culprits, sentence, since=since, parameters=self.parted_parameters[:8]
        )

    def _drifted(self, finding: Finding) -> Verdict:
        """``ReplicaConsistency`` has compared all there is, and named the rank where the replicas alone can tell it."""
        named = list(finding.ranks)
        tensors = [c for c in finding.culprits if not c.startswith("rank:")]
        self.note(
            "replicas", "differ", ranks=named, tensors=int(finding.score), decided_by=finding.evidence["decided_by"]
        )
        sentence = finding.message
        if not named and self._compare_replicas():
            named = self._who_left()
            if named:
                sentence += f" Rank {', '.join(map(str, named))} lies farther from the last common snapshot."
        since = self._newest_equal_snapshot(state=True)
        return self.verdict(
            VerdictKind.INFRASTRUCTURE,
            [*(f"rank:{r}" for r in named), *tensors],
            sentence,
            since=max(min(since, self.record.step), finding.since_step),
            decided_by=finding.evidence["decided_by"] if finding.ranks else "snapshot" if named else "nobody",
        )

    def _who_left(self) -> list[int]:
        """Without a majority: the rank that is farther from the common snapshot than the others, or whose loss is."""
        base = self.snapshots[-1].params if self.snapshots else None
        differing = set(self.parted_parameters)

        def measure() -> float:
            named = ((n, p) for n, p in self.module.named_parameters() if n in differing)
            return math.nan if base is None else ex.distance(named, base)

        far = np.array(self.measured("distance from the snapshot", measure) or [math.nan])
        if np.isfinite(far).all():
            others = float(np.min(far))
            guilty = [r for r, d in enumerate(far) if d > 3.0 * others + 1e-12]
            self.note("distance from the snapshot", "parted" if guilty else "alike", distances=[float(d) for d in far])
            if guilty and len(guilty) < len(far):
                return guilty
        named_ranks = sorted({r for f in self.findings if f.kind is FindingKind.RANK_OUTLIER for r in f.ranks})
        return named_ranks if len(named_ranks) < self.peers.size else []

    def _newest_equal_snapshot(self, state: bool = False) -> int:
        """Step of the newest snapshot in which the ranks' parameters are equal; else the incident's first step.

        With ``state`` the optimizers' state must be equal, too.
        """
        for snapshot in reversed(self.snapshots):
            params = sorted((snapshot.params or {}).items())
            if state:
                params += [(f"state {i}", t) for i, t in enumerate(tensors(snapshot.optimizers))]
            compared = self._fingerprints("snapshots", lambda params=params: params)  # type: ignore[misc]
            if compared is not None and not parted_ranks(compared[1])[0]:
                self.note("snapshots", "replicas are equal", step=snapshot.step)
                return snapshot.step
        return self.since
