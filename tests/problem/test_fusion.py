"""What compiled programs leave out of memory, held against what torch's own partitioner keeps."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import tapas
from tapas.capture import capture
from tapas.cost.collectives import ClusterRouter
from tapas.cost.kernels import Fused
from tapas.hardware.cluster_files import load_cluster
from tapas.hardware.mesh import parse_mesh
from tapas.ir.fold import fold
from tapas.planner.fit import search
from tapas.planner.pipeline import within
from tapas.planner.request import Request
from tapas.problem.build import build_problem
from tapas.problem.graph_rules import GraphRules
from tests.distributed.small import EAGER, small
from tests.oracle.highs import optimum
from tests.oracle.optima import every_choice
from tests.subjects import small_subject


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.gate, self.down = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return (x + self.down(F.silu(self.gate(y)) * self.up(y))).square().mean()


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, cos: Tensor) -> Tensor:
        q = self.q(x.tanh()).view(*x.shape[:2], 4, 16).transpose(1, 2)
        first, second = q.chunk(2, -1)
        q = q * cos + torch.cat([-second, first], -1) * cos
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return (x + self.out(F.gelu(y.transpose(1, 2).flatten(2)))).pow(2).sum()


def inputs_of(kind: type[nn.Module]) -> tuple[Tensor, ...]:
    x = torch.randn(8, 32, 64)
    return (x, torch.randn(32, 16)) if kind is Rotated else (x,)


def predicted(model: nn.Module, inputs: Any) -> float:
    """Bytes that the operators of a compiled program keep, but for weights and inputs."""
    calls = GraphRules(fold(capture(model, inputs, training=True)), compiled=True)
    copies, total = Counter(copy.block for copy in calls.folded.copies), 0.0
    for number, (block, first) in enumerate(zip(calls.folded.blocks, calls.first, strict=True)):
        for (_, call, _), shares in zip(calls.all[first:], calls.kept[first : first + len(block.ops)], strict=False):
            tensors = *call.operands, *call.results
            total += copies[number] * sum(t.nbytes * share for t, share in zip(tensors, shares, strict=True))
    return total


def kept_by_torch(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Bytes that torch's partitioner keeps for the backward pass."""
    there = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs)}
    storages: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in there:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = compiled(*inputs)
    loss.backward()
    return sum(storages.values())


# what torch.compile imports of torch uses what torch calls deprecated
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", [Gated, Rotated])
def test_kept_is_what_torch_keeps(kind: type[nn.Module]) -> None:
    model, inputs = kind(), inputs_of(kind)
    assert predicted(model, inputs) == pytest.approx(kept_by_torch(model, inputs), rel=0.05)


class Loss(nn.Module):
    def __init__(self, family: str) -> None:
        super().__init__()
        self.model, inputs = small(family)
        self.names = list(inputs)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(**dict(zip(self.names, inputs, strict=True)))["loss"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", ["llama", "vit"])
def test_kept_by_transformers(family: str) -> None:
    """Odds and ends such as the roots of norms weigh more in small models."""
    model, inputs = Loss(family), tuple(small(family)[1].values())
    assert predicted(model, inputs) == pytest.approx(kept_by_torch(model, inputs), rel=0.12)


def fused(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Fused | None]:
    calls = GraphRules(fold(capture(model, inputs, training=True)), compiled=True)
    return {op.name: one for (op, _, _), one in zip(calls.all, calls.fused, strict=True)}


def test_what_operators_of_a_kernel_hand_on_is_never_written() -> None:
    found = {name.partition("_")[0]: one for name, one in fused(Gated(), inputs_of(Gated)).items()}
    assert found["linear"] is None
    silu, product = found["silu"], found["mul"]
    assert silu is not None and product is not None
    assert silu.forward == (1, 0) and not silu.ends
    assert product.forward == (0, 1, 1) and product.ends
    assert silu.backward[1] == 0 and silu.backward[0] == 2  # read again, and its gradient written


def test_what_stands_behind_a_product_is_another_kernel() -> None:
    """The sum reads the input once more: the norm's kernel was done long before."""
    found = {name.partition("_")[0]: one for name, one in fused(Gated(), inputs_of(Gated)).items()}
    norm, total = found["layer"], found["add"]
    assert norm is not None and total is not None
    assert norm.forward[0] == 1 and total.forward[:2] == (1, 1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_compiled_plans_take_less(family: str) -> None:
    graph = small_subject(family).graph
    eager, compiled = (
        within(graph, Request.of("2x2", load_cluster("h100-sxm"), memory=None, recompute="none", compile=how)).best()
        for how in (False, True)
    )
    assert all(compiled.seconds()[phase] < eager.seconds()[phase] for phase in ("forward", "backward"))
    assert compiled.memory()["activations"] < eager.memory()["activations"]
    assert compiled.answer.gap <= 1e-9 * compiled.answer.cost


def test_the_best_compiled_plan_is_that_of_the_integer_program() -> None:
    part = build_problem(fold(small_subject("llama").graph), ClusterRouter(parse_mesh("4"), EAGER, compiled=True))
    assert optimum(every_choice(part)).cost == pytest.approx(search(part).answer.cost, rel=1e-7)


def test_a_plan_says_so_and_its_module_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # no compiler has to be there
    model, inputs = Gated(), inputs_of(Gated)
    plan = tapas.plan(model, inputs, mesh=1, cluster=EAGER, compile=True, training=True)
    plan.save(tmp_path / "plan.json")
    assert "compiled" in str(plan)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        counters.clear()
        parallel = tapas.parallelize(model, inputs, mesh=1, plan=tmp_path / "plan.json")
        loss = parallel(*inputs)
        loss.backward()
    finally:
        dist.destroy_process_group()
    assert counters["stats"]["unique_graphs"]
    assert loss.item() == pytest.approx(model(*inputs).item(), rel=1e-5)
