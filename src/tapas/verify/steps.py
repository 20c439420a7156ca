"""A few training steps: what the original and each rank do alike, what they have afterwards and how much memory they
took."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tapas._torch import RESIZE_MEMORY, TorchDispatchMode, pytree
from tapas.ir.graph import Graph
from tapas.runtime.collectives import Count

# A gradient that is zero but for rounding must not become a step of full length: hence the large eps.
RATE, EPSILON = 1e-3, 1e-5


@dataclass
class Outcome:
    """What one rank (or the original) has after its steps; a rank has its parts only."""

    outputs: list[torch.Tensor] = field(default_factory=list)  # of the first step
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first step
    losses: list[float] = field(default_factory=list)
    projected: dict[str, torch.Tensor] = field(default_factory=dict)  # gradients through all outputs, after all steps
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # after the last step
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # those that are written to, at the very end
    sent: Count = field(default_factory=Count)  # in the first step
    peak_nbytes: int = 0  # of memory, in the last step


def part_of(x: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    from torch.distributed.tensor import DTensor

    return x.to_local() if isinstance(x, DTensor) else x


def local(x: torch.Tensor) -> torch.Tensor:
    """The same as plain numbers."""
    x = part_of(x).detach()
    return x.to_dense() if x.is_sparse else x


class Allocated(TorchDispatchMode):
    """While active, follows `nbytes` and its `peak`: storages of `held` and of all that operators return, but for
    those of `others`."""

    def __init__(self, held: Iterable[torch.Tensor], others: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.alive = {local(tensor).untyped_storage()._cdata: 0 for tensor in others}  # bytes by storage
        self.nbytes = self.peak = 0
        for tensor in held:
            self.see(local(tensor))

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number not in self.alive:
            self.alive[number] = 0
            self.resize(number, storage.nbytes())
            weakref.finalize(storage, self.gone, number).atexit = False

    def resize(self, number: int, nbytes: int) -> None:
        self.nbytes += nbytes - self.alive[number]
        self.alive[number] = nbytes
        self.peak = max(self.peak, self.nbytes)

    def gone(self, number: int) -> None:
        self.nbytes -= self.alive.pop(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is RESIZE_MEMORY:
            self.resize(args[0].untyped_storage()._cdata, args[1])
        made = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(made):
            if type(value) is torch.Tensor and not value.is_sparse:
                self.see(value)
        return made


def whole(_: int, x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Stepper:
    """A program that can be trained, on one rank or whole."""

    graph: Graph
    forward: Callable[[], Sequence[torch.Tensor]]  # the graph's outputs; buffers are written
    parameters: Mapping[str, torch.Tensor]  # that get a gradient, by tensor name
    buffers: Callable[[], Mapping[str, torch.Tensor]] = dict  # those that are written to, as they are now
    share: Callable[[int, torch.Tensor], torch.Tensor] = whole  # what the rank has of a tensor laid out as an output is
    count: Count | None = None
    held: Sequence[torch.Tensor] = ()  # what takes memory besides the parameters
    inputs: Sequence[torch.Tensor] = ()  # what does not: it is the caller's

    def planned(self) -> list[int]:
        """Outputs that the planned step takes gradients from."""
        return self._places(self.graph.losses)

    def others(self) -> list[int]:
        """All that gradients can be taken from, if these are more."""
        wanted = {name for name, leaving in self.graph.leaving.items() if leaving.gradient}
        return self._places(wanted) if wanted > self.graph.losses else []

    def _places(self, names: Iterable[str]) -> list[int]:
        return sorted(self.graph.outputs.index(name) for name in names)

    def backward(self, outputs: Sequence[torch.Tensor], places: Sequence[int]) -> None:
        """From the loss alone, or from numbers that are as good as any."""
        starts = [(i, x) for i in places if (x := part_of(outputs[i])).requires_grad]
        alone = [self.graph.outputs[i] for i in places] == [self.graph.loss]
        gradients = [torch.ones_like(x) if alone else self._projection(i, x) for i, x in starts]
        if starts:
            torch.autograd.backward([x for _, x in starts], gradients)
        for parameter in self.parameters.values():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    def _projection(self, place: int, x: torch.Tensor) -> torch.Tensor:
        shape = self.graph.tensors[self.graph.outputs[place]].shape
        wide = torch.complex128 if x.is_complex() else torch.float64
        numbers = torch.randn(shape, dtype=wide, generator=torch.Generator().manual_seed(place))
        return self.share(place, numbers / max(numbers.numel(), 1) ** 0.5).to(x)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: local(p.grad).clone() for name, p in self.parameters.items() if p.grad is not None}


def take_steps(stepper: Stepper, steps: int) -> Outcome:
    """Forward, backward and optimizer steps; without anything to train it runs once."""
    made = Outcome()
    if not stepper.planned() or not stepper.parameters:
        with torch.no_grad(), Allocated((*stepper.held, *stepper.parameters.values()), stepper.inputs) as memory:
            outputs = stepper.forward()
        made.outputs, made.peak_nbytes = [local(x).clone() for x in outputs], memory.peak
        made.sent = _copied(stepper.count)
    else:
        _train(stepper, steps, made)
    made.buffers = {name: local(value).clone() for name, value in stepper.buffers().items()}
    return made


def _train(stepper: Stepper, steps: int, made: Outcome) -> None:
    parameters, loss_at = stepper.parameters, stepper.graph.loss_position
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, eps=EPSILON)
    for number in range(max(steps, 1)):
        optimizer.zero_grad()
        state = [value for kept in optimizer.state.values() for value in kept.values() if torch.is_tensor(value)]
        with Allocated((*stepper.held, *parameters.values(), *state), stepper.inputs) as memory:
            outputs = stepper.forward()
            stepper.backward(outputs, stepper.planned())
        if number == 0:
            made.outputs = [local(x).clone() for x in outputs]
            made.gradients = stepper.gradients()
            made.sent = _copied(stepper.count)
        if loss_at is not None:
            made.losses.append(float(local(outputs[loss_at])))
        made.peak_nbytes = memory.peak if state else 0  # the first step has no state yet
        del outputs
        if steps:
            optimizer.step()
    made.weights = {name: local(p).clone() for name, p in parameters.items()}
    if others := stepper.others():
        optimizer.zero_grad()
        stepper.backward(stepper.forward(), others)
        made.projected = stepper.gradients()


def _copied(count: Count | None) -> Count:
    return count.copy() if count is not None else Count()
