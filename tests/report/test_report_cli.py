"""The command line: what it prints, its exit codes, and its errors on one line."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from report_journals import MadeRun, fp16_run, parade

from lightning_sentinel import __version__
from lightning_sentinel.checkpoint.store import CheckpointStore
from lightning_sentinel.cli import COMMANDS, build_parser, main
from lightning_sentinel.cli.config import config_options
from lightning_sentinel.cli.dashboard import BARS
from lightning_sentinel.cli.watch import event_line, step_line
from lightning_sentinel.report.curve import MISSING_MATPLOTLIB
from lightning_sentinel.report.html import MISSING_JINJA


@pytest.fixture(scope="module")
def parade_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parade")
    parade(folder)
    return folder


def test_report_remakes_everything(parade_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(parade_dir), "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "The run finished; 4 incidents: 4 recovered.",
        "Next: Review 2 quarantined names; training needs nothing.",
        "  #1 step 120: spike; data, sample:prose/00000078/0; skip_step; recovered",
        "  #2 step 140: nonfinite_loss; infrastructure, module:layers.2.mixer, rank:0; retry_step; recovered",
        "  #3 step 195: spike; optimization, optimizer:lr; rollback_replay; recovered",
        "  #4 step 299: level_shift; data, source:code; rollback_skip; recovered",
        f"{tmp_path}/loss.png",
        f"{tmp_path}/report.html",
        f"{tmp_path}/summary.json",
    ]
    assert main(["report", str(parade_dir), "--out", str(tmp_path), "--json"]) == 0
    made = [f"{tmp_path}/{name}" for name in ("loss.png", "report.html", "summary.json")]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert json.loads(capsys.readouterr().out) == summary | {"written": made, "notes": []}
    assert main(["report", str(parade_dir), "--out", str(tmp_path), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_report_without_its_page_says_so_and_ends_with_1(
    parade_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("jinja2", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    notes = [MISSING_MATPLOTLIB, MISSING_JINJA]
    said = "".join(f"lightning-sentinel: {note}\n" for note in notes)
    assert main(["report", str(parade_dir), "--out", str(tmp_path), "--quiet"]) == 1
    assert capsys.readouterr() == ("", said)
    assert main(["report", str(parade_dir), "--out", str(tmp_path), "--json"]) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["written"], found["notes"], printed.err) == ([f"{tmp_path}/summary.json"], notes, said)
    monkeypatch.delitem(sys.modules, "jinja2")  # the picture alone is missing: the page draws its own
    assert main(["report", str(parade_dir), "--out", str(tmp_path), "--quiet"]) == 0
    assert capsys.readouterr().err == f"lightning-sentinel: {MISSING_MATPLOTLIB}\n"


def test_errors_are_one_line_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "journal").mkdir(parents=True)
    for arguments, said in {
        ("report", f"{tmp_path}/none"): (
            f"lightning-sentinel: No journal in {tmp_path}/none: expected {tmp_path}/none/journal/rank-00000.jsonl."
            " Give the run folder that RunJournal wrote."
        ),
        ("watch", f"{tmp_path}/none", "--once"): (
            f"lightning-sentinel: No journal in {tmp_path}/none. Give the run folder that RunJournal writes."
        ),
        ("watch", str(tmp_path), "--interval", "0"): (
            "lightning-sentinel: --interval must be greater than 0 seconds, got 0."
        ),
        ("verify", str(tmp_path)): (
            f"lightning-sentinel: No checkpoint in {tmp_path}. Give a run folder that has checkpoints/, or one checkpoint's"
            " folder."
        ),
        ("quarantine", "list", f"{tmp_path}/none"): (
            f"lightning-sentinel: {tmp_path}/none is not a folder. Give the run folder."
        ),
        ("quarantine", "list", f"{tmp_path}"): (
            f"lightning-sentinel: {tmp_path} is no run folder: it holds neither journal/ nor quarantine.jsonl. Give the run"
            " folder."
        ),
        ("quarantine", "add", f"{tmp_path}", "sample:a", "--reason", "why"): (
            f"lightning-sentinel: {tmp_path} is no run folder: it holds neither journal/ nor quarantine.jsonl. Give the run"
            " folder."
        ),
        ("quarantine", "revert", f"{tmp_path}/run", "sample:a", "--reason", "why"): (
            "lightning-sentinel: sample:a is not quarantined. See `lightning-sentinel quarantine list "
            + f"{tmp_path}/run`."
        ),
    }.items():
        assert main(arguments) == 2
        assert capsys.readouterr().err == said + "\n"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # no ledger where no run is


def test_a_place_that_cannot_be_written_to_is_an_error(
    parade_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["report", str(parade_dir), "--out", str(tmp_path / "file"), "--quiet"]) == 2
    assert capsys.readouterr().err == (
        f"lightning-sentinel: The report cannot be written to {tmp_path}/file: File exists."
        " Give --out a folder that can be.\n"
    )


COMMAND_LINES = [
    *(name for name in COMMANDS if find_spec(f"lightning_sentinel.cli.{name}")),
    *(f"quarantine {name}" for name in ("list", "add", "revert")),
]


@pytest.mark.parametrize("command", COMMAND_LINES)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert f"example:\n  lightning-sentinel {command}" in out
    assert "--json" in out or command == "quarantine"  # whose own three commands have it
    assert "\nExit codes: 0 " in out


def test_a_report_of_a_run_that_needs_a_person_is_made_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As its help and the page say: 0 is the report's, `watch` has an exit code for the run's end."""
    fp16_run(tmp_path)
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "failed"
    assert main(["watch", str(tmp_path), "--once", "--json"]) == 1
    for command in ("report", "quarantine list", "quarantine add", "quarantine revert", "config"):
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        codes = capsys.readouterr().out.partition("\nExit codes: ")[2]
        # 1 is the page that was not made, never what it tells.
        assert (codes[:2], " 1 " in codes, " 1 the page was not made" in codes) == ("0 ", *[command == "report"] * 2)


