"""What a rule is: the factors of an operator, einsum-like, and how a rank calls it.

Sharding a mesh axis by a factor f means: operands that have f are S on that dim, operands that lack
it are B (each device sees part of the work, so their gradients are partial sums), results that have
f are S, results that lack it are P. Nothing else has to be said about most operators.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tapas.errors import GraphError
from tapas.ir.graph import Graph, Op, Ref, Tensor
from tapas.sharding.layout import Layout, local_pieces, local_shape


@dataclass(frozen=True, slots=True)
class At:
    """Where a factor sits in one tensor: the major part of `dim`, `inner` elements a unit.

    `start:stop` (in units) says that this tensor holds only that section of the factor, as the
    results of a split or the operands of a concatenation do. `repeat` says that the dim holds the
    whole factor several times over, one after the other (gate and up packed in one matrix).
    """

    dim: int
    inner: int = 1
    start: int = 0
    stop: int | None = None
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class Collective:
    """What a kernel sends along its axis: a payload of the product of these factors' local sizes."""

    kind: str  # "all_reduce"
    factors: tuple[str, ...]
    itemsize: int = 4
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A sharded implementation of one factor that is more than calling the operator locally.

    `operands` and `results` override the states of those that lack the factor ("R" instead of
    B or P), None keeps the default. `imbalance` is the largest share of the work over the mean.
    """

    collectives: tuple[Collective, ...] = ()
    operands: tuple[str | None, ...] = ()
    results: tuple[str | None, ...] = ()
    imbalance: float = 1.0


@dataclass(frozen=True, slots=True)
class Factor:
    name: str
    size: int  # in units: what may be dealt out to devices
    operands: tuple[At | None, ...]
    results: tuple[At | None, ...]
    after: tuple[str, ...] = ()  # a minor factor: outer axes must have split these down to one unit
    blocked: bool = False  # counts as work, is never split
    kernel: Kernel | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One operator with the shapes it was called on."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """An argument by position or by name, Refs not resolved."""
        if index < len(self.args):
            return self.args[index]
        return dict(self.kwargs).get(name, default)

    def tensor(self, value: Any) -> Tensor | None:
        return self.operands[value.index] if isinstance(value, Ref) else None


@dataclass(frozen=True, slots=True)
class Local:
    """One rank's view of a call: mesh sizes, its coordinate, and the layouts around the operator."""

    call: Call
    mesh: tuple[int, ...]
    coord: tuple[int, ...]
    choice: tuple[str, ...]  # per axis: a factor's name, or "R", "B", "P0", "P1", ...
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]

    def operand_shape(self, index: int) -> tuple[int, ...]:
        return local_shape(self.call.operands[index].shape, self.operands[index], self.mesh, self.coord)

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        return local_shape(self.call.results[index].shape, self.results[index], self.mesh, self.coord)

    def operand_pieces(self, index: int, dim: int) -> tuple[tuple[int, int], ...]:
        """The ranges of the global dim that this rank holds of an operand."""
        return local_pieces(self.call.operands[index].shape, self.operands[index], self.mesh, self.coord)[dim]

    def result_pieces(self, index: int, dim: int) -> tuple[tuple[int, int], ...]:
        return local_pieces(self.call.results[index].shape, self.results[index], self.mesh, self.coord)[dim]

    def axes_of(self, factor: str) -> tuple[int, ...]:
        """The mesh axes that a factor is split over, outermost first."""
        return tuple(axis for axis, name in enumerate(self.choice) if name == factor)


Arguments = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]


