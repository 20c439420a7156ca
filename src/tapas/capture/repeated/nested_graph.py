"""A program around calls of blocks: from the recorded calls to a graph with bodies."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import compress
from operator import gt
from typing import Any

from tapas.capture.build import (
    GraphBoundary,
    alive,
    constants,
    dtype_name,
    dtypes_of,
    finish,
    mark,
    needed,
    op_of,
    reached,
    tensor_of,
    tensors_of,
    unprice,
)  # fmt: skip
from tapas.capture.calls import ExportedCall, FlatProgram, operands
from tapas.capture.leaves import ModelState
from tapas.capture.repeated.body_program import BodyProgram, BodyUse, Flags, read_by, renamed
from tapas.capture.repeated.call_chains import BLOCK, CallChain, ChainUse
from tapas.capture.repeated.candidates import Candidate
from tapas.capture.repeated.dry_run import CannotFold
from tapas.ir.graph import BLOCK as BLOCK_NAME
from tapas.ir.graph import Body, Graph, Leaf, Leaves, Op, Ref, Tensor, Tensors
from tapas.ir.inline import inline_single_calls
from tapas.ir.tensors import Families, Family, MemberTensor
from tapas.util import Picking, picking


@dataclass(frozen=True, slots=True)
class _BodyVariant:
    """A body, as its calls need it. Its inputs are first of all tensors of the submodule itself."""

    graph: Graph
    own: tuple[str, ...]  # these, by their paths below the submodule
    trains: Flags  # whether a gradient flows to them
    others: tuple[Leaf, ...]
    given: Picking | None  # these, if they are nothing but what the call is given
    trained: tuple[int, ...]  # numbers of the others that a gradient flows to
    arguments: tuple  # of a call: the number of the body, operands, and what the submodule holds
    spelled: tuple  # of a call whose operands include that
    family: Family  # of submodules that hold theirs alone


class NestedGraphBuilder:
    def __init__(
        self, calls: list[ExportedCall], program: FlatProgram, boundary: GraphBoundary, chains: Mapping[int, CallChain],
        state: ModelState,
    ) -> None:  # fmt: skip
        self.program, self.boundary, self.chains, self.state = program, boundary, chains, state
        constant = set(boundary.held)
        self.chain_uses = {
            call.results[0]: ChainUse(chains[call.args[0]], call, constant) for call in calls if call.target is BLOCK
        }
        read = set(boundary.leaving)
        calls = alive(calls, read, self.reads)
        fixed = constants(calls, boundary, never=BLOCK)
        constant |= fixed
        rest = [call for call in calls if call.results[0] not in fixed]
        self.prelude = [op_of(call) for call in calls if call.results[0] in fixed]
        self.ops = [self.chain_uses.get(call.results[0]) or op_of(call) for call in rest]
        self.tensors = tensors_of([call for call in calls if call.target is not BLOCK], program, ())
        no_grad = {call.results[0] for call in rest if not call.grad}
        self.needed: set[str] = set()
        self.unpriced: set[str] = set()
        if boundary.wanted:
            depends = reached(self.ops, dtypes_of(self.tensors), boundary.trainable, no_grad)
            planned = needed(self.ops, depends, boundary.wanted if boundary.losses is None else boundary.losses)
            uses = [chain.uses for chain in self.chain_uses.values()]
            self.needed = needed(self.ops, depends, boundary.wanted)
            self.unpriced = self.needed - planned
            if uses != [chain.uses for chain in self.chain_uses.values()]:
                raise CannotFold("gradients of outputs besides the loss flow through them")
        self.bodies: list[Body] = []
        self.made: dict[tuple[int, BodyUse, Flags], _BodyVariant] = {}
        self.hoisted: dict[tuple, dict[str, str]] = {}
        self.shapes: dict[tuple, int] = {}  # structure -> number of the body
        self.counts: dict[str, int] = defaultdict(int)
        self.families: Families = {}

    def reads(self, call: ExportedCall, wanted: set[str]) -> Iterable[str]:
        return self.chain_uses[call.results[0]].reads(wanted) if call.target is BLOCK else operands(call)

    # -- from calls of blocks to operators with bodies ---------------------------------------------

    def blocks(self, chain_use: ChainUse) -> Iterator[Op]:
        """The calls of a chain."""
        chain, inner, names, last = chain_use.chain, chain_use.chain.inner, chain_use.given, None
        if not chain_use.uses:  # nobody asked for gradients
            chain_use.back(set())
        flows = tuple(map(self.needed.__contains__, names))  # inputs that a gradient flows to, here or elsewhere
        carries: Flags = ()
        for number, (use, path, made) in enumerate(zip(chain_use.uses, chain.paths, chain.made, strict=True)):
            if number:
                names = chain.after(names, chain.made[number - 1])
            if use is None:
                carries = (False,) * len(made)
                continue
            now = chain.after(flows, carries) if carries else flows
            another = use is not last or now != flows
            if another:
                flows, last, carries = now, use, inner.carries(use)
                written = self.body(inner, use, tuple(map(gt, flows, inner.trained(use))))
            others = written.given(names) if written.given else self.others(inner, written, path, names)
            if another:  # or these are what the call before made
                self.needed.update([others[i] for i in written.trained])
            for name, (shape, dtype), flag in compress(zip(made, inner.facts, carries, strict=True), use.read):
                self.tensors[name] = Tensor(name, shape, dtype, flag)
            yield self.call(path, written, others, tuple(compress(made, use.read)), made[0])
        self.needed.update(compress(chain_use.results, carries))

    def others(self, inner: BodyProgram, written: _BodyVariant, path: str, given: tuple[str, ...]) -> tuple[str, ...]:
        """What a body reads besides tensors of its submodule."""
        made = self.hoist(inner, written.graph, path, given) if written.graph.prelude else {}
        return tuple(made.get(leaf.tensor) or self.name(leaf, inner, path, given) for leaf in written.others)

    def call(
        self, path: str, written: _BodyVariant, others: tuple[str, ...], results: tuple[str, ...], name: str
    ) -> Op:
        if path in self.state.members:
            self.families[path] = written.family
            return Op(name, BLOCK_NAME, others, results, written.arguments, (), path)
        own = tuple(self.state.paths(f"{path}.{name}")[0] for name in written.own)
        self.needed.update(compress(own, written.trains))  # it takes all readers to know whether a gradient flows there
        return Op(name, BLOCK_NAME, own + others, results, written.spelled, (), path)

    def name(self, leaf: Leaf, inner: BodyProgram, path: str, given: tuple[str, ...]) -> str:
        """What a leaf of a block is called for one copy."""
        if leaf.kind in ("parameter", "buffer"):
            return self.state.paths(f"{path}.{leaf.paths[0]}")[0]
        number = inner.numbers.get(leaf.tensor)
        return self.constant_leaf(inner, leaf) if number is None else given[number]

    def constant_leaf(self, inner: BodyProgram, leaf: Leaf) -> str:
        name = f"{inner.label}:{leaf.tensor}"
        if name not in self.tensors:
            meta = inner.program.meta[leaf.tensor]
            self.tensors[name] = Tensor(name, tuple(meta.shape), dtype_name(meta.dtype))
            self.boundary = replace(self.boundary, leaves=(*self.boundary.leaves, Leaf(name, "constant", (name,))))
        return name

    def hoist(self, inner: BodyProgram, graph: Graph, path: str, given: tuple[str, ...]) -> dict[str, str]:
        """Constants that a block makes are made before all operators, once for all copies that make the same."""
        inside = {name for op in graph.prelude for name in op.results}
        read = read_by(graph.prelude).keys() - inside
        names = {leaf.tensor: self.name(leaf, inner, path, given) for leaf in graph.leaves if leaf.tensor in read}
        key = id(graph), tuple(names.values())
        if key not in self.hoisted:
            prefix = f"{inner.kind.path}:{len(self.hoisted)}:"
            made = {name: f"{prefix}{name}" for name in inside}
            for op in graph.prelude:
                self.prelude.append(renamed(op, {**names, **made}, inner.kind.path, prefix))
            for name, own in made.items():
                self.tensors[own] = graph.tensors[name]._replace(name=own)
            self.hoisted[key] = made
        return self.hoisted[key]

    def body(self, inner: BodyProgram, use: BodyUse, cut: Flags) -> "_BodyVariant":
        key = id(inner), use, cut
        if key not in self.made:
            graph = inner.graph(use, cut if any(cut) else ())
            if not set(graph.outputs) <= graph.producers.keys():
                raise CannotFold(f"{inner.kind.path} returns a constant", inner.kind.member.structure.number)
            read = {name: i for i, name in enumerate(read_by(graph.ops))}
            leaves = [leaf for leaf in graph.leaves if leaf.tensor in read]
            leaves.sort(key=lambda leaf: (leaf.kind not in ("parameter", "buffer"), read[leaf.tensor]))
            own = [leaf for leaf in leaves if leaf.kind in ("parameter", "buffer")]
            inputs = tuple(leaf.tensor for leaf in leaves)
            shape = structure_of(graph, inputs)
            if shape not in self.shapes:  # or it was traced by itself, and is yet the same as another
                self.shapes[shape] = len(self.bodies)
                self.bodies.append(self.written(inner.kind.path, graph, inputs))
            others = tuple(leaves[len(own) :])
            trained = tuple(i for i, leaf in enumerate(others) if graph.tensors[leaf.tensor].differentiable)
            numbers = [inner.numbers.get(leaf.tensor) for leaf in others]
            given = picking(numbers) if not graph.prelude and None not in numbers else None
            paths = tuple(leaf.paths[0] for leaf in own)
            trains = tuple(graph.tensors[leaf.tensor].differentiable for leaf in own)
            spelled = self.shapes[shape], _refs(len(inputs)), ()
            arguments = self.shapes[shape], _refs(len(others)), paths
            weights = {leaf.paths[0] for leaf in inner.leaves if leaf.kind == "parameter"}
            family = family_of(inner.kind.member, set(compress(paths, trains)), weights)
            self.made[key] = _BodyVariant(graph, paths, trains, others, given, trained, arguments, spelled, family)
        return self.made[key]

    def written(self, path: str, graph: Graph, inputs: tuple[str, ...]) -> Body:
        self.counts[path] += 1
        prefix = f"{path}:" if self.counts[path] == 1 else f"{path}:{self.counts[path]}:"
        keep = {name: name for name in inputs}
        tensors = {
            keep.get(name, prefix + name): tensor._replace(name=keep.get(name, prefix + name))
            for name, tensor in graph.tensors.items()
        }
        ops = tuple(renamed(op, keep, path, prefix) for op in graph.ops)
        return Body(path, ops, tensors, inputs, tuple(prefix + name for name in graph.outputs))

    def graph(self) -> Graph:
        ops = [made for op in self.ops for made in (self.blocks(op) if isinstance(op, ChainUse) else (op,))]
        mark(self.tensors, self.needed.intersection(self.tensors))
        for leaf in self.boundary.leaves:
            if leaf.tensor not in self.tensors:
                self.tensors[leaf.tensor] = tensor_of(leaf.tensor, self.program, leaf.tensor in self.needed)
        unprice(self.tensors, self.unpriced)
        total = self.program.total + sum(len(chain.paths) * chain.inner.program.total for chain in self.chains.values())
        graph = finish(ops, self.prelude, self.tensors, self.boundary, total)
        kept = sum(len(self.bodies[op.args[0]].ops) - 1 for op in graph.ops if op.target == BLOCK_NAME)
        self.uncalled()
        graph = replace(
            graph,
            tensors=Tensors(graph.tensors.explicit, self.families),
            leaf_of=Leaves(graph.leaf_of.explicit, self.families, self.state.order),
            bodies=tuple(self.bodies),
            trimmed=max(graph.trimmed - kept, 0),
        )
        return inline_single_calls(graph)

    def uncalled(self) -> None:
        """Candidates that never run have tensors all the same."""
        families: dict[int, Family] = {}
        if len(self.families) < len(self.state.members):
            for path, member in self.state.members.items():
                if path not in self.families:
                    number = member.structure.number
                    self.families[path] = families.get(number) or families.setdefault(number, family_of(member))


def _refs(count: int) -> tuple[Ref, ...]:
    return tuple(map(Ref, range(count)))


def family_of(member: Candidate, trained: Set[str] = frozenset(), weights: Set[str] = frozenset()) -> Family:
    """Of submodules like this one; by their paths, what a gradient flows to, and weights, be they buffers."""
    held: dict[str, MemberTensor] = {}
    structure, inside = member.structure, member.inside
    for own, paths, tensors in (
        ("parameter", structure.parameters, inside.parameters),
        ("buffer", structure.buffers, inside.buffers),
    ):
        for path, tensor in zip(paths, tensors, strict=True):
            kind = "parameter" if path in weights else own
            held[path] = MemberTensor(kind, tuple(tensor.shape), dtype_name(tensor.dtype), path in trained)
    return Family(held)


def structure_of(graph: Graph, inputs: tuple[str, ...]) -> tuple:
    """Equal for bodies that differ in names only."""
    code = {name: number for number, name in enumerate(inputs)}
    found: list[Any] = [(*_facts(graph, name), graph.leaf_of[name].kind == "parameter") for name in inputs]
    for op in graph.ops:
        attributes = repr((op.args, op.kwargs))  # by value: 1 is not True, and 0.0 is not -0.0
        found.append((op.target, op.own_precision, attributes, tuple(code[name] for name in op.operands)))
        for name in op.results:
            code[name] = len(code)
            found.append(_facts(graph, name))
    return (*found, *(code[name] for name in graph.outputs))


def _facts(graph: Graph, name: str) -> tuple:
    tensor = graph.tensors[name]
    return tensor.shape, tensor.dtype, tensor.differentiable, tensor.unpriced
