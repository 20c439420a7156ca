"""The capture of a model, from its first fake input to the verified graph."""

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from tapas._torch import masks_as_given, pytree, silent_export, storages
from tapas.capture.assertions import assertions_answered
from tapas.capture.build import GraphBoundary, build
from tapas.capture.calls import Value, flatten
from tapas.capture.diagnostics import check_transforms, explain, live_place, without_inner_gradients
from tapas.capture.eager_behaviour import as_in_eager
from tapas.capture.follow_values import following
from tapas.capture.inputs import (
    Inputs,
    arguments_of,
    has_integers,
    integer_values,
    loss_position,
    output_position,
    prepare,
    register_dataclasses,
    tensor_places,
)
from tapas.capture.known_values import KnownValues
from tapas.capture.leaves import LiftedInputs, ModelState, check_plain, find_leaves, state_of, with_hidden
from tapas.capture.passes import rewritten
from tapas.capture.passes.functionalize import Functionalized, functionalize
from tapas.capture.passes.window_masks import with_windows
from tapas.capture.regions import Regions
from tapas.capture.repeated.body_program import BodyProgram, body_program, fake_arguments
from tapas.capture.repeated.call_chains import with_blocks
from tapas.capture.repeated.candidates import Candidate, repeated_modules
from tapas.capture.repeated.dry_run import CannotFold
from tapas.capture.repeated.inner_weights import with_inner_weights
from tapas.capture.repeated.nested_graph import NestedGraphBuilder
from tapas.capture.repeated.session import CopyKind, Session, check_repeats
from tapas.capture.repeated.stand_ins import answering
from tapas.capture.side_effects import side_effects_kept
from tapas.capture.weight_buffers import with_weights
from tapas.errors import CaptureError, GraphError
from tapas.ir.capacity import with_capacity
from tapas.ir.equivalence import differences
from tapas.ir.graph import Graph, Leaf, verify
from tapas.ir.known import NOTHING_READ, KnownProgram
from tapas.util import paused, told_once


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph with what running it needs besides: the values of constants, the shape of the output."""

    graph: Graph
    constants: dict[str, torch.Tensor]  # by tensor name
    output_spec: pytree.TreeSpec
    output_values: tuple[Any, ...]  # flattened outputs: tensor names as Value, all else as it is
    losses: tuple[str, ...] = ()  # the outputs that were named as those to train
    known: KnownProgram = NOTHING_READ  # what was read of integers that are given


def capture(
    model: nn.Module, inputs: Inputs, *, training: bool | None = None, name: str = "", losses: Sequence[str] = (),
    check_fold: bool = False,
) -> Graph:  # fmt: skip
    """The model's forward operators on these inputs.

    `inputs` is a tuple of positional or a dict of keyword inputs. Trained are the outputs that `losses` names, or the
    loss; with `training` all outputs of a model that returns none, without it a model without a loss is not trained.
    Of submodules that are known to be copies only one is traced; `check_fold` traces them all and compares.
    """
    graph = capture_program(model, inputs, training=training, name=name, losses=losses).graph
    if check_fold:
        whole = capture_program(model, inputs, training=training, name=name, losses=losses, whole=True)
        found = differences(graph, whole.graph)
        if found:
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            raise GraphError(
                graph.name, f"traced in blocks (first) and whole (second) it is not the same: {found[0]}{more}",
                "this is a defect of TAPAS: please report the model",
            )  # fmt: skip
    return graph


@paused
def capture_program(
    model: nn.Module, inputs: Inputs, *, training: bool | None = None, name: str = "", losses: Sequence[str] = (),
    whole: bool = False, capacity: float | None = None,
) -> Captured:  # fmt: skip
    """With `whole`, every submodule is traced, and the graph has no bodies. `capacity`: of experts that tokens are sent
    to, see ir/capacity.py."""
    if not isinstance(model, nn.Module):
        raise CaptureError("model", f"it is a {type(model).__name__}", "give a torch.nn.Module")
    check_plain(model)
    known, regions = _known(model, inputs), Regions(model, *arguments_of(inputs))
    subject = _Subject(
        model, *prepare(model, inputs), training, name or type(model).__name__, tuple(losses), known, regions
    )
    captured, notes = _with_regions(subject, whole)
    given = [leaf.paths[0] for leaf in captured.graph.leaf_of.explicit.values() if leaf.kind == "input"]
    known = subject.known.program(dict(zip(tensor_places(inputs), given, strict=True)))
    notes = tuple(told_once((*notes, *regions.notes, *known.notes(), *dict.fromkeys(subject.known.notes))))
    graph = with_capacity(with_windows(replace(captured.graph, notes=notes)), capacity)
    captured = replace(captured, graph=graph, losses=subject.losses, known=known)
    if (training or losses) and not captured.graph.training:
        raise CaptureError(
            type(model).__name__,
            "no gradient reaches any parameter from what it returns",
            "set requires_grad on the parameters to train, or plan for inference",
        )
    return captured


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is captured."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: bool | None
    name: str
    losses: tuple[str, ...]
    known: KnownValues
    regions: Regions


def _known(model: nn.Module, inputs: Inputs) -> KnownValues:
    """The integers that the model is given, and those that it holds."""
    held = {path: value.detach().to("cpu", copy=True) for path, value in model.named_buffers() if has_integers(value)}
    return KnownValues(integer_values(inputs), held, lambda: live_place(model))


def _with_regions(subject: _Subject, whole: bool) -> tuple[Captured, tuple[str, ...]]:
    """What cannot be exported is taken out, piece by piece, until the rest can."""
    captured: Captured | None = None
    try:
        captured, notes = (None, ()) if whole else _folded(subject)
        return captured or _whole(subject), notes
    except CaptureError as error:
        failure = error
    while captured is None:
        if not subject.regions.find(failure) and subject.known.strict:
            raise failure
        captured, failure = _tried(subject, failure)  # it may have shown only afterwards: strictly, it shows at once
    folded, notes = (None, ()) if whole else _folded(subject)
    return folded or captured, notes


def _tried(subject: _Subject, failure: CaptureError) -> tuple[Captured | None, CaptureError]:
    subject.known.strict = True
    try:
        return _whole(subject), failure
    except CaptureError as error:
        return None, error


def _whole(subject: _Subject) -> Captured:
    exported = _export(subject.model, subject.args, subject.kwargs, subject.known, subject.regions)
    leaves = find_leaves(exported, state_of(subject.model))
    program, output = flatten(exported.graph_module, leaves.bind)
    functional = functionalize(program)
    leaves = with_weights(leaves, functional.out, program, functional.mutated)
    spec = exported.call_spec.out_spec
    assert spec is not None
    returned = _returned(output, functional, {})
    boundary = _boundary(subject, leaves, functional, returned, spec)
    graph = verify(build(rewritten(functional.out, program, boundary.leaving, boundary.given), program, boundary))
    return Captured(graph, _constant_values(exported, graph), spec, _as_left(returned, graph))


def _folded(subject: _Subject) -> tuple[Captured | None, tuple[str, ...]]:
    """With one body for all copies of a submodule, None where there are none; and what could not be folded, and why."""
    members, notes = _around(subject.regions, repeated_modules(subject.model))
    while members:
        try:
            return _in_blocks(subject, members), tuple(notes)
        except CannotFold as reason:
            left = [m for m in members if reason.structure not in (None, m.structure.number)]
            why = str(reason)
        except CaptureError as reason:  # if something is wrong with the model, tracing all of it will tell
            left, why = [], f"without them, {reason.place}: {reason.fact}"
        paths = [member.path for member in members if member not in left]
        notes.append(_one_by_one(paths, why))
        members = left
    return None, tuple(notes)


def _around(regions: Regions, members: list[Candidate]) -> tuple[list[Candidate], list[str]]:
    """Those in which there is no region, whose copies are compared operator by operator; and why others are not."""
    inside = {
        m.structure.number for m in members if any(f"{path}.".startswith(f"{m.path}.") for path in regions.modules)
    }
    paths = [member.path for member in members if member.structure.number in inside]
    left = [member for member in members if member.structure.number not in inside]
    return left, [_one_by_one(paths, "code in them stays whole")] if paths else []


def _one_by_one(paths: list[str], why: str) -> str:
    return f"{len(paths)} submodules, {paths[0]} to {paths[-1]}, are traced one by one: {why}"


def _in_blocks(subject: _Subject, members: list[Candidate]) -> Captured:
    model, kwargs = subject.model, subject.kwargs
    with as_in_eager(model, kwargs, members):  # for all of it, or a configuration would seem to change in between
        with answering(model, members) as session:
            exported = _export(model, subject.args, kwargs, subject.known, subject.regions)
        programs: dict[CopyKind, BodyProgram] = {}
        for number, kind in enumerate(dict.fromkeys(called.kind for called in session.calls)):
            check_repeats(kind, 2)
            programs[kind] = body_program(kind, _export(kind.module, *fake_arguments(kind)), number)
            check_repeats(kind)
    state = state_of(model, members, [called.path for called in session.calls])
    return _graph_with_bodies(subject, exported, session, programs, state)


def _graph_with_bodies(
    subject: _Subject, exported: ExportedProgram, session: Session, programs: dict[CopyKind, BodyProgram],
    state: ModelState,
) -> Captured:  # fmt: skip
    leaves = with_hidden(find_leaves(exported, state), state)
    program, output = flatten(exported.graph_module, leaves.bind)
    program.meta = {**state.parameters, **state.buffers, **program.meta}
    spec = session.output_spec
    assert spec is not None
    used = output[spec.num_leaves :]
    now, chains, inner_writes = with_blocks(program, session, programs, used)
    functional = functionalize(program)
    touched = {v.name for v in used if isinstance(v, Value)} | set(now.values())
    if any(functional.root(v) in functional.mutated for v in touched):
        raise CannotFold("what a block reads or returns is written to")
    returned = _returned(output[: spec.num_leaves], functional, now)
    _check_constants(exported, programs, state)
    _check_writes(session, programs, state, leaves, functional)
    leaves = with_inner_weights(
        with_weights(leaves, functional.out, program, functional.mutated), session, programs, state
    )
    boundary = _boundary(subject, leaves, functional, returned, spec)
    writes = tuple((state.paths(path)[0], functional.read(value)) for path, value in inner_writes.items())
    boundary = replace(boundary, writes=tuple(sorted(boundary.writes + writes)))
    calls = rewritten(functional.out, program, boundary.leaving, boundary.given)
    graph = verify(NestedGraphBuilder(calls, program, boundary, chains, state).graph())
    constants = {f"{body.label}:{tensor}": v for body in programs.values() for tensor, v in body.constants.items()}
    return Captured(graph, _constant_values(exported, graph) | constants, spec, _as_left(returned, graph))


def _returned(output: tuple[Any, ...], functional: Functionalized, now: dict[str, str]) -> tuple[Any, ...]:
    """What the model returns, after all writes; `now`: what stands for tensors that are gone."""
    return tuple(Value(functional.read(now.get(v.name, v.name))) if isinstance(v, Value) else v for v in output)


def _as_left(returned: tuple[Any, ...], graph: Graph) -> tuple[Any, ...]:
    """The same by the names of the graph's outputs."""
    names = iter(graph.returned)
    return tuple(Value(next(names)) if isinstance(value, Value) else value for value in returned)


