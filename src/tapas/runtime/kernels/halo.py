"""Windows over positions of which a rank has a share: what they reach beyond it comes from the ranks beside it, or at
the ends is filled in, so that an operator that fills up nothing makes what this rank is to have."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tapas.ir.interpreter import resolve
from tapas.rules.base import Halo, Local
from tapas.rules.windows import NAMES, Reach, Window, each, looks_at, windows_of
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
    local: Local, comms: Comms, x: torch.Tensor, reaches: Mapping[str, Reach], fill: Fill, kept: bool = False
) -> torch.Tensor:
    """`reaches`: of factors that are split; one after the other, each with the borders of those before."""
    for name, reach in reaches.items():
        (axis,) = local.axes_of(name)
        x = with_borders(comms[axis], x, reach.dim, reach.halo, fill, kept)
    return x


def _split(local: Local, windows: Sequence[Window], transposed: bool = False) -> dict[str, Reach]:
    """The factors of positions that are split here, of an operator's first operand."""
    first, names = len(local.call.operands[0].shape) - len(windows), NAMES[len(windows)]
    pairs = enumerate(zip(names, windows, strict=True))
    return {name: window.reach(first + i, transposed) for i, (name, window) in pairs if local.axes_of(name)}


def _left_to_fill(windows: Sequence[Window], x: torch.Tensor, reaches: Mapping[str, Reach]) -> list[int]:
    """By the operator itself, dim by dim."""
    done = {reach.dim - x.dim() for reach in reaches.values()}
    return [0 if i - len(windows) in done else window.padding for i, window in enumerate(windows)]


def convolve(local: Local, comms: Comms, read: Reader, dims: int, groups: int) -> torch.Tensor:
    x, weight, padding = read("input"), read("weight"), read("padding")
    windows = windows_of(weight.shape[2:], read("stride"), padding, read("dilation"), dims)
    if "transpose" in local.call.target or read.values.get("transposed"):
        return _convolve_back(local, comms, read, windows, groups)
    reaches = _split(local, windows)
    if isinstance(padding, str):  # an operator of its own, which takes no numbers
        read.operator = resolve(local.call.target.replace(".padding", ".default"))
    around = bordered(local, comms, x, reaches, 0.0, kept=True)
    return read.run(input=around, padding=_left_to_fill(windows, x, reaches), groups=groups)


def _convolve_back(local: Local, comms: Comms, read: Reader, windows: Sequence[Window], groups: int) -> torch.Tensor:
    """What borders make is cut off again, but for what they add to the results of this rank's positions."""
    x, reaches = read("input"), _split(local, windows, transposed=True)
    around = bordered(local, comms, x, reaches, 0.0, kept=True)
    more, cuts = list(each(read("output_padding"), len(windows))), list[tuple[int, int, int]]()
    for reach in reaches.values():
        i = reach.dim - x.dim()
        start, length = windows[i].padding + reach.made * reach.halo.before, reach.made * x.shape[i]
        more[i] = max(0, start + length - (around.shape[i] - 1) * reach.made - windows[i].span)
        cuts.append((i, start, length))
    y = read.run(input=around, padding=_left_to_fill(windows, x, reaches), output_padding=more, groups=groups)
    for dim, start, length in cuts:
        y = y.narrow(dim, start, length)
    return y


def pool(local: Local, comms: Comms, *operands: torch.Tensor) -> Any:
    """Places beyond the ends are never the largest, and count as zeros of a mean."""
    if any(0 in local.result_shape(i) for i in range(len(local.call.results))):
        return empty_results(local, operands)
    read, (x,), largest = Reader(local, operands), operands, "max_pool" in local.call.target
    size, dims = read("kernel_size"), int(local.call.target.partition("_pool")[2][0])
    windows = windows_of(size, read("stride") or size, read("padding"), read("dilation") if largest else 1, dims)
    if not (reaches := _split(local, windows)):
        return read.run()
    around = bordered(local, comms, x, reaches, -torch.inf if largest else 0.0)
    return read.run(**{_first(read): around}, padding=_left_to_fill(windows, x, reaches))


def _first(read: Reader) -> str:
    """What schemas call the first operand."""
    return "self" if "self" in read.values else "input"


def resize(local: Local, comms: Comms, *operands: torch.Tensor) -> torch.Tensor:
    """The borders are resized with the rest, and cut off."""
    if 0 in local.result_shape():
        return empty_results(local, operands)
    read, (x,) = Reader(local, operands), operands
    whole, made = (t.shape[2:] for t in (local.call.operands[0], local.call.results[0]))
    near, names = looks_at(local.call.target) or 0, NAMES[len(whole)]
    reaches = {
        name: Reach(2 + i, 1, made[i] // whole[i], Halo(near, near))
        for i, name in enumerate(names)
        if local.axes_of(name)
    }
    around = bordered(local, comms, x, reaches, None)
    sizes = [of * here // size for here, size, of in zip(around.shape[2:], whole, made, strict=True)]
    y = read.run(**{_first(read): around}, **({} if read("output_size") is None else {"output_size": sizes}))
    for reach in reaches.values():
        y = y.narrow(reach.dim, near * reach.made, x.shape[reach.dim] * reach.made)
    return y
