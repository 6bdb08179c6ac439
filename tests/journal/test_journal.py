"""The journal: what is written is read back exactly, whatever happens to the file in between."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sentinel.incidents import Action
from lightning_sentinel.journal import (
    Follower,
    Journal,
    JournalProblem,
    iter_events,
    journal_files,
    number,
    read_journal,
    redact,
    to_json,
)

HEADER = {"schema": 1, "rank": 0, "attempt": 0, "step": 3, "tokens": 12}


def write(journal: Journal, event: str, step: int = 3, **fields: Any) -> None:
    journal.write(event, step=step, attempt=0, tokens=12, **fields)


def write_by_the_thread(journal: Journal, event: str) -> None:
    writers: list[int] = []

    def make() -> dict[str, Any]:
        writers.append(threading.get_ident())
        return {}

    journal.write_later(event, make, step=3, attempt=0, tokens=12)
    end = time.monotonic() + 10
    while not writers and time.monotonic() < end:
        time.sleep(0.001)
    assert writers
    assert writers[0] != threading.get_ident()
    journal.flush()  # waits for what the thread is at, and finds nothing


def without_time(event: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in event.items() if k != "time"}


# ------------------------------------------------------------------------------------------------------------- round trip


def test_an_event_comes_back_as_it_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    write(journal, "action.skip_step", incident=1, sample_ids=("a", "b"), reason="a spike")
    (event,) = read_journal(tmp_path)
    assert abs(event["time"] - os.stat(journal.path).st_mtime) < 5
    assert without_time(event) == HEADER | {
        "event": "action.skip_step",
        "incident": 1,
        "sample_ids": ["a", "b"],
        "reason": "a spike",
    }
    assert journal.path == tmp_path / "journal" / "rank-00000.jsonl"


def test_foreign_values_become_plain_json(tmp_path: Path) -> None:
    class Word(StrEnum):
        A = "a"

    journal = Journal(tmp_path, 0)
    write(
        journal,
        "x",
        f32=np.float32(0.5),
        i64=np.int64(7),
        flag=np.bool_(True),
        array=np.array([[1, 2]]),
        tensor=torch.tensor(2.5),
        word=Word.A,
        action=Action.SKIP_STEP,
        path=Path("a/b"),
        names={"b", "a"},
        by_number={3: "three"},
        raw=b"\x00",
        z=1 + 2j,
    )
    (event,) = read_journal(tmp_path)
    assert {k: v for k, v in event.items() if k not in (*HEADER, "time", "event")} == {
        "f32": 0.5,
        "i64": 7,
        "flag": True,
        "array": [[1, 2]],
        "tensor": 2.5,
        "word": "a",
        "action": "skip_step",
        "path": "a/b",
        "names": ["a", "b"],
        "by_number": {"3": "three"},
        "raw": "b'\\x00'",
        "z": "(1+2j)",
    }


@pytest.mark.parametrize("event", ["step", "scaler.changed"])
def test_non_finite_numbers_are_strings_and_come_back(tmp_path: Path, event: str) -> None:
    journal = Journal(tmp_path, 0)
    write(
        journal, event, loss=math.nan, high=np.float32("inf"), low=[-math.inf, 1.0], deep={"a": torch.tensor(math.nan)}
    )
    journal.close()
    text = journal.path.read_text()
    assert '"loss":"nan"' in text
    assert '"high":"inf"' in text
    assert '"low":["-inf",1.0]' in text
    assert '"deep":{"a":"nan"}' in text
    (read,) = read_journal(tmp_path)
    assert math.isnan(number(read["loss"]))
    assert number(read["high"]) == math.inf
    assert [number(v) for v in read["low"]] == [-math.inf, 1.0]
    assert math.isnan(number("a word"))
    assert math.isnan(number(True))


def test_a_field_with_a_headers_name_does_not_hide_the_header(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 2)
    write(journal, "scaler.overflow", rank=1, schema=9)
    (event,) = read_journal(tmp_path)
    assert (event["rank"], event["event_rank"], event["schema"], event["event_schema"]) == (2, 1, 1, 9)


def test_what_cannot_be_written_is_an_event_that_says_so(tmp_path: Path) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no")

    cycle: list[Any] = []
    cycle.append(cycle)
    journal = Journal(tmp_path, 0)
    write(journal, "x", value=Broken(), other=1)
    write(journal, "y", value=cycle)
    first, second = read_journal(tmp_path)
    assert (first["unwritable"], first["fields"]) == ("RuntimeError", ["other", "value"])
    assert "nested deeper than 32" in json.dumps(second["value"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def as_read(value: Any) -> Any:
    """What a value is after the journal: only non-finite numbers change."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, list):
        return [as_read(v) for v in value]
    if isinstance(value, dict):
        return {k: as_read(v) for k, v in value.items()}
    return value


