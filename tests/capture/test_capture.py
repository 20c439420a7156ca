"""Capture: the graph means what the model means, and bad input is told in a sentence."""

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tapas.capture import capture, capture_program
from tapas.errors import CaptureError
from tapas.ir.graph import Graph, verify
from tapas.ir.interpreter import leaf_values, run


def replay(model: nn.Module, inputs: dict[str, Any], **options: Any) -> tuple[Graph, tuple[Tensor, ...]]:
    """The graph and its outputs on the model's weights; checks them against the model."""
    captured = capture_program(model, inputs, **options)
    graph = captured.graph
    reference = copy.deepcopy(model)
    expected = reference(**inputs)
    leaves = leaf_values(graph, model, {k: v for k, v in inputs.items() if isinstance(v, Tensor)})
    got = run(graph, leaves | captured.constants)
    flat = [t for t in torch.utils._pytree.tree_leaves(expected) if isinstance(t, Tensor)]
    buffers = dict(reference.named_buffers())
    flat += [buffers[graph.leaf_of[buffer].paths[0]] for buffer, _ in graph.writes]
    assert len(got) == len(flat)
    for mine, theirs in zip(got, flat, strict=True):
        torch.testing.assert_close(mine, theirs, check_dtype=True)
    if graph.loss is not None:
        flat[graph.outputs.index(graph.loss)].backward()
        got[graph.outputs.index(graph.loss)].backward()
        grads = dict(model.named_parameters())
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(grads[name].grad, parameter.grad, msg=lambda m, n=name: f"{n}: {m}")
    return graph, got


def targets(graph: Graph) -> list[str]:
    return [op.target for op in graph.ops]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.relu(self.up(x))), y)


def test_the_graph_of_a_small_model() -> None:
    graph = capture(Mlp(), (torch.zeros(2, 4), torch.zeros(2, 4)), name="mlp")
    assert str(graph) == (
        "graph mlp (4 operators)\n"
        "  parameter up.weight*: float32[8, 4]\n"
        "  parameter up.bias*: float32[8]\n"
        "  parameter down.weight*: float32[4, 8]\n"
        "  parameter down.bias*: float32[4]\n"
        "  input x: float32[2, 4]\n"
        "  input y: float32[2, 4]\n"
        "  linear*: float32[2, 8] = aten.linear.default(x, up.weight, up.bias)  # up\n"
        "  relu*: float32[2, 8] = aten.relu.default(linear)\n"
        "  linear_1*: float32[2, 4] = aten.linear.default(relu, down.weight, down.bias)  # down\n"
        "  mse_loss*: float32[] = aten.mse_loss.default(linear_1, y)\n"
        "  return mse_loss  # loss: mse_loss"
    )
    assert graph.ops[1].source.startswith("test_capture.py:")


def test_one_tensor_given_twice_is_two_inputs() -> None:
    x = torch.zeros(2, 4)
    graph = capture(Mlp(), {"x": x, "y": x})
    assert [leaf.paths for leaf in graph.leaves if leaf.kind == "input"] == [("x",), ("y",)]
    assert graph.ops[-1].operands[1] == "y"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_inputs_may_live_elsewhere_than_the_model(device: str) -> None:
    other = "meta" if device == "cpu" else "cpu"
    graph = capture(Mlp().to(device), (torch.zeros(2, 4, device=other), torch.zeros(2, 4)))
    assert graph.training


def test_fake_model_and_fake_inputs() -> None:
    with torch._subclasses.FakeTensorMode():
        model, x = Mlp(), torch.zeros(2, 4)
    assert capture(model, (x, x)).training


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.steps.add_(1)
        y = self.linear(x)
        before = y.clone()
        y[:, 1:3] = 2 * y[:, 0:2]
        y[0] += torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=y.dtype)
        row = y.view(-1)
        row.mul_(2)
        y.t()[3].fill_(0.5)
        first, second = y[:, :3], y[:, 3:]
        second.add_(self.table[:3].to(y.dtype))
        kept = first * 1.0
        y.clamp_(min=-1)
        y.masked_fill_(y > 3, 0.25)
        y.unsqueeze(1).permute(1, 2, 0).transpose(0, 1)[2].sub_(0.1)
        z = torch.zeros_like(y)
        z[1] = kept.sum()
        return {"loss": (y * before).sum() + z.mean() + kept.sum(), "y": y, "row": row + 0, "z": z}


