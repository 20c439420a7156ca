"""In-place calls become functional ones, and calls that change nothing disappear.

Tensors that share memory form a family: a root and the views of it. A write to any member makes a
new value of the root; a member read later is made again from that value. Calls that merely copy
(`clone`, `contiguous`, `to` the same dtype) start a family of their own whose value is the old one.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from tapas._torch import operator_name, schema_of
from tapas.capture.calls import ExportedCall, FlatProgram, Value, operands
from tapas.capture.diagnostics import place_of
from tapas.capture.passes.canonicalize import IDENTITY, simplify
from tapas.capture.side_effects import was_in_checkpoint
from tapas.errors import CaptureError
from tapas.ir import custom_ops as _  # noqa: F401 - registers operators of our own
from tapas.ir.regions import keep_apart, region_named

aten = torch.ops.aten
REGION = torch.ops.tapas.region.default
FUNCTIONAL = {  # of those that write, by name and overload: where the functional form has another name
    ("bernoulli_", "float"): aten.bernoulli.p,
    ("normal_", "default"): aten.normal_functional.default,
}
RETURNING = {  # norms that write in passing, and those that return what they would write
    aten.batch_norm.default: torch.ops.tapas.batch_norm.default,
    aten.instance_norm.default: torch.ops.tapas.instance_norm.default,
}


@dataclass(slots=True)
class ViewOf:
    base: str  # the name it is a view of
    call: ExportedCall  # how it is made
    index: int  # which result of that call


@dataclass(slots=True)
class Functionalized:
    program: FlatProgram
    views: dict[str, ViewOf] = field(default_factory=dict)
    value: dict[str, str] = field(default_factory=dict)  # name -> the tensor that now holds its value
    version: dict[str, int] = field(default_factory=dict)  # writes to a root so far
    made_at: dict[str, int] = field(default_factory=dict)  # the root's version a view was made at
    mutated: set[str] = field(default_factory=set)
    checkpointed: set[str] = field(default_factory=set)  # what is made in regions that the original computes again
    shared: set[str] = field(default_factory=set)  # roots that are the memory of others
    regions: dict[str, set[str]] = field(default_factory=dict)  # by root: those whose results it may share memory with
    unreadable: dict[str, str] = field(default_factory=dict)  # roots, and where they were written to unseen
    out: list[ExportedCall] = field(default_factory=list)
    writes: bool = True  # without any, families need not be known

    def root(self, name: str) -> str:
        while name in self.views:
            name = self.views[name].base
        return name

    def read(self, name: str) -> str:
        """The tensor that holds the present value of `name`."""
        if self.unreadable and (place := self.unreadable.get(self.root(name))):
            raise CaptureError(
                place, "a tensor is written to through detach(), and read again itself", "write to a copy (clone)"
            )
        view = self.views.get(name)
        if view is None:
            return self.value.get(name, name)
        version = self.version.get(self.root(name), 0)
        if self.made_at.get(name, 0) != version:
            self._remake(view, version)
        return self.value.get(name, name)

    def _remake(self, view: ViewOf, version: int) -> None:
        call = view.call
        fresh = tuple(self.program.unique(f"{name}.w{version}") for name in call.results)
        for name, again in zip(call.results, fresh, strict=True):
            self.program.meta[again] = self.program.meta[name]
            self.made_at[name] = version
        made = self.emit(call.at_its_place(call.target, call.args, fresh, **call.kwargs))
        self.value.update(zip(call.results, made, strict=True))

    def emit(self, call: ExportedCall) -> tuple[str, ...]:
        """Append the call with its operands read now; return the tensors that hold its results."""
        call.read(self._now)
        simpler = simplify(call, self.program)
        if isinstance(simpler, Value):
            return (simpler.name,)
        self.out.append(simpler)
        return simpler.results

    def _now(self, value: Value) -> Value:
        name = self.read(value.name)
        return value if name == value.name else Value(name)

    def step(self, call: ExportedCall) -> None:
        written = written_by(call)
        if was_in_checkpoint(call.node):
            self.checkpointed.update(call.results)
        if call.target is aten.broadcast_tensors.default:
            self._broadcast(call)
        elif call.target in RETURNING and call.args[5] and isinstance(call.args[3], Value):
            self._norm(call)
        elif written is None:
            self._plain(call)
            if call.target is REGION:
                self._region(call)
        elif call.opname == "detach_":
            self._detach(call, written)
        else:
            self._write(call, written)

    def _plain(self, call: ExportedCall) -> None:
        base = base_of(call, self.program) if self.writes else None
        if base is not None:
            version = self.version.get(self.root(base), 0)
            for index, name in enumerate(call.results):
                self.views[name] = ViewOf(base, call, index)
                self.made_at[name] = version
        made = self.emit(call.at_its_place(call.target, call.args, **call.kwargs))
        self.value.update((name, at) for name, at in zip(call.results, made, strict=True) if name != at)

    def _region(self, call: ExportedCall) -> None:
        """Its results may be its operands, or views of them, which a write later on would tell."""
        operands, name = call.args
        region = region_named(name)
        shared = [operands[i].name for i in region.shared]
        self.shared |= {self.root(tensor) for tensor in (*shared, *(call.results if shared else ()))}
        for tensor in (*call.results, *(value.name for value in region.only_reads(operands))):
            self.regions.setdefault(self.root(tensor), set()).add(name)

    def _broadcast(self, call: ExportedCall) -> None:
        """One expand for each tensor: most of them change nothing and disappear."""
        for value, name in zip(call.args[0], call.results, strict=True):
            size = tuple(self.program.meta[name].shape)
            self._plain(call.at_its_place(aten.expand.default, (value, size), (name,)))

    def _norm(self, call: ExportedCall) -> None:
        """A norm that writes to its running statistics, which its schema does not tell."""
        statistics = [value.name for value in call.args[3:5]]
        made = tuple(self.program.unique(f"{name}.w{self.version.get(name, 0) + 1}") for name in statistics)
        self.program.meta.update(zip(made, (self.program.meta[name] for name in statistics), strict=True))
        self.emit(call.at_its_place(RETURNING[call.target], call.args, call.results + made))
        for name, new in zip(statistics, made, strict=True):
            self._written(name, new, call)

    def _detach(self, call: ExportedCall, written: str) -> None:
        """In place, but no value changes."""
        made = self.emit(call.at_its_place(aten.detach.default, call.args))
        self.value[written] = self.value[call.results[0]] = made[0]

    def _write(self, call: ExportedCall, written: str) -> None:
        place = place_of(call.node)
        if not call.results:
            raise CaptureError(place, f"{call.target} writes in place and returns nothing", "use its functional form")
        self._written(written, self._functional(call, written, place), call)
        # The result of an in-place call is the tensor it wrote to, not a copy of it.
        if call.results[0] != written:
            alias = call.at_its_place(aten.alias.default, (Value(written),))
            self.views[call.results[0]] = ViewOf(written, alias, 0)
            self.made_at[call.results[0]] = -1

    def _written(self, written: str, new: str, call: ExportedCall) -> None:
        """A tensor has another value from now on, and so have those whose memory it shares."""
        root, place = self.root(written), place_of(call.node)
        if was_in_checkpoint(call.node) and root not in self.checkpointed:
            fact = "writes inside of torch.utils.checkpoint to a tensor of outside, and again in every backward pass"
            raise CaptureError(place, fact, "call it without: recompute= says what the plan computes again")
        if root in self.shared:
            fact = "writes to a tensor that code which stays whole was given, or returned: it may be the same memory"
            raise CaptureError(place, fact, "write to a copy (clone)")
        for name in self.regions.get(root, ()):
            keep_apart(name)
        self.mutated.add(root)
        while written in self.views:
            view = self.views[written]
            if view.call.opname == "detach":
                self._part(written, root, place)
                break
            new = self._put_back(view, new, place)
            written = view.base
        self.version[written] = self.version.get(written, 0) + 1
        self.value[written] = new

    def _part(self, detached: str, root: str, place: str) -> None:
        """A tensor that was detached, and is written to, goes its own way from now on: what it was detached from has
        those values with its old gradient, which no operator makes, so nobody may read it."""
        self.unreadable[root] = place
        self.version[detached] = self.version.get(root, 0)
        self.regions[detached] = self.regions.get(root, set())
        del self.views[detached]

    def _functional(self, call: ExportedCall, written: str, place: str) -> str:
        """The value that the written tensor now has."""
        name = call.results[0]  # reads of it go through the family, so the name is free for the new value
        opname = call.opname
        if opname == "copy_":
            return self._copied(call, written, name)
        overload = functional_form(call.target)
        if overload is None:
            raise CaptureError(place, f"{call.target} writes in place and has no functional form", "avoid it")
        call.kwargs.pop("out", None)
        meta, made = self.program.meta, name
        dtype = self._promoted(overload, call, written)
        if dtype != meta[written].dtype:  # what is written keeps its dtype
            made = self.program.unique(f"{name}.promoted")
            meta[made] = torch.empty_like(meta[written], dtype=dtype, device="meta")
        new = self.emit(call.at_its_place(overload, call.args, (made,), **call.kwargs))[0]
        if made == name:
            return new
        return self.emit(call.at_its_place(aten.to.dtype, (Value(new), meta[written].dtype), (name,)))[0]

    def _promoted(self, overload: Any, call: ExportedCall, written: str) -> torch.dtype:
        """The dtype of what the functional form makes."""
        meta = self.program.meta
        if all(meta[name].dtype == meta[written].dtype for name in operands(call)):
            return meta[written].dtype

        def bare(tree: Any) -> Any:
            if isinstance(tree, Value):
                return torch.empty_like(meta[tree.name], device="meta")
            return [bare(item) for item in tree] if isinstance(tree, (list, tuple)) else tree

        return overload(*map(bare, call.args), **{key: bare(value) for key, value in call.kwargs.items()}).dtype

    def _copied(self, call: ExportedCall, written: str, name: str) -> str:
        meta, source = self.program.meta, call.args[1]
        shape, dtype = meta[written].shape, meta[written].dtype
        if meta[source.name].dtype != dtype:
            cast = self.program.unique(f"{name}.cast")
            meta[cast] = meta[source.name].to(dtype)
            source = Value(self.emit(call.at_its_place(aten.to.dtype, (source, dtype), (cast,)))[0])
        if meta[source.name].shape == shape:
            return self.read(source.name)
        return self.emit(call.at_its_place(aten.expand.default, (source, tuple(shape)), (name,)))[0]

    def _put_back(self, view: ViewOf, new: str, place: str) -> str:
        """The value of a view's base once the view has the value `new`."""
        name = self.program.unique(f"{view.base}.w{self.version.get(self.root(view.base), 0) + 1}")
        base = self.program.meta[view.base]
        self.program.meta[name] = base
        seen = self.program.meta[view.call.results[view.index]]
        same = seen.shape == base.shape and seen.dtype == base.dtype
        put = undo(view, Value(self.read(view.base)), Value(new), base, same)
        if put is None:
            raise CaptureError(
                place, f"a view made by {view.call.target} is written in place",
                "write to the tensor itself, or make the change with torch.where or torch.cat",
            )  # fmt: skip
        target, args = put
        return self.emit(view.call.at_its_place(target, args, (name,)))[0]