@given(JSON)
@settings(max_examples=150, deadline=None)
def test_any_json_value_round_trips(value: Any) -> None:
    text = to_json({"value": value})
    assert "\n" not in text
    assert json.loads(text) == {"value": as_read(value)}


# ------------------------------------------------------------------------------------------------------ damage and resume


@given(st.lists(st.tuples(st.sampled_from(["step", "x", "action.stop"]), st.text(max_size=6)), min_size=1, max_size=3))
@settings(max_examples=6, deadline=None)
def test_a_file_cut_at_any_byte_gives_the_complete_events_and_can_be_continued(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    journal = Journal(folder, 0)
    for event, note in events:
        journal.write(event, step=1, attempt=0, tokens=0, note=note)
    journal.close()
    whole = journal.path.read_bytes()
    lines = whole.splitlines(keepends=True)
    expected = read_journal(folder)
    assert [e["event"] for e in expected] == [event for event, _ in events]
    ends = np.cumsum([len(line) for line in lines])
    for cut in range(len(whole) + 1):
        journal.path.write_bytes(whole[:cut])
        # A line is complete with its last brace; the newline after it may be lost.
        complete = int((ends - 1 <= cut).sum())
        problems: list[JournalProblem] = []
        assert read_journal(journal.path, problems=problems) == expected[:complete]
        torn = cut > (ends[complete - 1] if complete else 0)
        assert [(p.line, p.truncated) for p in problems] == ([(complete + 1, True)] if torn else [])
    # A new process goes on after a kill in the middle of the last line.
    journal.path.write_bytes(whole[:-5])
    again = Journal(folder, 0)
    again.write("after", step=2, attempt=0, tokens=0)
    problems = []
    read = read_journal(folder, problems=problems)
    assert [e["event"] for e in read] == [event for event, _ in events[:-1]] + ["after"]
    assert [(p.line, p.truncated) for p in problems] == [(len(events), False)]


def test_the_reader_says_what_it_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path, 0)
    write(journal, "a")
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b"\x00\x00garbage\xff\n[1, 2]\n" + b'{"schema": 99, "event": "future"}\n')
    again = Journal(tmp_path, 0)
    write(again, "b")
    again.close()
    with again.path.open("ab") as file:
        file.write(b'{"schema": 1, "ev')
    with caplog.at_level(logging.WARNING, logger="lightning_sentinel"):
        assert [e["event"] for e in iter_events(tmp_path)] == ["a", "b"]
    path = again.path
    assert [r.message for r in caplog.records] == [
        f"{path}:2: the line is not JSON (11 bytes); skipped",
        f'{path}:3: the line is not an event: an object with "schema" and "event" was expected; skipped',
        f"{path}:4: the line has schema 99, this version reads up to 1; upgrade to read it; skipped",
        f"{path}:6: the last line is cut short (17 bytes); the events before it are complete",
    ]


def test_a_missing_journal_is_said_with_the_place_where_it_was_expected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        read_journal(tmp_path)
    assert str(error.value) == (
        f"No journal in {tmp_path}: expected {tmp_path}/journal/rank-00000.jsonl. Give the run folder that RunJournal wrote."
    )


# --------------------------------------------------------------------------------------------------- buffering, rotation


