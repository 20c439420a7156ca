"""Memory that gradients are packed into."""

from collections import defaultdict

import torch

from tapas._torch import storage_holders


class Memory:
    """Memory that is used again from step to step.

    A large tensor that is made anew in every step comes from the system on a CPU, page by page, each cleared first:
    that takes several times as long as to write the gradients into it. Devices' allocators keep what is freed.
    """

    def __init__(self) -> None:
        self.flats: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self.alone = storage_holders(torch.empty(1))

    def lend(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor, of any contents. It is lent again when nobody has it, or a view of it, any more."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        flats = self.flats[numel, dtype]
        free = next((flat for flat in flats if storage_holders(flat) == self.alone), None)
        if free is None:
            free = torch.empty(numel, dtype=dtype)
            flats.append(free)
        return free.detach()  # a tensor of its own: what is done to it is not done to the one that is kept
