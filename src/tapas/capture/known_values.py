"""Integers with values, while a model is captured: what code reads of them is known, and is written down.

Next to the tensors without data that an export computes with, the values of integer inputs and buffers, and of all that
follows from them alone, are computed as well. Where code asks for a number or makes a tensor whose size depends on
values, it gets what the example inputs give, and the question is recorded (ir/known.py): the graph holds where the
answer is the same. In the graph the integers stay what they were, inputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from tapas._torch import (
    DisableTorchFunction,
    FakeTensor,
    no_dispatch_modes,
    no_python_dispatcher,
    operator_name,
    pytree,
    storages,
)
from tapas.capture.diagnostics import data_dependent
from tapas.capture.inputs import MOST_INTEGERS as LIMIT
from tapas.capture.passes.canonicalize import keyword_items, plain
from tapas.ir.graph import Op, Ref
from tapas.ir.known import KnownLeaf, KnownProgram, KnownRead


@dataclass(frozen=True, eq=False)
class Known:
    """A tensor with its values; views of one share memory as the tensors of the program do."""

    number: int
    value: torch.Tensor

    @property
    def memory(self) -> int:
        return storages([self.value])[0]

    def all(self) -> bool:
        with apart():
            return bool(self.value.all())


@dataclass(frozen=True)
class KnownStep:
    function: Any
    args: tuple[Any, ...]  # Known in place of tensors
    kwargs: dict[str, Any]
    results: tuple[Known, ...]
    written: frozenset[int]  # memory


@dataclass(frozen=True)
class _Read:
    known: Known
    read: KnownRead


@dataclass
class KnownValues:
    """Of one export."""

    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)  # by place, as pytree.keystr writes it
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)  # by path
    place: Callable[[], str] = str  # where in the model code is
    known: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    leaves: dict[int, KnownLeaf] = field(default_factory=dict)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)  # as they were
    tape: list[KnownStep | _Read] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)  # memory that was written with what is not known
    everything: list[Known] = field(default_factory=list)  # which keeps memory apart
    notes: list[str] = field(default_factory=list)
    strict: bool = False  # what depends on values is an error where it is made, not only where it matters

    # -- what is known ---------------------------------------------------------------------------

    def of(self, tensor: torch.Tensor) -> Known | None:
        found = self.known.get(tensor)
        if found is None and not isinstance(tensor, FakeTensor) and type(tensor) is torch.Tensor:
            found = self._constant(tensor)
        return None if found is None or found.memory in self.lost else found

    def _constant(self, tensor: torch.Tensor) -> Known | None:
        if tensor.is_meta or tensor.numel() > LIMIT or tensor.layout is not torch.strided:
            return None
        with apart():
            value = tensor.detach().to("cpu", copy=True)
        return self.leaf(tensor, value, "constant", "")

    def leaf(self, tensor: torch.Tensor, value: torch.Tensor, kind: str, path: str) -> Known:
        made = self.new(value)
        self.leaves[made.number] = KnownLeaf(f"k{made.number}", kind, path)
        if kind == "constant":
            with apart():
                self.constants[made.number] = value.clone()
        self.known[tensor] = made
        return made

    def new(self, value: torch.Tensor) -> Known:
        made = Known(len(self.everything), value)
        self.everything.append(made)
        return made

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """At the start of the model's forward, on the tensors that it gets."""
        self.known, self.lost, self.tape = WeakTensorKeyDictionary(), set(), []
        self.leaves, self.constants, self.everything = {}, {}, []
        for path, tensor in pytree.tree_flatten_with_path((args, kwargs))[0]:
            value = self.inputs.get(pytree.keystr(path))
            if value is not None and isinstance(tensor, torch.Tensor):
                with apart():
                    self.leaf(tensor, value.clone(), "input", pytree.keystr(path))
        for path, value in self.buffers.items():
            home, _, name = path.rpartition(".")
            try:
                held = vars(model.get_submodule(home))["_buffers"]
            except AttributeError:  # in a submodule that a stand-in answers for
                continue
            tensor = held.get(name) if type(held) is dict else None
            if isinstance(tensor, torch.Tensor):
                with apart():
                    self.leaf(tensor, value.clone(), "buffer", path)

    # -- what is read ----------------------------------------------------------------------------

    def read(self, known: Known, *, sized: bool = False, asserted: bool = False) -> None:
        with apart():
            expected = torch.empty(known.value.shape, device="meta") if sized else known.value.clone()
        found = KnownRead(f"k{known.number}", self.place(), expected, sized, asserted)
        self.tape.append(_Read(known, found))

    def program(self, names: Mapping[str, str]) -> KnownProgram:
        """All that was read; `names` of inputs by place."""
        needed: set[int] = set()
        memory: set[int] = set()
        kept: list[Op | KnownRead] = []
        for step in reversed(self.tape):
            if isinstance(step, _Read):
                needed.add(step.known.number)
                memory.add(step.known.memory)
                kept.append(step.read)
            elif any(r.number in needed for r in step.results) or not memory.isdisjoint(step.written):
                operands = [k for k in pytree.tree_leaves((step.args, step.kwargs)) if isinstance(k, Known)]
                needed.update(k.number for k in operands)
                memory.update(k.memory for k in operands)
                kept.append(_op(step, len(kept)))
        leaves = [leaf for number, leaf in self.leaves.items() if number in needed]
        self._refuse_written(leaves)
        named = [KnownLeaf(one.tensor, one.kind, names.get(one.path, one.path)) for one in leaves]
        held = tuple((f"k{n}", value) for n, value in self.constants.items() if n in needed)
        return KnownProgram(tuple(named), tuple(_once(kept[::-1])), held)

    def _refuse_written(self, leaves: Sequence[KnownLeaf]) -> None:
        """A buffer that forward writes to has other values at every call: what was read of it holds for one."""
        written = frozenset[int]().union(*(step.written for step in self.tape if isinstance(step, KnownStep)))
        memory = {f"k{known.number}": known.memory for known in self.everything}
        for leaf in leaves:
            if leaf.kind == "buffer" and memory[leaf.tensor] in written:
                fact = "forward depends on the values of a tensor that it writes to"
                raise data_dependent(leaf.path, fact)


def _once(steps: Sequence[Op | KnownRead]) -> Iterator[Op | KnownRead]:
    """A tensor that is read twice between two writes is compared once."""
    seen: set[tuple[str, bool, bool]] = set()
    for step in steps:
        if isinstance(step, Op):
            if step.target.split(".")[1].endswith("_"):
                seen.clear()
        elif (key := (step.tensor, step.sized, step.asserted)) in seen:
            continue
        else:
            seen.add(key)
        yield step


def _op(step: KnownStep, number: int) -> Op:
    operands: list[str] = []

    def convert(tree: Any) -> Any:
        if isinstance(tree, Known):
            operands.append(f"k{tree.number}")
            return Ref(len(operands) - 1)
        if isinstance(tree, (list, tuple)):
            return tuple(convert(item) for item in tree)
        return plain(tree)

    args = tuple(map(convert, step.args))
    kwargs = tuple((key, convert(value)) for key, value in keyword_items(step.kwargs))
    name, overload = operator_name(step.function)
    target = f"{step.function.namespace}.{name}.{overload}"
    results = tuple(f"k{known.number}" for known in step.results)
    return Op(f"read{number}", target, tuple(operands), results, args, kwargs)


@contextmanager
def apart() -> Iterator[None]:
    """Within, tensors compute for real: the export sees nothing of it."""
    with no_dispatch_modes(), no_python_dispatcher(), DisableTorchFunction(), torch.no_grad():
        yield
