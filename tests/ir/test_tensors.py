"""Leaves and tensors of repeated submodules, which are made when somebody asks for them."""

import pickle

import pytest
import torch
from torch import Tensor, nn

from tapas.capture import capture, capture_program
from tapas.ir.graph import BLOCK, Graph, verify
from tapas.ir.inline import unfold
from tapas.ir.tensors import NamesBelow
from tapas.planner.pipeline import plan_graph
from tapas.planner.request import Request
from tests.capture.deceiving import INPUTS, LAYERS, Model


def both(model: nn.Module) -> tuple[Graph, Graph]:
    """In blocks, and traced whole."""
    return capture(model, INPUTS), capture_program(model, INPUTS, whole=True).graph


class Buffered(nn.Module):
    """A layer with a buffer that is read, and a parameter and a buffer that are not."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.unread = nn.Linear(8, 8), nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("idle", torch.ones(5, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x) * self.scale


class Skipping(Model):
    """Some of the layers never run."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers[:-1]:
            x = layer(x)
        return {"loss": self.head(x).square().mean()}


@pytest.mark.parametrize("make", [Model, lambda: Model(Buffered), Skipping, lambda: Skipping(Buffered)])
def test_leaves_are_those_of_the_whole_graph_in_the_same_order(make: type[Model]) -> None:
    folded, whole = both(make())
    assert folded.leaf_of.families and not whole.leaf_of.families
    kept = [leaf for leaf in whole.leaves if leaf.kind != "constant"]
    assert [leaf for leaf in folded.leaves if leaf.kind != "constant"] == kept
    assert [folded.tensors[leaf.tensor] for leaf in kept] == [whole.tensors[leaf.tensor] for leaf in kept]


def test_what_is_asked_for_by_name_is_what_is_listed() -> None:
    graph = capture(Model(Buffered), INPUTS)
    by_name = {name: graph.leaf_of[name] for name in list(graph.leaf_of)}
    assert by_name == dict(graph.leaf_of.items()) and len(by_name) == len(graph.leaf_of)
    assert {name: graph.tensors[name] for name in graph.tensors} == dict(graph.tensors.items())
    assert len(graph.tensors) == len(list(graph.tensors))
    for unknown in ("layers", "layers.0", "layers.0.up", "layers.0.up.weights", f"layers.{LAYERS}.up.weight", ""):
        assert unknown not in graph.leaf_of and unknown not in graph.tensors
        with pytest.raises(KeyError):
            graph.leaf_of[unknown]


def test_one_leaf_stands_for_all_that_are_alike() -> None:
    graph = capture(Model(Buffered), INPUTS)
    assert sum(times for _, times in graph.leaf_of.distinct) == len(graph.leaf_of)
    alike = {leaf.tensor: times for leaf, times in graph.leaf_of.distinct}
    assert alike["layers.0.up.weight"] == alike["layers.0.idle"] == LAYERS and alike["head.weight"] == 1


def test_planning_does_not_write_them_out() -> None:
    graph = capture(Model(), INPUTS)
    plan = plan_graph(graph, Request.of("2x2", memory=None))
    assert "layers.*.up.weight" in plan.parameters
    assert "_all" not in vars(graph.leaf_of) and "_all" not in vars(graph.tensors)


def test_calls_do_not_name_what_a_submodule_holds_alone() -> None:
    model = Model()
    model.layers[1].up.weight = model.layers[0].up.weight
    graph = capture(model, INPUTS)
    read = {op.module: set(op.operands) & set(model.state_dict()) for op in graph.ops if op.target == BLOCK}
    assert not any(read[f"layers.{i}"] for i in range(2, LAYERS))
    assert "layers.0.up.weight" in read["layers.0"] & read["layers.1"]
    assert graph.readers["layers.0.up.weight"] == graph.ops[1:3]
    assert [op.module for op in graph.readers["layers.3.up.weight"]] == ["layers.3"]


def test_they_outlive_a_pickle_and_writing_out() -> None:
    graph = capture(Model(Buffered), INPUTS)
    again = pickle.loads(pickle.dumps(graph))
    assert again == graph and str(again) == str(graph)
    assert set(verify(unfold(graph)).leaf_of) == set(graph.leaf_of)


def test_names_below_a_path() -> None:
    names = NamesBelow("layers.3", ("up.weight", "up.bias"))
    assert list(names) == ["layers.3.up.weight", "layers.3.up.bias"] == [names[0], names[1]]
    assert names == ("layers.3.up.weight", "layers.3.up.bias") and names[1:] == ("layers.3.up.bias",)
    assert (
        names != NamesBelow("layers.4", ("up.weight", "up.bias"))
        and len({names, NamesBelow(names.path, names.names)}) == 1
    )
    assert not NamesBelow("layers.3", ())
