"""The journal: append-only JSON lines, one set of files per rank, and reading them back.

A line is one event, complete in itself::

    {"schema": 1, "time": 1764433513.204118, "rank": 0, "attempt": 0, "step": 120, "tokens": 983040,
     "event": "incident.opened", "incident": {"number": 1, ...}}

``<run_dir>/journal/rank-00000.jsonl`` is written first; when it has grown to ``max_bytes``, ``rank-00000.0001.jsonl``
follows, and so on. No file is renamed, shortened or written again, so that a position in a file stays valid for whoever
follows it.

Design notes:

- ``step`` lines are collected; a thread of the journal encodes and writes them together, every second, also while
  training stands still in a collective that never returns. Every other event is written before :meth:`Journal.write`
  returns, after all lines that came before it, and ``action.*`` and ``incident.*`` are on the disk by then (fsync): the
  journal knows of an action before it happens.
- Training appends a line to a list and goes on. The lock that is held while lines are encoded and written is taken by
  the journal's thread and by whoever writes at once, flushes or closes. A process forked at any moment gets a lock of
  its own, none of the lines that wait, and no thread before it lets lines wait itself.
- JSON has no NaN. Non-finite numbers become the strings ``"nan"``, ``"inf"``, ``"-inf"``; :func:`number` turns them
  back.
- Training never fails because of its journal. A folder that is read-only or full gives one warning; what could not be
  written is counted in :attr:`Journal.failures`, and writing is tried again later.
- Secrets do not get in: every event except ``step`` (numbers and sample ids) passes through :func:`redact`.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import heapq
import itertools
import json
import logging
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from .journal_shape import what_is_wrong
from .limits import check_limits

SCHEMA = 1
REDACTED = "[redacted]"

log = logging.getLogger("lightning_sentinel")

_HEADER = ("schema", "time", "rank", "attempt", "step", "tokens", "event")
_FSYNC_EVENTS = ("action.", "incident.")
_MAX_DEPTH = 32

# --------------------------------------------------------------------------------------------- secrets

_SECRET_WORD = (
    r"pass(?:words?|wd|phrase)|pwd|secrets?|credentials?|api[_-]?key|access[_-]?key|private[_-]?key|signing[_-]?key"
)
_SECRET_KEY = re.compile(
    rf"(?:^|[_\-.\s])(?:{_SECRET_WORD})(?:$|[_\-.\s])|(?:^|[_\-.])auth(?:orization)?$|^cookies?$",
    re.IGNORECASE,
)
_TOKEN_KEY = re.compile(r"(?:^|[_\-.])(?:access|auth)?token$", re.IGNORECASE)
# The address of a webhook is all that is needed to write to it.
_WEBHOOK_KEY = re.compile(r"(?:^|[_\-.])webhook(?:[_\-.]?url)?$", re.IGNORECASE)
# Words of a tokenizer, not secrets: `pad_token: "<pad>"`.
_TOKENIZER_KEY = re.compile(
    r"(?:^|[_\-.])(?:pad|eos|bos|unk|mask|sep|cls|start|end|special|image|audio|video|decoder_start)[_\-.]token$",
    re.IGNORECASE,
)
_SECRET_TEXTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), REDACTED),
    (re.compile(r"(\b[a-z][a-z0-9+.\-]*://)[^\s/@:'\"]*:[^\s/@'\"]+@", re.IGNORECASE), rf"\1{REDACTED}@"),
    (
        re.compile(
            r"(\bwebhook(?:[_\-.]?url)?[\"']?\s*(?:=|:\s?)\s*[\"']?https?://[^\s/\"',;]+)[^\s\"',;]*", re.IGNORECASE
        ),
        rf"\1/{REDACTED}",
    ),
    (
        re.compile(r"(https?://[^\s/]+/(?:services|api/webhooks)/)[^\s\"',;]+", re.IGNORECASE),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9+/._~\-]{8,}=*", re.IGNORECASE), rf"\1 {REDACTED}"),
    (re.compile(r"\beyJ[\w\-]{8,}\.[\w\-]{8,}\.[\w\-]*"), REDACTED),
    (
        re.compile(
            r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w\-]{16,}"
            r"|\bhf_[A-Za-z0-9]{20,}|\bsk-[\w\-]{20,}|\bxox[abeprs]-[\w\-]{10,}|\bAIza[\w\-]{30,}|\bpypi-[\w\-]{20,}"
        ),
        REDACTED,
    ),
    (
        re.compile(
            rf"((?:(?:\b|_)(?:{_SECRET_WORD}|(?:access|auth|refresh|session|api|hf|wandb|github)[_-]?token)"
            r"|\b(?<!-)(?:token|sig|signature))"
            r"[\"']?\s*(?:=|:\s?)\s*)(?!\[redacted\])(\"[^\"]*\"|'[^']*'|[^\s,;&'\"\])}]+)",
            re.IGNORECASE,
        ),
        rf"\1{REDACTED}",
    ),
)


def redact(value: Any) -> Any:
    """``value`` with everything that looks like a secret replaced; containers are copied, the input is left alone.

    By key (``password``, ``api_key``, ``hf_token``, ...; a tokenizer's ``pad_token`` and counts such as ``max_tokens``
    stay) and by shape in any text (credentials in URLs, bearer tokens, private keys, well-known key prefixes,
    ``password=...``).

    Example:
        >>> redact({"db": "postgres://ann:hunter2@host/x", "api_key": "k-1", "pad_token": "<pad>", "max_tokens": 10})
        {'db': 'postgres://[redacted]@host/x', 'api_key': '[redacted]', 'pad_token': '<pad>', 'max_tokens': 10}
    """
    return _redact(value, 0)


def _redact(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return _redact_text(value)
    if depth > _MAX_DEPTH:
        return value
    if isinstance(value, Mapping):
        return {k: REDACTED if _is_secret_key(k, v) else _redact(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(v, depth + 1) for v in value]
    return value


def _is_secret_key(key: Any, value: Any) -> bool:
    if not isinstance(key, str) or value is None or isinstance(value, bool) or value == "":
        return False
    if _SECRET_KEY.search(key):
        return True
    if isinstance(value, str) and _WEBHOOK_KEY.search(key):
        return True
    return isinstance(value, str) and bool(_TOKEN_KEY.search(key)) and not _TOKENIZER_KEY.search(key)


def _redact_text(text: str) -> str:
    for pattern, replacement in _SECRET_TEXTS:
        text = pattern.sub(replacement, text)
    return text


# -------------------------------------------------------------------------------------------- encoding


def number(value: Any) -> float:
    """A journalled number as a float: ``"nan"``, ``"inf"``, ``"-inf"`` as they were; what is no number becomes NaN.

    Example:
        >>> number("-inf"), number(2), number(None)
        (-inf, 2.0, nan)
    """
    if isinstance(value, bool) or value is None:
        return math.nan
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:  # a whole number of more than 308 digits
            return math.inf if value > 0 else -math.inf
    return {"inf": math.inf, "-inf": -math.inf}.get(value, math.nan) if isinstance(value, str) else math.nan


def to_json(value: Any) -> str:
    """``value`` as strict JSON on one line: NumPy and tensor scalars as numbers, non-finite numbers as strings.

    Example:
        >>> import numpy as np
        >>> to_json({"loss": float("nan"), "n": np.int64(3)})
        '{"loss":"nan","n":3}'
    """
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError):  # a non-finite number, a key that is no string, a cycle
        return _ENCODER.encode(_plain(value, 0))


def _plain(value: Any, depth: int) -> Any:
    """``value`` made of what JSON knows."""
    kind = type(value)  # exactly these are most of what is written; a subclass may need more
    if kind is float:
        return value if value - value == 0.0 else _nonfinite(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is list and depth <= _MAX_DEPTH:
        return [v if type(v) in _AS_THEY_ARE else _plain(v, depth + 1) for v in value]
    if isinstance(value, Enum):
        return _plain(value.value, depth)
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _nonfinite(value)
    if depth > _MAX_DEPTH:
        return f"[nested deeper than {_MAX_DEPTH}: {type(value).__name__}]"
    if kind is dict or isinstance(value, Mapping):
        return {
            k if type(k) is str else str(_plain(k, depth + 1)): v
            if type(v) in _AS_THEY_ARE or (type(v) is float and v - v == 0.0)
            else _plain(v, depth + 1)
            for k, v in value.items()
        }
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(v, depth + 1) for v in value), key=str)
    if isinstance(value, (list, tuple)):
        return [_plain(v, depth + 1) for v in value]
    return _plain(_foreign(value), depth + 1)


_AS_THEY_ARE = frozenset({str, int, bool, type(None)})


def _nonfinite(value: float) -> str:
    return "nan" if value != value else "inf" if value > 0 else "-inf"


def _foreign(value: Any) -> Any:
    """One step towards JSON for a value of another library."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):  # NumPy and torch, scalars and arrays
        return value.tolist()
    return str(value)


