"""`--to transformers`: a DistributedConfig for `from_pretrained`, as JSON.

transformers (5.22) looks a module or parameter up by its name with `*` for every number, and merges what it is given
over the model's own plan: a module that stays whole has to say so.
"""

import json
from typing import Any, ClassVar

from torch import nn

from tapas.export.exported import CannotSay, Exported, Reason, starred
from tapas.export.grammar import Vocabulary
from tapas.export.saying import PlannedModel, Said, say
from tapas.export.sites import (
    BY_EXPERT,
    COLWISE,
    EMBEDDING,
    EXPERTS,
    FEATURES,
    LINEAR,
    OTHER,
    PACKED,
    ROWWISE,
    WHOLE,
    ModuleSplit,
)  # fmt: skip
from tapas.sharding.layout import State

REPLICATE = "replicate"
EXPERT_WEIGHT, ROUTER = "grouped_gemm", "ep_router"  # of experts that are dealt out to devices


class TransformersWords(Vocabulary):
    name = "transformers"
    splits: ClassVar = {
        LINEAR: frozenset({WHOLE, COLWISE, ROWWISE, PACKED}), EMBEDDING: frozenset({WHOLE, COLWISE, ROWWISE}),
        EXPERTS: frozenset({WHOLE, FEATURES, BY_EXPERT}),
    }  # fmt: skip

    def enters(self, kind: str, found: State, used: State, last: int) -> bool:
        cut = found.kind == "R" and used == State("S", last)
        return found == used or (kind == LINEAR and cut)  # rowwise_split_input

    def shares(self, module: nn.Module | None) -> bool:
        return module is not None  # replicated_with_grad_allreduce

    def leaves(self, kind: str, made: State, left: State, last: int) -> bool:
        if left.kind == "R":
            return not made.tiling  # summed up, gathered, or whole as it is; nothing gathers packed parts
        return kind == LINEAR and made == left and made.sharded and made.dim == last


def export_transformers(subject: PlannedModel, approximate: bool = False) -> Exported:
    said = say(subject, TransformersWords(), approximate)
    styles, expert_styles = plan_styles(subject, said)
    use, mesh = said.grammar.use, said.grammar.mesh
    size = {axis: mesh.sizes[axis] if axis >= 0 else 1 for axis in (use.tensor, use.data)}
    notes = [
        f"for {type(subject.model).__name__}; keys are merged over the model's own plan, so what stays whole says so",
        "gradients are added up where transformers does it: where a split module reads its input",
        *said.notes,
    ]
    if use.data >= 0:
        notes.append("over the batch transformers stores weights by its own fsdp plan, each split on its first dim")
    data: dict[str, Any] = {"tp_size": size[use.tensor], "fsdp_size": size[use.data], "tp_plan": styles}
    if expert_styles:
        data |= {"ep_size": size[use.tensor], "ep_plan": expert_styles}
    data |= {"notes": notes, "dropped": list(said.dropped)}
    text = json.dumps(data, indent=1) + "\n"
    return Exported("transformers", text, data, tuple(notes), said.dropped, subject.plan.cost, said.seconds)


def plan_styles(subject: PlannedModel, said: Said) -> tuple[dict[str, str], dict[str, str]]:
    """The style of every module that is split, or that the model's own plan would split; apart from these, those around
    experts that are dealt out to devices."""
    styles: dict[str, str] = {}
    differ: list[Reason] = []
    for split in said.splits:
        for name, style in _entries(split, said):
            key = starred(name)
            if styles.setdefault(key, style) != style:
                differ.append(
                    Reason(key, f"is {styles[key]} in one layer and {style} in another, keys tell none apart")
                )
    if differ:
        raise CannotSay("transformers", differ, "pin all layers to the same, e.g. with --pin '*=megatron'")
    styles |= _tied(said, styles)
    own = dict.fromkeys(subject.hints or {}, REPLICATE)
    kept = {key: style for key, style in styles.items() if style != REPLICATE or key in own}
    dealt = {key.rpartition(".")[0] for key, style in styles.items() if style == EXPERT_WEIGHT}
    experts = {key: kept.pop(key) for key in [*kept] if kept[key] in (EXPERT_WEIGHT, ROUTER) or key in dealt}
    return own | kept, experts


def _tied(said: Said, styles: dict[str, str]) -> dict[str, str]:
    """Second names of parameters that are split, in modules that are not: all of them become one tensor."""
    found: dict[str, str] = {}
    for leaf in said.grammar.problem.folded.parameters:
        homes = {path: styles.get(starred(path.rpartition(".")[0]), REPLICATE) for path in leaf.paths}
        split = next((style for style in homes.values() if style != REPLICATE), None)
        if split is not None:
            found |= {starred(path): split for path, style in homes.items() if style == REPLICATE}
    return found


def _entries(split: ModuleSplit, said: Said) -> list[tuple[str, str]]:
    path = split.path
    if split.kind == OTHER:
        return [(path, "replicated_with_grad_allreduce")]
    if split.split == WHOLE:
        return [(path, REPLICATE)]
    if split.split == BY_EXPERT:
        router = next(to for of, to in said.grammar.routers.items() if starred(of) == starred(path))
        inner = [(f"{path}.{name}", EXPERT_WEIGHT) for name in ("gate_up_proj", "down_proj")]
        return [*inner, (path, "moe_tp_experts"), (router, ROUTER)]
    if split.kind == EXPERTS:
        inner = [(f"{path}.gate_up_proj", "packed_colwise"), (f"{path}.down_proj", "rowwise")]
        return [*inner, (path, "moe_tp_experts")]
    if split.kind == EMBEDDING:
        return [(path, f"embedding_{split.split}")]
    if split.split == PACKED:
        return [(path, "packed_colwise")]
    if split.split == COLWISE:
        return [(path, "colwise" if split.left.sharded else "colwise_gather_output")]
    return [(path, "rowwise" if split.found.sharded else "rowwise_split_input")]