def test_only_commands_that_exist_are_offered(capsys: pytest.CaptureFixture[str]) -> None:
    text = build_parser().format_help()
    assert "scan" in text
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"lightning-sentinel {__version__}\n")
    with pytest.raises(SystemExit) as stop:
        main(["scann", "x"])
    assert stop.value.code == 2


def test_watch_prints_events_and_its_exit_code_is_the_runs_end(
    parade_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(parade_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("incident.opened" in line for line in lines) == 4
    assert any(line.endswith("#1 open: the loss is 4.1 nats above its band") for line in lines)
    assert lines[-1].startswith("step 399  410k tokens  loss ")
    assert all(len(line) <= 160 for line in lines)
    fp16_run(tmp_path)
    assert main(["watch", str(tmp_path), "--json"]) == 1
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (events[0]["event"], events[-1]["event"], events[-1]["status"]) == ("run.started", "run.ended", "failed")


def test_watch_speaks_in_words(parade_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(parade_dir), "--plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "{" in line or "None" in line or "=[]" in line or line.rstrip().endswith("=")]
    assert not [line for line in lines if "probe.deep" in line or "incident.updated" in line]
    assert all(re.match(r"\d\d:\d\d:\d\dZ  step ", line) for line in lines[:-1])
    event = {"time": 3600.0, "step": 7, "event": "triage.verdict", "incident": 2, "checks": {"a": "b"}}
    event["verdict"] = {"kind": "data", "culprits": ["sample:prose/1"]}
    assert event_line(event) == "01:00:00Z  step       7  triage.verdict       #2 data: sample:prose/1"
    event = {"time": 3600.0, "step": 7, "event": "mixture.changed", "weights": {"code": 0.25, "prose": 0.75}}
    assert event_line(event) == "01:00:00Z  step       7  mixture.changed      weights=code 0.25, prose 0.75"


def test_watch_ends_where_a_run_has_gone_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MadeRun(tmp_path)
    run.begin()
    run.run(3)
    for journal in run.journals:
        journal.close()
    assert main(["watch", str(tmp_path), "--once"]) == 0  # a moment ago
    assert "lost" not in capsys.readouterr().out
    file = tmp_path / "journal" / "rank-00000.jsonl"
    file.write_text(re.sub(r'"time": ?[0-9.]+', '"time":1000.5', file.read_text()))
    assert main(["watch", str(tmp_path)]) == 1
    assert re.search("^lost: nothing has been written for [0-9]+ minutes", capsys.readouterr().out, re.M)
    assert main(["watch", str(tmp_path / "no" / "such" / "run")]) == 2
    assert "There is no folder" in capsys.readouterr().err


def test_the_package_itself_can_be_run() -> None:
    done = subprocess.run([sys.executable, "-m", "lightning_sentinel", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "lightning-sentinel")


def test_watch_follows_a_run_that_is_still_being_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MadeRun(tmp_path)

    def write() -> None:
        time.sleep(0.3)
        run.begin()
        run.run(3)
        time.sleep(0.2)
        run.end()

    writer = threading.Thread(target=write)
    writer.start()
    assert main(["watch", str(tmp_path), "--interval", "0.05"]) == 0
    writer.join()
    out = capsys.readouterr().out
    assert [line.split()[3] for line in out.splitlines()[:-1]] == ["run.started", "run.ended"]


def test_the_picture_of_a_run_on_a_terminal(parade_dir: Path) -> None:
    rich_console = pytest.importorskip("rich.console", reason="pip install rich")
    from lightning_sentinel.cli.dashboard import Dashboard
    from lightning_sentinel.journal import Follower

    console = rich_console.Console(file=io.StringIO(), force_terminal=True, width=120, record=True)
    picture = Dashboard(parade_dir, console)
    picture.refresh()
    assert "waiting for the first step" in console.export_text()
    for event in Follower(parade_dir).poll():
        picture.show(event)
    assert picture.ended == "finished"
    picture.close()
    lines = [" ".join(line.strip("│ ").split()) for line in console.export_text().splitlines()]
    assert "state finished" in lines
    assert "open incidents none" in lines
    assert "known-good step 180" in lines
    assert any(line.startswith("now step 399 410k tokens loss ") for line in lines)
    assert "3 191 spike optimizer:lr rollback replay recovered" in lines
    assert any(line.startswith("loss ") and set(line[5:]) <= set(BARS) and len(line) == 53 for line in lines)


def test_the_command_line_picks_the_picture_on_a_terminal_only(parade_dir: Path) -> None:
    """In a pseudo terminal of its own, as a person would see it."""
    code = "import pty, sys; sys.exit(pty.spawn([sys.executable, '-m', 'lightning_sentinel.cli', *sys.argv[1:]]) >> 8)"
    for options, expected in (([], "open incidents"), (["--plain"], "incident.opened")):
        command = [sys.executable, "-c", code, "watch", str(parade_dir), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        assert done.returncode == 0
        assert expected in done.stdout


def test_a_wrong_command_line_is_one_line_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in {
        ("scann", "x"): "there is no 'scann' here. Did you mean scan? See `lightning-sentinel --help`.",
        ("verify",): "the following arguments are required: RUN|CHECKPOINT. See `lightning-sentinel verify --help`.",
        ("quarantine", "ad"): "there is no 'ad' here. Did you mean add? See `lightning-sentinel quarantine --help`.",
    }.items():
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"lightning-sentinel: {said}\n"


def test_verify_shows_how_far_the_hashing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (10, 20):
        save(store, step)
    monkeypatch.setattr("lightning_sentinel.progress.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("lightning_sentinel.progress.LINE_SECONDS", 0.0)
    assert main(["verify", str(tmp_path)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(", ")[2] for line in lines[:4]] == ["step-00000010"] * 2 + ["step-00000020"] * 2
    assert lines[3].startswith("hashing: 0.0 of 0.0 MiB (100 %), step-00000020")
    assert lines[4].startswith("hashing: done after ")


def test_lines_are_short_and_say_what_matters() -> None:
    step = {
        "event": "step", "step": 1200, "tokens": 983_040, "attempt": 2, "loss": 2.594, "loss_min": 2.0, "loss_max": 40.0,
        "worst_rank": 41, "grad_norm": "inf",
    }  # fmt: skip
    assert step_line(step) == "step 1,200  983k tokens  loss 2.5940 (rank 41: 40.0000)  grad inf  pass 2"
    event = {"event": "action.rollback", "time": 0.0, "step": 7, "replayed": [*"abcd"], "to_step": 3}
    assert event_line(event)[8:] == (
        "Z  step       7  action.rollback      back to step 3; 4 samples replayed, 0 names excluded"
    )


def test_the_ledger_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path)
    (tmp_path / "journal").mkdir()
    assert main(["quarantine", "add", run, "sample:a", "source:code", "--reason", "a table"]) == 0
    assert capsys.readouterr().out == "quarantined: sample:a, source:code\n"
    assert main(["quarantine", "add", run, "sample:a", "--reason", "again"]) == 0
    assert capsys.readouterr().out == "quarantined: nothing new\n"
    assert main(["quarantine", "revert", run, "sample:a", "--reason", "harmless"]) == 0
    assert capsys.readouterr().out == "taken back: sample:a\n"
    assert main(["quarantine", "list", run]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "added     sample:a  by hand  a table",
        "added     source:code  by hand  a table",
        "reverted  sample:a  by hand  harmless",
        "1 quarantined.",
    ]
    assert main(["quarantine", "list", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["active"] == ["source:code"]
    assert main(["quarantine", "add", run, "no-prefix", "--reason", "x"]) == 2
    assert "sample:" in capsys.readouterr().err


def test_the_report_tells_what_was_quarantined_and_taken_back_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = MadeRun(tmp_path)
    run.begin()
    run.run(20)
    run.write("quarantine.added", step=9, names=["sample:prose/9"], incident=1, reason="data/samples")
    run.end()
    by_run = {"name": "sample:prose/9", "step": 9, "incident": 1, "reason": "data/samples", "active": True}
    by_hand = {"name": "sample:by-hand/1", "step": None, "incident": None, "reason": "a table", "active": True}

    def reported() -> tuple[object, object]:
        capsys.readouterr()
        assert main(["report", str(tmp_path), "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        return summary["quarantined"], summary["next_action"]

    assert reported() == ([by_run], "Review 1 quarantined name; training needs nothing.")
    assert main(["quarantine", "add", str(tmp_path), "sample:by-hand/1", "--reason", "a table"]) == 0
    assert reported() == ([by_run, by_hand], "Review 2 quarantined names; training needs nothing.")
    page = (tmp_path / "report.html").read_text()
    assert '<code>sample:by-hand/1</code></td><td class="n">by hand</td>' in page
    assert main(["quarantine", "revert", str(tmp_path), "sample:by-hand/1", "--reason", "harmless"]) == 0
    taken_back = by_hand | {"active": False, "revert_reason": "harmless"}
    assert reported() == ([by_run, taken_back], "Review 1 quarantined name; training needs nothing.")
    assert "<td>reverted: harmless</td>" in (tmp_path / "report.html").read_text()
    # The ledger of a run holds what the run itself quarantined too; its word counts.
    with (tmp_path / "quarantine.jsonl").open("a") as ledger:
        for event, step, reason in (("added", 9, "data/samples"), ("reverted", None, "read: fine")):
            entry = {"schema": 1, "event": event, "name": "sample:prose/9", "time": 0.0, "step": step, "reason": reason}
            ledger.write(json.dumps(entry | {"incident": 1 if step else None, "policy": ""}) + "\n")
    assert reported() == ([by_run | {"active": False, "revert_reason": "read: fine"}, taken_back], "Nothing.")
    assert main(["quarantine", "add", str(tmp_path), "sample:by-hand/1", "--reason", "a table"]) == 0
    assert reported()[1] == "Review 1 quarantined name; training needs nothing."


def save(store: CheckpointStore, step: int) -> Path:
    """A checkpoint of one rank with a few bytes in each file."""
    pending = store.begin(step)
    for name in ("model.pt", "rank-00000.pt"):
        pending.write_bytes(name, b"x" * 100)
    return store.publish(pending, step=step, tokens=step).path


def test_verify_names_the_damage_and_the_checkpoint_to_resume_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    first, second, third = (save(store, step) for step in (10, 20, 30))
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"Resume from: {third} (a candidate: nothing here has passed probation)"
    )
    store.promote(first)
    store.promote(second)
    assert main(["verify", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["resume_from"], told["known_good"]) == (str(second), True)
    assert [c["status"] for c in told["checkpoints"]] == ["known_good", "known_good", "candidate"]
    (second / "model.pt").write_bytes(b"x" * 99 + b"y")
    assert main(["verify", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"whole    known_good  {first}"
    assert lines[1] == f"damaged  known_good  {second}"
    assert "model.pt" in lines[2]
    assert lines[-1] == f"Resume from: {first}"
    assert main(["verify", str(first)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Resume from: {first}"
    (first / "manifest.json").unlink()
    assert main(["verify", str(first)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"damaged  unreadable  {first}"
    assert lines[-1] == "Resume from: none of them."


def test_config_lists_every_option_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(config_options())
    assert all(row["meaning"] for row in rows)
    assert all(row["type"] for row in rows)
    assert main(["config", "run_journal"]) == 0
    assert (
        "  callbacks.run_journal.step_interval=1  (int; steps; at least 0 (0: no step lines))\n"
        "      Journal every Nth step's signals; 0: none." in capsys.readouterr().out
    )
    assert main(["config", "rank_telemetry"]) == 0
    assert 'callbacks.rank_telemetry.sync="gate"  (str; one of gate, lagged)' in capsys.readouterr().out
    assert main(["config", "incident_response"]) == 0
    line = 'callbacks.incident_response.mode="${oc.select:policy.mode,observe}"  (str; one of observe, guard, recover)'
    assert line in capsys.readouterr().out
    assert main(["config", "batch_validator"]) == 0
    bound = "(int; token; any whole number that is no token of the vocabulary)"
    assert f"callbacks.batch_validator.ignore_index=-100  {bound}" in capsys.readouterr().out
    assert main(["config", "policy"]) == 0
    assert '  policy.mode="observe"  (str; one of observe, guard, recover)' in capsys.readouterr().out
    assert main(["config", "run_jurnal", "--json"]) == 2
    assert capsys.readouterr().err == (
        "lightning-sentinel: No callback 'run_jurnal' in the configuration. Did you mean run_journal?\n"
    )
    assert main(["config", "zzz"]) == 2
    assert capsys.readouterr().err.startswith(
        "lightning-sentinel: No callback 'zzz' in the configuration. There are batch_validator,"
    )
    assert main(["config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(rows))


def test_a_closed_pipe_is_no_error() -> None:
    program = shutil.which("head")
    assert program is not None
    command = f"{sys.executable} -m lightning_sentinel.cli config | {program} -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.returncode) == ("", 0)
