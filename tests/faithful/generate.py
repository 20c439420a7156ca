"""Random modules, composed of pieces: a program is a small tree that prints, builds and shrinks."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.faithful.case import Call, Case, call, floats, ints
from tests.faithful.pieces import PIECES, B, D, S
from tests.faithful.run import Setting

DEPTH = 3


@dataclass(frozen=True)
class Node:
    """A piece by its name, or a way to put others together."""

    name: str
    children: tuple["Node", ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.children))})" if self.children else self.name

    def names(self) -> Iterator[str]:
        yield self.name
        for child in self.children:
            yield from child.names()


@dataclass(frozen=True)
class Program:
    """A module, how it is called, and what it returns."""

    body: Node
    given: str
    returned: str
    setting: Setting

    def __str__(self) -> str:
        return f"{self.given} -> {self.body} -> {self.returned} on {self.setting}"

    def families(self) -> set[str]:
        pieces = {PIECES[name].family for name in self.body.names() if name in PIECES}
        combined = {name for name in self.body.names() if name in COMBINED}
        return pieces | combined | {f"input {self.given}", f"output {self.returned}"}


# -- putting pieces together ----------------------------------------------------------------------------


class _Combined(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


class Sequence(_Combined):
    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Residual(_Combined):
    def forward(self, x):
        return x + self.parts[0](x)


class Branches(_Combined):
    def forward(self, x):
        return self.parts[0](x) * 0.5 + self.parts[1](x)


class Product(_Combined):
    def forward(self, x):
        return torch.sigmoid(self.parts[0](x)) * self.parts[1](x)


class Halves(_Combined):
    """Each part sees all and gives half of its features."""

    def forward(self, x):
        return torch.cat([part(x)[..., i * D // 2 : (i + 1) * D // 2] for i, part in enumerate(self.parts)], -1)


class Shared(_Combined):
    def forward(self, x):
        return self.parts[0](self.parts[0](x) * 0.5)


class Checkpointed(_Combined):
    def forward(self, x):
        return checkpoint(self.parts[0], x, use_reentrant=False)


class Frozen(_Combined):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.requires_grad_(False)

    def forward(self, x):
        return x + self.parts[0](x)


class NoGrad(_Combined):
    def forward(self, x):
        with torch.no_grad():
            other = self.parts[0](x)
        return x + other


# name -> the class, how many children, how often
COMBINED: dict[str, tuple[type[nn.Module], tuple[int, int], float]] = {
    "sequence": (Sequence, (2, 4), 4.0), "residual": (Residual, (1, 1), 3.0), "branches": (Branches, (2, 2), 2.0),
    "product": (Product, (2, 2), 1.0), "halves": (Halves, (2, 2), 1.0), "shared": (Shared, (1, 1), 1.0),
    "checkpoint": (Checkpointed, (1, 1), 0.5), "frozen": (Frozen, (1, 1), 0.5), "no_grad": (NoGrad, (1, 1), 0.5),
    "layers": (Sequence, (1, 1), 1.0),  # several copies of its child, with weights of their own
}  # fmt: skip
COPIES = 4


def build(node: Node) -> nn.Module:
    if node.name in PIECES:
        return PIECES[node.name].make()
    make = COMBINED[node.name][0]
    children = node.children * COPIES if node.name == "layers" else node.children
    return make(*(build(child) for child in children))


# -- around them ----------------------------------------------------------------------------------------


GIVEN: dict[str, tuple[Callable[[], Call], float]] = {
    "tensor": (lambda: call(floats(B, S, D), floats(B, S, D)), 5.0),
    "names": (lambda: call(x=floats(B, S, D), y=floats(B, S, D)), 2.0),
    "tokens": (lambda: call(ints(16, B, S), floats(B, S, D)), 2.0),
    "dict": (lambda: call({"x": floats(B, S, D), "y": floats(B, S, D)}), 0.5),
    "list": (lambda: call([floats(B, S, D), floats(B, S, D)]), 0.5),
    "options": (lambda: call(floats(B, S, D), floats(B, S, D), scale=0.5, flag=True), 0.5),
}
RETURNED: dict[str, tuple[Callable[[Any], torch.Tensor] | None, float]] = {
    "loss": (None, 5.0),
    "dict": (None, 2.0),
    "tuple": (None, 1.0),
    "classes": (None, 2.0),
    "losses": (lambda out: sum(out.values()), 0.7),  # type: ignore[arg-type,return-value]
    "outside": (lambda out: out.square().mean(), 0.7),
    "both": (lambda out: out["loss"] + 0.1 * out["hidden"].square().mean(), 0.7),
}


class Generated(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.returned, self.body, self.head = program.returned, build(program.body), nn.Linear(D, D)
        if program.given == "tokens":
            self.embed = nn.Embedding(16, D)

    def forward(self, x, y=None, scale=1.0, flag=False):
        if isinstance(x, dict):
            x, y = x["x"], x["y"]
        elif isinstance(x, list):
            x, y = x
        if not x.is_floating_point():
            x = self.embed(x)
        h = self.head(self.body(x if not flag else x * scale))
        match self.returned:
            case "loss":
                return F.mse_loss(h, y)
            case "dict":
                return {"loss": F.mse_loss(h, y), "hidden": h.detach(), "best": h.argmax(-1)}
            case "tuple":
                return (h - y).abs().mean(), h.mean(1).detach()
            case "classes":
                return F.cross_entropy(h.reshape(-1, D), y.argmax(-1).flatten())
            case "losses":
                return {"near": F.mse_loss(h, y), "small": h.abs().mean()}
            case "outside":
                return h - y
            case "both":
                return {"loss": F.mse_loss(h, y), "hidden": h}


def case_of(program: Program, name: str = "generated") -> Case:
    return Case(
        name, lambda: Generated(program), GIVEN[program.given][0], RETURNED[program.returned][0], tolerance=1e-8
    )


# -- at random --------------------------------------------------------------------------------------------


def _chosen(chance: random.Random, weights: dict[str, float]) -> str:
    return chance.choices(list(weights), list(weights.values()))[0]


_PIECES = {name: piece.weight for name, piece in PIECES.items()}
_COMBINED = {name: weight for name, (_, _, weight) in COMBINED.items()}
MESHES = ((2,), (2, 2))
SPLITS = ("batch", "tensor", "random", "random")


def tree(chance: random.Random, depth: int) -> Node:
    if depth == 0 or chance.random() < 0.35:
        return Node(_chosen(chance, _PIECES))
    name = _chosen(chance, _COMBINED)
    count = chance.randint(*COMBINED[name][1])
    return Node(name, tuple(tree(chance, depth - 1) for _ in range(count)))


def generated(seed: int) -> Program:
    chance = random.Random(seed)
    count = chance.randint(1, 4)
    body = Node("sequence", tuple(tree(chance, chance.randint(0, DEPTH - 1)) for _ in range(count)))
    given = _chosen(chance, {name: weight for name, (_, weight) in GIVEN.items()})
    returned = _chosen(chance, {name: weight for name, (_, weight) in RETURNED.items()})
    return Program(body, given, returned, Setting(chance.choice(MESHES), chance.choice(SPLITS), seed))


# -- smaller ----------------------------------------------------------------------------------------------


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less."""
    for body in _smaller(program.body):
        yield replace(program, body=body)
    if program.given != "tensor":
        yield replace(program, given="tensor")
    if program.returned != "loss":
        yield replace(program, returned="loss")
    if program.setting.mesh != (2,):
        yield replace(program, setting=replace(program.setting, mesh=(2,)))


def _smaller(node: Node) -> Iterator[Node]:
    yield from node.children
    least = COMBINED[node.name][1][0] if node.name in COMBINED else 0
    for i, child in enumerate(node.children):
        before, after = node.children[:i], node.children[i + 1 :]
        if len(node.children) > max(least, 1) or (node.name == "sequence" and len(node.children) > 1):
            yield replace(node, children=before + after)
        for less in _smaller(child):
            yield replace(node, children=(*before, less, *after))
    if not node.children and node.name != "relu":
        yield Node("relu")


def shrunk(program: Program, fails: Callable[[Program], bool], tries: int = 60) -> Program:
    """The smallest program that was found to fail in the same way."""
    while True:
        for candidate in smaller(program):
            tries -= 1
            if tries < 0:
                return program
            if fails(candidate):
                program = candidate
                break
        else:
            return program