def test_step_lines_wait_and_everything_else_is_written_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, buffer_seconds=3600)
    write(journal, "step", step=0)
    write(journal, "step", step=1)
    assert journal.path.read_bytes() == b""
    write(journal, "lr.changed")
    assert [e["event"] for e in read_journal(tmp_path)] == ["step", "step", "lr.changed"]
    write(journal, "step", step=2)
    journal.flush()
    assert len(read_journal(tmp_path)) == 4
    eager = Journal(tmp_path / "eager", 0, buffer_seconds=0)
    write(eager, "step")
    assert len(read_journal(tmp_path / "eager")) == 1


def test_actions_and_incidents_are_on_the_disk_before_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    journal = Journal(tmp_path, 0)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    sizes = []
    for event in ("finding", "action.rollback", "incident.opened", "step"):
        write(journal, event)
        sizes.append(journal.path.stat().st_size)
    assert synced == sizes[1:3]


def test_rotation_keeps_the_order_and_moves_no_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0, max_bytes=400)
    inode = None
    for step in range(12):
        write(journal, "x", step=step)
        inode = inode or journal.path.stat().st_ino
    journal.close()
    names = [p.name for p in journal_files(tmp_path)]
    assert names[:3] == ["rank-00000.jsonl", "rank-00000.0001.jsonl", "rank-00000.0002.jsonl"]
    assert (tmp_path / "journal" / names[0]).stat().st_ino == inode
    assert all(400 <= (tmp_path / "journal" / n).stat().st_size < 600 for n in names[:-1])
    assert [e["step"] for e in read_journal(tmp_path)] == list(range(12))
    again = Journal(tmp_path, 0, max_bytes=400)
    write(again, "x", step=12)
    assert [e["step"] for e in read_journal(tmp_path)] == list(range(13))


def test_a_follower_sees_every_event_once_across_files_and_unfinished_lines(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert follower.poll() == []
    journal = Journal(tmp_path, 0, max_bytes=300)
    seen = []
    for step in range(8):
        write(journal, "x", step=step)
        seen += [e["step"] for e in follower.poll()]
    assert seen == list(range(8))
    path = journal_files(tmp_path)[-1]
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"schema": 1, "time": 5.0, "rank": 0, "attempt": 0, "event": "half", ')
    assert follower.poll() == []
    with path.open("ab") as file:
        file.write(b'"tokens": 0, "step": 9}\n')
    assert [e["step"] for e in follower.poll()] == [9]


def test_ranks_are_merged_by_time_and_each_keeps_its_own_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 30.0, 25.0, 40.0, 20.0, 28.0, 50.0])
    monkeypatch.setattr("lightning_sentinel.journal.time.time", lambda: next(clock))
    first, second = Journal(tmp_path, 0), Journal(tmp_path, 1)
    for step in range(4):  # the clock is set back between the second and the third event
        write(first, "x", step=step)
    for step in range(3):
        write(second, "x", step=step)
    assert [(e["rank"], e["step"]) for e in read_journal(tmp_path)] == [
        (0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 3), (1, 2),
    ]  # fmt: skip
    assert [e["rank"] for e in read_journal(tmp_path, rank=1)] == [1, 1, 1]


# --------------------------------------------------------------------------------------------------------------- failures


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, logger="lightning_sentinel"):
        journal = Journal(tmp_path / "run", 0)
        for _ in range(3):
            write(journal, "action.stop")
        journal.close()
    assert [r.message for r in caplog.records] == [
        f"The journal cannot open {tmp_path}/run/journal/rank-00000.jsonl: Not a directory. Training goes on without it;"
        " writing is tried again every 5 s. Free space or make the folder writable, or give RunJournal another run_dir."
    ]
    assert journal.failures == [
        f"The journal cannot open {tmp_path}/run/journal/rank-00000.jsonl: Not a directory. 3 events could not be written."
    ]


