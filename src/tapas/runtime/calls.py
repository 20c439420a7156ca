"""Operators of a program that are more than a call of torch's own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tapas.rules.base import Local, Rule
from tapas.runtime.kernels import kernel_function


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


class KernelCall(nn.Module):
    """A sharded implementation with its own small collectives."""

    def __init__(self, rule: Rule, local: Local, comms: Mapping[int, Any]) -> None:
        super().__init__()
        assert rule.kernel is not None
        self.function, self.local, self.comms = kernel_function(rule.kernel), local, comms
        # autocast knows the operators, but not our implementations of them
        self.dtypes = [dtype_of(t.dtype) for t in local.call.operands] if rule.full_precision else []

    def forward(self, *operands: torch.Tensor) -> Any:
        if self.dtypes and torch.is_autocast_enabled(operands[0].device.type):
            operands = tuple(x.to(dtype) for x, dtype in zip(operands, self.dtypes, strict=True))
        return self.function(self.local, self.comms, *operands)


class Nothing(nn.Module):
    """A rank that got nothing of an operator does not call it: not every one takes empty shards."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.shapes, self.dtypes = tuple(shapes), tuple(dtypes)

    def forward(self, *operands: torch.Tensor) -> Any:
        made = [operands[0].new_zeros(s, dtype=d) for s, d in zip(self.shapes, self.dtypes, strict=True)]
        # stays in the graph, so that gradients of the operands exist on every rank
        floating = [o for o in operands if o.requires_grad]
        made = [m + 0 * sum(o.sum() for o in floating) if floating and m.is_floating_point() else m for m in made]
        return made[0] if len(made) == 1 else made


class RandomCall(nn.Module):
    """Draws the same numbers on ranks that hold the same shard, others on others."""

    def __init__(self, function: Callable[..., Any], shard: int) -> None:
        super().__init__()
        self.function, self.shard = function, shard

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        seed = int(torch.randint(2**31, ()))  # the generators of all ranks are in step
        with torch.random.fork_rng():
            torch.manual_seed(seed + self.shard)
            return self.function(*args, **kwargs)
