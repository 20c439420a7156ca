"""Example inputs, checked against the model's forward, and made distinct and weightless; which output is the loss."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from tapas._torch import FakeTensor, FakeTensorMode, pytree
from tapas.errors import CaptureError, nearest

Inputs = Sequence[Any] | Mapping[str, Any]
MOST_INTEGERS = 1 << 20  # elements: what is larger is no configuration


def prepare(model: nn.Module, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments in which every tensor is a fake one of its own.

    Two arguments that are one tensor would be captured as one input, so each gets its own.
    """
    args, kwargs = arguments_of(inputs)
    register_dataclasses((args, kwargs))
    _check(model, args, kwargs)
    home = _home(model)
    mode = fake_mode(model)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        device = home.device if home is not None else leaf.device
        with mode:
            made = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
        return made.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(fake, (args, kwargs))


def integer_values(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Copies of the integers and truth values that are given, by place; those without data have none."""
    leaves, _ = pytree.tree_flatten_with_path(arguments_of(inputs))
    return {pytree.keystr(path): value.detach().to("cpu", copy=True) for path, value in leaves if has_integers(value)}


def has_integers(value: Any) -> bool:
    if type(value) is not torch.Tensor or value.is_meta:
        return False
    return not (value.is_floating_point() or value.is_complex()) and value.numel() <= MOST_INTEGERS


def tensor_places(inputs: Inputs) -> list[str]:
    """The places of all tensors that are given, in the order in which they become inputs of a graph."""
    leaves, _ = pytree.tree_flatten_with_path(arguments_of(inputs))
    return [pytree.keystr(path) for path, value in leaves if isinstance(value, torch.Tensor)]


def register_dataclasses(tree: Any) -> None:
    """torch takes dataclasses apart only if it is told of them, and caches of transformers."""
    for leaf in pytree.tree_leaves(tree):
        if type(leaf).__name__ == "DynamicCache" and type(leaf).__module__ == "transformers.cache_utils":
            from transformers.integrations.executorch import register_dynamic_cache_export_support

            register_dynamic_cache_export_support()
        if is_dataclass(leaf) and not isinstance(leaf, type):
            torch.export.register_dataclass(type(leaf))
            register_dataclasses([getattr(leaf, field.name) for field in fields(leaf)])


def fake_mode(model: nn.Module) -> FakeTensorMode:
    """The one of the model's own tensors, if they are fake."""
    home = _home(model)
    return home.fake_mode if isinstance(home, FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)


def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """`input_ids int64[2, 8], labels int64[2, 8]`"""

    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__

    parts = [f"{n}: {text(v)}" for n, v in enumerate(args)] + [f"{k}: {text(v)}" for k, v in kwargs.items()]
    return ", ".join(parts) or "nothing"


def arguments_of(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """By position and by name."""
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        if not all(isinstance(name, str) for name in inputs):
            raise CaptureError(
                "example inputs", "their names are not all texts", "give the names of forward's arguments"
            )
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise CaptureError(
        "example inputs",
        f"they are a {type(inputs).__name__}",
        "give a tuple of positional inputs or a dict of keyword inputs",
    )


def _home(model: nn.Module) -> torch.Tensor | None:
    return next((t for tensors in (model.parameters(), model.buffers()) for t in tensors), None)


def _check(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for place, value in (*enumerate(args), *kwargs.items()):
        for leaf in pytree.tree_leaves(value):
            if not isinstance(leaf, (torch.Tensor, int, float, bool, str, complex, type(None), torch.dtype)):
                raise CaptureError(
                    f"example input {place}",
                    f"it holds a {type(leaf).__module__}.{type(leaf).__qualname__}",
                    "give tensors, numbers, or tuples, lists and dicts of them (torch.as_tensor makes tensors)",
                )
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"{type(model).__name__}.forward",
            f"the example inputs do not fit its arguments: {error}",
            _argument_help(signature, args, kwargs),
        ) from None


def _argument_help(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    known = [name for name, p in signature.parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for name in kwargs:
        if name not in known:
            return f"{name}: {nearest(name, known)}"
    return f"it takes {', '.join(known) or 'nothing'}, the inputs are {describe(args, kwargs)}"


def output_position(spec: pytree.TreeSpec, name: str) -> int:
    """Position among the flattened outputs of one that is named by its key, or by its number."""
    keys = [] if spec.is_leaf() else [str(key) for key in _keys(spec)] or [str(i) for i in range(spec.num_children)]
    if spec.is_leaf() and name == "0":
        return 0
    if name not in keys:
        known = keys or ["0"]
        raise CaptureError(f"losses: {name}", f"the model returns {', '.join(known)}", nearest(name, known))
    children = spec.children()
    return sum(child.num_leaves for child in children[: keys.index(name)])


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