def _check_constants(exported: ExportedProgram, programs: dict[CopyKind, BodyProgram], state: ModelState) -> None:
    """What code holds outside of all modules is a constant to an export; but it may be a weight that was left out."""
    held = [*exported.constants.values(), *(value for found in programs.values() for value in found.constants.values())]
    tensors = [value for value in held if isinstance(value, torch.Tensor)]
    if tensors:
        inside = set(chain.from_iterable(member.inside.storages for member in state.members.values()))
        if not inside.isdisjoint(storages(tensors)):
            raise CannotFold("code around a repeated submodule reads a tensor of it")


def _check_writes(
    session: Session,
    programs: dict[CopyKind, BodyProgram],
    state: ModelState,
    leaves: LiftedInputs,
    functional: Functionalized,
) -> None:
    """What one writes, nobody else may read: every body starts from the tensors as they were."""
    written = [leaf for leaf in leaves.leaves if leaf.tensor in functional.mutated] if functional.mutated else []
    if any(leaf.kind == "constant" or leaf.tensor in state.tied for leaf in written):
        raise CannotFold("the model writes to a tensor that its submodules may read")
    calls = Counter(called.path for called in session.calls)
    for called in session.calls:
        for name, _ in programs[called.kind].writes:
            if called.in_checkpoint:
                raise CannotFold(f"{called.path} writes to {name} in a checkpoint", called.kind.member.structure.number)
            if calls[called.path] > 1 or f"{called.path}.{name}" in state.tied:
                raise CannotFold(
                    f"{called.path} writes to {name}, which others read", called.kind.member.structure.number
                )


