"""Graphs and folds as text: what a stage changes in them is a readable diff. Accept it with TAPAS_UPDATE_GOLDEN=1."""

import os
from functools import cache
from pathlib import Path

import pytest

from tapas.capture import capture
from tapas.ir.fold import fold
from tapas.ir.graph import Graph
from tapas.models.load import load

pytest.importorskip("transformers")

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = {
    "llama": ("llama3-8b", {
        "num_hidden_layers": "4", "hidden_size": "64", "intermediate_size": "128", "num_attention_heads": "4",
        "num_key_value_heads": "2", "vocab_size": "128",
    }),
    "t5": ("t5-small", {
        "d_model": "64", "d_ff": "128", "num_layers": "3", "num_heads": "4", "d_kv": "16", "vocab_size": "128",
    }),
}  # fmt: skip


@cache
def graph(name: str) -> Graph:
    source, settings = MODELS[name]
    loaded = load(source, batch=4, seq=32, settings=settings)
    return capture(loaded.model, loaded.inputs, name=name)


def expect(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("TAPAS_UPDATE_GOLDEN"):
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text()


def test_graph() -> None:
    expect("graph_llama", str(graph("llama")))


def test_folds() -> None:
    expect("folds", "\n".join(str(fold(graph(name))) for name in MODELS))
