"""Plain data as JSON: what it holds of tensors is kept beside it, under names. Nothing is ever executed."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tapas.checkpoint.module_state import CheckpointError


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A JSON tree; the tensors in it are put into `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        tree = [encode(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
        return tree if isinstance(value, list) else {"tuple": tree}
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise CheckpointError(name, f"has the key {wrong[0]!r}", "use texts as keys")
        return {"dict": {key: encode(v, f"{name}.{key}", tensors) for key, v in value.items()}}
    raise CheckpointError(
        name, f"is a {type(value).__name__}", "keep only numbers, texts, lists, tuples, dicts and tensors"
    )


def decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `encode`."""
    if isinstance(tree, list):
        return [decode(t, tensors) for t in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, inner),) = tree.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "tuple":
        return tuple(decode(t, tensors) for t in inner)
    return {key: decode(t, tensors) for key, t in inner.items()}


def tensor_names(tree: Any) -> Iterator[str]:
    if isinstance(tree, list):
        for t in tree:
            yield from tensor_names(t)
    elif isinstance(tree, dict):
        ((kind, inner),) = tree.items()
        if kind == "tensor":
            yield inner
        else:
            yield from tensor_names(list(inner.values()) if kind == "dict" else inner)
