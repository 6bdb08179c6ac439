"""The ledger of quarantined samples and sources."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sentinel.data.quarantine import QuarantineLedger, append_lines, read_ledger

WHY = {"step": 12, "incident": 3, "policy": "recover", "reason": "random tokens"}


class Loader:
    def __init__(self) -> None:
        self.names: list[str] | None = None

    def exclude(self, names: list[str]) -> None:
        if "source:all" in names:
            raise ValueError("nothing is left to draw")
        self.names = names


def test_an_entry_says_who_when_why(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "quarantine.jsonl"
    ledger = QuarantineLedger(path)
    ledger.add(["sample:prose/3fa9/0", "source:code"], **WHY)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.pop("time") > 1.7e9 for line in lines] == [True, True]
    assert lines == [
        {"schema": 1, "event": "added", "name": name, **WHY} for name in ("sample:prose/3fa9/0", "source:code")
    ]
    assert ledger.active == {"sample:prose/3fa9/0", "source:code"}


def test_a_second_add_keeps_the_first_entry() -> None:
    ledger = QuarantineLedger()
    ledger.add(["sample:a", "sample:a"], **WHY)
    ledger.add(["sample:a"], **{**WHY, "step": 99})
    assert [(e.name, e.step) for e in ledger.entries] == [("sample:a", 12)]


@pytest.mark.parametrize("name", ["prose/1", "sample:", "source:", "rank:1", "", 7])
def test_only_samples_and_sources(name: object) -> None:
    with pytest.raises(ValueError, match="can not be quarantined; write 'sample:<id>' or 'source:<name>'"):
        QuarantineLedger().add([name], **WHY)  # type: ignore[list-item]


def test_a_revert_needs_a_reason_and_is_written_down(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    ledger = QuarantineLedger(path)
    ledger.add(["sample:a", "sample:b"], **WHY)
    with pytest.raises(ValueError, match="reverting the quarantine of 'sample:a' needs a reason"):
        ledger.revert("sample:a", "  ")
    with pytest.raises(KeyError, match="'sample:aa' is not quarantined; did you mean 'sample:a'"):
        ledger.revert("sample:aa", "harmless")
    ledger.revert("sample:a", "harmless")
    assert ledger.active == {"sample:b"}
    again = QuarantineLedger(path)
    assert again.active == {"sample:b"}
    assert again.entries == ledger.entries
    assert (again.entries[-1].event, again.entries[-1].reason) == ("reverted", "harmless")
    ledger.add(["sample:a"], **{**WHY, "step": 40})
    assert QuarantineLedger(path).active == {"sample:a", "sample:b"}


def test_a_truncated_last_line_is_skipped_and_closed_off(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    QuarantineLedger(path).add(["sample:a", "sample:b"], **WHY)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        ledger = QuarantineLedger(path)
        # the line without its newline is whole
        assert ledger.active == ({"sample:a", "sample:b"} if cut == len(whole) - 1 else {"sample:a"})
        ledger.add(["sample:c"], **WHY)
        assert QuarantineLedger(path).active == ledger.active >= {"sample:a", "sample:c"}


def test_foreign_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    QuarantineLedger(path).add(["sample:a"], **WHY)
    line = json.loads(path.read_text())
    for bad in (
        "[]",
        "7",
        "null",
        "\x00\xff",
        json.dumps({**line, "schema": 2}),
        json.dumps({**line, "event": "eaten"}),
        json.dumps({**line, "name": "rank:1"}),
    ):
        append_lines(path, bad + "\n")
    entries, unreadable = read_ledger(path)
    assert [e.name for e in entries] == ["sample:a"]
    assert unreadable == 7


def test_a_skipped_line_is_named_by_number_and_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "quarantine.jsonl"
    QuarantineLedger(path).add(["sample:a"], **WHY)
    line = json.loads(path.read_text())
    for bad in ({k: v for k, v in line.items() if k != "event"}, {**line, "event": "eaten"}, {**line, "time": None}):
        append_lines(path, "\n" + json.dumps(bad) + "\n")
    assert read_ledger(path)[1] == 3
    begin = f"of the quarantine ledger {path} is skipped"
    assert [r.getMessage() for r in caplog.records] == [
        f"Line 3 {begin}: it has no 'event'",
        f"Line 5 {begin}: quarantine entry has event 'eaten', expected 'added' or 'reverted'",
        f"Line 7 {begin}: float() argument must be a string or a real number, not 'NoneType'",
    ]


def test_a_missing_file_is_an_empty_ledger(tmp_path: Path) -> None:
    assert QuarantineLedger(tmp_path / "none.jsonl").active == frozenset()
    assert not (tmp_path / "none.jsonl").exists()


def test_other_ranks_read_but_do_not_write(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    QuarantineLedger(path).add(["sample:a"], **WHY)
    before = path.read_bytes()
    other = QuarantineLedger(path, write=False)
    other.add(["sample:b"], **WHY)
    assert other.active == {"sample:a", "sample:b"}
    assert path.read_bytes() == before


def test_a_file_that_can_not_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    ledger = QuarantineLedger(None)
    ledger.path = blocked / "quarantine.jsonl"
    ledger.add(["sample:a"], **WHY)
    ledger.add(["sample:b"], **WHY)
    assert ledger.active == {"sample:a", "sample:b"}
    assert ledger.write_error is not None
    assert sum("can not be written" in r.message for r in caplog.records) == 1


def test_state_goes_round_and_merges(tmp_path: Path) -> None:
    ledger = QuarantineLedger()
    ledger.add(["sample:a", "sample:b"], **WHY)
    ledger.revert("sample:a", "harmless")
    state = json.loads(json.dumps(ledger.state_dict()))
    # into a new run folder: everything is written there
    fresh = QuarantineLedger(tmp_path / "quarantine.jsonl")
    fresh.load_state_dict(state)
    assert fresh.entries == ledger.entries
    assert QuarantineLedger(tmp_path / "quarantine.jsonl").active == {"sample:b"}
    # into the folder it came from, whose ledger has gone on since: nothing doubles, nothing is lost
    fresh.add(["sample:c"], **{**WHY, "step": 50})
    fresh.load_state_dict(state)
    assert [e.name for e in fresh.entries] == ["sample:a", "sample:b", "sample:a", "sample:c"]
    assert fresh.active == {"sample:b", "sample:c"}


def test_apply_gives_every_loader_all_names() -> None:
    ledger = QuarantineLedger()
    ledger.add(["source:code", "sample:a"], **WHY)
    loader, plain = Loader(), object()
    assert ledger.apply([loader]) == []
    assert loader.names == ["sample:a", "source:code"]
    (problem,) = ledger.apply([plain, loader])
    assert problem.startswith("object has no exclude(names), so its 2 quarantined names are still drawn;")
    ledger.revert("sample:a", "harmless")
    ledger.apply([loader])
    assert loader.names == ["source:code"]
    ledger.add(["source:all"], **WHY)
    assert ledger.apply([loader]) == ["Loader refuses the quarantine: nothing is left to draw"]
    assert QuarantineLedger().apply([plain]) == []


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcde")), max_size=30))
def test_active_is_what_was_added_last_and_the_file_agrees(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[bool, str]]
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "quarantine.jsonl"
    ledger, model = QuarantineLedger(path), set()
    for add, letter in moves:
        name = f"sample:{letter}"
        if add:
            ledger.add([name], **WHY)
            model.add(name)
        elif name in model:
            ledger.revert(name, "harmless")
            model.discard(name)
        assert ledger.active == model
    assert QuarantineLedger(path).active == model


def test_lines_of_two_writers_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    child = os.fork()
    ledger = QuarantineLedger(path)
    for i in range(50):
        ledger.add([f"sample:{'child' if child == 0 else 'parent'}/{i}"], **WHY)
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    entries, unreadable = read_ledger(path)
    assert unreadable == 0
    assert len({e.name for e in entries}) == 100
