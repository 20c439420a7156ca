"""What a solution decided, in words that hold in other processes, precisions and batch sizes."""

from typing import Any

import numpy as np

from tapas.cost.collectives import ClusterRouter
from tapas.cost.optimizers import ADAM, Optimizer
from tapas.errors import PlanError
from tapas.ir.fold import Folded
from tapas.planner.solution import Solution, layout_of
from tapas.problem.build import build_problem
from tapas.problem.problem import ModeVariable, OpVariable, Problem, Variable, WeightVariable
from tapas.search import SearchAnswer
from tapas.sharding.layout import Layout

Decision = tuple[str, ...] | Layout  # an operator's options, the layout of a weight or tensor, or a mode
Decisions = tuple[tuple[Decision, ...], ...]  # by copy and variable


def decisions(solution: Solution) -> Decisions:
    def said(variable: Variable, choice: int) -> Decision:
        if isinstance(variable, OpVariable):
            return tuple(str(option) for option in variable.table.choice(choice).options)
        if isinstance(variable, ModeVariable):
            return (variable.modes[choice],)
        return layout_of(variable, choice)

    problem = solution.problem
    return tuple(
        tuple(said(v, choice) for v, choice in zip(problem.blocks[copy.block].variables, own, strict=True))
        for copy, own in zip(problem.folded.copies, solution.answer.choices, strict=True)
    )


def _choice(variable: Variable, said: Decision) -> int:
    """The choice in these words; at another size tilings differ, then the one that splits the same things."""
    if isinstance(variable, ModeVariable):
        return variable.modes.index(str(said[0]))
    if isinstance(variable, OpVariable):
        known, combos = list[Any](variable.table.options), variable.table.combos
        name = variable.op.module or variable.op.name
    else:
        numbers = variable.stored if isinstance(variable, WeightVariable) else variable.allowed
        known, combos = list[Any](variable.space.states), variable.space.combos[numbers]
        name = variable.tensor.name
    for words in (str, _roughly):
        fits = np.array([[words(part) == words(wanted) for wanted in said] for part in known])
        found = np.flatnonzero(fits[combos, np.arange(combos.shape[1])].all(1))
        if len(found):
            return int(found[0])
    what = ", ".join(map(str, said))
    raise PlanError(name, f"cannot be split as planned ({what}) at this size", "plan again for it")


def _roughly(part: Any) -> str:
    """Without the tiling."""
    return str(part).split("|")[0]


def restored(folded: Folded, router: ClusterRouter, said: Decisions, optimizer: Optimizer = ADAM) -> Solution:
    """The solution that decisions stand for, on a folded graph of the same structure."""
    problem: Problem = build_problem(folded, router, optimizer)
    if [len(problem.blocks[copy.block].variables) for copy in folded.copies] != list(map(len, said)):
        raise PlanError("model", "does other operations at this size than it was planned with", "plan again for it")
    choices = tuple(
        tuple(_choice(v, d) for v, d in zip(problem.blocks[copy.block].variables, own, strict=True))
        for copy, own in zip(folded.copies, said, strict=True)
    )
    return Solution(problem, SearchAnswer(choices, 0.0, 0.0, False))
