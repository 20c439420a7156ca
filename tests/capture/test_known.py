"""What capture reads out of integers is what every call is compared with; what only checks values does not stop it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tapas.capture import capture_program
from tapas.capture.program import Captured
from tapas.errors import CaptureError, TapasError
from tests.capture import checking

X, N = torch.randn(4, 8), torch.tensor([2, 1, 3, 2])


class Given(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return self.function(self.a(x), n).square().sum()


def captured(function: Callable[..., torch.Tensor], n: torch.Tensor = N) -> Captured:
    return capture_program(Given(function), (X, n))


def check(found: Captured, numbers: list[int]) -> None:
    found.known.check({("input", "n"): torch.tensor(numbers)})


def sized(h: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return h[n > 1]


def cut(h: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return h[: int(n.max())]


def written(h: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros(4, dtype=torch.long)
    counts[n > 2] = 2
    counts[0] += 1
    first = int(counts[0])
    counts[0] = 4
    return h[:first] + h[: int(counts[0]) : 4] + h[: int(counts.sum()) // 6]


def branched(h: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return h if bool((n > 0).all()) else -h


def test_only_what_was_read_has_to_be_the_same() -> None:
    found = captured(sized)
    assert found.graph.tensors["index"].shape == (3, 8)
    check(found, [5, 0, 2, 9])  # three are above one
    with pytest.raises(TapasError, match=r"test_known.py:\d+ in .*made for \(3, 1\)"):
        check(found, [5, 5, 2, 9])
    assert "values of n" in found.graph.notes[0]


@pytest.mark.parametrize(("function", "same", "other"), [
    (cut, [3, 3, 3, 3], [2, 2, 2, 2]), (branched, [1, 1, 1, 1], [1, 1, 0, 1]), (written, [0, 0, 9, 0], [0, 0, 0, 0]),
])  # fmt: skip
def test_numbers_and_branches(function, same: list[int], other: list[int]) -> None:
    found = captured(function)
    check(found, same)
    with pytest.raises(TapasError, match="plan again"):
        check(found, other)


@pytest.mark.parametrize("function", [
    lambda h, n: h[: int(torch.empty(4, dtype=torch.long).max())],
    lambda h, n: h[: int(n.new_empty(4).max())],
    lambda h, n: h[: int(torch.empty_like(n).copy_(n).max())],
    lambda h, n: h[: int(torch.randint(0, 4, ()))],
    lambda h, n: h[: int((h.sum(1) + n).max())],
    lambda h, n: h[: int(n.clone().mul_(h[0, 0].long()).max())],
])  # fmt: skip
def test_memory_random_numbers_and_activations_are_never_known(function) -> None:
    with pytest.raises(CaptureError, match=r"values of a tensor|read out of a tensor"):
        captured(function)


def test_integers_without_data_are_not_known() -> None:
    with pytest.raises(CaptureError, match="values of a tensor"):
        captured(cut, torch.empty(4, dtype=torch.long, device="meta"))


def test_who_reads_nothing_is_bound_to_nothing() -> None:
    found = captured(lambda h, n: h * (n > 1)[:, None] + h[n])
    assert not found.known.steps and not found.graph.notes


def test_the_models_own_checks_are_made_at_every_call() -> None:
    def checked(h: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(n > 0)
        torch._check_tensor_all(h < 1e6)
        return h

    found = captured(checked)
    check(found, [9, 9, 9, 9])
    with pytest.raises(TapasError, match="a check of the model's own fails"):
        check(found, [9, 0, 9, 9])
    assert "left out" in found.graph.notes[-1] and "checked at every call" in found.graph.notes[0]


def test_a_number_that_an_assertion_compares_does_not_bind() -> None:
    found = captured(checking.asserted)
    check(found, [0, 0, 0, 0])
    assert any("on the example inputs only" in note for note in found.graph.notes)
    assert len(found.graph.ops) == 3  # nothing of it is left


def test_an_assertion_that_fails_on_the_examples_is_an_error() -> None:
    with pytest.raises(CaptureError, match="fails on the example inputs"):
        captured(checking.failing)


@pytest.mark.parametrize("function", [checking.used, checking.caught, checking.chosen])
def test_what_changes_what_is_computed_is_no_check(function) -> None:
    notes = captured(function).graph.notes
    assert any("stays whole" in note for note in notes) and not any("left out" in note for note in notes)
