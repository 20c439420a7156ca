"""Folding: what repeats is found by structure, and every operator and edge stays in exactly one copy."""

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapas.capture import capture
from tapas.cost.collectives import ClusterRouter
from tapas.hardware.cluster_files import load_cluster
from tapas.hardware.mesh import parse_mesh
from tapas.ir.fold import Block, Copy, Folded, fold
from tapas.ir.graph import Graph
from tapas.ir.inline import unfold
from tapas.models.load import load
from tapas.plan.fingerprint import structure_of
from tapas.planner.fit import search
from tapas.problem.build import build_problem

pytest.importorskip("transformers")

_DECODER = {
    "hidden_size": "64", "intermediate_size": "128", "num_attention_heads": "4", "num_key_value_heads": "2",
    "head_dim": "16", "vocab_size": "128",
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "llama": ("llama3-8b", _DECODER | {"num_hidden_layers": "6"}),
    "gpt2": ("gpt2", {"n_embd": "64", "n_layer": "5", "n_head": "4", "vocab_size": "128"}),
    "t5": ("t5-small", {"d_model": "64", "d_ff": "128", "num_layers": "4", "num_heads": "4", "d_kv": "16"}),
    "gemma3": ("hf:gemma3_text", _DECODER | {"num_hidden_layers": "12"}),
    "gpt_oss": ("hf:gpt_oss", _DECODER | {"num_hidden_layers": "6", "num_local_experts": "4"}),
    "mixed": ("qwen3-30b-a3b", _DECODER | {
        "num_hidden_layers": "6", "decoder_sparse_step": "2", "num_experts": "4", "num_experts_per_tok": "2",
        "moe_intermediate_size": "32",
    }),
    "resnet": ("resnet50", {"depths": "[3, 4, 1, 1]", "num_labels": "10"}),
}  # fmt: skip
every = pytest.mark.parametrize("name", MODELS)


@cache
def graph(name: str, training: bool = True, **more: Any) -> Graph:
    source, settings = MODELS[name]
    loaded = load(source, batch=4, seq=32, settings=settings, training=training)
    return capture(loaded.model, loaded.inputs | more, training=training, name=name)


def blocks(folded: Folded) -> dict[str, int]:
    """Blocks that repeat, by name."""
    numbered = {block.name: len(folded.copies_of(b)) for b, block in enumerate(folded.blocks)}
    return {name: copies for name, copies in numbered.items() if copies > 1}


def exported(folded: Folded, place: tuple[int, int]) -> tuple[int, int]:
    """Which operator (of the unfolded graph) and result an export of a copy is; (-1, i) for shared weights."""
    copy, export = place
    block = folded.blocks[folded.copies[copy].block]
    start = sum(len(folded.blocks[c.block].ops) for c in folded.copies[:copy])
    name = block.exports[export]
    for i, op in enumerate(block.ops):
        if name in op.results:
            return start + i, op.results.index(name)
    return -1, block.weights.index(name)


def edges(whole: Graph, folded: Folded) -> Counter[tuple]:
    """Every edge as the copies tell it, in terms of the unfolded graph: from where, to which operand."""
    found: Counter[tuple] = Counter()
    start = 0
    shared = folded.copies[0].weights if not folded.blocks[folded.copies[0].block].ops else ()
    for copy in folded.copies:
        block = folded.blocks[copy.block]
        inside = {name: (start + i, r) for i, op in enumerate(block.ops) for r, name in enumerate(op.results)}
        outside: dict[str, Any] = dict(zip(block.weights, copy.weights, strict=True))
        outside |= dict(zip(block.constants, copy.constants, strict=True))
        for name, place in zip(block.ports, copy.ports, strict=True):
            at = exported(folded, place)
            outside[name] = shared[at[1]] if at[0] < 0 else at
        for i, op in enumerate(block.ops):
            for position, name in enumerate(op.operands):
                source = inside[name] if name in inside else outside[name]
                found[source, start + i, position] += 1
        start += len(block.ops)
    return found


