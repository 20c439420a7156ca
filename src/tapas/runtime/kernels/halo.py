"""Windows over positions of which a rank has a share: what they reach beyond it comes from the ranks beside it, or at
the ends is filled in, so that an operator that fills up nothing makes what this rank is to have."""

from collections.abc import Mapping
from typing import Any

import torch

from tapas.rules.base import Halo, Local
from tapas.rules.windows import NAMES, looks_at, windows_of
from tapas.runtime.kernels.common import Comm, Comms, Reader, empty_results

Fill = float | None  # None: with what lies at the end
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class _Shared(torch.autograd.Function):
    """The first and the last rows of a tensor, one after the other, and the tensor itself: gradients of both are added
    up where they lie."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.dim, ctx.first, ctx.last = dim, first, last
        ends = (x.narrow(dim, 0, first), x.narrow(dim, x.shape[dim] - last, last))
        return torch.cat([end.movedim(dim, 0) for end in ends]), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        of_ends, of_whole = grads
        whole = of_whole.clone()
        first, last = (end.movedim(0, ctx.dim) for end in of_ends.split((ctx.first, ctx.last)))
        whole.narrow(ctx.dim, 0, ctx.first).add_(first)
        whole.narrow(ctx.dim, whole.shape[ctx.dim] - ctx.last, ctx.last).add_(last)
        return whole, None, None, None


def with_borders(comm: Comm, x: torch.Tensor, dim: int, halo: Halo, fill: Fill, kept: bool) -> torch.Tensor:
    """A dim with so much of the ranks beside this one. `kept`: see `Comm.borders`."""
    here, last = comm.index, comm.size - 1
    sent, received = [0] * comm.size, [0] * comm.size
    if here > 0:
        sent[here - 1], received[here - 1] = halo.after, halo.before
    if here < last:
        sent[here + 1], received[here + 1] = halo.before, halo.after
    ends, whole = _Shared.apply(x, dim, halo.after * (here > 0), halo.before * (here < last))
    came = comm.borders(ends, sent, received, kept)
    arrived = halo.before * (here > 0), halo.after * (here < last)
    before, after = (part.movedim(0, dim) for part in came.split(arrived))
    if here == 0:
        before = _filled(whole, dim, 0, halo.before, fill)
    if here == last:
        after = _filled(whole, dim, x.shape[dim] - 1, halo.after, fill)
    return torch.cat((_laid_out(before, x), whole, _laid_out(after, x)), dim)


def _laid_out(part: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Channels last in memory, where they are in what it is put beside: else the whole would be laid out anew."""
    form = CHANNELS_LAST.get(x.dim())
    if form is None or x.is_contiguous() or not x.is_contiguous(memory_format=form):
        return part
    return part.contiguous(memory_format=form)


def _filled(x: torch.Tensor, dim: int, place: int, length: int, fill: Fill) -> torch.Tensor:
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    return x.narrow(dim, place, 1).expand(shape) if fill is None else x.new_full(shape, fill)


def bordered(
    local: Local, comms: Comms, x: torch.Tensor, halos: Mapping[str, tuple[int, Halo]], fill: Fill, kept: bool = False
) -> torch.Tensor:
    """`halos`: of factors, with the dim they are in; one after the other, each with the borders of those before."""
    for name, (dim, halo) in halos.items():
        for axis in local.axes_of(name):
            x = with_borders(comms[axis], x, dim, halo, fill, kept)
    return x


def windows_here(local: Local, size: Any, stride: Any, padding: Any, dilation: Any, dims: int) -> tuple[Any, list[int]]:
    """The halos of factors, as `bordered` wants them, of an operator's first operand; and what is left to fill up, dim
    by dim, where none of these is split."""
    windows, first = windows_of(size, stride, padding, dilation, dims), len(local.call.operands[0].shape) - dims
    halos = {name: (first + i, windows[i].halo) for i, name in enumerate(NAMES[dims]) if local.axes_of(name)}
    return halos, [0 if name in halos else window.padding for name, window in zip(NAMES[dims], windows, strict=True)]


def pool(local: Local, comms: Comms, *operands: torch.Tensor) -> Any:
    """Places beyond the ends are never the largest, and count as zeros of a mean."""
    if any(0 in local.result_shape(i) for i in range(len(local.call.results))):
        return empty_results(local, operands)
    read, largest = Reader(local, operands), "max_pool" in local.call.target
    size, dims = read("kernel_size"), int(local.call.target.partition("_pool")[2][0])
    if not any(local.axes_of(name) for name in NAMES[dims]):
        return read.run()
    stride, dilation = read("stride") or size, read("dilation") if largest else 1
    halos, padding = windows_here(local, size, stride, read("padding"), dilation, dims)
    x = bordered(local, comms, operands[0], halos, -torch.inf if largest else 0.0)
    changed = {"self" if "self" in read.values else "input": x}
    return read.run(padding=padding, **changed)


def resize(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    """The borders are resized with the rest, and cut off."""
    if 0 in local.result_shape():
        return empty_results(local, operands)
    read, (x,) = Reader(local, operands), operands
    dims = x.dim() - 2
    whole, made = (t.shape[2:] for t in (local.call.operands[0], local.call.results[0]))
    near = looks_at(local.call.target) or 0
    halos = {name: (2 + i, Halo(near, near)) for i, name in enumerate(NAMES[dims]) if local.axes_of(name)}
    x = bordered(local, comms, x, halos, None)
    sizes = [of * here // size for here, size, of in zip(x.shape[2:], whole, made, strict=True)]
    changed = {"self" if "self" in read.values else "input": x}
    y = read.run(**changed, **({} if read("output_size") is None else {"output_size": sizes}))
    for dim, _ in halos.values():
        margin = near * (made[dim - 2] // whole[dim - 2])
        y = y.narrow(dim, margin, y.shape[dim] - 2 * margin)
    return y
