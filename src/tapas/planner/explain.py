"""Why a plan is as it is: what each alternative would have cost, solved to its best, and why it loses."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from tapas.errors import PlanError
from tapas.ir.graph import Graph
from tapas.ir.patterns import matches
from tapas.plan.plan import Move, Plan
from tapas.plan.words import part_words, stored_words
from tapas.planner.assignment import choices_of
from tapas.planner.describe import assemble
from tapas.planner.fit import Further, LimitedProblem, search
from tapas.planner.pipeline import within
from tapas.planner.request import Request
from tapas.planner.solution import Solution
from tapas.problem.pins import NamedVariable, named_variables, unmatched
from tapas.problem.problem import OpVariable, Problem, Rows, TensorVariable, WeightVariable
from tapas.search import SearchAnswer
from tapas.util import Progress, paused, silent

Key = tuple[int, int]  # block, variable
Solve = Callable[[Key, np.ndarray], Solution]  # the best plan with these choices of a variable only
KINDS = ("compute", "update", "communication")
WORK = 20_000  # of a search within a memory limit, see solve_within: most of a second


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another thing to do along one axis, with everything else free to follow."""

    axis: str
    does: str
    cost: float | None  # None: the sizes forbid it, or another choice does the same for less
    seconds: dict[str, float]  # what it costs more, by kind
    move: Move | None  # the one that grew most
    move_seconds: float
    nbytes: int = 0  # of a device's memory that it needs


@dataclass(frozen=True, slots=True)
class ExplainedVariable:
    name: str  # of the first copy
    kind: str  # "weight", or the operator's target
    copies: int
    shape: tuple[int, ...]
    chosen: tuple[str, ...]  # per axis
    alternatives: tuple[Alternative, ...]
    untried: int = 0  # for which there was no time


@dataclass(frozen=True, slots=True)
class Explanation:
    pattern: str
    plan: Plan
    subjects: tuple[ExplainedVariable, ...]
    matched: int  # operators and weights, of which `subjects` are the most expensive

    def to_dict(self) -> dict[str, Any]:
        return {
            "pattern": self.pattern, "model": self.plan.model, "cost": self.plan.cost, "matched": self.matched,
            "subjects": [asdict(s) for s in self.subjects],
        }  # fmt: skip


