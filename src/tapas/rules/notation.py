"""Einsum-like notation for rules, and the helpers that rules share: labels of dims, operands that may be absent,
arguments in any spelling, and what kernels send.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tapas.errors import GraphError
from tapas.ir.graph import ITEMSIZE, Ref, Tensor, refs
from tapas.rules.base import Arguments, At, Call, Collective, Factor, Kernel, Local, Rule

Term = list[list[str]]  # the labels of one tensor: per dim, major first


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
    by_name: dict[str, _Label] = {}
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
                label = by_name.setdefault(name, _Label(sizes[name], [None] * count, [None] * len(results)))
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
        for name, label in by_name.items()
    )
    return Rule(factors, **options)


def factors_text(rule: Rule, call: Call) -> str:
    """The factors of a rule as a pattern for people: `1` is a dim without any, `!k` one that is never split."""

    def dim_text(dim: int, found: Sequence[tuple[Factor, At | None]]) -> str:
        here = sorted(((f, at) for f, at in found if at is not None and at.dim == dim), key=lambda p: -p[1].inner)
        words = [("!" if factor.blocked else "") + factor.name for factor, _ in here]
        return f"({' '.join(words)})" if len(words) > 1 else words[0] if words else "1"

    def terms(tensors: Sequence[Tensor], side: str) -> str:
        return ", ".join(
            " ".join(dim_text(d, [(f, getattr(f, side)[i]) for f in rule.factors]) for d in range(len(t.shape))) or "_"
            for i, t in enumerate(tensors)
        )

    return f"{terms(call.operands, 'operands')} -> {terms(call.results, 'results')}".strip()


# ---------------------------------------------------------------------------------------------
# Labels


def names(count: int) -> Term:
    """d0, d1, ...: one label a dim."""
    return [[f"d{i}"] for i in range(count)]


def broadcast(shape: Sequence[int], whole: Sequence[int]) -> Term:
    """Labels of a tensor that is broadcast to `whole`: its dims are the last ones, `1` where it is repeated."""
    skipped = len(whole) - len(shape)
    return [[f"d{i + skipped}"] if size == whole[i + skipped] else ["1"] for i, size in enumerate(shape)]


def aligned(shape: Sequence[int], labels: Term) -> Term:
    """The last dims are those of the labels; where there is one element only, it is broadcast."""
    last = labels[len(labels) - len(shape) :]
    return [["1"] if size == 1 else names for size, names in zip(shape, last, strict=True)]


def blocked(term: Term, dims: Sequence[int]) -> Term:
    """The same labels, with those of some dims never split."""
    return [["!" + label for label in labels] if d in dims else labels for d, labels in enumerate(term)]


def wrap(dim: int, rank: int) -> int:
    return dim + max(rank, 1) if dim < 0 else dim


def dims_of(value: Any, rank: int) -> tuple[int, ...]:
    """A dim argument as non-negative dims: None and () mean all of them."""
    if value is None or value == ():
        return tuple(range(rank))
    listed = value if isinstance(value, tuple) else (value,)
    return tuple(wrap(d, rank) for d in listed) if rank else ()


def distinct(call: Call) -> bool:
    """Each operand stands in the arguments once: x * x as one operand is not linear in x."""
    used = [i for value in (*call.args, *(v for _, v in call.kwargs)) for i in refs(value)]
    return len(used) == len(set(used))


def is_number(value: Any, *wanted: float) -> bool:
    return isinstance(value, (int, float)) and value in wanted


def replaced(call: Call, index: int, name: str, value: Any) -> Arguments:
    """The call's arguments with one of them changed, in the spelling it was given in."""
    if index < len(call.args):
        return (*call.args[:index], value, *call.args[index + 1 :]), call.kwargs
    return call.args, (*((k, v) for k, v in call.kwargs if k != name), (name, value))


def within(pieces: Sequence[tuple[int, int]], start: int, stop: int) -> int:
    """How many of a rank's elements lie in start:stop of the whole dim."""
    return sum(max(0, min(stop, high) - max(start, low)) for low, high in pieces)


def result_size(local: Local) -> Arguments:
    """For operators whose second argument is the size of the result."""
    return replaced(local.call, 1, "size", local.result_shape())


# ---------------------------------------------------------------------------------------------
# Optional operands, and statistics that kernels send


def placed(call: Call, *arguments: tuple[int, str, Term | None]) -> list[Term | None]:
    """Labels per operand, from (position, name, labels) per argument; absent operands are skipped."""
    terms: list[Term | None] = [None] * len(call.operands)
    for position, name, term in arguments:
        value = call.arg(position, name)
        if isinstance(value, Ref):
            terms[value.index] = term
    return terms


def number(call: Call, position: int, name: str) -> int | None:
    """Which operand an argument is."""
    value = call.arg(position, name)
    return value.index if isinstance(value, Ref) else None


def override(call: Call, operand: int | None, kind: str) -> tuple[str | None, ...]:
    """A kernel's states of operands: one of them differs from the default."""
    return tuple(kind if i == operand else None for i in range(len(call.operands)))


def real(labels: Iterable[str], shape: Iterable[int]) -> tuple[str, ...] | None:
    """The labels that become factors: dims of size one do not. None where there are no elements at all."""
    sizes = dict(zip(labels, shape, strict=True))
    return None if 0 in sizes.values() else tuple(label for label, size in sizes.items() if size > 1)


def wide(tensor: Tensor) -> int:
    """Bytes of a number that a sum is kept in."""
    return max(4, ITEMSIZE[tensor.dtype])


def sums(factors: tuple[str, ...] | None, itemsize: int, forward: int = 1, backward: int = 0) -> tuple[Collective, ...]:
    """So many all-reduces of one size in each direction; none of nothing."""
    if factors is None:
        return ()
    return tuple(Collective("all_reduce", factors, itemsize, i >= forward) for i in range(forward + backward))
