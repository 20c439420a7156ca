"""Which dims of which tensors are the same thing: the batch, the sequence, the vocabulary.

Dims that a factor joins belong together. Baselines and `--no-batch-split` speak of the batch without
knowing any operator; this is where they learn what it is.
"""

from collections.abc import Iterable, Sequence

from tapas.ir.graph import Op
from tapas.rules.base import At, Factor, Rule
from tapas.util import UnionFind

Dim = tuple[str, int]  # tensor name, dim


def places(op: Op, factor: Factor) -> list[tuple[str, At]]:
    """Where a factor of an operator is: names of tensors, and where in them."""
    pairs = zip((*op.operands, *op.results), (*factor.operands, *factor.results), strict=True)
    return [(name, at) for name, at in pairs if at is not None]


def dims_of_factor(op: Op, factor: Factor) -> list[Dim]:
    return [(name, at.dim) for name, at in places(op, factor)]


def joined_dims(calls: Iterable[tuple[Op, Rule]]) -> UnionFind:
    """Dims that major factors join."""
    groups = UnionFind()
    for op, rule in calls:
        for factor in rule.factors:
            if not (factor.after or factor.joint or factor.least):
                dims = dims_of_factor(op, factor)
                for dim in dims[1:]:
                    groups.join(dims[0], dim)
    return groups


def _attended(op: Op, rule: Rule) -> Iterable[Dim]:
    yield from (dim for factor in rule.factors if factor.name == rule.attended for dim in dims_of_factor(op, factor))


class DimRoles:
    """The role ("batch", "sequence") of each factor of each operator."""

    def __init__(self, calls: Sequence[tuple[Op, Rule]], seeds: Iterable[tuple[Dim, str]]) -> None:
        self._groups = joined_dims(calls)
        seeds = list(seeds)
        mixed = {self._groups.find(dim) for op, rule in calls for dim in _attended(op, rule)}
        leading = [dim for dim, role in seeds if role == "batch"]
        turned = any(self._groups.find(dim) in mixed for dim in leading)
        if turned and not any(self._groups.find((name, 1)) in mixed for name, _ in leading):
            # [sequence, batch, ...], as torch.nn.Transformer likes it: samples do not attend to each other
            seeds = [((name, 1 - dim), role) for (name, dim), role in seeds]
        self._roles: dict[Dim, str] = {}
        for dim, role in seeds:
            self._roles.setdefault(self._groups.find(dim), role)

    def of_dim(self, tensor: str, dim: int) -> str:
        return self._roles.get(self._groups.find((tensor, dim)), "")

    def of(self, op: Op, factor: Factor | None) -> str:
        if factor is None:
            return ""
        role = next((r for dim in dims_of_factor(op, factor) if (r := self.of_dim(*dim))), "")
        # The minor part of a dim is not split by itself: nobody can be asked to split a batch there. And who deals out
        # experts with the batch does more than to split it.
        return "" if (factor.after or factor.joint) and role == "batch" else role