def edges_of(whole: Graph) -> Counter[tuple]:
    made = {name: (i, r) for i, op in enumerate(whole.ops) for r, name in enumerate(op.results)}
    return Counter(
        (made.get(name, name), i, position)
        for i, op in enumerate(whole.ops)
        for position, name in enumerate(op.operands)
    )


def check(given: Graph) -> Folded:
    """The fold is a quotient: unfolding it gives the graph back, edge for edge."""
    folded, whole = fold(given), unfold(given)
    sequence = [op for copy in folded.copies for op in folded.blocks[copy.block].ops]
    assert folded.operators == len(sequence) == len(whole.ops)
    assert folded.unique_operators == sum(len(block.ops) for block in folded.blocks)
    for here, there in zip(sequence, whole.ops, strict=True):
        assert (here.target, here.args, here.kwargs) == (there.target, there.args, there.kwargs)
        for mine, theirs in zip((*here.operands, *here.results), (*there.operands, *there.results), strict=True):
            one, two = folded.tensors[mine], whole.tensors[theirs]
            assert (one.shape, one.dtype, one.differentiable) == (two.shape, two.dtype, two.differentiable)
    assert edges(whole, folded) == edges_of(whole)
    owned = Counter(name for copy in folded.copies for name in copy.weights)
    read = {name for op in whole.ops for name in op.operands}
    assert owned == Counter(leaf.tensor for leaf in whole.parameters() if leaf.tensor in read)
    made = {name: (i, r) for i, op in enumerate(whole.ops) for r, name in enumerate(op.results)}
    assert [exported(folded, place) for place in folded.outputs] == [made[n] for n in whole.outputs]
    leaving = {exported(folded, place): what for place, what in folded.leaving.items()}
    assert leaving == {made[name]: what for name, what in whole.leaving.items()}
    return folded


# -- architectures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.full)])
@every
def test_every_operator_and_edge_once(name: str, training: bool) -> None:
    """Whether capture hands the blocks over or not."""
    handed_over = check(graph(name, training))
    found = check(unfold(graph(name, training)))
    assert blocks(handed_over) == blocks(found)


def test_decoder() -> None:
    folded = fold(graph("llama"))
    assert blocks(folded) == {"model.layers.*": 6}
    assert "model.layers.*: 6 x" in str(folded)
    assert [copy.path for copy in folded.copies if copy.path] == [f"model.layers.{i}" for i in range(6)]


def test_encoder_and_decoder() -> None:
    """The first layer of either side makes the position bias that the others share."""
    folded = fold(graph("t5"))
    assert blocks(folded) == {"encoder.block.*": 3, "decoder.block.*": 3}
    (decoder,) = (b for b, block in enumerate(folded.blocks) if block.name == "decoder.block.*")
    copies = [folded.copies[c] for c in folded.copies_of(decoder)]
    common = set.intersection(*(set(copy.ports) for copy in copies))
    assert len(common) >= 2  # the encoder's states and the bias come from the same place for every copy


def test_alternating_attention() -> None:
    """Gemma 3: five sliding layers, one full, and so on."""
    folded = fold(graph("gemma3"))
    assert sum(blocks(folded).values()) == 12
    kinds = [folded.copies[c].block for c in range(len(folded.copies)) if folded.copies[c].path]
    assert len(kinds) == 12 and len(set(kinds)) in (1, 2)
    if len(set(kinds)) == 2:
        assert [i for i, kind in enumerate(kinds) if kind != kinds[0]] == [5, 11]


def test_alternating_sinks() -> None:
    assert sum(blocks(fold(graph("gpt_oss"))).values()) == 6


def test_dense_and_sparse_layers() -> None:
    folded = fold(graph("mixed"))
    assert sorted(blocks(folded).values()) == [3, 3]
    kinds = [copy.block for copy in folded.copies if copy.path]
    assert kinds[::2] == [kinds[0]] * 3 and kinds[1::2] == [kinds[1]] * 3


def test_stages_of_different_width() -> None:
    found = blocks(fold(graph("resnet")))
    assert sorted(found.values()) == [2, 3]  # the first layer of each stage changes the width


