"""How much memory a program really takes: the storages that are alive, counted operator by operator."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tapas._torch import TorchDispatchMode, pytree


def _plain(x: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return x.to_local() if isinstance(x, DTensor) else x


class Allocated(TorchDispatchMode):
    """While active, follows `nbytes` and its `peak`: storages of `held` and of all that operators return, but for
    those of `others`."""

    def __init__(self, held: Iterable[torch.Tensor], others: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.alive = {_plain(tensor).untyped_storage()._cdata for tensor in others}
        self.nbytes = self.peak = 0
        for tensor in held:
            self.see(_plain(tensor))

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        number, size = storage._cdata, storage.nbytes()
        if number not in self.alive:
            self.alive.add(number)
            self.nbytes += size
            self.peak = max(self.peak, self.nbytes)
            weakref.finalize(storage, self.gone, number, size).atexit = False

    def gone(self, number: int, size: int) -> None:
        self.alive.discard(number)
        self.nbytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(made):
            if isinstance(value, torch.Tensor) and type(value) is torch.Tensor:
                self.see(value)
        return made