def _boundary(
    subject: _Subject, leaves: LiftedInputs, functional: Functionalized, returned: tuple[Any, ...],
    spec: pytree.TreeSpec,
) -> GraphBoundary:  # fmt: skip
    program = functional.program
    losses = _losses(subject, returned, spec, program.meta)
    attributes = tuple(Leaf(tensor, "constant", (path,)) for tensor, path in program.attributes.items())
    outputs = tuple(v.name for v in returned if isinstance(v, Value))
    return GraphBoundary(
        leaves.leaves + attributes,
        outputs,
        frozenset(name for name in outputs if _differentiable(program.meta[name])) if losses else frozenset(),
        leaves.trainable,
        frozenset(functional.mutated),
        subject.name,
        losses[0] if len(losses) == 1 and program.meta[losses[0]].numel() == 1 else None,
        losses=frozenset(losses),
        writes=_writes((*leaves.leaves, *attributes), functional, subject.name),
        complete=True,
    )


def _writes(leaves: Sequence[Leaf], functional: Functionalized, model: str) -> tuple[tuple[str, str], ...]:
    """Buffers that the model writes to, and the tensors that they are afterwards."""
    found = []
    for leaf in leaves:
        if leaf.tensor in functional.mutated and leaf.kind != "input":
            if leaf.kind != "buffer":
                what = "parameter" if leaf.kind == "parameter" else "tensor, which is no buffer,"
                raise CaptureError(
                    leaf.paths[0], f"{model} writes to this {what} when it is called",
                    "make it a buffer (register_buffer), or write to it outside of forward",
                )  # fmt: skip
            found.append((leaf.tensor, functional.read(leaf.tensor)))
    return tuple(sorted(found))


