"""A line in which one value is not what was written: skipped and reported, or shown; nothing that reads a journal fails.

``SENTINEL_DAMAGED_LINES`` sets how many damaged journals are read; without it some hundreds are.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_journals import MadeRun, data_verdict, parade

from lightning_sentinel.checkpoint.recorded import read_recorded
from lightning_sentinel.cli import main
from lightning_sentinel.cli.dashboard import Dashboard
from lightning_sentinel.distributed.earlier import read_earlier
from lightning_sentinel.distributed.lost import last_words
from lightning_sentinel.incidents import FindingKind
from lightning_sentinel.journal import JournalProblem, journal_files, parse_line, read_journal
from lightning_sentinel.report.build import write_reports
from lightning_sentinel.report.data import load_run
from lightning_sentinel.report.html import render_html
from lightning_sentinel.report.summary import summarise
from lightning_sentinel.scan import LogReader

DAMAGED = int(os.environ.get("SENTINEL_DAMAGED_LINES", "400"))
AT_ONCE = 12  # in as many lines of one journal
PICTURES = 2  # so many of these are drawn by matplotlib, too
TAKEN_AWAY = object()
BAD: tuple[Any, ...] = (
    TAKEN_AWAY,
    None,
    "x",
    "nan",
    -1,
    True,
    float("inf"),
    1e300,
    10**30,
    10**400,
    [],
    {},
    [1, "a", None],
    [[{}]],
    {"a": [1]},
    "half a pair: \ud800",
)


def every_kind(run_dir: Path) -> list[dict[str, Any]]:
    """A short run whose journal holds every kind of event that a reader looks into; its lines."""
    run = MadeRun(run_dir, ranks=2, keep=(0,))
    run.begin(model={"width": 64})
    run.write("preflight.done", checks={"loader": "passed"}, warnings=0, seconds=0.1)
    run.write("replicas.compared", tensors=3, reason=None, left_out=[])
    run.write("mixture.changed", weights={"prose": 0.7, "code": 0.3}, old=None)
    run.run(3)
    run.checkpoint("saved", step=2)
    run.checkpoint("known_good", step=2)
    run.write("checkpoint.failed", what="save", reason="No space left on device")
    run.write("fault.injected", name="corrupt_batch", fired=1)
    run.run(1, jump=4.0)
    layer = {"module": "layers.2", "rank": 1, "healthy_rank": 0, "failing_rms": 14.25, "healthy_rms": 1.003}
    incident = run.incident(1, FindingKind.SPIKE, verdict=data_verdict("prose/00000003/0"))
    incident.hardware = {"ranks": {"1": {"ecc": 2}}, "range": {"ecc": [0, 0, 2]}}
    verdict = incident.verdict.to_dict() | {"evidence": {"comparisons": {"first_deviating_layer": layer}}}
    run.write("triage.verdict", incident=1, verdict=verdict)
    run.write("incident.updated", incident=incident.to_dict() | {"verdict": verdict})
    run.write("incident.bundle", incident=1, path="incidents/0001", bytes=10, seconds=0.1, command="replay")
    run.act(incident, "skip_step", sample_ids=["prose/00000003/0"])
    run.write("quarantine.added", names=["sample:prose/00000003/0"], reason="corrupt batch", incident=1)
    run.back_to(2, incident)
    run.run(2)
    run.close(incident)
    run.write("scaler.overflow", old_scale=65536.0, new_scale=32768.0, rank=0, parameters=["head.weight"])
    run.write("lr.changed", old=3e-3, new=1.5e-3, group=0)
    run.write("mixture.changed", weights={"prose": 0.5, "code": 0.5}, old={"prose": 0.7, "code": 0.3})
    run.write("experiment.started", kind="reduce_lr", experiment="lr-1", factor=0.5, until=9, incident=1)
    run.write("infra.event", kind="ecc", text="node 1: 2 uncorrectable errors")
    run.write("infra.event", kind="experiment", text="higher dropout, ticket 41")
    run.write("infra.hardware", incident=1, counters={"ecc": 2.0})
    run.begin(segment=1)
    run.write("run.resumed", checkpoint="checkpoints/step-00000002", epoch=0)
    run.write("topology.changed", old_world_size=2, world_size=1)
    run.run(2)
    run.write("exception", type="ValueError", message="broken", frames=["a.py:1"])
    run.write("journal.gap", lost_events=3, reason="disk full")
    run.end("failed")
    return [json.loads(line) for line in journal_files(run_dir)[0].read_text().splitlines()]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a line are, of lists the first entry."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*place, key)
        yield from places(inner, (*place, key))


def damaged(line: dict[str, Any], place: tuple[Any, ...], bad: Any) -> str:
    copied = json.loads(json.dumps(line))
    holder = copied
    for key in place[:-1]:
        holder = holder[key]
    if bad is TAKEN_AWAY:
        del holder[place[-1]]
    else:
        holder[place[-1]] = bad
    return json.dumps(copied)


def read_everywhere(run_dir: Path, *, picture: bool) -> None:
    """Everything that reads a journal, in this process."""
    run = load_run(run_dir)
    summary = summarise(run)
    if picture:
        write_reports(run_dir)
    else:
        render_html(run, summary).encode()
    screen = Dashboard(run_dir, console())
    events = read_journal(run_dir, problems=[])
    for event in events:
        screen.show(event)
    screen.close()
    main(["watch", str(run_dir), "--once"])
    for rank in (0, 1):
        read_recorded(run_dir, rank, step=2, attempt=None, steps=2, at_batch=1)
        read_earlier(run_dir, rank, 2)
        last_words(run_dir, rank)
    list(LogReader(run_dir).rows())


def console() -> Any:
    from rich.console import Console

    return Console(file=io.StringIO(), width=100)


def test_no_reader_fails_by_a_bad_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bad value in each of a few lines at a time: reading a journal takes longer than damaging it."""
    lines = every_kind(tmp_path / "made")
    texts = [json.dumps(line) for line in lines]
    newest = {line["event"]: i for i, line in enumerate(lines)}  # of each kind: its incident knows most
    chance = random.Random(7)
    spots = [(i, place) for i in newest.values() for place in places(lines[i])]
    while len(spots) < DAMAGED:
        spots += spots
    chance.shuffle(spots)
    damages = {i: [(place, chance.choice(BAD)) for j, place in spots[:DAMAGED] if j == i] for i in newest.values()}
    journals = 0
    while any(damages.values()):
        left = sorted((i for i, found in damages.items() if found), key=lambda i: -len(damages[i]))
        done = {i: damages[i].pop() for i in left[:AT_ONCE]}
        run_dir = tmp_path / str(journals)
        (run_dir / "journal").mkdir(parents=True)
        written = [damaged(lines[i], *done[i]) if i in done else text for i, text in enumerate(texts)]
        (run_dir / "journal" / "rank-00000.jsonl").write_text("\n".join(written) + "\n")
        try:
            read_everywhere(run_dir, picture=journals < PICTURES)
        except Exception as error:
            said = "; ".join(f"{lines[i]['event']} {place} = {bad!r:.60}" for i, (place, bad) in done.items())
            raise AssertionError(said) from error
        capsys.readouterr()
        journals += 1
    assert journals >= DAMAGED // AT_ONCE


