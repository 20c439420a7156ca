"""All meshes of a number of devices, and what a user says about how many there are."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapas.errors import TapasError
from tapas.hardware.cluster_files import load_cluster
from tapas.hardware.mesh import Mesh, counted, factorizations

NODES = load_cluster("h100-sxm")


def by_trying(number: int) -> set[tuple[int, ...]]:
    """All ordered factorizations, the slow way."""
    divisors = [d for d in range(2, number + 1) if number % d == 0]
    found = {(number,)} | {(a, b) for a in divisors for b in divisors if a * b == number}
    return found | {(a, b, c) for a in divisors for b in divisors for c in divisors if a * b * c == number}


@given(st.integers(2, 400))
def test_every_mesh_once(number: int) -> None:
    sizes = [mesh.sizes for mesh in factorizations(number)]
    assert len(sizes) == len(set(sizes))
    assert set(sizes) == by_trying(number)
    assert sizes == sorted(sizes, key=lambda s: (len(s), s))


def test_one_device_and_primes() -> None:
    assert factorizations(1) == [Mesh((1,))]
    assert factorizations(13) == [Mesh((13,))]
    assert [str(mesh) for mesh in factorizations(8)] == ["8", "2x4", "4x2", "2x2x2"]
    assert len(factorizations(64)) == 16 and len(factorizations(4096)) == 67
    assert all(prod(mesh.sizes) == 4096 for mesh in factorizations(4096))


def test_devices_are_counted_by_nodes() -> None:
    assert counted(NODES, None, None, None) == (NODES, None)
    assert counted(NODES, 64, None, None) == (NODES, 64)
    assert counted(NODES, None, 4, None) == (NODES, 32)
    small, many = counted(NODES, 8, 2, 4, Mesh((2, 4)))
    assert (small.per_node, many) == (4, 8) and small.intra == NODES.intra


@pytest.mark.parametrize(
    "devices, nodes, per_node, mesh, words",
    [
        (0, None, None, None, "--devices 0"),
        (None, -1, None, None, "--nodes -1"),
        (None, 2, 0, None, "--per-node 0"),
        (10**9, None, None, None, "give 1 to 1,000,000"),
        (8, 2, None, None, "2 nodes of 8 are 16 devices"),
        (8, None, None, Mesh((2, 2)), "the mesh takes 4 devices, but there are 8"),
    ],
)
def test_what_does_not_agree_is_refused(devices, nodes, per_node, mesh, words: str) -> None:
    with pytest.raises(TapasError) as caught:
        counted(NODES, devices, nodes, per_node, mesh)
    assert words in str(caught.value)
