"""What the kernels share: reading a call, sums over axes, global indices as local ones.

The process groups that sum come from the runtime, as `Comm`s.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from tapas._torch import schema_arguments
from tapas.ir.interpreter import argument, resolve
from tapas.rules.base import Local


class Comm(Protocol):
    """The ranks that differ along one axis only, as seen by one of them."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    @property
    def number(self) -> int:
        """By which operators find it (runtime/numbered.py)."""
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """P to R: the sum over the axis; the gradient passes unchanged."""
        ...

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """R to B: the value passes unchanged; the gradient is summed over the axis."""
        ...

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """The largest over the axis, element by element; no gradient."""
        ...

    def exchange(self, x: torch.Tensor, sent: list[int], received: list[int], back: bool = False) -> torch.Tensor:
        """So many rows to each rank, and so many from each; gradients go the other way. Bytes are counted where rows
        are at home, which is where they come from or where they come `back` to: who visits a rank is not planned."""
        ...

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """The maximum, which a selective block need not look for again."""
        ...

    def checked(self, x: torch.Tensor, wrong: torch.Tensor, fact: str, remedy: str) -> torch.Tensor:
        """x, unless something is wrong: then this is an error, on GPUs one that comes later."""
        ...

    def borders(self, x: torch.Tensor, sent: list[int], received: list[int], kept: bool) -> torch.Tensor:
        """An exchange with the neighbours. `kept`: a selective block need not do it again."""
        ...

    def pass_on(self, parts: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], phase: str) -> Any:
        """To the next rank, which has them in `arriving` after wait() on what is returned; no gradient."""
        ...


Comms = Mapping[int, Comm]
Pieces = Sequence[tuple[int, int]]


@torch.compiler.assume_constant_result  # its tracer cannot read schemas
def _arguments(target: str) -> tuple[tuple[str, Any], ...]:
    """An operator's arguments and their defaults."""
    return schema_arguments(resolve(target))


class Reader:
    """A call's arguments by their names in the schema: defaults, operands and dtypes filled in."""

    def __init__(self, local: Local, operands: Sequence[torch.Tensor]) -> None:
        self.operands, self.operator = operands, resolve(local.call.target)
        defaults = dict(_arguments(local.call.target))
        self.values = defaults | dict(zip(defaults, local.call.args, strict=False)) | dict(local.call.kwargs)

    def __call__(self, name: str) -> Any:
        return argument(self.values.get(name), self.operands)

    def run(self, /, **changed: Any) -> Any:
        """The operator itself, some of its arguments changed."""
        return self.operator(**({name: self(name) for name in self.values} | changed))


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in, as the operators themselves do."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def axes_of(local: Local, factors: Iterable[str]) -> tuple[int, ...]:
    wanted = set(factors)
    return tuple(axis for axis, name in enumerate(local.choice) if name in wanted)


def total(comms: Comms, axes: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    """P to R: summed, for work that every rank does in the same way."""
    for axis in axes:
        x = comms[axis].sum(x)
    return x


def copied(comms: Comms, axes: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    """R to B: for work of which every rank does a part, so that gradients are summed."""
    for axis in axes:
        x = comms[axis].copy(x)
    return x


def shared(comms: Comms, axes: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    """P to B: summed, for work of which every rank does a part."""
    return copied(comms, axes, total(comms, axes, x))


def largest(comms: Comms, axes: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    for axis in axes:
        x = comms[axis].maximum(x)
    return x


def positions(pieces: Pieces, device: torch.device) -> torch.Tensor:
    """The global indices that a rank holds."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in pieces])


def localize(index: torch.Tensor, pieces: Pieces) -> tuple[torch.Tensor, torch.Tensor]:
    """Global indices as positions in what this rank holds (0 for foreign ones), and which are held."""
    place, mine, offset = torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool), 0
    for start, stop in pieces:
        inside = (index >= start) & (index < stop)
        place = torch.where(inside, index - start + offset, place)
        mine, offset = mine | inside, offset + stop - start
    return place, mine


def empty_results(local: Local, operands: Sequence[torch.Tensor]) -> Any:
    """All results of an operator on a rank that got no work of it."""
    results = tuple(nothing(local, operands, i) for i in range(len(local.call.results)))
    return results[0] if len(results) == 1 else results


def nothing(local: Local, operands: Sequence[torch.Tensor], index: int = 0) -> torch.Tensor:
    """The result of a rank that got no work: zeros, of which gradients (also zero) still flow."""
    tied = [x for x in operands if x.requires_grad]
    dtype = getattr(torch, local.call.results[index].dtype)
    zeros = torch.zeros(local.result_shape(index), dtype=dtype, device=operands[0].device)
    for x in tied:
        zeros = zeros + x.reshape(-1)[:0].sum().to(dtype)
    return zeros
