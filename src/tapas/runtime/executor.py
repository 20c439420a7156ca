"""Programs of a model for inputs of several shapes, and how one of them is run on the tensors of a module."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tapas._torch import in_backward, pytree, whole_tensor
from tapas.capture.calls import Value
from tapas.capture.inputs import has_integers
from tapas.capture.program import Captured
from tapas.errors import TapasError
from tapas.hardware.cluster import COLLECTIVES
from tapas.ir.fold import Folded
from tapas.ir.graph import Graph
from tapas.plan.assignment import Assignment, output_layouts
from tapas.plan.pieces import candidates
from tapas.runtime.agreement import differing, first_seed, same_text
from tapas.runtime.ahead import ForwardPass
from tapas.runtime.buckets import make_buckets
from tapas.runtime.call_signature import CallSignature
from tapas.runtime.calls import DrawnCall
from tapas.runtime.collectives import Axes, Count, Rank, Side, mesh_axes
from tapas.runtime.draws import Draws
from tapas.runtime.gathered import Unit
from tapas.runtime.gradients import Accumulation, Gradients
from tapas.runtime.lent_memory import Memory
from tapas.runtime.output_gradients import refusing_gradients, returned
from tapas.runtime.parameters import stored_part
from tapas.runtime.parts import Input, placement
from tapas.runtime.program import Left, write_program
from tapas.runtime.recorder import StepRecorder
from tapas.runtime.side_groups import SideGroups, SideStream
from tapas.runtime.untraced import around_blocks
from tapas.sharding.layout import Layout, local_shape

PROGRAMS = 8  # so many are kept, besides the planned one
CHECKED = 3  # steps in which the ranks' inputs are compared
Modes = tuple[bool, ...]  # training or evaluation, of every module


@dataclass(frozen=True)
class Compilable:
    """A model and what was decided about it: all that a program is made of."""

    captured: Captured
    folded: Folded  # its graph
    assignment: Assignment


@dataclass(frozen=True)
class Again:
    """The same plan for inputs of other shapes, and in training or evaluation mode."""

    skeleton: nn.Module  # the model without its weights
    compilable: Callable[[nn.Module, Any], Compilable]  # of the skeleton and inputs


@dataclass(frozen=True)
class Options:
    """What a user can say about a parallel module."""

    initialize: bool = True  # weights that are on the meta device
    parts: bool = False  # each rank gives its part of a batch
    broadcast: bool = False  # weights are those of the first rank
    check_inputs: bool = False  # compare the ranks' inputs in the first steps
    recorder: StepRecorder | None = None  # of what is sent


@dataclass(frozen=True)
class Prepared:
    """A program for inputs of certain shapes."""

    captured: Captured
    program: fx.GraphModule  # torch.compile takes its blocks only
    inputs: dict[str, Input]  # by name
    outputs: list[Layout]
    sums: dict[str, tuple[int, ...]]  # by path
    units: list[Unit]  # parameters by path
    used: list[str]  # paths of parameters, in the order of their use
    written: list[str]  # paths of buffers, as the program returns what they are afterwards
    order: list[tuple[str, Any]]  # what the program takes: kind, and path, name or value
    modes: Modes  # that it was made in
    random: bool  # it draws random numbers
    pieces: list[tuple[str, Axes]]  # collectives that may be sent in pieces, by any rank

    def fits(self, values: dict[str, torch.Tensor], modes: Modes) -> bool:
        """Nothing here may depend on the rank: all of them have to choose the same program."""
        return self.modes == modes and all(self.inputs[n].shape == tuple(v.shape) for n, v in values.items())


def prepare(source: Compilable, rank: Rank, joint: bool, modes: Modes) -> Prepared:
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
            inputs[leaf.paths[0]] = Input(leaf.paths[0], shape, cut, part, graph.tensors[leaf.tensor].differentiable)
    sums = {graph.leaf_of[name].paths[0]: axes for name, axes in left.sums.items()}
    units = [tuple(replace(w, parameter=graph.leaf_of[w.parameter].paths[0]) for w in unit) for unit in left.units]
    used = [graph.leaf_of[name].paths[0] for name in left.used]
    written = [graph.leaf_of[buffer].paths[0] for buffer, _ in graph.writes]
    around_blocks(type(program).forward)
    outputs = output_layouts(source.assignment, source.folded)
    random = any(isinstance(module, DrawnCall) for module in program.modules())
    pieces = _sent_in_pieces(source)
    return Prepared(captured, program, inputs, outputs, sums, units, used, written, order, modes, random, pieces)


def _sent_in_pieces(source: Compilable) -> list[tuple[str, Axes]]:
    folded, assignment = source.folded, source.assignment
    alike = dict.fromkeys(zip((copy.block for copy in folded.copies), assignment.copies, strict=True))
    moves = (
        move
        for block, decided in alike
        for move in candidates(folded.blocks[block], folded.tensors, assignment.decisions[decided], assignment.mesh)
        if assignment.pieces > 1
    )
    kinds = {(kind, move.hop.axes) for move in moves for kind in (move.hop.forward, move.hop.backward)}
    return sorted((kind, axes) for kind, axes in kinds if kind in COLLECTIVES)


class _Homes(dict[str, tuple[nn.Module, str]]):
    """Where buffers are: the module that has one, and its name there. To walk down a path takes far longer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __missing__(self, path: str) -> tuple[nn.Module, str]:
        home, _, name = path.rpartition(".")
        self[path] = self.module.get_submodule(home), name
        return self[path]


