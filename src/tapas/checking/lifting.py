"""The same graph, and the same decisions, in another precision.

A plan made in bfloat16 is checked in float64 and float32: every cast in the graph stays where it is, but to
the wider type, so that what is left of a difference is a mistake and not rounding.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tapas.errors import PlanError
from tapas.fold import Folded
from tapas.graph import Graph, Op, Tensor
from tapas.layout import Layout
from tapas.posing import build_problem
from tapas.problem import OpVariable, Problem, Variable
from tapas.routing import Router
from tapas.search import Answer
from tapas.solution import Solution, layout_of

_NARROW = ("float16", "bfloat16", "float32", "float64")  # by width
_COMPLEX = {"float64": "complex128"}

Decision = tuple[str, ...] | Layout  # an operator's options, or the layout of a weight or tensor
Decisions = tuple[tuple[Decision, ...], ...]  # by copy and variable


def lifted_name(dtype: str, floor: str) -> str:
    """A dtype's name at least as wide as `floor`; integers stay."""
    if dtype in _NARROW:
        wide = max(_NARROW.index(dtype), _NARROW.index(floor))
        return _NARROW[wide]
    return _COMPLEX.get(floor, dtype) if dtype.startswith("complex") else dtype


def lifted_value(value: torch.Tensor, floor: str) -> torch.Tensor:
    name = str(value.dtype).removeprefix("torch.")
    return value.detach().to(getattr(torch, lifted_name(name, floor)))


def _argument(value: Any, floor: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_argument(item, floor) for item in value)
    if isinstance(value, str) and value.startswith("torch."):
        return "torch." + lifted_name(value.removeprefix("torch."), floor)
    return value


def _op(op: Op, floor: str) -> Op:
    kwargs = tuple((key, _argument(value, floor)) for key, value in op.kwargs)
    return replace(op, args=_argument(op.args, floor), kwargs=kwargs)


def _tensors(tensors: dict[str, Tensor], floor: str) -> dict[str, Tensor]:
    return {name: replace(t, dtype=lifted_name(t.dtype, floor)) for name, t in tensors.items()}


def lifted_graph(graph: Graph, floor: str) -> Graph:
    return replace(
        graph,
        tensors=_tensors(graph.tensors, floor),
        ops=tuple(_op(op, floor) for op in graph.ops),
        prelude=tuple(_op(op, floor) for op in graph.prelude),
    )


def lifted_folded(folded: Folded, floor: str) -> Folded:
    blocks = tuple(replace(block, ops=tuple(_op(op, floor) for op in block.ops)) for block in folded.blocks)
    return replace(folded, tensors=_tensors(folded.tensors, floor), blocks=blocks)


def decisions(solution: Solution) -> Decisions:
    """What was decided, in words that hold in every process and every precision."""

    def said(variable: Variable, choice: int) -> Decision:
        if isinstance(variable, OpVariable):
            return tuple(str(option) for option in variable.table.choice(choice).options)
        return layout_of(variable, choice)

    problem = solution.problem
    return tuple(
        tuple(said(v, choice) for v, choice in zip(problem.blocks[copy.block].variables, own, strict=True))
        for copy, own in zip(problem.folded.copies, solution.answer.choices, strict=True)
    )


def _choice(variable: Variable, said: Decision) -> int:
    if isinstance(variable, OpVariable):
        texts = [str(option) for option in variable.table.options]
        wanted = [texts.index(text) if text in texts else -1 for text in said]  # type: ignore[arg-type]
        found = np.flatnonzero((variable.table.combos == wanted).all(1))
    else:
        numbers = variable.allowed if hasattr(variable, "allowed") else variable.stored  # type: ignore[union-attr]
        found = np.flatnonzero(numbers == variable.space.find(said))  # type: ignore[arg-type]
    if not len(found):
        raise PlanError("plan", f"cannot be followed in this precision: {said}", "please report this defect")
    return int(found[0])


def restored(folded: Folded, router: Router, said: Decisions) -> Solution:
    """The solution that decisions stand for, on a folded graph of the same structure."""
    problem: Problem = build_problem(folded, router)
    choices = tuple(
        tuple(_choice(v, d) for v, d in zip(problem.blocks[copy.block].variables, own, strict=True))
        for copy, own in zip(folded.copies, said, strict=True)
    )
    return Solution(problem, Answer(choices, 0.0, 0.0, False))
