"""Weights that are gathered ahead and gradients that follow behind, in whatever order users call for them."""

from typing import Any

import pytest
import torch
from torch import nn

from tapas._torch import local_part
from tapas.runtime import ahead
from tapas.runtime.module import executor_of
from tests.distributed.parallel import Inputs, mesh_of, parallel_of
from tests.distributed.pool import Pool
from tests.distributed.test_loop import differ, gradients

full = pytest.mark.full
MODES = ("none", "gather", "selective", "block")
NEAR = 1e-9
SCATTERED = ("backward", "reduce_scatter")


def posed(
    mode: str, mesh: tuple[int, ...] = (4,), family: str = "llama", pin: str = "fsdp", pieces: int = 1
) -> tuple[nn.Module, Inputs, nn.Module]:
    return parallel_of(family, mesh_of(mesh), pins=[("*", pin)], recompute=mode, pieces=pieces)


def passes(
    rank: int, mode: str, mesh: tuple[int, ...], family: str, pin: str = "fsdp", pieces: int = 1
) -> dict[str, float]:
    """How far gradients are off after passes in all kinds of orders."""
    model, inputs, module = posed(mode, mesh, family, pin, pieces)
    off: dict[str, float] = {}

    def compare(what: str, work: Any) -> None:
        for one in (model, module):
            one.zero_grad()
            work(one)
        off[what] = differ(gradients(module), gradients(model))

    def loss(one: nn.Module) -> torch.Tensor:
        return one(**inputs)["loss"]

    def twice_through_one(one: nn.Module) -> None:
        value = loss(one)
        value.backward(retain_graph=True)
        value.backward()

    def one_through_two(one: nn.Module) -> None:
        (loss(one) + 2 * loss(one)).backward()

    def other_order(one: nn.Module) -> None:
        first, second = loss(one), loss(one)
        first.backward()
        second.backward()

    def never(one: nn.Module) -> None:
        loss(one)  # nobody calls for its gradients
        with torch.no_grad():
            loss(one)
        with torch.inference_mode():
            loss(one)
        loss(one).backward()

    def interrupted(one: nn.Module) -> None:
        """A hook of the user's fails half-way through a backward pass."""

        def fails(_: torch.Tensor) -> None:
            raise ArithmeticError

        parameter = list(one.parameters())[2]
        handle = parameter.register_hook(fails)
        with pytest.raises(ArithmeticError):
            loss(one).backward()
        handle.remove()
        one.zero_grad()
        loss(one).backward()

    for work in (loss_backward := lambda one: loss(one).backward(), twice_through_one, one_through_two, other_order):
        compare(getattr(work, "__name__", str(work)), work)
    compare("never", never)
    compare("interrupted", interrupted)
    compare("plain again", loss_backward)
    return off


@pytest.mark.parametrize(
    ("mode", "mesh", "family"),
    [
        ("gather", (4,), "llama"),
        ("block", (2, 2), "llama"),
        *(
            pytest.param(mode, mesh, family, marks=full)
            for family in ("llama", "packed", "gpt2", "mixtral", "t5")
            for mode in MODES
            for mesh in ((4,), (2, 2))
        ),
    ],
)
def test_backward_passes_in_any_order(pool: Pool, mode: str, mesh: tuple[int, ...], family: str) -> None:
    for off in pool(passes, mode, mesh, family):
        assert all(error < NEAR for error in off.values()), off


def unsynchronised(rank: int, strategy: str) -> tuple[float, list[int], bool]:
    """How far accumulated gradients are off, bytes that each backward pass sent, whether some were there early."""
    model, inputs, module = parallel_of("llama", mesh_of((4,)), pins=[("*", strategy)])
    other = {**inputs, "labels": inputs["labels"].roll(1, 1)}
    count, sent, early = executor_of(module).count, [], False

    def step(given: Inputs) -> None:
        module(**given)["loss"].backward()
        sent.append(sum(count.backward.values()))
        count.clear()

    count.clear()
    with module.no_sync():
        for given in (inputs, other):
            step(given)
        early = any(parameter.grad is not None for parameter in module.parameters())
    step(inputs)
    step(inputs)
    for given in (inputs, other, inputs, inputs):
        model(**given)["loss"].backward()
    return differ(gradients(module), gradients(model)), sent, early


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_are_sent_once_for_several_passes(pool: Pool, strategy: str) -> None:
    for error, (first, second, third, fourth), early in pool(unsynchronised, strategy):
        assert error < NEAR and not early
        # what is left are sums within the model, such as that of the loss
        assert first == second < third == fourth


def freed(rank: int, mode: str) -> tuple[int, int, int]:
    """Bytes of gathered weights: of all of them, after the forward pass, and after the backward pass."""
    _, inputs, module = posed(mode)
    wholes: list[torch.Tensor] = []
    honest = ahead.ForwardPass.enter

    def noted(self: ahead.ForwardPass, number: int) -> Any:
        found = honest(self, number)
        wholes.extend(found[0])
        return found

    ahead.ForwardPass.enter = noted  # type: ignore[method-assign]
    try:
        loss = module(**inputs)["loss"]
    finally:
        ahead.ForwardPass.enter = honest  # type: ignore[method-assign]
    every = sum(whole.numel() * whole.element_size() for whole in wholes)
    forward = sum(whole.untyped_storage().nbytes() for whole in wholes)
    loss.backward()
    return every, forward, sum(whole.untyped_storage().nbytes() for whole in wholes)


def test_gathered_weights_are_freed_where_the_plan_says_so(pool: Pool) -> None:
    for (every, kept, _), (other, left, after) in zip(pool(freed, "none"), pool(freed, "gather"), strict=True):
        assert kept == every == other > 0
        # norms that no operator keeps go with the last reference to them, not before
        assert left < 0.2 * every and after <= left


def moved(rank: int) -> float:
    """An optimizer that changes weights between two passes: what is gathered is what they are now."""
    model, inputs, module = posed("gather")
    for one in (model, module):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(**inputs)["loss"].backward()
            optimizer.step()
    whole = {n: p.full_tensor() for n, p in module.named_parameters()}  # type: ignore[operator]
    assert all(local_part(p).untyped_storage().nbytes() for p in module.parameters())
    return differ(whole, {n: p.detach() for n, p in model.named_parameters()})


def test_weights_are_gathered_as_they_are_now(pool: Pool) -> None:
    assert max(pool(moved)) < NEAR


def scattered(rank: int, mesh: tuple[int, ...]) -> tuple[float, int, int]:
    """Where every message takes its time: how far gradients of gathered weights are off, messages of the backward
    pass, and units."""
    model, inputs, module = parallel_of("llama", mesh_of(mesh), pins=[("*", "fsdp")], cluster="h100-sxm")
    executor = executor_of(module)
    executor.count.clear()
    for one in (model, module):
        one(**inputs)["loss"].backward()
    sent = sum(n for (phase, kind, _), n in executor.count.launches.items() if (phase, kind) == SCATTERED)
    return differ(gradients(module), gradients(model)), sent, len(executor.first.units)


@pytest.mark.parametrize("mesh", [(4,), pytest.param((2, 2), marks=full)])
def test_gradients_of_a_block_are_scattered_in_one_message(pool: Pool, mesh: tuple[int, ...]) -> None:
    for error, messages, units in pool(scattered, mesh):
        assert error < NEAR
        steps = len(mesh)  # one message for each of them, and for each axis that some weights go over first
        assert 0 < messages <= units * steps**2
