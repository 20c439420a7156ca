"""A stretch of a model's code that runs on real values: what it is given, reads, writes and makes (ir/regions.py)."""

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tapas._torch import checkpoints_patched, pytree, storages, writes_to
from tapas.capture.side_effects import PLAIN
from tapas.capture.stretches import Stretch
from tapas.ir.regions import OtherShape, Region, RegionResult, RegionSlot, Stage, Statements, numbered, register_region

_SEVERAL = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # of which the data may choose


class Odd(Exception):
    """Why a stretch cannot be a region: names that it makes, or is given, that are no tensors."""

    def __init__(self, why: str, made: Sequence[str] = (), given: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.made, self.given = made, given


class OddSizes(Odd):
    """It makes tensors of other sizes from other values."""


@dataclass(frozen=True)
class Given:
    """The values of names, flattened: tensors and modules by number."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    tensors: list[Tensor]
    modules: list[nn.Module]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Given":
        flat, spec = pytree.tree_flatten(dict(values))
        tensors: list[Tensor] = []
        modules: list[nn.Module] = []
        leaves = [_slot(leaf, tensors, modules) for leaf in flat]
        return cls(tuple(leaves), spec, tensors, modules)

    def like(self, region: Region) -> bool:
        """Whether the region was given the same when it ran, but for what tensors hold."""
        if self.spec != region.spec:
            return False
        return all(_alike(mine, other) for mine, other in zip(self.leaves, region.leaves, strict=True))

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers of the modules, as a Stage calls them."""
        found: dict[str, Tensor] = {}
        for number, module in enumerate(self.modules):
            for named in (module.named_parameters, module.named_buffers):
                found |= {f"parts.{number}.{path}": tensor for path, tensor in named(remove_duplicate=False)}
        return found


def _slot(leaf: Any, tensors: list[Tensor], modules: list[nn.Module]) -> Any:
    for kind, cls, found in (("tensor", Tensor, tensors), ("module", nn.Module, modules)):
        if isinstance(leaf, cls):
            if not any(leaf is other for other in found):
                found.append(leaf)  # type: ignore[arg-type]
            return RegionSlot(kind, next(number for number, other in enumerate(found) if other is leaf))
    return leaf


def _alike(mine: Any, other: Any) -> bool:
    if isinstance(mine, (RegionSlot, *PLAIN)) or isinstance(other, (RegionSlot, *PLAIN)):
        return type(mine) is type(other) and (mine == other or mine != mine)
    return type(mine) is type(other)


class _Touched(TorchFunctionMode):
    """Notes the tensors that code uses."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids.update(id(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))


def observed(stretch: Stretch, scope: Mapping[str, Any], place: str, any_size: bool) -> tuple[Any, str]:
    """What the stretch makes of the values of names, and the region that it is; Odd if it is none. `any_size`: also if
    other values give other sizes."""
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise Odd("runs in an autocast, which has to be part of it")
    statements = stretch.statements(list(scope))
    values = {name: scope[name] for name in statements.names}
    _check_given(values)
    given = Given.of(values)
    state, kept = given.state(), _Kept(stretch, given, values)
    drawn, foreign = _drawn(), _foreign_draws()
    with _Touched() as touched, _nothing_hidden():
        found = statements(values)
    if not _same_draws(foreign, _foreign_draws()):
        raise Odd("draws random numbers that are not torch's")
    written, buffers = kept.written(values)
    _check_made(found, statements)
    flat, returned = pytree.tree_flatten(found)
    now = given.state()
    tensors, made = numbered(flat)
    results = [*tensors, *(given.tensors[i] for i in written), *(now[path] for path in buffers)]
    if not results:
        raise Odd("makes nothing")
    used = _closed(state, touched.ids | {id(state[path]) for path in buffers}, given.modules)
    region = Region(
        place, statements, kept.stage, given.leaves, given.spec, tuple(used), written, buffers, returned, made,
        tuple(RegionResult(tuple(x.shape), x.dtype, x.requires_grad) for x in results),
        tuple(_shared(tensors, [*given.tensors, *(state[path] for path in used)])),
        not all(map(torch.equal, drawn, _drawn())),
    )  # fmt: skip
    kept.check(region, used, results, drawn)
    if not any_size:
        kept.check_sizes(region, used)
    return found, register_region(region)


@contextmanager
def _nothing_hidden() -> Iterator[None]:
    """Within, what reaches beyond a region is no part of one: hooks on tensors, gradients that are taken (a rank's
    tensors have gradients only where the plan needs them), and checkpoints, which run again when the modules have no
    weights any more."""

    def refused(*_: Any, **__: Any) -> Any:
        raise Odd("sets hooks, takes gradients, or has checkpoints")

    with ExitStack() as stack:
        for home, name in ((Tensor, "register_hook"), (torch.autograd, "backward"), (torch.autograd, "grad")):
            stack.enter_context(mock.patch.object(home, name, refused))
        stack.enter_context(checkpoints_patched(refused))
        yield


def _check_given(values: Mapping[str, Any]) -> None:
    odd = [name for name, value in values.items() if any(_holds_tensors(x) for x in pytree.tree_leaves(value))]
    if odd:
        raise Odd("is given objects that hold tensors", given=odd)


def _holds_tensors(leaf: Any, depth: int = 0, seen: set[int] | None = None) -> bool:
    """Whether an object is neither a tensor nor a module, and holds one."""
    if depth == 0 and isinstance(leaf, Tensor):
        return leaf.layout is not torch.strided
    if isinstance(leaf, nn.Module):
        return depth > 0
    if isinstance(leaf, (*PLAIN, type)) or depth > 5:
        return isinstance(leaf, torch.Generator)
    if isinstance(leaf, (Tensor, torch.Generator)):
        return True
    seen = set() if seen is None else seen
    if id(leaf) in seen:
        return False
    seen.add(id(leaf))
    return any(_holds_tensors(part, depth + 1, seen) for part in _parts(leaf))


def _parts(leaf: Any) -> Iterator[Any]:
    if isinstance(leaf, dict):
        yield from leaf.values()
    elif isinstance(leaf, (list, tuple, set)):
        yield from leaf
    elif hasattr(leaf, "__self__"):
        yield leaf.__self__
    elif getattr(leaf, "__closure__", None):
        yield from (cell.cell_contents for cell in leaf.__closure__)
    elif hasattr(leaf, "__dict__") and not callable(leaf):
        yield from vars(leaf).values()


def _check_made(found: Any, statements: Statements) -> None:
    """Tensors only: whatever else it makes may depend on their values."""
    named = found.items() if statements.returns is not None else [("", found)]
    plain = lambda leaf: leaf is None or isinstance(leaf, (Tensor, str))  # noqa: E731
    odd = [name for name, value in named if not all(map(plain, pytree.tree_leaves(value)))]
    if statements.returns is not None:
        odd += [name for name, value in found.items() if value is None]
    if odd:
        raise Odd("makes what is no tensor", made=odd)


def _closed(state: dict[str, Tensor], used: set[int], modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """What was used of the state, and all of a list of which something was: the data may choose. Each tensor once."""
    lists = []
    for number, module in enumerate(modules):
        lists += [f"parts.{number}.{path}" for path, part in module.named_modules() if isinstance(part, _SEVERAL)]
    touched = [path for path, tensor in state.items() if id(tensor) in used]
    whole = [f"{path}." for path in lists if any(t.startswith(f"{path}.") for t in touched)]
    once: dict[int, str] = {}
    for path, tensor in state.items():
        if id(tensor) in used or path.startswith(tuple(whole)):
            once.setdefault(id(tensor), path)
    return {path: state[path] for path in once.values()}


def _shared(results: Sequence[Tensor], operands: Sequence[Tensor]) -> Iterator[int]:
    """Operands whose memory is a result's, too."""
    memory = set(storages(results))
    yield from (number for number, where in enumerate(storages(operands)) if where in memory)


def _drawn() -> list[Tensor]:
    """The states of torch's generators."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def _draw_from(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])


def _foreign_draws() -> Any:
    return np.random.get_state(legacy=False), random.getstate()


def _same_draws(one: Any, other: Any) -> bool:
    return repr(one[0]) == repr(other[0]) and one[1] == other[1]


class _Kept:
    """What a stretch is given, as it was before."""

    def __init__(self, stretch: Stretch, given: Given, values: Mapping[str, Any]) -> None:
        self.stretch, self.given, self.state = stretch, given, given.state()
        self.leaves = {name: _identities(value) for name, value in values.items()}
        memo: dict[int, Any] = {id(tensor): _empty(tensor) for tensor in self.state.values()}
        try:
            self.stage = Stage(copy.deepcopy(given.modules, memo))
        except Exception as error:  # whatever its parts do not like about it
            raise Odd(f"uses a module that cannot be copied: {error}") from None
        self.tensors = [tensor.detach().clone() for tensor in given.tensors]
        self.held = {path: tensor.detach().clone() for path, tensor in self.state.items() if not _trained(tensor)}
        self.versions = list(map(writes_to, (*given.tensors, *self.state.values())))
        self.contents = [_contents(vars(m)) for module in given.modules for m in module.modules()]

    def written(self, values: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Operands and buffers that were written to; Odd if something else was."""
        changed = [name for name, before in self.leaves.items() if before != _identities(values[name])]
        if odd := [name for name in changed if not self.stretch.own(name)]:
            raise Odd("changes a list or a dict", made=odd)
        if self.contents != [_contents(vars(m)) for module in self.given.modules for m in module.modules()]:
            raise Odd("sets attributes of a module")
        count = len(self.given.tensors)
        versions = list(map(writes_to, (*self.given.tensors, *self.state.values())))
        differ = [before != after for before, after in zip(self.versions, versions, strict=True)]
        written = tuple(number for number in range(count) if differ[number])
        now = self.given.state()
        held = {path: differ[count + number] for number, path in enumerate(self.state)}
        buffers = tuple(path for path, tensor in self.state.items() if held[path] or now.get(path) is not tensor)
        if any(_trained(self.state[path]) for path in buffers):
            raise Odd("writes to a parameter")
        self._check_memory(written, buffers)
        return written, buffers

    def _check_memory(self, written: Sequence[int], buffers: Sequence[str]) -> None:
        """What is written is copied first: nobody else may have that memory."""
        everything = [*self.given.tensors, *({id(t): t for t in self.state.values()}.values())]
        memory = storages(everything)
        own = storages([*(self.given.tensors[i] for i in written), *(self.state[path] for path in buffers)])
        if any(memory.count(where) > 1 for where in own):
            raise Odd("writes to memory that several tensors share")

    def check(self, region: Region, used: Mapping[str, Tensor], results: Sequence[Tensor], drawn: list[Tensor]) -> None:
        """Whether the region makes the same of the same, and has a backward pass: one that looks at modules would find
        them without weights."""
        sources = [*self.given.tensors, *used.values()]
        values = [*self.tensors, *(self.held.get(path, tensor) for path, tensor in used.items())]
        operands = [v.detach().requires_grad_(x.requires_grad) for v, x in zip(values, sources, strict=True)]
        trained = [i for i, x in enumerate(sources) if x.requires_grad and i not in region.written]
        after = _drawn()
        _draw_from(drawn)
        try:
            again = region.run(operands)
            _differentiate(again, [operands[i] for i in trained])
        except Exception as error:
            raise Odd(f"does not run by itself: {error}") from error
        finally:
            _draw_from(after)
        if not all(torch.allclose(a, b, equal_nan=True) for a, b in zip(again, results, strict=True)):
            raise Odd("makes other values when it runs by itself")

    def check_sizes(self, region: Region, used: Mapping[str, Tensor]) -> None:
        """Whether other activations give other sizes, as far as a few can tell."""
        state = [self.held.get(path, tensor).detach() for path, tensor in used.items()]
        loose = replace(region, results=tuple(replace(r, trained=True) for r in region.results))
        generator = torch.Generator().manual_seed(0)
        for other in _OTHERS:
            operands = [other(x, generator) if _depends(x) else x for x in self.tensors]
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]):
                    loose.run([*operands, *state])
            except OtherShape as error:
                raise OddSizes("sizes", made=self._names(region, error.result)) from None
            except Exception:  # it need not take such values
                continue

    def _names(self, region: Region, result: int) -> list[str]:
        """Those of which a result is a part."""
        if self.stretch.returning:
            return []
        filled = region.filled(list(range(len(region.results))))  # type: ignore[arg-type]
        return [name for name, value in filled.items() if result in pytree.tree_leaves(value)]


