"""A module as a user writes it, how it is called, and what has to come of it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn


@dataclass(frozen=True)
class Call:
    """Arguments as the user gives them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Call]  # other numbers in every step
    loss: Callable[[Any], torch.Tensor] | None = None  # from the output; None: the model returns it
    train: bool = True
    refused: str | None = None  # the part of the error's text that has to be there
    before: Callable[[nn.Module, int], None] | None = None  # what the user does to the module before a step
    around: Callable[[], Any] | None = None  # the context of a step, such as an outer autocast
    replay: tuple[str, ...] = ()  # random numbers that the module draws and returns, and takes as inputs of these names
    random: bool = False  # draws that nobody sees: the ranks have to agree with each other
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9

    @property
    def drawn(self) -> bool:
        """Whether it draws random numbers: threads share a generator, so its ranks have to be processes."""
        return self.random or bool(self.replay)


CASES: dict[str, Case] = {}
Made = TypeVar("Made", bound=Callable[[], nn.Module])


def case(inputs: Callable[[], Call], **facts: Any) -> Callable[[Made], Made]:
    """Registers a class, or a function that makes a module, as a case of its name."""

    def register(make: Made) -> Made:
        name = _snake(make.__name__)
        if name in CASES:
            raise ValueError(f"{name}: there are two cases of this name")
        CASES[name] = Case(name, make, inputs, **facts)
        return make

    return register


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def ints(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, most, shape)
