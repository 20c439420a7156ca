"""Values that are equal but not the same, and tensors that are the same memory but not one."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tapas.capture import capture
from tapas.errors import GraphError
from tapas.ir.graph import BLOCK, Leaves, Tensors, verify
from tests.capture.deceiving import INPUTS, LAYERS, WIDTH, Layer, Model, bodies, checked


class Signed(Layer):
    """`value` is a zero."""

    def __init__(self, number: int, value: Any) -> None:
        super().__init__(number)
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        value = self.value[0] if isinstance(self.value, (tuple, list)) else self.value
        return x + self.down(self.inner(x)) * math.copysign(1.0, value)


@pytest.mark.parametrize("hold", [lambda v: v, lambda v: (v, 1), lambda v: [v]], ids=["alone", "tuple", "list"])
def test_zeros_of_both_signs(hold: Callable[[float], Any]) -> None:
    assert bodies(checked(Model(lambda number: Signed(number, hold(-0.0 if number == 3 else 0.0))))) == [LAYERS - 1]


class Given(Model):
    """Layers get `value` as an argument, the fourth another one."""

    def __init__(self, layer: Callable[[int], nn.Module], values: tuple[Any, Any]) -> None:
        super().__init__(layer)
        self.values = values

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(x, self.values[number == 3])
        return {"loss": self.head(x).square().mean()}


class Scaled(Layer):
    def forward(self, x: Tensor, value: float) -> Tensor:  # type: ignore[override]
        return x + self.down(self.inner(x)) * math.copysign(1.0, value)


class Keyed(Layer):
    def forward(self, x: Tensor, value: dict) -> Tensor:  # type: ignore[override]
        return x + self.down(self.inner(x)) * (2.0 if isinstance(next(iter(value)), bool) else 3.0)


def test_zeros_and_keys_as_arguments() -> None:
    assert bodies(checked(Given(Scaled, (0.0, -0.0)))) == [LAYERS - 1]
    assert bodies(checked(Given(Keyed, ({1: 2}, {True: 2})))) == [LAYERS - 1]


class Noting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(x)) * getattr(x, "note", 1.0)


class Notes(Model):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x.note = float(number)  # type: ignore[attr-defined]
        return {"loss": self.head(x).square().mean()}


def test_notes_on_results() -> None:
    checked(Notes(Noting))


class Aliased(Model):
    """A buffer in the memory of a layer's parameter."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.read = read
        self.register_buffer("alias", self.layers[1].up.weight.detach())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(x)["loss"] * (self.alias.sum() if self.read else 1.0)}


@pytest.mark.parametrize("read", [False, True])
def test_a_parameter_is_not_the_buffer_in_its_memory(read: bool) -> None:
    model = Aliased(read)
    graph = checked(model)
    assert graph.leaf_of["layers.1.up.weight"].kind == "parameter" and graph.leaf_of["alias"].kind == "buffer"
    assert [leaf.tensor for leaf in graph.parameters()] == [name for name, _ in model.named_parameters()]


class Hiding(Model):
    """Reads a module inside of a layer by a reference that nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [self.layers[3].norm]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.head(self.hidden[0](x)).square().mean()}


def test_weights_reached_by_another_way() -> None:
    graph = checked(Hiding())
    assert len([op for op in graph.ops if "layers.3.norm.weight" in op.operands]) == 2


def test_a_graph_whose_calls_read_what_is_not_there_does_not_verify() -> None:
    graph = capture(Model(), INPUTS)
    calls = [number for number, op in enumerate(graph.ops) if op.target == BLOCK]

    def changed(number: int, **what: Any) -> None:
        ops = list(graph.ops)
        ops[number] = replace(ops[number], **what)
        with pytest.raises(GraphError):
            verify(replace(graph, ops=tuple(ops)))

    call = graph.ops[calls[2]]
    changed(calls[2], module="nowhere.7")
    changed(calls[2], args=(*call.args[:2], (*call.args[2][:-1], "other.weight")))
    changed(calls[2], args=(*call.args[:2], call.args[2][:-1]))
    changed(0, results=("layers.3.up.weight",))
    assert verify(replace(graph, outputs=(*graph.outputs, "layers.3.up.weight")))
    with pytest.raises(GraphError):
        verify(replace(graph, leaf_of=Leaves(graph.leaf_of.explicit), tensors=Tensors(graph.tensors.explicit)))


def test_the_memory_of_a_layer_may_be_a_view() -> None:
    """Two layers hold different parts of one tensor: they are not tied."""
    model = Model()
    whole = torch.randn(2 * 16, WIDTH)
    for number in (1, 4):
        model.layers[number].up.weight = nn.Parameter(whole[16 * (number > 1) :][:16])
    graph = checked(model)
    assert all(len(leaf.paths) == 1 for leaf in graph.leaves) and bodies(graph) == [LAYERS]


class Rate:
    value = 1.0  # of the class


class Settings:
    def __init__(self) -> None:
        self.rate = Rate()


class Rated(Layer):
    """Reads what a class holds, through an object inside of an object."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.settings = Settings()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(x)) * self.settings.rate.value


class Rating(Model):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            Rate.value = 2.0 if number == 3 else 1.0
            x = layer(x)
        return {"loss": self.head(x).square().mean()}


def test_classes_of_objects_inside_of_objects() -> None:
    assert bodies(checked(Rating(Rated))) in ([], [LAYERS - 1])
