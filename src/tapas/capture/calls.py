"""The exported program as a flat list of calls: higher-order operators inlined, getitem gone."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import fx

from tapas._torch import HigherOrderOperator, operator_name
from tapas.capture.diagnostics import data_dependent, higher_order, place_of
from tapas.errors import CaptureError

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor by name, standing in a call's arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class UnreadNumber:
    """A number that depends on data, standing in a call's arguments: fine as long as only an assertion asks for it."""

    place: str


@dataclass(slots=True)
class ExportedCall:
    """One operator call. `grad` is False for what ran under `torch.no_grad()`."""

    target: Any  # a torch.ops overload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[str, ...]
    grad: bool
    node: fx.Node  # where it came from

    @property
    def opname(self) -> str:
        return operator_name(self.target)[0]

    @property
    def overload(self) -> str:
        return operator_name(self.target)[1]

    def at_its_place(self, target: Any, args: tuple[Any, ...], results: tuple[str, ...] = (), **kwargs: Any) -> Self:
        """Another call, made where this one was; of the same results if no others are given."""
        return type(self)(target, args, kwargs, results or self.results, self.grad, self.node)

    def read(self, replace: Callable[["Value"], Any]) -> None:
        """Let it read other tensors."""
        self.args = map_values(self.args, replace)
        self.kwargs = {key: map_values(tree, replace) for key, tree in self.kwargs.items()}


@dataclass(slots=True)
class FlatProgram:
    calls: list[ExportedCall] = field(default_factory=list)
    meta: dict[str, torch.Tensor] = field(default_factory=dict)  # a fake tensor for every name
    attributes: dict[str, str] = field(default_factory=dict)  # tensors read with get_attr: name -> path
    total: int = 0  # calls in the exported program

    def unique(self, name: str) -> str:
        if name not in self.meta:
            return name
        number = 1
        while f"{name}.v{number}" in self.meta:
            number += 1
        return f"{name}.v{number}"


@dataclass(frozen=True, slots=True)
class RegionMode:
    """What a region of the program runs under."""

    grad: bool = True
    autocast: torch.dtype | None = None
    own_precision: bool = False  # a region of autocast, on or off: whoever calls the model has no say in it


OWN_PRECISION = "tapas_own_precision"  # of a node: that of its region

# Higher-order operators that only set a mode: where the body stands among their arguments.
WRAPPERS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4, "tag_activation_checkpoint": 0}


def map_values(tree: Any, replace: Callable[[Value], Any]) -> Any:
    """The argument tree with every Value replaced."""
    if isinstance(tree, Value):
        return replace(tree)
    if isinstance(tree, (list, tuple)):
        return tuple([map_values(item, replace) for item in tree])
    return tree


def values_in(tree: Any) -> list[str]:
    """Names of the tensors in an argument tree, in order."""
    if isinstance(tree, Value):
        return [tree.name]
    if isinstance(tree, (list, tuple)):
        return [name for item in tree for name in values_in(item)]
    return []


def operands(call: ExportedCall) -> list[str]:
    return values_in(call.args) + [name for value in call.kwargs.values() for name in values_in(value)]


def flatten(module: fx.GraphModule, bind: dict[str, Any], grad: bool = True) -> tuple[FlatProgram, Any]:
    """All calls of the graph in order, and its output tree; `bind` gives the placeholders' values."""
    program = FlatProgram()
    for node in module.graph.find_nodes(op="placeholder"):
        value = bind.get(node.name)
        if isinstance(value, Value):
            program.meta.setdefault(value.name, node.meta["val"])
    return program, _walk(module, bind, program, RegionMode(grad))


def _walk(module: fx.GraphModule, bind: dict[str, Any], program: FlatProgram, mode: RegionMode) -> Any:
    known: dict[fx.Node, Any] = {}
    output: Any = None

    def resolve(tree: Any) -> Any:
        if isinstance(tree, fx.Node):
            return known[tree]
        if isinstance(tree, (list, tuple)):
            return tuple(resolve(item) for item in tree)
        return tree

    for node in module.graph.nodes:
        if node.op == "placeholder":
            known[node] = bind.get(node.name)
        elif node.op == "get_attr":
            known[node] = _attribute(module, node, program)
        elif node.op == "output":
            output = resolve(node.args[0])
        elif node.target is operator.getitem:
            known[node] = resolve(node.args[0])[node.args[1]]
        elif isinstance(node.target, HigherOrderOperator):
            known[node] = _inline(node, resolve, program, mode)
        else:
            program.total += 1
            known[node] = _call(node, resolve, program, mode)
    return output


