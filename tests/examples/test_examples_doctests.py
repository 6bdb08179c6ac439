"""The examples in the docstrings of the example."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import hybrid_lm
import pytest

MODULES = sorted(module.name for module in pkgutil.iter_modules(hybrid_lm.__path__, "hybrid_lm."))
WITH_EXAMPLES = {"hybrid_lm.datamodule", "hybrid_lm.metrics", "hybrid_lm.model", "hybrid_lm.module"}


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
    assert results.attempted > 0 or name not in WITH_EXAMPLES
