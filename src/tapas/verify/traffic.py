"""What a plan says will be sent, and what was."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tapas.planner.solution import Solution
from tapas.problem.problem import OpVariable, repeated
from tapas.runtime.collectives import Count
from tapas.sharding.layout import extent
from tapas.sharding.steps import COLLECTIVES

Kind = tuple[str, str, tuple[int, ...]]  # phase, collective, axes


@dataclass(frozen=True)
class Sent:
    phase: str
    kind: str
    axes: tuple[str, ...]  # by name
    predicted_nbytes: int
    executed_nbytes: int

    @property
    def ok(self) -> bool:
        return self.predicted_nbytes == self.executed_nbytes


def _kernels(variable: OpVariable, choice: int, mesh: tuple[int, ...]) -> Iterable[tuple[Kind, int]]:
    options = variable.table.choice(choice).options
    for axis, option in enumerate(options):
        if option.factor is None or option.factor.kernel is None:
            continue
        for sent in option.factor.kernel.collectives:
            nbytes = sent.itemsize
            for name in sent.factors:
                splitting = [a for a, o in enumerate(options) if o.factor is not None and o.name == name]
                tiling = options[splitting[0]].tiling if splitting else ()
                nbytes *= extent(variable.rule.factor(name).size, tiling, [mesh[a] for a in splitting])
            yield ("backward" if sent.backward else "forward", sent.kind, (axis,)), nbytes


def predicted(solution: Solution) -> Counter[Kind]:
    """Bytes by phase, collective and axes in one step."""
    found: Counter[Kind] = Counter()
    mesh = solution.problem.router.mesh.sizes
    for group in solution.groups():
        times, mode = len(group.copies), solution.mode(group)
        for transfer in solution.transfers(group):
            for move in transfer.moves:
                for phase, kind in (("forward", move.forward), ("backward", move.backward)):
                    if kind in COLLECTIVES:
                        twice = 2 if transfer.again and phase == "forward" else 1
                        found[phase, kind, move.axes] += twice * times * move.nbytes
        for variable, choice in zip(solution.part(group).variables, group.choices, strict=False):
            if isinstance(variable, OpVariable):
                for key, nbytes in _kernels(variable, choice, mesh):
                    twice = 2 if repeated(mode, variable) and key[0] == "forward" else 1
                    found[key] += twice * times * nbytes
    return found


def executed(counts: Iterable[Count]) -> Counter[Kind]:
    """The most that any rank sent."""
    found: Counter[Kind] = Counter()
    for count in counts:
        for phase, by_kind in (("forward", count.forward), ("backward", count.backward)):
            for (kind, axes), nbytes in by_kind.items():
                found[phase, kind, axes] = max(found[phase, kind, axes], nbytes)
    return found


def compare_traffic(solution: Solution, counts: Iterable[Count]) -> tuple[Sent, ...]:
    wanted, seen = predicted(solution), executed(counts)
    names = solution.problem.router.mesh.names
    keys = sorted(key for key in wanted.keys() | seen.keys() if wanted[key] or seen[key])
    return tuple(
        Sent(phase, kind, tuple(names[a] for a in axes), wanted[phase, kind, axes], seen[phase, kind, axes])
        for phase, kind, axes in sorted(keys, key=lambda k: (k[0] != "forward", k[1], k[2]))
    )
