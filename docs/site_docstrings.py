"""Makes the package's docstrings into Markdown for the site: simple tables, roles, examples."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

RULE = re.compile(r"^\s*=+(?:\s+=+)+\s*$")


class Docstrings(griffe.Extension):
    """Rewrites each docstring when it is loaded, and says a constructor's defaults as values, not as the names of such."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.name != "__init__" or func.parent is None:
            return
        module = importlib.import_module(func.module.path)
        actual = inspect.signature(getattr(module, func.parent.name).__init__).parameters
        for parameter in func.parameters:
            default = actual[parameter.name].default if parameter.name in actual else inspect.Parameter.empty
            if isinstance(default, bool | int | float | str | None) and parameter.default is not None:
                parameter.default = repr(default)

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """One docstring in Markdown.

    >>> markdown("Example:\\n    >>> 1")
    'Examples:\\n    >>> 1'
    >>> markdown("A :class:`Thing` of ``x``.")
    'A `Thing` of `x`.'
    """
    # Tables first: their columns are places in the line.
    text = "\n".join(tables(text.split("\n")))
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(r":\w+:`~?([^`<]+)`", r"`\1`", text)
    text = text.replace("``", "`")
    return re.sub(r"`docs/([\w/-]+)\.md`", r"[docs: \1](../\1.md)", text)


def tables(lines: list[str]) -> list[str]:
    """Lines with each simple table of reStructuredText as a Markdown table."""
    out: list[str] = []
    i = 0
    while i < len(lines):
        if not RULE.match(lines[i]):
            out.append(lines[i])
            i += 1
            continue
        end = i + 1
        rules = 1
        while end < len(lines) and rules < 3:
            rules += bool(RULE.match(lines[end]))
            end += 1
        out += table(lines[i:end])
        i = end
    return out


def table(lines: list[str]) -> list[str]:
    """A simple table: three rules, a head, rows whose further lines leave the first column empty."""
    starts = [m.start() for m in re.finditer(r"=+", lines[0])]
    spans = [slice(a, b) for a, b in zip(starts, [*starts[1:], None], strict=True)]
    rows: list[list[str]] = []
    for line in lines[1:]:
        if RULE.match(line) or not line.strip():
            continue
        cells = [line[span].strip() for span in spans]
        if rows and not cells[0] and len(rows) > 1:
            rows[-1] = [f"{a} {b}".strip() for a, b in zip(rows[-1], cells, strict=True)]
        else:
            rows.append(cells)
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    head, *body = [f"| {' | '.join(row)} |" for row in escaped]
    return ["", head, "| " + " | ".join("---" for _ in starts) + " |", *body, ""]
