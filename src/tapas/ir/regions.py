"""Regions: stretches of a model's own code that stay whole, as one operator, `tapas.region`.

Where control flow or sizes depend on the values of activations there are no operators to plan. Such statements run as
they were written, on whole tensors on every rank; autograd follows them as it does in the model. The operator names the
region, its operands are the tensors that the statements read, and the weights and buffers of the modules that they use;
its results are the tensors that they make, and new values of those that they write to.
"""

# torch gives its decorators no types.
# pyright: reportUnknownMemberType=false

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from tapas._torch import pytree, storages, writes_to
from tapas.errors import GraphError, TapasError

REGION = "tapas.region.default"


@dataclass(frozen=True, slots=True)
class RegionSlot:
    """Stands among the values that a region is given for an operand, or for a module."""

    kind: str  # "tensor" or "module"
    number: int


@dataclass(frozen=True, slots=True)
class RegionResult:
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool  # a gradient comes back through it


def numbered(values: Sequence[Any]) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The tensors among some values, and the values with Slots for them."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    numbers = iter(range(len(tensors)))
    return tensors, tuple(
        RegionSlot("tensor", next(numbers)) if isinstance(value, Tensor) else value for value in values
    )


@dataclass(frozen=True)
class Statements:
    """Python code as a function of the names that it reads."""

    source: str
    home: str  # the module whose globals it sees
    names: tuple[str, ...]
    returns: tuple[str, ...] | None  # the names that are read afterwards; None: what it returns

    @cached_property
    def function(self) -> Callable[..., Any]:
        from importlib import import_module

        scope = vars(import_module(self.home))
        made: dict[str, Any] = {}
        exec(compile(self.source, f"<a region of {self.home}>", "exec"), scope, made)  # the model's own code
        return cast(FunctionType, made["region"])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "function"}

    def __call__(self, values: dict[str, Any]) -> Any:
        """By name those of `returns` that it binds, or what it returns."""
        found = self.function(**values)
        if self.returns is None:
            return found
        return {name: found[name] for name in self.returns if name in found}


class OtherShape(TapasError):
    """A result of a region has another shape than it had."""

    def __init__(self, result: int, error: TapasError) -> None:
        super().__init__(error.place, error.fact, error.remedy)
        self.result = result


