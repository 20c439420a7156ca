"""Operators as other tools see them: those of modules that they know how to split, and all others."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from tapas.ir.fold import Folded
from tapas.ir.gating import HALVES, gating_of
from tapas.ir.graph import Op
from tapas.rules.choices import Option
from tapas.sharding.layout import State

LINEAR, EMBEDDING, EXPERTS, OTHER = "linear", "embedding", "experts", ""
_TARGETS = {"aten.linear.default": LINEAR, "aten.embedding.default": EMBEDDING, "tapas.experts.default": EXPERTS}
WEIGHT = {LINEAR: 1, EMBEDDING: 0, EXPERTS: 3}  # which operand says how a module is split
GATING = 5  # the argument that says how experts are packed
STREAM = {LINEAR: 0, EMBEDDING: 1, EXPERTS: 0}  # and which one its input is

# how a module is split along an axis
WHOLE, COLWISE, ROWWISE, PACKED, FEATURES, BY_EXPERT = "whole", "colwise", "rowwise", "packed", "features", "by expert"
NONE = ""  # in no way that has a name


@dataclass(frozen=True, slots=True)
class ModuleSplit:
    """What a module does along the axis that splits layers inside: its input as it is found, its result as it is
    left for its readers."""

    path: str
    kind: str  # LINEAR, EMBEDDING, EXPERTS, or OTHER: one that is whole, but sees a part of its input
    split: str
    found: State
    left: State
    input_shape: tuple[int, ...]
    result_shape: tuple[int, ...]
    result_dtype: str


class Sites:
    """Which module each operator belongs to, and what is known of it."""

    def __init__(self, folded: Folded, modules: Mapping[str, nn.Module]) -> None:
        self.folded, self.modules = folded, modules
        self.parameters = {name for name, leaf in folded.leaf_of.items() if leaf.kind == "parameter"}

    def is_parameter(self, tensor: str) -> bool:
        return tensor in self.parameters

    def is_buffer(self, tensor: str) -> bool:
        """Whether a weight is a buffer, of which fully_shard and its like know nothing."""
        home, _, name = self.folded.leaf_of[tensor].paths[0].rpartition(".")
        return home in self.modules and name in self.modules[home]._buffers

    def kind(self, op: Op) -> str:
        kind, module = _TARGETS.get(op.target, OTHER), self.modules.get(op.module)
        if kind == EXPERTS and not _usual(op):
            return OTHER
        if kind == OTHER or module is None or not self._owns(op, op.operands[WEIGHT[kind]]):
            return OTHER
        # one that does more in its forward than the class that tools know is not that class to them
        own = {LINEAR: nn.Linear.forward, EMBEDDING: nn.Embedding.forward}.get(kind)
        return kind if own is None or type(module).forward is own else OTHER

    def _owns(self, op: Op, tensor: str) -> bool:
        """Whether a tensor is a parameter of the operator's module itself."""
        if not self.is_parameter(tensor):
            return False
        return any(path.rpartition(".")[0] == op.module for path in self.folded.leaf_of[tensor].paths)


def _usual(experts: Op) -> bool:
    """Without biases, gate before up: what styles are for."""
    gating = gating_of(experts.args[GATING])
    return len(experts.operands) == GATING and gating.packing == HALVES and not gating.transposed


def split_of_module(kind: str, option: Option, devices: int) -> str:
    """How an option of an operator splits its module."""
    if option.factor is None:
        return WHOLE if option.name in ("R", "B") else NONE
    weight = option.operands[WEIGHT[kind]]
    if not weight.sharded or option.factor.joint:  # nobody else sends tokens to their experts
        return NONE
    if kind == EXPERTS:
        return BY_EXPERT if weight.dim == 0 else FEATURES if _halves(weight, devices) else NONE
    if weight.tiling:
        return PACKED if kind == LINEAR and weight.dim == 0 and _halves(weight, devices) else NONE
    columns = 0 if kind == LINEAR else 1
    return COLWISE if weight.dim == columns else ROWWISE


def _halves(state: State, devices: int) -> bool:
    """Two packed parts of one size, each of which divides evenly."""
    tiling = state.tiling
    return len(tiling) == 2 and tiling[0] == tiling[1] and tiling[0][0] // tiling[0][1] % devices == 0
