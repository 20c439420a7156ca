"""Capture that folds as it goes: what is traced once is what all copies do, whoever tries to deceive it."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tapas
from tapas.capture import capture
from tapas.errors import GraphError
from tapas.ir.graph import BLOCK, Graph
from tapas.ir.inline import unfold
from tapas.models.load import load, models
from tests.capture.deceiving import (
    INPUTS,
    LAYERS,
    WIDTH,
    Appending,
    Asking,
    ByAlias,
    ByName,
    ByOneOfSeveral,
    ByPieces,
    Called,
    Configured,
    Counting,
    Dropping,
    Epsilon,
    Flagged,
    Frozen,
    Hidden,
    Iterating,
    Layer,
    Listing,
    LookingThrough,
    Many,
    Model,
    Named,
    Objects,
    OfTheClass,
    OfTheType,
    Own,
    Parity,
    Remembering,
    Resting,
    Shaped,
    Swapping,
    Throwing,
    Turned,
    Typed,
    Windowed,
    bodies,
    checked,
    last_ones_only,
    longer_and_longer,
    looked_into,
    plainly,
    scaled,
    start_again,
    without_gradient,
    written_in_place,
)


def test_one_of_each_kind_is_traced() -> None:
    graph = checked(Model())
    assert bodies(graph) == [LAYERS]
    assert len(graph.bodies) == 1
    assert [op.module for op in graph.ops if op.target == BLOCK] == [f"layers.{i}" for i in range(LAYERS)]


def test_libraries_may_be_reached_through_a_link(tmp_path: Path) -> None:
    """As in an environment that is a link to another: torch is torch, whatever its path."""
    packages = Path(torch.__file__).parents[1]
    (tmp_path / "packages").symlink_to(packages)
    code = (
        "import sys, torch; from torch import nn; from tapas.capture import capture; "
        "layer = lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.1)); "
        "model = nn.Sequential(*[layer() for _ in range(6)]); "
        "print(torch.__file__, len(capture(model, (torch.zeros(2, 8),)).bodies))"
    )
    source = str(Path(tapas.__file__).parents[1])
    paths = os.pathsep.join((str(tmp_path / "packages"), source))
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    where, bodies = run.stdout.split()
    assert where.startswith(str(tmp_path))
    assert bodies == "1"


def test_the_model_is_as_it_was() -> None:
    model = Model()
    before = {path: (type(module), dict(vars(module))) for path, module in model.named_modules()}
    capture(model, INPUTS)
    assert {path: (type(module), dict(vars(module))) for path, module in model.named_modules()} == before
    assert "forward" not in vars(model)


def test_the_model_is_as_it_was_after_a_failure() -> None:
    model = Model()
    names = list(model.state_dict())
    with pytest.raises(Exception, match="fails on the example inputs"):
        capture(model, {"x": torch.zeros(2, 3, 5)})
    assert list(model.state_dict()) == names
    assert all(type(layer) is Layer for layer in model.layers)


@pytest.mark.parametrize(("distinct", "again"), [(1, 6), (4, 2)])
def test_a_layer_that_stands_at_several_places(distinct: int, again: int) -> None:
    """It is one submodule, called several times; and it keeps its weights."""
    layers = [Layer(number) for number in range(distinct)]
    model = Model()
    model.layers = nn.ModuleList([*layers, *layers[-1:] * again])
    before = {path: id(parameter) for path, parameter in model.named_parameters()}
    checked(model)
    assert {path: id(parameter) for path, parameter in model.named_parameters()} == before
    assert all(type(layer) is Layer for layer in model.layers)


# -- layers that look alike and are not ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "kinds"),
    [
        (Flagged, [5]), (Dropping, [3, 3]), (Windowed, [3, 3]), (Parity, [3, 3]), (Configured, [5]), (Objects, [5]),
        (Asking, [5]), (Frozen, [5]), (Shaped, [5]), (Epsilon, [5]), (Resting, [5]),
        (Hidden, []), (Named, [3, 3]), (Typed, []), (Turned, [5]), (ByName, [5]), (ByAlias, [5]), (LookingThrough, [5]),
        (ByOneOfSeveral, [5]), (ByPieces, [5]),
    ],
)  # fmt: skip
def test_a_difference_that_code_reads(layer: Callable[[int], nn.Module], kinds: list[int]) -> None:
    assert bodies(checked(Model(layer))) == kinds


def test_a_difference_that_no_code_reads() -> None:
    """Every layer knows its number, as those of transformers do."""
    assert bodies(checked(Model(Layer))) == [LAYERS]


def test_settings_that_become_others_while_the_model_runs() -> None:
    checked(Swapping())


# -- state that changes while the model runs -------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [Counting, Listing, OfTheClass, OfTheType, Iterating, Remembering, Throwing],
    ids=lambda kind: kind.__name__,
)
def test_a_counter(layer: type[Layer]) -> None:
    """No copy is answered for by another: the graph has each of the factors."""
    graph = unfold(_traced(Model(layer)))
    factors = [op.args[1] for op in graph.ops if op.target == "aten.mul.Tensor" and len(op.operands) == 1]
    assert len(factors) >= LAYERS - 1
    assert layer is Throwing or len(set(factors)) == len(factors)


def _traced(model: nn.Module) -> Graph:
    start_again()
    return capture(model, INPUTS)


def test_a_counter_of_its_own() -> None:
    model = Model(Own)

    def fresh() -> None:
        for layer in model.layers:
            layer.times = 0

    checked(model, fresh=fresh)


def test_closures() -> None:
    """Functions made for each layer, and one that counts in a variable of its maker."""

    def scaled(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * factor

    class Closing(Layer):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.scale = scaled(1.0 + number)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale(super().forward(x))

    assert bodies(checked(Model(Closing))) == []

    def counting() -> Callable[[], int]:
        count = 0

        def more() -> int:
            nonlocal count
            count += 1
            return count

        return more

    more = counting()

    class Shared(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * more()

    factors = [op.args[1] for op in unfold(capture(Model(Shared), INPUTS)).ops if op.target == "aten.mul.Tensor"]
    assert len(set(factors)) == LAYERS


# -- modules that are changed from outside ---------------------------------------------------------------


def test_hooks() -> None:
    model = Model()
    model.layers[2].up.register_forward_hook(lambda module, args, output: output * 2)
    model.layers[4].register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    assert bodies(checked(model)) == [4]


def test_patched_forwards() -> None:
    model = Model()

    def louder(x: Tensor) -> Tensor:
        return 2 * Layer.forward(model.layers[1], x)

    model.layers[1].forward = louder
    model.layers[3].inner = partial(torch.mul, other=torch.tensor(1.0)) and (lambda x: F.relu(model.layers[3].up(x)))
    assert bodies(checked(model)) == [4]


def test_wrapped_forwards() -> None:
    """The same wrapper around all, as decorators do it."""

    def twice(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(forward)
        def wrapped(self: nn.Module, x: Tensor) -> Tensor:
            return 2 * forward(self, x)

        return wrapped

    class Wrapped(Layer):
        forward = twice(Layer.forward)

    assert bodies(checked(Model(Wrapped))) == [LAYERS]


def test_shared_weights() -> None:
    """Some layers share a weight, some do not: the same body, but other blocks."""
    model = Model()
    for i in (1, 2):
        model.layers[i].up.weight = model.layers[0].up.weight
    model.layers[5].up.weight = nn.Parameter(model.layers[5].down.weight.detach().t().contiguous())
    graph = checked(model)
    assert bodies(graph) == [LAYERS]
    first = graph.leaf_of["layers.0.up.weight"]
    assert first.paths == ("layers.0.up.weight", "layers.1.up.weight", "layers.2.up.weight")


def test_weights_tied_within_a_layer() -> None:
    class Tied(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            if number == 3:
                self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return x + self.two(F.gelu(self.one(x)))

    assert bodies(checked(Model(Tied))) == [5]


def test_one_module_called_many_times() -> None:
    class Looping(Model):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.first(x)
            for layer in self.layers:
                x = layer(layer(x))
            return {"loss": self.head(x).square().mean()}

    assert bodies(checked(Looping())) == [2 * LAYERS]


# -- how layers are called -------------------------------------------------------------------------------


def test_a_layer_that_writes_to_a_list_it_is_given() -> None:
    def way(layers: Any, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        seen: dict[str, Tensor] = {}
        for layer in layers:
            x = layer(x, kept, seen)
        assert len(kept) == len(seen) == LAYERS
        return x + sum(made.mean() for made in kept)

    assert bodies(checked(Called(way, Appending))) == []


@pytest.mark.parametrize(
    ("way", "kinds"),
    [(plainly, [6]), (scaled, [3, 3]), (without_gradient, [3, 2]), (last_ones_only, [5]), (longer_and_longer, [2, 2]),
     (written_in_place, []), (looked_into, [])],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_ways_to_call(way: Callable[..., Tensor], kinds: list[int]) -> None:
    assert bodies(checked(Called(way, Many))) == kinds


def test_a_layer_that_writes_to_its_input() -> None:
    class Writing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return super().forward(x)

    assert bodies(checked(Model(Writing))) == []


def test_constants_and_buffers() -> None:
    class Buffered(Layer):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.register_buffer("table", torch.full((WIDTH,), 1.0 + number))
            self.register_buffer("other", torch.ones(WIDTH), persistent=number != 5)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.arange(3).view(3, 1).float() + torch.tensor([0.5])
            return super().forward(x) * self.table.cumsum(0) + mask

    assert bodies(checked(Model(Buffered))) == [5]


def test_buffers_that_several_write() -> None:
    shared = torch.zeros(1)

    class Seeing(Layer):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.register_buffer("seen", shared)

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1.0)
            return super().forward(x) * self.seen

    assert bodies(checked(Model(Seeing), fresh=lambda: shared.zero_())) == []  # type: ignore[arg-type, return-value]


def test_constants_of_several_kinds() -> None:
    class Scaled(Layer):
        def forward(self, x: Tensor, k: int) -> Tensor:
            return super().forward(x) * torch.tensor([1.0 * k] * WIDTH)

    def way(layers: Any, x: Tensor) -> Tensor:
        for k in (1, 2):
            for layer in layers:
                x = layer(x, k)
        return x

    checked(Called(way, Scaled))


def test_a_model_that_catches_everything() -> None:
    def way(layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            try:
                more = layer.up.bias.mean()
            except Exception:
                more = 0.0
            x = layer(x) + more
        return x

    assert bodies(checked(Called(way))) == []


def test_results_in_a_named_tuple() -> None:
    class Pair(NamedTuple):
        one: Tensor
        two: Tensor

    def way(layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            x = torch.stack(Pair(layer(x), x)).sum(0)  # type: ignore[arg-type]
        return x

    assert bodies(checked(Called(way))) == [LAYERS]


def test_nested_containers() -> None:
    """The outermost repeats are found; where those differ, the ones within."""

    class Stage(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*map(Layer, range(4 + number)))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x)

    assert bodies(checked(Model(Stage, 4))) == [4 + 5 + 6 + 7]
    assert bodies(checked(Model(lambda _: Stage(0), 4))) == [4]


def test_check_fold_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """If copies were taken for equal that are not, the check would say so."""
    from tapas.capture.repeated.evidence import EvidenceMode

    def blind(self: EvidenceMode, key: list) -> Any:
        known = self.candidates and self.candidates[0].operators
        return known[len(self.operators)] if known else None

    monkeypatch.setattr(EvidenceMode, "_expected", blind)
    with pytest.raises(GraphError, match="it is not the same"):
        capture(Model(Windowed), INPUTS, check_fold=True)
    capture(Model(Layer), INPUTS, check_fold=True)


DEPTHS = {  # how models say how deep they are; those of the others stay as they are
    "gpt": ("n_layer",), "t5": ("num_layers", "num_decoder_layers"), "whisper": ("encoder_layers", "decoder_layers"),
    "resnet50": (), "wide-resnet": (), "clip": (),
}  # fmt: skip


FIRST = {preset.model_type: preset.name for preset in reversed(models())}  # one of each family


def _preset(name: str, kind: str, training: bool):
    """Sizes and inference change little about what repeats: one of some families."""
    quick = name == FIRST[kind] and training and kind in ("llama", "gpt2", "t5", "resnet", "mixtral")
    return pytest.param(name, training, marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize(
    ("name", "training"), [_preset(p.name, p.model_type, training) for p in models() for training in (True, False)]
)
def test_presets(name: str, training: bool) -> None:
    """All of them, some with five layers; at full depth: `tapas fold NAME --check-fold`."""
    pytest.importorskip("transformers")
    depth = next((names for start, names in DEPTHS.items() if name.startswith(start)), ("num_hidden_layers",))
    loaded = load(name, training=training, settings=dict.fromkeys(depth, "5"))
    graph = capture(loaded.model, loaded.inputs, training=training, check_fold=True)
    assert bodies(graph)


FIVE = {"num_hidden_layers": "5"}
TWELVE = {"num_hidden_layers": "12"}  # five sliding layers and one full one, twice
WHOLE = [pytest.param(kind, {}, marks=pytest.mark.full) for kind in ("mamba", "gpt_neox", "falcon", "opt")]
GEMMA = [("gemma3_text", TWELVE), pytest.param("gemma3_text", {}, marks=pytest.mark.full)]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *GEMMA,
        pytest.param("swin", {}, marks=pytest.mark.full),
        ("albert", {}),
        *(pytest.param(p.values[0], FIVE, marks=pytest.mark.full) for p in WHOLE),
        *WHOLE,
    ],
)
def test_other_architectures(kind: str, settings: dict[str, str]) -> None:
    pytest.importorskip("transformers")
    loaded = load(f"hf:{kind}", batch=2, seq=16, settings=settings)
    capture(loaded.model, loaded.inputs, check_fold=True)
