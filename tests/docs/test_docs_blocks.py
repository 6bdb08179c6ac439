"""Every command and code block of README, docs and examples is run, and what a page shows of its output is what it prints.

A page runs from its top to its bottom in an empty folder, with ``runs/a`` of the page on the command line and nothing else
but what the page itself makes. Python and YAML run as they stand; a Trainer in them is quiet and takes eight steps.
Commands run as typed, with these changes:

- training is made short by further overrides (:data:`docs_runs.SHORT`): a smaller model, and the fault earlier. That the
  fault strikes is asserted of every command that names one; what came of it is in the output that the page shows;
- ``make`` lines are those that ``.ci/run`` itself consists of, which is asserted; so is the fault parade, which ``make
  demo`` is;
- other examples take a few steps more than until their fault strikes;
- benchmarks and what needs an installation, a job of several hosts or a server are run by the test that the page names
  (:mod:`docs_pages`).

``SENTINEL_DOCS_FULL=1`` trains at full length (half an hour), with the pages' own numbers.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from docs_pages import PAGES, ROOT, Block, blocks, blocks_of, commands, normal, not_shown
from docs_runs import FEW, FULL, Prints, program, runs_a, sentinel
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import lightning_sentinel
from lightning_sentinel import cli
from lightning_sentinel.config import build_callbacks
from lightning_sentinel.incidents import FindingKind
from lightning_sentinel.journal import read_journal

# ---------------------------------------------------------------------------------------------------- a page


class Page:
    """Runs the blocks of one page, from the top to the bottom."""

    def __init__(self, folder: Path, train: Callable[[str, Path], Prints]) -> None:
        self.folder, self.train = folder, train
        self.names: dict[str, Any] = {"__name__": "docs"}
        self.prints = Prints()
        self.logs: dict[str, str] = {}  # of each training, by its run folder

    def run(self, block: Block) -> None:
        if "elsewhere" in block.marks:
            return
        if "before" in block.marks:
            exec(block.marks["before"], self.names)
        if "output" in block.marks:
            alike = block.marks["output"].split("|")
            assert (missing := not_shown(self.prints.out, block.content, alike=alike)) is None, f"{block}: {missing}"
        elif "log" in block.marks:
            logged = self.logs[block.marks["log"]]
            assert (missing := not_shown(logged, block.content, between=True)) is None, f"{block}: {missing}"
        elif "folder" in block.marks:
            assert not_there(block) == []
        elif "shape" in block.marks:
            has_shape(block)
        elif block.language == "python":
            self.names["__name__"] = "docs"
            exec(compile(shortened(block.content), str(block), "exec"), self.names)
        elif block.language == "yaml":
            self.names["cfg"] = composes(block.content, self.folder)
        elif block.is_shell:
            for line in commands(block.content):
                self.prints = self.command(line)
        else:
            assert block.language == "text", f"what is this block? {block}"
            first = [line.split()[0] for line in block.content.splitlines() if line.strip() and line[0] != " "]
            assert not {"python", "pip", "make", "torchrun", "lightning-sentinel", "$"} & {*first}, (
                f"{block} has commands"
            )

    def command(self, line: str) -> Prints:
        words = shlex.split(line)
        while re.match(r"^[A-Z_]+=", words[0]):
            words = words[1:]
        name = words[0].removeprefix(".venv/bin/")
        if name == "lightning-sentinel":
            return sentinel(words[1:])
        if name == "make" or "experiment=parade" in words:
            by_ci(line)
            return Prints()
        if name == "python" and words[1] == "-m":
            assert words[2] == "pytest", line
            tool([*words[2:], "--collect-only"], ROOT)
            return Prints()
        if name == "ruff":
            tool([name, *words[1:], "--check"], ROOT)
            return Prints()
        assert name == "python", line
        assert (ROOT / words[1]).is_file(), line
        if words[1] == "examples/pretrain.py":
            given = [w.partition("=")[2] for w in words if w.startswith("hydra.run.dir=")]
            folder = given[0] if given else f"runs/{len([*Path('runs').iterdir()])}"
            prints = self.train(line, self.folder / folder)
            self.logs[folder] = prints.log
            return prints
        assert words[1].startswith("examples/"), f"{line}: the page must name the test that runs it"
        few = [] if FULL else FEW.get(Path(words[1]).name, [])
        return program([str(ROOT / words[1]), *words[2:], *few])


def tool(words: Sequence[str], where: Path) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=where, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def by_ci(line: str) -> None:
    """The line is one that CI itself runs, or what one of those runs."""
    ci = {line.partition("#")[0].strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()}
    without = {re.sub(r"^([A-Z_]+=\S+ |[A-Z_]+=\"[^\"]*\" )+", "", each) for each in ci}
    recipes = (ROOT / "Makefile").read_text().replace("$(PY)", "python").replace(" $(DEMO_ARGS)", "")
    if line.startswith("python"):
        assert f"\ndemo: $(VENV)/.installed\n\t{line}\n" in recipes, f"`make demo` is not {line!r}"
        line = "make demo"
    assert line in without | ci, f".ci/run has no line {line!r}: {sorted(without)}"


def shortened(code: str) -> str:
    """A Trainer of the documentation, quiet and ready after a few steps."""
    code = re.sub(r"max_steps=[\d_]+", "max_steps=8", code)
    quiet = "enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False"
    named = [word for word in ("logger=", "enable_checkpointing=") if word in code]
    quiet = ", ".join(q for q in quiet.split(", ") if not q.startswith(tuple(named)))
    return code.replace("L.Trainer(", f"L.Trainer({quiet}, ", 1)


def composes(content: str, folder: Path) -> Any:
    """A whole configuration is composed; a part of one must name options that exist."""
    document = OmegaConf.create(content)
    if "defaults" not in document:
        content = "defaults:\n  - callbacks: sentinel/default\n  - policy: observe\n  - _self_\n" + content
    (folder / "page.yaml").write_text(content)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder), version_base="1.3"):
        cfg = compose("page")
    build_callbacks(cfg.callbacks)
    return cfg


def not_there(block: Block) -> list[str]:
    """Names of the block's tree that its folder lacks; names deeper in lie two spaces further in."""
    root = Path(block.marks["folder"])
    missing = []
    for line in block.content.splitlines()[1:]:
        if line.startswith("  ") and not line.startswith("   "):
            name = line.split()[0].rstrip("/")
            if not list(root.glob(name)):
                missing.append(name)
    return missing