def test_tied_weights() -> None:
    """The table that embeds and classifies belongs to neither end: both read it through a port."""
    whole = graph("gpt2")
    folded = fold(whole)
    assert folded.blocks[0].name == "shared weights"
    (tied,) = folded.copies[0].weights
    assert len(whole.leaf_of[tied].paths) == 2
    readers = [c for c, copy in enumerate(folded.copies) if (0, 0) in copy.ports]
    assert len(readers) == 2


def test_per_layer_outputs() -> None:
    """Hidden states of all layers but the last leave the graph: those copies are alike, the last is not."""
    source, settings = MODELS["llama"]
    loaded = load(source, batch=4, seq=32, settings=settings, training=False)
    whole = capture(loaded.model, loaded.inputs | {"output_hidden_states": True}, training=False)
    folded = check(whole)
    assert blocks(folded) == {"model.layers.*": 5}
    assert len(folded.outputs) == len([n for n in whole.outputs if n not in whole.leaf_of]) >= 7
    assert len({copy for copy, _ in folded.outputs}) >= 6


# -- small modules -----------------------------------------------------------------------------------


class Nameless(nn.Module):
    """Layers that are no modules: a loop over parameters, so that no path carries a number."""

    def __init__(self, layers: int, scales: list[float] | None = None) -> None:
        super().__init__()
        self.up = nn.ParameterList([nn.Parameter(torch.empty(64, 32, device="meta")) for _ in range(layers)])
        self.down = nn.ParameterList([nn.Parameter(torch.empty(32, 64, device="meta")) for _ in range(layers)])
        self.stem = nn.Parameter(torch.empty(32, 32, device="meta"))
        self.scales = scales or [1.5] * layers

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.stem)  # without it the first layer would read an input, and so differ from the others
        for up, down, scale in zip(self.up, self.down, self.scales, strict=True):
            y = F.layer_norm(x, (32,))
            y = F.linear(F.gelu(F.linear(y, up)), down) * scale
            x = x + y
        return x.square().mean()


def captured(model: nn.Module, *inputs: Tensor, training: bool = True) -> Graph:
    return capture(model, inputs or (torch.empty(8, 32, device="meta"),), training=training)


def test_repeats_without_names() -> None:
    whole = captured(Nameless(7))
    assert not any(op.module for op in whole.ops)
    folded = check(whole)
    assert sorted(blocks(folded).values()) == [7]
    assert folded.unique_operators <= len(whole.ops) // 7 + 4


def test_a_different_constant_is_a_different_block() -> None:
    whole = captured(Nameless(6, [1.5, 1.5, 1.5, 1.5, 1.5, 2.5]))
    folded = check(whole)
    for copy in folded.copies:
        scales = {op.args[1] for op in folded.blocks[copy.block].ops if op.target == "aten.mul.Tensor"}
        assert len(scales) <= 1 or len(folded.copies_of(copy.block)) == 1
    assert max(blocks(folded).values()) == 5


