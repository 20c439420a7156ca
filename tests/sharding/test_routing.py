"""Routes between layouts: the move table, shortest paths, nesting, and what is sent."""

from dataclasses import replace
from itertools import combinations, pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tapas.cost.collectives import AxisLink, ClusterRouter, collective_seconds
from tapas.hardware.cluster import COLLECTIVES, Link
from tapas.hardware.cluster_files import load_cluster
from tapas.hardware.mesh import Mesh
from tapas.ir.graph import Tensor
from tapas.sharding.layout import B, P, R, S, State, local_elements
from tapas.sharding.layout_grid import steps_between
from tapas.sharding.route import conversion
from tapas.sharding.routing import TIE, LayoutSpace
from tapas.verify.launches import copies_of
from tests.properties import examples

MANY = settings(max_examples=examples(60), deadline=None, derandomize=True)
H100S = load_cluster("h100-sxm")
CLUSTER = replace(H100S, intra=replace(H100S.intra, times=()))  # for curves see tests/cost/test_curves.py
ADJOINT = {"R": R, "B": P, "P": B}

# DESIGN 2.1: forward and backward of every move along one axis; "" is free
MOVES = {
    ("S", "S"): ("all_to_all", "all_to_all"), ("S", "R"): ("all_gather", ""),
    ("S", "B"): ("all_gather", "reduce_scatter"), ("S", "P"): ("", ""),
    ("R", "S"): ("", "all_gather"), ("R", "B"): ("", "all_reduce"), ("R", "P"): ("", ""),
    ("B", "S"): ("", ""), ("B", "R"): ("", ""), ("B", "P"): ("", ""),
    ("P", "S"): ("reduce_scatter", "all_gather"), ("P", "R"): ("all_reduce", ""),
    ("P", "B"): ("all_reduce", "all_reduce"),
}  # fmt: skip


def space(
    mesh: tuple[int, ...], shape: tuple[int, ...], states: list[State], differentiable: bool = True
) -> LayoutSpace:
    return ClusterRouter(Mesh(mesh), CLUSTER).space(Tensor("t", shape, "bfloat16", differentiable), states)


@st.composite
def spaces(draw: st.DrawFn) -> LayoutSpace:
    mesh = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.sampled_from([2, 3, 7, 8, 64, 1000]), min_size=1, max_size=2)))
    splits = [S(d) for d in range(len(shape))]
    if shape[0] == 64 and draw(st.booleans()):
        splits.append(S(0, ((32, 8),) * 2))
    return space(mesh, shape, [P, *splits], draw(st.booleans()))


# -- one axis ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"), [(a, b) for a in (S(0), S(1), R, B, P) for b in (S(0), S(1), R, B, P) if a != b]
)
def test_move_table(old: State, new: State) -> None:
    """Each move sends what the table says, and takes as long as that takes.

    A single step, not a route: the cheapest way may be another one (S to B to P is as free as S to P)."""
    here = space((8,), (4096, 4096), [P, S(0), S(1)])
    source, target = here.find((old,)), here.find((new,))
    made = here.step(source, target)
    expected = MOVES[old.kind, new.kind]
    assert tuple(kind if kind in COLLECTIVES else "" for kind in (made.forward, made.backward)) == expected
    whole = 4096 * 4096 * 2
    for kind, seconds in zip(expected, (made.forward_seconds, made.backward_seconds), strict=True):
        sent = whole / 8 if kind == "all_to_all" else whole
        splits = [state.dim for state in (old, new) if state.sharded]
        # what is split on the second dim is copied once, and so is what is summed
        family = {"all_reduce": "pointwise"}.get(kind, "strided")
        copied = 2 * sent / CLUSTER.device.memory_bytes_per_s / CLUSTER.device.family(family).forward
        copies = kind == "all_reduce" or (bool(kind) and 1 in splits)
        sending = collective_seconds(kind, sent, AxisLink.of(8, CLUSTER.intra)) if kind else 0.0
        assert seconds == pytest.approx(sending + copies * copied)
    assert made.nbytes == (whole / 8 if "all_to_all" in expected else whole)


@pytest.mark.parametrize(("old", "new"), [(a, b) for a in (S(0), R, B, P) for b in (S(0), R, B, P)])
def test_backward_is_the_forward_of_the_adjoint_move(old: State, new: State) -> None:
    """What a gradient does on its way back is what a value does between the adjoint states."""

    def adjoint(state: State) -> State:
        return ADJOINT.get(state.kind, state)

    backward = conversion(new.gradient, old.gradient)
    assert backward == conversion(adjoint(new).value, adjoint(old).value)


