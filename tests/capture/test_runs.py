"""Runs of calls: what holds for the first of them need not hold for all."""

import pytest
import torch
from torch import Tensor, nn

from tapas.capture import capture
from tapas.ir.graph import BLOCK, Graph
from tapas.ir.inline import unfold
from tapas.ir.interpreter import run
from tests.capture.deceiving import INPUTS, LAYERS, WIDTH, Layer, Model, bodies, checked


def calls(graph: Graph) -> list[str]:
    return [op.module for op in graph.ops if op.target == BLOCK]


class Shifting(nn.Module):
    """What comes in first goes out last, three layers later."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.up(x) + z.detach(), x * 2, y * 3


class Register(Model):
    """Of the last layers only the last result is read, of those before them other ones."""

    def __init__(self, result: int, frozen: bool = False) -> None:
        super().__init__(Shifting, 12)
        self.result = result
        self.first.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        state = x, x.detach() + 1, torch.zeros_like(x)
        for layer in self.layers:
            state = layer(*state)
        return {"loss": self.head(state[self.result]).square().mean()}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("result", [0, 1, 2])
def test_what_is_read_changes_from_call_to_call(result: int, frozen: bool) -> None:
    graph = checked(Register(result, frozen))
    assert len(calls(graph)) > 6  # all but the first and the last few are the same


class Swapped(Model):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = y = self.first(x)
        for layer in self.layers:
            y, x = layer(x, y)
        return {"loss": self.head(x).square().mean()}


class Crossing(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.up(y), y * 2


def test_results_that_change_places() -> None:
    checked(Swapped(Crossing))


class Handing(nn.Module):
    """One result is its input, unless one looks closely."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.up(x) * y, y.view(y.shape)


class Straight(Model):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        y = x.detach()
        for layer in self.layers:
            x, y = layer(x, y)
        return {"loss": self.head(x + y).square().mean()}


@pytest.mark.parametrize("model", [Straight, Swapped])
def test_results_that_are_inputs(model: type[Model]) -> None:
    checked(model(Handing))


class Deaf(nn.Module):
    """Does not care what it is given."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.ones(2, 3, WIDTH))


def test_calls_that_nobody_needs() -> None:
    graph = checked(Model(Deaf))
    assert calls(graph) == []  # one is left, which is no repeat
    assert [op.module for op in graph.ops if "linear" in op.target] == [f"layers.{LAYERS - 1}.up", "head"]


class Skipping(Model):
    """What some layer returns is also read by the head."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = skip = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            skip = x if number == self.kept else skip
        return {"loss": self.head(x * skip.detach()).square().mean()}


@pytest.mark.parametrize("kept", range(LAYERS))
def test_results_that_others_read(kept: int) -> None:
    assert bodies(checked(Skipping(kept))) == [LAYERS]


class Fed(Model):
    """A later layer reads what an early one returned."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = early = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(early) if number == 4 else layer(x)
            early = x if number == 1 else early
        return {"loss": self.head(x).square().mean()}


def test_results_that_later_calls_read() -> None:
    graph = checked(Fed())
    assert calls(graph) == [f"layers.{i}" for i in (0, 1, 4, 5)]


class Side(nn.Module):
    """All layers read one tensor besides what the one before them made."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        return x + self.up(x) * side


class Aside(Model):
    def __init__(self, trained: bool, changes: int = LAYERS) -> None:
        super().__init__(Side)
        self.side = nn.Linear(4, WIDTH).requires_grad_(trained)
        self.changes = changes

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        side, x = self.side(x), self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(x, side if number < self.changes else side * 2)
        return {"loss": self.head(x).square().mean()}


@pytest.mark.parametrize("changes", [LAYERS, 3, 1])
@pytest.mark.parametrize("trained", [False, True])
def test_what_all_calls_share(trained: bool, changes: int) -> None:
    graph = checked(Aside(trained, changes))
    assert graph.tensors["side.weight"].differentiable == trained
    assert bodies(graph) == [LAYERS]


def test_inference() -> None:
    graph = capture(Model(), {"x": torch.zeros(2, 3, 4)}, training=False)
    assert bodies(graph) == [LAYERS] and not graph.training
    assert not any(tensor.differentiable for tensor in graph.tensors.values())


class Detaching(nn.Module):
    """Reads its input only through a detach, which the code around it does not."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x.detach())


class Residual(Model):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": self.head(x).square().mean()}


class Beside(nn.Module):
    """Reads what all layers share only through a detach."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        return x + self.up(x) * side.detach()


class Watched(Model):
    def __init__(self) -> None:
        super().__init__(Beside)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = side = self.first(x)
        for layer in self.layers:
            x = layer(x, side)
        return {"loss": self.head(x + side).square().mean()}


class Telling(nn.Module):
    """One result is made of the other."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.up(x)
        return x, x.mean()


class Told(Model):
    """The code around the layers reads one result only through a detach, a gradient flows through it all the same."""

    def __init__(self, between: bool) -> None:
        super().__init__(Telling)
        self.between = between

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, total = self.first(x), torch.zeros(())
        for layer in self.layers:
            x, mean = layer(x.detach() if self.between else x)
            total = total + mean
        return {"loss": self.head(x.detach()).square().mean() * total}


@pytest.mark.parametrize(
    "model", [lambda: Residual(Detaching), Watched, lambda: Told(False), lambda: Told(True)],
    ids=["inside", "shared", "after", "between"],
)  # fmt: skip
def test_what_is_detached_stays_detached(model: type[Model]) -> None:
    """Gradients too: the graph in blocks, replayed, has those of the model."""
    made = model()
    graph = unfold(checked(made))
    assert any(op.target == "aten.detach.default" for op in graph.ops)
    leaves = {name: value.detach().requires_grad_() for name, value in made.named_parameters()}
    (loss,) = run(graph, leaves | {"x": INPUTS["x"]})
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    wanted = torch.autograd.grad(made(**INPUTS)["loss"], list(made.parameters()), allow_unused=True)
    for name, one, two in zip(leaves, found, wanted, strict=True):
        assert (one is None) == (two is None), name
        if one is not None and two is not None:
            torch.testing.assert_close(one, two)


class Flat(Layer):
    """Returns its result in another shape than the code around it uses."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1, WIDTH)


class Unflat(Model):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).view(2, 3, WIDTH)
        return {"loss": self.head(x).square().mean()}


def test_results_that_are_reshaped_back() -> None:
    assert bodies(checked(Unflat(Flat))) == [LAYERS]
