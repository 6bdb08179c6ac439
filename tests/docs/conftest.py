"""One short training for each command line, however many tests need it."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from docs_runs import Prints, pretrain, shortening


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Prints]:
    """Trains the example once for each command line, however many pages have it; ``(line, run folder) -> Prints``."""
    store = tmp_path_factory.mktemp("docs")
    done: dict[tuple[str, ...], tuple[Path, Prints]] = {}

    def train(line: str, folder: Path) -> Prints:
        words = [w for w in shlex.split(line)[2:] if not w.startswith("hydra.run.dir=")]
        given = {w.partition("=")[0]: w for w in words} | {w.partition("=")[0]: w for w in shortening(words)}
        key = tuple(sorted(given.values()))
        if key not in done:
            where = store / str(len([*store.iterdir()]))
            done[key] = (where, pretrain([*given.values()], where))
        where, prints = done[key]
        shutil.copytree(where, folder)
        return Prints(prints.out.replace(str(where), str(folder)), prints.log.replace(str(where), str(folder)))

    return train
