"""Min-plus tensor networks: variables with finitely many choices, tables of costs over a few of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

_uids = count()


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Costs over the choices of the variables in `scope`, one array dim each.

    `uid` identifies the array, not its place: two tables with the same uid hold the same numbers over
    different variables, which is how repeated blocks are recognised when a network is contracted.
    """

    scope: tuple[int, ...]
    array: np.ndarray
    uid: int

    def on(self, scope: tuple[int, ...]) -> "Table":
        """The same numbers over other variables."""
        return Table(scope, self.array, self.uid)


def table(scope: Sequence[int], array: np.ndarray) -> Table:
    if len(scope) > 1 and len(set(scope)) != len(scope):
        raise ValueError(f"a variable occurs twice in {scope}: take the diagonal first")
    if array.ndim != len(scope):
        raise ValueError(f"{array.ndim} dims for {len(scope)} variables")
    return Table(tuple(scope), array, next(_uids))


def diagonal_table(scope: Sequence[int], array: np.ndarray) -> Table:
    """A table whose scope may name a variable more than once: then only its diagonal counts."""
    letters = {variable: position for position, variable in enumerate(dict.fromkeys(scope))}
    if len(letters) == len(scope):
        return Table(tuple(scope), array, next(_uids))
    return table(tuple(letters), np.einsum(array, [letters[v] for v in scope], list(letters.values())))


def evaluate(tables: Sequence[Table], choices: Mapping[int, int]) -> float:
    """What an assignment costs, table by table."""
    return float(sum(t.array[tuple(choices[v] for v in t.scope)] for t in tables))


def sum_by_scope(tables: Iterable[Table]) -> list[Table]:
    """One table for each set of variables, so that what is joined again and again does not grow in number."""
    found: dict[tuple[int, ...], Table] = {}
    for t in tables:
        scope = tuple(sorted(t.scope))
        if scope != t.scope:
            t = table(scope, t.array.transpose([t.scope.index(v) for v in scope]))
        known = found.get(scope)
        found[scope] = t if known is None else table(scope, known.array + t.array)
    return list(found.values())
