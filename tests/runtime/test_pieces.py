"""What is under way while a piece of a product is computed: a rank whose messages and products are written down."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tapas.runtime.collectives import Count, Rank
from tapas.runtime.moves import Step
from tapas.runtime.pieces import GatheredProduct, ScatteredProduct
from tapas.runtime.side_groups import SideAxes
from tapas.sharding.layout import B, P, R, S, State
from tapas.sharding.route import Hop
from tapas.verify.threads import run_threads, thread_axes

LENGTHS, FEATURES, SIZE = (2, 1, 2), 4, 2
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


WHOLE, WEIGHT = random(sum(LENGTHS), 6, FEATURES), random(3, FEATURES)


class Diary(SideAxes):
    """Notes when something is sent and when somebody waits for it."""

    def __init__(self, wires: Sequence[Any]) -> None:
        super().__init__(wires)
        self.lines: list[str] = []

    def gather(self, *args: Any) -> Any:
        return self._noted(super().gather(*args))

    def scatter(self, *args: Any) -> Any:
        return self._noted(super().scatter(*args))

    def _noted(self, work: Any) -> Any:
        self.lines.append("send")
        work.wait = lambda: self.lines.append("wait")
        return work

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        self.lines.append("compute")
        y = x @ weight.t()
        y.register_hook(lambda _: self.lines.append("compute"))
        return y

    def told(self) -> list[str]:
        told, self.lines = self.lines, []
        return told


def on_rank(index: int, wires: Sequence[Any], kind: Any, hop: Hop, x: Tensor, gradients: Sequence[Tensor]) -> Any:
    """What a rank makes of its part, the gradients of that and of the weight, and what was done in which order."""
    diary = Diary(wires)
    rank = Rank((SIZE,), (index,), wires, Count(), torch.device("cpu"), side=diary)
    shape = WHOLE.shape if kind is GatheredProduct else (*WHOLE.shape[:2], len(WEIGHT))
    product = kind(diary.product, Step(shape, (hop.old,), hop, rank), LENGTHS)
    x, weight = x.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    made = product(x, weight)
    results, forward = made if kind is GatheredProduct else (made,), diary.told()
    first, second = (
        torch.autograd.grad(results, (x, weight), gradients, retain_graph=again) for again in (True, False)
    )
    assert all(map(torch.equal, first, second))
    half = diary.told()
    assert half[: len(half) // 2] * 2 == half
    return results, first, forward, half[: len(half) // 2]


def both(kind: Any, hop: Hop, parts: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[Any]:
    axes = thread_axes((SIZE,))
    found = run_threads(lambda c: on_rank(c[0], axes[c], kind, hop, parts[c[0]], gradients[c[0]]), axes)
    return [found[i,] for i in range(SIZE)]


@pytest.mark.parametrize("read", [B, R])
def test_what_is_gathered_is_multiplied_as_it_arrives(read: State) -> None:
    """Others read it, too: a gradient of theirs is added."""
    one, two = random(5, 6, 3), random(5, 6, FEATURES)
    gradients = [(one, two), (2 * one, two)] if read == B else [(one, two)] * 2
    summed = sum(y @ WEIGHT + x for y, x in (gradients if read == B else gradients[:1]))
    assert isinstance(summed, Tensor)
    found = both(GatheredProduct, Hop((0,), S(1), read), WHOLE.chunk(SIZE, 1), gradients)
    for ((y, whole), (dx, dw), forward, backward), part, (gradient, _) in zip(
        found, summed.chunk(SIZE, 1), gradients, strict=True
    ):
        assert torch.equal(whole, WHOLE) and torch.allclose(y, WHOLE @ WEIGHT.t())
        assert torch.allclose(dx, part) and torch.allclose(dw, gradient.flatten(0, 1).t() @ WHOLE.flatten(0, 1))
        assert forward == ["send"] * 3 + ["wait", "compute"] * 3
        assert backward == (["compute", "send"] * 3 + ["wait"] * 3 if read == B else ["compute"] * 3)


def test_what_is_scattered_leaves_as_it_is_computed() -> None:
    parts, gradient = (WHOLE, random(*WHOLE.shape)), random(5, 6, 3)
    found = both(ScatteredProduct, Hop((0,), P, S(1)), parts, [(part,) for part in gradient.chunk(SIZE, 1)])
    results = (sum(parts) @ WEIGHT.t()).chunk(SIZE, 1)
    for ((y,), (dx, dw), forward, backward), part, result in zip(found, parts, results, strict=True):
        assert torch.allclose(y, result) and torch.allclose(dx, gradient @ WEIGHT)
        assert torch.allclose(dw, gradient.flatten(0, 1).t() @ part.flatten(0, 1))
        assert forward == ["compute", "send"] * 3 + ["wait"] * 3
        assert backward == ["send"] * 3 + ["wait", "compute"] * 3
