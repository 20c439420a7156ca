"""What a plan sends in a step: bytes by phase, collective and axes. Verification counts that it is true."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod

from tapas.hardware.cluster import COLLECTIVES
from tapas.ir.fold import Folded
from tapas.ir.graph import ITEMSIZE
from tapas.plan.assignment import Assignment, gathered_ahead, journeys, saved_weights
from tapas.rules.base import BORDERED, RECOMPUTED, Call, Rule, buffered, gathered_again, repeated, rule_for
from tapas.sharding.layout import extent, local_elements, parse_tiling
from tapas.sharding.route import step_nbytes, walked

Kind = tuple[str, str, tuple[int, ...]]  # phase, collective, axes


def kernel_collectives(
    rule: Rule, choice: Sequence[str], mesh: Sequence[int], coord: Sequence[int] | None = None
) -> Iterable[tuple[Kind, int]]:
    """What the sharded implementation of an operator sends, message by message: on the rank that sends most, or where
    ranks differ by where they are, on the one at `coord`."""
    chosen = [text.partition("|") for text in choice]
    factors = {factor.name: factor for factor in rule.factors}

    def size(name: str) -> int:
        factor = factors[name.removesuffix(BORDERED)]
        if factor.kernel is not None and factor.kernel.capacity and name.endswith(BORDERED):
            (axis,) = (a for a, (n, _, _) in enumerate(chosen) if n == factor.name)
            return int(buffered(factor.kernel.capacity, size(factor.joint), mesh[axis]))
        splitting = [a for a, (n, _, _) in enumerate(chosen) if n in factors and factor.name in (n, factors[n].joint)]
        tiling = parse_tiling(chosen[splitting[0]][2]) if splitting else ()
        units = extent(factor.size, tiling, [mesh[a] for a in splitting])
        return factor.bordered(units, bool(splitting)) if name.endswith(BORDERED) else units

    for axis, (name, _, _) in enumerate(chosen):
        kernel = factors[name].kernel if name in factors else None
        for sent in kernel.collectives if kernel is not None else ():
            points, phase = prod(map(size, sent.factors)), "backward" if sent.backward else "forward"
            for along in sent.axes(axis, mesh):
                nbytes = sent.point_nbytes(mesh[along], coord[along] if coord else None) * points
                yield from [((phase, sent.kind, (along,)), nbytes)] * sent.messages(mesh[along])


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
        for op, chosen in zip(block.ops, decision.operators, strict=True):
            rule = rule_for(Call.of(op, tensors))
            for key, nbytes in kernel_collectives(rule, chosen.choice, mesh):
                twice = 2 if repeated(decision.recompute, rule) and key[0] == "forward" else 1
                nbytes_by_kind[key] += twice * times * nbytes
    return nbytes_by_kind
