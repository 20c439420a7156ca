"""Reading and writing by index in a dim that is spread over devices: each rank serves the rows it holds."""

from collections.abc import Sequence

import torch

from tapas.rules.base import Local
from tapas.runtime.kernels.common import Comms, Pieces, Reader, localize, nothing, positions


def embedding(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    """Rows of foreign tokens are zero: the result is a partial sum."""
    read = Reader(local, operands)
    table = read("weight")
    if table.shape[0] == 0:
        return nothing(local, operands)
    pieces = local.operand_pieces(local.call.arg(0, "weight").index, 0)
    place, mine = localize(read("indices"), pieces)
    rows = read.run(indices=place, padding_idx=_place(read("padding_idx"), pieces))
    return rows.masked_fill(~mine.unsqueeze(-1), 0)


def _place(row: int, pieces: Pieces) -> int:
    """Where a row is held here; -1 if it is not."""
    offset = 0
    for start, stop in pieces:
        if start <= row < stop:
            return row - start + offset
        offset += stop - start
    return -1


def gather(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    """gather, take_along_dim and index_select: zero where the index points to a foreign place."""
    read = Reader(local, operands)
    if operands[0].numel() == 0:
        return nothing(local, operands)
    name = "index" if isinstance(read("index"), torch.Tensor) else "indices"
    dim = read("dim") % operands[0].dim()
    place, mine = localize(read(name), local.operand_pieces(0, dim))
    if local.call.target.startswith("aten.index_select"):
        mine = mine.reshape(-1, *[1] * (operands[0].dim() - 1 - dim))
    return read.run(**{name: place}).masked_fill(~mine, 0)


def scatter(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    """scatter, scatter_add, index_add, ...: writes to foreign places go to a row that is thrown away."""
    read = Reader(local, operands)
    x = operands[0]
    dim = read("dim") % x.dim()
    place, mine = localize(read("index"), local.operand_pieces(0, dim))
    index = torch.where(mine, place, x.shape[dim])
    return read.run(self=_longer(x, dim), index=index).narrow(dim, 0, x.shape[dim])


def _longer(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([x, torch.zeros_like(x.narrow(dim, 0, 1) if x.shape[dim] else _one(x, dim))], dim)


def _one(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.new_zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]))


def _split_dims(local: Local, rank: int) -> list[int]:
    """The dims of the first operand that are indexed and split, by their factors' names r0, r1, ..."""
    return [dim for dim in range(rank) if local.axes_of(f"r{dim}")]


def _counted(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(index < 0, index + size, index)  # python's negative indices


def index(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    """x[i, :, j]: zero where an index points to a foreign place."""
    read = Reader(local, operands)
    x, indices = operands[0], list(read("indices"))
    if x.numel() == 0:
        return nothing(local, operands)
    held: list[torch.Tensor] = []
    for dim in _split_dims(local, x.dim()):
        counted = _counted(indices[dim], local.call.operands[0].shape[dim])
        indices[dim], mine = localize(counted, local.operand_pieces(0, dim))
        held.append(mine)
    selected = read.run(indices=indices)
    mask = held[0]
    for mine in held[1:]:
        mask = mask & mine
    return selected.masked_fill(~_trailed(mask, indices, x.dim()), 0)


def _trailed(mask: torch.Tensor, indices: Sequence[torch.Tensor | None], rank: int) -> torch.Tensor:
    """The mask with a dim of one for each dim of the result that comes after the indexed ones."""
    used = [dim for dim, i in enumerate(indices) if i is not None]
    together = used == list(range(used[0], used[-1] + 1))
    after = rank - 1 - used[-1] if together else rank - len(used)
    return mask.reshape((*mask.shape, *[1] * after))


def index_put(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    """x[i, :, j] = v: writes to foreign places go to a row that is thrown away."""
    read = Reader(local, operands)
    x, indices = operands[0], list(read("indices"))
    whole = x
    for dim in _split_dims(local, x.dim()):
        counted = _counted(indices[dim], local.call.operands[0].shape[dim])
        place, mine = localize(counted, local.operand_pieces(0, dim))
        indices[dim] = torch.where(mine, place, x.shape[dim])
        whole = _longer(whole, dim)
    return read.run(self=whole, indices=indices)[tuple(slice(0, size) for size in x.shape)]


def one_hot(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    """Some of the classes."""
    classes = positions(local.result_pieces(0, operands[0].dim()), operands[0].device)
    return (operands[0].unsqueeze(-1) == classes).to(torch.int64)