class Layer(nn.Module):
    def __init__(self, slope: float = 0.1, width: int = 32) -> None:
        super().__init__()
        self.inner, self.slope = nn.Linear(32, width), slope
        self.outer = nn.Linear(width, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.outer(F.leaky_relu(self.inner(x), self.slope)) * mask


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(32, 32), nn.ModuleList(layers)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x, mask = self.stem(x), mask.exp()
        for layer in self.layers:
            x = layer(x, mask)
        return x.square().mean()


def stacked(layers: list[nn.Module]) -> Graph:
    with torch.device("meta"):
        return captured(Stack(layers).to("meta"), torch.empty(8, 32), torch.empty(8, 32))


def test_equal_names_prove_nothing() -> None:
    """Layers that differ in one constant, or in a width, are not copies though their paths are alike."""
    folded = check(stacked([Layer(), Layer(0.2), Layer(), Layer(0.2), Layer(width=48)]))
    kinds = [copy.block for copy in folded.copies if copy.path]
    assert kinds == [kinds[0], kinds[1], kinds[0], kinds[1]] and kinds[0] != kinds[1]


def test_tensors_that_all_copies_read() -> None:
    """The mask is made once, outside: a port that is bound to the same place in every copy."""
    folded = check(stacked([Layer() for _ in range(4)]))
    copies = [copy for copy in folded.copies if copy.path]
    assert len(copies) == 4
    common = set.intersection(*(set(copy.ports) for copy in copies))
    assert len(common) == 1


def test_a_layer_used_twice_shares_its_weights() -> None:
    layer = Layer()
    folded = check(stacked([layer, layer, layer]))
    assert folded.blocks[0].name == "shared weights"
    assert len(folded.copies[0].weights) == 4


def test_a_body_that_is_called_often_in_one_block() -> None:
    """Each call has tensors of its own."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in (*self.layers, *self.layers):
                x = layer(x)
            return x.square().mean()

    for block in check(capture(Twice(), (torch.zeros(4, 8),))).blocks:
        made = [name for op in block.ops for name in op.results]
        assert len(set(made)) == len(made)


def test_wiring_counts() -> None:
    """Same operators, other wiring: the second block reads its own first result twice."""

    class Crossed(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a = torch.tanh(torch.relu(x) * y) + x
            b = torch.tanh(torch.relu(a) * y) + y
            c = torch.tanh(torch.relu(b) * y) + b
            return torch.tanh(torch.relu(c) * y) + c

    folded = check(captured(Crossed(), torch.empty(8, 8), torch.empty(8, 8), training=False))
    assert all(len(folded.copies_of(copy.block)) <= 3 for copy in folded.copies)


def test_nothing_repeats() -> None:
    folded = check(captured(nn.Linear(32, 8), training=False))
    assert len(folded.blocks) == len(folded.copies) == 1


class _Adds(nn.Module):
    """A block that adds to a stream what it makes of something else: partial sums may pass along the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4096, 16384, bias=False, device="meta")
        self.down = nn.Linear(16384, 4096, bias=False, device="meta")

    def forward(self, c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(c).relu())


class _Stream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Adds() for _ in range(5))

    def forward(self, c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(c, x)
        return x


def test_folding_does_not_change_the_optimum() -> None:
    """The same graph as one block: an output that a repeated block exports binds its own copy only."""
    inputs = tuple(torch.empty(64, 4096, device="meta") for _ in range(2))
    captured = capture(_Stream(), inputs, training=False)
    folded, whole = fold(captured), unfold(captured)
    assert len(folded.copies) > len(folded.blocks)
    one = Folded(
        "one", whole.tensors, whole.leaf_of,
        (Block("all", whole.ops, (), tuple(leaf.tensor for leaf in whole.parameters()),
               tuple(leaf.tensor for leaf in whole.leaves if leaf.kind == "input"), whole.outputs),),
        (Copy(0, "", (), tuple(leaf.tensor for leaf in whole.parameters()),
              tuple(leaf.tensor for leaf in whole.leaves if leaf.kind == "input")),),
        tuple((0, i) for i in range(len(whole.outputs))),
        {(0, i): whole.leaving[name] for i, name in enumerate(whole.outputs)},
    )  # fmt: skip
    router = ClusterRouter(parse_mesh("4"), load_cluster("h100-sxm"))
    costs = [search(build_problem(graph, router)).answer.cost for graph in (folded, one)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-9)


class _Both(nn.Module):
    """Does the same to both of its inputs, with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._one(x), self._one(y)

    def _one(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(self.up(x).relu()).tanh()).sin()


class _Streams(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Both() for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x, y = layer(x, y)
        return x, y


@pytest.mark.parametrize("layers", [4, 5])
def test_what_is_copy_of_nothing_is_folded_as_if_it_were_written_out(layers: int) -> None:
    """The last layer makes what the model returns, and has its like in no other: parts of it repeat."""
    captured = capture(_Streams(layers), (torch.randn(4, 16), torch.randn(4, 16)), training=False)
    assert captured.bodies
    given, written = check(captured), check(unfold(captured))
    assert structure_of(given) == structure_of(written)
    assert len(given.copies) > layers
