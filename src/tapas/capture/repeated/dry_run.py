"""A run of a submodule on tensors without data, from which nothing escapes but what it returns.

Whatever else a run leaves behind (an attribute, a tensor in a list, a mode) could be read by code around it, which the
other copies' runs would not serve: then the submodule is no candidate for folding.
"""

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from tapas._torch import (
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    has_attributes,
    no_dispatch_modes,
    no_python_dispatcher,
    pytree,
    writes_to,
)
from tapas.capture.repeated.candidates import Candidate, same_tensor
from tapas.capture.repeated.evidence import PLAIN, Evidence, EvidenceMode, Incomparable


class CannotFold(BaseException):  # a model that catches what goes wrong must not catch this
    """The model has to be traced whole; or all members of a structure, if that is given."""

    def __init__(self, reason: str, structure: int | None = None) -> None:
        super().__init__(reason)
        self.structure = structure


class Arguments(NamedTuple):
    """What a submodule is called with."""

    values: tuple[tuple[str, Any], ...]  # flattened: "tensor" and its number, or "plain" and the value
    spec: pytree.TreeSpec
    tensors: tuple[tuple, ...]  # as same_tensor tells them
    grad: bool  # whether gradients are enabled


class Returned(NamedTuple):
    """What it returns."""

    values: tuple[tuple[str, Any], ...]  # "input" or "same" and a number, "tensor" and a meta one, "plain" and a value
    spec: pytree.TreeSpec
    tensors: tuple[tuple, ...]  # the "tensor" ones, as same_tensor tells them


class DryRun(NamedTuple):
    evidence: Evidence
    returned: Returned
    deviation: str  # how it is unlike the records it was compared with


def arguments_of(args: tuple, kwargs: dict[str, Any], given: Sequence[torch.Tensor]) -> Arguments:
    flat, spec = pytree.tree_flatten((args, kwargs))
    order = {id(tensor): number for number, tensor in enumerate(given)}
    values = tuple(("tensor", order[id(v)]) if isinstance(v, torch.Tensor) else ("plain", v) for v in flat)
    return Arguments(values, spec, tuple(map(same_tensor, given)), torch.is_grad_enabled())


def dry_run(
    member: Candidate, arguments: Arguments, known: Sequence[Evidence], mode: FakeTensorMode
) -> DryRun | Evidence:
    """Run a submodule and compare it with earlier runs; the one that it agrees with, if there is one.

    `mode` makes tensors without data where the submodule's own have some."""
    escaping: list[weakref.ref] = []
    try:
        with (
            no_dispatch_modes(),
            no_python_dispatcher(),
            DisableTorchFunction(),
            torch.set_grad_enabled(arguments.grad),
        ):
            found = _run(member, arguments, known, mode, escaping)
    except Incomparable as what:
        raise CannotFold(f"{member.path} runs {what}", member.structure.number) from None
    if _kept(escaping):
        raise CannotFold(f"{member.path} keeps a tensor that it does not return", member.structure.number)
    return found


def _kept(tensors: Sequence[weakref.ref]) -> bool:
    """Whether somebody holds one of them, besides rings of objects that hold each other."""
    if all(tensor() is None for tensor in tensors):
        return False
    gc.collect()
    return any(tensor() is not None for tensor in tensors)


def _run(
    member: Candidate,
    arguments: Arguments,
    known: Sequence[Evidence],
    mode: FakeTensorMode,
    escaping: list[weakref.ref],
) -> DryRun | Evidence:
    def refused(reason: str) -> CannotFold:
        return CannotFold(f"{member.path} {reason}", member.structure.number)

    with _mode_for(member, arguments, mode) or nullcontext() as fake, _state_kept(member, fake is not None) as weights:
        given = [without_data(*facts) for facts in arguments.tensors]
        handed = [given[v] if what == "tensor" else v for what, v in arguments.values]
        args, kwargs = pytree.tree_unflatten(handed, arguments.spec)
        state = torch.is_grad_enabled(), torch.get_default_dtype()
        with EvidenceMode(given, weights, known) as recording:
            try:
                output = member.module(*args, **kwargs)
            except Exception as error:  # tracing all of the model will tell the user, if it is the model's fault
                raise refused(f"does not run on tensors without data: {type(error).__name__}: {error}") from error
        if state != (torch.is_grad_enabled(), torch.get_default_dtype()):
            raise refused("leaves another mode behind")
        if not _containers(output).isdisjoint(_containers((args, kwargs))):
            raise refused("returns what it was given")
        after, spec_after = pytree.tree_flatten((args, kwargs))
        if spec_after != arguments.spec or not all(map(is_, after, handed)):
            raise refused("writes to its arguments")
        if any(writes_to(tensor) or has_attributes(tensor) for tensor in given):
            raise refused("writes to its arguments")
        values, spec = pytree.tree_flatten(output)
        unknown = next((v for v in values if not isinstance(v, torch.Tensor) and type(v) not in PLAIN), None)
        if unknown is not None:
            raise refused(f"returns a {type(unknown).__name__}")
        evidence = recording.evidence(spec, values)
        own = set(map(id, weights))
        escaping += [weakref.ref(tensor) for tensor in recording.tensors if id(tensor) not in own]
    if any(evidence is one for one in known):
        return evidence
    return DryRun(evidence, _returned(values, spec, given), recording.deviation)


