"""What kernels send along an axis (`Comm` in kernels/common.py): counted, and told from what failed.

An exchange is an operator to torch: a selective block keeps what it brought, as it keeps the results of products. It is
two, for an operator that such a block runs again exchanges again, too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tapas._torch import assert_on_device
from tapas.errors import TapasError
from tapas.runtime.collectives import Rank
from tapas.runtime.lost_ranks import Sent, Site, WireFailed, collective_failed
from tapas.runtime.moves import Step, compiled_in, own_memory
from tapas.runtime.numbered import numbered, register
from tapas.sharding.layout import B, P, R
from tapas.sharding.route import Hop


@torch.library.custom_op("tapas::maximum", mutates_args=())
def compiled_maximum(x: torch.Tensor, number: int) -> torch.Tensor:
    comm = numbered(number)
    return own_memory(comm.all_reduce_max(x, compiled_in(comm.rank)), x)


@compiled_maximum.register_fake
def _(x: torch.Tensor, number: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("tapas::largest", mutates_args=())
def largest(x: torch.Tensor, number: int, path: str) -> torch.Tensor:
    comm = numbered(number)
    return own_memory(comm.all_reduce_max(x, path or compiled_in(comm.rank)), x)


@largest.register_fake
def _(x: torch.Tensor, number: int, path: str) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("tapas::checked", mutates_args=())
def checked(x: torch.Tensor, wrong: torch.Tensor, number: int, fact: str, remedy: str) -> torch.Tensor:
    comm = numbered(number)
    place = comm.site.within(compiled_in(comm.rank))
    if wrong.device.type != "cpu":
        assert_on_device(~wrong, f"{place}: {fact}; {remedy}")
    elif bool(wrong):
        raise TapasError(place, fact, remedy)
    return x.clone()


@checked.register_fake
def _(x: torch.Tensor, wrong: torch.Tensor, number: int, fact: str, remedy: str) -> torch.Tensor:
    return torch.empty_like(x)


def _exchanging(name: str) -> Any:
    """An operator that exchanges rows."""

    @torch.library.custom_op(name, mutates_args=())
    def operator(
        x: torch.Tensor, number: int, kind: str, sent: list[int], received: list[int], back: bool, phase: str, path: str
    ) -> torch.Tensor:
        return numbered(number).all_to_all(x, kind, sent, received, back, phase, path)

    @operator.register_fake
    def _(
        x: torch.Tensor, number: int, kind: str, sent: list[int], received: list[int], back: bool, phase: str, path: str
    ) -> torch.Tensor:
        return x.new_empty((sum(received), *x.shape[1:]))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.number, ctx.kind, ctx.sent, ctx.received, ctx.back, _, ctx.path = inputs

    def exchange_back(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        returned = operator(grad, ctx.number, ctx.kind, ctx.received, ctx.sent, not ctx.back, "backward", ctx.path)
        return returned, *(None,) * 7

    operator.register_autograd(exchange_back, setup_context=keep)
    return operator


exchange, exchange_again = _exchanging("tapas::exchange"), _exchanging("tapas::exchange_again")


class AxisComm:
    def __init__(self, rank: Rank, axis: int, site: Site) -> None:
        self.rank, self.site, self.wire, self.axes = rank, site, rank.wires[axis], (axis,)
        self.size, self.index = self.wire.size, self.wire.index
        self.number = register(self)
        # what is whole or a sum along the axis may have any shape
        self.sum = Step((), (), Hop(self.axes, P, R), rank, site)
        self.copy = Step((), (), Hop(self.axes, R, B), rank, site)

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return compiled_maximum(x.detach(), self.number)
        return self.all_reduce_max(x.detach(), self.rank.journal.path)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        return largest(x.detach(), self.number, self._path())

    def all_reduce_max(self, x: torch.Tensor, path: str | None) -> torch.Tensor:
        self.rank.count.copies["forward"] += x.numel() > 0
        with self.sending("forward", "all_reduce", [x.nbytes], path):
            return self.wire.all_reduce(x, "max")

    def exchange(self, x: torch.Tensor, sent: list[int], received: list[int], back: bool = False) -> torch.Tensor:
        return exchange(x, self.number, "all_to_all", sent, received, back, "forward", self._path())

    def checked(self, x: torch.Tensor, wrong: torch.Tensor, fact: str, remedy: str) -> torch.Tensor:
        return checked(x, wrong, self.number, fact, remedy)

    def borders(self, x: torch.Tensor, sent: list[int], received: list[int], kept: bool) -> torch.Tensor:
        operator = exchange if kept else exchange_again
        return operator(x, self.number, "halo", sent, received, False, "forward", self._path())

    def _path(self) -> str:
        """For the backward pass, too. Compiled code serves all copies."""
        return "" if torch.compiler.is_compiling() else self.rank.journal.path

    def all_to_all(
        self, x: torch.Tensor, kind: str, sent: list[int], received: list[int], back: bool, phase: str, path: str
    ) -> torch.Tensor:
        """Rows are sorted into what is sent, or out of what comes back: a copy either way."""
        row = x.shape[1:].numel() * x.element_size()
        nbytes = sum(received if back else sent) * row
        self.rank.count.copies[phase] += nbytes > 0
        if kind == "all_to_all" and not back and x.is_floating_point():  # no counts
            self.rank.count.visits[phase, self.axes] += sum(received) * row
        with self.sending(phase, kind, [nbytes], path or compiled_in(self.rank)):
            return self.wire.all_to_all(x, sent, received)

    def pass_on(self, parts: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], phase: str) -> "PassedOn":
        return PassedOn(self, parts, arriving, phase)

    @contextmanager
    def sending(
        self, phase: str, kind: str, sizes: Sequence[int], path: str | None, counted: bool = True
    ) -> Iterator[None]:
        """Counts it, and if it fails says what it was."""
        count = self.rank.count
        for nbytes in sizes if counted else ():
            count.add(phase, kind, self.axes, nbytes)
        try:
            yield
        except WireFailed as failure:
            sent = Sent(self.site.within(path), kind, self.axes, sum(sizes), phase, count.number)
            raise collective_failed(sent, failure.ranks, failure.error) from failure.error


class PassedOn:
    """Tensors on their way to the next rank of an axis."""

    def __init__(
        self, comm: AxisComm, parts: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], phase: str
    ) -> None:
        self.comm, self.phase, self.path = comm, phase, compiled_in(comm.rank)
        self.sizes = [x.nbytes for x in parts]
        with comm.sending(phase, "ring", self.sizes, self.path):
            self.work = comm.wire.pass_on(parts, arriving)

    def wait(self) -> None:
        with self.comm.sending(self.phase, "ring", self.sizes, self.path, counted=False):
            self.work.wait()
