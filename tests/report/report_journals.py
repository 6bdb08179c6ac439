"""Journals as real runs write them, made without training: through the real Journal, with the incident types themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lightning_sentinel.callbacks.rank_telemetry import ALL_RANKS, outliers
from lightning_sentinel.incidents import (
    Experiment,
    Finding,
    FindingKind,
    Incident,
    IncidentStatus,
    Verdict,
    VerdictKind,
)
from lightning_sentinel.journal import Journal

TOKENS_PER_STEP = 1024
DETECTORS = {
    FindingKind.SPIKE: "spike",
    FindingKind.LEVEL_SHIFT: "spike",
    FindingKind.RANK_OUTLIER: "rank_outlier",
    FindingKind.SCALE_COLLAPSE: "loss_scale",
}


class MadeRun:
    """Plays a run: a smooth descent with noise, into which the caller puts faults, incidents and rollbacks."""

    def __init__(
        self,
        run_dir: Path,
        *,
        ranks: int = 1,
        keep: tuple[int, ...] = (0,),
        seed: int = 0,
        start: float = 5.5,
        floor: float = 2.0,
        speed: float = 60,
    ):
        # Of many ranks a few keep a journal here: that is what costs time, and no more is read.
        self.journals = [Journal(run_dir, rank) for rank in range(ranks) if ranks <= 4 or rank in keep]
        self.ranks, self.random = ranks, np.random.default_rng(seed)
        self.tokens_per_step = TOKENS_PER_STEP * ranks  # stays, whatever becomes of the number of ranks
        self.start, self.floor, self.speed = start, floor, speed
        self.step = self.attempt = 0
        self.applied: list[bool] = []
        self.scale = 1.0
        self.peak_lr, self.warmup, self.horizon = 3e-3, 20, 400
        self.bad_rank: dict[int, float] = {}
        self.slow_rank: int | None = None
        self.chance = np.random.default_rng(seed + 1)
        self.extra = 0.0
        self.lr_factor = 1.0

    @property
    def tokens(self) -> int:
        return self.step * self.tokens_per_step

    def write(self, event: str, step: int | None = None, rank: int | None = None, **fields: Any) -> None:
        for journal in self.journals if rank is None else [j for j in self.journals if j.rank == rank]:
            journal.write(
                event, step=self.step if step is None else step, attempt=self.attempt, tokens=self.tokens, **fields
            )

    def begin(self, segment: int = 0, **config: Any) -> None:
        self.write(
            "run.started",
            segment=segment,
            versions={"lightning": "2.6.6", "torch": "2.13.0"},
            world_size=self.ranks,
            strategy="DDPStrategy" if self.ranks > 1 else "SingleDeviceStrategy",
            precision="32-true",
            seeds={"torch": 1},
            config=config,
        )

    def lr(self, step: int) -> float:
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        return self.peak_lr * 0.5 * (1 + np.cos(np.pi * min(1.0, (step - self.warmup) / self.horizon)))

    def run(self, n: int, *, jump: float | list[float] = 0.0, applied: bool = True, grad: float = 1.0) -> None:
        jumps = list(jump) if isinstance(jump, list) else [jump] * n
        for i in range(n):
            base = self.floor + (self.start - self.floor) * np.exp(-self.step / self.speed) + self.extra + jumps[i]
            losses = base + 0.03 * self.random.standard_normal(self.ranks) * max(1.0, base / 3)
            for rank, loss in self.bad_rank.items():
                losses[rank] = loss + 0.3 * self.random.standard_normal()
            finite = losses[np.isfinite(losses)]
            step = self.step
            self.applied = [*self.applied[:step], applied]
            self.step += 1
            self.write(
                "step",
                step=step,
                loss=float(losses.mean()),
                loss_min=float(finite.min()) if finite.size else float("nan"),
                loss_median=float(np.median(finite)) if finite.size else float("nan"),
                loss_max=float(finite.max()) if finite.size else float("nan"),
                worst_rank=int(np.argmax(losses)),
                grad_norm=float(grad * (0.8 + 2.0 * np.exp(-step / 40)) * np.exp(0.15 * self.random.standard_normal())),
                update_norm=float(0.2 * self.lr(step) / self.peak_lr) if step % 10 == 0 else float("nan"),
                lr=[self.lr(step) * self.lr_factor],
                loss_scale=self.scale,
                data_seconds=0.002,
                **self.seconds(),
                applied=applied,
                applied_steps=sum(self.applied),
                sample_ids=[f"prose/{step:08x}/{k}" for k in range(2)],
                epoch=0,
                batch_idx=step,
                loss_bits="40000000",
                sources={},
                **({"rank_losses": losses.round(6).tolist()} if 1 < self.ranks <= ALL_RANKS else {}),
                **(
                    {"outlier_losses": {str(r): float(losses[r]) for r in outliers(losses)}}
                    if self.ranks > ALL_RANKS
                    else {}
                ),
            )
        for journal in self.journals:
            journal.flush()

    def seconds(self) -> dict[str, Any]:
        """Of a step: on several ranks all wait for the slow one, or for anybody."""
        if self.ranks == 1:
            return {"step_seconds": 0.05}
        slow = self.slow_rank
        return {
            "step_seconds": 0.05,
            "wait_seconds": 0.03,
            "own_seconds": 0.021 if slow is None else 0.04,
            "step_seconds_median": 0.05,
            "data_seconds_median": 0.001,
            "wait_seconds_median": 0.03,
            "own_seconds_median": 0.02,
            "slowest_rank": int(self.chance.integers(self.ranks)) if slow is None else slow,
        }

    def incident(
        self,
        number: int,
        kind: FindingKind,
        *,
        since: int | None = None,
        score: float = 12.0,
        threshold: float = 6.0,
        verdict: Verdict,
        unit: str = "robust sigma",
        message: str = "the loss is 4.1 nats above its band",
    ) -> Incident:
        step = self.step - 1
        finding = Finding(
            kind=kind,
            detector=DETECTORS.get(kind, "nonfinite"),
            step=step,
            score=score,
            threshold=threshold,
            unit=unit,
            message=message,
            since_step=step if since is None else since,
        )
        incident = Incident(
            number=number,
            opened_step=step,
            since_step=finding.since_step,
            attempt=self.attempt,
            tokens=self.tokens,
            findings=[finding],
        )
        self.write("incident.opened", step=step, incident=incident.to_dict())
        incident.verdict = verdict
        for experiment in verdict.experiments:
            self.write("triage.experiment", step=step, incident=number, **experiment.to_dict())
        self.write("triage.verdict", step=step, incident=number, verdict=verdict.to_dict())
        self.write("incident.updated", step=step, incident=incident.to_dict())
        return incident

    def act(self, incident: Incident, action: str, reason: str = "as the policy says", **fields: Any) -> None:
        step = self.step - 1
        incident.actions.append({"action": action, "step": step, "attempt": self.attempt, "reason": reason})
        self.write(f"action.{action}", step=step, incident=incident.number, reason=reason, **fields)
        self.write("incident.updated", step=step, incident=incident.to_dict())

    def back_to(
        self, step: int, incident: Incident, *, excluded: list[str] | None = None, action: str = "rollback_replay"
    ) -> None:
        self.act(incident, action, f"back to step {step}")
        from_step, self.step = self.step - 1, step
        self.attempt += 1
        replayed = [f"prose/{s:08x}/{k}" for s in range(step, from_step + 1) for k in range(2)]
        self.write(
            "action.rollback",
            from_step=from_step,
            to_step=step,
            action=action,
            incident=incident.number,
            replayed_ids=[i for i in replayed if i not in (excluded or [])],
            excluded_ids=excluded or [],
        )

    def close(
        self, incident: Incident, status: IncidentStatus = IncidentStatus.RECOVERED, path_z: float | None = 0.4
    ) -> None:
        incident.status, incident.closed_step, incident.path_z = status, self.step - 1, path_z
        incident.closing = "The loss is back inside the forecast band."
        self.write("incident.closed", step=self.step - 1, incident=incident.to_dict())

    def checkpoint(self, state: str = "saved", step: int | None = None) -> None:
        at = self.step if step is None else step
        self.write(f"checkpoint.{state}", step=at, path=f"checkpoints/step-{at:08d}", sha256=f"{at:064x}")

    def end(self, status: str = "finished") -> None:
        self.write("run.ended", status=status, exception=None)
        for journal in self.journals:
            journal.close()


def data_verdict(*samples: str) -> Verdict:
    return Verdict(
        VerdictKind.DATA,
        tuple(f"sample:{s}" for s in samples),
        "The batch alone gives this loss, whatever the weights.",
        reproducible=True,
        sample_ids=samples,
        experiments=(
            Experiment("replay", "equal", {"loss": 6.1, "replayed_loss": 6.1}),
            Experiment("neighbour batch", "healthy", {"loss": 2.1}),
        ),
    )


def parade(run_dir: Path) -> MadeRun:
    """One process: a corrupt batch, a transient NaN, a learning-rate spike rolled back, a level shift."""
    run = MadeRun(run_dir)
    run.begin(model={"width": 64}, optimizer={"lr": 3e-3}, data={"sources": ["prose", "code"]})
    run.write("mixture.changed", weights={"prose": 0.7, "code": 0.3}, old=None)
    run.run(100)
    run.checkpoint()
    run.run(20)
    run.checkpoint("known_good", step=100)
    run.write("fault.injected", name="corrupt_batch", fired=1)
    run.run(1, jump=4.1, applied=False, grad=20)
    first = run.incident(1, FindingKind.SPIKE, verdict=data_verdict("prose/00000078/0"))
    run.act(first, "skip_step", sample_ids=["prose/00000078/0", "prose/00000078/1"])
    run.write("quarantine.added", names=["sample:prose/00000078/0"], reason="corrupt batch", incident=1)
    run.run(19)
    run.close(first)
    run.write("fault.injected", name="transient_nan", fired=1)
    run.run(1, jump=float("nan"), applied=False, grad=float("nan"))
    second = run.incident(
        2,
        FindingKind.NONFINITE_LOSS,
        score=1,
        threshold=0,
        unit="micro-batches",
        message="1 micro-batch has a non-finite loss",
        verdict=Verdict(
            VerdictKind.INFRASTRUCTURE,
            ("module:layers.2.mixer", "rank:0"),
            "The replay is finite: not the data, not the weights.",
            reproducible=False,
            experiments=(Experiment("replay", "finite", {"loss": 2.4}),),
        ),
    )
    run.back_to(140, second, action="retry_step")
    run.run(20)
    run.close(second, path_z=0.1)
    run.run(20)
    run.checkpoint()
    run.run(10)
    run.write("fault.injected", name="lr_spike", fired=1)
    run.lr_factor = 50.0
    run.write("lr.changed", old=2e-3, new=0.1, group=0)
    run.run(6, jump=[0.1, 0.5, 1.2, 2.0, 2.8, 3.4], grad=6)
    third = run.incident(
        3,
        FindingKind.SPIKE,
        since=191,
        score=31,
        verdict=Verdict(VerdictKind.OPTIMIZATION, ("optimizer:lr",), "The rate is 50 times the planned one."),
    )
    run.lr_factor = 1.0
    run.back_to(175, third)
    run.write("lr.changed", old=0.1, new=2e-3, group=0)
    run.run(65)
    run.close(third)
    run.checkpoint("known_good", step=180)
    run.write("mixture.changed", weights={"prose": 0.5, "code": 0.5}, old={"prose": 0.7, "code": 0.3})
    run.run(30)
    run.extra = 0.55
    run.write("fault.injected", name="level_shift", fired=1)
    run.run(30)
    run.checkpoint()
    fourth = run.incident(
        4,
        FindingKind.LEVEL_SHIFT,
        since=270,
        score=9.1,
        message="the loss sits 0.55 nats higher since step 270",
        verdict=Verdict(VerdictKind.DATA, ("source:code",), "Only this source's loss has moved."),
    )
    run.checkpoint("poisoned", step=run.step)
    run.extra = 0.0
    run.back_to(250, fourth, action="rollback_skip", excluded=["source:code"])
    run.write("quarantine.added", names=["source:code"], reason="level shift", incident=4)
    run.run(80)
    run.close(fourth, path_z=0.7)
    run.run(70)
    run.checkpoint()
    run.end()
    return run


def bad_rank(run_dir: Path, ranks: int = 2, rank: int = 1) -> MadeRun:
    """Several ranks: from step 120 on one of them sits near 40, the mean moves little where the ranks are many."""
    run = MadeRun(run_dir, ranks=ranks, keep=(0, rank), seed=3)
    run.begin(data={"path": "/data"})
    run.run(100)
    run.checkpoint()
    run.run(20)
    run.write("fault.injected", rank=rank, name="bad_rank", fired=1)
    run.bad_rank = {rank: 40.0}
    run.run(1, applied=False)
    incident = run.incident(
        1,
        FindingKind.RANK_OUTLIER,
        score=90,
        message=f"rank {rank} is at 40.0 nats, the median of the ranks at 2.5",
        verdict=Verdict(
            VerdictKind.INFRASTRUCTURE, (f"rank:{rank}",), "The other ranks compute a healthy loss on its batch."
        ),
    )
    run.run(4)
    run.bad_rank = {}
    run.back_to(100, incident)
    run.run(40)
    run.close(incident, path_z=0.2)
    run.checkpoint("known_good", step=100)
    run.run(160)
    run.end()
    return run


def long_night(run_dir: Path) -> MadeRun:
    """Four ranks and everything that a page can show: one bad rank rolled back, a restart on two ranks, an open incident."""
    run = MadeRun(run_dir, ranks=4, seed=11)
    run.scale = 65536.0
    run.begin(model={"width": 64}, optimizer={"lr": 3e-3}, data={"sources": ["prose", "code"]})
    run.write("mixture.changed", weights={"prose": 0.7, "code": 0.3}, old=None)
    run.run(100)
    run.checkpoint()
    run.run(20)
    run.checkpoint("known_good", step=100)
    run.write("fault.injected", rank=2, name="bad_rank", fired=1)
    run.bad_rank = {2: 40.0}
    run.run(4)
    layer = {"module": "layers.2.mixer", "rank": 2, "healthy_rank": 0, "failing_rms": 14.25, "healthy_rms": 1.003}
    first = run.incident(
        1,
        FindingKind.RANK_OUTLIER,
        since=120,
        score=91,
        message="rank 2 is at 40.0 nats, the median of the ranks at 2.5",
        verdict=Verdict(
            VerdictKind.INFRASTRUCTURE,
            ("rank:2",),
            "The healthy ranks compute a healthy loss on rank 2's batch.",
            reproducible=False,
            experiments=(
                Experiment("replay of the batch on rank 2", "40.02 nats", {"loss": 40.02}),
                Experiment("the same batch on rank 0", "2.49 nats", {"loss": 2.49}),
            ),
            evidence={"comparisons": {"first_deviating_layer": layer}},
        ),
    )
    bundle = run_dir / "incidents" / "0001"
    bundle.mkdir(parents=True)
    run.bad_rank = {}
    run.back_to(100, first)
    run.run(50)
    run.close(first, path_z=0.2)
    run.write("infra.event", kind="ecc", text="node 1: 2 uncorrectable errors on device 0")
    run.run(20)
    run.write("mixture.changed", weights={"prose": 0.5, "code": 0.5}, old={"prose": 0.7, "code": 0.3})
    run.run(10)
    run.write("scaler.overflow", old_scale=65536.0, new_scale=32768.0, rank=0, parameters=["head.weight"])
    run.scale = 32768.0
    run.run(20)
    run.checkpoint()  # of step 200
    run.run(10)
    # Killed; the launcher starts it again, on the two ranks that are left, from the newest checkpoint.
    run.ranks, run.step, run.attempt = 2, 200, 2
    run.begin(segment=1)
    run.write("run.resumed", checkpoint="checkpoints/step-00000200", epoch=0)
    run.write("topology.changed", old_world_size=4, world_size=2)
    run.run(20)
    run.checkpoint("known_good", step=200)
    run.run(20)
    run.lr_factor = 0.5
    run.write("lr.changed", old=3e-3, new=1.5e-3, group=0)
    run.run(20)
    run.write("infra.event", kind="experiment", text="higher dropout from here on, ticket 41")
    run.run(10)
    run.run(1, jump=4.1, applied=False, grad=20)
    second = run.incident(2, FindingKind.SPIKE, verdict=data_verdict("prose/0000010e/0"))
    run.act(second, "skip_step", sample_ids=["prose/0000010e/0", "prose/0000010e/1"])
    run.write("quarantine.added", names=["sample:prose/0000010e/0"], reason="corrupt batch", incident=2)
    run.run(19)
    run.close(second)
    run.run(10)
    run.extra = 0.55
    run.run(10)
    run.checkpoint()  # of step 310
    run.run(10)
    run.checkpoint("poisoned", step=310)
    run.checkpoint()  # of step 320
    third = run.incident(
        3,
        FindingKind.LEVEL_SHIFT,
        since=300,
        score=9.1,
        message="the loss sits 0.55 nats higher since step 300",
        verdict=Verdict(VerdictKind.OPTIMIZATION, ("optimizer:lr",), "The rate is too high for the new batch."),
    )
    reduced = {"factor": 0.5, "from": run.step - 1, "until": None, "incident": 3}
    run.act(third, "reduce_lr", "half the rate for good")
    run.write("experiment.started", kind="reduce_lr", experiment=f"lr-3-{run.step - 1}", **reduced)
    run.run(30)
    for journal in run.journals:
        journal.close()
    return run


def fp16_run(run_dir: Path) -> MadeRun:
    """Loss scale events, an open incident, and a run that ends with an exception."""
    run = MadeRun(run_dir, seed=5)
    run.scale = 65536.0
    run.begin(precision="16-mixed")
    run.run(60)
    run.write("scaler.overflow", old_scale=65536.0, new_scale=32768.0, rank=0, parameters=["head.weight"])
    run.scale = 32768.0
    run.run(60)
    for _ in range(8):
        run.write("scaler.backoff", old_scale=run.scale, new_scale=run.scale / 2, rank=0, parameters=["head.weight"])
        run.scale /= 2
        run.run(1, applied=False)
    run.incident(
        1,
        FindingKind.SCALE_COLLAPSE,
        score=8,
        threshold=4,
        unit="overflows in a row",
        message="8 overflows in a row",
        verdict=Verdict(VerdictKind.NUMERICS, ("module:layers.1.mlp",), "Activations beyond 65504."),
    )
    run.run(10)
    run.end("failed")
    return run
