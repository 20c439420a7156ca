"""Dtypes made wider: of values, of casts in a graph, and of those that code which stays whole makes in Python."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tapas.ir.regions import region_named, with_regions

_NARROW = ("float16", "bfloat16", "float32", "float64")  # by width
_COMPLEX = {"float64": "complex128"}
_CASTS = {torch.Tensor.half: "float16", torch.Tensor.bfloat16: "bfloat16", torch.Tensor.float: "float32"}


def lifted_name(dtype: str, floor: str) -> str:
    """A dtype's name at least as wide as `floor`; integers stay."""
    if dtype in _NARROW:
        wide = max(_NARROW.index(dtype), _NARROW.index(floor))
        return _NARROW[wide]
    return _COMPLEX.get(floor, dtype) if dtype.startswith("complex") else dtype


def lifted_dtype(dtype: torch.dtype, floor: str) -> torch.dtype:
    return getattr(torch, lifted_name(str(dtype).removeprefix("torch."), floor))


def lifted_value(value: torch.Tensor, floor: str) -> torch.Tensor:
    return value.detach().to(lifted_dtype(value.dtype, floor))


@contextmanager
def default_dtype(precision: str) -> Iterator[None]:
    """What code that stays whole makes without a dtype is as wide as what the graph makes so."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(lifted_dtype(before, precision))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def lifted_region(name: str, floor: str) -> str:
    """The region with its casts widened, as those of a graph are, under a name that is the same in every process."""
    lifted = f"{name} in {floor}"
    with_regions({lifted: replace(region_named(name), around=partial(WiderCasts, floor))})
    return lifted


@dataclass
class WiderCasts(TorchFunctionMode):
    floor: str

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _CASTS and args:
            return args[0].to(getattr(torch, lifted_name(_CASTS[func], self.floor)), **(kwargs or {}))
        given = {name: self._lifted(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._lifted, args), **given)

    def _lifted(self, value: Any) -> Any:
        return lifted_dtype(value, self.floor) if isinstance(value, torch.dtype) else value
