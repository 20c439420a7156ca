"""Gradients of weights that were gathered, on their way back to the ranks that store them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from tapas.runtime.collectives import Axes, Count, Side
from tapas.runtime.joined import Joined, joined
from tapas.runtime.moves import Step
from tapas.runtime.redistribute import Conversion

Key = tuple[Axes, torch.dtype]  # what tensors that travel together have in common


def scatter(
    steps: Mapping[int, Sequence[Step]], values: dict[int, torch.Tensor], side: Side, count: Count
) -> Iterator[None]:
    """Gradients of gathered weights the way back, those of a unit together; `values` become this rank's parts."""
    left = {index: [step.back for step in steps[index]] for index in values}
    while any(left.values()):
        summed: dict[Key, list[int]] = defaultdict(list)
        scattered: dict[Key, dict[int, Conversion]] = defaultdict(dict)
        for index, remaining in left.items():
            step = remaining.pop() if remaining else None
            if step is None:
                continue
            if step.kind == "all_reduce":
                summed[step.axes, values[index].dtype].append(index)
            elif step.kind == "reduce_scatter":
                scattered[step.axes, values[index].dtype][index] = step
            else:  # it is whole on every rank
                part = step.local(values[index])
                values[index] = part.clone() if step.kind == "slice" else part  # the whole is not to be kept for it
        works = [_summed(axes, members, values, side, count) for (axes, _), members in summed.items()]
        lots = {key: _ScatteredTogether(conversions, values, count) for key, conversions in scattered.items()}
        works += [lot.start(axes, side, count) for (axes, _), lot in lots.items()]
        yield
        for work in works:
            work.wait()
        for lot in lots.values():
            values |= lot.parts()


def _summed(axes: Axes, members: Sequence[int], values: dict[int, torch.Tensor], side: Side, count: Count) -> Any:
    """In place; `values` become the tensors that are summed."""
    together = joined({index: values[index].numel() * values[index].element_size() for index in members})
    sent: list[torch.Tensor] = []
    for index in members:
        if index not in together:
            sent.append(values[index].contiguous())
            count.copied("backward", values[index], sent[-1])
            values[index] = sent[-1]
    if together:
        flat = torch.cat([values[index].reshape(-1) for index in together])
        count.copies["backward"] += 1
        sent.append(flat)
        for index, part in zip(together, flat.split([values[index].numel() for index in together]), strict=True):
            values[index] = part.view(values[index].shape)
    count.add("backward", "all_reduce", axes, sum(x.numel() * x.element_size() for x in sent))
    return side.sum(axes, sent, members)


class _ScatteredTogether:
    """Gradients that are dealt out together, one step of their way."""

    def __init__(self, steps: Mapping[int, Conversion], values: dict[int, torch.Tensor], count: Count) -> None:
        """What is packed, or is what is packed, leaves `values`."""
        self.steps, self.shapes = steps, {index: values[index].shape for index in steps}
        nbytes = {i: values[i].numel() * values[i].element_size() for i in steps if self._in_parts(i)}
        self.joined = joined(nbytes)
        self.flats: dict[int, torch.Tensor] = {}
        for index, step in steps.items():
            if index not in self.joined:
                self.flats[index] = step.joint.pack(values[index])
                count.copied("backward", values[index], self.flats[index])
        if self.joined:
            wholes = [values[index].contiguous() for index in self.joined]
            for index, whole in zip(self.joined, wholes, strict=True):
                count.copied("backward", values[index], whole)
            self.flat = self.buffer.pack_wholes(wholes)
            count.copies["backward"] += 1
        for index in steps:
            del values[index]

    def _in_parts(self, index: int) -> bool:
        return self.steps[index].joint.lies_in_parts(self.shapes[index])

    @cached_property
    def buffer(self) -> Joined:
        members = len(self.steps[self.joined[0]].joint.deal.members)
        return Joined(members, tuple(self.shapes[index].numel() // members for index in self.joined))

    def start(self, axes: Axes, side: Side, count: Count) -> Any:
        wholes = list(self.flats.values())
        members = [index for index in self.steps if index in self.flats]
        parts = {i: flat.new_empty(flat.numel() // self.steps[i].joint.sizes[0]) for i, flat in self.flats.items()}
        made = list(parts.values())
        if self.joined:
            wholes.append(self.flat)
            made.append(self.flat.new_empty(self.buffer.numel))
            parts |= zip(self.joined, self.buffer.parts(made[-1]), strict=True)
        self.made = parts
        count.add("backward", "reduce_scatter", axes, sum(x.numel() * x.element_size() for x in wholes))
        return side.scatter(axes, made, wholes, [*members, *self.joined])

    def parts(self) -> dict[int, torch.Tensor]:
        self.flats.clear()
        return {i: step.joint.own_part(self.made[i], self.shapes[i]) for i, step in self.steps.items()}
