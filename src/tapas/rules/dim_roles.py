"""Which dims of which tensors are the same thing: the batch, the sequence, the vocabulary.

Dims that a factor joins belong together. Baselines and `--no-batch-split` speak of the batch without
knowing any operator; this is where they learn what it is.
"""

from collections.abc import Iterable, Sequence

from tapas.ir.graph import Op
from tapas.rules.base import Factor, Rule
from tapas.util import UnionFind

Dim = tuple[str, int]


def places(op: Op, factor: Factor) -> Iterable[Dim]:
    for names, where in ((op.operands, factor.operands), (op.results, factor.results)):
        yield from ((name, at.dim) for name, at in zip(names, where, strict=True) if at is not None)


def _attended(op: Op, rule: Rule) -> Iterable[Dim]:
    yield from (dim for factor in rule.factors if factor.name == rule.attended for dim in places(op, factor))


class DimRoles:
    """The role ("batch", "sequence") of each factor of each operator."""

    def __init__(self, calls: Sequence[tuple[Op, Rule]], seeds: Iterable[tuple[Dim, str]]) -> None:
        self._groups = UnionFind()
        for op, rule in calls:
            for factor in rule.factors:
                if factor.after:
                    continue
                dims = list(places(op, factor))
                for dim in dims[1:]:
                    self._groups.join(dims[0], dim)
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
        role = next((r for dim in places(op, factor) if (r := self.of_dim(*dim))), "")
        # The minor part of a dim is not split by itself: nobody can be asked to split a batch there.
        return "" if factor.after and role == "batch" else role
