"""What the choices of a block need of a device's memory, operator by operator.

Every amount belongs to a choice, or to the choices at both ends of an edge: so amounts add up in tables, just like
the cost.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tapas.cost.memory import (
    ALWAYS,
    CopiesAt,
    Lifetime,
    gradient_lifetime,
    saved_lifetime,
    shared_gradient_lifetime,
    working_lifetime,
)
from tapas.problem.problem import BlockProblem, Edge, ModeVariable, OpVariable, TensorVariable, WeightVariable
from tapas.rules.base import BLOCK, GATHER, KEEP, MODES, SELECTIVE, gathered_again
from tapas.search import Table, table

WHOLE = (KEEP, GATHER)  # all activations are kept
KINDS: tuple[str, ...] = ("weights", "optimizer", "gradients", "activations", "gathered", "working", "constants")


@dataclass(frozen=True)
class Amount:
    """Bytes by the choices of some variables of a block."""

    kind: str
    scope: tuple[int, ...]
    nbytes: np.ndarray
    lifetime: Lifetime


class BlockMemory:
    """All amounts of a block."""

    def __init__(
        self, part: BlockProblem, state_bytes: Mapping[int, int], trained: bool, accumulated: bool = False
    ) -> None:
        """`accumulated`: gradients of micro batches before this one are there all the time."""
        self.part, self.state_bytes, self.trained, self.accumulated = part, state_bytes, trained, accumulated
        ops = [v for v, variable in enumerate(part.variables) if isinstance(variable, OpVariable)]
        self.place = {v: i for i, v in enumerate(ops)}
        self.places = max(len(ops), 1)
        self.weights = {v for v, variable in enumerate(part.variables) if isinstance(variable, WeightVariable)}
        self.amounts = (
            *self._weights(), *self._operators(), *self._edges(), *self._gathered(), *self._moved(), *self._outputs(),
            *self._ports(),
        )  # fmt: skip

    @cached_property
    def first_reader(self) -> dict[int, int]:
        """Where the backward pass is done with a variable: at the first operator that reads it."""
        found: dict[int, int] = {}
        for edge in reversed(self.part.edges):
            here = self.place.get(edge.target, found.get(edge.target))
            if here is not None:
                found[edge.source] = min(here, found.get(edge.source, here))
        return found

    def _saved(self, place: int, *modes: str) -> Lifetime:
        # at its own turn a copy has all of its activations, kept or not
        return saved_lifetime(place, self.places, modes, computed=KEEP in modes)

    def _weights(self) -> Iterator[Amount]:
        for v in self.weights:
            variable = self.part.variables[v]
            assert isinstance(variable, WeightVariable)
            held = variable.space.elements[variable.stored]
            nbytes = held * float(variable.space.itemsize)
            yield Amount("weights", (v,), nbytes, ALWAYS)
            if variable.tensor.priced:
                yield Amount("optimizer", (v,), held * float(self.state_bytes[variable.space.itemsize]), ALWAYS)
                made = self.first_reader.get(v)
                # of one that other blocks read, the first of these leaves its part long before the last one
                lifetime = shared_gradient_lifetime(MODES) if made is None else gradient_lifetime(made)
                yield Amount("gradients", (v,), nbytes, ALWAYS if self.accumulated else lifetime)
                if self.accumulated:  # to be added to what is there
                    yield Amount("working", (v,), nbytes, working_lifetime(made or 0))

    def _operators(self) -> Iterator[Amount]:
        for v, place in self.place.items():
            variable = self.part.variables[v]
            assert isinstance(variable, OpVariable)
            yield Amount("working", (v,), variable.table.working_bytes, working_lifetime(place))
            if variable.rule.resident is not None:
                yield Amount("constants", (v,), variable.table.resident_bytes, ALWAYS)
            if self.trained:
                yield Amount("activations", (v,), variable.table.saved_bytes, self._saved(place, *WHOLE))
                if self._leaves_what_it_keeps(variable):  # its readers have it, whatever this block computes again
                    yield Amount("activations", (v,), variable.table.saved_bytes, self._saved(place, SELECTIVE, BLOCK))
                if variable.rule.products and self.part.mode is not None:
                    yield Amount("activations", (v,), variable.table.result_bytes, self._saved(place, SELECTIVE))

    def _leaves_what_it_keeps(self, variable: OpVariable) -> bool:
        """Whether other copies read what an operator keeps of its results: then it counts for them, too."""
        kept = self.part.mode is not None and variable.saves_results
        return kept and not set(self.part.block.exports).isdisjoint(variable.op.results)

    def _edges(self) -> Iterator[Amount]:
        for edge in self.part.edges:
            place = self.place.get(edge.target, self.first_reader.get(edge.target))
            if place is None:
                continue
            before = edge.space.nbytes[edge.source_layouts][:, None]
            after = edge.space.nbytes[edge.target_layouts][None, :]
            moved = edge.source_layouts[:, None] != edge.target_layouts[None, :]
            wire = np.where(moved, before + after, 0.0)  # what is sent and what is received
            if edge.source in self.weights:  # those that are gathered are on their way at other times
                wire = np.where(before < after, 0.0, wire)
            yield Amount("working", (edge.source, edge.target), wire, working_lifetime(place))

    @cached_property
    def keepers(self) -> dict[int, list[Edge]]:
        """For every variable and port the edges to operators that keep what they read there, in order."""
        found: dict[int, list[Edge]] = defaultdict(list)
        for edge in sorted(self.part.edges, key=lambda e: (self.place.get(e.target, -1), e.operand)):
            variable = self.part.variables[edge.target]
            if isinstance(variable, OpVariable) and variable.saves[edge.operand]:
                found[edge.source].append(edge)
        return found

    def _gathered(self) -> Iterator[Amount]:
        """Weights as a block takes them: gathered when it begins, then kept, or freed and gathered again; while it is
        at its turn the next one's come already, which are taken to be as large."""
        for edge in self.part.edges:
            if edge.source not in self.weights:
                continue
            exported, saved = self.part.gathered[edge.source]
            view, _, after = _bytes(edge)
            scope, nbytes = (edge.source, edge.target), np.where(view, 0.0, after)
            if not self.trained:
                yield Amount("gathered", scope, 2 * nbytes, Lifetime(turns=range(self.places)))
                continue
            again = tuple(mode for mode in MODES if gathered_again(mode, exported, saved))
            place = self.place.get(edge.target, self.first_reader.get(edge.target, 0))
            variable = self.part.variables[edge.source]
            assert isinstance(variable, WeightVariable)
            if (
                variable.tensor.priced
            ):  # its gradient leaves when its block is done, and so has that of the one after it
                yield Amount("working", scope, nbytes, Lifetime(turns=range(self.places)))
                yield Amount("working", scope, nbytes, Lifetime(turns=range(place + 1)))
            if again:
                yield Amount("gathered", scope, 2 * nbytes, Lifetime(turns=range(self.places), turn_modes=again))
            if saved or exported:
                kept = tuple(mode for mode in MODES if mode not in again)
                yield Amount("gathered", scope, nbytes, Lifetime(False, kept, range(place, self.places), kept))

    def _moved(self) -> Iterator[Amount]:
        """What operators keep of tensors that came to them in another layout. The first of a tensor's keepers counts
        it as it came there (see calls.py); that is all there is unless it was moved."""
        if not self.trained:
            return
        for source, edges in self.keepers.items():
            for number, edge in enumerate(edges):
                view, before, after = _bytes(edge)
                if source in self.weights:
                    continue
                if edge.space.packed:
                    kind, nbytes = "gathered", np.where(view, 0.0, after)
                elif number or self._keeps_result(source):
                    kind, nbytes = "activations", np.where(view, 0.0, after)
                else:
                    # a part that is no tensor of its own keeps the whole; other keepers do so anyway. Copies of the
                    # block that read the same tensor share that, but not what each of them moved
                    copies, others = self._copies(source), before if len(edges) > 1 else 0.0
                    kind = "activations"
                    nbytes = np.where(view, (before - after) / copies, after * (1 - 1 / copies) + others / copies)
                yield Amount(kind, (source, edge.target), nbytes, self._saved(self.place[edge.target], *WHOLE))
        for edge in self.part.edges:  # in the layout in which several operators find it, maybe of other blocks
            kept = edge.target in self.keepers and edge.source not in self.weights
            if edge.target not in self.place and kept and self._keeps_result(edge.source):
                view, _, after = _bytes(edge)
                nbytes, place = np.where(view, 0.0, after), self.first_reader.get(edge.target, 0)
                yield Amount("activations", (edge.source, edge.target), nbytes, self._saved(place, *WHOLE))

    def _copies(self, source: int) -> int:
        """How many copies of the block read the same tensor."""
        own = len(self.part.variables)
        return self.part.port_copies[source - own] if source >= own else 1

    def _keeps_result(self, source: int) -> bool:
        """Whether the operator that made a tensor keeps it, too."""
        if source >= len(self.part.variables):
            return source - len(self.part.variables) in self.part.kept_ports
        variable = self.part.variables[source]
        if isinstance(variable, TensorVariable):
            made = (edge.source for edge in self.part.edges if edge.target == source)
            return any(self._keeps_result(v) for v in made)
        return isinstance(variable, OpVariable) and variable.saves_results

    def _outputs(self) -> Iterator[Amount]:
        """Whoever called the model holds what it returned."""
        for e, v in self.part.outputs.items():
            variable = self.part.variables[v]
            assert isinstance(variable, TensorVariable)
            if variable.tensor.shape and self.part.block.exports[e] not in self.part.saved:
                yield Amount("activations", (v,), variable.space.nbytes[variable.allowed], ALWAYS)

    def _ports(self) -> Iterator[Amount]:
        """What a block reads is kept if it is to be computed again."""
        if self.part.mode is None:
            return
        own = len(self.part.variables)
        for i, (space, copies) in enumerate(zip(self.part.ports, self.part.port_copies, strict=True)):
            if not space.packed and i not in self.part.kept_ports:
                yield Amount("activations", (own + i,), space.nbytes / copies, self._saved(0, SELECTIVE, BLOCK))

    # -- as tables ---------------------------------------------------------------------------------

    def tables(self, copies: CopiesAt, rows: Sequence[np.ndarray | None], always: bool = True) -> Iterator[Table]:
        """The bytes of all copies at a moment, by the choices that are left; without what is always there, if so
        wanted."""
        modes = self._modes(rows)
        for amount in self.amounts:
            times = amount.lifetime.times_by_mode(copies, modes)
            if not any(times) or (amount.lifetime.always and not always):
                continue
            nbytes = amount.nbytes
            if any(rows[v] is not None for v in amount.scope):
                nbytes = nbytes[np.ix_(*(_all(rows[v], n) for v, n in zip(amount.scope, nbytes.shape, strict=True)))]
            if not nbytes.any():
                continue
            if self.part.mode is None or times.count(times[0]) == len(times):
                yield table(amount.scope, nbytes * times[0])
            else:
                yield table((self.part.mode, *amount.scope), np.multiply.outer(np.array(times, float), nbytes))

    def _modes(self, rows: Sequence[np.ndarray | None]) -> Sequence[str]:
        if self.part.mode is None:
            return (KEEP,)
        variable, chosen = self.part.variables[self.part.mode], rows[self.part.mode]
        assert isinstance(variable, ModeVariable)
        return [variable.modes[i] for i in _all(chosen, len(variable.modes))]

    # -- as numbers --------------------------------------------------------------------------------

    @cached_property
    def _numbers(self) -> "_Numbers":
        return _Numbers.of(self.amounts)

    def at(self, choices: Sequence[int]) -> "CopyMemory":
        """For given choices of the own variables and the ports."""
        numbers, mode = self._numbers, self.part.mode_of(choices)
        nbytes = numbers.at(choices)

        nbytes_at_turn = nbytes * numbers.turned[mode]

        def total(counted: np.ndarray) -> dict[str, float]:
            return dict(zip(KINDS, np.bincount(numbers.kind, nbytes * counted, len(KINDS)).tolist(), strict=True))

        turns: dict[str, np.ndarray] = {kind: np.zeros(self.places) for kind in KINDS}
        for kind, mine in numbers.turning.items():
            here = nbytes_at_turn[mine]
            come = np.bincount(numbers.start[mine], here, self.places + 1)
            turns[kind] = np.cumsum(come - np.bincount(numbers.stop[mine], here, self.places + 1))[:-1]
        return CopyMemory(total(numbers.always), total(numbers.kept[mode]), float(nbytes @ numbers.after), turns)


