"""The recorded calls of submodules, put into the program where their answers are read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tapas.capture.calls import ExportedCall, FlatProgram, Value, map_values
from tapas.capture.repeated.body_program import BodyProgram
from tapas.capture.repeated.call_chains import CallChain, ChainSpan, chain_spans
from tapas.capture.repeated.dry_run import CannotFold
from tapas.capture.repeated.session import Answer, CopyKind, Session

BLOCK = torch.ops.tapas.block.default
ANSWER = torch.ops.tapas.answer.default


class PlacedBlocks(NamedTuple):
    now: dict[str, str]  # what stands for answers
    chains: dict[int, CallChain]  # by the number that is the first argument of their calls


def with_blocks(
    program: FlatProgram, session: Session, programs: Mapping[CopyKind, BodyProgram], used: list[Any]
) -> PlacedBlocks:
    """Put the recorded calls where their answers are read."""
    now: dict[str, str] = {}
    chains: dict[int, CallChain] = {}
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
        elif now:
            call.args = map_values(call.args, lambda v: Value(now.get(v.name, v.name)))
            call.kwargs = {
                key: map_values(value, lambda v: Value(now.get(v.name, v.name))) for key, value in call.kwargs.items()
            }
            out.append(call)
        else:
            out.append(call)
    for span in waiting:
        emit(span)
    program.calls = out
    return PlacedBlocks(now, chains)


class _BlockPlace(NamedTuple):
    """In place of a node: where a block was called."""

    path: str

    @property
    def meta(self) -> dict[str, Any]:
        return {"nn_module_stack": {self.path: (self.path, None)}}
