"""A few training steps: what the original and each rank do alike, and what they have afterwards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tapas.ir.interpreter import run
from tapas.runtime.collectives import Count
from tapas.verify.allocation import Allocated
from tapas.verify.job import Trial

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


def loss_position(trial: Trial) -> int | None:
    graph = trial.graph
    return graph.outputs.index(graph.loss) if graph.loss is not None else None


def replayed(trial: Trial) -> Outcome:
    """The captured graph as it is, on one device."""
    graph = trial.graph
    parameters = {name: trial.leaves[name].clone().requires_grad_() for name in trial.trained()}
    leaves = {name: value for name, value in trial.leaves.items() if name not in trial.made} | parameters
    return take_steps(lambda: run(graph, leaves), parameters, loss_position(trial), trial.steps)
