"""Models built to deceive a capture that traces one layer for many, and how its result is checked."""

import itertools
import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapas.capture import capture_program
from tapas.ir.equivalence import differences
from tapas.ir.graph import BLOCK, Graph, verify
from tapas.ir.inline import unfold
from tapas.ir.interpreter import leaf_values, run

WIDTH, LAYERS = 8, 6


class Layer(nn.Module):
    """Deceives nobody."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(x))


class Model(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module] = Layer, layers: int = LAYERS) -> None:
        super().__init__()
        self.first, self.layers, self.head = (
            nn.Linear(4, WIDTH),
            nn.ModuleList(map(layer, range(layers))),
            nn.Linear(8, 1),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.head(x).square().mean()}


INPUTS = {"x": torch.arange(24.0).view(2, 3, 4) / 24}


def bodies(graph: Graph) -> list[int]:
    """How often each body is called."""
    called = [op.args[0] for op in graph.ops if op.target == BLOCK]
    return sorted((called.count(number) for number in set(called)), reverse=True)


def checked(model: nn.Module, inputs: Any = None, fresh: Callable[[], None] = lambda: None) -> Graph:
    """The captured graph, which is that of all copies traced, and computes what the model computes.

    `fresh` puts back what a run of the model changes."""
    inputs = inputs or INPUTS
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    fresh()
    captured = capture_program(model, inputs)
    fresh()
    whole = capture_program(model, inputs, whole=True).graph
    assert differences(captured.graph, whole) == []
    fresh()
    wanted = model(**inputs)["loss"]
    fresh()
    flat = verify(unfold(captured.graph))
    leaves = leaf_values(flat, model, inputs) | captured.constants
    torch.testing.assert_close(run(flat, leaves)[flat.outputs.index(str(flat.loss))], wanted)
    return captured.graph


class Flagged(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.number != 3 else x + self.inner(x).sum(-1, keepdim=True)


class Dropping(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.rate = 0.0 if number < 3 else 0.25

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), self.rate, training=False) * (1 + self.rate)


class Windowed(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.window = [2, 3][number % 2]  # as index parity does it

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[:, : self.window].sum(1, keepdim=True)


class Parity(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.number % 2 else -x)


class Configured(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.options = {"scale": [1.0, 2.0 if number == 4 else 1.0]}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.options["scale"][1]


class Settings:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Objects(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.settings = Settings(3.0 if number == 2 else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.settings.scale


class Labelled:
    """Settings with a large table, which takes long to compare; `other` is how some ask for it."""

    attribute_map: ClassVar = {"other": "table"}

    def __init__(self, last: float) -> None:
        self.scale, self.table = 1.0, dict.fromkeys(range(300), 1.0) | {299: last}

    def __getattr__(self, name: str) -> Any:
        if name not in self.attribute_map:
            raise AttributeError(name)
        return self.__dict__[self.attribute_map[name]]


class Tabled(Layer):
    """Has a large table and does not read it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.settings = Labelled(3.0 if number == 2 else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.settings.scale


class ByName(Tabled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.settings.table[299]


class ByAlias(Tabled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.settings.other[299]


class ByOneOfSeveral(Tabled):
    def forward(self, x: Tensor) -> Tensor:
        for name in ("table", "others"):
            x = x * getattr(self.settings, name, {299: 1.0})[299]
        return super().forward(x)


class ByPieces(Tabled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.settings, f"tab{'le' if self.training else 'let'}")[299]


class LookingThrough(Tabled):
    def forward(self, x: Tensor) -> Tensor:
        found = [value for value in self.settings.__dict__.values() if isinstance(value, dict)]
        return super().forward(x) * found[0][299]


class Asking(Layer):
    """One has an attribute that the others do not have."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        if number == 5:
            self.special = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if hasattr(self, "special") else 1)


class Frozen(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.up.weight.requires_grad_(number != 1)


class Shaped(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        if number == 2:
            self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)


class Epsilon(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.norm.eps = 1e-5 if number else 1e-2


class Resting(Layer):
    """Training mode of a part: a batch norm that uses its buffers in one layer only."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.drop = nn.Dropout(0.0)
        self.drop.train(number != 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.drop.training else 5)


class Numbers(list):
    """A list, to all that look; but of a class of its own."""


class Slotted:
    __slots__ = ("scale",)


class Below(Slotted):
    pass


class Hidden(Layer):
    """State that objects do not keep where it can be seen."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.numbers, self.below = Numbers([1.0 + number]), Below()
        self.below.scale = 1.0 + number

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.numbers[0] * self.below.scale


class Named(Layer):
    """Names that are computed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.key, self.settings = "sc" + "ale", Settings(1.0 + number // 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.settings, self.key)


class Typed(Layer):
    """Asks for the class of what it is."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.scale = 1.0 + number

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.scale if type(self) is Typed else 1)


class Turned(Layer):
    """A weight in another order of memory."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        if number == 2:
            self.up.weight = nn.Parameter(torch.randn(WIDTH, 16).t())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.up.weight.is_contiguous() else 2 * x)


calls = 0


log: list[int] = []


class Plain:
    scale = 1.0


class Doubled(Plain):
    scale = 2.0


class Swapping(Model):
    """Settings that all layers read become those of another class, and have the same attributes."""

    def __init__(self) -> None:
        super().__init__(Scaled)
        self.settings = Plain()
        for layer in self.layers:
            layer.settings = self.settings

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            self.settings.__class__ = Doubled if number % 2 else Plain
            x = layer(x)
        return {"loss": self.head(x).square().mean()}


class Scaled(Layer):
    settings: Plain

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.settings.scale


class Counting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        global calls
        calls += 1
        return super().forward(x) * calls


class Listing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        log.append(1)
        return super().forward(x) * len(log)


class OfTheClass(Layer):
    made = 0

    def forward(self, x: Tensor) -> Tensor:
        OfTheClass.made += 1
        return super().forward(x) * OfTheClass.made


class OfTheType(Layer):
    made = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).made += 1
        return super().forward(x) * type(self).made


class Iterating(Layer):
    numbers = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.numbers)


class Remembering(Layer):
    def forward(self, x: Tensor, past: list[int] = []) -> Tensor:  # noqa: B006
        past.append(1)
        return super().forward(x) * len(past)


class Throwing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.randint(1, 9)


class Own(Layer):
    """Counts its own calls: each has been called once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        return super().forward(x) * self.times


def start_again() -> None:
    global calls
    calls = 0
    log.clear()
    OfTheClass.made = OfTheType.made = 0
    Iterating.numbers = itertools.count(1)
    assert Remembering.forward.__defaults__ is not None
    Remembering.forward.__defaults__[0].clear()
    random.seed(3)


class Called(nn.Module):
    """Layers that take and return more than a tensor."""

    def __init__(self, forward: Callable[..., Tensor], layer: Callable[[int], nn.Module] = Layer) -> None:
        super().__init__()
        self.first, self.layers, self.head = (
            nn.Linear(4, WIDTH),
            nn.ModuleList(map(layer, range(LAYERS))),
            nn.Linear(8, 1),
        )
        self.way = forward

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.head(self.way(self.layers, self.first(x))).square().mean()}


class Many(Layer):
    def forward(self, x: Tensor, *, scale: float = 1.0, others: dict[str, Tensor] | None = None) -> tuple:
        made = self.inner(x)
        y = x + self.down(made) * scale
        if others is not None:
            y = y + others["mask"] * others["x"]
        return y, None, {"made": made, "x": x}


def plainly(layers: Any, x: Tensor) -> Tensor:
    mask = torch.ones(3, 1).cumsum(0)
    kept = []
    for layer in layers:
        x, _, more = layer(x, scale=0.5, others={"mask": mask, "x": x})
        kept.append(more["made"].mean())
    return x + torch.stack(kept).sum()


def scaled(layers: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        x, *_ = layer(x, scale=1.0 + i // 3)
    return x


def without_gradient(layers: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for layer in layers[:3]:
            x, *_ = layer(x)
    for layer in layers[3:]:
        x, *_ = layer(x)
    return x


def last_ones_only(layers: Any, x: Tensor) -> Tensor:
    made = x
    for layer in layers:
        x, _, more = layer(x)
        made = more["made"]
    return made[..., :WIDTH]


def longer_and_longer(layers: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        x, *_ = layer(torch.cat([x, x[:, :1]], 1) if i % 2 else x)
    return x


def written_in_place(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x, *_ = layer(x)
        x += 1
    return x


def looked_into(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)[0] * layer.up.weight.sum()
    return x


class Appending(Layer):
    """Gives more than it returns."""

    def forward(self, x: Tensor, kept: list[Tensor], seen: dict[str, Tensor]) -> Tensor:
        kept.append(self.inner(x))
        seen[str(len(seen))] = x
        return x + self.down(kept[-1])
