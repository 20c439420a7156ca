"""What a plan said would be sent, beside what was."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tapas.ir.fold import Folded
from tapas.plan.assignment import Assignment
from tapas.plan.traffic import Kind, predicted
from tapas.rules.matmul import DISPATCH
from tapas.runtime.collectives import Count


@dataclass(frozen=True)
class SentBytes:
    phase: str
    kind: str
    axes: tuple[str, ...]  # by name
    predicted_nbytes: int
    executed_nbytes: int

    @property
    def ok(self) -> bool:
        return self.predicted_nbytes == self.executed_nbytes


def executed(counts: Iterable[Count]) -> Counter[Kind]:
    """The most that any rank sent."""
    most: Counter[Kind] = Counter()
    for count in counts:
        for phase, by_kind in (("forward", count.forward), ("backward", count.backward)):
            for (kind, axes), nbytes in by_kind.items():
                most[phase, kind, axes] = max(most[phase, kind, axes], nbytes)
    return most


def compare_traffic(
    folded: Folded, assignment: Assignment, names: Sequence[str], counts: Iterable[Count]
) -> tuple[SentBytes, ...]:
    """`names`: of the mesh's axes."""
    wanted, seen = predicted(folded, assignment), executed(counts)
    keys = sorted(key for key in wanted.keys() | seen.keys() if wanted[key] or seen[key])
    return tuple(
        SentBytes(phase, kind, tuple(names[a] for a in axes), wanted[phase, kind, axes], seen[phase, kind, axes])
        for phase, kind, axes in sorted(keys, key=lambda k: (k[0] != "forward", k[1], k[2]))
    )


def busiest(assignment: Assignment, names: Sequence[str], counts: Sequence[Count]) -> dict[str, float]:
    """By axis over which tokens are sent to their experts: how many more than its share the busiest rank got. What is
    sent is counted where rows are at home, so that this does not show there."""
    operators = [op for decision in assignment.decisions for op in decision.operators]
    axes = {axis for op in operators for axis, text in enumerate(op.choice) if text.partition("|")[0] == DISPATCH}
    found: dict[str, float] = {}
    for axis in sorted(axes):
        came = [count.visits["forward", (axis,)] for count in counts]
        if total := sum(came):
            found[names[axis]] = max(came) * len(came) / total
    return found
