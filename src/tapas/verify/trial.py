"""A plan to run and compare, as plain data that can be sent to another process, in any precision.

A plan made in bfloat16 is checked in float64 and float32: every cast in the graph stays where it is, but to
the wider type, so that what is left of a difference is a mistake and not rounding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from tapas._torch import pytree
from tapas.capture.calls import Value
from tapas.capture.program import Captured
from tapas.hardware.mesh import Mesh
from tapas.ir.fold import Folded
from tapas.ir.graph import Graph, Op, Tensors
from tapas.ir.regions import REGION
from tapas.plan.assignment import Assignment, output_layouts, weight_layouts
from tapas.runtime.executor import Compilable
from tapas.runtime.parts import shard
from tapas.sharding.layout import Layout, R
from tapas.verify.homes import CarriedRegions, Home
from tapas.verify.precision import lifted_name, lifted_region, lifted_value

PRECISIONS = ("float64", "float32")

Coord = tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """How what is compared lies on a mesh; on one of no axes all of it is whole."""

    mesh: tuple[int, ...]
    outputs: tuple[Layout, ...]
    weights: Mapping[str, Layout]  # as they are stored, by tensor name

    def share(self, coord: Coord) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """What a rank has of a tensor that is laid out as an output, by the number of that."""
        return lambda number, x: shard(x, self.outputs[number], self.mesh, coord)


def unplaced(graph: Graph) -> Placed:
    return Placed((), ((),) * len(graph.outputs), {leaf.tensor: () for leaf in graph.parameters()})


@dataclass(frozen=True)
class Trial:
    """What every rank is given."""

    graph: Graph
    folded: Folded
    mesh: Mesh
    assignment: Assignment
    leaves: dict[str, torch.Tensor]  # parameters, buffers, inputs and constants, by tensor name
    steps: int
    homes: tuple[Home | CarriedRegions, ...] = ()  # what a process has to import

    def at(self, precision: str) -> "Trial":
        graph, folded = lifted_graph(self.graph, precision), lifted_folded(self.folded, precision)
        leaves = {name: lifted_value(value, precision) for name, value in self.leaves.items()}
        return replace(self, graph=graph, folded=folded, leaves=leaves)

    @cached_property
    def placed(self) -> "Placed":
        """Where everything is; parameters that no operator reads are whole."""
        unread = {leaf.tensor: (R,) * len(self.mesh.sizes) for leaf in self.graph.parameters()}
        weights = unread | weight_layouts(self.assignment, self.folded)
        return Placed(self.mesh.sizes, tuple(output_layouts(self.assignment, self.folded)), weights)

    def trained(self) -> list[str]:
        """Parameters that get a gradient, by tensor name."""
        return [leaf.tensor for leaf in self.graph.trained()]

    def source(self) -> Compilable:
        """For the parallel module; its outputs come as a plain tuple, whatever the model returns."""
        names = self.graph.outputs
        spec = pytree.tree_structure(tuple(range(len(names))))
        captured = Captured(self.graph, dict(self.leaves), spec, tuple(Value(name) for name in names))
        return Compilable(captured, self.folded, self.assignment)


def _argument(value: Any, floor: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_argument(item, floor) for item in value)
    if isinstance(value, str) and value.startswith("torch."):
        return "torch." + lifted_name(value.removeprefix("torch."), floor)
    return value


def _op(op: Op, tensors: Tensors, floor: str) -> Op:
    kwargs = tuple((key, _argument(value, floor)) for key, value in op.kwargs)
    narrow = tensors[op.results[0]].dtype
    if not op.operands and "dtype" not in dict(kwargs) and lifted_name(narrow, floor) != narrow:
        kwargs = (*kwargs, ("dtype", "torch." + lifted_name(narrow, floor)))  # it would make torch's default
    args = _argument(op.args, floor)
    if op.target == REGION:
        args = (op.args[0], lifted_region(op.args[1], floor))
    return replace(op, args=args, kwargs=kwargs)


def _tensors(tensors: Tensors, floor: str) -> Tensors:
    return Tensors({name: t._replace(dtype=lifted_name(t.dtype, floor)) for name, t in tensors.items()})


def lifted_graph(graph: Graph, floor: str) -> Graph:
    return replace(
        graph,
        tensors=_tensors(graph.tensors, floor),
        ops=tuple(_op(op, graph.tensors, floor) for op in graph.ops),
        prelude=tuple(_op(op, graph.tensors, floor) for op in graph.prelude),
    )


def lifted_folded(folded: Folded, floor: str) -> Folded:
    blocks = tuple(
        replace(block, ops=tuple(_op(op, folded.tensors, floor) for op in block.ops)) for block in folded.blocks
    )
    return replace(folded, tensors=_tensors(folded.tensors, floor), blocks=blocks)
