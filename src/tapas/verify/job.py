"""What every rank is given: plain data that can be sent to another process."""

from dataclasses import dataclass

import torch

from tapas._torch import pytree
from tapas.capture.calls import Value
from tapas.capture.program import Captured
from tapas.cost.collectives import ClusterRouter
from tapas.hardware.cluster import Cluster, Mesh
from tapas.ir.fold import Folded
from tapas.ir.graph import Graph
from tapas.planner.decisions import Decisions, restored
from tapas.planner.solution import Solution
from tapas.verify.lifting import lifted_folded, lifted_graph, lifted_value

PRECISIONS = ("float64", "float32")


@dataclass(frozen=True)
class Job:
    graph: Graph  # as it was planned
    folded: Folded
    mesh: Mesh
    cluster: Cluster
    decisions: Decisions
    leaves: dict[str, torch.Tensor]  # parameters, buffers, inputs and constants, by tensor name
    steps: int

    def at(self, precision: str) -> "Trial":
        solution = restored(
            lifted_folded(self.folded, precision), ClusterRouter(self.mesh, self.cluster), self.decisions
        )
        leaves = {name: lifted_value(value, precision) for name, value in self.leaves.items()}
        return Trial(lifted_graph(self.graph, precision), solution, leaves, self.steps)


@dataclass(frozen=True)
class Trial:
    """A job in one precision."""

    graph: Graph
    solution: Solution
    leaves: dict[str, torch.Tensor]
    steps: int

    @property
    def made(self) -> set[str]:
        """Leaves whose values the prelude computes."""
        return {name for op in self.graph.prelude for name in op.results}

    def trained(self) -> list[str]:
        """Parameters that get a gradient, by tensor name."""
        tensors = self.graph.tensors
        return [leaf.tensor for leaf in self.graph.parameters() if tensors[leaf.tensor].differentiable]

    def captured(self) -> Captured:
        """For the parallel module; its outputs come as a plain tuple, whatever the model returns."""
        names = self.graph.outputs
        spec = pytree.tree_structure(tuple(range(len(names))))
        return Captured(self.graph, dict(self.leaves), spec, tuple(Value(name) for name in names))
