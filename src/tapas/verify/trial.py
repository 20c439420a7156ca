"""What every rank is given: plain data that can be sent to another process."""

from dataclasses import dataclass
from functools import cached_property

import torch

from tapas._torch import pytree
from tapas.capture.calls import Value
from tapas.capture.program import Captured
from tapas.hardware.mesh import Mesh
from tapas.ir.fold import Folded
from tapas.ir.graph import Graph
from tapas.plan.assignment import Assignment, weight_layouts
from tapas.runtime.module import Compilable
from tapas.sharding.layout import Layout
from tapas.verify.lifting import lifted_folded, lifted_graph, lifted_value

PRECISIONS = ("float64", "float32")


@dataclass(frozen=True)
class Job:
    graph: Graph  # as it was planned
    folded: Folded
    mesh: Mesh
    assignment: Assignment
    leaves: dict[str, torch.Tensor]  # parameters, buffers, inputs and constants, by tensor name
    steps: int

    def at(self, precision: str) -> "Trial":
        leaves = {name: lifted_value(value, precision) for name, value in self.leaves.items()}
        graph, folded = lifted_graph(self.graph, precision), lifted_folded(self.folded, precision)
        return Trial(graph, folded, self.mesh, self.assignment, leaves, self.steps)


@dataclass(frozen=True)
class Trial:
    """A job in one precision."""

    graph: Graph
    folded: Folded
    mesh: Mesh
    assignment: Assignment
    leaves: dict[str, torch.Tensor]
    steps: int

    @cached_property
    def stored(self) -> dict[str, Layout]:
        """How each parameter is stored that an operator reads, by tensor name."""
        return weight_layouts(self.assignment, self.folded)

    @property
    def made(self) -> set[str]:
        """Leaves whose values the prelude computes."""
        return {name for op in self.graph.prelude for name in op.results}

    def trained(self) -> list[str]:
        """Parameters that get a gradient, by tensor name."""
        tensors = self.graph.tensors
        return [leaf.tensor for leaf in self.graph.parameters() if tensors[leaf.tensor].differentiable]

    def source(self) -> Compilable:
        """For the parallel module; its outputs come as a plain tuple, whatever the model returns."""
        names = self.graph.outputs
        spec = pytree.tree_structure(tuple(range(len(names))))
        captured = Captured(self.graph, dict(self.leaves), spec, tuple(Value(name) for name in names))
        return Compilable(captured, self.folded, self.assignment)
