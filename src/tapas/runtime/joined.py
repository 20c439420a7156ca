"""Small tensors that travel together lie in one buffer: a message for each of them takes longer than to copy them.

One kernel copies all of them into the buffer, and one out of it, unless what arrives can stay where it is. Large ones
are sent from where they lie, and arrive where they belong.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch

SMALL = 16 << 20  # bytes of a whole tensor: what takes as long to copy as a message takes to get under way
Key = TypeVar("Key", bound=Hashable)


def joined(nbytes: Mapping[Key, int]) -> list[Key]:
    """Which of the tensors of a message lie in one buffer: the small ones, if there are several."""
    small = [key for key, size in nbytes.items() if 0 < size <= SMALL]
    return small if len(small) > 1 else []


@dataclass(frozen=True)
class Joined:
    """Tensors of which each member has an equal part, one after the other in the first dim."""

    members: int
    numels: tuple[int, ...]  # of the parts

    @cached_property
    def numel(self) -> int:
        return sum(self.numels)

    def parts(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        """A member's own, in its part of the buffer."""
        return flat.split(self.numels)

    def pack_parts(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def pack_wholes(self, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([whole.view(self.members, -1) for whole in wholes], dim=1).view(-1)

    def unpack_wholes(self, flat: torch.Tensor, wholes: Sequence[torch.Tensor]) -> None:
        rows = [whole.view(self.members, -1) for whole in wholes]
        torch.split_with_sizes_copy(flat.view(self.members, -1), self.numels, dim=1, out=rows)