def test_without_a_gradient_nothing_is_sent_back() -> None:
    here = space((4,), (64, 64), [P, S(0), S(1)], differentiable=False)
    assert B not in here.states
    assert not here.steps[1][np.isfinite(here.steps[1])].any()


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives(kind: str) -> None:
    link, axis = CLUSTER.intra, AxisLink.of(8, CLUSTER.intra)
    one = collective_seconds(kind, 1e9, axis)
    assert one >= 7 / 8 * 1e9 / link.bytes_per_s
    assert collective_seconds(kind, 2e9, axis) > one
    assert collective_seconds(kind, 1e9, AxisLink.of(1, link)) == 0
    assert collective_seconds(kind, np.array([1e9, 2e9]), axis)[0] == one  # type: ignore[index]


def test_a_collective_without_a_price_is_an_error() -> None:
    with pytest.raises(KeyError, match="gossip"):
        collective_seconds("gossip", 1e9, AxisLink.of(8, CLUSTER.intra))


def test_weights_travel_in_one_message_over_all_axes() -> None:
    """They bear a share of its latency, and cross nodes over all of a node's cards at once."""
    router, tensor = ClusterRouter(Mesh((8, 8)), CLUSTER), Tensor("w", (4096, 4096), "bfloat16", True)
    alone, some = (router.space(tensor, [S(0)], packed=share) for share in (1.0, 0.25))
    (one,), (other,) = (here.route(here.find((S(0), S(0))), here.find((B, B))) for here in (alone, some))
    link = AxisLink.of(64, Link(min(CLUSTER.intra.bytes_per_s, 8 * CLUSTER.inter.bytes_per_s), 1e-5))
    assert one.axes == other.axes == (0, 1)
    assert one.forward_seconds == pytest.approx(collective_seconds("all_gather", 4096 * 4096 * 2, link))
    assert one.forward_seconds - other.forward_seconds == pytest.approx(0.75 * 6 * 1e-5)
    assert one.backward_seconds - other.backward_seconds == pytest.approx(0.75 * 6 * 1e-5)


@MANY
@given(
    st.lists(st.sampled_from([1, 2, 8, 16]), min_size=1, max_size=3).map(tuple), st.sampled_from([(4,), (2, 4)]),
    st.data(),
)  # fmt: skip
def test_copies_are_those_that_the_runtime_makes(shape: tuple[int, ...], mesh: tuple[int, ...], data: st.DataObject):
    """Where all ranks hold the same, which sizes are chosen for here."""
    here = space(mesh, shape, [P, *(S(d) for d in range(len(shape)))])
    assume(len(here) > 1)
    graph = steps_between(here.grid, True)
    groups = [group for group in graph.groups if len(group.steps)]
    assume(groups)
    group = data.draw(st.sampled_from(groups))
    place = data.draw(st.integers(0, len(group.steps) - 1))
    step, back = int(group.steps[place]), place >= group.forward
    source, target = (here.layout(int(ends[step])) for ends in (graph.source, graph.target))
    axes = tuple(int(a) for a in group.axes[:, place])
    old, new = source[axes[0]], target[axes[0]]
    assume(all(prod(mesh[a] for a, s in enumerate(source) if s == S(d)) in (1, 2, 4, 8) for d in range(len(shape))))
    before, after = (new.gradient, old.gradient) if back else (old.value, new.value)
    kind = conversion(before, after)
    tensor = Tensor("t", shape, "bfloat16", True)
    made = copies_of(kind, before, after, tensor, source, axes, mesh, (0,) * len(mesh))
    assert here._copies(group, graph)[place] == made


def test_all_reduce_is_scatter_and_gather() -> None:
    parts = [collective_seconds(kind, 1e8, AxisLink.of(8, CLUSTER.intra)) for kind in ("reduce_scatter", "all_gather")]
    assert collective_seconds("all_reduce", 1e8, AxisLink.of(8, CLUSTER.intra)) == pytest.approx(sum(parts))


# -- any mesh ----------------------------------------------------------------------------------------


@MANY
@given(spaces(), st.data())
def test_routes_are_what_they_cost(here: LayoutSpace, data: st.DataObject) -> None:
    source, target = (data.draw(st.integers(0, len(here) - 1)) for _ in range(2))
    moves = here.route(source, target)
    ties = TIE * len(moves)
    assert sum(m.seconds for m in moves) + ties == pytest.approx(here.seconds[source, target], rel=1e-9, abs=1e-15)
    assert sum(m.forward_seconds for m in moves) <= here.seconds[source, target]
    if here.priced:
        return
    assert all(m.backward == "none" and m.backward_seconds == 0 for m in moves)


