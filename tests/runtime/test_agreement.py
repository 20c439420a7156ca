"""Which tensor is not the same on all ranks."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tapas.runtime.agreement import SAMPLE, differing, fingerprint
from tapas.runtime.collectives import Count, Rank
from tapas.verify.threads import thread_axes

MESH = (2, 2)


def asked(tensors_of) -> set[str | None]:
    axes = thread_axes(MESH)
    ranks = [Rank(MESH, coord, wires, Count(), torch.device("cpu")) for coord, wires in axes.items()]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return set(pool.map(lambda rank: differing(tensors_of(rank.coord), rank), ranks))


@pytest.mark.parametrize("odd", [None, (0, 0), (1, 0), (1, 1)])
def test_all_ranks_name_the_same_tensor(odd: tuple[int, int] | None) -> None:
    def tensors(coord: tuple[int, ...]) -> dict[str, torch.Tensor]:
        return {"same": torch.arange(3), "other": torch.tensor([1.0, float("nan"), 2.0 + (coord == odd)])}

    assert asked(tensors) == {"other" if odd else None}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 3), torch.randn(2 * SAMPLE + 7), torch.randn(3, 4).t(), torch.tensor(2.0), torch.ones(3).bool(),
        torch.randn(4).bfloat16(), torch.randn(3, dtype=torch.complex128), torch.arange(4), torch.empty(0),
    ],
)  # fmt: skip
def test_fingerprints(tensor: torch.Tensor) -> None:
    assert torch.equal(fingerprint(tensor), fingerprint(tensor.clone()))
    if tensor.numel():
        changed = ~tensor if tensor.dtype == torch.bool else tensor + 1
        assert not torch.equal(fingerprint(tensor), fingerprint(changed))
    if tensor.numel() > 2:
        assert tensor.dtype == torch.bool or not torch.equal(fingerprint(tensor), fingerprint(tensor.flip(0)))
