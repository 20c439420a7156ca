"""What a run of calls needs and passes on, as those around it ask.

Call by call, but only until nothing changes any more from one to the next: then all the others are the same.
"""

from collections.abc import Iterable
from itertools import compress
from operator import or_

from tapas.capture.calls import Call
from tapas.capture.repeated.inner import Flags, Use
from tapas.capture.repeated.runs import Run


class Site:
    """A run in the program."""

    __slots__ = ("_depends", "_read", "constant", "given", "results", "run", "uses")

    def __init__(self, run: Run, call: Call, constant: set[str]) -> None:
        self.run, self.constant = run, constant
        self.given = tuple([value.name for value in call.args[1]])  # to the first call
        self.results = call.results  # of the last one
        nothing = (False,) * len(self.given)
        self._read: list[Flags] = []  # of the results of each call: which are read
        self._depends: list[Flags] = [nothing] * len(run.paths)  # of its inputs: which a gradient could flow to
        self.uses: list[Use | None] = []  # None for calls that nobody needs

    def reads(self, wanted: set[str]) -> Iterable[str]:
        """What it needs of that which the first call is given, if these tensors are wanted."""
        run, read = self.run, _flags(self.results, wanted)
        need = run.inner.needs(read)
        shared, found = run.shared(need), [read]
        while len(found) < len(run.paths):
            before = run.before(need)
            if before == read:
                found += [read] * (len(run.paths) - len(found))
            else:
                read, need = before, run.inner.needs(before)
                shared = tuple(map(or_, shared, run.shared(need)))
                found.append(read)
        self._read = found[::-1]
        return compress(self.given, map(or_, need, shared))

    def ahead(self, depends: set[str]) -> Iterable[str]:
        """The results that depend on sources, if these tensors do."""
        run, inputs = self.run, _flags(self.given, depends)
        made, found = run.inner.depends(inputs), [inputs]
        while len(found) < len(run.paths):
            after = run.after(inputs, made)
            if after == inputs:
                found += [inputs] * (len(run.paths) - len(found))
            else:
                inputs, made = after, run.inner.depends(after)
                found.append(inputs)
        self._depends = found
        return compress(self.results, made)

    def back(self, wanted: set[str]) -> Iterable[str]:
        """The operands that a gradient flows to, if it comes from these tensors."""
        run, flags = self.run, _flags(self.results, wanted)
        first = _flags(self.given, self.constant)
        later = run.after(first, (False,) * len(run.inner.made))
        trained = shared = (False,) * len(self.given)
        found: list[Use | None] = []
        last: Use | None = None
        for number in reversed(range(len(run.paths))):
            read, depends, constant = self._read[number], self._depends[number], later if number else first
            if not any(read):
                trained = shared  # nobody needs this call, nor those before it
                found += [None] * (number + 1)
                break
            use = Use(read, constant, depends, flags)
            if use != last:
                last, trained = use, run.inner.trained(use)
                flags, shared = run.before(trained), tuple(map(or_, shared, run.shared(trained)))
            found.append(last)
        self.uses = found[::-1]
        return compress(self.given, map(or_, trained, shared))


def _flags(names: tuple[str, ...], among: set[str]) -> Flags:
    return tuple(map(among.__contains__, names))
