"""What a kernel may send along one mesh axis. The process groups that do it come from the runtime."""

from typing import Protocol

import torch


class Comm(Protocol):
    """The ranks that differ along one axis only, as seen by one of them."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """P to R: the sum over the axis; the gradient passes unchanged."""
        ...

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """R to B: the value passes unchanged; the gradient is summed over the axis."""
        ...

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """The largest over the axis, element by element; no gradient."""
        ...
