"""Any optimizer of torch.optim on this rank's parts of parameters, without a dispatch of DTensor per tensor.

Users have an optimizer over DTensors: its groups, its state and its checkpoints are those of the plain one over the
same parameters. Behind it another one works on the parts, which are the same memory. What users see is the truth:
before a step the inner optimizer is told what groups and gradients are, afterwards it is asked what became of them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from tapas._torch import like_parameter, local_part
from tapas.errors import TapasError
from tapas.runtime.elementwise import LEARNING_RATE, Behaviour, try_out, unhooked_step

PLACE = "local_optimizer"
Kind = Callable[..., Optimizer]
Group = dict[str, Any]


def local_optimizer(kind: Kind, params: Iterable[Any], /, **options: Any) -> Optimizer:
    """`kind(params, **options)`, such as `torch.optim.AdamW(module.parameters(), lr=1e-3)`, for parameters that are
    DTensors: with the same results and the same state for checkpoints, but as fast as on plain tensors.

    `kind` has to update every element by itself, unless all parameters are whole on every rank. It is tried out.
    """
    return LocalOptimizer(kind, params, options)


class LocalOptimizer(Optimizer):
    def __init__(self, kind: Kind, params: Iterable[Any], options: dict[str, Any]) -> None:
        if options.get("differentiable"):
            raise TapasError(PLACE, "differentiable=True", f"gradients of a step: use {_name(kind)} itself")
        self.kind, self.options = kind, options
        self.inner: Optimizer | None = None
        self.parts: dict[Any, Any] = {}  # parameter -> what the inner optimizer has for it
        self.owners: dict[Any, Any] = {}  # and back
        self.told: list[list[Any]] = []  # per group its parameters, with
        self.theirs: list[list[_Pair]] = []  # what the inner optimizer has for each of them
        self.tried: dict[tuple[int, torch.device, str], Behaviour] = {}
        self.elementwise_state: dict[Any, frozenset[str]] = {}  # parameter -> what has an element for each of its own
        self.handed_out = False  # somebody may hold on to the state that users see
        super().__init__(params, {})
        self.inner = kind([self._inner_group(group) for group in self.param_groups], **options)
        self.defaults = dict(self.inner.defaults)
        self.compute = unhooked_step(self.inner)
        self._take_options(self.inner)
        for group in self.param_groups:
            self._check(group)

    # -- groups --------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        if self.inner is None:  # it is made of all groups at once
            return
        try:
            self.inner.add_param_group(self._inner_group(self.param_groups[-1]))
            self._take_options(self.inner)
            self._check(self.param_groups[-1])
        except Exception:
            del self.inner.param_groups[len(self.param_groups) - 1 :], self.param_groups[-1]
            raise

    def _inner_group(self, group: Group) -> Group:
        """As one that an optimizer is made of."""
        parts = [self._part(parameter) for parameter in group["params"]]
        names = group.get("param_names")
        given = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        return given | {"params": list(zip(names, parts, strict=True)) if names else parts}

    def _take_options(self, inner: Optimizer) -> None:
        for group, theirs in zip(self.param_groups, inner.param_groups, strict=True):
            group.update({key: value for key, value in theirs.items() if key != "params"})

    def _check(self, group: Group) -> None:
        """Whether the optimizer may work on parts of these parameters."""
        seen: dict[tuple[int, torch.device], Behaviour] = {}
        for number, parameter in enumerate(group["params"]):
            if not isinstance(parameter, DTensor):
                continue
            key = max(parameter.dim(), 1), parameter.device
            if key not in seen:
                seen[key] = self._behaviour(group, *key)
            self.elementwise_state[parameter] = seen[key].elementwise_state
            if seen[key].objection and _split(parameter):
                shape = f"a parameter of shape {tuple(parameter.shape)}"
                name = group["param_names"][number] if "param_names" in group else shape
                raise TapasError(
                    PLACE, f"{_name(self.kind)} cannot work on a part of {name}, which is {parameter.placements}: "
                    f"{seen[key].objection}", f"use {_name(self.kind)} itself, or keep these parameters whole",
                )  # fmt: skip

    def _behaviour(self, group: Group, dims: int, device: torch.device) -> Behaviour:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if "lr" in options:
            rate = options["lr"]
            options["lr"] = torch.full_like(rate, LEARNING_RATE) if torch.is_tensor(rate) else LEARNING_RATE
        key = dims, device, repr(options)
        if key not in self.tried:
            named = "param_names" in group

            def make(parameter: nn.Parameter) -> Optimizer:
                given: Any = [(group["param_names"][0], parameter)] if named else [parameter]
                return self.kind([{**options, "params": given}], **self.options)

            self.tried[key] = try_out(make, dims, device)
        return self.tried[key]

    def _part(self, parameter: Any) -> Any:
        """What the inner optimizer has for a parameter: its memory on this rank."""
        if parameter not in self.parts:
            part = parameter
            if isinstance(parameter, DTensor):
                if any(placement.is_partial() for placement in parameter.placements):
                    raise TapasError(PLACE, f"a parameter is {parameter.placements}", "sum it up first")
                part = nn.Parameter(local_part(parameter).detach(), requires_grad=parameter.requires_grad)
            self.parts[parameter], self.owners[part] = part, parameter
        return self.parts[parameter]

    # -- steps ---------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **more: Any) -> Any:  # type: ignore[override]
        assert self.inner is not None
        if self.handed_out:
            self._give_state(self.inner)
        self._tell(self.inner)
        try:
            return self.compute(self._telling(self.inner, closure), **more)
        finally:
            self._take_options(self.inner)
            for pairs in self.theirs:
                for pair in pairs:
                    pair.part.grad = None
            if self.handed_out:
                self._take_state(self.inner)

    def _tell(self, inner: Optimizer) -> None:
        """What the groups are now, and the gradients."""
        if len(self.told) != len(self.param_groups) or not all(map(_same, self.told, self.param_groups)):
            self._regroup(inner)
        for group, theirs, pairs in zip(self.param_groups, inner.param_groups, self.theirs, strict=True):
            parts = theirs["params"]
            theirs.update(group)
            theirs["params"] = parts
            for pair in pairs:
                pair.tell()

    def _regroup(self, inner: Optimizer) -> None:
        """After the first step, only if somebody changed the groups by hand."""
        missing = len(self.param_groups) - len(inner.param_groups)
        inner.param_groups[len(self.param_groups) :] = [{} for _ in range(missing)]
        for group, theirs in zip(self.param_groups, inner.param_groups, strict=True):
            if any(parameter not in self.parts for parameter in group["params"]):
                self._check(group)
            theirs["params"] = [self._part(parameter) for parameter in group["params"]]
        self.told = [list(group["params"]) for group in self.param_groups]
        self.theirs = [[_Pair(p, self.parts[p]) for p in told if isinstance(p, DTensor)] for told in self.told]

    def _telling(self, inner: Optimizer, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        if closure is None:
            return None

        def told() -> Any:
            loss = closure()
            self._tell(inner)  # of the gradients that it has made
            return loss

        return told

    # -- state ---------------------------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        """As that of an optimizer over the parameters. Whoever asks may go on to look at it, and to change it."""
        if not self.handed_out and self.inner is not None:
            self.handed_out = True
            self._take_state(self.inner)
        return self.shown

    @state.setter
    def state(self, state: dict[Any, Any]) -> None:
        self.shown = state if isinstance(state, defaultdict) else defaultdict(dict, state)
        self.handed_out = self.inner is not None

    def _take_state(self, inner: Optimizer) -> None:
        for part, held in inner.state.items():
            parameter = self.owners.get(part)
            if parameter is None:  # under a name of the optimizer's own
                self.shown[part] = held
                continue
            shown = self.shown[parameter]
            for key, value in held.items():
                if not _shows(shown.get(key), value):
                    shown[key] = self._as_shown(parameter, key, value)
            for key in shown.keys() - held.keys():
                del shown[key]
        for parameter in [p for p in self.shown if self.parts.get(p, p) not in inner.state]:
            del self.shown[parameter]

    def _give_state(self, inner: Optimizer) -> None:
        for parameter, shown in self.shown.items():
            if parameter not in self.parts:
                inner.state[parameter] = shown
                continue
            held = inner.state[self.parts[parameter]]
            for key, value in shown.items():
                if not _shows(value, held.get(key)):
                    held[key] = _as_held(parameter, key, value)
            for key in held.keys() - shown.keys():
                del held[key]
        for part in [part for part in inner.state if self.owners.get(part, part) not in self.shown]:
            del inner.state[part]

    def _as_shown(self, parameter: Any, key: str, value: Any) -> Any:
        """State as an optimizer over DTensors has it: like the parameter, whole on all ranks, or a plain number."""
        if isinstance(value, list | tuple):
            return type(value)([self._as_shown(parameter, key, item) for item in value])
        if not isinstance(value, torch.Tensor) or not isinstance(parameter, DTensor) or key == "step":
            return value
        if value.shape == local_part(parameter).shape:
            if not value.dim() and key not in self.elementwise_state[parameter]:
                return value
            if value.dtype == parameter.dtype:
                return like_parameter(value, parameter)
            return DTensor.from_local(
                value, parameter.device_mesh, parameter.placements, run_check=False,
                shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
        if not value.dim():
            return value
        mesh = parameter.device_mesh
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What load_state_dict ends in: the state of all parameters, and the groups."""
        assert self.inner is not None
        self.param_groups = state["param_groups"]
        numbers = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        self.inner.load_state_dict(
            {
                "state": {
                    numbers.get(p, p): {key: _as_held(p, key, value) for key, value in held.items()}
                    if p in numbers
                    else held
                    for p, held in state["state"].items()
                },
                "param_groups": [
                    group | {"params": [numbers[p] for p in group["params"]]} for group in self.param_groups
                ],
            }
        )
        self._take_options(self.inner)
        self.shown = defaultdict(dict)
        self._take_state(self.inner)

    def __getstate__(self) -> dict[str, Any]:
        raise TapasError(PLACE, "an optimizer on parts cannot be copied or pickled", "keep its state_dict()")