def _default(value: Any) -> Any:
    plain = _foreign(value)
    if isinstance(plain, complex):
        return str(plain)
    return plain


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_default)

# --------------------------------------------------------------------------------------------- writing


def journal_dir(run_dir: str | Path) -> Path:
    return Path(run_dir) / "journal"


# When it came, and the line itself or the rest of its header (event, step, attempt, tokens) and what makes its fields.
_Pending = tuple[float, str] | tuple[float, str, int, int, int, Callable[[], dict[str, Any]]]

# The journal's thread holds Python's lock for about this long at a time, then training has it for as long.
_PIECE_SECONDS = 0.001
_PIECE_LINES = 1024
# A line that has waited for so many times `buffer_seconds` tells that the thread does not keep up, or that the disk stands
# still. Whoever adds the next one then writes them all, and waits for the disk: what waits must not fill the memory.
_OVERDUE = 10
_CLOSE_SECONDS = 1.0  # for the thread to end; it has nothing to do any more

# Held while one line is made: a fork waits until no thread of a journal's is within other code, whose locks the child would
# find taken for ever.
_MAKING = threading.RLock()


def _header(rank: int, now: float, event: str, step: int, attempt: int, tokens: int) -> dict[str, Any]:
    """What every line begins with."""
    return {
        "schema": SCHEMA,
        "time": round(now, 6),
        "rank": rank,
        "attempt": attempt,
        "step": step,
        "tokens": tokens,
        "event": event,
    }