@dataclass(frozen=True)
class _Numbers:
    """All amounts of a block in one array, to be looked up at once."""

    nbytes: np.ndarray
    offset: np.ndarray  # of each amount
    variables: np.ndarray  # [amount, dim]
    strides: np.ndarray  # [amount, dim]; 0 where it has fewer dims
    kind: np.ndarray
    start: np.ndarray  # the first of its copy's turns at which it is there
    stop: np.ndarray
    always: np.ndarray  # whether it is there at every moment
    after: np.ndarray  # whether it is there once its copy is done
    kept: dict[str, np.ndarray]  # by mode, whether it is there from the forward to the backward pass
    turned: dict[str, np.ndarray]  # by mode, whether it is there at the turn of operators
    turning: dict[str, np.ndarray]  # by kind, the amounts that are there at the turn of some operator

    @staticmethod
    def of(amounts: Sequence[Amount]) -> "_Numbers":
        arrays = [np.ascontiguousarray(amount.nbytes, float) for amount in amounts]
        most = max((a.ndim for a in arrays), default=0)
        lives = [amount.lifetime for amount in amounts]
        turning = defaultdict[str, list[int]](list)
        for i, amount in enumerate(amounts):
            if amount.lifetime.turns:
                turning[amount.kind].append(i)
        return _Numbers(
            np.concatenate([a.ravel() for a in arrays]) if arrays else np.zeros(0),
            np.cumsum([0, *(a.size for a in arrays)])[:-1],
            np.array([amount.scope + (0,) * (most - len(amount.scope)) for amount in amounts], int).reshape(-1, most),
            np.array([[s // 8 for s in a.strides] + [0] * (most - a.ndim) for a in arrays], int).reshape(-1, most),
            np.array([KINDS.index(amount.kind) for amount in amounts], int),
            np.array([life.turns.start for life in lives], int),
            np.array([life.turns.stop for life in lives], int),
            np.array([life.always for life in lives], bool),
            np.array([life.after for life in lives], float),
            {mode: np.array([mode in life.modes for life in lives], bool) for mode in MODES},
            {mode: np.array([life.turns_in(mode) for life in lives], bool) for mode in MODES},
            {kind: np.array(mine) for kind, mine in turning.items()},
        )

    def at(self, choices: Sequence[int]) -> np.ndarray:
        return self.nbytes[self.offset + (np.array(choices)[self.variables] * self.strides).sum(1)]


@dataclass(frozen=True)
class CopyMemory:
    """The bytes of a copy by kind."""

    always: dict[str, float]
    kept: dict[str, float]  # from its forward to its backward pass, besides
    gradients: float  # after its backward pass
    turns: dict[str, np.ndarray]  # at the turn of each of its operators, besides what is always there

    @cached_property
    def worst(self) -> int:
        """Where it needs most at its turn."""
        return int(np.argmax(sum(self.turns.values())))

    @cached_property
    def at_worst(self) -> dict[str, float]:
        return {kind: float(turn[self.worst]) for kind, turn in self.turns.items()}

    @cached_property
    def most(self) -> float:
        return sum(self.at_worst.values())


def _bytes(edge: Edge) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a tensor at the end of an edge: whether it is still in the same memory, and its bytes before and after."""
    before, after = edge.source_layouts[:, None], edge.target_layouts[None, :]
    return edge.space.views[before, after], edge.space.nbytes[before], edge.space.nbytes[after]


def _all(rows: np.ndarray | None, size: int) -> np.ndarray:
    return np.arange(size) if rows is None else rows
