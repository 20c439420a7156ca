"""Plans of other tools as pins: a transformers tp_plan, a file of DTensor placements, or Megatron's degrees."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tapas.errors import PlanError
from tapas.export.dtensor_placements import FORMAT
from tapas.export.exported import starred
from tapas.hardware.mesh import Mesh
from tapas.ir.patterns import matches
from tapas.planner.request import Request
from tapas.problem.baselines import STYLES, splits_weights
from tapas.problem.pins import unmatched
from tapas.problem.restrictions import Pairs

OWN = "transformers"  # the model's own plan
_REMEDY = (
    "give `transformers` for the model's own tp_plan, or a JSON file: a tp_plan, a DistributedConfig, placements as "
    '`tapas export --to dtensor` writes them, or {"tensor_model_parallel_size": 8, ...}'
)
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CONTEXT, EXPERT, SEQUENCE = "context_parallel_size", "expert_model_parallel_size", "sequence_parallel"


def with_foreign(
    request: Request, given: str, hints: Mapping[str, str] | None, parameters: Collection[str] = ()
) -> Request:
    """The request, which then insists on another tool's plan; `hints` is the model's own tp_plan, `parameters` are the
    names of the model's, one of which every entry that splits something has to match."""
    mesh = request.mesh
    if given == OWN:
        if not hints:
            raise PlanError(f"--from {OWN}", "the architecture brings no tp_plan", _REMEDY)
        return _styled(request, hints, given, "hf")
    data = _read(Path(given))
    if data.get("format") == FORMAT:
        return replace(request, pins=(*placement_pins(data, given, mesh), *request.pins))
    if TENSOR in data:
        return replace(request, pins=(*megatron_pins(data, given, mesh), *request.pins))
    plan = data.get("tp_plan", data)
    if not _texts(plan) or not _texts(data.get("ep_plan") or {}):
        raise PlanError(f"--from {given}", "is none of the plans that are known", _REMEDY)
    outer = mesh.devices // mesh.sizes[-1]
    _check_size(data.get("tp_size"), mesh.sizes[-1], "tp_size", given, mesh)
    if data.get("ep_size", 1) not in (1, None):
        _check_size(data["ep_size"], mesh.sizes[-1], "ep_size", given, mesh)
        plan = {**plan, **(data.get("ep_plan") or {})}
    pieces = data.get("fsdp_size", 1) not in (1, None)
    if pieces:
        _check_size(data["fsdp_size"], outer, "fsdp_size", given, mesh)
    _check_matches({key: style for key, style in plan.items() if key not in (hints or {})}, given, parameters)
    merged = {**(hints or {}), **plan} if plan else {}  # as transformers does
    return _styled(request, merged, given, "hf-fsdp" if pieces else "hf")


def _styled(request: Request, plan: Mapping[str, str], given: str, strategy: str) -> Request:
    check_styles(plan, given)
    return replace(request, pins=(("*", strategy), *request.pins), tp_plan=tuple(plan.items()))


def check_styles(plan: Mapping[str, str], given: str) -> None:
    """Name the entry that cannot be understood."""
    for key, style in plan.items():
        if style not in STYLES:
            fact = f"{key} is {style}, which is no style that is known"
            raise PlanError(f"--from {given}", fact, f"known are {', '.join(STYLES)}")


def _check_matches(plan: Mapping[str, str], given: str, parameters: Collection[str]) -> None:
    """transformers passes over a key that matches nothing: what was meant by it would be missing from the price."""
    for key, style in plan.items():
        if parameters and splits_weights(style) and not any(matches(name, key) for name in parameters):
            fact = f"{key} matches no parameter or module of the model"
            modules = [name.rpartition(".")[0] for name in parameters]
            raise PlanError(f"--from {given}", fact, unmatched(key, [*modules, *parameters]))


