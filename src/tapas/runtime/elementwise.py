"""Does an optimizer update every element of a tensor by itself? It is tried, on a small one, whole and cut in two.

One that does may work on a rank's part of a parameter as if that were all of it. Each part has its own optimizer here,
as each rank has one; what is compared is the parameter after some steps, and all that the optimizers remember.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

SCALES = (1.0, 100.0, 0.01, 1.0, 30.0, 1.0)  # of the gradient in each step: some clip the large ones
LEARNING_RATE = 0.01  # schedules set it to anything, also to zero, with which all are alike
Make = Callable[[nn.Parameter], Optimizer]
State = dict[str, Any]


@dataclass(frozen=True)
class Behaviour:
    """What was seen of an optimizer."""

    objection: str  # why it cannot work on parts; "": it can
    elementwise_state: frozenset[str] = frozenset()  # has an element for each one of the parameter


def unhooked_step(optimizer: Optimizer) -> Callable[..., Any]:
    """An optimizer's step without the hooks that users set for all optimizers: it is none of theirs."""
    step: Any = type(optimizer).step
    return (step.__wrapped__ if getattr(step, "hooked", False) else step).__get__(optimizer)


def try_out(make: Make, dims: int, device: torch.device) -> Behaviour:
    """`make`: an optimizer for a parameter; `dims`: how many it has."""
    shape = [max(5 - dim, 2) for dim in range(dims)]
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (
        (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device) for scale in (1.0, *SCALES)
    )
    cpu = device.type == "cpu"
    with torch.random.fork_rng([] if cpu else [device], device_type="cuda" if cpu else device.type):
        try:
            whole, remembered = _trained(make, start, gradients)
            alike = frozenset(key for key, value in remembered.items() if _shape(value) == start.shape)
            for dim in range(dims):
                cut = zip(*(x.chunk(2, dim) for x in (start, *gradients)), strict=True)
                parts = [_trained(make, first, rest) for first, *rest in cut]
                if not _close(whole, torch.cat([part for part, _ in parts], dim)):
                    return Behaviour(f"it changes a tensor cut along dim {dim} in another way than a whole one", alike)
                if wrong := _differing(remembered, [state for _, state in parts], alike, dim):
                    return Behaviour(f"its {wrong} is another for a tensor cut along dim {dim}", alike)
        except Exception as error:  # anything can happen in it; where it is not needed, it may stay unknown
            return Behaviour(f"it cannot be tried on small tensors ({type(error).__name__}: {error})")
    return Behaviour("", alike)


def _trained(make: Make, start: torch.Tensor, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, State]:
    parameter = nn.Parameter(start.clone(memory_format=torch.contiguous_format))
    optimizer = make(parameter)
    step = unhooked_step(optimizer)
    for gradient in gradients:
        loss = gradient.new_ones(())  # all ranks have the same

        def closure(gradient: torch.Tensor = gradient, loss: torch.Tensor = loss) -> torch.Tensor:
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
            return loss

        closure()
        step(closure)
    return parameter.detach(), dict(optimizer.state.get(parameter, {}))


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, torch.Tensor) else None


def _close(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and torch.allclose(one, two, rtol=1e-7, atol=1e-10, equal_nan=True)


def _differing(whole: State, parts: Sequence[State], alike: frozenset[str], dim: int) -> str | None:
    """What is not remembered of the parts as it is of the whole."""
    for key, value in whole.items():
        values: list[Any] = [part.get(key) for part in parts]
        if key in alike:
            same = _close(value, torch.cat(values, dim))
        elif isinstance(value, torch.Tensor):
            same = all(isinstance(other, torch.Tensor) and _close(value, other) for other in values)
        else:
            same = value is None or (
                isinstance(value, bool | int | float | str) and all(value == other for other in values)
            )
        if not same:
            return key
    return next((key for part in parts for key in part if key not in whole), None)
