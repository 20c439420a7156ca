"""A plan in the words of a format: the plan itself, or, where that has no words for it, the best one that has."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tapas.cost.memory import Optimizer
from tapas.errors import PlanError
from tapas.export.dry_run import try_code
from tapas.export.exported import CannotSay, Reason, grouped, starred
from tapas.export.grammar import AxisUse, Grammar, Vocabulary, used_axes
from tapas.export.sites import ModuleSplit
from tapas.ir.capacity import with_capacity
from tapas.ir.fold import fold
from tapas.ir.graph import Graph
from tapas.plan.plan import Plan
from tapas.planner.assignment import choices_of, followed
from tapas.planner.fit import search
from tapas.planner.pipeline import router_of
from tapas.planner.solution import Solution
from tapas.problem.build import build_problem
from tapas.problem.problem import Problem, WeightVariable
from tapas.search import SearchAnswer

SMALL = 0.01  # of all weights: so much may be stored whole beside weights that are stored in pieces
TRIES = 12


@dataclass(frozen=True)
class PlannedModel:
    """A plan with the model that it is for."""

    plan: Plan
    model: nn.Module
    inputs: Any
    graph: Graph
    hints: Mapping[str, str] | None = None  # transformers' own tp_plan


@dataclass(frozen=True)
class Said:
    """What can be said: a plan's own decisions, or those of the best plan that the format can say."""

    grammar: Grammar
    solution: Solution
    splits: tuple[ModuleSplit, ...]
    dropped: tuple[str, ...] = ()
    seconds: float | None = None
    notes: tuple[str, ...] = ()


def say(subject: PlannedModel, words: Vocabulary, approximate: bool = False) -> Said:
    plan = subject.plan
    folded = fold(with_capacity(replace(subject.graph, found=dict(plan.assignment.found)), plan.capacity))
    problem = build_problem(folded, router_of(plan), Optimizer(plan.optimizer, plan.master))
    choices = choices_of(problem, followed(plan, subject.graph, folded))
    if choices is None:
        raise PlanError("plan", "has choices that this version of TAPAS does not know", "make the plan again")
    solution = Solution(problem, SearchAnswer(choices, plan.cost, plan.bound, False))
    modules = dict(subject.model.named_modules())
    grammar = Grammar(problem, modules, words, used_axes(problem, solution))
    reasons = [*grammar.reasons(solution), *_whole_weights(problem, solution, grammar.use)]
    said = Said(grammar, solution, tuple(grammar.splits(solution)))
    if not reasons:
        said, failed = _tried(subject, said)
        reasons += [failed] if failed else []
    if not reasons:
        return said
    if not approximate:
        remedy = "--approximate exports the best plan that can be said, with what it costs; or pin these"
        raise CannotSay(words.name, reasons, remedy)
    possible = list(_possible(subject, problem, modules, words))
    if not possible:
        raise CannotSay(words.name, reasons, "and no other plan was found that it has words for")
    best = min(possible, key=lambda found: found.solution.answer.cost)
    return replace(best, dropped=tuple(grouped(reasons)), seconds=best.solution.answer.cost)


def _whole_weights(problem: Problem, solution: Solution, use: AxisUse) -> Iterator[Reason]:
    """Weights that are stored whole along the axis of the batch, if they are more than odds and ends."""
    if use.data < 0:
        return
    found: list[tuple[str, int]] = []
    for group in solution.groups():
        part = solution.part(group)
        for variable, choice in zip(part.variables, group.choices, strict=False):
            if isinstance(variable, WeightVariable):
                layout = variable.space.layout(int(variable.stored[choice]))
                if not layout[use.data].sharded:
                    path = problem.folded.leaf_of[variable.tensor.name].paths[0]
                    found.append((path, variable.tensor.elements * len(group.copies)))
    if sum(elements for _, elements in found) > SMALL * problem.parameters:
        axis = problem.router.mesh.names[use.data]
        yield from (Reason(path, f"is stored whole over {axis}, fully_shard stores it in pieces") for path, _ in found)


def _tried(subject: PlannedModel, said: Said) -> tuple[Said, Reason | None]:
    """With a look at whether the model's own code goes along."""
    use = said.grammar.use
    devices = said.grammar.mesh.sizes[use.tensor] if use.tensor >= 0 else 1
    if devices == 1:
        return said, None
    try:
        planned = said.grammar.local_shapes(said.solution)
        return said, try_code(subject.model, subject.inputs, said.splits, planned, devices)
    except Exception as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        note = f"could not be tried on local shapes here, because the model does not run without data ({first[0]})"
        return replace(said, notes=(*said.notes, note)), None


def _possible(
    subject: PlannedModel, problem: Problem, modules: Mapping[str, nn.Module], words: Vocabulary
) -> Iterator[Said]:
    """The best plan that can be said for every use of the axes."""
    for use in _uses(subject, problem):
        whole: frozenset[str] = frozenset()
        for _ in range(TRIES):
            grammar = Grammar(problem, modules, words, use, whole)
            try:
                found = search(*grammar.restricted())
            except PlanError:  # nothing at all fits this use, e.g. a batch that is too small
                break
            said, failed = _tried(subject, Said(grammar, found, tuple(grammar.splits(found))))
            if failed is None:
                yield _noted(subject, said)
                break
            whole |= {starred(failed.place)}


def _uses(subject: PlannedModel, problem: Problem) -> Iterator[AxisUse]:
    sizes = problem.router.mesh.sizes
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    split = subject.plan.source.get("batch_split", True)
    if len(axes) <= 1:
        yield AxisUse(axes[-1] if axes else -1, -1)
        if split and axes:
            yield AxisUse(-1, axes[0])
    elif len(axes) == 2 and split:
        yield AxisUse(axes[1], axes[0])


def _noted(subject: PlannedModel, said: Said) -> Said:
    limit, needed = subject.plan.limit, said.solution.peak.nbytes
    if limit and needed > limit:
        note = f"needs {needed / 1e9:.4g} GB per device without recomputing, the plan was made for {limit / 1e9:.4g} GB"
        return replace(said, notes=(*said.notes, note))
    return said