def test_writes_in_place_become_values() -> None:
    torch.manual_seed(0)
    model = InPlace().double()
    graph, _ = replay(model, {"x": torch.randn(3, 6, dtype=torch.float64)})
    assert not [t for t in targets(graph) if t.split(".")[1].endswith("_")]
    assert graph.writes == (("steps", "add_"),)


class Narrow(nn.Module):
    """Sums and products in place keep the dtype of what is written, also where the other operand's is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        narrow = (x * self.p).bfloat16()
        narrow += x * 1.001
        narrow[:, 2:].mul_(x[:, 2:])
        whole = torch.arange(6)
        whole //= torch.tensor(2)  # of these, the functional forms are overloads of other names
        whole |= torch.tensor(1)
        power = x.clone().pow_(whole)
        return {"loss": (narrow * 3).sum(), "narrow": narrow, "power": power, "whole": whole}


def test_what_is_written_keeps_its_dtype() -> None:
    torch.manual_seed(0)
    model, x = Narrow(), torch.randn(3, 6)
    graph, results = replay(model, {"x": x})
    assert [graph.tensors[name].dtype for name in graph.returned[1:]] == ["bfloat16", "float32", "int64"]
    assert torch.equal(results[1], model(x)["narrow"])  # to the last bit: all of it is rounded where the model does


class Out(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        torch.add(x, x, out=y)
        return y * 2


def test_a_result_is_written_where_it_is_asked_for() -> None:
    replay(Out(), {"x": torch.randn(3)})


class Detached(nn.Module):
    """Adds to what was looked up in a table, and detached; `again`: and reads what it was detached from."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again, self.p = again, nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        found = x.index_select(0, torch.tensor([2, 0]))
        position = found.view(2, 6).detach()
        position += self.p * 2
        return (position * self.p).sum() + (found.sum() if self.again else 0)


def test_what_was_detached_may_be_written_to() -> None:
    replay(Detached(again=False), {"x": torch.randn(3, 6)})
    with pytest.raises(CaptureError, match=r"test_capture\.py:.*written to through detach"):
        capture(Detached(again=True), {"x": torch.randn(3, 6)})


def test_a_write_that_cannot_be_followed_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1.5
            y.unfold(0, 2, 1).mul_(2)
            return y

    with pytest.raises(
        CaptureError, match=r"test_capture\.py:.*unfold.* is written in place; write to the tensor itself"
    ):
        capture(Model(), (torch.zeros(4),))


class NoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            frozen = self.a(x).contiguous()
            copied = self.b(x)
        y = self.a(x)
        with torch.no_grad():
            cut = y.clone()
        side = self.b(y)
        loss = (self.b(y.detach()) + y * cut + frozen).sum()
        return {"loss": loss, "side": side, "best": side.argmax(-1), "copied": copied, "none": None, "three": 3}


def test_gradients_flow_where_the_model_lets_them() -> None:
    torch.manual_seed(0)
    graph, _ = replay(NoGrad().double(), {"x": torch.randn(2, 4, dtype=torch.float64)})
    flags = {tensor.name: tensor.differentiable for tensor in graph.tensors.values()}
    assert flags["a.weight"] and flags["b.weight"] and not flags["b.bias"] and not flags["unused.weight"]
    by_output = dict(zip(("loss", "side", "best", "copied"), graph.outputs, strict=True))
    assert {name: flags[tensor] for name, tensor in by_output.items()} == {
        "loss": True, "side": True, "best": False, "copied": False,
    }  # fmt: skip
    assert targets(graph).count("aten.detach.default") == 2


def test_autocast_writes_its_casts_down() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.linear(x)
                z = y.softmax(-1)
            return z.float().pow(2).sum()

    torch.manual_seed(0)
    graph, _ = replay(Model(), {"x": torch.randn(2, 4)})
    assert targets(graph)[:4] == ["aten.to.dtype"] * 3 + ["aten.linear.default"]


