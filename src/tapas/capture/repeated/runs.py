"""Calls that follow each other: a thousand layers are one run, and what holds for its first few calls holds for all.

In a run, each call is of the same kind as the one before it, and goes on with what that one returned; all else it
is given is what the first one was given. Nobody else reads what is returned within it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from tapas.capture.repeated.inner import Flags, Inner
from tapas.capture.repeated.session import Answer, Called, Kind

Carried = tuple[tuple[int, int], ...]  # inputs, and the results of the call before that they are


class Run(NamedTuple):
    inner: Inner
    paths: tuple[str, ...]  # of the submodules that are called, in order
    carried: Carried
    made: list[tuple[str, ...]]  # names of what each call makes

    def after(self, given: tuple, made: tuple) -> tuple:
        """What the next call is given (names, or flags), if one is given this and makes that."""
        found = list(given)
        for i, r in self.carried:
            found[i] = made[r]
        return tuple(found)

    def before(self, inputs: Flags) -> Flags:
        """What the call before makes of these inputs."""
        found = [False] * len(self.inner.made)
        for i, r in self.carried:
            found[r] = found[r] or inputs[i]
        return tuple(found)

    def shared(self, inputs: Flags) -> Flags:
        """Those of these inputs that are the same for all calls."""
        carried = {i for i, _ in self.carried}
        return tuple(flag and i not in carried for i, flag in enumerate(inputs))


class Stretch(NamedTuple):
    """The calls of a run, by number."""

    first: int
    stop: int
    carried: Carried


def stretches(calls: Sequence[Called], shown: Collection[Answer], inners: Mapping[Kind, Inner]) -> Iterator[Stretch]:
    """All calls in order, in runs that are as long as possible."""
    ends = {answer.call for answer in shown}  # what these return is read by others than the call after them
    for number, called in enumerate(calls):
        for tensor in called.tensors:
            if type(tensor) is Answer and tensor.call != number - 1:
                ends.add(tensor.call)
    first, carried = 0, ()
    for number in range(1, len(calls)):
        now, last = calls[number], calls[number - 1]
        if now.kind is last.kind and number - 1 not in ends:
            found = _carried(now, last, number, inners[now.kind])
            if found and (found == carried or number == first + 1):
                carried = found
                continue
        yield Stretch(first, number, carried)
        first, carried = number, ()
    if calls:
        yield Stretch(first, len(calls), carried)


def _carried(now: Called, last: Called, number: int, inner: Inner) -> Carried:
    """Inputs that the last call made; none if others are not what that one was given."""
    found = []
    for i, (one, two) in enumerate(zip(now.tensors, last.tensors, strict=True)):
        if type(one) is Answer and one.call == number - 1:
            source = inner.sources[one.result]
            if source < len(inner.made):
                found.append((i, source))
            elif source - len(inner.made) != i:  # it hands on what it was given, but in another place
                return ()
        elif one != two:
            return ()
    return tuple(found)
