"""Verification of what a search found."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from tapas.planner.assignment import assignment_of
from tapas.planner.solution import Solution
from tapas.verify import verification
from tapas.verify.subject import Subject
from tapas.verify.trial import PRECISIONS
from tapas.verify.verification import Report, examine

# The best plan of every family is verified in both precisions, float32 against the original module. For other plans
# of the same graphs, the run against the graph in float64 says more, and float32 is left to `make test-full`.
float64_mostly = pytest.mark.parametrize(
    "precisions", [("float64",), pytest.param(PRECISIONS, marks=pytest.mark.full)], ids=["float64", "both"]
)


def examine_solution(
    found: Subject, solution: Solution, precisions: Sequence[str] = PRECISIONS, pieces: int = 1, **options: Any
) -> Report:
    with patch.object(verification, "PRECISIONS", precisions):
        return examine(found, assignment_of(solution, pieces), solution.problem.router, **options)
