"""Verification of what a search found."""

from typing import Any

from tapas.planner.assignment import assignment_of
from tapas.planner.solution import Solution
from tapas.verify.subject import Subject
from tapas.verify.verification import Report, examine


def examine_solution(found: Subject, solution: Solution, **options: Any) -> Report:
    return examine(found, assignment_of(solution), solution.problem.router, **options)
