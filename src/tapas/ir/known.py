"""What capture read out of integers that a model is given, and the small program that reads it again at every call.

A graph is made for sizes and branches; where those come from values of inputs (grids, lengths, where images stand in a
text), it holds for inputs of which the same is read. Reading is a few operators on small whole tensors, on the host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tapas.errors import TapasError
from tapas.ir.graph import Op
from tapas.ir.interpreter import call


@dataclass(frozen=True, slots=True)
class KnownLeaf:
    """A tensor that was read, or from which what was read is computed."""

    tensor: str  # its name in the program
    kind: str  # "input", "buffer" or "constant"
    path: str


@dataclass(frozen=True, slots=True)
class KnownRead:
    """At this point of the program: a tensor whose values, or whose size, decided something."""

    tensor: str
    place: str  # of the model
    expected: torch.Tensor
    sized: bool = False  # only its size counts
    asserted: bool = False  # the model itself insists on it


@dataclass(frozen=True)
class KnownProgram:
    leaves: tuple[KnownLeaf, ...] = ()
    steps: tuple[Op | KnownRead, ...] = ()
    constants: tuple[tuple[str, torch.Tensor], ...] = ()  # by name in the program

    @property
    def reads(self) -> list[KnownRead]:
        return [step for step in self.steps if isinstance(step, KnownRead)]

    def check(self, values: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Raise if something else is read of these values, which are given by kind and path."""
        if not self.steps:
            return
        known: dict[str, torch.Tensor] = {name: value.clone() for name, value in self.constants}
        for leaf in self.leaves:
            if leaf.kind != "constant":
                known[leaf.tensor] = values[leaf.kind, leaf.path].detach().to("cpu", copy=True)
        with torch.no_grad():
            for step in self.steps:
                if isinstance(step, KnownRead):
                    _compare(step, known[step.tensor], self.sources)
                else:
                    known.update(zip(step.results, call(step, known), strict=True))

    @property
    def sources(self) -> list[str]:
        """The names of the inputs and buffers."""
        return [leaf.path for leaf in self.leaves if leaf.kind != "constant"]

    def notes(self) -> tuple[str, ...]:
        """For whoever reads the plan."""
        reads = [read for read in self.reads if not read.asserted]
        made: list[str] = []
        if reads and self.sources:  # what a model computes from its own constants does not change
            places = list(dict.fromkeys(read.place for read in reads))
            more = f" and {len(places) - 1} more places" if len(places) > 1 else ""
            made.append(
                f"sizes or branches depend on the values of {', '.join(self.sources)} ({places[0]}{more}): the plan "
                "holds for those of the example inputs, which every call is compared with"
            )
        asserted = list(dict.fromkeys(read.place for read in self.reads if read.asserted))
        if asserted:
            made.append(f"checked at every call, as the model does: {_listed(asserted)}")
        return tuple(made)


NOTHING_READ = KnownProgram()


def _compare(read: KnownRead, value: torch.Tensor, sources: Sequence[str]) -> None:
    expected = read.expected
    if read.sized:
        if value.shape != expected.shape:
            raise _other(read, f"{tuple(value.shape)} is the size", f"{tuple(expected.shape)}", sources)
    elif value.shape != expected.shape or not _equal(value, expected):
        if read.asserted:
            remedy = f"look at {', '.join(sources)}: the model refuses these values"
            raise TapasError(read.place, "a check of the model's own fails on these inputs", remedy)
        raise _other(read, f"{_few(value)} is read", _few(expected), sources)


def _equal(value: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(value, expected)


def _other(read: KnownRead, fact: str, expected: str, sources: Sequence[str]) -> TapasError:
    remedy = f"give the planned values of {', '.join(sources)}, or plan again with these"
    return TapasError(read.place, f"{fact} of what the inputs give here, the plan was made for {expected}", remedy)


def _few(value: torch.Tensor) -> str:
    numbers = [number.item() for number in value.reshape(-1)[:4]]
    return str(numbers[0]) if value.numel() == 1 else f"{numbers}{'...' if value.numel() > 4 else ''}"


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