@dataclass(frozen=True, slots=True)
class Rule:
    factors: tuple[Factor, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()  # groups of operands through which partial sums may pass
    flops: float = 0.0  # per point of the product of all factors; 0: bound by memory alone
    view: bool = False  # moves no bytes
    random: bool = False
    local: Callable[[Local], Arguments] | None = None  # how constants change for local shapes
    target: str | None = None  # what a rank calls instead, where the operator's own constants cannot say it
    kernel: str | None = None  # function of spmd/kernels.py that serves the factors with a Kernel
    missing: bool = False  # no rule is known: runs whole
    unknown_work: bool = False  # costed by its bytes although it may be much arithmetic

    def factor(self, name: str) -> Factor:
        return next(f for f in self.factors if f.name == name)


RuleFunction = Callable[[Call], Rule]
_RULES: dict[str, RuleFunction] = {}


def rule(*targets: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule for operators; two rules for one operator are an error."""

    def register(function: RuleFunction) -> RuleFunction:
        for target in targets:
            if target in _RULES:
                raise ValueError(f"{target} has two rules: {_RULES[target].__module__} and {function.__module__}")
            _RULES[target] = function
        return function

    return register


def registered() -> dict[str, RuleFunction]:
    return dict(_RULES)


def call_of(graph: Graph, op: Op) -> Call:
    return Call(
        op.target,
        op.args,
        op.kwargs,
        tuple(graph.tensors[name] for name in op.operands),
        tuple(graph.tensors[name] for name in op.results),
    )


def rule_for(call: Call) -> Rule:
    """The rule of a call; an operator nobody described runs whole."""
    function = _RULES.get(call.target)
    if function is not None:
        return function(call)
    from tapas.rules.unknown import without_rule  # asks torch, which takes long to import

    return without_rule(call)


# ---------------------------------------------------------------------------------------------
# Einsum-like notation


@dataclass(slots=True)
class _Label:
    size: int
    operands: list[At | None]
    results: list[At | None]
    majors: set[str] = field(default_factory=set)


def parse(term: str) -> list[list[str]]:
    """`b s (h d)` -> [[b], [s], [h, d]]."""
    dims: list[list[str]] = []
    group: list[str] | None = None
    for token in term.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            group = []
        elif token == ")":
            dims.append(group or [])
            group = None
        elif group is not None:
            group.append(token)
        else:
            dims.append([token])
    return dims


def einsum(pattern: str, call: Call, sizes: dict[str, int] | None = None, **options: Any) -> Rule:
    """A rule from a pattern such as `b s k, n k -> b s n` or `b s (h d) -> b s h d`.

    `1` is a dim of size one (or one that is broadcast), `!k` a blocked factor, `(h d)` a product with h
    major. `_` stands for an operand that takes no part in any factor. Inner sizes of products that
    appear nowhere alone are given in `sizes`.
    """
    inputs, output = pattern.split("->")
    terms = [parse(t) if t.strip() != "_" else None for t in inputs.split(",")] if inputs.strip() else []
    outs = [parse(t) if t.strip() != "_" else None for t in output.split(",")]
    return from_labels(terms, outs, call, sizes, **options)


def from_labels(
    operands: Sequence[list[list[str]] | None],
    results: Sequence[list[list[str]] | None],
    call: Call,
    sizes: dict[str, int] | None = None,
    kernels: dict[str, Kernel] | None = None,
    **options: Any,
) -> Rule:
    """The same from lists of labels per dim (a dim is a list of labels, major first)."""
    if len(operands) != len(call.operands) or len(results) != len(call.results):
        raise GraphError(call.target, f"rule has {len(operands)} operands and {len(results)} results, call differs")
    sizes = dict(sizes or {})
    shapes = [t.shape for t in call.operands] + [t.shape for t in call.results]
    terms = [*operands, *results]
    for term, shape in zip(terms, shapes, strict=True):
        if term is not None and len(term) != len(shape):
            raise GraphError(call.target, f"rule names {len(term)} dims of shape {shape}")
        for labels, size in zip(term or [], shape, strict=False):
            if len(labels) == 1 and labels[0] != "1":
                sizes.setdefault(labels[0].lstrip("!"), size)
    found: dict[str, _Label] = {}
    blocked: set[str] = set()
    count = len(operands)
    for position, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        for dim, (labels, size) in enumerate(zip(term or [], shape, strict=False)):
            names = [label.lstrip("!") for label in labels]
            blocked |= {label[1:] for label in labels if label.startswith("!")}
            names = [n for n in names if n != "1"]
            if names and prod(sizes[n] for n in names) != size:
                raise GraphError(call.target, f"dim {dim} of shape {shape} is not {'*'.join(names)}")
            real = [n for n in names if sizes[n] > 1]
            for index, name in enumerate(real):
                label = found.setdefault(name, _Label(sizes[name], [None] * count, [None] * len(results)))
                at = At(dim, prod(sizes[n] for n in real[index + 1 :]))
                (label.operands if position < count else label.results)[
                    position if position < count else position - count
                ] = at
                label.majors |= set(real[:index])
    factors = tuple(
        Factor(
            name,
            label.size,
            tuple(label.operands),
            tuple(label.results),
            after=tuple(sorted(label.majors)),
            blocked=name in blocked,
            kernel=(kernels or {}).get(name),
        )
        for name, label in found.items()
    )
    return Rule(factors, **options)
