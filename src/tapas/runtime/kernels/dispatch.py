"""Experts of which a rank has some: their tokens are here, or are sent to the ranks that hold them and back.

How many rows go where is known to the device only. Ranks tell each other, expert by expert. Either the host reads both
what it sends and what it gets at once: once a layer in the forward pass, and not at all in the backward pass. Or there
is a capacity: ranks send each other buffers of a size that is known before, and nothing is read. No row is left behind:
where one does not fit, all ranks fail.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from tapas.ir.interpreter import resolve
from tapas.rules.base import Local, buffered
from tapas.rules.matmul import DISPATCH, EXPERTS
from tapas.runtime.kernels.common import Comm, Comms, Reader, localize, nothing
from tapas.runtime.untraced import untraced
from tapas.sharding.layout import local_pieces


def experts(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    """Some of the experts: tokens of the others are skipped, as the operator does with foreign numbers."""
    if axes := local.axes_of(DISPATCH):
        capacity = Reader(local, operands)("capacity")
        if capacity:
            return send_buffers(local, comms, axes[0], capacity, operands)
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


def _held(local: Local, axis: int, operand: int = 3) -> list[int]:
    """How many experts the ranks of an axis hold, or rows of another operand; these follow one another."""
    shape, layout = local.call.operands[operand].shape, local.operands[operand]
    counts: list[int] = []
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


def send_buffers(
    local: Local, comms: Comms, axis: int, capacity: float, operands: Sequence[torch.Tensor]
) -> torch.Tensor:
    """In buffers with room for `capacity` times an equal share of the tokens that the most loaded rank has, and all of
    their slots. Slots of no expert are not sent: what comes of them is zero."""
    read, comm, held = Reader(local, operands), comms[axis], _held(local, axis)
    hidden, index, weight = (read(name) for name in ("hidden", "index", "weight"))
    slots, mine = index.shape[1], held[comm.index]
    room = slots * int(buffered(capacity, max(_held(local, axis, 0)), comm.size)) // comm.size
    route = _Buffers.of(index.reshape(-1), held, room)
    coming = comm.exchange(route.going, held, [mine] * comm.size).view(comm.size, mine)
    coming = _all_fit(local, comms, comm, route, coming, capacity)

    def sent(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Rows of x in buffers; a rank without tokens sends empty ones."""
        rows = x.index_select(0, places) if len(x) else x.new_zeros(len(places), *x.shape[1:]) + x.sum()
        return comm.exchange(rows, [room] * comm.size, [room] * comm.size)

    rows, scale = sent(hidden, route.slots // slots), sent(weight.reshape(-1), route.slots)
    if mine:
        ends = coming.cumsum(1)  # of the rows of each expert here, in each buffer
        place = torch.searchsorted(ends, route.numbers.expand(comm.size, room).contiguous(), right=True)
        made = resolve(EXPERTS)(rows, place.view(-1, 1), scale.unsqueeze(1), *_experts(read))  # the rest is for no one
    else:  # nobody looks at what comes back, but others wait for this rank in the backward pass
        made = rows + scale.sum().to(rows.dtype)
        for x in operands[3:]:
            made = made + x[:0].sum().to(rows.dtype)
    back = comm.exchange(made, [room] * comm.size, [room] * comm.size, back=True)
    found = back.index_select(0, route.places).masked_fill(route.foreign.unsqueeze(1), 0)
    return torch.empty_like(found).index_copy(0, route.order, found).view(*index.shape, back.shape[1]).sum(1)


@dataclass(frozen=True)
class _Buffers:
    """Where slots lie in buffers, one for each rank."""

    order: torch.Tensor  # slots by expert; those of no expert come last
    foreign: torch.Tensor  # which of these are of none
    going: torch.Tensor  # how many there are of each expert
    most: torch.Tensor  # and for any rank
    numbers: torch.Tensor  # of the rows of a buffer
    slots: torch.Tensor  # of each row of each buffer; behind the last one some other slot, of which nothing comes
    places: torch.Tensor  # of each slot, in `order`, among these rows

    @staticmethod
    def of(flat: torch.Tensor, held: Sequence[int], room: int) -> "_Buffers":
        ranks, every, device = len(held), sum(held), flat.device
        expert, order = torch.sort(torch.where((flat >= 0) & (flat < every), flat, every), stable=True)
        ends = torch.searchsorted(expert, torch.arange(every, device=device, dtype=expert.dtype), right=True)
        bounds = torch.cat((ends.new_zeros(1), ends))
        first = torch.stack([bounds[number] for number in accumulate(held, initial=0)])  # of the slots for each rank
        numbers, place = torch.arange(room, device=device), torch.arange(len(order), device=device)
        slots = (first[:-1, None] + numbers).view(-1)
        slots = order[slots % len(order)] if len(order) else slots
        to = torch.searchsorted(first[1:], place, right=True).clamp(max=ranks - 1)
        places = (to * room + place - first[to]).clamp(0, ranks * room - 1)
        return _Buffers(order, place >= first[-1], bounds.diff(), first.diff().amax(), numbers, slots, places)


def _all_fit(
    local: Local, comms: Comms, comm: Comm, route: _Buffers, coming: torch.Tensor, capacity: float
) -> torch.Tensor:
    """What comes, if all ranks have room for it."""
    most = route.most.reshape(1)
    for other in comms.values():
        if other is comm or other.size > 1:
            most = other.largest(most)
    room = len(route.numbers)
    room_for = f"than a capacity of {capacity:g} has room for ({room} rows)"
    fact = f"some rank has more tokens for the experts of another one {room_for}"
    return comm.checked(coming, most > room, fact, "raise the capacity, or leave it out")
