"""The tree of modules that users see: for every module of the original one of the same name, that holds its parameters
and buffers. What they compute is computed elsewhere, so what nobody would look at cannot be set or hooked here."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tapas._torch import held_modules, like_parameter, whole_tensor
from tapas.errors import TapasError
from tapas.runtime.collectives import Rank
from tapas.runtime.parts import shard
from tapas.sharding.layout import Layout

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
PLAIN = frozenset(vars(nn.Module()))  # what every module has: its mode, its dicts
OWN = PLAIN | set(dir(nn.Module)) - {"forward"}  # and what its class has


@dataclass
class Tree:
    """What all modules of a tree share."""

    rank: Rank
    executor: Any = None  # what runs the program; while there is none the tree is made, and anything can be set

    def __deepcopy__(self, memo: Any) -> "Tree":
        return self  # a copy of a part of the tree: that of all of it has a tree of its own


@dataclass(frozen=True)
class Counterpart:
    """What a module of the tree stands for."""

    tree: Tree
    path: str  # in the model
    description: str = ""  # what the original's repr has in parentheses
    attributes: frozenset[str] = frozenset()  # that the original has besides
    layouts: dict[str, Layout] = field(default_factory=dict)  # of its own parameters, and buffers that are weights


class CounterpartModule(nn.Module):
    """Stands for a module of the original. All that it has besides is in one attribute: users' names are free."""

    _tapas: Counterpart

    def extra_repr(self) -> str:
        if "_tapas" not in vars(self):  # a slice of a container
            return super().extra_repr()
        layouts = [f"{name}: [{', '.join(map(str, layout))}]" for name, layout in self._tapas.layouts.items()]
        return ", ".join(filter(None, [self._tapas.description, *layouts]))

    def __setattr__(self, name: str, value: Any) -> None:
        if _matters(self, name):
            value = _checked(self, name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if _matters(self, name):
            raise _unseen(self, name, "is deleted from")
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if _finished(self):
            raise _unseen(self, name, "is registered in")
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        if _finished(self):
            tensor = _checked(self, name, tensor)
        super().register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        if _finished(self):
            raise _unseen(self, name, "is registered in")
        super().add_module(name, module)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Plain tensors are whole, on every rank, and are cut. `state_dict` is a copy of the user's."""
        for name in self._tapas.layouts:
            value, mine = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == mine.shape:
                state_dict[prefix + name] = _cut(self, name, value)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class SubmoduleCounterpart(CounterpartModule):
    """Is not called: nobody would hear of it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fact = "submodules of a parallel module have no program of their own"
        raise TapasError(self._tapas.path, fact, "call the whole module, or parallelize this one by itself")

    def _refuse_hook(self, *_: Any, **__: Any) -> NoReturn:
        fact = "hooks on submodules of a parallel module are never called: its program calls operators"
        raise TapasError(self._tapas.path, fact, "register it on the whole module, or on parameters")

    register_forward_hook = register_forward_pre_hook = _refuse_hook  # type: ignore[assignment]
    register_full_backward_hook = register_full_backward_pre_hook = _refuse_hook  # type: ignore[assignment]
    register_backward_hook = _refuse_hook  # type: ignore[assignment]


def _finished(module: nn.Module) -> bool:
    mine = vars(module).get("_tapas")
    return mine is not None and mine.tree.executor is not None


def _matters(module: CounterpartModule, name: str) -> bool:
    """Whether code of the model might read an attribute. What torch.compile and others note on modules is theirs."""
    if name in OWN or not _finished(module):
        return False
    held = (module._tapas.attributes, module._parameters, module._buffers, module._modules)
    return not name.startswith("_") or any(name in names for names in held)


def _unseen(module: CounterpartModule, name: str, what: str) -> TapasError:
    place = f"{module._tapas.path}.{name}".lstrip(".")
    fact = f"{what} the parallel module, whose program was made before and cannot see it"
    return TapasError(place, fact, "do it to the model before parallelize, or keep it outside of the module")


def _checked(module: CounterpartModule, name: str, value: Any) -> Any:
    """A buffer can be set to another of its kind: it is read in every step. What else there is cannot."""
    now = module._buffers.get(name)
    if now is None or not isinstance(value, torch.Tensor):
        raise _unseen(module, name, "is set on")
    if (value.shape, value.dtype) != (now.shape, now.dtype):
        place = f"{module._tapas.path}.{name}".lstrip(".")
        fact = f"is set to {value.dtype}{list(value.shape)}, the program was made for {now.dtype}{list(now.shape)}"
        raise TapasError(place, fact, "give it this shape and type")
    if isinstance(now, DTensor):
        return _cut(module, name, whole_tensor(value) if isinstance(value, DTensor) else value)
    return value.to(now.device)


def _cut(module: CounterpartModule, name: str, value: torch.Tensor) -> torch.Tensor:
    """What is whole on every rank, as the module has this weight."""
    rank, mine = module._tapas.tree.rank, getattr(module, name)
    part = shard(value.detach(), module._tapas.layouts[name], rank.mesh, rank.coord)
    return like_parameter(part.to(mine.device).contiguous(), mine)


def grow(root: CounterpartModule, model: nn.Module, tree: Tree) -> None:
    """Below `root`, the tree of `model`. A module that stands at several places does so here."""
    made: dict[nn.Module, CounterpartModule] = {model: root}
    for path, module in model.named_modules():
        mine = made[module]
        vars(mine)["_tapas"] = Counterpart(tree, path, _description(module), frozenset(vars(module)) - PLAIN)
        mine.training = module.training
        if isinstance(module, (nn.ParameterList, nn.ParameterDict)):  # how many it has, or their names
            vars(mine).update((name, value) for name, value in vars(module).items() if name not in PLAIN)
        for name, parameter in module._parameters.items():
            if parameter is None:
                mine.register_parameter(name, None)
        for name, child in held_modules(module).items():
            if child is not None and child not in made:
                made[child] = counterpart_class(child)()
            mine.add_module(name, made[child] if child is not None else None)


def counterpart_class(module: nn.Module) -> type[CounterpartModule]:
    """With the name of the original's class. Containers are containers."""
    return _class(SubmoduleCounterpart, type(module).__name__, _container(module))


def parallel_class(base: type[CounterpartModule], module: nn.Module) -> Any:
    """As FSDP does it: a class of its own for every class of models."""
    return _class(base, f"Parallel{type(module).__name__}", _container(module))


def _container(module: nn.Module) -> type[nn.Module] | None:
    return next((kind for kind in CONTAINERS if isinstance(module, kind)), None)


@cache
def _class(base: type[CounterpartModule], name: str, container: type[nn.Module] | None) -> Any:
    return type(name, (base, container) if container else (base,), {"__module__": base.__module__})


def _description(module: nn.Module) -> str:
    try:
        return module.extra_repr() if not isinstance(module, CONTAINERS) else ""
    except Exception:  # whatever a user's code does not like about it: it is for people only
        return ""


def home_of(root: CounterpartModule, path: str) -> tuple[CounterpartModule, str]:
    """The module that holds a tensor, and the name it has there. A model may be nothing but names of tensors: then
    the modules on the way are made."""
    *parents, name = path.split(".")
    home: Any = root
    for i, parent in enumerate(parents):
        if parent not in held_modules(home):
            home.add_module(parent, SubmoduleCounterpart())
            vars(held_modules(home)[parent])["_tapas"] = Counterpart(root._tapas.tree, ".".join(parents[: i + 1]))
        home = held_modules(home)[parent]
    return home, name
