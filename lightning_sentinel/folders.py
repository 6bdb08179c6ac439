"""Where files go: folders of a filesystem, also where Lightning itself is given an address with a protocol.

Whole and verified files need rename and fsync, and a journal needs to be appended to. Object stores have neither, so an
address like ``s3://...`` is refused for the run folder instead of becoming a folder of that name here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

# Also what is left of it when somebody has made a Path of it; one letter is a drive.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):(?://(?=.)|(?=/))(.*)", re.DOTALL)
_LOCAL = ("file", "local")


def as_folder(value: str | os.PathLike[str], option: str) -> Path:
    """A folder as it was configured; ``file://`` and ``local://``, which fsspec understands, too.

    Example:
        >>> as_folder("file:///data/runs/a", "RunJournal: run_dir").as_posix()
        '/data/runs/a'

    Args:
        value: A path.
        option: Whose it is, for the error.

    Raises:
        ValueError: It is an address with another protocol.
    """
    text = os.fspath(value)
    found = _ADDRESS.match(text)
    if found is None:
        return Path(text)
    protocol, rest = found.groups()
    if protocol.lower() in _LOCAL:
        return Path(rest)
    raise ValueError(
        f"{option} is {text!r}, expected a folder on a filesystem that all ranks reach: {protocol} has no rename, fsync and"
        " append. Give a folder (of a mount, say); ModelCheckpoint(dirpath=...) may write to that address beside it."
    )


def root_folder(default_root_dir: str | os.PathLike[str]) -> Path:
    """The Trainer's root folder; the working directory where Lightning's own is an address that cannot be one.

    Example:
        >>> root_folder("s3://bucket/runs") == Path.cwd()
        True
    """
    try:
        return as_folder(default_root_dir, "default_root_dir")
    except ValueError:
        return Path.cwd()
