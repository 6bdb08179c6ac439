"""The summary's numbers on made journals, each checked by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from report_journals import MadeRun, bad_rank, fp16_run, parade

from lightning_sentinel.report.build import write_reports
from lightning_sentinel.report.data import RunData, branches, load_run, loss_from_bits
from lightning_sentinel.report.summary import (
    false_incidents,
    probability_words,
    summarise,
    summarise_run,
)


@pytest.fixture(scope="module")
def parade_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parade")
    parade(folder)
    return folder


def step(number: int, loss: float = 2.0, **fields: object) -> dict[str, object]:
    return {
        "schema": 1, "time": 1000.0 + number, "rank": 0, "attempt": 0, "step": number, "tokens": 10 * (number + 1),
        "event": "step", "loss": loss, "applied": True, **fields,
    }  # fmt: skip


def test_the_parade_in_numbers(parade_dir: Path) -> None:
    summary = summarise_run(parade_dir)
    assert {
        k: summary[k] for k in ("schema", "status", "steps", "applied_steps", "attempts", "tokens", "rollbacks")
    } == {
        "schema": 1,
        "status": "finished",
        "steps": 400,
        "applied_steps": 399,  # one step was skipped; the rolled back ones were applied on the path that counts
        "attempts": 4,
        "tokens": 400 * 1024,
        "rollbacks": 3,
    }
    assert summary["actions"] == {"retry_step": 1, "rollback_replay": 1, "rollback_skip": 1, "skip_step": 1}
    assert summary["open_incidents"] == []
    assert summary["failures"] == []
    assert summary["headline"] == "The run finished; 4 incidents: 4 recovered."
    assert summary["next_action"] == "Review 2 quarantined names; training needs nothing."
    assert summary["last_known_good"]["step"] == 180
    assert [(c["step"], c["state"]) for c in summary["checkpoints"]] == [
        (100, "known_good"), (180, "known_good"), (300, "poisoned"), (400, "candidate"),
    ]  # fmt: skip
    assert [(q["name"], q["step"], q["incident"], q["active"]) for q in summary["quarantined"]] == [
        ("sample:prose/00000078/0", 121, 1, True),
        ("source:code", 250, 4, True),
    ]
    assert [(f["name"], f["first_step"], f["fired"]) for f in summary["faults"]] == [
        ("corrupt_batch", 120, 1), ("transient_nan", 140, 1), ("lr_spike", 190, 1), ("level_shift", 270, 1),
    ]  # fmt: skip


def test_incident_rows_answer_who_when_what(parade_dir: Path) -> None:
    first, second, third, fourth = summarise_run(parade_dir)["incidents"]
    assert (first["verdict"], first["culprits"], first["action"]) == ("data", ["sample:prose/00000078/0"], "skip_step")
    assert first["samples_skipped"] == ["prose/00000078/0", "prose/00000078/1"]
    assert (first["statistic"], first["threshold"], first["unit"]) == (12.0, 6.0, "robust sigma")
    assert (first["since_step"], first["opened_step"], first["closed_step"], first["path_z"]) == (120, 120, 139, 0.4)
    assert (second["culprits"], second["samples_replayed"]) == (["module:layers.2.mixer", "rank:0"], 2)
    assert (third["since_step"], third["opened_step"]) == (191, 195)
    assert third["samples_replayed"] == 2 * (195 - 175 + 1)
    assert (fourth["samples_skipped"], fourth["sources_excluded"]) == ([], ["code"])
    assert [i["status"] for i in (first, second, third, fourth)] == ["recovered"] * 4


def test_the_loss_is_the_mean_of_the_newest_live_steps() -> None:
    events = [step(n, loss=5.0) for n in range(30)]
    events += [step(n, loss=9.0) for n in range(30, 40)]  # abandoned
    events += [step(n, loss=2.0 + 0.1 * (n % 2)) for n in range(30, 50)]
    summary = summarise(RunData.from_events(events), now=2000.0)
    assert summary["loss_nats"] == 2.05
    assert summary["loss_steps"] == 20
    assert summary["token_probability"] == round(math.exp(-2.05), 6) == 0.128735
    assert (summary["steps"], summary["applied_steps"], summary["tokens"]) == (50, 50, 500)


@pytest.mark.parametrize(("nats", "probability"), [(2.05, "0.129"), (2.90, "0.055")])
def test_nats_in_words_do_not_over_claim(nats: float, probability: str) -> None:
    assert probability_words(nats) == (
        f"{nats:.3f} nats per token: the geometric mean of the probabilities given to the right tokens is {probability}"
    )


def test_a_run_without_a_finite_loss_has_none() -> None:
    summary = summarise(RunData.from_events([step(0, loss="nan"), step(1, loss="inf")]), now=1000.0)
    assert (summary["loss_nats"], summary["loss_steps"], summary["token_probability"]) == (None, 0, None)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


@pytest.mark.parametrize(
    ("tail", "now", "status"),
    [
        ([], 1010.0, "running"),
        ([], 9999.0, "lost"),
        ([{"event": "run.ended", "status": "failed"}], 9999.0, "failed"),
        ([{"event": "run.ended", "status": "finished"}, {"event": "run.started"}], 1010.0, "running"),
    ],
)
def test_the_state_of_a_run(tail: list[dict[str, object]], now: float, status: str) -> None:
    events = [step(0), *({**step(1), **t} for t in tail)]
    assert summarise(RunData.from_events(events), now=now)["status"] == status


def test_open_incident_and_failed_run(tmp_path: Path) -> None:
    fp16_run(tmp_path)
    summary = summarise_run(tmp_path)
    assert (summary["status"], summary["open_incidents"]) == ("failed", [1])
    assert summary["headline"] == "The run failed; 1 incident: 1 open."
    assert summary["next_action"] == (
        "Find out why it stopped, then choose a restore point: no checkpoint has passed probation."
    )
    assert summary["scaler"] == {
        "overflows": 1,
        "backoffs": 8,
        "growths": 0,
        "changes": 0,
        "first_scale": 65536.0,
        "last_scale": 128.0,
        "smallest_scale": 128.0,
    }
    assert summary["applied_steps"] == 130
    assert false_incidents(summary) == [1]


def test_an_incident_is_false_unless_a_fault_explains_it(parade_dir: Path) -> None:
    summary = summarise_run(parade_dir)
    assert false_incidents(summary) == []
    assert false_incidents(summary, [(120, 120), (190, 195)], slack_steps=10) == [2, 4]


def test_one_event_of_several_ranks_is_told_once_and_a_rank_alone_is_heard(tmp_path: Path) -> None:
    bad_rank(tmp_path, ranks=3, rank=2)
    data = load_run(tmp_path)
    assert data.ranks == [0, 1, 2]
    assert len(data.of("incident.opened")) == 1
    assert [e["rank"] for e in data.of("fault.injected")] == [2]  # only that rank has written it
    assert data.steps.rank_losses is not None
    assert data.steps.rank_losses.shape == (len(data.steps), 3)
    assert summarise(data)["applied_steps"] == 300


def test_abandoned_steps_are_told_from_live_ones() -> None:
    branch, live = branches(np.array([0, 1, 2, 3, 2, 3, 1, 2, 3, 4]))
    assert branch.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert live.tolist() == [True, False, False, False, False, False, True, True, True, True]
    assert [len(a) for a in branches(np.zeros(0, dtype=np.int64))] == [0, 0]


def test_loss_bits_are_the_float32_itself() -> None:
    assert loss_from_bits(np.float32(2.05).byteswap().tobytes().hex()) == float(np.float32(2.05))
    assert math.isnan(loss_from_bits("7fc00000"))


def test_a_restart_from_an_older_checkpoint_and_a_changed_topology(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.begin()
    run.run(30)
    for journal in run.journals:  # killed: no end is written
        journal.close()
    run.step = 20
    run.begin()
    run.write("topology.changed", old_world_size=1, world_size=2)
    run.write("run.resumed", checkpoint="checkpoints/step-00000020")
    run.run(20)
    run.end()
    data = load_run(tmp_path)
    summary = summarise(data)
    assert summary["restarts"][0]["step"] == 20
    assert summary["restarts"][0]["checkpoint"] == "checkpoints/step-00000020"
    assert (summary["steps"], int(data.steps.live.sum())) == (40, 40)


def test_an_experiment_is_what_the_suite_or_a_person_calls_one(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.begin()
    run.run(5)
    run.write("infra.event", kind="experiment", text="mixture moved to 70 % code, on purpose")
    run.write("infra.event", kind="ecc", text="node 3")
    run.run(5)
    run.write("experiment.started", kind="reduce_lr", experiment="lr-1")
    run.run(5)
    run.end()
    found = summarise(load_run(tmp_path))["experiments"]
    assert [(e["event"], e["step"], e["kind"]) for e in found] == [
        ("infra.event", 5, "experiment"), ("experiment.started", 10, "reduce_lr"),
    ]  # fmt: skip
    write_reports(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "mixture moved to 70 % code, on purpose" in page.split('id="experiments"')[1].split("</section>")[0]


def test_what_could_not_be_read_or_written_is_listed(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.run(2)
    run.write("journal.gap", lost_events=3, reason="The journal cannot write x: No space left on device.")
    run.write("checkpoint.failed", reason="no room")
    run.end()
    with run.journals[0].path.open("ab") as file:
        file.write(b"{")
    assert summarise_run(tmp_path, failures=["first"])["failures"] == [
        "first",
        "3 events of rank 0 were lost: The journal cannot write x: No space left on device.",
        "A checkpoint at step 2 failed: no room",
        f"{run.journals[0].path}:6: the last line is cut short (1 bytes); the events before it are complete",
    ]


def test_a_full_disk_is_one_failure_however_often_it_failed_a_save(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.run(6)
    for at in (2, 4, 6):
        full = f"No space left on device (/runs/a/checkpoints/step-{at:08d}.tmp)"
        run.write("checkpoint.failed", step=at, what="saving", reason=full)
    run.write("checkpoint.failed", step=6, what="promoting", reason="Read-only file system (/runs/a)")
    run.end()
    assert summarise_run(tmp_path)["failures"] == [
        "3 checkpoints failed, steps 2 to 6; the first: No space left on device (/runs/a/checkpoints/step-00000002.tmp)",
        "A checkpoint at step 6 failed: Read-only file system (/runs/a)",
    ]


def test_files_are_replaced_whole_and_failures_are_sentences(parade_dir: Path, tmp_path: Path) -> None:
    result = write_reports(parade_dir, out=tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["loss.png", "report.html", "summary.json"]
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == result.summary
    assert (tmp_path / "out" / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (tmp_path / "file").write_text("")
    blocked = write_reports(parade_dir, out=tmp_path / "file" / "out")
    assert blocked.written == []
    assert blocked.summary["failures"] == [f"The report cannot be written to {tmp_path}/file/out: Not a directory."]


def test_without_matplotlib_one_note_says_what_to_install(
    parade_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    result = write_reports(parade_dir, out=tmp_path)
    assert sorted(p.name for p in result.written) == ["report.html", "summary.json"]
    assert result.notes == [
        "No loss.png: matplotlib is not installed. Install it with `pip install 'lightning-sentinel[report]'`, then run"
        " `lightning-sentinel report RUN`."
    ]


def test_a_missing_journal_is_an_error_unless_a_failure_explains_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No journal in"):
        write_reports(tmp_path)
    summary = write_reports(tmp_path, failures=["The journal cannot open it."], files=False).summary
    assert (summary["steps"], summary["failures"]) == (0, ["The journal cannot open it."])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_hundred_thousand_steps_are_summed_up_in_a_small_report(tmp_path: Path, ranks: int) -> None:
    run = MadeRun(tmp_path, speed=9000, ranks=ranks, keep=(0,))
    run.horizon = 100_000
    run.begin()
    run.applied = []
    lines = []
    noise = np.random.default_rng(0).normal(0, 0.03, (100_000, ranks)).round(6)
    for n in range(100_000):
        loss = 2.0 + math.exp(-n / 9000)
        each = (loss + noise[n]).tolist()
        of_ranks = {
            "rank_losses": each,
            "worst_rank": int(noise[n].argmax()),
            "loss_max": max(each),
            "loss_min": min(each),
        }
        event = step(n, loss=loss, grad_norm=1.0, lr=[1e-3], loss_scale=1.0, **(of_ranks if ranks > 1 else {}))
        lines.append(json.dumps(event))
    for journal in run.journals:
        journal.close()
    with run.journals[0].path.open("a") as file:
        file.write("\n".join(lines) + "\n")
    result = write_reports(tmp_path)
    assert result.summary["steps"] == 100_000
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
