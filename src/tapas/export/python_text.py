"""Python as one writes it: entries by path, layers in loops."""

import re
from collections.abc import Mapping

Entries = dict[str, str]  # path below a module -> what is said of it


def path_text(root: str, path: str) -> str:
    """`model.layers.0.mlp` below `root` as an expression.

    >>> path_text("model", "encoder.block.0.layer")
    'model.encoder.block[0].layer'
    """
    return root + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split(".") if part)


def loops(opening: str, entries: Mapping[str, str], closing: str, members: Mapping[str, int]) -> list[str]:
    """All entries, those of layers that say the same in one loop. `{}` in `opening` is the module they are below,
    `members` says how many layers a container has."""
    outside: Entries = {}
    layers: dict[str, dict[int, Entries]] = {}
    for path, said in entries.items():
        home = re.match(r"(.+?)\.(\d+)\.(.+)", path)
        if home is None:
            outside[path] = said
        else:
            layers.setdefault(home[1], {}).setdefault(int(home[2]), {})[home[3]] = said
    lines = _call(opening.format("model"), outside, closing) if outside else []
    for container, numbered in layers.items():
        for numbers, said in _alike(numbered):
            where, call = path_text("model", container), _call(opening.format("layer"), said, closing)
            if len(numbers) == 1:
                lines += _call(opening.format(f"{where}[{numbers[0]}]"), said, closing)
                continue
            lines.append(f"for layer in {_several(where, numbers, members[container])}:")
            lines += [f"    {line}" for line in call]
    return lines


def _several(where: str, numbers: list[int], members: int) -> str:
    first, last = numbers[0], numbers[-1]
    if numbers != list(range(first, last + 1)):
        return f"[{where}[i] for i in {numbers}]"
    return where if len(numbers) == members else f"{where}[{first}:{last + 1}]"


def _alike(numbered: Mapping[int, Entries]) -> list[tuple[list[int], Entries]]:
    found: list[tuple[list[int], Entries]] = []
    for number, said in sorted(numbered.items()):
        same = next((numbers for numbers, other in found if other == said), None)
        if same is None:
            found.append(([number], said))
        else:
            same.append(number)
    return found


def _call(opening: str, entries: Entries, closing: str) -> list[str]:
    return [opening, *(f'    "{path}": {said},' for path, said in entries.items()), closing]
