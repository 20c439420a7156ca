"""What torch.compile leaves alone."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tapas._torch import skip_frame

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """A function that is called as it is, with all that it calls. torch's own decorator forgets the types."""
    return torch.compiler.disable(function)  # type: ignore[return-value]


def around_blocks(function: Function) -> Function:
    """A function that is called as it is, but not what it calls."""
    return skip_frame(function)  # type: ignore[return-value]
