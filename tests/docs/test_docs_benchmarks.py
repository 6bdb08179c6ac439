"""The benchmarks of the documentation as typed: the files they write, and output with the words of the page.

What makes them short: a smaller model, fewer rounds, steps or trials, each by an option of the benchmark.
``SENTINEL_DOCS_FULL=1`` leaves them as they are (about an hour).
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from docs_pages import ROOT, Block, commands, not_shown
from docs_runs import FULL, Prints, program

# Which options make a command short, and the numbers that its JSON (or else its output) has.
SHORT: dict[tuple[str, ...], tuple[list[str], set[str]]] = {
    ("overhead.py",): (
        ["--model", "tiny", "--rounds", "2"],
        {"ratio_median", "ratio_interval", "own_share", "host_syncs", "peers", "deep_probe", "first_step_ms"},
    ),
    ("overhead.py", "--growth"): (["--growth", "100"], {"us_per_step_by_tenth", "resident_mib_by_tenth"}),
    ("overhead.py", "--scaling"): (["--steps", "40"], {"own_us_by_layers", "own_us_by_parameters"}),
    ("state.py",): (
        ["--parameters", "200000", "--repeat", "2", "--saves", "1"],
        {"snapshot_ratio", "rollback_ratio", "peak_memory_ratio"},
    ),
    ("detection.py",): (
        ["--quick", "1000"],
        {"false_per_1e6", "delays", "single", "ranks", "sweep"},
    ),
}


def run(line: str, folder: Path) -> tuple[Prints, dict[str, Any]]:
    """Run a line of a page in ``folder``; what it prints, and the numbers that it writes, if it was asked to."""
    words = shlex.split(line)
    assert words[0] == "python"
    script = ROOT / words[1]
    given = [w for w in words[2:] if w.startswith("--") and w not in ("--json", "--png")]
    short, numbers = SHORT[(script.name, *given)]
    prints = program([str(script), *words[2:], *([] if FULL else short)])
    files = {option: folder / value for option, value in itertools.pairwise(words) if option in ("--json", "--png")}
    result: dict[str, Any] = {}
    if "--json" in files:
        result = json.loads(files["--json"].read_text(encoding="utf-8"))
        assert numbers <= {*result}
    else:
        assert numbers <= {*re.findall(r"^(\w+) ", prints.out, re.MULTILINE)}
    if "--png" in files:
        assert files["--png"].read_bytes().startswith(b"\x89PNG")
    return prints, result


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(7200 if FULL else 900)
def test_what_it_costs(folder: Path, documented: list[Block]) -> None:
    found = [run(line, folder) for block in documented for line in commands(block.take())]
    (cost,) = (result for _, result in found if result)
    assert {*cost["host_syncs"]} == {"gate", "lagged"}
    assert {*cost["peers"]} == {"SpikeDetection", "detect_anomaly", "DebugUnderflowOverflow", "gradient norms"}
    assert cost["ratio_interval"][0] <= cost["ratio_median"] <= cost["ratio_interval"][1]


@pytest.mark.slow
@pytest.mark.timeout(7200 if FULL else 600)
def test_how_good_detection_is(folder: Path, documented: list[Block]) -> None:
    block, output = documented
    (line,) = commands(block.take())
    prints, result = run(line, folder)
    # Which detector saw how many of the events depends on how many there are.
    printed, shown = (re.sub(r"\{.*\}", "{}", text) for text in (prints.out, output.take()))
    assert (missing := not_shown(printed, shown)) is None, missing
    assert result["ranks"]
