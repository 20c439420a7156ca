"""The parallel module: the original parameter names as DTensors, the rank's program inside."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree  # captured outputs are described by its specs
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard  # packed weights: no public name yet

from tapas.capture.calls import Value
from tapas.capture.program import Captured
from tapas.errors import TapasError
from tapas.layout import Layout, State, local_pieces
from tapas.solution import Solution
from tapas.spmd.gradients import Gradients, buckets
from tapas.spmd.program import Rank, output_layouts, weight_layouts, write_program
from tapas.spmd.wire import Count, GradientGroups, mesh_axes


def placement(state: State) -> Placement:
    """A stored state as DTensor says it."""
    if not state.sharded:
        return Replicate()
    return _StridedShard(state.dim, split_factor=len(state.tiling)) if state.tiling else Shard(state.dim)


def shard(x: torch.Tensor, layout: Layout, mesh: Sequence[int], coord: Sequence[int]) -> torch.Tensor:
    """What the rank at `coord` holds of a whole tensor."""
    for dim, ranges in enumerate(local_pieces(x.shape, layout, mesh, coord)):
        if ranges != ((0, x.shape[dim]),):
            parts = [x.narrow(dim, start, stop - start) for start, stop in ranges]
            x = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return x


def _last_used_first(program: fx.GraphModule, order: Sequence[tuple[str, Any]]) -> list[int]:
    """Parameters by when their gradients will be there: the backward pass runs from the end."""
    nodes = list(program.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    leaves = [node for node in nodes if node.op == "placeholder"]
    first = {
        index: min((place[user] for user in node.users), default=0)
        for node, (kind, index) in zip(leaves, order, strict=True)
        if kind == "parameter"
    }
    return sorted(first, key=lambda index: -first[index])


class ParallelModule(nn.Module):
    """Computes what the original model computes; every rank calls it with the same global inputs."""

    program: fx.GraphModule
    count: Count

    def __init__(self, model: nn.Module, captured: Captured, solution: Solution, device_mesh: DeviceMesh) -> None:
        super().__init__()
        graph = captured.graph
        sizes = solution.problem.router.mesh.sizes
        if tuple(device_mesh.shape) != tuple(sizes):
            raise TapasError(
                "mesh", f"the plan is for {sizes}, the device mesh is {tuple(device_mesh.shape)}", "make them agree"
            )
        coord = device_mesh.get_coordinate()
        if coord is None:
            raise TapasError("mesh", "this rank is not part of the device mesh", "call it on the mesh's ranks only")
        self.count = Count()
        device = torch.device(device_mesh.device_type)
        rank = Rank(tuple(sizes), tuple(coord), mesh_axes(device_mesh), self.count, device)
        # hidden from nn.Module: it has no parameters of its own, and its inner names are of no use in a checkpoint
        later: dict[str, tuple[int, ...]] = {}
        object.__setattr__(self, "program", write_program(graph, solution, rank, later))
        self._graph, self._captured = graph, captured
        self._outputs = output_layouts(solution)
        self._mesh, self._rank = device_mesh, rank
        self._order: list[tuple[str, Any]] = []
        made = {name for op in graph.prelude for name in op.results}
        state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        saved = set(model.state_dict())
        layouts = weight_layouts(solution)
        whole: Layout = (State("R"),) * len(sizes)
        names: list[str] = []
        parameters: list[nn.Parameter] = []
        for leaf in graph.leaves:
            if leaf.kind == "parameter":
                source = state[leaf.paths[0]]
                made_here = self._parameter(source, layouts.get(leaf.tensor, whole))
                for path in leaf.paths:
                    self._register(path, made_here)
                self._order.append(("parameter", len(names)))
                names.append(leaf.tensor)
                parameters.append(made_here)
            elif leaf.kind == "buffer":
                buffer = state[leaf.paths[0]].detach().clone().to(device)
                self._register(leaf.paths[0], buffer, leaf.paths[0] in saved)
                self._order.append(("buffer", leaf.paths[0]))
            elif leaf.kind == "input":
                self._order.append(("input", leaf.paths[0]))
            elif leaf.tensor not in made:
                self._order.append(("constant", captured.constants[leaf.tensor].to(device)))
        groups = GradientGroups(device_mesh, coord)
        sums = {names.index(name): axes for name, axes in later.items()}
        found = buckets(parameters, sums, _last_used_first(self.program, self._order))
        for bucket in found:
            groups.add(bucket.axes)
        self._gradients = Gradients(parameters, found, groups.start, self.count)

    def _parameter(self, source: torch.Tensor, layout: Layout) -> nn.Parameter:
        mesh, coord = self._rank.mesh, self._rank.coord
        local = shard(source.detach(), layout, mesh, coord)
        local = (
            torch.empty_like(local, device=self._rank.device) if source.is_meta else local.to(self._rank.device).clone()
        )
        made = DTensor.from_local(
            local.contiguous(), self._mesh, [placement(s) for s in layout], run_check=False,
            shape=source.shape, stride=torch.empty(source.shape, device="meta").stride(),
        )  # fmt: skip
        return nn.Parameter(made, requires_grad=source.requires_grad)

    def _register(self, path: str, value: torch.Tensor, saved: bool = True) -> None:
        home: nn.Module = self
        *parents, name = path.split(".")
        for parent in parents:
            if parent not in home._modules:
                home.add_module(parent, nn.Module())
            home = home.get_submodule(parent)
        if isinstance(value, nn.Parameter):
            home.register_parameter(name, value)
        else:
            home.register_buffer(name, value, persistent=saved)

    def _leaves(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for kind, what in self._order:
            match kind:
                case "parameter":
                    found.append(self._gradients.leaf(what))
                case "buffer":
                    found.append(self.get_buffer(what))
                case "constant":
                    found.append(what)
                case "input":
                    found.append(self._input(what, inputs))
        return found

    def _input(self, name: str, inputs: Mapping[str, Any]) -> torch.Tensor:
        tensor = next(
            t for t in (self._graph.tensors[leaf.tensor] for leaf in self._graph.leaves if name in leaf.paths)
        )
        if name not in inputs:
            raise TapasError(name, "this input is missing", f"the plan was made for {', '.join(self.input_names)}")
        value = inputs[name]
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if tuple(value.shape) != tensor.shape:
            raise TapasError(
                name,
                f"has shape {tuple(value.shape)}, the plan was made for {tensor.shape}",
                "plan again for this shape",
            )
        return value.to(self._rank.device)

    @property
    def input_names(self) -> list[str]:
        return [name for kind, name in self._order if kind == "input"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = dict(zip(self.input_names, args, strict=False)) | kwargs
        unknown = sorted(set(inputs) - set(self.input_names))
        if unknown or len(args) > len(self.input_names):
            raise TapasError(
                ", ".join(unknown) or "inputs", "not an input that was captured", f"give {', '.join(self.input_names)}"
            )
        results = self.program(*self._leaves(inputs))
        values = dict(zip(self._graph.outputs, map(self._output, results, self._outputs), strict=True))
        if self._graph.loss is not None:
            values[self._graph.loss] = results[self._graph.outputs.index(self._graph.loss)]
        flat = [values[v.name] if isinstance(v, Value) else v for v in self._captured.output_values]
        return pytree.tree_unflatten(flat, self._captured.output_spec)

    def _output(self, local: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Other outputs than the loss come as DTensors, in the layout in which they were made."""
        return DTensor.from_local(local.detach(), self._mesh, [placement(s) for s in layout], run_check=False)
