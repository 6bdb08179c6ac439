"""What is known without an experiment: invalid inputs, a restart, slow ranks, a state that was given so."""

from __future__ import annotations

from ...incidents import FindingKind, Verdict, VerdictKind
from ..ladder import Ladder

DATA_FINDINGS = frozenset(
    {
        FindingKind.INVALID_BATCH,
        FindingKind.NO_SUPERVISED_TOKENS,
        FindingKind.REPEATED_SAMPLES,
        FindingKind.UNSEEN_SAMPLES,
    }
)


class Known(Ladder):
    """Findings that are measurements already."""

    def inputs(self) -> Verdict | None:
        """What the batch validator found in the step's inputs."""
        found = [f for f in self.findings if f.kind in DATA_FINDINGS]
        if not found:
            self.note("inputs", "valid, as far as they are checked", samples=len(self.record.sample_ids))
            return None
        culprits = [c for f in found for c in f.culprits]
        samples = [c.removeprefix("sample:") for c in culprits if c.startswith("sample:")]
        since = min(f.since_step for f in found)
        kinds = sorted({str(f.kind) for f in found})
        self.note("inputs", "invalid", kinds=kinds, culprits=culprits[:32], since_step=since)
        if "cursor" in culprits:
            culprits, samples = ["cursor"], []
        sentence = self.said(found)
        return self.verdict(VerdictKind.DATA, culprits, sentence, since=since, samples=samples, kinds=kinds)

    def restart(self) -> Verdict | None:
        """What differs from the checkpoint after a restart."""
        found = [f for f in self.findings if f.kind is FindingKind.RESTART_JUMP]
        aligned = any(f.restart_aligned for f in self.findings)
        if not found:
            if aligned:
                self.note("restart", "near, nothing differs", restart_step=self.record.restart_step)
            return None
        culprits = [c for f in found for c in f.culprits]
        self.note("restart", "differs from the checkpoint", culprits=culprits, restart_step=self.record.restart_step)
        if "cursor" in culprits:
            kind, culprits = VerdictKind.DATA, ["cursor"]
        elif any(c == "scheduler" or c.startswith("optimizer:") for c in culprits):
            kind = VerdictKind.OPTIMIZATION
        else:
            kind = VerdictKind.UNDETERMINED
        sentence = self.said(found)
        since = min(f.since_step for f in found)
        return self.verdict(kind, culprits, sentence, since=since, restart_aligned=True)

    def stragglers(self) -> Verdict | None:
        """A rank that is only slow needs no experiment: the seconds of all ranks are the measurement."""
        if not self.kinds or self.kinds - {FindingKind.STRAGGLER}:
            return None
        ranks = sorted({r for f in self.findings for r in f.ranks})
        columns = {c: [float(x) for x in self.record.column(f"{c}_seconds")[:64]] for c in ("step", "data", "wait")}
        self.note("step time", "slow ranks", ranks=ranks, **columns)
        sentence = " ".join(f.message for f in self.findings[:4])
        return self.verdict(VerdictKind.INFRASTRUCTURE, [f"rank:{r}" for r in ranks], sentence)

    def no_gradient(self) -> Verdict | None:
        """A step in which nothing was to be learned: a replay would give nothing again."""
        if not self.kinds or self.kinds - {FindingKind.NO_GRADIENT}:
            return None
        return self.verdict(VerdictKind.UNDETERMINED, (), self.said(self.findings))

    def given_state(self) -> Verdict | None:
        """Parameters and buffers that were not finite before the first step."""
        found = [f for f in self.findings if f.kind is FindingKind.NONFINITE_STATE]
        if not found:
            return None
        culprits = [c for f in found for c in f.culprits]
        self.note("initial state", "not finite", culprits=culprits[:32])
        return self.verdict(VerdictKind.NUMERICS, culprits, found[0].message, since=0, reproducible=True)
