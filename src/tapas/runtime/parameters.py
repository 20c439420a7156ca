"""A parameter as a program takes it, and as it gets its gradient."""

import torch
from torch.distributed.tensor import DTensor

from tapas._torch import accumulation_hooks, gradient_hooks, like_parameter, local_part


def stored_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, of which autograd knows nothing."""
    return part_of(parameter).detach()


def part_of(parameter: torch.Tensor) -> torch.Tensor:
    return local_part(parameter) if isinstance(parameter, DTensor) else parameter


def hand_over(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """As autograd does it for a parameter that it knows: hooks see the gradient, then the parameter."""
    made = gradient.contiguous()
    if isinstance(parameter, DTensor):  # as FSDP2 does it: from_local takes ten times as long
        made = like_parameter(made, parameter)
    for hook in gradient_hooks(parameter):
        changed = hook(made)
        made = made if changed is None else changed
    if parameter.grad is None:
        parameter.grad = made
    else:
        stored_part(parameter.grad).add_(stored_part(made))
    for hook in accumulation_hooks(parameter):
        hook(parameter)