def _returned(values: list[Any], spec: pytree.TreeSpec, given: list[torch.Tensor]) -> Returned:
    places = {id(tensor): ("input", number) for number, tensor in enumerate(given)}
    outputs: list[tuple[str, Any]] = []
    tensors: list[tuple] = []
    for value in values:
        if not isinstance(value, torch.Tensor):
            outputs.append(("plain", value))
        elif id(value) in places:
            outputs.append(places[id(value)])
        else:
            places[id(value)] = "same", len(outputs)
            bare = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            outputs.append(("tensor", bare))
            tensors.append(same_tensor(value))
    return Returned(tuple(outputs), spec, tuple(tensors))


def _mode_for(member: Candidate, arguments: Arguments, mode: FakeTensorMode) -> FakeTensorMode | None:
    """The mode that makes tensors without data; meta tensors have none anyway, and are much faster."""
    held = (*member.inside.parameters, *member.inside.buffers)
    fake = next((tensor for tensor in held if isinstance(tensor, FakeTensor)), None)
    if fake is not None:
        return fake.fake_mode
    bare = all(tensor.is_meta for tensor in held) and all(facts[3].type == "meta" for facts in arguments.tensors)
    return None if bare else mode


def without_data(size: Any, stride: Any, dtype: torch.dtype, device: torch.device, grad: bool) -> torch.Tensor:
    made = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return made.requires_grad_() if grad else made


_HELD = ("_parameters", "_buffers", "_modules")


@contextmanager
def _state_kept(member: Candidate, light: bool) -> Iterator[list[torch.Tensor]]:
    """Within, the submodule's parameters and buffers are tensors without data, which are returned; afterwards its
    modules are as they were."""
    owns = [module.__dict__ for module in member.inside.modules]
    holds = [held for own in owns for name in _HELD if (held := own[name])]
    before = [(held, held.copy()) for held in (*owns, *holds)]
    if light:
        _lighten([own[name] for own in owns for name in _HELD[:2]])
    during = [(held, held.copy()) for held in (*owns, *holds)] if light else before
    weights = [w for own in owns for name in _HELD[:2] for w in own[name].values() if w is not None]
    flags, unchanged = [tensor.requires_grad for tensor in weights], False
    try:
        yield weights
        for held, was in during:
            if not _is_same(held, was):
                name = next((n for n in (*held, *was) if held.get(n, held) is not was.get(n, was)), "their order")
                raise CannotFold(f"{member.path} writes to attribute {name}", member.structure.number)
        if flags != [tensor.requires_grad for tensor in weights]:
            raise CannotFold(f"{member.path} freezes or unfreezes parameters", member.structure.number)
        unchanged = not light
    finally:
        if not unchanged:
            for tensor, flag in zip(weights, flags, strict=True):
                tensor.requires_grad_(flag)
            for held, was in before:
                held.clear()
                held.update(was)


def _is_same(held: dict, was: dict) -> bool:
    """Whether a dict holds the very objects that it held."""
    return all(map(is_, held.values(), was.values())) and held.keys() == was.keys()


def _lighten(holds: list[dict]) -> None:
    """Put tensors without data in place of others."""
    made: dict[int, torch.Tensor] = {}

    def light(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in made:
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            wrapped = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
            made[id(tensor)] = wrapped
        return made[id(tensor)]

    for held in holds:
        held.update({name: light(tensor) for name, tensor in held.items()})


def _containers(tree: Any) -> set[int]:
    """The lists and dicts in a tree."""
    if isinstance(tree, (list, tuple)):
        inner = set().union(*map(_containers, tree))
        return inner | {id(tree)} if isinstance(tree, list) else inner
    if isinstance(tree, dict):
        return {id(tree)}.union(*map(_containers, tree.values()))
    return set()
