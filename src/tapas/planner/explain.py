"""Why a plan is as it is: what each alternative would have cost, solved to its best, and why it loses."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tapas.errors import PlanError
from tapas.ir.graph import Graph
from tapas.ir.patterns import matches
from tapas.plan.plan import Move, Plan
from tapas.plan.words import part_words, stored_words
from tapas.planner.describe import assemble
from tapas.planner.fit import search
from tapas.planner.pipeline import pose
from tapas.planner.request import Request
from tapas.planner.solution import Solution
from tapas.problem.pins import NamedVariable, named_variables, unmatched
from tapas.problem.problem import OpVariable, Problem, Rows, TensorVariable, WeightVariable
from tapas.util import Progress, silent

Key = tuple[int, int]  # block, variable
KINDS = ("compute", "update", "communication")


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another thing to do along one axis, with everything else free to follow."""

    axis: str
    does: str
    cost: float | None  # None: the sizes forbid it, or another choice does the same for less
    seconds: dict[str, float]  # what it costs more, by kind
    move: Move | None  # the one that grew most
    move_seconds: float


@dataclass(frozen=True, slots=True)
class ExplainedVariable:
    name: str  # of the first copy
    kind: str  # "weight", or the operator's target
    copies: int
    shape: tuple[int, ...]
    chosen: tuple[str, ...]  # per axis
    alternatives: tuple[Alternative, ...]


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
    """`limit` bounds the operators, and again the weights, that are looked at."""
    problem, rows = pose(graph, request, hints, progress, apart=[pattern])
    progress("search")
    best = search(problem, rows)
    plan = assemble(best, {})
    found = _matching(problem, pattern)
    ranked = sorted(found, key=lambda key: -_weight(problem, best, key))
    operators = [k for k in ranked if isinstance(found[k].variable, OpVariable)][:limit]
    weights = [k for k in ranked if isinstance(found[k].variable, WeightVariable)][:limit]
    subjects = []
    for key in (*operators, *weights):
        progress(f"alternatives of {found[key].names[0]}")
        subjects.append(_subject(problem, rows, best, plan, key, found[key]))
    return Explanation(pattern, plan, tuple(subjects), len(found))


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
    problem: Problem, rows: Rows, best: Solution, plan: Plan, key: Key, site: NamedVariable
) -> ExplainedVariable:
    variable = site.variable
    words, combos = _described(variable, site)
    here = _first(problem, best, key)
    axes = problem.router.mesh.names
    made = []
    for axis, name in enumerate(axes):
        chosen = words[combos[here, axis]]
        for does in dict.fromkeys(w for w in words if w is not None and w != chosen):
            left = _rows(combos, here, axis, [i for i, w in enumerate(words) if w == does])
            made.append(_alternative(problem, rows, plan, key, left, name, does or "whole"))
    made.sort(key=lambda a: float("inf") if a.cost is None else a.cost)
    tensor = variable.call.results[0] if isinstance(variable, OpVariable) else variable.tensor
    return ExplainedVariable(
        site.names[0], variable.op.target if isinstance(variable, OpVariable) else "weight",
        len(problem.folded.copies_of(key[0])), tensor.shape,
        tuple(words[o] or "whole" for o in combos[here]), tuple(made),
    )  # fmt: skip


def _described(variable: Any, site: NamedVariable) -> tuple[list[str | None], np.ndarray]:
    """Words for everything a variable may do along an axis (None: never), and [choice, axis] -> its number."""
    if isinstance(variable, OpVariable):
        target = variable.op.target
        words = [part_words(target, str(o), site.role(o), str(o.results[0])) for o in variable.table.options]
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
    problem: Problem, rows: Rows, plan: Plan, key: Key, left: np.ndarray, axis: str, does: str
) -> Alternative:
    if key in rows:
        left = np.intersect1d(left, rows[key])
    impossible = Alternative(axis, does, None, {}, None, 0.0)
    if not len(left):
        return impossible
    try:
        other = assemble(search(problem, {**rows, key: left}), {})
    except PlanError:
        return impossible
    more = {kind: _kind(other, kind) - _kind(plan, kind) for kind in KINDS}
    move, seconds = _grown(plan, other)
    return Alternative(axis, does, other.cost, more, move, seconds)


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
