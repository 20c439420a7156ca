"""The recorded calls of submodules, put into the program where their answers are read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tapas.capture.calls import Call, Program, Value, map_values
from tapas.capture.repeated.dry_run import CannotFold
from tapas.capture.repeated.inner import Inner
from tapas.capture.repeated.runs import Run, Stretch, stretches
from tapas.capture.repeated.session import Answer, Kind, Session

BLOCK = torch.ops.tapas.block.default
ANSWER = torch.ops.tapas.answer.default


class Placed(NamedTuple):
    now: dict[str, str]  # what stands for answers
    runs: dict[int, Run]  # by the number that is the first argument of their calls


def with_blocks(program: Program, session: Session, inners: Mapping[Kind, Inner], used: list[Any]) -> Placed:
    """Put the recorded calls where their answers are read."""
    now: dict[str, str] = {}
    runs: dict[int, Run] = {}
    results: dict[int, list[str]] = {}  # names of all results, by number of the call; those within runs are not read
    waiting = stretches(session.calls, session.shown, inners)
    out: list[Call] = []

    def operand(what: Any) -> str:
        if type(what) is Answer:
            return results[what.call][what.result]
        value = used[what]
        if not isinstance(value, Value):
            raise CannotFold("a block is given what is no tensor of the program")
        return now.get(value.name) or value.name

    def made_by(path: str, inner: Inner) -> tuple[str, ...]:
        names = tuple([program.unique(f"{path}:{name}") for name in inner.outputs])
        program.meta.update(zip(names, inner.metas, strict=True))
        return names

    def emit(stretch: Stretch) -> None:
        calls = session.calls[stretch.first : stretch.stop]
        given = tuple([operand(tensor) for tensor in calls[0].tensors])
        inner = inners[calls[0].kind]
        paths = tuple([called.path for called in calls])
        made = [made_by(path, inner) for path in paths]
        run = Run(inner, paths, stretch.carried, made)
        everything = (*made[-1], *(run.after(given, made[-2]) if len(made) > 1 else given))
        results[stretch.stop - 1] = [everything[source] for source in inner.sources]
        if inner.made:
            values = tuple([Value(name) for name in given])
            place: Any = _Place(paths[0])
            out.append(Call(BLOCK, (stretch.first, values), {}, made[-1], calls[0].kind.grad, place))
            runs[stretch.first] = run

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
    for stretch in waiting:
        emit(stretch)
    program.calls = out
    return Placed(now, runs)


class _Place(NamedTuple):
    """In place of a node: where a block was called."""

    path: str

    @property
    def meta(self) -> dict[str, Any]:
        return {"nn_module_stack": {self.path: (self.path, None)}}
