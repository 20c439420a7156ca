"""Export a model without its repeated submodules: one of each kind runs, for the others a stand-in answers.

While the model is exported, the members of its containers are emptied and do not run: a call of one is
written down, and answered with tensors of the shapes that a copy of it returned. The first of each kind runs
on tensors without data, watched (see watch.py). Only what code around them reads of such answers enters the program.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from tapas.capture.repeated.candidates import Member
from tapas.capture.repeated.kept import PLAIN, SIGNED, Unknown
from tapas.capture.repeated.seen import Seen
from tapas.capture.repeated.structure import same_tensor
from tapas.capture.repeated.watch import watching

_library = torch.library.Library("tapas", "FRAGMENT")
_library.define("block(int call, Tensor[] operands) -> Tensor[]")
_library.define("answer(int call, int result, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor")
_library.impl(
    "answer",
    lambda call, result, size, stride, dtype, device: torch.empty_strided(size, stride, dtype=dtype, device=device),
    "CompositeExplicitAutograd",
)


class CannotFold(BaseException):  # a model that catches what goes wrong must not catch this
    """The model has to be traced whole; or all members of a structure, if that is given. Once more may help."""

    def __init__(self, reason: str, structure: int | None = None, again: bool = False) -> None:
        super().__init__(reason)
        self.structure, self.again = structure, again


@dataclass(frozen=True, eq=False)
class Kind:
    """What a run of one copy showed: the same for all copies that are called in the same way."""

    member: Member
    signature: list[Any]
    inputs: tuple[tuple[str, Any], ...]  # flattened arguments: "tensor" and its number, or "plain" and the value
    shapes: tuple[tuple, ...]  # of the tensors among them
    spec: pytree.TreeSpec
    outputs: tuple[tuple[str, Any], ...]  # "input" or "same" and a number, "tensor" and a meta one, "plain" and a value
    facts: tuple[tuple, ...]  # of these tensors, as same_tensor tells them: they have a device, and may need a gradient
    output_spec: pytree.TreeSpec
    seen: Seen

    @cached_property
    def alone(self) -> bool:
        """It returns a tensor, not a tree of them."""
        return self.output_spec.is_leaf()

    @property
    def grad(self) -> bool:
        return self.signature[0]

    @property
    def path(self) -> str:
        return self.member.path

    @property
    def module(self) -> nn.Module:
        return self.member.module


class Called(NamedTuple):
    kind: Kind
    path: str
    tensors: tuple[Any, ...]  # tensors given: of the program, or Answer


Opened = Callable[[], AbstractContextManager[None]]


class Standin(torch.Tensor):
    """In place of a result. Whatever is computed with it is computed with a tensor of the program instead."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    facts: tuple  # as same_tensor tells them

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.facts[3]


class Answer(NamedTuple):
    """A result of a recorded call."""

    call: int
    result: int


