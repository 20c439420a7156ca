"""What a rule could have offered too: every other split along one axis of two, tried out."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from tapas.rules.choices import Choice, Option
from tapas.sharding.layout import B, P, S, State
from tests.oracle.case import Case
from tests.oracle.dealing import deal, ranks
from tests.oracle.harness import Built, build, call_function, offered, same, simulate
from tests.oracle.threads import Coord


def forgotten(case: Case) -> set[str]:
    """Splits along one axis of two that are right but not offered, such as `S(0), B -> P`."""
    built, mesh = build(case), (2,)
    known = {_split_text(o.operands, o.results) for o in offered(built, mesh)}
    found = set()
    for operands in itertools.product(*(_places(t.shape, B) for t in built.call.operands)):
        for results in _right_values(built, operands, mesh):
            text = _split_text(operands, results)
            if text in known or not any(s.sharded for s in (*operands, *results)):
                continue
            if _works(lambda o=operands, r=results: simulate(built, _choice(o, r), mesh)):
                found.add(text)
    return found


def _right_values(built: Built, operands: tuple[State, ...], mesh: tuple[int, ...]) -> Iterator[tuple[State, ...]]:
    """The states of the results under which the values are right. Gradients come later: with shapes that do
    not fit, backward passes have been seen to crash."""
    places = [_places(t.shape, P) for t in built.call.results]
    if built.rule.local:  # the arguments depend on the results' layouts
        for results in itertools.product(*places):
            if _works(lambda r=results: simulate(built, _choice(operands, r), mesh, backward=False)):
                yield results
        return
    local: dict[Coord, list[torch.Tensor]] = {}
    dealt = [deal(t.detach(), (s.value,), mesh) for t, s in zip(built.tensors, operands, strict=True)]

    def run(coord: Coord) -> None:
        local[coord] = call_function(built.call.target, built.call.args, built.call.kwargs, [t[coord] for t in dealt])

    def right(i: int, state: State) -> None:
        shares = {coord: results[i] for coord, results in local.items()}
        same("", shares, (state,), mesh, built.results[i], built.tolerance)

    if all(_works(lambda c=coord: run(c)) for coord in ranks(mesh)):
        fitting = [[s for s in states if _works(lambda i=i, s=s: right(i, s))] for i, states in enumerate(places)]
        yield from itertools.product(*fitting)


def _works(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except Exception:  # any failure means that this split does not work
        return False
    return True


def _choice(operands: tuple[State, ...], results: tuple[State, ...]) -> Choice:
    return Choice((Option("?", operands, results),))


def _places(shape: Sequence[int], otherwise: State) -> list[State]:
    return [otherwise, *(S(d) for d, size in enumerate(shape) if size % 2 == 0 and size)]


def _split_text(operands: Sequence[State], results: Sequence[State]) -> str:
    def text(states: Sequence[State]) -> str:
        return ", ".join("B" if s.kind == "R" else f"S({s.dim})" if s.sharded else s.kind for s in states)

    return f"{text(operands)} -> {text(results)}"
