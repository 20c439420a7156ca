"""Faults planted one by one into parallel programs: verify catches those that change a result by more than rounding,
and names the first wrong operator. Those that change nothing are listed."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tapas._torch import in_backward
from tapas.verify import threads, verification
from tapas.verify.steps import Outcome
from tapas.verify.trial import Coord, Trial
from tapas.verify.verification import Report
from tests.faithful.modules import CASES
from tests.faithful.run import Setting, verified

MESH = (2,)
QUICK = ("batch_norm_net", "exponential_average")
MORE = ("small_llama", "loss_outside", "straight_through", "shared_norm_buffer", "losses_in_a_dict", "top_k_experts")
# Where and which: the number of a collective in a step.
HARMLESS = {
    # a user's function runs on the whole, and each rank goes on with its own part of the result
    ("straight_through", "batch"): ("0 all_gather forward", "6 all_gather backward"),
    # between layers the pin holds activations whole, of which every reader takes its own part
    ("small_llama", "tensor"): (
        *(f"{number} all_gather forward" for number in (0, 9, 18, 27)),
        *(f"{number} reduce_scatter backward" for number in (34, 43, 52, 61)),
    ),
}

Outcomes = dict[Coord, Outcome]


def all_alone(axis: threads.ThreadAxis, name: str, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """What a collective gives a rank that hears nothing from the others."""
    if name == "all_gather":
        return torch.cat([x] * axis.size)
    if name == "reduce_scatter":
        return x.chunk(axis.size)[axis.index].clone()
    if name == "all_to_all":
        sent, received = args
        return torch.cat([x.split(sent)[axis.index]] * axis.size)[: sum(received)]
    return x.clone()


class Dropped:
    """Counts the collectives of every rank; the one of a number is not done."""

    def __init__(self, number: int | None) -> None:
        self.number, self.own, self.phases = number, threading.local(), dict[int, str]()

    def method(self, name: str) -> Callable[..., Any]:
        plain = getattr(threads.ThreadAxis, name)

        def called(axis: threads.ThreadAxis, x: torch.Tensor, *args: Any) -> Any:
            number = self.own.number = getattr(self.own, "number", -1) + 1
            self.phases[number] = f"{name} {'backward' if in_backward() else 'forward'}"
            return all_alone(axis, name, x.detach(), *args) if number == self.number else plain(axis, x, *args)

        return called

    def first_pass(self) -> list[tuple[int, str]]:
        """Of those that were counted: the search for a culprit makes one pass, forward and backward."""
        found = sorted(self.phases.items())
        turns = (n for (_, before), (n, after) in pairwise(found) if "backward" in before and "forward" in after)
        return found[: next(turns, len(found))]

    @contextmanager
    def planted(self) -> Iterator[None]:
        methods = {name: self.method(name) for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")}
        with patch.multiple(threads.ThreadAxis, **methods):
            yield


@contextmanager
def unwritten(path: str) -> Iterator[None]:
    plain = threads.written

    def written(graph: Any, outputs: Any) -> Mapping[str, torch.Tensor]:
        return {name: value for name, value in plain(graph, outputs).items() if graph.leaf_of[name].paths[0] != path}

    with patch.object(threads, "written", written):
        yield


def report_and_outcomes(name: str, split: str, steps: int = 1) -> tuple[Report, Outcomes]:
    """The report, and what the ranks had in float64."""
    found: list[Outcomes] = []
    run = verification.run_in_threads

    def kept(trial: Trial) -> Outcomes:
        found.append(run(trial))
        return found[-1]

    with patch.object(verification, "run_in_threads", kept):
        report = verified(CASES[name], Setting(MESH, split), steps, noise=True)
    return report, found[0]


def changed(one: Outcomes, two: Outcomes) -> bool:
    """By more than rounding."""
    return any(
        _differs(getattr(one[coord], field.name), getattr(two[coord], field.name))
        for coord in one
        for field in fields(Outcome)
        if field.name not in ("sent", "peak_nbytes")
    )


def _differs(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        scale = max(float(one.abs().max()), 1e-3) if one.numel() else 1.0
        return one.shape != two.shape or not torch.allclose(one, two, rtol=1e-9, atol=1e-9 * scale)
    if isinstance(one, Mapping):
        return one.keys() != two.keys() or any(_differs(value, two[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) != len(two) or any(map(_differs, one, two))
    return abs(one - two) > 1e-9 * max(abs(one), 1.0)


CASES_AND_SPLITS = [
    pytest.param(name, split, marks=() if name in QUICK else pytest.mark.full)
    for name in (*QUICK, *MORE)
    for split in ("batch", "tensor")
]


@pytest.mark.parametrize(("name", "split"), CASES_AND_SPLITS)
def test_dropped_collectives(name: str, split: str) -> None:
    count = Dropped(None)
    with count.planted():
        report, clean = report_and_outcomes(name, split, steps=0)
    assert report.ok
    harmless = []
    for number, what in count.first_pass():
        with Dropped(number).planted():
            report, outcomes = report_and_outcomes(name, split, steps=0)
        if changed(clean, outcomes):
            assert not report.ok, (number, what)
            assert report.culprit is not None, (number, what)
        else:
            assert report.ok, (number, what, report.checks)
            harmless.append(f"{number} {what}")
    assert tuple(harmless) == HARMLESS.get((name, split), ())


@pytest.mark.parametrize(("name", "split"), CASES_AND_SPLITS)
def test_dropped_writes(name: str, split: str) -> None:
    report, clean = report_and_outcomes(name, split)
    assert report.ok
    for buffer in next(iter(clean.values())).buffers:
        with unwritten(buffer):
            report, outcomes = report_and_outcomes(name, split)
        assert changed(clean, outcomes) and not report.ok
        assert report.culprit is not None and report.culprit.phase == f"write to {buffer}"
