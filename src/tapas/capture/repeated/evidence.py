"""What a submodule runs, operator by operator: the record of one run, and the comparison of another with it.

Two submodules are copies if they run the same operators with the same attributes on the same operands (the same input,
the same weight, the same earlier result) under the same modes. What is known from a record need not be computed again:
a run that is compared is answered from the record as long as it agrees, and goes on by itself where it deviates.

Attention and linear are compared as they are called: they are made of half of all operators that a layer dispatches.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from tapas._torch import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    autocast_depth,
    autocasting,
    current_dispatch_mode,
    has_attributes,
    hooks_on,
    writes_to,
    writes_to_operands,
)

PLAIN = frozenset((
    int, float, bool, str, bytes, complex, type(None), type(...), range, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format,
))  # fmt: skip
_EXACT = PLAIN - {float, complex}  # equal values are the same
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_LIFT = torch.ops.aten.lift_fresh.default
# Functions that are operators of many parts. Each returns a tensor that is not one of its operands.
_COMPOSITES = (
    (functional.linear, torch.ops.aten.linear.default),
    (functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default),
)


class Incomparable(BaseException):  # code that catches what goes wrong must not catch this
    """Something runs that nobody can compare: `args[0]` says what."""


class FreshTensor(NamedTuple):
    """In a record: a tensor that the operator makes."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    example: torch.Tensor | None  # one that can be copied, which is quicker than to make one

    def made(self) -> torch.Tensor:
        size, stride, dtype, device, example = self
        return torch.empty_strided(size, stride, dtype=dtype, device=device) if example is None else example.detach()


class KnownTensor(NamedTuple):
    """In a record: a tensor that was there before, by its number; operators that write return their operand."""

    number: int


class OperatorRecord(NamedTuple):
    key: list[Any]  # operator, modes, attributes and operands
    results: Any  # FreshTensor, KnownTensor and plain values, in lists
    computed: bool  # its results have data: they are computed again, not answered for


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """All operators of a run, and what it returned."""

    operators: list[OperatorRecord]
    returned: list[Any]
    foreign: list[torch.Tensor]  # tensors that were neither given nor the submodule's own; kept for their identity


