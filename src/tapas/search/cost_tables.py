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
    """A table of costs over variables that are all different.

    >>> table((4, 7), np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).scope
    (4, 7)
    """
    if len(scope) > 1 and len(set(scope)) != len(scope):
        raise ValueError(f"a variable occurs twice in {scope}: take the diagonal first")
    if array.ndim != len(scope):
        raise ValueError(f"{array.ndim} dims for {len(scope)} variables")
    return Table(tuple(scope), array, next(_uids))


def diagonal_table(scope: Sequence[int], array: np.ndarray) -> Table:
    """A table whose scope may name a variable more than once: then only its diagonal counts.

    >>> both = diagonal_table((4, 4), np.array([[1.0, 2.0], [3.0, 4.0]]))
    >>> both.scope, both.array.tolist()
    ((4,), [1.0, 4.0])
    """
    letters = {variable: position for position, variable in enumerate(dict.fromkeys(scope))}
    if len(letters) == len(scope):
        return Table(tuple(scope), array, next(_uids))
    return table(tuple(letters), np.einsum(array, [letters[v] for v in scope], list(letters.values())))


def evaluate(tables: Sequence[Table], choices: Mapping[int, int]) -> float:
    """What an assignment costs, table by table.

    >>> evaluate([table((0,), np.array([1.0, 2.0])), table((0, 1), np.array([[5.0, 6.0], [7.0, 8.0]]))], {0: 1, 1: 0})
    9.0
    """
    return float(sum(t.array[tuple(choices[v] for v in t.scope)] for t in tables))


def sum_by_scope(tables: Iterable[Table]) -> list[Table]:
    """One table for each set of variables, so that what is joined again and again does not grow in number.

    >>> pair = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> [(t.scope, t.array.tolist()) for t in sum_by_scope([table((0, 1), pair), table((1, 0), pair)])]
    [((0, 1), [[2.0, 5.0], [5.0, 8.0]])]
    """
    sums: dict[tuple[int, ...], Table] = {}
    for t in tables:
        scope = tuple(sorted(t.scope))
        if scope != t.scope:
            t = table(scope, t.array.transpose([t.scope.index(v) for v in scope]))
        before = sums.get(scope)
        sums[scope] = t if before is None else table(scope, before.array + t.array)
    return list(sums.values())


def align_to_scope(t: Table, scope: Sequence[int]) -> np.ndarray:
    """The array of a table with one dim for each variable of `scope` (size 1 where it has none).

    >>> align_to_scope(table((7, 4), np.zeros((3, 2))), (4, 5, 7)).shape
    (2, 1, 3)
    """
    place = {v: i for i, v in enumerate(t.scope)}
    array = t.array.transpose([place[v] for v in scope if v in place])
    return array[tuple(slice(None) if v in place else None for v in scope)]