def _dataclasses_known(module: nn.Module, args: Any, output: Any) -> None:
    register_dataclasses(output)


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], known: KnownValues | None = None,
    regions: Regions | None = None,
) -> ExportedProgram:  # fmt: skip
    known = known or KnownValues(place=lambda: live_place(model))
    try:
        with ExitStack() as stack:
            for context in (as_in_eager(model, kwargs), masks_as_given(), torch.enable_grad(), _quiet()):
                stack.enter_context(context)
            stack.enter_context(without_inner_gradients())
            stack.enter_context(side_effects_kept())
            stack.enter_context(assertions_answered(known, known.place, known.notes))
            stack.enter_context(following(model, known))
            if regions is not None:
                stack.enter_context(regions.taken_out())
                stack.callback(model.register_forward_pre_hook(regions.restart).remove)
            stack.callback(model.register_forward_hook(_dataclasses_known).remove)
            exported = torch.export.export(model, args, kwargs, strict=False)
        check_transforms(exported)
        return exported
    except (CaptureError, CannotFold):
        raise
    except Exception as error:  # a model may raise anything: the user gets the place and the reason
        raise explain(error, model, args, kwargs) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """A failing export prints its graph and warns: the user gets our sentence instead."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), silent_export():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _losses(
    subject: _Subject, returned: tuple[Any, ...], spec: pytree.TreeSpec, meta: dict[str, torch.Tensor]
) -> list[str]:
    """The outputs whose gradients are planned for: those that were named, or the loss, or else all if it is trained."""
    if subject.training is False:
        return []
    tensors = [
        value.name if isinstance(value, Value) and _differentiable(meta[value.name]) else "" for value in returned
    ]
    if subject.losses:
        positions = [output_position(spec, name) for name in subject.losses]
        for name, position in zip(subject.losses, positions, strict=True):
            if not tensors[position]:
                raise CaptureError(f"losses: {name}", "is not a tensor of real numbers", "name outputs to be trained")
        return [tensors[position] for position in positions]
    position = loss_position(spec)
    for name in tensors if position is None else tensors[position : position + 1]:
        if name and meta[name].numel() == 1:
            return [name]
    return list(dict.fromkeys(filter(None, tensors))) if subject.training else []


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _constant_values(exported: ExportedProgram, graph: Graph) -> dict[str, torch.Tensor]:
    """Tensors that the model holds outside its parameters and buffers."""
    known = graph.leaf_of.explicit.values()
    paths = {leaf.tensor: leaf.paths[0] for leaf in known if leaf.kind == "constant" and leaf.paths}
    found = {tensor: exported.constants.get(path) for tensor, path in paths.items()}
    return {tensor: value for tensor, value in found.items() if isinstance(value, torch.Tensor)}
