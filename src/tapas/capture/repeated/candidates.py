"""Which submodules may be copies of each other, as far as their structure tells.

Members of one container that have the same classes, parameters and buffers all the way down. Whether they
also compute the same is told by what they run: see evidence.py.
"""

from collections import Counter, defaultdict
from typing import NamedTuple

from torch import nn

from tapas._torch import globally_hooked, held_modules, hooked
from tapas.capture.repeated.structure import ModuleContents, Structure, StructureTable

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
LEAST = 4  # fewer are traced sooner than compared


class Candidate(NamedTuple):
    """A submodule that has siblings of the same structure."""

    path: str
    container: nn.Module
    module: nn.Module
    inside: ModuleContents
    structure: Structure


def repeated_modules(model: nn.Module) -> list[Candidate]:
    """Members of containers that have a sibling of the same structure, outermost first; none within another.

    Those with hooks are left out: whoever listens has to hear them all.
    """
    if hooked(model) or globally_hooked():
        return []
    found: list[Candidate] = []
    seen: set[int] = set()  # a module may stand at several places
    within: list[Candidate] = []  # whose insides are not yet among these: mostly nobody asks
    known = StructureTable()

    def look(module: nn.Module, path: str) -> None:
        children = [(name, child) for name, child in held_modules(module).items() if child is not None]
        alike: dict[int, list[Candidate]] = defaultdict(list)
        if isinstance(module, _CONTAINERS) and len(children) >= LEAST:
            while within:
                seen.update(map(id, within.pop().inside.modules))
            kinds = Counter(type(child) for _, child in children)
            here = {id(child): name for name, child in reversed(children)}  # the first place of each
            for name, child in children:
                able = kinds[type(child)] >= LEAST and held_modules(child) and here[id(child)] == name
                if able and id(child) not in seen:
                    try:
                        structure, inside = known.of(child)
                    except (KeyError, RuntimeError, NotImplementedError):  # compiled, scripted, or not initialised
                        continue
                    alike[structure.number].append(Candidate(f"{path}{name}", module, child, inside, structure))
        for same in alike.values():
            if len(same) >= LEAST:
                found.extend(member for member in same if not member.inside.hooked)
                within.extend(same)
                seen.update([id(member.module) for member in same])
        for name, child in children:
            if id(child) not in seen:
                seen.add(id(child))
                look(child, f"{path}{name}.")

    look(model, "")
    return found
