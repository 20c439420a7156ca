"""What the rules are tested on: an operator with real arguments."""

from dataclasses import dataclass, field
from typing import Any

import torch

MESHES = ((2,), (3,), (4,), (2, 2), (2, 3))
_generator = torch.Generator().manual_seed(0)


def reseed() -> None:
    """Makes the numbers in a module of cases independent of the modules read before it."""
    _generator.manual_seed(0)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator, dtype=torch.float64) + 0.2


def integers(*shape: int, high: int, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_generator)


def booleans(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator) < 0.5


def like(x: torch.Tensor) -> torch.Tensor:
    """Random numbers of the same shape and kind."""
    if x.is_floating_point() or x.is_complex():
        return torch.randn(x.shape, generator=_generator, dtype=x.dtype)
    return torch.randint(-9, 9, x.shape, generator=_generator).to(x.dtype)


@dataclass(frozen=True)
class Case:
    """One call of an operator. `frozen`: floating operands (by number) without a gradient."""

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[int, ...] = ()
    exact: bool = True  # False: values are random or undefined, only shapes are compared
    known: frozenset[str] = frozenset()  # splits that work but are not offered, on purpose: say why beside it
    note: str = ""
    meshes: tuple[tuple[int, ...], ...] = MESHES

    @property
    def id(self) -> str:
        def text(value: Any) -> str:
            if isinstance(value, torch.Tensor):
                return "x".join(map(str, value.shape)) or "scalar"
            if isinstance(value, (tuple, list)):
                return "(" + ",".join(map(text, value)) + ")"
            return str(value)

        parts = [text(a) for a in self.args] + [f"{k}={text(v)}" for k, v in self.kwargs.items()]
        return f"{self.target}-{','.join(parts)}".replace(" ", "")