class EvidenceMode(TorchDispatchMode):
    """Records what runs within, comparing it with earlier records."""

    supports_higher_order_operators = True  # to be asked about them, too

    def __init__(self, inputs: Iterable[torch.Tensor], weights: Iterable[torch.Tensor], known: Sequence[Evidence]):
        super().__init__()
        self.tensors: list[torch.Tensor] = []  # by number: inputs, weights, results
        self.numbers: dict[int, int] = {}
        self.foreign: list[torch.Tensor] = []
        self.operators: list[OperatorRecord] = []
        self.candidates = list(known)  # the first of them agrees so far
        self.deviation = ""
        self.thread = get_ident()
        self.inside_composite = False  # whose parts are not looked at
        for tensor in (*inputs, *weights):
            self._number(tensor)
        self.hooked = hooks_on(self.tensors)  # by others, who may

    def __enter__(self) -> "EvidenceMode":
        for function, operator in _COMPOSITES:
            if getattr(functional, function.__name__) is function:  # or somebody has put something else there
                setattr(functional, function.__name__, partial(self.composite, function, operator))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for function, _ in _COMPOSITES:
            now = getattr(functional, function.__name__)
            if isinstance(now, partial) and now.func == self.composite:
                setattr(functional, function.__name__, function)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A deep model comes here for every operator of every copy: what is common is written out."""
        if self.inside_composite:
            return func(*args, **kwargs or {})
        key = self._key(func, args, kwargs)
        record = self._expected(key)
        if record is None or record.computed:
            return self._compute(func, args, kwargs or {}, record, key)
        self.operators.append(record)
        results = record.results
        return self._answer(results) if type(results) is not list else [self._answer(item) for item in results]

    def _compute(self, func: Any, args: Any, kwargs: Any, record: OperatorRecord | None, key: list[Any]) -> Any:
        if not isinstance(func, OpOverload):
            raise Incomparable(f"the higher-order operator {func}")
        result = func(*args, **kwargs)
        if record is None:
            record = OperatorRecord(key, *self._results(result))
        self._number_all(result)
        self.operators.append(record)
        return result

    def composite(self, function: Callable[..., torch.Tensor], operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Called in place of a function of many operators. Where others listen to these, or an operand is wrapped in a
        way that only they see through, it runs as it is."""
        operands = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        mine = self.thread == get_ident() and current_dispatch_mode() is self and not self.inside_composite
        if not mine or not all(id(tensor) in self.numbers for tensor in operands):
            return function(*args, **kwargs)
        key = self._key(operator, args, kwargs)
        record = self._expected(key)
        self.inside_composite = True
        try:
            if record is None or record.computed:
                result = function(*args, **kwargs)
                record = record or OperatorRecord(key, *self._results(result))
            if not record.computed:
                result = _Composite.apply(record.results, *operands)
        finally:
            self.inside_composite = False
        self._number(result)
        self.operators.append(record)
        return result

    # -- what an operator is ---------------------------------------------------------------------

    def _key(self, operator: Any, args: Any, kwargs: Any) -> list[Any]:
        key = [operator, torch.is_grad_enabled(), autocast_depth(), _autocast() if autocasting() else None]
        self._describe(args, key)
        if kwargs:
            key += kwargs
            self._describe(kwargs.values(), key)
        return key

    def _describe(self, values: Iterable[Any], key: list[Any]) -> None:
        for value in values:
            kind = type(value)
            if kind in _EXACT:
                key.append(kind)
                key.append(value)
            elif isinstance(value, torch.Tensor):
                number, node = self.numbers.get(id(value)), value.grad_fn
                key.append(self._foreign(value, key[0]) if number is None else number)
                key += (value.requires_grad,) if node is None else (type(node), node.name())  # its class, if custom
            elif kind is list or kind is tuple:
                kinds = list(map(type, value))
                if _EXACT.issuperset(kinds):
                    key.append(kinds)
                    key.append(list(value))
                else:
                    key.append(len(value))
                    self._describe(value, key)
            elif kind in PLAIN:
                key.append(kind)
                key.append(repr(value))  # nan is nan, and 0.0 is not -0.0
            elif kind is torch.Generator:
                key.append(value)
            else:
                raise Incomparable(f"{key[0]} with a {kind.__name__}")

    def _foreign(self, tensor: torch.Tensor, func: OpOverload) -> Any:
        """A tensor that is none of inputs, weights and results: a constant by its value, others as the very same."""
        if type(tensor) not in _PLAIN_TENSORS:
            raise Incomparable(f"{func} on a tensor that was not given")
        if func is _LIFT and tensor.device.type == "cpu" and tensor.is_contiguous():
            content = ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
            return tensor.dtype, tensor.shape, content
        if writes_to_operands(func):
            raise Incomparable(f"{func} on a tensor that is not its own")
        self.foreign.append(tensor)
        return "foreign", id(tensor), writes_to(tensor)

    # -- what a record says of it ----------------------------------------------------------------

    def _expected(self, key: list[Any]) -> OperatorRecord | None:
        place = len(self.operators)
        while self.candidates:
            known = self.candidates[0].operators
            if place < len(known) and known[place].key == key:
                return known[place]
            if not self.deviation:
                self.deviation = f"operator {place} is {key[0]}" + _unlike(key, known[place : place + 1])
            self._next()
        return None

    def _next(self) -> None:
        """The next record that agrees with what has run."""
        del self.candidates[0]
        while self.candidates and not _begins(self.candidates[0].operators, self.operators):
            del self.candidates[0]

    def _answer(self, result: Any) -> Any:
        if type(result) is FreshTensor:
            made = result.made()
            self.numbers[id(made)] = len(self.tensors)
            self.tensors.append(made)
            return made
        if type(result) is KnownTensor:
            return self.tensors[result.number]
        return [self._answer(item) for item in result] if type(result) is list else result

    def _results(self, result: Any) -> tuple[Any, bool]:
        """As a record has them, and whether they have data."""
        if isinstance(result, torch.Tensor):
            number = self.numbers.get(id(result))
            if number is not None:
                return KnownTensor(number), False
            data = result.constant is not None if isinstance(result, FakeTensor) else not result.is_meta
            facts = result.shape, result.stride(), result.dtype, result.device
            plain = type(result) is torch.Tensor and result.is_meta
            example = torch.empty_strided(*facts[:2], dtype=facts[2], device="meta") if plain else None
            return FreshTensor(*facts, example), data
        if isinstance(result, (list, tuple)):
            found = [self._results(item) for item in result]
            return [item for item, _ in found], any(data for _, data in found)
        return result, result is not None

    def _number(self, tensor: torch.Tensor) -> None:
        if self.numbers.setdefault(id(tensor), len(self.tensors)) == len(self.tensors):
            self.tensors.append(tensor)

    def _number_all(self, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._number(result)
        elif isinstance(result, (list, tuple)):
            for item in result:
                self._number_all(item)

    # -- what the run comes to -------------------------------------------------------------------

    def evidence(self, spec: Any, values: list[Any]) -> Evidence:
        """Once the run has ended: of all of it, with what it returned; that of another run if it is the same."""
        returned: list[Any] = [spec]
        for value in values:
            if isinstance(value, torch.Tensor):
                if id(value) not in self.numbers:
                    raise Incomparable("a result that no operator made")
                if has_attributes(value):
                    raise Incomparable("a note on a result")
        self._describe(values, returned)
        if hooks_on(self.tensors) > self.hooked:
            raise Incomparable("a hook on a tensor")
        while self.candidates:
            known = self.candidates[0]
            if len(known.operators) == len(self.operators) and known.returned == returned:
                return known
            self.deviation = self.deviation or "it ends in another way"
            self._next()
        return Evidence(self.operators, returned, self.foreign)


class _Composite(torch.autograd.Function):
    """The result of a function that did not run, of which autograd knows what it depends on."""

    @staticmethod
    def forward(ctx: Any, result: FreshTensor, *operands: torch.Tensor) -> torch.Tensor:
        return result.made()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise Incomparable("a backward pass of its own")


# Set once the class is there, or torch would hide it from a compiler that never sees it, which takes as long again.
EvidenceMode.__torch_dispatch__ = EvidenceMode.dispatch


def _autocast() -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _begins(known: list[OperatorRecord], run: list[OperatorRecord]) -> bool:
    """Whether a record begins with what has run."""
    if len(known) < len(run):
        return False
    return all(one is two or one.key == two.key for one, two in zip(known, run, strict=False))


def _unlike(key: list[Any], known: list[OperatorRecord]) -> str:
    if not known:
        return ", where the other has ended"
    other = known[0].key
    return " with other operands or attributes" if other[0] is key[0] else f", not {other[0]}"
