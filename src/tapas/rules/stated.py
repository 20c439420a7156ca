"""`tapas.rule`: the factors of an operator of one's own, stated by its author."""

from collections.abc import Callable
from typing import TypeVar

from tapas.errors import TapasError
from tapas.rules.base import Call, Rule, registered
from tapas.rules.base import rule as register
from tapas.rules.notation import einsum

Decorated = TypeVar("Decorated")
_stated: dict[str, tuple[str, bool]] = {}  # patterns by target


def rule(operator: str, factors: str, *, random: bool = False) -> Callable[[Decorated], Decorated]:
    """State how an operator of `torch.library` can be split: `tapas.rule("mine::scaled", "b s d, d -> b s d")`.

    Every tensor that it takes, then every one that it returns, with a name for each dim. Along a factor (a name)
    whatever has it is split; results without it are sums over it, operands without it are read whole, and what the
    operator computes for a part has to be that part of what it computes for the whole. `1` is a dim of size one, `!d`
    one that is never split, `(h d)` a product, `_` a tensor that is always whole. `random` ones draw numbers. It may
    stand above the operator as a decorator. `tapas verify` tells whether it is true.
    """
    namespace, _, name = operator.partition("::")
    name, _, overload = name.partition(".")
    if not name or "->" not in factors:
        remedy = 'give both as in tapas.rule("mine::scaled", "b s d, d -> b s d")'
        raise TapasError(f"rule {operator!r}", f"{factors!r} are no factors of an operator", remedy)
    target = f"{namespace}.{name}.{overload or 'default'}"
    if target in registered() and _stated.get(target) != (factors, random):
        raise TapasError(f"rule {operator!r}", "this operator has another rule", "state one rule for each operator")
    if target not in _stated:
        _stated[target] = factors, random

        @register(target)
        def by_author(call: Call) -> Rule:
            return einsum(factors, call, random=random, unknown_work=True)

    return lambda decorated: decorated
