"""What a plan says will be sent, and what was."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from tapas.ir.fold import Folded
from tapas.ir.graph import ITEMSIZE
from tapas.plan.assignment import Assignment, OperatorDecision, gathered_ahead, journeys, saved_weights
from tapas.rules.base import RECOMPUTED, Call, Rule, gathered_again, repeated, rule_for
from tapas.runtime.collectives import Count
from tapas.sharding.layout import extent, local_elements, parse_tiling
from tapas.sharding.route import COLLECTIVES, step_nbytes, walked

Kind = tuple[str, str, tuple[int, ...]]  # phase, collective, axes


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


def kernel_collectives(rule: Rule, decided: OperatorDecision, mesh: Sequence[int]) -> Iterable[tuple[Kind, int]]:
    """What the sharded implementation of an operator sends, message by message."""
    chosen = [text.partition("|") for text in decided.choice]
    factors = {factor.name: factor for factor in rule.factors}
    for axis, (name, _, _) in enumerate(chosen):
        kernel = factors[name].kernel if name in factors else None
        for sent in kernel.collectives if kernel is not None else ():
            nbytes = sent.itemsize
            for other in sent.factors:
                splitting = [a for a, (n, _, _) in enumerate(chosen) if n in factors and other in (n, factors[n].joint)]
                tiling = parse_tiling(chosen[splitting[0]][2]) if splitting else ()
                nbytes *= extent(factors[other].size, tiling, [mesh[a] for a in splitting])
            message = ("backward" if sent.backward else "forward", sent.kind, (axis,)), nbytes
            yield from [message] * sent.messages(mesh[axis])


def predicted(folded: Folded, assignment: Assignment) -> Counter[Kind]:
    """Bytes by phase, collective and axes in one step."""
    nbytes_by_kind: Counter[Kind] = Counter()
    tensors, mesh = folded.tensors, assignment.mesh
    alike = Counter(zip((copy.block for copy in folded.copies), assignment.copies, strict=True))
    for (number, decided), times in alike.items():
        block, decision = folded.blocks[number], assignment.decisions[decided]
        stored, saved, mode = set(block.weights), saved_weights(block, tensors), decision.recompute
        for journey in journeys(block, tensors, decision):
            tensor, again = tensors[journey.tensor], mode in RECOMPUTED
            if ahead := journey.tensor in stored:
                stored.remove(journey.tensor)
                again = gathered_again(mode, journey.tensor in block.exports, journey.tensor in saved)
            for before, hop in walked(journey.start, journey.route):
                if ahead and not gathered_ahead(hop):
                    ahead, again = False, mode in RECOMPUTED
                old, new = (local_elements(tensor.shape, layout, mesh) for layout in (before, hop.after(before)))
                devices = prod(mesh[axis] for axis in hop.axes)
                nbytes = step_nbytes({hop.forward, hop.backward}, old, new, devices) * ITEMSIZE[tensor.dtype]
                if hop.forward in COLLECTIVES:
                    nbytes_by_kind["forward", hop.forward, hop.axes] += (1 + again) * times * nbytes
                if hop.backward in COLLECTIVES and journey.back:
                    nbytes_by_kind["backward", hop.backward, hop.axes] += times * nbytes
        for op, choice in zip(block.ops, decision.operators, strict=True):
            rule = rule_for(Call.of(op, tensors))
            for key, nbytes in kernel_collectives(rule, choice, mesh):
                twice = 2 if repeated(decision.recompute, rule) and key[0] == "forward" else 1
                nbytes_by_kind[key] += twice * times * nbytes
    return nbytes_by_kind


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


def busiest(names: Sequence[str], counts: Sequence[Count]) -> dict[str, float]:
    """By axis over which rows are sent to where they are worked on: how many more than its share the busiest rank got.
    What is sent is counted where rows are at home, so that this does not show there."""
    axes = {axes for count in counts for phase, axes in count.visits if phase == "forward"}
    found: dict[str, float] = {}
    for some in sorted(axes):
        came = [count.visits["forward", some] for count in counts]
        if total := sum(came):
            found[",".join(names[axis] for axis in some)] = max(came) * len(came) / total
    return found