HEAD = {"schema": 1, "time": 1764433513.2, "rank": 0, "attempt": 0, "step": 120, "tokens": 983040, "event": "step"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"step": None, "loss": 2.0}, 'has "step" None: a whole number from 0 on was expected'),
        ({"step": True, "loss": 2.0}, 'has "step" True: a whole number from 0 on was expected'),
        ({"step": -1, "loss": 2.0}, 'has "step" -1: a whole number from 0 on was expected'),
        ({"tokens": 10**30, "loss": 2.0}, f'has "tokens" {10**30}: a whole number from 0 on was expected'),
        ({"rank": "0", "loss": 2.0}, "has \"rank\" '0': a whole number from 0 on was expected"),
        ({"time": 1e30, "loss": 2.0}, 'has "time" 1e+30: seconds since 1970 were expected'),
        ({"loss": "x"}, 'has "loss" \'x\': a number, "nan", "inf" or "-inf" was expected'),
        ({"loss": None}, 'has "loss" None: a number, "nan", "inf" or "-inf" was expected'),
        ({"event": "incident.opened"}, 'has no "incident"'),
        ({"event": "incident.opened", "incident": 3}, 'has "incident": an object was expected'),
        ({"event": "incident.closed", "incident": {}}, 'has no "incident.number"'),
        ({"event": "action.stop", "incident": {"number": 1}}, 'has "incident": a whole number was expected'),
        ({"event": "checkpoint.saved", "checkpoint_step": "5"}, 'has "checkpoint_step": a whole number from 0 on was'),
        ({"event": "quarantine.added", "names": ["a", 3]}, 'has "names.1": text was expected'),
    ],
)
def test_a_line_of_another_shape_is_no_event(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}"):
        parse_line(json.dumps(HEAD | fields).encode())


@pytest.mark.parametrize("loss", [2.0, 2, "nan", "inf", "-inf"])
def test_a_line_as_it_is_written_is_an_event(loss: Any) -> None:
    assert parse_line(json.dumps(HEAD | {"loss": loss}).encode())["loss"] == loss
    gap = HEAD | {"event": "journal.gap", "step": -1}
    assert parse_line(json.dumps(gap).encode()) == gap


def test_half_a_surrogate_pair_is_shown_as_a_question_mark_and_a_whole_one_stays() -> None:
    line = HEAD | {"event": "infra.event", "text": "a \ud800 b \U0001f600"}
    assert parse_line(json.dumps(line).encode())["text"] == "a ? b \U0001f600"


def test_one_misspelt_key_costs_its_line_alone_and_the_report_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parade(tmp_path)
    path = tmp_path / "journal" / "rank-00000.jsonl"
    lines = path.read_text().splitlines()
    lines[49] = lines[49].replace('"attempt"', '"attdmpt"')
    path.write_text("\n".join(lines) + "\n")
    problems: list[JournalProblem] = []
    assert len(read_journal(tmp_path, problems=problems)) == len(lines) - 1
    said = f'{path}:50: the line has no "attempt"; skipped'
    assert [str(p) for p in problems] == [said]
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "The run finished; 4 incidents: 4 recovered."
    assert out[-1] == said
    assert "line has no &#34;attempt&#34;; skipped" in (tmp_path / "report.html").read_text()
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert capsys.readouterr().err == f"lightning-sentinel: {said}\n"
