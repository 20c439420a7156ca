"""What is made of integers and constants alone, in the order in which it is first used.

Code that goes over a set (of kinds of layers, to make a mask and a rotation for each) does so in another order in every
process: strings are hashed with a seed. The programs of all ranks, and the one that a plan was made for, have to be the
same. Positions, masks and tables are such values, and nothing else is: what depends on weights or on real numbers that
the model is given stays where it is, and so does whatever is drawn.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch

from tapas.capture.calls import ExportedCall, FlatProgram, operands
from tapas.capture.diagnostics import module_of, source_of


def in_order_of_use(
    calls: list[ExportedCall], program: FlatProgram, given: Iterable[str], outputs: Iterable[str]
) -> list[ExportedCall]:
    """The calls of a line of code share its places among them."""
    fixed = {name for name in given if program.meta[name].is_floating_point() or program.meta[name].is_complex()}
    moving: dict[str, ExportedCall] = {}  # by result
    for call in calls:
        if _stays(call) or not fixed.isdisjoint(operands(call)):
            fixed.update(call.results)
        else:
            moving.update(dict.fromkeys(call.results, call))
    used: dict[int, ExportedCall] = {}

    def use(names: Iterable[str]) -> None:
        """Depth first, without recursion: tables may be made in many steps."""
        waiting = [iter(names)]
        path: list[ExportedCall] = []
        while waiting:
            name = next(waiting[-1], None)
            if name is None:
                waiting.pop()
                if path:
                    call = path.pop()
                    used[id(call)] = call
            elif (call := moving.get(name)) is not None and id(call) not in used:
                path.append(call)
                waiting.append(iter(operands(call)))

    for call in calls:
        if call.results[0] not in moving:
            use(operands(call))
    use(outputs)
    use(name for call in calls for name in call.results)  # what nobody uses
    order: dict[tuple[str, str], list[ExportedCall]] = defaultdict(list)  # of a line of code: its calls change places
    for call in used.values():
        order[_line(call)].append(call)
    left = {line: iter(some) for line, some in order.items()}
    made = [next(left[_line(call)]) if call.results[0] in moving else call for call in calls]
    return made if _in_order(made) else calls


def _line(call: ExportedCall) -> tuple[str, str]:
    return module_of(call.node), source_of(call.node)


def _in_order(calls: list[ExportedCall]) -> bool:
    """Whether nothing is read before it is made."""
    waiting = {name for call in calls for name in call.results}
    for call in calls:
        if not waiting.isdisjoint(operands(call)):
            return False
        waiting.difference_update(call.results)
    return True


def _stays(call: ExportedCall) -> bool:
    target = call.target
    return getattr(target, "namespace", "") != "aten" or torch.Tag.nondeterministic_seeded in target.tags
