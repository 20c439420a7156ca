"""`--to dtensor`: placements per parameter, as `torch.distributed.tensor.distribute_tensor` takes them."""

import json
from typing import Any

from tapas.export.exported import Exported
from tapas.export.parameters import stored_parameters, tied_names, work_note
from tapas.plan.plan import Plan
from tapas.sharding.layout import Layout, State

FORMAT = "dtensor-placements"


def placement_text(state: State) -> str:
    """As one writes it in Python; a packed weight is split segment by segment."""
    if not state.sharded:
        return "Replicate()"
    if state.tiling:
        return f"_StridedShard({state.dim}, split_factor={len(state.tiling)})"
    return f"Shard({state.dim})"


def placements(layout: Layout) -> list[str]:
    return list(map(placement_text, layout))


def export_dtensor(plan: Plan) -> Exported:
    """Every layout that weights are stored in is one that DTensor has: nothing is ever refused."""
    note = work_note(plan)
    data: dict[str, Any] = {
        "format": FORMAT,
        "model": plan.model,
        "mesh": {"names": plan.mesh["names"], "sizes": plan.mesh["sizes"]},
        "parameters": {
            p.name: {"shape": list(p.shape), "placements": placements(p.layout)} for p in stored_parameters(plan)
        },
        "tied": tied_names(plan),
        "notes": [note],
    }
    return Exported("dtensor", _text(data), data, (note,), planned_seconds=plan.cost)


def _text(data: dict[str, Any]) -> str:
    """One line for each parameter."""
    head = {key: value for key, value in data.items() if key != "parameters"}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in data["parameters"].items()]
    inner = '"parameters": {\n' + ",\n".join(lines) + "\n }"
    others = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    return "{\n" + ",\n".join([*others[:3], " " + inner, *others[3:]]) + "\n}\n"
