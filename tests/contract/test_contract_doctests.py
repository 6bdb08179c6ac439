"""The examples in the package's docstrings are run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import lightning_sentinel

MODULES = sorted(m.name for m in pkgutil.walk_packages(lightning_sentinel.__path__, "lightning_sentinel."))


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = sum(len(test.examples) for name in MODULES for test in finder.find(importlib.import_module(name)))
    assert found > 60