def has_shape(block: Block) -> None:
    """A journal line is read back as one."""
    lines = " ".join(block.content.split())
    folder = Path("shape") / "journal"
    folder.mkdir(parents=True)
    (folder / "rank-00000.jsonl").write_text(lines + "\n")
    (event,) = read_journal("shape")
    assert event == json.loads(lines)
    real = next(e for e in read_journal("runs/a") if e["event"] == event["event"])
    assert {*event} <= {*real}
    assert {*event["incident"]} <= {*real["incident"]}


@pytest.fixture
def page_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Callable[[str, Path], Prints]) -> Page:
    monkeypatch.chdir(tmp_path)
    for link in ("examples", "configs", "benchmarks"):
        (tmp_path / link).symlink_to(ROOT / link)
    (tmp_path / "runs").mkdir()
    return Page(tmp_path, trained)


@pytest.mark.slow
@pytest.mark.timeout(7200 if FULL else 900)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks(page: Path, page_runner: Page) -> None:
    found = blocks(page)
    if page.name != "command-line.md" and any("runs/a" in b.content or "runs/a" in str(b.marks) for b in found):
        page_runner.train(runs_a(), page_runner.folder / "runs" / "a")
        sentinel(["report", "runs/a"])
    for block in found:
        page_runner.run(block)


# ---------------------------------------------------------------------------------------------------- made pages


def site_hooks() -> Any:
    """What mkdocs makes pages with."""
    pytest.importorskip("mkdocs", reason="pip install lightning-sentinel[docs]")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_blocks_of_pages_that_are_made(page_runner: Page) -> None:
    made = dict(site_hooks().pages())
    found = [block for name, text in made.items() for block in blocks_of(name, text)]
    assert {block.page for block in found} == {"configuration.md"}
    for block in found:
        page_runner.run(block)


@pytest.mark.parametrize("name", sorted(n for n in lightning_sentinel.__all__ if n[0].isupper()))
def test_the_page_of_a_callback_has_an_example_that_is_run(name: str) -> None:
    """By tests/contract/test_contract_doctests.py, whose finder must find it."""
    thing = getattr(lightning_sentinel, name)
    module = importlib.import_module(thing.__module__)
    found = [t for t in doctest.DocTestFinder().find(module) if t.name == f"{module.__name__}.{name}"]
    if issubclass(thing, Exception):
        return
    assert [len(test.examples) > 0 for test in found] == [True]