def test_constants_go_to_the_prelude_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequency", torch.arange(4.0))
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x * torch.cos(torch.arange(2)[:, None] * self.frequency) * self.scale
            return x.sum() + torch.rand(4).sum() * 0

    model = Model()
    graph, _ = replay(model, {"x": torch.randn(2, 4)})
    made = [op.target for op in graph.prelude]
    assert made == ["aten.arange.default", "aten.unsqueeze.default", "aten.mul.Tensor", "aten.cos.default"]
    assert [leaf.tensor for leaf in graph.leaves if leaf.kind == "constant"] == [graph.prelude[-1].results[0]]
    assert "aten.rand.default" in targets(graph)


def test_what_changes_nothing_is_trimmed() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.dropout(x.to(x.dtype).contiguous().view(2, -1, 2).expand(-1, 4, -1), 0.5, training=False)
            dead = y.sum(0)
            del dead
            return y.transpose(0, 1).contiguous().view(8, 2)[:] * 1

    graph, _ = replay(Model(), {"x": torch.randn(2, 8)}, training=False)
    assert targets(graph) == ["aten.reshape.default", "aten.transpose.int", "aten.reshape.default"]
    assert graph.ops[0].args[1] == (2, 4, 2)
    assert graph.trimmed >= 6


def test_several_results_and_a_tensor_given_twice_to_one_call() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            values, index = x.topk(2)
            a, b = values.chunk(2, -1)
            return torch.cat([a, b, a], -1).gather(-1, index)

    graph, _ = replay(Model(), {"x": torch.randn(3, 3)}, training=False)
    topk, chunk, cat, _ = graph.ops
    assert len(topk.results) == 2 and len(chunk.results) == 2
    assert cat.operands == (chunk.results[0], chunk.results[1], chunk.results[0])


def test_tied_weights_are_one_leaf() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.embed(ids)), ids)

    for device in ("cpu", "meta"):
        graph = capture(Model().to(device) if device == "cpu" else _on_meta(Model), (torch.zeros(3, dtype=torch.long),))
        assert [leaf.paths for leaf in graph.parameters()] == [("embed.weight", "head.weight")]
        assert len(graph.readers["embed.weight"]) == 2


def _on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


def test_batch_norm_keeps_its_books() -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)).pow(2).mean()

    graph, _ = replay(Model().double(), {"x": torch.randn(2, 3, 6, 6, dtype=torch.float64)})
    assert [buffer for buffer, _ in graph.writes] == [
        "norm.num_batches_tracked", "norm.running_mean", "norm.running_var"
    ]  # fmt: skip


def test_training_and_inference_by_what_the_model_returns() -> None:
    x = torch.zeros(2, 4)
    assert capture(Mlp(), (x, x)).loss == "mse_loss"
    assert not capture(Mlp(), (x, x), training=False).training
    assert capture(nn.Linear(4, 4), (x,)).loss is None
    outside = capture(nn.Linear(4, 4), (x,), training=True)
    assert outside.training and outside.loss is None and outside.losses == set(outside.outputs)
    with pytest.raises(CaptureError, match="no gradient reaches any parameter"):
        capture(Mlp().requires_grad_(False), (x, x), training=True)


def test_the_model_and_its_numbers_are_untouched() -> None:
    model = InPlace()
    before = copy.deepcopy(model.state_dict())
    capture(model, (torch.zeros(3, 6),))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Chooser())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Chooser(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_control_flow_on_data_names_module_and_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match=r"inner\.1 \(test_capture\.py:\d+ in forward\): .*values of a tensor"):
        capture(Branch().to("meta"), (torch.zeros(2, 4, device="meta"),))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.zeros(2, 5), torch.zeros(2, 4)), r"up .*float32\[2, 5\].*check their shapes"),
        ({"x": torch.zeros(2, 4), "z": torch.zeros(2, 4)}, r"Mlp.forward: .*; z: .*known|Mlp.forward: .*; z: "),
        ((torch.zeros(2, 4),), r"missing a required argument: 'y'"),
        ((torch.zeros(2, 4), object()), r"example input 1: it holds a builtins.object"),
        (7, r"example inputs: they are a int; give a tuple"),
    ],
)
def test_wrong_inputs_are_explained(inputs: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        capture(Mlp(), inputs)
    assert "Traceback" not in str(caught.value) and "\n" not in str(caught.value)


def test_sizes_that_depend_on_data_are_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0].sum()

    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+ in forward\).*depends on"):
        capture(Model(), (torch.zeros(4),))


