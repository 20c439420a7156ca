"""The parallel module: the original parameter names as DTensors, the rank's program inside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree  # captured outputs are described by its specs
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tapas.capture.calls import Value
from tapas.capture.program import Captured
from tapas.errors import TapasError
from tapas.layout import Layout, State
from tapas.solution import Solution
from tapas.spmd.gradients import Gradients, buckets
from tapas.spmd.initial import initial_values, same_numbers
from tapas.spmd.inputs import Input, input_of, named
from tapas.spmd.moves import Step
from tapas.spmd.placements import placement, shard
from tapas.spmd.program import Left, Rank, output_layouts, weight_layouts, write_program
from tapas.spmd.wire import Count, GradientGroups, mesh_axes

Again = Callable[[dict[str, torch.Tensor]], tuple[Captured, Solution]]  # the same plan for inputs of other shapes


@dataclass(frozen=True)
class Prepared:
    """A program for inputs of certain shapes."""

    captured: Captured
    program: fx.GraphModule
    inputs: dict[str, Input]  # by name
    outputs: list[Layout]
    sums: dict[str, tuple[int, ...]]
    scatters: dict[str, Step]
    order: list[tuple[str, Any]]  # what the program takes: kind, and path, name or value

    def fits(self, values: dict[str, Any]) -> bool:
        return all(self.inputs[name].fits(value.shape) for name, value in values.items())


def prepare(captured: Captured, solution: Solution, rank: Rank, joint: bool) -> Prepared:
    graph, left = captured.graph, Left(joint)
    program = write_program(graph, solution, rank, left)
    made = {name for op in graph.prelude for name in op.results}
    inputs: dict[str, Input] = {}
    order: list[tuple[str, Any]] = []
    for leaf in graph.leaves:
        if leaf.kind == "input":
            (name,) = leaf.paths
            inputs[name] = input_of(name, graph.tensors[leaf.tensor].shape, left.cuts.get(leaf.tensor))
            order.append(("input", name))
        elif leaf.kind != "constant":
            order.append((leaf.kind, leaf.paths[0]))
        elif leaf.tensor not in made:
            order.append(("constant", captured.constants[leaf.tensor].to(rank.device)))
    sums = {graph.leaf_of[name].paths[0]: axes for name, axes in left.sums.items()}
    scatters = {graph.leaf_of[name].paths[0]: step for name, step in left.scatters.items()}
    return Prepared(captured, program, inputs, output_layouts(solution), sums, scatters, order)


class ParallelModule(nn.Module):
    """Computes what the original model computes; every rank calls it."""

    count: Count

    def __init__(
        self, model: nn.Module, captured: Captured, solution: Solution, device_mesh: DeviceMesh,
        again: Again | None = None, initialize: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        coord = _coordinate(solution.problem.router.mesh.sizes, device_mesh)
        self.count = Count()
        device = torch.device(device_mesh.device_type)
        rank = Rank(tuple(device_mesh.shape), coord, mesh_axes(device_mesh), self.count, device)
        self._mesh, self._rank, self._again = device_mesh, rank, again
        self._groups = GradientGroups(device_mesh, coord)
        first = prepare(captured, solution, rank, self._groups.all_here)
        # a tuple hides it from nn.Module: a program's inner names are of no use in a checkpoint
        self._prepared: tuple[Prepared, ...] = (first,)
        self._hold(model, captured, weight_layouts(solution))
        if initialize:
            self._initialise(model)
        self._paths = [path for kind, path in first.order if kind == "parameter"]
        self._gradients = self._gathering(first)
        self._take_over(first)

    @property
    def program(self) -> fx.GraphModule:
        """What this rank runs, for inputs of the planned shapes."""
        return self._prepared[0].program

    def _hold(self, model: nn.Module, captured: Captured, layouts: dict[str, Layout]) -> None:
        """Parameters and buffers, under the names they have in the model."""
        state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        saved = set(model.state_dict())
        self._layouts: dict[str, Layout] = {}
        for leaf in captured.graph.leaves:
            if leaf.kind == "parameter":
                layout = layouts.get(leaf.tensor, (State("R"),) * self._mesh.ndim)
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
                home.add_module(parent, nn.Module())
            home = home.get_submodule(parent)
        if isinstance(value, nn.Parameter):
            home.register_parameter(name, value)
        else:
            home.register_buffer(name, value, persistent=saved)

    def _initialise(self, model: nn.Module) -> None:
        """Weights and buffers that were on the meta device."""
        if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            return
        held = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers(remove_duplicate=False))
        with same_numbers(), torch.no_grad():
            for values in initial_values(model, self._rank.device):
                for path, value in values.items():
                    if path in self._layouts:
                        part = shard(value, self._layouts[path], self._rank.mesh, self._rank.coord)
                        held[path].to_local().copy_(part)  # type: ignore[operator]
                    elif path in held:
                        held[path].copy_(value)

    def _gathering(self, prepared: Prepared) -> Gradients:
        parameters = [self.get_parameter(path) for path in self._paths]
        sums = {i: prepared.sums[path] for i, path in enumerate(self._paths) if path in prepared.sums}
        found = buckets(parameters, sums, _last_used_first(prepared))
        for bucket in found:
            self._groups.add("all_reduce", bucket.axes)
        for step in prepared.scatters.values():
            self._groups.add("reduce_scatter", step.back.axes)
        return Gradients(parameters, found, self._groups, self.count)

    def _take_over(self, prepared: Prepared) -> None:
        """Gradients that a program would wait for are taken from it."""
        for path, step in prepared.scatters.items():
            step.hand_over = partial(self._gradients.scatter, self._paths.index(path), step)

    @torch.compiler.disable(recursive=False)  # of this, torch.compile is to take the program only
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        prepared, leaves = self._read(args, kwargs)  # pyright: ignore[reportCallIssue]
        return self._handed_out(prepared, prepared.program(*leaves))  # pyright: ignore[reportCallIssue]

    @torch.compiler.disable
    def _read(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Prepared, list[torch.Tensor]]:
        """The program for these inputs, and its arguments."""
        inputs = named(list(self._prepared[0].inputs), args, kwargs)
        prepared = self._prepared_for(inputs)
        found: list[torch.Tensor] = []
        parameters = iter(range(len(self._paths)))
        for kind, what in prepared.order:
            match kind:
                case "parameter":
                    found.append(self._gradients.leaf(next(parameters)))
                case "buffer":
                    found.append(self.get_buffer(what))
                case "constant":
                    found.append(what)
                case "input":
                    found.append(prepared.inputs[what].take(inputs[what], self._rank.device))
        return prepared, found

    def _prepared_for(self, inputs: dict[str, Any]) -> Prepared:
        for prepared in self._prepared:
            if prepared.fits(inputs):
                return prepared
        planned = self._prepared[0].inputs
        name, wrong = next((n, v) for n, v in inputs.items() if not planned[n].fits(v.shape))
        if self._again is None or any(v.dim() != len(planned[n].shape) for n, v in inputs.items()):
            raise TapasError(
                name, f"has shape {tuple(wrong.shape)}, the plan was made for {planned[name].shape}",
                "plan again for this shape",
            )  # fmt: skip
        shapes = {n: torch.empty(v.shape, dtype=v.dtype, device="meta") for n, v in inputs.items()}
        made = prepare(*self._again(shapes), self._rank, self._groups.all_here)
        if made.sums != self._prepared[0].sums or made.scatters.keys() != self._prepared[0].scatters.keys():
            raise TapasError(
                name, f"with shape {tuple(wrong.shape)} gradients travel in other ways than planned",
                "plan again for this shape",
            )  # fmt: skip
        self._take_over(made)
        self._prepared = (*self._prepared, made)
        return made

    @torch.compiler.disable
    def _handed_out(self, prepared: Prepared, results: Sequence[torch.Tensor]) -> Any:
        """What the original returns, from the program's results."""
        graph, captured = prepared.captured.graph, prepared.captured
        values = dict(zip(graph.outputs, map(self._output, results, prepared.outputs), strict=True))
        if graph.loss is not None:
            values[graph.loss] = results[graph.outputs.index(graph.loss)]
        flat = [values[v.name] if isinstance(v, Value) else v for v in captured.output_values]
        return pytree.tree_unflatten(flat, captured.output_spec)

    def _output(self, local: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Other outputs than the loss come as DTensors, in the layout in which they were made."""
        return DTensor.from_local(local.detach(), self._mesh, [placement(s) for s in layout], run_check=False)


def _coordinate(sizes: Sequence[int], device_mesh: DeviceMesh) -> tuple[int, ...]:
    if tuple(device_mesh.shape) != tuple(sizes):
        raise TapasError(
            "mesh", f"the plan is for {sizes}, the device mesh is {tuple(device_mesh.shape)}", "make them agree"
        )
    coord = device_mesh.get_coordinate()
    if coord is None:
        raise TapasError("mesh", "this rank is not part of the device mesh", "call it on the mesh's ranks only")
    return tuple(coord)


def _last_used_first(prepared: Prepared) -> list[int]:
    """Parameters by when their gradients will be there: the backward pass runs from the end."""
    nodes = list(prepared.program.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    leaves = [node for node in nodes if node.op == "placeholder"]
    held = [node for node, (kind, _) in zip(leaves, prepared.order, strict=True) if kind == "parameter"]
    first = [min((place[user] for user in node.users), default=0) for node in held]
    return sorted(range(len(held)), key=lambda index: -first[index])
