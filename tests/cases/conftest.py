"""What several cases share: one start of two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from triage_matrix.ranks import start_together


@pytest.fixture(scope="session")
def told_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank of ``hidden_nan_ranks`` wrote down, by case and in rank order."""
    folder = tmp_path_factory.mktemp("told")
    here = Path(__file__).parent
    assert start_together("hidden_nan_ranks", [str(folder)], here, here.parent, timeout=280) == [0, 0]
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        found.setdefault(file.stem.rpartition("-")[0], []).append(json.loads(file.read_text()))
    return found
