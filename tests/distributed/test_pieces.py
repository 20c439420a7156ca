"""Activations that travel in pieces, on processes."""

import pytest
import torch

from tapas.runtime.module import executor_of
from tapas.runtime.pieces import PiecedProduct
from tests.distributed.pool import Pool
from tests.distributed.test_ahead import NEAR, full, passes, posed
from tests.distributed.test_loop import differ, gradients


def near(family: str) -> float:
    """Transformers have parts in float32, whatever the rest is in: in another order these are off by so much."""
    return NEAR if family == "packed" else 1e-6


@pytest.mark.parametrize(
    ("mode", "mesh", "family"),
    [
        ("none", (4,), "packed"),
        *(
            pytest.param(mode, mesh, family, marks=full)
            for family in ("llama", "packed", "gpt2")
            for mode in ("none", "gather", "block")  # torch allows one backward pass through a selective block
            for mesh in ((4,), (2, 2))
        ),
    ],
)
def test_backward_passes_in_any_order(pool: Pool, mode: str, mesh: tuple[int, ...], family: str) -> None:
    for off in pool(passes, mode, mesh, family, "megatron-sp", 2):
        assert all(error < near(family) for error in off.values()), off


def compiled(rank: int) -> tuple[float, int, int]:
    """How far a compiled module is off, how many products are in pieces, and groups that their pieces have."""
    model, inputs, module = posed("none", (2, 2), "packed", "megatron-sp", 2)
    called = torch.compile(module, backend="aot_eager")
    for one in (model, called):
        one(**inputs)["loss"].backward()
    executor = executor_of(module)
    pieced = sum(isinstance(part, PiecedProduct) for part in executor.program.modules())
    apart = set(executor.pieces.groups.values()).isdisjoint(executor.groups.groups.values())  # type: ignore[attr-defined]
    return differ(gradients(module), gradients(model)), pieced, apart


def test_compiled_products_are_one_piece(pool: Pool) -> None:
    for error, pieced, apart in pool(compiled):
        assert error < NEAR and pieced and apart