@pytest.mark.parametrize("by", [write, write_by_the_thread])
def test_a_full_disk_loses_events_says_so_once_and_recovers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    by: Callable[[Journal, str], None],
) -> None:
    journal = Journal(tmp_path, 0, retry_seconds=0, buffer_seconds=0.01)
    by(journal, "before")
    real = os.write
    room = [0, 40]  # bytes for the first write, then none
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="lightning_sentinel"):

        def short(fd: int, data: bytes) -> int:
            left = room.pop() if len(room) > 1 else room[0]
            if not left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, bytes(data)[:left])

        patch.setattr(os, "write", short)
        by(journal, "lost.one")
        by(journal, "lost.two")
    by(journal, "after")
    problems: list[JournalProblem] = []
    events = read_journal(tmp_path, problems=problems)
    assert [e["event"] for e in events] == ["before", "journal.gap", "after"]
    assert events[1]["lost_events"] == 2
    assert [(p.line, p.truncated) for p in problems] == [(2, False)]
    assert journal.failures == [
        f"The journal cannot write {journal.path}: No space left on device. 2 events could not be written."
    ]
    assert len(caplog.records) == 1


def test_closing_twice_and_writing_after_closing(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    write(journal, "a")
    journal.close()
    journal.close()
    write(journal, "b")
    assert [e["event"] for e in read_journal(tmp_path)] == ["a", "b"]


def test_a_wrong_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^RunJournal: max_bytes must be at least 1, found 0\.$"
    ):  # as the callback says it
        Journal(tmp_path, 0, max_bytes=0)


# -------------------------------------------------------------------------------------------------------------- redaction


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("connect to postgres://ann:hunter2@db/x failed", "connect to postgres://[redacted]@db/x failed"),
        ("Authorization: Bearer abc.def-123456", "Authorization: Bearer [redacted]"),
        ("password=hunter2, user=ann", "password=[redacted], user=ann"),
        ("{'api_key': 'k-123', 'n': 1}", "{'api_key': [redacted], 'n': 1}"),
        ("WANDB_API_KEY=0123456789abcdef", "WANDB_API_KEY=[redacted]"),
        ("use hf_abcdefghijklmnopqrstuv now", "use [redacted] now"),
        ("AKIAABCDEFGHIJKLMNOP", "[redacted]"),
        ("ghp_abcdefghijklmnopqrstuvwxyz012345", "[redacted]"),
        ("s3 url https://b.example/x?a=1&sig=abcdef%3D&b=2", "s3 url https://b.example/x?a=1&sig=[redacted]&b=2"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----.", "[redacted]."),
        ("index 5 is out of bounds for tokens: 50257", "index 5 is out of bounds for tokens: 50257"),
        ("see https://example.org/a:b for the tokenizer", "see https://example.org/a:b for the tokenizer"),
        ("the keyword max_tokens=10 and pad_token='<pad>'", "the keyword max_tokens=10 and pad_token='<pad>'"),
    ],
)
def test_secrets_in_texts_are_redacted_and_nothing_else(text: str, expected: str) -> None:
    assert redact(text) == expected
    assert redact(expected) == expected


def test_secrets_under_their_keys_are_redacted() -> None:
    config = {
        "optimizer": {"lr": 1e-3},
        "logger": {"api_key": "abc", "apiKey": None, "password": 1234, "user": "ann"},
        "tokens": 5,
        "max_tokens": 10,
        "hf_token": "abc",
        "token": "abc",
        "eos_token": "</s>",
        "secrets": "x",
        "monkey": "banana",
        "nested": [{"client_secret": "s"}],
        "use_auth": True,
    }
    before = json.dumps(config)
    assert redact(config) == {
        "optimizer": {"lr": 1e-3},
        "logger": {"api_key": "[redacted]", "apiKey": None, "password": "[redacted]", "user": "ann"},
        "tokens": 5,
        "max_tokens": 10,
        "hf_token": "[redacted]",
        "token": "[redacted]",
        "eos_token": "</s>",
        "secrets": "[redacted]",
        "monkey": "banana",
        "nested": [{"client_secret": "[redacted]"}],
        "use_auth": True,
    }
    assert json.dumps(config) == before


def test_the_journal_holds_no_secret(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    write(journal, "run.ended", message="login as https://ann:hunter2@host failed", config={"password": "hunter2"})
    journal.close()
    assert b"hunter2" not in journal.path.read_bytes()
