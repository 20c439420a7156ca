"""Code that stays whole: which statements, what the plan says of it, and what is refused."""

import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

import tapas
from tapas.capture import capture
from tapas.capture.program import capture_program
from tapas.errors import CaptureError, TapasError
from tapas.ir.interpreter import leaf_values, tensor_values
from tapas.ir.regions import REGION


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.between(self.a(x))).square().mean()

    def between(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def regions(model: nn.Module) -> list[str]:
    graph = capture(model, (torch.randn(6, 8),))
    assert any(op.target == "aten.linear.default" for op in graph.ops)
    return [note for note in graph.notes if "stays whole" in note]


class Chosen(Layered):
    def between(self, h):
        h = h + 1
        if h.sum() > 0:
            h = h * 2
        return h - 1


def test_the_innermost_statement_is_taken_and_told() -> None:
    code = Chosen.between.__code__
    (note,) = regions(Chosen())
    line = code.co_firstlineno + 2
    assert note.startswith(f"Chosen (test_regions.py:{line} in between): this code stays whole")
    assert "depends on the values of a tensor" in note
    assert Chosen.between.__code__ is code, "the model is as it was"
    graph = capture(Chosen(), (torch.randn(6, 8),))
    (op,) = [op for op in graph.ops if op.target == REGION]
    assert len(op.operands) == 1 and [o.target for o in graph.ops].count("aten.add.Tensor") == 1


class Counted(Layered):
    def between(self, h):
        rows = (h[:, 0] > 0).nonzero()[:, 0]
        picked = h[rows]
        return h + picked.sum(0)


def test_sizes_that_depend_on_data_stay_inside() -> None:
    graph = capture(Counted(), (torch.randn(6, 8),))
    (op,) = [op for op in graph.ops if op.target == REGION]
    assert [graph.tensors[name].shape for name in op.results] == [(6, 8)]


class Ragged(nn.Module):
    """Nothing is left to plan but what is before."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return h[h[:, 0] > 0]


def test_another_shape_is_refused_by_place() -> None:
    torch.manual_seed(0)
    model, x = Ragged(), torch.randn(6, 8)
    graph = capture_program(model, (x,), training=True).graph
    assert torch.equal(tensor_values(graph, leaf_values(graph, model, {"x": x}))[graph.outputs[0]], model(x))
    others = leaf_values(graph, model, {"x": -x})
    with pytest.raises(TapasError, match=r"Ragged \(test_regions.py:\d+ in forward\).* of shape"):
        tensor_values(graph, others)


def drawn_by_numpy(h):
    if h.sum() > 0:
        h = h * float(np.random.rand())
    return h * float(np.random.rand())


def drawn_by_python(h):
    return h * random.random() if h.sum() > -1e9 else h


def hooked(h):
    if h.sum() > -1e9:
        h = h * 1
        h.register_hook(lambda gradient: 2 * gradient)
    return h


class Remembers(Layered):
    def between(self, h):
        if h.sum() > -1e9:
            self.last = h.mean()
        return h


@pytest.mark.parametrize("function", [drawn_by_numpy, drawn_by_python, hooked])
def test_what_reaches_beyond_is_refused(function) -> None:
    model = Layered()
    model.between = function
    with pytest.raises(CaptureError):
        capture(model, (torch.randn(6, 8),))


def test_attributes_that_are_set_are_refused() -> None:
    with pytest.raises(CaptureError):
        capture(Remembers(), (torch.randn(6, 8),))


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x[x.sum(1) > 0]).square().mean()


def test_a_model_of_which_nothing_would_be_left_is_refused() -> None:
    with pytest.raises(CaptureError, match="depends on"):
        capture(Whole(), (torch.randn(6, 8),))


def test_without_data_the_place_is_told() -> None:
    with torch.device("meta"):
        model = Chosen()
    with pytest.raises(CaptureError, match="depends on the values"):
        capture(model, (torch.randn(6, 8, device="meta"),))


class Unread(Layered):
    """What it reads and writes is for the data to say."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def between(self, h):
        if h[0, 0] > 5:
            h = self.c(h)
        if h[0, 0] < -5:
            self.count += 1
        return h


@pytest.mark.parametrize(("value", "fact"), [(9.0, "reads a weight"), (-9.0, "writes to a tensor")])
def test_what_the_example_did_not_touch_is_refused_when_it_is(value: float, fact: str) -> None:
    torch.manual_seed(0)
    model, x = Unread(), torch.randn(6, 8)
    graph = capture_program(model, (x,)).graph
    assert all("c.weight" not in op.operands for op in graph.ops)
    with torch.no_grad():
        model.a.bias.fill_(value)
        model.a.weight.fill_(0)
    with pytest.raises(TapasError, match=fact):
        tensor_values(graph, leaf_values(graph, model, {"x": x}))


class Passed(Layered):
    """What the branch makes may be what it was given; one of the two is written to afterwards."""

    def __init__(self, result: bool) -> None:
        super().__init__()
        self.result = result

    def between(self, h):
        h = h + 1
        y = h
        if h.sum() > 0:
            y = h * 2
        (y if self.result else h).mul_(3)
        return y + h


@pytest.mark.parametrize("result", [True, False])
def test_memory_that_is_shared_for_some_values_is_refused_where_it_is_written_to(result: bool) -> None:
    model, x = Passed(result), torch.randn(6, 8)
    with torch.no_grad():
        model.a.bias.fill_(10.0)
    graph = capture_program(model, (x,)).graph
    values = tensor_values(graph, leaf_values(graph, model, {"x": x}))
    assert values[graph.outputs[0]].item() == pytest.approx(model(x).item(), rel=1e-5)
    with torch.no_grad():
        model.a.bias.fill_(-10.0)
    with pytest.raises(TapasError, match="returns what it was given, which is written to later"):
        tensor_values(graph, leaf_values(graph, model, {"x": x}))


def test_other_threads_run_the_model_meanwhile() -> None:
    model, x, found = Chosen(), torch.randn(64, 8), []
    wanted = model(x)
    other = threading.Thread(target=lambda: found.extend(model(x) for _ in range(200)))
    other.start()
    capture(Chosen(), (torch.randn(6, 8),))
    other.join()
    assert len(found) == 200 and all(torch.equal(value, wanted) for value in found)


def test_a_plan_says_so_and_is_verified() -> None:
    torch.manual_seed(0)
    model, x = Chosen(), torch.randn(8, 8)
    plan = tapas.plan(model, (x,), mesh=2)
    assert any("stays whole" in warning for warning in plan.warnings)
    assert tapas.verify(model, (x,), plan=plan, in_process=True, steps=2).ok
