"""The tables that the search gets: what is a variable, what an edge costs, what may be left out."""

from collections.abc import Iterable
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapas.capture import capture
from tapas.cost.collectives import ClusterRouter
from tapas.hardware.cluster_files import load_cluster
from tapas.hardware.mesh import parse_mesh
from tapas.ir.fold import fold
from tapas.ir.graph import Graph
from tapas.planner.fit import search
from tapas.problem.build import build_problem
from tapas.problem.problem import OpVariable, Problem, TensorVariable, WeightVariable
from tapas.search import solve
from tapas.sharding.layout import R, State
from tapas.sharding.routing import LayoutSpace


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """A transformer in a few lines: everything the tables know occurs in it."""

    def __init__(self, layers: int = 3, width: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(8192, width)
        self.layers = nn.ModuleList(Attention(width, 16) for _ in range(layers))
        self.head = nn.Linear(width, 8192)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@cache
def graph() -> Graph:
    with torch.device("meta"):
        ids = [torch.zeros(16, 256, dtype=torch.int64) for _ in range(2)]
        return capture(Model(), tuple(ids), training=True, name="model")


@cache
def problem(mesh: str) -> Problem:
    return build_problem(fold(graph()), ClusterRouter(parse_mesh(mesh), load_cluster("h100-sxm")))


each_mesh = pytest.mark.parametrize("mesh", ["4", "2x4"])


@each_mesh
def test_leaving_out_dominated_choices_keeps_the_optimum(mesh: str) -> None:
    part = problem(mesh)
    kept, all_of_them = part.network(part.rows()), part.network({})
    assert sum(sum(b.sizes) for b in kept.blocks) < sum(sum(b.sizes) for b in all_of_them.blocks)
    assert solve(kept).cost == pytest.approx(solve(all_of_them).cost, rel=1e-9)


@each_mesh
def test_fewer_choices_never_help(mesh: str) -> None:
    part, random = problem(mesh), np.random.default_rng(0)
    best = search(part).answer.cost
    inner = [
        (b, v, len(variable.seconds))
        for b, block in enumerate(part.blocks)
        for v, variable in enumerate(block.variables)
        if v not in block.exports
    ]
    for _ in range(5):
        rows = {(b, v): np.sort(random.permutation(n)[: max(1, n // 2)]) for b, v, n in inner if random.random() < 0.3}
        found = search(part, rows)
        assert found.answer.cost >= best * (1 - 1e-9)
        for copy, own in zip(part.folded.copies, found.answer.choices, strict=True):  # choices of the full tables
            assert all(choice in rows[copy.block, v] for v, choice in enumerate(own) if (copy.block, v) in rows)


def test_copies_that_share_a_port_cannot_be_pinned_apart() -> None:
    part = problem("4")
    repeated = next(b for b in range(len(part.blocks)) if len(part.folded.copies_of(b)) > 1)
    with pytest.raises(ValueError, match="pinned differently"):
        part.network({(repeated, part.blocks[repeated].exports[0]): np.array([0])})


@each_mesh
def test_what_is_a_variable(mesh: str) -> None:
    """Operators, weights, and tensors that several operators or other blocks read; no inputs."""
    part = problem(mesh)
    leaves = {leaf.tensor: leaf.kind for leaf in part.folded.leaves}
    for block in part.blocks:
        operators = [v.op for v in block.variables if isinstance(v, OpVariable)]
        assert tuple(operators) == block.block.ops
        assert [v.tensor.name for v in block.variables if isinstance(v, WeightVariable)] == list(block.block.weights)
        reads = [name for op in operators for name in op.operands]
        tensors = [v.tensor.name for v in block.variables if isinstance(v, TensorVariable)]
        made = {*block.block.weights, *(name for op in operators for name in op.results)}
        assert set(tensors) == {n for n in made if reads.count(n) > 1 or n in block.block.exports}
        assert not any(leaves.get(edge.tensor) in ("input", "constant", "buffer") for edge in block.edges)


def layouts(space: LayoutSpace, *numbers: int) -> Iterable[tuple[State, ...]]:
    """Axis by axis."""
    return zip(*(space.layout(int(number)) for number in numbers), strict=True)


@each_mesh
def test_every_edge_costs_its_route(mesh: str) -> None:
    """Seconds of an edge are those between the layouts at its ends; a weight's gather and its gradient may hide."""
    hidden = 0
    for block in problem(mesh).blocks:
        for edge in block.edges:
            costs = edge.costs()
            assert costs.shape == (len(edge.source_layouts), len(edge.target_layouts))
            for i, j in ((0, 0), (-1, -1), (len(costs) // 2, costs.shape[1] // 3)):
                source, target = edge.source_layouts[i], edge.target_layouts[j]
                total, ahead = edge.space.seconds[source, target], edge.space.forward_seconds[source, target]
                if edge.hidden is None and edge.ahead is None:
                    assert costs[i, j] == total
                else:
                    hidden += 1
                    before = 0.0 if edge.ahead is None else edge.ahead[j]
                    behind = 0.0 if edge.hidden is None else edge.hidden[j]
                    waited = total - edge.overlap * (min(ahead, before) + min(total - ahead, behind))
                    if any(a.sharded and b.sharded and a != b for a, b in layouts(edge.space, source, target)):
                        waited = total  # exchanged where it is read
                    assert costs[i, j] == pytest.approx(waited, abs=1e-12)
                # a second time it takes no longer, and hides behind more if its reader is computed again, too
                twice, once = edge.again(True)[i, j], edge.again(False)[i, j]
                assert 0.0 <= twice <= once <= ahead + 1e-15
            rows, columns = np.arange(0, len(costs), 2), np.arange(0, costs.shape[1], 3)
            assert np.array_equal(edge.costs(rows, columns), costs[np.ix_(rows, columns)])
    assert hidden


@each_mesh
def test_choices_fit_the_layouts_they_ask_for(mesh: str) -> None:
    for block in problem(mesh).blocks:
        spaces = {e.tensor: e.space for e in block.edges if e.target not in block.outputs.values()}
        for variable in block.variables:
            if not isinstance(variable, OpVariable):
                continue
            for choice in range(0, len(variable.table), 5):
                made = variable.table.choice(choice)
                for position, name in enumerate(variable.op.operands):
                    if name in spaces:
                        assert spaces[name].find(made.operand(position)) == variable.table.operands[position][choice]
            assert (variable.table.seconds >= 0).all()
            assert np.isfinite(variable.table.seconds).all()


@each_mesh
def test_weights_are_stored_whole_or_split(mesh: str) -> None:
    for block in problem(mesh).blocks:
        for variable in block.variables:
            if isinstance(variable, WeightVariable):
                layouts = [variable.space.layout(int(i)) for i in variable.stored]
                assert all(state == R or state.sharded for layout in layouts for state in layout)


@each_mesh
def test_the_loss_is_whole_and_outputs_are_no_partial_sums(mesh: str) -> None:
    part = problem(mesh)
    for place, wanted in part.folded.leaving.items():
        states = "R" if wanted.whole else "RS"
        block = part.blocks[part.folded.copies[place[0]].block]
        variable = block.variables[block.outputs[place[1]]]
        assert isinstance(variable, TensorVariable)
        layouts = [variable.space.layout(int(i)) for i in variable.allowed]
        assert layouts and all(state.kind in states for layout in layouts for state in layout)


def test_nothing_is_missing() -> None:
    assert problem("4").missing == ()


def test_depth_changes_no_table() -> None:
    """Copies share their block's tables: a deeper model has a longer list of copies and nothing else."""
    with torch.device("meta"):
        ids = [torch.zeros(16, 256, dtype=torch.int64) for _ in range(2)]
        deep = capture(Model(9), tuple(ids), training=True)
    other = build_problem(fold(deep), ClusterRouter(parse_mesh("4"), load_cluster("h100-sxm")))
    mine, theirs = problem("4").network({}), other.network({})
    assert [b.sizes for b in mine.blocks] == [b.sizes for b in theirs.blocks]
    assert len(theirs.copies) == len(mine.copies) + 6
    for one, two in zip(mine.blocks, theirs.blocks, strict=True):
        assert all(np.array_equal(s.array, t.array) for s, t in zip(one.tables, two.tables, strict=True))


def test_rows_of_numbers_are_no_sequences() -> None:
    """Of tokens the second dim is the sequence; of plain numbers it is features."""
    tokens, numbers = torch.zeros(4, 6, dtype=torch.long), torch.randn(4, 6)
    for inputs, role in ((tokens, "sequence"), (numbers, "")):
        module = nn.Sequential(nn.Embedding(8, 6) if role else nn.ReLU(), nn.Linear(6, 6))
        captured = capture(module, (inputs,), training=False)
        problem = build_problem(fold(captured), ClusterRouter(parse_mesh("2"), load_cluster("h100-sxm")))
        leaf = problem.folded.inputs[0].tensor
        assert problem.roles.of_dim(leaf, 0) == "batch" and problem.roles.of_dim(leaf, 1) == role