def _encoded(line: _Pending, rank: int) -> str:
    if len(line) == 2:
        return line[1]
    now, event, step, attempt, tokens, make = line
    header = _header(rank, now, event, step, attempt, tokens)
    try:
        # Signals that were not measured are NaN in most steps, so they are looked for first.
        return to_json(header | _plain(make(), 0))
    except Exception as error:
        return to_json(header | {"unwritable": type(error).__name__})


class Journal:
    """Writes one rank's events; the event sink behind ``RunContext.journal``.

    Args:
        run_dir: The run folder; made if missing.
        rank: Global rank of this process.
        max_bytes: Size at which the next file begins.
        buffer_seconds: How long a ``step`` line may wait in memory.
        retry_seconds: After a failure, how long to wait before the next try.
        listener: Called with event, step and fields after every event except ``step``.

    Attributes:
        failures: What went wrong, a sentence each, newest count included; empty while all is well.
    """

    def __init__(
        self,
        run_dir: str | Path,
        rank: int,
        *,
        max_bytes: int = 256 * 2**20,
        buffer_seconds: float = 1.0,
        retry_seconds: float = 5.0,
        listener: Callable[[str, int, Mapping[str, Any]], None] | None = None,
    ) -> None:
        check_limits("RunJournal", {"max_bytes": max_bytes})
        self.run_dir = Path(run_dir)
        self.rank = rank
        self.max_bytes = max_bytes
        self.buffer_seconds = buffer_seconds
        self.retry_seconds = retry_seconds
        self.listener = listener
        self._first_error: str | None = None
        self._lost = 0
        self._lost_since_write = 0
        self._retry_at = 0.0
        self._fd: int | None = None
        self._size = 0
        self._index = 0
        self._torn = False  # the file ends within a line
        self._complete = 0  # lines of the newest write that are whole
        # Changed by `append` and `del` alone, each of which is one step to other threads.
        self._waiting: list[_Pending] = []
        self._turn = 0  # rises when lines are taken from there
        self._thread: threading.Thread | None = None
        self._begin_alone()
        _journals.add(self)
        with self._lock:
            self._try_open()

    def _begin_alone(self) -> None:
        """What depends on the threads of this process; also in a child that was forked, which has none of them."""
        self._waiting.clear()
        self._turn += 1
        # For the file. Checkpoints may be hashed, and their events written, in a thread of their own.
        self._lock = threading.RLock()
        self._thread_lock = threading.RLock()
        self._thread, self._stop = None, threading.Lock()

    @property
    def failures(self) -> list[str]:
        if self._first_error is None:
            return []
        return [f"{self._first_error} {self._lost} events could not be written."]

    @property
    def path(self) -> Path:
        """The file being written."""
        name = f"rank-{self.rank:05d}" + (f".{self._index:04d}" if self._index else "")
        return journal_dir(self.run_dir) / f"{name}.jsonl"

    def write(self, event: str, *, step: int, attempt: int, tokens: int, **fields: Any) -> None:
        """Append one event. A field that bears a header's name, such as ``rank``, is written as ``event_rank``."""
        now = time.time()
        line = _header(self.rank, now, event, step, attempt, tokens)
        for name in _HEADER:
            if name in fields:
                fields[f"event_{name}"] = fields.pop(name)
        is_step = event == "step"
        try:
            text = to_json(line | fields) if is_step else to_json(line | redact(_plain(fields, 0)))
        except Exception as error:  # a foreign object's own __str__ may raise anything; training goes on
            text = to_json(line | {"unwritable": type(error).__name__, "fields": sorted(fields)})
        if is_step:
            self._let_wait((now, text))
        else:
            with self._lock:
                self._waiting.append((now, text))
                self._write_waiting(sync=event.startswith(_FSYNC_EVENTS))
        if self.listener is not None and not is_step:
            self.listener(event, step, fields)

    def write_later(
        self, event: str, make: Callable[[], dict[str, Any]], *, step: int, attempt: int, tokens: int
    ) -> None:
        """Append one event of plain numbers and names, such as ``step``, whose fields are made when it is written.

        That is within ``buffer_seconds``, before the next event and on :meth:`flush`, mostly by the journal's own thread:
        what ``make`` reads must not change any more.
        """
        self._let_wait((time.time(), event, step, attempt, tokens, make))

    def _let_wait(self, line: _Pending) -> None:
        """Let a line wait with the others for the thread, without waiting for anything here."""
        waiting = self._waiting
        waiting.append(line)
        served = self._thread is not None or (self.buffer_seconds > 0 and self._start_thread())
        try:
            waited = line[0] - waiting[0][0]
        except IndexError:  # written meanwhile
            return
        if waited >= (self.buffer_seconds * _OVERDUE if served else self.buffer_seconds):
            self.flush()

    def flush(self) -> None:
        """Write what is waiting."""
        with self._lock:
            self._write_waiting()

    def close(self) -> None:
        """Flush, close, end the thread; a later :meth:`write` opens the file again. May be called twice."""
        with self._thread_lock:
            # First: a line that is added from here on gets a thread of its own, one that was added before is flushed now.
            thread, self._thread = self._thread, None
            if thread is not None:
                _let_go(self._stop)
        with self._lock:
            self.flush()
            self._close_file()
        if thread is not None:
            thread.join(_CLOSE_SECONDS)

    # ---------------------------------------------------------------------------------------------- inside

    def _start_thread(self) -> bool:
        """Whether there is a thread; without one, lines that have waited are written by whoever adds the next."""
        with self._thread_lock:
            if self._thread is None:
                stop = threading.Lock()
                stop.acquire()
                journal = weakref.ref(self, partial(_let_go, stop))
                seconds = min(self.buffer_seconds, threading.TIMEOUT_MAX)
                thread = threading.Thread(
                    target=_write_every, args=(journal, stop, seconds), name="Journal", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # no more threads for this user, or the interpreter is about to end
                    return False
                self._thread, self._stop = thread, stop
            return True

    def _write_piece(self) -> bool:
        """On the thread: write what waits, as far as one piece goes; whether there is more."""
        with self._lock:
            self._write_waiting(until=time.perf_counter() + _PIECE_SECONDS)
        return bool(self._waiting)

    def _write_waiting(self, *, sync: bool = False, until: float | None = None) -> None:
        """Write what waits by now: all of it, or what can be encoded until then and at least one line."""
        waiting = self._waiting
        left = len(waiting)
        while left > 0 and waiting:
            if self._fd is None and not self._try_open():
                lost = waiting[:left]
                self._turn += 1
                del waiting[:left]
                self._drop(lost)
                return
            turn, lines = self._turn, list[str]()
            for line in waiting[: min(left, _PIECE_LINES)]:
                with _MAKING:
                    lines.append(_encoded(line, self.rank))
                if until is not None and time.perf_counter() >= until:
                    break
            done = len(lines)
            # No call from the comparison on: between two of them a signal's handler may run.
            if turn != self._turn:
                continue  # one wrote an event in between, and these before it
            self._turn += 1
            del waiting[:done]
            left -= done
            self._write_lines(lines, sync=sync)
            if until is not None:
                return

    def _write_lines(self, lines: list[str], *, sync: bool) -> None:
        if self._lost_since_write:
            lines.insert(0, self._gap_line())
        try:
            self._append(lines)
            if sync and self._fd is not None:
                os.fsync(self._fd)
        except OSError as error:
            self._fail(f"cannot write {self.path}", error)
            self._drop(lines[self._complete :])
            return
        self._lost_since_write = 0
        if self._size >= self.max_bytes:
            self._close_file()
            self._index += 1
            self._try_open()

    def _append(self, lines: list[str]) -> None:
        """Write the lines in one go. After a short write (full disk) the next one begins on a new line."""
        assert self._fd is not None
        chunks = [line.encode("ascii") + b"\n" for line in lines]
        data = memoryview(b"\n" * self._torn + b"".join(chunks))
        done, ends = 0, [*itertools.accumulate(len(chunk) for chunk in chunks)]
        lead, self._complete = int(self._torn), 0
        while done < len(data):
            written = os.write(self._fd, data[done:])
            done += written
            self._size += written
            self._complete = bisect.bisect_right(ends, done - lead)
            self._torn = self._complete == 0 or ends[self._complete - 1] != done - lead

    def _gap_line(self) -> str:
        return to_json(
            {
                "schema": SCHEMA,
                "time": round(time.time(), 6),
                "rank": self.rank,
                "attempt": 0,
                "step": -1,
                "tokens": 0,
                "event": "journal.gap",
                "lost_events": self._lost_since_write,
                "reason": self._first_error,
            }
        )

    def _try_open(self) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        try:
            folder = journal_dir(self.run_dir)
            folder.mkdir(parents=True, exist_ok=True)
            existing = journal_files(self.run_dir, rank=self.rank)
            if existing:
                self._index = max(self._index, _rotation(existing[-1]))
            if self.path.exists() and self.path.stat().st_size >= self.max_bytes:
                self._index += 1
            is_new = not self.path.exists()
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size = os.fstat(self._fd).st_size
            self._torn = self._size > 0 and os.pread(self._fd, 1, self._size - 1) != b"\n"
            if is_new:
                _fsync_folder(folder)
        except OSError as error:
            self._fail(f"cannot open {self.path}", error)
            return False
        return True

    def _fail(self, what: str, error: OSError) -> None:
        self._close_file()
        self._retry_at = time.monotonic() + self.retry_seconds
        if self._first_error is None:
            reason = error.strerror or type(error).__name__
            self._first_error = f"The journal {what}: {reason}."
            # Not warnings.warn: under `-W error` that would raise into training.
            log.warning(
                "%s Training goes on without it; writing is tried again every %g s. Free space or make the folder"
                " writable, or give RunJournal another run_dir.",
                self._first_error,
                self.retry_seconds,
            )

    def _drop(self, lines: Sequence[_Pending | str]) -> None:
        lost = sum('"event":"journal.gap"' not in line for line in lines)
        self._lost += lost
        self._lost_since_write += lost

    def _close_file(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                os.close(fd)
            except OSError as error:  # a network file system may report a lost write only here
                self._fail(f"could not be closed: {self.path}", error)


# ---------------------------------------------------------------------------------------------- thread and fork


def _write_every(of: weakref.ref[Journal], stop: threading.Lock, seconds: float) -> None:
    """What a journal's thread does until the journal is closed, or dropped: then it has no more to write to."""
    while not stop.acquire(timeout=seconds):
        journal = of()
        if journal is None:
            return
        while journal._write_piece():
            if stop.acquire(timeout=_PIECE_SECONDS):
                return
        del journal


def _let_go(lock: threading.Lock, _: object = None) -> None:
    with contextlib.suppress(RuntimeError):  # it had been let go of
        lock.release()


_journals: weakref.WeakSet[Journal] = weakref.WeakSet()


def _begin_alone() -> None:
    """In a process that was just forked."""
    for journal in list(_journals):
        journal._begin_alone()
    _MAKING.release()


os.register_at_fork(before=_MAKING.acquire, after_in_parent=_MAKING.release, after_in_child=_begin_alone)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --------------------------------------------------------------------------------------------- reading

_DECODE = json.JSONDecoder().raw_decode
_FILE_NAME = re.compile(r"rank-(\d{5,})(?:\.(\d{4,}))?\.jsonl")


def _rotation(path: Path) -> int:
    match = _FILE_NAME.fullmatch(path.name)
    return int(match[2] or 0) if match else 0


def journal_files(run_dir: str | Path, rank: int | None = None) -> list[Path]:
    """Journal files of a run folder by rank, then in the order they were written."""
    found = []
    folder = journal_dir(run_dir)
    if folder.is_dir():
        for path in folder.iterdir():
            match = _FILE_NAME.fullmatch(path.name)
            if match and rank in (None, int(match[1])):
                found.append((int(match[1]), int(match[2] or 0), path))
    return [path for _, _, path in sorted(found)]


@dataclass(frozen=True)
class JournalProblem:
    """A line that is no event.

    Attributes:
        path: The file.
        line: Line number, from 1.
        truncated: True for a last line that a kill or a full disk cut short.
        reason: A sentence.
    """

    path: Path
    line: int
    truncated: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def _json(raw: bytes) -> Any:
    """``json.loads`` without what a journal's line, ASCII as it is, does not need: a quarter faster on a hundred thousand."""
    try:
        text = raw.decode("ascii").strip()
        value, end = _DECODE(text)
        if end == len(text):
            return value
    except ValueError:
        pass
    return json.loads(raw)


def parse_line(raw: bytes) -> dict[str, Any]:
    """One line as an event; raises ValueError with the reason if it is none.

    What an event must hold is said in :mod:`lightning_sentinel.journal_shape`.
    """
    try:
        event = _json(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({len(raw)} bytes)") from error
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError('is not an event: an object with "schema" and "event" was expected')
    if not isinstance(event.get("schema"), int) or not 1 <= event["schema"] <= SCHEMA:
        raise ValueError(f"has schema {event.get('schema')!r}, this version reads up to {SCHEMA}; upgrade to read it")
    wrong = what_is_wrong(event)
    if wrong is not None:
        raise ValueError(wrong)
    # Half of a surrogate pair is no text: it can neither be printed nor written to a page.
    return event if b"\\ud" not in raw and b"\\uD" not in raw else _whole_text(event)


def _whole_text(event: dict[str, Any]) -> dict[str, Any]:
    """The event with a question mark for each half of a surrogate pair whose other half is missing."""
    whole: dict[str, Any] = json.loads(json.dumps(event, ensure_ascii=False).encode("utf-8", "replace"))
    return whole


def iter_file(
    path: str | Path,
    *,
    problems: list[JournalProblem] | None = None,
    skip_steps: bool = False,
    read: Callable[[int], object] | None = None,
) -> Iterator[dict[str, Any]]:
    """Events of one file in their order. What is no event goes to ``problems`` or, without it, to the log.

    Args:
        path: The file.
        problems: Gets what could not be read.
        skip_steps: Leave out ``step`` lines, which are then not parsed.
        read: Told of so many more bytes that have been read, about once a MiB.
    """
    path, unsaid = Path(path), 0
    with path.open("rb") as file:
        for line_number, raw in enumerate(file, start=1):
            unsaid += len(raw)
            if read is not None and unsaid >= 1 << 20:
                read(unsaid)
                unsaid = 0
            if raw.isspace() or (skip_steps and b'"event":"step"' in raw[:256] and raw.endswith(b"\n")):
                continue
            try:
                yield parse_line(raw)
            except ValueError as error:
                truncated = not raw.endswith(b"\n")
                reason = (
                    f"the last line is cut short ({len(raw)} bytes); the events before it are complete"
                    if truncated
                    else f"the line {error}; skipped"
                )
                problem = JournalProblem(path, line_number, truncated, reason)
                if problems is None:
                    log.warning("%s", problem)
                else:
                    problems.append(problem)


def iter_events(
    source: str | Path, *, rank: int | None = None, problems: list[JournalProblem] | None = None
) -> Iterator[dict[str, Any]]:
    """Events of a run folder, all ranks merged by time (each rank's own order is kept), or of one journal file.

    Args:
        source: Run folder, its ``journal`` folder, or one ``.jsonl`` file.
        rank: Only this rank's files.
        problems: Gets what could not be read; without it, it is logged.

    Raises:
        FileNotFoundError: Where there is no journal.
    """
    source = Path(source)
    if source.is_file():
        yield from iter_file(source, problems=problems)
        return
    if source.name == "journal" and not journal_dir(source).is_dir():
        source = source.parent
    files = journal_files(source, rank=rank)
    if not files:
        raise FileNotFoundError(
            f"No journal in {source}: expected {journal_dir(source) / 'rank-00000.jsonl'}. Give the run folder that"
            " RunJournal wrote."
        )
    by_rank: dict[str, list[Path]] = {}
    for path in files:
        by_rank.setdefault(path.name.split(".")[0], []).append(path)
    streams = [_timed(paths, problems) for paths in by_rank.values()]
    for _, event in heapq.merge(*streams, key=lambda timed: timed[0]):
        yield event


def _timed(paths: Iterable[Path], problems: list[JournalProblem] | None) -> Iterator[tuple[float, dict[str, Any]]]:
    """One rank's events with a time that never goes back, even where the machine's clock was set back."""
    latest = -math.inf
    for path in paths:
        for event in iter_file(path, problems=problems):
            stamp = number(event.get("time"))
            latest = max(latest, stamp) if stamp == stamp else latest
            yield latest, event


def read_journal(
    source: str | Path, *, rank: int | None = None, problems: list[JournalProblem] | None = None
) -> list[dict[str, Any]]:
    """All of :func:`iter_events` as a list."""
    return list(iter_events(source, rank=rank, problems=problems))


class Follower:
    """Reads a growing journal of one rank: each :meth:`poll` gives the events that have come since the last one.

    A line that is still being written is left for the next poll; files that follow the first are taken up by themselves.
    """

    def __init__(self, run_dir: str | Path, rank: int = 0) -> None:
        self.run_dir, self.rank = Path(run_dir), rank
        self.problems: list[JournalProblem] = []
        self._index = 0
        self._offset = 0
        self._lines = 0

    def poll(self) -> list[dict[str, Any]]:
        """New events, oldest first; empty where there are none, also before the journal exists."""
        events: list[dict[str, Any]] = []
        files = journal_files(self.run_dir, rank=self.rank)
        while self._index < len(files):
            events += self._read(files[self._index])
            if self._index + 1 == len(files):
                break
            # The writer has gone on to the next file, so this one is complete.
            self._index, self._offset, self._lines = self._index + 1, 0, 0
        return events

    def _read(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                self._offset += len(raw)
                self._lines += 1
                if raw.isspace():
                    continue
                try:
                    yield parse_line(raw)
                except ValueError as error:
                    self.problems.append(JournalProblem(path, self._lines, False, f"the line {error}; skipped"))
