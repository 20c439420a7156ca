"""Every rule against its operator: whole run = combined sharded run, values and gradients."""

import importlib
import pkgutil

import pytest

import oracle
from oracle.case import reseed
from oracle.harness import Case, check
from oracle.missing import forgotten
from tapas.rules.base import registered

MODULES = [name for _, name, _ in pkgutil.iter_modules(oracle.__path__) if name.startswith("cases_")]


def cases_of(module: str) -> list[Case]:
    reseed()
    return importlib.import_module(f"oracle.{module}").CASES


CASES: list[Case] = [case for name in MODULES for case in cases_of(name)]


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_sharded_equals_whole(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_nothing_is_forgotten(case: Case) -> None:
    if case.exact:
        assert forgotten(case) == set(case.known)


def test_every_rule_has_a_case() -> None:
    assert set(registered()) - {case.target for case in CASES} == set()