def check_file(given: str) -> None:
    """Refuse what is no plan at all, before any work is done for it."""
    if given != OWN:
        _read(Path(given))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"--from {path}", "no such file", _REMEDY) from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise PlanError(f"--from {path}", f"cannot be read as JSON: {type(error).__name__}", _REMEDY) from None
    if not isinstance(data, dict):
        raise PlanError(f"--from {path}", "is not a table", _REMEDY)
    if "assignment" in data:
        raise PlanError(f"--from {path}", "is a plan of TAPAS itself", "print it with `tapas show`")
    return cast(dict[str, Any], data)


def _texts(plan: Any) -> bool:
    return isinstance(plan, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in plan.items())


def _check_size(size: Any, axis: int, name: str, given: str, mesh: Mesh) -> None:
    if size is not None and size != axis:
        fact = f"{name} is {size}, the last axis of the mesh has {axis} devices"
        raise PlanError(f"--from {given}", fact, f"use a mesh whose last axis is {size} (it is {mesh})")


def placement_pins(data: Mapping[str, Any], given: str, mesh: Mesh) -> Pairs:
    sizes = data.get("mesh", {}).get("sizes") if isinstance(data.get("mesh"), dict) else None
    if sizes != list(mesh.sizes):
        raise PlanError(f"--from {given}", f"is for a mesh of {sizes}", "plan for the same mesh")
    parameters = data.get("parameters")
    if not isinstance(parameters, dict):
        raise PlanError(f"--from {given}", "has no parameters", _REMEDY)
    layouts: dict[str, str] = {}
    for name, said in parameters.items():
        texts = said.get("placements") if isinstance(said, dict) else None
        if not isinstance(texts, list) or len(texts) != len(mesh.sizes):
            raise PlanError(f"--from {given}: {name}", "has no placement for each axis of the mesh", _REMEDY)
        layouts[name] = f"[{', '.join(_state(str(text), f'--from {given}: {name}', said) for text in texts)}]"
    return tuple(_folded(layouts).items())


def _folded(layouts: Mapping[str, str]) -> dict[str, str]:
    """One pin for all layers, where a pattern says the same of all that it matches."""
    found: dict[str, str] = {}
    for name, layout in layouts.items():
        pattern = starred(name)
        same = pattern in found or all(layouts[n] == layout for n in layouts if matches(n, pattern))
        found[pattern if same else name] = layout
    return found


def _state(text: str, place: str, said: Mapping[str, Any]) -> str:
    """`Shard(0)` -> `S(0)`."""
    if re.fullmatch(r"(Replicate|R)(\(\))?", text):
        return "R"
    if plain := re.fullmatch(r"(?:Shard|S)\((?:dim=)?(\d+)\)", text):
        return f"S({plain[1]})"
    packed = re.fullmatch(r"_StridedShard\((?:dim=)?(\d+), split_factor=(\d+)\)", text)
    shape = said.get("shape")
    if packed and isinstance(shape, list) and int(packed[1]) < len(shape):
        parts = int(packed[2])
        return f"S({packed[1]}|{parts}x{shape[int(packed[1])] // parts})"
    raise PlanError(place, f"{text} is not a placement that is known", "write Shard(0), Replicate() or _StridedShard")


def megatron_pins(data: Mapping[str, Any], given: str, mesh: Mesh) -> Pairs:
    """Tensor and data parallel degrees, with or without sequence parallelism."""
    place = f"--from {given}"
    known = (TENSOR, PIPELINE, CONTEXT, EXPERT, SEQUENCE, "data_parallel_size")
    if unknown := [key for key in data if key not in known]:
        raise PlanError(place, f"{', '.join(unknown)} is not understood", f"known are {', '.join(known)}")
    for name in (PIPELINE, CONTEXT, EXPERT):
        if data.get(name, 1) != 1:
            raise PlanError(place, f"{name} is {data[name]}", "only tensor and data parallelism can be priced")
    outer = mesh.devices // mesh.sizes[-1]
    _check_size(data[TENSOR], mesh.sizes[-1], TENSOR, given, mesh)
    _check_size(data.get("data_parallel_size"), outer, "data_parallel_size", given, mesh)
    return (("*", "megatron-sp" if data.get(SEQUENCE) else "megatron"),)
