"""Gradients of weights that were gathered, on their way back to the ranks that store them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tapas.runtime.collectives import Count, Side
from tapas.runtime.moves import Step
from tapas.runtime.redistribute import Conversion


def scatter(
    steps: Mapping[int, Sequence[Step]], values: dict[int, torch.Tensor], side: Side, count: Count
) -> Iterator[None]:
    """Gradients of gathered weights the way back, those of a unit together; `values` become this rank's parts."""
    left = {index: [step.back for step in steps[index]] for index in values}
    shapes: dict[int, torch.Size] = {}
    while any(left.values()):
        summed: dict[Any, list[int]] = defaultdict(list)
        lots: dict[Any, dict[int, tuple[Conversion, torch.Tensor]]] = defaultdict(dict)
        for index, remaining in left.items():
            step = remaining.pop() if remaining else None
            if step is not None and step.kind == "all_reduce":
                whole = values[index].contiguous()
                count.copied("backward", values[index], whole)
                values[index] = whole
                summed[step.axes, whole.dtype].append(index)
            elif step is not None and step.kind == "reduce_scatter":
                shapes[index] = values[index].shape
                flat = step.joint.pack(values[index])
                count.copied("backward", values[index], flat)
                lots[step.axes, flat.dtype][index] = step, flat
                del values[index]  # it is packed, or what is packed
            elif step is not None:  # it is whole on every rank
                part = step.local(values[index])
                values[index] = part.clone() if step.kind == "slice" else part  # the whole is not to be kept for it
        works: list[Any] = []
        for (axes, _), members in summed.items():
            wholes = [values[index] for index in members]
            count.add("backward", "all_reduce", axes, sum(x.numel() * x.element_size() for x in wholes))
            works.append(side.sum(axes, wholes, members))
        parts: dict[int, torch.Tensor] = {}
        for (axes, _), lot in lots.items():
            count.add("backward", "reduce_scatter", axes, sum(x.numel() * x.element_size() for _, x in lot.values()))
            for index, (step, flat) in lot.items():
                parts[index] = flat.new_empty(flat.numel() // step.joint.sizes[0])
            flats = [flat for _, flat in lot.values()]
            works.append(side.scatter(axes, [parts[index] for index in lot], flats, list(lot)))
        yield
        for work in works:
            work.wait()
        for lot in lots.values():
            for index, (step, _) in lot.items():
                values[index] = step.joint.own_part(parts[index], shapes[index])