def _attribute(module: fx.GraphModule, node: fx.Node, program: FlatProgram) -> Any:
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    if not isinstance(found, torch.Tensor):
        return found
    name = program.unique(node.name)
    program.meta[name] = node.meta.get("val", found)
    program.attributes[name] = str(node.target)
    return Value(name)


def _inline(node: fx.Node, resolve: Callable[[Any], Any], program: FlatProgram, mode: RegionMode) -> Any:
    kind = node.target.name()  # type: ignore[union-attr]
    position = WRAPPERS.get(kind)
    if position is None:
        raise CaptureError(place_of(node), *higher_order(kind))
    args = resolve(node.args)
    if kind == "wrap_with_set_grad_enabled":
        mode = replace(mode, grad=bool(args[0]))
    elif kind == "wrap_with_autocast":
        mode = RegionMode(mode.grad, args[1] if args[2] else None, own_precision=True)
    body = args[position]
    names = [inner.name for inner in body.graph.find_nodes(op="placeholder")]
    return _walk(body, dict(zip(names, args[position + 1 :], strict=True)), program, mode)


def _call(node: fx.Node, resolve: Callable[[Any], Any], program: FlatProgram, mode: RegionMode) -> Any:
    results: list[str] = []

    def define(value: Any, index: int | None) -> Any:
        if isinstance(value, torch.Tensor):
            if any(not isinstance(size, int) for size in value.shape):
                raise data_dependent(place_of(node), f"the size of the result of {node.target} depends on data")
            name = program.unique(node.name if index is None else f"{node.name}.{index}")
            program.meta[name] = value
            results.append(name)
            return Value(name)
        if isinstance(value, (list, tuple)):
            return tuple(define(item, number) for number, item in enumerate(value))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return UnreadNumber(place_of(node))
        return value

    _check_dense(node)
    made = define(node.meta.get("val"), None)
    if results:  # without a tensor result it is an assertion
        args, kwargs = resolve(node.args), {key: resolve(value) for key, value in node.kwargs.items()}
        _check_numbers((args, *kwargs.values()))
        node.meta[OWN_PRECISION] = mode.own_precision
        call = ExportedCall(node.target, args, kwargs, tuple(results), mode.grad, node)
        if mode.autocast:
            _cast(call, program, mode.autocast)
        program.calls.append(call)
    return made


def _check_numbers(tree: Any) -> None:
    if isinstance(tree, UnreadNumber):
        raise data_dependent(tree.place, "a number is read out of a tensor")
    if isinstance(tree, (list, tuple)):
        for item in tree:
            _check_numbers(item)


def _check_dense(node: fx.Node) -> None:
    flag = _SPARSE.get(node.target)
    if flag is not None and len(node.args) > flag and node.args[flag]:
        raise CaptureError(place_of(node), "an embedding has sparse=True: its gradients are sparse", "leave that out")


# the place of the flag among their arguments
_SPARSE: dict[Any, int] = {torch.ops.aten.embedding.default: 4, torch.ops.aten.embedding_bag.padding_idx: 5}


def _cast(call: ExportedCall, program: FlatProgram, dtype: torch.dtype) -> None:
    """Under autocast, export leaves out the casts that autocast makes: write them down."""
    result = program.meta[call.results[0]].dtype
    have = {program.meta[name].dtype for name in operands(call) if program.meta[name].is_floating_point()}
    lowered = result == dtype and have - {dtype}
    raised = result == torch.float32 and have == {dtype}
    if not (lowered or raised) or "to" in call.opname.split("_"):
        return

    def cast(value: Value) -> Value:
        tensor = program.meta[value.name]
        if not tensor.is_floating_point() or tensor.dtype == result:
            return value
        name = program.unique(f"{value.name}.cast")
        program.meta[name] = tensor.to(result)
        program.calls.append(call.at_its_place(aten.to.dtype, (value, result), (name,)))
        return Value(name)

    call.read(cast)
