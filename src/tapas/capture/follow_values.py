"""The modes under which a model is exported with its known values (see known_values.py)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tapas._torch import FakeTensor, HigherOrderOperator, TorchDispatchMode, operator_name, pytree, schema_of
from tapas.capture.assertions import ASSERTED_ONCE, DROPPED, question
from tapas.capture.calls import WRAPPERS
from tapas.capture.diagnostics import TRANSFORMED, NoOperator, higher_order, is_transform
from tapas.capture.inputs import MOST_INTEGERS as LIMIT
from tapas.capture.known_values import Known, KnownStep, KnownValues, apart
from tapas.errors import CaptureError

aten = torch.ops.aten
# A result of memory as it comes is never a known value; nor is one that is drawn.
_UNKNOWN = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"))
# Their operand tells a size and a dtype only.
_SHAPE_ONLY = frozenset(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"))
_INDEXED = frozenset(("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"))


class DataDependentResult(Exception):
    """A number, or a tensor of a size, that nobody knows without values."""


def _without_size(made: Any) -> bool:
    if isinstance(made, torch.Tensor):
        return any(not isinstance(size, int) for size in made.shape)
    return isinstance(made, (torch.SymInt, torch.SymFloat, torch.SymBool))


class FollowValues(TorchDispatchMode):
    """While a model is exported: known values go along with tensors without data."""

    supports_higher_order_operators = True

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self.values = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.values.strict and isinstance(func, HigherOrderOperator) and func.name() not in WRAPPERS:
            raise NoOperator(*higher_order(func.name()))
        made = self._followed_call(func, args, kwargs or {})
        if self.values.strict and any(map(_without_size, pytree.tree_leaves(made))):
            raise DataDependentResult(f"the result of {func} depends on values")
        return made

    def _followed_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, HigherOrderOperator) or func.namespace == "prim":
            return func(*args, **kwargs)
        name = operator_name(func)[0]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        known = [self.values.of(tensor) for tensor in tensors]
        if tensors and not any(known) and name not in _SHAPE_ONLY:
            if name == "_local_scalar_dense" and (asked := question()) is not None and asked.wanted is not None:
                self.values.notes.append(f"{self.values.place()}: {DROPPED}")
                return asked.wanted
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags or name in _UNKNOWN:
            return self._unknown(func, args, kwargs)
        if name in _SHAPE_ONLY:
            return self._same_shape(func, args, kwargs, tensors[0], known[0])
        if name in _INDEXED and any(
            isinstance(i, torch.Tensor) and i.dtype is torch.bool for i in args[1] if i is not None
        ):
            return self._by_mask(func, args, kwargs, all(known))
        if name == "masked_select" and (mask := self.values.of(args[1])) is not None and not all(known):
            return self._selected(func, args, mask)
        if name == "_ctc_loss" and all(known[1:]):
            return self._aligned(func, args)
        if not all(known):
            return self._unknown(func, args, kwargs)
        follows = dict(zip(map(id, tensors), known, strict=True))
        swapped = [follows.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return self._followed(func, name, args, kwargs, pytree.tree_unflatten(swapped, spec))

    # -- all operands are known ------------------------------------------------------------------

    def _followed(self, func: Any, name: str, args: Any, kwargs: Any, own: Any) -> Any:
        own_args, own_kwargs = own
        if name == "_local_scalar_dense":
            return self._number(own_args[0])
        if name == "equal":
            for one in own_args:
                self.values.read(one)
            with apart():
                return torch.equal(own_args[0].value, own_args[1].value)
        dynamic = torch.Tag.dynamic_output_shape in func.tags and name not in _INDEXED
        made = None if dynamic else func(*args, **kwargs)
        if not dynamic and any(t.numel() > LIMIT for t in _tensors(made)):
            self._forget(func, args, kwargs)
            return made
        try:
            with apart():
                values = func(*_valued(own_args), **_on_host(_valued(own_kwargs)))
        except Exception:  # what goes wrong on values goes wrong when the model is run
            self._forget(func, args, kwargs)
            return func(*args, **kwargs) if dynamic else made
        if dynamic:
            made = pytree.tree_map_only(torch.Tensor, lambda v: _without_data(v, _tensors((args, kwargs))), values)
        found = self._keep(func, own_args, own_kwargs, made, values)
        if dynamic:
            for one in found:
                self.values.read(one, sized=True)
        return made

    def _number(self, known: Known) -> Any:
        """What code reads; a number that only an assertion compares does not bind the plan."""
        with apart():
            number = known.value.item()
        asked = question()
        if asked is None:
            self.values.read(known)
        elif asked.wanted is not None:
            self.values.read(known, asserted=True)
        else:
            self.values.notes.append(f"{self.values.place()}: {ASSERTED_ONCE}")
        return number

    def _keep(self, func: Any, args: Any, kwargs: Any, made: Any, values: Any) -> list[Known]:
        """The results with their values; results that are operands, written to, are those."""
        shown, hidden = _tensors(made), _tensors(values)
        if len(shown) != len(hidden) or any(a.shape != b.shape for a, b in zip(shown, hidden, strict=True)):
            return []
        operands = {id(k.value): k for k in pytree.tree_leaves((args, kwargs)) if isinstance(k, Known)}
        found = [operands.get(id(value)) or self.values.new(value) for value in hidden]
        for tensor, one in zip(shown, found, strict=True):
            self.values.known[tensor] = one
        written = frozenset(k.memory for k in _written(func, args, kwargs) if isinstance(k, Known))
        self.values.tape.append(KnownStep(func, tuple(args), dict(kwargs), tuple(found), written))
        return found

    # -- some are not ----------------------------------------------------------------------------

    def _unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._forget(func, args, kwargs)
        return func(*args, **kwargs)

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """What is written to with what is not known is not known any more."""
        for tensor in _written(func, args, kwargs):
            known = self.values.known.get(tensor) if isinstance(tensor, torch.Tensor) else None
            if known is not None:
                self.values.lost.add(known.memory)

    def _same_shape(self, func: Any, args: Any, kwargs: Any, like: torch.Tensor, known: Known | None) -> Any:
        """Zeros of the shape of an activation: its values do not count."""
        made = func(*args, **kwargs)
        if made.numel() > LIMIT or any(isinstance(a, torch.Tensor) for a in args[1:]):
            return made
        with apart():
            filled = func(torch.empty(like.shape, dtype=like.dtype), *args[1:], **_on_host(kwargs))
        self.values.leaf(made, filled, "constant", "")
        return made

    def _by_mask(self, func: Any, args: Any, kwargs: Any, everything: bool) -> Any:
        """An index that is a mask takes as many elements as it has ones: they are counted where that is known. To put
        one number there, nobody has to count."""
        indices: list[torch.Tensor | None] = list(args[1])
        if len(args) < 3 or args[2].numel() != 1:
            indices = []
            for index in args[1]:
                if index is None or index.dtype is not torch.bool:
                    indices.append(index)
                    continue
                mask = self.values.of(index)
                if mask is None:
                    return self._unknown(func, args, kwargs)
                indices += self._places(index, mask)
        made = func(args[0], indices, *args[2:], **kwargs)
        if not everything:
            self._forget(func, args, kwargs)
            return made
        leaves, spec = pytree.tree_flatten((args, kwargs))
        own = pytree.tree_unflatten([self.values.of(x) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
        with apart():
            values = func(*_valued(own[0]), **_valued(own[1]))
        self._keep(func, own[0], own[1], made, values)
        return made

    def _places(self, index: torch.Tensor, mask: Known) -> list[torch.Tensor]:
        """Where a mask has ones, without data; that there are so many is written down."""
        with apart():
            rows = aten.nonzero.default(mask.value)
        one = self.values.new(rows)
        self.values.tape.append(KnownStep(aten.nonzero.default, (mask,), {}, (one,), frozenset()))
        self.values.read(one, sized=True)
        return [aten.new_empty.default(index, [rows.shape[0]], dtype=torch.long) for _ in range(index.dim())]

    def _aligned(self, func: Any, args: Any) -> Any:
        """A CTC loss, whose table is as wide as the longest target; what it returns is not, and binds nobody."""
        scores, *others = args
        own = [self.values.of(other) if isinstance(other, torch.Tensor) else other for other in others]
        with apart():
            values = func(torch.zeros(scores.shape, dtype=scores.dtype), *_valued(own))
        return tuple(_without_data(value, [scores]) for value in values)

    def _selected(self, func: Any, args: Any, mask: Known) -> torch.Tensor:
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        with apart():
            rows = aten.nonzero.default(mask.value.expand(shape))
        wide = self.values.new(mask.value)
        self.values.tape.append(KnownStep(aten.expand.default, (mask, list(shape)), {}, (wide,), frozenset()))
        one = self.values.new(rows)
        self.values.tape.append(KnownStep(aten.nonzero.default, (wide,), {}, (one,), frozenset()))
        self.values.read(one, sized=True)
        return aten.new_empty.default(args[0], [rows.shape[0]])


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The operands that an operator writes to."""
    for number, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from pytree.tree_leaves(value)


