"""No test starts several ranks without the limit on collectives: found in the tests' own code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LIMITS = re.compile(r"\b(CollectiveLimit|limited|limit_groups)\b")
# What a command line or a program in a string says for several ranks; `--devices=` is an option of the tests' own scripts,
# which are looked at themselves.
IN_WORDS = re.compile(r"(?<!--)devices[\"']?\s*[=:]\s*[\"']?([2-9]|1\d)|trainer=dd[p]")
# Calls init_process_group where there is no launcher, to see that nothing is done.
STARTS_NOBODY = {"test_distributed_meeting"}


def starts_ranks(node: ast.AST) -> bool:
    """A call with ``devices=`` other than 1, a group made by hand, a setting or a command line that says so."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        devices = [k.value for k in node.keywords if k.arg == "devices"]
        return name == "init_process_group" or any(not is_one(value) for value in devices)
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return any(isinstance(k, ast.Constant) and k.value == "devices" and not is_one(v) for k, v in pairs)
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(IN_WORDS.search(node.value))


def is_one(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in (1, "1")


def top_level(source: str) -> list[tuple[ast.stmt, str]]:
    """The statements of a module, a function or class with its decorators, and their text."""
    found, lines = [], source.splitlines()
    for statement in ast.parse(source).body:
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
        found.append((statement, "\n".join(lines[first - 1 : statement.end_lineno])))
    return found


def functions_with_limit(sources: dict[str, str]) -> set[tuple[str, str]]:
    """Module and name of the functions that give the limit to what they start."""
    return {
        (module, statement.name)
        for module, source in sources.items()
        for statement, text in top_level(source)
        if isinstance(statement, ast.FunctionDef) and LIMITS.search(text)
    }


def unlimited(module: str, source: str, good: set[tuple[str, str]]) -> list[int]:
    """Lines that start several ranks where neither the statement around them nor the function they call has the limit.

    ``good``: module and name of the functions with it.
    """
    found, statements = [], top_level(source)
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node, _ in statements
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    # A program in strings may be put together from several: one of them has to give it the limit.
    strings = [n.value for s, _ in statements for n in ast.walk(s) if isinstance(n, ast.Constant)]
    in_words = any(isinstance(value, str) and LIMITS.search(value) for value in strings)
    for statement, text in statements:
        if LIMITS.search(text):
            continue
        for node in ast.walk(statement):
            if not starts_ranks(node) or (isinstance(node, ast.Constant) and in_words):
                continue
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if imported.get(called, (module, called)) not in good:
                found.append(node.lineno)
    return sorted(set(found))


def test_every_test_with_several_ranks_has_the_limit_on_collectives() -> None:
    files = {path.stem: path for path in sorted(TESTS.rglob("*.py")) if path.stem not in STARTS_NOBODY}
    sources = {name: path.read_text() for name, path in files.items()}
    assert sum("gloo" in text for text in sources.values()) > 10  # something is looked at
    good = functions_with_limit(sources)
    where = [
        f"{files[n].relative_to(TESTS)}:{line}" for n, text in sources.items() for line in unlimited(n, text, good)
    ]
    assert where == [], (
        "give them tests/collective_limit.py's CollectiveLimit, or limit_groups() after the group is made"
    )


KIT = {
    "kit": "def make(callbacks, **options):\n    return L.Trainer(callbacks=limited(callbacks, options), **options)",
    "bare": "def make(callbacks, **options):\n    return L.Trainer(callbacks=callbacks, **options)",
}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f():\n    L.Trainer(devices=2, callbacks=[])", [2]),
        ("def f(n):\n    L.Trainer(devices=n, callbacks=[])", [2]),
        ("def f():\n    L.Trainer(devices=1, callbacks=[])", []),
        ("def f():\n    L.Trainer(devices=2, callbacks=[CollectiveLimit()])", []),
        ("def f():\n    L.Trainer(devices=2, callbacks=[])\ndef g():\n    CollectiveLimit()", [2]),
        ("from kit import make\ndef f():\n    make([], devices=2)", []),
        ("from bare import make\ndef f():\n    make([], devices=2)", [3]),
        ("from kit import make\n\nmake([], **{'devices': 2})", [3]),
        ("def f():\n    dist.init_process_group('gloo')", [2]),
        ("def f():\n    dist.init_process_group('gloo')\n    limit_groups()", []),
        ("PROGRAM = '''\nL.Trainer(devices=2)\n'''", [1]),
        ("def f():\n    run('trainer.devices=2')\n    run('trainer=ddp')", [2, 3]),
        ("def f():\n    run('trainer.devices=1')\n    run('--devices=4')", []),
        ("A = 'CollectiveLimit()'\nB = 'L.Trainer(devices=2)'\nL.Trainer(devices=3)", [3]),
    ],
)
def test_what_is_found(source: str, lines: list[int]) -> None:
    assert unlimited("looked_at", source, functions_with_limit(KIT | {"looked_at": source})) == lines
