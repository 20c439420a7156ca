"""The examples in docstrings run."""

import doctest
import pkgutil
from importlib import import_module

import pytest

import tapas.search

MODULES = [module.name for module in pkgutil.iter_modules(tapas.search.__path__, "tapas.search.")]
EXAMPLES = 12  # at least so many docstrings have one


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0


def test_there_are_examples() -> None:
    found = [test for name in MODULES for test in doctest.DocTestFinder().find(import_module(name)) if test.examples]
    assert len(found) >= EXAMPLES