def explain(
    graph: Graph,
    request: Request,
    pattern: str,
    limit: int = 8,
    hints: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> Explanation:
    """`limit` bounds the operators, and again the weights, that are looked at. The plan fits into memory; where that
    decides, so does every alternative: it is the best of a short search."""
    limits = within(graph, request, hints, progress, apart=[pattern])
    problem, rows = limits.problem, limits.rows
    progress("search")
    fastest = search(problem, rows)
    limited = not limits.fits(fastest)
    best = limits.best() if limited else fastest
    plan = assemble(best, {})
    found = _matching(problem, pattern)
    ranked = sorted(found, key=lambda key: -_weight(problem, best, key))
    operators = [k for k in ranked if isinstance(found[k].variable, OpVariable)][:limit]
    weights = [k for k in ranked if isinstance(found[k].variable, WeightVariable)][:limit]
    subjects, solve = [], partial(_best_with, limits, limited)
    for key in (*operators, *weights):
        progress(f"alternatives of {found[key].names[0]}")
        subjects.append(_subject(problem, rows, best, plan, key, found[key], solve))
    return Explanation(pattern, plan, tuple(subjects), len(found))


# ------------------------------------------------------------------------------- the operators of a whole plan


@dataclass(frozen=True, slots=True)
class ExplainedOperator:
    """What else an operator with weights could do, in all of these copies at once."""

    copies: tuple[int, ...]
    operator: int  # its number in its block
    subject: ExplainedVariable


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Of the operators with weights those that there was time for, the most expensive first."""

    cost: float  # seconds a step of the plan that they are compared with
    operators: tuple[ExplainedOperator, ...]
    left: int  # for which there was no time
    seconds: float  # that there were


class _OutOfTime(Exception):
    """The time for alternatives is up."""


@paused
def what_if(
    graph: Graph,
    request: Request,
    plan: Plan,
    seconds: float,
    hints: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> WhatIf:
    """The alternatives of all operators with weights of a plan, each with the best around it, however much memory that
    needs; but where memory limits the plan itself, the best of a short search that fits, too. None is begun after
    `seconds`."""
    limits = within(graph, request, hints, progress)
    problem, until = limits.problem, perf_counter() + seconds
    same = plan.assignment.mesh == request.mesh.sizes
    choices = choices_of(problem, plan.assignment) if same else None
    if choices is None:
        raise PlanError("plan", "decides what cannot be chosen for this model", "make the plan again")
    best = Solution(problem, SearchAnswer(choices, plan.cost, plan.bound, False))
    limited = not limits.fits(search(problem, limits.rows))

    def solve(key: Key, left: np.ndarray) -> Solution:
        if perf_counter() > until:
            raise _OutOfTime
        return _best_with(limits, limited, key, left)

    sites, plain = named_variables(problem), assemble(best, {})
    read = [k for k, s in sites.items() if isinstance(s.variable, OpVariable) and _reads_weights(problem, s.variable)]
    found: list[ExplainedOperator] = []
    for key in sorted(read, key=lambda k: -_weight(problem, best, k)):
        if perf_counter() > until:
            break
        progress(f"alternatives of {sites[key].names[0]}")
        subject = _subject(problem, limits.rows, best, plain, key, sites[key], solve)
        operators = [v for v, o in enumerate(problem.blocks[key[0]].variables) if isinstance(o, OpVariable)]
        copies = tuple(problem.folded.copies_of(key[0]))
        found.append(ExplainedOperator(copies, operators.index(key[1]), subject))
    return WhatIf(plan.cost, tuple(found), len(read) - len(found), seconds)


def _reads_weights(problem: Problem, variable: OpVariable) -> bool:
    leaves = map(problem.folded.leaf_of.get, variable.op.operands)
    return any(leaf is not None and leaf.kind == "parameter" for leaf in leaves)


def _best_with(limits: LimitedProblem, limited: bool, key: Key, left: np.ndarray) -> Solution:
    """The best plan with these choices of a variable only; one that fits, if memory limits the plan itself."""
    problem, further = limits.problem, _only(limits.problem, key, left)
    fastest = search(problem, further(problem, limits.rows))
    if limits.limit is None or not limited or limits.fits(fastest):
        return fastest
    return Solution(problem, limits.fitting(further, WORK).within(limits.limit, fastest.peak.moment))


def _only(problem: Problem, key: Key, left: np.ndarray) -> Further:
    """Leaves these choices of a variable; also where the same copies are parted into more blocks."""
    block, v = key
    copies = set(problem.folded.copies_of(block))

    def further(other: Problem, rows: Rows) -> Rows:
        narrowed = dict(rows)
        for b in range(len(other.blocks)):
            if copies.issuperset(other.folded.copies_of(b)):
                narrowed[b, v] = np.intersect1d(left, rows[b, v]) if (b, v) in rows else left
        return narrowed

    return further


# ------------------------------------------------------------------------------------------------ one of them


def _matching(problem: Problem, pattern: str) -> dict[Key, NamedVariable]:
    """Sites by pattern; a part of a name will do where nothing matches as a whole."""
    everything = {k: s for k, s in named_variables(problem).items() if not isinstance(s.variable, TensorVariable)}
    for wanted in (pattern, f"*{pattern}*"):
        found = {k: s for k, s in everything.items() if any(matches(name, wanted) for name in s.names)}
        if found:
            return found
    names = (name for s in everything.values() for name in s.names)
    raise PlanError(f"pattern {pattern}", "no operator or parameter matches it", unmatched(pattern, names))


def _first(problem: Problem, solution: Solution, key: Key) -> int:
    """What the first copy of the block chose."""
    return solution.answer.choices[problem.folded.copies_of(key[0])[0]][key[1]]


def _weight(problem: Problem, solution: Solution, key: Key) -> float:
    variable = problem.blocks[key[0]].variables[key[1]]
    copies = len(problem.folded.copies_of(key[0]))
    if isinstance(variable, OpVariable):
        return copies * float(variable.seconds[_first(problem, solution, key)])
    return copies * float(variable.tensor.nbytes) if isinstance(variable, WeightVariable) else 0.0


def _subject(
    problem: Problem, rows: Rows, best: Solution, plan: Plan, key: Key, site: NamedVariable, solve: Solve
) -> ExplainedVariable:
    variable = site.variable
    words, combos = _described(variable, site)
    here = _first(problem, best, key)
    axes = problem.router.mesh.names
    made, untried = [], 0
    for axis, name in enumerate(axes):
        chosen = words[combos[here, axis]]
        for does in dict.fromkeys(w for w in words if w is not None and w != chosen):
            left = _rows(combos, here, axis, [i for i, w in enumerate(words) if w == does])
            if key in rows:
                left = np.intersect1d(left, rows[key])
            try:
                made.append(_alternative(plan, partial(solve, key), left, name, does or "whole"))
            except _OutOfTime:
                untried += 1
    made.sort(key=lambda a: float("inf") if a.cost is None else a.cost)
    tensor = variable.call.results[0] if isinstance(variable, OpVariable) else variable.tensor
    return ExplainedVariable(
        site.names[0], variable.op.target if isinstance(variable, OpVariable) else "weight",
        len(problem.folded.copies_of(key[0])), tensor.shape,
        tuple(words[o] or "whole" for o in combos[here]), tuple(made), untried,
    )  # fmt: skip


def _described(variable: Any, site: NamedVariable) -> tuple[list[str | None], np.ndarray]:
    """Words for everything a variable may do along an axis (None: never), and [choice, axis] -> its number."""
    if isinstance(variable, OpVariable):
        target = variable.op.target
        options = variable.table.options
        words = [part_words(target, str(o), site.role(o), str(o.results[0]), o.capacity) for o in options]
        return list(words), variable.table.combos
    combos = variable.space.combos[variable.stored]
    possible = set(np.unique(combos).tolist())
    states = variable.space.states
    return [stored_words(str(s)) if i in possible else None for i, s in enumerate(states)], combos


def _rows(combos: np.ndarray, here: int, axis: int, options: list[int]) -> np.ndarray:
    """The choices that differ from the present one along one axis only."""
    others = np.delete(np.arange(combos.shape[1]), axis)
    same = (combos[:, others] == combos[here, others]).all(1)
    return np.flatnonzero(same & np.isin(combos[:, axis], options))


def _alternative(
    plan: Plan, solve: Callable[[np.ndarray], Solution], left: np.ndarray, axis: str, does: str
) -> Alternative:
    impossible = Alternative(axis, does, None, {}, None, 0.0)
    if not len(left):
        return impossible
    try:
        other = assemble(solve(left), {})
    except PlanError:
        return impossible
    more = {kind: _kind(other, kind) - _kind(plan, kind) for kind in KINDS}
    move, seconds = _grown(plan, other)
    return Alternative(axis, does, other.cost, more, move, seconds, sum(other.memory.values()))


def _kind(plan: Plan, kind: str) -> float:
    """Compute without the optimizer's update, which stands by itself."""
    seconds = plan.seconds.get(kind, 0.0)
    return seconds - plan.seconds.get("update", 0.0) if kind == "compute" else seconds


def _grown(plan: Plan, other: Plan) -> tuple[Move | None, float]:
    """The move of the other plan that takes most time over ours."""
    before = _waits(plan)
    grown = {key: seconds - before[key] for key, seconds in _waits(other).items()}
    key = max(grown, key=lambda k: grown[k], default=None)
    if key is None or grown[key] <= 0:
        return None, 0.0
    return next(m for m in other.moves if (m.block, m.tensor, m.at) == key), grown[key]


def _waits(plan: Plan) -> Mapping[tuple[str, str, str], float]:
    total: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for move in plan.moves:
        total[move.block, move.tensor, move.at] += move.copies * move.seconds
    return total
