"""The command line as its page says: help with an example that runs, exit codes, JSON alone, errors on one line.

Everything works on the run folder that the page itself makes.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from docs_pages import ROOT, blocks, commands
from docs_runs import Prints, runs_a

from lightning_sentinel.cli import COMMANDS, main

PAGE = ROOT / "docs" / "command-line.md"
# Every command line that a machine would read, with its exit code.
FOR_MACHINES = {
    "report runs/a": 0,
    "watch runs/a --once": 0,
    "scan metrics.csv": 1,
    "scan runs/a/metrics/metrics.csv": 0,
    "verify runs/a": 0,
    "verify damaged": 1,
    "replay runs/a --incident 3": 0,
    "quarantine list runs/a": 0,
    "quarantine add runs/a sample:a --reason why": 0,
    "quarantine revert runs/a sample:a --reason why": 0,
    "config rollback": 0,
}
# What goes wrong, and what the one line must name: what was found, and what to do.
MISUSE = {
    "": ("COMMAND", "See `lightning-sentinel --help`."),
    "confg": ("'confg'", "Did you mean config?"),
    "report": ("RUN", "See `lightning-sentinel report --help`."),
    "report nowhere": ("No journal in nowhere", "Give the run folder"),
    "report garbage": ("No line of garbage/journal/rank-00000.jsonl can be read", "Give the folder of a run"),
    "report empty": ("No line of empty/journal/rank-00000.jsonl can be read", "a run that has begun"),
    "watch nowhere --once": ("No journal in nowhere", "Give the run folder"),
    "watch garbage --once": ("No line of garbage/journal/rank-00000.jsonl can be read", "Give the folder of a run"),
    "watch runs/a --interval soon": ("'soon'", "See `lightning-sentinel watch --help`."),
    "watch runs/a --interval 0": ("got 0", "must be greater than 0 seconds"),
    "scan nowhere.csv": ("There is no nowhere.csv", "Give a log file"),
    "scan lossless.csv": ("found no loss among the columns 'a', 'b'", "name it with --loss COLUMN"),
    "scan binary.csv": ("binary.csv is not a text file", "Give CSV"),
    "scan void.csv": ("void.csv is empty", "expected a header and rows"),
    "scan header.csv": ("header.csv: it holds no row with a training loss", "Give a log that holds steps and losses"),
    "scan words.csv": (
        "none of its 2 rows can be read, the first: line 2, found 'high'",
        "--loss COLUMN names another",
    ),
    "scan summary.json": ("summary.json: none of its 1 rows can be read", "Give a log that holds steps and losses"),
    "scan metrics.csv --png nowhere/x.png": (
        "there is no folder nowhere",
        "Make it, or give a path in one that is there",
    ),
    "scan metrics.csv header.csv --png lossless.csv": ("--png lossless.csv is a file", "Give a folder."),
    "scan metrics.csv --loss los": ("found no column 'los'", "'loss'"),
    "scan metrics.csv --set callbacks.spike_detector.treshold=3": ("'treshold'", "nearest: threshold"),
    "scan metrics.csv --set callbacks.spike_detector.threshold=-3": ("found -3", "must be greater than 0"),
    "scan metrics.csv --set threshold": ("found 'threshold'", "expected DETECTOR.NAME=VALUE"),
    "scan metrics.csv lossless.csv --follow": ("found 2", "takes one file"),
    "verify nowhere": ("No checkpoint in nowhere", "Give a run folder"),
    "verify empty": ("No checkpoint in empty", "Give a run folder"),
    "replay runs/a": ("--incident", "See `lightning-sentinel replay --help`."),
    "replay nowhere --incident 1": ("nowhere has no bundle of incident 1", "`lightning-sentinel report nowhere` lists"),
    "replay runs/a --incident 9": ("no bundle of incident 9", "there are bundles of 1, 2, 3"),
    "replay runs/a --incident three": ("'three'", "See `lightning-sentinel replay --help`."),
    "replay damaged --incident 3": ("weights.pt fails SHA-256", "Put an undamaged copy there."),
    "replay damaged --incident 2": ("manifest.json is not JSON", "Put an undamaged copy there."),
    "replay runs/a --incident 3 --module nope": ("no module 'nope'", "Nearest names: "),
    "replay runs/a --incident 3 --rank 7": ("holds the ranks [0]", "not [7]"),
    "replay runs/a --incident 3 --device nowhere": ("--device nowhere cannot be used", "Give cpu"),
    "replay runs/a --incident 3 --rebuild nowhere.f": ("'nowhere.f', which cannot be imported", "Give --app-dir"),
    "replay runs/a --incident 3 --dtype float8": ("'float8'", "Did you mean float64?"),
    "quarantine": ("COMMAND", "See `lightning-sentinel quarantine --help`."),
    "quarantine list nowhere": ("nowhere is not a folder", "Give the run folder"),
    "quarantine add runs/a 77 --reason x": ("'77'", "write 'sample:<id>' or 'source:<name>'"),
    "quarantine add runs/a sample:77": ("--reason", "See `lightning-sentinel quarantine add --help`."),
    "quarantine add runs/a sample:77 --reason ' '": ("--reason is empty", "Say why"),
    "quarantine revert runs/a sample:77 --reason x": (
        "sample:77 is not quarantined",
        "`lightning-sentinel quarantine list",
    ),
    "canary": ("--app", "See `lightning-sentinel canary --help`."),
    "canary --app nowhere.py": ("nowhere.py is no file", "Give --app the script"),
    "config spike_detektor": ("'spike_detektor'", "spike_detector"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, trained: Callable[[str, Path], Prints]) -> Path:
    """A folder with ``runs/a``, a copy of it that is damaged, a log with a spike, and files that are none."""
    folder = tmp_path_factory.mktemp("command-line")
    trained(runs_a(), folder / "runs" / "a")
    shutil.copytree(folder / "runs" / "a", folder / "damaged")
    flip(sorted((folder / "damaged" / "checkpoints").glob("*/model.pt"))[0])
    flip(folder / "damaged" / "incidents" / "0003" / "weights.pt")
    (folder / "damaged" / "incidents" / "0002" / "manifest.json").write_text("{")
    luck = random.Random(0)
    for name, content in (("garbage", luck.randbytes(3000)), ("empty", b"")):
        (folder / name / "journal").mkdir(parents=True)
        (folder / name / "journal" / "rank-00000.jsonl").write_bytes(content)
    rows = "".join(f"{t},{2 + luck.gauss(0, 0.03) + (2.5 if t == 150 else 0):.4f}\n" for t in range(200))
    (folder / "metrics.csv").write_text("step,loss\n" + rows)
    (folder / "lossless.csv").write_text("a,b\n1,2\n")
    (folder / "binary.csv").write_bytes(bytes(range(256)) * 8)
    (folder / "void.csv").write_text("")
    summary = {"schema": 1, "status": "finished", "steps": 3, "loss_nats": 2.1, "scaler": {"overflows": 0}}
    (folder / "summary.json").write_text(json.dumps(summary) + "\n")
    (folder / "header.csv").write_text("step,loss\n")
    (folder / "words.csv").write_text("step,loss\n0,high\n1,low\n")
    return folder


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


@pytest.fixture(autouse=True)
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def called(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as end:  # usage errors and --help
        return int(end.code or 0)


@pytest.mark.parametrize("line", MISUSE)
def test_what_is_wrong_is_said_on_one_line_with_what_to_do(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(shlex.split(line)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("lightning-sentinel: ")
    assert printed.err.count("\n") == 1
    assert printed.err.isprintable() or printed.err.removesuffix("\n").isprintable()
    found, remedy = MISUSE[line]
    assert found in printed.err
    assert remedy in printed.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_must_not_be_read_is_said_on_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(place / "runs" / "a", "secret")
    for file in Path("secret", "journal").iterdir():
        file.chmod(0)
    assert main(["report", "secret"]) == 2
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("line", FOR_MACHINES)
def test_json_is_all_there_is_on_standard_output(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And the exit code is the one that the page gives this outcome."""
    assert main([*shlex.split(line), "--json"]) == FOR_MACHINES[line]
    printed = capsys.readouterr()
    documents = printed.out.splitlines() if line.startswith("watch") else [printed.out]  # watch: one document a line
    assert documents
    for document in documents:
        json.loads(document)
    assert printed.err == ""


def test_the_page_gives_every_command_its_exit_codes() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert [row.split("`")[1].split()[0] for row in rows][: len(COMMANDS)] == list(COMMANDS)


def test_every_command_is_tried_on_the_page_or_on_its_own() -> None:
    tried = {
        shlex.split(line)[1]
        for page in (PAGE, ROOT / "docs" / "canary.md")
        for block in blocks(page)
        if block.is_shell
        for line in commands(block.content)
        if line.startswith("lightning-sentinel ")
    }
    assert tried == set(COMMANDS)


def example_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert called([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    return text.partition("example:\n  lightning-sentinel ")[2].splitlines()[0]


NAMES = [
    *(n for n in COMMANDS if n not in ("quarantine", "canary")),
    *(f"quarantine {n}" for n in ("list", "add", "revert")),
]


@pytest.mark.parametrize("command", NAMES)
def test_the_example_in_the_help_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """That of ``canary`` is run by tests/canary, which the page on it names."""
    words = shlex.split(example_of(command, capsys))
    assert main(words) == (1 if command == "scan" else 0), words
    assert capsys.readouterr().out
    if command == "scan":
        assert Path("metrics.png").read_bytes().startswith(b"\x89PNG")
