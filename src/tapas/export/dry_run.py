"""Does a model's own code work on what each device holds? It is run without data, whole and on local shapes: modules
that are split hand on tensors of the local shapes, and all that is computed between them has to have the shapes that
the plan says.

A layout is only a promise about code that is written for it: `view(batch, -1, heads, 64)` with the number of all heads
turns half of them into half the sequence, and `reshape` turns that back again.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tapas._torch import FakeTensorMode, TorchDispatchMode, pytree
from tapas.export.exported import Reason
from tapas.export.sites import OTHER, ModuleSplit
from tapas.sharding.layout import State, local_shape

Shape = tuple[int, ...]
LocalShapes = Mapping[tuple[str, Shape], set[Shape]]  # (module, a whole shape in it) -> what a device holds of it


class _Differs(Exception):
    def __init__(self, path: str, shape: Shape, wanted: Shape) -> None:
        self.path, self.shape, self.wanted = path, shape, wanted


def try_code(
    model: nn.Module, inputs: Any, splits: Sequence[ModuleSplit], planned: LocalShapes, devices: int
) -> Reason | None:
    """Why the code does not work on local shapes, and where; None if it does. Raises what the model raises unsplit."""
    called: list[str] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        bare = without_data(model)
        given = pytree.tree_map(lambda x: _bare(x) if isinstance(x, torch.Tensor) else x, inputs)
        with _followed(bare, called):
            whole = _run(bare, given, splits, 1, called)
            called.clear()
            try:
                parts = _run(bare, given, splits, devices, called)
            except _Differs as found:
                place = found.path.rpartition(".")[0]  # the code around the module brought it there
                fact = f"hands {found.path} a tensor of {_text(found.shape)} where {_text(found.wanted)} is expected"
                return Reason(place, f"its code {fact}")
            except Exception as error:
                first = " ".join(str(error).strip().splitlines()[:1])
                return Reason(called[-1] if called else "", f"its code fails on a part of its input: {first}")
    return _difference(whole, parts, planned)


def _difference(whole: "list[_Made]", parts: "list[_Made]", planned: LocalShapes) -> Reason | None:
    """The first tensor that is not what a device should hold."""
    for (module, name, shape), (where, other, local) in zip(whole, parts, strict=False):
        if (module, name) != (where, other):
            return Reason(where, f"its code goes another way on a part of its input ({other} instead of {name})")
        wanted = planned.get((module, shape), {shape, local})
        if local not in wanted:
            expected = " or ".join(map(_text, sorted(wanted)))
            return Reason(module, f"its code makes {_text(local)} of a part of its input, where {expected} is planned")
    return None if len(whole) == len(parts) else Reason("", "its code goes another way on local shapes")


_Made = tuple[str, str, Shape]  # module, operator, shape of a result


# what a reshape comes down to, one of them here and another there; the next operator sees what became of it
_ALIKE = ("view", "_unsafe_view", "clone", "expand", "alias", "detach", "_reshape_alias")


class _ShapeRecorder(TorchDispatchMode):
    """Every tensor that is made, with the module in which that happens."""

    def __init__(self, called: list[str]) -> None:
        super().__init__()
        self.called, self.made = called, list[_Made]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        where = self.called[-1] if self.called else ""
        name = func.overloadpacket.__name__
        if name not in _ALIKE:
            self.made += [(where, name, shape) for shape in _shapes(result)]
        return result


def _run(model: nn.Module, inputs: Any, splits: Sequence[ModuleSplit], devices: int, called: list[str]) -> list[_Made]:
    with _stubs(model, splits, devices), _ShapeRecorder(called) as recorder:
        outputs = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return [*recorder.made, *(("", "output", shape) for shape in _shapes(outputs))]


def without_data(model: nn.Module) -> nn.Module:
    """A copy with tensors that have none."""
    shared = {id(t): _bare(t) for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared).eval()


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    bare = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


def _shapes(outputs: Any) -> list[Shape]:
    return [tuple(x.shape) for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]


def _text(shape: Shape) -> str:
    return "×".join(map(str, shape))


@contextmanager
def _followed(model: nn.Module, called: list[str]) -> Iterator[None]:
    """`called`: the modules that are running, outermost first."""
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: called.append(name)))
        handles.append(module.register_forward_hook(lambda *_: called.pop() and None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _stubs(model: nn.Module, splits: Sequence[ModuleSplit], devices: int) -> Iterator[None]:
    modules = dict(model.named_modules())
    replaced: list[nn.Module] = []
    for split in splits:
        if split.kind != OTHER and split.path in modules:
            modules[split.path].forward = _stub(split, devices)  # type: ignore[method-assign]
            replaced.append(modules[split.path])
    try:
        yield
    finally:
        for module in replaced:
            module.__dict__.pop("forward", None)


def _stub(split: ModuleSplit, devices: int) -> Callable[..., torch.Tensor]:
    wanted = _local(split.input_shape, split.found, devices)
    result = _local(split.result_shape, split.left, devices)
    dtype = getattr(torch, split.result_dtype)

    def forward(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if tuple(x.shape) != wanted:
            raise _Differs(split.path, tuple(x.shape), wanted)
        return torch.empty(result, dtype=dtype)

    return forward


def _local(shape: Shape, state: State, devices: int) -> Shape:
    return local_shape(shape, (state,), (devices,)) if devices > 1 else shape
