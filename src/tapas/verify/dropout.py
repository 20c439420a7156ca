"""Dropout is set to zero for a comparison: original and parallel program draw their numbers in another order.

The plan is made, or followed, for the model as it is; only what runs here is silenced.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tapas.errors import TapasError
from tapas.ir.fold import Folded
from tapas.ir.graph import Graph, Op
from tapas.ir.interpreter import resolve

_CHANCES = ("p", "dropout_p", "dropout")  # what torch's schemas call the share that is dropped


def silent_graph(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """The graph without dropout, and the modules where there was some."""
    ops = tuple(_silent(op) for op in graph.ops)
    changed = dict.fromkeys(old.module or old.name for old, new in zip(graph.ops, ops, strict=True) if old != new)
    return replace(graph, ops=ops), tuple(changed)


def silent_folded(folded: Folded) -> Folded:
    blocks = tuple(replace(block, ops=tuple(map(_silent, block.ops))) for block in folded.blocks)
    return replace(folded, blocks=blocks)


def _silent(op: Op) -> Op:
    function: Any = resolve(op.target)
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return op
    names = [argument.name for argument in function._schema.arguments]
    position = next((names.index(name) for name in _CHANCES if name in names), None)
    if position is None:
        raise TapasError(
            op.module or op.name, f"{op.target} draws random numbers, which no two programs do alike",
            "check the model without it",
        )  # fmt: skip
    args = tuple(0.0 if i == position else value for i, value in enumerate(op.args))
    kwargs = tuple((key, 0.0 if key == names[position] else value) for key, value in op.kwargs)
    return op if (args, kwargs) == (op.args, op.kwargs) else replace(op, args=args, kwargs=kwargs)


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def silence(model: nn.Module) -> None:
    """The same for a module: dropout modules, and what modules and configurations call drop-something."""
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        _zero(vars(module))
    config = getattr(model, "config", None)
    for part in (config, *(vars(config).values() if hasattr(config, "__dict__") else ())):
        if part is not None and type(part).__name__.endswith("Config"):
            _zero(vars(part))
            if getattr(part, "use_cache", False):  # not captured either
                part.use_cache = False


def _zero(fields: dict[str, Any]) -> None:
    fields.update({k: 0.0 for k, v in fields.items() if "drop" in k and isinstance(v, float)})
