"""Buffers of collectives: what comes out is what went in, with one copy on either side, or none."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tapas._torch import TorchDispatchMode
from tapas.runtime.joined import SMALL, Joined, joined
from tapas.runtime.packing import Deal, Packing
from tapas.sharding.layout import pieces
from tests.properties import examples

_COPIES = {torch.ops.aten.copy_, torch.ops.aten.clone, torch.ops.aten.cat, torch.ops.aten.stack}


class Copies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in _COPIES
        return func(*args, **(kwargs or {}))


def deals(shape: tuple[int, ...], dim: int, segments: int, sizes: tuple[int, ...]) -> list[Deal]:
    """Those of all members."""
    tiling = ((shape[dim] // segments, 1),) * segments if segments > 1 else ()
    places = list(torch.cartesian_prod(*(torch.arange(n) for n in sizes)).view(-1, len(sizes)).tolist())
    members = tuple(pieces(shape[dim], tiling, sizes, place) for place in places)
    return [Deal(dim, members, mine) for mine in range(prod(sizes))]


@st.composite
def dealt(draw) -> tuple[list[Deal], torch.Tensor, tuple[int, ...], bool]:
    sizes = draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3)]))
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    dim, segments = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
    shape = (*shape[:dim], shape[dim] * segments, *shape[dim + 1 :])
    x = torch.arange(prod(shape)).view(shape)
    if draw(st.booleans()):  # strides of their own
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    return deals(shape, dim, segments, sizes), x, sizes, len(sizes) > 1 or draw(st.booleans())


def in_buffer(parts: list[torch.Tensor], sizes: tuple[int, ...]) -> torch.Tensor:
    """What collectives over one axis after the other make of the members' buffers: the last axis is major."""
    stacked = torch.stack(parts).view(*sizes, -1)
    return stacked.permute(*reversed(range(len(sizes))), len(sizes)).reshape(-1)


@given(dealt())
@settings(max_examples=examples(300), deadline=None)
def test_what_is_dealt_out_can_be_put_together(case) -> None:
    found, x, sizes, padded = case
    for deal in found:
        packing = Packing(deal, sizes, padded)
        flat = packing.pack(x)
        assert flat.numel() == packing.numel(x.shape)
        for member, start, numel in packing.places(x.shape):
            assert torch.equal(flat[start : start + numel].view(deal.shape(x.shape, member)), deal.take(x, member))
        mine = deal.take(x, deal.mine)
        assert torch.equal(packing.unpack(flat, mine.shape), x)
        assert torch.equal(packing.unpack(flat, mine.shape, torch.empty(x.shape, dtype=x.dtype)), x)


@given(dealt())
@settings(max_examples=examples(300), deadline=None)
def test_parts_that_are_sent_arrive_where_they_belong(case) -> None:
    found, x, sizes, _ = case
    parts = [Packing(deal, sizes).pack_part(deal.take(x, deal.mine)) for deal in found]
    arrived = in_buffer(parts, sizes)
    for deal in found:
        packing, mine = Packing(deal, sizes), deal.take(x, deal.mine)
        assert torch.equal(packing.unpack(arrived, mine.shape), x)
        own = parts[deal.mine]
        assert torch.equal(packing.own_part(own, x.shape), mine)


@pytest.mark.parametrize(
    ("shape", "dim", "sizes", "into", "out"),
    [
        ((8, 3), 0, (4,), 0, 0),  # the first dim: none
        ((1, 8, 3), 1, (4,), 0, 0),  # as good as the first
        ((7, 3), 0, (4,), 4, 0),  # its last part is short: what is sent is padded, what arrives begins with the whole
        ((3, 8), 1, (4,), 1, 1),
        ((3, 8, 5), 1, (2,), 1, 1),
        ((8, 3), 0, (2, 2), 1, 1),  # over one axis after the other
    ],
)
def test_at_most_one_copy(shape: tuple[int, ...], dim: int, sizes: tuple[int, ...], into: int, out: int) -> None:
    x = torch.arange(prod(shape)).view(shape)
    packing = Packing(deals(shape, dim, 1, sizes)[0], sizes)
    with Copies() as copies:
        flat = packing.pack(x)
    assert copies.count == into
    part = packing.own_part(flat[: flat.numel() // prod(sizes)], shape)
    with Copies() as copies:
        sent = packing.pack_part(part)
    assert copies.count == 0 and sent.data_ptr() == part.data_ptr()
    with Copies() as copies:
        packing.unpack(flat, part.shape)
    assert copies.count == out


@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(1, 3))
@settings(max_examples=examples(100), deadline=None)
def test_small_tensors_share_a_buffer_in_which_members_parts_lie_together(members, rows, width) -> None:
    wholes = [torch.randn(members * n, width) for n in rows]
    buffer = Joined(members, tuple(n * width for n in rows))
    sent = [buffer.pack_parts([w.chunk(members)[m].reshape(-1) for w in wholes]) for m in range(members)]
    with Copies() as copies:
        flat = buffer.pack_wholes(wholes)
    assert copies.count == 1
    assert torch.equal(flat, torch.cat(sent))  # what is gathered lies as what is dealt out
    for whole, part in zip(wholes, buffer.parts(sent[-1]), strict=True):
        assert torch.equal(part.view(-1, width), whole.chunk(members)[-1])
    arrived = [torch.empty_like(w) for w in wholes]
    buffer.unpack_wholes(flat, arrived)
    assert all(map(torch.equal, arrived, wholes))


@pytest.mark.parametrize(
    ("nbytes", "together"),
    [
        ({"norm": 4096, "up": SMALL + 1, "down": SMALL}, ["norm", "down"]),
        ({"norm": 4096, "up": SMALL + 1}, []),  # one by itself gains nothing
        ({"norm": 4096, "empty": 0}, []),
    ],
)
def test_small_tensors_lie_together_if_there_are_several(nbytes: dict[str, int], together: list[str]) -> None:
    assert joined(nbytes) == together