class _Pair:
    """A parameter, and its part as a parameter of its own."""

    __slots__ = ("parameter", "part", "source")

    def __init__(self, parameter: Any, part: torch.Tensor) -> None:
        self.parameter, self.part, self.source = parameter, part, None

    def tell(self) -> None:
        parameter = self.parameter
        source = local_part(parameter)
        if self.source is not source:  # other memory than before
            self.part.data, self.source = source.detach(), source
        gradient = parameter.grad
        self.part.grad = None if gradient is None else _part_of_gradient(parameter, gradient)


def _same(told: list[Any], group: Group) -> bool:
    parameters = group["params"]
    return len(told) == len(parameters) and all(map(is_, told, parameters))


def _shows(shown: Any, held: Any) -> bool:
    return shown is held or (isinstance(shown, DTensor) and local_part(shown) is held)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or repr(kind)


def _split(parameter: Any) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    sizes = parameter.device_mesh.shape
    return any(n > 1 and not placement.is_replicate() for n, placement in zip(sizes, parameter.placements, strict=True))


def _part_of_gradient(parameter: Any, gradient: Any) -> torch.Tensor:
    if not isinstance(gradient, DTensor):
        raise TapasError(PLACE, "a gradient is not a DTensor, as its parameter is", "set one that is placed like it")
    wanted, placements = parameter.placements, gradient.placements
    if placements is wanted or placements == wanted:
        return local_part(gradient)
    return gradient.redistribute(placements=wanted).to_local()


def _as_held(parameter: Any, key: str, value: Any) -> Any:
    """The inverse of `_as_shown`, for whatever users put there."""
    if isinstance(value, list | tuple):
        return type(value)([_as_held(parameter, key, item) for item in value])
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, DTensor):
        if value.dim() and _split(parameter) and value.shape == parameter.shape:
            fact = f"{key} of a parameter that is {parameter.placements} is a plain tensor"
            raise TapasError(PLACE, fact, "give a DTensor that is placed like the parameter")
        return value
    if value.device_mesh != parameter.device_mesh:
        fact = f"{key} of a parameter is on another mesh than the parameter"
        raise TapasError(PLACE, fact, "load it by tapas.load_checkpoint or torch.distributed.checkpoint")
    wanted = parameter.placements if value.shape == parameter.shape else (Replicate(),) * value.device_mesh.ndim
    if value.placements is wanted or value.placements == wanted:
        return local_part(value)
    return value.redistribute(placements=wanted).to_local()
