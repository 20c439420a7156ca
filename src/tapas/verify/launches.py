"""How many messages and copies a plan says that a step has, on one rank.

A move is one message, whatever it goes over, and copies its tensor into a buffer or out of one unless it can do without
(see copies_of). Weights that are gathered ahead are one message a block, of which one kernel copies the small ones, and
so are their gradients; those of whole weights are packed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import prod

from tapas.hardware.cluster import COLLECTIVES
from tapas.ir.fold import Block, Folded
from tapas.ir.graph import ITEMSIZE, Tensor
from tapas.plan.assignment import Assignment, BlockDecision, gathered_ahead, journeys, saved_weights
from tapas.plan.pieces import PiecedMove, pieced_moves
from tapas.plan.traffic import Kind, kernel_collectives
from tapas.rules.base import RECOMPUTED, Call, gathered_again, repeated, rule_for
from tapas.runtime.buckets import messages
from tapas.runtime.joined import joined
from tapas.sharding.layout import Layout, R, State, local_elements, local_shape, pieces, split_of
from tapas.sharding.route import Hop, walked

Coord = tuple[int, ...]


@dataclass
class Launches:
    messages: Counter[Kind] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)  # by phase


@dataclass(frozen=True)
class _Frame:
    """A tensor along the axes of a step, on one rank."""

    tensor: Tensor
    layout: Layout  # with the axes of the step in a state that splits
    axes: tuple[int, ...]
    mesh: tuple[int, ...]
    coord: Coord

    def lengths(self, dim: int) -> list[list[int]]:
        """For each member what it has of each segment."""
        splitting, tiling = split_of(self.layout, dim)
        sizes, found = [self.mesh[a] for a in splitting], []
        for place in range(prod(self.mesh[a] for a in self.axes)):
            where = dict(zip(self.axes, _unravel(place, [self.mesh[a] for a in self.axes]), strict=True))
            held = pieces(self.tensor.shape[dim], tiling, sizes, [where.get(a, self.coord[a]) for a in splitting])
            found.append([stop - start for start, stop in held])
        return found

    def first(self, dim: int, others: Layout) -> bool:
        """Whether the parts of a dim lie one after the other in memory; `others`: how other dims are laid out."""
        before = local_shape(self.tensor.shape, others, self.mesh, self.coord)[:dim]
        return prod(before) == 1 and len(self.lengths(dim)[0]) == 1

    @property
    def elements(self) -> int:
        """What this rank holds."""
        return prod(local_shape(self.tensor.shape, self.layout, self.mesh, self.coord))

    def mine(self) -> int:
        number = 0
        for axis in self.axes:
            number = number * self.mesh[axis] + self.coord[axis]
        return number


def _unravel(number: int, sizes: Sequence[int]) -> list[int]:
    place = []
    for size in reversed(sizes):
        place.append(number % size)
        number //= size
    return place[::-1]


def copies_of(
    kind: str, old: State, new: State, tensor: Tensor, layout: Layout, axes: tuple[int, ...], mesh: tuple[int, ...],
    coord: Coord, joint: bool = False,
) -> int:  # fmt: skip
    """How often a conversion copies its tensor. `joint`: it goes over all axes at once, not one after the other."""

    def frame(state: State) -> _Frame:
        here = tuple(state if a in axes else s for a, s in enumerate(layout))
        return _Frame(tensor, here, axes, mesh, coord)

    one = joint or len(axes) == 1
    if not tensor.elements:
        return 0
    match kind:
        case "all_reduce":
            return int(frame(old).elements > 0)
        case "all_gather":
            at = frame(old)
            totals = [sum(lengths) for lengths in at.lengths(old.dim)]
            shorter = [length for length in totals if length < totals[0]]
            whole = one and at.first(old.dim, layout) and not any(shorter[1:])
            return int(totals[at.mine()] < max(totals)) + int(not whole)
        case "reduce_scatter":
            at = frame(new)
            even = len({tuple(lengths) for lengths in at.lengths(new.dim)}) == 1
            return int(not (one and even and at.first(new.dim, layout)))
        case "all_to_all":
            before, after = frame(old), frame(new)
            same = old.dim == new.dim
            packed = same or not after.first(new.dim, before.layout)
            unpacked = same or not before.first(old.dim, after.layout)
            return (packed and before.elements > 0) + (unpacked and after.elements > 0)
    return 0


@dataclass(frozen=True)
class _Weight:
    """One that is gathered ahead."""

    tensor: Tensor
    steps: tuple[tuple[Layout, Hop], ...]
    again: bool
    back: bool

    @property
    def gathers(self) -> list[tuple[Layout, Hop]]:
        return [(before, hop) for before, hop in self.steps if hop.forward == "all_gather"]


_Lot = tuple[str, tuple[int, ...], str]  # collective, axes and type


@dataclass(frozen=True)
class _Gone:
    """A tensor that goes a step together with others."""

    tensor: Tensor
    before: Layout
    hop: Hop
    last: bool = True  # of its steps

    def nbytes(self, mesh: tuple[int, ...], coord: Coord, kind: str) -> int:
        """Of the whole that is gathered or dealt out, or of what is summed."""
        layout = self.before if kind == "all_reduce" else self.hop.after(self.before)
        return prod(local_shape(self.tensor.shape, layout, mesh, coord)) * ITEMSIZE[self.tensor.dtype]


class _Counting:
    def __init__(self, folded: Folded, assignment: Assignment, coord: Coord) -> None:
        self.tensors, self.mesh, self.coord, self.pieces = folded.tensors, assignment.mesh, coord, assignment.pieces
        self.found = Launches()

    def block(self, block: Block, decision: BlockDecision, times: int) -> Iterator[tuple[tuple[int, ...], str, int]]:
        """All of some copies that do the same; whole weights, with axes, type and bytes, come back."""
        saved, mode = saved_weights(block, self.tensors), decision.recompute
        stored, unit = set(block.weights), list[_Weight]()
        pieced = pieced_moves(block, self.tensors, decision, self.mesh, self.coord, self.pieces).values()
        cuts = {(move.tensor, move.reader, move.number): move for move in pieced}
        for journey in journeys(block, self.tensors, decision):
            tensor, again = self.tensors[journey.tensor], mode in RECOMPUTED
            route = [*walked(journey.start, journey.route)]
            if journey.tensor in stored:
                stored.remove(journey.tensor)
                if route and _only_sums(route[0][1]):
                    (before, hop), *route = route
                    if journey.back:
                        nbytes = local_elements(tensor.shape, before, self.mesh) * ITEMSIZE[tensor.dtype]
                        yield hop.axes, tensor.dtype, nbytes
                ahead = tuple(takewhile(lambda step: gathered_ahead(step[1]), route))
                if not all(_only_sums(hop) for _, hop in ahead):
                    freed = gathered_again(mode, journey.tensor in block.exports, journey.tensor in saved)
                    unit.append(_Weight(tensor, ahead, freed, journey.back))
                    route = route[len(ahead) :]
            for number, (before, hop) in enumerate(route):
                often = (1 + again) * times, times if journey.back else 0
                if move := cuts.get((journey.tensor, journey.reader, number)):
                    self.in_pieces(move, tensor, *often)
                else:
                    self.step(tensor, before, hop, *often)
        if unit:
            self.unit(unit, times)
        for op, choice in zip(block.ops, decision.operators, strict=True):
            rule = rule_for(Call.of(op, self.tensors))
            for (phase, kind, axes), nbytes in kernel_collectives(rule, choice.choice, self.mesh, self.coord):
                if not nbytes:
                    continue
                twice = 2 if repeated(mode, rule) and phase == "forward" else 1
                self.found.messages[phase, kind, axes] += twice * times
                self.found.copies[phase] += 0 if kind == "ring" else twice * times  # rings send from where tensors lie

    def step(self, tensor: Tensor, before: Layout, hop: Hop, forward: int, backward: int) -> None:
        if not tensor.elements:
            return  # empty messages do not count
        if hop.forward in COLLECTIVES:
            self.found.messages["forward", hop.forward, hop.axes] += forward
            self.found.copies["forward"] += forward * self.copies(tensor, before, hop)
        if hop.backward in COLLECTIVES and backward:
            self.found.messages["backward", hop.backward, hop.axes] += backward
            self.found.copies["backward"] += backward * self.copies(tensor, before, hop, back=True)

    def in_pieces(self, move: PiecedMove, tensor: Tensor, forward: int, backward: int) -> None:
        """Each is a tensor of its own, of which the first dim is whole. A product's results are put together, or the
        gradients of what it reads are."""
        layout = tuple(R if state.sharded and state.dim == 0 else state for state in move.layout)
        for length in move.lengths(tensor.shape, self.mesh, self.coord, self.pieces):
            self.step(tensor._replace(shape=(length, *tensor.shape[1:])), layout, move.hop, forward, backward)
        if move.gathers:
            self.found.copies["forward"] += forward
        elif move.back:
            self.found.copies["backward"] += backward

    def copies(self, tensor: Tensor, before: Layout, hop: Hop, back: bool = False, joint: bool = False) -> int:
        old, new = (hop.new.gradient, hop.old.gradient) if back else (hop.old.value, hop.new.value)
        kind = hop.backward if back else hop.forward
        return copies_of(kind, old, new, tensor, before, hop.axes, self.mesh, self.coord, joint)

    def unit(self, weights: Sequence[_Weight], times: int) -> None:
        """Step by step, those of one kind together."""
        for some in (weights, [weight for weight in weights if weight.again]):
            for number in range(max((len(weight.gathers) for weight in some), default=0)):
                lots: dict[_Lot, list[_Gone]] = defaultdict(list)
                for weight in some:
                    if number < len(weight.gathers) and weight.tensor.elements:
                        before, hop = weight.gathers[number]
                        gone = _Gone(weight.tensor, before, hop, last=number == len(weight.gathers) - 1)
                        lots["all_gather", hop.axes, weight.tensor.dtype].append(gone)
                self.lots(lots, "forward", times)
        trained = [weight for weight in weights if weight.back]
        for number in range(max((len(weight.steps) for weight in trained), default=0)):
            lots = defaultdict(list)
            for weight in trained:
                if number < len(weight.steps) and weight.tensor.elements:
                    before, hop = weight.steps[-1 - number]
                    if hop.backward in ("reduce_scatter", "all_reduce"):
                        lots[hop.backward, hop.axes, weight.tensor.dtype].append(_Gone(weight.tensor, before, hop))
            self.lots(lots, "backward", times)

    def lots(self, lots: Mapping["_Lot", Sequence["_Gone"]], phase: str, times: int) -> None:
        """Messages of several tensors: small ones of equal parts lie in one buffer, see runtime/joined.py."""
        for (kind, axes, _), members in lots.items():
            self.found.messages[phase, kind, axes] += times
            sizes = {
                i: gone.nbytes(self.mesh, self.coord, kind)
                for i, gone in enumerate(members)
                if self.in_parts(gone, kind)
            }
            together = joined(sizes)
            alone = [gone for i, gone in enumerate(members) if i not in together]
            if kind != "all_reduce":  # sums are made in place
                back = phase == "backward"
                self.found.copies[phase] += times * sum(
                    self.copies(g.tensor, g.before, g.hop, back, joint=True) for g in alone
                )
            if together:  # what was gathered is copied out of it, too
                self.found.copies[phase] += times * (2 if kind == "all_gather" else 1)

    def in_parts(self, gone: "_Gone", kind: str) -> bool:
        """Whether every member has an equal part, one after the other in memory."""
        if kind == "all_reduce":
            return True
        state = gone.hop.old.value if kind == "all_gather" else gone.hop.old.gradient
        here = tuple(state if a in gone.hop.axes else s for a, s in enumerate(gone.before))
        at = _Frame(gone.tensor, here, gone.hop.axes, self.mesh, self.coord)
        even = len({tuple(lengths) for lengths in at.lengths(state.dim)}) == 1
        return gone.last and even and at.first(state.dim, gone.before)


def _only_sums(hop: Hop) -> bool:
    return hop.old.value == hop.new.value and hop.backward == "all_reduce"


def predicted_launches(folded: Folded, assignment: Assignment, coord: Coord) -> Launches:
    counting = _Counting(folded, assignment, coord)
    whole: dict[tuple[tuple[int, ...], str], list[int]] = defaultdict(list)
    alike = Counter(zip((copy.block for copy in folded.copies), assignment.copies, strict=True))
    for (number, decided), times in alike.items():
        for axes, dtype, nbytes in counting.block(folded.blocks[number], assignment.decisions[decided], times):
            whole[axes, dtype] += [nbytes] * times
    sizes = [(key, nbytes) for key, every in whole.items() for nbytes in every]
    for (axes, _), members in messages(sizes, on_cpus=True):
        counting.found.messages["backward", "all_reduce", axes] += any(sizes[i][1] for i in members)
    counting.found.copies["backward"] += len(sizes)
    return counting.found