def _valued(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.value if isinstance(leaf, Known) else leaf, tree)


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items() if key != "pin_memory"
    }


def _without_data(value: torch.Tensor, like: Sequence[torch.Tensor]) -> torch.Tensor:
    facts = list(value.shape), list(value.stride())
    fake = next((t for t in like if isinstance(t, FakeTensor)), None)
    if fake is None:
        return aten.empty_strided.default(*facts, dtype=value.dtype, device=value.device)
    return aten.new_empty_strided.default(fake, *facts, dtype=value.dtype)


class TensorsOfTensors(TorchFunctionMode):
    """Tensors made of what is not one. torch.tensor of a list of tensors reads them one by one, past all modes: it
    stacks them instead. And what numpy draws is new in every call, of which an export would know nothing."""

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self.values, self.drawn = values, _drawn()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.values.strict and is_transform(func):
            raise NoOperator(*TRANSFORMED)
        if func in _FROM_NUMPY and args and isinstance(args[0], np.ndarray) and not _same(self.drawn, _drawn()):
            fact = "makes a tensor of numpy's after numpy has drawn random numbers: the plan would hold them for ever"
            remedy = "draw with torch (transformers: config.apply_spec_augment=False), or give them as inputs"
            raise CaptureError(self.values.place(), fact, remedy)
        if func is torch.tensor and args and isinstance(args[0], (list, tuple)):
            inside = pytree.tree_leaves(args[0])
            if any(isinstance(leaf, FakeTensor) for leaf in inside):
                made = _stacked(args[0]).detach()
                return made.to(**{key: kwargs[key] for key in ("dtype", "device") if kwargs.get(key) is not None})
        return func(*args, **kwargs)


_FROM_NUMPY = (torch.tensor, torch.as_tensor, torch.from_numpy)


def _drawn() -> Any:
    """The state of numpy's generator."""
    return np.random.get_state(legacy=False)["state"]  # type: ignore[call-overload, index]


def _same(state: Any, other: Any) -> bool:
    return state.keys() == other.keys() and all(np.array_equal(state[key], other[key]) for key in state)


def _stacked(tree: Any) -> torch.Tensor:
    if isinstance(tree, torch.Tensor):
        return tree.reshape(())
    return torch.stack(list(map(_stacked, tree))) if isinstance(tree, (list, tuple)) else torch.tensor(tree)


@contextmanager
def following(model: nn.Module, values: KnownValues) -> Iterator[None]:
    """Within, forward runs with its known values."""
    forward, before = model.forward, vars(model).get("forward")

    @wraps(forward)
    def forward_with_known_values(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            values.begin(model, args, kwargs)
            stack.enter_context(TensorsOfTensors(values))
            stack.enter_context(FollowValues(values))
            return forward(*args, **kwargs)

    model.forward = forward_with_known_values
    try:
        yield
    finally:
        vars(model).pop("forward", None)
        if before is not None:
            model.forward = before
