"""Text that every Python installation carries, as two sources of sequences: English prose and program source.

Prose is the language reference that ``help()`` shows (``pydoc_data.topics``) and docstrings of the standard library; code is
the library's own files. A file gives either its source or its docstrings, never both, so that no text is in both sources.
Every sixteenth document is held out for validation. Tokens are bytes, ``0 .. 255``, and :data:`SEPARATOR` ends each document.

Documents are packed one after the other and cut into sequences of ``length`` tokens. A target is the token that follows, but
never that of another document: after a separator the target is ignored, so no token is predicted from a text that it does not
belong to. ``document_ids`` rises where a document begins, for models that reset their state there.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SEPARATOR = 256
VOCAB_SIZE = 257
IGNORED = -100

PACKAGES = (
    *(
        "asyncio",
        "collections",
        "concurrent",
        "ctypes",
        "dbm",
        "email",
        "encodings",
        "html",
        "http",
        "importlib",
        "json",
    ),
    *("logging", "multiprocessing", "re", "sqlite3", "tomllib", "unittest", "urllib", "wsgiref", "xml", "zoneinfo"),
)
SHORTEST_DOCSTRING = 160  # bytes; shorter ones are a line that says little
HELD_OUT = 16  # one document in so many, and one byte in so many at most, is for validation


@dataclass(frozen=True)
class Document:
    """One text and the hash that names it."""

    text: bytes
    name: str

    @classmethod
    def of(cls, text: bytes) -> Document:
        return cls(text, hashlib.blake2b(text, digest_size=5).hexdigest())


class TextSource:
    """Documents packed into sequences; one source of a mixture.

    A sample's id is source, document and the offset in bytes of its first token in that document, such as
    ``prose/3fa9c1d2e0/4096``.

    Args:
        name: Name of the source.
        documents: Its documents, in order.
        length: Tokens in a sequence.
    """

    def __init__(self, name: str, documents: Sequence[Document], length: int) -> None:
        if length < 1:
            raise ValueError(f"a sequence has {length} tokens, expected at least 1")
        self.name = name
        self.length = length
        self._names = [document.name for document in documents]
        sizes = np.array([len(document.text) + 1 for document in documents], dtype=np.int64)
        self._starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
        if self._starts[-1] <= length:
            raise ValueError(
                f"source {name!r} has {self._starts[-1]} tokens, not enough for one sequence of {length} and its targets;"
                " raise max_bytes or lower sequence_length"
            )
        self._tokens: npt.NDArray[np.int16] = np.full(self._starts[-1], SEPARATOR, dtype=np.int16)
        for start, document in zip(self._starts, documents, strict=False):
            self._tokens[start : start + len(document.text)] = np.frombuffer(document.text, dtype=np.uint8)
        self._document: npt.NDArray[np.int32] = np.repeat(np.arange(len(documents), dtype=np.int32), sizes)

    def __len__(self) -> int:
        """Sequences in one pass."""
        return int((self._starts[-1] - 1) // self.length)

    def sample_id(self, index: int) -> str:
        first = index * self.length
        document = self._document[first]
        return f"{self.name}/{self._names[document]}/{first - self._starts[document]}"

    def sample(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """``input_ids`` and ``targets`` ``[T]`` int64, ``document_ids`` ``[T]`` int32 counted from 0 in each sequence."""
        window = slice(index * self.length, (index + 1) * self.length + 1)
        tokens = self._tokens[window].astype(np.int64)
        documents = self._document[window]
        return {
            "input_ids": tokens[:-1],
            "targets": np.where(documents[1:] == documents[:-1], tokens[1:], IGNORED),
            "document_ids": documents[:-1] - documents[0],
        }


def library_files() -> list[Path]:
    """Files of the standard library, less its tests, in an order that mixes them and is the same on every call."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [*root.glob("*.py"), *(file for package in PACKAGES for file in (root / package).rglob("*.py"))]
    kept = [file for file in files if not {"test", "tests"} & set(file.relative_to(root).parts)]
    return sorted(kept, key=lambda file: hashlib.blake2b(file.relative_to(root).as_posix().encode()).digest())


def docstrings(source: bytes) -> Iterator[str]:
    """Docstrings of the module, its classes, functions and methods that are long enough to be prose."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in _definitions(tree):
        text = ast.get_docstring(node)
        if text is not None and len(text) >= SHORTEST_DOCSTRING:
            yield text


def _definitions(node: ast.Module | ast.ClassDef) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    yield node
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _definitions(child)
        elif isinstance(child, ast.FunctionDef):
            yield child


class _Collection:
    """Documents up to a size in bytes, each text once, none longer than an eighth of it (a file may be very long)."""

    def __init__(self, max_bytes: int) -> None:
        self.room = max_bytes
        self.longest = max(1, max_bytes // 8)
        self.documents: dict[str, Document] = {}

    def add(self, text: bytes) -> None:
        document = Document.of(text[: min(self.room, self.longest)])
        if document.text and document.name not in self.documents:
            self.documents[document.name] = document
            self.room -= len(document.text)


class _Split:
    """Training and held-out documents of one source."""

    def __init__(self, max_bytes: int) -> None:
        self.train, self.held_out = _Collection(max_bytes), _Collection(max_bytes // HELD_OUT)
        self.count = 0

    def add(self, text: bytes) -> None:
        (self.held_out if self.count % HELD_OUT == 0 else self.train).add(text)
        self.count += 1

    @property
    def full(self) -> bool:
        return self.train.room <= 0

    def documents(self) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
        # a text that both halves hold, such as an empty template, stays held out
        train = (d for name, d in self.train.documents.items() if name not in self.held_out.documents)
        return tuple(train), tuple(self.held_out.documents.values())


@lru_cache(maxsize=4)
def collect(max_bytes: int) -> dict[str, tuple[tuple[Document, ...], tuple[Document, ...]]]:
    """Training and held-out documents of ``prose`` and ``code``, at most ``max_bytes`` and a sixteenth of it for each source.

    The same on every call and every rank with the same Python installation.
    """
    from pydoc_data.topics import topics

    code, prose = _Split(max_bytes), _Split(max_bytes)
    for name in sorted(topics):
        prose.add(topics[name].encode())
    for file in library_files():
        if not code.full:
            code.add(file.read_bytes())
        elif not prose.full:
            for text in docstrings(file.read_bytes()):
                prose.add(text.encode())
        else:
            break
    return {"prose": prose.documents(), "code": code.documents()}


def text_sources(max_bytes: int, length: int, *, held_out: bool = False) -> list[TextSource]:
    """The sources ``prose`` and ``code``: the documents for training, or those held out for validation."""
    return [TextSource(name, documents[held_out], length) for name, documents in collect(max_bytes).items()]
