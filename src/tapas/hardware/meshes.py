"""All meshes of a number of devices.

The order of axes is their placement: meshes are row-major, so that the innermost axis lies within a node as far as
it fits (see `axis_link`). Several axes in place of one also split what one cannot: 8 devices as 4x2 share 4 heads
along one axis and something else along the other.
"""

from dataclasses import replace

from tapas.errors import TapasError
from tapas.hardware.cluster import Cluster, Mesh

MOST_AXES = 3  # of a mesh
MOST_DEVICES = 1_000_000


def factorizations(devices: int, axes: int = MOST_AXES) -> list[Mesh]:
    """Every mesh of so many devices, axes of one device left out; those of few axes first."""
    if devices == 1:
        return [Mesh((1,))]
    return [Mesh(sizes) for many in range(1, axes + 1) for sizes in _products(devices, many)]


def _products(number: int, many: int) -> list[tuple[int, ...]]:
    """All ways to write a number as a product of so many factors above 1, order counts."""
    if many == 1:
        return [(number,)] if number > 1 else []
    divisors = (d for d in range(2, number // 2 + 1) if number % d == 0)
    return [(first, *rest) for first in divisors for rest in _products(number // first, many - 1)]


def counted(
    cluster: Cluster, devices: int | None, nodes: int | None, per_node: int | None, mesh: Mesh | None = None
) -> tuple[Cluster, int | None]:
    """The cluster with as many devices to a node as were asked for, and how many devices there are, if that was
    said; what was said twice has to agree."""
    given = [("--devices", devices), ("--nodes", nodes), ("--per-node", per_node)]
    for option, value in given:
        if value is not None and not 1 <= value <= MOST_DEVICES:
            raise TapasError(f"{option} {value}", "is not a number of them", f"give 1 to {MOST_DEVICES:,}")
    if per_node is not None:
        cluster = replace(cluster, per_node=per_node)
    if nodes is not None:
        there = nodes * cluster.per_node
        if devices not in (None, there):
            fact = f"{nodes} nodes of {cluster.per_node} are {there} devices"
            raise TapasError(f"--devices {devices} --nodes {nodes}", fact, "leave one of them out")
        devices = there
    if devices is not None and mesh is not None and mesh.devices != devices:
        fact = f"the mesh takes {mesh.devices} devices, but there are {devices}"
        raise TapasError(f"--mesh {mesh}", fact, "leave the mesh out to have all meshes tried, or correct one of them")
    return cluster, devices
