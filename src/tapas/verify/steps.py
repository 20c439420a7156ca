"""A few training steps: what the original and each rank do alike, what they have afterwards and how much memory they
took."""

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tapas._torch import TorchDispatchMode, pytree
from tapas.capture.calls import Value
from tapas.errors import CaptureError
from tapas.ir.graph import Graph
from tapas.ir.interpreter import run
from tapas.runtime.collectives import Count
from tapas.verify.subject import Subject, silence
from tapas.verify.trial import Trial, lifted_value

# A gradient that is zero but for rounding must not become a step of full length: hence the large eps.
RATE, EPSILON = 1e-3, 1e-5


@dataclass
class Outcome:
    """What one rank (or the original) has after its steps; a rank has its parts only."""

    outputs: list[torch.Tensor] = field(default_factory=list)  # of the first step
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first step
    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # after the last step
    sent: Count = field(default_factory=Count)  # in the first step
    peak_nbytes: int = 0  # of memory, in the last step


def local(x: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return (x.to_local() if isinstance(x, DTensor) else x).detach()


class Allocated(TorchDispatchMode):
    """While active, follows `nbytes` and its `peak`: storages of `held` and of all that operators return, but for
    those of `others`."""

    def __init__(self, held: Iterable[torch.Tensor], others: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.alive = {local(tensor).untyped_storage()._cdata for tensor in others}
        self.nbytes = self.peak = 0
        for tensor in held:
            self.see(local(tensor))

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        number, size = storage._cdata, storage.nbytes()
        if number not in self.alive:
            self.alive.add(number)
            self.nbytes += size
            self.peak = max(self.peak, self.nbytes)
            weakref.finalize(storage, self.gone, number, size).atexit = False

    def gone(self, number: int, size: int) -> None:
        self.alive.discard(number)
        self.nbytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(made):
            if isinstance(value, torch.Tensor) and type(value) is torch.Tensor:
                self.see(value)
        return made


def take_steps(
    forward: Callable[[], Sequence[torch.Tensor]], parameters: Mapping[str, torch.Tensor], loss_at: int | None,
    steps: int, count: Count | None = None, held: Sequence[torch.Tensor] = (), inputs: Sequence[torch.Tensor] = (),
) -> Outcome:  # fmt: skip
    """`forward` returns the graph's outputs; without a loss it runs once and nothing is trained. `held`: what takes
    memory besides the parameters; `inputs` do not count, they are the caller's."""
    made = Outcome()
    if loss_at is None or not parameters:
        with torch.no_grad(), Allocated((*held, *parameters.values()), inputs) as memory:
            outputs = forward()
        made.outputs, made.peak_nbytes = [local(x).clone() for x in outputs], memory.peak
        made.sent = _copied(count)
        return made
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, eps=EPSILON)
    for number in range(max(steps, 1)):
        optimizer.zero_grad()
        state = [value for kept in optimizer.state.values() for value in kept.values() if torch.is_tensor(value)]
        with Allocated((*held, *parameters.values(), *state), inputs) as memory:
            outputs = forward()
            outputs[loss_at].backward()
        if number == 0:
            made.outputs = [local(x).clone() for x in outputs]
            made.gradients = {n: local(p.grad).clone() for n, p in parameters.items() if p.grad is not None}
            made.sent = _copied(count)
        made.losses.append(float(local(outputs[loss_at])))
        made.peak_nbytes = memory.peak if state else 0  # the first step has no state yet
        del outputs
        if steps:
            optimizer.step()
    made.weights = {name: local(p).clone() for name, p in parameters.items()}
    return made


def _copied(count: Count | None) -> Count:
    return Count(count.forward.copy(), count.backward.copy()) if count is not None else Count()


def replayed(trial: Trial) -> Outcome:
    """The captured graph as it is, on one device."""
    graph = trial.graph
    parameters = {name: trial.leaves[name].clone().requires_grad_() for name in trial.trained()}
    leaves = trial.leaves | parameters

    def forward() -> Sequence[torch.Tensor]:
        outputs = run(graph, leaves)
        leaves.update(written(graph, outputs))
        return outputs

    return take_steps(forward, parameters, graph.loss_position, trial.steps)


def written(graph: Graph, outputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What buffers are afterwards, by tensor name."""
    values = outputs[len(graph.returned) :]
    return {buffer: value.detach() for (buffer, _), value in zip(graph.writes, values, strict=True)}


def run_original(subject: Subject, steps: int) -> Outcome:
    """Forward, backward and optimizer steps of the module itself, in float32."""
    graph = subject.graph
    model = copy.deepcopy(subject.model).float()
    silence(model)
    inputs = {k: lifted_value(v, "float32") if isinstance(v, torch.Tensor) else v for k, v in subject.inputs.items()}
    named = dict(model.named_parameters(remove_duplicate=False))
    parameters = {leaf.tensor: named[leaf.paths[0]] for leaf in graph.trained()}
    return take_steps(lambda: _outputs(subject, model, model(**inputs)), parameters, graph.loss_position, steps)


def _outputs(subject: Subject, model: torch.nn.Module, made: Any) -> list[torch.Tensor]:
    """What the model returned, in the order of the graph's outputs."""
    flat = pytree.tree_leaves(made)
    values = subject.captured.output_values
    if len(flat) != len(values):
        raise CaptureError(
            type(subject.model).__name__,
            f"it returns {len(flat)} values where {len(values)} were captured",
            "let it return the same in every call",
        )
    tensors = {v.name: x for v, x in zip(values, flat, strict=True) if isinstance(v, Value)}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    written = [buffers[subject.graph.leaf_of[buffer].paths[0]].clone() for buffer, _ in subject.graph.writes]
    return [*(tensors[name] for name in subject.graph.returned), *written]