# ---------------------------------------------------------------------------------------------------- the marks


def test_every_named_test_takes_the_block() -> None:
    """The test exists, asks for ``documented``, which fails where a block was not taken, and takes text of it."""
    named = {
        (block.marks["elsewhere"], str(block)) for page in PAGES for block in blocks(page) if "elsewhere" in block.marks
    }
    assert named
    for test, block in sorted(named):
        file, _, function = test.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function]
        assert len(nodes) == 1, f"{block}: {file} has no {function}"
        assert "documented" in {a.arg for a in nodes[0].args.args}, f"{block}: {test} does not ask for `documented`"
        calls = {
            n.func.attr for n in ast.walk(nodes[0]) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
        }
        assert "take" in calls, f"{block}: {test} takes no block"


def test_every_how_to_shows_what_its_faults_lead_to() -> None:
    """Behind a command with a fault the page reports on that run and shows the output."""
    for page in (ROOT / "docs" / "howto").glob("*.md"):
        found = blocks(page)
        shell = [(i, line) for i, b in enumerate(found) if b.is_shell for line in commands(b.content)]
        for _, line in shell:
            if "faults=" not in line:
                continue
            (folder,) = (w.partition("=")[2] for w in shlex.split(line) if w.startswith("hydra.run.dir="))
            after = [i for i, other in shell if other == f"lightning-sentinel report {folder}"]
            assert after, f"{page.name}: no report on {folder}"
            assert "output" in found[after[0] + 1].marks, (
                f"{page.name}: the output of the report on {folder} is not shown"
            )


def test_every_kind_of_failure_has_one_page_that_speaks_of_it() -> None:
    folder = ROOT / "docs" / "howto"
    rows = [line for line in (folder / "index.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    page_of = {
        kind: row.split("](")[1].split(")")[0] for row in rows for kind in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert sum(len(re.findall(r"`\w+`", row.split("|")[1])) for row in rows) == len(page_of)
    assert {*page_of} == {str(kind) for kind in FindingKind}
    for kind, page in page_of.items():
        assert f"`{kind}`" in (folder / page).read_text(encoding="utf-8"), f"{page} does not speak of {kind}"


def why_refused(words: Sequence[str]) -> str | None:
    """What the parser says against a command line."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            cli.build_parser().parse_args(words)
        except SystemExit:
            return err.getvalue()
    return None


def test_inline_command_lines_parse() -> None:
    """``lightning-sentinel report RUN`` in running text or a table: the command and its options exist."""
    seen = 0
    for page in PAGES:
        for line in re.findall(r"`lightning-sentinel (\w[^`|\n]*)`", page.read_text(encoding="utf-8")):
            words = shlex.split(line.replace(" N", " 1"))
            if len(words) > 1 and "--help" not in words:  # else only its name is said
                # What stands for a run may be left out in running text; what is there must be understood.
                refused = why_refused([w for w in words if w != "..."])
                assert refused is None or "are required" in refused, f"{page.name}: {line}: {refused}"
                seen += 1
            assert words[0] in cli.COMMANDS, f"{page.name}: {line}"
    assert seen > 10


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    missing = [
        str(p.relative_to(ROOT / "docs"))
        for p in (ROOT / "docs").rglob("*.md")
        if f" {p.relative_to(ROOT / 'docs')}\n" not in nav
    ]
    assert missing == []


def test_what_counts_as_the_output_that_is_shown() -> None:
    """The comparison itself: numbers and hashes may differ, words, their order and missing lines may not."""
    printed = "The run finished; 1 incident: 1 recovered.\n"
    printed += "  #1 step 60: spike; data, sample:a/1, sample:a/2; skip_step\nx.png\n"
    shown = "The run finished; 1 incident: 1 recovered.\n  #1 step 120: spike; data, sample:b/7; skip_step\n"
    assert "printed and not shown: x.png" in str(not_shown(printed, shown))
    assert not_shown(printed, shown + "...") is None
    assert not_shown(printed, "...\nx.png") is None
    assert not_shown(printed, shown.replace("data", "numerics") + "...") is not None
    assert not_shown(printed, shown.replace("1 incident: 1", "1 incident: 1 escalated, 1") + "...") is not None
    assert normal("rank:1, module:model.layers.2") != normal("rank:0, module:model.layers.2")
