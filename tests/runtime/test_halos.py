"""Borders of neighbours: what is exchanged is the adjoint of itself going back, and several dims may be dealt out."""

from itertools import permutations, product

import pytest
import torch

from tapas.rules.base import Halo
from tapas.rules.choices import Choice
from tapas.runtime.kernels.halo import with_borders
from tests.oracle.case import Case, floats
from tests.oracle.harness import build, choices, offered, simulate
from tests.oracle.threads import comms_of, run_ranks

full = pytest.mark.full
IN_FULL = [pytest.param(8, marks=full)]


@pytest.mark.parametrize("ranks", [2, 3, 4, *IN_FULL])
@pytest.mark.parametrize("halo", [Halo(1, 1), Halo(3, 2), Halo(1, 0)], ids=str)
@pytest.mark.parametrize("fill", [0.0, None], ids=["zeros", "ends"])
def test_gradients_are_those_of_the_adjoint(ranks: int, halo: Halo, fill: float | None) -> None:
    """<A x, y> is <x, A' y>, and A x is what lies there in the whole."""
    size, dim = 4 * ranks, 1
    whole = floats(2, size, 3)
    coords, parts = [(r,) for r in range(ranks)], whole.chunk(ranks, dim)
    comms = comms_of((ranks,), coords)
    seeds = [floats(2, size // ranks + halo.before + halo.after, 3) for _ in coords]

    def work(coord: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        x = parts[coord[0]].clone().requires_grad_()
        made = with_borders(comms[coord][0], x, dim, halo, fill, kept=True)
        made.backward(seeds[coord[0]])
        assert x.grad is not None
        return made.detach(), x.grad

    done = run_ranks(coords, comms, work)
    ends = [
        whole.new_full((2, length, 3), fill) if fill is not None else whole[:, place : place + 1].expand(2, length, 3)
        for length, place in ((halo.before, 0), (halo.after, size - 1))
    ]
    around = torch.cat((ends[0], whole, ends[1]), dim)
    for (rank,), (made, _) in done.items():
        torch.testing.assert_close(made, around.narrow(dim, rank * size // ranks, made.shape[dim]), rtol=0, atol=0)
    forward = sum(float((done[c][0] * seed).sum()) for c, seed in zip(coords, seeds, strict=True))
    backward = sum(float((done[c][1] * part).sum()) for c, part in zip(coords, parts, strict=True))
    assert forward == pytest.approx(backward, rel=1e-12)


SEVERAL = [
    Case("aten.conv2d.default", (floats(1, 2, 12, 12), floats(3, 2, 5, 3), floats(3)), {"padding": (2, 1)}),
    Case("aten.conv2d.default", (floats(1, 4, 12, 24), floats(4, 2, 3, 7), None, (2, 2), (1, 3), (1, 1), 2)),
    Case("aten.conv3d.default", (floats(1, 2, 4, 12, 6), floats(2, 2, 3, 5, 3), floats(2)), {"padding": (1, 2, 1)}),
    Case("aten.max_pool2d.default", (floats(1, 2, 24, 12), (3, 3), (2, 2), (1, 1))),
    Case("aten.avg_pool3d.default", (floats(1, 1, 12, 6, 12), (3, 3, 3), (1, 1, 1), (1, 1, 1))),
    Case("aten.conv_transpose2d.input", (floats(1, 2, 6, 12), floats(2, 3, 4, 5), floats(3), (2, 1), (1, 2))),
    Case("aten.upsample_bicubic2d.default", (floats(1, 2, 12, 6), (24, 18), False)),
]
MESHES = [(2, 2), (2, 3), pytest.param((3, 4), marks=full), pytest.param((2, 2, 3), marks=full)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", SEVERAL, ids=[case.id for case in SEVERAL])
def test_corners_come_along(case: Case, mesh: tuple[int, ...]) -> None:
    """Each of several axes deals out a dim of its own, beside borders in all of them: values, gradients and bytes."""
    built, tried = build(case), 0
    reaching = [o for o in offered(built, mesh) if o.factor and o.factor.least]
    for some in permutations(reaching, min(len(mesh), len(reaching))):
        fitting = all(o.factor and o.factor.fits(n) for o, n in zip(some, mesh, strict=False))
        if len(some) == len(mesh) and fitting:
            simulate(built, Choice(some), mesh)
            tried += 1
    assert tried or len(mesh) > len(reaching)


def test_what_is_dealt_out() -> None:
    """Equal shares over one axis, each at least as long as what others need of it."""
    case = Case("aten.conv2d.default", (floats(1, 2, 12, 10), floats(3, 2, 9, 3)), {"padding": (4, 1)})
    built = build(case)

    def dealt(*mesh: int) -> set[tuple[str, ...]]:
        found = {choice.names for choice in choices(built.call, offered(built, mesh), mesh)}
        return {names for names in found if {"height", "width"} & {*names}}

    assert dealt(2) == {("height",), ("width",)}
    assert dealt(3) == {("height",)}  # ten columns do not divide
    assert dealt(4) == set()  # three rows are fewer than the four that a neighbour needs
    assert dealt(5) == {("width",)}
    on_two = dealt(2, 5)
    assert ("height", "width") in on_two and ("width", "height") not in on_two
    assert not {pair for pair in product(("height", "width"), repeat=2) if pair[0] == pair[1]} & dealt(2, 2)


def test_channels_stay_last_in_memory() -> None:
    whole = floats(2, 3, 8, 6).contiguous(memory_format=torch.channels_last)
    coords = [(0,), (1,)]
    comms = comms_of((2,), coords)

    def work(coord: tuple[int, ...]) -> torch.Tensor:
        x = whole.chunk(2, 2)[coord[0]].contiguous(memory_format=torch.channels_last)
        return with_borders(comms[coord][0], x, 2, Halo(1, 1), 0.0, kept=True)

    for made in run_ranks(coords, comms, work).values():
        assert made.is_contiguous(memory_format=torch.channels_last)


def test_largest_of_what_is_there() -> None:
    """Nothing beyond the ends is larger than what is there, be it as small as can be."""
    x = torch.full((1, 1, 8, 4), -torch.finfo(torch.float64).max, dtype=torch.float64)
    built = build(Case("aten.max_pool2d.default", (x, (3, 3), (1, 1), (1, 1))))
    (height,) = [o for o in offered(built, (2,)) if o.name == "height"]
    simulate(built, Choice((height,)), (2,))