def _differentiate(results: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    trained = [x for x in results if x.requires_grad]
    if trained and sources:
        torch.autograd.grad(trained, sources, [torch.ones_like(x) for x in trained], allow_unused=True)


def _depends(x: Tensor) -> bool:
    """Integers are mostly sizes, indices and labels, which must be what they are."""
    return x.is_floating_point() or x.dtype is torch.bool


def _permuted(x: Tensor, generator: torch.Generator) -> Tensor:
    return x.reshape(-1)[torch.randperm(x.numel(), generator=generator)].view(x.shape)


# Values in place of those of the example: true and false, all of one sign, and in another order.
_OTHERS = (
    lambda x, _: torch.ones_like(x) if x.dtype is torch.bool else x.abs(),
    lambda x, _: torch.zeros_like(x) if x.dtype is torch.bool else -x.abs(),
    lambda x, _: ~x if x.dtype is torch.bool else -x,
    _permuted,
)


def _identities(value: Any) -> tuple[Any, list[int]]:
    flat, spec = pytree.tree_flatten(value)
    return spec, list(map(id, flat))


def _empty(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _contents(attributes: Mapping[str, Any]) -> list[Any]:
    """Attributes by identity, and what lists and dicts among them hold; buffers are looked at by themselves."""
    found: list[Any] = []
    for name, value in attributes.items():
        if name != "_buffers":
            inside = tuple(map(id, _parts(value))) if isinstance(value, (list, dict, set)) else ()
            found.append((name, id(value), inside))
    return found
