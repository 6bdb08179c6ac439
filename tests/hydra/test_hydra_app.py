"""The suite's groups in somebody else's application, made in the style of lightning-hydra-template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import collective_limit
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from template_app import result_of, run_app, write_app

import lightning_sentinel
from lightning_sentinel.callbacks.defaults import ORDER
from lightning_sentinel.conf.generate import CALLBACKS
from lightning_sentinel.config import build_callbacks, misspelt_overrides

SUITE = [kind.__name__ for kind in ORDER]


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return write_app(tmp_path)


@pytest.fixture(autouse=True)
def fresh_hydra() -> Iterator[None]:
    GlobalHydra.instance().clear()
    yield
    GlobalHydra.instance().clear()


def config(app: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(app.parent.parent / "configs"), version_base="1.3"):
        return compose("train", ["paths.output_dir=out", *overrides])


def test_default_brings_the_whole_suite_in_order(app: Path) -> None:
    cfg = config(app)
    assert list(cfg.callbacks) == list(CALLBACKS)
    assert [type(c).__name__ for c in build_callbacks(cfg.callbacks)] == SUITE
    assert cfg.policy == {"mode": "observe", "ladders": {}, "budgets": {}}


def test_beside_the_application_s_own_callbacks(app: Path) -> None:
    cfg = config(app, "callbacks=many")
    assert list(cfg.callbacks) == ["model_checkpoint", *CALLBACKS]
    assert [type(c).__name__ for c in build_callbacks(cfg.callbacks)] == ["ModelCheckpoint", *SUITE]


def test_only_some_of_them(app: Path) -> None:
    cfg = config(app, "callbacks=[sentinel/spike_detector,sentinel/rank_telemetry]")
    assert list(cfg.callbacks) == ["spike_detector", "rank_telemetry"]


def test_null_removes_one_and_an_experiment_overrides(app: Path) -> None:
    cfg = config(app, "callbacks.rollback=null")
    assert [type(c).__name__ for c in build_callbacks(cfg.callbacks)] == [n for n in SUITE if n != "Rollback"]
    cfg = config(app, "experiment=strict")
    built = {type(c).__name__: c for c in build_callbacks(cfg.callbacks)}
    assert list(built) == [n for n in SUITE if n != "Rollback"]
    spikes, response = built["SpikeDetector"], built["IncidentResponse"]
    assert isinstance(spikes, lightning_sentinel.SpikeDetector)
    assert spikes.detector.threshold == 9.5
    assert isinstance(response, lightning_sentinel.IncidentResponse)
    assert response.policy.mode == "guard"


def test_values_reach_the_constructors_as_plain_ones(app: Path) -> None:
    overrides = [
        "callbacks.nonfinite_tracer.boundaries=[layers.*,head]",
        "+policy.ladders={numerics/step: [skip_step, stop]}",
        "+policy.budgets={stop: 3}",
    ]
    built = {type(c).__name__: c for c in build_callbacks(config(app, *overrides).callbacks)}
    tracer, response = built["NonFiniteTracer"], built["IncidentResponse"]
    assert isinstance(tracer, lightning_sentinel.NonFiniteTracer)
    assert tracer.boundaries == ["layers.*", "head"]
    assert type(tracer.boundaries) is list
    assert isinstance(response, lightning_sentinel.IncidentResponse)
    assert response.policy.ladders["numerics/step"] == ("skip_step", "stop")
    assert response.policy.budgets["stop"] == 3


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["callbacks.spike_detector.treshold=3"],
            ["callbacks.spike_detector.treshold: no such key. Nearest valid name: callbacks.spike_detector.threshold"],
        ),
        (["policy=recver"], ["policy=recver: no such option. Nearest valid name: recover."]),
        (["-m", "policy=recover,gaurd"], ["policy=gaurd: no such option. Nearest valid name: guard."]),
        (
            ["callbacks=sentinel/defualt"],
            ["callbacks=sentinel/defualt: no such option. Nearest valid name: sentinel/default."],
        ),
        (
            ["policy=guard", "policy.mod=x", "trainer.max_step=3"],
            [
                "policy.mod: no such key. Nearest valid name: policy.mode",
                "trainer.max_step: no such key. Nearest valid name: trainer.max_steps",
            ],
        ),
        (["--config-name", "train", "sede=3"], ["sede: no such key. Nearest valid name: seed"]),
        (["+new.key=3", "~policy", "callbacks.rollback=null", "policy=guard", "seed=2", "hydra.run.dir=x"], []),
        (["policy=recver", "--config-name=missing"], []),
        (["seed=[1"], []),
    ],
)
def test_misspelt_overrides_are_named(app: Path, arguments: list[str], lines: list[str]) -> None:
    assert misspelt_overrides(arguments, app.parent.parent / "configs", "train") == lines


@pytest.mark.slow
def test_multirun_over_the_policies(app: Path) -> None:
    quiet = ["callbacks.run_journal.report=false", "hydra.sweep.dir=out"]
    done = run_app(app, "-m", "policy=observe,guard,recover", *quiet)
    assert done.returncode == 0, done.stderr
    out = app.parent.parent / "out"
    results = [result_of(out / str(job)) for job in range(3)]
    assert [r["callbacks"] for r in results] == [SUITE] * 3
    assert [r["steps"] for r in results] == [10, 10, 10]
    # The loss of one step is NaN: it reaches the weights where nobody may act.
    assert [r["finite"] for r in results] == [False, True, True]
    root = Path(lightning_sentinel.__file__).parent.parent
    assert {r["package"] for r in results} == {lightning_sentinel.__file__}
    assert {Path(r["plugin"]).parent.parent.parent for r in results} == {root}
    for job in range(3):
        lines = (out / str(job) / "journal" / "rank-00000.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        assert [e["event"] for e in events if e["event"] in ("run.started", "incident.opened")] == [
            "run.started",
            "incident.opened",
        ]


@pytest.mark.slow
def test_misspelt_key_on_the_command_line_ends_before_training(app: Path) -> None:
    done = run_app(app, "callbacks.spike_detector.treshold=8", "hydra.run.dir=out")
    assert done.returncode == 1
    assert "Could not override 'callbacks.spike_detector.treshold'" in done.stderr
    assert not (app.parent.parent / "out" / "result.json").exists()


FAULT = (
    "+callbacks.faults={_target_: lightning_sentinel.FaultInjector, faults:"
    " [{_target_: lightning_sentinel.faults.TransientNan, step: 6, target: net, rank: 1}]}"
)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_started_under_hydra_recover_together(app: Path) -> None:
    """Lightning starts the second process with Hydra's command line: it must find the groups and the folder, too.

    One rank computes a NaN that does not come again: both go back, and end where a run without it ends.
    """
    shutil.copy(collective_limit.__file__, app.parent)
    quiet = ["model.nan_step=-1", "trainer.max_steps=14", "callbacks.run_journal.report=false"]
    short = ["policy=recover", "callbacks.incident_response.probation_steps=4"]
    done = run_app(
        app,
        *quiet[:2],
        *short,
        FAULT,
        "+callbacks.limit._target_=collective_limit.CollectiveLimit",
        "trainer.devices=2",
        "+trainer.strategy=ddp",
        "hydra.run.dir=out",
    )
    assert done.returncode == 0, done.stderr
    out = app.parent.parent / "out"
    result = result_of(out)
    assert (result["steps"], result["finite"]) == (14, True)
    assert result["callbacks"] == [*SUITE, "FaultInjector", "CollectiveLimit"]
    told = []
    for rank in range(2):
        events = [json.loads(line) for line in (out / "journal" / f"rank-{rank:05d}.jsonl").read_text().splitlines()]
        assert events[0]["event"] == "run.started"
        assert (events[0]["rank"], events[0]["world_size"]) == (rank, 2)
        fired = [(e["name"], e["fired"]) for e in events if e["event"] == "fault.injected"]
        assert fired == ([("transient_nan", 1)] if rank == 1 else [])
        wanted = ("incident.opened", "incident.closed", "action.retry_step", "action.rollback")
        told.append([(e["event"], e["attempt"]) for e in events if e["event"] in wanted])
        (closed,) = [e["incident"] for e in events if e["event"] == "incident.closed"]
        assert (closed["opened_step"], closed["status"]) == (6, "recovered")
        assert [action["action"] for action in closed["actions"]] == ["retry_step"]
        steps = [(e["attempt"], e["step"]) for e in events if e["event"] == "step" and e["applied"]]
        assert steps == [*((0, n) for n in range(6)), *((1, n) for n in range(6, 14))]
    assert told[0] == told[1]
    assert [name for name, _ in told[0]].count("action.rollback") == 1
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["rollbacks"], summary["open_incidents"]) == ("finished", 1, [])
    assert "rank 1" in (out / "report.html").read_text()
    # Both ranks are given the same batches here, so one process alone comes to the same weights, bit for bit.
    done = run_app(app, *quiet, "policy=observe", "hydra.run.dir=alone")
    assert done.returncode == 0, done.stderr
    assert result_of(app.parent.parent / "alone")["weights"] == result["weights"]
