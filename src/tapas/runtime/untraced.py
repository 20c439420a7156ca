"""What torch.compile leaves alone."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """A function that is called as it is, with all that it calls. torch's own decorator forgets the types."""
    return torch.compiler.disable(function)  # type: ignore[return-value]
