"""A program around calls of blocks: from the recorded calls to a graph with bodies."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch

from tapas.capture.build import (
    Pieces,
    alive,
    constants,
    dtypes_of,
    finish,
    mark,
    op_of,
    tensor_of,
    tensors_of,
)  # fmt: skip
from tapas.capture.calls import Call, Program, Value, map_values, operands
from tapas.capture.gradients import needed, reached
from tapas.capture.inner import Inner, Use, read_by, renamed
from tapas.capture.leaves import State
from tapas.capture.standins import Answer, Called, CannotFold, Kind, Session
from tapas.graph import BLOCK as BLOCK_NAME
from tapas.graph import Body, Graph, Leaf, Op, Ref, Tensor
from tapas.unfold import without_single

BLOCK = torch.ops.tapas.block.default
ANSWER = torch.ops.tapas.answer.default


def with_blocks(program: Program, session: Session, inners: Mapping[Kind, Inner], used: list[Any]) -> dict[str, str]:
    """Put the recorded calls where their answers are read; returns what stands for answers now."""
    now: dict[str, str] = {}
    results: dict[Answer, str] = {}
    standing_in = dict(session.pending.values())
    out: list[Call] = []
    emitted = 0

    def operand(what: Any) -> Value:
        if isinstance(what, Answer):
            return Value(results[what])
        value = used[what]
        if not isinstance(value, Value):
            raise CannotFold("a block is given what is no tensor of the program")
        return Value(now.get(value.name) or value.name)

    def emit(number: int) -> None:
        called = session.calls[number]
        given = tuple([operand(tensor) for tensor in called.tensors])
        inner = inners[called.kind]
        made = tuple([program.unique(f"{called.path}:{inner.results[r]}") for r in inner.made])
        known = dict(zip([inner.results[r] for r in inner.made], made, strict=True))
        for r, name in zip(inner.made, made, strict=True):
            program.meta[name] = standing_in[Answer(number, r)]
        for r, name in enumerate(inner.results):  # what is handed through has its name
            results[Answer(number, r)] = known.get(name) or given[inner.numbers[name]].name
        if made:
            out.append(Call(BLOCK, (number, given), {}, made, called.kind.grad, _Place(called.path)))  # type: ignore[arg-type]

    for call in program.calls:
        if call.target is ANSWER:
            number, result = call.args[:2]
            while emitted <= number:
                emit(emitted)
                emitted += 1
            now[call.results[0]] = results[Answer(number, result)]
        elif now:
            call.args = map_values(call.args, lambda v: Value(now.get(v.name, v.name)))
            call.kwargs = {
                key: map_values(value, lambda v: Value(now.get(v.name, v.name))) for key, value in call.kwargs.items()
            }
            out.append(call)
        else:
            out.append(call)
    while emitted < len(session.calls):
        emit(emitted)
        emitted += 1
    program.calls = out
    return now


class _Place(NamedTuple):
    """In place of a node: where a block was called."""

    path: str

    @property
    def meta(self) -> dict[str, Any]:
        return {"nn_module_stack": {self.path: (self.path, None)}}


@dataclass(frozen=True, slots=True)
class _Written:
    """A body, as its calls need it. Its inputs are first of all tensors of the submodule itself."""

    own: tuple[int, ...]  # numbers of these among its parameters and buffers
    facts: tuple[tuple, ...]  # their shapes, their dtypes, and whether a gradient flows to them
    others: tuple[Leaf, ...]
    trained: tuple[int, ...]  # numbers of the others that a gradient flows to
    arguments: tuple[int, tuple[Ref, ...]]  # of every call: the number of the body, and its inputs


class _Nesting:
    def __init__(
        self, calls: list[Call], program: Program, pieces: Pieces, called: list[Called], inners: Mapping[Kind, Inner],
        state: State,
    ) -> None:  # fmt: skip
        self.program, self.pieces, self.called, self.inners, self.state = program, pieces, called, inners, state
        self.known: dict[int, tuple[Inner, tuple[str, ...], dict[str, int]]] = {}
        self.read = set(pieces.outputs)
        self.calls = alive(calls, self.read, self.reads)
        self.fixed = constants(self.calls, pieces, never=BLOCK)
        self.constant = pieces.held | self.fixed
        rest = [call for call in self.calls if call.results[0] not in self.fixed]
        self.blocks = {call.results[0]: call for call in rest if call.target is BLOCK}
        self.prelude = [op_of(call) for call in self.calls if call.results[0] in self.fixed]
        self.ops = [self.bare(call) if call.target is BLOCK else op_of(call) for call in rest]
        self.tensors = tensors_of(self.calls, program, ())
        no_grad = {call.results[0] for call in rest if not call.grad}
        self.uses: dict[int, Use] = {}
        self.depends: set[str] = set()
        self.needed: set[str] = set()
        if pieces.wanted:
            ahead = {name: partial(self.ahead, call) for name, call in self.blocks.items()}
            back = {name: partial(self.back, call) for name, call in self.blocks.items()}
            self.depends = reached(self.ops, dtypes_of(self.tensors), pieces.trainable, no_grad, ahead)
            self.needed = needed(self.ops, self.depends, pieces.wanted, back)
        self.bodies: list[Body] = []
        self.made: dict[tuple[int, Use], _Written] = {}
        self.hoisted: dict[tuple, dict[str, str]] = {}
        self.shapes: dict[tuple, int] = {}  # structure -> number of the body
        self.counts: dict[str, int] = defaultdict(int)
        self.met: set[str] = set()  # submodules that were called

    def of(self, call: Call) -> tuple[Inner, tuple[str, ...], dict[str, int]]:
        """A block call's program, its operands, and the numbers of its results in that program."""
        number, given = call.args
        if number not in self.known:
            inner = self.inners[self.called[number].kind]
            numbers = dict(zip(call.results, inner.made, strict=True))
            self.known[number] = inner, tuple(value.name for value in given), numbers
        return self.known[number]

    def bare(self, call: Call) -> Op:
        """A block's call before it is known how it is used."""
        return Op(call.results[0], BLOCK_NAME, self.of(call)[1], call.results, (), (), self.called[call.args[0]].path)

    def reads(self, call: Call, wanted: set[str]) -> Iterable[str]:
        if call.target is not BLOCK:
            return operands(call)
        inner, given, numbers = self.of(call)
        return [given[n] for n in inner.needs(tuple([r for name, r in numbers.items() if name in wanted]))]

    def ahead(self, call: Call, depends: set[str]) -> set[str]:
        inner, given, numbers = self.of(call)
        found = inner.depends(frozenset([n for n, name in enumerate(given) if name in depends]))
        return {name for name, r in numbers.items() if r in found}

    def back(self, call: Call, wanted: set[str]) -> set[str]:
        inner, given, _ = self.of(call)
        use = self.uses[call.args[0]] = self.use(call, wanted)  # all that read its results were asked before
        return {given[n] for n in inner.trained(use)}

    def use(self, call: Call, wanted: set[str]) -> Use:
        _, given, numbers = self.of(call)
        return Use(
            tuple([r for name, r in numbers.items() if name in self.read]),
            frozenset([n for n, name in enumerate(given) if name in self.constant]),
            frozenset([n for n, name in enumerate(given) if name in self.depends]),
            frozenset([r for name, r in numbers.items() if name in wanted]),
        )

    # -- from calls of blocks to operators with bodies ---------------------------------------------

    def block(self, op: Op) -> Op:
        call = self.blocks[op.name]
        called = self.called[call.args[0]]
        inner, given, numbers = self.of(call)
        use = self.uses.get(call.args[0]) or self.use(call, self.needed)
        graph = inner.graph(use)
        written = self.body(inner, use, graph)
        made = self.hoist(inner, graph, called.path, given) if graph.prelude else {}
        everything = self.state.members[called.path]
        own = [everything[number] for number in written.own]
        others = [made.get(leaf.tensor) or self.name(leaf, inner, called.path, given) for leaf in written.others]
        if called.path not in self.met and self.state.tied.keys().isdisjoint(own):
            self.tensors.update(zip(own, map(_tensor, zip(own, *written.facts, strict=True)), strict=True))
            self.needed.update([others[i] for i in written.trained])
        else:  # others read them as well: it takes all of them to know whether a gradient flows there
            own = [self.state.paths(path)[0] for path in own]
            self.needed.update(compress(own, written.facts[-1]), [others[i] for i in written.trained])
        self.met.add(called.path)
        operands = (*own, *others)
        results = tuple([name for name, r in numbers.items() if r in use.results])
        return Op(op.name, BLOCK_NAME, operands, results, written.arguments, (), op.module)

    def name(self, leaf: Leaf, inner: Inner, path: str, given: tuple[str, ...]) -> str:
        """What a leaf of a block is called for one copy."""
        if leaf.kind in ("parameter", "buffer"):
            return self.state.paths(f"{path}.{leaf.paths[0]}")[0]
        number = inner.numbers.get(leaf.tensor)
        return self.constant_leaf(inner, leaf) if number is None else given[number]

    def constant_leaf(self, inner: Inner, leaf: Leaf) -> str:
        name = f"{inner.label}:{leaf.tensor}"
        if name not in self.tensors:
            meta = inner.program.meta[leaf.tensor]
            self.tensors[name] = Tensor(name, tuple(meta.shape), str(meta.dtype).removeprefix("torch."))
            self.pieces = replace(self.pieces, leaves=(*self.pieces.leaves, Leaf(name, "constant", (name,))))
        return name

    def hoist(self, inner: Inner, graph: Graph, path: str, given: tuple[str, ...]) -> dict[str, str]:
        """Constants that a block makes are made before all operators, once for all copies that make the same."""
        inside = {name for op in graph.prelude for name in op.results}
        read = read_by(graph.prelude) - inside
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

    def body(self, inner: Inner, use: Use, graph: Graph) -> "_Written":
        key = id(inner), use
        if key not in self.made:
            if not set(graph.outputs) <= graph.producers.keys():
                raise CannotFold(f"{inner.kind.path} returns a constant", inner.kind.member.structure.number)
            read = read_by(graph.ops)
            leaves = [leaf for leaf in graph.leaves if leaf.tensor in read]
            leaves.sort(key=lambda leaf: leaf.kind not in ("parameter", "buffer"))
            own = [leaf for leaf in leaves if leaf.kind in ("parameter", "buffer")]
            inputs = tuple(leaf.tensor for leaf in leaves)
            shape = structure_of(graph, inputs)
            if shape not in self.shapes:  # or it was traced by itself, and is yet the same as another
                self.shapes[shape] = len(self.bodies)
                self.bodies.append(self.written(inner.kind.path, graph, inputs))
            arguments = self.shapes[shape], tuple(Ref(i) for i in range(len(inputs)))
            facts = tuple(zip(*(graph.tensors[leaf.tensor][1:] for leaf in own), strict=True)) or ((),) * 3
            paths = [*inner.kind.member.structure.parameters, *inner.kind.member.structure.buffers]
            numbers = tuple(paths.index(leaf.paths[0]) for leaf in own)
            others = tuple(leaves[len(own) :])
            trained = tuple(i for i, leaf in enumerate(others) if graph.tensors[leaf.tensor].differentiable)
            self.made[key] = _Written(numbers, facts, others, trained, arguments)
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
        ops = [self.block(op) if op.name in self.blocks else op for op in self.ops]
        mark(self.tensors, self.needed.intersection(self.tensors))
        for leaf in self.pieces.leaves:
            if leaf.tensor not in self.tensors:
                self.tensors[leaf.tensor] = tensor_of(leaf.tensor, self.program, leaf.tensor in self.needed)
        total = self.program.total + sum(self.inners[c.kind].program.total for c in self.called)
        graph = finish(ops, self.prelude, self.tensors, self.pieces, total)
        kept = sum(len(self.bodies[op.args[0]].ops) - 1 for op in graph.ops if op.target == BLOCK_NAME)
        return without_single(replace(graph, bodies=tuple(self.bodies), trimmed=max(graph.trimmed - kept, 0)))


_tensor = partial(tuple.__new__, Tensor)  # of a tuple; a deep model has a great many


def structure_of(graph: Graph, inputs: tuple[str, ...]) -> tuple:
    """Equal for bodies that differ in names only."""
    code = {name: number for number, name in enumerate(inputs)}
    found: list[Any] = [_facts(graph, name) for name in inputs]
    for op in graph.ops:
        found.append((op.target, op.args, op.kwargs, tuple(code[name] for name in op.operands)))
        for name in op.results:
            code[name] = len(code)
            found.append(_facts(graph, name))
    return (*found, *(code[name] for name in graph.outputs))


def _facts(graph: Graph, name: str) -> tuple:
    tensor = graph.tensors[name]
    return tensor.shape, tensor.dtype, tensor.differentiable


def nested_graph(
    calls: list[Call], program: Program, pieces: Pieces, called: list[Called], inners: Mapping[Kind, Inner],
    state: State,
) -> Graph:  # fmt: skip
    return _Nesting(calls, program, pieces, called, inners, state).graph()