class Executor:
    """Runs a plan's programs on the parameters and buffers of a module."""

    def __init__(
        self, model: nn.Module, source: Compilable, device_mesh: DeviceMesh, calls: CallSignature,
        again: Again | None = None, options: Options | None = None,
    ) -> None:  # fmt: skip
        coord = _coordinate(source.assignment.mesh, device_mesh)
        if not same_text(repr(source.assignment), device_mesh):
            fact = "is not the same on all ranks: they were given different models or options, or took different time"
            raise TapasError("plan", fact, "make one with tapas.plan, save it, and give all ranks its path (plan=)")
        device = torch.device(device_mesh.device_type)
        self.mesh, self.calls, self.again, self.options = device_mesh, calls, again, options or Options()
        self.count, self.draws = Count(), Draws(first_seed(device_mesh), device=device)
        wires, self.memory = mesh_axes(device_mesh), Memory()
        if (recorder := self.options.recorder) is not None:
            self.count, wires = recorder.count, recorder.axes(wires)
        groups = SideGroups(device_mesh, coord, self.count)
        self.groups: Side = recorder.side(groups) if recorder is not None else groups
        pieces = SideGroups(device_mesh, coord, self.count, "pieces")
        self.pieces: Side = recorder.side(pieces, moves=True) if recorder is not None else pieces
        shape = tuple(device_mesh.shape)
        self.rank = Rank(shape, coord, wires, self.count, device, self.draws, side=self.pieces)
        self.ahead, self.behind = SideStream(device), SideStream(device)
        self.unchecked = CHECKED if self.options.check_inputs and not self.options.parts else 0
        parameters = model.named_parameters(remove_duplicate=False)
        self.frozen = frozenset(path for path, parameter in parameters if not parameter.requires_grad)
        self.paths, modules = zip(*model.named_modules(), strict=True)
        modes = tuple(module.training for module in modules)
        self.first = prepare(source, self.rank, self.groups.joint, modes)
        groups.paths = [path for kind, path in self.first.order if kind == "parameter"]

    def attach(self, module: nn.Module) -> None:
        """Run on this module's tensors."""
        self.modules = [module.get_submodule(path) for path in self.paths]
        self.homes = _Homes(module)
        weights = [path for kind, path in self.first.order if kind == "parameter"]
        self.number = {path: i for i, path in enumerate(weights)}
        self.parameters = [getattr(*self.homes[path]) for path in weights]
        buffers = [(i, *self.homes[path]) for i, path in enumerate(weights)]
        self.buffers = [(i, home._buffers, name) for i, home, name in buffers if name in home._buffers]
        self.accumulation = Accumulation()
        self.frozen_parameters = {path: p for path, p in module.named_parameters() if path in self.frozen}
        self.programs: tuple[tuple[Prepared, Gradients], ...] = ((self.first, self._gathering(self.first)),)

    @property
    def program(self) -> fx.GraphModule:
        """What this rank runs, for inputs of the planned shapes."""
        return self.first.program

    @property
    def constants(self) -> list[torch.Tensor]:
        """What the program holds besides parameters and buffers."""
        return [what for kind, what in self.first.order if kind == "constant"]

    @property
    def modes(self) -> Modes:
        return tuple([module.training for module in self.modules])

    def _gathering(self, prepared: Prepared) -> Gradients:
        sums = {self.number[path]: axes for path, axes in prepared.sums.items()}
        order = [self.number[path] for path in reversed(dict.fromkeys(prepared.used))]
        packed = make_buckets(self.parameters, sums, order)
        for bucket in packed:
            self.groups.add("all_reduce", bucket.axes)
        for step in (step for unit in prepared.units for weight in unit for step in weight.steps):
            for conversion in (step.ahead, step.back):
                if conversion.kind in COLLECTIVES:
                    self.groups.add(conversion.kind, conversion.axes)
        for kind, axes in prepared.pieces:
            self.pieces.add(kind, axes)
        units = [{self.number[weight.parameter]: weight.steps for weight in unit} for unit in prepared.units]
        trained = {self.number[leaf.paths[0]] for leaf in prepared.captured.graph.trained()}
        return Gradients(
            self.parameters, trained, packed, units, self.groups, self.behind, self.count, self.memory,
            self.accumulation,
        )  # fmt: skip

    def _forward_pass(self, prepared: Prepared, gradients: Gradients) -> ForwardPass:
        return ForwardPass(
            prepared.units, lambda path: stored_part(self.parameters[self.number[path]]),
            lambda path, whole: gradients.leaf(self.number[path], whole), self.groups, self.ahead, self.count,
        )  # fmt: skip

    def drawing(self, prepared: Prepared) -> AbstractContextManager[None]:
        """What a program runs in: users' generators are left alone."""
        return self.draws.apart() if prepared.random else nullcontext()

    @torch.compiler.disable
    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Prepared, Gradients, list[Any]]:
        """The program for a call, where its gradients go, and its arguments."""
        inputs = self.calls.tensors(args, kwargs)
        self._check_inputs(inputs)
        prepared, gradients = self._planned_for_parts(inputs) if self.options.parts else self._prepared_for(inputs)
        self._check_gradients(prepared)
        self._check_known(prepared, inputs)
        arguments: list[Any] = []
        gathered = {weight.parameter for unit in prepared.units for weight in unit}
        gradients.enter()
        for i, held, name in self.buffers:  # weights that are buffers may be set to others
            self.parameters[i] = held[name]
        for kind, what in prepared.order:
            match kind:
                case "parameter":
                    arguments.append(gradients.leaf(self.number[what]) if what not in gathered else None)
                case "buffer":
                    # an alias: what it is now, if it is written
                    arguments.append(getattr(*self.homes[what]).detach())
                case "constant":
                    arguments.append(what)
                case "input":
                    arguments.append(prepared.inputs[what].take(inputs[what], self.rank.device, self.options.parts))
        return prepared, gradients, [*arguments, self._forward_pass(prepared, gradients)]

    def _check_inputs(self, inputs: dict[str, torch.Tensor]) -> None:
        """In the first steps: who gives every rank another batch does so from the beginning."""
        if not self.unchecked:
            return
        self.unchecked -= 1
        plain = {name: value for name, value in inputs.items() if not isinstance(value, DTensor)}
        if name := differing(plain, self.rank):
            raise TapasError(
                name, "is not the same on all ranks, which are to be given the same batch",
                "seed or shard the data alike, or plan with parts=True to give each rank its part; "
                "check_inputs=False leaves this check out",
            )  # fmt: skip

    def _check_known(self, prepared: Prepared, inputs: dict[str, torch.Tensor]) -> None:
        """Sizes and branches are those that the values of the example inputs gave: the same has to be read of these."""
        known = prepared.captured.known
        if not known.steps:
            return
        wanted: dict[tuple[str, str], torch.Tensor] = {}
        for leaf in known.leaves:
            if leaf.kind == "input":
                value = inputs[leaf.path]
                wanted["input", leaf.path] = whole_tensor(value) if isinstance(value, DTensor) else value
            elif leaf.kind == "buffer":
                value = getattr(*self.homes[leaf.path])
                wanted["buffer", leaf.path] = whole_tensor(value) if isinstance(value, DTensor) else value
        known.check(wanted)

    def _check_gradients(self, prepared: Prepared) -> None:
        """What the program has no way to make."""
        if torch.is_grad_enabled() and prepared.captured.graph.training:
            for path, parameter in self.frozen_parameters.items():
                if parameter.requires_grad:
                    raise TapasError(
                        path, "requires a gradient, but was frozen when the plan was made: nobody adds up its gradient",
                        "set requires_grad before parallelize, and freeze it afterwards",
                    )  # fmt: skip
        if prepared.random and in_backward():
            raise TapasError(
                "forward", "is computed again in a backward pass, and would draw other random numbers",
                "leave it to the plan: pass recompute=, instead of using torch.utils.checkpoint",
            )  # fmt: skip

    def _planned_for_parts(self, inputs: dict[str, torch.Tensor]) -> tuple[Prepared, Gradients]:
        """Of a part nobody knows what whole it is of: it has to be of the planned one."""
        prepared, gradients = self.programs[0]
        if prepared.captured.known.steps:
            fact = "sizes or branches depend on values of the whole batch, of which each rank is to give a part"
            raise TapasError(", ".join(prepared.captured.known.sources), fact, "give whole batches (parts=False)")
        for name, value in inputs.items():
            wanted = prepared.inputs[name].shape if isinstance(value, DTensor) else prepared.inputs[name].part
            if tuple(value.shape) != wanted:
                fact = f"has shape {tuple(value.shape)}, this rank's part of the planned batch is {wanted}"
                raise TapasError(name, fact, "give that part, or plan again for this batch")
        if prepared.modes != self.modes:
            raise TapasError("mode", "training and evaluation mode differ from the planned one", "give whole batches")
        return prepared, gradients

    def _prepared_for(self, inputs: dict[str, torch.Tensor]) -> tuple[Prepared, Gradients]:
        modes = self.modes
        for prepared, gradients in self.programs:
            if prepared.fits(inputs, modes):
                return prepared, gradients
        planned = self.first.inputs
        wrong = next((n for n, v in inputs.items() if tuple(v.shape) != planned[n].shape), None)
        if self.again is None or any(v.dim() != len(planned[n].shape) for n, v in inputs.items()):
            fact = "training and evaluation mode differ from the planned one"
            if wrong is not None:
                fact = f"has shape {tuple(inputs[wrong].shape)}, the plan was made for {planned[wrong].shape}"
            raise TapasError(wrong or "mode", fact, "plan again for this")
        made = prepare(self._compilable(self.again, inputs), self.rank, self.groups.joint, modes)
        first, *others = self.programs
        self.programs = (first, *others[-PROGRAMS + 1 :], (made, self._gathering(made)))
        self.accumulation.forget_all_but([gradients for _, gradients in self.programs])
        return self.programs[-1]

    def _compilable(self, again: Again, inputs: dict[str, torch.Tensor]) -> Compilable:
        modules = dict(again.skeleton.named_modules())
        for path, mode in zip(self.paths, self.modes, strict=True):
            modules[path].training = mode
        examples = {
            name: value if has_integers(value) else
            torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=self.calls.trained[name])
            for name, value in inputs.items()
        }  # fmt: skip
        return again.compilable(again.skeleton, self.calls.filled(examples))

    @torch.compiler.disable
    def hand_out(self, prepared: Prepared, gradients: Gradients, results: Sequence[torch.Tensor]) -> Any:
        """What the original returns, from the program's results; buffers are what they are afterwards."""
        graph, captured = prepared.captured.graph, prepared.captured
        values: dict[str, torch.Tensor] = {}
        for name, local, layout in zip(graph.outputs, results, prepared.outputs, strict=True):
            value = returned(local, gradients.begin)
            values[name] = value if graph.leaving[name].whole else self._output(value, layout, graph, name)
        for path, value in zip(prepared.written, results[len(graph.returned) :], strict=True):
            buffer = getattr(*self.homes[path])
            if buffer.data_ptr() != value.data_ptr():  # the program may have written to it
                # not in place: what is saved for the backward pass stays what it was
                buffer.data = value.detach()
        flat = [values[v.name] if isinstance(v, Value) else v for v in captured.output_values]
        if torch.is_grad_enabled() and not graph.training and self._wants_gradients:
            flat = [refusing_gradients(v) if isinstance(v, torch.Tensor) else v for v in flat]
        return pytree.tree_unflatten(flat, captured.output_spec)

    @property
    def _wants_gradients(self) -> bool:
        return any(self.calls.trained.values()) or any(p.requires_grad for p in self.parameters)

    def _output(self, local: torch.Tensor, layout: Layout, graph: Graph, name: str) -> torch.Tensor:
        """What not every rank has to have whole is a DTensor, in the layout in which it was made."""
        shape = graph.tensors[name].shape
        return DTensor.from_local(
            local, self.mesh, [placement(s) for s in layout], run_check=False,
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
