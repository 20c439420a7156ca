"""Each rank's program: a block is written once, however many copies of it there are."""

import re
from functools import cache

import pytest
import torch
from torch import fx

from tapas.capture import capture_program
from tapas.ir.fold import fold
from tapas.planner.pipeline import decided
from tapas.planner.request import Request
from tapas.runtime.collectives import Count, Rank
from tapas.runtime.executor import Compilable, Prepared, prepare
from tapas.verify.threads import thread_axes
from tests.distributed.small import EAGER, llama

MESH, HERE = (2, 2), (0, 1)


@cache
def prepared(layers: int, strategy: str) -> Prepared:
    captured = capture_program(*llama(layers))
    pins = [("*", strategy)] if strategy else []
    folded = fold(captured.graph)
    source = Compilable(captured, folded, decided(captured.graph, folded, Request.of(MESH, EAGER, pins=pins)))
    rank = Rank(MESH, HERE, thread_axes(MESH)[HERE], Count(), torch.device("cpu"))
    return prepare(source, rank, joint=True, modes=(True,))


def blocks(program: fx.GraphModule) -> list[fx.GraphModule]:
    return [module for module in program.children() if isinstance(module, fx.GraphModule)]


@pytest.mark.parametrize("strategy", ["", "ddp", "fsdp", "megatron"])
def test_a_block_is_written_once(strategy: str) -> None:
    few, many = prepared(3, strategy).program, prepared(6, strategy).program
    assert len(list(few.modules())) == len(list(many.modules()))
    assert [len(b.graph.nodes) for b in blocks(few)] == [len(b.graph.nodes) for b in blocks(many)]
    calls = [sum(node.op == "call_module" for node in program.graph.nodes) for program in (few, many)]
    assert calls[1] == calls[0] + 3


def test_every_copy_leaves_its_gradients_to_the_caller() -> None:
    gathered = [weight.parameter for unit in prepared(6, "").units for weight in unit]
    for left in (prepared(6, "ddp").sums, gathered):
        assert {number for path in left for number in re.findall(r"layers\.(\d)", path)} == set("012345")


def test_gradients_are_expected_from_the_end() -> None:
    order = prepared(3, "ddp").used[::-1]
    assert (order[0], order[-1]) == ("lm_head.weight", "model.embed_tokens.weight")
    layers = [int(number) for path in order for number in re.findall(r"layers\.(\d)", path)]
    assert layers == sorted(layers, reverse=True)
    last = [path.removeprefix("model.layers.2.") for path in order if "layers.2" in path]
    assert last[0] == "mlp.down_proj.weight" and last[-1] == "input_layernorm.weight"
