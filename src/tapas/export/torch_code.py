"""`--to torch`: a Python file with `parallelize_module` and `fully_shard`, as one writes it by hand."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import ClassVar

from torch import nn

from tapas.export.exported import Exported
from tapas.export.grammar import Vocabulary
from tapas.export.python_text import loops, path_text
from tapas.export.saying import PlannedModel, Said, say
from tapas.export.sites import COLWISE, EMBEDDING, EXPERTS, LINEAR, OTHER, ROWWISE, WHOLE, ModuleSplit
from tapas.sharding.layout import State


class TorchWords(Vocabulary):
    name = "torch"
    splits: ClassVar = {
        LINEAR: frozenset({WHOLE, COLWISE, ROWWISE}), EMBEDDING: frozenset({WHOLE, COLWISE, ROWWISE}),
        EXPERTS: frozenset({WHOLE}),
    }  # fmt: skip

    def enters(self, kind: str, found: State, used: State, last: int) -> bool:
        cut = found.kind == "R" and used == State("S", last)
        return found == used or (kind == LINEAR and cut)

    def shares(self, module: nn.Module | None) -> bool:
        return module is not None and not list(module.children())  # SequenceParallel, whichever dim that is

    def leaves(self, kind: str, made: State, left: State, last: int) -> bool:
        return left.kind == "R" or (made == left and made.sharded and made.dim == last)


def export_torch(subject: PlannedModel, approximate: bool = False) -> Exported:
    said = say(subject, TorchWords(), approximate)
    notes = [*_notes(said), *said.notes]
    text = _file(subject, said, notes)
    styles = {split.path: style(split) for split in said.splits if style(split)}
    data = {"mesh": _mesh(said), "styles": styles, "notes": notes, "dropped": list(said.dropped)}
    return Exported("torch", text, data, tuple(notes), said.dropped, subject.plan.cost, said.seconds)


def _mesh(said: Said) -> dict[str, int]:
    mesh = said.grammar.mesh
    return dict(zip(mesh.names, mesh.sizes, strict=True))


def _notes(said: Said) -> list[str]:
    if said.grammar.use.data < 0:
        return ["weights that stay whole are plain tensors beside DTensors: give optimizers foreach=False"]
    axis = said.grammar.mesh.names[said.grammar.use.data]
    return [
        f"each rank along {axis} is given its own part of the batch, and gradients are averaged over {axis}: a loss "
        "that is a mean has to be one over as many items on each of them",
        "fully_shard stores every weight of a layer in pieces of its first dim, also the small ones",
    ]


def style(split: ModuleSplit) -> str:
    """The style of a module, as one writes it; "" for one that is whole."""
    if split.kind == OTHER:
        return f"SequenceParallel(sequence_dim={split.found.dim}, use_local_output=True)" if split.found.sharded else ""
    arguments: list[str] = []
    if split.split == COLWISE:
        if not split.left.sharded:
            arguments.append("output_layouts=Replicate()")
        return f"ColwiseParallel({', '.join(arguments)})"
    if split.split == ROWWISE:
        if not split.found.sharded:
            arguments.append("input_layouts=Replicate()")
        return f"RowwiseParallel({', '.join(arguments)})"
    return ""


def _file(subject: PlannedModel, said: Said, notes: Iterable[str]) -> str:
    use, mesh = said.grammar.use, said.grammar.mesh
    styles = {split.path: style(split) for split in said.splits if style(split)}
    kind = type(subject.model).__name__
    sizes, names = tuple(mesh.sizes), tuple(mesh.names)
    lines = [
        f'"""How {kind} is split over a mesh of {" x ".join(map(str, sizes))} devices. Written by `tapas export`.', "",
        "    model = parallelize(model, make_mesh())", "",
        *(f"Note: {note}." for note in notes), *(f"Left out of the plan: {text}." for text in said.dropped), '"""', "",
        *_imports(styles, use.data >= 0), "", "",
        'def make_mesh(device_type="cuda"):',
        f"    return init_device_mesh(device_type, {sizes!r}, mesh_dim_names={names!r})", "", "",
        "def parallelize(model, mesh):",
    ]  # fmt: skip
    body: list[str] = []
    members = {path: len(list(module.children())) for path, module in subject.model.named_modules()}
    if styles:
        body += [f'tp = mesh["{names[use.tensor]}"]', *loops("parallelize_module({}, tp, {{", styles, "})", members)]
        body += _tied(said, styles)
    if use.data >= 0:
        body += _sharded(said, names[use.data])
    lines += [f"    {line}" if line else "" for line in [*body, "return model"]]
    return "\n".join(lines) + "\n"


def _imports(styles: Mapping[str, str], sharded: bool) -> list[str]:
    text = " ".join(styles.values())
    parallel = sorted(
        [word for word in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel") if word in text]
        + ["parallelize_module"] * bool(styles)
    )
    lines = ["from torch.distributed.device_mesh import init_device_mesh"]
    lines += ["from torch.distributed.fsdp import fully_shard"] * sharded
    lines += ["from torch.distributed.tensor import Replicate"] * ("Replicate" in text)
    return lines + [f"from torch.distributed.tensor.parallel import {', '.join(parallel)}"] * bool(parallel)


def _tied(said: Said, styles: Mapping[str, str]) -> list[str]:
    """`parallelize_module` makes new parameters: those that were one are made one again."""
    lines: list[str] = []
    for leaf in said.grammar.problem.folded.parameters:
        split = [path for path in leaf.paths if path.rpartition(".")[0] in styles]
        if split and len(leaf.paths) > 1:
            others = [path for path in leaf.paths if path != split[0]]
            lines += [f"{path_text('model', path)} = {path_text('model', split[0])}  # tied" for path in others]
    return lines


def _sharded(said: Said, axis: str) -> list[str]:
    """Layer by layer, so that one is gathered while another computes; then the rest."""
    containers: defaultdict[str, int] = defaultdict(int)
    for copy in said.grammar.problem.folded.copies:
        home, _, number = copy.path.rpartition(".")
        if number.isdigit():
            containers[home] += 1
    lines: list[str] = []
    for home in containers:
        lines += [f"for layer in {path_text('model', home)}:", f'    fully_shard(layer, mesh=mesh["{axis}"])']
    return [*lines, f'fully_shard(model, mesh=mesh["{axis}"])']
