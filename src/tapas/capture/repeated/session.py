"""Export a model without its repeated submodules: for each call of one, a stand-in answers.

While the model is exported, the members of its containers are emptied: a call of one is written down, and answered
with tensors of the shapes that it returned when it ran on tensors without data, where it was compared with earlier
ones (see evidence.py). Only what code around them reads of such answers enters the program.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tapas._torch import (
    FakeTensorMode,
    as_in_export,
    as_subclass,
    autocast_depth,
    pytree,
)
from tapas.capture.repeated.answers import Answer, StandIn
from tapas.capture.repeated.candidates import Candidate, same_tensor
from tapas.capture.repeated.dry_run import Arguments, CannotFold, Returned, arguments_of, dry_run
from tapas.capture.repeated.evidence import PLAIN, Evidence, Incomparable
from tapas.capture.side_effects import in_checkpoint, side_effects_kept

log = logging.getLogger(__name__)

_library = torch.library.Library("tapas", "FRAGMENT")
_library.define("block(int call, Tensor[] operands) -> Tensor[]")
_library.define("answer(int call, int result, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor")
_library.impl(
    "answer",
    lambda call, result, size, stride, dtype, device: torch.empty_strided(size, stride, dtype=dtype, device=device),
    "CompositeExplicitAutograd",
)


@dataclass(frozen=True, eq=False)
class CopyKind:
    """What a run of one copy showed: the same for all copies that are called in the same way and run the same."""

    member: Candidate
    signature: list[Any]
    arguments: Arguments
    returned: Returned
    evidence: Evidence

    @cached_property
    def alone(self) -> bool:
        """It returns a tensor, not a tree of them."""
        return self.returned.spec.is_leaf()

    @property
    def grad(self) -> bool:
        return self.arguments.grad

    @property
    def path(self) -> str:
        return self.member.path

    @property
    def module(self) -> nn.Module:
        return self.member.module


class RecordedCall(NamedTuple):
    kind: CopyKind
    path: str
    tensors: tuple[Any, ...]  # tensors given: of the program, or Answer
    in_checkpoint: bool


Opened = Callable[[], AbstractContextManager[None]]


@dataclass
class Session:
    """One export of a model without its copies."""

    calls: list[RecordedCall] = field(default_factory=list)
    kinds: dict[int, list[CopyKind]] = field(default_factory=lambda: defaultdict(list))  # by structure
    pending: dict[int, tuple[Answer, torch.Tensor]] = field(default_factory=dict)  # by id; the tensor keeps it alive
    shown: dict[Answer, torch.Tensor] = field(default_factory=dict)  # answers that the program reads
    used: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)  # tensors of the program given to calls
    fake: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    running: bool = False
    depth: int = field(default_factory=autocast_depth)  # of the caller's regions of autocast
    output_spec: pytree.TreeSpec | None = None

    # -- a call of a member ----------------------------------------------------------------------

    def call(self, member: Candidate, opened: Opened, args: tuple, kwargs: dict[str, Any]) -> Any:
        """`opened`: within it the member can run."""
        if not self.running:
            raise CannotFold(f"{member.path} is called by another repeated submodule", member.structure.number)
        if autocast_depth() != self.depth or torch.is_inference_mode_enabled():
            raise CannotFold("a submodule is called in a region of autocast or in inference mode")
        given: dict[int, torch.Tensor] = {}
        signature: list[Any] = [torch.is_grad_enabled(), torch.get_default_dtype()]
        try:
            _sign(args, given, signature)
            _sign(kwargs, given, signature)
        except Incomparable as what:
            raise CannotFold(f"{member.path} is given {what}", member.structure.number) from None
        tensors = list(given.values())
        arguments = arguments_of(args, kwargs, tensors)
        same = {kind.evidence: kind for kind in self.kinds[member.structure.number] if kind.signature == signature}
        with opened():
            found = dry_run(member, arguments, list(same), self.fake)
        if isinstance(found, Evidence):
            return self.answer(member, same[found], tensors)
        if same:
            log.debug("%s is not a copy of %s: %s", member.path, next(iter(same.values())).path, found.deviation)
        kind = CopyKind(member, signature, arguments, found.returned, found.evidence)
        self.kinds[member.structure.number].append(kind)
        return self.answer(member, kind, tensors)

    def answer(self, member: Candidate, kind: CopyKind, tensors: Collection[torch.Tensor]) -> Any:
        number, given = len(self.calls), list(tensors)
        results, made = [], 0
        for what, value in kind.returned.values:
            if what == "input":
                results.append(given[value])
            elif what == "same":
                results.append(results[value])
            elif what == "plain":
                results.append(value)
            else:
                facts = kind.returned.tensors[made]
                tensor = as_subclass(StandIn, value, facts[4])
                tensor.facts = facts
                self.pending[id(tensor)] = Answer(number, made), tensor
                made += 1
                results.append(tensor)
        self.calls.append(RecordedCall(kind, member.path, tuple(map(self.operand, given)), in_checkpoint()))
        return results[0] if kind.alone else pytree.tree_unflatten(results, kind.returned.spec)

    def operand(self, tensor: torch.Tensor) -> Any:
        found = self.pending.get(id(tensor))
        if found is not None:
            return found[0]
        return self.used.setdefault(id(tensor), (len(self.used), tensor))[0]

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


def check_repeats(kind: CopyKind, times: int = 1) -> None:
    """What ran must be the same when it runs again: the program that is traced of it comes from a run of its own."""
    member = kind.member
    with as_in_export(), side_effects_kept():
        for _ in range(times):
            found = dry_run(member, kind.arguments, [kind.evidence], FakeTensorMode(allow_non_fake_inputs=True))
            if not isinstance(found, Evidence):
                raise CannotFold(
                    f"{member.path} runs differently the next time: {found.deviation}", member.structure.number
                )


class ShowAnswers(TorchFunctionMode):
    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.session.pending:
            args, kwargs = self.session.show(tuple(args)), self.session.show(dict(kwargs))
        return func(*args, **kwargs)


def _sign(tree: Any, given: dict[int, torch.Tensor], out: list[Any]) -> None:
    """Write down what code can tell of arguments, and collect their tensors by id."""
    kind = type(tree)
    if kind in PLAIN:
        out += (kind, repr(tree) if kind in (float, complex) else tree)  # nan is nan, and 0.0 is not -0.0
    elif isinstance(tree, torch.Tensor):
        if id(tree) in given:
            out.append(list(given).index(id(tree)))
        else:
            given[id(tree)] = tree
        if isinstance(tree, StandIn):
            if len(vars(tree)) > 1:  # somebody has written a note on it
                raise Incomparable("a tensor with a note on it")
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
    elif (told := getattr(kind, "told_of_it", None)) is not None:  # one of ours, which pytree knows, too
        out.append(kind)
        _sign(told(tree), given, out)
    else:
        raise Incomparable(f"a {kind.__name__}")