@dataclass
class Session:
    """One export of a model without its copies."""

    calls: list[Called] = field(default_factory=list)
    kinds: dict[int, list[Kind]] = field(default_factory=lambda: defaultdict(list))  # by structure
    pending: dict[int, tuple[Answer, torch.Tensor]] = field(default_factory=dict)  # by id; the tensor keeps it alive
    shown: dict[Answer, torch.Tensor] = field(default_factory=dict)  # answers that the program reads
    used: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)  # tensors of the program given to calls
    running: bool = False
    output_spec: pytree.TreeSpec | None = None
    plain: tuple[Callable, Callable] = (nn.Module.__call__, nn.Module.__getattr__)

    # -- a call of a member ----------------------------------------------------------------------

    def call(self, member: Member, opened: Opened, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`opened`: within it the member can run."""
        with torch._C.DisableTorchFunction():  # to look at an answer is not to read it
            return self._call(member, opened, args, kwargs)

    def _call(self, member: Member, opened: Opened, args: tuple, kwargs: dict[str, Any]) -> Any:
        _check_modes()
        given: dict[int, torch.Tensor] = {}
        signature: list[Any] = [torch.is_grad_enabled(), torch.get_default_dtype()]
        try:
            _sign(args, given, signature)
            _sign(kwargs, given, signature)
        except Unknown:
            what = f"{member.path} is given what is neither a tensor nor plain"
            raise CannotFold(what, member.structure.number) from None
        for kind in self.kinds[member.structure.number]:
            if kind.signature == signature and kind.seen.same_for(member.inside.modules):
                return self.answer(member, kind, given.values())
        tensors = list(given.values())
        kind = self.run(member, opened, signature, (args, kwargs), tensors)
        if not kind.seen.same_for(member.inside.modules):  # libraries import and prepare things at their first use
            kind = self.run(member, opened, signature, (args, kwargs), tensors)
        check(kind)
        self.kinds[member.structure.number].append(kind)
        return self.answer(member, kind, tensors)

    def answer(self, member: Member, kind: Kind, tensors: Collection[torch.Tensor]) -> Any:
        number, given = len(self.calls), list(tensors)
        results, made = [], 0
        for what, value in kind.outputs:
            if what == "input":
                results.append(given[value])
            elif what == "same":
                results.append(results[value])
            elif what == "plain":
                results.append(value)
            else:
                facts = kind.facts[made]
                tensor = torch.Tensor._make_subclass(Standin, value, facts[4])
                tensor.facts = facts
                self.pending[id(tensor)] = Answer(number, made), tensor
                made += 1
                results.append(tensor)
        self.calls.append(Called(kind, member.path, tuple(map(self.operand, given))))
        return results[0] if kind.alone else pytree.tree_unflatten(results, kind.output_spec)

    def operand(self, tensor: torch.Tensor) -> Any:
        found = self.pending.get(id(tensor))
        if found is not None:
            return found[0]
        return self.used.setdefault(id(tensor), (len(self.used), tensor))[0]

    def run(self, member: Member, opened: Opened, signature: list, arguments: tuple, given: list[torch.Tensor]) -> Kind:
        """Run a member on tensors without data, watched."""
        flat, spec = pytree.tree_flatten(arguments)
        mode = _mode_for(member, given)
        with opened(), _untraced(self.plain):
            with _weightless(member.inside.modules, mode), watching(member.module) as seen:
                made: dict[int, torch.Tensor] = {}
                for tensor in given:
                    size, stride, dtype, device, grad = same_tensor(tensor)
                    copy = torch.empty_strided(size, stride, dtype=dtype, device=device)
                    made[id(tensor)] = copy.requires_grad_(grad) if grad else copy
                handed = [made.get(id(v), v) for v in flat]
                args, kwargs = pytree.tree_unflatten(handed, spec)
                before = [tensor._version for tensor in made.values()]
                state = torch.is_grad_enabled(), torch.get_default_dtype()
                output = member.module(*args, **kwargs)
                if state != (torch.is_grad_enabled(), torch.get_default_dtype()):
                    raise CannotFold(f"{member.path} leaves another mode behind", member.structure.number)
            if not _containers(output).isdisjoint(_containers((args, kwargs))):
                raise CannotFold(f"{member.path} returns what it was given", member.structure.number)
            after, spec_after = pytree.tree_flatten((args, kwargs))
            same = spec_after == spec and all(a is b for a, b in zip(after, handed, strict=True))
            if not same or before != [tensor._version for tensor in made.values()]:
                raise CannotFold(f"{member.path} writes to its arguments", member.structure.number)
            values, output_spec = pytree.tree_flatten(output)
            bare = [_meta(value) if isinstance(value, torch.Tensor) else value for value in values]
        places = {id(tensor): ("input", number) for number, tensor in enumerate(made.values())}
        outputs: list[tuple[str, Any]] = []
        found: list[tuple] = []
        for value, alone in zip(values, bare, strict=True):
            if not isinstance(value, torch.Tensor):
                if type(value) not in PLAIN:
                    raise CannotFold(f"{member.path} returns a {type(value).__name__}", member.structure.number)
                outputs.append(("plain", value))
            else:
                outputs.append(places.setdefault(id(value), ("same", len(outputs))))
                if outputs[-1] == ("same", len(outputs) - 1):
                    outputs[-1] = "tensor", alone
                    found.append(same_tensor(value))
        order = {id(tensor): number for number, tensor in enumerate(given)}
        inputs = tuple(("tensor", order[id(v)]) if isinstance(v, torch.Tensor) else ("plain", v) for v in flat)
        shapes = tuple(same_tensor(tensor) for tensor in given)
        return Kind(
            member, signature, inputs, shapes, spec, tuple(outputs), tuple(found), output_spec,
            seen,
        )  # fmt: skip

    # -- what the program reads of the answers ---------------------------------------------------

    def show(self, tree: Any) -> Any:
        """The tree with tensors of the program in place of answers."""
        if isinstance(tree, torch.Tensor):
            found = self.pending.get(id(tree))
            return tree if found is None else self._shown(*found)
        if type(tree) in (list, tuple):
            return type(tree)(self.show(item) for item in tree)
        if type(tree) is dict:
            return {key: self.show(value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple, dict)):
            return pytree.tree_map_only(torch.Tensor, self.show, tree)
        return tree

    def _shown(self, answer: Answer, tensor: torch.Tensor) -> torch.Tensor:
        if answer not in self.shown:
            size, stride, dtype, device, grad = same_tensor(tensor)
            made = torch.ops.tapas.answer(answer.call, answer.result, size, stride, dtype, device)
            self.shown[answer] = made.requires_grad_() if grad else made
        return self.shown[answer]


def check(kind: Kind) -> None:
    """What ran must be the same when it runs again."""
    member = kind.member
    if kind.signature[1] != torch.get_default_dtype():
        raise CannotFold(f"{member.path} is called with another default dtype", member.structure.number)
    if kind.seen.unknown:
        raise CannotFold(f"{member.path}: nobody knows {kind.seen.unknown}", member.structure.number)
    if not kind.seen.same_for(member.inside.modules):
        what = kind.seen.changed(member.inside.modules)
        raise CannotFold(
            f"{member.path} reads what changes while the model runs: {what}", member.structure.number, True
        )


class Showing(TorchFunctionMode):
    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.session.pending:
            args, kwargs = self.session.show(tuple(args)), self.session.show(dict(kwargs))
        return func(*args, **kwargs)


def _containers(tree: Any) -> set[int]:
    """The lists and dicts in a tree."""
    if isinstance(tree, (list, tuple)):
        inner = set().union(*map(_containers, tree))
        return inner | {id(tree)} if isinstance(tree, list) else inner
    if isinstance(tree, dict):
        return {id(tree)}.union(*map(_containers, tree.values()))
    return set()


def _sign(tree: Any, given: dict[int, torch.Tensor], out: list[Any]) -> None:
    """Write down what code can tell of arguments, and collect their tensors by id."""
    kind = type(tree)
    if kind in PLAIN:
        out += (kind, tree)
        if kind in SIGNED:
            out.append(str(tree))
    elif isinstance(tree, torch.Tensor):
        if id(tree) in given:
            out.append(list(given).index(id(tree)))
        else:
            given[id(tree)] = tree
        if isinstance(tree, Standin):
            if len(vars(tree)) > 1:  # somebody has written a note on it
                raise Unknown
            out += tree.facts
        else:
            out += same_tensor(tree)
    elif kind is dict:
        out += (kind, len(tree), *tree, *map(type, tree))
        for item in tree.values():
            _sign(item, given, out)
    elif kind in (tuple, list):
        out += (kind, len(tree))
        for item in tree:
            _sign(item, given, out)
    else:
        raise Unknown


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _mode_for(member: Member, given: list[torch.Tensor]) -> FakeTensorMode | None:
    """The mode that makes tensors without data; meta tensors have none anyway, and are much faster."""
    held = (*member.inside.parameters, *member.inside.buffers)
    fake = next((tensor for tensor in held if isinstance(tensor, FakeTensor)), None)
    if fake is not None:
        return fake.fake_mode
    weightless = all(tensor.is_meta for tensor in held) and all(t.device.type == "meta" for t in given)
    return None if weightless else FakeTensorMode(allow_non_fake_inputs=True)


def _check_modes() -> None:
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if autocast or torch.is_inference_mode_enabled():
        raise CannotFold("a submodule is called under autocast or in inference mode")


@contextmanager
def _untraced(plain: tuple[Callable, Callable]) -> Iterator[None]:
    """Nothing that runs within is written into the program; modules are called and read as without export."""
    traced = nn.Module.__call__, nn.Module.__getattr__
    nn.Module.__call__, nn.Module.__getattr__ = plain  # type: ignore[assignment, method-assign]
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            yield
    finally:
        nn.Module.__call__, nn.Module.__getattr__ = traced  # type: ignore[assignment, method-assign]


@contextmanager
def _weightless(modules: list[nn.Module], mode: FakeTensorMode | None) -> Iterator[None]:
    """Modules with tensors without data for parameters and buffers."""
    made: dict[int, torch.Tensor] = {}
    before: list[tuple[dict, dict]] = []

    def light(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or isinstance(tensor, FakeTensor) or (mode is None and tensor.is_meta):
            return tensor
        if id(tensor) not in made:
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            wrapped = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
            made[id(tensor)] = wrapped
        return made[id(tensor)]

    with mode or nullcontext():
        try:
            for module in modules:
                for held in (vars(module)["_parameters"], vars(module)["_buffers"]):
                    before.append((held, dict(held)))
                    held.update({name: light(tensor) for name, tensor in held.items()})
            yield
            if any(held.keys() != own.keys() for held, own in before):
                raise CannotFold("a repeated submodule makes parameters or buffers while it runs")
        finally:
            for held, own in before:
                held.clear()
                held.update(own)
