"""Writes ``summary.json``, ``loss.png`` and ``report.html`` of a run folder, each whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..journal import journal_files, to_json
from ..progress import Progress
from .data import RunData, load_run
from .summary import summarise


@dataclass
class Reports:
    """What was made: the summary, the files written, and notes on what could not be made and why."""

    summary: dict[str, Any]
    written: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write_reports(
    run_dir: str | Path,
    *,
    failures: Sequence[str] = (),
    files: bool = True,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Reports:
    """Make a run's summary and, with ``files``, write it with picture and report into ``out`` or the run folder.

    Without matplotlib there is no picture, and a note says how to get it. A folder that cannot be written to is a sentence
    in the summary's ``failures``, not an exception. A missing journal gives an empty summary if ``failures`` say why it is
    missing. ``progress``, in bytes, follows the reading of the journal and says what is being made.

    Raises:
        FileNotFoundError: Where there is no journal and no failure explains it.
    """
    run_dir = Path(run_dir)
    out = run_dir if out is None else Path(out)
    try:
        run = _read(run_dir, progress)
    except (FileNotFoundError, PermissionError):
        if not failures:
            raise
        run = RunData.from_events([])
    result = Reports(summarise(run, failures=failures))
    if not files:
        return result
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, make in (("loss.png", _picture), ("report.html", _page)):
            if progress is not None:
                progress.advance(0, f"making {name}")
            _write(out / name, make(run, result), result)
        _write(out / "summary.json", (to_json(result.summary) + "\n").encode(), result)
    except OSError as error:
        result.summary["failures"].append(f"The report cannot be written to {out}: {error.strerror or error}.")
    return result


def _read(run_dir: Path, progress: Progress | None) -> RunData:
    if progress is None:
        return load_run(run_dir)
    progress.total = sum(path.stat().st_size for path in journal_files(run_dir))
    run = load_run(run_dir, partial(progress.advance, note="reading the journal"))
    progress.advance(progress.total - progress.done)  # what is left below a MiB of each file
    return run


def remove_leftovers(out: Path) -> None:
    """Take away what a process that was ended while it wrote has left beside the files."""
    for name in ("loss.png", "report.html", "summary.json"):
        for path in out.glob(f".{name}.*"):
            path.unlink(missing_ok=True)


def _picture(run: RunData, result: Reports) -> bytes | None:
    if not len(run.steps):
        result.notes.append("No loss.png: the journal holds no step lines (RunJournal step_interval: 1 writes them).")
        return None
    from .curve import MISSING_MATPLOTLIB, render_png

    try:
        return render_png(run, result.summary)
    except ImportError:
        result.notes.append(MISSING_MATPLOTLIB)
        return None


def _page(run: RunData, result: Reports) -> bytes | None:
    from .html import MISSING_JINJA, render_html

    try:
        return render_html(run, result.summary).encode()
    except ImportError:
        result.notes.append(MISSING_JINJA)
        return None


def _write(path: Path, content: bytes | None, result: Reports) -> None:
    """Beside, to the disk, then in place: a reader sees the old file or the new one."""
    if content is None:
        return
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    result.written.append(path)
