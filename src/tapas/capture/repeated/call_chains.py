"""The recorded calls of submodules, put into the program as chains: a thousand layers are one, and what holds for its
first few calls holds for all.

In a chain, each call is of the same kind as the one before it, and goes on with what that one returned; all else it
is given is what the first one was given. Nobody else reads what is returned within it, and nothing is written. What its
calls need and pass on is worked out call by call, but only until nothing changes any more from one to the next.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from operator import or_
from typing import Any, NamedTuple

import torch

from tapas.capture.calls import ExportedCall, FlatProgram, Value
from tapas.capture.repeated.answers import Answer
from tapas.capture.repeated.body_program import BodyProgram, BodyUse, Flags
from tapas.capture.repeated.dry_run import CannotFold
from tapas.capture.repeated.session import CopyKind, RecordedCall, Session

BLOCK = torch.ops.tapas.block.default
ANSWER = torch.ops.tapas.answer.default

Carried = tuple[tuple[int, int], ...]  # inputs, and the results of the call before that they are


class CallChain(NamedTuple):
    inner: BodyProgram
    paths: tuple[str, ...]  # of the submodules that are called, in order
    carried: Carried
    made: list[tuple[str, ...]]  # names of what each call makes

    def after(self, given: tuple, made: tuple) -> tuple:
        """What the next call is given (names, or flags), if one is given this and makes that."""
        found = list(given)
        for i, r in self.carried:
            found[i] = made[r]
        return tuple(found)

    def before(self, inputs: Flags) -> Flags:
        """What the call before makes of these inputs."""
        found = [False] * len(self.inner.made)
        for i, r in self.carried:
            found[r] = found[r] or inputs[i]
        return tuple(found)

    def shared(self, inputs: Flags) -> Flags:
        """Those of these inputs that are the same for all calls."""
        carried = {i for i, _ in self.carried}
        return tuple(flag and i not in carried for i, flag in enumerate(inputs))


class ChainSpan(NamedTuple):
    """The calls of a chain, by number."""

    first: int
    stop: int
    carried: Carried


def chain_spans(
    calls: Sequence[RecordedCall], shown: Collection[Answer], programs: Mapping[CopyKind, BodyProgram]
) -> Iterator[ChainSpan]:
    """All calls in order, in chains that are as long as possible."""
    ends = {answer.call for answer in shown}  # what these return is read by others than the call after them
    for number, called in enumerate(calls):
        for tensor in called.tensors:
            if type(tensor) is Answer and tensor.call != number - 1:
                ends.add(tensor.call)
    first, carried = 0, ()
    for number in range(1, len(calls)):
        now, last = calls[number], calls[number - 1]
        if now.kind is last.kind and number - 1 not in ends and not programs[now.kind].writes:
            found = _carried(now, last, number, programs[now.kind])
            if found and (found == carried or number == first + 1):
                carried = found
                continue
        yield ChainSpan(first, number, carried)
        first, carried = number, ()
    if calls:
        yield ChainSpan(first, len(calls), carried)


def _carried(now: RecordedCall, last: RecordedCall, number: int, inner: BodyProgram) -> Carried:
    """Inputs that the last call made; none if others are not what that one was given."""
    found = []
    for i, (one, two) in enumerate(zip(now.tensors, last.tensors, strict=True)):
        if type(one) is Answer and one.call == number - 1:
            source = inner.sources[one.result]
            if source < len(inner.made):
                found.append((i, source))
            elif source - len(inner.made) != i:  # it hands on what it was given, but in another place
                return ()
        elif one != two:
            return ()
    return tuple(found)


class PlacedBlocks(NamedTuple):
    now: dict[str, str]  # what stands for answers
    chains: dict[int, CallChain]  # by the number that is the first argument of their calls
    writes: dict[str, str]  # buffers of submodules, by path, and what they become


def with_blocks(
    program: FlatProgram, session: Session, programs: Mapping[CopyKind, BodyProgram], used: list[Any]
) -> PlacedBlocks:
    """Put the recorded calls where their answers are read."""
    now: dict[str, str] = {}
    chains: dict[int, CallChain] = {}
    writes: dict[str, str] = {}
    results: dict[int, list[str]] = {}  # names of all results, by number of the call; those within chains are not read
    waiting = chain_spans(session.calls, session.shown, programs)
    out: list[ExportedCall] = []

    def operand(what: Any) -> str:
        if type(what) is Answer:
            return results[what.call][what.result]
        value = used[what]
        if not isinstance(value, Value):
            raise CannotFold("a block is given what is no tensor of the program")
        return now.get(value.name) or value.name

    def made_by(path: str, inner: BodyProgram) -> tuple[str, ...]:
        names = tuple([program.unique(f"{path}:{name}") for name in inner.outputs])
        program.meta.update(zip(names, inner.metas, strict=True))
        return names

    def emit(span: ChainSpan) -> None:
        calls = session.calls[span.first : span.stop]
        given = tuple([operand(tensor) for tensor in calls[0].tensors])
        inner = programs[calls[0].kind]
        paths = tuple([called.path for called in calls])
        made = [made_by(path, inner) for path in paths]
        chain = CallChain(inner, paths, span.carried, made)
        everything = (*made[-1], *(chain.after(given, made[-2]) if len(made) > 1 else given))
        results[span.stop - 1] = [everything[source] for source in inner.sources]
        writes.update((f"{paths[-1]}.{name}", results[span.stop - 1][r]) for name, r in inner.writes)
        if inner.made:
            values = tuple([Value(name) for name in given])
            place: Any = _BlockPlace(paths[0])
            out.append(ExportedCall(BLOCK, (span.first, values), {}, made[-1], calls[0].kind.grad, place))
            chains[span.first] = chain

    for call in program.calls:
        if call.target is ANSWER:
            number, result = call.args[:2]
            while number not in results:
                emit(next(waiting))
            now[call.results[0]] = results[number][result]
            continue
        if now:
            call.read(lambda v: Value(now.get(v.name, v.name)))
        out.append(call)
    for span in waiting:
        emit(span)
    program.calls = out
    return PlacedBlocks(now, chains, writes)


class _BlockPlace(NamedTuple):
    """In place of a node: where a block was called."""

    path: str

    @property
    def meta(self) -> dict[str, Any]:
        return {"nn_module_stack": {self.path: (self.path, None)}}


class ChainUse:
    """A chain in the program."""

    __slots__ = ("_depends", "_read", "chain", "constant", "given", "results", "uses")

    def __init__(self, chain: CallChain, call: ExportedCall, constant: set[str]) -> None:
        self.chain, self.constant = chain, constant
        self.given = tuple([value.name for value in call.args[1]])  # to the first call
        self.results = call.results  # of the last one
        nothing = (False,) * len(self.given)
        self._read: list[Flags] = []  # of the results of each call: which are read
        self._depends: list[Flags] = [nothing] * len(chain.paths)  # of its inputs: which a gradient could flow to
        self.uses: list[BodyUse | None] = []  # None for calls that nobody needs

    def reads(self, wanted: set[str]) -> Iterable[str]:
        """What it needs of that which the first call is given, if these tensors are wanted."""
        chain, read = self.chain, _flags(self.results, wanted)
        need = chain.inner.needs(read)
        shared, found = chain.shared(need), [read]
        while len(found) < len(chain.paths):
            before = chain.before(need)
            if before == read:
                found += [read] * (len(chain.paths) - len(found))
            else:
                read, need = before, chain.inner.needs(before)
                shared = tuple(map(or_, shared, chain.shared(need)))
                found.append(read)
        self._read = found[::-1]
        return compress(self.given, map(or_, need, shared))

    def ahead(self, depends: set[str]) -> Iterable[str]:
        """The results that depend on sources, if these tensors do."""
        chain, inputs = self.chain, _flags(self.given, depends)
        made, found = chain.inner.depends(inputs), [inputs]
        while len(found) < len(chain.paths):
            after = chain.after(inputs, made)
            if after == inputs:
                found += [inputs] * (len(chain.paths) - len(found))
            else:
                inputs, made = after, chain.inner.depends(after)
                found.append(inputs)
        self._depends = found
        return compress(self.results, made)

    def back(self, wanted: set[str]) -> Iterable[str]:
        """The operands that a gradient flows to, if it comes from these tensors."""
        chain, flags = self.chain, _flags(self.results, wanted)
        first = _flags(self.given, self.constant)
        later = chain.after(first, (False,) * len(chain.inner.made))
        trained = shared = (False,) * len(self.given)
        found: list[BodyUse | None] = []
        last: BodyUse | None = None
        for number in reversed(range(len(chain.paths))):
            read, depends, constant = self._read[number], self._depends[number], later if number else first
            if not any(read):
                trained = shared  # nobody needs this call, nor those before it
                found += [None] * (number + 1)
                break
            use = BodyUse(read, constant, depends, flags)
            if use != last:
                last, trained = use, chain.inner.trained(use)
                flags, shared = chain.before(trained), tuple(map(or_, shared, chain.shared(trained)))
            found.append(last)
        self.uses = found[::-1]
        return compress(self.given, map(or_, trained, shared))


def _flags(names: tuple[str, ...], among: set[str]) -> Flags:
    return tuple(map(among.__contains__, names))