class Stage(nn.Module):
    """Modules without weights, which the region's operands are lent to."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, region: "Region", tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        leaves = [self._filled(leaf, tensors) for leaf in region.leaves]
        found = region.statements(pytree.tree_unflatten(leaves, region.spec))
        return found, [self.get_buffer(path) for path in region.buffers]

    def _filled(self, leaf: Any, tensors: Sequence[Tensor]) -> Any:
        if not isinstance(leaf, RegionSlot):
            return leaf
        return tensors[leaf.number] if leaf.kind == "tensor" else self.parts[leaf.number]


@dataclass(frozen=True)
class Region:
    place: str
    statements: Statements
    stage: Stage
    leaves: tuple[Any, ...]  # what the names are given, flattened, with Slots for tensors and modules
    spec: pytree.TreeSpec
    state: tuple[str, ...]  # weights and buffers of the stage: the last operands
    written: tuple[int, ...]  # operands that are written to: the results after those of `returned`
    buffers: tuple[str, ...]  # those of the state that are: the results after these
    returned: pytree.TreeSpec  # of what is bound or returned
    made: tuple[Any, ...]  # that, flattened: Slots for the first results, and what is no tensor
    results: tuple[RegionResult, ...]
    shared: tuple[int, ...]  # operands whose memory is a result's, too
    random: bool
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # what its code runs within
    apart: bool = False  # one of its results or operands is written to later on: they must not share memory

    def run(self, operands: Sequence[Tensor]) -> list[Tensor]:
        count = len(operands) - len(self.state)
        given = [x.clone() if i in self.written else x for i, x in enumerate(operands[:count])]
        lent = dict(zip(self.state, operands[count:], strict=True))
        lent |= {path: lent[path].clone() for path in self.buffers}
        watched = [x for i, x in enumerate(given) if i not in self.written]
        watched += [x for path, x in lent.items() if path not in self.buffers] + self._unread
        before = list(map(writes_to, watched))
        with _lending:  # ranks may be threads, which share the stage
            found, buffers = self._called(given, lent)
        if before != list(map(writes_to, watched)):
            raise self._other("writes to a tensor that it did not write to")
        values, spec = pytree.tree_flatten(found)
        tensors, made = numbered(values)
        if spec != self.returned or made != self.made:
            raise self._other("makes other things than it made")
        if self.apart and not set(storages(tensors)).isdisjoint(storages([*given, *lent.values()])):
            raise self._other(
                "returns what it was given, which is written to later, where it returned a tensor of its own"
            )
        return self._checked([*tensors, *(given[i] for i in self.written), *buffers])

    def only_reads(self, operands: Sequence[Any]) -> list[Any]:
        """Those of its operands that it does not write to."""
        count = len(operands) - len(self.state)
        given = [x for i, x in enumerate(operands[:count]) if i not in self.written]
        return given + [x for path, x in zip(self.state, operands[count:], strict=True) if path not in self.buffers]

    def filled(self, results: Sequence[Tensor]) -> Any:
        """What is bound or returned, of such results."""
        return pytree.tree_unflatten(
            [results[x.number] if isinstance(x, RegionSlot) else x for x in self.made], self.returned
        )

    @cached_property
    def _unread(self) -> list[Tensor]:
        """Of the stage, what it did not read, without data."""
        held = (*self.stage.named_parameters(), *self.stage.named_buffers())
        return [tensor for path, tensor in held if path not in self.state]

    def _called(self, given: Sequence[Tensor], lent: dict[str, Tensor]) -> tuple[Any, list[Tensor]]:
        try:
            with self.around():
                return torch.func.functional_call(self.stage, lent, (self, given))
        except (NotImplementedError, RuntimeError) as error:
            if "meta" in str(error):
                raise self._other("reads a weight that it did not read") from error
            raise

    def _checked(self, results: list[Tensor]) -> list[Tensor]:
        for number, (result, wanted) in enumerate(zip(results, self.results, strict=True)):
            if tuple(result.shape) != wanted.shape:
                fact = f"makes a tensor of shape {tuple(result.shape)} that was one of {wanted.shape}"
                raise OtherShape(number, self._other(fact))
            if result.is_meta:
                raise self._other("reads a weight that it did not read")
            if result.requires_grad and not wanted.trained:
                raise self._other("makes a tensor with a gradient that had none")
        return results

    def _other(self, fact: str) -> TapasError:
        remedy = "give inputs of which it makes the same, or write it with fixed sizes: masks, torch.where, topk"
        return TapasError(self.place, f"this code, which stays whole, {fact} when the plan was made", remedy)


_lending = threading.RLock()
_regions: dict[str, Region] = {}


def register_region(region: Region) -> str:
    """Under a name of its own, which graphs say."""
    name = f"{region.place}#{len(_regions)}"
    _regions[name] = region
    return name


def keep_apart(name: str) -> None:
    """From now on it is refused to return what it was given."""
    _regions[name] = replace(_regions[name], apart=True)


def region_named(name: str) -> Region:
    if name not in _regions:
        raise GraphError(name, "this code is not known in this process", "verify in one process (in_process=True)")
    return _regions[name]


def with_regions(regions: dict[str, Region]) -> None:
    """Those of another process."""
    _regions.update(regions)


@torch.compiler.disable
def apply_region(tensors: Sequence[Tensor], name: str) -> list[Tensor]:
    """What the operator does: the statements themselves, gradients included."""
    return region_named(name).run(tensors)


@torch.library.custom_op("tapas::region", mutates_args=())
def _operator(tensors: list[Tensor], name: str) -> list[Tensor]:
    return [result.detach().clone() for result in region_named(name).run(tensors)]


@_operator.register_fake
def _(tensors: list[Tensor], name: str) -> list[Tensor]:
    results = region_named(name).results
    return [tensors[0].new_empty(result.shape, dtype=result.dtype) for result in results]
