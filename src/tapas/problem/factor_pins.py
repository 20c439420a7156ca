"""Restrictions by what operators are split by: factors such as `e`, and the roles `batch` and `sequence`."""

import numpy as np

from tapas.errors import PlanError, nearest
from tapas.ir.patterns import matches
from tapas.problem.pins import OTHERS, NamedVariable, named_variables, restrict, speaking, unmatched
from tapas.problem.problem import OpVariable, Problem, Rows
from tapas.rules.choices import Option

ANY = "*"  # on an axis: whatever is best there


def words(site: NamedVariable, option: Option) -> set[str]:
    """What an option goes by: its factor, and what that is to the user."""
    return {option.name, site.role(option)} - {""}


def _all_words(site: NamedVariable) -> set[str]:
    if not isinstance(site.variable, OpVariable):
        return set()
    return set[str]().union(*(words(site, option) for option in site.variable.table.options))


def _words_there(site: NamedVariable) -> set[str]:
    """Without those of positions that do not divide into even shares on any axis of this mesh."""
    if not isinstance(site.variable, OpVariable):
        return set()
    table = site.variable.table
    there = np.isin(np.arange(len(table.options)), table.combos)
    known = [o for o, ok in zip(table.options, there, strict=True) if ok or not (o.factor and o.factor.least)]
    return set[str]().union(*(words(site, option) for option in known))


def _named(problem: Problem, pattern: str, place: str) -> list[tuple[NamedVariable, set[str]]]:
    """The operators that match a pattern, each with all the words for what it may do."""
    operators = [s for s in named_variables(problem).values() if isinstance(s.variable, OpVariable)]
    chosen = [s for s in operators if any(matches(name, pattern) for name in s.names)]
    if not chosen:
        raise PlanError(place, "no module matches this pattern", unmatched(pattern, speaking(operators)))
    return [(site, _all_words(site)) for site in chosen]


def _known(problem: Problem, pattern: str) -> set[str]:
    """All that may be said of the operators that match a pattern."""
    operators = (s for s in named_variables(problem).values() if any(matches(name, pattern) for name in s.names))
    return set[str]().union(*map(_all_words, operators))


def wanted_words(text: str) -> tuple[str, ...]:
    """`[ring, *]`, a word for each axis, or a word without brackets."""
    bare = text.strip()
    inner = bare[1:-1] if bare.startswith("[") and bare.endswith("]") else bare
    return tuple(part.strip() for part in inner.split(","))


def pin_factor(
    problem: Problem, pattern: str, text: str, rows: Rows, others: str = OTHERS
) -> dict[tuple[int, int], np.ndarray]:
    """Insist on a factor (or a role): a word alone means that some axis splits by it, in brackets is one for each axis.
    It holds for those operators that match and have such a factor."""
    place, asked = f"--pin {pattern}={text}", wanted_words(text)
    axes, each = len(problem.router.mesh.sizes), "[" in text
    if each and len(asked) != axes:
        fact = f"{len(asked)} {'word' if len(asked) == 1 else 'words'} for {axes} mesh axes"
        raise PlanError(place, fact, "write one per axis, * where any will do, or one without brackets")
    needed, sites = set(asked) - {ANY}, _named(problem, pattern, place)
    able = {site.names for site, _ in sites if needed <= _words_there(site)}
    if not able and any(needed <= known for _, known in sites):
        fact = f"positions do not divide into even shares, or into too short ones, for {', '.join(sorted(needed))}"
        raise PlanError(place, fact, "use a smaller axis, or pictures of another size")
    if not able:
        raise PlanError(place, f"nothing there has all of {', '.join(sorted(needed))}", "ask for one of them")

    def op(site: NamedVariable, option: Option, axis: int) -> bool:
        wanted = asked[axis] if each else asked[0]
        return site.names not in able or wanted == ANY or wanted in words(site, option)

    return restrict(problem, op=op, rows=rows, place=place, others=others, somewhere=not each)


def names_factors(problem: Problem, pattern: str, text: str) -> bool:
    """Whether a pin speaks of factors, not of layouts: `[h, R]` does, `R` alone does not."""
    asked = set(wanted_words(text)) - {ANY}
    return not asked <= {"R", "B", "P"} and asked <= _known(problem, pattern)


def forbid(
    problem: Problem, pattern: str, factor: str, rows: Rows, others: str = OTHERS
) -> dict[tuple[int, int], np.ndarray]:
    """Take a factor (or the role `batch` or `sequence`) away from operators that match a pattern."""
    place = f"--forbid {pattern}={factor}"
    sites = _named(problem, pattern, place)
    known, chosen = set[str]().union(*(known for _, known in sites)), {site.names for site, _ in sites}
    if factor not in known:
        raise PlanError(place, f"nothing there has a factor {factor}", nearest(factor, sorted(known)))

    def op(site: NamedVariable, option: Option, axis: int) -> bool:
        return site.names not in chosen or factor not in words(site, option)

    return restrict(problem, op=op, rows=rows, place=place, others=others)


def no_batch_split(problem: Problem) -> dict[tuple[int, int], np.ndarray]:
    def op(site: NamedVariable, option: Option, axis: int) -> bool:
        dealt = {option.name, option.factor.joint if option.factor else ""}
        assert isinstance(site.variable, OpVariable)
        return not any(o.name in dealt and site.role(o) == "batch" for o in site.variable.table.options)

    return restrict(problem, op=op, place="--no-batch-split")
