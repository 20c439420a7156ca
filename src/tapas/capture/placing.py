"""The recorded calls of submodules, put into the program where their answers are read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tapas.capture.calls import Call, Program, Value, map_values
from tapas.capture.inner import Inner
from tapas.capture.standins import Answer, CannotFold, Kind, Session

BLOCK = torch.ops.tapas.block.default
ANSWER = torch.ops.tapas.answer.default


def with_blocks(program: Program, session: Session, inners: Mapping[Kind, Inner], used: list[Any]) -> dict[str, str]:
    """Put the recorded calls where their answers are read; returns what stands for answers now."""
    now: dict[str, str] = {}
    results: list[list[str]] = []  # names of all results, by number of the call
    standing_in = dict(session.pending.values())
    out: list[Call] = []

    def operand(what: Any) -> str:
        if type(what) is Answer:
            return results[what.call][what.result]
        value = used[what]
        if not isinstance(value, Value):
            raise CannotFold("a block is given what is no tensor of the program")
        return now.get(value.name) or value.name

    def emit(number: int) -> None:
        called = session.calls[number]
        given = [operand(tensor) for tensor in called.tensors]
        inner = inners[called.kind]
        made = [program.unique(f"{called.path}:{name}") for name in inner.outputs]
        for r, name in zip(inner.made, made, strict=True):
            program.meta[name] = standing_in[Answer(number, r)]
        everything = made + given
        results.append([everything[source] for source in inner.sources])
        if made:
            values = tuple([Value(name) for name in given])
            place: Any = _Place(called.path)
            out.append(Call(BLOCK, (number, values), {}, tuple(made), called.kind.grad, place))

    for call in program.calls:
        if call.target is ANSWER:
            number, result = call.args[:2]
            while len(results) <= number:
                emit(len(results))
            now[call.results[0]] = results[number][result]
        elif now:
            call.args = map_values(call.args, lambda v: Value(now.get(v.name, v.name)))
            call.kwargs = {
                key: map_values(value, lambda v: Value(now.get(v.name, v.name))) for key, value in call.kwargs.items()
            }
            out.append(call)
        else:
            out.append(call)
    while len(results) < len(session.calls):
        emit(len(results))
    program.calls = out
    return now


class _Place(NamedTuple):
    """In place of a node: where a block was called."""

    path: str

    @property
    def meta(self) -> dict[str, Any]:
        return {"nn_module_stack": {self.path: (self.path, None)}}
