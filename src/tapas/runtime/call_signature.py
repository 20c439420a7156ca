"""How the original is called: which tensors of a call a program takes, and what else has to be as it was planned."""

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tapas._torch import pytree
from tapas.errors import TapasError


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor in the planned call."""

    name: str  # of the program's input
    requires_grad: bool


class CallSignature:
    """The signature of forward, and the call that was planned, with slots for its tensors."""

    def __init__(self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.signature, self.args, self.kwargs = signature, args, kwargs
        self.keywords = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        planned = self._bound(args, kwargs)
        self.leaves, self.spec = pytree.tree_flatten(planned)
        self.places = list(_by_place(planned))
        self.trained = {leaf.name: leaf.requires_grad for leaf in self.leaves if isinstance(leaf, Slot)}

    @classmethod
    def of(cls, model: nn.Module, inputs: Any, names: Iterable[str]) -> "CallSignature":
        """`inputs` as they were captured: each tensor became an input, in this order."""
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (inputs, {})
        args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
        left = iter(names)

        def slot(leaf: Any) -> Any:
            return Slot(next(left), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

        return cls(inspect.signature(model.forward), *pytree.tree_map(slot, (args, kwargs)))

    @classmethod
    def by_name(cls, names: Iterable[str]) -> "CallSignature":
        """Of a program without a model: it takes its inputs by their names."""
        names = list(names)
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        return cls(inspect.Signature(parameters), (), {name: Slot(name, False) for name in names})

    def filled(self, values: Mapping[str, torch.Tensor]) -> Any:
        """The planned inputs with other tensors, as planning takes them: by position or by name."""
        fill = lambda leaf: values[leaf.name] if isinstance(leaf, Slot) else leaf  # noqa: E731
        args, kwargs = pytree.tree_map(fill, (self.args, self.kwargs))
        return kwargs or args

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a call by the names of the program's inputs; all else has to be as planned."""
        try:
            given = self._bound(args, kwargs)
        except TypeError as error:
            taken = ", ".join(self.signature.parameters)
            raise TapasError("inputs", str(error), f"the model takes {taken}") from None
        leaves, spec = pytree.tree_flatten(given)
        if spec != self.spec:
            leaves = self._in_planned_order(given)
        found: dict[str, torch.Tensor] = {}
        for planned, leaf, place in zip(self.leaves, leaves, self.places, strict=True):
            if isinstance(planned, Slot):
                found[planned.name] = _tensor(planned, leaf, place)
            elif planned is not leaf and not _equal(planned, leaf):
                words = "a tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)
                raise TapasError(place, f"is {words}, the plan was made with {planned!r}", "give that, or plan again")
        return found

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """By the names of forward's arguments, with defaults for what is not given."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name in self.keywords:
            bound.arguments[name] = dict(sorted(bound.arguments[name].items()))
        return dict(bound.arguments)

    def _in_planned_order(self, given: dict[str, Any]) -> list[Any]:
        """Of a call that is built otherwise: fine if only the order in a dict differs."""
        leaves = _by_place(given)
        for place in self.places:
            if place not in leaves:
                raise TapasError(place, "is missing", "the plan was made with it: give it, or plan again")
        for place in leaves:
            if place not in self.places:
                raise TapasError(place, "is not an input that was planned with", "leave it out, or plan again")
        return [leaves[place] for place in self.places]


def _by_place(given: dict[str, Any]) -> dict[str, Any]:
    """`batch['text'][0]` -> what is there."""
    leaves, _ = pytree.tree_flatten_with_path(given)
    return {re.sub(r"^\['(\w+)'\]", r"\1", pytree.keystr(path)): leaf for path, leaf in leaves}


def _equal(planned: Any, given: Any) -> bool:
    return type(planned) is type(given) and not isinstance(given, torch.Tensor) and bool(planned == given)


def _tensor(slot: Slot, value: Any, place: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        text = "None" if value is None else f"a {type(value).__name__}"
        raise TapasError(place, f"is {text}, the plan was made with a tensor", "give a tensor, or plan again")
    if value.requires_grad and not slot.requires_grad and torch.is_grad_enabled():
        raise TapasError(
            place, "requires a gradient, which the plan was made without",
            "detach it, or plan again with an example input that requires one",
        )  # fmt: skip
    return value
