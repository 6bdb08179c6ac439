"""The fenced blocks of README, docs and examples, who runs each, and when printed output is what a page shows.

A comment right above a block says what the page's test does with it beside running it:

``<!-- before: CODE -->``
    Python that makes what the page takes for granted: a model, a loader, a file.
``<!-- output -->``
    The block is what the last command of the block before it prints. ``<!-- output: A|B -->``: either word may stand there.
``<!-- log: RUN FOLDER -->``
    The block is what the suite has logged in that run; lines may stand between.
``<!-- folder: PATH -->``
    The block is a tree of files, each of which must be there.
``<!-- shape -->``
    The JSON has the keys that the code really writes; the test knows of which code.
``<!-- elsewhere: FILE::TEST -->``
    That test runs it: it is given the block by the fixture ``documented``, and has failed if it did not take its text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"((?:^ *<!-- \w[^\n]*-->\n)*)^( *)```([^\n]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PROGRAMS = ("python", "make", "pip", "lightning-sentinel", "torchrun", "mkdir", ".venv/bin/python", ".venv/bin/ruff")


@dataclass
class Block:
    """One fenced block.

    Attributes:
        page: Its page, as a path from the root of the project.
        line: Line of its fence.
        marks: The comments above it, by their first word.
        language: As on the fence; empty for none.
        content: The lines between the fences.
        taken: Whether a test has taken the text.
    """

    page: str
    line: int
    marks: dict[str, str]
    language: str
    content: str
    taken: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def take(self) -> str:
        """The text, to run it or hold something against it."""
        self.taken = True
        return self.content

    @property
    def is_shell(self) -> bool:
        """Whether its lines are commands."""
        if self.language or not self.content.strip():
            return self.language in ("bash", "sh", "console")
        words = [w for w in self.content.split() if not re.match(r"^[A-Z_]+=", w)]
        return words[0] in PROGRAMS


def blocks_of(page: str, text: str) -> list[Block]:
    """Every fenced block of a page.

    Example:
        >>> block, = blocks_of("a.md", "<!-- output -->\\n```text\\ndone\\n```\\n")
        >>> (block.line, block.marks, block.language, block.content)
        (2, {'output': ''}, 'text', 'done')
    """
    found = []
    for match in BLOCK.finditer(text):
        comments, indent, language, content = match.groups()
        marks = {}
        for comment in re.findall(r"<!-- (.*?) *-->", comments):
            word, _, rest = comment.partition(":")
            marks[word] = rest.strip()
        lines = [line.removeprefix(indent) for line in content.splitlines()]
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Block(page, line, marks, language.strip(), "\n".join(lines)))
    return found


def blocks(page: Path) -> list[Block]:
    return blocks_of(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))


def documented_by(test: str) -> list[Block]:
    """The blocks of which a page says that this test, ``FILE::TEST``, runs them."""
    return [block for page in PAGES for block in blocks(page) if block.marks.get("elsewhere") == test]


def commands(content: str) -> list[str]:
    """The command lines of a shell block, without comments and prompts, each on one line."""
    lines = re.sub(r"\\\n\s*", "", content).splitlines()
    kept = [re.split(r"\s{2,}#|^#", line)[0].strip() for line in lines]
    return [line.removeprefix("$ ") for line in kept if line]


# ---------------------------------------------------------------------------------------------------- output

SAMPLE = r"sample:\w+/\w+(?:/\w+)?"


def normal(line: str) -> str:
    """A line without what differs from run to run: times, numbers, hashes, how many samples are named, widths of columns.

    Numbers that are part of a name stay: a module, a rank, an incident.

    Example:
        >>> normal("#1 step 120: spike; data, sample:prose/ee95a1a5ce/2365, sample:code/0; 1.2e-3 s")
        '#1 step 9: spike; data, sample:S; 9 s'
        >>> normal("22:50:57  step-00000120  (90 %), known-good, module:layers.2, rank:0")
        'T step-9 (9 %), known-good, module:layers.2, rank:0'
    """
    line = re.sub(r"\b\d\d:\d\d:\d\dZ?\b", "T", line)
    line = re.sub(rf"{SAMPLE}(?:, {SAMPLE})*", "sample:S", line)
    line = re.sub(r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b", "9", line)
    line = re.sub(r"(?<![\w.:#])[-+]?(?:\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?|inf|nan)(?:[kMG](?= ))?(?!\w)", "9", line)
    return " ".join(line.split())


def not_shown(printed: str, shown: str, *, between: bool = False, alike: Sequence[str] = ()) -> str | None:
    """What of a page's output was not printed; None if it was printed as shown.

    ``...`` in a line stands for anything, alone on a line for any number of lines.

    Args:
        printed: What the command printed.
        shown: The page's block.
        between: Whether further lines may stand between those of the page, as in a log.
        alike: Words that may stand for each other.

    Example:
        >>> not_shown("a 1\\nb\\nc 3 seconds", "a 7\\n...\\nc 4 ...")
        >>> not_shown("the run failed", "the run finished")
        "'the run finished' was not printed; there is: the run failed"
    """

    def as_one(line: str) -> str:
        for word in alike[1:]:
            line = re.sub(rf"\b{word}\b", alike[0], line)
        return normal(line)

    lines = [as_one(line) for line in printed.splitlines() if line.strip()]
    at, free = 0, between
    for wanted in (line for line in shown.splitlines() if line.strip()):
        if wanted.strip() == "...":
            free = True
            continue
        pattern = re.compile(".*".join(re.escape(as_one(part)) for part in wanted.split("...")))
        where = next((i for i in range(at, len(lines)) if pattern.fullmatch(lines[i])), None)
        if where is None or (where > at and not free):
            rest = lines[at:] if free else lines[at : at + 1]
            return f"{wanted.strip()!r} was not printed; there is: {' | '.join(rest) or 'nothing more'}"
        at, free = where + 1, between
    if at < len(lines) and not free:
        return f"printed and not shown: {' | '.join(lines[at:])}"
    return None
