"""Members of a model that do not run: they are emptied, and a call of one goes to the session."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from torch import nn

from tapas._torch import DisableTorchFunction, pytree
from tapas.capture.repeated.candidates import Candidate
from tapas.capture.repeated.dry_run import CannotFold
from tapas.capture.repeated.session import Session, ShowAnswers


class _EmptiedDict(dict):
    """The insides of a member while the model runs: whoever looks there gets to know more than a copy's call."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session


def _guarded(name: str) -> Callable[..., Any]:
    def method(self: _EmptiedDict, *args: Any) -> Any:
        if self.session.running:
            raise CannotFold("code around a repeated submodule looks inside of it")
        return getattr(dict, name)(self, *args)

    return method


for _name in ("__contains__", "__getitem__", "__iter__", "__len__", "get", "items", "keys", "values"):
    setattr(_EmptiedDict, _name, _guarded(_name))


class _ContainerModules(dict):
    """A container's modules, of which only the running model sees all: nobody else has to walk over the members."""

    def __init__(self, session: Session, inside: dict, silent: set[int]) -> None:
        super().__init__(inside)
        self.session = session
        self.others = {name: module for name, module in inside.items() if id(module) not in silent}

    def items(self) -> Any:
        return super().items() if self.session.running else self.others.items()

    def values(self) -> Any:
        return super().values() if self.session.running else self.others.values()

    def keys(self) -> Any:
        return super().keys() if self.session.running else self.others.keys()


@dataclass
class SilencedModule:
    """A member that does not run."""

    session: Session
    member: Candidate
    closed: _EmptiedDict
    insides: tuple[dict, dict, dict] | None = None  # modules, parameters and buffers; None if it was never closed
    kind: type = nn.Module

    def close(self) -> None:
        module = self.member.module
        own = module.__dict__
        self.kind, self.insides = type(module), (own["_modules"], own["_parameters"], own["_buffers"])
        own["_modules"] = own["_parameters"] = own["_buffers"] = self.closed
        own["_tapas_silent"] = self
        object.__setattr__(module, "__class__", _answering(self.kind))

    def open(self) -> None:
        if self.insides is None:
            return
        module = self.member.module
        own = module.__dict__
        object.__setattr__(module, "__class__", self.kind)
        own["_modules"], own["_parameters"], own["_buffers"] = self.insides
        own.pop("_tapas_silent", None)

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.open()
        running, self.session.running = self.session.running, False
        try:
            yield
        finally:
            self.close()
            self.session.running = running


@cache
def _answering(kind: type) -> type:
    """A subclass whose call is answered by the session."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        silent = self.__dict__["_tapas_silent"]
        with DisableTorchFunction():  # to look at an answer is not to read it
            return silent.session.call(silent.member, silent.opened, args, kwargs)

    own = {"__call__": __call__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), own)


_PLAIN = nn.Module.__call__, nn.Module.__getattr__


@contextmanager
def _untraced_members(session: Session) -> Iterator[None]:
    """While a member runs, modules are called and read as without export, which has both replaced.

    Once for all members: a change of nn.Module makes Python forget what it knows about every class of modules."""
    (call, get), (traced_call, traced_get) = _PLAIN, (nn.Module.__call__, nn.Module.__getattr__)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (traced_call if session.running else call)(self, *args, **kwargs)

    def __getattr__(self: nn.Module, name: str) -> Any:
        return (traced_get if session.running else get)(self, name)

    nn.Module.__call__, nn.Module.__getattr__ = __call__, __getattr__  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.__call__, nn.Module.__getattr__ = traced_call, traced_get  # type: ignore[assignment, method-assign]


@contextmanager
def answering(model: nn.Module, members: list[Candidate]) -> Iterator[Session]:
    """Within, the model can be exported without its members; it returns (what it returns, tensors that calls use)."""
    session = Session()
    closed = _EmptiedDict(session)
    held = [SilencedModule(session, member, closed) for member in members]
    forward = model.forward

    @wraps(forward)
    def shown(*args: Any, **kwargs: Any) -> Any:
        session.running = True
        try:
            with _untraced_members(session), ShowAnswers(session):
                output = forward(*args, **kwargs)
                flat, session.output_spec = pytree.tree_flatten(output)
                return session.show(flat), [tensor for _, tensor in session.used.values()]
        finally:
            session.running = False

    silent = {id(member.module) for member in members}
    containers = {id(member.container): vars(member.container) for member in members}.values()
    insides = [own["_modules"] for own in containers]
    before = vars(model).get("forward")
    try:
        for own, inside in zip(containers, insides, strict=True):
            own["_modules"] = _ContainerModules(session, inside, silent)
        for one in held:
            one.close()
        model.forward = shown
        yield session
    finally:
        vars(model).pop("forward", None)
        if before is not None:
            model.forward = before
        for one in held:
            one.open()
        for own, inside in zip(containers, insides, strict=True):
            own["_modules"] = inside
