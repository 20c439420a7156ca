"""Operators as they occur in models, with the tilings that a whole model asks for.

Packed projections, uneven heads and grouped queries: units and cuts travel through the graph, and every
operator must be right under each of the tilings that reach it.
"""

from collections.abc import Callable

import pytest
import torch

from tapas.capture import capture
from tapas.ir.graph import Graph, Op
from tapas.rules.base import Call, rule_for
from tapas.rules.choices import options
from tapas.rules.tiling import Divisibility, find_tilings
from tests.oracle.case import Case, like
from tests.oracle.harness import SAMPLES, Built, call_function, choices, differentiate, sampled, simulate

transformers = pytest.importorskip("transformers")


def gpt2() -> torch.nn.Module:
    """Five heads, and 33 tokens: nothing divides."""
    config = transformers.GPT2Config(
        n_layer=1, n_embd=20, n_head=5, vocab_size=33, n_positions=8, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> torch.nn.Module:
    """Two heads of keys and values for six of queries."""
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=24, intermediate_size=20, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=33, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def phi3() -> torch.nn.Module:
    """Q, K and V of different sizes in one matrix, gate and up in another."""
    config = transformers.Phi3Config(
        num_hidden_layers=1, hidden_size=24, intermediate_size=20, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=40, pad_token_id=0, use_cache=False, resid_pdrop=0.0,
    )  # fmt: skip
    return transformers.Phi3ForCausalLM(config)


def run_whole(graph: Graph) -> dict[str, torch.Tensor]:
    """All tensors of a graph, from random leaves."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in graph.tensors.items():
        dtype = getattr(torch, tensor.dtype)
        found[name] = (
            torch.rand(tensor.shape).to(dtype) if dtype.is_floating_point else torch.ones(tensor.shape).to(dtype)
        )
    for leaf in graph.leaves:
        if leaf.kind == "input":
            found[leaf.tensor] = torch.randint(0, 30, graph.tensors[leaf.tensor].shape)
    for op in (*graph.prelude, *graph.ops):
        results = call_function(op.target, op.args, op.kwargs, [found[name] for name in op.operands])
        found.update(zip(op.results, results, strict=True))
    return found


def built(graph: Graph, op: Op, values: dict[str, torch.Tensor]) -> Built:
    call = Call.of(op, graph.tensors)
    tensors = [values[name].detach().clone().requires_grad_(graph.tensors[name].differentiable) for name in op.operands]
    results = call_function(op.target, op.args, op.kwargs, tensors)
    seeds = [like(r) if r.requires_grad else None for r in results]
    gradients = differentiate(results, tensors, seeds)
    return Built(
        Case(op.target, ()), op, call, rule_for(call), tensors, [r.detach() for r in results], seeds, gradients
    )


@pytest.mark.parametrize("mesh", [(3,), (2, 3)], ids=str)
@pytest.mark.parametrize("make", [gpt2, llama, phi3])
def test_operators_of_models(make: Callable[[], torch.nn.Module], mesh: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = make().double()
    ids = torch.randint(0, 30, (4, 6))
    graph = capture(model, {"input_ids": ids, "labels": ids.clone()}, training=True)
    values = run_whole(graph)
    calls = [(op, Call.of(op, graph.tensors), rule_for(Call.of(op, graph.tensors))) for op in graph.ops]
    tilings, _ = find_tilings(calls, Divisibility(mesh))
    seen = set()
    for (op, call, rule), offered in zip(calls, tilings, strict=True):
        shapes = tuple(t.shape for t in (*call.operands, *call.results))
        if (key := (op.target, str(op.args), shapes, str(offered))) in seen:
            continue
        seen.add(key)
        found = choices(call, options(rule, call, offered, Divisibility(mesh)), mesh)
        for choice in sampled(found, SAMPLES, str(key)) if len(mesh) > 1 else found:
            try:
                simulate(built(graph, op, values), choice, mesh)
            except Exception as error:
                raise AssertionError(f"{op.name} {op.target} {shapes} with {choice}: {error}") from error
