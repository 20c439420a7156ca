"""Experts of which a rank has some: their tokens are here, or are sent to the ranks that hold them and back.

How many rows go where is known to the device only. Ranks tell each other, expert by expert, and the host reads both
what it sends and what it gets at once: once a layer in the forward pass, and not at all in the backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tapas.ir.interpreter import resolve
from tapas.rules.base import Local
from tapas.rules.matmul import DISPATCH, EXPERTS
from tapas.runtime.kernels.common import Comm, Comms, Reader, localize, nothing
from tapas.runtime.untraced import untraced
from tapas.sharding.layout import local_pieces


def experts(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    """Some of the experts: tokens of the others are skipped, as the operator does with foreign numbers."""
    if axes := local.axes_of(DISPATCH):
        return send(local, comms[axes[0]], _held(local, axes[0]), operands)
    read = Reader(local, operands)
    needed = operands if len(operands) == 5 else (*operands[:3], operands[-1])  # without features there are biases
    if any(x.numel() == 0 for x in needed):
        return nothing(local, operands)
    place, mine = localize(read("index"), local.operand_pieces(3, 0))
    index = torch.where(mine, place, -1)
    return resolve(EXPERTS)(read("hidden"), index, read("weight"), *_experts(read))


def _experts(read: Reader) -> tuple[Any, ...]:
    """What the operator is given besides tokens and their slots."""
    return tuple(read(name) for name in ("gate_up", "down", "gating", "gate_up_bias", "down_bias"))


def _held(local: Local, axis: int) -> list[int]:
    """How many experts the ranks of an axis hold; these follow one another."""
    shape, layout, counts = local.call.operands[3].shape, local.operands[3], list[int]()
    for place in range(local.mesh[axis]):
        coord = (*local.coord[:axis], place, *local.coord[axis + 1 :])
        counts.append(sum(stop - start for start, stop in local_pieces(shape, layout, local.mesh, coord)[0]))
    return counts


@untraced  # sizes depend on data
def send(local: Local, comm: Comm, held: list[int], operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """`held`: how many experts each rank has. Slots of no expert at all go to the first one, and weigh nothing: all
    slots are sent, whatever the routing is."""
    read = Reader(local, operands)
    hidden, index, weight = (read(name) for name in ("hidden", "index", "weight"))
    slots, every, mine = index.shape[1], sum(held), held[comm.index]
    flat = index.reshape(-1)
    known = (flat >= 0) & (flat < every)
    expert, order = torch.sort(torch.where(known, flat, 0), stable=True)
    ends = torch.searchsorted(expert, torch.arange(every, device=flat.device, dtype=expert.dtype), right=True)
    going = torch.diff(ends, prepend=ends.new_zeros(1))
    coming = comm.exchange(going, held, [mine] * comm.size).view(comm.size, mine)
    sizes = torch.cat((torch.stack([part.sum() for part in going.split(held)]), coming.sum(1))).tolist()
    sent, received = sizes[: comm.size], sizes[comm.size :]

    rows = comm.exchange(hidden.index_select(0, order // slots), sent, received)
    scale = comm.exchange(torch.where(known, weight.reshape(-1), 0).index_select(0, order), sent, received)
    place = torch.arange(mine, device=flat.device).repeat(comm.size)
    place = place.repeat_interleave(coming.reshape(-1), output_size=sum(received))
    if mine and len(rows):
        made = resolve(EXPERTS)(rows, place.unsqueeze(1), scale.unsqueeze(1), *_experts(read))
    else:  # no row, but others wait for this rank in the backward pass
        made = rows + scale.sum().to(rows.dtype)
        for x in operands[3:]:
            made = made + x[:0].sum().to(rows.dtype)
    back = comm.exchange(made, received, sent, back=True)
    return torch.empty_like(back).index_copy(0, order, back).view(*index.shape, back.shape[1]).sum(1)
