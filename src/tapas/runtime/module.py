"""The parallel module: the original parameter names as DTensors, the rank's program inside."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tapas._torch import pytree
from tapas.capture.calls import Value
from tapas.capture.program import Captured
from tapas.errors import TapasError
from tapas.ir.fold import Folded
from tapas.ir.graph import Graph
from tapas.plan.assignment import Assignment, output_layouts, weight_layouts
from tapas.runtime.collectives import Count, GradientGroups, Rank, mesh_axes
from tapas.runtime.gradients import Gradients, Memory, make_buckets, plain_output, refusing_gradients
from tapas.runtime.initialize import initial_values, same_numbers
from tapas.runtime.moves import Step
from tapas.runtime.parts import Input, named, placement, shard
from tapas.runtime.program import Left, write_program
from tapas.sharding.layout import Layout, R, local_shape

# the same plan for inputs of other shapes, and in training or evaluation mode
Again = Callable[[dict[str, torch.Tensor], bool], "Compilable"]
PROGRAMS = 8  # so many are kept, besides the planned one


@dataclass(frozen=True)
class Compilable:
    """A model and what was decided about it: all that a program is made of."""

    captured: Captured
    folded: Folded  # its graph
    assignment: Assignment


@dataclass(frozen=True)
class Prepared:
    """A program for inputs of certain shapes."""

    captured: Captured
    program: fx.GraphModule
    run: Callable[..., Any]  # the program, of which torch.compile takes the blocks only
    inputs: dict[str, Input]  # by name
    outputs: list[Layout]
    sums: dict[str, tuple[int, ...]]
    scatters: dict[str, Step]
    order: list[tuple[str, Any]]  # what the program takes: kind, and path, name or value
    training: bool  # made in training mode

    def fits(self, values: dict[str, torch.Tensor], training: bool) -> bool:
        """Nothing here may depend on the rank: all of them have to choose the same program."""
        return self.training == training and all(self.inputs[n].shape == tuple(v.shape) for n, v in values.items())


def prepare(source: Compilable, rank: Rank, joint: bool, training: bool) -> Prepared:
    captured, graph, left = source.captured, source.captured.graph, Left(joint)
    program = write_program(graph, source.folded, source.assignment, rank, left)
    inputs: dict[str, Input] = {}
    order: list[tuple[str, Any]] = []
    for leaf in graph.given_leaves:
        if leaf.kind == "constant":
            order.append(("constant", captured.constants[leaf.tensor].to(rank.device)))
            continue
        order.append((leaf.kind, leaf.paths[0]))
        if leaf.kind == "input":
            shape, cut = graph.tensors[leaf.tensor].shape, left.cuts.get(leaf.tensor)
            part = local_shape(shape, cut.layout, rank.mesh, rank.coord) if cut is not None else shape
            inputs[leaf.paths[0]] = Input(shape, cut, part)
    sums = {graph.leaf_of[name].paths[0]: axes for name, axes in left.sums.items()}
    scatters = {graph.leaf_of[name].paths[0]: step for name, step in left.scatters.items()}
    run = torch.compiler.disable(program.forward, recursive=False)
    outputs = output_layouts(source.assignment, source.folded)
    return Prepared(captured, program, run, inputs, outputs, sums, scatters, order, training)


class ParallelModule(nn.Module):
    """Computes what the original model computes; every rank calls it."""

    count: Count

    def __init__(
        self, model: nn.Module, source: Compilable, device_mesh: DeviceMesh,
        again: Again | None = None, initialize: bool = True, parts: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        coord = _coordinate(source.assignment.mesh, device_mesh)
        self.count = Count()
        device = torch.device(device_mesh.device_type)
        rank = Rank(tuple(device_mesh.shape), coord, mesh_axes(device_mesh), self.count, device)
        self._mesh, self._rank, self._again, self._parts = device_mesh, rank, again, parts
        self._positional = list(inspect.signature(model.forward).parameters)
        self.train(model.training)
        self._groups, self._memory = GradientGroups(device_mesh, coord), Memory()
        first = prepare(source, rank, self._groups.all_here, self.training)
        self._hold(model, source.captured, weight_layouts(source.assignment, source.folded))
        if initialize:
            self._initialise(model)
        paths = [path for kind, path in first.order if kind == "parameter"]
        self._number = {path: i for i, path in enumerate(paths)}
        # tuples hide them from nn.Module: a program's inner names are of no use in a checkpoint
        self._programs: tuple[tuple[Prepared, Gradients], ...] = ((first, self._gathering(first)),)

    @property
    def program(self) -> fx.GraphModule:
        """What this rank runs, for inputs of the planned shapes."""
        return self._programs[0][0].program

    @property
    def constants(self) -> list[torch.Tensor]:
        """What the program holds besides parameters and buffers."""
        return [what for kind, what in self._programs[0][0].order if kind == "constant"]

    def _hold(self, model: nn.Module, captured: Captured, layouts: dict[str, Layout]) -> None:
        """Parameters and buffers, under the names they have in the model."""
        state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        saved = set(model.state_dict())
        self._layouts: dict[str, Layout] = {}
        for leaf in captured.graph.leaves:
            if leaf.kind == "parameter":
                layout = layouts.get(leaf.tensor, (R,) * self._mesh.ndim)
                parameter = self._parameter(state[leaf.paths[0]], layout)
                for path in leaf.paths:
                    self._layouts[path] = layout
                    self._register(path, parameter)
            elif leaf.kind == "buffer":
                source = state[leaf.paths[0]].detach()
                held = torch.empty_like(source, device=self._rank.device) if source.is_meta else source.clone()
                self._register(leaf.paths[0], held.to(self._rank.device), leaf.paths[0] in saved)

    def _parameter(self, source: torch.Tensor, layout: Layout) -> nn.Parameter:
        local = shard(source.detach(), layout, self._rank.mesh, self._rank.coord)
        if source.is_meta:
            local = torch.empty_like(local, device=self._rank.device)
        else:
            local = local.to(self._rank.device).clone()
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
                if hasattr(home, parent):
                    raise TapasError(path, f"the parallel module uses the name {parent} itself", "rename the submodule")
                home.add_module(parent, nn.Module())
            home = home.get_submodule(parent)
        if hasattr(home, name) and name not in home._parameters and name not in home._buffers:
            raise TapasError(path, f"the parallel module uses the name {name} itself", "rename it in the model")
        if isinstance(value, nn.Parameter):
            home.register_parameter(name, value)
        else:
            home.register_buffer(name, value, persistent=saved)

    def _initialise(self, model: nn.Module) -> None:
        """Weights and buffers that were on the meta device."""
        if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            return
        held = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))
        with same_numbers(self._mesh), torch.no_grad():
            for values in initial_values(model, self._rank.device):
                for path, value in values.items():
                    if path in self._layouts:
                        part = shard(value, self._layouts[path], self._rank.mesh, self._rank.coord)
                        held[path].to_local().copy_(part)  # type: ignore[operator]
                    elif path in held:
                        held[path].copy_(value)

    def _gathering(self, prepared: Prepared) -> Gradients:
        parameters = [self.get_parameter(path) for path in self._number]
        sums = {self._number[path]: axes for path, axes in prepared.sums.items()}
        packed = make_buckets(parameters, sums, [self._number[path] for path in _last_used_first(prepared)])
        for bucket in packed:
            self._groups.add("all_reduce", bucket.axes)
        for step in prepared.scatters.values():
            self._groups.add("reduce_scatter", step.back.axes)
        scattered = {self._number[path] for path in prepared.scatters}
        trained = {self._number[leaf.paths[0]] for leaf in prepared.captured.graph.trained()}
        return Gradients(parameters, trained, packed, scattered, self._groups, self.count, self._memory)

    @torch.compiler.disable(recursive=False)  # of this, torch.compile is to take the blocks only
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        prepared, leaves = self._read(args, kwargs)  # pyright: ignore[reportCallIssue]
        return self._handed_out(prepared, prepared.run(*leaves))  # pyright: ignore[reportCallIssue]

    @torch.compiler.disable
    def _read(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Prepared, list[torch.Tensor]]:
        """The program for these inputs, and its arguments."""
        inputs = named(list(self._programs[0][0].inputs), self._positional, args, kwargs)
        prepared, gradients = self._planned_for_parts(inputs) if self._parts else self._prepared_for(inputs)
        arguments: list[torch.Tensor] = []
        for kind, what in prepared.order:
            match kind:
                case "parameter":
                    arguments.append(gradients.leaf(self._number[what]))
                case "buffer":
                    arguments.append(self.get_buffer(what).detach())  # an alias: what it is now, if it is written
                case "constant":
                    arguments.append(what)
                case "input":
                    arguments.append(prepared.inputs[what].take(inputs[what], self._rank.device, self._parts))
        return prepared, arguments

    def _planned_for_parts(self, inputs: dict[str, torch.Tensor]) -> tuple[Prepared, Gradients]:
        """Of a part nobody knows what whole it is of: it has to be of the planned one."""
        prepared, gradients = self._programs[0]
        for name, value in inputs.items():
            wanted = prepared.inputs[name].shape if isinstance(value, DTensor) else prepared.inputs[name].part
            if tuple(value.shape) != wanted:
                fact = f"has shape {tuple(value.shape)}, this rank's part of the planned batch is {wanted}"
                raise TapasError(name, fact, "give that part, or plan again for this batch")
        if prepared.training != self.training:
            raise TapasError("mode", "training and evaluation mode differ from the planned one", "give whole batches")
        return prepared, gradients

    def _prepared_for(self, inputs: dict[str, torch.Tensor]) -> tuple[Prepared, Gradients]:
        for prepared, gradients in self._programs:
            if prepared.fits(inputs, self.training):
                return prepared, gradients
        planned = self._programs[0][0].inputs
        wrong = next((n for n, v in inputs.items() if tuple(v.shape) != planned[n].shape), None)
        if self._again is None or any(v.dim() != len(planned[n].shape) for n, v in inputs.items()):
            fact = "training and evaluation mode differ from the planned one"
            if wrong is not None:
                fact = f"has shape {tuple(inputs[wrong].shape)}, the plan was made for {planned[wrong].shape}"
            raise TapasError(wrong or "mode", fact, "plan again for this")
        shapes = {n: torch.empty(v.shape, dtype=v.dtype, device="meta") for n, v in inputs.items()}
        made = prepare(self._again(shapes, self.training), self._rank, self._groups.all_here, self.training)
        first, *others = self._programs
        self._programs = (first, *others[-PROGRAMS + 1 :], (made, self._gathering(made)))
        return self._programs[-1]

    @torch.compiler.disable
    def _handed_out(self, prepared: Prepared, results: Sequence[torch.Tensor]) -> Any:
        """What the original returns, from the program's results; buffers are what they are afterwards."""
        graph, captured = prepared.captured.graph, prepared.captured
        values = {
            name: plain_output(local) if graph.leaving[name].whole else self._output(local, layout, graph, name)
            for name, local, layout in zip(graph.outputs, results, prepared.outputs, strict=True)
        }
        for (buffer, _), value in zip(graph.writes, results[len(graph.returned) :], strict=True):
            # not in place: what is saved for the backward pass stays what it was
            self.get_buffer(graph.leaf_of[buffer].paths[0]).data = value.detach()
        flat = [values[v.name] if isinstance(v, Value) else v for v in captured.output_values]
        if torch.is_grad_enabled() and not graph.training and any(p.requires_grad for p in self.parameters()):
            flat = [refusing_gradients(v) if isinstance(v, torch.Tensor) else v for v in flat]
        return pytree.tree_unflatten(flat, captured.output_spec)

    def _output(self, local: torch.Tensor, layout: Layout, graph: Graph, name: str) -> torch.Tensor:
        """What not every rank has to have whole is a DTensor, in the layout in which it was made."""
        shape = graph.tensors[name].shape
        return DTensor.from_local(
            local, self._mesh, [placement(s) for s in layout], run_check=False,
            shape=torch.Size(shape), stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip


def _coordinate(sizes: Sequence[int], device_mesh: DeviceMesh) -> tuple[int, ...]:
    if tuple(device_mesh.shape) != tuple(sizes):
        raise TapasError(
            "mesh", f"the plan is for {sizes}, the device mesh is {tuple(device_mesh.shape)}", "make them agree"
        )
    coord = device_mesh.get_coordinate()
    if coord is None:
        raise TapasError("mesh", "this rank is not part of the device mesh", "call it on the mesh's ranks only")
    return tuple(coord)


def _last_used_first(prepared: Prepared) -> list[str]:
    """Parameters by when their gradients will be there: the backward pass runs from the end."""
    nodes = list(prepared.program.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    leaves = [node for node in nodes if node.op == "placeholder"]
    first = {  # blocks take their arguments in the order of use
        path: min(((place[user], user.all_input_nodes.index(node)) for user in node.users), default=(0, 0))
        for node, (kind, path) in zip(leaves, prepared.order, strict=True)
        if kind == "parameter"
    }
    return sorted(first, key=lambda path: first[path], reverse=True)
