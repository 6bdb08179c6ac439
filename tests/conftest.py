"""Shared by all tests: one torch thread, quiet Lightning, and the few third-party warnings that are not ours to fix."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from docs_pages import ROOT, Block, documented_by

torch.set_num_threads(1)

# Each of these is raised by Lightning about the tests' own tiny set-up, never about the suite.
LIGHTNING_NOISE = [
    "ignore:.*does not have many workers.*",
    "ignore:.*GPU available but not used.*",
    "ignore:.*is smaller than the logging interval.*",
    "ignore:.*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    "ignore:Checkpoint directory .* exists and is not empty",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for noise in LIGHTNING_NOISE:
            item.add_marker(pytest.mark.filterwarnings(noise), append=False)
    # Files with long tests come first: the last ones to be handed out then are short, and both workers end together.
    long = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("distributed")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(autouse=True)
def quiet_lightning() -> None:
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)


@pytest.fixture
def documented(request: pytest.FixtureRequest) -> Iterator[list[Block]]:
    """The blocks of the documentation that say that this test runs them; each must be taken."""
    test = f"{Path(request.node.path).relative_to(ROOT)}::{request.node.originalname}"
    blocks = documented_by(test)
    assert blocks, f"no page says that {test} runs one of its blocks"
    yield blocks
    assert [str(block) for block in blocks if not block.taken] == []
