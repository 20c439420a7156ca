"""Layers that run differently in ways that only a close look at what is dispatched can tell."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tapas._torch import TorchDispatchMode
from tapas.capture import capture, capture_program
from tapas.errors import CaptureError
from tapas.ir.equivalence import differences
from tapas.ir.graph import Graph
from tests.capture.deceiving import INPUTS, LAYERS, Called, Layer, Model, bodies, checked


def different(change: Callable[[Layer, Tensor], Tensor], odd: int = 2) -> Callable[[int], Layer]:
    """Layers of which one does something with its result."""

    class Different(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return change(self, y) if self.number == odd else y

    return Different


def compared(model: nn.Module) -> Graph:
    """The captured graph, which is that of all copies traced; its values are not looked at."""
    graph = capture_program(model, INPUTS).graph
    assert differences(graph, capture_program(model, INPUTS, whole=True).graph) == []
    return graph


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class DoubledToo(Doubled):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def _without_grad(layer: Layer, y: Tensor) -> Tensor:
    with torch.no_grad():
        return y * 1.5


def _lower(layer: Layer, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return y + layer.up(y).sum().float()


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, y: y.detach(), lambda layer, y: y * torch.tensor(2.0), lambda layer, y: F.relu(y),
        lambda layer, y: y.view(-1).view(y.shape), lambda layer, y: y + torch.arange(8.0), _without_grad, _lower,
        lambda layer, y: y.detach().requires_grad_(), lambda layer, y: F.linear(y, layer.up.weight[:8]),
        lambda layer, y: F.linear(y, layer.up.weight[8:]),
    ],
)  # fmt: skip
def test_one_layer_does_more(change: Callable[[Layer, Tensor], Tensor]) -> None:
    found = bodies(compared(Model(different(change))))
    assert found  # those after a layer that cuts the gradient off may be a body of their own
    assert sum(found) < LAYERS


@pytest.mark.parametrize(
    "value",
    [lambda n: -0.0 if n == 2 else 0.0, lambda n: True if n == 2 else 1, lambda n: float("nan") if n == 2 else 0.5,
     lambda n: 1 if n == 2 else 1.0],
    ids=["zero", "true", "nan", "one"],
)  # fmt: skip
def test_values_that_are_equal_but_not_the_same(value: Callable[[int], Any]) -> None:
    class Adding(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).clamp(min=value(self.number))

    class Constant(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.tensor([value(self.number)])

    assert bodies(compared(Model(Adding))) == [LAYERS - 1]
    captured = capture_program(Model(Constant), INPUTS)  # the same body, but it is given another tensor
    assert len({str(value) for value in captured.constants.values()}) == 2


def test_nan_is_nan() -> None:
    class Adding(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + float("nan") + torch.tensor([float("nan")])

    assert bodies(capture(Model(Adding), INPUTS)) == [LAYERS]


@pytest.mark.parametrize(("scale", "kinds"), [(lambda n: n, []), (lambda n: n // 3, [3, 3])])
def test_the_number_of_the_layer_as_a_scale(scale: Callable[[int], int], kinds: list[int]) -> None:
    class Scaled(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / (1 + scale(self.number))

    assert bodies(checked(Model(Scaled))) == kinds


def test_custom_functions_with_the_same_forward() -> None:
    class Custom(Layer):
        def forward(self, x: Tensor) -> Tensor:
            kind = DoubledToo if self.number == 2 else Doubled
            return super().forward(kind.apply(x))  # type: ignore[arg-type]

    graph = capture(Model(Custom), INPUTS)
    assert graph.notes == ()
    assert bodies(graph) == [LAYERS - 1]  # the forward passes are the same, what comes back is not


def test_dropout() -> None:
    class Dropping(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.1 if self.number < 3 else 0.25)

    assert bodies(compared(Model(Dropping))) == [3, 3]


def test_constants_of_a_module_and_of_each_layer() -> None:
    table = torch.arange(8.0)

    class Shared(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * table

    class Own(Layer):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.table = torch.full((8,), 1.0 + number)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.table

    assert bodies(checked(Model(Shared))) == [LAYERS]
    assert bodies(checked(Model(Own))) == [LAYERS]  # each is given its own


def test_a_weight_from_elsewhere() -> None:
    """To the layers it is a constant; to the model it is a parameter."""
    model = Model()

    class Reading(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * model.first.weight.sum()

    model.layers = nn.ModuleList(map(Reading, range(LAYERS)))
    checked(model)


@pytest.mark.parametrize("limit", [3, 7])
def test_a_layer_that_changes_after_some_calls(limit: int) -> None:
    class Tiring(Layer):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Tiring.calls += 1
            return super().forward(x) * (1 if Tiring.calls <= limit else 2)

    graph = capture(Model(Tiring), INPUTS)
    assert "the next time" in graph.notes[0]
    assert bodies(graph) == []


def test_a_layer_that_changes_with_every_other_call() -> None:
    class Turning(Layer):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Turning.calls += 1
            return super().forward(x) * (1 + Turning.calls % 2)

    assert "the next time" in capture(Model(Turning), INPUTS).notes[0]


def test_a_hook_on_a_tensor() -> None:
    class Hooking(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.number == 4:
                y.register_hook(lambda grad: 2 * grad)
            return y + 1

    with pytest.raises(CaptureError, match="a hook on a tensor, which would be lost"):
        capture(Model(Hooking), INPUTS)


class Keeping(Layer):
    """Code around it may read what it keeps."""

    past: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.past = super().forward(x)
        return self.past


store: list[Tensor] = []


class Storing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        store[:] = [self.inner(x)]
        return super().forward(x)


class Freezing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.requires_grad_(self.number != 3)
        return super().forward(x)


class Written(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x[0] = 0
        return super().forward(x)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(Keeping, "attribute past"), (Storing, "keeps a tensor"), (Freezing, "freezes"),
     (Written, "in-place")],
)  # fmt: skip
def test_what_cannot_be_folded_is_traced_and_said(layer: type[Layer], reason: str) -> None:
    model = Model(layer)
    frozen = [parameter.requires_grad for parameter in model.parameters()]
    graph = capture(model, INPUTS)
    assert bodies(graph) == []
    (note,) = graph.notes
    assert note.startswith(f"{LAYERS} submodules, layers.0 to layers.{LAYERS - 1}, are traced one by one: layers.")
    assert reason in note
    assert layer is Freezing or frozen == [parameter.requires_grad for parameter in model.parameters()]
    assert layer is Keeping or not any("past" in vars(layer) for layer in model.layers)


def test_layers_that_call_each_other() -> None:
    class Asking(Layer):
        others: list[nn.Module]

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + Layer.forward(self.others[0], y) if self.number == 3 else y  # type: ignore[arg-type]

    class Calling(Asking):
        def forward(self, x: Tensor) -> Tensor:
            y = Layer.forward(self, x)
            return y + self.others[0](y) if self.number == 3 else y

    for layer in (Asking, Calling):
        model = Model(layer)
        for each in model.layers:
            vars(each)["others"] = [model.layers[0]]
        graph = checked(model)
        assert bodies(graph) == []
        assert graph.notes


def test_a_mistake_in_one_layer_is_explained_by_tracing_all() -> None:
    class Wrong(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if self.number != 4 else x[..., :3])

    with pytest.raises(Exception, match=r"layers\.4"):
        capture(Model(Wrong), INPUTS)


def test_checkpointed_layers() -> None:
    class Saving(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[return-value]

    assert bodies(checked(Model(Saving))) == [LAYERS]


def test_plain_arguments() -> None:
    class Told(Layer):
        def forward(self, x: Tensor, *, options: dict[str, Any], mode: str = "add") -> tuple[Tensor, dict[str, Any]]:
            y = super().forward(x) * options["scale"]
            return (y + x if mode == "add" else y - x), {"mode": mode, "scale": options["scale"]}

    def way(layers: Any, x: Tensor) -> Tensor:
        for number, layer in enumerate(layers):
            x, said = layer(x, options={"scale": 0.0 if number < 4 else -0.0}, mode="add" if number < 2 else "sub")
            x = x * 2 if said["mode"] == "add" else x
        return x

    assert bodies(checked(Called(way, Told))) == [2, 2, 2]


def test_a_shared_module_inside_of_layers() -> None:
    """All hold the same norm: its weight is one leaf."""
    norm = nn.LayerNorm(8)

    class Sharing(Layer):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.norm = norm

    graph = checked(Model(Sharing))
    assert bodies(graph) == [LAYERS]
    assert len(graph.leaf_of["layers.0.norm.weight"].paths) == LAYERS


def test_a_profiler_is_left_alone() -> None:
    calls = []

    def profile(*_: Any) -> None:
        calls.append(1)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        graph = capture(Model(), INPUTS)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(before)
    assert bodies(graph) == [LAYERS]
    assert calls


class Doubling(TorchDispatchMode):
    """Changes products, which linear is made of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        return result * 2 if func is torch.ops.aten.addmm.default else result