def functionalize(program: FlatProgram) -> Functionalized:
    """All calls without writes in `out`; `read` tells where a name's final value is."""
    state = Functionalized(
        program, writes=any(written_by(call) is not None or call.target in RETURNING for call in program.calls)
    )
    for call in program.calls:
        state.step(call)
    return state


# Which calls write, which results are views, and how a view's value is put back into its base


@cache
def _writes(target: Any) -> tuple[int, str] | None:
    """Position and name of the argument an operator writes to."""
    for position, argument in enumerate(schema_of(target).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return position, argument.name
    return None


@cache
def functional_form(target: Any) -> Any:
    """The operator that returns what this one writes; None: there is none. An overload may have another name."""
    name, overload = operator_name(target)
    plain = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")  # __ior__ is x |= y
    packet = getattr(aten, plain, None)
    if target.namespace != "aten" or packet is None:
        return None
    if (name, overload) in FUNCTIONAL:
        return FUNCTIONAL[name, overload]
    if name.endswith("_") and overload in packet.overloads():
        return getattr(packet, overload)
    taken, others = _taken(target), [getattr(packet, other) for other in packet.overloads()]
    shapes = torch.Tag.inplace_view in target.tags  # then it is no value that is written
    return None if shapes else next((o for o in others if _writes(o) is None and _taken(o) == taken), None)


def _taken(target: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema_of(target).arguments if not argument.is_out]


@cache
def _is_view(target: Any) -> bool:
    """Whether the results may share the memory of the first argument."""
    schema = schema_of(target)
    shared = any(result.alias_info is not None for result in schema.returns)
    return shared and bool(schema.arguments) and schema.arguments[0].alias_info is not None


def written_by(call: ExportedCall) -> str | None:
    """The name of the tensor a call writes to."""
    found = _writes(call.target)
    if found is None:
        return None
    position, name = found
    value = call.args[position] if position < len(call.args) else call.kwargs.get(name)
    return value.name if isinstance(value, Value) else None


def base_of(call: ExportedCall, program: FlatProgram) -> str | None:
    """The tensor whose memory the results share, if they do."""
    if not _is_view(call.target) or not call.args or not isinstance(call.args[0], Value):
        return None
    first = call.args[0].name
    return first if _shares(call, program.meta[first], program.meta[call.results[0]]) else None


def _shares(call: ExportedCall, base: torch.Tensor, result: torch.Tensor) -> bool:
    """Some calls return a view where they can and a copy where they cannot."""
    opname = call.opname
    if opname == "contiguous":
        return base.is_contiguous()
    if opname in ("to", "type_as"):
        return base.dtype == result.dtype
    if opname in ("reshape", "reshape_as", "flatten"):
        try:
            torch.empty_strided(base.shape, base.stride(), device="meta").view(result.shape)
        except RuntimeError:
            return False
    return True


def undo(view: ViewOf, base: Value, new: Value, meta: torch.Tensor, same: bool) -> tuple[Any, tuple[Any, ...]] | None:
    """The call that gives the base (shaped like `meta`) once its view has the value `new`; None if none does.

    `same` says that the view has the shape and dtype of its base.
    """
    call = view.call
    opname, rest = call.opname, call.args[1:]
    rank = meta.dim()
    match opname:
        case "slice":
            dim, start, end, step = (*rest, *(0, None, None, 1)[len(rest) :])
            return aten.slice_scatter.default, (base, new, dim, start, end, step)
        case "select":
            return aten.select_scatter.default, (base, new, *rest)
        case "diagonal":
            return aten.diagonal_scatter.default, (base, new, *rest)
        case "unbind":
            return aten.select_scatter.default, (base, new, rest[0] if rest else 0, view.index)
        case "transpose" | "swapaxes" | "swapdims":
            return aten.transpose.int, (new, *rest)
        case "t" | "numpy_T" | "mT" if rank == 2:
            return aten.transpose.int, (new, 0, 1)
        case "permute":
            order = [dim % rank for dim in rest[0]]
            return aten.permute.default, (new, tuple(order.index(dim) for dim in range(rank)))
        case "view" | "reshape" | "flatten" | "unsqueeze" | "squeeze" | "unflatten" | "view_as" | "reshape_as":
            if call.overload == "dtype":
                return None
            return aten.reshape.default, (new, tuple(meta.shape))
        case _ if same and opname in IDENTITY:
            return aten.alias.default, (new,)
    return None
