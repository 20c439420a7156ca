"""The program of a submodule that is called many times, and what of it a call needs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tapas._torch import pytree
from tapas.capture.build import GraphBoundary, alive, build, dtypes_of, op_of, reached, tensor_of, tensors_of
from tapas.capture.calls import ExportedCall, FlatProgram, Value, flatten, operands
from tapas.capture.inputs import fake_mode
from tapas.capture.leaves import find_leaves, state_of
from tapas.capture.passes import rewritten
from tapas.capture.passes.functionalize import functionalize
from tapas.capture.repeated.dry_run import CannotFold, without_data
from tapas.capture.repeated.session import CopyKind
from tapas.capture.weight_buffers import with_weights
from tapas.ir.graph import Graph, Leaf, Op

Flags = tuple[bool, ...]  # of each input, or of each result that is made: a call has them in no time


class BodyUse(NamedTuple):
    """How a call uses a block: which specialised graph it needs."""

    read: Flags  # results
    constant: Flags  # inputs
    depends: Flags  # inputs that a gradient could flow to
    wanted: Flags  # results that a gradient comes from


@dataclass
class BodyProgram:
    """One kind's program; inputs are called `in#0`, `in#1`, ..."""

    kind: CopyKind
    program: FlatProgram
    calls: list[ExportedCall]
    results: tuple[str, ...]
    leaves: tuple[Leaf, ...]  # parameters, buffers and constants, by their names in the submodule
    trainable: frozenset[str]
    mutated: frozenset[str]
    writes: tuple[tuple[str, int], ...]  # buffers, by path in the submodule, and the results that they become
    constants: dict[str, torch.Tensor]
    made: tuple[int, ...]  # results that are neither inputs nor the same as others
    numbers: dict[str, int]  # of inputs, by name
    label: str  # tells its constants from those of other kinds

    def __post_init__(self) -> None:
        for name in ("needs", "depends", "trained", "carries", "graph"):  # all copies ask the same
            setattr(self, name, cache(getattr(self, name)))

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        return tuple(map(name_of, range(len(self.kind.arguments.tensors))))

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The results that are made."""
        return tuple(self.results[r] for r in self.made)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Where each result is among those that are made, followed by the inputs."""
        return tuple(map((*self.outputs, *self.inputs).index, self.results))

    @cached_property
    def facts(self) -> tuple[tuple, ...]:
        """Shape and dtype of each result that is made."""
        return tuple(tensor_of(name, self.program)[1:3] for name in self.outputs)

    @cached_property
    def metas(self) -> tuple[torch.Tensor, ...]:
        """A fake tensor for each of them."""
        return tuple(self.program.meta[name] for name in self.outputs)

    def needs(self, read: Flags) -> Flags:
        """The inputs that some results depend on."""
        names = {name for call in alive(self.calls, set(compress(self.outputs, read))) for name in operands(call)}
        return tuple(name in names for name in self.inputs)

    def depends(self, inputs: Flags) -> Flags:
        """The results that a gradient could flow from, if it can flow to some inputs."""
        ops = [op_of(call) for call in self.calls]
        dtypes = dtypes_of(tensors_of(self.calls, self.program, ()))
        no_grad = {call.results[0] for call in self.calls if not call.grad}
        names = reached(ops, dtypes, self.trainable.union(compress(self.inputs, inputs)), no_grad)
        return tuple(name in names for name in self.outputs)

    def trained(self, use: BodyUse) -> Flags:
        """The inputs that a gradient flows to."""
        tensors = self.graph(use, ()).tensors
        return tuple(tensors[name].differentiable for name in self.inputs)

    def carries(self, use: BodyUse) -> Flags:
        """The results that a gradient flows through, be it that it comes from others that are made of them."""
        tensors = self.graph(use, ()).tensors
        return tuple(name in tensors and tensors[name].differentiable for name in self.outputs)

    def graph(self, use: BodyUse, cut: Flags) -> Graph:
        """`cut`: inputs that a gradient flows to elsewhere, but not here."""
        kinds = ("constant" if constant else "input" for constant in use.constant)
        boundary = GraphBoundary(
            self.leaves + tuple(map(Leaf, self.inputs, kinds)),
            tuple(compress(self.outputs, use.read)),
            frozenset(compress(self.outputs, use.wanted)),
            self.trainable.union(compress(self.inputs, use.depends)),
            self.mutated,
            self.kind.path,
            trained=frozenset(compress(self.inputs, cut)),
        )
        return build(self.calls, self.program, boundary)