def _attended(layer: Layer, y: Tensor, **options: Any) -> Tensor:
    heads = y.view(*y.shape[:2], 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, **options).transpose(1, 2).reshape(y.shape)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"scale": 0.25}, {"attn_mask": None, "dropout_p": 0.0}])
def test_attention_is_compared_by_its_arguments(options: dict[str, Any]) -> None:
    class Attending(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return _attended(self, super().forward(x), **(options if self.number == 2 else {}))

    found = bodies(compared(Model(Attending)))
    same = options == {"attn_mask": None, "dropout_p": 0.0}  # written in another way: traced, and yet the same
    assert found == [LAYERS if same else LAYERS - 1]


def test_modes_below_linear_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    class Moded(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with Doubling() if self.number == 2 else nullcontext():
                return super().forward(x)

    caplog.set_level("DEBUG", "tapas")
    compared(Model(Moded))
    assert "layers.2 is not a copy of layers.0" in caplog.text


def test_results_of_linear_are_written_to() -> None:
    class Writing(Layer):
        def inner(self, x: Tensor) -> Tensor:
            return self.up(self.norm(x)).relu_()

    assert bodies(checked(Model(Writing))) == [LAYERS]


def test_a_gradient_within_a_layer_is_not_guessed() -> None:
    class Differentiating(Layer):
        def forward(self, x: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(self.inner(x).sum(), x if self.number != 2 else self.up.weight)
            return super().forward(x) + slope.sum()

    try:
        graph = capture(Model(Differentiating), INPUTS)
    except CaptureError:
        return  # an export cannot take gradients either
    assert bodies(graph) == []
