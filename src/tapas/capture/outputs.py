"""The outputs of a model: which tensors there are, and which of them is the loss."""

from typing import Any

from tapas._torch import pytree


def loss_position(spec: pytree.TreeSpec) -> int | None:
    """Position among the flattened outputs of what the model itself calls `loss`."""
    if spec.is_leaf():
        return None
    keys = _keys(spec)
    children = spec.children()
    if "loss" not in keys:
        return None
    index = keys.index("loss")
    if index >= len(children) or children[index].num_leaves != 1:
        return None
    return sum(child.num_leaves for child in children[:index])


def _keys(spec: pytree.TreeSpec) -> list[Any]:
    context = spec.context
    if isinstance(context, (list, tuple)):  # dicts, and transformers' outputs
        inner = context[0] if context and isinstance(context[0], (list, tuple)) else context
        return list(inner)
    return list(getattr(context, "_fields", ()))  # named tuples
