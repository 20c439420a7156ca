"""Which buffers are weights."""

import pytest
import torch
import torch.nn.functional as F
import transformers as T
from torch import nn

from tapas.capture.program import capture
from tapas.ir.graph import Graph
from tests.quantised import Int4Linear, Int4Written, Int8Linear, PackedLinear, quantised_llama

X = torch.randn(4, 64)


def weights(graph: Graph) -> set[str]:
    """Buffers of the model that the graph has as parameters."""
    return {leaf.paths[0] for leaf in graph.parameters() if leaf.paths[0].rpartition(".")[2] not in ("weight", "bias")}


@pytest.mark.parametrize(("kind", "found"), [
    (Int8Linear, {"q"}), (Int4Linear, {"q"}), (Int4Written, {"q"}), (PackedLinear, {"q"}),
])  # fmt: skip
def test_quantised_layers(kind: type[nn.Module], found: set[str]) -> None:
    """Their scales are small here."""
    graph = capture(kind(64, 128), (X,))
    assert weights(graph) == found
    assert {leaf.paths[0] for leaf in graph.leaves if leaf.kind == "buffer"} == {
        name for name, _ in kind(64, 128).named_buffers() if name not in found
    }


def test_large_scales_are_weights_too() -> None:
    assert weights(capture(Int4Linear(256, 128), (torch.randn(4, 256),))) == {"q", "scale"}


class Others(nn.Module):
    """Large buffers that are no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.ones(64, 64).tril())
        self.register_buffer("table", torch.randn(4096, 64))
        self.register_buffer("written", torch.randn(64, 64))
        self.register_buffer("small", torch.randn(8, 64))
        self.register_buffer("unread", torch.randn(64, 64))

    def forward(self, x):
        scores = (x.t() @ x).masked_fill(self.mask == 0, -1e9).softmax(-1)
        self.written.mul_(0.5)
        return F.linear(x @ scores + self.table[: x.size(0)], self.written) @ self.small.t()


def test_masks_tables_and_what_is_written() -> None:
    graph = capture(Others(), (X,))
    assert weights(graph) == set()
    assert "aten.eq.Scalar" in {op.target for op in graph.prelude}  # computed once


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randint(-9, 9, (100, 64), dtype=torch.int8))
        self.register_buffer("positions", torch.arange(2048))
        self.register_buffer("kernel", torch.randn(64, 64, 3))
        self.places = nn.Embedding(2048, 64)

    def forward(self, ids):
        x = F.embedding(ids, self.table).to(torch.float32) + self.places(self.positions[: ids.size(1)])
        return F.conv1d(x.mT, self.kernel)


def test_tables_of_tokens_and_kernels_but_not_what_looks_up() -> None:
    assert weights(capture(Quantised(), (torch.randint(0, 100, (2, 8)),))) == {"table", "kernel"}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_models_of_transformers_have_none(family: str) -> None:
    """Masks of 64 x 64 and more, rotary tables."""
    made = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50, "use_cache": False}
    model = T.GPT2LMHeadModel(T.GPT2Config(**made)) if family == "gpt2" else T.LlamaForCausalLM(T.LlamaConfig(**made))
    assert weights(capture(model.eval(), {"input_ids": torch.randint(0, 50, (2, 80))})) == set()


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def block() -> nn.Module:
    return nn.Sequential(Int8Linear(64, 64), nn.Tanh())


def test_copies_have_them_alike() -> None:
    graph = capture(Layers(*(block() for _ in range(5))), (X,), check_fold=True)
    assert graph.bodies and weights(graph) == {f"layers.{i}.0.q" for i in range(5)}


def test_a_copy_that_is_called_twice() -> None:
    shared = block()
    graph = capture(Layers(shared, *(block() for _ in range(4)), shared), (X,), check_fold=True)
    assert graph.bodies and weights(graph) == {f"layers.{i}.0.q" for i in range(5)}


class Sum(nn.Module):
    """Reads a buffer as a term."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.after = nn.Tanh()

    def forward(self, x):
        return self.after(x + self.table.sum(0).to(x.dtype))


def test_a_weight_to_some_blocks_and_a_term_to_others() -> None:
    """What is made of it is not computed once by each rank, which holds a part."""
    shared = Int8Linear(64, 64)
    products = [nn.Sequential(shared, nn.Tanh()) for _ in range(4)]
    model = Layers(Layers(*products), Layers(*(Sum(shared.q) for _ in range(4))))
    graph = capture(model, (X,))
    assert weights(graph) == {"layers.0.layers.0.0.q"} and not graph.prelude
    assert "a weight to one block" in graph.notes[0]


def test_a_llama() -> None:
    graph = capture(quantised_llama(adapters=True), {"input_ids": torch.randint(0, 50, (2, 8))}, check_fold=True)
    found = weights(graph)
    layer = "model.layers.1"
    assert {f"{layer}.mlp.{name}.base.q" for name in ("gate_proj", "up_proj", "down_proj")} <= found
    assert not any("inv_freq" in name for name in found)
    assert not any(graph.tensors[leaf.tensor].differentiable for leaf in graph.parameters() if leaf.paths[0] in found)
