"""Which operators of a block read which, from the structure that a plan stores."""

import re
from dataclasses import dataclass

from tapas.plan.fingerprint import BlockStructure
from tapas.plan.plan import Plan
from tapas.report.words import kind
from tapas.rules.base import wording

CALL = re.compile(r"(?P<module>.*): (?P<target>[^(]+)\((?P<operands>.*)\)")


@dataclass(frozen=True, slots=True)
class StoredCall:
    """One operator of a structure; what it reads is called as in there: `w0`, `p0`, `c0` or `3.0`."""

    module: str
    target: str
    operands: tuple[str, ...]

    @property
    def reads_weights(self) -> bool:
        return any(operand.startswith("w") for operand in self.operands)


def stored_call(text: str) -> StoredCall:
    found = CALL.fullmatch(text)
    if found is None:  # a plan that was changed by hand
        return StoredCall("", "", ())
    return StoredCall(found["module"], found["target"], tuple(filter(None, found["operands"].split(", "))))


def structure_of_copy(plan: Plan, copy: int) -> BlockStructure:
    structure = plan.assignment.structure
    return structure.blocks[structure.copies[copy].structure]


def follows(block: BlockStructure, source: str) -> list[str]:
    """What a result of a block comes from, as `["self_attn.k_proj"]` for keys that were rotated: on each way there the
    last module with weights, or operator worth a name (attention). What comes from other blocks has none here."""
    wanted, names, visited = [source], dict[str, None](), set[int]()
    while wanted:
        number = wanted.pop().partition(".")[0]
        if not number.isdecimal() or int(number) in visited:
            continue
        visited.add(int(number))
        call = stored_call(block.operators[int(number)])
        if call.reads_weights:
            names[call.module] = None
        elif wording(call.target).listed and number != source.partition(".")[0]:
            names[kind(call.target)] = None
        else:
            wanted += call.operands
    return list(names)
