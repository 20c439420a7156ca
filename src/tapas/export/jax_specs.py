"""`--to jax`: a PartitionSpec for every parameter, with the mesh."""

from dataclasses import replace
from math import prod
from typing import Any

from tapas.export.exported import CannotSay, Exported, Reason, grouped
from tapas.export.parameters import StoredParameter, stored_parameters, work_note
from tapas.plan.plan import Plan
from tapas.sharding.layout import R, split_of

Spec = tuple[tuple[str, ...], ...]  # for every dim the axes that split it, outermost first


def export_jax(plan: Plan, approximate: bool = False) -> Exported:
    names, sizes = tuple(plan.mesh["names"]), tuple(plan.mesh["sizes"])
    specs: dict[str, Spec] = {}
    reasons: list[Reason] = []
    for parameter in stored_parameters(plan):
        said, lacking = _sayable(parameter, sizes)
        reasons += lacking
        specs[parameter.name] = spec_of(said, names)
    if reasons and not approximate:
        remedy = "store these whole (--pin 'NAME=R') or use another mesh; or --approximate stores them whole"
        raise CannotSay("jax", reasons, remedy)
    dropped = tuple(f"{text} (stored whole instead)" for text in grouped(reasons))
    notes = work_note(plan), "names and dims are those of the PyTorch parameters"
    data = {
        "mesh": {"names": list(names), "sizes": list(sizes)}, "specs": {name: list(map(list, s)) for name, s in
        specs.items()}, "notes": list(notes), "dropped": list(dropped),
    }  # fmt: skip
    text = _python(plan, names, sizes, specs, notes, dropped)
    return Exported("jax", text, data, notes, dropped, plan.cost)


def _sayable(parameter: StoredParameter, sizes: tuple[int, ...]) -> tuple[StoredParameter, list[Reason]]:
    """The parameter as JAX can store it, and what it cannot."""
    reasons: list[Reason] = []
    layout = list(parameter.layout)
    for dim, size in enumerate(parameter.shape):
        axes, tiling = split_of(parameter.layout, dim)
        devices = prod(sizes[a] for a in axes)
        if len(tiling) > 1:
            fact = f"its dim {dim} is split in each of {len(tiling)} parts, a PartitionSpec splits it in one piece"
        elif size % devices:
            fact = f"its dim {dim} of {size} does not divide over {devices} devices, which NamedSharding asks for"
        elif tiling and tiling[0][0] // tiling[0][1] % devices:
            fact = f"its dim {dim} is split in units of {tiling[0][1]}, unevenly"
        else:
            continue
        reasons.append(Reason(parameter.name, fact))
        for axis in axes:
            layout[axis] = R
    return replace(parameter, layout=tuple(layout)), reasons


def spec_of(parameter: StoredParameter, names: tuple[str, ...]) -> Spec:
    dims = [tuple(names[a] for a in split_of(parameter.layout, dim)[0]) for dim in range(len(parameter.shape))]
    while dims and not dims[-1]:  # P("x", None) and P("x") are the same
        dims.pop()
    return tuple(dims)


def _entry(axes: tuple[str, ...]) -> str:
    if not axes:
        return "None"
    return repr(axes[0]) if len(axes) == 1 else repr(axes)


def _python(plan: Plan, names: Any, sizes: Any, specs: dict[str, Spec], notes: Any, dropped: Any) -> str:
    shape, axes = tuple(sizes), tuple(names)
    lines = [f'"""How the parameters of {plan.model} are stored on a mesh of {"x".join(map(str, sizes))} devices.', ""]
    lines += [f"It {notes[0]}.", f"Note: {notes[1]}."]
    lines += [f"Left out: {text}." for text in dropped]
    lines += [
        "",
        "    shardings = {name: NamedSharding(mesh(), spec) for name, spec in SPECS.items()}",
        "    weights = {name: jax.device_put(value, shardings[name]) for name, value in weights.items()}",
        '"""', "", "import jax", "from jax.sharding import PartitionSpec as P", "",
        f"MESH_SHAPE, MESH_AXES = {shape!r}, {axes!r}", "",
        "SPECS = {",
    ]  # fmt: skip
    lines += [f'    "{name}": P({", ".join(map(_entry, spec))}),' for name, spec in specs.items()]
    lines += ["}", "", "", "def mesh():", "    return jax.make_mesh(MESH_SHAPE, MESH_AXES)", ""]
    return "\n".join(lines)