def test_numbers_and_none_may_be_inputs() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, scale: float, mask: Tensor | None = None, flag: bool = False) -> Tensor:
            return x * scale if flag and mask is None else x

    graph = capture(Model(), {"x": torch.zeros(3), "scale": 2.0, "mask": None, "flag": True})
    assert [leaf.paths[0] for leaf in graph.leaves] == ["x"]
    assert graph.ops[0].args[1] == 2.0
    assert verify(graph) is graph


def test_a_parameter_and_an_input_may_share_a_name() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.x * x).sum()

    graph = capture(Model(), (torch.zeros(3),))
    assert graph.training and len(graph.leaves) == 2


# ---------------------------------------------------------------------------------------------
# Merged dims


def sizes(graph: Graph) -> set[int]:
    return {size for op in graph.ops for name in op.results for size in graph.tensors[name].shape}


class Attention(nn.Module):
    """The stock layer, with sizes that tell dims apart: 4 heads of 2 features, batch 3, sequence 5."""

    def __init__(self, batch_first: bool, weights: bool, mask: bool, padding: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 4, batch_first=batch_first)
        self.weights, self.mask, self.padding = weights, mask, padding

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        mask = torch.full((5, 5), -torch.inf).triu(1) if self.mask else None
        padding = torch.arange(5).expand(3, 5) > 3 if self.padding else None
        if mask is not None and padding is not None:
            padding = torch.zeros(3, 5).masked_fill(padding, -torch.inf)
        out, found = self.inner(x, x, x, need_weights=self.weights, attn_mask=mask, key_padding_mask=padding)
        return out.square().mean(), found