@MANY
@given(spaces(), st.data())
def test_routes_arrive_by_steps_that_can_run(here: LayoutSpace, data: st.DataObject) -> None:
    """Each step changes one state to another on its axes; no inner axis splits a dim that it touches."""
    source, target = (data.draw(st.integers(0, len(here) - 1)) for _ in range(2))
    layout = list(here.layout(source))
    for move in here.route(source, target):
        assert all(layout[a] == move.old for a in move.axes)
        touched = {s.dim for s in (move.old, move.new) if s.sharded}
        inner = [a for a in range(move.axes[0] + 1, len(layout)) if a not in move.axes]
        assert not any(layout[a].sharded and layout[a].dim in touched for a in inner)
        before = local_elements(here.shape, tuple(layout), here.mesh)
        for a in move.axes:
            layout[a] = move.new
        assert here.find(tuple(layout)) >= 0
        after = local_elements(here.shape, tuple(layout), here.mesh)
        if {"all_gather", "reduce_scatter"} & {move.forward, move.backward}:
            # a collective moves padded pieces: as many as there are ranks, all as large as the largest
            assert move.nbytes == min(before, after) * here.itemsize * prod(here.mesh[a] for a in move.axes)
        else:
            assert move.nbytes == max(before, after) * here.itemsize
    assert tuple(layout) == here.layout(target)


@MANY
@given(spaces())
def test_triangle_inequality(here: LayoutSpace) -> None:
    assume(len(here) <= 130)
    seconds = here.seconds
    assert not np.diagonal(seconds).any()
    for via in range(len(here)):
        assert (seconds <= seconds[:, via, None] + seconds[None, via, :] + 1e-15).all()


@MANY
@given(spaces())
def test_everything_can_be_reached(here: LayoutSpace) -> None:
    assert np.isfinite(here.seconds).all()
    assert (here.forward_seconds <= here.seconds + 1e-15).all()
    assert (here.forward_seconds >= 0).all()


@MANY
@given(spaces(), st.data())
def test_ways_to_few_layouts_are_the_same(here: LayoutSpace, data: st.DataObject) -> None:
    assume(4 <= len(here) <= 130)
    some = st.lists(st.integers(0, len(here) - 1), min_size=1, max_size=len(here) // 4)
    sources = np.arange(len(here))
    for targets in (np.array(data.draw(some)), np.array(data.draw(some))):
        total, forward = here.between(sources, targets)
        assert total == pytest.approx(here.seconds[:, targets], rel=1e-12)
        assert forward == pytest.approx(here.paths.both[1][:, targets], rel=1e-12)
        del here.paths.both  # or nothing else would be looked for from now on


@MANY
@given(spaces())
def test_layouts_and_bytes(here: LayoutSpace) -> None:
    for index in range(0, len(here), 7):
        layout = here.layout(index)
        assert here.find(layout) == index
        assert here.nbytes[index] == local_elements(here.shape, layout, here.mesh) * here.itemsize
        for one, two in combinations(layout, 2):  # a dim is split in one way only
            assert not (one.sharded and two.sharded and one.dim == two.dim and one.tiling != two.tiling)
    assert here.find((S(9),) * len(here.mesh)) == -1


def test_the_outer_axis_is_not_gathered_under_the_inner_one() -> None:
    """[S(0), S(0)] to [R, S(0)] takes more than a gather over the outer axis: pieces would interleave."""
    here = space((2, 4), (1024, 1024), [P, S(0)], differentiable=False)
    both, inner = here.find((S(0), S(0))), here.find((R, S(0)))
    assert np.isinf(here.steps[0][both, inner])
    assert len(here.route(both, inner)) > 1
    outer = here.find((S(0), R))
    assert [m.forward for m in here.route(both, outer)] == ["all_gather"]


def test_a_dim_is_not_split_finer_than_its_units() -> None:
    here = space((2, 4), (64,), [S(0, ((64, 16),))])
    assert here.find((R, S(0, ((64, 16),)))) >= 0
    assert here.find((S(0, ((64, 16),)),) * 2) == -1  # eight devices, four heads


def test_hierarchical_all_reduce_beats_one_axis_after_the_other() -> None:
    """Over nodes and devices at once only a share of the bytes crosses the slow link."""
    here = space((4, 8), (8192, 8192), [P], differentiable=False)
    source, target = here.find((P, P)), here.find((R, R))
    (move,) = here.route(source, target)
    assert move.axes == (0, 1) and move.forward == "all_reduce"
    slow = collective_seconds("all_reduce", 8192 * 8192 * 2, AxisLink.of(4, CLUSTER.inter))
    assert move.seconds < slow


def test_larger_tensors_take_longer() -> None:
    costs = [space((2, 4), (n, 1024), [P, S(0), S(1)]).seconds for n in (1024, 4096, 16384)]
    for smaller, larger in pairwise(costs):
        assert (smaller <= larger + 1e-15).all()


def test_spaces_are_made_once() -> None:
    router = ClusterRouter(Mesh((2, 2)), CLUSTER)
    one = router.space(Tensor("a", (8, 8), "float32"), [S(0), P])
    assert router.space(Tensor("b", (8, 8), "int32"), [P, S(0)]) is one  # bytes count, names and dtypes do not
    assert router.space(Tensor("a", (8, 8), "float32", True), [P, S(0)]) is not one