def name_of(number: int) -> str:
    return f"in#{number}"


def fake_arguments(kind: CopyKind) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments like those that the kind was called with."""
    with fake_mode(kind.module):
        made = [without_data(*facts) for facts in kind.arguments.tensors]
    return pytree.tree_unflatten(
        [made[v] if what == "tensor" else v for what, v in kind.arguments.values], kind.arguments.spec
    )


def body_program(kind: CopyKind, exported: ExportedProgram, number: int) -> BodyProgram:
    leaves = find_leaves(exported, state_of(kind.module))
    bind = dict(leaves.bind)
    specs = [spec for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    for spec, (what, value) in zip(specs, kind.arguments.values, strict=True):
        if what == "tensor":
            bind[spec.arg.name] = Value(name_of(value))
    program, output = flatten(exported.graph_module, bind, kind.grad)
    functional = functionalize(program)
    if any(name_of(n) in functional.mutated for n in range(len(kind.arguments.tensors))):
        raise CannotFold(f"{kind.path} writes to its inputs", kind.member.structure.number)
    results = []
    for value, (what, like) in zip(output, kind.returned.values, strict=True):
        if what == "tensor":
            if not isinstance(value, Value) or program.meta[value.name].shape != like.shape:
                raise CannotFold(
                    f"{kind.path} returned something else when it was traced", kind.member.structure.number
                )
            results.append(functional.read(value.name))
    leaves = with_weights(leaves, functional.out, program, functional.mutated)
    own: list[Leaf] = [leaf for leaf in leaves.leaves if leaf.kind != "input"]
    own += [Leaf(tensor, "constant", (path,)) for tensor, path in program.attributes.items()]
    writes: list[tuple[str, int]] = []
    for leaf in own:
        if leaf.tensor in functional.mutated:
            if leaf.kind != "buffer":
                raise CannotFold(f"{kind.path} writes to a tensor that is no buffer", kind.member.structure.number)
            writes.append((leaf.paths[0], len(results)))
            results.append(functional.read(leaf.tensor))
    calls = rewritten(functional.out, program, tuple(results))
    held = {leaf.tensor: exported.constants.get(leaf.paths[0]) for leaf in own if leaf.kind == "constant"}
    constants = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    trainable = frozenset(leaf.tensor for leaf in own) & leaves.trainable
    numbers = {name_of(n): n for n in range(len(kind.arguments.tensors))}
    made = tuple(r for r, name in enumerate(results) if name not in numbers and results.index(name) == r)
    return BodyProgram(
        kind,
        program,
        calls,
        tuple(results),
        tuple(own),
        trainable,
        frozenset(functional.mutated),
        tuple(writes),
        constants,
        made,
        numbers, f"{kind.path}:{number}",
    )  # fmt: skip


def renamed(op: Op, names: dict[str, str], module: str, prefix: str) -> Op:
    """An operator under the names of another copy; what is not named otherwise gets the prefix."""
    return replace(
        op,
        name=f"{prefix}{op.name}",
        operands=tuple(names.get(name, f"{prefix}{name}") for name in op.operands),
        results=tuple(names.get(name, f"{prefix}{name}") for name in op.results),
        module=".".join(part for part in (module, op.module) if part),
    )


def read_by(ops: Iterable[Op]) -> dict[str, None]:
    """What operators read, in their order."""
    return dict.fromkeys(name for op in ops for name in op.operands)
