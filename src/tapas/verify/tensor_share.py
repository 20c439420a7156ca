"""How much of a model tensor parallelism alone splits, the use of its parameters and not only how they are stored.

The batch stays whole, and operators split as much of the parameters that they read as any of their factors does: such a
plan gathers no weight. Whether it pays is another matter: small models are faster whole.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tapas.ir.graph import Graph
from tapas.plan.plan import Plan
from tapas.planner.assignment import assignment_of
from tapas.planner.fit import search
from tapas.planner.pipeline import described, within
from tapas.planner.request import Request
from tapas.planner.solution import Solution
from tapas.problem.pins import NamedVariable, restrict
from tapas.problem.problem import OpVariable, Problem
from tapas.rules.choices import Option

NAMED = 6  # parameters left whole, the largest first


@dataclass(frozen=True, slots=True)
class TensorShare:
    share: float  # of the bytes of the parameters that are used: those that are split wherever they are
    whole: tuple[str, ...]  # the largest of the others, with the reason
    plan: Plan


def tensor_share(graph: Graph, mesh: str) -> TensorShare:
    request = Request.of(mesh, batch_split=False, memory=None, baselines=False)
    limits = within(graph, request)
    weights = _MostOfWeights(limits.problem, {})
    solution = search(limits.problem, restrict(limits.problem, op=weights, rows=limits.rows, place="tensor only"))
    readers: dict[str, list[tuple[bool, str]]] = defaultdict(list)
    for name, split, reader in _uses(solution):
        readers[name].append((split, reader))
    total = split_bytes = 0
    whole: list[tuple[int, str]] = []
    for leaf in graph.parameters():
        if not readers[leaf.tensor]:
            continue
        size = graph.tensors[leaf.tensor].nbytes
        unsplit = [reader for split, reader in readers[leaf.tensor] if not split]
        total, split_bytes = total + size, split_bytes + (0 if unsplit else size)
        whole += [(size, f"{leaf.paths[0]}: {unsplit[0]}")] if unsplit else []
    whole.sort(key=lambda item: -item[0])
    share = round(split_bytes / total, 4) if total else 1.0
    return TensorShare(share, tuple(text for _, text in whole[:NAMED]), described(solution, graph, request))


@dataclass(frozen=True, slots=True)
class _MostOfWeights:
    """Of an operator's options, those that split the largest part of the parameters that it reads."""

    problem: Problem
    known: dict[int, int]

    def split(self, site: NamedVariable, option: Option) -> int:
        assert isinstance(site.variable, OpVariable)
        pairs = zip(site.variable.call.operands, option.operands, strict=True)
        leaf_of = self.problem.folded.leaf_of
        split = [t for t, state in pairs if state.sharded and t.name in leaf_of]
        return sum(t.nbytes for t in split if leaf_of[t.name].kind == "parameter")

    def __call__(self, site: NamedVariable, option: Option, axis: int) -> bool:
        assert isinstance(site.variable, OpVariable)
        if id(site) not in self.known:
            others = [o for o in site.variable.table.options if site.role(o) != "batch"]
            self.known[id(site)] = max(self.split(site, o) for o in others)
        return self.split(site, option) == self.known[id(site)]


def _uses(solution: Solution) -> Iterator[tuple[str, bool, str]]:
    """Every parameter that an operator reads, whether it reads it in parts, and what the operator does."""
    problem, assignment = solution.problem, assignment_of(solution)
    folded = problem.folded
    for number, copy in enumerate(folded.copies):
        block, decided = folded.blocks[copy.block], assignment.decision(number)
        own = dict(zip(block.weights, copy.weights, strict=True))
        for op, choice in zip(block.ops, decided.operators, strict=True):
            for operand, layout in zip(op.operands, choice.operands, strict=True):
                name = own.get(operand, problem.name_of(operand))
                if name in folded.leaf_of and folded.leaf_of[name].kind == "parameter":
                    how = ", ".join(text.partition("|")[0] for text in choice.choice)
                    why = "none of its factors splits it" if how in ("R", "B") else f"what splits is {how}"
                    yield name, any(s.sharded for s in layout), f"read whole by {op.target}, {why}"
