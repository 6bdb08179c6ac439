"""What several cases share: one start of two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sentinel_kit import run_ranks


@pytest.fixture(scope="session")
def told_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank of ``hidden_nan_ranks`` wrote down, by case and in rank order."""
    folder = tmp_path_factory.mktemp("told")
    run_ranks(Path(__file__).with_name("hidden_nan_ranks.py"), folder)
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        found.setdefault(file.stem.rpartition("-")[0], []).append(json.loads(file.read_text()))
    return found