@pytest.mark.parametrize("padding", (False, True))
@pytest.mark.parametrize("mask", (False, True))
@pytest.mark.parametrize("weights", (False, True))
@pytest.mark.parametrize("batch_first", (False, True))
def test_stock_attention_keeps_batch_heads_and_sequence_apart(
    batch_first: bool, weights: bool, mask: bool, padding: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn((3, 5, 8) if batch_first else (5, 3, 8))
    graph, _ = replay(Attention(batch_first, weights, mask, padding), {"x": x})
    assert sizes(graph) <= {1, 2, 3, 4, 5, 8, 24}  # never 15 (sequence and batch) or 12 (batch and heads)
    assert "aten.split.Tensor" in targets(graph) and "aten.select.int" not in targets(graph)


def test_a_scaled_sum_of_products_on_merged_heads() -> None:
    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
            flat = torch.relu(bias).reshape(12, 1, 5)
            scores = torch.baddbmm(flat, q.reshape(12, 5, 2), k.reshape(12, 5, 2).mT, beta=0.5, alpha=3)
            return scores.softmax(-1).view(3, 4, 5, 5)

    inputs = {"q": torch.randn(3, 4, 5, 2), "k": torch.randn(3, 4, 5, 2), "bias": torch.randn(3, 4, 1, 5)}
    graph, _ = replay(Model(), inputs, training=False)
    assert 12 not in sizes(graph)


@pytest.mark.parametrize("batch_first", (False, True))
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_stock_transformer_with_a_causal_mask(batch_first: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Transformer(8, 4, 2, 2, 11, 0.0, batch_first=batch_first)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(5)
            return self.inner(source, target, tgt_mask=mask).square().mean()

    torch.manual_seed(0)
    source, target = torch.randn(3, 7, 8), torch.randn(3, 5, 8)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    graph, _ = replay(Model(), {"source": source, "target": target})
    assert not sizes(graph) & {15, 21, 12}


@pytest.mark.parametrize("unbound", (False, True))
def test_packed_tensors_are_split(unbound: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            packed = self.qkv(x).reshape(2, 5, 3, 4, 2).permute(2, 0, 3, 1, 4)
            q, k, v = packed.unbind(0) if unbound else (packed[0], packed[-2], packed[2])
            return F.scaled_dot_product_attention(q, k, v).square().mean()

    graph, _ = replay(Model(), {"x": torch.randn(2, 5, 8)})
    views = ["aten.reshape.default", "aten.permute.default"] * 3
    assert targets(graph)[:8] == ["aten.linear.default", "aten.split.Tensor", *views]


def test_a_packed_dim_that_is_not_the_major_one_stays() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            one, two = (x * 2).reshape(2, 4, 2, 3).unbind(2)
            first = (x + 1).reshape(2, 2, 12)[:, 0]  # the other half is not asked for
            return one * two + first.reshape(2, 4, 3)

    graph, _ = replay(Model(), {"x": torch.randn(2, 24)}, training=False)
    assert "aten.unbind.int" in targets(graph) and "aten.select.int" in targets(graph)


def test_a_stream_is_not_taken_apart_for_what_is_added_to_it() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(x)
            tiles = y.reshape(2, 3, 4, 5).transpose(1, 2).reshape(2, 12, 5)
            return (y + tiles).reshape(2, 4, 3, 5).transpose(1, 2)

    graph, _ = replay(Model(), {"x": torch.randn(2, 12, 5)}, training=False)
    added = next(op for op in graph.ops if op.target == "aten.add.Tensor")
    assert graph.tensors[added.results[0]].shape == (2, 12, 5)


def test_flattened_layers_run_on_the_dims_themselves() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            inner = F.gelu(self.up(x.reshape(6, 4)) * 2)
            out = torch.mm(inner, self.down.weight.t()).view(2, 3, 4)
            return out.sum(), inner  # what leaves flattened leaves flattened

    graph, (_, inner) = replay(Model(), {"x": torch.randn(2, 3, 4)})
    assert inner.shape == (6, 6)
    products = [op for op in graph.ops if op.target in ("aten.linear.default", "aten.matmul.default")]
    assert [graph.tensors[op.results[0]].shape for op in products] == [(2, 3, 6), (2, 3, 4)]


def test_copies_that_bring_the_last_dim_together_are_kept() -> None:
    """Attention with a strided mask is not fused; all other copies for the sake of memory layout are wasted."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(9, 2))

        def forward(self, x: Tensor) -> Tensor:
            heads = x.view(4, 3, 2, 8).transpose(1, 2).contiguous()  # of no use
            bias = self.table.view(3, 3, 2).permute(2, 0, 1).contiguous()
            return F.scaled_dot_product_attention(heads, heads, heads, bias.contiguous()).sum()

    graph, _ = replay(Model(), {"x": torch.randn(4, 3, 16)})
    assert [graph.tensors[op.results[0]].shape for op in graph.ops if "contiguous" in op.target] == [(2, 3, 3)]


@pytest.mark.parametrize("seed", range(12))
def test_any_chain_of_views_keeps_its_meaning(seed: int) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            draw = random.Random(seed)
            number = draw.randrange
            seen, y = [], x * 2
            for _ in range(14):
                match number(6):
                    case 0 | 1:
                        shape, left = [], y.numel()
                        while left > 1 and len(shape) < 4:
                            found = [d for d in (1, 2, 3, 4, 6, 8, 12) if left % d == 0]
                            shape.append(found[number(len(found))])
                            left //= shape[-1]
                        y = y.reshape(*shape, left)
                    case 2 | 3:
                        y = y.permute(*draw.sample(range(y.dim()), y.dim()))
                    case 4:
                        y = y.softmax(number(y.dim())) + y.sigmoid()
                    case _:
                        dim = number(y.dim())
                        if y.shape[dim] > 1 and y.numel() > 48:
                            y = torch.stack([part.sin() * i for i, part in enumerate(y.unbind(dim))]).sum(0)
                        y = F.linear(y, torch.eye(y.shape[-1]) * 2)
                seen.append(y)
            return [seen[-1], seen[number(14)]]

    torch.manual_seed(0)
    replay(Model(), {"x": torch.randn(4, 6, 24)}, training=False)


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=None) + torch.randint(0, 2, x.shape, generator=None)


def test_no_generator_is_none() -> None:
    graph = capture(Noisy(), (torch.zeros(4, 3),), training=False)
    assert {"aten.randn.default", "aten.randint.low"} <= {op.target for op in graph.ops}
