"""What a call of a repeated submodule returns while the model around it is exported."""

from typing import NamedTuple

import torch

from tapas._torch import ignores_torch_function


class StandIn(torch.Tensor):
    """In place of a result. Whatever is computed with it is computed with a tensor of the program instead."""

    __torch_function__ = ignores_torch_function
    facts: tuple  # as same_tensor tells them

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.facts[3]


class Answer(NamedTuple):
    """A result of a recorded call."""

    call: int
    result: int
