"""What the choices of a block need of a device's memory, operator by operator.

Every amount belongs to a choice, or to the choices at both ends of an edge: so amounts add up in tables, just like
the cost.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from tapas.problem import (
    BLOCK,
    KEEP,
    SELECTIVE,
    BlockProblem,
    ModeVariable,
    OpVariable,
    TensorVariable,
    WeightVariable,
)
from tapas.search import Table, table

KINDS: tuple[str, ...] = ("weights", "optimizer", "gradients", "activations", "gathered", "working", "constants")
When = Literal["before", "after", "idle"] | int  # a moment as a copy sees it: see BlockMemory.tables
ALWAYS = -1  # the place of what is there at every moment


@dataclass(frozen=True)
class Amount:
    """Bytes by the choices of some variables of a block."""

    kind: str
    scope: tuple[int, ...]
    nbytes: np.ndarray
    place: int  # of the operator that it belongs to, among those of the block
    modes: tuple[str, ...] = ()  # it is kept for the backward pass in these modes only


class BlockMemory:
    """All amounts of a block."""

    def __init__(self, part: BlockProblem, state_bytes: Mapping[int, int], trained: bool) -> None:
        self.part, self.state_bytes, self.trained = part, state_bytes, trained
        ops = [v for v, variable in enumerate(part.variables) if isinstance(variable, OpVariable)]
        self.place = {v: i for i, v in enumerate(ops)}
        self.places = max(len(ops), 1)
        self.weights = {v for v, variable in enumerate(part.variables) if isinstance(variable, WeightVariable)}
        self.amounts = (*self._weights(), *self._operators(), *self._edges(), *self._outputs(), *self._ports())

    @cached_property
    def first_reader(self) -> dict[int, int]:
        """Where the backward pass is done with a variable: at the first operator that reads it."""
        found: dict[int, int] = {}
        for edge in reversed(self.part.edges):
            here = self.place.get(edge.target, found.get(edge.target))
            if here is not None:
                found[edge.source] = min(here, found.get(edge.source, here))
        return found

    def _weights(self) -> Iterator[Amount]:
        for v in self.weights:
            variable = self.part.variables[v]
            assert isinstance(variable, WeightVariable)
            held = variable.space.elements[variable.stored]
            nbytes = held * float(variable.space.itemsize)
            yield Amount("weights", (v,), nbytes, ALWAYS)
            if variable.tensor.differentiable:
                yield Amount("optimizer", (v,), held * float(self.state_bytes[variable.space.itemsize]), ALWAYS)
                yield Amount("gradients", (v,), nbytes, self.first_reader.get(v, 0))

    def _operators(self) -> Iterator[Amount]:
        for v, place in self.place.items():
            variable = self.part.variables[v]
            assert isinstance(variable, OpVariable)
            yield Amount("working", (v,), variable.table.working_bytes, place)
            if self.trained:
                yield Amount("activations", (v,), variable.table.saved_bytes, place, (KEEP,))
                if variable.rule.flops and self.part.mode is not None:
                    yield Amount("activations", (v,), variable.table.result_bytes, place, (SELECTIVE,))

    def _edges(self) -> Iterator[Amount]:
        for edge in self.part.edges:
            place = self.place.get(edge.target, self.first_reader.get(edge.target))
            if place is None:
                continue
            before = edge.space.nbytes[edge.source_layouts][:, None]
            after = edge.space.nbytes[edge.target_layouts][None, :]
            moved = edge.source_layouts[:, None] != edge.target_layouts[None, :]
            wire = np.where(moved, before + after, 0.0)  # what is sent and what is received
            yield Amount("working", (edge.source, edge.target), wire, place)
            if self.trained and edge.source in self.weights and edge.space.differentiable:
                copied = np.where(moved & (after > before), after, 0.0)
                yield Amount("gathered", (edge.source, edge.target), copied, place, (KEEP,))

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
        for i, copies in enumerate(self.part.port_copies):
            space = next((e.space for e in self.part.edges if e.source == own + i), None)
            if space is not None and not space.packed:
                yield Amount("activations", (own + i,), space.nbytes / copies, 0, (SELECTIVE, BLOCK))

    # -- as tables ---------------------------------------------------------------------------------

    def tables(self, when: When, rows: Sequence[np.ndarray | None], always: bool = True) -> Iterator[Table]:
        """Of a copy that has been through the forward pass only (before the moment), of one that is done with the
        backward pass (after), of one that has neither kept nor made anything (idle), or of one whose operator at
        this place is at its turn."""
        for amount in self.amounts:
            if amount.place == ALWAYS and not always:
                continue
            scope, nbytes = amount.scope, amount.nbytes[np.ix_(*(_all(rows[v], n) for v, n in self._sizes(amount)))]
            if not nbytes.any() or not self._there(amount, when):
                continue
            if when == "before" and amount.modes and self.part.mode is not None:
                modes = self._modes(rows)
                if set(modes) != {KEEP}:
                    scope = (self.part.mode, *scope)
                    nbytes = np.array([nbytes * (mode in amount.modes) for mode in modes])
                elif KEEP not in amount.modes:
                    continue
            yield table(scope, nbytes)

    def _sizes(self, amount: Amount) -> list[tuple[int, int]]:
        return list(zip(amount.scope, amount.nbytes.shape, strict=True))

    def _modes(self, rows: Sequence[np.ndarray | None]) -> list[str]:
        assert self.part.mode is not None
        variable, chosen = self.part.variables[self.part.mode], rows[self.part.mode]
        assert isinstance(variable, ModeVariable)
        return [variable.modes[i] for i in _all(chosen, len(variable.modes))]

    def _there(self, amount: Amount, when: When) -> bool:
        if amount.place == ALWAYS or when == "idle":
            return amount.place == ALWAYS
        match amount.kind:
            case "gradients":
                return when == "after" or (when != "before" and amount.place > when)
            case "working":
                return when == amount.place
            case _:
                if when == "after":
                    return False
                # at its own turn a copy has all of its activations, kept or not
                return when == "before" or (amount.place <= when and KEEP in amount.modes)

    # -- as numbers --------------------------------------------------------------------------------

    def at(self, choices: Sequence[int]) -> "CopyMemory":
        """For given choices of the own variables and the ports."""
        mode = self.part.mode_of(choices)
        always, kept = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
        turns = {kind: np.zeros(self.places) for kind in KINDS}
        gradients = 0.0
        for amount in self.amounts:
            nbytes = float(amount.nbytes[tuple(choices[v] for v in amount.scope)])
            if amount.place == ALWAYS:
                always[amount.kind] += nbytes
            elif amount.kind == "gradients":
                gradients += nbytes
                turns["gradients"][: amount.place] += nbytes
            elif amount.kind == "working":
                turns["working"][amount.place] += nbytes
            else:
                if mode in amount.modes:
                    kept[amount.kind] += nbytes
                if KEEP in amount.modes:
                    turns[amount.kind][amount.place :] += nbytes
        return CopyMemory(always, kept, gradients, turns)


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


def _all(rows: np.ndarray | None, size: int) -> np.ndarray:
    return np.arange(size) if rows is None else rows
